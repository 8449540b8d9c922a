"""What prefill workers are told to fetch, and which pairs are left alone after a failure."""

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.observability.phases import AttemptFacts
from gateway.requests.pulls import FIRST_PAUSE_S, MAX_PAUSE_S, PATIENCE_S, Pulls
from gateway.topology.events import PrefillStarted
from gateway.topology.session import Peer
from services.runtime.clock import ManualClock
from services.scheduling.routing.views import Pull, WorkerView


class Cluster:
    """Stands for the topology."""

    def __init__(self) -> None:
        self.identities = dict.fromkeys(("h", "other", "p"), "same")

    def member(self, worker_id: str) -> Any:
        if worker_id not in self.identities:
            return None
        peer = Peer(worker_id=worker_id, incarnation="1" * 32, address="host:1")
        record = SimpleNamespace(identity_key=self.identities[worker_id])
        return SimpleNamespace(record=record, session=SimpleNamespace(is_up=True, peer=peer))

    def may_go_on(self, began: str, here: str) -> bool:
        return began == here


def view(worker_id: str) -> WorkerView:
    return WorkerView(worker_id, "0" * 32, 100, 100, 0, 0, 1000, can_pull=True)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def made(
    cluster: Cluster, clock: ManualClock, *, is_on: bool = True, blocked: Collection[tuple[str, str]] = ()
) -> Pulls:
    return Pulls(cast(Any, cluster), clock=clock, is_on=is_on, is_blocked=blocked.__contains__)


@pytest.fixture
def pulls(cluster: Cluster, clock: ManualClock) -> Pulls:
    return made(cluster, clock)


def facts(order: Any, *, num_tokens: int = 0, has_started: bool = True) -> AttemptFacts:
    made = AttemptFacts(1, None, 900, 0, "d", False, "p")
    made.pull = order
    made.prefill_started = PrefillStarted(0.0, num_pulled_tokens=num_tokens) if has_started else None
    return made


def orders(pulls: Pulls, *, holder: str = "h") -> Any:
    route = SimpleNamespace(pulls={"p": Pull(view(holder), 800, 10, 0.1, 0.4)})
    return pulls.orders(cast(Any, route))


def test_a_worker_is_told_where_to_fetch_and_for_how_long(pulls: Pulls) -> None:
    (order,) = orders(pulls).values()
    assert tuple(order) == ("h", "1" * 32, "host:1", 800, PATIENCE_S + 0.4)
    assert not orders(pulls, holder="gone")


def test_what_the_operator_or_the_workers_do_not_allow_is_not_fetched(cluster: Cluster, clock: ManualClock) -> None:
    assert made(cluster, clock, is_on=False).can_pull is None
    can_pull = made(cluster, clock).can_pull
    assert can_pull is not None
    assert can_pull(view("h"), view("p"))
    assert not can_pull(view("gone"), view("p"))
    cluster.identities["h"] = "other weights"
    assert not can_pull(view("h"), view("p"))


def test_nothing_is_fetched_over_the_path_of_a_blocked_pair(cluster: Cluster, clock: ManualClock) -> None:
    can_pull = made(cluster, clock, blocked={("p", "h")}).can_pull
    assert can_pull is not None
    assert not can_pull(view("h"), view("p"))
    assert can_pull(view("other"), view("p"))


def test_a_pair_that_failed_rests_longer_each_time_and_a_success_ends_that(pulls: Pulls, clock: ManualClock) -> None:
    can_pull, order = pulls.can_pull, orders(pulls)["p"]
    assert can_pull is not None
    pause_s = FIRST_PAUSE_S
    for _ in range(8):
        assert can_pull(view("h"), view("p"))
        pulls.note(facts(order))
        assert not can_pull(view("h"), view("p"))
        assert can_pull(view("other"), view("p"))
        clock.advance(pause_s - 0.01)
        assert not can_pull(view("h"), view("p"))
        clock.advance(0.02)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)
    pulls.note(facts(order, num_tokens=800))
    pulls.note(facts(order))
    clock.advance(FIRST_PAUSE_S + 0.01)
    assert can_pull(view("h"), view("p"))


def test_a_worker_that_left_is_forgotten(pulls: Pulls) -> None:
    pulls.note(facts(orders(pulls)["p"]))
    assert pulls._pauses
    pulls.forget("h")
    assert not pulls._pauses


def test_an_attempt_without_a_pull_or_without_news_says_nothing(pulls: Pulls) -> None:
    can_pull = pulls.can_pull
    assert can_pull is not None
    pulls.note(facts(None))
    pulls.note(facts(orders(pulls)["p"], has_started=False))
    assert can_pull(view("h"), view("p"))


@pytest.mark.parametrize(("pulls", "publishes"), [(True, True), (True, False), (False, True)])
async def test_the_second_prefill_worker_is_sent_to_the_first_one(
    make_system: Any, worker_type: Any, pair_type: Any, pulls: bool, publishes: bool
) -> None:
    system, pair = await make_system(routing="round_robin"), pair_type([5, 6, 7])
    facts = {"pulls": pulls, "kv_bytes_per_token": 1000}
    prefills = [worker_type("prefill", f"prefill-{number}", pair.prefill, **facts) for number in range(2)]
    decode = worker_type("decode", "decode-0", pair.decode, **facts)
    for worker in (*prefills, decode):
        await system.add(worker)
    prompt = [9] * 400
    for _ in range(2):
        assert (await system.complete(prompt=prompt, max_tokens=3)).status_code == 200
        view = system.gateway.requests._dispatcher._hints._view
        for worker in view._workers.values() if publishes else ():
            view._pages.add(tuple(worker.expected), worker.bit)  # as the workers themselves do within a second
    # The first one had nothing to fetch, and what it computed is held there and at the decode worker.
    first, second = sorted((worker.attempts[0].request for worker in prefills), key=lambda one: one.HasField("pull"))
    assert not first.HasField("pull")
    assert second.HasField("pull") == (pulls and publishes), "what is only expected cannot be fetched"
    if not (pulls and publishes):
        return
    addresses = {
        system.gateway.requests._dispatcher._topology.member(name).record.address: name for name in system.workers
    }
    assert addresses[second.pull.own_address].startswith("prefill-")
    assert addresses[second.pull.address] not in ("", addresses[second.pull.own_address])
    assert second.pull.num_tokens == 384
    assert second.pull.limit_ms > PATIENCE_S * 1000
    # It was told that nothing came, and leaves the pair alone for a while.
    (pair_of,) = system.gateway.requests._dispatcher.pulls._pauses
    assert pair_of == (addresses[second.pull.address], addresses[second.pull.own_address])
