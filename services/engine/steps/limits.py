"""Limits on the length and the tokens of a sequence, checked before any computation. Must not import torch."""

from collections.abc import Iterable
from dataclasses import dataclass

from services.runtime.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class SequenceLimits:
    """Limits that a model and its page pool impose on one sequence."""

    context_length_tokens: int
    vocab_size: int
    num_pages: int
    page_size: int

    @property
    def max_sequence_tokens(self) -> int:
        """Length of the longest sequence that fits into the model's context and the pool."""
        return min(self.context_length_tokens, self.num_pages * self.page_size)

    def check_fits(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Rejects a request that exceeds the model's context or the pool.

        Raises:
            InvalidRequest: With the code context_length_exceeded and the numbers.
        """
        wanted = num_prompt_tokens + max_tokens
        if wanted <= self.max_sequence_tokens:
            return
        if wanted > self.context_length_tokens:
            reason = f"the model's context length is {self.context_length_tokens} tokens"
        else:
            pool_tokens = self.num_pages * self.page_size
            reason = f"the worker's KV memory holds {pool_tokens} tokens ({self.num_pages} pages)"
        raise InvalidRequest(
            f"{reason}, but {wanted} were requested: {num_prompt_tokens} in the prompt and {max_tokens} for the answer",
            field="prompt" if num_prompt_tokens >= self.max_sequence_tokens else "max_tokens",
            code="context_length_exceeded",
        )

    def check_token_ids(self, token_ids: Iterable[int], *, field: str = "prompt") -> None:
        """Raises InvalidRequest for the first token ID outside the model's vocabulary."""
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequest(
                    f"token id {token_id} is outside the model's vocabulary of {self.vocab_size}", field=field
                )
