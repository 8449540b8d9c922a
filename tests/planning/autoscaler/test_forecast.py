"""Forecasts: lines are continued, seasons repeat, and noise is uncertainty."""

import gzip
import math
import random
from pathlib import Path

import pytest

from planning.autoscaler.forecast import Forecaster

TRACES = Path(__file__).resolve().parents[3] / "benchmarks" / "traces"


def test_nothing_seen_is_nothing_forecast() -> None:
    assert Forecaster(10.0).ahead(60.0).upper == 0.0


def test_a_line_is_continued_and_what_would_be_negative_is_0() -> None:
    up, down = Forecaster(10.0), Forecaster(10.0)
    for slot in range(12):
        up.add(5.0 + 0.5 * slot)
        down.add(5.5 - 0.5 * slot if slot < 11 else 0.0)
    assert up.ahead(0.0).mean == pytest.approx(5.0 + 0.5 * 12)
    assert up.ahead(100.0).mean == pytest.approx(5.0 + 0.5 * 22)
    assert down.ahead(300.0).mean == 0.0


def test_the_upper_end_is_seldom_exceeded_by_a_steady_rate() -> None:
    source, forecaster, above = random.Random(4), Forecaster(10.0), 0
    for slot in range(400):
        count = sum(source.random() < 0.02 for _ in range(5000)) / 10  # 10/s, about Poisson
        if slot >= 20:
            above += count > forecaster.ahead(0.0).upper
        forecaster.add(count)
    assert above / 380 < 0.15


def test_a_known_season_comes_again_in_the_strength_of_the_last_slots() -> None:
    forecaster = Forecaster(10.0, season=20)
    for slot in range(43):
        strength = 1.0 if slot < 20 else 2.0
        forecaster.add(strength * (10 + 5 * math.sin(2 * math.pi * slot / 20)))
    expected = 2 * (10 + 5 * math.sin(2 * math.pi * 43 / 20))
    assert forecaster.ahead(0.0).mean == pytest.approx(expected, rel=0.02)
    assert forecaster.ahead(100.0).mean == pytest.approx(2 * (10 + 5 * math.sin(2 * math.pi * 53 / 20)), rel=0.02)


def test_until_a_season_has_been_seen_the_trend_is_all_there_is() -> None:
    with_season, without = Forecaster(10.0, season=50), Forecaster(10.0)
    for slot in range(30):
        with_season.add(float(slot))
        without.add(float(slot))
    assert with_season.ahead(50.0) == without.ahead(50.0)


def test_a_season_in_which_nothing_came_is_not_believed() -> None:
    forecaster = Forecaster(10.0, season=20)
    for slot in range(43):
        forecaster.add(0.0 if slot < 25 else 10.0)
    assert 9.0 < forecaster.ahead(0.0).mean < 11.0


@pytest.mark.parametrize(("ahead", "share"), [(1, 0.5), (3, 0.7), (6, 0.8), (18, 0.95)])
def test_the_second_public_week_is_forecast_better_than_by_the_same_slot_of_the_first(ahead: int, share: float) -> None:
    """ServeGen's m-small, windows of 600 s: the mean error of ours is at most `share` of that of last week's slot."""
    text = gzip.decompress((TRACES / "servegen_m-small_rates.txt.gz").read_bytes()).decode()
    rates = [float(line) for line in text.splitlines() if not line.startswith("#")]
    week, forecaster, ours, theirs, num_above = 1008, Forecaster(600.0, season=1008), 0.0, 0.0, 0
    for slot, rate in enumerate(rates):
        target = slot - 1 + ahead
        if week + 17 <= slot and target < len(rates):
            found = forecaster.ahead((ahead - 1) * 600.0)
            ours += abs(found.mean - rates[target])
            theirs += abs(rates[target - week] - rates[target])
            num_above += rates[target] > found.upper
        forecaster.add(rate)
    assert ours <= share * theirs
    assert num_above / 990 < 0.3


def test_a_part_of_the_uncertainty_is_taken_where_less_caution_is_asked_for() -> None:
    forecaster = Forecaster(10.0)
    for rate in (4.0, 6.0, 5.0, 7.0, 4.0, 6.0):
        forecaster.add(rate)
    full, half, none = (forecaster.ahead(60.0, caution=caution) for caution in (1.0, 0.5, 0.0))
    assert full.mean == half.mean == none.mean == none.upper
    assert half.upper - half.mean == pytest.approx((full.upper - full.mean) / 2)
    assert full.upper > full.mean


@pytest.mark.parametrize(("slot_s", "is_rising"), [(5.0, True), (10.0, False), (600.0, False)])
def test_a_trend_is_drawn_through_the_same_time_of_shorter_slots(slot_s: float, is_rising: bool) -> None:
    forecaster = Forecaster(slot_s)
    for rate in [1.0] * 8 + [9.0] * 8:
        forecaster.add(rate)
    assert (forecaster.ahead(0.0).mean > 9.5) == is_rising
