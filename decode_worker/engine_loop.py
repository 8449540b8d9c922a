"""What a decode worker does on its engine thread: set pages aside, run the batch, and say what came out of each step.

The thread that calls `step` owns the page allocator and everything here. Messages, tasks, transfers, deadlines and
promises are the event loop's business; this file knows none of them.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from decode_worker.scheduler import BatchScheduler, Progress, Work
from services.engine.pages import PageAllocator, PageChanges, PageCounts, PageLease, num_pages_for
from services.engine.prefix import KeyChain, PageKey
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


class PausedSequence(NamedTuple):
    """A sequence that was taken out of the batch; nothing of it changes until `unpause`.

    `page_ids` hold the KV of its first `num_computed_tokens` tokens, which are all but the last, `next_token_id`.
    """

    key: Hashable
    num_generated_tokens: int
    num_computed_tokens: int
    next_token_id: int
    page_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReservedPages:
    """Pages in the order of the tokens; the first `num_cached_tokens` tokens, whole pages, are there already."""

    page_ids: tuple[int, ...]
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step, or what changed between steps (`advances` is empty then). Times are Unix nanoseconds.

    What `paused` names was paused after the step. `changes` says which pages have come to be found, and which no longer
    are, since the report before.
    """

    start_unix_ns: int
    end_unix_ns: int
    advances: tuple[Advance, ...]
    paused: tuple[PausedSequence, ...]
    pages: PageCounts
    num_running: int
    num_waiting: int
    waiting_tokens: int
    changes: PageChanges


