"""Network cards: a transfer has both ends to itself."""

from dataclasses import replace

import pytest

from planning.simulator.cluster import simulate
from planning.simulator.faults import DEATH, Fault, with_faults
from planning.simulator.jobs import Job
from planning.simulator.traces import TraceRequest
from planning.simulator.transfers import Network
from services.scheduling.prediction import LinkSpeed, PrefillSpeed
from services.scheduling.routing.pulls import ASK_S
from tests.planning.simulator.small import cluster_spec, trace_of, worker_spec


def test_cards_are_taken_in_turn_and_only_those_two() -> None:
    network = Network()
    assert network.book(source="p0", target="d0", now_s=0.0, duration_s=2.0) == 2.0
    assert network.book(source="p1", target="d0", now_s=1.0, duration_s=1.0) == 3.0  # d0 is taken
    assert network.book(source="p0", target="d1", now_s=1.0, duration_s=1.0) == 3.0  # p0 is taken
    assert network.book(source="p2", target="d2", now_s=1.0, duration_s=1.0) == 2.0
    assert network.book(source="p2", target="d0", now_s=9.0, duration_s=1.0) == 10.0


@pytest.mark.parametrize(("workers_per_host", "factor"), [(1, 1), (2, 2)])
def test_two_workers_of_one_host_share_its_card(workers_per_host: int, factor: int) -> None:
    """Two prompts of one length at one moment, each 1,000,000 bytes at 1 MB/s: side by side, or one after the other."""
    worker = worker_spec(link=LinkSpeed(0.0, 1e6))
    spec = replace(cluster_spec(2, 2, prefill=worker, decode=worker), workers_per_host=workers_per_host)
    run = simulate(trace_of([TraceRequest(0.0, 1000, 2), TraceRequest(0.0, 1000, 2)]), spec, "round_robin")
    waits_s = sorted(job.joined_s - job.first_token_s for job in run.jobs if job.joined_s and job.first_token_s)
    assert waits_s == pytest.approx([1.0, factor * 1.0])


def pulling(*, link: LinkSpeed, pulls_prefixes: bool = True) -> list[Job]:
    """Two prompts with the same 1,600 first tokens, and the second one's worker is another one: a burst of others."""
    blocks = tuple(range(100))
    first = [TraceRequest(0.0, 1600, 2, blocks)]
    later = [TraceRequest(5.0 + 0.001 * number, 1616, 2, (*blocks, 1000 + number)) for number in range(6)]
    one = worker_spec(link=link, prefill=PrefillSpeed(0.01, 1e-3, 0.0))
    spec = replace(cluster_spec(4, 1, prefill=one, decode=one), pulls_prefixes=pulls_prefixes)
    return list(simulate(trace_of([*first, *later], 16), spec, "hybrid").jobs)


def test_a_prefix_is_fetched_where_that_is_quicker_than_computing_it() -> None:
    jobs = pulling(link=LinkSpeed(0.001, 1e9))
    fetched = [job for job in jobs if job.pull is not None]
    assert fetched
    assert all(job.num_cached_tokens == 1600 for job in fetched)
    for job in fetched:
        assert job.first_token_s is not None
        # 1.6 MB over the link, a question, and the last page.
        assert job.first_token_s - job.arrival_s >= 0.0016 + 0.001 + ASK_S
    slow = pulling(link=LinkSpeed(0.001, 1e5))
    assert all(job.pull is None for job in slow), "16 s on the link, 1.6 s to compute"


def test_nothing_is_fetched_unless_it_is_asked_for() -> None:
    assert all(job.pull is None for job in pulling(link=LinkSpeed(0.001, 1e9), pulls_prefixes=False))


@pytest.mark.parametrize("role", ["prefill_worker", "decode_worker"])
def test_a_prefix_on_its_way_for_an_attempt_that_fails_is_nobodys(role: str) -> None:
    blocks = tuple(range(100))
    one = worker_spec(link=LinkSpeed(0.001, 2e6), prefill=PrefillSpeed(0.01, 1e-3, 0.0))
    spec = replace(cluster_spec(2, 2, prefill=one, decode=one), pulls_prefixes=True)
    requests = [
        TraceRequest(0.0, 1600, 2, blocks),
        *(TraceRequest(5.0, 1616, 2, (*blocks, 200 + number)) for number in range(100)),
    ]
    whole = simulate(trace_of(requests, 16), spec, "hybrid").jobs
    lost = next(getattr(job, role) for job in whole if job.pull is not None)
    fault = Fault(kind=DEATH, worker_id=lost, at_s=5.1)
    jobs = simulate(trace_of(requests, 16), spec, "hybrid", meddler=with_faults([fault])).jobs
    assert all(job.end_s is not None for job in jobs)
    assert any(job.attempt == 2 for job in jobs)
