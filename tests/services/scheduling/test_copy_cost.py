from services.scheduling.copy_cost import DEFAULT_COPY, TRY_AGAIN, CopyMeter
from services.scheduling.prediction import LinkSpeed, PrefillSpeed

PREFILL = PrefillSpeed(overhead_s=0.1, s_per_token=1e-4, s_per_token_squared=1e-8)
MIB = 1 << 20


def meter(bytes_per_s: float) -> CopyMeter:
    """One that has seen copies of that speed."""
    made = CopyMeter()
    for number in range(1, 20):
        made.observe(number * MIB, 1e-4 + number * MIB / bytes_per_s, float(number))
    return made


def test_before_it_has_seen_anything_it_takes_a_guess() -> None:
    assert CopyMeter().speed == DEFAULT_COPY


def test_copies_are_worth_it_where_they_take_less_than_the_tokens_would() -> None:
    copies = meter(1e9)
    # 1,000 tokens: 0.1 s and 0.01 s; after 9,000 others 0.18 s more. The step's overhead is spent in any case.
    for before, megabytes, is_cheaper in ((0, 100, True), (0, 130, False), (9000, 250, True), (9000, 310, False)):
        num_bytes = megabytes * 10**6
        assert is_cheaper == copies.is_cheaper_than_computing(
            1000, num_tokens_before=before, num_bytes=num_bytes, prefill=PREFILL
        )


def test_copies_are_worth_it_where_they_take_less_than_sending() -> None:
    assert meter(2e9).is_cheaper_than_sending(100 * MIB, LinkSpeed(latency_s=1e-3, bytes_per_s=1e9))
    assert not meter(5e8).is_cheaper_than_sending(100 * MIB, LinkSpeed(latency_s=1e-3, bytes_per_s=1e9))


def test_what_seems_too_dear_is_tried_now_and_then() -> None:
    copies = meter(1e6)
    tried = [
        copies.is_cheaper_than_computing(1000, num_tokens_before=0, num_bytes=100 * MIB, prefill=PREFILL)
        for _ in range(3 * TRY_AGAIN)
    ]
    assert sum(tried) == 3
    assert not any(tried[: TRY_AGAIN - 1])


def test_after_a_rehearsal_one_hiccup_changes_little() -> None:
    now_s = 0.0
    copied: list[int] = []

    def copy(num_pages: int) -> int:
        nonlocal now_s
        copied.append(num_pages)
        # The first time memory is touched takes much longer.
        now_s += (1e-4 + num_pages * MIB / 1e9) * (1 if len(copied) > 1 else 100)
        return num_pages * MIB

    copies = CopyMeter()
    copies.rehearse(copy, lambda: now_s)
    assert 0.8e9 < copies.speed.bytes_per_s < 1.25e9
    copies.observe(MIB, 1.0, now_s)
    assert copies.speed.time_s(100 * MIB) < 0.25
