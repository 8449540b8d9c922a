"""Chooses the sequences that sit out a step because their masks are dear. `MaskPace` is pure: seconds in, keys out.

A grammar is asked for each token of its answer, on the thread that computes everybody's. Usual forms take some
microseconds; one that was written to be dear takes milliseconds, and a batch may be full of such answers. So those
that are much dearer than others of the batch may take MASK_PART as long as the rest of the steps, and have a token in
some steps only. Among themselves they share that time evenly, however dear each of them is (start-time fair queueing:
Goyal, Vin, Cheng 1996). Tokens do not depend on the other sequences of a step, so they stay equal. A sequence that has
had no mask in the batch yet is taken to be as dear as those that came before it: many of one request come at once.
"""

import math
from collections.abc import Collection, Hashable, Mapping

from decode_worker.features import StepFeature, StepTaken
from decode_worker.scheduler import Work
from services.engine.steps.sequence import Sequence

MASK_PART = 0.4
"""A token of another answer takes at most 1.4 times as long for them, over some steps."""
CHEAP_S = 50e-6
"""Sequences with cheaper masks are never left out."""
DEAR_FACTOR = 2.0
"""Dear is what takes this many times as long as the cheapest: where all are dear none waits for another."""
NEWEST_PART = 0.25
"""Weight of the newest time in a cost: one time may be long because the thread lost its core."""


class MaskPace:
    """The accounts of one batch."""

    def __init__(self) -> None:
        self._costs_s: dict[Hashable, float] = {}
        self._had_s: dict[Hashable, float] = {}
        """Time that each dear one has had, counted from what the one with the least had when it came."""
        self._credit_s = 0.0
        self._masked: set[Hashable] = set()
        self._measured: set[Hashable] = set()
        """Those in `_costs_s` whose cost is their own."""
        self._first_cost_s = 0.0
        """Cost of the first mask that sequences have had here, newer ones counting more."""

    def add(self, key: Hashable) -> None:
        """Notes a sequence that has a grammar."""
        self._masked.add(key)

    def discard(self, key: Hashable) -> None:
        """Forgets a sequence. Unknown keys are ignored."""
        self._masked.discard(key)

    def resting(self, keys: Collection[Hashable]) -> Collection[Hashable]:
        """Returns the sequences of the batch, `keys`, that have no token in this step; never all of them.

        Costs of sequences that are not in the batch are forgotten.
        """
        if not self._masked:
            return ()
        self._costs_s = {key: self._costs_s.get(key, self._first_cost_s) for key in self._masked if key in keys}
        self._measured.intersection_update(self._costs_s)
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
        """Notes how long a step took, and what of it the mask of each sequence that has a grammar."""
        dear_s = 0.0
        for key, mask_s in masks_s.items():
            if key in self._measured:
                self._costs_s[key] += NEWEST_PART * (mask_s - self._costs_s[key])
            else:
                self._measured.add(key)
                self._costs_s[key] = mask_s
                self._first_cost_s += NEWEST_PART * (mask_s - self._first_cost_s)
            if key in self._had_s:
                self._had_s[key] += mask_s
                dear_s += mask_s
        earned_s = MASK_PART * max(0.0, step_s - dear_s)
        self._credit_s = min(self._credit_s - dear_s, 0.0) + earned_s


class PacedMasks(StepFeature):
    """Has the sequences of a batch that have a grammar take turns by what their masks cost."""

    def __init__(self) -> None:
        self._pace = MaskPace()
        self._sequences: dict[Hashable, Sequence] = {}
        self._masks_s: dict[Hashable, float] = {}

    def start(self, sequence: Sequence) -> None:
        """Notes a sequence if it has a grammar."""
        if sequence.grammar is not None:
            self._sequences[sequence.sequence_id] = sequence
            self._pace.add(sequence.sequence_id)

    def free(self, key: Hashable) -> None:
        """Forgets a sequence. Unknown keys are ignored."""
        if self._sequences.pop(key, None) is not None:
            self._pace.discard(key)

    def resting(self, keys: Collection[Hashable]) -> Collection[Hashable]:
        """Returns the sequences that have no token in the next step."""
        return self._pace.resting(keys)

    def computed(self, work: list[Work]) -> None:
        """Takes the times that the masks of the step took."""
        self._masks_s = {one.key: self._sequences[one.key].take_mask_s() for one in work if one.key in self._sequences}

    def end_step(self, step: StepTaken) -> None:
        """Notes what of the step's time the masks took."""
        self._pace.note_step(step.time_s, self._masks_s)
