"""The queue of requests that wait for room."""

import asyncio
import math

import pytest

from gateway.admission import MAX_SILENCE_S, AdmissionQueue
from services.runtime.clock import SYSTEM_CLOCK
from services.runtime.errors import DeadlineExceeded, Overloaded, WorkerUnavailable
from services.scheduling.queue import QueueEntry, RequestQueue, ServiceClass
from tests.stopwatch import Stopwatch


class Room:
    """So many places; whoever is let go takes one."""

    def __init__(self, num_places=0):
        self.num_places = num_places

    def take(self):
        if not self.num_places:
            return False
        self.num_places -= 1
        return True


def refused(item):
    return Overloaded(f"no room for {item.key}", retry_after_s=2.0)


def make_queue(max_waiting=10, **settings):
    return AdmissionQueue(RequestQueue(max_waiting=max_waiting, **settings), refusal=refused)


def entry(key, service_class=ServiceClass.NORMAL, *, arrived_s=0.0, deadline_s=math.inf, service_s=0.0):
    return QueueEntry(key, service_class, "", 10, arrived_s, deadline_s, service_s)


async def wait(queue, room, item, order, *, is_resumed=False, timeout_s=10.0):
    with queue.enter(item, room.take, is_resumed=is_resumed) as place:
        if await place.wait_for_turn(timeout_s):
            order.append(item.key)


async def started(*coroutines):
    """Tasks, in order, each of which has run until its first wait."""
    tasks = []
    for coroutine in coroutines:
        tasks.append(asyncio.create_task(coroutine))
        await asyncio.sleep(0)
    return tasks


async def test_all_go_in_order_as_room_comes():
    queue, room, order = make_queue(), Room(), []
    tasks = await started(*(wait(queue, room, entry(key, arrived_s=n), order) for n, key in enumerate("abcde")))
    assert len(queue) == 5
    room.num_places = 2
    queue.poke()
    await asyncio.gather(*tasks[:2])
    assert order == ["a", "b"]
    assert len(queue) == 3
    room.num_places = 3
    queue.poke()
    await asyncio.gather(*tasks)
    assert order == list("abcde")


async def test_many_go_in_one_look():
    queue, room, order = make_queue(1000), Room(), []
    tasks = await started(*(wait(queue, room, entry(n, arrived_s=n), order) for n in range(500)))
    room.num_places = 500
    watch = Stopwatch()
    queue.poke()
    await asyncio.gather(*tasks)
    assert watch.elapsed_s() < 500 * 0.01
    assert order == list(range(500))


async def test_urgent_requests_go_before_those_that_came_first():
    queue, room, order = make_queue(), Room(), []
    kinds = [ServiceClass.BATCH, ServiceClass.LOW, ServiceClass.CRITICAL, ServiceClass.INTERACTIVE]
    tasks = await started(*(wait(queue, room, entry(kind, kind, arrived_s=n), order) for n, kind in enumerate(kinds)))
    assert queue.is_behind_others(entry("new", ServiceClass.INTERACTIVE))
    room.num_places = 4
    queue.poke()
    await asyncio.gather(*tasks)
    assert order == sorted(kinds)


async def test_only_its_own_class_and_higher_ones_are_before_it():
    queue, room, order = make_queue(), Room(), []
    (task,) = await started(wait(queue, room, entry("b", ServiceClass.BATCH), order))
    assert not queue.is_behind_others(entry("i", ServiceClass.INTERACTIVE))
    assert queue.is_behind_others(entry("c", ServiceClass.BATCH))
    room.num_places = 1
    queue.poke()
    await task


async def test_a_full_queue_refuses_or_pushes_out_a_lower_class():
    queue, room, order = make_queue(1), Room(), []
    (batch,) = await started(wait(queue, room, entry("b", ServiceClass.BATCH), order))
    with pytest.raises(Overloaded) as error:
        queue.enter(entry("c", ServiceClass.BATCH), room.take)
    assert error.value.retry_after_s == 2.0
    (urgent,) = await started(wait(queue, room, entry("i", ServiceClass.INTERACTIVE), order))
    with pytest.raises(Overloaded, match="no room for b"):
        await batch
    (resumed,) = await started(wait(queue, room, entry("r"), order, is_resumed=True))
    assert len(queue) == 2
    room.num_places = 2
    queue.poke()
    await asyncio.gather(urgent, resumed)
    assert order == ["r", "i"]


