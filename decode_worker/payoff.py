"""Estimates how likely draft tokens are to be accepted, and how many of them are worth verifying.

Pure arithmetic, without a model or a clock. The caller counts the steps.

Each draft token has a *kind*: its source, whether the sequence samples greedily, and the confidence of the source (the
draft model's probability, or the length of the n-gram match). Acceptance is recorded per kind, for each request and for
the whole worker. The estimate of a request relies on its own record as far as it has one, and otherwise on the worker's
record. Records decay with each step, so that a kind that did not pay off is tried again after a while, but rarely.

Cost: the best step produces the most tokens per unit of time. A draft token is therefore worth verifying if its
acceptance probability exceeds the tokens that the step would otherwise produce in the time that the draft token adds
(as in TurboSpec, Liu et al. 2024).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from services.engine.steps.guesses import LEVELS

Source = Literal["ngram", "draft"]

ANY_LEVEL = LEVELS
"""Level of a draft model's token before it has been drafted."""
PRIOR_WEIGHT = 4.0
"""Weight of the prior, as a number of observations."""
MOST_WEIGHT = 64.0
"""Maximum weight of a record, as a number of observations. Older observations decay as new ones arrive."""
TRIAL_STEPS = 32
MOST_LOST_STEPS = 12.0
"""Loss, in plain steps, that ends a trial early. One or two delayed steps do not reach it."""
KEPT_OF_GAINS = 0.5
"""Fraction of earlier gains that carries over to the next trial, so that one unpredictable text does not end it."""
PLAIN_EVERY = 128
"""Steps with draft tokens after which PLAIN_STEPS run without, for comparison."""
PLAIN_STEPS = 16
"""Plain steps measured in a row. The first half takes up to a third longer and is ignored."""
REPAID_STEPS = 64
"""Number of steps over which the cost of reading a prompt is spread."""
SHORTEST_S = 1e-6
FIRST_REST_STEPS = 32
MOST_REST_STEPS = 1024
REQUEST_HALF_LIFE_STEPS = 256
WORKER_HALF_LIFE_STEPS = 4096


class Kind(NamedTuple):
    """Properties that predict acceptance. `level` is the confidence of the source, 0 to LEVELS - 1, or ANY_LEVEL."""

    source: Source
    is_greedy: bool
    level: int


def level_of_match(num_tokens: int) -> int:
    """Returns the level of a match of `num_tokens` >= 2.

    The levels are 2, 3, 4, 5, 6-7, 8-11, 12-15, and 16 or more.
    """
    if num_tokens < 6:
        return num_tokens - 2
    return 4 if num_tokens < 8 else 5 if num_tokens < 12 else 6 if num_tokens < 16 else 7


def first_guess(kind: Kind) -> float:
    """Returns the prior acceptance probability of a kind without observations."""
    if kind.level == ANY_LEVEL:
        return 0.5
    sureness = (kind.level + 0.5) / LEVELS
    if kind.source == "draft":
        return 0.25 + 0.75 * sureness
    return 0.3 + 0.6 * sureness if kind.is_greedy else 0.1 + 0.4 * sureness


@dataclass(slots=True)
class _Tally:
    num_right: float
    num: float
    step: int


class Record:
    """Acceptance by kind.

    The prior of a request's record is the worker's record; the worker's starts from `first_guess`.
    """

    def __init__(self, half_life_steps: int, *, behind: Record | None = None) -> None:
        self._half_life_steps = half_life_steps
        self._behind = behind
        self._tallies: dict[Kind, _Tally] = {}

    def chance(self, kind: Kind, step: int) -> float:
        """Returns the probability that the next draft token of this kind is accepted, if the tokens before it are."""
        before = first_guess(kind) if self._behind is None else self._behind.chance(kind, step)
        tally = self._tallies.get(kind)
        if tally is None:
            return before
        if step > tally.step:
            self._fade(tally, step)
        return (PRIOR_WEIGHT * before + tally.num_right) / (PRIOR_WEIGHT + tally.num)

    def note(self, kind: Kind, step: int, right: float) -> None:
        """Records a draft token whose predecessors were accepted.

        `right` is 1 if it was accepted, 0 if not, or its probability of acceptance.
        """
        tally = self._tallies.get(kind)
        if tally is None:
            tally = self._tallies[kind] = _Tally(0.0, 0.0, step)
        elif step > tally.step:
            self._fade(tally, step)
        if tally.num >= MOST_WEIGHT:
            tally.num_right *= MOST_WEIGHT / (tally.num + 1)
            tally.num *= MOST_WEIGHT / (tally.num + 1)
        tally.num_right += right
        tally.num += 1
        if self._behind is not None:
            self._behind.note(kind, step, right)

    def _fade(self, tally: _Tally, step: int) -> None:
        keep = 0.5 ** ((step - tally.step) / self._half_life_steps)
        tally.num_right *= keep
        tally.num *= keep
        tally.step = step


