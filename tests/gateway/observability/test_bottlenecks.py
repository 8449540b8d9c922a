"""Which figures of workers make what holds a model back, and how it is shown."""

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from gateway.observability.bottlenecks import PIECE_WORKERS, WINDOW_S, BottleneckWatch
from gateway.topology.counts import Counts
from gateway.topology.reports import WorkerLoad
from services.runtime.clock import ManualClock
from services.runtime.worker_state import WorkerState
from services.scheduling.links import PeerLink
from services.scheduling.prediction import DecodeSpeed

STEP = DecodeSpeed(overhead_s=0.010, s_per_sequence=0.001)
"""A batch of 10 makes 500 tokens a second, one of 90 makes 900."""
FLAT = DecodeSpeed(overhead_s=0.010, s_per_sequence=0.0)


class Cluster:
    """Workers and answers that a test changes, and the watch of them."""

    def __init__(self, *, itl_target_s: float | None = None) -> None:
        self.clock = ManualClock()
        self.members: list[Any] = []
        self.waiting: dict[tuple[str, str, str], int] = {("m", "normal", "running"): 1}
        self.busy_s = self.gateway_share = 0.0
        self.shares: dict[str, float | None] = {}
        self.watch = BottleneckWatch(
            lambda: self.members,
            lambda: self.waiting,
            busy_s=lambda: self.busy_s,
            itl_target_s=itl_target_s,
            clock=self.clock,
        )

    def add(self, role: str, worker_id: str, *, share: float | None = 0.0, state: Any = WorkerState.READY, **load: Any):
        """Adds a worker that computes for a share of the time; None: it does not say."""
        record = SimpleNamespace(role=role, id=worker_id, incarnation=worker_id, model="m", max_running=90)
        session = SimpleNamespace(counts=None, links={})
        load = {"pages_total": 100, **load}
        self.shares[worker_id] = share
        self.members.append(SimpleNamespace(record=record, session=session, state=state, load=WorkerLoad(**load)))
        return self.members[-1]

    def pass_seconds(self, number: int) -> None:
        for _ in range(number):
            self.clock.advance(1.0)
            self.busy_s += self.gateway_share
            for member in self.members:
                share, counts = self.shares[member.record.id], member.session.counts
                if share is not None:
                    member.session.counts = Counts({}, {}, {}, None, (counts.step_s if counts else 0.0) + share)
            list(self.watch.pieces())

    def loads(self) -> dict[str, float]:
        registry = CollectorRegistry()
        registry.register(self.watch)
        return {
            f"{sample.labels['role']} {sample.labels['resource']}": sample.value
            for family in registry.collect()
            for sample in family.samples
            if family.name == "tandem_resource_load_ratio"
        }

    def told(self) -> list[tuple[str, str]]:
        return [(one["role"], one["resource"]) for one in self.watch.told()]


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_workers_compute_for_a_share_of_the_last_seconds(cluster: Cluster) -> None:
    cluster.add("prefill", "p-0", share=0.9)
    cluster.add("prefill", "p-1", share=0.3)
    cluster.add("decode", "d-0", share=1.0, running=10, decode_speed=STEP)
    cluster.pass_seconds(3)
    assert cluster.loads()["prefill compute"] == pytest.approx(0.6)
    assert cluster.loads()["decode compute"] == pytest.approx(500 / 900)
    cluster.shares["p-0"] = 0.0
    cluster.pass_seconds(WINDOW_S)
    assert cluster.loads()["prefill compute"] == pytest.approx(0.15), "what was before counts no longer"


@pytest.mark.parametrize(("speed", "expected"), [(STEP, 10 / 20 / (20 / 30)), (FLAT, 10 / 90)])
def test_a_target_for_the_time_of_a_token_limits_the_batch(speed: DecodeSpeed, expected: float) -> None:
    cluster = Cluster(itl_target_s=0.030)
    cluster.add("decode", "d-0", share=1.0, running=10, decode_speed=speed)
    cluster.pass_seconds(3)
    assert cluster.loads()["decode compute"] == pytest.approx(expected)


def test_a_decode_worker_in_which_prompts_wait_is_full_while_it_computes(cluster: Cluster) -> None:
    cluster.add("decode", "d-0", share=0.95, running=1, waiting_tokens=50, decode_speed=STEP)
    cluster.pass_seconds(3)
    assert cluster.loads()["decode compute"] == pytest.approx(0.95)


def test_a_worker_that_counts_nothing_is_judged_by_its_load(cluster: Cluster) -> None:
    cluster.add("prefill", "p-0", share=None, running=1)
    cluster.add("decode", "d-0", share=None)
    cluster.pass_seconds(5)
    assert (cluster.loads()["prefill compute"], cluster.loads()["decode compute"]) == (1.0, 0.0)


def test_a_decode_worker_that_has_measured_nothing_is_as_full_as_its_places(cluster: Cluster) -> None:
    cluster.add("decode", "d-0", share=1.0, running=45)
    cluster.pass_seconds(3)
    assert cluster.loads()["decode compute"] == pytest.approx(0.5)


def test_pages_count_that_are_taken_or_promised(cluster: Cluster) -> None:
    cluster.add("decode", "d-0", pages_used=30, pages_reserved=20, pages_promised=10, pages_cached=40)
    cluster.pass_seconds(1)
    assert cluster.loads()["decode pages"] == pytest.approx(0.6)


def test_links_are_full_that_have_a_second_of_pages_under_way_to_ready_workers(cluster: Cluster) -> None:
    sender = cluster.add("prefill", "p-0")
    cluster.add("decode", "d-0")
    cluster.add("decode", "d-1")
    sender.session.links = {
        "d-0": PeerLink(0.1, 1e6, 5_000_000),
        "d-1": PeerLink(0.1, 1e6, 200_000),
        "gone": PeerLink(0.1, 1e6, 5_000_000),
    }
    cluster.pass_seconds(4)
    assert cluster.loads()["prefill link"] == pytest.approx((1.0 + 0.2) / 2)


