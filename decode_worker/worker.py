"""The event loop's side of a decode worker: the request lifecycle from admission to the last token.

Lifetimes are scopes. A request has no task, except while it is handed over to another decode worker. Everything that
happens to it arrives as a call, and every call that ends it goes through `end`. It holds two resources:

    the attempt: its table entry and deadline
        From `_on_admit` until `end`, for any reason.
    its pages: the admission and pages of the pool
        From `_on_admit` until `free`. Usually that is when the attempt ends. If a transfer writes into the pages, it
        is when the transfer calls `release`, which its abort triggers. If a transfer reads the pages, it is when the
        task of the transfer and its abort have ended.

The party that cancels (a command, a newer attempt, a session that ended) reports the end itself, so this module emits
nothing for it, nor for a transfer that the prefill side cancelled and reported. The table is the fence: a transfer, a
commit, or an engine report for an attempt that is not in the table is rejected or dropped.

Nothing here accesses tensors. The engine thread receives commands and sends reports.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from decode_worker.admission import AdmissionBook
from decode_worker.arrivals import Arrivals
from decode_worker.attempt import DecodeAttempt, Phase
from decode_worker.moves import Moves
from protos import worker_pb2, worker_pb2_grpc
from services.engine.steps.sequence import Grammar, Sampling
from services.engine.steps.step import NonFiniteLogits, SampledToken
from services.runtime.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    RequestCancelled,
    TandemError,
    WorkerUnavailable,
)
from services.runtime.logs import request_fields
from services.scheduling.speedometer import numbers
from services.structured.form import AnswerForm
from services.structured.grammar import GrammarState
from worker.attempts import (
    AttemptKey,
    AttemptSpec,
    finished_message,
    is_bare,
    read_key,
    read_spec,
    tokens_message,
)
from worker.engine import (
    Advance,
    DecodeEngine,
    DecodeReport,
    EngineFacts,
    Preemption,
)
from worker.engine_worker import Around, EngineWorker
from worker.metrics import Load, Speeds
from worker.sessions import CommandHandler, Payload, Session, SessionServer, StepTokens, failed
from worker.spans import AttemptSpans
from worker.threads import on_this_loop

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the load of a decode worker."""

    max_admitted: int
    is_optimistic: bool = True
    """Whether requests are admitted by their expected length instead of their worst case."""


