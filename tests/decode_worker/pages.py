"""The memory of a BatchScheduler as plain counts, and a short way to add a sequence to both."""

import itertools
from collections.abc import Hashable, Sequence
from typing import Any

from decode_worker.scheduler import BatchScheduler, Progress


class Pages:
    """The scheduler's memory as plain counts: whose pages are how many. Nobody shares."""

    def __init__(self, num_pages: int, page_size: int = 4) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.held: dict[Hashable, int] = {}
        self.asked: dict[Hashable, int] = {}
        self.reserved: list[Hashable] = []
        self.kept: dict[Hashable, int] = {}
        self.scheduler: BatchScheduler
        self.keeps = False

    @property
    def num_available_pages(self) -> int:
        return self.num_pages - sum(self.held.values())

    def num_freed_pages(self, keys: Sequence[Hashable]) -> list[int]:
        return list(itertools.accumulate(self.held[key] for key in keys))

    def reserve(self, key: Hashable) -> None:
        self.held[key] = self.asked.pop(key)
        self.reserved.append(key)
        assert self.num_available_pages >= 0

    def enter(self, key: Hashable, num_tokens: int) -> int:
        assert key not in self.held
        self.held[key] = -(-num_tokens // self.page_size)
        assert self.num_available_pages >= 0
        return self.kept.pop(key, 0)

    def grow(self, key: Hashable, num_pages: int) -> None:
        self.held[key] += num_pages
        assert self.num_available_pages >= 0

    def evict(self, key: Hashable) -> int:
        assert self.held.pop(key) > 0
        if self.keeps:
            self.kept[key] = self.scheduler._entries[key].progress.num_computed_tokens
        return self.kept.get(key, 0)


def make(
    *, max_batch: int = 4, step_tokens: int = 64, num_pages: int = 1000, page_size: int = 4, **fields: Any
) -> tuple[BatchScheduler, Pages]:
    scheduler = BatchScheduler(
        max_batch=max_batch, step_tokens=step_tokens, num_pages=num_pages, page_size=page_size, **fields
    )
    pages = Pages(num_pages, page_size)
    pages.scheduler = scheduler
    return scheduler, pages


def add(
    s: BatchScheduler,
    pages: Pages,
    key: Hashable,
    prompt: int,
    emitted: int,
    computed: int,
    new: int = 1000,
    **fields: Any,
) -> None:
    """Adds a sequence; where some of its tokens are computed, their pages exist."""
    if computed:
        pages.held[key] = -(-computed // pages.page_size)
    progress = Progress(prompt, prompt + emitted, computed)
    max_num_tokens = prompt + emitted + new
    s.add(key, progress, max_num_tokens=max_num_tokens, num_pages=pages.held.get(key, 0), **fields)
