"""Which pairs of workers take far longer for handoffs than expected. Pure: time is an argument, in seconds.

A slow pair is named to operators, and neither of its workers is blamed. It stays in use: the router's cost has the
measured speed of its link.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

NUM_HANDOFFS = 3
"""Number of latest handoffs of a pair whose median is judged."""
MAX_AGE_S = 10.0
"""Maximum age of these handoffs, in seconds."""
MIN_LATE_S = 0.25
"""Minimum delay of a slow pair's median handoff, in seconds. Shorter delays may come from a busy machine."""
SLOW_RATIO = 3.0
"""Minimum ratio of actual to expected time of a slow pair, also compared with the median ratio of the other pairs."""
FLOOR_S = 0.01
"""Time that is added to both times of a ratio, in seconds: very short times say little."""

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class SlowPair:
    """A pair of workers with slow handoffs. Ratios are actual time / expected time. `others` is that of other pairs."""

    pair: Pair
    ratio: float
    others: float
    took_s: float


class HandoffTimes:
    """The latest handoffs between all pairs of workers, by the IDs of the prefill worker and the decode worker."""

    def __init__(self) -> None:
        self._times: dict[Pair, deque[tuple[float, float, float]]] = {}
        """(when, actual time, expected time) of each handoff."""

    def note(self, pair: Pair, took_s: float, *, expected_s: float, now_s: float) -> None:
        """Records a handoff."""
        times = self._times.get(pair)
        if times is None:
            times = self._times[pair] = deque(maxlen=NUM_HANDOFFS)
        times.append((now_s, max(0.0, took_s), expected_s))

    def forget(self, worker_id: str) -> None:
        """Drops the handoffs of a worker that has left."""
        for pair in [pair for pair in self._times if worker_id in pair]:
            del self._times[pair]

    def slow(self, now_s: float) -> list[SlowPair]:
        """Returns the pairs that are slow now, slowest first."""
        self._times = {pair: times for pair, times in self._times.items() if now_s - times[-1][0] <= MAX_AGE_S}
        recent = {pair: times for pair, times in self._times.items() if now_s - times[0][0] <= MAX_AGE_S}
        ratios = {
            pair: median((took_s + FLOOR_S) / (expected_s + FLOOR_S) for _, took_s, expected_s in times)
            for pair, times in recent.items()
        }
        in_order = sorted(ratios.values())
        found = []
        for pair, times in recent.items():
            late_s = median(took_s - expected_s for _, took_s, expected_s in times)
            if len(times) < NUM_HANDOFFS or late_s < MIN_LATE_S or ratios[pair] < SLOW_RATIO:
                continue
            others = _median_without(in_order, ratios[pair])
            if ratios[pair] >= SLOW_RATIO * others:
                found.append(SlowPair(pair, ratios[pair], others, median(took_s for _, took_s, _ in times)))
        return sorted(found, key=lambda one: -one.ratio)


def _median_without(in_order: Sequence[float], ratio: float) -> float:
    """Returns the median of sorted ratios without `ratio`, which is one of them. Returns 1 if no other is left."""
    at, num = bisect_left(in_order, ratio), len(in_order) - 1
    middle = (in_order[place + (place >= at)] for place in ((num - 1) // 2, num // 2))
    return sum(middle) / 2 if num else 1.0
