"""The events of one answer on their way from the sessions of its workers to the task that runs it."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from gateway.requests.tokens import TokenLog
from gateway.topology.events import Event
from gateway.topology.session import WorkerSession
from services.runtime.errors import TandemError


class Mailbox:
    """Events of one answer on their way from the sessions to the task that runs it; `tokens` are those that it has."""

    def __init__(self, tokens: TokenLog) -> None:
        self.num_left = tokens.num_left
        self.events: deque[tuple[WorkerSession, Event]] = deque()
        """The events that wait, to be taken from the left."""
        self._error: TandemError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._take_now: Callable[[], bool] | None = None

    def deliver(self, session: WorkerSession, event: Event) -> None:
        """Takes an event; a session calls this."""
        self.events.append((session, event))
        # A waiter that was cancelled is done.
        take_now = None if self._waiter is None or self._waiter.done() else self._take_now
        if take_now is None or not take_now():
            self._wake()

    def fail(self, error: TandemError) -> None:
        """Makes every wait from now on raise `error`, such as when the deadline has passed."""
        self._error = error
        self._wake()

    def clear(self) -> None:
        """Forgets events of an attempt that is over."""
        self.events.clear()

    async def wait(self, take_now: Callable[[], bool] | None = None) -> None:
        """Waits for at least one event. Raises the failure.

        `take_now` is called for each event that comes meanwhile, by the session that delivers it: no task has to be
        woken. True: it has taken the events, and the wait continues. False: the wait is over. It must not raise.
        """
        while not self.events and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            self._take_now = take_now
            try:
                await self._waiter
            finally:
                self._take_now = None
            if take_now is not None:
                break
        if self._error is not None:
            raise self._error.again()

    async def rest(self, seconds: float, *, until: Callable[[], bool] = lambda: False) -> None:
        """Waits without looking at events, less long if `until` holds at a `nudge`. Raises the failure at once."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._error is None and not until():
                    self._waiter = asyncio.get_running_loop().create_future()
                    await self._waiter
        if self._error is not None:
            raise self._error.again()

    def nudge(self) -> None:
        """Has a `rest` look again whether it may end."""
        self._wake()

    def _wake(self) -> None:
        self._take_now = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
