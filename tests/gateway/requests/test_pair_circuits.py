"""A path between two living workers that fails is learned as such: no worker is blamed, and no request is lost."""

import asyncio
from types import SimpleNamespace

import pytest

from gateway.requests import failover
from gateway.requests.pair_circuits import PairCircuits
from protos import worker_pb2
from services.runtime.clock import ManualClock
from services.runtime.errors import (
    ChannelUnreachable,
    InternalError,
    LinkRefused,
    Overloaded,
    PeerUnreachable,
    TransferFailed,
    WorkerUnavailable,
)
from services.runtime.worker_state import WorkerState
from services.scheduling.breakers import FORGET_AFTER_S

ANSWER = [5, 6, 7, 1]
ADVICE = "127.0.0.1:40053 cannot be reached: let the firewall pass the transfer port"


def is_trial(attempt):
    return attempt.key[0].startswith("trial-")


def of_clients(attempts):
    return [attempt for attempt in attempts if not is_trial(attempt)]


class Network:
    """Two prefill and two decode workers. The pairs in `cut` report `error` instead of a handoff."""

    def __init__(self, system, pair, worker_type):
        self.system, self.pair, self.worker_type = system, pair, worker_type
        self.cut: set[tuple[str, str]] = set()
        self.error: Exception = ChannelUnreachable(ADVICE)
        self.tried: list[tuple[str, tuple[str, str]]] = []
        """(request, pair) of each failed handoff of a client."""

    async def start(self, *, prefill=2, decode=2):
        for number in range(prefill):
            await self.system.add(self.worker_type("prefill", f"prefill-{number}", self.prefill))
        for number in range(decode):
            await self.system.add(self.worker_type("decode", f"decode-{number}", self.pair.decode))
        return self

    async def prefill(self, attempt):
        decodes = {worker.incarnation: worker.worker_id for worker in self.system.workers.values()}
        pair = attempt.worker.worker_id, decodes[attempt.request.decode_incarnation]
        if pair not in self.cut:
            await self.pair.prefill(attempt)
            return
        if not is_trial(attempt):
            self.tried.append((attempt.key[0], pair))
        attempt.fail(self.error)

    async def ask(self, first=5, **body):
        response = await self.system.complete(prompt=[first, 6, 7], max_tokens=100, return_token_ids=True, **body)
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["token_ids"] == ANSWER
        return response

    async def blocked(self):
        found = (await self.system.http.get("/cluster")).json()["cut_pairs"]
        return {(pair["prefill_id"], pair["decode_id"]): pair for pair in found}

    @property
    def dispatcher(self):
        return self.system.gateway.requests._dispatcher

    def pairs_of(self):
        """The pairs that failed each request, in order."""
        found: dict[str, list[tuple[str, str]]] = {}
        for request_id, pair in self.tried:
            found.setdefault(request_id, []).append(pair)
        return found


@pytest.fixture
def make_network(make_system, worker_type, pair_type):
    async def make(*, prefill=2, decode=2, **settings):
        system = await make_system(routing="round_robin", **settings)
        return await Network(system, pair_type(ANSWER), worker_type).start(prefill=prefill, decode=decode)

    return make


