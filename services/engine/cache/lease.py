"""Lease of one sequence's pages as a context manager. Does not access their content."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from services.engine.cache.pages import HeldState, PageAllocator
from services.runtime.errors import InvariantViolated


class PageLease:
    """The pages of one sequence and its remaining promise, as a context manager that releases both on exit.

    `page_ids` is the sequence's page table, in order. It grows in place, and `close` empties it, so a sequence that
    shares the list cannot access its former pages.
    """

    def __init__(self, allocator: PageAllocator, *, num_promised_pages: int = 0) -> None:
        """Promises `num_promised_pages`. Raises NoFreePages if too few pages are available."""
        allocator.promise(num_promised_pages)
        self._allocator = allocator
        self._num_promised = num_promised_pages
        self._is_closed = False
        self.page_ids: list[int] = []

    @property
    def num_promised_pages(self) -> int:
        """Pages that `grow` can still allocate without failing."""
        return self._num_promised

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    def can_grow(self, num_pages: int) -> bool:
        """Returns whether `grow` would succeed now."""
        return self._allocator.can_promise(num_pages - min(num_pages, self._num_promised))

    def grow(self, num_pages: int, *, state: HeldState) -> list[int]:
        """Allocates `num_pages` more pages, from the promise first. Returns only the new pages. All or none.

        Raises:
            NoFreePages: The pages beyond the promise are not available.
        """
        if self._is_closed:
            raise InvariantViolated("a closed page lease cannot grow")
        num_promised = min(num_pages, self._num_promised)
        page_ids = self._allocator.allocate(num_pages, state=state, num_promised=num_promised)
        self._num_promised -= num_promised
        self.page_ids += page_ids
        return page_ids

    def grow_to(self, num_pages: int, *, state: HeldState) -> list[int]:
        """Grows until the lease contains at least `num_pages`. Returns only the new pages."""
        return self.grow(max(0, num_pages - len(self.page_ids)), state=state)

    def mark_used(self) -> None:
        """Changes all reserved pages of the lease to used."""
        is_reserved = [page_id for page_id in self.page_ids if self._allocator.state(page_id) == "reserved"]
        self._allocator.mark_used(is_reserved)

    def take(self, page_ids: Sequence[int], generations: Sequence[int] | None = None) -> bool:
        """Adds pages with existing content, like `PageAllocator.take`. This reduces the promise by the same number."""
        if self._is_closed:
            raise InvariantViolated("a closed page lease cannot grow")
        num_promised = min(len(page_ids), self._num_promised)
        if not self._allocator.take(page_ids, generations, num_promised=num_promised):
            return False
        self._num_promised -= num_promised
        self.page_ids += page_ids
        return True

    def close(self, *, is_kept: bool = False) -> None:
        """Releases the pages and the promise. Idempotent.

        If `is_kept` is true, used pages stay cached until they are evicted, and the caller can take them again by their
        generation.
        """
        if self._is_closed:
            return
        self._is_closed = True
        page_ids, self.page_ids[:] = self.page_ids[:], []
        num_promised, self._num_promised = self._num_promised, 0
        self._allocator.unpromise(num_promised)
        self._allocator.release(page_ids, is_kept=is_kept)

    def __enter__(self) -> PageLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