def test_what_lasts_is_told_with_its_numbers(cluster: Cluster) -> None:
    cluster.add("prefill", "p-0", share=0.97)
    cluster.add("decode", "d-0", share=1.0, running=10, decode_speed=FLAT)
    cluster.pass_seconds(3)
    assert cluster.told() == []
    cluster.pass_seconds(20)
    assert cluster.told() == [("prefill", "compute")]
    (one,) = cluster.watch.told()
    assert one["said"].startswith("97% of what prefill workers can compute is taken; one more prefill worker: +100%")
    assert {"role": "prefill", "resource": "compute", "load": 0.97} in one["loads"]
    assert 15 <= cluster.clock.unix_ns() / 1e9 - one["since_unix_s"] <= 23
    registry = CollectorRegistry()
    registry.register(cluster.watch)
    labels = {"model": "m", "role": "prefill", "resource": "compute", "work": "urgent"}
    assert registry.get_sample_value("tandem_bottleneck", labels) == 1
    cluster.shares["p-0"] = 0.1
    cluster.pass_seconds(30)
    assert cluster.told() == []


def test_requests_of_one_model_say_nothing_of_another(cluster: Cluster) -> None:
    cluster.waiting = {("m", "normal", "queued"): 4, ("n", "normal", "queued"): 0}
    cluster.add("decode", "d-0", pages_used=90)
    cluster.pass_seconds(20)
    assert [(one["model"], one["role"], one["resource"]) for one in cluster.watch.told()] == [
        ("m", "decode", "pages"),
        ("n", "decode", "compute"),
    ]
    assert cluster.watch.told()[1]["said"].startswith("no decode worker is ready")


def test_batch_work_alone_is_told_as_such(cluster: Cluster) -> None:
    cluster.waiting = {("m", "batch", "queued"): 4, ("m", "normal", "queued"): 0}
    cluster.add("prefill", "p-0", share=1.0)
    cluster.add("decode", "d-0")
    cluster.pass_seconds(20)
    (one,) = cluster.watch.told()
    assert one["is_batch_only"] is True
    cluster.waiting["m", "normal", "running"] = 1
    cluster.pass_seconds(1)
    assert cluster.watch.told()[0]["is_batch_only"] is False


def test_answers_too_quick_to_be_seen_are_not_batch_work(cluster: Cluster) -> None:
    cluster.waiting = {("m", "batch", "queued"): 0, ("m", "normal", "running"): 0}
    cluster.gateway_share = 0.95
    cluster.add("decode", "d-0")
    cluster.pass_seconds(20)
    assert [one["is_batch_only"] for one in cluster.watch.told()] == [False]


def test_without_traffic_nothing_is_told(cluster: Cluster) -> None:
    cluster.waiting = {("m", "normal", "queued"): 0}
    cluster.add("prefill", "p-0")
    cluster.add("decode", "d-0")
    cluster.pass_seconds(30)
    assert cluster.told() == []


@pytest.mark.parametrize("state", [WorkerState.LOST, WorkerState.DRAINING, WorkerState.LEFT_OUT])
def test_a_worker_that_takes_no_requests_does_not_count(cluster: Cluster, state: WorkerState) -> None:
    cluster.add("prefill", "p-0", share=0.1, state=state)
    cluster.add("prefill", "p-1", share=0.9)
    cluster.add("decode", "d-0")
    cluster.pass_seconds(20)
    assert cluster.told() == [("prefill", "compute")]


def test_counts_that_fall_and_loads_that_cannot_be_do_no_harm(cluster: Cluster) -> None:
    cluster.add("prefill", "p-0", share=-1e9, pages_total=0, pages_used=10**9)
    cluster.add("prefill", "p-1", share=1e300, pages_used=10**9)
    cluster.add("decode", "d-0", share=0.5, running=10**9, context_tokens=10**15, decode_speed=DecodeSpeed(0, 0, 0))
    cluster.pass_seconds(20)
    assert all(0 <= load <= 1 for load in cluster.loads().values())


def test_the_gateway_is_full_when_its_thread_is(cluster: Cluster) -> None:
    cluster.gateway_share = 0.96
    cluster.add("prefill", "p-0", share=0.5)
    cluster.add("decode", "d-0")
    cluster.pass_seconds(20)
    assert cluster.told() == [("gateway", "compute")]


def test_many_workers_are_sampled_in_pieces(cluster: Cluster) -> None:
    for number in range(2 * PIECE_WORKERS + 1):
        cluster.add("decode", f"d-{number}", running=9)
    pieces = cluster.watch.pieces()
    next(pieces)
    assert cluster.told() == [], "an incomplete pass reports nothing"
    assert len(list(pieces)) >= 1


def test_time_between_pieces_is_measured_by_one_clock(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway and the worker are always busy, and other tasks run for a second between the first two pieces."""
    monkeypatch.setattr("gateway.observability.bottlenecks.PIECE_WORKERS", 1)
    cluster.add("prefill", "p-0")
    worker = cluster.add("prefill", "p-1")

    def pass_a_second() -> None:
        cluster.clock.advance(1.0)
        cluster.busy_s += 1.0
        worker.session.counts = Counts({}, {}, {}, None, cluster.busy_s)

    pass_a_second()
    pieces = cluster.watch.pieces()
    next(pieces)
    pass_a_second()
    list(pieces)
    pass_a_second()
    list(cluster.watch.pieces())
    assert cluster.loads()["gateway compute"] == 1.0
    assert cluster.watch._windows["p-1", "p-1"].use("prefill").compute == 1.0
