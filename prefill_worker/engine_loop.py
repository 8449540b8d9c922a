"""What a prefill worker does on its engine thread: compute the next chunks, and say which pages are complete.

The thread that calls `step` owns everything here. Messages, tasks, transfers and the order in which prompts get their
turn are the event loop's business; this file knows none of them.
"""

from collections.abc import Callable, Hashable

from services.engine.engine import EngineParts
from services.engine.runner import ModelRunner
from services.engine.steps.sequence import Sequence
from services.engine.steps.step import (
    PROMPT_ROWS,
    NonFiniteLogits,
    SampledToken,
    StepItem,
    StepOutcome,
    StepPlan,
    with_whole_prompt,
)
from services.runtime.clock import Clock
from services.scheduling.background import Chunk
from services.scheduling.chunks import DEFAULT_CLASS, ChunkScheduler, StepTargets
from services.scheduling.prediction import DEFAULT_PREFILL
from worker.engine import CachedPrefix, ComputedChunk, KeptPages, PrefillEngine, PrefillReport
from worker.engine_pages import EnginePages

STEP_TARGETS = StepTargets(alone_s=0.050)
"""Longer than a decode worker's: only prompts wait for a step here, and how many come is known."""
UNMEASURED_TOKENS = 128
"""Most tokens of a step before its time is known: a whole prompt takes minutes on a slow machine."""


class PrefillLoop(PrefillEngine):
    """The prompts that are being computed, and the pages of computed ones for as long as nobody needs the room.

    A prompt begins behind those of its first tokens whose pages are cached. At least one token is always computed,
    because the first answer comes out of it.
    """

    def __init__(
        self,
        *,
        runner: ModelRunner,
        pages: EnginePages,
        chunk_tokens: int,
        clock: Clock,
        on_report: Callable[[PrefillReport], None],
    ) -> None:
        self._runner = runner
        self._pages = self.prefixes = pages
        self._clock = clock
        self._on_report = on_report
        self._scheduler = ChunkScheduler(chunk_tokens=chunk_tokens, reported_tokens=PROMPT_ROWS, targets=STEP_TARGETS)
        self.speedometer = pages.speedometer
        self._sequences: dict[Hashable, Sequence] = {}
        self._kept: dict[Hashable, KeptPages] = {}

    def begin(self, sequence: Sequence, *, salt: bytes, service_class: int = DEFAULT_CLASS) -> CachedPrefix:
        """Implements PrefillEngine."""
        num_cached = self._pages.begin(sequence, salt)
        self._sequences[sequence.sequence_id] = sequence
        self._scheduler.add(
            sequence.sequence_id,
            start=sequence.num_computed_tokens,
            num_tokens=sequence.num_prompt_tokens,
            service_class=service_class,
            now_s=self._clock.monotonic(),
            is_reported=sequence.reports_prompt,
        )
        return CachedPrefix(sequence.num_computed_tokens, tuple(sequence.page_table[:num_cached]))

    def release(self, key: Hashable, *, is_kept: bool = False) -> None:
        """Implements PrefillEngine."""
        self._sequences.pop(key, None)
        self._scheduler.remove(key)
        if not is_kept:
            self._pages.close(key)
        elif (kept := self._pages.keep(key)) is not None:
            self._kept[key] = kept

    def take_kept(self, kept_key: Hashable, key: Hashable) -> tuple[int, ...] | None:
        """Implements PrefillEngine."""
        kept = self._kept.get(kept_key)
        if kept is None or not self._pages.take(key, kept):
            self.drop_kept(kept_key)
            return None
        del self._kept[kept_key]
        return kept.page_ids

    def drop_kept(self, key: Hashable) -> None:
        """Implements PrefillEngine; pages with names may still be found by their content."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._pages.drop(kept)

    def step(self) -> bool:
        """Schedules, computes, applies and reports a step; returns whether more is to be computed."""
        start_s = self._clock.monotonic()
        speed = self.speedometer.prefill
        chunks = self._scheduler.next_step(
            speed=speed or DEFAULT_PREFILL, now_s=start_s, max_tokens=UNMEASURED_TOKENS if speed is None else None
        )
        if not chunks:
            if self._pages.has_news:
                self._report(self._clock.unix_ns(), ())
            return False
        start_unix_ns = self._clock.unix_ns()
        found = [(self._sequences[chunk.key], chunk.num_tokens) for chunk in chunks]
        plan = StepPlan([StepItem(sequence, number, sequence.pooling is None) for sequence, number in found])
        is_usual = not plan.reports_prompts
        result = self._runner.run(plan)
        computed = tuple(map(self._apply, chunks, result.outcomes))
        self._report(start_unix_ns, computed)
        # All that a step costs this thread is a part of what the next ones will take; reporting a prompt costs more.
        end_s = self._clock.monotonic()
        if is_usual:
            work = [(chunk.start, chunk.num_tokens, True) for chunk in chunks]
            self.speedometer.observe_step(work, end_s - start_s, end_s)
        else:
            self._scheduler.note_reported_step(end_s - start_s, now_s=end_s)
        return len(self._scheduler) > 0

    def _apply(self, chunk: Chunk, outcome: StepOutcome) -> ComputedChunk:
        sequence = self._sequences[chunk.key]
        outcome = with_whole_prompt(sequence, chunk.start, outcome)
        assert sequence.num_computed_tokens == chunk.start, "the schedule and the sequence agree"
        end = sequence.num_computed_tokens = chunk.start + chunk.num_tokens
        if isinstance(outcome, NonFiniteLogits):
            self._pages.unname(sequence)
        else:
            self._pages.name(sequence, chunk.start)
        page_size = self._pages.page_size
        first_page = chunk.start // page_size
        end_page = self._pages.num_pages_for(end) if chunk.is_last else end // page_size
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

    def check_books(self) -> None:
        """Implements Engine."""
        self._pages.check_books()

    def _report(self, start_unix_ns: int, chunks: tuple[ComputedChunk, ...]) -> None:
        pages, changes = self._pages.take_report()
        self._on_report(PrefillReport(start_unix_ns, self._clock.unix_ns(), pages, changes, chunks))


def prefill_loop(
    parts: EngineParts, on_report: Callable[[PrefillReport], None], *, chunk_tokens: int, clock: Clock
) -> PrefillLoop:
    """The loop of a loaded model, which knows the speed of the steps that were rehearsed."""
    pages = EnginePages(parts.allocator, page_size=parts.pool.layout.page_size, clock=clock, tier=parts.tier)
    pages.speedometer.observe_steps(parts.first_steps, clock.monotonic())
    return PrefillLoop(runner=parts.runner, pages=pages, chunk_tokens=chunk_tokens, clock=clock, on_report=on_report)
