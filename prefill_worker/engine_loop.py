"""What a prefill worker does on its engine thread: compute the next chunks, and say which pages are complete.

The thread that calls `step` owns the page allocator and everything here. Messages, tasks, transfers and the order in
which prompts get their turn are the event loop's business; this file knows none of them.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

from services.engine.cache.host_tier import HostTier, take_prefix
from services.engine.cache.pages import PageAllocator, PageChanges, PageCounts, PageLease, num_pages_for
from services.engine.steps.sequence import FinishReason, Sequence
from services.engine.steps.step import (
    PROMPT_ROWS,
    NonFiniteLogits,
    SampledToken,
    StepItem,
    StepOutcome,
    StepPlan,
    StepResult,
    with_whole_prompt,
)
from services.runtime.clock import Clock
from services.runtime.page_keys import KeyChain
from services.scheduling.chunks import DEFAULT_CLASS, Chunk, ChunkScheduler, StepTargets
from services.scheduling.copy_cost import CopyMeter
from services.scheduling.prediction import DEFAULT_PREFILL
from services.scheduling.speedometer import Speedometer

STEP_TARGETS = StepTargets(alone_s=0.050)
"""Longer than a decode worker's: only prompts wait for a step here, and how many come is known."""
UNMEASURED_TOKENS = 128
"""A step has at most so many while nobody knows how long it takes: a whole prompt takes minutes on a slow machine."""


class Runner(Protocol):
    """What the loop needs of services.engine.runner.ModelRunner."""

    def run(self, plan: StepPlan) -> StepResult:
        """Computes one step."""
        ...


