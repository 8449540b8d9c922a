"""The plain description of one engine step and of its result; no torch, no policy."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace

import numpy as np

from services.engine.steps.sequence import Sequence
from services.runtime.errors import GrammarExhausted, TandemError

PROMPT_ROWS = 64
"""Tokens of reported prompts that are computed at a time, and in a step, for which all others in it wait:
[64, V] logits are 80 MB of float64 for the largest vocabularies, a whole chunk's would be gigabytes."""


class NonFiniteLogits(TandemError):
    """The model gave NaN or plus infinity for a sequence, or ruled all tokens out: no token can be trusted."""


class NothingAllowed(NonFiniteLogits, GrammarExhausted):
    """A sequence's grammar allows no token, as one that is too complex to continue with: no fault of the worker."""


@dataclass(frozen=True, slots=True)
class StepItem:
    """Compute `token_ids[num_computed : num_computed + num_scheduled_tokens]` of one sequence.

    A token is sampled where that reaches the end of `token_ids`, unless `wants_token` is false. `proposed` are guesses
    of what comes then: they are computed in the same pass, and a token is chosen behind each of them, too.
    """

    sequence: Sequence
    num_scheduled_tokens: int
    wants_token: bool = True
    proposed: tuple[int, ...] = ()

    @property
    def is_sampled(self) -> bool:
        """Whether the step gives a token for this sequence."""
        return self.wants_token and self.num_scheduled_tokens == self.sequence.num_uncomputed_tokens

    @property
    def num_pooled(self) -> int:
        """Tokens whose hidden states enter the embedding: all of them for a mean, otherwise the prompt's last."""
        pooling = self.sequence.pooling
        if pooling is None:
            return 0
        is_last = self.num_scheduled_tokens == self.sequence.num_uncomputed_tokens
        return self.num_scheduled_tokens if pooling == "mean" else int(is_last)

    @property
    def num_rows(self) -> int:
        """Tokens that go through the model for it."""
        return self.num_scheduled_tokens + len(self.proposed)


@dataclass(slots=True)
class StepPlan:
    """What one step computes. A sequence occurs at most once."""

    items: list[StepItem] = field(default_factory=list)

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens of all items."""
        return sum(item.num_scheduled_tokens for item in self.items)

    @property
    def reports_prompts(self) -> bool:
        """Whether tokens of any prompt are reported."""
        return any(item.sequence.reports_prompt for item in self.items)


@dataclass(slots=True)
class PromptReport:
    """Natural logarithms of how likely the model found a prompt's tokens from the second on.

    Columns, as an object for each of 100,000 candidates would take a tenth of a second to make: `logprobs` (doubles)
    has one entry for each token, `top_token_ids` (32 bits) and `top_logprobs` (doubles) its `num_top` likeliest tokens,
    the likeliest first, one token of the prompt after the other.
    """

    num_top: int
    logprobs: array[float]
    top_token_ids: array[int]
    top_logprobs: array[float]

    def __len__(self) -> int:
        return len(self.logprobs)

    def put(self, start: int, more: PromptReport) -> None:
        """Has `more` follow the first `start` tokens, in the place of what followed them."""
        assert more.num_top == self.num_top, "one prompt is asked for one number of candidates"
        self.logprobs[start:] = more.logprobs
        self.top_token_ids[start * self.num_top :] = more.top_token_ids
        self.top_logprobs[start * self.num_top :] = more.top_logprobs


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A chosen token. Logprobs are natural logarithms under the model's own distribution.

    `logprob` and `top` (token id and logprob, likeliest first) are None and empty where `Sampling.logprobs` is None.
    The first of an answer has what is reported of the prompt, where `Sampling.prompt_logprobs` asks for it.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    prompt: PromptReport | None = None


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """What a step without a token for the sequence says of its prompt: of the tokens after those it computed."""

    prompt: PromptReport


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What an item with proposals gave: each proposal that is what was chosen in its place, and the next choice.

    The last one is missing where it could not be made, or where a token before it ends the sequence. At least one.
    """

    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PooledState:
    """What a step and those before it made of the hidden states of a prompt that is embedded, float32 [hidden].

    After the model's last norm: that of the last token, or the sum of those of all tokens so far, added in their order.
    """

    state: np.ndarray


Outcome = SampledToken | PooledState | NonFiniteLogits | None
StepOutcome = SampledToken | SampledTokens | PromptTokens | PooledState | NonFiniteLogits | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome per item of the plan, in its order: a token, None where none was due, or why that sequence must fail.

    A failure is the sequence's own: the others' results stand. For a prompt that is reported each outcome has the part
    that the step computed; `with_whole_prompt` puts them together.
    """

    outcomes: list[StepOutcome]


def with_whole_prompt(sequence: Sequence, start: int, outcome: StepOutcome) -> Outcome:
    """Returns the outcome of a step that began at token `start`, a first token with all of the prompt's reports.

    Until then they are kept with the sequence, as is what was pooled; what is computed once more takes the place of
    what was kept. Nothing was proposed.
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
