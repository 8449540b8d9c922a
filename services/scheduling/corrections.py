"""How far predictions of the same kind were off lately, and the factor by which the next one is corrected.

A prediction adds up what is measured: queues, computation, transfers. It leaves out what is not, such as messages, the
work of neighbours on the same cores, or prompts that arrive a moment later and share the worker's steps. What is left
out is nearly the same from one request to the next on one way, so it is learnt from how predictions turned out.

A way's predictions may be off by different factors where prompts differ in length, so only predictions of similar
lengths are compared. The median of their ratios counts, as a request that was hit by an accident says nothing of the
next one. Ratios are of the prediction before it was corrected: a factor does not feed on itself, however many requests
are under way. Seconds throughout. Knows no worker and no clock.
"""

import math
from collections import deque
from collections.abc import Hashable
from itertools import islice

NUM_COUNTED = 4
"""The latest ratios of similar predictions that count, beside one of 1, which is believed until others agree."""
SIMILAR = 2.5
"""Predictions that differ by less than this factor are similar."""
MOST = 3.0
"""No prediction is multiplied or divided by more: what is off by more is no matter of habit."""
MAX_KEPT = 32
MAX_WAYS = 4096


class Corrections:
    """The ratios of seen to predicted times, by way. A way is any key, such as a pair of workers."""

    def __init__(self) -> None:
        self._ratios: dict[Hashable, deque[tuple[float, float]]] = {}
        """By way: the logarithms of each prediction and of its ratio, the newest last."""
        self._usual: dict[Hashable, tuple[float, float, float]] = {}
        """By way: the factor of predictions between two lengths, while it is the last that was asked for."""

    def observe(self, way: Hashable, *, predicted_s: float, seen_s: float) -> None:
        """Notes that something predicted to take `predicted_s`, uncorrected, took `seen_s`.

        Times that are not positive, or not finite, say nothing and are left out.
        """
        if not (0 < predicted_s < math.inf and seen_s > 0):
            return
        ratios = self._ratios.pop(way, None)
        self._usual.pop(way, None)
        if ratios is None:
            ratios = deque(maxlen=MAX_KEPT)
            if len(self._ratios) >= MAX_WAYS:  # workers come and go
                forgotten = next(iter(self._ratios))
                del self._ratios[forgotten]
                self._usual.pop(forgotten, None)
        self._ratios[way] = ratios  # the way that was heard of last is the last to be forgotten
        size = math.log(predicted_s)
        ratios.append((size, math.log(seen_s) - size))

    def factor(self, way: Hashable, predicted_s: float) -> float:
        """Returns what to multiply a prediction by; 1 where nothing is known."""
        usual = self._usual.get(way)
        if usual is not None and usual[0] < predicted_s < usual[1]:
            return usual[2]
        ratios = self._ratios.get(way)
        if ratios is None or not 0 < predicted_s < math.inf:
            return 1.0
        size = math.log(predicted_s)
        sizes, found = zip(*islice(reversed(ratios), NUM_COUNTED), strict=True)
        shortest, longest = max(sizes) - _SIMILAR, min(sizes) + _SIMILAR
        if shortest < size < longest:
            factor = _factor([0.0, *found])
            self._usual[way] = math.exp(shortest), math.exp(longest), factor
            return factor
        # Rare, and several times as slow.
        similar = (ratio for other, ratio in reversed(ratios) if -_SIMILAR < other - size < _SIMILAR)
        return _factor([0.0, *islice(similar, NUM_COUNTED)])


_SIMILAR, _MOST = math.log(SIMILAR), math.log(MOST)


def _factor(ratios: list[float]) -> float:
    return math.exp(max(-_MOST, min(_MOST, _median(ratios))))


def _median(values: list[float]) -> float:
    """Returns the median; of the two in the middle the one that changes less."""
    values.sort()
    lower, upper = values[(len(values) - 1) // 2], values[len(values) // 2]
    return lower if abs(lower) < abs(upper) else upper
