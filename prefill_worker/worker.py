"""The event loop's side of a prefill worker: the request lifecycle from its command to the commit of its pages.

Lifetimes are scopes. An attempt acquires these resources, in this order:

    its table entry and its place in the queue
        Released by `_ended`, which runs when its task ends in any way, even if it was cancelled before it started.
    page reservations and pages of the pool
        Released by `_free`, after `_ended` and the abort of the transfer, because until then the pages may be read.
    a prefix fetch, which fills the cache
        See `prefill_worker.pulls`. It ends before the prompt is admitted.
    a transfer, and pages at the decode worker
        Committed by `seal`, or else aborted by `_ended` in a separate task that is never cancelled.

The worker requests pages from the decode worker before it computes the prompt. The reply arrives while it computes.

After a prompt has been computed, its pages outlive the attempt for a while (`prefill_worker.kept`), however it ended.
If the decode worker crashes, the next attempt hands the pages over again and computes nothing. The retained pages are
unreferenced and are evicted first.

To cancel an attempt in any phase (queued, reserving, computing, streaming, or sealing), cancel its task. The party that
cancels (a command, a newer attempt, a session that ended) reports the end itself, so nothing is emitted for it.
`_serve` reports every other end. The table is the fence: engine reports for an attempt that is not in it are dropped.

Nothing here accesses tensors. The engine thread receives commands and sends reports.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from kv_transfer.protocol.messages import TransferId
from kv_transfer.send_link import SendTransfer
from prefill_worker.attempt import PrefillAttempt
from prefill_worker.embeddings import EmbeddingWish
from prefill_worker.kept import Kept, KeptPrompts
from prefill_worker.pulls import Pulls
from prefill_worker.scheduler import PromptQueue, PromptSize
from protos import worker_pb2, worker_pb2_grpc
from services.engine.cache.pool import num_pages_for
from services.engine.steps.sequence import Grammar, Sampling
from services.engine.steps.step import SampledToken
from services.runtime.errors import RequestCancelled, TandemError, TransferFailed
from services.runtime.logs import request_fields
from services.scheduling.speedometer import numbers
from worker.attempts import (
    AttemptKey,
    finished_message,
    handed_off_message,
    read_key,
    read_spec,
    tokens_message,
)
from worker.engine import CachedPrefix, ComputedChunk, EngineFacts, PrefillEngine, PrefillReport
from worker.engine_worker import Around, EngineWorker
from worker.metrics import Load, Speeds
from worker.sessions import CommandHandler, Session, SessionServer, failed
from worker.spans import AttemptSpans
from worker.threads import on_this_loop, within

# Uncomputed tokens of admitted prompts, in steps: one step runs while the next is prepared.
STEPS_AHEAD = 2

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the load of a prefill worker."""

    chunk_tokens: int
    max_waiting: int


