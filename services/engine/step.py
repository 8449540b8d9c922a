"""The plain description of one engine step and of its result; no torch, no policy."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.engine.sequence import Sequence
from services.runtime.errors import InvalidRequest, TandemError


class NonFiniteLogits(TandemError):
    """The model gave NaN or infinity for a sequence, or nothing was left to choose from: no token can be trusted."""


class NothingAllowed(NonFiniteLogits, InvalidRequest):
    """A sequence's grammar allows no token, as one that is too complex to go on with: no fault of who computes it."""


@dataclass(frozen=True, slots=True)
class StepItem:
    """Compute `token_ids[num_computed : num_computed + num_scheduled_tokens]` of one sequence.

    A token is sampled where that reaches the end of `token_ids`, unless `wants_token` is false.
    """

    sequence: Sequence
    num_scheduled_tokens: int
    wants_token: bool = True

    @property
    def is_sampled(self) -> bool:
        """Whether the step gives a token for this sequence."""
        return self.wants_token and self.num_scheduled_tokens == self.sequence.num_uncomputed_tokens


@dataclass(slots=True)
class StepPlan:
    """What one step computes. A sequence occurs at most once."""

    items: list[StepItem] = field(default_factory=list)

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens of all items."""
        return sum(item.num_scheduled_tokens for item in self.items)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A chosen token. Logprobs are natural logarithms under the model's own distribution.

    `logprob` and `top` (token id and logprob, likeliest first) are None and empty where `Sampling.logprobs` is None.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome per item of the plan, in its order: a token, None where none was due, or why that sequence must fail.

    A failure is the sequence's own: the others' results stand.
    """

    outcomes: list[SampledToken | NonFiniteLogits | None]
