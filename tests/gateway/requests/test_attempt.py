"""The token log and the order of events from two workers, without any socket."""

import pytest

from gateway.requests.attempt import Attempt, CrowdedOut, Giver
from gateway.requests.mailbox import Mailbox
from gateway.requests.tokens import TokenLog
from gateway.topology.events import (
    Admitted,
    AttemptKey,
    Declined,
    DecodeStarted,
    Emitted,
    Failed,
    Finished,
    HandedOff,
    SequenceOrder,
)
from gateway.topology.reports import WorkerLoad
from gateway.topology.session import Peer
from gateway.topology.watch import AttemptWatch, WorkerWatch
from services.runtime.clock import SYSTEM_CLOCK, Deadline
from services.runtime.errors import DeadlineExceeded, NoFreePages, TransferFailed, WorkerUnavailable

HANDED_OFF = HandedOff(1, 1, 0.0, "none")


class Session:
    """Stands for a worker's session: remembers what it was told."""

    def __init__(self, worker_id="w"):
        self.peer = Peer(worker_id=worker_id, incarnation="0" * 32, address="h:1")
        self.sent, self.cancelled, self.is_open = [], 0, False
        self.load = WorkerLoad()

    def open(self, key, route, *, num_left=None):
        self.is_open = True

    def close(self, key):
        self.is_open = False

    def cancel(self, key):
        self.is_open = False
        self.cancelled += 1

    def admit(self, order, *, is_local_prefill, is_from_decode=False):
        self.sent.append("admit from decode" if is_from_decode else "admit")

    def prefill(self, order, *, decode):
        self.sent.append("prefill")


class Scene:
    """An attempt that was admitted and whose prompt is being computed."""

    def __init__(self, max_tokens=100, *, giver=None):
        self.decode, self.prefill = Session(), Session()
        self.mailbox, self.log = Mailbox(), TokenLog(max_tokens)
        order = SequenceOrder(AttemptKey("r", 1), (1,), (), None, (), Deadline.after(60), None)
        watch = AttemptWatch(WorkerWatch(SYSTEM_CLOCK), "decode-0", token_s=0.01)
        self.attempt = Attempt(order, decode=self.decode, mailbox=self.mailbox, log=self.log, watch=watch, giver=giver)

    async def start(self):
        admit = self.attempt.admit(is_local_prefill=False)
        admit.send(None)
        self.mailbox.deliver(self.decode, Admitted())
        with pytest.raises(StopIteration):
            admit.send(None)
        self.attempt.start_prefill([self.prefill])
        return self

    def tell(self, session, *events):
        for event in events:
            self.mailbox.deliver(session, event)


def tokens(first, *ids):
    return Emitted(first, list(ids), None)


@pytest.mark.parametrize(("is_move", "sent"), [(False, ["admit"]), (True, ["admit from decode"])])
async def test_who_takes_an_answer_over_is_told_whether_a_decode_worker_has_the_pages(*, is_move, sent):
    scene = Scene(giver=Giver(Session(), AttemptKey("r", 0)) if is_move else None)
    await scene.start()
    assert scene.decode.sent == sent
    assert scene.attempt.is_move == is_move


async def test_tokens_wait_for_the_first_one():
    scene = await Scene().start()
    scene.tell(scene.decode, DecodeStarted(), tokens(1, 11, 12), Finished("stop"))
    assert (await scene.attempt.next_arrived()).token_ids == []
    scene.tell(scene.prefill, tokens(0, 10))
    arrived = await scene.attempt.next_arrived()
    assert (arrived.first_index, arrived.token_ids, arrived.finish_reason) == (0, [10, 11, 12], "stop")
    scene.attempt.close()
    assert (scene.decode.cancelled, scene.prefill.cancelled) == (0, 1)


async def test_finish_does_not_overtake_tokens_that_wait():
    scene = await Scene().start()
    scene.tell(scene.decode, tokens(1, 11))
    scene.tell(scene.decode, Finished("length"))
    scene.tell(scene.prefill, HANDED_OFF)
    with pytest.raises(TransferFailed):
        await scene.attempt.next_arrived()
    scene.attempt.close()
    assert scene.decode.cancelled == 1


async def test_tokens_before_a_failure_are_given_first():
    scene = await Scene().start()
    scene.tell(scene.prefill, tokens(0, 10), HANDED_OFF)
    scene.tell(scene.decode, tokens(1, 11), Failed(WorkerUnavailable("gone")))
    assert (await scene.attempt.next_arrived()).token_ids == [10, 11]
    with pytest.raises(WorkerUnavailable):
        await scene.attempt.next_arrived()
    scene.attempt.close()
    assert (scene.decode.cancelled, scene.prefill.cancelled) == (0, 0)


async def test_prefill_failure_matters_only_before_decoding():
    scene = await Scene().start()
    scene.tell(scene.prefill, tokens(0, 10))
    scene.tell(scene.decode, DecodeStarted())
    scene.tell(scene.prefill, Failed(WorkerUnavailable("gone")))
    scene.tell(scene.decode, tokens(1, 11), Finished("length"))
    arrived = await scene.attempt.next_arrived()
    assert (arrived.token_ids, arrived.finish_reason) == ([10, 11], "length")
    other = await Scene().start()
    other.tell(other.prefill, Failed(TransferFailed("broke")))
    with pytest.raises(TransferFailed):
        await other.attempt.next_arrived()
    other.attempt.close()
    assert other.decode.cancelled == 1


async def test_lack_of_room_on_the_way_is_no_failure():
    scene = await Scene().start()
    scene.tell(scene.prefill, Failed(NoFreePages("no pages")))
    with pytest.raises(CrowdedOut):
        await scene.attempt.next_arrived()


async def test_refused_prefill_uses_the_next_and_then_gives_up():
    scene = Scene()
    second = Session("second")
    scene.attempt._is_at_decode = True
    scene.attempt.start_prefill([scene.prefill, second])
    asked = []
    scene.attempt.watch.prompt_refused = asked.append
    scene.tell(scene.prefill, Declined(NoFreePages("full")))
    scene.tell(second, tokens(0, 10))
    assert (await scene.attempt.next_arrived()).token_ids == [10]
    assert second.sent == ["prefill"]
    assert asked == ["second"], "who computes it now is watched"
    third = Scene()
    third.attempt.start_prefill([third.prefill])
    third.tell(third.prefill, Declined(NoFreePages("full")))
    with pytest.raises(CrowdedOut):
        await third.attempt.next_arrived()


async def test_events_of_other_workers_are_nobodys():
    scene = await Scene().start()
    scene.tell(Session(), tokens(0, 99), Failed(WorkerUnavailable("other")))
    assert (await scene.attempt.next_arrived()).token_ids == []


async def test_deadline_comes_before_waiting_events():
    scene = await Scene().start()
    scene.tell(scene.prefill, tokens(0, 10))
    scene.mailbox.fail(DeadlineExceeded("late"))
    with pytest.raises(DeadlineExceeded):
        await scene.attempt.next_arrived()
    scene.attempt.close()
    scene.attempt.close()
    assert (scene.decode.cancelled, scene.prefill.cancelled) == (1, 1)
