"""What a decode worker does on its engine thread: set pages aside, run the batch, and say what came out of each step.

The thread that calls `step` owns the page allocator and everything here. Messages, tasks, transfers, deadlines and
promises are the event loop's business; this file knows none of them.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from decode_worker.mask_pace import MaskPace
from decode_worker.scheduler import BatchScheduler, Preemption, Progress, Work, is_swap_cheaper
from decode_worker.speculation import Candidate, Proposal, Speculator
from services.engine.cache.host_tier import HostTier, take_prefix
from services.engine.cache.pages import PageAllocator, PageChanges, PageCounts, PageLease, num_pages_for
from services.engine.cache.swap import SwapSpace
from services.engine.steps.sequence import FinishReason, Sequence
from services.engine.steps.step import (
    NonFiniteLogits,
    SampledToken,
    SampledTokens,
    StepItem,
    StepOutcome,
    StepPlan,
    StepResult,
    with_whole_prompt,
)
from services.runtime.clock import Clock
from services.runtime.errors import InvariantViolated, RequestCancelled
from services.runtime.page_keys import KeyChain, PageKey
from services.scheduling.chunks import DEFAULT_CLASS
from services.scheduling.copy_cost import CopyMeter
from services.scheduling.prediction import DEFAULT_DECODE, DEFAULT_LINK, DEFAULT_PREFILL
from services.scheduling.speedometer import Speedometer, StepWork

R = TypeVar("R")


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

    `num_tokens` were computed from `start` on. `token_index` is the place in the answer of `outcome`'s token, or of the
    first of several: all but the last of them were proposed. `outcome` is None where the step computed a part of the
    prompt or replayed a token. A sequence with a `finish_reason` or a failure has left the batch, its pages free.
    """

    key: Hashable
    start: int
    num_tokens: int
    token_index: int
    outcome: SampledToken | SampledTokens | NonFiniteLogits | None
    finish_reason: FinishReason | None
    proposal: Proposal | None = None

    @property
    def tokens(self) -> tuple[SampledToken, ...]:
        """The new tokens of the answer, in order."""
        if isinstance(self.outcome, SampledTokens):
            return self.outcome.tokens
        return (self.outcome,) if isinstance(self.outcome, SampledToken) else ()

    @property
    def num_rows(self) -> int:
        """Tokens that went through the model, those that were rejected included."""
        return self.num_tokens if self.proposal is None else 1 + len(self.proposal.token_ids)

    @property
    def num_accepted(self) -> int:
        """Proposed tokens that were right."""
        return 0 if self.proposal is None else self.proposal.num_accepted(self.tokens)


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

    What `paused` names was paused after the step, and what `preempted` names gave way before it. `changes` says which
    pages have come to be found, and which no longer are, since the report before.
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
    preempted: tuple[Preemption, ...] = ()


@dataclass(frozen=True, slots=True)
class _Asked:
    """A reservation that waits for its pages."""

    token_ids: list[int]
    num_nameable_tokens: int
    given: "Future[ReservedPages]"


@dataclass(frozen=True, slots=True)
class _Swapped:
    """What a sequence that gave way has in the host's memory: the KV of its first tokens, page by page."""

    slots: list[int]
    num_computed_tokens: int


