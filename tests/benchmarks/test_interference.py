"""Targets, comparison and plot of the sweep, from made-up figures."""

import argparse
import asyncio
import time
import xml.etree.ElementTree as xml
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks import interference
from benchmarks.interference import Point, Unloaded, compare, draw, measure, measure_unloaded, report, targets_from
from benchmarks.load import Endpoint, Targets, Timing
from benchmarks.plot import svg_file
from tests.waiting import HANG_LIMIT_S


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


class System(Endpoint):
    """Gives a token each `step_s`; while prompts of the sweep are computed, the streams stand still."""

    step_s = 0.02
    prompt_s = 0.3
    is_full = False
    lock = asyncio.Lock()

    def __init__(self) -> None:
        super().__init__("http://nowhere", lambda prompt, n: {})

    async def ask(
        self, prompt: Sequence[int], num_tokens: int, *, timeout_s: float = HANG_LIMIT_S, into: Timing | None = None
    ) -> Timing:
        timing = Timing(0.0) if into is None else into
        timing.sent_s = time.monotonic()
        if len(prompt) == interference.PROMPT_TOKENS:
            if self.is_full:
                timing.failure = "503: full"
                return timing
            async with self.lock:
                await asyncio.sleep(self.prompt_s)
        for _ in range(num_tokens):
            async with self.lock:
                timing.arrivals_s.append((time.monotonic(), 1))
            await asyncio.sleep(self.step_s)
        return timing


class FullSystem(System):
    """Refuses the prompts of the sweep."""

    is_full = True


ARGUMENTS = argparse.Namespace(seed=1, streams=2, seconds=1.0)


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interference, "WARM_UP_S", 0.2)
    monkeypatch.setattr(interference, "NEW_TOKENS", 4)


async def test_a_stall_of_the_streams_is_seen() -> None:
    found = await measure("one", System(), 0.5, 3.0, Targets(60.0, 60.0), ARGUMENTS)
    assert found.num_requests > 0
    assert found.num_failed == 0
    assert found.ttft_p50_s >= System.prompt_s
    assert found.itl_p99_s >= System.prompt_s * 0.9
    assert found.itl_p99_s > 2 * found.itl_p50_s
    assert found.goodput == found.num_requests / ARGUMENTS.seconds
    assert found.stream_tokens_per_s > 0


async def test_refused_prompts_are_no_goodput() -> None:
    system = FullSystem()
    found = await measure("one", system, 0.5, 3.0, Targets(60.0, 60.0), ARGUMENTS)
    assert (found.goodput, found.num_failed) == (0.0, found.num_requests)
    with pytest.raises(SystemExit, match="503: full"):
        await measure_unloaded("one", system, ARGUMENTS)


async def test_unloaded_times_are_those_of_lone_prompts_and_undisturbed_streams() -> None:
    found = await measure_unloaded("one", System(), ARGUMENTS)
    assert found.ttft_s >= System.prompt_s
    assert System.step_s * 0.9 <= found.itl_s < System.prompt_s


def test_the_report_says_who_is_better(capsys: pytest.CaptureFixture[str]) -> None:
    points = [point("1P1D", 0.1, itl_p99_s=0.01, ttft_p50_s=0.3), point("one", 0.1)]
    report(points, compare(points))
    said = {line.split(",")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert said["itl_p99 at 0.1"].endswith("1P1D is better")
    assert said["ttft_p50 at 0.1"].endswith("one process is better")
