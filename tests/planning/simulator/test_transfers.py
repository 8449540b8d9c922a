"""Network cards: a transfer has both ends to itself."""

from dataclasses import replace

import pytest

from planning.simulator.cluster import simulate
from planning.simulator.traces import TraceRequest
from planning.simulator.transfers import Network
from services.scheduling.prediction import LinkSpeed
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
