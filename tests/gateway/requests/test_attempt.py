"""The order of events from two workers, without any socket."""

import asyncio
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.requests.attempt import FROM_DECODE, FROM_GIVER, FROM_PREFILL, Attempt, CrowdedOut, Giver
from gateway.requests.mailbox import Mailbox
from gateway.requests.stage import TERMINAL, AttemptStage
from gateway.requests.tokens import TokenLog
from gateway.topology.events import (
    Admitted,
    AttemptKey,
    Cancelled,
    Declined,
    DecodeStarted,
    Embedded,
    Emitted,
    Event,
    Failed,
    Finished,
    HandedOff,
    OpeningLink,
    Paused,
    PrefillStarted,
    PullOrder,
    SequenceOrder,
)
from gateway.topology.reports import WorkerLoad
from gateway.topology.session import Peer
from gateway.topology.watch import AttemptWatch, WorkerWatch
from services.runtime.clock import SYSTEM_CLOCK, Deadline
from services.runtime.errors import DeadlineExceeded, NoFreePages, TandemError, TransferFailed, WorkerUnavailable
from tests.examples import examples

HANDED_OFF = HandedOff(1, 1, 0.0, "none")


class Session:
    """Stands for a worker's session: remembers what it was told."""

    def __init__(self, worker_id="w"):
        self.peer = Peer(worker_id=worker_id, incarnation="0" * 32, address="h:1")
        self.sent, self.cancelled, self.is_open = [], 0, False
        self.load = WorkerLoad()

    def open(self, key, sink):
        self.is_open = True

    def close(self, key):
        self.is_open = False

    def cancel(self, key, heard=None):
        self.is_open = False
        self.cancelled += 1

    def admit(self, order, *, is_local_prefill, is_from_decode=False):
        self.sent.append("admit from decode" if is_from_decode else "admit")

    def prefill(self, order, *, decode, pull=None):
        self.sent.append("prefill")
        self.pull = pull

    def hand_over(self, key, *, next_attempt, decode):
        self.sent.append("hand over")

    def pause(self, key):
        self.sent.append("pause")

    def unpause(self, key):
        self.sent.append("unpause")


class Scene:
    """An attempt that was admitted and whose prompt is being computed."""

    def __init__(self, max_tokens=100, *, giver=None):
        self.decode, self.prefill = Session(), Session()
        self.log = TokenLog(max_tokens)
        self.mailbox = Mailbox(self.log)
        order = SequenceOrder(AttemptKey("r", 1), (1,), (), None, (), Deadline.after(60), None)
        watch = AttemptWatch(WorkerWatch(SYSTEM_CLOCK), "decode-0", token_s=0.01)
        self.attempt = Attempt(
            order, decode=self.decode, mailbox=self.mailbox, tokens=self.log, watch=watch, giver=giver
        )

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
    scene.attempt._at.add(scene.decode)
    scene.attempt.start_prefill([scene.prefill, second])
    asked = []
    scene.attempt.watch.prompt_refused = lambda worker_id, awaits: asked.append(worker_id)
    scene.tell(scene.prefill, Declined(NoFreePages("full")))
    scene.tell(second, tokens(0, 10))
    assert (await scene.attempt.next_arrived()).token_ids == [10]
    assert second.sent == ["prefill"]
    assert asked == ["second"], "the worker that computes it now is watched"
    third = Scene()
    third.attempt.start_prefill([third.prefill])
    third.tell(third.prefill, Declined(NoFreePages("full")))
    with pytest.raises(CrowdedOut):
        await third.attempt.next_arrived()


async def test_each_prefill_worker_is_told_what_it_is_to_fetch_itself():
    scene, second = Scene(), Session("second")
    scene.attempt._at.add(scene.decode)
    pull = PullOrder("holder", "1" * 32, "h:2", 800, 0.5)
    scene.attempt.start_prefill([scene.prefill, second], {"second": pull})
    scene.attempt.watch.prompt_refused = lambda worker_id, awaits: None
    assert (scene.prefill.pull, scene.attempt.facts.pull) == (None, None)
    scene.tell(scene.prefill, Declined(NoFreePages("full")))
    await scene.attempt.next_arrived()
    assert second.pull is scene.attempt.facts.pull is pull


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


