"""The queue of requests that no decode worker can take yet: bounded, first in first out.

Knows no request and no worker: whoever waits is told when it is first and something may have changed.
"""

import asyncio
from collections import OrderedDict
from types import TracebackType

from services.runtime.errors import Overloaded, TandemError

MIN_RETRY_S = 0.01
"""The first in the queue asks workers again at most this often."""
MAX_RETRY_S = 0.5
"""It asks again at least this often, should no sign of change come."""
RETRY_AFTER_S = 1.0
"""What a refused client is told."""


class AdmissionQueue:
    """Holds at most `max_waiting` requests."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiting: OrderedDict[WaitingPlace, None] = OrderedDict()
        self.closed_by: TandemError | None = None
        """Raised by every wait from now on."""

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def enter(self, *, is_resumed: bool = False) -> "WaitingPlace":
        """A place at the end; for a request that was already running, at the front and beyond the bound.

        Raises Overloaded if the queue is full. The place is left by leaving its `with` block.
        """
        if len(self._waiting) >= self._max_waiting and not is_resumed:
            raise Overloaded("the cluster is full and the queue has no room", retry_after_s=RETRY_AFTER_S)
        place = WaitingPlace(self)
        self._waiting[place] = None
        if is_resumed:
            self._waiting.move_to_end(place, last=False)
        return place

    def poke(self) -> None:
        """Says that a worker may have room now."""
        if self._waiting:
            next(iter(self._waiting)).wake()

    def close(self, error: TandemError) -> None:
        """Ends every wait with `error`."""
        self.closed_by = error
        for place in self._waiting:
            place.wake()

    def leave(self, place: "WaitingPlace") -> None:
        """Gives up a place; the next one may be first now."""
        self._waiting.pop(place, None)
        self.poke()

    def is_first(self, place: "WaitingPlace") -> bool:
        """Whether it is this one's turn."""
        return next(iter(self._waiting), None) is place


class WaitingPlace:
    """One request's place in the queue, for use in a `with` block."""

    def __init__(self, queue: AdmissionQueue) -> None:
        self._queue = queue
        self._woken = asyncio.Event()

    def __enter__(self) -> "WaitingPlace":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._queue.leave(self)

    def wake(self) -> None:
        """Ends the current wait, or the next one at once."""
        self._woken.set()

    async def wait_for_turn(self, timeout_s: float) -> bool:
        """Waits until this place is first and a try may succeed. False: `timeout_s` passed before.

        Raises what the queue was closed with.
        """
        loop = asyncio.get_running_loop()
        give_up_at_s = loop.time() + timeout_s
        while True:
            wait_s = min(give_up_at_s - loop.time(), MAX_RETRY_S)
            if wait_s <= 0:
                return False
            was_woken = await self._sleep(wait_s)
            if self._queue.closed_by is not None:
                raise self._queue.closed_by
            if self._queue.is_first(self) and (was_woken or loop.time() < give_up_at_s):
                return True

    async def _sleep(self, wait_s: float) -> bool:
        try:
            async with asyncio.timeout(wait_s):
                await self._woken.wait()
                self._woken.clear()
                await asyncio.sleep(min(MIN_RETRY_S, wait_s))
        except TimeoutError:
            return False
        return True
