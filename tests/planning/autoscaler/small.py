"""A kind of worker, loads over time, and what an autoscaler makes of them."""

import math
import random
from collections.abc import Callable

from planning.autoscaler.need import need_of
from planning.autoscaler.policy import Autoscaler, AutoscalerSettings
from planning.autoscaler.simulated import Scaled, scaled
from planning.planner.question import Kind, LatencyTargets
from planning.simulator.cluster import ClusterSpec
from planning.simulator.laws import LinearLaw
from planning.simulator.profiles import Profile
from planning.simulator.report import tpot_s, ttft_s
from planning.simulator.traces import Trace, TraceRequest
from services.scheduling.prediction import DecodeSpeed, PrefillSpeed

STEP = DecodeSpeed(0.008, 5e-5, 2.1e-8)
KV_BYTES = 2 * 48 * 4 * 128 * 2
MOE = Kind(
    "qwen3-30b-a3b-like",
    Profile("moe", LinearLaw(PrefillSpeed(0.01, 2.2e-5, 2e-10), STEP, STEP), KV_BYTES),
    2,
    6.0,
    1400,
    int((0.9 * 160e9 - 61e9) / KV_BYTES),
)
"""Two H100s: 45,000 prompt tokens/s; a step reads 61 GB of weights' active share and the contexts. Not measured."""
TARGETS = LatencyTargets(ttft_s=3.0, tpot_s=0.035)

Rate = Callable[[float], float]
Lengths = Callable[[float], tuple[int, int]]


def sine(now_s: float) -> float:
    """1 to 24 requests/s and back in 900 s."""
    return 12.5 - 11.5 * math.cos(2 * math.pi * now_s / 900)


def arrivals(rate: Rate, lengths: Lengths, end_s: float, *, seed: int = 1) -> Trace:
    source, now_s, requests = random.Random(seed), 0.0, []
    top = max(rate(second) for second in range(int(end_s) + 1))
    while (now_s := now_s + source.expovariate(top)) < end_s:
        if source.random() * top < rate(now_s):
            requests.append(TraceRequest(now_s, *lengths(now_s)))
    return Trace("load", "csv", 0, tuple(requests))


def run(
    rate: Rate,
    lengths: Lengths,
    end_s: float,
    settings: AutoscalerSettings,
    *,
    workers: tuple[int, int] = (1, 1),
    seed: int = 1,
) -> Scaled:
    spec = ClusterSpec(
        num_prefill=workers[0],
        num_decode=workers[1],
        prefill=MOE.spec(),
        decode=MOE.spec(),
        max_sequence_tokens=20_000,
        max_waiting=10**6,
    )
    autoscaler = Autoscaler(settings, need_of(MOE, MOE, targets=TARGETS))
    return scaled(arrivals(rate, lengths, end_s, seed=seed), spec, autoscaler=autoscaler, first=lengths(0.0))


def goodput(found: Scaled, *, since_s: float = 0.0) -> float:
    jobs = [job for job in found.run.jobs if job.arrival_s >= since_s]
    good = [job.end_s is not None and ttft_s(job) <= 3.0 and tpot_s(job) <= 0.035 for job in jobs]
    return sum(good) / len(good)


def perfect_seconds(rate: Rate, lengths: Lengths, end_s: float, *, start_up_s: float) -> float:
    """Worker-seconds of an oracle: what each second needs, and a start-up for each worker that comes."""
    need, before, total = need_of(MOE, MOE, targets=TARGETS), (1, 1), 0.0
    for second in range(int(end_s)):
        now = tuple(max(1, math.ceil(value)) for value in need(rate(second), *lengths(second)))
        total += sum(now) + start_up_s * sum(max(0, one - other) for one, other in zip(now, before, strict=True))
        before = now
    return total
