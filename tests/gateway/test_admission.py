"""The queue of requests that wait for room."""

import asyncio

import pytest

from gateway.admission import MAX_RETRY_S, AdmissionQueue
from services.runtime.errors import Overloaded


async def test_only_the_first_gets_its_turn():
    queue = AdmissionQueue(10)
    order = []

    async def wait(name, done):
        with queue.enter() as place:
            assert await place.wait_for_turn(10)
            order.append(name)
            await done.wait()

    done = asyncio.Event()
    tasks = [asyncio.create_task(wait(name, done)) for name in "abc"]
    await asyncio.sleep(0)
    for _ in range(5):
        queue.poke()
        await asyncio.sleep(0.02)
    assert order == ["a"]
    done.set()
    await asyncio.gather(*tasks)
    assert order == ["a", "b", "c"]
    assert queue.num_waiting == 0


async def test_bound_does_not_hold_for_running_requests():
    queue = AdmissionQueue(1)
    with queue.enter() as ordinary:
        with pytest.raises(Overloaded) as refused:
            queue.enter()
        assert refused.value.retry_after_s
        with queue.enter(is_resumed=True) as resumed:
            assert queue.is_first(resumed)
        assert queue.is_first(ordinary)


async def test_cancelled_wait_gives_up_its_place():
    queue = AdmissionQueue(10)

    async def wait():
        with queue.enter() as place:
            await place.wait_for_turn(60)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0.01)
    with queue.enter() as second:
        task.cancel()
        assert await second.wait_for_turn(5)
        assert queue.num_waiting == 1


async def test_wait_ends_in_time_and_asks_again_without_a_sign():
    queue = AdmissionQueue(10)
    with queue.enter() as first, queue.enter() as second:
        started_s = asyncio.get_running_loop().time()
        assert not await second.wait_for_turn(0.05)
        assert asyncio.get_running_loop().time() - started_s < 1
        assert await first.wait_for_turn(10)
        assert asyncio.get_running_loop().time() - started_s < 2 * MAX_RETRY_S + 1
        assert not await first.wait_for_turn(0)
