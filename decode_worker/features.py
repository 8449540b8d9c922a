"""Interface of optional features of decode steps, such as speculation and mask pacing.

The decode loop does not depend on any feature. All methods are called on the engine thread.
"""

from collections.abc import Callable, Collection, Hashable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

from decode_worker.scheduler import Work
from services.engine.steps.sequence import Sequence
from services.engine.steps.step import SampledToken
from services.scheduling.prediction import DecodeSpeed


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens for a sequence."""

    token_ids: tuple[int, ...]

    @property
    def source(self) -> str:
        """Returns the name of the drafting method."""
        raise NotImplementedError

    def num_accepted(self, tokens: SequenceOf[SampledToken]) -> int:
        """Returns how many draft tokens match the sampled tokens."""
        return sum(token.token_id == proposed for token, proposed in zip(tokens, self.token_ids, strict=False))


class StepAhead(NamedTuple):
    """A step that is scheduled and not yet computed.

    `look_ahead(key, n)` allocates pages for up to `n` more tokens of a decoding sequence, and returns how many tokens
    fit.
    """

    work: list[Work]
    sequences: Mapping[Hashable, Sequence]
    look_ahead: Callable[[Hashable, int], int]
    decode: DecodeSpeed | None


class StepTaken(NamedTuple):
    """A step that was computed and applied, `time_s` seconds after it was scheduled."""

    work: list[Work]
    time_s: float
    num_accepted: int
    reports_prompts: bool


class StepFeature:
    """Influences the steps of a decode loop. The default methods do nothing."""

    def start(self, sequence: Sequence) -> None:
        """Adds a sequence that was queued."""

    def free(self, key: Hashable) -> None:
        """Removes a sequence. Ignores unknown keys."""

    def resting(self, keys: Collection[Hashable]) -> Collection[Hashable]:
        """Returns the sequences of the batch (`keys`) that skip the next step."""
        return ()

    def propose(self, step: StepAhead) -> Mapping[Hashable, Proposal]:
        """Returns draft tokens to verify in the step, by sequence."""
        return {}

    def computed(self, work: list[Work]) -> None:
        """Handles the end of a step's computation, before its tokens are applied and before sequences end."""

    def learn(self, key: Hashable, proposal: Proposal, tokens: SequenceOf[SampledToken]) -> None:
        """Learns from the tokens that were sampled for a proposal, before its sequence may end."""

    def end_step(self, step: StepTaken) -> None:
        """Handles the end of a step."""

    def check_books(self) -> None:
        """Raises InvariantViolated if state remains while no sequence is registered."""
