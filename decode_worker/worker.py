"""The event loop's side of a decode worker: a request's life from admission to its last token.

Lifetimes are scopes, and there is no task per request (but one while it is handed over to another decode worker): what
happens to a request comes in as calls, and every call that ends it goes through `_end`. It holds two things, with two
ends:

    the attempt   entry in the table, deadline     from `_on_admit` until `_end`: finished, failed, cancelled,
                                                   superseded, deadline passed, session ended, engine broken
    its pages     the promise, pages of the pool   from `_on_admit` until `_free`: at once with the attempt's end,
                                                   unless a transfer is writing into them; then when the transfer says
                                                   that nothing does any more (`release`), which its abort brings about;
                                                   or a transfer is reading them: when its task and its abort have ended

Whoever cancels (a command, a newer attempt, a session that ended) owes the answer; nothing is emitted for it. A
transfer that the prefill side cancelled is not answered here either: the prefill worker has. The fence is the table: a
transfer, a commit or a report of the engine about an attempt that is not in it is refused or dropped.

Nothing here touches a tensor; the engine thread is given commands and sends reports.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any, TypeVar

from decode_worker.engine_loop import Advance, DecodeLoop, PausedSequence, ReservedPages, StepReport
from decode_worker.scheduler import AdmissionBook, BatchScheduler, Preemption
from decode_worker.speculation import Speculator
from kv_transfer.protocol.messages import TransferId
from kv_transfer.receiving import LinkReceiver, Reserved
from kv_transfer.sending import HandoffStats, SendLinks, SendTransfer
from protos import worker_pb2, worker_pb2_grpc
from services.engine.cache.swap import SwapSpace
from services.engine.engine import EngineParts, check_token_ids
from services.engine.steps.sequence import Grammar, Sampling, Sequence
from services.engine.steps.step import PROMPT_ROWS, NonFiniteLogits, SampledToken
from services.runtime import telemetry
from services.runtime.clock import SYSTEM_CLOCK, Clock
from services.runtime.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    RequestCancelled,
    TandemError,
    TransferFailed,
    WorkerUnavailable,
)
from services.runtime.logs import request_fields
from services.runtime.page_keys import cache_salt
from services.runtime.telemetry import Event, TraceContext, Value
from services.scheduling.speedometer import numbers
from services.structured.form import AnswerForm
from services.structured.grammar import Grammars, GrammarState
from worker.attempts import (
    AttemptKey,
    AttemptSpec,
    finished_message,
    handed_off_message,
    is_bare,
    read_key,
    read_spec,
    tokens_message,
)
from worker.engine_worker import EngineWorker, PagesChanged
from worker.host import infallible, on_this_loop, record_chunk, record_sending
from worker.metrics import Load, Speeds, WorkerMetrics
from worker.sessions import CommandHandler, Payload, Session, SessionServer, StepTokens, failed

MAX_SPAN_EVENTS = 64

R = TypeVar("R")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a decode worker takes on."""

    max_batch: int
    max_admitted: int
    chunk_tokens: int
    swap_bytes: int = 0
    """Of host memory, for pages of sequences that gave way. 0: these are always computed again."""
    is_optimistic: bool = True
    """Whether requests are let in by what they are expected to need, not by their worst case."""


class Phase(Enum):
    """Where an attempt stands."""

    ADMITTED = auto()
    """Its pages are promised; a transfer may reserve them."""
    RECEIVING = auto()
    """A transfer holds its pages."""
    COMPUTING = auto()
    """The engine has it."""
    PAUSED = auto()
    """The engine has it outside the batch, and the gateway knows."""
    HANDING_OVER = auto()
    """As PAUSED, and its pages are on their way to another decode worker."""
    ENDED = auto()
    """It was answered, or nobody waits for it."""


