"""How long tokens wait for one another when the gateway has more to do than its core can.

A token costs little where it is read from its worker's message and much where it goes out: an event, a write and a
packet of its own. While there is time for that, each token goes out as it comes. Where the gateway falls behind, tokens
of one answer that come within `hold_s`, a share of the delay, go out together, as one event. So a gateway at its limit
sends larger events, a moment later; otherwise it would fall behind its workers more and more, until requests are
refused and sessions break.

It falls behind where messages of its workers are read late *and* its event loop has no time to spare. Lateness alone
may be the network's, and a loop that is busy but in time needs no help. How late a message is follows from its worker's
time stamp, compared with those of the same worker's other messages; how busy the loop's thread is, waits for a core
included, comes from the kernel. Time is real here; the rule itself is `Pace.adjust`.
"""

import asyncio
import math
import time
from pathlib import Path

LOOK_S = 0.1
BUSY_SHARE = 0.8
LATE_S = 0.05
HOLD_SHARE = 0.2
"""The share of messages' lateness that becomes `hold_s`. With less, a gateway that is offered twice its limit is a
second late; with more, streams stutter after each burst of requests."""
MAX_HOLD_S = 0.2
"""Readers hardly notice; it is well below the silence that counts as a worker's fault (`health.MIN_SILENCE_S`)."""
MEMORY_S = 10.0
"""The soonest message is remembered for this time, and up to twice as long: clocks are set now and then."""

_SCHEDSTAT = Path("/proc/thread-self/schedstat")


class Lateness:
    """The lateness of the messages of one worker."""

    def __init__(self) -> None:
        self._since_s = 0.0
        self._most_ahead_s = self._most_ahead_before_s = -math.inf

    @property
    def most_ahead_s(self) -> float:
        """By how much the worker's clock is ahead of the one here at least; minus infinity: nothing is known."""
        return max(self._most_ahead_s, self._most_ahead_before_s)

    def of(self, ahead_s: float, now_s: float) -> float:
        """Returns how much later than the soonest one a message is, in seconds.

        `ahead_s`: by how much its time stamp is ahead of the clock here, whatever the two clocks show.
        """
        if now_s - self._since_s > MEMORY_S:
            self._since_s = now_s
            self._most_ahead_before_s, self._most_ahead_s = self._most_ahead_s, -math.inf
        self._most_ahead_s = max(self._most_ahead_s, ahead_s)
        return self.most_ahead_s - ahead_s


class Pace:
    """The pace of one event loop. Sessions look at `hold_s`, which is from 0 to MAX_HOLD_S."""

    def __init__(self) -> None:
        self.hold_s = 0.0
        self.busy_share = 0.0
        """The busy share of the last LOOK_S."""
        self._late_s: float | None = None
        """By how much the latest message since the last reading was late; None: no message has come."""

    def note_late(self, seconds: float) -> None:
        """Notes that a message was read `seconds` late."""
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
    """Returns the seconds for which this thread has run or waited for a core; only run, where waits are not known."""
    try:
        run_ns, wait_ns, _ = _SCHEDSTAT.read_text().split()
    except (OSError, ValueError):
        return time.thread_time()
    return (int(run_ns) + int(wait_ns)) / 1e9
