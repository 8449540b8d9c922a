"""What a draft model would say next: cheaper than `sample`, of the same noise, and not to be relied on.

Of a draw with top-k or top-p only the likeliest candidates race, and what depends on other tokens is left out. The
noise is that of the position, so that from similar logits the same token is drawn (Gumbel coupling). The CPU kernels
have a loop of their own for this, `kernels/guess.h`.

Legend: R rows, V vocabulary, C candidates of a row.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import torch

from services.engine.kernels.library import LEVELS, Draw
from services.engine.sampling import gumbel_noise

_CANDIDATES = 32
"""So few that the noise costs little, so many that they nearly always have the winner among them."""


class Guess(NamedTuple):
    """A token, and how likely it is by the draft."""

    token_id: int
    probability: float

    @property
    def level(self) -> int:
        """The same as a number below LEVELS."""
        return min(LEVELS - 1, int(self.probability * LEVELS))


class Limit(NamedTuple):
    """How far to guess for one sequence: at most `most` tokens, while one more is likely enough to be right.

    `chances` [LEVELS] says how likely a guess of each level is right if those before it are, `next` how likely one that
    has not been made. Guessing goes on while the chance that all are right, the next one too, is above `least`.
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
        """Take one more; return whether another is wanted."""
        limit = self._limit
        self.guesses.append(guess)
        self._reached *= limit.chances[guess.level]
        return len(self.guesses) < limit.most and self._reached * limit.next > limit.least


def guess(logits: torch.Tensor, draws: SequenceOf[Draw]) -> list[Guess]:
    """Say which token `sample` would choose in each row of `logits` [R, V] float32, or nearly."""
    values = logits.numpy(force=True)
    token_ids = values.argmax(axis=-1)
    by_chance = [row for row, draw in enumerate(draws) if draw.temperature > 0]
    scales = np.array([draw.temperature or 1.0 for draw in draws], np.float32)
    if by_chance:
        values = values / scales[:, None]
        count = min(_CANDIDATES, values.shape[1])
        candidate_ids = np.argpartition(values[by_chance], -count, axis=-1)[:, -count:]
        seeds, positions = [draws[row].seed for row in by_chance], [draws[row].position for row in by_chance]
        noise = gumbel_noise(seeds, positions, torch.from_numpy(candidate_ids)).numpy()
        for place, row in enumerate(by_chance):
            scores = values[row, candidate_ids[place]]
            noise[place] += np.where(_is_likely(scores, draws[row]), scores, -np.inf)
            token_ids[row] = candidate_ids[place, noise[place].argmax()]
    rows = np.arange(len(token_ids))
    chosen = values[rows, token_ids]
    highest = values.max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):  # of a draft that gives NaN, nothing is likely
        probabilities = np.exp(chosen - highest[:, 0]) / np.exp(values - highest).sum(axis=-1)
    return [*map(Guess, token_ids.tolist(), np.nan_to_num(probabilities).tolist())]


def _is_likely(scores: np.ndarray, draw: Draw) -> np.ndarray:
    """Say of the candidates' scores [C] which top-k, top-p and min-p leave, as if there were no others."""
    order = np.argsort(-scores)
    weights = np.exp(scores[order] - scores[order[0]])
    shares = weights.cumsum() / weights.sum()
    is_kept = (shares - weights / weights.sum() < draw.top_p) & (weights >= draw.min_p)
    is_kept[draw.top_k or len(order) :] = False
    is_likely = np.empty(len(order), bool)
    is_likely[order] = is_kept
    return is_likely
