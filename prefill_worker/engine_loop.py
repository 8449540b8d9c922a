"""The engine thread of a prefill worker: computes the next chunks and reports complete pages.

The thread that calls `step` owns all objects here. Messages, tasks, transfers, and the admission order of prompts
belong to the event loop. This module does not depend on them.
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
"""Longer than a decode worker's target: only prompts wait for a step here, and their number is known."""
UNMEASURED_TOKENS = 128
"""Maximum tokens of a step before its speed is known. A whole prompt takes minutes on a slow machine."""


class PrefillLoop(PrefillEngine):
    """The prompts that are being computed, and the retained pages of computed prompts until they are evicted.

    A prompt starts after its cached prefix. At least one token is always computed, because it yields the first token of
    the response.
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
        """Implements PrefillEngine. Named pages remain in the prefix cache."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._pages.drop(kept)

    def step(self) -> bool:
        """Schedules, computes, applies, and reports a step. Returns whether work remains."""
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
        # The time of a step includes all its work on this thread. Steps that report prompts are slower and excluded.
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
    """Returns the loop of a loaded model. Its step-time estimator starts with the measurements of the warm-up."""
    pages = EnginePages(parts.allocator, page_size=parts.pool.layout.page_size, clock=clock, tier=parts.tier)
    pages.speedometer.observe_steps(parts.first_steps, clock.monotonic())
    return PrefillLoop(runner=parts.runner, pages=pages, chunk_tokens=chunk_tokens, clock=clock, on_report=on_report)
