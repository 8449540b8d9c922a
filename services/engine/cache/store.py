"""The allocator's interface to the store of evicted named pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from services.runtime.page_keys import PageKey


class NamedPage(NamedTuple):
    """A page that is being evicted, its key, and the key of the preceding page."""

    page_id: int
    key: PageKey
    parent: PageKey | None


class PageStore(Protocol):
    """Receives the named pages that an allocation evicts. Implemented by services.engine.cache.host_tier."""

    def __contains__(self, key: PageKey) -> bool:
        """Returns whether the store contains the page with this key."""
        ...

    def parents(self) -> dict[PageKey, PageKey | None]:
        """Returns, for each page in the store, the key of the preceding page."""
        ...

    def put(self, pages: Sequence[NamedPage]) -> list[PageKey]:
        """Stores some or all of these pages. Returns the keys that this evicts from the store."""
        ...

    def discard(self, key: PageKey) -> None:
        """Drops the page with this key. Ignores unknown keys."""
        ...

    def take(self, keys: Sequence[PageKey]) -> list[int]:
        """Removes these pages from lookup. Returns the slots from which the caller can load their content."""
        ...

    def problems(self) -> list[str]:
        """Returns inconsistencies of the bookkeeping."""
        ...
