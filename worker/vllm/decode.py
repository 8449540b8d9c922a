"""vLLM as the engine of a decode worker. Prompts arrive in reserved blocks or are computed here."""

from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass

from services.engine.cache.pages import PageChanges, PageCounts
from services.engine.cache.pool import num_pages_for
from services.engine.steps.sequence import Sequence
from services.engine.steps.step import NonFiniteLogits, SampledToken
from services.runtime.clock import Clock
from services.runtime.errors import RequestCancelled
from services.scheduling.chunks import DEFAULT_CLASS
from services.scheduling.speedometer import Speedometer
from worker.engine import Advance, DecodeEngine, DecodeReport, Preemption, ReservedPages
from worker.vllm.core import Computed, Core, request_ids


@dataclass(slots=True)
class _Answer:
    """A sequence in vLLM's queue or batch."""

    key: Hashable
    sequence: Sequence
    is_running: bool = False


class VllmDecode(DecodeEngine):
    """Reservations and sequences by their keys and vLLM's IDs.

    vLLM cannot pause a single sequence. `pause` has no effect, so sequences cannot migrate.
    """

    def __init__(self, core: Core, *, clock: Clock, on_report: Callable[[DecodeReport], None]) -> None:
        self._core = core
        self._clock = clock
        self._on_report = on_report
        self.speedometer = Speedometer()
        self._ids = request_ids("d")
        self._id_of: dict[Hashable, str] = {}
        self._asked: dict[Hashable, Future[ReservedPages]] = {}
        """Reservations that wait for their blocks."""
        self._answers: dict[str, _Answer] = {}
        self._reported: PageCounts | None = None

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
        given: Future[ReservedPages] = Future()
        self._asked[key] = given
        num_pages = num_pages_for(len(token_ids), self._core.block_size)

        def on_blocks(block_ids: tuple[int, ...], num_cached_tokens: int) -> None:
            del self._asked[key]
            given.set_result(ReservedPages(block_ids[:num_pages], num_cached_tokens))

        request_id = self._id_of[key] = next(self._ids)
        self._core.add_awaited(
            request_id, token_ids, on_blocks, salt=salt, service_class=service_class, adapter=adapter
        )
        return given

    def withdraw(self, key: Hashable) -> None:
        """Implements DecodeEngine."""
        if key in self._asked:
            self.free(key)

    def start(
        self, sequence: Sequence, *, salt: bytes, is_paused: bool = False, service_class: int = DEFAULT_CLASS
    ) -> None:
        """Implements DecodeEngine."""
        key = sequence.sequence_id
        request_id = self._id_of.get(key)
        if request_id is not None:
            self._core.arrived(request_id, sequence)
        else:
            request_id = self._id_of[key] = next(self._ids)
            self._core.add(request_id, sequence, salt=salt, service_class=service_class)
        self._answers[request_id] = _Answer(key, sequence)

    def pause(self, key: Hashable) -> None:
        """Implements DecodeEngine. Has no effect: the sequence continues."""

    def unpause(self, key: Hashable) -> None:
        """Implements DecodeEngine."""

    def free(self, key: Hashable) -> None:
        """Implements DecodeEngine."""
        asked = self._asked.pop(key, None)
        if asked is not None:
            asked.set_exception(RequestCancelled("the pages are no longer needed"))
        request_id = self._id_of.pop(key, None)
        if request_id is not None:
            self._answers.pop(request_id, None)
            self._core.abort(request_id)

    def step(self) -> bool:
        """Implements Engine."""
        start_unix_ns, start_s = self._clock.unix_ns(), self._clock.monotonic()
        done = self._core.step()
        preempted = tuple(self._preempt(self._answers[one]) for one in done.preempted if one in self._answers)
        work = self._work(done.computed)
        advances = tuple(self._advance(one) for one in done.computed if one.request_id in self._answers)
        counts = self._core.counts()
        if advances or preempted or any(done.changes) or counts != self._reported:
            self._reported = counts
            self._on_report(self._report(start_unix_ns, done.changes, advances, preempted))
        if work:
            end_s = self._clock.monotonic()
            self.speedometer.observe_step(work, end_s - start_s, end_s)
        return done.has_more

    def check_books(self) -> None:
        """Implements Engine."""
        if not self._id_of:
            self._core.check_books()

    def _work(self, computed: tuple[Computed, ...]) -> list[tuple[int, int, bool]]:
        """Returns a step's work for the step-time estimator."""
        return [
            (one.start, one.num_tokens, one.num_tokens > 1 or one.start < answer.sequence.num_prompt_tokens)
            for one in computed
            if (answer := self._answers.get(one.request_id)) is not None
        ]

    def _preempt(self, answer: _Answer) -> Preemption:
        answer.is_running = False
        answer.sequence.num_computed_tokens = 0
        return Preemption(answer.key, "recomputed")

    def _advance(self, computed: Computed) -> Advance:
        answer = self._answers[computed.request_id]
        sequence = answer.sequence
        answer.is_running = True
        sequence.num_computed_tokens = computed.start + computed.num_tokens
        token_index = sequence.num_generated_tokens
        finish_reason = None
        if isinstance(computed.outcome, SampledToken):
            sequence.append_token(computed.outcome.token_id)
            finish_reason = sequence.finish_reason()
        if isinstance(computed.outcome, NonFiniteLogits) or finish_reason is not None:
            del self._answers[computed.request_id], self._id_of[answer.key]
            if not computed.has_ended:
                self._core.abort(computed.request_id)
        return Advance(answer.key, computed.start, computed.num_tokens, token_index, computed.outcome, finish_reason)

    def _report(
        self,
        start_unix_ns: int,
        changes: PageChanges,
        advances: tuple[Advance, ...],
        preempted: tuple[Preemption, ...],
    ) -> DecodeReport:
        running = [answer for answer in self._answers.values() if answer.is_running]
        waiting_tokens = sum(
            max(0, answer.sequence.num_prompt_tokens - answer.sequence.num_computed_tokens)
            for answer in self._answers.values()
        )
        assert self._reported is not None, "counted in the step that is reported"
        return DecodeReport(
            start_unix_ns,
            self._clock.unix_ns(),
            self._reported,
            changes,
            advances,
            (),
            len(running),
            len(self._answers) - len(running),
            waiting_tokens,
            preempted,
        )
