"""One request's state in the engine: its tokens, how far they are computed, where their KV lies, how to sample.

Plain data: no torch, and a clock only for what its grammar takes. The engine thread owns every Sequence; the runner
only reads it.
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
"""Which hidden states of a text make its embedding: that of its last token, or the mean of all."""


class Sampling(SamplingParams, frozen=True, kw_only=True):
    """How tokens are chosen and when the answer stops, checked at construction: InvalidRequest names the field."""

    stop_token_ids: frozenset[int] = frozenset()
    """End the answer and are its last token; the model's end-of-sequence ids among them, unless they are ignored."""

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.top_k < 0:
            raise invalid_value("top_k", self.top_k, "at least 0 (0 keeps all)")
        if not all(map(math.isfinite, self.logit_bias.values())):
            raise InvalidRequest("logit_bias must have finite numbers", field="logit_bias")

    @property
    def has_penalties(self) -> bool:
        """Whether a choice depends on the tokens before it in other ways than through the model."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    def finish_reason(self, num_generated_tokens: int, last_token_id: int) -> FinishReason | None:
        """Says why an answer of this length, at least one token, ends with its last; None where it does not."""
        if num_generated_tokens > self.min_tokens and last_token_id in self.stop_token_ids:
            return "stop"
        return "length" if num_generated_tokens >= self.max_tokens else None


class Grammar(Protocol):
    """What form an answer must have, and how far it has come. It belongs to one sequence.

    Its state follows from the tokens that it was given, and from nothing else.
    """

    @property
    def num_tokens(self) -> int:
        """How many tokens of the answer it was given."""
        ...

    def advance(self, token_ids: SequenceOf[int]) -> None:
        """Gives it the next tokens of the answer."""
        ...

    def allowed(self) -> bytes:
        """Says which tokens may come next: token t may if bit t % 8, of value 2^(t % 8), of byte t // 8 is set.

        Those of tokens beyond the last byte are not. No bit is set where nothing can follow: a token before
        was not allowed, or the grammar is too complex to continue with.
        """
        ...


class Sequence:
    """Tokens of one attempt of a request and how far they have come.

    `token_ids` is prompt + emitted (by earlier attempts) + generated. Everything after the prompt counts for
    penalties, min_tokens and max_tokens, so a resumed sequence continues exactly as the first one would have.
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
        """`page_table` is kept, not copied: a PageLease's `page_ids` may be passed and grow under the sequence.

        `grammar` may have been given some of the emitted tokens already, or none.
        """
        self.sequence_id = sequence_id
        self.sampling = sampling
        self.grammar = grammar
        self.adapter = ""
        """What the model is changed by; empty: nothing."""
        self.pooling: Pooling | None = None
        """How the prompt is embedded; None: it is answered. Nothing is sampled for one that is embedded."""
        self.pooled: np.ndarray | None = None
        """What its steps have made of its hidden states so far, float32 [hidden]; see `PooledState`."""
        self.mask_s = 0.0
        """Seconds that the grammar has taken since `take_mask_s`."""
        self.token_ids: list[int] = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        if not self.num_prompt_tokens:
            raise InvalidRequest("the prompt has no tokens", field="prompt")
        self.token_ids += emitted_token_ids
        self.num_emitted_tokens = len(self.token_ids) - self.num_prompt_tokens
        self.num_computed_tokens = 0
        self.page_table: list[int] = page_table if page_table is not None else []
        self.prompt_report: PromptReport | None = None
        """What is known of the prompt's tokens from the second on, where they are reported."""
        self._generated_counts: dict[int, int] = {}
        self._num_counted_tokens = self.num_prompt_tokens
        self._prompt_token_set: frozenset[int] | None = None

    @property
    def prompt_token_ids(self) -> list[int]:
        """A copy of the prompt."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def num_tokens(self) -> int:
        """All tokens so far; also the position of the next one."""
        return len(self.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens after the prompt, those of earlier attempts included; also the index of the next one."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV does not exist yet."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def max_num_tokens(self) -> int:
        """The number of tokens at which it ends at the latest."""
        return self.num_prompt_tokens + (self.sampling.max_tokens if self.pooling is None else 0)

    @property
    def reports_prompt(self) -> bool:
        """Whether the prompt's tokens are to be reported."""
        return self.sampling.prompt_logprobs is not None and self.num_generated_tokens == 0

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether all of the prompt must be computed, cached or not: pages hold no hidden states."""
        return self.reports_prompt or self.pooling == "mean"

    def append_token(self, token_id: int) -> None:
        """Adds a chosen token. Its KV is computed by the next step."""
        self.token_ids.append(token_id)

    def finish_reason(self) -> FinishReason | None:
        """Says why the last token ends the sequence; None where it does not. An embedded one stops once computed."""
        if self.pooling is not None:
            return None if self.num_uncomputed_tokens else "stop"
        num_generated = self.num_generated_tokens
        return None if num_generated == 0 else self.sampling.finish_reason(num_generated, self.token_ids[-1])

    def allowed_tokens(self) -> bytes | None:
        """Says which tokens may come next, in the bits of `Grammar.allowed`; None where there is no grammar: all may.

        The grammar is given the tokens that it lacks first, so that a resumed sequence has the same ones to choose from
        as the one that it continues. Costs only what was added since the last call.
        """
        if self.grammar is None:
            return None
        begun_s = time.perf_counter()
        self.grammar.advance(self.token_ids[self.num_prompt_tokens + self.grammar.num_tokens :])
        allowed = self.grammar.allowed()
        self.mask_s += time.perf_counter() - begun_s
        return allowed

    def take_mask_s(self) -> float:
        """Returns the seconds that its grammar has taken since the last call."""
        mask_s, self.mask_s = self.mask_s, 0.0
        return mask_s

    def generated_counts(self) -> Mapping[int, int]:
        """Returns how often each token occurs after the prompt. Costs only what was added since the last call."""
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
    """A sequence as it will be with more tokens, for code that chooses the token after them. The sequence is not
    changed.

    Where it has a grammar, these must be tokens that it will have: a grammar only goes forward.
    """

    __slots__ = ("_sequence", "_token_ids", "num_generated_tokens", "num_tokens", "sampling")

    def __init__(self, sequence: Sequence, token_ids: SequenceOf[int]) -> None:
        self._sequence = sequence
        self._token_ids = token_ids
        self.sampling = sequence.sampling
        self.num_tokens = sequence.num_tokens + len(token_ids)
        self.num_generated_tokens = sequence.num_generated_tokens + len(token_ids)

    def allowed_tokens(self) -> bytes | None:
        """As of a Sequence."""
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
        """As of a Sequence."""
        counts = dict(self._sequence.generated_counts())
        for token_id in self._token_ids:
            counts[token_id] = counts.get(token_id, 0) + 1
        return counts

    def prompt_token_set(self) -> frozenset[int]:
        """As of a Sequence."""
        return self._sequence.prompt_token_set()


Chooser = Sequence | Lookahead
"""What a choice depends on, beside the logits."""
