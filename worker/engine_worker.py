"""The shared logic of both workers between their sessions and their engine thread.

Independent of the role and the engine: subclasses define attempts, and `worker.engine` the engine interface.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from kv_transfer.prefixes import PrefixGiver
from kv_transfer.send_link import SendTransfer
from kv_transfer.sending import SendLinks
from protos import worker_pb2
from services.engine.cache.pages import PageCounts
from services.engine.steps.sequence import Grammar, Sampling, Sequence
from services.engine.thread import EngineThread, StepWatch
from services.runtime.clock import Clock
from services.runtime.errors import (
    InternalError,
    InvalidRequest,
    InvariantViolated,
    NotOffered,
    TandemError,
    WorkerUnavailable,
)
from services.runtime.page_keys import PageKey, cache_salt
from services.structured.compiler import GrammarCompiler
from services.structured.grammar import Grammars
from worker.attempts import AttemptSpec, AttemptTable
from worker.engine import Engine, EngineFacts, KeptPages, StepReport
from worker.metrics import Load, WorkerMetrics
from worker.sessions import CommandHandler, Payload, Reports, Session, SessionServer
from worker.spans import AttemptSpans
from worker.threads import infallible, on_this_loop

ENGINE_STOP_TIMEOUT_S = 10.0

PagesChanged = Callable[[tuple[PageKey, ...], tuple[PageKey, ...]], None]
"""Called on the event loop with the keys of pages that entered the prefix cache and of pages that left it."""

R = TypeVar("R")

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class EngineAttempt:
    """The attributes shared by attempts of both workers."""

    spec: AttemptSpec[Sampling]
    session: Session
    spans: AttemptSpans


A = TypeVar("A", bound=EngineAttempt)


@dataclass(frozen=True, kw_only=True)
class Around:
    """The components around a worker's engine.

    Without `grammars`, constrained requests are rejected. If `step_timeout_s` is 0, steps have no time limit.
    """

    incarnation: str
    links: SendLinks
    metrics: WorkerMetrics
    clock: Clock
    grammars: Grammars | None = None
    step_timeout_s: float = 0.0
    gpu: Callable[[], worker_pb2.GpuFacts | None] | None = None
    on_pages_changed: PagesChanged | None = None


class EngineWorker(ABC, Generic[A]):
    """Attempts, sessions with gateways, and an engine thread, whose failure ends the worker.

    Create it on the event loop.
    """

    name: ClassVar[str]
    """Name of the worker in messages."""

    def __init__(
        self,
        around: Around,
        facts: EngineFacts,
        *,
        engine: Engine,
        handlers: Mapping[str, CommandHandler],
        peer_links: Callable[[], Iterable[worker_pb2.PeerLink]] | None = None,
    ) -> None:
        self.facts = facts
        self.prefixes = engine.prefixes
        self.incarnation = around.incarnation
        self._links = around.links
        self._metrics = around.metrics
        self._clock = around.clock
        self._grammars = None if around.grammars is None else GrammarCompiler(around.grammars)
        self._on_pages_changed = around.on_pages_changed
        self._attempts: AttemptTable[A] = AttemptTable()
        self._pages = PageCounts(facts.limits.num_pages, facts.limits.num_pages, 0, 0, 0)
        self._is_draining = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._event_loop = asyncio.get_running_loop()
        self.drain_requested = asyncio.Event()
        self.failed: asyncio.Future[None] = self._event_loop.create_future()
        self.sessions = SessionServer(
            incarnation=around.incarnation,
            handlers={**handlers, "drain": self._on_drain},
            reports=Reports(
                load=lambda: self.load().to_message(is_draining=self._is_draining),
                gpu=around.gpu,
                links=peer_links,
                counts=self._metrics.counts,
            ),
            on_session_closed=self._on_session_closed,
        )
        self._thread = EngineThread(
            engine.step, on_fatal=on_this_loop(self._on_engine_failed), on_idle=engine.check_books
        )
        self._step_watch = StepWatch(self._thread, timeout_s=around.step_timeout_s)
        self._thread.start()

    @abstractmethod
    def load(self) -> Load:
        """Returns the current load of the worker."""

    @abstractmethod
    def _fail_all(self, error: TandemError) -> None:
        """Fails every attempt and reports the error."""

    @abstractmethod
    def _lose(self, attempt: A) -> None:
        """Ends an attempt whose session has closed, so that no event can be sent."""

    @abstractmethod
    async def wait_idle(self) -> None:
        """Waits until every attempt has ended. Each attempt has a deadline, so the wait is bounded."""

    @abstractmethod
    async def close(self) -> None:
        """Ends and reports the remaining attempts, frees all resources, and stops the engine."""

    def begin_drain(self) -> None:
        """Rejects new attempts from now on. Running attempts finish."""
        self._is_draining = True
        self.sessions.load_changed()

    def end_drain(self) -> None:
        """Accepts new attempts again."""
        self._is_draining = False
        self.sessions.load_changed()

    def check_engine(self, elapsed_s: float) -> None:
        """Fails the worker if a step hangs. Call it periodically, with the time since the previous call."""
        if self._step_watch.is_stuck(elapsed_s):
            self._thread.abandon("the engine is stuck")
            self._on_engine_failed(InvariantViolated("a step of the engine did not end in time"))
        loss = self.facts.loss()
        if loss is not None:
            self._thread.abandon("the engine has lost a process")  # its step may wait for that process indefinitely
            self._on_engine_failed(loss)

    async def _stop(self) -> None:
        """Closes the parts of an idle worker, in the order of their dependencies."""
        await self._links.close()
        self.sessions.close()
        await asyncio.to_thread(self._thread.settle, timeout_s=ENGINE_STOP_TIMEOUT_S)
        await asyncio.to_thread(self._thread.stop, timeout_s=ENGINE_STOP_TIMEOUT_S)

    # --- attempts ---

    def _leaving(self) -> WorkerUnavailable:
        return WorkerUnavailable(f"the {self.name} is leaving")

    def _check(self, spec: AttemptSpec[Sampling], *, num_new_tokens: int) -> None:
        """Raises InvalidRequest if the model cannot compute the prompt plus `num_new_tokens`."""
        self.facts.check(spec.sampling)
        if spec.adapter and spec.adapter not in self.facts.adapters:
            raise NotOffered(f"the {self.name} does not have the adapter {spec.adapter!r}", field="model")
        limits = self.facts.limits
        limits.check_fits(len(spec.prompt_token_ids), num_new_tokens)
        limits.check_token_ids(spec.prompt_token_ids)
        limits.check_token_ids(spec.emitted_token_ids, field="emitted_token_ids")
        limits.check_token_ids(spec.sampling.logit_bias, field="logit_bias")
        if spec.form is not None and self._grammars is None:
            raise InvalidRequest("this worker has no grammars", field="json_schema")

    def _sequence(
        self, spec: AttemptSpec[Sampling], grammar: Grammar | None, emitted_token_ids: list[int]
    ) -> tuple[Sequence, bytes]:
        """Returns the sequence that the engine computes for an attempt, and the salt of its pages."""
        sequence = Sequence(
            spec.key,
            spec.prompt_token_ids,
            sampling=spec.sampling,
            emitted_token_ids=emitted_token_ids,
            grammar=grammar,
        )
        sequence.adapter = spec.adapter
        return sequence, self.salt(spec)

    def salt(self, spec: AttemptSpec[Sampling]) -> bytes:
        """Returns the part of the page names that limits sharing to attempts with the same model and tenant."""
        return cache_salt(model=self.facts.fingerprint, tenant=spec.cache_salt)

    async def find_prefix(self, token_ids: list[int], sharers: str) -> KeptPages:
        """Returns the cached pages of the beginning of `token_ids` that are visible to `sharers`."""
        prefixes = self.prefixes
        if prefixes is None:
            return KeptPages((), ())
        salt = cache_salt(model=self.facts.fingerprint, tenant=sharers)
        return await asyncio.wrap_future(self.command(lambda: prefixes.find_prefix(token_ids, salt=salt)))

    def prefix_giver(self) -> PrefixGiver:
        """Returns the service that sends cached pages to other workers."""
        page_size = self.facts.limits.page_size
        return PrefixGiver(self._links, self.find_prefix, incarnation=self.incarnation, page_size=page_size)

    def emit(self, attempt: A, payload: Payload) -> None:
        """Sends an event about an attempt to its gateway."""
        self.sessions.emit(attempt.session, *attempt.spec.key, payload)

    def begin_task(self, run: Coroutine[Any, Any, R], *, name: str | None = None) -> "asyncio.Task[R]":
        """Runs a coroutine as a task that the worker tracks."""
        task = asyncio.create_task(run, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def abort_transfer(self, transfer: SendTransfer, reason: TandemError, then: Callable[[], None]) -> None:
        """Aborts a transfer in a separate task that is never cancelled. Calls `then` once nothing reads its pages."""

        def ended(abort: "asyncio.Task[None]") -> None:
            error = abort.exception()
            if error is not None:  # its pages may still be read by an unknown reader
                self._on_engine_failed(error)
            then()

        self.begin_task(transfer.abort(reason)).add_done_callback(ended)

    async def _on_drain(self, session: Session, message: worker_pb2.DrainWorker) -> None:
        self.drain_requested.set()

    def _on_session_closed(self, session: Session) -> None:
        for attempt in self._attempts:
            if attempt.session is session:
                self._lose(attempt)

    # --- the engine ---

    def command(self, command: Callable[[], R]) -> "Future[R]":
        """Submits an engine command, which runs between two steps. If it fails, the worker fails."""
        return self._thread.submit(infallible(command))

    def _note_step(self, report: StepReport, *, num_sequences: int, num_tokens: int) -> None:
        """Records the page counts, the changes of the prefix cache, and the step if it computed anything."""
        self._pages = report.pages
        if self._on_pages_changed is not None and any(report.changes):
            self._on_pages_changed(*report.changes)
        if num_sequences:
            self._metrics.note_step(seconds=report.seconds, num_sequences=num_sequences, num_tokens=num_tokens)

    def _on_engine_failed(self, error: BaseException) -> None:
        """Fails every attempt and lets the process end, because the engine's results are no longer reliable."""
        if self.failed.done():
            return
        logger.critical("the engine failed", exc_info=error)
        self._is_draining = True
        self._fail_all(InternalError(f"the {self.name} failed"))
        self.failed.set_exception(error)