@dataclass(eq=False, slots=True)
class _Attempt:
    spec: AttemptSpec[Sampling]
    session: Session
    admitted_s: float
    from_decode: bool
    is_local: bool
    handle: int = 0
    """Under which its tokens may be told together with others'; 0: they may not."""
    phase: Phase = Phase.ADMITTED
    wants_pause: bool = False
    paused: PausedSequence | None = None
    """Where it stands, in PAUSED and HANDING_OVER."""
    hand_over: "asyncio.Task[HandoffStats] | None" = None
    transfer: SendTransfer | None = None
    """What reads its pages while it is handed over."""
    sending_since_s: float = 0.0
    grammar: "asyncio.Task[GrammarState] | None" = None
    """Makes what its tokens must keep to; None: they may be any."""
    deadline: asyncio.TimerHandle | None = None
    trace: TraceContext | None = None
    """Under which its spans are recorded; None: it has none."""
    has_begun: bool = False
    """Of a prompt that is computed here: the first tokens were."""
    decoding_since_unix_ns: int = 0
    """0: it was in no step yet."""
    sending_since_unix_ns: int = 0
    num_steps: int = 0
    """The next three are counted where there is a trace."""
    num_neighbours: int = 0
    """Sequences of all these steps together, itself included."""
    max_batch: int = 0
    span_events: list[Event] = field(default_factory=list)
    num_tokens: int = 0
    """Tokens that were emitted here."""
    num_preempted: int = 0
    """How often it gave way to others."""
    num_proposed: int = 0
    """Tokens that were proposed for it, and those of them that were right."""
    num_accepted: int = 0

    @property
    def num_tokens_to_come(self) -> int:
        """Leading tokens whose pages a transfer brings: the prompt's, or all but the last where decode goes on."""
        spec = self.spec
        return len(spec.prompt_token_ids) + (len(spec.emitted_token_ids) - 1 if self.from_decode else 0)

    def note_step(self, report: StepReport) -> None:
        """It was in a step of the batch, after its prompt."""
        self.decoding_since_unix_ns = self.decoding_since_unix_ns or report.start_unix_ns
        if self.trace is not None:
            num_sequences = len(report.advances)
            self.num_steps += 1
            self.num_neighbours += num_sequences
            self.max_batch = max(self.max_batch, num_sequences)

    def record_steps(self, end_unix_ns: int, error: TandemError | None) -> None:
        """Its steps as a span, if it had any."""
        if self.trace is None or not self.num_steps:
            return
        telemetry.record(
            "decode.steps",
            telemetry.sibling(self.trace, telemetry.DECODE_SPAN),
            self.decoding_since_unix_ns,
            end_unix_ns,
            attributes={
                "tandem.tokens": self.num_tokens,
                "tandem.steps": self.num_steps,
                "tandem.batch_mean": self.num_neighbours / self.num_steps,
                "tandem.batch_max": self.max_batch,
                "tandem.preemptions": self.num_preempted,
                "tandem.proposed": self.num_proposed,
                "tandem.accepted": self.num_accepted,
            },
            events=self.span_events,
            error=error,
        )


