"""Which sequences sit out a step because saying what may come next in them is dear. Pure: seconds in, keys out.

A grammar is asked for each token of its answer, on the thread that computes everybody's. Usual forms take some
microseconds; one that was written to be dear takes milliseconds, and there may be as many such answers as the batch has
places. So those that are much dearer than others of the batch may take MASK_PART as long as the rest of the steps, and
have a token in some steps only. Among themselves they share that time evenly, however dear each of them is (start-time
fair queueing: Goyal, Vin, Cheng 1996). Tokens do not depend on who else is in a step, so they are the same.
"""

import math
from collections.abc import Collection, Hashable, Mapping

MASK_PART = 0.4
"""A token of another answer takes at most 1.4 times as long for them, over some steps."""
CHEAP_S = 50e-6
"""What takes less is never left out."""
DEAR_FACTOR = 2.0
"""Where all are dear nobody has to wait for anybody: dear is what takes so many times as long as the cheapest."""
NEWEST_PART = 0.25
"""What the newest time counts in the cost of a sequence: one may be long because the thread lost its core."""


class MaskPace:
    """The accounts of one batch."""

    def __init__(self) -> None:
        self._costs_s: dict[Hashable, float] = {}
        self._had_s: dict[Hashable, float] = {}
        """Time that each dear one has had, counted from what the one with the least had when it came."""
        self._credit_s = 0.0

    def resting(self, keys: Collection[Hashable]) -> Collection[Hashable]:
        """Those of the batch that have no token in this step; never all. Costs of others are forgotten."""
        if not self._costs_s:
            return ()
        self._costs_s = {key: cost_s for key, cost_s in self._costs_s.items() if key in keys}
        least_s = min(self._costs_s.values(), default=0.0) if len(self._costs_s) == len(keys) else 0.0
        bound_s = max(CHEAP_S, DEAR_FACTOR * least_s)
        dear = [key for key, cost_s in self._costs_s.items() if cost_s > bound_s]
        least_had_s = min((self._had_s[key] for key in dear if key in self._had_s), default=0.0)
        self._had_s = {key: self._had_s.get(key, least_had_s) for key in dear}
        resting, left_s, turn_s = set(), self._credit_s, math.inf
        for key in sorted(dear, key=self._had_s.__getitem__):
            if left_s <= 0 or self._had_s[key] > turn_s:
                resting.add(key)
            left_s -= self._costs_s[key]
            # One that could have another token before this one has its turn first, in the next step.
            turn_s = min(turn_s, self._had_s[key] + self._costs_s[key])
        return resting

    def note_step(self, step_s: float, masks_s: Mapping[Hashable, float]) -> None:
        """How long a step took, and what of it the mask of each sequence that has a grammar."""
        dear_s = 0.0
        for key, mask_s in masks_s.items():
            before_s = self._costs_s.get(key, mask_s)
            self._costs_s[key] = before_s + NEWEST_PART * (mask_s - before_s)
            if key in self._had_s:
                self._had_s[key] += mask_s
                dear_s += mask_s
        earned_s = MASK_PART * max(0.0, step_s - dear_s)
        self._credit_s = min(self._credit_s - dear_s, 0.0) + earned_s
