"""How long tokens wait for one another when the gateway has more to do than its core can.

A token costs little where it is read from its worker's message and much where it goes out: an event, a write and a
packet of its own. While there is time for that, each goes out as it comes. Where the gateway falls behind, tokens of
one answer that come within `hold_s`, a part of what it is behind, go out together, as one event. A gateway at its limit
so sends larger events, a moment later; otherwise it would fall behind its workers more and more, until requests are
refused and sessions break.

It falls behind where messages of its workers are read late *and* its event loop has no time to spare. Late alone may be
the network; and a loop that is busy but in time needs no help. How late a message is, its worker's time stamp says, by
comparison with the others of the same worker; how busy the loop's thread is says the kernel, with what it waited for
a core. Time is real here; the rule itself is `Pace.adjust`.
"""

import asyncio
import math
import time
from pathlib import Path

LOOK_S = 0.1
BUSY_SHARE = 0.8
LATE_S = 0.05
HOLD_SHARE = 0.2
"""Of what messages are late by. Less, and a gateway that is offered twice its limit is a second late; more, and streams
stutter after each burst of requests."""
MAX_HOLD_S = 0.2
"""Readers hardly notice; it is well below the silence that counts as a worker's fault (`health.MIN_SILENCE_S`)."""
MEMORY_S = 10.0
"""For so long and up to twice as long the soonest message is remembered: clocks are set now and then."""

_SCHEDSTAT = Path("/proc/thread-self/schedstat")


class Lateness:
    """Of the messages of one worker."""

    def __init__(self) -> None:
        self._since_s = 0.0
        self._most_ahead_s = self._most_ahead_before_s = -math.inf

    def of(self, ahead_s: float, now_s: float) -> float:
        """How much later than the soonest one a message is, in seconds.

        `ahead_s`: by how much its time stamp is ahead of the clock here, whatever the two clocks show.
        """
        if now_s - self._since_s > MEMORY_S:
            self._since_s = now_s
            self._most_ahead_before_s, self._most_ahead_s = self._most_ahead_s, -math.inf
        self._most_ahead_s = max(self._most_ahead_s, ahead_s)
        return max(self._most_ahead_s, self._most_ahead_before_s) - ahead_s


class Pace:
    """One event loop's. `hold_s`, from 0 to MAX_HOLD_S, is what sessions look at."""

    def __init__(self) -> None:
        self.hold_s = 0.0
        self.busy_share = 0.0
        """Of the last LOOK_S."""
        self._late_s: float | None = None
        """By how much the latest message since the last reading was late; None: there was none."""

    def note_late(self, seconds: float) -> None:
        """A message was read so late."""
        self._late_s = max(self._late_s or 0.0, seconds)

    def adjust(self, busy_share: float) -> None:
        """Takes a new reading."""
        self.busy_share = busy_share
        late_s, self._late_s = self._late_s, None
        if busy_share < BUSY_SHARE:
            self.hold_s = 0.0
        elif late_s is not None:
            self.hold_s = min(MAX_HOLD_S, late_s * HOLD_SHARE) if late_s > LATE_S else 0.0

    async def keep(self) -> None:
        """Adjusts it for ever, by what the thread that runs this does."""
        busy_s, at_s = thread_busy_s(), time.monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            was_busy_s, was_s = busy_s, at_s
            busy_s, at_s = thread_busy_s(), time.monotonic()
            self.adjust((busy_s - was_busy_s) / (at_s - was_s))


def thread_busy_s() -> float:
    """Seconds for which this thread has run or waited for a core; where nobody tells of waiting, run."""
    try:
        run_ns, wait_ns, _ = _SCHEDSTAT.read_text().split()
    except (OSError, ValueError):
        return time.thread_time()
    return (int(run_ns) + int(wait_ns)) / 1e9