class DecodeWorker(EngineWorker[_Attempt]):
    """Takes pages in, generates tokens, and hands sequences over to other decode workers. Made on the event loop.

    It is the ReceiveTarget of the LinkReceiver that `attach` gives it. `grammars` are for answers that must have a
    form, which are refused without.
    """

    name = "decode worker"

    def __init__(
        self,
        *,
        parts: EngineParts,
        links: SendLinks,
        incarnation: str,
        limits: Limits,
        metrics: WorkerMetrics,
        step_timeout_s: float = 0.0,
        gpu: Callable[[], worker_pb2.GpuFacts | None] | None = None,
        grammars: Grammars | None = None,
        on_pages_changed: PagesChanged | None = None,
        speculator: Speculator | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(
            parts=parts,
            links=links,
            metrics=metrics,
            grammars=grammars,
            on_pages_changed=on_pages_changed,
            clock=clock,
        )
        self._book = AdmissionBook(
            num_pages=parts.pool.num_pages,
            page_size=self._page_size,
            max_admitted=limits.max_admitted,
            is_optimistic=limits.is_optimistic,
        )
        self._num_running = 0
        self._num_preempted = 0
        self._waiting_tokens = 0
        self._context_tokens = 0
        self._receiving: dict[AttemptKey, _Attempt] = {}
        """Those whose pages a transfer holds or waits for, ended or not."""
        self._reserving: set[Future[ReservedPages]] = set()
        """Of those that wait for pages."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._receiver: LinkReceiver
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        handlers: dict[str, CommandHandler] = {
            "admit": self._on_admit,
            "cancel": self._on_cancel,
            "pause": self._on_pause,
            "unpause": self._on_unpause,
            "hand_over": self._on_hand_over,
        }
        self._open_sessions(incarnation, handlers, gpu=gpu)
        self._loop = DecodeLoop(
            runner=parts.runner,
            allocator=parts.allocator,
            page_size=self._page_size,
            scheduler=BatchScheduler(
                max_batch=limits.max_batch,
                step_tokens=limits.chunk_tokens,
                num_pages=parts.pool.num_pages,
                page_size=self._page_size,
                is_exact=parts.model.exact,
                reported_tokens=PROMPT_ROWS,
            ),
            is_exact=parts.model.exact,
            clock=clock,
            on_report=on_this_loop(self._on_report),
            swap=SwapSpace(parts.pool, limits.swap_bytes) if limits.swap_bytes else None,
            tier=parts.tier,
            speculator=speculator,
        )
        self._speedometer = self._loop.speedometer
        self._speedometer.observe_steps(parts.first_steps, clock.unix_ns() / 1e9)
        self._start_engine(self._loop, step_timeout_s=step_timeout_s)

    def attach(self, receiver: LinkReceiver) -> None:
        """Names the receiver whose target this worker is; before the first session."""
        self._receiver = receiver

    def load(self) -> Load:
        """How busy the worker is now."""
        return Load(
            *self._pages,
            promised_pages=max(0, self._book.promised_pages - self._pages.reserved - self._pages.used),
            running=self._num_running,
            waiting=max(0, len(self._book) - self._num_running),
            speeds=Speeds(
                prefill=numbers(self._speedometer.prefill_now),
                decode=numbers(self._speedometer.decode_now),
                link=numbers(self._speedometer.link),
            ),
            waiting_tokens=self._waiting_tokens,
            context_tokens=self._context_tokens if self._num_running else 0,
            promised_pages_by_class=self._book.pages_by_class,
            running_by_class=self._book.num_by_class,
            num_preempted=self._num_preempted,
        )

    async def wait_idle(self) -> None:
        """Returns when every attempt has ended and its pages are free; each has a deadline."""
        await self._is_idle.wait()

    async def close(self) -> None:
        """Fails what is left, waits until nothing is held, and stops the engine."""
        self._is_draining = True
        leaving = WorkerUnavailable("the decode worker is leaving")
        for attempt in self._attempts:
            self._end(attempt, "failed", leaving, answer=failed(leaving))
        await self._receiver.close()
        await self.wait_idle()
        await self._stop()

    # --- commands, on the event loop ---

    async def _on_admit(self, session: Session, message: worker_pb2.Admit) -> None:
        if self._is_draining:
            raise WorkerUnavailable("the decode worker is leaving")
        spec = read_spec(message.sequence, Sampling, clock=self._clock)
        self._check(spec, num_new_tokens=spec.sampling.max_tokens)
        if len(spec.emitted_token_ids) >= spec.sampling.max_tokens:
            raise InvalidRequest("the emitted tokens leave nothing to generate", field="emitted_token_ids")
        if message.from_decode and (message.local_prefill or not spec.emitted_token_ids):
            raise InvalidRequest("a decode worker hands over a sequence that has emitted tokens", field="from_decode")
        attempt = _Attempt(
            spec, session, self._clock.monotonic(), message.from_decode, message.local_prefill, message.handle
        )
        attempt.trace = telemetry.sampled(spec.traceparent, spec.tracestate)
        superseded = self._attempts.begin(spec.key, attempt)
        if superseded is not None:
            self._end(superseded, "superseded", RequestCancelled("a newer attempt was admitted"))
        try:
            self._book.promise(
                spec.key,
                num_prompt_tokens=len(spec.prompt_token_ids),
                max_tokens=spec.sampling.max_tokens,
                num_emitted_tokens=len(spec.emitted_token_ids),
                service_class=spec.service_class,
            )
        except TandemError:
            self._attempts.end(spec.key)
            self._metrics.count_attempt("refused")
            raise
        self._is_idle.clear()
        attempt.deadline = self._event_loop.call_later(spec.deadline.remaining_s(), self._expire, attempt)
        if spec.form is not None:
            attempt.grammar = self._begin_task(self._begin_grammar(spec, spec.form))
            attempt.grammar.add_done_callback(lambda task: self._on_grammar_made(attempt, task))
        self._emit(attempt, worker_pb2.Admitted())
        if message.local_prefill:
            attempt.phase = Phase.COMPUTING
            self._start(attempt, num_computed_tokens=0, emitted_token_ids=spec.emitted_token_ids)

    def _find(self, session: Session, attempt_id: worker_pb2.AttemptId) -> _Attempt | None:
        attempt = self._attempts.find(read_key(attempt_id))
        return attempt if attempt is not None and attempt.session is session else None

    async def _on_cancel(self, session: Session, message: worker_pb2.Cancel) -> None:
        attempt = self._find(session, message.id)
        has_begun = attempt is not None and attempt.phase is not Phase.ADMITTED
        if attempt is not None:
            self._end(attempt, "cancelled", RequestCancelled("the attempt was cancelled"))
        if message.wants_word:
            self.sessions.emit(session, *read_key(message.id), worker_pb2.Cancelled(has_begun=has_begun))

    async def _on_pause(self, session: Session, message: worker_pb2.Pause) -> None:
        attempt = self._find(session, message.id)
        if attempt is None:
            return
        attempt.wants_pause = True
        if attempt.phase is Phase.COMPUTING:
            self._engine.submit(infallible(lambda: self._loop.pause(attempt.spec.key)))

    async def _on_unpause(self, session: Session, message: worker_pb2.Unpause) -> None:
        attempt = self._find(session, message.id)
        if attempt is None or attempt.phase is Phase.HANDING_OVER:
            return
        attempt.wants_pause = False
        # One that is not paused yet goes on as soon as the engine says that it is.
        if attempt.phase is Phase.PAUSED:
            self._go_on(attempt)

    async def _on_hand_over(self, session: Session, message: worker_pb2.HandOver) -> None:
        attempt = self._find(session, message.id)
        if attempt is None or attempt.phase is Phase.HANDING_OVER:
            return
        if attempt.phase is not Phase.PAUSED or message.next_attempt <= attempt.spec.key.attempt:
            error = InvalidRequest("only a paused attempt is handed over, and to a later one", field="next_attempt")
            self._end(attempt, "failed", error, answer=failed(error))
            return
        attempt.phase = Phase.HANDING_OVER
        attempt.hand_over = self._begin_task(self._hand_over(attempt, message))
        attempt.hand_over.add_done_callback(lambda task: self._on_hand_over_ended(attempt, task))

    def _lose(self, attempt: _Attempt) -> None:
        self._end(attempt, "cancelled", RequestCancelled("the gateway's session ended"))

    # --- the receiving side of a handoff, on the event loop ---

    async def reserve(self, transfer_id: TransferId, num_tokens: int) -> Reserved:
        """Sets the prompt's pages aside. Raises TransferFailed for an attempt that does not wait for pages here."""
        key = AttemptKey(transfer_id.request_id, transfer_id.attempt)
        attempt = self._attempts.find(key)
        if attempt is None or attempt.phase is not Phase.ADMITTED:
            raise TransferFailed("the attempt does not wait for pages here")
        if num_tokens != attempt.num_tokens_to_come:
            raise TransferFailed(f"the attempt waits for {attempt.num_tokens_to_come} tokens, not {num_tokens}")
        attempt.phase = Phase.RECEIVING
        self._receiving[key] = attempt
        spec = attempt.spec
        token_ids = [*spec.prompt_token_ids, *spec.emitted_token_ids][:num_tokens]
        num_prompt_tokens, salt = len(spec.prompt_token_ids), self._salt(spec)
        asking = self._engine.submit(
            infallible(
                lambda: self._loop.reserve(
                    key, token_ids, num_prompt_tokens=num_prompt_tokens, salt=salt, service_class=spec.service_class
                )
            )
        )
        try:
            # Should the attempt end meanwhile, the transfer is told so and gives the pages back through `release`.
            reserved = await self._reserved(await asyncio.shield(asyncio.wrap_future(asking)))
        except RequestCancelled:  # it has ended while it waited for pages
            await self.release(transfer_id, TransferFailed("the attempt has ended"))
            raise
        except Exception as error:
            await self.release(transfer_id, TransferFailed("the pages could not be reserved"))
            raise WorkerUnavailable("the decode worker failed") from error
        return Reserved(page_ids=reserved.page_ids, num_cached_tokens=reserved.num_cached_tokens)

    async def _reserved(self, given: "Future[ReservedPages]") -> ReservedPages:
        self._reserving.add(given)
        try:
            return await asyncio.shield(asyncio.wrap_future(given))
        finally:
            self._reserving.discard(given)

    async def commit(self, transfer_id: TransferId, *, first_token_id: int, sampling_position: int) -> None:
        """Puts the sequence in line for the batch. Raises where the attempt has ended or the seal contradicts it."""
        key = AttemptKey(transfer_id.request_id, transfer_id.attempt)
        attempt = self._attempts.find(key)
        if attempt is None or key not in self._receiving:
            raise RequestCancelled("the attempt has ended here")
        emitted = attempt.spec.emitted_token_ids or [first_token_id]
        num_tokens = attempt.num_tokens_to_come
        is_next = first_token_id == (emitted[-1] if attempt.from_decode else emitted[0])
        if sampling_position != num_tokens + 1 or not is_next:
            raise TransferFailed("the seal does not continue this attempt")
        check_token_ids(self._parts.model_config, [first_token_id])
        del self._receiving[key]
        attempt.phase = Phase.COMPUTING
        self._start(attempt, num_computed_tokens=num_tokens, emitted_token_ids=emitted)

    async def release(self, transfer_id: TransferId, error: TandemError) -> None:
        """The transfer ended without a commit and nothing writes to its pages any more."""
        key = AttemptKey(transfer_id.request_id, transfer_id.attempt)
        attempt = self._receiving.pop(key, None)
        if attempt is None:
            return
        if attempt.phase is Phase.ENDED:
            self._free(key)
        else:
            self._end(attempt, "failed", error, answer=_answer(error))

    async def abandon(self, transfer_id: TransferId, error: TandemError) -> None:
        """The sender had given the transfer up before it heard of the commit: nobody waits for this answer."""
        attempt = self._attempts.find(AttemptKey(transfer_id.request_id, transfer_id.attempt))
        if attempt is not None:
            self._end(attempt, "failed", error, answer=_answer(error))

    # --- the sending side of a handoff: a paused sequence moves to another decode worker ---

    async def _hand_over(self, attempt: _Attempt, message: worker_pb2.HandOver) -> HandoffStats:
        paused = attempt.paused
        assert paused is not None, "only a paused attempt is handed over"
        attempt.transfer = await self._links.reserve(
            message.decode_address,
            message.decode_incarnation,
            TransferId(attempt.spec.key.request_id, message.next_attempt),
            num_tokens=paused.num_computed_tokens,
            deadline=attempt.spec.deadline,
        )
        attempt.sending_since_s, attempt.sending_since_unix_ns = self._clock.monotonic(), self._clock.unix_ns()
        attempt.transfer.send(0, paused.page_ids)
        return await attempt.transfer.seal(
            num_tokens=paused.num_computed_tokens,
            first_token_id=paused.next_token_id,
            sampling_position=paused.num_computed_tokens + 1,
        )

    def _on_hand_over_ended(self, attempt: _Attempt, task: "asyncio.Task[HandoffStats]") -> None:
        key = attempt.spec.key
        error = RequestCancelled("the attempt was cancelled") if task.cancelled() else task.exception()
        if error is None:
            stats = task.result()
            self._record_sending(attempt, sent=stats)
            self._metrics.note_transfer(
                num_bytes=stats.num_bytes,
                seconds=self._clock.monotonic() - attempt.sending_since_s,
                exposed_s=stats.exposed_s,
            )
            self._speedometer.observe_transfer(stats.num_bytes, stats.exposed_s, self._clock.monotonic())
            self._end(attempt, "handed_off", RequestCancelled("it moved"), answer=handed_off_message(stats))
            self._free(key)
            return
        if not isinstance(error, TandemError):
            logger.error("a handover failed", exc_info=error, extra=request_fields(*key, attempt.spec.traceparent))
            error = TransferFailed("the handover failed")
        self._record_sending(attempt, error=error)
        self._end(attempt, "failed", error, answer=failed(error))
        if attempt.transfer is None:
            self._free(key)
            return
        abort = self._begin_task(attempt.transfer.abort(error))
        abort.add_done_callback(lambda abort: self._on_aborted(attempt, abort))

    def _record_sending(
        self, attempt: _Attempt, *, sent: HandoffStats | None = None, error: BaseException | None = None
    ) -> None:
        if attempt.trace is not None and attempt.sending_since_unix_ns:
            trace = telemetry.sibling(attempt.trace, telemetry.DECODE_SPAN)
            record_sending(trace, attempt.sending_since_unix_ns, self._clock.unix_ns(), sent=sent, error=error)

    def _on_aborted(self, attempt: _Attempt, abort: "asyncio.Task[None]") -> None:
        error = abort.exception()
        if error is not None:  # its pages may still be read, and by whom is not known
            self._on_engine_failed(error)
        self._free(attempt.spec.key)

    def _begin_task(self, run: Coroutine[Any, Any, R]) -> "asyncio.Task[R]":
        task = asyncio.create_task(run)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- the life of an attempt ---

    async def _begin_grammar(self, spec: AttemptSpec[Sampling], form: AnswerForm) -> GrammarState:
        """Replays the emitted tokens too: with the same ones, the answer goes on as it would have."""
        assert self._grammars is not None, "such a request was refused"
        return await self._grammars.begin(form, eos_token_ids=spec.eos_token_ids, token_ids=spec.emitted_token_ids)

    def _start(self, attempt: _Attempt, *, num_computed_tokens: int, emitted_token_ids: list[int]) -> None:
        """Has the attempt computed; as soon as it has its grammar, which is usually long before its pages are here."""
        begin = partial(
            self._compute, attempt, num_computed_tokens=num_computed_tokens, emitted_token_ids=emitted_token_ids
        )
        if attempt.grammar is None:
            begin()
        else:
            attempt.grammar.add_done_callback(lambda task: self._on_grammar_there(attempt, task, begin))

    def _on_grammar_made(self, attempt: _Attempt, task: "asyncio.Task[GrammarState]") -> None:
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if not isinstance(error, TandemError):
            fields = request_fields(*attempt.spec.key, attempt.spec.traceparent)
            logger.error("a grammar failed", exc_info=error, extra=fields)
            error = InternalError("the grammar could not be made")
        self._end(attempt, "failed", error, answer=failed(error))

    def _on_grammar_there(
        self, attempt: _Attempt, task: "asyncio.Task[GrammarState]", begin: Callable[[Grammar], None]
    ) -> None:
        if attempt.phase is not Phase.ENDED:  # as it is where the grammar could not be made
            begin(task.result())

    def _compute(
        self,
        attempt: _Attempt,
        grammar: Grammar | None = None,
        *,
        num_computed_tokens: int,
        emitted_token_ids: list[int],
    ) -> None:
        spec = attempt.spec
        sequence = Sequence(
            spec.key,
            spec.prompt_token_ids,
            sampling=spec.sampling,
            emitted_token_ids=emitted_token_ids,
            grammar=grammar,
        )
        sequence.num_computed_tokens = num_computed_tokens
        is_paused, salt = attempt.wants_pause, self._salt(spec)
        self._engine.submit(
            infallible(
                lambda: self._loop.start(sequence, salt=salt, is_paused=is_paused, service_class=spec.service_class)
            )
        )

    def _go_on(self, attempt: _Attempt) -> None:
        attempt.phase = Phase.COMPUTING
        attempt.paused = None
        self._engine.submit(infallible(lambda: self._loop.unpause(attempt.spec.key)))

    def _expire(self, attempt: _Attempt) -> None:
        error = DeadlineExceeded("the request's deadline passed")
        self._end(attempt, "failed", error, answer=failed(error))

    def _end(self, attempt: _Attempt, outcome: str, reason: TandemError, *, answer: Payload | None = None) -> None:
        """Ends an attempt, once: whatever comes first. Its pages are freed now, or when a transfer lets them go."""
        if attempt.phase is Phase.ENDED:
            return
        attempt.phase = Phase.ENDED
        key = attempt.spec.key
        self._attempts.end(key)
        if attempt.deadline is not None:
            attempt.deadline.cancel()
        if attempt.grammar is not None:
            attempt.grammar.cancel()
        if answer is not None:
            self._emit(attempt, answer)
        self._metrics.count_attempt(outcome)
        attempt.record_steps(self._clock.unix_ns(), reason if outcome == "failed" else None)
        if key in self._receiving:
            self._engine.submit(infallible(lambda: self._loop.withdraw(key)))
            self._receiver.abort(TransferId(*key), reason)
        elif attempt.hand_over is not None:
            attempt.hand_over.cancel()
        else:
            self._free(key)

    def _free(self, key: AttemptKey) -> None:
        self._engine.submit(infallible(lambda: self._loop.free(key)))
        self._book.withdraw(key)
        self.sessions.load_changed()
        if not len(self._book):
            self._is_idle.set()

    def _salt(self, spec: AttemptSpec[Sampling]) -> bytes:
        return cache_salt(model=self._parts.fingerprint, tenant=spec.cache_salt)

    # --- what the engine thread says ---

    def _on_report(self, report: StepReport) -> None:
        self._note_pages(report.pages, report.changes)
        self._num_running = report.num_running
        self._waiting_tokens = report.waiting_tokens
        for preemption in report.preempted:
            self._on_preempted(preemption, report)
        self._on_advances(report)
        for paused in report.paused:
            assert isinstance(paused.key, AttemptKey), "only attempts are computed"
            attempt = self._attempts.find(paused.key)
            if attempt is not None:
                self._on_paused(attempt, paused)
        if report.advances:
            self._metrics.note_step(
                seconds=(report.end_unix_ns - report.start_unix_ns) / 1e9,
                num_sequences=len(report.advances),
                num_tokens=sum(advance.num_rows for advance in report.advances),
            )
            self._context_tokens = sum(a.start + a.num_tokens for a in report.advances)
        if not report.num_running:
            self.sessions.load_changed()  # an idle worker is seen as idle at once, even if its last step has no event

    def _on_advances(self, report: StepReport) -> None:
        """Tells each gateway the tokens of the step, together as far as nothing else is to be said about them."""
        steps: dict[Session, StepTokens] = {}
        for advance in report.advances:
            assert isinstance(advance.key, AttemptKey), "only attempts are computed"
            attempt = self._attempts.find(advance.key)
            if attempt is None:
                continue
            token = self._on_advance(attempt, advance, report)
            if token is not None:
                handles, indexes, token_ids = steps.setdefault(attempt.session, StepTokens([], [], []))
                handles.append(attempt.handle)
                indexes.append(advance.token_index)
                token_ids.append(token.token_id)
        for session, tokens in steps.items():
            self.sessions.emit_step(session, tokens)

    def _on_advance(self, attempt: _Attempt, advance: Advance, report: StepReport) -> SampledToken | None:
        """Says what happened to a sequence, but for a token about which there is nothing else to say: that is given."""
        if attempt.is_local and not attempt.has_begun:
            attempt.has_begun = True
            self._on_prefill_begun(attempt, advance, report)
        if advance.start >= len(attempt.spec.prompt_token_ids):
            if not attempt.decoding_since_unix_ns:
                self._emit(attempt, worker_pb2.DecodeStarted())
            attempt.note_step(report)
        elif attempt.is_local and not attempt.decoding_since_unix_ns:  # later: pages that were lost to others
            record_chunk(
                attempt.trace,
                report.start_unix_ns,
                report.end_unix_ns,
                start=advance.start,
                num_tokens=advance.num_tokens,
            )
        if isinstance(advance.outcome, NonFiniteLogits):
            self._end(attempt, "failed", advance.outcome, answer=failed(advance.outcome))
            return None
        if advance.proposal is not None:
            num_proposed, num_accepted = len(advance.proposal.token_ids), advance.num_accepted
            attempt.num_proposed += num_proposed
            attempt.num_accepted += num_accepted
            self._metrics.note_speculation(advance.proposal.source, proposed=num_proposed, accepted=num_accepted)
        tokens = advance.tokens
        num_answer_tokens = advance.token_index + len(tokens)
        if tokens:
            attempt.num_tokens += len(tokens)
            self._book.note_tokens(attempt.spec.key, num_answer_tokens)
            if attempt.handle and len(tokens) == 1 and advance.finish_reason is None and is_bare(tokens[0]):
                return tokens[0]
            self._emit(attempt, tokens_message(advance.token_index, *tokens))
        if advance.finish_reason is not None:
            self._book.note_end(num_answer_tokens)
            answer = finished_message(advance.finish_reason)
            self._end(attempt, "finished", RequestCancelled("the answer is complete"), answer=answer)
        return None

    def _on_paused(self, attempt: _Attempt, paused: PausedSequence) -> None:
        if not attempt.wants_pause:
            self._go_on(attempt)
            return
        attempt.phase = Phase.PAUSED
        attempt.paused = paused
        self._emit(attempt, worker_pb2.Paused(num_tokens=paused.num_generated_tokens))

    def _on_prefill_begun(self, attempt: _Attempt, advance: Advance, report: StepReport) -> None:
        """Of a prompt that is computed here, the first tokens were computed, or all were here already."""
        num_cached_tokens = min(advance.start, len(attempt.spec.prompt_token_ids))
        step_s = (report.end_unix_ns - report.start_unix_ns) / 1e9
        queue_s = max(0.0, self._clock.monotonic() - attempt.admitted_s - step_s)
        self._emit(attempt, worker_pb2.PrefillStarted(queue_s=queue_s, num_cached_tokens=num_cached_tokens))
        num_prompt_tokens = len(attempt.spec.prompt_token_ids)
        self._metrics.note_prompt(num_tokens=num_prompt_tokens, num_cached_tokens=num_cached_tokens)

    def _on_preempted(self, preemption: Preemption, report: StepReport) -> None:
        self._num_preempted += 1
        self._metrics.count_preemption(preemption.reason)
        assert isinstance(preemption.key, AttemptKey), "only attempts are computed"
        attempt = self._attempts.find(preemption.key)
        if attempt is not None:
            attempt.num_preempted += 1
            if attempt.trace is not None and len(attempt.span_events) < MAX_SPAN_EVENTS:
                said: dict[str, Value] = {"tandem.reason": preemption.reason, "tandem.tokens": attempt.num_tokens}
                attempt.span_events.append(Event("preempted", report.start_unix_ns, said))

    def _fail_all(self, error: TandemError) -> None:
        for attempt in self._attempts:
            self._end(attempt, "failed", error, answer=failed(error))
        for given in self._reserving:
            if not given.done():
                given.set_exception(WorkerUnavailable(f"the {self.name} failed"))


def _answer(error: TandemError) -> Payload | None:
    """What the gateway is told of an ended transfer: who cancels it answers for it, everybody else waits for us."""
    return None if isinstance(error, RequestCancelled) else failed(error)


class Servicer(worker_pb2_grpc.DecodeWorkerServicer):
    """The sessions as a gRPC service."""

    def __init__(self, sessions: SessionServer) -> None:
        self._sessions = sessions

    async def Session(
        self, request_iterator: AsyncIterator[worker_pb2.DecodeCommands], context: object
    ) -> AsyncIterator[worker_pb2.StepEvents]:
        """One gateway's stream."""
        async for events in self._sessions.serve(request_iterator):
            yield events
