"""A pool that changes while requests run: workers start, leave and are lost; no request is."""

import random
from dataclasses import replace

import pytest

from planning.simulator.cluster import Cluster, Run, simulate
from planning.simulator.events import EventLoop
from planning.simulator.faults import DEATH, SILENCE, SLOWNESS, STOPPED_CARD, Fault, with_faults
from planning.simulator.jobs import CHUNKINGS, Job
from planning.simulator.pool import DECODE, PREFILL, decode_view, prefill_view
from planning.simulator.prefill import PrefillWorker
from planning.simulator.traces import TraceRequest
from services.scheduling.prediction import LinkSpeed
from services.scheduling.routing.views import WorkerView
from tests.planning.simulator.small import cluster_spec, trace_of, worker_spec

WORKED_OUT = ("as_prefill", "usual_link", "as_decode")


def requests(num: int, gap_s: float) -> list[TraceRequest]:
    return [TraceRequest(gap_s * index, 300, 40) for index in range(num)]


def check_all_answered(run: Run) -> None:
    assert all(job.end_s is not None and not job.refusal for job in run.jobs)


def test_a_worker_that_starts_costs_at_once_and_helps_later() -> None:
    def meddle(cluster: Cluster, loop: EventLoop) -> None:
        loop.at(1.0, lambda: cluster.pool.add(PREFILL, start_up_s=2.0) and None)

    run = simulate(trace_of(requests(200, 0.04)), cluster_spec(), "least_loaded", meddler=meddle)
    check_all_answered(run)
    began = [job.prefill_began_s for job in run.jobs if job.prefill_worker == "p1" and job.prefill_began_s]
    assert min(began) >= 3.0
    assert run.worker_seconds == pytest.approx(3 * run.end_s - 1.0)


def test_a_worker_that_leaves_ends_what_it_has_and_gets_nothing_new() -> None:
    told: list[float] = []

    def meddle(cluster: Cluster, loop: EventLoop) -> None:
        loop.at(1.001, lambda: cluster.pool.drain("d0", lambda: told.append(loop.now_s)))

    run = simulate(trace_of(requests(200, 0.02)), cluster_spec(1, 2), "least_loaded", meddler=meddle)
    check_all_answered(run)
    on_it = [job for job in run.jobs if job.decode_worker == "d0"]
    assert on_it
    assert max(job.dispatched_s for job in on_it if job.dispatched_s is not None) <= 1.001
    assert told == [pytest.approx(max(job.end_s for job in on_it if job.end_s is not None))]


def test_without_decode_workers_requests_wait_for_one() -> None:
    def meddle(cluster: Cluster, loop: EventLoop) -> None:
        cluster.pool.add(DECODE, start_up_s=5.0)

    run = simulate(trace_of(requests(5, 0.01)), cluster_spec(1, 0), "hybrid", meddler=meddle)
    check_all_answered(run)
    assert all(job.first_token_s is not None and job.first_token_s >= 5.0 for job in run.jobs)


