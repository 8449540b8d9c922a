"""Turns of connections at reading bodies, so that what some send leaves the event loop time for everybody's answers.

Receiving a megabyte takes the loop the same time whether it is used or dropped. All bodies that need several reads
therefore share one rate. Above it the gateway stops reading, and TCP's flow control holds the client's bytes back. A
body that came in one read with its head never waits, and one of which little is left does not wait for all the others:
such bodies have every second turn. Knows no HTTP.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from uvicorn.protocols.http.flow_control import FlowControl

BYTES_PER_S = 64 * 2**20
"""The rate of all bodies together; receiving this much takes about an eighth of one core."""
BURST_S = 0.05
"""As much as the rate gives in this time may come at once after a pause."""
MIN_READ_BYTES = 4 * 1024
"""The least that a read counts: a byte costs the loop nearly as much."""
BYTES_PER_PART = 256
"""What a part of a body counts, such as a chunk of one byte: parsing it takes the loop half a microsecond and more."""
TURN_S = 1e-3
"""The least time between two turns, so that what was read in the first is known before the second."""
SMALL_BYTES = 64 * 1024
"""What may be left of a body that has every second turn."""


@dataclass(frozen=True, slots=True)
class Read:
    """A part of a body that a connection has read."""

    num_bytes: int
    num_parts: int = 0
    num_left: int = -1
    """Bytes that are still to come; -1: an unknown number."""
    is_cut: bool = False
    """Whether more has been read already and waits for a turn to be parsed."""


class Flow(FlowControl):
    """Reads where its protocol wishes it and it has its turn.

    `on_turn` is called when a turn begins, before more is read; it may lose the turn again.
    """

    def __init__(self, transport: asyncio.Transport, *, on_turn: Callable[[], None] | None = None) -> None:
        super().__init__(transport)
        self.on_turn = on_turn
        self._is_wished = True
        self._has_turn = True

    def pause_reading(self) -> None:
        """The protocol wishes for no more."""
        self._is_wished = False
        super().pause_reading()

    def resume_reading(self) -> None:
        """The protocol wishes for more."""
        self._is_wished = True
        if self._has_turn:
            super().resume_reading()

    def lose_turn(self) -> None:
        """Makes the reader wait until `gain_turn`."""
        self._has_turn = False
        super().pause_reading()

    def gain_turn(self) -> None:
        """Lets the reader continue if the protocol wishes it."""
        self._has_turn = True
        if self.on_turn is not None:
            self.on_turn()
        if self._is_wished and self._has_turn:
            super().resume_reading()


class ReadingTurns:
    """Gives turns at `bytes_per_s`, to those whose bytes somebody wants before those whose bytes are dropped."""

    def __init__(self, bytes_per_s: float = BYTES_PER_S) -> None:
        self._bytes_per_s = bytes_per_s
        self._paid_until_s = 0.0
        """The time until which the rate is spent on what was read."""
        self._small: dict[Flow, None] = {}
        self._wanted: dict[Flow, None] = {}
        self._dropped: dict[Flow, None] = {}
        self._was_small = False
        """Whether the last turn was for one of `_small`."""
        self._timer: asyncio.TimerHandle | None = None

    def note_read(self, flow: Flow, read: Read, *, is_wanted: bool) -> None:
        """A connection has read a part of a body, and more is to come."""
        now_s = asyncio.get_running_loop().time()
        cost_s = max(read.num_bytes, read.num_parts * BYTES_PER_PART, MIN_READ_BYTES) / self._bytes_per_s
        self._paid_until_s = max(self._paid_until_s, now_s - BURST_S) + cost_s
        if self._paid_until_s > now_s or read.is_cut:
            flow.lose_turn()
            is_small = 0 <= read.num_left <= SMALL_BYTES
            (self._dropped if not is_wanted else self._small if is_small else self._wanted)[flow] = None
            self._set_timer()

    def leave(self, flow: Flow) -> None:
        """A connection has ended."""
        for queue in (self._small, self._wanted, self._dropped):
            queue.pop(flow, None)

    def _set_timer(self) -> None:
        if self._timer is None and (self._small or self._wanted or self._dropped):
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(self._paid_until_s, loop.time() + TURN_S), self._give)

    def _give(self) -> None:
        self._timer = None
        first, second = (self._wanted, self._small) if self._was_small else (self._small, self._wanted)
        queue = first or second or self._dropped
        # The turn before this one may have taken more than was known when the timer was set.
        if queue and self._paid_until_s <= asyncio.get_running_loop().time():
            flow = next(iter(queue))
            del queue[flow]
            self._was_small = queue is self._small
            flow.gain_turn()
        self._set_timer()
