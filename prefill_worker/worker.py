"""The event loop's side of a prefill worker: a prompt's life from its command to the commit of its pages.

Lifetimes are scopes. What an attempt holds, in the order in which it takes it, and who gives it back:

    entry in the table, place in the queue      `_ended`: runs when the attempt's task ends, however it ends, even
                                                when it was cancelled before it began
    pages in the books, pages of the pool       `_free`: runs after that, and after the transfer's abort, because until
                                                then something may still read them
    a transfer, and pages at the decode worker  committed by `seal`, or else aborted by `_ended` in a task of its own,
                                                which nobody cancels

The decode worker is asked for pages before a prompt is computed, and answers while it is.

Once a prompt is computed, its pages outlive the attempt for a while (`_Kept`), however that ended: should the decode
worker die, the next attempt hands them over again and computes nothing. They are nobody's then and give way at once.

So cancelling is cancelling the task, in any phase: queued, reserving, computing, streaming, sealing. Whoever cancels (a
command, a newer attempt, a session that ended) owes the answer; nothing is emitted for it. Everything else that ends an
attempt is answered by `_serve`. The fence is the table: what the engine reports of an attempt that is not in it is
dropped.

Nothing here touches a tensor; the engine thread is given commands and sends reports.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from kv_transfer.protocol.messages import TransferId
from kv_transfer.sending import SendLinks, SendTransfer
from prefill_worker.engine_loop import CachedPrefix, ComputedChunk, PrefillLoop, StepReport
from prefill_worker.scheduler import PromptQueue, PromptSize
from protos import worker_pb2, worker_pb2_grpc
from services.engine.cache.pages import num_pages_for
from services.engine.engine import EngineParts
from services.engine.steps.sequence import Grammar, Sampling, Sequence
from services.engine.steps.step import NonFiniteLogits, SampledToken
from services.runtime import telemetry
from services.runtime.clock import SYSTEM_CLOCK, Clock
from services.runtime.errors import (
    RequestCancelled,
    TandemError,
    TransferFailed,
    WorkerUnavailable,
)
from services.runtime.logs import request_fields
from services.runtime.page_keys import cache_salt
from services.runtime.telemetry import TraceContext
from services.scheduling.speedometer import numbers
from services.structured.form import AnswerForm
from services.structured.grammar import Grammars
from worker.attempts import (
    AttemptKey,
    AttemptSpec,
    finished_message,
    handed_off_message,
    read_key,
    read_spec,
    tokens_message,
)
from worker.engine_worker import EngineWorker, PagesChanged
from worker.host import infallible, on_this_loop, record_chunk, record_sending, within
from worker.metrics import Load, Speeds, WorkerMetrics
from worker.sessions import CommandHandler, Session, SessionServer, failed

# Uncomputed tokens of prompts that have their turn, in steps: one runs, the next is ready when it ends.
STEPS_AHEAD = 2
MAX_TOLD_CHUNKS = 32
# How long computed pages are kept after their attempt: a gateway notices a death and tries again well within it.
KEPT_S = 10.0
# How long the next attempt waits for the former one to let go of the pages before it rather computes them again.
KEPT_WAIT_S = 0.5

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a prefill worker takes on."""

    chunk_tokens: int
    max_waiting: int


@dataclass(eq=False, slots=True)
class _Kept:
    """A prompt whose pages are all computed, and what another attempt must have in common with the one that did it."""

    key: AttemptKey
    """The attempt under which the engine thread knows the pages."""
    prompt_token_ids: list[int]
    cache_salt: str
    sampling: Sampling
    first_token_id: int
    outcome: SampledToken | None
    """The first token as it was sampled. None: the attempt had been told which it is."""
    form: AnswerForm | None = None
    is_let_go: asyncio.Event = field(default_factory=asyncio.Event)
    """The attempt has ended and nothing reads the pages."""
    expiry: asyncio.TimerHandle | None = None

    def fits(self, spec: AttemptSpec[Sampling]) -> bool:
        """Whether computing the prompt of `spec` would give these pages and this token."""
        if spec.prompt_token_ids != self.prompt_token_ids or spec.cache_salt != self.cache_salt:
            return False
        if spec.sampling != self.sampling or spec.form != self.form:
            return False
        if spec.emitted_token_ids:
            return spec.emitted_token_ids[0] == self.first_token_id
        return self.outcome is not None