EVENTS = {
    OpeningLink: OpeningLink(),
    Admitted: Admitted(),
    Declined: Declined(NoFreePages("full")),
    PrefillStarted: PrefillStarted(0.0, 0),
    HandedOff: HANDED_OFF,
    DecodeStarted: DecodeStarted(),
    Paused: Paused(0),
    Finished: Finished("stop"),
    Failed: Failed(WorkerUnavailable("gone")),
    Cancelled: Cancelled(has_begun=True),
    Embedded: Embedded(b""),
}
ANSWER = list(range(40))
"""Every worker computes the same tokens."""


@st.composite
def stories(draw):
    """What the workers of an attempt say, in any order and without any sense, and what is done to it meanwhile."""
    says = st.tuples(st.sampled_from(("decode", "prefill", "giver", "stranger")), st.sampled_from([*EVENTS.values()]))
    first = st.integers(0, len(ANSWER) - 4)
    emits = st.tuples(
        st.sampled_from(("decode", "prefill", "giver", "stranger")),
        st.builds(lambda index, count: Emitted(index, ANSWER[index : index + count], None), first, st.integers(1, 4)),
    )
    acts = st.tuples(st.just("act"), st.sampled_from(("take", "take", "take", "pause", "unpause", "explain", "close")))
    return draw(st.booleans()), draw(st.lists(st.one_of(says, emits, emits, acts), max_size=40))


@settings(max_examples=examples(400), deadline=None)
@given(stories())
def test_every_event_in_every_stage_has_a_defined_result(story):
    """Whatever comes in whatever order: no error but those of workers, each token once and in order, nothing leaks."""
    is_move, parts = story
    asyncio.run(play(is_move, parts))


async def play(is_move, parts):
    giver = Giver(Session("giver"), AttemptKey("r", 0)) if is_move else None
    scene = Scene(giver=giver)
    older = None
    if giver is None:
        await scene.start()
    else:
        admit = scene.attempt.admit(is_local_prefill=False)
        admit.send(None)
        scene.mailbox.deliver(scene.decode, Admitted())
        with pytest.raises(StopIteration):
            admit.send(None)
        giver.session.is_open = True
        older = Scene().attempt
        scene.attempt.take_over(older)
        assert older.stage is AttemptStage.CLOSED
    attempt = scene.attempt
    sessions = {"decode": scene.decode, "prefill": scene.prefill, "stranger": Session("stranger")}
    sessions["giver"] = giver.session if giver is not None else sessions["stranger"]
    given, seen = [], [attempt.stage]
    for who, what in parts:
        before, reached = attempt.stage, attempt.reached
        if who != "act":
            scene.tell(sessions[who], what)
        elif what == "take":
            try:
                given += attempt.take_arrived().token_ids
            except (CrowdedOut, TandemError):
                assert attempt.stage in TERMINAL
        else:
            {"pause": attempt.pause, "unpause": attempt.unpause, "explain": attempt.explain, "close": attempt.close}[
                what
            ]()
        seen.append(attempt.stage)
        assert given == scene.log.token_ids == ANSWER[: len(given)]
        assert before not in TERMINAL or attempt.stage in TERMINAL
        assert attempt.reached >= min(reached, AttemptStage.DECODING)
        assert attempt.stage is attempt.reached or attempt.stage in TERMINAL
        holds = {worker for worker in (scene.decode, scene.prefill) if attempt.is_at(worker)}
        assert holds == {worker for worker in (scene.decode, scene.prefill) if worker.is_open}
    attempt.close()
    assert attempt.stage in TERMINAL
    assert not any(worker.is_open for worker in (scene.decode, scene.prefill))
    assert giver is None or not giver.session.is_open
    assert scene.decode.cancelled + scene.prefill.cancelled <= 2


def test_the_tables_name_every_event_of_every_worker():
    events = set(typing.get_args(Event))
    assert set(EVENTS) | {Emitted} == events
    assert all(set(table) == events for table in (FROM_DECODE, FROM_PREFILL, FROM_GIVER))
