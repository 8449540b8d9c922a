"""The pages of a decode worker's sequences: reserves them for transfers, allocates them, and swaps them to host memory.

Implements Memory for the BatchScheduler, which decides whose pages move. The pages of a preempted sequence are either
copied to `swap` and back, or recomputed, whichever is faster according to measurements. Belongs to the engine thread.
"""

from collections import Counter
from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from dataclasses import dataclass

from services.engine.cache.host_tier import HostTier
from services.engine.cache.pages import PageAllocator
from services.engine.cache.swap import SwapSpace
from services.engine.engine import EngineParts
from services.engine.steps.sequence import Sequence
from services.runtime.clock import Clock
from services.runtime.errors import InvariantViolated, RequestCancelled
from services.runtime.page_keys import KeyChain
from services.scheduling.prediction import (
    DEFAULT_DECODE,
    DEFAULT_LINK,
    DEFAULT_PREFILL,
    DecodeSpeed,
    LinkSpeed,
    PrefillSpeed,
)
from worker.engine import ReservedPages
from worker.engine_pages import EnginePages


@dataclass(frozen=True, slots=True)
class _Asked:
    """A reservation that waits for its pages."""

    token_ids: list[int]
    num_nameable_tokens: int
    given: "Future[ReservedPages]"


@dataclass(frozen=True, slots=True)
class _Swapped:
    """KV of a preempted sequence's first tokens in host memory, page by page."""

    slots: list[int]
    num_computed_tokens: int


