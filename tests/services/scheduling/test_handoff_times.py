"""Which pair of workers is slow, judged by its latest handoffs and those of the other pairs."""

from statistics import median

import pytest

from services.scheduling.handoff_times import FLOOR_S, MAX_AGE_S, NUM_HANDOFFS, HandoffTimes, _median_without

PAIRS = [("p0", "d0"), ("p0", "d1"), ("p1", "d0"), ("p1", "d1")]


def times(**took_s):
    """Handoffs that should take 0.05 s; `took_s` is by pair, as in `p0_d1`, and 0.05 for the others."""
    found = HandoffTimes()
    for turn in range(NUM_HANDOFFS):
        for pair in PAIRS:
            found.note(pair, took_s.get("_".join(pair), 0.05), expected_s=0.05, now_s=float(turn))
    return found


def test_a_pair_that_is_slower_than_the_others_is_named():
    (slow,) = times(p0_d1=0.8).slow(3.0)
    assert slow.pair == ("p0", "d1")
    assert (round(slow.ratio, 1), slow.others, slow.took_s) == (13.5, 1.0, 0.8)


def test_what_is_slow_between_all_names_no_pair():
    assert times(p0_d0=0.8, p0_d1=0.8, p1_d0=0.8, p1_d1=0.8).slow(3.0) == []


def test_a_fraction_of_a_second_may_come_from_a_busy_machine():
    assert times(p0_d1=0.29).slow(3.0) == []


def test_a_few_handoffs_or_old_ones_say_nothing():
    few = HandoffTimes()
    for now_s in (0.0, 1.0):
        few.note(PAIRS[0], 2.0, expected_s=0.05, now_s=now_s)
    assert few.slow(1.0) == []
    assert times(p0_d1=0.8).slow(MAX_AGE_S + 0.5) == []


def test_a_worker_that_left_is_forgotten():
    found = times(p0_d1=0.8)
    found.forget("d1")
    assert found.slow(3.0) == []
    assert all("d1" not in pair for pair in found._times)


def test_pairs_without_a_recent_handoff_are_dropped():
    found = times()
    found.note(PAIRS[0], 0.05, expected_s=0.05, now_s=8.0)
    found.slow(MAX_AGE_S + NUM_HANDOFFS)
    assert list(found._times) == PAIRS[:1]


@pytest.mark.parametrize("num", range(1, 8))
def test_a_pair_is_compared_with_the_median_of_the_others(num):
    """Also if several pairs have the same ratio."""
    found = HandoffTimes()
    took_s = [2.0, 0.05, 0.6, 0.05, 0.1, 0.02, 0.6][:num]
    for turn in range(NUM_HANDOFFS):
        for number, one_s in enumerate(took_s):
            found.note((f"p{number}", "d"), one_s, expected_s=0.05, now_s=float(turn))
    ratios = [(one_s + FLOOR_S) / (0.05 + FLOOR_S) for one_s in took_s]
    others = median(ratios[1:] or [1.0])
    assert (found.slow(3.0)[0].pair, found.slow(3.0)[0].others) == (("p0", "d"), pytest.approx(others))
    assert all(_median_without(sorted(ratios), ratio) == pytest.approx(without(ratios, ratio)) for ratio in ratios)


def without(ratios, ratio):
    others = list(ratios)
    others.remove(ratio)
    return median(others or [1.0])


def test_the_number_of_comparisons_grows_with_the_pairs_not_with_their_square(monkeypatch):
    num_judged = []

    def counted(values):
        num_judged.append(len(values := list(values)))
        return median(values)

    monkeypatch.setattr("services.scheduling.handoff_times.median", counted)
    found = HandoffTimes()
    for turn in range(NUM_HANDOFFS):
        for number in range(300):
            found.note((f"p{number}", "d"), 2.0, expected_s=0.05, now_s=float(turn))
    found.slow(3.0)
    assert sum(num_judged) <= 3 * NUM_HANDOFFS * 300
