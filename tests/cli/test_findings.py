import pytest

from cli.findings import size_text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536 * 1024**2, "1.5 GiB"), (5 * 1024**5, "5120 TiB")],
)
def test_a_size_is_told_in_the_largest_unit_that_gives_at_least_one(num_bytes: float, text: str) -> None:
    assert size_text(num_bytes) == text
