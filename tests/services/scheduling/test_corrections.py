"""What the next prediction learns from how earlier ones turned out."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduling.corrections import MAX_KEPT, MAX_WAYS, MOST, NUM_COUNTED, Corrections


def taught(*pairs, way="way"):
    """Corrections that have seen these (predicted, seen) seconds."""
    corrections = Corrections()
    for predicted_s, seen_s in pairs:
        corrections.observe(way, predicted_s=predicted_s, seen_s=seen_s)
    return corrections


def test_nothing_is_corrected_before_two_predictions_agree():
    assert Corrections().factor("way", 0.1) == 1.0
    assert taught((0.1, 0.2)).factor("way", 0.1) == 1.0
    assert taught((0.1, 0.2), (0.1, 0.15)).factor("way", 0.1) == pytest.approx(1.5)
    assert taught((0.1, 0.2), (0.1, 0.05)).factor("way", 0.1) == 1.0
    assert taught((0.2, 0.1), (0.2, 0.1)).factor("way", 0.2) == pytest.approx(0.5)


def test_one_accident_says_nothing_of_the_next_request():
    usual = [(0.1, 0.13)] * 5
    assert taught(*usual, (0.1, 9.0)).factor("way", 0.1) == pytest.approx(1.3)
    assert taught((0.1, 9.0), *usual).factor("way", 0.1) == pytest.approx(1.3)


def test_a_change_is_believed_when_most_of_those_that_count_agree():
    corrections = taught(*[(0.1, 0.1)] * MAX_KEPT)
    for number in range(NUM_COUNTED):
        is_most = number > (NUM_COUNTED + 1) // 2
        assert corrections.factor("way", 0.1) == (pytest.approx(1.5) if is_most else 1.0)
        corrections.observe("way", predicted_s=0.1, seen_s=0.15)


def test_short_and_long_predictions_have_factors_of_their_own():
    corrections = taught(*[(0.01, 0.02), (1.0, 1.1)] * 8)
    assert corrections.factor("way", 0.012) == pytest.approx(2.0)
    assert corrections.factor("way", 0.8) == pytest.approx(1.1)
    assert corrections.factor("way", 50.0) == 1.0


def test_ways_are_apart_and_those_not_heard_of_for_longest_are_forgotten():
    corrections = taught((0.1, 0.2), (0.1, 0.2), way="old")
    assert corrections.factor("new", 0.1) == 1.0
    for number in range(MAX_WAYS - 1):
        corrections.observe(number, predicted_s=0.1, seen_s=0.1)
    corrections.observe("old", predicted_s=0.1, seen_s=0.2)
    corrections.observe("one more", predicted_s=0.1, seen_s=0.1)
    assert corrections.factor("old", 0.1) == pytest.approx(2.0)
    assert 0 not in corrections._ratios
    assert len(corrections._ratios) == MAX_WAYS


def test_times_that_say_nothing_are_left_out():
    corrections = taught(*[(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0)] * 4)
    assert corrections.factor("way", 1.0) == 1.0
    assert taught(*[(1.0, 2.0)] * 4).factor("way", 0.0) == 1.0


@given(st.lists(st.tuples(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6)), max_size=80), st.floats(1e-6, 1e6))
def test_factors_are_bounded_whatever_was_seen(pairs, predicted_s):
    factor = taught(*pairs).factor("way", predicted_s)
    assert math.isfinite(factor)
    assert 1 / MOST - 1e-9 <= factor <= MOST + 1e-9


def test_what_a_prediction_leaves_out_is_learnt_within_ten_requests():
    """5 ms of messages, a third more of work by a neighbour, and one in ten that is hit by an accident."""
    chance, corrections, off = random.Random(7), Corrections(), []
    for number in range(60):
        predicted_s = 0.08 if number % 2 else 0.27
        seen_s = 0.005 + predicted_s * chance.uniform(1.2, 1.5) + (1.0 if chance.random() < 0.1 else 0.0)
        corrected_s = predicted_s * corrections.factor("way", predicted_s)
        corrections.observe("way", predicted_s=predicted_s, seen_s=seen_s)
        if number >= 10 and seen_s < 1.0:
            off.append(abs(seen_s - corrected_s) / max(seen_s, corrected_s))
    assert max(off) < 0.25


@given(st.lists(st.tuples(st.booleans(), st.floats(0.001, 100), st.floats(0.001, 100)), max_size=60))
def test_a_factor_that_is_kept_is_what_is_worked_out(steps):
    kept, told = Corrections(), []
    for is_asked, predicted_s, seen_s in steps:
        if is_asked:
            assert kept.factor("way", predicted_s) == taught(*told).factor("way", predicted_s)
        else:
            told.append((predicted_s, seen_s))
            kept.observe("way", predicted_s=predicted_s, seen_s=seen_s)
