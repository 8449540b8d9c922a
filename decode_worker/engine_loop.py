"""What a decode worker does on its engine thread: set pages aside, run the batch, and say what came out of each step.

The thread that calls `step` owns the page allocator and everything here. Messages, tasks, transfers, deadlines and
promises are the event loop's business; this file knows none of them.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from decode_worker.scheduler import BatchScheduler, Progress, Work
from services.engine.pages import PageAllocator, PageCounts, PageLease, num_pages_for
from services.engine.sequence import FinishReason, Sequence
from services.engine.step import NonFiniteLogits, SampledToken, StepItem, StepPlan, StepResult
from services.runtime.clock import Clock


class Runner(Protocol):
    """What the loop needs of services.engine.runner.ModelRunner."""

    def prepare(self, plan: StepPlan) -> Any:
        """Does what needs the interpreter before a step can be computed."""
        ...

    def compute(self, step: Any) -> StepResult:
        """Computes a prepared step, most of the time without the interpreter's lock."""
        ...


class Advance(NamedTuple):
    """What a step did to one sequence.

    `token_index` is the place in the answer of `outcome`'s token. `outcome` is None where the step computed a part of
    the prompt or replayed a token. A sequence with a `finish_reason` or a failure has left the batch, its pages free.
    """

    key: Hashable
    start: int
    num_tokens: int
    token_index: int
    outcome: SampledToken | NonFiniteLogits | None
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step, or a change of the pages between steps (`advances` is empty then). Times are Unix nanoseconds."""

    start_unix_ns: int
    end_unix_ns: int
    advances: tuple[Advance, ...]
    pages: PageCounts
    num_running: int
    num_waiting: int
    waiting_tokens: int


class DecodeLoop:
    """The pages that are set aside and the sequences that are computed.

    A key owns its pages from `reserve` or `start` until it ends in a step or `free` is called. `on_report` is called on
    the engine thread and must not block. What a step did is reported when the next one has been prepared: the event
    loop, which shares the interpreter's lock, then works while the model computes, and the engine does not wait for it.
    """

    def __init__(
        self,
        *,
        runner: Runner,
        allocator: PageAllocator,
        page_size: int,
        scheduler: BatchScheduler,
        clock: Clock,
        on_report: Callable[[StepReport], None],
    ) -> None:
        self._runner = runner
        self._allocator = allocator
        self._page_size = page_size
        self._scheduler = scheduler
        self._clock = clock
        self._on_report = on_report
        self._leases: dict[Hashable, PageLease] = {}
        self._sequences: dict[Hashable, Sequence] = {}
        self._reported_pages: PageCounts | None = None
        self._unsent: StepReport | None = None
        self._is_checked = False

    def reserve(self, key: Hashable, *, num_tokens: int, max_num_tokens: int) -> list[int]:
        """Sets the prompt's pages aside, promises the rest of the worst case, and returns the pages in order.

        Raises NoFreePages, which the caller's books exclude.
        """
        lease = self._lease(key, max_num_tokens)
        return lease.grow_to(num_pages_for(num_tokens, self._page_size), state="reserved")

    def start(self, sequence: Sequence) -> None:
        """Puts a sequence in line for the batch.

        Its prompt has arrived in the pages that were reserved under its id (`num_computed_tokens` says so), or it has
        none and is computed here.
        """
        key = sequence.sequence_id
        lease = self._leases.get(key) or self._lease(key, sequence.max_num_tokens)
        lease.mark_used()
        sequence.page_table = lease.page_ids
        self._sequences[key] = sequence
        progress = Progress(sequence.num_prompt_tokens, sequence.num_tokens, sequence.num_computed_tokens)
        self._scheduler.add(key, progress)

    def free(self, key: Hashable) -> None:
        """Forgets a key in any phase and frees its pages. Unknown keys are ignored."""
        self._scheduler.remove(key)
        self._sequences.pop(key, None)
        lease = self._leases.pop(key, None)
        if lease is not None:
            lease.close()

    def step(self) -> bool:
        """Schedule, prepare, report the last step, compute, apply. Returns whether there is more to compute."""
        step = self._scheduler.next_step()
        if not step:
            self._send()
            self._rest()
            return False
        start_unix_ns = self._clock.unix_ns()
        prepared = self._runner.prepare(StepPlan([self._item(work) for work in step]))
        self._send()
        result = self._runner.compute(prepared)
        advances = tuple(map(self._apply, step, result.outcomes))
        self._unsent = self._report(start_unix_ns, advances)
        has_more = self._scheduler.num_running + self._scheduler.num_waiting > 0
        if not has_more:
            self._send()
        return has_more

    def _lease(self, key: Hashable, max_num_tokens: int) -> PageLease:
        assert key not in self._leases, "a key reserves or starts once"
        self._is_checked = False
        lease = PageLease(self._allocator, num_promised_pages=num_pages_for(max_num_tokens, self._page_size))
        self._leases[key] = lease
        return lease

    def _item(self, work: Work) -> StepItem:
        sequence = self._sequences[work.key]
        assert sequence.num_computed_tokens == work.start, "the schedule and the sequence agree"
        num_tokens = work.start + work.num_tokens
        if len(sequence.page_table) * self._page_size < num_tokens:
            self._leases[work.key].grow_to(num_pages_for(num_tokens, self._page_size), state="used")
        return StepItem(sequence, work.num_tokens)

    def _apply(self, work: Work, outcome: SampledToken | NonFiniteLogits | None) -> Advance:
        sequence = self._sequences[work.key]
        sequence.num_computed_tokens += work.num_tokens
        token_index = sequence.num_generated_tokens
        finish_reason = None
        if isinstance(outcome, SampledToken):
            sequence.append_token(outcome.token_id)
            finish_reason = sequence.finish_reason()
        if finish_reason is not None or isinstance(outcome, NonFiniteLogits):
            self.free(work.key)
        return Advance(work.key, work.start, work.num_tokens, token_index, outcome, finish_reason)

    def _rest(self) -> None:
        """Nothing to compute: the pages may have changed, and there is time to check the books."""
        if not self._leases and not self._is_checked:
            self._allocator.check_integrity()
            self._is_checked = True
        if self._allocator.counts() != self._reported_pages:
            self._on_report(self._report(self._clock.unix_ns(), ()))

    def _send(self) -> None:
        unsent, self._unsent = self._unsent, None
        if unsent is not None:
            self._on_report(unsent)

    def _report(self, start_unix_ns: int, advances: tuple[Advance, ...]) -> StepReport:
        self._reported_pages = self._allocator.counts()
        return StepReport(
            start_unix_ns,
            self._clock.unix_ns(),
            advances,
            self._reported_pages,
            self._scheduler.num_running,
            self._scheduler.num_waiting,
            self._scheduler.waiting_tokens,
        )
