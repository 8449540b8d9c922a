"""What passes between a worker's event loop and its engine thread, and how long the event loop waits."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from services.runtime.clock import Deadline
from services.runtime.errors import DeadlineExceeded, InvariantViolated

R = TypeVar("R")


@contextlib.asynccontextmanager
async def within(deadline: Deadline) -> AsyncIterator[None]:
    """Ends what is inside when the deadline passes. Raises DeadlineExceeded."""
    limit = asyncio.timeout(deadline.remaining_s())
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceeded("the request's deadline passed") from None


def infallible(command: Callable[[], R]) -> Callable[[], R]:
    """A command for the engine thread that cannot fail: if it does, the books are wrong and the engine stops."""

    def run() -> R:
        try:
            return command()
        except InvariantViolated:
            raise
        except Exception as error:
            raise InvariantViolated(f"a command of the engine failed: {type(error).__name__}") from error

    return run


def on_this_loop(receive: Callable[[R], None]) -> Callable[[R], None]:
    """A function that any thread may call and that calls `receive` on the event loop that runs now."""
    loop = asyncio.get_running_loop()

    def call(what: R) -> None:
        # A closed loop means that the process is ending and nobody is left to tell.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(receive, what)

    return call
