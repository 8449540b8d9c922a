"""The queue of requests that wait for room in the cluster: whose turn it is, and when somebody may go.

The order is `services.scheduling.queue`'s business; whether there is room for the first one is asked of whoever
entered it. Knows no request and no worker. Who is let go has left the queue, so the next one can be let go in the same
moment; should no worker take it after all, it comes back with the rank it had. From then on there is less room than it
seems, so it keeps its place when it asks again, and nobody behind it goes before it has its answer.
"""

import asyncio
from collections.abc import Callable, Hashable
from types import TracebackType

from services.runtime.clock import SYSTEM_CLOCK, Clock
from services.runtime.errors import DeadlineExceeded, Overloaded, TandemError
from services.scheduling.queue import QueueEntry, QueueFull, RequestQueue

GATHER_S = 0.002
"""Signs that there may be room come with every step of every worker: those of so long are answered together."""
MAX_SILENCE_S = 0.25
"""Looks again at least this often, should no sign come."""
COME_BACK_S = 0.02
"""Who was refused by a worker that seemed to have room asks again after this; nobody behind it goes before."""


class AdmissionQueue:
    """Those who wait for one model's workers. Belongs to one event loop.

    `refusal` makes what a request is told for which there is no place.
    """

    def __init__(
        self, queue: RequestQueue, *, refusal: Callable[[QueueEntry], Overloaded], clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._queue = queue
        self._refusal = refusal
        self._clock = clock
        self._places: dict[Hashable, WaitingPlace] = {}
        self._asking: WaitingPlace | None = None
        """Asks again, and holds up the others."""
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self.closed_by: TandemError | None = None
        """Raised by every wait from now on."""

    def __len__(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    def is_behind_others(self, entry: QueueEntry) -> bool:
        """Whether somebody waits who may not be overtaken: of the same class or a higher one."""
        return self._queue.num_ahead(entry.service_class) > 0

    def enter(
        self, entry: QueueEntry, has_room: Callable[[], bool], *, is_resumed: bool = False, was_refused: bool = False
    ) -> "WaitingPlace":
        """A place in the queue; for a request that was already running, at the front and beyond the bound.

        `has_room` is asked when it is first. `was_refused`: a worker that seemed to have room had none. Raises
        Overloaded if the queue is full; who has a lower class is pushed out instead, and told so. The place is left by
        leaving its `with` block.
        """
        place = WaitingPlace(self, entry, has_room, is_resumed=is_resumed)
        if was_refused:
            place.be_careful()
        try:
            pushed_out = self._queue.push(entry, is_resumed=is_resumed)
        except QueueFull as full:
            raise self._refusal(entry) from full
        if pushed_out is not None:
            self._places.pop(pushed_out.key).end(self._refusal(pushed_out))
        self._places[entry.key] = place
        self._look_after(GATHER_S)
        return place

    def poke(self) -> None:
        """Says that a worker may have room now."""
        if self._places:
            self._look_after(GATHER_S)

    def close(self, error: TandemError) -> None:
        """Ends every wait with `error`."""
        self.closed_by = error
        places, self._places = self._places, {}
        for key, place in places.items():
            self._queue.remove(key)
            place.end(error)

    def take_back(self, place: "WaitingPlace") -> None:
        """No worker took it."""
        if self._asking is place:
            self._asking = None
        elif not place.was_ended:
            self._queue.push_back(place.entry, is_resumed=place.is_resumed)
            self._places[place.entry.key] = place
        self._look_after(GATHER_S)

    def leave(self, place: "WaitingPlace") -> None:
        """Gives up a place; the next one may be first now."""
        if self._asking is place:
            self._asking = None
        if self._places.pop(place.entry.key, None) is not None:
            self._queue.remove(place.entry.key)
        self._look_after(GATHER_S)

    def _look_after(self, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + wait_s
        if self._timer is not None:
            if self._due_s <= due_s:
                return
            self._timer.cancel()
        self._timer, self._due_s = loop.call_at(due_s, self._look), due_s

    def _look(self) -> None:
        """Lets everybody go who can go now, in order."""
        self._timer = None
        for entry in self._queue.expire(self._clock.monotonic()):
            self._places.pop(entry.key).end(DeadlineExceeded("the request's deadline cannot be met any more"))
        wait_s = MAX_SILENCE_S
        while self._asking is None and (first := self._queue.peek()) is not None:
            place = self._places[first.key]
            patience_s = place.not_before_s - asyncio.get_running_loop().time()
            if patience_s > 0:
                wait_s = min(wait_s, patience_s)
                break
            if not place.is_over and not place.has_room():
                break
            if place.is_careful and not place.is_over:
                self._asking = place
            else:
                self._queue.pop()
                del self._places[first.key]
            place.go()
        if self._places:
            self._look_after(wait_s)


class WaitingPlace:
    """One request's place in the queue, for use in a `with` block."""

    def __init__(
        self, queue: AdmissionQueue, entry: QueueEntry, has_room: Callable[[], bool], *, is_resumed: bool
    ) -> None:
        self.entry = entry
        self.is_resumed = is_resumed
        self.has_room = has_room
        self.not_before_s = 0.0
        self.is_careful = False
        """Keeps its place while it asks."""
        self._queue = queue
        self._ended_by: TandemError | None = None
        self._turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __enter__(self) -> "WaitingPlace":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._queue.leave(self)
        self._turn.cancel()

    @property
    def is_over(self) -> bool:
        """Whether nobody waits here any more."""
        return self._turn.done()

    def go(self) -> None:
        """It is this one's turn."""
        if not self._turn.done():
            self._turn.set_result(None)

    def end(self, error: TandemError) -> None:
        """The wait is over without a turn."""
        self._ended_by = error
        if not self._turn.done():
            self._turn.set_result(None)

    @property
    def was_ended(self) -> bool:
        """Whether it has been told why it will have no turn."""
        return self._ended_by is not None

    def be_careful(self) -> None:
        """There was less room than it seemed: it waits a moment before it asks again."""
        self.is_careful = True
        self.not_before_s = asyncio.get_running_loop().time() + COME_BACK_S

    def come_back(self) -> None:
        """No worker took it: it waits again, with the rank it had."""
        self._turn = asyncio.get_running_loop().create_future()
        self.be_careful()
        self._queue.take_back(self)

    async def wait_for_turn(self, timeout_s: float) -> bool:
        """Waits until this place is first and there is room. False: `timeout_s` passed before.

        Raises DeadlineExceeded, Overloaded where it was pushed out, or what the queue was closed with.
        """
        if self._ended_by is None and self._queue.closed_by is None:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._turn
            except TimeoutError:
                return False
        error = self._ended_by or self._queue.closed_by
        if error is not None:
            raise error
        return True
