"""What a draft model is asked and what it says: plain data, for its loop in the kernels and for the one in torch."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

LEVELS = 8
"""Number of levels of how likely a guess is by the draft."""


class Guess(NamedTuple):
    """A token, and how likely it is by the draft."""

    token_id: int
    probability: float

    @property
    def level(self) -> int:
        """The probability as a number below LEVELS."""
        return min(LEVELS - 1, int(self.probability * LEVELS))


class Draw(NamedTuple):
    """How a token is chosen: the noise is that of `seed`, an unsigned 64-bit number, at `position`.

    The likeliest token is chosen where the temperature is 0; top_k is 0 for all tokens.
    """

    seed: int
    position: int
    temperature: float
    min_p: float
    top_p: float
    top_k: int


class Limit(NamedTuple):
    """How far to guess for one sequence: at most `most` tokens, while one more is likely enough to be right.

    `chances` [LEVELS] says how likely a guess of each level is right if those before it are, `next` how likely one that
    has not been made. Guessing continues while the chance that all are right, the next one too, is above `least`.
    """

    most: int
    chances: SequenceOf[float]
    next: float
    least: float


class Chain:
    """Guesses for one sequence."""

    def __init__(self, limit: Limit) -> None:
        self.guesses: list[Guess] = []
        self._limit = limit
        self._reached = 1.0

    def add(self, guess: Guess) -> bool:
        """Takes one more; returns whether another is wanted."""
        limit = self._limit
        self.guesses.append(guess)
        self._reached *= limit.chances[guess.level]
        return len(self.guesses) < limit.most and self._reached * limit.next > limit.least
