"""Drafts tokens from the earlier text of the sequence: prompt lookup (Saxena 2023), also known as n-gram.

Text repeats itself: code repeats names, summaries repeat their source, and small models repeat most text. If the last
tokens occurred before, the tokens that followed them are proposed. Must not import torch. Uses no model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MIN_MATCH_TOKENS = 2
MAX_MATCH_TOKENS = 16
"""Longest match that is counted. Longer matches predict no better."""
NUM_PLACES = 8
"""Number of most recent earlier occurrences of the last tokens to compare."""


class PromptLookup:
    """The tokens of one sequence, with lookup of its last tokens. Each lookup costs one numpy scan over the tokens."""

    def __init__(self) -> None:
        self._token_ids = np.empty(0, dtype=np.int64)
        self._num_tokens = 0

    def propose(self, token_ids: Sequence[int], max_tokens: int) -> tuple[list[int], int]:
        """Returns draft tokens to follow `token_ids`, and the length of the match from which they were copied.

        `token_ids` must extend the `token_ids` of the previous call. Returns no draft tokens if fewer than
        MIN_MATCH_TOKENS match.
        """
        known = self._extend(token_ids)
        num_tokens = len(known)
        if num_tokens <= MIN_MATCH_TOKENS or max_tokens < 1:
            return [], 0
        # Every position after an earlier occurrence of the last two tokens.
        is_match = (known[1:-1] == known[-1]) & (known[:-2] == known[-2])
        places = is_match.nonzero()[0][-NUM_PLACES:] + 2
        if not len(places):
            return [], 0
        lengths = [self._match_length(int(place)) for place in places]
        length = max(lengths)
        place = int(places[max(index for index, each in enumerate(lengths) if each == length)])
        # A match that reaches the end is a repetition, which is continued with the draft tokens themselves.
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
        """Returns how many tokens before `place` equal the tokens at the end."""
        most = min(place, MAX_MATCH_TOKENS)
        before = self._token_ids[place - most : place]
        last = self._token_ids[self._num_tokens - most : self._num_tokens]
        differs = (before != last)[::-1]
        return int(differs.argmax()) if differs.any() else most