@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize("num_prefill", [0, 3])
def test_what_gateways_see_is_what_workers_are_whatever_happens(
    chunking: str, num_prefill: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Views are kept until a worker changes: prefixes in small pools, fetches, and all kinds of faults."""
    source = random.Random(1)
    prompts = [(group, *range(100 * number, 100 * number + 20)) for number in range(1, 31) for group in (1, 2)]
    load = [
        TraceRequest(source.uniform(*when), 16 * 21 + 5, source.randint(1, 60), block_ids=source.choice(prompts))
        for when in ((0, 10), (0, 10), (0, 10), (0, 10), (3.9, 4))  # the last ones wait when a worker dies
        for _ in range(60)
    ]
    faults = [
        Fault(kind=DEATH, worker_id="d0", at_s=4.0),
        Fault(kind=SILENCE, worker_id="p1", at_s=2.0),
        Fault(kind=SLOWNESS, worker_id="d1", at_s=1.0, duration_s=3.0, factor=3.0),
        Fault(kind=STOPPED_CARD, worker_id="p0", at_s=5.0, duration_s=1.0),
    ]
    num_kept = 0

    def meddle(cluster: Cluster, loop: EventLoop) -> None:
        with_faults(faults)(cluster, loop)
        views = cluster.views

        def compared(job: Job) -> tuple[list[WorkerView], list[WorkerView], dict[str, int]]:
            nonlocal num_kept
            kept = [worker.view for worker in (*cluster.pool.prefills.values(), *cluster.pool.decodes.values())]
            seen = views(job)
            for before, view in zip(kept, (*seen[0], *seen[1]), strict=True):
                worker = cluster.pool.find(view.worker_id)
                assert worker is not None
                worker.view = None
                most = cluster.spec.max_sequence_tokens
                new = prefill_view(worker, most) if isinstance(worker, PrefillWorker) else decode_view(worker, most)
                assert facts(view) == facts(new)
                num_kept += view is before
            return seen

        monkeypatch.setattr(cluster, "views", compared)

    one = worker_spec(num_pages=400, chunk_tokens=512, chunking=chunking, max_batch=8)
    spec = replace(cluster_spec(num_prefill, 3, prefill=one, decode=one), pulls_prefixes=True)
    run = simulate(trace_of(load), spec, "hybrid", meddler=meddle)
    check_all_answered(run)
    assert num_kept > 100


def facts(view: WorkerView) -> tuple[object, ...]:
    """What is known of a worker, without what was worked out of it."""
    return tuple(getattr(view, name) for name in WorkerView.__struct_fields__ if name not in WORKED_OUT)


@pytest.mark.parametrize("victim", ["p0", "d0"])
@pytest.mark.parametrize("found_out_s", [0.0, 3.0])
def test_what_a_lost_worker_had_is_computed_elsewhere_from_where_it_was(victim: str, found_out_s: float) -> None:
    def meddle(cluster: Cluster, loop: EventLoop) -> None:
        loop.at(1.003, lambda: cluster.lose_worker(victim))
        loop.at(1.003 + found_out_s, lambda: cluster.note_lost(victim))

    link = worker_spec(link=LinkSpeed(0.001, 1e6))
    spec = cluster_spec(2, 2, prefill=link, decode=link)
    run = simulate(trace_of(requests(100, 0.02)), spec, "least_loaded", meddler=meddle)
    check_all_answered(run)
    again = [job for job in run.jobs if job.attempt > 1]
    assert again
    assert all(job.attempt == 2 for job in again)
    if victim == "d0":
        assert any(1 < job.num_emitted < 40 for job in again), "what was given is not given again"
        assert all(job.end_s is not None and job.end_s > 1.003 + found_out_s for job in again)
    if found_out_s == 0.0:
        assert all(job.dispatched_s is not None and job.dispatched_s <= 1.003 for job in again)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_comes_and_goes_every_request_ends(seed: int) -> None:
    source = random.Random(seed)

    def meddle(cluster: Cluster, loop: EventLoop) -> None:
        def change() -> None:
            pool = cluster.pool
            role, ids = source.choice(((PREFILL, list(pool.prefills)), (DECODE, list(pool.decodes))))
            what = source.randrange(3)
            if what == 0 or len(ids) < 2:
                pool.add(role, start_up_s=source.random())
            elif what == 1:
                pool.drain(source.choice(ids))
            else:
                victim = source.choice(ids)
                cluster.lose_worker(victim)
                loop.at(loop.now_s + source.random(), lambda: cluster.note_lost(victim))
            if cluster.num_to_come:
                loop.at(loop.now_s + source.expovariate(5.0), change)

        change()

    some = [TraceRequest(0.02 * index, source.randrange(1, 600), source.randrange(1, 60)) for index in range(300)]
    run = simulate(trace_of(some), cluster_spec(2, 2), "hybrid", meddler=meddle)
    assert all((job.end_s is not None) != (job.refusal == "failed") for job in run.jobs)
    assert sum(job.attempt > 1 for job in run.jobs) > 0
