"""Half a cluster's capacity to ten times as much: how many answers are good, refused and late."""

import math
import random
from collections import Counter
from dataclasses import dataclass, replace

import pytest

from planning.simulator.cluster import PUSHED_OUT, QUEUE_FULL, ClusterSpec, simulate
from planning.simulator.jobs import FCFS
from planning.simulator.traces import TraceRequest
from services.scheduling.overload import Targets
from services.scheduling.prediction import DecodeSpeed, PrefillSpeed
from tests.planning.simulator.small import cluster_spec, trace_of, worker_spec

TTFT_S = 5.0
SECONDS, RAMP_S = 100, 20
BATCH_SHARE, INTERACTIVE_SHARE = 0.5, 0.15
WORKER = worker_spec(
    chunking=FCFS,
    num_pages=1200,
    prefill=PrefillSpeed(0.006, 0.0013),  # of a small model on a CPU
    decode=DecodeSpeed(0.02, 0.004, 1e-6),
    chunk_tokens=512,
    max_batch=64,
)
SPEC = cluster_spec(2, 2, prefill=WORKER, decode=WORKER, max_waiting=1024, local_prefill_tokens=None)


def arrivals(rate_per_s: float, *, seed: int, batch_share: float = BATCH_SHARE) -> list[TraceRequest]:
    rng, now_s, requests = random.Random(seed), 0.0, []
    while (now_s := now_s + rng.expovariate(rate_per_s)) < SECONDS:
        drawn = rng.random()
        is_interactive = drawn < batch_share + INTERACTIVE_SHARE
        service_class = "batch" if drawn < batch_share else "interactive" if is_interactive else "normal"
        requests.append(
            TraceRequest(
                now_s,
                num_prompt_tokens=rng.randrange(256, 768),
                num_output_tokens=rng.randrange(64, 192),
                service_class=service_class,
            )
        )
    return requests


@dataclass
class Outcome:
    """What happened after the ramp. Shares are of those that are not batch work, `late` of those that were let in."""

    good_per_s: float
    refused_share: float
    late_share: float
    batch_refusals: Counter[str]


def outcome(requests: list[TraceRequest], spec: ClusterSpec) -> Outcome:
    num_good, refused, late, batch_refusals = 0, [], [], Counter[str]()
    for job in simulate(trace_of(requests), spec, "hybrid").jobs:
        is_batch = job.service_class == "batch"
        ttft_s = math.inf if job.first_token_s is None else job.first_token_s - job.arrival_s
        if job.end_s is not None and RAMP_S <= job.end_s < SECONDS:
            num_good += is_batch or ttft_s <= TTFT_S
        if is_batch and job.refusal:
            batch_refusals[job.refusal] += 1
        elif not is_batch and job.arrival_s >= RAMP_S:
            refused.append(bool(job.refusal))
            if not job.refusal:
                late.append(ttft_s > TTFT_S)
    return Outcome(
        num_good / (SECONDS - RAMP_S), sum(refused) / len(refused), sum(late) / max(1, len(late)), batch_refusals
    )


@pytest.fixture(scope="module")
def capacity_per_s() -> float:
    """What it completes where more waits than it can do, and nobody is promised anything."""
    backlog = arrivals(30.0, seed=1, batch_share=1.0)
    return outcome([*backlog, *arrivals(0.1, seed=1)], replace(SPEC, max_waiting=10**6)).good_per_s


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0, 5.0, 10.0])
@pytest.mark.parametrize("seed", [2, 5])
def test_at_any_load_nearly_all_of_the_capacity_gives_good_answers(
    capacity_per_s: float, factor: float, seed: int
) -> None:
    got = outcome(arrivals(factor * capacity_per_s, seed=seed), replace(SPEC, targets=Targets(TTFT_S)))
    # Steps that are filled first come first served end 2.78 answers a second, those of the workers' own chunks 2.43. At
    # twice that, what to let in is the hardest to tell: 0.928 and 1.014 for these seeds.
    least = 0.92 if factor == 2.0 else 0.95
    assert got.good_per_s >= least * min(1.0, 0.85 * factor) * capacity_per_s
    assert got.late_share <= 0.10
    assert set(got.batch_refusals) <= {QUEUE_FULL, PUSHED_OUT}, "by the bound of the queue, never by a prediction"
    if factor <= 1.0:
        assert got.refused_share == 0.0
    if factor < 10.0:
        assert not got.batch_refusals, "the queue holds them all"