class DecodeWorker(EngineWorker[DecodeAttempt]):
    """Receives pages, generates tokens, and hands sequences over to other decode workers. Create it on the event loop.

    `arrivals` is the target of its LinkReceiver. `make_engine` receives the function that handles reports. `arrivals`
    and `_moves` use the methods without an underscore.
    """

    name = "decode worker"

    def __init__(
        self,
        around: Around,
        facts: EngineFacts,
        *,
        make_engine: Callable[[Callable[[DecodeReport], None]], DecodeEngine],
        limits: Limits,
    ) -> None:
        self.engine = make_engine(on_this_loop(self._on_report))
        self._speedometer = self.engine.speedometer
        self.arrivals = Arrivals(self, self.engine)
        self._moves = Moves(self, self.engine, links=around.links, metrics=around.metrics, clock=around.clock)
        self._book = AdmissionBook(
            num_pages=facts.limits.num_pages,
            page_size=facts.limits.page_size,
            max_admitted=limits.max_admitted,
            is_optimistic=limits.is_optimistic,
        )
        self._num_running = 0
        self._num_preempted = 0
        self._waiting_tokens = 0
        self._context_tokens = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        handlers: dict[str, CommandHandler] = {
            "admit": self._on_admit,
            "cancel": self._on_cancel,
            "pause": self._moves.on_pause,
            "unpause": self._moves.on_unpause,
            "hand_over": self._moves.on_hand_over,
        }
        super().__init__(around, facts, engine=self.engine, handlers=handlers, peer_links=around.links.peer_links)

    def load(self) -> Load:
        """Returns the current load of the worker."""
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
        """Waits until every attempt has ended, at its deadline at the latest, and its pages are free."""
        await self._is_idle.wait()

    async def close(self) -> None:
        """Fails the remaining attempts, waits until they hold no resources, and stops the engine."""
        self._is_draining = True
        self._fail_attempts(self._leaving())
        await self.arrivals.close()
        await self.wait_idle()
        await self._stop()

    # --- commands, on the event loop ---

    async def _on_admit(self, session: Session, message: worker_pb2.Admit) -> None:
        if self._is_draining:
            raise self._leaving()
        spec = read_spec(message.sequence, Sampling, clock=self._clock)
        self._check(spec, num_new_tokens=spec.sampling.max_tokens)
        if len(spec.emitted_token_ids) >= spec.sampling.max_tokens:
            raise InvalidRequest("the emitted tokens leave nothing to generate", field="emitted_token_ids")
        if message.from_decode and (message.local_prefill or not spec.emitted_token_ids):
            raise InvalidRequest("a decode worker hands over a sequence that has emitted tokens", field="from_decode")
        attempt = DecodeAttempt(
            spec,
            session,
            AttemptSpans.of(spec, message.span_clock, received_unix_ns=self._clock.unix_ns()),
            self._clock.monotonic(),
            message.from_decode,
            message.local_prefill,
            message.handle,
        )
        superseded = self._attempts.begin(spec.key, attempt)
        if superseded is not None:
            self.end(superseded, "superseded", RequestCancelled("a newer attempt was admitted"))
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
            attempt.grammar = self.begin_task(self._begin_grammar(spec, spec.form))
            attempt.grammar.add_done_callback(lambda task: self._on_grammar_made(attempt, task))
        self.emit(attempt, worker_pb2.Admitted())
        if message.local_prefill:
            attempt.phase = Phase.COMPUTING
            self.start(attempt, num_computed_tokens=0, emitted_token_ids=spec.emitted_token_ids)

    def find(self, key: AttemptKey) -> DecodeAttempt | None:
        """Returns the attempt with exactly this number, or None if it has ended or was superseded."""
        return self._attempts.find(key)

    def find_of(self, session: Session, attempt_id: worker_pb2.AttemptId) -> DecodeAttempt | None:
        """Returns an attempt of this session, or None. Raises InvalidRequest if the ID is malformed."""
        attempt = self._attempts.find(read_key(attempt_id))
        return attempt if attempt is not None and attempt.session is session else None

    async def _on_cancel(self, session: Session, message: worker_pb2.Cancel) -> None:
        attempt = self.find_of(session, message.id)
        has_begun = attempt is not None and attempt.phase is not Phase.ADMITTED
        if attempt is not None:
            attempt.spans.give_up(message)
            self.end(attempt, "cancelled", RequestCancelled("the attempt was cancelled"))
        if message.wants_word:
            self.sessions.emit(session, *read_key(message.id), worker_pb2.Cancelled(has_begun=has_begun))

    def _lose(self, attempt: DecodeAttempt) -> None:
        self.end(attempt, "cancelled", RequestCancelled("the gateway's session ended"))

    # --- the lifecycle of an attempt ---

    async def _begin_grammar(self, spec: AttemptSpec[Sampling], form: AnswerForm) -> GrammarState:
        """Compiles the constraint and replays the emitted tokens, so that the response continues unchanged."""
        assert self._grammars is not None, "such a request was refused"
        return await self._grammars.begin(form, eos_token_ids=spec.eos_token_ids, token_ids=spec.emitted_token_ids)

    def start(self, attempt: DecodeAttempt, *, num_computed_tokens: int, emitted_token_ids: list[int]) -> None:
        """Starts the computation once the grammar is compiled, which is usually long before the pages arrive."""
        spec = attempt.spec

        def begin(grammar: Grammar | None) -> None:
            sequence, salt = self._sequence(spec, grammar, emitted_token_ids)
            sequence.num_computed_tokens = num_computed_tokens
            is_paused = attempt.wants_pause
            self.command(
                lambda: self.engine.start(sequence, salt=salt, is_paused=is_paused, service_class=spec.service_class)
            )

        def begin_with(task: "asyncio.Task[GrammarState]") -> None:
            if attempt.phase is not Phase.ENDED:  # it has ended if compiling failed
                begin(task.result())

        if attempt.grammar is None:
            begin(None)
        else:
            attempt.grammar.add_done_callback(begin_with)

    def _on_grammar_made(self, attempt: DecodeAttempt, task: "asyncio.Task[GrammarState]") -> None:
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if not isinstance(error, TandemError):
            fields = request_fields(*attempt.spec.key, attempt.spec.traceparent)
            logger.error("a grammar failed", exc_info=error, extra=fields)
            error = InternalError("the grammar could not be made")
        self.end(attempt, "failed", error, answer=failed(error))

    def _expire(self, attempt: DecodeAttempt) -> None:
        error = DeadlineExceeded("the request's deadline passed")
        self.end(attempt, "failed", error, answer=failed(error))

    def end(self, attempt: DecodeAttempt, outcome: str, reason: TandemError, *, answer: Payload | None = None) -> None:
        """Ends an attempt, once. Its pages are freed now, or when their transfer releases them."""
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
            self.emit(attempt, answer)
        self._metrics.count_attempt(outcome)
        attempt.note_steps(reason if outcome == "failed" else None)
        attempt.spans.export()
        if key in self.arrivals:
            self.arrivals.abort(key, reason)
        elif attempt.hand_over is not None:
            attempt.hand_over.cancel()
        else:
            self.free(key)

    def free(self, key: AttemptKey) -> None:
        """Frees the pages and the admission of an attempt. No transfer may use the pages."""
        self.command(lambda: self.engine.free(key))
        self._book.withdraw(key)
        self.sessions.load_changed()
        if not len(self._book):
            self._is_idle.set()

    # --- reports of the engine thread ---

    def _on_report(self, report: DecodeReport) -> None:
        self._note_step(
            report,
            num_sequences=len(report.advances),
            num_tokens=sum(advance.num_rows for advance in report.advances),
        )
        self._num_running = report.num_running
        self._waiting_tokens = report.waiting_tokens
        for preemption in report.preempted:
            self._on_preempted(preemption, report)
        self._on_advances(report)
        for paused in report.paused:
            assert isinstance(paused.key, AttemptKey), "only attempts are computed"
            attempt = self._attempts.find(paused.key)
            if attempt is not None:
                self._moves.on_paused(attempt, paused)
        if report.advances:
            self._context_tokens = sum(advance.start + advance.num_tokens for advance in report.advances)
        if not report.num_running:
            self.sessions.load_changed()  # reports an idle worker as idle at once, even if its last step emits no event

    def _on_advances(self, report: DecodeReport) -> None:
        """Sends each gateway the tokens of the step. Tokens that need no other details are sent in one message."""
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

    def _on_advance(self, attempt: DecodeAttempt, advance: Advance, report: DecodeReport) -> SampledToken | None:
        """Emits the events of a sequence. Returns a token instead if it needs no other details."""
        if attempt.is_local and not attempt.has_begun:
            attempt.has_begun = True
            self._on_prefill_begun(attempt, advance, report)
        if advance.start >= len(attempt.spec.prompt_token_ids):
            if not attempt.decoding_since_unix_ns:
                began_unix_ns = attempt.spans.told_unix_ns(report.start_unix_ns)
                self.emit(attempt, worker_pb2.DecodeStarted(began_unix_ns=began_unix_ns))
            attempt.note_step(report)
        elif attempt.is_local and not attempt.decoding_since_unix_ns:  # later chunks recompute preempted pages
            attempt.spans.chunk(
                report.start_unix_ns, report.end_unix_ns, start=advance.start, num_tokens=advance.num_tokens
            )
        if isinstance(advance.outcome, NonFiniteLogits):
            self.end(attempt, "failed", advance.outcome, answer=failed(advance.outcome))
            return None
        if (guesses := advance.guesses) is not None:
            attempt.note_guesses(guesses)
            self._metrics.note_speculation(guesses.source, proposed=guesses.num_tokens, accepted=guesses.num_accepted)
        tokens = advance.tokens
        num_answer_tokens = advance.token_index + len(tokens)
        if tokens:
            attempt.num_tokens += len(tokens)
            self._book.note_tokens(attempt.spec.key, num_answer_tokens)
            if attempt.handle and len(tokens) == 1 and advance.finish_reason is None and is_bare(tokens[0]):
                return tokens[0]
            self.emit(attempt, tokens_message(advance.token_index, *tokens))
        if advance.finish_reason is not None:
            self._book.note_end(num_answer_tokens)
            answer = finished_message(advance.finish_reason)
            self.end(attempt, "finished", RequestCancelled("the answer is complete"), answer=answer)
        return None

    def _on_prefill_begun(self, attempt: DecodeAttempt, advance: Advance, report: DecodeReport) -> None:
        """Handles the first computed tokens of a local prompt, or a prompt whose pages were all cached."""
        num_cached_tokens = min(advance.start, len(attempt.spec.prompt_token_ids))
        queue_s = max(0.0, self._clock.monotonic() - attempt.admitted_s - report.seconds)
        began_unix_ns = attempt.spans.told_unix_ns(report.start_unix_ns)
        started = worker_pb2.PrefillStarted(
            queue_s=queue_s, num_cached_tokens=num_cached_tokens, began_unix_ns=began_unix_ns
        )
        self.emit(attempt, started)
        num_prompt_tokens = len(attempt.spec.prompt_token_ids)
        self._metrics.note_prompt(num_tokens=num_prompt_tokens, num_cached_tokens=num_cached_tokens)

    def _on_preempted(self, preemption: Preemption, report: DecodeReport) -> None:
        self._num_preempted += 1
        self._metrics.count_preemption(preemption.reason)
        assert isinstance(preemption.key, AttemptKey), "only attempts are computed"
        attempt = self._attempts.find(preemption.key)
        if attempt is not None:
            attempt.note_preemption(preemption, report.start_unix_ns)

    def _fail_attempts(self, error: TandemError) -> None:
        for attempt in self._attempts:
            self.end(attempt, "failed", error, answer=failed(error))

    def _fail_all(self, error: TandemError) -> None:
        self._fail_attempts(error)
        self.arrivals.fail(WorkerUnavailable(f"the {self.name} failed"))


class Servicer(worker_pb2_grpc.DecodeWorkerServicer):
    """The sessions as a gRPC service."""

    def __init__(self, sessions: SessionServer) -> None:
        self._sessions = sessions

    async def Session(
        self, request_iterator: AsyncIterator[worker_pb2.DecodeCommands], context: object
    ) -> AsyncIterator[worker_pb2.StepEvents]:
        """Serves the stream of one gateway."""
        async for events in self._sessions.serve(request_iterator):
            yield events
