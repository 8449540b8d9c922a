"""Plain data that describes one engine step and its result. Must not import torch. Contains no policy."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace

import numpy as np

from services.engine.steps.sequence import Sequence
from services.runtime.errors import GrammarExhausted, TandemError

PROMPT_ROWS = 64
"""Maximum number of tokens of reported prompts per step and per pass. The step's other items wait for them.
[64, V] logits take 80 MB in float64 for the largest vocabularies. A whole chunk would take gigabytes."""


class NonFiniteLogits(TandemError):
    """The model's logits contain NaN or plus infinity, or all tokens are excluded: no token can be trusted."""


class NothingAllowed(NonFiniteLogits, GrammarExhausted):
    """A sequence's grammar allows no token, for example because it is too complex. The worker is not at fault."""


@dataclass(frozen=True, slots=True)
class StepItem:
    """Computes `token_ids[num_computed : num_computed + num_scheduled_tokens]` of one sequence.

    If this range reaches the end of `token_ids`, a token is sampled, unless `wants_token` is false. `proposed` contains
    draft tokens for the next positions. They are computed in the same pass, and a token is also sampled after each.
    """

    sequence: Sequence
    num_scheduled_tokens: int
    wants_token: bool = True
    proposed: tuple[int, ...] = ()

    @property
    def is_sampled(self) -> bool:
        """Whether the step samples a token for this sequence."""
        return self.wants_token and self.num_scheduled_tokens == self.sequence.num_uncomputed_tokens

    @property
    def num_pooled(self) -> int:
        """Number of tokens whose hidden states are pooled: all tokens for a mean, otherwise only the prompt's last."""
        pooling = self.sequence.pooling
        if pooling is None:
            return 0
        is_last = self.num_scheduled_tokens == self.sequence.num_uncomputed_tokens
        return self.num_scheduled_tokens if pooling == "mean" else int(is_last)

    @property
    def num_rows(self) -> int:
        """Number of tokens that the model computes for this item."""
        return self.num_scheduled_tokens + len(self.proposed)


@dataclass(slots=True)
class StepPlan:
    """The work of one step. Contains each sequence at most once."""

    items: list[StepItem] = field(default_factory=list)

    @property
    def num_scheduled_tokens(self) -> int:
        """Total number of scheduled tokens."""
        return sum(item.num_scheduled_tokens for item in self.items)

    @property
    def reports_prompts(self) -> bool:
        """Whether the step reports tokens of any prompt."""
        return any(item.sequence.reports_prompt for item in self.items)


@dataclass(slots=True)
class PromptReport:
    """Log-probabilities (natural) of a prompt's tokens, from the second token.

    Stored as columns, because creating an object for each of 100,000 candidates would take a tenth of a second.
    `logprobs` (doubles) has one entry per token. `top_token_ids` (32 bits) and `top_logprobs` (doubles) contain the
    `num_top` likeliest tokens per prompt token, in descending order, for one prompt token after the other.
    """

    num_top: int
    logprobs: array[float]
    top_token_ids: array[int]
    top_logprobs: array[float]

    def __len__(self) -> int:
        return len(self.logprobs)

    def put(self, start: int, more: PromptReport) -> None:
        """Replaces everything after the first `start` tokens with `more`."""
        assert more.num_top == self.num_top, "one prompt is asked for one number of candidates"
        self.logprobs[start:] = more.logprobs
        self.top_token_ids[start * self.num_top :] = more.top_token_ids
        self.top_logprobs[start * self.num_top :] = more.top_logprobs


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A sampled token. Log-probabilities are natural, and use the model's distribution before any adjustment.

    If `Sampling.logprobs` is None, `logprob` is None and `top` is empty. Otherwise, `top` contains pairs of token ID
    and log-probability in descending order. If `Sampling.prompt_logprobs` requests it, the first token of a response
    contains the report of the prompt.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    prompt: PromptReport | None = None


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Prompt report of a step without a sampled token. Covers the successors of the tokens that the step computed."""

    prompt: PromptReport


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Result of an item with draft tokens: the accepted draft tokens, and the token sampled after them.

    Contains at least one token. The sampled token is missing if it cannot be chosen, or if an accepted token ends the
    sequence.
    """

    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PooledState:
    """Pooled hidden states of an embedded prompt after this step and all earlier steps, float32 [hidden].

    States are read after the model's last norm. The result is the state of the last token, or the sum of the states of
    all tokens so far, added in order.
    """

    state: np.ndarray


Outcome = SampledToken | PooledState | NonFiniteLogits | None
StepOutcome = SampledToken | SampledTokens | PromptTokens | PooledState | NonFiniteLogits | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome per item of the plan, in order: a token, None if no token was due, or the sequence's failure.

    A failure only affects its sequence. The results of the other sequences are valid. For a reported prompt, each
    outcome contains the part that the step computed, and `with_whole_prompt` combines the parts.
    """

    outcomes: list[StepOutcome]


def with_whole_prompt(sequence: Sequence, start: int, outcome: StepOutcome) -> Outcome:
    """Returns the outcome of a step that began at token `start`. A first token receives the complete prompt report.

    Until then, the sequence stores the partial reports and the pooled states. Recomputed tokens replace their earlier
    entries. The item must have no draft tokens.
    """
    if isinstance(outcome, PooledState):
        sequence.pooled = outcome.state
        return outcome
    assert not isinstance(outcome, SampledTokens), "a caller that proposes tokens takes the outcome apart"
    if not sequence.reports_prompt or not isinstance(outcome, SampledToken | PromptTokens):
        assert not isinstance(outcome, PromptTokens)
        return outcome
    assert outcome.prompt is not None, "each step of such a prompt reports it"
    if sequence.prompt_report is None:
        sequence.prompt_report = outcome.prompt
    else:
        sequence.prompt_report.put(start, outcome.prompt)
    if isinstance(outcome, PromptTokens):
        return None
    return replace(outcome, prompt=sequence.prompt_report)
