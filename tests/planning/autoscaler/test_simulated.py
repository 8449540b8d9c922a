"""An autoscaler in a simulated cluster: the issue's waves, a mix that turns, and a catalogue of loads."""

import math
from statistics import fmean

import pytest

from planning.autoscaler.policy import AutoscalerSettings
from planning.simulator.report import percentile, ttft_s
from tests.planning.autoscaler.small import Lengths, Rate, goodput, perfect_seconds, run, sine

SLOW = AutoscalerSettings(start_up_s=120.0)
LEAN = AutoscalerSettings(start_up_s=120.0, interval_s=5.0, settle_s=10.0, headroom=1.0)
QUICK = AutoscalerSettings(start_up_s=30.0)


def test_a_wave_is_ridden() -> None:
    """8,000 tokens in, 1,000 out, TTFT 3 s, 35 ms a token, workers start for 120 s."""

    def lengths(_: float) -> tuple[int, int]:
        return 8000, 1000

    perfect = perfect_seconds(sine, lengths, 900, start_up_s=120.0)
    found = [run(sine, lengths, 900, LEAN, seed=seed) for seed in (1, 2, 3)]
    assert fmean(map(goodput, found)) >= 0.8
    assert fmean(one.run.worker_seconds for one in found) <= 1.25 * perfect


def test_a_ramp_keeps_first_tokens_quick() -> None:
    """2 to 10 requests/s in 5 minutes, 4,000 tokens in, 1,000 out, workers start for 120 s."""
    found = run(lambda now_s: min(10.0, 2 + 8 * now_s / 300), lambda _: (4000, 1000), 900, SLOW, workers=(2, 2))
    waits = sorted(ttft_s(job) for job in found.run.jobs)
    assert percentile(waits, 0.95) <= 5.0


def test_where_the_mix_turns_roles_that_change_beat_workers_that_come() -> None:
    """Prompts of 12,000 tokens and short answers become short prompts and answers of 1,500, with a budget of 9."""

    def lengths(now_s: float) -> tuple[int, int]:
        return (12_000, 50) if now_s < 200 else (200, 1500)

    def rate(now_s: float) -> float:
        return 9.0 if now_s < 200 else 12.0

    results = {}
    for changes_roles in (True, False):
        settings = AutoscalerSettings(start_up_s=120.0, changes_roles=changes_roles, max_workers=9)
        results[changes_roles] = run(rate, lengths, 500, settings, workers=(6, 2))
    assert any(decision.to_decode for _, decision in results[True].decisions)
    assert goodput(results[True], since_s=200) > goodput(results[False], since_s=200)


SHAPES: dict[str, Rate] = {
    "constant": lambda _: 4.0,
    "step up": lambda now_s: 2.0 if now_s < 100 else 6.0,
    "step down": lambda now_s: 6.0 if now_s < 100 else 1.0,
    "ramp": lambda now_s: 1 + now_s / 60,
    "wave": lambda now_s: 3 - 2 * math.cos(now_s / 30),
    "spike": lambda now_s: 12.0 if 100 <= now_s < 120 else 2.0,
    "on and off": lambda now_s: 5.0 if int(now_s / 50) % 2 else 0.1,
    "silence": lambda now_s: 4.0 if now_s < 150 else 0.02,
}
MIXES: dict[str, Lengths] = {
    "long prompts": lambda _: (8000, 50),
    "balanced": lambda _: (2000, 200),
    "long answers": lambda _: (200, 600),
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("shape", SHAPES)
def test_whatever_comes_everybody_is_answered_and_workers_follow_the_load(shape: str, mix: str) -> None:
    rate, lengths, end_s = SHAPES[shape], MIXES[mix], 300.0
    found = run(rate, lengths, end_s, QUICK, workers=(2, 2))
    assert all(job.end_s is not None for job in found.run.jobs)
    perfect = perfect_seconds(rate, lengths, end_s, start_up_s=30.0)
    assert found.run.worker_seconds <= 2.5 * perfect + 4 * 60.0
    assert goodput(found, since_s=200) >= 0.9
    if shape == "constant":
        assert [time_s for time_s, _ in found.decisions if time_s > 250] == [], "nothing changes where nothing changes"
