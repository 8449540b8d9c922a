"""The figures of the last seconds: rates, shares and quantiles."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dashboard.series import COLUMNS, WINDOW_S, Series, TrafficTotals, quantile


def totals(**fields: Any) -> TrafficTotals:
    nothing: dict[str, Any] = {
        **{"ttft": [0] * 4, "itl": [0] * 3, "ended": {}, "queued": 0, "running": 0},
        **{"generated_tokens": 0.0, "prompt_tokens": 0.0, "cached_tokens": 0.0},
    }
    return TrafficTotals(**{**nothing, **fields})


def test_figures_are_those_of_the_window() -> None:
    series = Series((0.1, 0.2, 0.4), (0.01, 0.02), seconds=30)
    for second in range(25):
        count = second * 5
        series.add(
            1000.0 + second - 3600.0 * (second > 20),  # somebody sets the clock
            float(second),
            totals(
                ttft=[0, count, 0, 0],
                itl=[count, 0, count],
                generated_tokens=100.0 * second,
                prompt_tokens=40.0 * second,
                cached_tokens=10.0 * second,
                ended={"finished": 2 * second, "good": second},
                queued=second,
                running=3,
            ),
        )
    times, columns = series.last(2)
    assert times == [-2577.0, -2576.0]
    assert set(columns) == set(COLUMNS)
    now = {name: values[-1] for name, values in columns.items()}
    assert now["ttft_p50_s"] == pytest.approx(0.15)
    assert now["itl_p99_s"] == 0.02  # beyond the last bound, which is all that is known
    assert (now["generated_per_s"], now["hit_share"]) == (100.0, 0.25)
    assert (now["finished_per_s"], now["good_per_s"], now["refused_per_s"]) == (2.0, 1.0, 0.0)
    assert (now["queued"], now["running"]) == (24, 3)


def test_what_is_over_leaves_the_figures_and_what_nobody_knows_is_nothing() -> None:
    series = Series((0.1,), (0.1,), seconds=5)
    series.add(0.0, 0.0, totals(ttft=[0, 0], itl=[0, 0]))
    assert series.last(1)[1]["generated_per_s"] == [None]  # nothing to compare with yet
    for second in range(1, WINDOW_S + 3):
        series.add(float(second), float(second), totals(ttft=[1, 0], itl=[0, 0], generated_tokens=8.0))
        now = {name: values[-1] for name, values in series.last(1)[1].items()}
        is_over = second > WINDOW_S
        assert now["generated_per_s"] == (0.0 if is_over else pytest.approx(8.0 / second, rel=1e-3))
        assert now["ttft_p50_s"] == (None if is_over else 0.05)
        assert now["hit_share"] is None
    assert len(series.last(900)[0]) == 5


@given(
    values=st.lists(st.floats(0.0, 100.0), min_size=1, max_size=40),
    share=st.floats(0.0, 1.0),
)
def test_a_quantile_is_in_its_bucket(values: list[float], share: float) -> None:
    bounds = (1.0, 5.0, 20.0, 50.0)
    counts = [0] * 5
    for value in values:
        counts[sum(bound < value for bound in bounds)] += 1
    true = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    read = quantile(bounds, counts, share)
    low = max((bound for bound in (0.0, *bounds) if bound < true), default=0.0)
    high = min((bound for bound in bounds if bound >= true), default=50.0)
    assert low <= read <= high or read == pytest.approx(low)
    assert math.isnan(quantile(bounds, [0] * 5, share))
