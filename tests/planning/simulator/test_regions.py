"""Regions in the simulator: home first, what is far takes longer, and what the loss of a region costs."""

from dataclasses import replace

import pytest

from planning.simulator.cluster import NO_WORKER, ClusterSpec, Run, simulate
from planning.simulator.faults import LOST_REGION, SILENCE_S, Fault, with_faults
from planning.simulator.jobs import Job
from planning.simulator.report import ttft_s
from planning.simulator.traces import TraceRequest
from services.scheduling.overload import Targets
from tests.planning.simulator.small import cluster_spec, trace_of

FAR_S = 0.08
LOST_S, BACK_S = 10.0, 20.0


def two_regions(num_prefill: int = 4, num_decode: int = 4, *, ttft_s: float | None = 2.0) -> ClusterSpec:
    """Workers with even numbers are in the region eu, the others in us."""
    spec = cluster_spec(num_prefill, num_decode)
    routing = replace(spec.routing, distances_s={("eu", "us"): FAR_S, ("us", "eu"): FAR_S})
    targets = None if ttft_s is None else Targets(ttft_s, None)
    return replace(spec, regions=("eu", "us"), routing=routing, targets=targets)


def where(job: Job) -> set[str]:
    """The regions of its workers, of which the first four of each role take turns; what comes back is in eu."""
    numbers = [int(name[1:]) for name in (job.prefill_worker, job.decode_worker) if name]
    return {"us" if number in (1, 3) else "eu" for number in numbers}


def test_requests_stay_at_home_and_the_way_elsewhere_takes_its_time() -> None:
    requests = [TraceRequest(float(number), 300, 20, region=("eu", "us")[number % 2]) for number in range(8)]
    jobs = simulate(trace_of(requests), two_regions(), "hybrid").jobs
    assert [where(job) for job in jobs] == [{"eu"}, {"us"}] * 4
    (far,) = simulate(trace_of([TraceRequest(0.0, 300, 20, region="us")]), two_regions(1, 1), "hybrid").jobs
    assert where(far) == {"eu"}, "us has no worker"
    assert ttft_s(far) - ttft_s(jobs[0]) == pytest.approx(FAR_S)


def test_home_is_left_when_the_target_would_be_missed_and_only_then() -> None:
    burst = [TraceRequest(0.01 * number, 3000, 2, region="eu") for number in range(40)]  # 0.3 s each
    patient = simulate(trace_of(burst), two_regions(ttft_s=60.0), "hybrid").jobs
    assert {region for job in patient for region in where(job)} == {"eu"}
    pressed = simulate(trace_of(burst), two_regions(ttft_s=2.0), "hybrid").jobs
    places = [where(job) for job in pressed if not job.refusal]
    assert places[0] == {"eu"}
    assert {"us"} in places
    held = [replace(request, residency=("eu",)) for request in burst]
    kept = simulate(trace_of(held), two_regions(ttft_s=2.0), "hybrid").jobs
    assert {region for job in kept if not job.refusal for region in where(job)} == {"eu"}


@pytest.fixture(scope="module")
def lost() -> Run:
    """Half of the requests come to either region; of eu's, every second one is held there."""
    requests = [
        TraceRequest(0.05 * number, 300, 50, region=("eu", "us")[number % 2], residency=("eu",) * (number % 4 == 0))
        for number in range(600)
    ]
    fault = Fault(kind=LOST_REGION, region="eu", at_s=LOST_S, duration_s=BACK_S - LOST_S)
    return simulate(trace_of(requests), two_regions(), "hybrid", meddler=with_faults([fault]))


def test_a_lost_region_costs_the_others_no_answer(lost: Run) -> None:
    assert all(job.end_s is not None and not job.refusal for job in lost.jobs if not job.residency)
    moved = [job for job in lost.jobs if job.attempt > 1]
    assert moved, "answers ran in the region"
    assert all(where(job) == {"us"} for job in moved if not job.refusal)


def test_what_is_held_there_is_refused_until_it_is_back_and_never_goes_elsewhere(lost: Run) -> None:
    held = [job for job in lost.jobs if job.residency]
    assert all(where(job) <= {"eu"} for job in held)
    assert {job.refusal for job in held} == {"", NO_WORKER}
    away = [job for job in held if LOST_S + SILENCE_S < job.arrival_s < BACK_S]
    assert away
    assert all(job.refusal == NO_WORKER for job in away)
    assert all(not job.refusal for job in held if job.arrival_s > BACK_S or job.arrival_s < LOST_S - 5)


def test_what_it_costs_in_time(lost: Run) -> None:
    free = [job for job in lost.jobs if job.region == "eu" and not job.residency]

    def mean_s(first_s: float, last_s: float) -> float:
        times = [ttft_s(job) for job in free if first_s <= job.arrival_s < last_s]
        return sum(times) / len(times)

    before, after = mean_s(0.0, LOST_S), mean_s(BACK_S + 1, 30.0)
    unnoticed, away = mean_s(LOST_S, LOST_S + SILENCE_S), mean_s(BACK_S - 5, BACK_S)
    assert before == pytest.approx(after, rel=0.01)
    assert 1.0 < unnoticed < SILENCE_S + 1.0, "requests wait until the silence is noticed"
    assert before + FAR_S - 1e-6 <= away < before + FAR_S + 0.1
