"""A second tier of memory for named KV pages: what the pool evicts goes to the host's memory, and comes back.

A page is copied out when an allocation takes it from the pool's cache, and only if it has a name: its content is then
final and was computed or verified here. It is found by the same key as before, hence by the same tenants. It comes back
when a sequence begins with what is in it, into a page of that sequence, if the caller says that copying is worth it; a
key is in the pool or here, never in both. When there is no room those go that came first, which of one sequence is its
end before its beginning. What is copied cannot be told from what was never away: the same bytes under the same name.

Knows no sequence, no speed and no clock. Belongs to the engine thread; nothing locks, and nothing is half done when a
method returns. Lost with the process, as the pool is.

    pool    free -> used -> cached --evict--> free
                     ^                 | put
                     | load, name      v
    host             +-- take -------- held --(no room)--> gone
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
    """Slots of the tier, `held + free == total`, and since the start how many pages came, went back, and were lost."""

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
    """Named pages in a swap space of their own, the longest here first to go. See `PageStore` for the callers."""

    def __init__(self, space: SwapSpace) -> None:
        self._space = space
        self._entries: dict[PageKey, _Entry] = {}  # in the order in which they go
        self._num_stored = self._num_loaded = self._num_dropped = 0

    @property
    def page_bytes(self) -> int:
        """Size of a page in bytes."""
        return self._space.page_bytes

    def stats(self) -> HostTierStats:
        """Returns counts, from any thread; they may be of different moments there."""
        free, total = self._space.num_free_slots, self._space.num_slots
        return HostTierStats(total, free, total - free, self._num_stored, self._num_loaded, self._num_dropped)

    def __contains__(self, key: PageKey) -> bool:
        """Returns whether the page with this key is here."""
        return key in self._entries

    def parents(self) -> dict[PageKey, PageKey | None]:
        """Returns the key of the page before each that is here."""
        return {key: entry.parent for key, entry in self._entries.items()}

    def put(self, pages: Sequence[NamedPage]) -> list[PageKey]:
        """Copies pages of the pool that are about to be evicted, in that order; returns the keys that went for them.

        Where they do not all fit, the last are kept: those that would have been evicted last.
        """
        # What was taken and is not loaded yet still has its slots.
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
        """Forgets a page, if it is here."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._space.free([entry.slot])
            self._num_dropped += 1

    def take(self, keys: Sequence[PageKey]) -> list[int]:
        """Returns the slots of pages that are here, which are no longer found; the caller gives them to `load`."""
        return [self._entries.pop(key).slot for key in keys]

    def load(self, slots: Sequence[int], page_ids: Sequence[int]) -> None:
        """Copies what was taken into pages of the pool and gives up the slots."""
        self._space.load(slots, page_ids)
        self._space.free(slots)
        self._num_loaded += len(slots)

    def rehearse(self, num_pages: int) -> int:
        """Copies the first pages of the pool, as many as fit in, out and in again: so that it can be timed.

        Before anybody uses them. Returns how many bytes were copied.
        """
        page_ids = range(min(num_pages, self._space.num_free_slots, self._space.num_pool_pages))
        slots = self._space.store(page_ids)
        self._space.load(slots, page_ids)
        self._space.free(slots)
        return 2 * len(slots) * self._space.page_bytes

    def problems(self) -> list[str]:
        """Returns how the books contradict themselves; between two calls of an allocator nothing is taken."""
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
    """Gives an empty lease the pages with the first of these keys that exist; returns how many.

    First those in the pool, then, of those behind them, what is in the host's memory, if `is_worth(number of these
    pages, number of pages before them)`. `timed(number of pages, copy)` calls `copy`, which takes most of the time.
    """
    cached = allocator.find(keys)
    is_taken = lease.take(cached)
    assert is_taken, "pages that were found exist, and a prompt begins when its pages can be had"
    num_cached = len(cached)
    if tier is None:
        return num_cached
    stored = allocator.find_stored(keys[num_cached:])
    # Without room for them the rest of the sequence has none either, which is the caller's to be told.
    if not stored or not lease.can_grow(len(stored)) or not is_worth(len(stored), num_cached):
        return num_cached
    slots = allocator.take_stored(stored)
    # This may evict others into the tier, but not what was taken from it.
    page_ids = lease.grow(len(stored), state="used")
    timed(len(stored), lambda: tier.load(slots, page_ids))
    allocator.name(page_ids, stored, parent=keys[num_cached - 1] if num_cached else None)
    return num_cached + len(stored)
