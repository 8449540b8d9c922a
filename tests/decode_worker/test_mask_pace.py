"""Answers whose masks are dear take a bounded part of the engine's time, and share it evenly."""

from collections import Counter
from collections.abc import Mapping

import pytest

from decode_worker.mask_pace import CHEAP_S, MASK_PART, MaskPace

STEP_S = 1e-3
"""What a step takes without masks."""


def steps(pace: MaskPace, masks_s: Mapping[str, float], num_steps: int) -> tuple[Counter[str], float]:
    """How many tokens each gets, those without a mask having 0 s, and how long the steps take together."""
    counts: Counter[str] = Counter()
    total_s = 0.0
    for key, mask_s in masks_s.items():
        if mask_s:
            pace.add(key)
    for _ in range(num_steps):
        resting = pace.resting(masks_s.keys())
        present = [key for key in masks_s if key not in resting]
        assert present
        counts.update(present)
        spent_s = {key: masks_s[key] for key in present if masks_s[key]}
        step_s = STEP_S + sum(spent_s.values())
        total_s += step_s
        pace.note_step(step_s, spent_s)
    return counts, total_s


@pytest.mark.parametrize("mask_s", [2 * CHEAP_S, 1e-3, 12e-3, 0.2])
def test_dear_masks_take_a_part_of_the_time(mask_s: float) -> None:
    pace, masks_s = MaskPace(), {"plain": 0.0, **{f"dear {n}": mask_s for n in range(16)}}
    steps(pace, masks_s, 2)  # nothing is known of them in the first one
    counts, total_s = steps(pace, masks_s, 20_000)
    assert counts["plain"] == 20_000
    assert total_s <= 20_000 * STEP_S * (1 + MASK_PART) + 2 * 16 * mask_s
    of_dear = [count for key, count in counts.items() if key != "plain"]
    assert min(of_dear) >= max(of_dear) - 1
    assert min(of_dear) * 16 * mask_s >= 0.9 * min(20_000 * STEP_S * MASK_PART, 20_000 * 16 * mask_s) - 16 * mask_s


def test_cheap_masks_never_wait() -> None:
    counts, _ = steps(MaskPace(), {"plain": 0.0, **{f"{n}": 0.9 * CHEAP_S for n in range(64)}}, 100)
    assert set(counts.values()) == {100}


def test_where_all_are_dear_nobody_waits() -> None:
    counts, _ = steps(MaskPace(), {f"{n}": 1e-3 + n * 1e-5 for n in range(16)}, 100)
    assert set(counts.values()) == {100}


def test_masks_of_newcomers_are_taken_to_be_as_dear_as_earlier_ones() -> None:
    """Sixteen answers of one request come at once, again and again: each time nothing is known of them."""
    pace, mask_s = MaskPace(), 4e-3
    num_first_steps = []
    for burst in range(10):
        masks_s = {"plain": 0.0, **{f"{burst} {n}": mask_s for n in range(16)}}
        counts, _ = steps(pace, masks_s, 1)
        num_first_steps.append(len(counts) - 1)
        steps(pace, masks_s, 3)
        for key in masks_s:
            pace.discard(key)
    assert num_first_steps[0] == 16  # none has come before
    assert max(num_first_steps[1:]) <= 1


def test_cheap_newcomers_after_dear_ones_wait_for_their_first_token_only() -> None:
    pace = MaskPace()
    steps(pace, {"plain": 0.0, **{f"dear {n}": 4e-3 for n in range(16)}}, 50)
    counts, _ = steps(pace, {"plain": 0.0, **{f"cheap {n}": CHEAP_S / 2 for n in range(4)}}, 100)
    assert min(counts.values()) >= 90


def test_of_the_dear_ones_each_has_the_same_time() -> None:
    counts, _ = steps(MaskPace(), {"plain": 0.0, "usual": 0.2e-3, "bomb": 4e-3, "other bomb": 4e-3}, 20_000)
    assert counts["usual"] / counts["bomb"] == pytest.approx(20, rel=0.1)
    assert counts["bomb"] == pytest.approx(counts["other bomb"], rel=0.05)


def test_who_comes_later_has_no_debt_and_no_claim() -> None:
    pace, masks_s = MaskPace(), {"plain": 0.0, "a": 1e-3}
    steps(pace, masks_s, 1000)
    counts, _ = steps(pace, masks_s | {"b": 1e-3}, 1000)
    assert counts["a"] == pytest.approx(counts["b"], rel=0.05)


def test_one_slow_mask_does_not_make_a_sequence_dear() -> None:
    pace, masks_s = MaskPace(), {"plain": 0.0, "usual": CHEAP_S / 2}
    steps(pace, masks_s, 10)
    pace.note_step(1e-3, {"usual": 2.4 * CHEAP_S})
    counts, _ = steps(pace, masks_s, 10)
    assert counts["usual"] == 10


def test_nothing_is_kept_of_those_that_have_gone() -> None:
    pace = MaskPace()
    steps(pace, {"plain": 0.0, "dear": 1e-3}, 10)
    steps(pace, {"plain": 0.0}, 1)
    counts, _ = steps(pace, {"plain": 0.0, "dear": 0.0}, 5)
    assert counts["dear"] == 5
