"""Rows on their way: when one comes again, and which is next."""

import asyncio

import pytest

from gateway.batches.pending import MAX_TIMEOUTS, PendingRow, PendingRows, RowAnswer, later_s
from gateway.batches.rows import Line
from tests.waiting import HANG_LIMIT_S


def test_a_row_that_is_put_off_comes_again_after_its_time():
    never = {"retry-after": "60", "x-should-retry": "false"}
    tries = iter([(429, {"retry-after": "7"}), (503, {}), (0, {}), (504, {}), (504, {}), (400, {}), (429, never)])
    row = PendingRow(0, 0, 0)
    later = [later_s(RowAnswer(*each, b""), row) for each in tries]
    assert later == [7.0, 1.0, 1.0, 60.0, 120.0, None, None]
    row.num_timeouts = MAX_TIMEOUTS - 1
    assert later_s(RowAnswer(504, {}, b""), row) is None


@pytest.fixture
def pending():
    """Two rows."""

    async def rows():
        for number in range(2):
            yield number, Line(number + 1, 3 * number, b"%d\n" % number)

    async def read(row):
        return b"read again at %d" % row.start

    return PendingRows(rows(), 2, read)


async def test_the_row_whose_time_comes_first_is_next_whenever_it_was_put_off(pending):
    (first, line), (second, _) = await pending.take(), await pending.take()
    assert line == b"0\n"
    pending.put_off(first, 3600.0)
    waiting = asyncio.create_task(pending.is_due())
    await asyncio.sleep(0)
    pending.put_off(second, 0.01)
    async with asyncio.timeout(HANG_LIMIT_S):
        assert await waiting
    assert await pending.take() == (second, b"read again at 3")
    waiting = asyncio.create_task(pending.is_due())
    await asyncio.sleep(0)
    pending.close()
    async with asyncio.timeout(HANG_LIMIT_S):
        assert not await waiting
