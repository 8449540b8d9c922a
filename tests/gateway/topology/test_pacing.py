"""Tokens that go out together while there is no time for each: when, for how long, and that nothing else changes."""

import asyncio
import time
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.limits import ModelLimits, complete_sampling
from gateway.topology.events import AttemptKey, Emitted, Failed, Finished, SequenceOrder
from gateway.topology.pacing import BUSY_SHARE, LATE_S, MAX_HOLD_S, MEMORY_S, Lateness, Pace, thread_busy_s
from gateway.topology.session import DecodeSession, Peer
from gateway.types import AskedSampling
from protos import inference_pb2, worker_pb2
from services.runtime.clock import SYSTEM_CLOCK, Deadline
from services.runtime.errors import WorkerLost, WorkerUnavailable
from tests.waiting import HANG_LIMIT_S

PEER = Peer(worker_id="decode-0", incarnation="now", address="127.0.0.1:1")
LIMITS = ModelLimits(vocab_size=10_000, context_length_tokens=10_000)


def test_waits_are_a_part_of_what_messages_are_late_by():
    pace = Pace()
    waits = []
    for late_s in (0.0, LATE_S, 0.06, 0.3, 0.5, 60.0, 0.1, 0.01):
        pace.note_late(late_s / 2)
        pace.note_late(late_s)
        pace.note_late(late_s / 3)
        pace.adjust(1.0)
        waits.append(pace.hold_s)
    assert waits == pytest.approx([0, 0, 0.012, 0.06, 0.1, MAX_HOLD_S, 0.02, 0])


def test_a_loop_with_time_to_spare_makes_nobody_wait():
    pace = Pace()
    pace.note_late(1.0)
    pace.adjust(BUSY_SHARE - 0.01)
    assert pace.hold_s == 0


def test_a_loop_too_busy_to_read_a_message_at_all_knows_nothing_new():
    pace = Pace()
    pace.note_late(0.3)
    pace.adjust(1.0)
    pace.adjust(1.0)
    assert pace.hold_s == pytest.approx(0.06)


def test_messages_are_late_beside_the_soonest_one_whatever_the_clocks_show():
    lateness = Lateness()
    assert [lateness.of(ahead_s, 100.0) for ahead_s in (-5.3, -5.0, -5.1, -6.0)] == pytest.approx([0, 0, 0.1, 1.0])
    # The worker's clock is set back by an hour, for which no message was late for long.
    assert lateness.of(-3605.0, 105.0) == pytest.approx(3600)
    assert lateness.of(-3605.0, 105.0 + MEMORY_S) == pytest.approx(3600)
    assert lateness.of(-3605.0, 105.1 + 2 * MEMORY_S) == 0


async def test_a_worker_s_messages_say_how_late_they_are():
    scene = Scene(1, hold_s=0.0)
    for late_s in (0, 0.5, 0.25):
        unix_ms = (SYSTEM_CLOCK.unix_ns() - int(late_s * 1e9)) // 1_000_000
        scene.session._take(
            worker_pb2.StepEvents(worker_incarnation=PEER.incarnation, load=worker_pb2.WorkerLoad(unix_ms=unix_ms))
        )
    scene.pace.adjust(1.0)
    assert 0.09 <= scene.pace.hold_s <= MAX_HOLD_S


async def test_the_pace_follows_the_loop_it_runs_on():
    pace = Pace()
    keeping = asyncio.create_task(pace.keep())
    deadline_s = time.monotonic() + HANG_LIMIT_S
    while not pace.hold_s and time.monotonic() < deadline_s:
        until_s = time.monotonic() + 0.01
        while time.monotonic() < until_s:
            pass
        pace.note_late(0.5)
        await asyncio.sleep(0)
    assert pace.hold_s
    assert pace.busy_share > BUSY_SHARE
    while pace.hold_s and time.monotonic() < deadline_s:
        pace.note_late(0.5)
        await asyncio.sleep(0.05)
    assert not pace.hold_s
    keeping.cancel()