class DecodePages(EnginePages):
    """Pages of each sequence by key, from `ask` or `start` to `close`.

    `is_exact` means that a chunk computes the same bits as single-token steps. Pages that decode steps filled are then
    reusable by prompts that start with that response. Pages of prompts are reusable in any case.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        *,
        page_size: int,
        clock: Clock,
        is_exact: bool,
        tier: HostTier | None = None,
        swap: SwapSpace | None = None,
    ) -> None:
        host = tier or swap
        page_bytes = None if host is None else host.page_bytes
        super().__init__(allocator, page_size=page_size, clock=clock, tier=tier, page_bytes=page_bytes)
        self.is_exact = is_exact
        self._swap = swap
        self._asked: dict[Hashable, _Asked] = {}
        self._swapped: dict[Hashable, _Swapped] = {}
        self._sequences: dict[Hashable, Sequence] = {}

    @classmethod
    def of(cls, parts: EngineParts, *, swap_bytes: int, clock: Clock) -> "DecodePages":
        """Returns the pages of a loaded model. `swap_bytes` is the host memory for preempted sequences, or 0 for none.

        Raises ConfigError if that memory cannot be allocated.
        """
        swap = SwapSpace(parts.pool, swap_bytes) if swap_bytes else None
        page_size = parts.pool.layout.page_size
        pages = cls(
            parts.allocator, page_size=page_size, clock=clock, is_exact=parts.model.exact, tier=parts.tier, swap=swap
        )
        pages.speedometer.observe_steps(parts.first_steps, clock.unix_ns() / 1e9)
        return pages

    def ask(
        self, key: Hashable, token_ids: list[int], *, num_prompt_tokens: int, salt: bytes
    ) -> "Future[ReservedPages]":
        """Registers a reservation. `reserve` grants it. `close` fails it with RequestCancelled."""
        self._open(key, salt)
        num_nameable_tokens = self._num_nameable_tokens(num_prompt_tokens, len(token_ids))
        asked = self._asked[key] = _Asked(token_ids, num_nameable_tokens, Future())
        return asked.given

    def is_asking(self, key: Hashable) -> bool:
        """Returns whether a reservation waits for its pages."""
        return key in self._asked

    def start(self, sequence: Sequence, salt: bytes) -> None:
        """Assigns reserved pages to a sequence. Without a reservation, it gets pages when it enters the batch."""
        key = sequence.sequence_id
        self._sequences[key] = sequence
        lease = self._leases.get(key)
        if lease is None:
            self._open(key, salt)
            sequence.num_computed_tokens = 0
            return
        lease.mark_used()
        sequence.page_table = lease.page_ids
        self.name(sequence, 0)

    def close(self, key: Hashable) -> None:
        """Releases the pages of the key and fails its pending reservation. Ignores unknown keys."""
        super().close(key)
        self._sequences.pop(key, None)
        swapped = self._swapped.pop(key, None)
        if swapped is not None and self._swap is not None:
            self._swap.free(swapped.slots)
        asked = self._asked.pop(key, None)
        if asked is not None:
            asked.given.set_exception(RequestCancelled("the pages are no longer needed"))

    # --- implements Memory for the scheduler ---

    @property
    def num_available_pages(self) -> int:
        """Returns the number of free and cached pages."""
        return self._allocator.num_available_pages

    def num_freed_pages(self, keys: SequenceOf[Hashable]) -> list[int]:
        """Returns how many pages evicting the first of these would free, then the first two, and so on."""
        num_held: Counter[int] = Counter()
        freed, num_freed = [], 0
        for key in keys:
            for page_id in self._leases[key].page_ids:
                num_held[page_id] += 1
                num_freed += num_held[page_id] == self._allocator.num_references(page_id)
            freed.append(num_freed)
        return freed

    def reserve(self, key: Hashable) -> None:
        """Grants a reservation by setting its future."""
        asked = self._asked.pop(key)
        keys = self._chains[key].extend(asked.token_ids, asked.num_nameable_tokens)
        num_tokens = len(asked.token_ids)
        num_cached = self._fill(
            key, keys, num_tokens=num_tokens, state="reserved", is_worth=self._is_cheaper_than_sending
        )
        page_ids = tuple(self._leases[key].page_ids)
        asked.given.set_result(ReservedPages(page_ids, num_cached * self.page_size))

    def enter(self, key: Hashable, num_tokens: int) -> int:
        """Allocates pages for a sequence and fills them from the cache and the swap space.

        Returns how many of its tokens are computed.
        """
        sequence = self._sequences[key]
        num_nameable_tokens = self._num_nameable_tokens(sequence.num_prompt_tokens, num_tokens - 1)
        num_findable_tokens = 0 if sequence.needs_whole_prompt else num_nameable_tokens
        keys = self._chains[key].extend(sequence.token_ids, num_nameable_tokens)
        num_cached = self._fill(
            key,
            keys[: num_findable_tokens // self.page_size],
            num_tokens=num_tokens,
            state="used",
            is_worth=self._is_cheaper_than_computing,
        )
        self._hand_to(sequence, num_cached)
        self._swap_in(sequence, num_cached)
        self.name(sequence, 0)
        return sequence.num_computed_tokens

    def grow(self, key: Hashable, num_pages: int) -> None:
        """Allocates more pages for a sequence."""
        self._leases[key].grow(num_pages, state="used")

    def evict(self, key: Hashable) -> int:
        """Frees a sequence's pages, and swaps them out if that pays off.

        Returns how many computed tokens were swapped.
        """
        sequence = self._sequences[key]
        lease = self._leases.pop(key)
        num_computed_tokens, sequence.num_computed_tokens = sequence.num_computed_tokens, 0
        page_ids = lease.page_ids[: self.num_pages_for(num_computed_tokens)]
        is_swapped = self._swap_out(sequence, num_computed_tokens, page_ids)
        lease.close()
        sequence.page_table = []
        return num_computed_tokens if is_swapped else 0

    # --- host memory ---

    def _swap_in(self, sequence: Sequence, num_cached: int) -> None:
        swapped = self._swapped.pop(sequence.sequence_id, None)
        if swapped is None or self._swap is None:
            return
        if swapped.num_computed_tokens > sequence.num_computed_tokens:
            swap, slots = self._swap, swapped.slots[num_cached:]
            page_ids = sequence.page_table[num_cached : len(swapped.slots)]
            self._timed(len(page_ids), lambda: swap.load(slots, page_ids))
            sequence.num_computed_tokens = swapped.num_computed_tokens
        self._swap.free(swapped.slots)

    def _swap_out(self, sequence: Sequence, num_computed_tokens: int, page_ids: list[int]) -> bool:
        """Copies the pages of a preempted sequence if there is space and copying is cheaper than recomputing."""
        swap = self._swap
        if swap is None or not 0 < len(page_ids) <= swap.num_free_slots:
            return False
        if not is_swap_cheaper(
            num_tokens=num_computed_tokens,
            num_chunked_tokens=self._num_nameable_tokens(sequence.num_prompt_tokens, num_computed_tokens),
            num_bytes=len(page_ids) * self._page_bytes,
            prefill=self.speedometer.prefill or DEFAULT_PREFILL,
            decode=self.speedometer.decode or DEFAULT_DECODE,
            copy=self._copies.speed,
        ):
            return False
        slots = self._timed(len(page_ids), lambda: swap.store(page_ids))
        self._swapped[sequence.sequence_id] = _Swapped(slots, num_computed_tokens)
        return True

    def _is_cheaper_than_sending(self, num_pages: int, num_pages_before: int) -> bool:
        return self._copies.is_cheaper_than_sending(num_pages * self._page_bytes, self.speedometer.link or DEFAULT_LINK)

    def _open(self, key: Hashable, salt: bytes) -> None:
        assert key not in self._chains, "a key reserves or starts once"
        self._chains[key] = KeyChain(salt, self.page_size)

    def _num_nameable_tokens(self, num_prompt_tokens: int, num_tokens: int) -> int:
        return num_tokens if self.is_exact else min(num_tokens, num_prompt_tokens)

    def _check(self) -> None:
        super()._check()
        if self._swap is not None and self._swap.num_free_slots != self._swap.num_slots:
            raise InvariantViolated("slots of the swap space are held by nobody")


def is_swap_cheaper(
    *,
    num_tokens: int,
    num_chunked_tokens: int,
    num_bytes: int,
    prefill: PrefillSpeed,
    decode: DecodeSpeed,
    copy: LinkSpeed,
) -> bool:
    """Returns whether swapping KV of `num_tokens` tokens (`num_bytes`) out and in is faster than recomputing it.

    Tokens after the first `num_chunked_tokens` are recomputed one per step. The estimate cannot know which pages other
    sequences still share or which will be cache hits, so it may overestimate the cost of recomputing.
    """
    num_steps = num_tokens - num_chunked_tokens
    compute_s = prefill.time_s(num_chunked_tokens) + num_steps * decode.step_s(1, num_tokens)
    return 2 * copy.time_s(num_bytes) < compute_s