class DecodeLoop:
    """The pages that are set aside and the sequences that are computed.

    `is_exact`: a chunk gives the same bits as single-token steps. Then tokens that an earlier attempt emitted are
    computed again in chunks, and otherwise one by one, as when they were generated. And then pages that were filled by
    steps of decoding are found by prompts that begin with what was said in them, as those of prompts are in any case.

    Pages are taken when they are needed, and if there are none, the scheduler says who gives way: that sequence's pages
    are copied to `swap` and back, or it is computed again, whichever takes less time by what was measured. Its tokens
    stay, so that it goes on with the same answer. Named pages that the pool has no room to keep go to `tier`, and come
    back where that takes less time than computing them or having them sent.

    A key is known from `reserve` or `start` until it ends in a step or `free` is called. `on_report` is called on the
    engine thread and must not block. What a step did is reported when the next one has been prepared: the event
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
        swap: SwapSpace | None = None,
        tier: HostTier | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        self._runner = runner
        self._allocator = allocator
        self._page_size = page_size
        self._scheduler = scheduler
        self._is_exact = is_exact
        self._clock = clock
        self._on_report = on_report
        self._swap = swap
        self._tier = tier
        self._page_bytes = 0 if (host := tier or swap) is None else host.page_bytes
        self._speculator = speculator
        self.speedometer = Speedometer()
        """Of steps; who measures transfers may add them."""
        self._mask_pace = MaskPace()
        self._copies = CopyMeter()
        if tier is not None:
            self._copies.rehearse(tier.rehearse, clock.monotonic)
        self._memory = _Memory(self)
        self._asked: dict[Hashable, _Asked] = {}
        self._swapped: dict[Hashable, _Swapped] = {}
        self._classes: dict[Hashable, int] = {}
        self._leases: dict[Hashable, PageLease] = {}
        self._chains: dict[Hashable, KeyChain] = {}
        self._sequences: dict[Hashable, Sequence] = {}
        self._pausing: set[Hashable] = set()
        self._paused: set[Hashable] = set()
        self._reported_pages: PageCounts | None = None
        self._unsent: StepReport | None = None
        self._is_checked = False

    def reserve(
        self,
        key: Hashable,
        token_ids: list[int],
        *,
        num_prompt_tokens: int,
        salt: bytes,
        service_class: int = DEFAULT_CLASS,
    ) -> "Future[ReservedPages]":
        """Sets pages aside for tokens that are to arrive, as soon as there are some: at once, unless others of its
        class or a better one need them more.

        The first `num_prompt_tokens` of them are the prompt. Pages are shared with sequences of the same `salt`. The
        future is set on the engine thread; it fails with RequestCancelled if `free` or `withdraw` comes first.
        """
        assert key not in self._chains, "a key reserves or starts once"
        self._chains[key] = KeyChain(salt, self._page_size)
        self._classes[key] = service_class
        num_nameable_tokens = self._num_nameable_tokens(num_prompt_tokens, len(token_ids))
        asked = self._asked[key] = _Asked(token_ids, num_nameable_tokens, Future())
        num_pages = num_pages_for(len(token_ids), self._page_size)
        self._scheduler.ask(key, num_pages, service_class=service_class)
        self._scheduler.settle(self._memory)
        return asked.given

    def withdraw(self, key: Hashable) -> None:
        """Has a reservation that still waits for its pages fail. One that has them is left alone."""
        if key in self._asked:
            self.free(key)

    def start(
        self, sequence: Sequence, *, salt: bytes, is_paused: bool = False, service_class: int = DEFAULT_CLASS
    ) -> None:
        """Puts a sequence in line for the batch, or pauses it before its first step of decoding.

        Its leading tokens have arrived in the pages that were reserved under its id (`num_computed_tokens` says how
        many; it keeps the class of its reservation), or it has none and is computed here.
        """
        key = sequence.sequence_id
        self._sequences[key] = sequence
        if sequence.grammar is not None:
            self._mask_pace.add(key)
        lease = self._leases.get(key)
        if lease is None:
            assert key not in self._chains, "a key reserves or starts once"
            self._chains[key] = KeyChain(salt, self._page_size)
            self._classes[key] = service_class
            sequence.num_computed_tokens = 0
        else:
            lease.mark_used()
            sequence.page_table = lease.page_ids
            self._name(sequence, 0)
        self._schedule(sequence, has_run=False)
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
        if self._can_pause(sequence):
            self._send()
            self._on_report(self._report(self._clock.unix_ns(), (), (self._take_out(sequence),)))

    def unpause(self, key: Hashable) -> None:
        """Puts a paused sequence back in line, or lets one that was to be paused go on. Others are left alone."""
        self._pausing.discard(key)
        if key in self._paused:
            self._paused.remove(key)
            self._schedule(self._sequences[key], has_run=True)

    def free(self, key: Hashable) -> None:
        """Forgets a key in any phase and frees its pages. Unknown keys are ignored."""
        self._scheduler.remove(key)
        self._sequences.pop(key, None)
        self._mask_pace.discard(key)
        self._chains.pop(key, None)
        self._classes.pop(key, None)
        self._pausing.discard(key)
        self._paused.discard(key)
        if self._speculator is not None:
            self._speculator.free(key)
        lease = self._leases.pop(key, None)
        if lease is not None:
            lease.close()
        swapped = self._swapped.pop(key, None)
        if swapped is not None and self._swap is not None:
            self._swap.free(swapped.slots)
        asked = self._asked.pop(key, None)
        if asked is not None:
            asked.given.set_exception(RequestCancelled("the pages are not needed any more"))

    def step(self) -> bool:
        """Schedule, prepare, report the last step, compute, apply. Returns whether there is more to compute."""
        speeds = self.speedometer
        began_unix_ns = self._clock.unix_ns()
        step = self._scheduler.next_step(
            self._memory,
            prefill=speeds.prefill,
            decode=speeds.decode,
            now_s=self._clock.monotonic(),
            resting=self._mask_pace.resting,
        )
        if not step:
            self._send()
            self._report_pages()
            return False
        start_unix_ns = proposed_unix_ns = self._clock.unix_ns()
        proposals: dict[Hashable, Proposal] = {}
        if self._speculator is not None and (proposals := self._propose(step, self._speculator)):
            proposed_unix_ns = self._clock.unix_ns()
        plan = StepPlan([self._item(work, proposals.get(work.key)) for work in step])
        is_usual = not plan.reports_prompts  # which takes longer than computing them
        prepared = self._runner.prepare(plan)
        self._send()
        rows = list(self._rows(step, proposals))  # before the step ends sequences
        result = self._runner.compute(prepared)
        masks_s = {work.key: self._sequences[work.key].take_mask_s() for work in step if work.key in self._mask_pace}
        advances = tuple(
            self._apply(work, outcome, proposals.get(work.key))
            for work, outcome in zip(step, result.outcomes, strict=True)
        )
        end_unix_ns = self._clock.unix_ns()
        self._mask_pace.note_step((end_unix_ns - start_unix_ns) / 1e9, masks_s)
        if self._speculator is not None:
            is_decoding_only = is_usual and all(work.samples and work.num_tokens == 1 for work in step)
            num_accepted = sum(advance.num_accepted for advance in advances)
            self._speculator.end_step(num_accepted, is_comparable=is_decoding_only)
        paused = tuple(self._take_out(sequence) for sequence in self._due_to_pause())
        self._unsent = self._report(start_unix_ns, advances, paused)
        if is_usual:
            # All that a step costs this thread is a part of what the next ones will take, but for what was proposed.
            done_unix_ns = self._clock.unix_ns()
            spent_ns = done_unix_ns - began_unix_ns - (proposed_unix_ns - start_unix_ns)
            speeds.observe_step(rows, spent_ns / 1e9, done_unix_ns / 1e9)
        has_more = self._scheduler.has_any
        if not has_more:
            self._send()
        return has_more

    def _rows(self, step: list[Work], proposals: Mapping[Hashable, Proposal]) -> Iterator[StepWork]:
        """A step's work as the speedometer takes it: a proposed token costs what one more sequence would."""
        for key, start, num_tokens, _ in step:
            yield start, num_tokens, num_tokens > 1 or start < self._sequences[key].num_prompt_tokens
            if (proposal := proposals.get(key)) is not None:
                for num_ahead in range(1, 1 + len(proposal.token_ids)):
                    yield start + num_ahead, 1, False

    def _lease(self, key: Hashable) -> PageLease:
        self._is_checked = False
        lease = self._leases[key] = PageLease(self._allocator)
        return lease

    def _take_cached(self, lease: PageLease, keys: list[PageKey], is_worth: Callable[[int, int], bool]) -> int:
        """Takes the pages with these keys that are there, or in the host's memory if that is worth it; how many."""
        return take_prefix(lease, self._allocator, self._tier, keys, is_worth=is_worth, timed=self._timed)

    def _is_copy_cheaper_than_computing(self, num_pages: int, num_pages_before: int) -> bool:
        return self._copies.is_cheaper_than_computing(
            num_pages * self._page_size,
            num_tokens_before=num_pages_before * self._page_size,
            num_bytes=num_pages * self._page_bytes,
            prefill=self.speedometer.prefill or DEFAULT_PREFILL,
        )

    def _is_copy_cheaper_than_sending(self, num_pages: int, num_pages_before: int) -> bool:
        return self._copies.is_cheaper_than_sending(num_pages * self._page_bytes, self.speedometer.link or DEFAULT_LINK)

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

    def _schedule(self, sequence: Sequence, *, has_run: bool) -> None:
        num_chunked_tokens = sequence.num_prompt_tokens
        if self._is_exact:
            # All but the last: what continues an answer is a step of decoding, as it would have been.
            num_chunked_tokens = max(num_chunked_tokens, sequence.num_tokens - 1)
        progress = Progress(num_chunked_tokens, sequence.num_tokens, sequence.num_computed_tokens)
        self._scheduler.add(
            sequence.sequence_id,
            progress,
            max_num_tokens=sequence.max_num_tokens,
            service_class=self._classes[sequence.sequence_id],
            num_pages=len(sequence.page_table),
            has_run=has_run,
            now_s=self._clock.monotonic(),
            is_reported=sequence.reports_prompt,
        )

    def _due_to_pause(self) -> list[Sequence]:
        return [sequence for key in self._pausing if self._can_pause(sequence := self._sequences[key])]

    def _can_pause(self, sequence: Sequence) -> bool:
        """Whether it is where a step of decoding begins, its pages here: another worker could go on."""
        is_between_steps = sequence.num_generated_tokens > 0 and sequence.num_uncomputed_tokens == 1
        return is_between_steps and sequence.sequence_id in self._leases

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

    def _propose(self, step: list[Work], speculator: Speculator) -> dict[Hashable, Proposal]:
        """Proposals for sequences that have begun their answer and take the next token of it in this step."""
        decoding = [work for work in step if work.samples and work.num_tokens == 1]
        if not decoding or not speculator.is_open(len(decoding)):
            return {}
        candidates = []
        for work in decoding:
            sequence = self._sequences[work.key]
            num_free = self._scheduler.look_ahead(work.key, speculator.max_depth, self._memory)
            if num_free and sequence.num_generated_tokens:
                candidates.append(Candidate(sequence, num_free))
        if not candidates:
            return {}
        return speculator.propose(candidates, speed=self.speedometer.decode)

    def _item(self, work: Work, proposal: Proposal | None) -> StepItem:
        sequence = self._sequences[work.key]
        assert sequence.num_computed_tokens == work.start, "the schedule and the sequence agree"
        return StepItem(sequence, work.num_tokens, proposed=() if proposal is None else proposal.token_ids)

    def _apply_proposed(self, work: Work, outcome: SampledTokens, proposal: Proposal) -> Advance:
        """The proposals that were right are tokens like others, and computed. What is behind them in the pages is no
        matter: the next step writes there before it reads.
        """
        sequence = self._sequences[work.key]
        token_index = sequence.num_generated_tokens
        for token in outcome.tokens:
            sequence.append_token(token.token_id)
        num_accepted = proposal.num_accepted(outcome.tokens)
        num_tokens = sequence.num_computed_tokens = min(work.start + 1 + num_accepted, sequence.num_tokens - 1)
        num_tokens -= work.start
        if work.start // self._page_size != sequence.num_computed_tokens // self._page_size:
            self._name(sequence, work.start)
        assert self._speculator is not None
        self._speculator.learn(work.key, proposal, outcome.tokens)
        finish_reason = sequence.finish_reason()
        if finish_reason is not None:
            self.free(work.key)
        else:
            self._scheduler.accept(work.key, num_tokens - 1)
        return Advance(work.key, work.start, num_tokens, token_index, outcome, finish_reason, proposal)

    def _apply(self, work: Work, outcome: StepOutcome, proposal: Proposal | None) -> Advance:
        if isinstance(outcome, SampledTokens):
            assert proposal is not None, "who gets several tokens has proposed some"
            return self._apply_proposed(work, outcome, proposal)
        sequence = self._sequences[work.key]
        outcome = with_whole_prompt(sequence, work.start, outcome)
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
        return Advance(work.key, work.start, work.num_tokens, token_index, outcome, finish_reason, proposal)

    def check_books(self) -> None:
        """Compares what is known of the pages with the pages, where nobody has any and that was not done since.

        Takes 10 ms for 30,000 pages: for an engine that has had nothing to do for a while. Raises InvariantViolated.
        """
        if self._chains or self._is_checked:
            return
        self._allocator.check_integrity()
        if self._swap is not None and self._swap.num_free_slots != self._swap.num_slots:
            raise InvariantViolated("slots of the swap space are held by nobody")
        if self._speculator is not None:
            self._speculator.check_integrity()
        self._is_checked = True

    def _report_pages(self) -> None:
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
            self._scheduler.take_preemptions(),
        )

    # --- the pages, as the scheduler has them moved ---

    def _num_freed_pages(self, keys: SequenceOf[Hashable]) -> list[int]:
        num_held: Counter[int] = Counter()
        freed, num_freed = [], 0
        for key in keys:
            for page_id in self._leases[key].page_ids:
                num_held[page_id] += 1
                num_freed += num_held[page_id] == self._allocator.num_references(page_id)
            freed.append(num_freed)
        return freed

    def _give_asked(self, key: Hashable) -> None:
        asked = self._asked.pop(key)
        lease = self._lease(key)
        keys = self._chains[key].extend(asked.token_ids, asked.num_nameable_tokens)
        num_cached = self._take_cached(lease, keys, self._is_copy_cheaper_than_sending)
        lease.grow_to(num_pages_for(len(asked.token_ids), self._page_size), state="reserved")
        asked.given.set_result(ReservedPages(tuple(lease.page_ids), num_cached * self._page_size))

    def _enter(self, key: Hashable, num_tokens: int) -> int:
        """What is found or comes from the host's memory is computed; the rest of the tokens has pages to go to."""
        sequence, lease = self._sequences[key], self._lease(key)
        num_nameable_tokens = self._num_nameable_tokens(sequence.num_prompt_tokens, num_tokens - 1)
        num_findable_tokens = 0 if sequence.reports_prompt else num_nameable_tokens
        keys = self._chains[key].extend(sequence.token_ids, num_nameable_tokens)
        findable = keys[: num_findable_tokens // self._page_size]
        num_cached = self._take_cached(lease, findable, self._is_copy_cheaper_than_computing)
        lease.grow_to(num_pages_for(num_tokens, self._page_size), state="used")
        sequence.page_table = lease.page_ids
        sequence.num_computed_tokens = num_cached * self._page_size
        swapped = self._swapped.pop(key, None)
        if swapped is not None and self._swap is not None:
            if swapped.num_computed_tokens > sequence.num_computed_tokens:
                page_ids = lease.page_ids[num_cached : len(swapped.slots)]
                self._copy(lambda swap: swap.load(swapped.slots[num_cached:], page_ids), len(page_ids))
                sequence.num_computed_tokens = swapped.num_computed_tokens
            self._swap.free(swapped.slots)
        self._name(sequence, 0)
        return sequence.num_computed_tokens

    def _evict(self, key: Hashable) -> int:
        sequence = self._sequences[key]
        lease = self._leases.pop(key)
        num_computed_tokens, sequence.num_computed_tokens = sequence.num_computed_tokens, 0
        page_ids = lease.page_ids[: num_pages_for(num_computed_tokens, self._page_size)]
        is_swapped = self._is_swapped(sequence, num_computed_tokens, len(page_ids))
        if is_swapped:
            slots: list[int] = self._copy(lambda swap: swap.store(page_ids), len(page_ids))
            self._swapped[key] = _Swapped(slots, num_computed_tokens)
        lease.close()
        sequence.page_table = []
        return num_computed_tokens if is_swapped else 0

    def _is_swapped(self, sequence: Sequence, num_computed_tokens: int, num_pages: int) -> bool:
        """Whether the pages of a sequence that gives way are copied."""
        if self._swap is None or not 0 < num_pages <= self._swap.num_free_slots:
            return False
        return is_swap_cheaper(
            num_tokens=num_computed_tokens,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_bytes=num_pages * self._page_bytes,
            is_exact=self._is_exact,
            prefill=self.speedometer.prefill or DEFAULT_PREFILL,
            decode=self.speedometer.decode or DEFAULT_DECODE,
            copy=self._copies.speed,
        )

    def _copy(self, run: Callable[[SwapSpace], R], num_pages: int) -> R:
        assert self._swap is not None, "who copies has where to"
        swap = self._swap
        return self._timed(num_pages, lambda: run(swap))

    def _timed(self, num_pages: int, copy: Callable[[], R]) -> R:
        start_s = self._clock.monotonic()
        result = copy()
        end_s = self._clock.monotonic()
        self._copies.observe(num_pages * self._page_bytes, end_s - start_s, end_s)
        return result


class _Memory:
    """The pages of a loop's sequences as decode_worker.scheduler.Memory."""

    def __init__(self, loop: DecodeLoop) -> None:
        self._loop = loop

    @property
    def num_available_pages(self) -> int:
        """Free and cached ones."""
        return self._loop._allocator.num_available_pages

    def num_freed_pages(self, keys: SequenceOf[Hashable]) -> list[int]:
        """Those of which nobody else has a hold."""
        return self._loop._num_freed_pages(keys)

    def reserve(self, key: Hashable) -> None:
        """Sets the future of a reservation."""
        self._loop._give_asked(key)

    def enter(self, key: Hashable, num_tokens: int) -> int:
        """Takes what is found of the tokens, brings back what was copied, and takes new pages for the rest."""
        return self._loop._enter(key, num_tokens)

    def grow(self, key: Hashable, num_pages: int) -> None:
        """Takes new pages."""
        self._loop._leases[key].grow(num_pages, state="used")

    def evict(self, key: Hashable) -> int:
        """Copies the pages or not, and lets them go."""
        return self._loop._evict(key)
