"""Selects sequences that skip a step because their grammar masks are expensive. `MaskPace` is pure arithmetic.

A grammar computes a mask for each token, on the thread that computes the whole batch. Usual constraints take some
microseconds per mask. A constraint that is designed to be expensive takes milliseconds, and such requests could fill a
batch. Therefore sequences whose masks are much more expensive than others in the batch may use at most MASK_PART of the
remaining step time, and skip some steps. They share that time evenly, however expensive each of them is (start-time
fair queueing: Goyal, Vin, Cheng 1996). Skipping does not change the tokens, because they do not depend on the other
sequences of a step. A sequence without a measured mask is assumed to cost as much as the first masks of earlier
sequences, because one client often submits many similar requests at once.
"""

import math
from collections.abc import Collection, Hashable, Mapping

from decode_worker.features import StepFeature, StepTaken
from decode_worker.scheduler import Work
from services.engine.steps.sequence import Sequence

MASK_PART = 0.4
"""Time for expensive masks relative to the rest of the steps. Other tokens take at most 1.4 times as long on average.
"""
CHEAP_S = 50e-6
"""Sequences with cheaper masks never skip a step, in seconds."""
DEAR_FACTOR = 2.0
"""A mask is expensive if it costs this many times the cheapest. If all are expensive, no sequence waits."""
NEWEST_PART = 0.25
"""Weight of the latest measurement in a cost. One measurement may be long because the thread lost its core."""


class MaskPace:
    """The mask costs of one batch."""

    def __init__(self) -> None:
        self._costs_s: dict[Hashable, float] = {}
        self._had_s: dict[Hashable, float] = {}
        """Mask time used by each expensive sequence. A new sequence starts at the lowest value in the batch."""
        self._credit_s = 0.0
        self._masked: set[Hashable] = set()
        self._measured: set[Hashable] = set()
        """Keys in `_costs_s` with a measured cost."""
        self._first_cost_s = 0.0
        """Cost of the first mask of a sequence, as a moving average over sequences, in seconds."""

    def add(self, key: Hashable) -> None:
        """Registers a sequence that has a grammar."""
        self._masked.add(key)

    def discard(self, key: Hashable) -> None:
        """Removes a sequence. Ignores unknown keys."""
        self._masked.discard(key)

    def resting(self, keys: Collection[Hashable]) -> Collection[Hashable]:
        """Returns the sequences of the batch (`keys`) that skip this step. Never returns all of them.

        Drops the costs of sequences that are not in the batch.
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
            # Later sequences wait for the next step if an earlier one is entitled to another token before them.
            turn_s = min(turn_s, self._had_s[key] + self._costs_s[key])
        return resting

    def note_step(self, step_s: float, masks_s: Mapping[Hashable, float]) -> None:
        """Records the duration of a step and how much of it the mask of each constrained sequence took."""
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
    """Lets the constrained sequences of a batch skip steps according to the cost of their masks."""

    def __init__(self) -> None:
        self._pace = MaskPace()
        self._sequences: dict[Hashable, Sequence] = {}
        self._masks_s: dict[Hashable, float] = {}

    def start(self, sequence: Sequence) -> None:
        """Registers a sequence if it has a grammar."""
        if sequence.grammar is not None:
            self._sequences[sequence.sequence_id] = sequence
            self._pace.add(sequence.sequence_id)

    def free(self, key: Hashable) -> None:
        """Removes a sequence. Ignores unknown keys."""
        if self._sequences.pop(key, None) is not None:
            self._pace.discard(key)

    def resting(self, keys: Collection[Hashable]) -> Collection[Hashable]:
        """Returns the sequences that skip the next step."""
        return self._pace.resting(keys)

    def computed(self, work: list[Work]) -> None:
        """Reads the mask times of the step."""
        self._masks_s = {one.key: self._sequences[one.key].take_mask_s() for one in work if one.key in self._sequences}

    def end_step(self, step: StepTaken) -> None:
        """Records the mask times of the step."""
        self._pace.note_step(step.time_s, self._masks_s)
