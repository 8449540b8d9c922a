import asyncio

import pytest

from services.runtime.clock import Deadline
from services.runtime.errors import DeadlineExceeded, InvariantViolated, TransferFailed
from worker.threads import infallible, on_this_loop, within


async def test_what_takes_longer_than_the_deadline_ends_with_it() -> None:
    with pytest.raises(DeadlineExceeded):
        async with within(Deadline.after(0.01)):
            await asyncio.sleep(5)


async def test_another_timeout_is_not_taken_for_the_deadline() -> None:
    with pytest.raises(TimeoutError):
        async with within(Deadline.after(5)):
            raise TimeoutError
    with pytest.raises(TransferFailed):
        async with within(Deadline.after(5)):
            raise TransferFailed("x")


def test_a_command_that_nobody_waits_for_must_not_fail() -> None:
    def broken() -> None:
        raise KeyError("x")

    with pytest.raises(InvariantViolated):
        infallible(broken)()
    infallible(lambda: None)()


async def test_calls_from_any_thread_arrive_on_the_loop() -> None:
    arrived: list[int] = []
    call = on_this_loop(arrived.append)
    await asyncio.to_thread(call, 1)
    await asyncio.sleep(0)
    assert arrived == [1]
