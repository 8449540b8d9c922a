"""What a program gets for a prompt: its answers as far as they have come. Plain data."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The natural logarithm of a chosen token's probability, and of the likeliest tokens', by token id."""

    token_id: int
    logprob: float
    top: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer. `finish_reason` is stop or length; None: it is not complete."""

    index: int
    text: str
    token_ids: Sequence[int]
    finish_reason: str | None
    logprobs: Sequence[TokenLogprob] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the log-probabilities of its tokens; None where they were not asked for."""
        return None if self.logprobs is None else sum(each.logprob for each in self.logprobs)


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A vector: the numbers that the server's /v1/embeddings answers."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """A text with its vector; `prompt` is None where it was given as token ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: EmbeddingOutput


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt with its answers; `prompt` is None where it was given as token ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: Sequence[CompletionOutput]

    @property
    def finished(self) -> bool:
        """Whether all answers are complete."""
        return all(each.finish_reason is not None for each in self.outputs)