@dataclass(eq=False, slots=True)
class _Attempt:
    spec: AttemptSpec[Sampling]
    session: Session
    decode_address: str
    decode_incarnation: str
    arrived_s: float
    task: "asyncio.Task[None]" = field(init=False)
    has_turn: asyncio.Event = field(default_factory=asyncio.Event)
    has_begun: bool = False
    """The engine may hold pages for it."""
    former: _Kept | None = None
    """What an earlier attempt has computed of the same."""
    kept: _Kept | None = None
    """What this one has computed or taken over."""
    grammar: Grammar | None = None
    """What the first token must keep to; None: it may be any, or is known."""
    transfer: SendTransfer | None = None
    chunks: "asyncio.Queue[tuple[StepReport, ComputedChunk]]" = field(default_factory=asyncio.Queue)
    trace: TraceContext | None = None
    """Under which its spans are recorded; None: it has none."""
    sending_since_unix_ns: int | None = None
    outcome: str = "cancelled"
    abort_reason: TandemError | None = field(default_factory=lambda: RequestCancelled("the attempt was cancelled"))
    started_unix_ns: int = 0
    """When the gateway was told that it has begun."""
    computed: list[tuple[int, int, int]] = field(default_factory=list)
    """Of its first chunks: when the step began and ended, in Unix nanoseconds, and tokens."""

    @property
    def num_tokens(self) -> int:
        return len(self.spec.prompt_token_ids)

    def told_chunks(self) -> list[worker_pb2.PromptChunk]:
        """How its prompt was computed; a step may have begun before its beginning was told."""
        return [
            worker_pb2.PromptChunk(
                began_s=max(0, start_unix_ns - self.started_unix_ns) / 1e9,
                spent_s=(end_unix_ns - start_unix_ns) / 1e9,
                num_tokens=num_tokens,
            )
            for start_unix_ns, end_unix_ns, num_tokens in self.computed
        ]

    def end(self, outcome: str, abort_reason: TandemError | None) -> None:
        """How it ended, and why its transfer, if there is one, must be aborted; None: it was committed."""
        self.outcome = outcome
        self.abort_reason = abort_reason


