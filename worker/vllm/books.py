"""Tracks the blocks that transfers fill or read, for vLLM's scheduler. Pure bookkeeping, without vLLM.

A request whose tokens arrive by a transfer gets its blocks in a step, and is not computed until `arrive`. The blocks of
a held request stay until `let_go`, however the request ended. vLLM is notified of both in the next step. Belongs to the
engine thread.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from worker.vllm.core import OnBlocks


class Scheduled(NamedTuple):
    """A step computes `num_tokens` tokens of a request from position `start`."""

    request_id: str
    start: int
    num_tokens: int


class News(NamedTuple):
    """Requests whose transfer into their blocks has ended, and requests whose blocks no transfer reads any longer."""

    arrived: tuple[str, ...]
    let_go: tuple[str, ...]


@dataclass(slots=True)
class _Awaited:
    """A request whose first `num_tokens` tokens arrive by a transfer. `has_blocks` once vLLM has allocated them."""

    num_tokens: int
    on_blocks: OnBlocks
    has_blocks: bool = False


class TransferBooks:
    """Requests with blocks used by a transfer, by vLLM's request IDs, and the contents of the current step."""

    def __init__(self, on_preempted: Callable[[str], None] = lambda request_id: None) -> None:
        self.on_preempted = on_preempted
        """Called with a request that has just lost its blocks, before any of them is overwritten."""
        self._awaited: dict[str, _Awaited] = {}
        self._held: set[str] = set()
        self._arrived: list[str] = []
        self._let_go: list[str] = []
        self._scheduled: list[Scheduled] = []
        self._preempted: list[str] = []

    # --- calls from the engine ---

    def await_tokens(self, request_id: str, num_tokens: int, on_blocks: OnBlocks) -> None:
        """Registers a request whose first tokens arrive by a transfer."""
        self._awaited[request_id] = _Awaited(num_tokens, on_blocks)

    def arrive(self, request_id: str) -> None:
        """Ends a transfer into a request, complete or not. Notifies vLLM if the request had blocks."""
        awaited = self._awaited.pop(request_id, None)
        if awaited is not None and awaited.has_blocks:
            self._arrived.append(request_id)

    def hold(self, request_id: str) -> None:
        """Retains the blocks of a request until `let_go`."""
        self._held.add(request_id)

    def let_go(self, request_id: str, *, has_ended: bool) -> None:
        """Allows vLLM to free the blocks of a held request. If it `has_ended`, vLLM is notified in the next step."""
        self._held.discard(request_id)
        if has_ended:
            self._let_go.append(request_id)

    @property
    def has_news(self) -> bool:
        """Returns whether the next step has updates for vLLM."""
        return bool(self._arrived or self._let_go)

    @property
    def num_requests(self) -> int:
        """Returns the number of requests whose blocks are used by a transfer, or that wait for blocks."""
        return len(self._awaited) + len(self._held)

    def take_step(self) -> tuple[list[Scheduled], list[str]]:
        """Returns the work of the last step, and the requests that were preempted before it."""
        scheduled, self._scheduled = self._scheduled, []
        preempted, self._preempted = self._preempted, []
        return scheduled, preempted

    # --- calls from vLLM, within a step ---

    def num_to_arrive(self, request_id: str, num_cached_tokens: int) -> int:
        """Returns how many tokens arrive in addition to the cached tokens, or 0 for a request that is computed here.

        Returns 0 too for a request that received its tokens and was preempted, because they are not sent again.
        """
        awaited = self._awaited.get(request_id)
        return 0 if awaited is None else awaited.num_tokens - num_cached_tokens

    def note_blocks(self, request_id: str, block_ids: Sequence[int], num_to_arrive: int) -> None:
        """Passes the blocks of a request to its transfer, which writes into them."""
        awaited = self._awaited[request_id]
        awaited.has_blocks = True
        awaited.on_blocks(tuple(block_ids), awaited.num_tokens - num_to_arrive)

    def note_scheduled(self, scheduled: Scheduled) -> None:
        """Records the work of the step."""
        self._scheduled.append(scheduled)

    def note_preempted(self, request_ids: Iterable[str]) -> None:
        """Records requests that lost their blocks in this step."""
        for request_id in request_ids:
            self._preempted.append(request_id)
            self.on_preempted(request_id)

    def is_awaited(self, request_id: str) -> bool:
        """Returns whether the first tokens of a request have not arrived yet."""
        return request_id in self._awaited

    def is_held(self, request_id: str) -> bool:
        """Returns whether the blocks of a request are retained when it ends."""
        return request_id in self._held

    def take_news(self) -> News:
        """Returns the updates of transfers since the last step."""
        news = News(tuple(self._arrived), tuple(self._let_go))
        self._arrived, self._let_go = [], []
        return news
