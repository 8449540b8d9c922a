"""What a prefill worker does on its engine thread: compute the next chunks, and say which pages are complete.

The thread that calls `step` owns the page allocator and everything here. Messages, tasks, transfers and the order in
which prompts get their turn are the event loop's business; this file knows none of them.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

from prefill_worker.scheduler import Chunk, ChunkScheduler
from services.engine.pages import CachedPages, PageAllocator, PageCounts, PageLease, num_pages_for
from services.engine.sequence import FinishReason, Sequence
from services.engine.step import NonFiniteLogits, SampledToken, StepItem, StepPlan, StepResult
from services.runtime.clock import Clock
from services.scheduling.prediction import PrefillMeter


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
class StepReport:
    """One step, or a change of the pages between steps (`chunks` is empty then). Times are Unix nanoseconds."""

    start_unix_ns: int
    end_unix_ns: int
    chunks: tuple[ComputedChunk, ...]
    pages: PageCounts


class PrefillLoop:
    """The prompts that are being computed, and the pages of those that were, as long as nobody needs the room.

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
    ) -> None:
        self._runner = runner
        self._allocator = allocator
        self._page_size = page_size
        self._clock = clock
        self._on_report = on_report
        self._scheduler = ChunkScheduler(chunk_tokens=chunk_tokens)
        self._meter = PrefillMeter()
        self._leases: dict[Hashable, PageLease] = {}
        self._sequences: dict[Hashable, Sequence] = {}
        self._kept: dict[Hashable, CachedPages] = {}
        self._reported_pages: PageCounts | None = None
        self._is_checked = False

    def begin(self, sequence: Sequence) -> None:
        """Takes all pages of a prompt and makes it ready. Raises NoFreePages, which the caller's books exclude."""
        self._is_checked = False
        lease = PageLease(self._allocator)
        lease.grow(num_pages_for(sequence.num_prompt_tokens, self._page_size), state="used")
        sequence.page_table = lease.page_ids
        self._leases[sequence.sequence_id] = lease
        self._sequences[sequence.sequence_id] = sequence
        self._scheduler.add(sequence.sequence_id, num_tokens=sequence.num_prompt_tokens, now_s=self._clock.monotonic())

    def release(self, key: Hashable, *, is_kept: bool = False) -> None:
        """Forgets a prompt and frees its pages, computed or not. Unknown keys are ignored.

        The pages of one that `is_kept` are all computed: they stay as they are until `take_kept`, `drop_kept`, or
        another prompt that needs them.
        """
        self._sequences.pop(key, None)
        self._scheduler.remove(key)
        lease = self._leases.pop(key, None)
        if lease is None:
            return
        if is_kept:
            self._kept[key] = lease.cache()
        else:
            lease.close()

    def take_kept(self, kept_key: Hashable, key: Hashable) -> tuple[int, ...] | None:
        """Gives the pages that are kept under `kept_key` to `key`, which releases them. None: not all are there."""
        cached = self._kept.get(kept_key)
        lease = None if cached is None else PageLease.from_cached(self._allocator, cached)
        if lease is None:
            self.drop_kept(kept_key)
            return None
        del self._kept[kept_key]
        self._is_checked = False
        self._leases[key] = lease
        return tuple(lease.page_ids)

    def drop_kept(self, key: Hashable) -> None:
        """Frees what is left of the pages that are kept under a key. Unknown keys are ignored."""
        cached = self._kept.pop(key, None)
        if cached is not None:
            self._allocator.drop_cached(cached)

    def step(self) -> bool:
        """Schedule, run, apply, report. Returns whether there is more to compute."""
        start_s = self._clock.monotonic()
        chunks = self._scheduler.next_step(speed=self._meter.speed, now_s=start_s)
        if not chunks:
            self._rest()
            return False
        start_unix_ns = self._clock.unix_ns()
        result = self._runner.run(StepPlan([self._item(chunk) for chunk in chunks]))
        computed = tuple(map(self._apply, chunks, result.outcomes))
        self._report(start_unix_ns, computed)
        self._observe(chunks, start_s)
        return len(self._scheduler) > 0

    def _observe(self, chunks: list[Chunk], start_s: float) -> None:
        """Learns from a step how long the next ones will take, all that a step costs this thread included."""
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        pairs = sum(chunk.num_tokens * (chunk.num_tokens + 2 * chunk.start) for chunk in chunks)
        # One chunk that has as many tokens, and as much attention to pay, as all of them.
        num_cached_tokens = round((pairs / num_tokens - num_tokens) / 2)
        end_s = self._clock.monotonic()
        self._meter.observe(num_tokens, num_cached_tokens, end_s - start_s, end_s)

    def _item(self, chunk: Chunk) -> StepItem:
        return StepItem(self._sequences[chunk.key], chunk.num_tokens)

    def _apply(self, chunk: Chunk, outcome: SampledToken | NonFiniteLogits | None) -> ComputedChunk:
        sequence = self._sequences[chunk.key]
        assert sequence.num_computed_tokens == chunk.start, "the schedule and the sequence agree"
        sequence.num_computed_tokens += chunk.num_tokens
        end = sequence.num_computed_tokens
        first_page = chunk.start // self._page_size
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

    def _rest(self) -> None:
        """Nothing to compute: the pages may have changed, and there is time to check the books."""
        if not self._leases and not self._is_checked:
            self._allocator.check_integrity()
            self._is_checked = True
        if self._allocator.counts() != self._reported_pages:
            self._report(self._clock.unix_ns(), ())

    def _report(self, start_unix_ns: int, chunks: tuple[ComputedChunk, ...]) -> None:
        self._reported_pages = self._allocator.counts()
        self._on_report(StepReport(start_unix_ns, self._clock.unix_ns(), chunks, self._reported_pages))
