"""Events on their way to the task that waits for them."""

import asyncio

import pytest

from gateway.requests.mailbox import Mailbox
from gateway.requests.tokens import TokenLog
from gateway.topology.events import DecodeStarted
from services.runtime.errors import DeadlineExceeded


async def started(waiting):
    """A task that has run until its first wait."""
    task = asyncio.ensure_future(waiting)
    await asyncio.sleep(0)
    return task


async def test_a_wait_ends_with_the_first_event_and_keeps_it():
    mailbox = Mailbox(TokenLog(10))
    task = await started(mailbox.wait())
    mailbox.deliver(None, DecodeStarted())
    await task
    assert [event for _, event in mailbox.events] == [DecodeStarted()]
    await mailbox.wait()


async def test_events_are_taken_where_they_come_until_the_taker_declines():
    mailbox, taken = Mailbox(TokenLog(10)), []

    def take():
        taken.append(len(mailbox.events))
        mailbox.events.clear()
        return len(taken) < 3

    task = await started(mailbox.wait(take))
    for _ in range(3):
        mailbox.deliver(None, DecodeStarted())
    assert taken == [1, 1, 1]
    mailbox.deliver(None, DecodeStarted())  # the task has been woken, so this waits for it
    await task
    assert (taken, len(mailbox.events)) == ([1, 1, 1], 1)


async def test_a_failure_ends_this_wait_and_every_later_one():
    mailbox = Mailbox(TokenLog(10))
    task = await started(mailbox.wait())
    mailbox.fail(DeadlineExceeded("late"))
    for waiting in (task, mailbox.wait(), mailbox.rest(60)):
        with pytest.raises(DeadlineExceeded):
            await waiting


async def test_a_rest_ignores_events_and_ends_at_a_nudge_that_fulfils_it():
    mailbox, is_done = Mailbox(TokenLog(10)), False
    task = await started(mailbox.rest(60, until=lambda: is_done))
    mailbox.nudge()
    await asyncio.sleep(0)
    assert not task.done()
    is_done = True
    mailbox.nudge()
    await task


async def test_nobody_is_woken_for_a_wait_that_was_cancelled():
    mailbox = Mailbox(TokenLog(10))
    task = await started(mailbox.wait(lambda: pytest.fail("nobody waits")))
    task.cancel()
    mailbox.deliver(None, DecodeStarted())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(mailbox.events) == 1
