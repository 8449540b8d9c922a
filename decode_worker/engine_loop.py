"""The engine thread of a decode worker: reserves pages, runs the batch, and reports the result of each step.

The thread that calls `step` owns all objects here. Messages, tasks, transfers, deadlines, and admissions belong to the
event loop. Features (`decode_worker.features`) plug in, so this module does not depend on them.
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future

from decode_worker.features import Proposal, StepAhead, StepFeature, StepTaken
from decode_worker.pages import DecodePages
from decode_worker.scheduler import BatchScheduler, Progress, Work
from services.engine.engine import EngineParts
from services.engine.runner import ModelRunner
from services.engine.steps.sequence import Sequence
from services.engine.steps.step import (
    PROMPT_ROWS,
    NonFiniteLogits,
    PooledState,
    SampledToken,
    SampledTokens,
    StepItem,
    StepOutcome,
    StepPlan,
    with_whole_prompt,
)
from services.runtime.clock import Clock
from services.scheduling.chunks import DEFAULT_CLASS
from services.scheduling.speedometer import StepWork
from worker.engine import Advance, DecodeEngine, DecodeReport, Guesses, PausedSequence, ReservedPages


class DecodeLoop(DecodeEngine):
    """The sequences that the engine computes. Owns `pages` and `scheduler`. The scheduler moves pages through `pages`.

    If chunked prefill produces the same bits as decoding (`replays_in_chunks`), tokens that an earlier attempt emitted
    are recomputed in chunks. Otherwise they are recomputed one by one, as they were generated.

    Pages are allocated on demand. If none is free, the scheduler preempts a sequence. The preempted sequence keeps its
    tokens, so that it later resumes the same response.

    The report of a step is sent after the next step has been prepared. The event loop shares the interpreter lock with
    this thread, so it handles the report while the model computes, and the engine does not wait.
    """

    def __init__(
        self,
        *,
        runner: ModelRunner,
        pages: DecodePages,
        scheduler: BatchScheduler,
        clock: Clock,
        on_report: Callable[[DecodeReport], None],
        features: SequenceOf[StepFeature] = (),
    ) -> None:
        self._runner = runner
        self._pages = self.prefixes = pages
        self._scheduler = scheduler
        self._clock = clock
        self._on_report = on_report
        self._features = features
        self.speedometer = pages.speedometer
        self._classes: dict[Hashable, int] = {}
        self._sequences: dict[Hashable, Sequence] = {}
        self._pausing: set[Hashable] = set()
        self._paused: set[Hashable] = set()
        self._unsent: DecodeReport | None = None

    def reserve(
        self,
        key: Hashable,
        token_ids: list[int],
        *,
        num_prompt_tokens: int,
        salt: bytes,
        service_class: int = DEFAULT_CLASS,
        adapter: str = "",
    ) -> "Future[ReservedPages]":
        """Implements DecodeEngine."""
        given = self._pages.ask(key, token_ids, num_prompt_tokens=num_prompt_tokens, salt=salt)
        self._classes[key] = service_class
        self._scheduler.ask(key, self._pages.num_pages_for(len(token_ids)), service_class=service_class)
        self._scheduler.settle(self._pages)
        return given

    def withdraw(self, key: Hashable) -> None:
        """Implements DecodeEngine."""
        if self._pages.is_asking(key):
            self.free(key)

    def start(
        self, sequence: Sequence, *, salt: bytes, is_paused: bool = False, service_class: int = DEFAULT_CLASS
    ) -> None:
        """Implements DecodeEngine."""
        key = sequence.sequence_id
        self._sequences[key] = sequence
        self._classes.setdefault(key, service_class)
        self._pages.start(sequence, salt)
        for feature in self._features:
            feature.start(sequence)
        self._schedule(sequence, has_run=False)
        if is_paused:
            self.pause(key)

    def pause(self, key: Hashable) -> None:
        """Implements DecodeEngine."""
        sequence = self._sequences.get(key)
        if sequence is None or key in self._paused:
            return
        self._pausing.add(key)
        if self._can_pause(sequence):
            self._send()
            self._on_report(self._report(self._clock.unix_ns(), (), (self._take_out(sequence),)))

    def unpause(self, key: Hashable) -> None:
        """Implements DecodeEngine."""
        self._pausing.discard(key)
        if key in self._paused:
            self._paused.remove(key)
            self._schedule(self._sequences[key], has_run=True)

    def free(self, key: Hashable) -> None:
        """Implements DecodeEngine."""
        self._scheduler.remove(key)
        self._sequences.pop(key, None)
        self._classes.pop(key, None)
        self._pausing.discard(key)
        self._paused.discard(key)
        for feature in self._features:
            feature.free(key)
        self._pages.close(key)

    def step(self) -> bool:
        """Schedules a step, reports the previous one, computes, and applies it. Returns whether work remains."""
        speeds = self.speedometer
        began_unix_ns = self._clock.unix_ns()
        step = self._scheduler.next_step(
            self._pages,
            prefill=speeds.prefill,
            decode=speeds.decode,
            now_s=self._clock.monotonic(),
            resting=self._resting,
        )
        if not step:
            self._send()
            if self._pages.has_news:
                self._on_report(self._report(self._clock.unix_ns(), (), ()))
            return False
        start_unix_ns = self._clock.unix_ns()
        proposals = self._propose(step)
        proposed_unix_ns = self._clock.unix_ns() if proposals else start_unix_ns
        plan = StepPlan([self._item(work, proposals.get(work.key)) for work in step])
        reports_prompts = plan.reports_prompts  # reporting takes longer than computing
        prepared = self._runner.prepare(plan)
        self._send()
        rows = list(self._rows(step, proposals))  # read before the step ends sequences
        result = self._runner.compute(prepared)
        for feature in self._features:
            feature.computed(step)
        advances = tuple(
            self._apply(work, outcome, proposals.get(work.key))
            for work, outcome in zip(step, result.outcomes, strict=True)
        )
        self._end_step(step, advances, start_unix_ns, reports_prompts=reports_prompts)
        paused = tuple(self._take_out(sequence) for sequence in self._due_to_pause())
        self._unsent = self._report(start_unix_ns, advances, paused)
        if not reports_prompts:
            # The time of a step includes all its work on this thread, except for the time of drafting tokens.
            done_unix_ns = self._clock.unix_ns()
            spent_ns = done_unix_ns - began_unix_ns - (proposed_unix_ns - start_unix_ns)
            speeds.observe_step(rows, spent_ns / 1e9, done_unix_ns / 1e9)
        has_more = self._scheduler.has_any
        if not has_more:
            self._send()
        return has_more

    def check_books(self) -> None:
        """Implements Engine."""
        if self._pages.check_books():
            for feature in self._features:
                feature.check_books()

    # --- features ---

    def _resting(self, keys: Collection[Hashable]) -> Collection[Hashable]:
        return {key for feature in self._features for key in feature.resting(keys)}

    def _propose(self, step: list[Work]) -> dict[Hashable, Proposal]:
        ahead = StepAhead(step, self._sequences, self._look_ahead, self.speedometer.decode)
        proposals: dict[Hashable, Proposal] = {}
        for feature in self._features:
            proposals |= feature.propose(ahead)
        return proposals

    def _look_ahead(self, key: Hashable, num_tokens: int) -> int:
        return self._scheduler.look_ahead(key, num_tokens, self._pages)

    def _end_step(
        self, step: list[Work], advances: tuple[Advance, ...], start_unix_ns: int, *, reports_prompts: bool
    ) -> None:
        time_s = (self._clock.unix_ns() - start_unix_ns) / 1e9
        num_accepted = sum(advance.guesses.num_accepted for advance in advances if advance.guesses is not None)
        for feature in self._features:
            feature.end_step(StepTaken(step, time_s, num_accepted, reports_prompts))
        if reports_prompts:
            self._scheduler.chunks.note_reported_step(time_s, now_s=self._clock.monotonic())

    # --- the work of a step ---

    def _rows(self, step: list[Work], proposals: Mapping[Hashable, Proposal]) -> Iterator[StepWork]:
        """Yields a step's work for the step-time estimator. A draft token costs as much as one more sequence."""
        for key, start, num_tokens, _ in step:
            yield start, num_tokens, num_tokens > 1 or start < self._sequences[key].num_prompt_tokens
            if (proposal := proposals.get(key)) is not None:
                for num_ahead in range(1, 1 + len(proposal.token_ids)):
                    yield start + num_ahead, 1, False

    def _item(self, work: Work, proposal: Proposal | None) -> StepItem:
        sequence = self._sequences[work.key]
        assert sequence.num_computed_tokens == work.start, "the schedule and the sequence agree"
        proposed = () if proposal is None else proposal.token_ids
        return StepItem(sequence, work.num_tokens, sequence.pooling is None, proposed)

    def _apply(self, work: Work, outcome: StepOutcome, proposal: Proposal | None) -> Advance:
        if isinstance(outcome, SampledTokens):
            assert proposal is not None, "several tokens come of a proposal"
            return self._apply_proposed(work, outcome, proposal)
        sequence = self._sequences[work.key]
        outcome = with_whole_prompt(sequence, work.start, outcome)
        sequence.num_computed_tokens += work.num_tokens
        token_index = sequence.num_generated_tokens
        if isinstance(outcome, NonFiniteLogits):
            self._pages.unname(sequence)
        else:
            self._name(sequence, work.start)
        finish_reason = None
        if isinstance(outcome, SampledToken):
            sequence.append_token(outcome.token_id)
        if isinstance(outcome, SampledToken | PooledState):
            finish_reason = sequence.finish_reason()
        if finish_reason is not None or isinstance(outcome, NonFiniteLogits):
            self.free(work.key)
        guesses = None if proposal is None else Guesses(proposal.source, len(proposal.token_ids), 0)
        return Advance(work.key, work.start, work.num_tokens, token_index, outcome, finish_reason, guesses)

    def _apply_proposed(self, work: Work, outcome: SampledTokens, proposal: Proposal) -> Advance:
        """Applies the accepted draft tokens like sampled ones. The next step overwrites the KV of rejected tokens."""
        sequence = self._sequences[work.key]
        token_index = sequence.num_generated_tokens
        for token in outcome.tokens:
            sequence.append_token(token.token_id)
        num_accepted = proposal.num_accepted(outcome.tokens)
        sequence.num_computed_tokens = min(work.start + 1 + num_accepted, sequence.num_tokens - 1)
        num_tokens = sequence.num_computed_tokens - work.start
        self._name(sequence, work.start)
        for feature in self._features:
            feature.learn(work.key, proposal, outcome.tokens)
        finish_reason = sequence.finish_reason()
        if finish_reason is not None:
            self.free(work.key)
        else:
            self._scheduler.accept(work.key, num_tokens - 1)
        guesses = Guesses(proposal.source, len(proposal.token_ids), num_accepted)
        return Advance(work.key, work.start, num_tokens, token_index, outcome, finish_reason, guesses)

    def _name(self, sequence: Sequence, start: int) -> None:
        page_size = self._pages.page_size
        if start // page_size != sequence.num_computed_tokens // page_size:
            self._pages.name(sequence, start)

    def _schedule(self, sequence: Sequence, *, has_run: bool) -> None:
        num_chunked_tokens = sequence.num_prompt_tokens
        if self._scheduler.replays_in_chunks:
            # All but the last token: the step that continues a response must be a decode step, as without preemption.
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

    # --- pauses ---

    def _due_to_pause(self) -> list[Sequence]:
        return [sequence for key in self._pausing if self._can_pause(sequence := self._sequences[key])]

    def _can_pause(self, sequence: Sequence) -> bool:
        """Returns whether a decode step is next and the pages are held here, so that the sequence could migrate."""
        is_between_steps = sequence.num_generated_tokens > 0 and sequence.num_uncomputed_tokens == 1
        return is_between_steps and sequence.sequence_id in self._pages

    def _take_out(self, sequence: Sequence) -> PausedSequence:
        key = sequence.sequence_id
        self._scheduler.remove(key)
        self._pausing.discard(key)
        self._paused.add(key)
        num_pages = self._pages.num_pages_for(sequence.num_computed_tokens)
        return PausedSequence(
            key,
            sequence.num_generated_tokens,
            sequence.num_computed_tokens,
            sequence.token_ids[-1],
            tuple(sequence.page_table[:num_pages]),
        )

    # --- reports ---

    def _send(self) -> None:
        unsent, self._unsent = self._unsent, None
        if unsent is not None:
            self._on_report(unsent)

    def _report(
        self, start_unix_ns: int, advances: tuple[Advance, ...], paused: tuple[PausedSequence, ...]
    ) -> DecodeReport:
        pages, changes = self._pages.take_report()
        return DecodeReport(
            start_unix_ns,
            self._clock.unix_ns(),
            pages,
            changes,
            advances,
            paused,
            self._scheduler.num_running,
            self._scheduler.num_waiting,
            self._scheduler.waiting_tokens,
            self._scheduler.take_preemptions(),
        )


def decode_loop(
    parts: EngineParts,
    on_report: Callable[[DecodeReport], None],
    *,
    max_batch: int,
    chunk_tokens: int,
    swap_bytes: int,
    clock: Clock,
    features: SequenceOf[StepFeature] = (),
) -> DecodeLoop:
    """Returns the loop of a loaded model. Its step-time estimator starts with the measurements of the warm-up.

    Raises ConfigError if the swap memory cannot be allocated.
    """
    pages = DecodePages.of(parts, swap_bytes=swap_bytes, clock=clock)
    scheduler = BatchScheduler(
        max_batch=max_batch,
        step_tokens=chunk_tokens,
        num_pages=parts.pool.num_pages,
        page_size=pages.page_size,
        replays_in_chunks=parts.runner.replays_in_chunks,
        reported_tokens=PROMPT_ROWS,
    )
    return DecodeLoop(
        runner=parts.runner, pages=pages, scheduler=scheduler, clock=clock, on_report=on_report, features=features
    )
