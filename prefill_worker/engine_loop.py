"""What a prefill worker does on its engine thread: compute the next chunks, and say which pages are complete.

The thread that calls `step` owns the page allocator and everything here. Messages, tasks, transfers and the order in
which prompts get their turn are the event loop's business; this file knows none of them.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

from prefill_worker.scheduler import Chunk, ChunkScheduler
from services.engine.pages import PageAllocator, PageCounts, PageLease, num_pages_for
from services.engine.sequence import FinishReason, Sequence
from services.engine.step import NonFiniteLogits, SampledToken, StepItem, StepPlan, StepResult
from services.runtime.clock import Clock


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


@dataclass(frozen=True, slots=True)
class _Prompt:
    sequence: Sequence
    lease: PageLease


class PrefillLoop:
    """The prompts that are being computed. `on_report` is called on the engine thread and must not block."""

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
        self._prompts: dict[Hashable, _Prompt] = {}
        self._reported_pages: PageCounts | None = None
        self._is_checked = False

    def begin(self, sequence: Sequence) -> None:
        """Takes all pages of a prompt and makes it ready. Raises NoFreePages, which the caller's books exclude."""
        self._is_checked = False
        lease = PageLease(self._allocator)
        lease.grow(num_pages_for(sequence.num_prompt_tokens, self._page_size), state="used")
        sequence.page_table = lease.page_ids
        self._prompts[sequence.sequence_id] = _Prompt(sequence, lease)
        self._scheduler.add(sequence.sequence_id, num_tokens=sequence.num_prompt_tokens)

    def release(self, key: Hashable) -> None:
        """Forgets a prompt and frees its pages, computed or not. Unknown keys are ignored."""
        prompt = self._prompts.pop(key, None)
        if prompt is not None:
            self._scheduler.remove(key)
            prompt.lease.close()

    def step(self) -> bool:
        """Schedule, run, apply, report. Returns whether there is more to compute."""
        chunks = self._scheduler.next_step()
        if not chunks:
            self._rest()
            return False
        start_unix_ns = self._clock.unix_ns()
        result = self._runner.run(StepPlan([self._item(chunk) for chunk in chunks]))
        computed = tuple(map(self._apply, chunks, result.outcomes))
        self._report(start_unix_ns, computed)
        return len(self._scheduler) > 0

    def _item(self, chunk: Chunk) -> StepItem:
        return StepItem(self._prompts[chunk.key].sequence, chunk.num_tokens)

    def _apply(self, chunk: Chunk, outcome: SampledToken | NonFiniteLogits | None) -> ComputedChunk:
        sequence = self._prompts[chunk.key].sequence
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
        if not self._prompts and not self._is_checked:
            self._allocator.check_integrity()
            self._is_checked = True
        if self._allocator.counts() != self._reported_pages:
            self._report(self._clock.unix_ns(), ())

    def _report(self, start_unix_ns: int, chunks: tuple[ComputedChunk, ...]) -> None:
        self._reported_pages = self._allocator.counts()
        self._on_report(StepReport(start_unix_ns, self._clock.unix_ns(), chunks, self._reported_pages))