class Price:
    """Cost of step time in tokens: the tokens that the step produces so far, divided by its time so far."""

    def __init__(self, *, num_tokens: float, time_s: float) -> None:
        self._num_tokens = num_tokens
        self._time_s = time_s

    def of(self, time_s: float) -> float:
        """Converts a time to tokens."""
        return time_s * self._num_tokens / self._time_s

    def add(self, *, num_tokens: float, time_s: float) -> None:
        """Adds tokens and time to the step."""
        self._num_tokens += num_tokens
        self._time_s += time_s


def worthwhile(chances: Sequence[float], cost: float) -> tuple[int, float]:
    """Returns how many leading draft tokens to verify and the expected gain, in tokens.

    `chances` holds the acceptance probability of each token if its predecessors are accepted. `cost` is the cost of one
    token, in tokens.
    """
    reached, gain, num = 1.0, 0.0, 0
    for chance in chances:
        reached *= chance
        if reached <= cost:
            break
        gain += reached - cost
        num += 1
    return num, gain


class Balance:
    """Measures whether speculation pays off at a batch size, all costs included, and suspends it if it does not.

    The wall time of speculative steps is compared with plain steps, of which a few run from time to time. Each losing
    trial doubles the next suspension, up to MOST_REST_STEPS. Each winning trial halves it.
    """

    def __init__(self) -> None:
        self.plain_s: float | None = None
        """Seconds per token without draft tokens. None until measured."""
        self._plain: list[float] = []
        """Times of the latest plain steps, in seconds per token."""
        self._net = 0.0
        """Gain since the last suspension, in plain steps. Includes a fraction of the gain of earlier trials."""
        self._owed_s = 0.0
        """Time spent on reading prompts that has not been recovered yet, in seconds."""
        self._num_steps = 0
        self._num_since_plain = 0
        self._num_resting = 0
        self._rest_steps = FIRST_REST_STEPS

    def is_open(self) -> bool:
        """Returns whether this step may speculate. Call it once per step."""
        if self._num_resting:
            self._num_resting -= 1
            return False
        self._num_since_plain += 1
        return self.plain_s is not None and self._num_since_plain <= PLAIN_EVERY

    def note_plain(self, num_tokens: int, time_s: float) -> None:
        """Records the time of a step without draft tokens."""
        self._plain.append(max(time_s, SHORTEST_S) / num_tokens)
        if len(self._plain) < PLAIN_STEPS:
            return
        self.plain_s = statistics.median(self._plain[PLAIN_STEPS // 2 :])
        self._plain.clear()
        self._num_since_plain = 0

    def note(self, num_sequences: int, num_accepted: int, time_s: float, *, read_s: float = 0.0) -> None:
        """Records a speculative step, which produced one token per sequence and `num_accepted` more.

        `read_s` of its time was spent on reading prompts, which pays off in later steps.
        """
        assert self.plain_s is not None, "it was not open"
        self._plain.clear()
        self._owed_s += read_s
        paid_s = self._owed_s / REPAID_STEPS
        self._owed_s -= paid_s
        gave_s = self.plain_s * (num_sequences + num_accepted)
        net = (gave_s - (time_s - read_s + paid_s)) / (self.plain_s * num_sequences)
        self._net += max(net, -MOST_LOST_STEPS / 6)
        self._num_steps += num_accepted > 0 or not read_s  # a step that only read prompts is not a trial
        if self._net <= -MOST_LOST_STEPS or (self._num_steps >= TRIAL_STEPS and self._net < 0):
            self._num_resting = self._rest_steps
            self._rest_steps = min(2 * self._rest_steps, MOST_REST_STEPS)
            self._net, self._num_steps = 0.0, 0
        elif self._num_steps >= TRIAL_STEPS:
            self._rest_steps = max(self._rest_steps // 2, FIRST_REST_STEPS)
            self._net, self._num_steps = self._net * KEPT_OF_GAINS, 0