@pytest.mark.parametrize(
    ("error", "most"),
    [
        (ChannelUnreachable(ADVICE), 1),
        (LinkRefused("the receiver accepts no more Links"), 1),
        (PeerUnreachable("the receiver did not accept a Link in time"), 1),
        (TransferFailed("the channel broke"), 2),
        (WorkerUnavailable("the Link broke"), 2),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
async def test_a_pair_is_blocked_and_named_whatever_the_class_of_its_error(make_network, caplog, error, most):
    network = await make_network()
    network.cut, network.error = {("prefill-0", "decode-0")}, error
    for number in range(20):
        await network.ask(number + 5)
    assert len(network.tried) == most, "a blocked pair gets no request of a client"
    ((pair, shown),) = (await network.blocked()).items()
    assert pair == ("prefill-0", "decode-0")
    assert shown["words"] == error.message
    assert not network.dispatcher.watch.circuits(), "no worker is blamed"
    await network.system.until(lambda: network.system.gateway.troubles.of("circuit"))
    (trouble,) = network.system.gateway.troubles.of("circuit")
    assert trouble.subject == "prefill-0 to decode-0"
    assert error.message in trouble.cause
    assert "transfer port" in trouble.remedy
    assert [record.prefill for record in caplog.records if record.message == "pair blocked"] == ["prefill-0"]


async def test_trials_unblock_a_pair_and_no_client_waits_for_them(make_network):
    network = await make_network()
    network.cut = {("prefill-0", "decode-0")}
    while not await network.blocked():
        await network.ask()
    worker, pair = network.system.workers["prefill-0"], ("prefill-0", "decode-0")
    await network.system.until(lambda: sum(map(is_trial, worker.attempts)) >= 2)
    num_tried = len(network.tried)
    for number in range(8):
        await network.ask(number + 20)
    assert len(network.tried) == num_tried
    network.cut.clear()
    await network.system.until(lambda: not network.dispatcher.pairs.is_blocked(pair))
    assert await network.blocked() == {}
    assert network.dispatcher.num_open_breakers == 0


async def test_a_path_that_is_cut_while_the_other_decode_worker_is_ejected_loses_no_request(make_network):
    """35 of 60 requests were answered 503, after three attempts on the same pair."""
    network = await make_network(prefill=1)
    watch = network.dispatcher.watch

    async def stays_broken(attempt):
        if is_trial(attempt):
            attempt.refuse(InternalError("slow"))
        else:
            await network.pair.decode(attempt)

    ejected = network.system.workers["decode-1"]
    ejected.script = stays_broken
    for _ in range(3):
        watch.failed("decode-1", [])
    await network.system.until(lambda: watch.circuit("decode-1") in ("open", "half_open"))
    network.cut = {("prefill-0", "decode-0")}
    network.error = WorkerUnavailable("the receiver did not make a Link in time")
    for number in range(60):
        await network.ask(number + 5)
    assert max(map(len, network.pairs_of().values())) == 1
    assert not of_clients(ejected.attempts), "the healthy decode worker computes the prompts itself"


async def test_no_request_uses_a_pair_again_that_failed_it(make_network, monkeypatch):
    monkeypatch.setattr("gateway.requests.pair_circuits.MAX_ERRORS", 10**6)
    network = await make_network()
    network.cut = {(f"prefill-{p}", f"decode-{d}") for p in range(2) for d in range(2)}
    network.error = TransferFailed("the channel broke")
    await asyncio.gather(*(network.ask(number + 5) for number in range(12)))
    for pairs in network.pairs_of().values():
        assert len(pairs) == len(set(pairs)) < failover.MAX_PATHS
    attempts = of_clients([one for number in range(2) for one in network.system.workers[f"decode-{number}"].attempts])
    assert sum(attempt.request.local_prefill for attempt in attempts) == 12


async def test_a_request_whose_only_pair_failed_it_is_computed_by_one_worker(make_network, monkeypatch):
    monkeypatch.setattr("gateway.requests.pair_circuits.MAX_ERRORS", 10**6)
    network = await make_network(prefill=1, decode=1)
    network.cut, network.error = {("prefill-0", "decode-0")}, TransferFailed("the channel broke")
    for number in range(4):
        await network.ask(number + 5)
    assert [len(pairs) for pairs in network.pairs_of().values()] == [1] * 4


async def test_failed_pairs_do_not_count_against_max_attempts(make_network):
    network = await make_network(max_attempts=1)
    network.cut = {("prefill-0", "decode-0"), ("prefill-1", "decode-1"), ("prefill-0", "decode-1")}
    for number in range(8):
        await network.ask(number + 5)
    assert network.tried


async def test_a_worker_that_is_leaving_blames_no_pair(make_network):
    network = await make_network()
    network.cut, network.error = {("prefill-0", "decode-0"), ("prefill-0", "decode-1")}, WorkerUnavailable("leaving")
    network.system.workers["prefill-0"].drain()
    session = network.system.gateway.topology.member("prefill-0").session
    await network.system.until(lambda: session.load.is_draining)
    for number in range(4):
        await network.ask(number + 5)
    assert not network.dispatcher.pairs.has_blocked


async def test_a_peer_that_turns_out_to_be_leaving_blames_no_pair(make_network):
    network = await make_network(prefill=1)
    leaving = network.system.workers["decode-0"]
    leaving.word_delay_s = 0.3

    async def reports_a_peer_that_leaves(attempt):
        if attempt.request.decode_incarnation != leaving.incarnation:
            await network.pair.prefill(attempt)
            return
        attempt.fail(PeerUnreachable("the Link was refused"))
        await network.system.until(lambda: attempt.key in leaving.cancelled)
        leaving.drain()

    network.system.workers["prefill-0"].script = reports_a_peer_that_leaves
    for number in range(4):
        await network.ask(number + 5)
    assert leaving.cancelled
    assert not network.dispatcher.pairs.has_blocked


async def test_a_peer_that_died_blames_no_pair(make_network):
    """The prefill worker may report it before the gateway has noticed the death."""
    network = await make_network(prefill=1)
    dead = network.system.workers["decode-0"]

    async def reports_a_death(attempt):
        if attempt.request.decode_incarnation != dead.incarnation:
            await network.pair.prefill(attempt)
            return
        dead.gives_word = False
        attempt.fail(PeerUnreachable("the Link broke"))
        await asyncio.sleep(0.02)
        await dead.die()

    network.system.workers["prefill-0"].script = reports_a_death
    for number in range(4):
        await network.ask(number + 5)
    assert not network.dispatcher.pairs.has_blocked
    del network.system.workers["decode-0"]


async def test_a_worker_that_left_takes_its_circuits_with_it(make_network):
    network = await make_network()
    network.cut = {("prefill-0", "decode-0")}
    while not await network.blocked():
        await network.ask()
    pairs = network.dispatcher.pairs
    assert pairs.has_blocked
    await network.system.workers.pop("decode-0").stop()
    await network.system.until(lambda: network.system.gateway.topology.member("decode-0") is None)
    assert not pairs.has_blocked
    assert not any("decode-0" in pair for pair in pairs._breakers.known())


async def test_what_is_remembered_of_lost_workers_is_bounded(make_network, monkeypatch):
    monkeypatch.setattr("gateway.requests.dispatch.MAX_LOST", 2)
    network = await make_network()
    attempt = SimpleNamespace(watch=SimpleNamespace(failed=lambda worker_id: failed.append(worker_id)))
    failed: list[str] = []
    for number in (0, 0, 1, 2, 3, 3):
        session = SimpleNamespace(peer=SimpleNamespace(worker_id=f"w{number}", incarnation=f"i{number}"))
        network.dispatcher._note_lost(attempt, session)
    assert failed == ["w0", "w1", "w2", "w3"], "a death is one error, however many attempts it ended"
    assert list(network.dispatcher._last_lost) == ["w2", "w3"]


async def test_a_refused_link_is_no_lack_of_room(make_network):
    """It was tried again each 20 ms on the same pair, 2,237 times for one request."""
    network = await make_network(prefill=2, decode=1)
    network.cut, network.error = {("prefill-0", "decode-0")}, LinkRefused("the receiver accepts no more Links")
    for number in range(12):
        await network.ask(number + 5)
    assert len(network.tried) == 1


async def test_an_attempt_without_room_waits_and_does_not_wait_for_ever(make_network, monkeypatch):
    rests = []

    async def rest(mailbox, seconds, **how):
        rests.append(seconds)

    monkeypatch.setattr("gateway.requests.mailbox.Mailbox.rest", rest)
    network = await make_network(prefill=1, decode=1)
    network.cut, network.error = {("prefill-0", "decode-0")}, Overloaded("no pages")
    response = await network.system.complete(prompt=[5, 6, 7], max_tokens=100)
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "overloaded_error"
    most = failover.MAX_CROWDINGS * 3
    assert len(network.tried) == most
    waits = [seconds for seconds in rests if seconds <= failover.MAX_CROWDED_WAIT_S]
    assert waits[: failover.MAX_CROWDINGS - 1] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert not network.dispatcher.pairs.has_blocked


async def test_a_last_attempt_may_use_an_ejected_worker(make_network):
    network = await make_network(prefill=0, decode=3)
    watch = network.dispatcher.watch

    async def stays_broken(attempt):
        attempt.refuse(InternalError("slow")) if is_trial(attempt) else await network.pair.decode(attempt)

    async def fails(attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.fail(WorkerUnavailable("no more"))

    network.system.workers["decode-0"].script = stays_broken
    for number in (1, 2):
        network.system.workers[f"decode-{number}"].script = fails
    for _ in range(3):
        watch.failed("decode-0", [])
    await network.system.until(lambda: watch.circuit("decode-0") in ("open", "half_open"))
    await network.ask()
    assert len(of_clients(network.system.workers["decode-0"].attempts)) == 1


def attempt_of(prefill, decode, *, incarnation="1"):
    """An attempt on two workers. `incarnation` is of the processes of both."""
    sessions = [
        SimpleNamespace(peer=SimpleNamespace(worker_id=one, incarnation=one + incarnation)) for one in (prefill, decode)
    ]
    return SimpleNamespace(prefill=sessions[0], decode=sessions[1], probes=set())


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def circuits(clock):
    """Circuits of workers that are all ready, in the processes of `attempt_of`."""
    return PairCircuits(SimpleNamespace(member=ready), clock=clock)


def ready(worker_id, *, incarnation="1"):
    peer = SimpleNamespace(worker_id=worker_id, incarnation=worker_id + incarnation)
    return SimpleNamespace(state=WorkerState.READY, session=SimpleNamespace(peer=peer))


def test_a_pair_that_was_blocked_for_long_is_unblocked_by_a_trial(circuits, clock):
    circuits.failed(attempt_of("p", "d"), PeerUnreachable("cut"))
    clock.advance(FORGET_AFTER_S + 1)
    circuits.failed(attempt_of("p", "e"), PeerUnreachable("cut"))
    circuits.due_for_trial()
    clock.advance(2.0)
    assert ("p", "d") in circuits.due_for_trial()
    trial = attempt_of("p", "d")
    circuits.begin_trial(trial, "p")
    circuits.succeeded(trial)
    assert not circuits.is_blocked(("p", "d"))


def test_a_worker_that_left_takes_its_counted_errors_with_it(circuits):
    circuits.failed(attempt_of("p", "d"), TransferFailed("broke"))
    circuits.forget("d")
    circuits.failed(attempt_of("p", "d"), TransferFailed("broke"))
    assert not circuits.has_blocked
    circuits.failed(attempt_of("p", "d"), TransferFailed("broke"))
    assert circuits.has_blocked


def test_a_worker_that_leaves_after_a_long_pause_leaves_no_doubt_behind(circuits, clock):
    circuits.failed(attempt_of("p", "d"), TransferFailed("broke"))
    clock.advance(FORGET_AFTER_S + 1)
    circuits.failed(attempt_of("p", "e"), TransferFailed("broke"))
    circuits.forget("d")
    assert not circuits.is_in_doubt(("p", "d"))


def test_an_error_of_a_process_that_has_left_does_not_count_against_its_successor(circuits):
    circuits.failed(attempt_of("p", "d", incarnation="0"), PeerUnreachable("cut"))
    assert not circuits.has_blocked
    assert circuits.due_for_trial() == []


def test_one_failed_handoff_is_followed_by_a_trial_whose_failure_blocks_the_pair(circuits):
    pair = "p", "d"
    circuits.failed(attempt_of(*pair), TransferFailed("broke"))
    assert (circuits.is_in_doubt(pair), circuits.due_for_trial()) == (True, [pair])
    trial = attempt_of(*pair)
    circuits.begin_trial(trial, "p")
    circuits.failed(trial, TransferFailed("broke"))
    assert circuits.is_blocked(pair)


def test_a_trial_that_succeeds_ends_the_doubt_and_the_error_before_it_still_counts(circuits):
    pair = "p", "d"
    circuits.failed(attempt_of(*pair), TransferFailed("broke"))
    trial = attempt_of(*pair)
    circuits.begin_trial(trial, "p")
    circuits.succeeded(trial)
    assert (circuits.is_in_doubt(pair), circuits.due_for_trial()) == (False, [])
    circuits.failed(attempt_of(*pair), TransferFailed("broke"))
    assert circuits.is_blocked(pair), "the path may lose only large frames"


def test_a_handoff_that_succeeds_drops_the_error_before_it(circuits):
    circuits.failed(attempt_of("p", "d"), TransferFailed("broke"))
    circuits.succeeded(attempt_of("p", "d"))
    assert circuits.due_for_trial() == []
    circuits.failed(attempt_of("p", "d"), TransferFailed("broke"))
    assert not circuits.has_blocked
