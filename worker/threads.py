"""Communication between a worker's event loop and its engine thread, and deadlines on the event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from services.runtime.clock import Deadline
from services.runtime.errors import DeadlineExceeded, InvariantViolated

R = TypeVar("R")


@contextlib.asynccontextmanager
async def within(deadline: Deadline) -> AsyncIterator[None]:
    """Cancels the enclosed block when the deadline passes. Raises DeadlineExceeded."""
    limit = asyncio.timeout(deadline.remaining_s())
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceeded("the request's deadline passed") from None


def infallible(command: Callable[[], R]) -> Callable[[], R]:
    """Wraps an engine command that must not fail. A failure means inconsistent state, so the engine stops."""

    def run() -> R:
        try:
            return command()
        except InvariantViolated:
            raise
        except Exception as error:
            raise InvariantViolated(f"a command of the engine failed: {type(error).__name__}") from error

    return run


def on_this_loop(receive: Callable[[R], None]) -> Callable[[R], None]:
    """Returns a function that calls `receive` on the current event loop. It may be called from any thread."""
    loop = asyncio.get_running_loop()

    def call(what: R) -> None:
        # If the loop is closed, the process is exiting and no receiver is left.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(receive, what)

    return call
