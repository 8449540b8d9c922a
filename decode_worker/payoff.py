"""How likely proposed tokens are to be right, learned from what became of earlier ones, and what a token is worth.

Pure arithmetic: no model, no clock. Steps are counted by the caller.

A proposal is of a *kind*: where it comes from, whether the sequence draws by chance, and how sure its source was (the
draft's probability, or how many tokens matched). What was accepted of each kind is known for each request and for the
worker as a whole; a request is believed by its own record as far as it has one, and by the worker's otherwise. Records
fade step by step, so that what did not pay is tried again after a while, and rarely.

Price: at the best, a step gives as many tokens for its time as possible. So a proposal belongs into it if its chance is
more than the tokens that the step gives in the time that it costs (as in TurboSpec, Liu et al. 2024).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from services.engine.steps.guesses import LEVELS

Source = Literal["ngram", "draft"]

ANY_LEVEL = LEVELS
"""Level of a draft's guess before it is made."""
PRIOR_WEIGHT = 4.0
"""As many observations as what was known before counts for."""
MOST_WEIGHT = 64.0
"""A record does not count for more observations than this: the past fades as they come."""
TRIAL_STEPS = 32
MOST_LOST_STEPS = 12.0
"""A trial that has lost the time of that many plain steps ends at once, but not by one or two that were held up."""
KEPT_OF_GAINS = 0.5
"""What was gained in earlier trials counts for so much: a text that cannot be guessed does not end it for the next."""
PLAIN_EVERY = 128
"""After this number of steps with proposals, PLAIN_STEPS are made without, to be compared with."""
PLAIN_STEPS = 16
"""Plain steps measured in a row; the first half, which takes up to a third longer each, does not count."""
REPAID_STEPS = 64
"""Steps in which reading a prompt is paid for."""
SHORTEST_S = 1e-6
FIRST_REST_STEPS = 32
MOST_REST_STEPS = 1024
REQUEST_HALF_LIFE_STEPS = 256
WORKER_HALF_LIFE_STEPS = 4096


class Kind(NamedTuple):
    """What makes proposals alike. `level`, of how sure a source is, is from 0 to LEVELS - 1, or ANY_LEVEL."""

    source: Source
    is_greedy: bool
    level: int


def level_of_match(num_tokens: int) -> int:
    """Returns how sure a match of this length, at least 2, is: 2, 3, 4, 5, 6 to 7, 8 to 11, 12 to 15, more."""
    if num_tokens < 6:
        return num_tokens - 2
    return 4 if num_tokens < 8 else 5 if num_tokens < 12 else 6 if num_tokens < 16 else 7


def first_guess(kind: Kind) -> float:
    """The chance of a kind of which nothing is known yet."""
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
    """What was accepted of each kind: a request's over the worker's, or the worker's over a first guess."""

    def __init__(self, half_life_steps: int, *, behind: Record | None = None) -> None:
        self._half_life_steps = half_life_steps
        self._behind = behind
        self._tallies: dict[Kind, _Tally] = {}

    def chance(self, kind: Kind, step: int) -> float:
        """How likely the next proposal of this kind is to be right, if those before it are."""
        before = first_guess(kind) if self._behind is None else self._behind.chance(kind, step)
        tally = self._tallies.get(kind)
        if tally is None:
            return before
        if step > tally.step:
            self._fade(tally, step)
        return (PRIOR_WEIGHT * before + tally.num_right) / (PRIOR_WEIGHT + tally.num)

    def note(self, kind: Kind, step: int, right: float) -> None:
        """One of this kind, those before it being right, was right (1) or not (0), or so likely to be right."""
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
    """What a second of a step costs in tokens: those that it gives by what is in it so far, over its time so far."""

    def __init__(self, *, num_tokens: float, time_s: float) -> None:
        self._num_tokens = num_tokens
        self._time_s = time_s

    def of(self, time_s: float) -> float:
        """So much time, in tokens."""
        return time_s * self._num_tokens / self._time_s

    def add(self, *, num_tokens: float, time_s: float) -> None:
        """The step gives so much more, and takes so much longer."""
        self._num_tokens += num_tokens
        self._time_s += time_s


def worthwhile(chances: Sequence[float], cost: float) -> tuple[int, float]:
    """How many of the first proposals to take, and what is gained by it, in tokens.

    `chances` are of each if those before it are right, and `cost` is the price of one.
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
    """Whether speculation has paid at a size of batch, all that it costs included; where it has not, it rests.

    Steps that were tried are compared by the clock with plain ones, of which a few are made now and then. Every trial
    that loses makes the rest after it twice as long, up to MOST_REST_STEPS, and every one that gains half as long.
    """

    def __init__(self) -> None:
        self.plain_s: float | None = None
        """Seconds for a token without proposals; None: that was not measured yet."""
        self._plain: list[float] = []
        """Times of the latest plain steps."""
        self._net = 0.0
        """Plain steps whose time was gained since the last rest, of earlier trials a part."""
        self._owed_s = 0.0
        """Time that was spent on reading and is to be gained yet."""
        self._num_steps = 0
        self._num_since_plain = 0
        self._num_resting = 0
        self._rest_steps = FIRST_REST_STEPS

    def is_open(self) -> bool:
        """Whether this step may be tried; to be asked once a step."""
        if self._num_resting:
            self._num_resting -= 1
            return False
        self._num_since_plain += 1
        return self.plain_s is not None and self._num_since_plain <= PLAIN_EVERY

    def note_plain(self, num_tokens: int, time_s: float) -> None:
        """Notes the time of a step without proposals."""
        self._plain.append(max(time_s, SHORTEST_S) / num_tokens)
        if len(self._plain) < PLAIN_STEPS:
            return
        self.plain_s = statistics.median(self._plain[PLAIN_STEPS // 2 :])
        self._plain.clear()
        self._num_since_plain = 0

    def note(self, num_sequences: int, num_accepted: int, time_s: float, *, read_s: float = 0.0) -> None:
        """Notes a step that was tried: it gave each sequence a token, and `num_accepted` more.

        `read_s` of it went into reading prompts, which pays in steps to come.
        """
        assert self.plain_s is not None, "it was not open"
        self._plain.clear()
        self._owed_s += read_s
        paid_s = self._owed_s / REPAID_STEPS
        self._owed_s -= paid_s
        gave_s = self.plain_s * (num_sequences + num_accepted)
        net = (gave_s - (time_s - read_s + paid_s)) / (self.plain_s * num_sequences)
        self._net += max(net, -MOST_LOST_STEPS / 6)
        self._num_steps += num_accepted > 0 or not read_s  # a step that only read is no trial yet
        if self._net <= -MOST_LOST_STEPS or (self._num_steps >= TRIAL_STEPS and self._net < 0):
            self._num_resting = self._rest_steps
            self._rest_steps = min(2 * self._rest_steps, MOST_REST_STEPS)
            self._net, self._num_steps = 0.0, 0
        elif self._num_steps >= TRIAL_STEPS:
            self._rest_steps = max(self._rest_steps // 2, FIRST_REST_STEPS)
            self._net, self._num_steps = self._net * KEPT_OF_GAINS, 0
