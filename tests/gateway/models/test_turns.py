"""Turns of tenants on a few threads."""

import asyncio
import threading
import time

import pytest

from gateway.models.turns import Turns
from tests.waiting import HANG_LIMIT_S, until

LIMIT_S = HANG_LIMIT_S


def steps(name, order, num_steps, *, may_begin=None):
    if may_begin is not None:
        assert may_begin.wait(LIMIT_S)
    for _ in range(num_steps):
        order.append(name)
        yield
    return name


async def test_tenants_take_turns_whatever_they_have_waiting():
    turns, order, may_begin = Turns(1), [], threading.Event()
    many = [asyncio.create_task(turns.run(steps("a", order, 20, may_begin=may_begin), tenant="a")) for _ in range(8)]
    await until(lambda: turns.num_waiting == 7)
    one = asyncio.create_task(turns.run(steps("b", order, 3), tenant="b"))
    await until(lambda: turns.num_waiting == 8)
    may_begin.set()
    assert await asyncio.wait_for(one, LIMIT_S) == "b"
    assert order.index("b") <= 2
    assert len(order) - 3 <= 8
    assert await asyncio.wait_for(asyncio.gather(*many), LIMIT_S) == ["a"] * 8


async def test_a_tenants_own_short_work_does_not_wait_for_its_long_one():
    turns, order = Turns(1), []
    long = asyncio.create_task(turns.run(steps("long", order, 10_000)))
    await until(lambda: bool(order))
    assert await asyncio.wait_for(turns.call(lambda: "short"), LIMIT_S) == "short"
    assert not long.done()
    long.cancel()


async def test_long_work_never_has_all_threads():
    turns, order, running, most = Turns(2), [], 0, 0

    def long(name):
        nonlocal running, most
        yield
        for _ in range(20):
            running += 1
            most = max(most, running)
            order.append(name)
            time.sleep(0.001)
            running -= 1
            yield
        return name

    async with asyncio.timeout(LIMIT_S):
        assert await asyncio.gather(*(turns.run(long(name)) for name in "abc")) == ["a", "b", "c"]
    assert most == 1
    assert len(set(order[:6])) == 3


async def test_what_a_step_raises_comes_back():
    turns = Turns()

    def broken():
        yield
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await turns.run(broken())
    assert await turns.call(lambda: 5) == 5


async def test_no_step_is_begun_for_a_caller_that_has_gone():
    turns, order, may_begin = Turns(1), [], threading.Event()
    first = asyncio.create_task(turns.run(steps("first", order, 1, may_begin=may_begin)))
    gone = asyncio.create_task(turns.run(steps("gone", order, 1)))
    await until(lambda: turns.num_waiting == 1)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    may_begin.set()
    assert await asyncio.wait_for(first, LIMIT_S) == "first"
    assert await asyncio.wait_for(turns.call(lambda: order), LIMIT_S) == ["first"]


async def test_asyncios_own_threads_stay_free():
    turns, may_end = Turns(), threading.Event()
    busy = [asyncio.create_task(turns.call(lambda: may_end.wait(LIMIT_S))) for _ in range(50)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), LIMIT_S) == "free"
    may_end.set()
    assert all(await asyncio.gather(*busy))
