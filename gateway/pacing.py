"""How long tokens wait for one another when the gateway has more to do than its core can.

A token costs little where it is read from its worker's message and much where it goes out: an event, a write and a
packet of its own. While there is time for that, each goes out as it comes. When the event loop is busy nearly all the
time, `hold_s` grows from 0: tokens of one answer that come within it go out together, as one event. A gateway at its
limit so sends larger events, a moment later; otherwise it would fall behind its workers more and more, until their
messages fill what may wait for it and their sessions break.

The share of time in which the loop's thread works is told by the kernel, with what it waited for a core: on a machine
that others use as well, there is no time either. Time is real here; the rule itself is `Pace.adjust`.
"""

import asyncio
import time
from pathlib import Path

LOOK_S = 0.1
MIN_HOLD_S = 0.005
MAX_HOLD_S = 0.2
"""Readers do not notice; it is well below the silence that counts as a worker's fault (`health.MIN_SILENCE_S`)."""
BUSY, AT_EASE = 0.9, 0.7
GROWTH = 1.5

_SCHEDSTAT = Path("/proc/thread-self/schedstat")


class Pace:
    """One event loop's. `hold_s`, from 0 to MAX_HOLD_S, is what sessions look at."""

    def __init__(self) -> None:
        self.hold_s = 0.0
        self.busy_share = 0.0
        """Of the last LOOK_S."""

    def adjust(self, busy_share: float) -> None:
        """Takes a new reading: waits grow while there is no time, shrink when there is, and stay in between."""
        self.busy_share = busy_share
        if busy_share > BUSY:
            self.hold_s = min(MAX_HOLD_S, max(MIN_HOLD_S, self.hold_s * GROWTH))
        elif busy_share < AT_EASE:
            shorter_s = self.hold_s / GROWTH
            self.hold_s = shorter_s if shorter_s >= MIN_HOLD_S else 0.0

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
