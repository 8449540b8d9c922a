"""State of one request in the engine: its tokens, its progress, its page table, and its sampling parameters.

Plain data. Must not import torch, and uses a clock only to measure the grammar. The engine thread owns every Sequence,
and the runner only reads it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from services.runtime.bounds import invalid_value
from services.runtime.errors import InvalidRequest
from services.runtime.sampling import SamplingParams, check_numbers

if TYPE_CHECKING:
    from services.engine.steps.step import PromptReport

FinishReason = Literal["stop", "length"]
Pooling = Literal["last", "mean"]
"""Hidden states that form an embedding: the state of the last token, or the mean over all tokens."""


class Sampling(SamplingParams, frozen=True, kw_only=True):
    """Sampling parameters and stop conditions.

    The constructor raises InvalidRequest with the name of an invalid field.
    """

    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the response and are its last token. Includes the model's EOS tokens unless they are ignored."""

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.top_k < 0:
            raise invalid_value("top_k", self.top_k, "at least 0 (0 keeps all)")
        if not all(map(math.isfinite, self.logit_bias.values())):
            raise InvalidRequest("logit_bias must have finite numbers", field="logit_bias")

    @property
    def has_penalties(self) -> bool:
        """Whether a choice depends on earlier tokens other than through the model."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    def finish_reason(self, num_generated_tokens: int, last_token_id: int) -> FinishReason | None:
        """Returns why a response of this length (at least 1) ends with its last token, or None if it continues."""
        if num_generated_tokens > self.min_tokens and last_token_id in self.stop_token_ids:
            return "stop"
        return "length" if num_generated_tokens >= self.max_tokens else None


class Grammar(Protocol):
    """Output constraint of one sequence, and the progress through it.

    The state depends only on the tokens that it has received.
    """

    @property
    def num_tokens(self) -> int:
        """Number of response tokens that the grammar has received."""
        ...

    def advance(self, token_ids: SequenceOf[int]) -> None:
        """Advances the grammar by the next tokens of the response."""
        ...

    def allowed(self) -> bytes:
        """Returns a bit mask of the allowed next tokens.

        Token t is allowed if bit t % 8, of value 2^(t % 8), of byte t // 8 is set. Tokens beyond the last byte are not
        allowed. No bit is set if no token can follow: an earlier token was not allowed, or the grammar is too complex
        to continue.
        """
        ...


class Sequence:
    """The tokens of one attempt of a request, and how many of them are computed.

    `token_ids` is prompt + emitted (by earlier attempts) + generated. Everything after the prompt counts toward
    penalties, min_tokens, and max_tokens, so a resumed sequence continues exactly like the original.
    """

    __slots__ = (
        "_generated_counts",
        "_num_counted_tokens",
        "_prompt_token_set",
        "adapter",
        "grammar",
        "mask_s",
        "num_computed_tokens",
        "num_emitted_tokens",
        "num_prompt_tokens",
        "page_table",
        "pooled",
        "pooling",
        "prompt_report",
        "sampling",
        "sequence_id",
        "token_ids",
    )

    def __init__(
        self,
        sequence_id: Hashable,
        prompt_token_ids: Iterable[int],
        *,
        sampling: Sampling,
        emitted_token_ids: Iterable[int] = (),
        page_table: list[int] | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        """Stores `page_table` without copying it, so a PageLease's `page_ids` may be passed and may grow later.

        `grammar` may already have received some or all of the emitted tokens.
        """
        self.sequence_id = sequence_id
        self.sampling = sampling
        self.grammar = grammar
        self.adapter = ""
        """Name of the adapter applied to the model. Empty if there is no adapter."""
        self.pooling: Pooling | None = None
        """Pooling of an embedding request, for which nothing is sampled. None if the request generates tokens."""
        self.pooled: np.ndarray | None = None
        """Hidden states pooled so far, float32 [hidden]. See `PooledState`."""
        self.mask_s = 0.0
        """Time spent in the grammar since the last `take_mask_s`, in seconds."""
        self.token_ids: list[int] = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        if not self.num_prompt_tokens:
            raise InvalidRequest("the prompt has no tokens", field="prompt")
        self.token_ids += emitted_token_ids
        self.num_emitted_tokens = len(self.token_ids) - self.num_prompt_tokens
        self.num_computed_tokens = 0
        self.page_table: list[int] = page_table if page_table is not None else []
        self.prompt_report: PromptReport | None = None
        """Report on the prompt tokens from the second token, if the request asks for it."""
        self._generated_counts: dict[int, int] = {}
        self._num_counted_tokens = self.num_prompt_tokens
        self._prompt_token_set: frozenset[int] | None = None

    @property
    def prompt_token_ids(self) -> list[int]:
        """A copy of the prompt."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far, which is also the position of the next token."""
        return len(self.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        """Number of tokens after the prompt, including earlier attempts, which is also the index of the next token."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV does not exist yet."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def max_num_tokens(self) -> int:
        """Maximum number of tokens of the sequence."""
        return self.num_prompt_tokens + (self.sampling.max_tokens if self.pooling is None else 0)

    @property
    def reports_prompt(self) -> bool:
        """Whether steps report the prompt's tokens."""
        return self.sampling.prompt_logprobs is not None and self.num_generated_tokens == 0

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether the whole prompt must be computed even if it is cached, because pages contain no hidden states."""
        return self.reports_prompt or self.pooling == "mean"

    def append_token(self, token_id: int) -> None:
        """Appends a sampled token. The next step computes its KV."""
        self.token_ids.append(token_id)

    def finish_reason(self) -> FinishReason | None:
        """Returns why the last token ends the sequence, or None if the sequence continues.

        Embedding requests finish once their prompt is computed.
        """
        if self.pooling is not None:
            return None if self.num_uncomputed_tokens else "stop"
        num_generated = self.num_generated_tokens
        return None if num_generated == 0 else self.sampling.finish_reason(num_generated, self.token_ids[-1])

    def allowed_tokens(self) -> bytes | None:
        """Returns the allowed next tokens in the bits of `Grammar.allowed`, or None if there is no grammar.

        First advances the grammar by the tokens that it has not received, so that a resumed sequence has the same
        choices as the original. Costs only the tokens added since the last call.
        """
        if self.grammar is None:
            return None
        begun_s = time.perf_counter()
        self.grammar.advance(self.token_ids[self.num_prompt_tokens + self.grammar.num_tokens :])
        allowed = self.grammar.allowed()
        self.mask_s += time.perf_counter() - begun_s
        return allowed

    def take_mask_s(self) -> float:
        """Returns the seconds spent in the grammar since the last call."""
        mask_s, self.mask_s = self.mask_s, 0.0
        return mask_s

    def generated_counts(self) -> Mapping[int, int]:
        """Returns how often each token occurs after the prompt. Costs only the tokens added since the last call."""
        for token_id in self.token_ids[self._num_counted_tokens :]:
            self._generated_counts[token_id] = self._generated_counts.get(token_id, 0) + 1
        self._num_counted_tokens = len(self.token_ids)
        return self._generated_counts

    def prompt_token_set(self) -> frozenset[int]:
        """Returns the distinct tokens of the prompt."""
        if self._prompt_token_set is None:
            self._prompt_token_set = frozenset(self.prompt_token_ids)
        return self._prompt_token_set


class Lookahead:
    """View of a sequence with additional tokens, for choosing the token after them. Does not change the sequence.

    If the sequence has a grammar, pass only accepted tokens, because the grammar cannot move backward.
    """

    __slots__ = ("_sequence", "_token_ids", "num_generated_tokens", "num_tokens", "sampling")

    def __init__(self, sequence: Sequence, token_ids: SequenceOf[int]) -> None:
        self._sequence = sequence
        self._token_ids = token_ids
        self.sampling = sequence.sampling
        self.num_tokens = sequence.num_tokens + len(token_ids)
        self.num_generated_tokens = sequence.num_generated_tokens + len(token_ids)

    def allowed_tokens(self) -> bytes | None:
        """Returns the allowed next tokens. See `Sequence.allowed_tokens`."""
        sequence, grammar = self._sequence, self._sequence.grammar
        if grammar is None:
            return None
        num_missing = self.num_generated_tokens - grammar.num_tokens
        num_ahead = min(num_missing, len(self._token_ids))
        behind = sequence.token_ids[sequence.num_tokens - (num_missing - num_ahead) :]
        begun_s = time.perf_counter()
        grammar.advance([*behind, *self._token_ids[len(self._token_ids) - num_ahead :]])
        allowed = grammar.allowed()
        sequence.mask_s += time.perf_counter() - begun_s
        return allowed

    def generated_counts(self) -> Mapping[int, int]:
        """Returns how often each token occurs after the prompt."""
        counts = dict(self._sequence.generated_counts())
        for token_id in self._token_ids:
            counts[token_id] = counts.get(token_id, 0) + 1
        return counts

    def prompt_token_set(self) -> frozenset[int]:
        """Returns the distinct tokens of the prompt."""
        return self._sequence.prompt_token_set()


Chooser = Sequence | Lookahead
"""Everything that a choice depends on, except the logits."""
