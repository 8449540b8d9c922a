"""The tokens of one answer, over all its attempts, and what one look at its events adds to them."""

from collections.abc import Sequence

import msgspec

from gateway.topology.events import Emitted
from gateway.types import FinishReason, PromptLogprobs, TokenLogprobs
from services.runtime.errors import InternalError, TransferFailed


class Arrived(msgspec.Struct):
    """New tokens in order, and whether the worker ended the answer with them."""

    first_index: int
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: FinishReason | None = None


class TokenLog:
    """The tokens of one answer, over all attempts. Index n is taken only after n-1; repeats are dropped."""

    def __init__(self, max_tokens: int, token_ids: Sequence[int] = (), *, num_prompt_logprobs: int = 0) -> None:
        self.token_ids: list[int] = list(token_ids)
        self._max_tokens = max_tokens
        self._num_prompt_logprobs = num_prompt_logprobs
        # The worker that began the answer elsewhere computed the prompt, and how much of it was cached is not known
        # here.
        self._num_cached_tokens: int | None = 0 if token_ids else None

    @property
    def num_cached_tokens(self) -> int:
        """Tokens from the prompt's beginning that no attempt computed, because other requests had left their pages."""
        return self._num_cached_tokens or 0

    @property
    def next_index(self) -> int:
        """The index that must come next."""
        return len(self.token_ids)

    @property
    def is_full(self) -> bool:
        """Whether it has max_tokens tokens."""
        return len(self.token_ids) >= self._max_tokens

    def num_left(self) -> int:
        """Returns the number of tokens that may still come."""
        return self._max_tokens - len(self.token_ids)

    def note_prefill(self, num_cached_tokens: int) -> None:
        """Notes that an attempt computes the prompt except for its first tokens."""
        # What one attempt computed, the next may find as pages: the request has computed it all the same.
        known = self._num_cached_tokens
        self._num_cached_tokens = num_cached_tokens if known is None else min(known, num_cached_tokens)

    def accept(self, tokens: Emitted) -> Emitted:
        """Appends what is new and returns it. Raises TransferFailed at a gap, InternalError beyond max_tokens."""
        next_index = len(self.token_ids)
        num_known = next_index - tokens.first_index
        if num_known < 0:
            raise TransferFailed(f"token {next_index} is missing; the worker sent {tokens.first_index} next")
        if tokens.logprobs is not None and len(tokens.logprobs) != len(tokens.token_ids):
            raise InternalError("a worker sent tokens without their log-probabilities")
        if num_known > 0:
            logprobs = None if tokens.logprobs is None else tokens.logprobs[num_known:]
            tokens = Emitted(next_index, tokens.token_ids[num_known:], logprobs)
        elif next_index == 0 and len(tokens.prompt_logprobs or ()) != self._num_prompt_logprobs:
            raise InternalError("a worker sent the first token without the prompt's log-probabilities")
        if next_index + len(tokens.token_ids) > self._max_tokens:
            raise InternalError("a worker sent more tokens than it was asked for")
        self.token_ids += tokens.token_ids
        return tokens
