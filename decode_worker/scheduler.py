"""Selects the work of a decode worker's next step and the sequences to preempt.

`BatchScheduler` belongs to the engine thread. It fills the batch, mixes decode, replay, and local prefill in one step,
and preempts sequences if batch slots or pages run out. It does not depend on tensors, clocks, threads, or messages.
"""

import itertools
import operator
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal, NamedTuple, Protocol

from decode_worker.admission import watermark_pages
from services.engine.cache.pool import num_pages_for
from services.scheduling.chunks import DEFAULT_CLASS, ChunkScheduler, Speed
from services.scheduling.prediction import DecodeSpeed
from worker.engine import Preemption

HEADROOM_TOKENS = 256
"""Tokens by which a sequence preempted for lack of pages, and the sequences of the batch, must be able to grow when it
re-enters. Doubles with each preemption, so that wrong estimates cause only a few preemptions per request."""


@dataclass(slots=True)
class Progress:
    """Progress of a sequence.

    Positions below `num_chunked_tokens` (at least the prompt) may be computed in chunks. Positions from there to
    `num_tokens` are computed in single-token steps. The step that reaches `num_tokens` samples a token.
    """

    num_chunked_tokens: int
    num_tokens: int
    num_computed_tokens: int


class Work(NamedTuple):
    """The next `num_tokens` tokens of a sequence from position `start`. `samples` if they yield a new token."""

    key: Hashable
    start: int
    num_tokens: int
    samples: bool


class Memory(Protocol):
    """Interface to a worker's pages (`decode_worker.pages`). The scheduler requests only available pages."""

    @property
    def num_available_pages(self) -> int:
        """Returns the number of allocatable pages: free pages and unreferenced cached pages."""
        ...

    def num_freed_pages(self, keys: Sequence[Hashable]) -> list[int]:
        """Returns how many pages evicting the first of these would free in total, then the first two, and so on."""
        ...

    def reserve(self, key: Hashable) -> None:
        """Grants the reservation that was requested under this key."""
        ...

    def enter(self, key: Hashable, num_tokens: int) -> int:
        """Allocates pages for a sequence's first `num_tokens`. Returns how many tokens are already computed in them."""
        ...

    def grow(self, key: Hashable, num_pages: int) -> None:
        """Allocates more pages for a sequence."""
        ...

    def evict(self, key: Hashable) -> int:
        """Frees all pages of a sequence. Returns how many computed tokens `enter` will certainly restore."""
        ...


class _Where(Enum):
    LINE = auto()
    PROMPTS = auto()
    DECODING = auto()


@dataclass(eq=False, slots=True)
class _Entry:
    """A sequence, or a reservation (`num_asked_pages`)."""

    key: Hashable
    service_class: int
    rank: tuple[int, int, int]
    """Sort key, lowest first: class, whether it has never been in the batch, and order of entry or arrival."""
    progress: Progress
    max_num_tokens: int
    num_pages: int = 0
    num_asked_pages: int = 0
    where: _Where = _Where.LINE
    num_shortages: int = 0
    """Number of preemptions for lack of pages."""
    added_s: float = 0.0
    is_reported: bool = False

    @property
    def is_sequence(self) -> bool:
        return not self.num_asked_pages


_NOTHING = Progress(0, 0, 0)