class PrefillWorker(EngineWorker[PrefillAttempt]):
    """Computes prompts and hands their pages over. Create it on the event loop.

    `make_engine` receives the function that handles reports.
    """

    name = "prefill worker"

    def __init__(
        self,
        around: Around,
        facts: EngineFacts,
        *,
        make_engine: Callable[[Callable[[PrefillReport], None]], PrefillEngine],
        limits: Limits,
    ) -> None:
        self._engine = make_engine(on_this_loop(self._on_report))
        self._kept = KeptPrompts(lambda key: self._forget(key))
        self._queue = PromptQueue(
            max_waiting=limits.max_waiting,
            num_pages=facts.limits.num_pages,
            ahead_tokens=STEPS_AHEAD * limits.chunk_tokens,
        )
        handlers: dict[str, CommandHandler] = {"prefill": self._on_prefill, "cancel": self._on_cancel}
        handlers["embed"] = self._on_embed
        super().__init__(around, facts, engine=self._engine, handlers=handlers, peer_links=around.links.peer_links)

        self.pulls = Pulls(self, self.prefixes, queue=self._queue, clock=self._clock)

    def load(self) -> Load:
        """Returns the current load of the worker."""
        return Load(
            *self._pages,
            promised_pages=max(0, self._queue.promised_pages - self._pages.used),
            running=self._queue.num_inside,
            waiting=self._queue.num_waiting,
            speeds=Speeds(
                prefill=numbers(self._engine.speedometer.prefill_now),
                decode=numbers(self._engine.speedometer.decode_now),
                link=numbers(self._links.meters.usual()),
            ),
            waiting_tokens=self._queue.waiting_tokens,
        )

    async def wait_idle(self) -> None:
        """Waits until every attempt has ended. Each attempt has a deadline, so the wait is bounded."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def close(self) -> None:
        """Fails the remaining attempts, waits until they hold no resources, and stops the engine."""
        self._is_draining = True
        self._fail_all(self._leaving())
        await self.wait_idle()
        await self.pulls.close()
        self._kept.clear()
        await self._stop()

    # --- commands, on the event loop ---

    async def _on_prefill(self, session: Session, message: worker_pb2.Prefill) -> None:
        spec = read_spec(message.sequence, Sampling, clock=self._clock)
        # Only the prompt is computed here. The decode worker has checked that the response fits too.
        self._check(spec, num_new_tokens=1)
        spans = AttemptSpans.of(spec, message.span_clock, received_unix_ns=self._clock.unix_ns())
        attempt = PrefillAttempt(
            spec, session, spans, message.decode_address, message.decode_incarnation, self._clock.monotonic()
        )
        if message.HasField("pull"):
            attempt.pull = message.pull
        self._take(attempt)

    async def _on_embed(self, session: Session, message: worker_pb2.Embed) -> None:
        wish = EmbeddingWish.read(message, is_offered=self.facts.embeds)
        spec = read_spec(message.sequence, Sampling, clock=self._clock)
        self._check(spec, num_new_tokens=0)
        spans = AttemptSpans.of(spec, message.span_clock, received_unix_ns=self._clock.unix_ns())
        attempt = PrefillAttempt(spec, session, spans, "", "", self._clock.monotonic(), embedding=wish)
        self._take(attempt)

    def _take(self, attempt: PrefillAttempt) -> None:
        if self._is_draining:
            raise self._leaving()
        spec = attempt.spec
        superseded = self._attempts.begin(spec.key, attempt)
        if superseded is not None:
            superseded.task.cancel()
        attempt.former = self._kept.find(spec) if attempt.embedding is None else None
        try:
            if attempt.former is None:
                self._enter(attempt)
        except TandemError:
            self._attempts.end(spec.key)
            self._metrics.count_attempt("refused")
            raise
        attempt.task = self.begin_task(self._serve(attempt), name=f"prefill {spec.key}")
        attempt.task.add_done_callback(lambda task: self._ended(attempt))
        self._give_turns()

    def _enter(self, attempt: PrefillAttempt) -> None:
        spec = attempt.spec
        is_ready = not attempt.needs_grammar and attempt.pull is None
        self._queue.enter(spec.key, self._size(attempt), service_class=spec.service_class, is_ready=is_ready)

    def _size(self, attempt: PrefillAttempt) -> PromptSize:
        num_pages = num_pages_for(attempt.num_tokens, self.facts.limits.page_size)
        return PromptSize(attempt.num_tokens, num_pages, attempt.reports_prompt)

    async def _on_cancel(self, session: Session, message: worker_pb2.Cancel) -> None:
        attempt = self._attempts.find(read_key(message.id))
        is_known = attempt is not None and attempt.session is session
        if attempt is not None and is_known:
            attempt.spans.give_up(message)
            attempt.task.cancel()
        if message.wants_word:
            has_begun = attempt is not None and is_known and attempt.transfer is not None
            self.sessions.emit(session, *read_key(message.id), worker_pb2.Cancelled(has_begun=has_begun))

    def _lose(self, attempt: PrefillAttempt) -> None:
        attempt.task.cancel()

    # --- the lifecycle of an attempt, one task each ---

    async def _serve(self, attempt: PrefillAttempt) -> None:
        try:
            async with within(attempt.spec.deadline):
                await (self._prefill(attempt) if attempt.embedding is None else self._embed(attempt, attempt.embedding))
        except TandemError as error:
            self._fail(attempt, error)
        except Exception as error:  # root of the task: every failure must be reported to the gateway
            logger.exception("an attempt failed", extra=request_fields(*attempt.spec.key, attempt.spec.traceparent))
            self._fail(attempt, error)

    async def _prefill(self, attempt: PrefillAttempt) -> None:
        page_ids = None if attempt.former is None else await self._take_over(attempt, attempt.former)
        if page_ids is None:
            if attempt.pull is not None:
                attempt.pulled = await self.pulls.fetch(attempt, attempt.pull)
                self._metrics.note_pull(num_tokens=attempt.pulled.num_tokens, num_bytes=attempt.pulled.num_bytes)
            attempt.grammar = await self._grammar(attempt)
            self._queue.make_ready(attempt.spec.key)
            self._give_turns()
            await attempt.has_turn.wait()
        if not self._links.has_link(attempt.decode_address, attempt.decode_incarnation):
            self.emit(attempt, worker_pb2.OpeningLink())
        # Requested before the computation: if the prompt crashes this worker, the peer can report which attempt ran.
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
                self.emit(attempt, finished_message(last.finish_reason))
                attempt.end("finished", RequestCancelled("the first token ended the answer"))
                return
            outcome = last.outcome if isinstance(last.outcome, SampledToken) else None
            attempt.kept = self._kept.add(attempt.spec, outcome)
        await self._seal(attempt, transfer)

    async def _embed(self, attempt: PrefillAttempt, wish: EmbeddingWish) -> None:
        await attempt.has_turn.wait()
        await self._begin(attempt)
        vector = await wish.vector_of(attempt.next_chunk, num_tokens=attempt.num_tokens)
        self.emit(attempt, worker_pb2.Embedded(vector=vector))
        attempt.end("embedded", None)

    # --- pages computed by an earlier attempt of the request ---

    async def _take_over(self, attempt: PrefillAttempt, former: Kept) -> tuple[int, ...] | None:
        """Adopts the pages of an earlier attempt. Returns None, and queues the prompt instead, if they were evicted."""
        page_ids = None
        if await former.let_go() and self._queue.enter_computed(attempt.spec.key, self._size(attempt)):
            attempt.has_begun = True
            taking = self._thread.submit(lambda: self._engine.take_kept(former.key, attempt.spec.key))
            page_ids = await asyncio.wrap_future(taking)
        if page_ids is not None:
            attempt.kept = self._kept.add(attempt.spec, former.outcome)
            return page_ids
        self._kept.forget(former)
        self._queue.leave(attempt.spec.key)
        self._enter(attempt)
        self._give_turns()
        return None

    def _send_again(self, attempt: PrefillAttempt, transfer: SendTransfer, page_ids: tuple[int, ...]) -> None:
        assert attempt.kept is not None, "the attempt has taken the pages over"
        self._emit_started(attempt, attempt.num_tokens, began_unix_ns=self._clock.unix_ns())
        if not attempt.spec.emitted_token_ids and attempt.kept.outcome is not None:
            self.emit(attempt, tokens_message(0, attempt.kept.outcome))
        transfer.send(0, page_ids)

    def _forget(self, key: AttemptKey) -> None:
        self.command(lambda: self._engine.drop_kept(key))

    # --- computing a prompt ---

    async def _follow(self, attempt: PrefillAttempt, transfer: SendTransfer, prefix: CachedPrefix) -> ComputedChunk:
        """Sends the computed chunks, emits the first token, and returns the last chunk."""
        if prefix.page_ids:
            self._send(attempt, transfer, 0, prefix.page_ids)
        while True:
            chunk = await attempt.next_chunk()
            if isinstance(chunk.outcome, SampledToken):
                self.emit(attempt, tokens_message(0, chunk.outcome))
            if chunk.page_ids:
                self._send(attempt, transfer, chunk.first_page, chunk.page_ids)
            if chunk.is_last:
                return chunk

    def _send(
        self, attempt: PrefillAttempt, transfer: SendTransfer, first_page: int, page_ids: tuple[int, ...]
    ) -> None:
        """Sends pages. If the transfer has ended, raises its error, because the rest of the prompt is not needed."""
        transfer.send(first_page, page_ids)
        attempt.sending_since_unix_ns = attempt.sending_since_unix_ns or self._clock.unix_ns()

    async def _begin(self, attempt: PrefillAttempt) -> CachedPrefix:
        """Starts the prompt on the engine. Returns its cached prefix."""
        spec = attempt.spec
        sequence, salt = self._sequence(spec, attempt.grammar, spec.emitted_token_ids)
        sequence.pooling = None if attempt.embedding is None else attempt.embedding.pooling
        attempt.has_begun, began_unix_ns = True, self._clock.unix_ns()
        beginning = self.command(lambda: self._engine.begin(sequence, salt=salt, service_class=spec.service_class))
        prefix = await asyncio.wrap_future(beginning)
        self._emit_started(attempt, prefix.num_tokens, began_unix_ns=began_unix_ns)
        self._queue.computed(spec.key, prefix.num_tokens)
        self._give_turns()
        return prefix

    async def _grammar(self, attempt: PrefillAttempt) -> Grammar | None:
        """Returns the constraint on the first token, or None."""
        spec = attempt.spec
        if spec.form is None or not attempt.needs_grammar:
            return None
        assert self._grammars is not None, "such a request was refused"
        return await self._grammars.begin(spec.form, eos_token_ids=spec.eos_token_ids)

    def _emit_started(self, attempt: PrefillAttempt, num_cached_tokens: int, *, began_unix_ns: int) -> None:
        pulled = attempt.pulled
        queue_s = self._clock.monotonic() - attempt.arrived_s - pulled.time_s
        attempt.started_unix_ns = self._clock.unix_ns()
        told_unix_ns = attempt.spans.told_unix_ns(began_unix_ns)
        started = worker_pb2.PrefillStarted(
            queue_s=queue_s,
            num_cached_tokens=num_cached_tokens,
            began_unix_ns=told_unix_ns,
            num_pulled_tokens=pulled.num_tokens,
            pull_s=pulled.time_s,
            pulled_bytes=pulled.num_bytes,
        )
        self.emit(attempt, started)
        self._metrics.note_prompt(num_tokens=attempt.num_tokens, num_cached_tokens=num_cached_tokens)

    async def _seal(self, attempt: PrefillAttempt, transfer: SendTransfer) -> None:
        assert attempt.kept is not None, "what is sealed is computed"
        start_unix_ns = attempt.sending_since_unix_ns or self._clock.unix_ns()
        try:
            stats = await transfer.seal(
                num_tokens=attempt.num_tokens,
                first_token_id=attempt.kept.first_token_id,
                sampling_position=attempt.num_tokens + 1,
            )
        except BaseException as error:
            attempt.spans.sending(start_unix_ns, self._clock.unix_ns(), error=error)
            raise
        attempt.spans.sending(start_unix_ns, self._clock.unix_ns(), sent=stats)
        attempt.end("handed_off", None)
        self._metrics.note_transfer(
            num_bytes=stats.num_bytes,
            seconds=(self._clock.unix_ns() - start_unix_ns) / 1e9,
            exposed_s=stats.exposed_s,
        )
        self.emit(attempt, handed_off_message(stats, attempt.told_chunks()))

    def _fail(self, attempt: PrefillAttempt, error: BaseException) -> None:
        self.emit(attempt, failed(error))
        attempt.end("failed", error if isinstance(error, TandemError) else TransferFailed("the prefill failed"))

    def _ended(self, attempt: PrefillAttempt) -> None:
        self._attempts.end(attempt.spec.key)
        self._metrics.count_attempt(attempt.outcome)
        attempt.spans.export()
        if attempt.transfer is None or attempt.abort_reason is None:
            self._free(attempt)
        else:
            self.abort_transfer(attempt.transfer, attempt.abort_reason, lambda: self._free(attempt))

    def _free(self, attempt: PrefillAttempt) -> None:
        kept = attempt.kept
        is_kept = kept is not None and kept in self._kept
        if attempt.has_begun:
            self.command(lambda: self._engine.release(attempt.spec.key, is_kept=is_kept))
        if is_kept and kept is not None:
            self._kept.let_go(kept)
        self._queue.leave(attempt.spec.key)
        self.room_changed()

    def room_changed(self) -> None:
        """Admits prompts after capacity was freed."""
        self.sessions.load_changed()
        self._give_turns()

    def _give_turns(self) -> None:
        for key in self._queue.next_turns():
            assert isinstance(key, AttemptKey), "only attempts are queued"
            attempt = self._attempts.find(key)
            # A superseded attempt is missing here. It leaves the queue once its task has ended.
            if attempt is not None:
                attempt.has_turn.set()

    # --- reports of the engine thread ---

    def _on_report(self, report: PrefillReport) -> None:
        self._note_step(
            report,
            num_sequences=len(report.chunks),
            num_tokens=sum(chunk.num_tokens for chunk in report.chunks),
        )
        for chunk in report.chunks:
            assert isinstance(chunk.key, AttemptKey), "only attempts are computed"
            self._queue.computed(chunk.key, chunk.num_tokens)
            attempt = self._attempts.find(chunk.key)
            if attempt is not None:
                attempt.note_chunk(report, chunk)
        if report.chunks:
            self._give_turns()
        else:
            self.sessions.load_changed()  # pages became free: reports an idle worker as idle at once

    def _fail_all(self, error: TandemError) -> None:
        for attempt in self._attempts:
            self._fail(attempt, error)
            attempt.task.cancel()


class Servicer(worker_pb2_grpc.PrefillWorkerServicer):
    """The sessions as a gRPC service."""

    def __init__(self, sessions: SessionServer) -> None:
        self._sessions = sessions

    async def Session(
        self, request_iterator: AsyncIterator[worker_pb2.PrefillCommands], context: object
    ) -> AsyncIterator[worker_pb2.StepEvents]:
        """Serves the stream of one gateway."""
        async for events in self._sessions.serve(request_iterator):
            yield events