class PrefillWorker(EngineWorker[_Attempt]):
    """Computes prompts and hands their pages over. Made on the event loop.

    `grammars` are for answers that must have a form, which are refused without.
    """

    name = "prefill worker"

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
        self._kept: dict[str, _Kept] = {}
        """By request, of those whose newest computed attempt may be handed over again."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._queue = PromptQueue(
            max_waiting=limits.max_waiting,
            num_pages=parts.pool.num_pages,
            ahead_tokens=STEPS_AHEAD * limits.chunk_tokens,
        )
        handlers: dict[str, CommandHandler] = {"prefill": self._on_prefill, "cancel": self._on_cancel}
        self._open_sessions(incarnation, handlers, gpu=gpu, links=self._links.peer_links)
        self._loop = PrefillLoop(
            runner=parts.runner,
            allocator=parts.allocator,
            page_size=self._page_size,
            chunk_tokens=limits.chunk_tokens,
            clock=clock,
            on_report=on_this_loop(self._on_report),
            tier=parts.tier,
        )
        self._loop.speedometer.observe_steps(parts.first_steps, clock.monotonic())
        self._start_engine(self._loop, step_timeout_s=step_timeout_s)

    def load(self) -> Load:
        """How busy the worker is now."""
        return Load(
            *self._pages,
            promised_pages=max(0, self._queue.promised_pages - self._pages.used),
            running=self._queue.num_inside,
            waiting=self._queue.num_waiting,
            speeds=Speeds(
                prefill=numbers(self._loop.speedometer.prefill_now),
                decode=numbers(self._loop.speedometer.decode_now),
                link=numbers(self._links.meters.usual()),
            ),
            waiting_tokens=self._queue.waiting_tokens,
        )

    async def wait_idle(self) -> None:
        """Returns when every attempt has ended; each has a deadline."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def close(self) -> None:
        """Fails what is left, waits until nothing is held, and stops the engine."""
        self._is_draining = True
        self._fail_all(WorkerUnavailable("the prefill worker is leaving"))
        await self.wait_idle()
        for kept in list(self._kept.values()):
            self._forget(kept)
        await self._stop()

    # --- commands, on the event loop ---

    async def _on_prefill(self, session: Session, message: worker_pb2.Prefill) -> None:
        if self._is_draining:
            raise WorkerUnavailable("the prefill worker is leaving")
        spec = read_spec(message.sequence, Sampling, clock=self._clock)
        # Only the prompt is computed here; whether the answer fits too was the decode worker's question.
        self._check(spec, num_new_tokens=1)
        attempt = _Attempt(spec, session, message.decode_address, message.decode_incarnation, self._clock.monotonic())
        attempt.trace = telemetry.sampled(spec.traceparent, spec.tracestate)
        superseded = self._attempts.begin(spec.key, attempt)
        if superseded is not None:
            superseded.task.cancel()
        attempt.former = self._former_of(spec)
        try:
            if attempt.former is None:
                self._enter(attempt)
        except TandemError:
            self._attempts.end(spec.key)
            self._metrics.count_attempt("refused")
            raise
        attempt.task = asyncio.create_task(self._serve(attempt), name=f"prefill {spec.key}")
        self._tasks.add(attempt.task)
        attempt.task.add_done_callback(lambda task: self._ended(attempt, task))
        self._give_turns()

    def _enter(self, attempt: _Attempt) -> None:
        spec = attempt.spec
        is_ready = not _needs_grammar(spec)
        self._queue.enter(spec.key, self._size(attempt), service_class=spec.service_class, is_ready=is_ready)

    def _former_of(self, spec: AttemptSpec[Sampling]) -> _Kept | None:
        former = self._kept.get(spec.key.request_id)
        if former is not None and not former.fits(spec):
            self._forget(former)
            return None
        return former

    def _size(self, attempt: _Attempt) -> PromptSize:
        return PromptSize(attempt.num_tokens, num_pages_for(attempt.num_tokens, self._page_size))

    async def _on_cancel(self, session: Session, message: worker_pb2.Cancel) -> None:
        attempt = self._attempts.find(read_key(message.id))
        is_known = attempt is not None and attempt.session is session
        if attempt is not None and is_known:
            attempt.task.cancel()
        if message.wants_word:
            has_begun = attempt is not None and is_known and attempt.transfer is not None
            self.sessions.emit(session, *read_key(message.id), worker_pb2.Cancelled(has_begun=has_begun))

    def _lose(self, attempt: _Attempt) -> None:
        attempt.task.cancel()

    # --- the life of an attempt, one task each ---

    async def _serve(self, attempt: _Attempt) -> None:
        try:
            async with within(attempt.spec.deadline):
                await self._prefill(attempt)
        except TandemError as error:
            self._fail(attempt, error)
        except Exception as error:  # root of the task: the gateway gets an answer whatever went wrong
            logger.exception("an attempt failed", extra=request_fields(*attempt.spec.key, attempt.spec.traceparent))
            self._fail(attempt, error)

    async def _prefill(self, attempt: _Attempt) -> None:
        page_ids = None if attempt.former is None else await self._take_over(attempt, attempt.former)
        if page_ids is None:
            attempt.grammar = await self._grammar(attempt.spec)
            self._queue.make_ready(attempt.spec.key)
            self._give_turns()
            await attempt.has_turn.wait()
        # Asked before anything is computed: should the prompt kill this worker, the other one can tell whose it was.
        transfer = attempt.transfer = await self._links.ask(
            attempt.decode_address,
            attempt.decode_incarnation,
            TransferId(*attempt.spec.key),
            num_tokens=attempt.num_tokens,
            deadline=attempt.spec.deadline,
        )
        if page_ids is not None:
            await transfer.granted()
            self._send_again(attempt, transfer, page_ids)
        else:
            prefix = await self._begin(attempt)
            await transfer.granted()
            last = await self._follow(attempt, transfer, prefix)
            if last.finish_reason is not None:
                self._emit(attempt, finished_message(last.finish_reason))
                attempt.end("finished", RequestCancelled("the first token ended the answer"))
                return
            self._keep(attempt, last.outcome if isinstance(last.outcome, SampledToken) else None)
        await self._seal(attempt, transfer)

    # --- pages that an earlier attempt of the same request has computed ---

    async def _take_over(self, attempt: _Attempt, former: _Kept) -> tuple[int, ...] | None:
        """The pages, held by this attempt now. None: they are gone, and the attempt stands in the queue instead."""
        page_ids = None
        if await self._is_let_go(former) and self._queue.enter_computed(attempt.spec.key, self._size(attempt)):
            attempt.has_begun = True
            taking = self._engine.submit(lambda: self._loop.take_kept(former.key, attempt.spec.key))
            page_ids = await asyncio.wrap_future(taking)
        if page_ids is not None:
            self._keep(attempt, former.outcome)
            return page_ids
        self._forget(former)
        self._queue.leave(attempt.spec.key)
        self._enter(attempt)
        self._give_turns()
        return None

    async def _is_let_go(self, former: _Kept) -> bool:
        try:
            async with asyncio.timeout(KEPT_WAIT_S):
                await former.is_let_go.wait()
        except TimeoutError:
            return False
        return True

    def _send_again(self, attempt: _Attempt, transfer: SendTransfer, page_ids: tuple[int, ...]) -> None:
        assert attempt.kept is not None, "who has the pages has the rest"
        self._emit_started(attempt, attempt.num_tokens)
        if not attempt.spec.emitted_token_ids and attempt.kept.outcome is not None:
            self._emit(attempt, tokens_message(0, attempt.kept.outcome))
        transfer.send(0, page_ids)

    def _keep(self, attempt: _Attempt, outcome: SampledToken | None) -> None:
        """From here on the attempt's pages outlive it."""
        spec = attempt.spec
        first_token_id = spec.emitted_token_ids[0] if outcome is None else outcome.token_id
        former = self._kept.get(spec.key.request_id)
        if former is not None:
            self._forget(former)
        attempt.kept = _Kept(
            spec.key,
            spec.prompt_token_ids,
            spec.cache_salt,
            spec.sampling,
            first_token_id,
            outcome,
            form=spec.form,
        )
        self._kept[spec.key.request_id] = attempt.kept

    def _forget(self, kept: _Kept) -> None:
        request_id = kept.key.request_id
        if self._kept.get(request_id) is kept:
            del self._kept[request_id]
        if kept.expiry is not None:
            kept.expiry.cancel()
        self._engine.submit(infallible(lambda: self._loop.drop_kept(kept.key)))

    # --- a prompt that is computed ---

    async def _follow(self, attempt: _Attempt, transfer: SendTransfer, prefix: CachedPrefix) -> ComputedChunk:
        """Has what is computed sent, chunk by chunk, emits the first token, returns the last chunk."""
        if prefix.page_ids:
            self._send(attempt, transfer, 0, prefix.page_ids)
        while True:
            report, chunk = await attempt.chunks.get()
            record_chunk(
                attempt.trace,
                report.start_unix_ns,
                report.end_unix_ns,
                start=chunk.start,
                num_tokens=chunk.num_tokens,
            )
            if isinstance(chunk.outcome, NonFiniteLogits):
                raise chunk.outcome
            if isinstance(chunk.outcome, SampledToken):
                self._emit(attempt, tokens_message(0, chunk.outcome))
            if chunk.page_ids:
                self._send(attempt, transfer, chunk.first_page, chunk.page_ids)
            if chunk.is_last:
                return chunk

    def _send(self, attempt: _Attempt, transfer: SendTransfer, first_page: int, page_ids: tuple[int, ...]) -> None:
        """Raises what ended the transfer, if it has ended: nobody waits for the rest of the prompt then."""
        transfer.send(first_page, page_ids)
        attempt.sending_since_unix_ns = attempt.sending_since_unix_ns or self._clock.unix_ns()

    async def _begin(self, attempt: _Attempt) -> CachedPrefix:
        """Puts the prompt in line for the engine; returns when that knows what need not be computed."""
        spec = attempt.spec
        sequence = Sequence(
            spec.key,
            spec.prompt_token_ids,
            sampling=spec.sampling,
            emitted_token_ids=spec.emitted_token_ids,
            grammar=attempt.grammar,
        )
        salt = cache_salt(model=self._parts.fingerprint, tenant=spec.cache_salt)
        attempt.has_begun = True
        beginning = self._engine.submit(
            infallible(lambda: self._loop.begin(sequence, salt=salt, service_class=spec.service_class))
        )
        prefix = await asyncio.wrap_future(beginning)
        self._emit_started(attempt, prefix.num_tokens)
        self._queue.computed(spec.key, prefix.num_tokens)
        self._give_turns()
        return prefix

    async def _grammar(self, spec: AttemptSpec[Sampling]) -> Grammar | None:
        """What the first token must keep to."""
        if spec.form is None or not _needs_grammar(spec):
            return None
        assert self._grammars is not None, "such a request was refused"
        return await self._grammars.begin(spec.form, eos_token_ids=spec.eos_token_ids)

    def _emit_started(self, attempt: _Attempt, num_cached_tokens: int) -> None:
        queue_s = self._clock.monotonic() - attempt.arrived_s
        attempt.started_unix_ns = self._clock.unix_ns()
        self._emit(attempt, worker_pb2.PrefillStarted(queue_s=queue_s, num_cached_tokens=num_cached_tokens))
        self._metrics.note_prompt(num_tokens=attempt.num_tokens, num_cached_tokens=num_cached_tokens)

    async def _seal(self, attempt: _Attempt, transfer: SendTransfer) -> None:
        assert attempt.kept is not None, "what is sealed is computed"
        start_unix_ns = attempt.sending_since_unix_ns or self._clock.unix_ns()
        try:
            stats = await transfer.seal(
                num_tokens=attempt.num_tokens,
                first_token_id=attempt.kept.first_token_id,
                sampling_position=attempt.num_tokens + 1,
            )
        except BaseException as error:
            record_sending(attempt.trace, start_unix_ns, self._clock.unix_ns(), error=error)
            raise
        record_sending(attempt.trace, start_unix_ns, self._clock.unix_ns(), sent=stats)
        attempt.end("handed_off", None)
        self._metrics.note_transfer(
            num_bytes=stats.num_bytes,
            seconds=(self._clock.unix_ns() - start_unix_ns) / 1e9,
            exposed_s=stats.exposed_s,
        )
        self._emit(attempt, handed_off_message(stats, attempt.told_chunks()))

    def _fail(self, attempt: _Attempt, error: BaseException) -> None:
        self._emit(attempt, failed(error))
        attempt.end("failed", error if isinstance(error, TandemError) else TransferFailed("the prefill failed"))

    def _ended(self, attempt: _Attempt, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._attempts.end(attempt.spec.key)
        self._metrics.count_attempt(attempt.outcome)
        if attempt.transfer is None or attempt.abort_reason is None:
            self._free(attempt)
            return
        abort = asyncio.create_task(attempt.transfer.abort(attempt.abort_reason))
        self._tasks.add(abort)
        abort.add_done_callback(lambda task: self._aborted(attempt, task))

    def _aborted(self, attempt: _Attempt, abort: "asyncio.Task[None]") -> None:
        self._tasks.discard(abort)
        error = abort.exception()
        if error is not None:  # its pages may still be read, and by whom is not known
            self._on_engine_failed(error)
        self._free(attempt)

    def _free(self, attempt: _Attempt) -> None:
        kept = attempt.kept
        is_kept = kept is not None and self._kept.get(attempt.spec.key.request_id) is kept
        if attempt.has_begun:
            self._engine.submit(infallible(lambda: self._loop.release(attempt.spec.key, is_kept=is_kept)))
        if is_kept and kept is not None:
            kept.is_let_go.set()
            kept.expiry = self._event_loop.call_later(KEPT_S, self._forget, kept)
        self._queue.leave(attempt.spec.key)
        self.sessions.load_changed()
        self._give_turns()

    def _give_turns(self) -> None:
        for key in self._queue.next_turns():
            assert isinstance(key, AttemptKey), "only attempts are queued"
            attempt = self._attempts.find(key)
            # One that was superseded a moment ago leaves as soon as its task has run.
            if attempt is not None:
                attempt.has_turn.set()

    # --- what the engine thread says ---

    def _on_report(self, report: StepReport) -> None:
        self._note_pages(report.pages, report.changes)
        for chunk in report.chunks:
            assert isinstance(chunk.key, AttemptKey), "only attempts are computed"
            self._queue.computed(chunk.key, chunk.num_tokens)
            attempt = self._attempts.find(chunk.key)
            if attempt is not None:
                attempt.chunks.put_nowait((report, chunk))
                if len(attempt.computed) < MAX_TOLD_CHUNKS:
                    attempt.computed.append((report.start_unix_ns, report.end_unix_ns, chunk.num_tokens))
        if report.chunks:
            self._metrics.note_step(
                seconds=(report.end_unix_ns - report.start_unix_ns) / 1e9,
                num_sequences=len(report.chunks),
                num_tokens=sum(chunk.num_tokens for chunk in report.chunks),
            )
            self._give_turns()
        else:
            self.sessions.load_changed()  # pages came free: an idle worker is seen as idle at once

    def _fail_all(self, error: TandemError) -> None:
        for attempt in self._attempts:
            self._fail(attempt, error)
            attempt.task.cancel()


def _needs_grammar(spec: AttemptSpec[Sampling]) -> bool:
    """An attempt that has emitted tokens samples nothing here."""
    return spec.form is not None and not spec.emitted_token_ids


class Servicer(worker_pb2_grpc.PrefillWorkerServicer):
    """The sessions as a gRPC service."""

    def __init__(self, sessions: SessionServer) -> None:
        self._sessions = sessions

    async def Session(
        self, request_iterator: AsyncIterator[worker_pb2.PrefillCommands], context: object
    ) -> AsyncIterator[worker_pb2.StepEvents]:
        """One gateway's stream."""
        async for events in self._sessions.serve(request_iterator):
            yield events