def test_without_a_kernel_that_tells_the_thread_s_own_time_counts(monkeypatch, tmp_path):
    monkeypatch.setattr("gateway.topology.pacing._SCHEDSTAT", tmp_path / "absent")
    before_s = thread_busy_s()
    until_s = time.monotonic() + 0.05
    while time.monotonic() < until_s:
        pass
    assert 0 < thread_busy_s() - before_s < 1


class Told:
    """A route that writes down what it gets."""

    def __init__(self):
        self.events = []

    def deliver(self, session, event):
        self.events.append(event)

    @property
    def merged(self):
        """The events, with tokens that follow each other joined."""
        merged = []
        for event in self.events:
            last = merged[-1] if merged else None
            if isinstance(event, Emitted) and isinstance(last, Emitted):
                assert event.first_index == last.first_index + len(last.token_ids)
                merged[-1] = Emitted(last.first_index, last.token_ids + event.token_ids, None)
            else:
                merged.append(event)
        return merged


class Scene:
    """A decode session with some answers, and a worker that says what a test has it say."""

    def __init__(self, num_answers, *, hold_s):
        self.pace = Pace()
        self.pace.hold_s = hold_s
        self.session = DecodeSession(PEER, gateway_incarnation="g", on_change=lambda session: None, pace=self.pace)
        self.session.is_up = True
        self.routes = [Told() for _ in range(num_answers)]
        self.orders = [order(str(number)) for number in range(num_answers)]
        self.handles = []
        for one, route in zip(self.orders, self.routes, strict=True):
            self.session.open(one.key, route)
            self.session.admit(one, is_local_prefill=True)
        commands = deque(self.session._outgoing)
        self.handles = [command.admit.handle for command in commands]
        self.next_index = [0] * num_answers

    def say(self, *events):
        message = worker_pb2.StepEvents(worker_incarnation=PEER.incarnation)
        for event in events:
            message.events.append(event)
        self.session._take(message)

    def step(self, answers):
        """Takes a step with one more token of each answer."""
        step = worker_pb2.StepTokens()
        for number in answers:
            step.handles.append(self.handles[number])
            step.indexes.append(self.next_index[number])
            step.token_ids.append(1000 * number + self.next_index[number])
            self.next_index[number] += 1
        return worker_pb2.WorkerEvent(step_tokens=step)

    def end(self, number):
        """The last two tokens of an answer and its end, as workers send it."""
        key, first = self.orders[number].key, self.next_index[number]
        attempt = worker_pb2.AttemptId(request_id=key.request_id, attempt=key.attempt)
        token_ids = [1000 * number + first, 1000 * number + first + 1]
        self.next_index[number] += 2
        return [
            worker_pb2.WorkerEvent(id=attempt, tokens=worker_pb2.Tokens(first_index=first, token_ids=token_ids)),
            worker_pb2.WorkerEvent(id=attempt, finished=worker_pb2.Finished(reason=inference_pb2.FINISH_REASON_LENGTH)),
        ]


def order(request_id):
    return SequenceOrder(
        key=AttemptKey(request_id, 1),
        prompt_token_ids=[5],
        emitted_token_ids=[],
        sampling=complete_sampling(AskedSampling(max_tokens=100), LIMITS, num_prompt_tokens=1, seed=0),
        eos_token_ids=[],
        deadline=Deadline.after(60),
        trace=None,
    )


async def test_with_time_each_token_goes_on_at_once():
    scene = Scene(1, hold_s=0.0)
    scene.say(scene.step([0]))
    scene.say(scene.step([0]))
    assert scene.routes[0].events == [Emitted(0, [0], None), Emitted(1, [1], None)]


async def test_without_time_those_of_an_answer_go_on_together_after_the_wait():
    scene = Scene(2, hold_s=0.05)
    scene.say(scene.step([0, 1]))
    scene.pace.hold_s = 0.0  # What has begun to wait is not overtaken by what comes now.
    scene.say(scene.step([0]), scene.step([0, 1]))
    assert not scene.routes[0].events
    async with asyncio.timeout(HANG_LIMIT_S):
        while not scene.routes[1].events:  # noqa: ASYNC110 - the session has a timer, and nobody to tell of it
            await asyncio.sleep(0.01)
    assert scene.routes[0].events == [Emitted(0, [0, 1, 2], None)]
    assert scene.routes[1].events == [Emitted(0, [1000, 1001], None)]
    scene.say(scene.step([0]))
    assert scene.routes[0].events[1:] == [Emitted(3, [3], None)]