async def test_cancelled_wait_gives_up_its_place():
    queue, room, order = make_queue(), Room(), []
    first, second = await started(*(wait(queue, room, entry(key), order) for key in "ab"))
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert len(queue) == 1
    room.num_places = 1
    queue.poke()
    await second
    assert order == ["b"]


async def test_one_that_is_cancelled_as_it_may_go_takes_nothing_from_the_next():
    queue, room, order = make_queue(), Room(1), []
    first, second = await started(*(wait(queue, room, entry(key), order) for key in "ab"))
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await second
    assert order == ["b"]


async def test_wait_ends_in_time_and_looks_again_without_a_sign():
    queue, room, order = make_queue(), Room(), []
    watch = Stopwatch()
    await wait(queue, room, entry("late"), order, timeout_s=0.05)
    assert watch.elapsed_s() < 1
    assert order == []
    assert len(queue) == 0
    (task,) = await started(wait(queue, room, entry("a"), order))
    await asyncio.sleep(0.01)  # the first look, which finds nothing
    room.num_places = 1  # and nobody says so
    watch = Stopwatch()
    await task
    assert watch.elapsed_s() < MAX_SILENCE_S + 1
    assert order == ["a"]


async def test_whoever_no_worker_took_waits_again_before_the_others():
    queue, room, order = make_queue(), Room(1), []

    async def refused_once():
        with queue.enter(entry("a", arrived_s=1.0), room.take) as place:
            assert await place.wait_for_turn(10)
            place.come_back()
            assert len(queue) == 2
            room.num_places = 2
            assert await place.wait_for_turn(10)
            order.append("a")

    tasks = await started(refused_once(), wait(queue, room, entry("b", arrived_s=2.0), order))
    await asyncio.gather(*tasks)
    assert order == ["a", "b"]


async def test_a_deadline_that_cannot_be_met_ends_the_wait():
    queue, room, order = make_queue(), Room(), []
    now_s = SYSTEM_CLOCK.monotonic()
    hopeless = entry("a", deadline_s=now_s + 60, service_s=61)
    with pytest.raises(DeadlineExceeded):
        await wait(queue, room, hopeless, order)
    assert len(queue) == 0


async def test_a_closed_queue_ends_every_wait():
    queue, room, order = make_queue(), Room(), []
    tasks = await started(*(wait(queue, room, entry(key), order) for key in "ab"))
    queue.close(WorkerUnavailable("over"))
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, WorkerUnavailable)
    with pytest.raises(WorkerUnavailable):
        await wait(queue, room, entry("c"), order)


async def test_nobody_overtakes_one_that_was_refused_while_it_asks_again():
    queue, room, order = make_queue(), Room(5), []
    asking, answer = asyncio.Event(), asyncio.Event()

    async def asks_again():
        with queue.enter(entry("a", arrived_s=1.0), room.take, was_refused=True) as place:
            assert await place.wait_for_turn(10)
            assert len(queue) == 2
            asking.set()
            await answer.wait()
            order.append("a")

    tasks = await started(asks_again(), wait(queue, room, entry("b", arrived_s=2.0), order))
    await asking.wait()
    queue.poke()
    await asyncio.sleep(0.02)
    assert order == []
    answer.set()
    await asyncio.gather(*tasks)
    assert order == ["a", "b"]


async def test_one_that_is_pushed_out_while_it_asks_is_told_when_it_comes_back():
    queue, room, order = make_queue(1), Room(5), []
    with queue.enter(entry("b", ServiceClass.BATCH), room.take, was_refused=True) as place:
        assert await place.wait_for_turn(10)
        (urgent,) = await started(wait(queue, room, entry("i", ServiceClass.INTERACTIVE), order))
        place.come_back()
        with pytest.raises(Overloaded, match="no room for b"):
            await place.wait_for_turn(10)
    await urgent
    assert order == ["i"]
