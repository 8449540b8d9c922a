"""Second cache tier in host memory. Named pages evicted from the pool move here and are reloaded on a hit.

A page is copied here when an allocation evicts it from the pool, and only if it is named (registered under a key). Its
content is then final, and was computed or verified on this worker. The key is unchanged, so the same tenants can find
the page. When a sequence starts with the page's content, the page is copied into a page of that sequence, provided that
the caller expects the copy to pay off. A key is in the pool or in this tier, never in both. When the tier is full, it
evicts the pages stored first, and therefore the end of a sequence before its beginning. A reloaded page has the same
bytes and the same key as a page that was never evicted.

Does not depend on sequences, link speeds, or clocks. The engine thread owns the tier, so there are no locks, and each
method completes its operation before it returns. The content is lost with the process, like the pool.

    pool    free -> used -> cached --evict--> free
                     ^                 | put
                     | load, name      v
    host             +-- take -------- held --(tier full)--> evicted
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from services.engine.cache.lease import PageLease
from services.engine.cache.pages import PageAllocator
from services.engine.cache.store import NamedPage
from services.engine.cache.swap import SwapSpace
from services.runtime.page_keys import PageKey


class HostTierStats(NamedTuple):
    """Slots of the tier, with `held + free == total`, and the pages stored, loaded, and dropped since the start."""

    total: int
    free: int
    held: int
    num_stored: int
    num_loaded: int
    num_dropped: int


class _Entry(NamedTuple):
    slot: int
    parent: PageKey | None


class HostTier:
    """Named pages in a dedicated swap space. Evicts the oldest pages first. Implements `PageStore`."""

    def __init__(self, space: SwapSpace) -> None:
        self._space = space
        self._entries: dict[PageKey, _Entry] = {}  # in eviction order
        self._num_stored = self._num_loaded = self._num_dropped = 0

    @property
    def page_bytes(self) -> int:
        """Size of a page in bytes."""
        return self._space.page_bytes

    def stats(self) -> HostTierStats:
        """Returns the counts. Callable from any thread, where the counts may be from different moments."""
        free, total = self._space.num_free_slots, self._space.num_slots
        return HostTierStats(total, free, total - free, self._num_stored, self._num_loaded, self._num_dropped)

    def __contains__(self, key: PageKey) -> bool:
        """Returns whether the tier contains the page with this key."""
        return key in self._entries

    def parents(self) -> dict[PageKey, PageKey | None]:
        """Returns, for each page in the tier, the key of the preceding page."""
        return {key: entry.parent for key, entry in self._entries.items()}

    def put(self, pages: Sequence[NamedPage]) -> list[PageKey]:
        """Copies pool pages that are about to be evicted, in eviction order. Returns the keys dropped to free slots.

        If the pages do not all fit, the tier stores the last of them, which would have been evicted last.
        """
        # Pages that were taken but not yet loaded still occupy their slots.
        room = self._space.num_free_slots + len(self._entries)
        pages = pages[max(0, len(pages) - room) :]
        if not pages:
            return []
        gone = list(islice(self._entries, max(0, len(pages) - self._space.num_free_slots)))
        for key in gone:
            self.discard(key)
        slots = self._space.store([page.page_id for page in pages])
        for page, slot in zip(pages, slots, strict=True):
            self._entries[page.key] = _Entry(slot, page.parent)
        self._num_stored += len(pages)
        return gone

    def discard(self, key: PageKey) -> None:
        """Drops a page. Ignores unknown keys."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._space.free([entry.slot])
            self._num_dropped += 1

    def take(self, keys: Sequence[PageKey]) -> list[int]:
        """Removes pages from the index and returns their slots. Pass the slots to `load`."""
        return [self._entries.pop(key).slot for key in keys]

    def load(self, slots: Sequence[int], page_ids: Sequence[int]) -> None:
        """Copies taken slots into pages of the pool, and frees the slots."""
        self._space.load(slots, page_ids)
        self._space.free(slots)
        self._num_loaded += len(slots)

    def rehearse(self, num_pages: int) -> int:
        """Copies the first pages of the pool out and back in, for timing. Returns the number of bytes copied.

        Call it before the pages are in use. Copies at most `num_pages`, and only as many as fit.
        """
        page_ids = range(min(num_pages, self._space.num_free_slots, self._space.num_pool_pages))
        slots = self._space.store(page_ids)
        self._space.load(slots, page_ids)
        self._space.free(slots)
        return 2 * len(slots) * self._space.page_bytes

    def problems(self) -> list[str]:
        """Returns inconsistencies of the bookkeeping. Expects no taken slots, which holds between allocator calls."""
        problems = self._space.problems()
        slots = {entry.slot for entry in self._entries.values()}
        if len(slots) != len(self._entries) or len(slots) != self._space.num_slots - self._space.num_free_slots:
            problems.append("keys and slots of the host tier do not agree")
        return problems


def take_prefix(
    lease: PageLease,
    allocator: PageAllocator,
    tier: HostTier | None,
    keys: Sequence[PageKey],
    *,
    is_worth: Callable[[int, int], bool],
    timed: Callable[[int, Callable[[], None]], None],
) -> int:
    """Gives an empty lease the pages of the longest available prefix of `keys`. Returns their number.

    The lease first receives pages from the pool. The pages that follow are loaded from host memory if `is_worth(number
    of these pages, number of pages before them)` is true. `timed(number of pages, copy)` must call `copy`, which takes
    most of the time.
    """
    cached = allocator.find(keys)
    is_taken = lease.take(cached)
    assert is_taken, "pages that were found exist, and a prompt begins when its pages can be had"
    num_cached = len(cached)
    if tier is None:
        return num_cached
    stored = allocator.find_stored(keys[num_cached:])
    # If these pages do not fit, neither does the rest of the sequence. The caller handles that case.
    if not stored or not lease.can_grow(len(stored)) or not is_worth(len(stored), num_cached):
        return num_cached
    slots = allocator.take_stored(stored)
    # This may evict other pages into the tier, but not the pages taken from it.
    page_ids = lease.grow(len(stored), state="used")
    timed(len(stored), lambda: tier.load(slots, page_ids))
    allocator.name(page_ids, stored, parent=keys[num_cached - 1] if num_cached else None)
    return num_cached + len(stored)
