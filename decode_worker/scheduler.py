"""Who gets a place on a decode worker, what its next step computes, and who gives way: pure bookkeeping.

`AdmissionBook` belongs to the event loop: it decides who is let in, by what answers are expected to need.
`BatchScheduler` belongs to the engine thread: it fills the batch, mixes decode, replay and local prefill in a step, and
says who loses a place or pages when there are too few. Neither knows a tensor, a clock, a thread or a message.
"""

import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal, NamedTuple, Protocol

from services.runtime.errors import NoFreePages, Overloaded
from services.scheduling.chunks import DEFAULT_CLASS, ChunkScheduler, Speed
from services.scheduling.prediction import DecodeSpeed, LinkSpeed, PrefillSpeed

NUM_CLASSES = 5
HEADROOM_TOKENS = 256
"""Who has given way for want of pages comes back when it and those beside it could grow by so many tokens each; twice
as many each further time, so that however wrong expectations are, a request gives way only a few times."""
FORGET = 1 / 32
"""What one ended answer counts in the mean of all."""
MIN_ANSWERS = 8
"""Before so many have ended, an answer is expected to take half of what it may."""
OUTLAST = 1.5
"""Who outlasts what was expected is expected to take so many times what it has."""


def watermark_pages(num_pages: int) -> int:
    """Pages of a pool that are left alone when something enters, so that those inside can grow."""
    return max(1, num_pages // 100)


def _num_pages_for(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)


# --- admission, on the event loop ---


class AnswerLengths:
    """How many tokens answers have, learned from those that ended: the mean, and how far they stray from it."""

    def __init__(self) -> None:
        self._num = 0
        self._mean = self._deviation = 0.0

    def note(self, num_tokens: int) -> None:
        """An answer ended by itself with so many tokens."""
        self._num += 1
        weight = max(FORGET, 1 / self._num)
        self._deviation += weight * (abs(num_tokens - self._mean) - self._deviation) if self._num > 1 else 0.0
        self._mean += weight * (num_tokens - self._mean)

    def expected(self, max_tokens: int) -> int:
        """What to count an answer of at most `max_tokens` for: the mean and one mean deviation."""
        expected = self._mean + self._deviation if self._num >= MIN_ANSWERS else max_tokens / 2
        return min(max_tokens, max(1, math.ceil(expected)))


@dataclass(slots=True)
class _Promise:
    service_class: int
    num_prompt_tokens: int
    max_tokens: int
    expected_tokens: int
    num_pages: int


class AdmissionBook:
    """Lets requests in as long as what they are expected to need is there.

    The rule: a request is counted with the pages of its prompt and of the answer that is expected (AnswerLengths; more
    once it has outlasted that). One of class c is admitted if, with it, the requests of class c and more urgent ones
    are fewer than `max_admitted` and their pages, and the watermark, fit into the pool; less urgent ones do not count,
    since they give way. The only one of its class and more urgent ones is always admitted: whoever asks has checked
    that its worst case fits when it is alone. With `is_optimistic` false everything counts for its worst case.

    A promise stands until it is withdrawn: pages that the request has taken by then are part of it.
    """

    def __init__(self, *, num_pages: int, page_size: int, max_admitted: int, is_optimistic: bool = True) -> None:
        self._num_pages = num_pages
        self._page_size = page_size
        self._max_admitted = max_admitted
        self._is_optimistic = is_optimistic
        self._watermark = watermark_pages(num_pages) if is_optimistic else 0
        self._answers = AnswerLengths()
        self._promises: dict[Hashable, _Promise] = {}
        self._pages_by_class = [0] * NUM_CLASSES
        self._num_by_class = [0] * NUM_CLASSES

    def __len__(self) -> int:
        """Requests with a promise."""
        return len(self._promises)

    @property
    def promised_pages(self) -> int:
        """Pages that all are expected to need, taken ones included."""
        return sum(self._pages_by_class)

    @property
    def pages_by_class(self) -> tuple[int, ...]:
        """The same for each service class."""
        return tuple(self._pages_by_class)

    @property
    def num_by_class(self) -> tuple[int, ...]:
        """Requests with a promise, for each service class."""
        return tuple(self._num_by_class)

    def promise(
        self,
        key: Hashable,
        *,
        num_prompt_tokens: int,
        max_tokens: int,
        num_emitted_tokens: int = 0,
        service_class: int = DEFAULT_CLASS,
    ) -> None:
        """Lets a request in. Raises Overloaded or NoFreePages when it cannot be let in now."""
        assert key not in self._promises, "a request is admitted once"
        worst = _num_pages_for(num_prompt_tokens + max_tokens, self._page_size)
        assert worst <= self._num_pages, "who asks has checked that the request can ever fit"
        num_ahead = sum(self._num_by_class[: service_class + 1])
        if num_ahead >= self._max_admitted:
            raise Overloaded(f"the decode worker holds {num_ahead} requests that are as urgent already")
        expected = max_tokens
        if self._is_optimistic:
            expected = max(self._answers.expected(max_tokens), self._outlasting(num_emitted_tokens, max_tokens))
        promise = _Promise(service_class, num_prompt_tokens, max_tokens, expected, 0)
        num_pages = self._pages_of(promise)
        free = self._num_pages - self._watermark - sum(self._pages_by_class[: service_class + 1])
        if num_ahead and num_pages > free:
            raise NoFreePages(f"the request is expected to need {num_pages} pages and {max(free, 0)} are not promised")
        self._promises[key] = promise
        self._num_by_class[service_class] += 1
        self._resize(promise)

    def note_tokens(self, key: Hashable, num_answer_tokens: int) -> None:
        """The answer has so many tokens now: one that outlasts what was expected counts for more. O(1)."""
        promise = self._promises.get(key)
        if promise is not None and num_answer_tokens >= promise.expected_tokens < promise.max_tokens:
            promise.expected_tokens = self._outlasting(num_answer_tokens, promise.max_tokens)
            self._resize(promise)

    def note_end(self, num_answer_tokens: int) -> None:
        """An answer ended by itself: what is expected of the next ones follows it."""
        self._answers.note(num_answer_tokens)

    def withdraw(self, key: Hashable) -> None:
        """Ends a promise; the request holds no page any more. Unknown keys are ignored."""
        promise = self._promises.pop(key, None)
        if promise is not None:
            self._num_by_class[promise.service_class] -= 1
            self._pages_by_class[promise.service_class] -= promise.num_pages

    @staticmethod
    def _outlasting(num_tokens: int, max_tokens: int) -> int:
        return min(max_tokens, math.ceil(OUTLAST * num_tokens) + 1)

    def _pages_of(self, promise: _Promise) -> int:
        return _num_pages_for(promise.num_prompt_tokens + promise.expected_tokens, self._page_size)

    def _resize(self, promise: _Promise) -> None:
        num_pages = self._pages_of(promise)
        self._pages_by_class[promise.service_class] += num_pages - promise.num_pages
        promise.num_pages = num_pages


# --- the batch, on the engine thread ---


@dataclass(slots=True)
class Progress:
    """How far a sequence is.

    Positions below `num_chunked_tokens`, at least the prompt's, may be computed in chunks; those from there to
    `num_tokens` in single-token steps. The step that reaches `num_tokens` samples.
    """

    num_chunked_tokens: int
    num_tokens: int
    num_computed_tokens: int


class Work(NamedTuple):
    """The next `num_tokens` tokens of a sequence, from position `start`; `samples` when a new token comes out."""

    key: Hashable
    start: int
    num_tokens: int
    samples: bool


class Preemption(NamedTuple):
    """A sequence gave way.

    `place`: it left the batch for a better class and keeps its pages. `no_page`: it left the batch because there was no
    page for its next token, and keeps those that it has. `swapped`, `recomputed`: others got its pages; what was in
    them is in the host's memory, or will be computed again.
    """

    key: Hashable
    reason: Literal["place", "no_page", "swapped", "recomputed"]


class Memory(Protocol):
    """The pages of a worker, as the scheduler has them moved. What it asks for is there: it has looked before."""

    @property
    def num_available_pages(self) -> int:
        """Pages that can be taken: free ones, and those that are only cached."""
        ...

    def num_freed_pages(self, keys: Sequence[Hashable]) -> list[int]:
        """How many would come free in all if the first of these lost its pages, the first two, and so on."""
        ...

    def reserve(self, key: Hashable) -> None:
        """Gives the pages that were asked for under this key."""
        ...

    def enter(self, key: Hashable, num_tokens: int) -> int:
        """Gives a sequence without pages those of its first tokens; returns how many of them are computed there."""
        ...

    def grow(self, key: Hashable, num_pages: int) -> None:
        """Gives a sequence more pages."""
        ...

    def evict(self, key: Hashable) -> int:
        """Takes all pages of a sequence; returns how many computed tokens `enter` will bring back by all means."""
        ...


class _Where(Enum):
    LINE = auto()
    PROMPTS = auto()
    DECODING = auto()


@dataclass(eq=False, slots=True)
class _Entry:
    """A sequence, or pages that were asked for (`progress` is None)."""

    key: Hashable
    service_class: int
    rank: tuple[int, int, int]
    """Lower goes first: class, whether it has never been in the batch, and then in order of entry or arrival."""
    progress: Progress
    max_num_tokens: int
    num_pages: int = 0
    num_asked_pages: int = 0
    where: _Where = _Where.LINE
    num_shortages: int = 0
    """How often it gave way for want of pages."""
    added_s: float = 0.0
    is_reported: bool = False

    @property
    def is_sequence(self) -> bool:
        """False: pages that were asked for."""
        return not self.num_asked_pages


_NOTHING = Progress(0, 0, 0)


class BatchScheduler:
    """Continuous batching with preemption.

    Each step gives every decoding or replaying sequence one token, and the rest of the budget to prompts that are
    computed here, by ChunkScheduler's order. Decoding never waits for prompts, and prompts never starve beside it.

    **Rank.** All sequences have one order: the better class first; within a class those that have been in the batch
    before those that have not; then the older. The line for places and pages is in this order, and who gives way is
    its reverse: the youngest of the lowest class.

    **Places.** A better class takes the place of the worst sequence of the batch, which keeps its pages.

    **Pages.** A sequence enters with the pages of all its tokens; of those that lack pages, nobody overtakes. To enter,
    one may have the pages of worse classes, and of worse-ranked ones that are not in the batch. While others run, the
    watermark stays free, and for one that gave way for want of pages also the headroom that it and those beside it may
    take (HEADROOM_TOKENS). A running one that needs a page may have those of all worse-ranked ones; if that is not
    enough it leaves the batch and keeps what it has until somebody better needs it. Pages that were given to who asked
    for them (a transfer writes into them), and those of sequences that were removed, are nobody's to take.

    **Progress.** The best-ranked sequence of the batch gets every page that is not out of reach. If the batch is empty,
    the best-ranked one in line does, without any margin. Pages out of reach come back without anything from here. So as
    long as each sequence fits into the pool when it is alone, the best-ranked one always ends, and after it the next;
    only better classes can keep one waiting.
    """

    def __init__(
        self,
        *,
        max_batch: int,
        step_tokens: int,
        num_pages: int,
        page_size: int,
        is_exact: bool = False,
        min_prefill_tokens: int = 16,
        reported_tokens: int | None = None,
    ) -> None:
        """`is_exact`: tokens of an answer may be computed again in chunks. `reported_tokens` as in ChunkScheduler."""
        assert min(max_batch, step_tokens, min_prefill_tokens) > 0, "a step computes something"
        self._max_batch = max_batch
        self._step_tokens = step_tokens
        self._page_size = page_size
        self._is_exact = is_exact
        self._min_prefill_tokens = min(min_prefill_tokens, step_tokens)
        self._watermark = watermark_pages(num_pages)
        self._chunks = ChunkScheduler(chunk_tokens=step_tokens, reported_tokens=reported_tokens)
        self._entries: dict[Hashable, _Entry] = {}
        self._line: list[tuple[tuple[int, int, int], Hashable]] = []
        """By rank."""
        self._prompts: dict[Hashable, _Entry] = {}  # in the batch, prompt not computed
        self._decoding: dict[Hashable, _Entry] = {}  # in the batch, prompt computed
        self._num_asking = 0
        self._waiting_tokens = 0
        self._numbers = itertools.count()
        self._preemptions: list[Preemption] = []

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self._prompts) + len(self._decoding)

    @property
    def num_waiting(self) -> int:
        """Sequences without a place."""
        return len(self._line) - self._num_asking

    @property
    def has_any(self) -> bool:
        """Whether anybody is in the batch or in line."""
        return bool(self._entries)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of prompts, and of answers that are computed again, that are still to be computed in chunks."""
        return self._waiting_tokens

    def take_preemptions(self) -> tuple[Preemption, ...]:
        """Who gave way since the last call, in order."""
        preemptions = tuple(self._preemptions)
        self._preemptions.clear()
        return preemptions

    def ask(self, key: Hashable, num_pages: int, *, service_class: int = DEFAULT_CLASS) -> None:
        """Asks for pages for a sequence that is to come; `Memory.reserve` gives them. It is unknown here from then."""
        assert num_pages > 0, "who asks needs something"
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
        """Adds a sequence with at least one uncomputed token, which holds `num_pages` pages.

        It ends with `max_num_tokens` tokens at the latest, for which the whole pool suffices.
        """
        assert progress.num_computed_tokens < progress.num_tokens, "a sequence has something to compute"
        assert progress.num_chunked_tokens <= progress.num_tokens, "the chunks are part of the sequence"
        rank = (service_class, 0, next(self._numbers)) if has_run else self._new_rank(service_class)
        entry = _Entry(key, service_class, rank, progress, max_num_tokens, num_pages, added_s=now_s)
        entry.is_reported = is_reported
        self._insert(entry)
        self._waiting_tokens += _uncomputed_in_chunks(progress)

    def remove(self, key: Hashable) -> None:
        """Forgets a sequence, ended or cancelled, or pages that were asked for. Unknown keys are ignored."""
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
        """What the next step computes; it counts as computed from here on. Empty: there is nothing to do, or whoever
        is left waits for pages that are out of reach. `resting` says who of those that decode has no token in it.

        A sequence whose work `samples` gets its new token here too: it has one more token to compute in the step after,
        unless it is removed before. With the measured speeds prompts stretch the steps of others by little.
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
        """How many tokens more than it has, `num_tokens` at most, a sequence that decodes in this step has pages for.

        It gets pages for them if nobody waits and the watermark stays free: they are pages that it would take soon.
        """
        entry = self._decoding[key]
        end = entry.progress.num_computed_tokens
        # The last token of all is never computed, and the step itself gives one.
        num_tokens = min(num_tokens, entry.max_num_tokens - entry.progress.num_tokens)
        num_missing = _num_pages_for(end + num_tokens, self._page_size) - entry.num_pages
        if num_missing > 0 and not self._line and memory.num_available_pages - num_missing >= self._watermark:
            memory.grow(key, num_missing)
            entry.num_pages += num_missing
        return max(0, min(num_tokens, entry.num_pages * self._page_size - end))

    def accept(self, key: Hashable, num_tokens: int) -> None:
        """The last step computed so many tokens more of a sequence that decodes, and gave as many more."""
        progress = self._decoding[key].progress
        progress.num_computed_tokens += num_tokens
        progress.num_tokens += num_tokens

    def settle(self, memory: Memory) -> None:
        """Gives pages and places to all in line who can have them now."""
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
                self._give_way(self._worst_running(), "place")
            self._enter(entry, num_missing, memory)

    # --- places ---

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
        self._chunks.add(
            entry.key,
            start=progress.num_computed_tokens,
            num_tokens=progress.num_chunked_tokens,
            service_class=entry.service_class,
            now_s=entry.added_s,
            is_reported=entry.is_reported,
        )

    def _give_way(self, entry: _Entry, reason: Literal["place", "no_page"]) -> None:
        """Takes a sequence out of the batch; it keeps its pages."""
        self._back_to_line(entry)
        entry.num_shortages += reason == "no_page"
        self._preemptions.append(Preemption(entry.key, reason))

    # --- pages ---

    def _num_missing(self, entry: _Entry) -> int:
        return max(0, _num_pages_for(entry.progress.num_tokens, self._page_size) - entry.num_pages)

    def _claim(self, entry: _Entry, num_missing: int, memory: Memory) -> bool:
        """Sees to it that there are pages for one that wants to enter; False: it cannot have them now."""
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
        now = max(entry.num_pages, _num_pages_for(num_tokens, self._page_size))
        return max(0, _num_pages_for(min(num_tokens + headroom, entry.max_num_tokens), self._page_size) - now)

    def _grow(self, memory: Memory) -> None:
        """Gives those who decode the page of their next token, the best-ranked first."""
        size = self._page_size
        short = [e for e in self._decoding.values() if e.progress.num_computed_tokens >= e.num_pages * size]
        if len(short) > memory.num_available_pages:
            short.sort(key=_rank)
        for entry in short:
            if entry.where is not _Where.DECODING:
                continue  # it has given way to one before it
            if memory.num_available_pages or self._free_page(entry, memory):
                memory.grow(entry.key, 1)
                entry.num_pages += 1
            else:
                self._give_way(entry, "no_page")

    def _free_page(self, entry: _Entry, memory: Memory) -> bool:
        victims = self._holders(other for other in self._entries.values() if other.rank > entry.rank)
        freed = memory.num_freed_pages([victim.key for victim in victims])
        if not freed or not freed[-1]:
            return False
        self._evict_some(victims, freed, 1, memory)
        return True

    @staticmethod
    def _holders(entries: Iterable[_Entry]) -> list[_Entry]:
        """Those that hold pages, the worst-ranked first."""
        return sorted((entry for entry in entries if entry.num_pages), key=_rank, reverse=True)

    def _evict_some(self, victims: list[_Entry], freed: list[int], num_pages: int, memory: Memory) -> None:
        """Takes the pages of as few of these as free `num_pages` pages."""
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
        if self._is_exact:
            # All but the last: what continues an answer is a step of decoding, as it would have been.
            progress.num_chunked_tokens = max(progress.num_chunked_tokens, progress.num_tokens - 1)
        self._waiting_tokens += _uncomputed_in_chunks(progress)
        self._preemptions.append(Preemption(entry.key, "swapped" if progress.num_computed_tokens else "recomputed"))

    # --- books ---

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
            self._chunks.remove(entry.key)
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
        chunks = self._chunks.next_step(
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


def is_swap_cheaper(
    *,
    num_tokens: int,
    num_prompt_tokens: int,
    num_bytes: int,
    is_exact: bool,
    prefill: PrefillSpeed,
    decode: DecodeSpeed,
    copy: LinkSpeed,
) -> bool:
    """Whether to copy the KV of `num_tokens` tokens, `num_bytes` bytes, out and in again, or to compute it again.

    Where chunks are not exact, tokens of the answer are computed one a step. What others still hold or what will be
    found again is not known before, and makes computing look dearer than it may turn out.
    """
    num_chunked = num_tokens if is_exact else min(num_tokens, num_prompt_tokens)
    num_steps = num_tokens - num_chunked
    compute_s = prefill.time_s(num_chunked) + num_steps * decode.step_s(1, num_tokens)
    return 2 * copy.time_s(num_bytes) < compute_s


def _rank(entry: _Entry) -> tuple[int, int, int]:
    return entry.rank


def _first(place: tuple[tuple[int, int, int], Hashable]) -> tuple[int, int, int]:
    return place[0]


def _uncomputed_in_chunks(progress: Progress) -> int:
    return max(progress.num_chunked_tokens - progress.num_computed_tokens, 0)


def _advance(key: Hashable, progress: Progress, num_tokens: int) -> Work:
    start = progress.num_computed_tokens
    end = progress.num_computed_tokens = start + num_tokens
    samples = end == progress.num_tokens
    progress.num_tokens += samples
    return Work(key, start, num_tokens, samples)
