"""The closed forms of a decode worker's batch, against trying every batch."""

from hypothesis import given
from hypothesis import strategies as st

from services.scheduling.capacity import largest_batch, tokens_per_s
from services.scheduling.prediction import DecodeSpeed

LINES = st.builds(DecodeSpeed, st.floats(1e-4, 0.1), st.floats(0, 0.01), st.floats(0, 1e-5))


@given(LINES, st.integers(1, 200), st.floats(0, 5000), st.floats(1e-4, 2))
def test_the_largest_batch_that_keeps_the_target_is_found(
    line: DecodeSpeed, most: int, context: float, target_s: float
) -> None:
    kept = [batch for batch in range(1, most + 1) if line.step_s(batch, batch * context) <= target_s]
    found = largest_batch(lambda _: line, most, context_tokens=context, step_target_s=target_s)
    assert found == max(kept, default=1)
    assert largest_batch(lambda _: line, most, context_tokens=context, step_target_s=None) == most


@given(LINES, st.integers(1, 200), st.floats(0, 5000))
def test_a_larger_batch_never_makes_fewer_tokens(line: DecodeSpeed, batch: int, context: float) -> None:
    fewer = tokens_per_s(line, batch, context_tokens=context)
    assert 0 < fewer <= tokens_per_s(line, batch + 1, context_tokens=context) * (1 + 1e-9)


def test_without_sequences_or_time_nothing_is_made() -> None:
    assert tokens_per_s(DecodeSpeed(0.01, 0.001), 0, context_tokens=10) == 0
    assert tokens_per_s(DecodeSpeed(0, 0), 4, context_tokens=0) == 0