async def test_what_is_held_comes_before_the_end_and_before_the_news_of_a_death():
    scene = Scene(2, hold_s=60)
    scene.say(scene.step([0, 1]))
    scene.say(*scene.end(0))
    assert scene.routes[0].events == [Emitted(0, [0], None), Emitted(1, [1, 2], None), Finished("length")]
    assert not scene.routes[1].events
    scene.session._break(WorkerUnavailable("gone"))
    tokens, failed = scene.routes[1].events
    assert tokens == Emitted(0, [1000], None)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, WorkerLost)


async def test_what_is_held_for_an_attempt_that_is_left_is_dropped():
    scene = Scene(2, hold_s=60)
    scene.say(scene.step([0, 1]))
    scene.session.close(scene.orders[0].key)
    scene.say(scene.step([0, 1]))
    assert scene.session.num_dropped_events == 1
    scene.session._release_all()
    assert not scene.routes[0].events
    assert scene.routes[1].events == [Emitted(0, [1000, 1001], None)]


async def test_tokens_that_do_not_follow_each_other_are_not_put_together():
    scene = Scene(1, hold_s=60)
    scene.say(scene.step([0]))
    scene.next_index[0] = 5
    scene.say(scene.step([0]))
    assert scene.routes[0].events == [Emitted(0, [0], None)]
    scene.session._release_all()
    assert scene.routes[0].events[1:] == [Emitted(5, [5], None)]


@pytest.mark.parametrize("num_answers", [3])
@settings(deadline=None)
@given(data=st.data())
def test_every_answer_is_told_the_same_as_without_waiting(num_answers, data):
    """The events and their order are the same, whatever comes together, whenever waits begin and end."""
    actions = data.draw(
        st.lists(
            st.one_of(
                st.lists(st.integers(0, num_answers - 1), min_size=1, unique=True),
                st.tuples(st.just("end"), st.integers(0, num_answers - 1)),
                st.tuples(st.just("hold"), st.sampled_from([0.0, 60.0])),
                st.just("release"),
            ),
            max_size=40,
        )
    )

    async def play(*, waits):
        scene = Scene(num_answers, hold_s=0.0)
        ended = set()
        for action in actions:
            match action:
                case ("hold", float(hold_s)):
                    scene.pace.hold_s = hold_s if waits else 0.0
                case ("end", int(number)):
                    if number not in ended:
                        ended.add(number)
                        scene.say(*scene.end(number))
                case "release":
                    scene.session._release_all()
                case answers:
                    scene.say(scene.step([number for number in answers if number not in ended]))
        scene.session._break(WorkerUnavailable("gone"))
        return [
            [type(event) if isinstance(event, Failed) else event for event in route.merged] for route in scene.routes
        ]

    assert asyncio.run(play(waits=True)) == asyncio.run(play(waits=False))


async def test_a_stream_has_fewer_events_and_the_same_text(make_system, pair_type, tokenizer, read_sse):
    text = "hello world, naïve café 🙂 日本語 end " * 8
    answer = tokenizer.encode(text, add_special_tokens=False).ids
    system = await make_system()
    await system.add_pair(pair_type([*answer, 1]))

    async def stream():
        response = await system.complete(max_tokens=len(answer) + 1, temperature=0, stream=True, return_token_ids=True)
        *chunks, done = read_sse(response.text)
        assert done == "[DONE]"
        choices = [chunk["choices"][0] for chunk in chunks]
        assert "".join(choice["text"] for choice in choices) == text
        assert [token for choice in choices for token in choice.get("token_ids", [])] == [*answer, 1]
        return len(chunks)

    num_events = await stream()
    pace = system.gateway.topology.pace
    pace.adjust = lambda busy_share: None
    pace.hold_s = 0.05
    assert await stream() < num_events / 2
    assert b"tandem_token_hold_seconds 0.05" in (await system.http.get("/metrics")).content
