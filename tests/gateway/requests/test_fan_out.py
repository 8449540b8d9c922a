"""Several answers at once: order, failures, and a reader that leaves."""

import asyncio
import contextlib

import pytest

from gateway.requests.fan_out import MAX_WAITING_PARTS, all_of, merged
from tests.waiting import HANG_LIMIT_S


class Streams:
    """Streams of numbers that count how many are open."""

    def __init__(self):
        self.num_open = 0

    async def of(self, parts, *, failure=None):
        self.num_open += 1
        try:
            for part in parts:
                await asyncio.sleep(0)
                yield part
            if failure is not None:
                raise failure
        finally:
            self.num_open -= 1


@pytest.mark.parametrize("num_streams", [1, 3])
async def test_all_parts_come_in_the_order_of_their_stream(num_streams):
    streams = Streams()
    seen = {index: [] for index in range(num_streams)}
    async with contextlib.aclosing(merged([streams.of(range(20)) for _ in range(num_streams)])) as parts:
        async for index, part in parts:
            seen[index].append(part)
    assert seen == {index: list(range(20)) for index in range(num_streams)}
    assert streams.num_open == 0


async def test_first_failure_ends_all():
    streams = Streams()

    async def read_all():
        both = [streams.of(range(10**6)), streams.of([1], failure=ValueError("broken"))]
        async with contextlib.aclosing(merged(both)) as parts:
            async for _ in parts:
                pass

    with pytest.raises(ValueError, match="broken"):
        await read_all()
    assert streams.num_open == 0


@pytest.mark.parametrize("num_streams", [1, 2, 5])
async def test_a_reader_that_leaves_with_parts_waiting_ends_all_at_once(num_streams):
    streams = Streams()
    async with asyncio.timeout(HANG_LIMIT_S):
        async with contextlib.aclosing(merged([streams.of(range(10**6)) for _ in range(num_streams)])) as parts:
            await anext(parts)
            # Now the queue is full, and every stream waits for room in it.
            for _ in range(10 * MAX_WAITING_PARTS):
                await asyncio.sleep(0)
    assert streams.num_open == 0
    assert len(asyncio.all_tasks()) == 1


async def test_results_come_in_order_and_the_first_failure_cancels_the_rest():
    async def give(value):
        await asyncio.sleep(0.001 * (3 - value))
        return value

    assert await all_of([give(value) for value in range(3)]) == [0, 1, 2]

    async def fail():
        raise ValueError("broken")

    async with asyncio.timeout(HANG_LIMIT_S):
        with pytest.raises(ValueError, match="broken"):
            await all_of([asyncio.sleep(3600), fail()])
    assert len(asyncio.all_tasks()) == 1