@dataclass(frozen=True, slots=True)
class ComputedChunk:
    """What a step did to one prompt.

    `page_ids` are the pages that the step completed, from place `first_page` of the prompt's page table on. On the last
    chunk, `outcome` is the first token, why there is none, or None where the caller has the token already;
    `finish_reason` is set when the first token is also the last.
    """

    key: Hashable
    start: int
    num_tokens: int
    first_page: int
    page_ids: tuple[int, ...]
    is_last: bool
    outcome: SampledToken | NonFiniteLogits | None
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """What of a prompt need not be computed: its first `num_tokens` tokens, whole pages, whose KV is in `page_ids`."""

    num_tokens: int
    page_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _KeptPages:
    page_ids: tuple[int, ...]
    generations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step, or a change of the pages between steps (`chunks` is empty then). Times are Unix nanoseconds.

    `changes` says which pages have come to be found, and which no longer are, since the report before.
    """

    start_unix_ns: int
    end_unix_ns: int
    chunks: tuple[ComputedChunk, ...]
    pages: PageCounts
    changes: PageChanges


class PrefillLoop:
    """The prompts that are being computed, and the pages of those that were, as long as nobody needs the room.

    Full pages are named by what is in them as soon as they are computed, and a prompt begins after those of its first
    tokens that are there already. At least one token is always computed, because the first answer comes out of it.
    Pages that the pool had no room to keep are copied back from `tier`, where that takes less time than computing them.

    `on_report` is called on the engine thread and must not block.
    """

    def __init__(
        self,
        *,
        runner: Runner,
        allocator: PageAllocator,
        page_size: int,
        chunk_tokens: int,
        clock: Clock,
        on_report: Callable[[StepReport], None],
        tier: HostTier | None = None,
    ) -> None:
        self._runner = runner
        self._allocator = allocator
        self._tier = tier
        self._page_size = page_size
        self._clock = clock
        self._on_report = on_report
        self._scheduler = ChunkScheduler(chunk_tokens=chunk_tokens, reported_tokens=PROMPT_ROWS, targets=STEP_TARGETS)
        self.speedometer = Speedometer()
        self._copies = CopyMeter()
        if tier is not None:
            self._copies.rehearse(tier.rehearse, clock.monotonic)
        self._leases: dict[Hashable, PageLease] = {}
        self._sequences: dict[Hashable, Sequence] = {}
        self._chains: dict[Hashable, KeyChain] = {}
        self._kept: dict[Hashable, _KeptPages] = {}
        self._reported_pages: PageCounts | None = None
        self._is_checked = False

    def begin(self, sequence: Sequence, *, salt: bytes, service_class: int = DEFAULT_CLASS) -> CachedPrefix:
        """Takes all pages of a prompt and makes it ready; returns what is there already.

        Pages are shared with prompts of the same `salt`. Raises NoFreePages, which the caller's books exclude.
        """
        self._is_checked = False
        key, num_tokens = sequence.sequence_id, sequence.num_prompt_tokens
        chain = KeyChain(salt, self._page_size)
        lease = PageLease(self._allocator)
        keys = chain.extend(sequence.token_ids, num_tokens - 1)
        num_cached = take_prefix(
            lease,
            self._allocator,
            self._tier,
            [] if sequence.reports_prompt else keys,
            is_worth=self._is_copy_cheaper,
            timed=self._copy,
        )
        cached = tuple(lease.page_ids)
        lease.grow_to(num_pages_for(num_tokens, self._page_size), state="used")
        sequence.page_table = lease.page_ids
        sequence.num_computed_tokens = num_cached * self._page_size
        self._leases[key] = lease
        self._sequences[key] = sequence
        self._chains[key] = chain
        self._scheduler.add(
            key,
            start=sequence.num_computed_tokens,
            num_tokens=num_tokens,
            service_class=service_class,
            now_s=self._clock.monotonic(),
            is_reported=sequence.reports_prompt,
        )
        return CachedPrefix(sequence.num_computed_tokens, cached)

    def release(self, key: Hashable, *, is_kept: bool = False) -> None:
        """Forgets a prompt and lets its pages go, computed or not. Unknown keys are ignored.

        The pages of one that `is_kept` are all computed: they stay as they are until `take_kept`, `drop_kept`, or
        another prompt that needs them.
        """
        self._sequences.pop(key, None)
        self._chains.pop(key, None)
        self._scheduler.remove(key)
        lease = self._leases.pop(key, None)
        if lease is None:
            return
        if is_kept:
            page_ids = tuple(lease.page_ids)
            self._kept[key] = _KeptPages(page_ids, self._allocator.generations(page_ids))
        lease.close(is_kept=is_kept)

    def take_kept(self, kept_key: Hashable, key: Hashable) -> tuple[int, ...] | None:
        """Gives the pages that are kept under `kept_key` to `key`, which releases them. None: not all are there."""
        kept = self._kept.get(kept_key)
        lease = PageLease(self._allocator)
        if kept is None or not lease.take(kept.page_ids, kept.generations):
            self.drop_kept(kept_key)
            return None
        del self._kept[kept_key]
        self._is_checked = False
        self._leases[key] = lease
        return kept.page_ids

    def drop_kept(self, key: Hashable) -> None:
        """Ends the keeping of pages; those that are named may still be found by their content. Ignores unknown keys."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._allocator.drop(kept.page_ids, kept.generations)

    def step(self) -> bool:
        """Schedule, run, apply, report. Returns whether there is more to compute."""
        start_s = self._clock.monotonic()
        speed = self.speedometer.prefill
        chunks = self._scheduler.next_step(
            speed=speed or DEFAULT_PREFILL, now_s=start_s, max_tokens=UNMEASURED_TOKENS if speed is None else None
        )
        if not chunks:
            self._report_pages()
            return False
        start_unix_ns = self._clock.unix_ns()
        plan = StepPlan([self._item(chunk) for chunk in chunks])
        is_usual = not plan.reports_prompts
        result = self._runner.run(plan)
        computed = tuple(map(self._apply, chunks, result.outcomes))
        self._report(start_unix_ns, computed)
        # All that a step costs this thread is a part of what the next ones will take; reporting a prompt costs more.
        end_s = self._clock.monotonic()
        if is_usual:
            work = [(chunk.start, chunk.num_tokens, True) for chunk in chunks]
            self.speedometer.observe_step(work, end_s - start_s, end_s)
        return len(self._scheduler) > 0

    def _item(self, chunk: Chunk) -> StepItem:
        return StepItem(self._sequences[chunk.key], chunk.num_tokens)

    def _apply(self, chunk: Chunk, outcome: StepOutcome) -> ComputedChunk:
        sequence = self._sequences[chunk.key]
        outcome = with_whole_prompt(sequence, chunk.start, outcome)
        assert sequence.num_computed_tokens == chunk.start, "the schedule and the sequence agree"
        sequence.num_computed_tokens += chunk.num_tokens
        end = sequence.num_computed_tokens
        first_page = chunk.start // self._page_size
        if isinstance(outcome, NonFiniteLogits):
            self._allocator.unname(sequence.page_table)
        else:
            self._name(sequence, first_page)
        end_page = num_pages_for(end, self._page_size) if chunk.is_last else end // self._page_size
        finish_reason = None
        if isinstance(outcome, SampledToken):
            sequence.append_token(outcome.token_id)
            finish_reason = sequence.finish_reason()
        return ComputedChunk(
            chunk.key,
            chunk.start,
            chunk.num_tokens,
            first_page,
            tuple(sequence.page_table[first_page:end_page]),
            chunk.is_last,
            outcome,
            finish_reason,
        )

    def _name(self, sequence: Sequence, first_page: int) -> None:
        """Lets others find the pages that are full now, from place `first_page` of the page table on."""
        end_page = sequence.num_computed_tokens // self._page_size
        keys = self._chains[sequence.sequence_id].extend(sequence.token_ids, sequence.num_computed_tokens)[:end_page]
        parent = keys[first_page - 1] if first_page else None
        self._allocator.name(sequence.page_table[first_page:end_page], keys[first_page:], parent=parent)

    def _is_copy_cheaper(self, num_pages: int, num_pages_before: int) -> bool:
        assert self._tier is not None, "there is something to copy"
        return self._copies.is_cheaper_than_computing(
            num_pages * self._page_size,
            num_tokens_before=num_pages_before * self._page_size,
            num_bytes=num_pages * self._tier.page_bytes,
            prefill=self.speedometer.prefill or DEFAULT_PREFILL,
        )

    def _copy(self, num_pages: int, copy: Callable[[], None]) -> None:
        assert self._tier is not None, "there is something to copy"
        start_s = self._clock.monotonic()
        copy()
        end_s = self._clock.monotonic()
        self._copies.observe(num_pages * self._tier.page_bytes, end_s - start_s, end_s)

    def check_books(self) -> None:
        """Compares what is known of the pages with the pages, where nobody has any and that was not done since.

        Takes 10 ms for 30,000 pages: for an engine that has had nothing to do for a while. Raises InvariantViolated.
        """
        if not self._leases and not self._is_checked:
            self._allocator.check_integrity()
            self._is_checked = True

    def _report_pages(self) -> None:
        if self._allocator.counts() != self._reported_pages or self._allocator.has_changes:
            self._report(self._clock.unix_ns(), ())

    def _report(self, start_unix_ns: int, chunks: tuple[ComputedChunk, ...]) -> None:
        self._reported_pages = self._allocator.counts()
        changes = self._allocator.take_changes()
        self._on_report(StepReport(start_unix_ns, self._clock.unix_ns(), chunks, self._reported_pages, changes))
