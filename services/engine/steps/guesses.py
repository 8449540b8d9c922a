"""Input and output of a draft model as plain data, for the loop in the kernels and the loop in torch."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

LEVELS = 8
"""Number of levels into which the draft's probabilities are grouped."""


class Guess(NamedTuple):
    """A draft token, and its probability according to the draft model."""

    token_id: int
    probability: float

    @property
    def level(self) -> int:
        """The probability as an integer below LEVELS."""
        return min(LEVELS - 1, int(self.probability * LEVELS))


class Draw(NamedTuple):
    """Sampling parameters of one token. `seed` (unsigned 64-bit) and `position` determine the noise.

    A temperature of 0 selects the likeliest token. A top_k of 0 allows all tokens.
    """

    seed: int
    position: int
    temperature: float
    min_p: float
    top_p: float
    top_k: int


class Limit(NamedTuple):
    """Limit on the draft tokens of one sequence: at most `most`, and fewer if another is unlikely to be accepted.

    `chances` [LEVELS] is the probability, by level, that a draft token is accepted if all earlier ones are. `next` is
    this probability for a draft token that does not exist yet. Drafting continues while the probability that all draft
    tokens are accepted, including the next one, is above `least`.
    """

    most: int
    chances: SequenceOf[float]
    next: float
    least: float


class Chain:
    """Draft tokens of one sequence."""

    def __init__(self, limit: Limit) -> None:
        self.guesses: list[Guess] = []
        self._limit = limit
        self._reached = 1.0

    def add(self, guess: Guess) -> bool:
        """Appends a draft token. Returns whether to draft another."""
        limit = self._limit
        self.guesses.append(guess)
        self._reached *= limit.chances[guess.level]
        return len(self.guesses) < limit.most and self._reached * limit.next > limit.least
