"""Bookkeeping of KV pages: their holders, their keys, and the free list.

Does not touch page memory, and does not depend on sequences, models, or transfers. The engine thread owns everything
here, so there are no locks. Only `PageAllocator.generations` may be called from other threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, takewhile
from typing import Literal, NamedTuple

from services.engine.cache.store import NamedPage, PageStore
from services.runtime.errors import InvariantViolated, NoFreePages
from services.runtime.page_keys import PageKey

PageState = Literal["free", "cached", "reserved", "used"]
HeldState = Literal["reserved", "used"]

# Same order as the state codes in PageAllocator._states.
_STATES: tuple[PageState, ...] = ("free", "cached", "reserved", "used")
_FREE, _CACHED, _RESERVED, _USED = range(4)
_CODE_OF: dict[HeldState, int] = {"reserved": _RESERVED, "used": _USED}


class PageCounts(NamedTuple):
    """Number of pages in each state. The four states add up to `total`."""

    total: int
    free: int
    cached: int
    reserved: int
    used: int


class PageChanges(NamedTuple):
    """Keys added to the index and keys removed from it since the last report. No key is in both."""

    added: tuple[PageKey, ...]
    evicted: tuple[PageKey, ...]

    @classmethod
    def none(cls) -> PageChanges:
        """Returns an empty set of changes."""
        return cls((), ())


class PageAllocator:
    """Tracks the holders of each page. Does not access the pool's memory.

    A page is `free`, `cached` (no holders, but its content can be reused), `reserved` (held for content that is still
    to arrive and be verified), or `used` (held, with trusted content). Holders are counted, and the last release frees
    or caches the page. A **promise** counts pages that an admitted request may still need. It allocates no page, but
    prevents other requests from taking the last ones. The **generation** of a page changes at each allocation, so a
    stale reference to a previous holder's content can be detected.

    A used page with final content may be **named**, that is, registered under a key (services.runtime.page_keys).
    `find` returns named pages to sequences that need the same content, and the last release of a named page caches it.
    If two pages have the same content, one of them is named. An allocation that finds too few free pages evicts cached
    pages in the order of their release. Among pages released together, it evicts the end of the sequence before the
    beginning, because a page can only be found through the pages before it. If there is a `store`, evicted named pages
    move there, and `find_stored` finds them. A key is in the pool or in the store. `take_changes` returns the keys that
    were added to or removed from both together.

    Misuse, such as releasing a free page or marking a page used twice, raises InvariantViolated, because the
    bookkeeping is then wrong, and sooner or later a response is wrong too.
    """

    def __init__(self, num_pages: int, *, store: PageStore | None = None) -> None:
        if num_pages < 1:
            raise ValueError(f"an allocator needs at least 1 page, not {num_pages}")
        self._store = store
        self._num_pages = num_pages
        self._states = bytearray(num_pages)
        self._references = [0] * num_pages
        self._generations = [0] * num_pages
        # Allocations pop from the end: the most recently released page is the likeliest to be in the processor's cache.
        self._free_ids = list(range(num_pages - 1, -1, -1))
        self._num_in_state = [num_pages, 0, 0, 0]
        self._num_promised = 0
        self._keys: list[PageKey | None] = [None] * num_pages
        self._page_of: dict[PageKey, int] = {}
        self._cached: dict[int, None] = {}  # in eviction order
        self._parents: dict[PageKey, PageKey | None] = {}  # for each key in _page_of, the key of the preceding page
        self._added: dict[PageKey, None] = {}  # since take_changes
        self._evicted: dict[PageKey, None] = {}

    @property
    def num_pages(self) -> int:
        """Total number of pages."""
        return self._num_pages

    @property
    def num_free_pages(self) -> int:
        """Pages without holders and without reusable content."""
        return self._num_in_state[_FREE]

    @property
    def num_cached_pages(self) -> int:
        """Unreferenced pages whose content can still be reused. Allocations evict them."""
        return self._num_in_state[_CACHED]

    @property
    def num_reserved_pages(self) -> int:
        """Pages held for content that has not been verified."""
        return self._num_in_state[_RESERVED]

    @property
    def num_used_pages(self) -> int:
        """Held pages with trusted content."""
        return self._num_in_state[_USED]

    @property
    def num_promised_pages(self) -> int:
        """Pages that are promised but still free or cached."""
        return self._num_promised

    @property
    def num_available_pages(self) -> int:
        """Pages that can be promised or allocated without breaking a promise."""
        return self._num_in_state[_FREE] + self._num_in_state[_CACHED] - self._num_promised

    def counts(self) -> PageCounts:
        """Returns the number of pages in each state."""
        return PageCounts(self._num_pages, *self._num_in_state)

    def can_promise(self, num_pages: int) -> bool:
        """Returns whether `promise` would succeed now."""
        return num_pages <= self.num_available_pages

    def promise(self, num_pages: int) -> None:
        """Promises `num_pages` to the caller.

        Raises:
            NoFreePages: Fewer pages are available.
        """
        _check_count(num_pages)
        if not self.can_promise(num_pages):
            raise self._no_free_pages(num_pages)
        self._num_promised += num_pages

    def unpromise(self, num_pages: int) -> None:
        """Withdraws a promise of `num_pages`."""
        _check_count(num_pages)
        if num_pages > self._num_promised:
            raise InvariantViolated(f"{num_pages} pages given back of {self._num_promised} promised")
        self._num_promised -= num_pages

    def allocate(self, num_pages: int, *, state: HeldState, num_promised: int = 0) -> list[int]:
        """Allocates `num_pages` pages, each with one holder and a new generation. Uses free pages first. All or none.

        `num_promised` of them were promised to the caller before. Their allocation cannot fail, and reduces the
        promise.

        Raises:
            NoFreePages: Too few pages are available beyond those promised to other callers.
        """
        _check_count(num_pages)
        if not 0 <= num_promised <= min(num_pages, self._num_promised):
            raise InvariantViolated(
                f"{num_pages} pages asked for, {num_promised} of them from a promise of {self._num_promised}"
            )
        if num_pages - num_promised > self.num_available_pages:
            raise self._no_free_pages(num_pages - num_promised)
        self._num_promised -= num_promised
        self._evict(num_pages - len(self._free_ids))
        page_ids = [self._free_ids.pop() for _ in range(num_pages)]
        code = _CODE_OF[state]
        for page_id in page_ids:
            self._move(page_id, code)
            self._references[page_id] = 1
            self._generations[page_id] += 1
        return page_ids

    def name(self, page_ids: Sequence[int], keys: Sequence[PageKey], *, parent: PageKey | None = None) -> None:
        """Registers used pages, consecutive and with final content, under keys.

        `parent` is the key of the preceding page, or None if the pages start the sequence. A key that is already
        assigned to another page stays there. If the preceding page is not registered, the pages after it are not
        registered either, because no lookup could reach them.
        """
        for page_id, key in zip(page_ids, keys, strict=True):
            self._check_state(page_id, _USED)
            if self._keys[page_id] not in (None, key):
                raise InvariantViolated(f"page {page_id} is named twice")
            if parent is not None and parent not in self._page_of and not self._is_stored(parent):
                return
            if key not in self._page_of:
                self._page_of[key] = page_id
                self._parents[key] = parent
                self._keys[page_id] = key
                if self._store is not None and key in self._store:
                    self._store.discard(key)  # the page was recomputed: one copy is enough
                else:
                    self._note(key, self._added, self._evicted)
            parent = key

    def unname(self, page_ids: Sequence[int]) -> None:
        """Removes the keys of used pages with wrong content, and the keys of all pages computed after them.

        Takes time in proportion to the number of named pages, including stored ones.
        """
        for page_id in page_ids:
            self._check_state(page_id, _USED)
        is_doubtful: dict[PageKey | None, bool] = {None: False}
        for page_id in page_ids:
            if (key := self._keys[page_id]) is not None:
                is_doubtful[key] = True
        if len(is_doubtful) == 1:
            return
        parents = self._parents if self._store is None else self._parents | self._store.parents()
        for key in parents:
            chain: list[PageKey | None] = []
            ancestor: PageKey | None = key
            while ancestor not in is_doubtful:
                if ancestor not in parents:  # evicted: pages after it may depend on a wrong page
                    is_doubtful[ancestor] = True
                    break
                chain.append(ancestor)
                ancestor = parents[ancestor]
            is_doubtful.update(dict.fromkeys(chain, is_doubtful[ancestor]))
        for key in [key for key in parents if is_doubtful[key]]:
            named = self._page_of.get(key)
            if named is None:
                self._forget_stored(key)
            elif named in self._cached:
                self._free_cached(named)
            else:
                self._forget_key(named)

    @property
    def has_changes(self) -> bool:
        """Whether `take_changes` would return any keys."""
        return bool(self._added or self._evicted)

    def take_changes(self) -> PageChanges:
        """Returns the keys added and removed since the last call. A key with both changes is in neither set."""
        changes = PageChanges(tuple(self._added), tuple(self._evicted))
        self._added.clear()
        self._evicted.clear()
        return changes

    def find(self, keys: Sequence[PageKey]) -> list[int]:
        """Returns the pages of the longest prefix of `keys` that is in the pool. Changes nothing."""
        page_ids = []
        for key in keys:
            page_id = self._page_of.get(key)
            if page_id is None:
                break
            page_ids.append(page_id)
        return page_ids

    def find_stored(self, keys: Sequence[PageKey]) -> list[PageKey]:
        """Returns the longest prefix of `keys` that is in the store."""
        return list(takewhile(self._is_stored, keys))

    def take_stored(self, keys: Sequence[PageKey]) -> list[int]:
        """Removes the pages from the store. Lookups miss until the pages are registered again. Returns their slots."""
        assert self._store is not None, "what was found is somewhere"
        for key in keys:
            self._note(key, self._evicted, self._added)
        return self._store.take(keys)

    def take(self, page_ids: Sequence[int], generations: Sequence[int] | None = None, *, num_promised: int = 0) -> bool:
        """Adds one holder to each of these distinct pages, whose content is reused. All or none.

        `num_promised` of them were promised to the caller before, which reduces the promise. Returns False and changes
        nothing if a page has a different generation or no content, or if promises to other callers prevent it.
        """
        if not 0 <= num_promised <= min(len(page_ids), self._num_promised):
            raise InvariantViolated(
                f"{len(page_ids)} pages taken, {num_promised} of them from a promise of {self._num_promised}"
            )
        if generations is not None and self.generations(page_ids) != tuple(generations):
            return False
        if any(self._states[page_id] not in (_CACHED, _USED) for page_id in page_ids):
            return False
        cached = [page_id for page_id in page_ids if self._states[page_id] == _CACHED]
        if len(cached) - num_promised > self.num_available_pages:
            return False
        self._num_promised -= num_promised
        for page_id in cached:
            del self._cached[page_id]
            self._move(page_id, _USED)
        for page_id in page_ids:
            self._references[page_id] += 1
        return True

    def drop(self, page_ids: Sequence[int], generations: Sequence[int]) -> None:
        """Frees the pages that are cached in that generation and have no key. Idempotent."""
        for page_id, generation in zip(page_ids, generations, strict=True):
            is_meant = page_id in self._cached and self._generations[page_id] == generation
            if is_meant and self._keys[page_id] is None:
                self._free_cached(page_id)

    def mark_used(self, page_ids: Sequence[int]) -> None:
        """Changes reserved pages to used, after their content was verified."""
        for page_id in page_ids:
            self._check_state(page_id, _RESERVED)
            self._move(page_id, _USED)

    def retain(self, page_ids: Sequence[int]) -> None:
        """Adds one holder to each page."""
        for page_id in page_ids:
            self._check_held(page_id)
            self._references[page_id] += 1

    def release(self, page_ids: Sequence[int], *, is_kept: bool = False) -> None:
        """Removes one holder from each page.

        A page without holders becomes cached if it is named or if `is_kept` is true. Otherwise, it becomes free.
        Expects the pages in the order of the sequence's tokens.
        """
        for page_id in reversed(page_ids):
            self._check_held(page_id)
            self._references[page_id] -= 1
            if self._references[page_id]:
                continue
            if self._states[page_id] == _USED and (is_kept or self._keys[page_id] is not None):
                self._move(page_id, _CACHED)
                self._cached[page_id] = None
            else:
                self._move(page_id, _FREE)
                self._free_ids.append(page_id)

    def state(self, page_id: int) -> PageState:
        """Returns the page's state."""
        self._check_id(page_id)
        return _STATES[self._states[page_id]]

    def num_references(self, page_id: int) -> int:
        """Returns the number of holders of the page."""
        self._check_id(page_id)
        return self._references[page_id]

    def generation(self, page_id: int) -> int:
        """Returns how often the page was allocated."""
        self._check_id(page_id)
        return self._generations[page_id]

    def generations(self, page_ids: Sequence[int]) -> tuple[int, ...]:
        """Returns the generation of each page. This is the only method that other threads may call."""
        if page_ids and not (min(page_ids) >= 0 and max(page_ids) < self._num_pages):
            raise InvariantViolated(f"pages {list(page_ids)} do not all exist; the pool has {self._num_pages}")
        return tuple(map(self._generations.__getitem__, page_ids))

    def check_integrity(self) -> None:
        """Checks every count against every page. Takes time in proportion to the pool, so call it when idle.

        Raises:
            InvariantViolated: The bookkeeping is inconsistent. The message lists every inconsistency.
        """
        problems = [
            *self._count_problems(),
            *self._page_problems(),
            *self._free_list_problems(),
            *self._cache_problems(),
            *self._store_problems(),
        ]
        if problems:
            raise InvariantViolated("page allocator: " + "; ".join(problems))

    def _evict(self, num_pages: int) -> None:
        page_ids = list(islice(self._cached, max(0, num_pages)))
        if self._store is not None:
            keys = [(page_id, key) for page_id in page_ids if (key := self._keys[page_id]) is not None]
            for key in self._store.put([NamedPage(page_id, key, self._parents[key]) for page_id, key in keys]):
                self._note(key, self._evicted, self._added)
        for page_id in page_ids:
            self._free_cached(page_id)

    def _free_cached(self, page_id: int) -> None:
        del self._cached[page_id]
        self._forget_key(page_id)
        self._move(page_id, _FREE)
        self._free_ids.append(page_id)

    def _forget_key(self, page_id: int) -> None:
        key, self._keys[page_id] = self._keys[page_id], None
        if key is not None:
            del self._page_of[key]
            del self._parents[key]
            if not self._is_stored(key):
                self._note(key, self._evicted, self._added)

    def _is_stored(self, key: PageKey) -> bool:
        return self._store is not None and key in self._store

    def _forget_stored(self, key: PageKey) -> None:
        assert self._store is not None, "what is in no page is in the store"
        self._store.discard(key)
        self._note(key, self._evicted, self._added)

    @staticmethod
    def _note(key: PageKey, happened: dict[PageKey, None], opposite: dict[PageKey, None]) -> None:
        if key in opposite:
            del opposite[key]
        else:
            happened[key] = None

    def _no_free_pages(self, num_pages: int) -> NoFreePages:
        return NoFreePages(
            f"{num_pages} KV pages are needed, {max(self.num_available_pages, 0)} of {self._num_pages} are available"
        )

    def _move(self, page_id: int, code: int) -> None:
        self._num_in_state[self._states[page_id]] -= 1
        self._num_in_state[code] += 1
        self._states[page_id] = code

    def _check_id(self, page_id: int) -> None:
        # A negative ID would silently select a page from the end.
        if not 0 <= page_id < self._num_pages:
            raise InvariantViolated(f"page {page_id} does not exist; the pool has {self._num_pages}")

    def _check_state(self, page_id: int, code: int) -> None:
        self._check_id(page_id)
        if self._states[page_id] != code:
            raise InvariantViolated(f"page {page_id} is {self.state(page_id)}, not {_STATES[code]}")

    def _check_held(self, page_id: int) -> None:
        self._check_id(page_id)
        if self._references[page_id] < 1:
            raise InvariantViolated(f"page {page_id} is {self.state(page_id)}: nobody holds it")

    def _count_problems(self) -> list[str]:
        problems = []
        for code, name in enumerate(_STATES):
            counted = self._states.count(code)
            if counted != self._num_in_state[code]:
                problems.append(f"{self._num_in_state[code]} pages said to be {name}, {counted} are")
        if sum(self._num_in_state) != self._num_pages:
            problems.append(f"states add up to {sum(self._num_in_state)} of {self._num_pages} pages")
        if not 0 <= self._num_promised <= self._num_in_state[_FREE] + self._num_in_state[_CACHED]:
            problems.append(
                f"{self._num_promised} pages promised of {self._num_in_state[_FREE]} free "
                f"and {self._num_in_state[_CACHED]} cached"
            )
        return problems

    def _page_problems(self) -> list[str]:
        problems = []
        for page_id, references in enumerate(self._references):
            is_held = self._states[page_id] in (_RESERVED, _USED)
            if is_held != (references > 0) or references < 0:
                problems.append(f"page {page_id} is {self.state(page_id)} with {references} holders")
            if self._states[page_id] != _FREE and self._generations[page_id] < 1:
                problems.append(f"page {page_id} is {self.state(page_id)} but was never allocated")
        return problems

    def _free_list_problems(self) -> list[str]:
        listed = set(self._free_ids)
        problems = []
        if len(listed) != len(self._free_ids):
            problems.append("a page is listed as free twice")
        really_free = {page_id for page_id, code in enumerate(self._states) if code == _FREE}
        if listed != really_free:
            problems.append(f"list of free pages is wrong about pages {sorted(listed ^ really_free)[:10]}")
        return problems

    def _cache_problems(self) -> list[str]:
        problems = []
        really_cached = {page_id for page_id, code in enumerate(self._states) if code == _CACHED}
        if wrong := sorted(self._cached.keys() ^ really_cached):
            problems.append(f"list of cached pages is wrong about pages {wrong[:10]}")
        named = {page_id: key for page_id, key in enumerate(self._keys) if key is not None}
        if {key: page_id for page_id, key in named.items()} != self._page_of or len(named) != len(self._page_of):
            problems.append("pages and keys do not agree")
        if self._parents.keys() != self._page_of.keys():
            problems.append("keys and the keys before them do not agree")
        if wrong := [page_id for page_id in named if self._states[page_id] not in (_CACHED, _USED)]:
            problems.append(f"pages {wrong[:10]} are named and hold nothing")
        return problems

    def _store_problems(self) -> list[str]:
        if self._store is None:
            return []
        problems = self._store.problems()
        if both := self._page_of.keys() & self._store.parents().keys():
            problems.append(f"{len(both)} keys are in the pool and in the store")
        return problems


def _check_count(num_pages: int) -> None:
    if num_pages < 0:
        raise InvariantViolated(f"{num_pages} is no number of pages")
