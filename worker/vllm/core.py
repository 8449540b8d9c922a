"""The interface of the two engines to vLLM: requests by ID, steps, and blocks by number.

`worker.vllm.running.RunningCore` implements it with vLLM. Belongs to the engine thread. Does not depend on the role.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, Protocol

from services.engine.cache.pages import PageChanges, PageCounts
from services.engine.steps.sequence import Sequence
from services.engine.steps.step import Outcome

OnBlocks = Callable[[tuple[int, ...], int], None]
"""Called within a step, before its computation, with the blocks of a request whose first tokens arrive by a transfer,
in token order, and the number of leading tokens that are cached in them."""


class Computed(NamedTuple):
    """The result of a step for a request: `num_tokens` tokens from position `start`, and the outcome.

    `block_ids` are all blocks of a held request, in token order. They are empty for other requests. `outcome` is None
    if the step ends before the last known token. `has_ended` is set if vLLM has ended the request, for example at its
    token limit.
    """

    request_id: str
    start: int
    num_tokens: int
    block_ids: tuple[int, ...]
    outcome: Outcome
    has_ended: bool


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step of vLLM.

    Requests in `preempted` lost their blocks before it and will be recomputed from their first token.
    """

    computed: tuple[Computed, ...]
    preempted: tuple[str, ...]
    has_more: bool
    """Whether another step would have work without a further command."""
    changes: PageChanges = field(default_factory=PageChanges.none)
    """Blocks that entered or left the prefix cache in this step."""


class Core(Protocol):
    """vLLM's scheduler and executor. A request is registered from `add` until it ends in a step, or until `abort`."""

    @property
    def block_size(self) -> int:
        """Returns the number of tokens per block."""
        ...

    def add(self, request_id: str, sequence: Sequence, *, salt: bytes, service_class: int) -> None:
        """Queues a sequence to be computed here."""
        ...

    def add_held(self, request_id: str, sequence: Sequence, *, salt: bytes, service_class: int) -> tuple[int, ...]:
        """Queues a prompt that samples one token. Its blocks do not change until `let_go`.

        Returns the cached blocks of its first tokens, which do not change either.
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
        """Requests blocks for tokens whose KV arrives by a transfer. Nothing is computed until `arrived`."""
        ...

    def arrived(self, request_id: str, sequence: Sequence) -> None:
        """Continues an awaited request as `sequence`, which starts with the received tokens."""
        ...

    def abort(self, request_id: str) -> None:
        """Ends a request and frees its blocks by the next step. No transfer may access the blocks."""
        ...

    def let_go(self, request_id: str) -> None:
        """Frees the blocks of a held request by the next step, and ends it if it still runs."""
        ...

    def step(self) -> StepDone:
        """Schedules and computes a step."""
        ...

    def counts(self) -> PageCounts:
        """Returns the number of blocks by state.

        Cached blocks count as free, because vLLM does not distinguish them.
        """
        ...

    def check_books(self) -> None:
        """Raises InvariantViolated if a request or block is still held while the engine is idle."""
        ...


def request_ids(prefix: str) -> Iterator[str]:
    """Yields IDs that are new to vLLM, because it may still hold blocks of an earlier request with the same key."""
    return (f"{prefix}{number}" for number in count())
