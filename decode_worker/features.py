"""What may plug into a decode worker's steps: speculation, and the pace of dear masks. The loop knows neither.

Everything here is called on the engine thread.
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
    """Tokens that may come next in a sequence."""

    token_ids: tuple[int, ...]

    @property
    def source(self) -> str:
        """What proposed them, in a word."""
        raise NotImplementedError

    def num_accepted(self, tokens: SequenceOf[SampledToken]) -> int:
        """How many of them are among the tokens that were chosen."""
        return sum(token.token_id == proposed for token, proposed in zip(tokens, self.token_ids, strict=False))


class StepAhead(NamedTuple):
    """A step that was scheduled and is not computed yet.

    `look_ahead(key, n)` gives a sequence that decodes pages for up to `n` tokens more, and returns for how many.
    """

    work: list[Work]
    sequences: Mapping[Hashable, Sequence]
    look_ahead: Callable[[Hashable, int], int]
    decode: DecodeSpeed | None


class StepTaken(NamedTuple):
    """A step that was computed and applied, in `time_s` seconds from when it was scheduled."""

    work: list[Work]
    time_s: float
    num_accepted: int
    reports_prompts: bool


class StepFeature:
    """Has its say in the steps of a decode loop; by default none."""

    def start(self, sequence: Sequence) -> None:
        """Notes a sequence that was put in line."""

    def free(self, key: Hashable) -> None:
        """Forgets a sequence. Unknown keys are ignored."""

    def resting(self, keys: Collection[Hashable]) -> Collection[Hashable]:
        """Returns the sequences among the batch, `keys`, that have no token in the next step."""
        return ()

    def propose(self, step: StepAhead) -> Mapping[Hashable, Proposal]:
        """Returns tokens to compute in a step beside those that are certain, by sequence."""
        return {}

    def computed(self, work: list[Work]) -> None:
        """Notes that a step was computed, before sequences get their tokens or end."""

    def learn(self, key: Hashable, proposal: Proposal, tokens: SequenceOf[SampledToken]) -> None:
        """Notes the tokens that were chosen behind a proposal, before its sequence may end."""

    def end_step(self, step: StepTaken) -> None:
        """Notes a step that is over."""

    def check_books(self) -> None:
        """Raises InvariantViolated if something is held while no sequence is known."""
