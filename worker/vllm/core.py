"""What the two engines ask of vLLM, in this project's words: requests by id, steps, and blocks by number.

`worker.vllm.running.RunningCore` is vLLM behind it. Everything belongs to the engine thread. Knows neither role.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, Protocol

from services.engine.cache.pages import PageChanges, PageCounts
from services.engine.steps.sequence import Sequence
from services.engine.steps.step import Outcome

OnBlocks = Callable[[tuple[int, ...], int], None]
"""Called within a step, before it computes, with the blocks of a request whose first tokens arrive by a transfer, in
the order of the tokens, and the number of leading tokens that are cached in them."""


class Computed(NamedTuple):
    """What a step computed of a request: `num_tokens` tokens from `start` on, and what came of it.

    `block_ids` are all its blocks, in the order of the tokens, where the request is one that is held, else none.
    `outcome` is None where the step ends before the last known token. `has_ended` says that vLLM has ended the request,
    as it does after the most tokens that it may give.
    """

    request_id: str
    start: int
    num_tokens: int
    block_ids: tuple[int, ...]
    outcome: Outcome
    has_ended: bool


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step of vLLM. `preempted` lost their blocks before it and will be computed again from their first token."""

    computed: tuple[Computed, ...]
    preempted: tuple[str, ...]
    has_more: bool
    """Whether another step would do anything, should no command come before it."""
    changes: PageChanges = field(default_factory=PageChanges.none)
    """Which blocks are found by their names since this step, and which no longer."""


class Core(Protocol):
    """vLLM's scheduler and executor. A request is known from `add` to its end in a step, or to `abort`."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        ...

    def add(self, request_id: str, sequence: Sequence, *, salt: bytes, service_class: int) -> None:
        """Puts a sequence in line, to be computed here."""
        ...

    def add_held(self, request_id: str, sequence: Sequence, *, salt: bytes, service_class: int) -> tuple[int, ...]:
        """Puts a prompt in line of which one token is chosen; its blocks stay as they are until `let_go`.

        Returns the blocks of its first tokens that are cached already, which stay, too.
        """
        ...

    def add_awaited(
        self,
        request_id: str,
        token_ids: list[int],
        on_blocks: OnBlocks,
        *,
        salt: bytes,
        service_class: int,
        adapter: str = "",
    ) -> None:
        """Asks for blocks for tokens whose KV arrives by a transfer; nothing is computed until `arrived`."""
        ...

    def arrived(self, request_id: str, sequence: Sequence) -> None:
        """Lets an awaited request continue as `sequence`, whose first tokens are those that have arrived."""
        ...

    def abort(self, request_id: str) -> None:
        """Ends a request, of which nothing is read or written any longer, and frees its blocks by the next step."""
        ...

    def let_go(self, request_id: str) -> None:
        """Frees the blocks of a held request by the next step, and ends it if it still runs."""
        ...

    def step(self) -> StepDone:
        """Schedules and computes a step."""
        ...

    def counts(self) -> PageCounts:
        """The blocks by state. vLLM does not tell free blocks from cached ones: both are free."""
        ...

    def check_books(self) -> None:
        """Raises InvariantViolated where a request or a block is held although nothing is asked for."""
        ...


def request_ids(prefix: str) -> Iterator[str]:
    """Yields ids that vLLM has not seen: it may still hold the blocks of an earlier request under a key."""
    return (f"{prefix}{number}" for number in count())