class DecodeLoop:
    """The pages that are set aside and the sequences that are computed.

    `is_exact`: a chunk gives the same bits as single-token steps. Then tokens that an earlier attempt emitted are
    computed again in chunks, and otherwise one by one, as when they were generated. And then pages that were filled by
    steps of decoding are found by prompts that begin with what was said in them, as those of prompts are in any case.

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
        is_exact: bool,
        clock: Clock,
        on_report: Callable[[StepReport], None],
    ) -> None:
        self._runner = runner
        self._allocator = allocator
        self._page_size = page_size
        self._scheduler = scheduler
        self._is_exact = is_exact
        self._clock = clock
        self._on_report = on_report
        self._leases: dict[Hashable, PageLease] = {}
        self._chains: dict[Hashable, KeyChain] = {}
        self._sequences: dict[Hashable, Sequence] = {}
        self._pausing: set[Hashable] = set()
        self._paused: set[Hashable] = set()
        self._reported_pages: PageCounts | None = None
        self._unsent: StepReport | None = None
        self._is_checked = False

    def reserve(
        self, key: Hashable, token_ids: list[int], *, num_prompt_tokens: int, max_num_tokens: int, salt: bytes
    ) -> ReservedPages:
        """Sets pages aside for tokens that are to arrive, and promises the rest of the worst case.

        The first `num_prompt_tokens` of them are the prompt. Pages are shared with sequences of the same `salt`. Raises
        NoFreePages, which the caller's books exclude.
        """
        lease = self._lease(key, max_num_tokens, salt)
        num_nameable_tokens = self._num_nameable_tokens(num_prompt_tokens, len(token_ids))
        cached = self._take_cached(lease, self._chains[key].extend(token_ids, num_nameable_tokens))
        lease.grow_to(num_pages_for(len(token_ids), self._page_size), state="reserved")
        return ReservedPages(tuple(lease.page_ids), cached * self._page_size)

    def start(self, sequence: Sequence, *, salt: bytes, is_paused: bool = False) -> None:
        """Puts a sequence in line for the batch, or pauses it before its first step of decoding.

        Its leading tokens have arrived in the pages that were reserved under its id (`num_computed_tokens` says how
        many), or it has none and is computed here.
        """
        key = sequence.sequence_id
        lease = self._leases.get(key)
        if lease is None:
            lease = self._lease(key, sequence.max_num_tokens, salt)
            num_tokens = self._num_nameable_tokens(sequence.num_prompt_tokens, sequence.num_tokens - 1)
            keys = self._chains[key].extend(sequence.token_ids, num_tokens)
            sequence.num_computed_tokens = self._take_cached(lease, keys) * self._page_size
        lease.mark_used()
        sequence.page_table = lease.page_ids
        self._sequences[key] = sequence
        self._name(sequence, 0)
        self._schedule(sequence)
        if is_paused:
            self.pause(key)

    def pause(self, key: Hashable) -> None:
        """Takes a sequence out of the batch as soon as it has a token and only the last one is not computed.

        It keeps its pages. It is reported, once, after everything that was computed for it. One that has ended, or is
        paused, is left alone.
        """
        sequence = self._sequences.get(key)
        if sequence is None or key in self._paused:
            return
        self._pausing.add(key)
        if _can_pause(sequence):
            self._send()
            self._on_report(self._report(self._clock.unix_ns(), (), (self._take_out(sequence),)))

    def unpause(self, key: Hashable) -> None:
        """Puts a paused sequence back in line, or lets one that was to be paused go on. Others are left alone."""
        self._pausing.discard(key)
        if key in self._paused:
            self._paused.remove(key)
            self._schedule(self._sequences[key])

    def free(self, key: Hashable) -> None:
        """Forgets a key in any phase and frees its pages. Unknown keys are ignored."""
        self._scheduler.remove(key)
        self._sequences.pop(key, None)
        self._chains.pop(key, None)
        self._pausing.discard(key)
        self._paused.discard(key)
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
        paused = tuple(self._take_out(sequence) for sequence in self._due_to_pause())
        self._unsent = self._report(start_unix_ns, advances, paused)
        has_more = self._scheduler.num_running + self._scheduler.num_waiting > 0
        if not has_more:
            self._send()
        return has_more

    def _lease(self, key: Hashable, max_num_tokens: int, salt: bytes) -> PageLease:
        assert key not in self._leases, "a key reserves or starts once"
        self._is_checked = False
        lease = PageLease(self._allocator, num_promised_pages=num_pages_for(max_num_tokens, self._page_size))
        self._leases[key] = lease
        self._chains[key] = KeyChain(salt, self._page_size)
        return lease

    def _take_cached(self, lease: PageLease, keys: list[PageKey]) -> int:
        """Takes the pages with these keys that are there; how many."""
        cached = self._allocator.find(keys)
        is_taken = lease.take(cached)
        assert is_taken, "what is found is there, and the lease was promised as many"
        return len(cached)

    def _num_nameable_tokens(self, num_prompt_tokens: int, num_tokens: int) -> int:
        """How many of the first tokens have KV that another sequence may use instead of computing them in chunks."""
        return num_tokens if self._is_exact else min(num_tokens, num_prompt_tokens)

    def _name(self, sequence: Sequence, start: int) -> None:
        """Lets others find the pages that have become full since `start` tokens were computed."""
        num_tokens = self._num_nameable_tokens(sequence.num_prompt_tokens, sequence.num_computed_tokens)
        first_page, end_page = start // self._page_size, num_tokens // self._page_size
        if first_page < end_page:
            keys = self._chains[sequence.sequence_id].extend(sequence.token_ids, num_tokens)[:end_page]
            parent = keys[first_page - 1] if first_page else None
            self._allocator.name(sequence.page_table[first_page:end_page], keys[first_page:], parent=parent)

    def _schedule(self, sequence: Sequence) -> None:
        num_chunked_tokens = sequence.num_prompt_tokens
        if self._is_exact:
            # All but the last: what continues an answer is a step of decoding, as it would have been.
            num_chunked_tokens = max(num_chunked_tokens, sequence.num_tokens - 1)
        progress = Progress(num_chunked_tokens, sequence.num_tokens, sequence.num_computed_tokens)
        self._scheduler.add(sequence.sequence_id, progress)

    def _due_to_pause(self) -> list[Sequence]:
        return [sequence for key in self._pausing if _can_pause(sequence := self._sequences[key])]

    def _take_out(self, sequence: Sequence) -> PausedSequence:
        key = sequence.sequence_id
        self._scheduler.remove(key)
        self._pausing.discard(key)
        self._paused.add(key)
        num_pages = num_pages_for(sequence.num_computed_tokens, self._page_size)
        return PausedSequence(
            key,
            sequence.num_generated_tokens,
            sequence.num_computed_tokens,
            sequence.token_ids[-1],
            tuple(sequence.page_table[:num_pages]),
        )

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
        if isinstance(outcome, NonFiniteLogits):
            self._allocator.unname(sequence.page_table)
        elif work.start // self._page_size != sequence.num_computed_tokens // self._page_size:
            self._name(sequence, work.start)
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
        if self._allocator.counts() != self._reported_pages or self._allocator.has_changes:
            self._on_report(self._report(self._clock.unix_ns(), (), ()))

    def _send(self) -> None:
        unsent, self._unsent = self._unsent, None
        if unsent is not None:
            self._on_report(unsent)

    def _report(
        self, start_unix_ns: int, advances: tuple[Advance, ...], paused: tuple[PausedSequence, ...]
    ) -> StepReport:
        self._reported_pages = self._allocator.counts()
        return StepReport(
            start_unix_ns,
            self._clock.unix_ns(),
            advances,
            paused,
            self._reported_pages,
            self._scheduler.num_running,
            self._scheduler.num_waiting,
            self._scheduler.waiting_tokens,
            self._allocator.take_changes(),
        )


def _can_pause(sequence: Sequence) -> bool:
    """Whether it is where a step of decoding begins: another worker could go on from here without replaying."""
    return sequence.num_generated_tokens > 0 and sequence.num_uncomputed_tokens == 1
