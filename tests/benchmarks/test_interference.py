"""Targets, comparison and plot of the sweep, from made-up figures."""

import xml.etree.ElementTree as xml
from typing import Any

import pytest

from benchmarks.interference import Point, Unloaded, compare, draw, targets_from
from benchmarks.plot import svg_file


def point(system: str, load: float, **fields: Any) -> Point:
    figures = {"itl_p50_s": 0.01, "itl_p99_s": 0.02, "ttft_p50_s": 0.1, "ttft_p99_s": 0.2, "goodput": 1.0}
    counts = {"num_requests": 9, "num_failed": 0, "stream_tokens_per_s": 100.0}
    return Point(system=system, load=load, rate=load * 10, **(figures | counts | fields))


def test_targets_are_the_better_system_s_times_a_factor() -> None:
    targets = targets_from([Unloaded(0.2, 0.01), Unloaded(0.1, 0.02)], 5, 3)
    assert (targets.ttft_s, targets.itl_s) == pytest.approx((0.5, 0.03))


def test_each_rate_is_compared_with_the_best_one_process() -> None:
    points = [
        point("1P1D", 0.1, itl_p99_s=0.02, goodput=2.0),
        point("one, 512", 0.1, itl_p99_s=0.2, goodput=1.0),
        point("one, 128", 0.1, itl_p99_s=0.08, goodput=0.5),
    ]
    ratios = compare(points)
    itl = ratios["itl_p99 at 0.1, 1P1D over one process"]
    assert (itl.value, itl.lower_is_better) == (pytest.approx(0.25), True)
    assert ratios["goodput at 0.1, 1P1D over one process"].value == 2.0


def test_nobody_content_with_one_process_is_no_ratio() -> None:
    ratios = compare([point("1P1D", 0.1), point("one", 0.1, goodput=0.0)])
    assert not any(name.startswith("goodput") for name in ratios)


def test_the_plot_is_one_file_with_a_line_for_each_system() -> None:
    points = [point(system, load) for load in (0.1, 0.2) for system in ("1P1D", "one <process>")]
    drawn = xml.fromstring(draw(points))
    space = "{http://www.w3.org/2000/svg}"
    charts = drawn.findall(f"{space}svg")
    assert len(charts) == 4
    assert all(len(chart.findall(f"{space}polyline")) == 2 for chart in charts)
    assert {(chart.get("x"), chart.get("y")) for chart in charts} == {
        ("0", "28"),
        ("640", "28"),
        ("0", "356"),
        ("640", "356"),
    }


def test_a_plot_of_nothing() -> None:
    assert xml.fromstring(svg_file([])).tag.endswith("svg")
