"""Guesses what comes next from what a sequence has said before: prompt lookup (Saxena 2023), also known as n-gram.

Text repeats itself: code its names, summaries their source, small models everything. Where the last tokens occurred
before, what followed them then is proposed. No model, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MIN_MATCH_TOKENS = 2
MAX_MATCH_TOKENS = 16
"""Longer matches are as good as these."""
NUM_PLACES = 8
"""Number of the latest places of the last tokens that are compared."""


class PromptLookup:
    """The tokens of one sequence, to look its last ones up in. Costs a scan over its tokens, which numpy makes."""

    def __init__(self) -> None:
        self._token_ids = np.empty(0, dtype=np.int64)
        self._num_tokens = 0

    def propose(self, token_ids: Sequence[int], max_tokens: int) -> tuple[list[int], int]:
        """Returns what may follow `token_ids`, and how many of the last of them occurred before what it was taken from.

        `token_ids` are those of the last call and more. Nothing is proposed where fewer than MIN_MATCH_TOKENS match.
        """
        known = self._extend(token_ids)
        num_tokens = len(known)
        if num_tokens <= MIN_MATCH_TOKENS or max_tokens < 1:
            return [], 0
        # Every place but the last whose token, with the one before it, equals the last two.
        is_match = (known[1:-1] == known[-1]) & (known[:-2] == known[-2])
        places = is_match.nonzero()[0][-NUM_PLACES:] + 2
        if not len(places):
            return [], 0
        lengths = [self._match_length(int(place)) for place in places]
        length = max(lengths)
        place = int(places[max(index for index, each in enumerate(lengths) if each == length)])
        # What repeats itself until the end keeps repeating: behind the end come the proposals themselves.
        period = num_tokens - place
        found: list[int] = known[place : place + max_tokens].tolist()
        return [found[index % period] for index in range(max_tokens)], length

    def _extend(self, token_ids: Sequence[int]) -> np.ndarray:
        num_tokens = len(token_ids)
        if num_tokens > len(self._token_ids):
            grown = np.empty(max(256, 2 * num_tokens), dtype=np.int64)
            grown[: self._num_tokens] = self._token_ids[: self._num_tokens]
            self._token_ids = grown
        self._token_ids[self._num_tokens : num_tokens] = token_ids[self._num_tokens :]
        self._num_tokens = num_tokens
        return self._token_ids[:num_tokens]

    def _match_length(self, place: int) -> int:
        """Returns how many tokens before `place` are those at the end, the same order."""
        most = min(place, MAX_MATCH_TOKENS)
        before = self._token_ids[place - most : place]
        last = self._token_ids[self._num_tokens - most : self._num_tokens]
        differs = (before != last)[::-1]
        return int(differs.argmax()) if differs.any() else most
