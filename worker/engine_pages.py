"""The pages of an engine loop's sequences: their leases, their names, and their cached prefixes.

Full pages are named by their content. A new sequence starts after the cached pages that match its first tokens. Named
pages that were evicted from the pool are copied back from the host tier if that takes less time than computing them.
Belongs to the engine thread. Does not depend on steps, batches, or messages.
"""

from collections.abc import Callable, Hashable
from typing import TypeVar

from services.engine.cache.host_tier import HostTier, take_prefix
from services.engine.cache.lease import PageLease
from services.engine.cache.pages import HeldState, PageAllocator, PageChanges, PageCounts
from services.engine.cache.pool import num_pages_for
from services.engine.steps.sequence import Sequence
from services.runtime.clock import Clock
from services.runtime.errors import InvariantViolated
from services.runtime.page_keys import KeyChain, PageKey
from services.scheduling.copy_cost import CopyMeter
from services.scheduling.prediction import DEFAULT_PREFILL
from services.scheduling.speedometer import Speedometer
from worker.engine import KeptPages, PrefixPages, ReservedPages

R = TypeVar("R")

IsWorthCopying = Callable[[int, int], bool]
"""Decides whether to copy pages back, given their number in the host tier and the number of pages before them."""


class EnginePages(PrefixPages):
    """Leases and content keys of each sequence. The only user of the allocator on the engine thread.

    `page_bytes` is the size of a page when copied to or from host memory. Pages cached by a previous engine are reused.
    Raises InvariantViolated if a previous engine still holds pages or the allocator is inconsistent.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        *,
        page_size: int,
        clock: Clock,
        tier: HostTier | None = None,
        page_bytes: int | None = None,
    ) -> None:
        held = allocator.counts()
        if held.reserved or held.used:
            raise InvariantViolated(f"an engine before this one left {held.reserved + held.used} pages held")
        allocator.check_integrity()
        self.page_size = page_size
        self.speedometer = Speedometer()
        """Step-time estimator of the loop. Copying must beat its estimate for computing."""
        self._allocator = allocator
        self._clock = clock
        self._tier = tier
        self._page_bytes = page_bytes if page_bytes is not None else 0 if tier is None else tier.page_bytes
        self._copies = CopyMeter()
        if tier is not None:
            self._copies.rehearse(tier.rehearse, clock.monotonic)
        self._leases: dict[Hashable, PageLease] = {}
        self._chains: dict[Hashable, KeyChain] = {}
        self._reported: PageCounts | None = None
        self._is_checked = False

    def __contains__(self, key: object) -> bool:
        """Returns whether the key holds pages."""
        return key in self._leases

    def num_pages_for(self, num_tokens: int) -> int:
        """Returns the number of pages that hold this many tokens."""
        return num_pages_for(num_tokens, self.page_size)

    def begin(self, sequence: Sequence, salt: bytes) -> int:
        """Allocates all pages of a sequence. Returns how many leading pages are already computed.

        Leaves at least one token to compute. Raises NoFreePages.
        """
        chain = KeyChain(salt, self.page_size)
        keys = chain.extend(sequence.token_ids, sequence.num_prompt_tokens - 1)
        num_cached = self._fill(
            sequence.sequence_id,
            [] if sequence.needs_whole_prompt else keys,
            num_tokens=sequence.num_prompt_tokens,
            state="used",
            is_worth=self._is_cheaper_than_computing,
        )
        self._chains[sequence.sequence_id] = chain
        self._hand_to(sequence, num_cached)
        return num_cached

    def take(self, key: Hashable, kept: KeptPages) -> bool:
        """Assigns retained pages to a key. Returns False if some of them have been overwritten."""
        lease = PageLease(self._allocator)
        if not lease.take(kept.page_ids, kept.generations):
            return False
        self._is_checked = False
        self._leases[key] = lease
        return True

    def find_prefix(self, token_ids: list[int], *, salt: bytes) -> KeptPages:
        """Implements PrefixPages."""
        page_ids = self._allocator.find(KeyChain(salt, self.page_size).extend(token_ids, len(token_ids)))
        return KeptPages(tuple(page_ids), self._allocator.generations(page_ids))

    def reserve_prefix(self, key: Hashable, token_ids: list[int], *, salt: bytes) -> ReservedPages:
        """Implements PrefixPages."""
        chain = self._chains[key] = KeyChain(salt, self.page_size)
        keys, num_tokens = chain.extend(token_ids, len(token_ids)), len(token_ids)
        num_cached = self._fill(
            key, keys, num_tokens=num_tokens, state="reserved", is_worth=self._is_cheaper_than_computing
        )
        return ReservedPages(tuple(self._leases[key].page_ids), num_cached * self.page_size)

    def cache_prefix(self, key: Hashable) -> None:
        """Implements PrefixPages."""
        lease = self._leases[key]
        lease.mark_used()
        self._allocator.name(lease.page_ids, self._chains[key].keys)
        self.close(key)

    def name(self, sequence: Sequence, start: int) -> None:
        """Adds the pages that became full since `start` tokens were computed to the prefix cache."""
        num_tokens = self._num_nameable_tokens(sequence.num_prompt_tokens, sequence.num_computed_tokens)
        first_page, end_page = start // self.page_size, num_tokens // self.page_size
        if first_page < end_page:
            keys = self._chains[sequence.sequence_id].extend(sequence.token_ids, num_tokens)[:end_page]
            parent = keys[first_page - 1] if first_page else None
            self._allocator.name(sequence.page_table[first_page:end_page], keys[first_page:], parent=parent)

    def unname(self, sequence: Sequence) -> None:
        """Removes the pages of a failed sequence from the prefix cache."""
        self._allocator.unname(sequence.page_table)

    def close(self, key: Hashable) -> None:
        """Releases the pages of the key. Ignores unknown keys."""
        self._chains.pop(key, None)
        lease = self._leases.pop(key, None)
        if lease is not None:
            lease.close()

    def keep(self, key: Hashable) -> KeptPages | None:
        """Releases the pages of the key but retains their content for `take` until evicted.

        Returns None if it has none.
        """
        self._chains.pop(key, None)
        lease = self._leases.pop(key, None)
        if lease is None:
            return None
        kept = KeptPages(tuple(lease.page_ids), self._allocator.generations(lease.page_ids))
        lease.close(is_kept=True)
        return kept

    def drop(self, kept: KeptPages) -> None:
        """Discards retained pages. Named pages remain in the prefix cache."""
        self._allocator.drop(kept.page_ids, kept.generations)

    @property
    def has_news(self) -> bool:
        """Returns whether page counts or names have changed since `take_report`."""
        return self._allocator.counts() != self._reported or self._allocator.has_changes

    def take_report(self) -> tuple[PageCounts, PageChanges]:
        """Returns the page counts, and the names added and removed since the previous call."""
        self._reported = self._allocator.counts()
        return self._reported, self._allocator.take_changes()

    def check_books(self) -> bool:
        """Checks the page accounting if no page is held and no check has run since the last use.

        Returns whether it ran.

        Takes 10 ms for 30,000 pages. Raises InvariantViolated.
        """
        if self._leases or self._chains or self._is_checked:
            return False
        self._check()
        self._is_checked = True
        return True

    def _check(self) -> None:
        self._allocator.check_integrity()

    def _num_nameable_tokens(self, num_prompt_tokens: int, num_tokens: int) -> int:
        """Returns how many of the first `num_tokens` have KV that other sequences may reuse."""
        return num_tokens

    def _fill(
        self, key: Hashable, keys: list[PageKey], *, num_tokens: int, state: HeldState, is_worth: IsWorthCopying
    ) -> int:
        """Allocates pages for `num_tokens` tokens.

        Returns how many of them were cached in the pool or the host tier.
        """
        self._is_checked = False
        lease = PageLease(self._allocator)
        num_cached = take_prefix(lease, self._allocator, self._tier, keys, is_worth=is_worth, timed=self._timed)
        lease.grow_to(self.num_pages_for(num_tokens), state=state)
        self._leases[key] = lease
        return num_cached

    def _hand_to(self, sequence: Sequence, num_cached: int) -> None:
        sequence.page_table = self._leases[sequence.sequence_id].page_ids
        sequence.num_computed_tokens = num_cached * self.page_size

    def _is_cheaper_than_computing(self, num_pages: int, num_pages_before: int) -> bool:
        return self._copies.is_cheaper_than_computing(
            num_pages * self.page_size,
            num_tokens_before=num_pages_before * self.page_size,
            num_bytes=num_pages * self._page_bytes,
            prefill=self.speedometer.prefill or DEFAULT_PREFILL,
        )

    def _timed(self, num_pages: int, copy: Callable[[], R]) -> R:
        start_s = self._clock.monotonic()
        result = copy()
        end_s = self._clock.monotonic()
        self._copies.observe(num_pages * self._page_bytes, end_s - start_s, end_s)
        return result
