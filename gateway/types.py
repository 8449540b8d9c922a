"""What a request and its answer are made of: how tokens are chosen, and the parts that an answer comes in.

Plain data, which every room of the gateway may import: nothing here knows an API, a worker or a bound.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec

from services.runtime.sampling import SamplingMembers, SamplingParams
from services.structured.form import AnswerForm

FinishReason = Literal["stop", "length"]
"""Why an answer ended."""


Pooling: TypeAlias = Literal["last", "mean"]
"""Which hidden states of a text make its vector: that of the last token, or the mean of all."""

SLICE_CANDIDATES = 2048
"""The candidates of a prompt's tokens that are dealt with at a time, in less than a millisecond."""


class AskedSampling(SamplingMembers, kw_only=True):
    """Sampling as a client asked for it; None where something is absent. Unchecked."""

    max_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    logit_bias: Mapping[int, float] = {}
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: str = ""
    """What the answer must keep to, as `gateway.forms.response_format` writes it; empty: any text will do."""
    form_field: str = "response_format"
    """The member of the request that asks for it."""


class Sampling(SamplingParams, frozen=True, kw_only=True):
    """Sampling as it will be done: checked, complete, and the same for every attempt."""

    stop_token_ids: tuple[int, ...] = ()
    form: AnswerForm | None = None
    """What the answer must keep to; None: any text will do."""


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Natural logarithms of probabilities: of the chosen token, and (token id, logarithm) of the likeliest ones."""

    logprob: float
    top: list[tuple[int, float]]


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Natural logarithms of probabilities for a prompt's tokens from the second on, in columns: there may be many.

    `logprobs` has one entry for each token; `top_token_ids` and `top_logprobs` have its `num_top` likeliest tokens, one
    token of the prompt after the other.
    """

    logprobs: Sequence[float]
    num_top: int
    top_token_ids: Sequence[int]
    top_logprobs: Sequence[float]

    def __len__(self) -> int:
        return len(self.logprobs)

    def slices(self) -> Iterator[tuple[int, "PromptLogprobs"]]:
        """Yields the columns of some tokens after the other, with the first one's place: work of less than 1 ms each.

        All of them are lists.
        """
        num = self.num_top
        num_tokens = max(1, SLICE_CANDIDATES // (1 + num))
        for start in range(0, len(self), num_tokens):
            end = start + num_tokens
            tops = slice(start * num, end * num)
            top_ids, top_logprobs = list(self.top_token_ids[tops]), list(self.top_logprobs[tops])
            yield start, PromptLogprobs(list(self.logprobs[start:end]), num, top_ids, top_logprobs)

    def parts(self) -> Iterator[list[TokenLogprobs]]:
        """Yields an entry for each token, as many at a time as are in a slice."""
        for _, part in self.slices():
            tops, num = list(zip(part.top_token_ids, part.top_logprobs, strict=True)), self.num_top
            yield [
                TokenLogprobs(logprob, tops[place * num : (place + 1) * num])
                for place, logprob in enumerate(part.logprobs)
            ]

    def entries(self) -> list[TokenLogprobs]:
        """Returns an entry for each token."""
        return list(itertools.chain.from_iterable(self.parts()))


class Usage(msgspec.Struct, frozen=True):
    """Counts and times of one answer, as in the public API."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_s: float
    prefill_s: float
    transfer_s: float
    decode_s: float


class Delta(msgspec.Struct):
    """The next part of an answer. The last one has `finish_reason` and `usage`."""

    first_index: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | None = None
    """Log-probabilities of the prompt's tokens from the second on; with the first token, where they were asked for."""
    layout: str = ""
    """With the first token: fingerprint of layout and weights of the worker that continues the answer."""