class BatchScheduler:
    """Continuous batching with preemption.

    Each step computes one token of every decoding or replaying sequence. The rest of the budget computes local prompts
    in the order of ChunkScheduler. Decoding never waits for prompts, and prompts never starve because of decoding.

    **Rank.** Sequences are ordered by class, then by whether they have been in the batch before, then by age. The queue
    for batch slots and pages follows this order. Preemption reverses it: the youngest sequence of the lowest class
    first.

    **Batch slots and pages.** A sequence of a better class replaces the worst sequence of the batch, which retains its
    pages. A sequence enters with pages for all its tokens. Sequences that lack pages do not overtake each other. An
    entering sequence may evict pages of worse classes, and of worse-ranked sequences outside the batch. While other
    sequences run, the watermark must stay free. A sequence that was preempted for lack of pages also needs the headroom
    that it and the batch may use (HEADROOM_TOKENS). A running sequence that needs a page may evict all worse-ranked
    sequences. If that is not enough, it leaves the batch and retains its pages until a better-ranked sequence needs
    them. Reserved pages (a transfer writes into them) and pages of removed sequences are never evicted.

    **Progress.** The best-ranked sequence of the batch can get every evictable page. If the batch is empty, the
    best-ranked queued sequence can, without any margin. All other pages become free without the scheduler. So if each
    sequence fits into the pool alone, the best-ranked one always finishes, then the next. Only better classes can delay
    it.
    """

    def __init__(
        self,
        *,
        max_batch: int,
        step_tokens: int,
        num_pages: int,
        page_size: int,
        replays_in_chunks: bool = False,
        min_prefill_tokens: int = 16,
        reported_tokens: int | None = None,
    ) -> None:
        """`replays_in_chunks` allows recomputing emitted tokens in chunks. See ChunkScheduler for `reported_tokens`."""
        assert min(max_batch, step_tokens, min_prefill_tokens) > 0, "a step computes something"
        self._max_batch = max_batch
        self._step_tokens = step_tokens
        self._page_size = page_size
        self.replays_in_chunks = replays_in_chunks
        self._min_prefill_tokens = min(min_prefill_tokens, step_tokens)
        self._watermark = watermark_pages(num_pages)
        self.chunks = ChunkScheduler(chunk_tokens=step_tokens, reported_tokens=reported_tokens)  # for prompts
        self._entries: dict[Hashable, _Entry] = {}
        self._line: list[tuple[tuple[int, int, int], Hashable]] = []
        """Sorted by rank."""
        self._prompts: dict[Hashable, _Entry] = {}  # in the batch, prompt not computed
        self._decoding: dict[Hashable, _Entry] = {}  # in the batch, prompt computed
        self._num_asking = 0
        self._waiting_tokens = 0
        self._numbers = itertools.count()
        self._preemptions: list[Preemption] = []

    @property
    def num_running(self) -> int:
        """Returns the number of sequences in the batch."""
        return len(self._prompts) + len(self._decoding)

    @property
    def num_waiting(self) -> int:
        """Returns the number of queued sequences."""
        return len(self._line) - self._num_asking

    @property
    def has_any(self) -> bool:
        """Returns whether any sequence is in the batch or in the queue."""
        return bool(self._entries)

    @property
    def waiting_tokens(self) -> int:
        """Returns how many tokens of prompts and of replayed responses remain to be computed in chunks."""
        return self._waiting_tokens

    def take_preemptions(self) -> tuple[Preemption, ...]:
        """Returns the preemptions since the last call, in order."""
        preemptions = tuple(self._preemptions)
        self._preemptions.clear()
        return preemptions

    def ask(self, key: Hashable, num_pages: int, *, service_class: int = DEFAULT_CLASS) -> None:
        """Requests pages for a future sequence. `Memory.reserve` grants them, and the scheduler then drops the key."""
        assert num_pages > 0, "a reservation has pages"
        entry = _Entry(key, service_class, self._new_rank(service_class), _NOTHING, 0, num_asked_pages=num_pages)
        self._insert(entry)
        self._num_asking += 1

    def add(
        self,
        key: Hashable,
        progress: Progress,
        *,
        max_num_tokens: int,
        service_class: int = DEFAULT_CLASS,
        num_pages: int = 0,
        has_run: bool = False,
        now_s: float = 0.0,
        is_reported: bool = False,
    ) -> None:
        """Adds a sequence with at least one uncomputed token. It already holds `num_pages` pages.

        The sequence ends with at most `max_num_tokens` tokens, which must fit into the whole pool.
        """
        assert progress.num_computed_tokens < progress.num_tokens, "a sequence has something to compute"
        assert progress.num_chunked_tokens <= progress.num_tokens, "the chunks are part of the sequence"
        rank = (service_class, 0, next(self._numbers)) if has_run else self._new_rank(service_class)
        entry = _Entry(key, service_class, rank, progress, max_num_tokens, num_pages, added_s=now_s)
        entry.is_reported = is_reported
        self._insert(entry)
        self._waiting_tokens += _uncomputed_in_chunks(progress)

    def remove(self, key: Hashable) -> None:
        """Removes a finished or cancelled sequence, or a reservation. Ignores unknown keys."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self._waiting_tokens -= _uncomputed_in_chunks(entry.progress)
        if entry.where is _Where.LINE:
            self._num_asking -= not entry.is_sequence
            self._leave_line(entry)
        else:
            self._leave_batch(entry)

    def next_step(
        self,
        memory: Memory,
        *,
        prefill: Speed | None = None,
        decode: DecodeSpeed | None = None,
        now_s: float = 0.0,
        resting: Callable[[Collection[Hashable]], Collection[Hashable]] | None = None,
    ) -> list[Work]:
        """Returns the work of the next step and counts it as computed. `resting` selects sequences that skip the step.

        Returns an empty list if nothing remains, or if the rest waits for pages that cannot be evicted. A sequence
        whose work `samples` gets its new token here. It then has one more token to compute in the next step, unless it
        is removed first. The measured speeds limit how much prompts delay decoding.
        """
        self._grow(memory)
        self.settle(memory)
        left_out = () if resting is None else resting(self._decoding.keys())
        decoding = [entry for entry in self._decoding.values() if not left_out or entry.key not in left_out]
        step = [_advance(entry.key, entry.progress, 1) for entry in decoding]
        if self._prompts:
            step += self._prefill_chunks(len(step), prefill, decode, now_s)
        return step

    def look_ahead(self, key: Hashable, num_tokens: int, memory: Memory) -> int:
        """Returns for how many further tokens, up to `num_tokens`, a sequence of this step has pages.

        Allocates pages for them if the queue is empty and the watermark stays free. The sequence would need them soon.
        """
        entry = self._decoding[key]
        end = entry.progress.num_computed_tokens
        # The very last token is never computed, and the step itself yields one token.
        num_tokens = min(num_tokens, entry.max_num_tokens - entry.progress.num_tokens)
        num_missing = num_pages_for(end + num_tokens, self._page_size) - entry.num_pages
        if num_missing > 0 and not self._line and memory.num_available_pages - num_missing >= self._watermark:
            memory.grow(key, num_missing)
            entry.num_pages += num_missing
        return max(0, min(num_tokens, entry.num_pages * self._page_size - end))

    def accept(self, key: Hashable, num_tokens: int) -> None:
        """Records that the last step computed and yielded `num_tokens` more tokens of a decoding sequence."""
        progress = self._decoding[key].progress
        progress.num_computed_tokens += num_tokens
        progress.num_tokens += num_tokens

    def settle(self, memory: Memory) -> None:
        """Assigns pages and batch slots to all queued sequences that can have them now."""
        is_short = is_full = False
        for _, key in tuple(self._line):
            entry = self._entries[key]
            if not entry.is_sequence:
                is_short = is_short or not self._claim(entry, entry.num_asked_pages, memory)
                if not is_short:
                    self.remove(key)
                    memory.reserve(key)
                continue
            if is_full or not self._can_have_place(entry):
                is_full = True
                if not self._num_asking:
                    return
                continue
            num_missing = self._num_missing(entry)
            if num_missing and (is_short or not self._claim(entry, num_missing, memory)):
                is_short = True
                continue
            if self.num_running >= self._max_batch:
                self._preempt(self._worst_running(), "place")
            self._enter(entry, num_missing, memory)

    # --- batch slots ---

    def _can_have_place(self, entry: _Entry) -> bool:
        return self.num_running < self._max_batch or self._worst_running().service_class > entry.service_class

    def _worst_running(self) -> _Entry:
        return max(itertools.chain(self._prompts.values(), self._decoding.values()), key=_rank)

    def _enter(self, entry: _Entry, num_missing: int, memory: Memory) -> None:
        self._leave_line(entry)
        progress = entry.progress
        if not entry.num_pages:
            self._waiting_tokens -= _uncomputed_in_chunks(progress)
            progress.num_computed_tokens = memory.enter(entry.key, progress.num_tokens)
            self._waiting_tokens += _uncomputed_in_chunks(progress)
        elif num_missing:
            memory.grow(entry.key, num_missing)
        entry.num_pages += num_missing
        if entry.rank[1]:
            entry.rank = (entry.service_class, 0, next(self._numbers))
        if not _uncomputed_in_chunks(progress):
            entry.where = _Where.DECODING
            self._decoding[entry.key] = entry
            return
        entry.where = _Where.PROMPTS
        self._prompts[entry.key] = entry
        self.chunks.add(
            entry.key,
            start=progress.num_computed_tokens,
            num_tokens=progress.num_chunked_tokens,
            service_class=entry.service_class,
            now_s=entry.added_s,
            is_reported=entry.is_reported,
        )

    def _preempt(self, entry: _Entry, reason: Literal["place", "no_page"]) -> None:
        """Removes a sequence from the batch. It retains its pages."""
        self._back_to_line(entry)
        entry.num_shortages += reason == "no_page"
        self._preemptions.append(Preemption(entry.key, reason))

    # --- pages ---

    def _num_missing(self, entry: _Entry) -> int:
        return max(0, num_pages_for(entry.progress.num_tokens, self._page_size) - entry.num_pages)

    def _claim(self, entry: _Entry, num_missing: int, memory: Memory) -> bool:
        """Makes pages available for an entering sequence. Returns False if that is impossible now."""
        wanted = num_missing + self._margin(entry)
        available = memory.num_available_pages
        if wanted <= available:
            return True
        victims = self._holders(
            other
            for other in self._entries.values()
            if other.service_class > entry.service_class
            or (other.where is _Where.LINE and other.rank > entry.rank and other is not entry)
        )
        if available + sum(victim.num_pages for victim in victims) < wanted:
            return False
        freed = memory.num_freed_pages([victim.key for victim in victims])
        if available + freed[-1] < wanted:
            return False
        self._evict_some(victims, freed, num_missing - available, memory)
        return True

    def _margin(self, entry: _Entry) -> int:
        if not self.num_running:
            return 0
        if not entry.num_shortages:
            return self._watermark
        headroom = HEADROOM_TOKENS << min(entry.num_shortages - 1, 32)
        beside = itertools.chain(self._prompts.values(), self._decoding.values())
        growing = [entry, *(other for other in beside if other.service_class <= entry.service_class)]
        return self._watermark + sum(self._num_growing_pages(other, headroom) for other in growing)

    def _num_growing_pages(self, entry: _Entry, headroom: int) -> int:
        num_tokens = entry.progress.num_tokens
        now = max(entry.num_pages, num_pages_for(num_tokens, self._page_size))
        return max(0, num_pages_for(min(num_tokens + headroom, entry.max_num_tokens), self._page_size) - now)

    def _grow(self, memory: Memory) -> None:
        """Allocates the page of the next token for decoding sequences, the best-ranked first."""
        size = self._page_size
        short = [e for e in self._decoding.values() if e.progress.num_computed_tokens >= e.num_pages * size]
        if len(short) > memory.num_available_pages:
            short.sort(key=_rank)
        for entry in short:
            if entry.where is not _Where.DECODING:
                continue  # it was preempted for a better-ranked one
            if memory.num_available_pages or self._free_page(entry, memory):
                memory.grow(entry.key, 1)
                entry.num_pages += 1
            else:
                self._preempt(entry, "no_page")

    def _free_page(self, entry: _Entry, memory: Memory) -> bool:
        victims = self._holders(other for other in self._entries.values() if other.rank > entry.rank)
        freed = memory.num_freed_pages([victim.key for victim in victims])
        if not freed or not freed[-1]:
            return False
        self._evict_some(victims, freed, 1, memory)
        return True

    @staticmethod
    def _holders(entries: Iterable[_Entry]) -> list[_Entry]:
        """Returns the entries that hold pages, the worst-ranked first."""
        return sorted((entry for entry in entries if entry.num_pages), key=_rank, reverse=True)

    def _evict_some(self, victims: list[_Entry], freed: list[int], num_pages: int, memory: Memory) -> None:
        """Evicts victims in order until `num_pages` pages are free."""
        num_freed = 0
        for victim, num_freed_then in zip(victims, freed, strict=True):
            if num_freed >= num_pages:
                return
            self._evict(victim, memory)
            num_freed = num_freed_then

    def _evict(self, entry: _Entry, memory: Memory) -> None:
        if entry.where is _Where.LINE:
            entry.num_shortages = max(1, entry.num_shortages)
        else:
            self._back_to_line(entry)
            entry.num_shortages += 1
        progress = entry.progress
        self._waiting_tokens -= _uncomputed_in_chunks(progress)
        entry.num_pages = 0
        progress.num_computed_tokens = memory.evict(entry.key)
        if self.replays_in_chunks:
            # All but the last token: the step that continues a response must be a decode step, as without preemption.
            progress.num_chunked_tokens = max(progress.num_chunked_tokens, progress.num_tokens - 1)
        self._waiting_tokens += _uncomputed_in_chunks(progress)
        self._preemptions.append(Preemption(entry.key, "swapped" if progress.num_computed_tokens else "recomputed"))

    # --- queue and batch ---

    def _new_rank(self, service_class: int) -> tuple[int, int, int]:
        return (service_class, 1, next(self._numbers))

    def _insert(self, entry: _Entry) -> None:
        assert entry.key not in self._entries, "a sequence is added once"
        self._entries[entry.key] = entry
        insort(self._line, (entry.rank, entry.key), key=_first)

    def _leave_line(self, entry: _Entry) -> None:
        place = bisect_left(self._line, entry.rank, key=_first)
        assert self._line[place][1] == entry.key, "ranks are different"
        del self._line[place]

    def _leave_batch(self, entry: _Entry) -> None:
        if self._prompts.pop(entry.key, None) is not None:
            self.chunks.remove(entry.key)
        self._decoding.pop(entry.key, None)

    def _back_to_line(self, entry: _Entry) -> None:
        self._leave_batch(entry)
        entry.where = _Where.LINE
        insort(self._line, (entry.rank, entry.key), key=_first)

    # --- prompts ---

    def _prefill_chunks(
        self, num_decoding: int, prefill: Speed | None, decode: DecodeSpeed | None, now_s: float
    ) -> list[Work]:
        busy_s = None
        if num_decoding and prefill is not None:
            context_tokens = sum(entry.progress.num_computed_tokens for entry in self._decoding.values())
            busy_s = 0.0 if decode is None else decode.step_s(num_decoding, context_tokens)
        chunks = self.chunks.next_step(
            speed=prefill,
            now_s=now_s,
            max_tokens=max(self._step_tokens - num_decoding, self._min_prefill_tokens),
            busy_s=busy_s,
        )
        step = []
        for chunk in chunks:
            entry = self._prompts[chunk.key]
            step.append(_advance(chunk.key, entry.progress, chunk.num_tokens))
            self._waiting_tokens -= chunk.num_tokens
            if chunk.is_last:
                entry.where = _Where.DECODING
                self._decoding[chunk.key] = self._prompts.pop(chunk.key)
        return step


_rank = operator.attrgetter("rank")
_first = operator.itemgetter(0)


def _uncomputed_in_chunks(progress: Progress) -> int:
    return max(progress.num_chunked_tokens - progress.num_computed_tokens, 0)


def _advance(key: Hashable, progress: Progress, num_tokens: int) -> Work:
    start = progress.num_computed_tokens
    end = progress.num_computed_tokens = start + num_tokens
    samples = end == progress.num_tokens
    progress.num_tokens += samples
    return Work(key, start, num_tokens, samples)
