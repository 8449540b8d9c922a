"""Where named pages go that an allocation evicts, as the allocator sees it. Knows no tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from services.runtime.page_keys import PageKey


class NamedPage(NamedTuple):
    """A page that is evicted, what it is found by, and the key of the page before it."""

    page_id: int
    key: PageKey
    parent: PageKey | None


class PageStore(Protocol):
    """Where named pages go that an allocation evicts; services.engine.cache.host_tier is one."""

    def __contains__(self, key: PageKey) -> bool:
        """Returns whether the store has the page with this key."""
        ...

    def parents(self) -> dict[PageKey, PageKey | None]:
        """Returns the key of the page before each in the store."""
        ...

    def put(self, pages: Sequence[NamedPage]) -> list[PageKey]:
        """Keeps what is in these pages, or not; returns the keys of the pages that this evicts from the store."""
        ...

    def discard(self, key: PageKey) -> None:
        """Forgets the page with this key; unknown keys are ignored."""
        ...

    def take(self, keys: Sequence[PageKey]) -> list[int]:
        """Gives up the content of these pages; the caller gets it back by the numbers that are returned."""
        ...

    def problems(self) -> list[str]:
        """Returns how the books contradict themselves, if they do."""
        ...
