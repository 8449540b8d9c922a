"""Deltas that go their short way, and what must not: the end, failures, moves, and what a slow client cannot take."""

import asyncio
from types import SimpleNamespace

import pytest

from gateway.requests.delivery import Delivery, FastPath
from gateway.requests.mailbox import Mailbox
from gateway.requests.tokens import TokenLog
from gateway.types import Delta
from services.runtime.errors import DeadlineExceeded, WorkerUnavailable


class Scene:
    """One answer whose worker sends texts; "." ends it, an error ends its attempt."""

    def __init__(self):
        self.mailbox, self.fast_path, self.observed = Mailbox(TokenLog(10)), FastPath(), []
        self.attempt = SimpleNamespace(is_over=False, is_moving=False, take_arrived=self.take_arrived)
        request = SimpleNamespace(mailbox=self.mailbox, take=self.take)
        self.delivery = Delivery(
            request, self.fast_path, lambda request, attempt, delta, _: self.observed.append(delta.text), None
        )
        self.error = None

    def take_arrived(self):
        texts = []
        while self.mailbox.events:
            event = self.mailbox.events.popleft()[1]
            if isinstance(event, Exception):
                self.error, self.attempt.is_over = event, True
            else:
                texts.append(event)
        if self.error is not None and not texts:
            raise self.error
        return "".join(texts)

    def take(self, attempt, text):
        return Delta(0, [], text, finish_reason="stop" if text.endswith(".") else None)

    def tell(self, *events):
        for event in events:
            self.mailbox.deliver(None, event)

    async def waiting(self):
        """The task that runs the answer, which waits for the next delta."""
        task = asyncio.ensure_future(self.delivery.next(self.attempt))
        await asyncio.sleep(0)
        return task


async def test_a_delta_is_taken_where_its_event_comes():
    scene, taken = Scene(), []
    scene.fast_path.take = lambda delta: taken.append(delta.text) or True
    task = await scene.waiting()
    scene.tell("a", "b")
    assert taken == ["a", "b"] == scene.observed
    await asyncio.sleep(0)
    assert not task.done()
    scene.tell(".")
    assert (await task).text == "."
    assert taken == ["a", "b"]


async def test_without_a_fast_path_the_task_gets_all():
    scene = Scene()
    task = await scene.waiting()
    scene.tell("a", "b")
    assert (await task).text == "ab"


async def test_nothing_is_overtaken_by_what_comes_after_a_refusal():
    scene, taken = Scene(), []
    is_slow = False

    def take(delta):
        if is_slow:
            return False
        taken.append(delta.text)
        return True

    scene.fast_path.take = take
    task = await scene.waiting()
    scene.tell("a")
    is_slow = True
    scene.tell("b")
    is_slow = False
    # The task has been woken and has not run yet.
    scene.tell("c")
    assert taken == ["a"]
    assert (await task).text == "b"
    assert (await scene.delivery.next(scene.attempt)).text == "c"
    task = await scene.waiting()
    scene.tell("d")
    assert taken == ["a", "d"]
    assert scene.observed == ["a", "b", "c", "d"]
    task.cancel()


async def test_who_reads_is_not_overtaken_while_busy():
    scene, taken = Scene(), []
    scene.fast_path.take = lambda delta: taken.append(delta.text) or True
    scene.tell("a")
    assert (await scene.delivery.next(scene.attempt)).text == "a"
    scene.tell("b")
    assert not taken
    assert (await scene.delivery.next(scene.attempt)).text == "b"


async def test_the_task_hears_of_a_failure_after_the_tokens_before_it():
    scene = Scene()
    scene.fast_path.take = lambda delta: True
    task = await scene.waiting()
    scene.tell(WorkerUnavailable("gone"))
    with pytest.raises(WorkerUnavailable):
        await task
    other = Scene()
    other.fast_path.take = lambda delta: True
    other.tell("a", WorkerUnavailable("gone"))
    assert (await other.delivery.next(other.attempt)).text == "a"
    with pytest.raises(WorkerUnavailable):
        await other.delivery.next(other.attempt)


async def test_an_answer_that_moves_goes_through_the_task():
    scene, taken = Scene(), []
    scene.fast_path.take = lambda delta: taken.append(delta.text) or True
    scene.attempt.is_moving = True
    task = await scene.waiting()
    scene.tell("a")
    assert (await task).text == "a"
    assert not taken


async def test_a_fault_of_the_fast_path_is_the_answers_and_not_the_sessions():
    scene = Scene()

    def fail(delta):
        raise ZeroDivisionError

    scene.fast_path.take = fail
    task = await scene.waiting()
    scene.tell("a")
    with pytest.raises(ZeroDivisionError):
        await task


async def test_an_end_that_was_there_before_the_deadline_counts():
    scene = Scene()
    scene.fast_path.take = lambda delta: True
    task = await scene.waiting()
    scene.tell("a.")
    scene.mailbox.fail(DeadlineExceeded("late"))
    assert (await task).text == "a."
    with pytest.raises(DeadlineExceeded):
        await scene.delivery.next(scene.attempt)


async def test_nothing_is_taken_for_a_task_that_was_cancelled():
    scene, taken = Scene(), []
    scene.fast_path.take = lambda delta: taken.append(delta.text) or True
    task = await scene.waiting()
    task.cancel()
    scene.tell("a")
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not taken
