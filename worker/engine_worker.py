"""What both workers do between their sessions and their engine thread, whatever they compute.

Knows no role and no engine by name: a worker says what an attempt of its own is and how one ends, and `worker.engine`
what an engine is.
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
"""Called on the event loop with the keys of pages that have come to be found here, and of those that no longer are."""

R = TypeVar("R")

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class EngineAttempt:
    """What the attempts of both workers have."""

    spec: AttemptSpec[Sampling]
    session: Session
    spans: AttemptSpans


A = TypeVar("A", bound=EngineAttempt)


@dataclass(frozen=True, kw_only=True)
class Around:
    """What surrounds a worker's engine.

    `grammars` are for answers that must have a form, which are refused without. `step_timeout_s` of 0: a step may take
    any time.
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
    """Attempts, sessions with gateways, and an engine thread whose end is the worker's. Made on the event loop."""

    name: ClassVar[str]
    """As in messages."""

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
        """How busy the worker is now."""

    @abstractmethod
    def _fail_all(self, error: TandemError) -> None:
        """Answers and ends every attempt."""

    @abstractmethod
    def _lose(self, attempt: A) -> None:
        """Ends an attempt whose session is closed, so that nothing can be answered."""

    @abstractmethod
    async def wait_idle(self) -> None:
        """Returns when every attempt has ended. Each has a deadline, so this does too."""

    @abstractmethod
    async def close(self) -> None:
        """Ends and answers what is left, frees everything and stops the engine."""

    def begin_drain(self) -> None:
        """Takes nothing new from here on; what was taken is finished."""
        self._is_draining = True
        self.sessions.load_changed()

    def end_drain(self) -> None:
        """Takes new attempts again."""
        self._is_draining = False
        self.sessions.load_changed()

    def check_engine(self, elapsed_s: float) -> None:
        """Fails the worker if a step does not end; called again and again, `elapsed_s` after the last time."""
        if self._step_watch.is_stuck(elapsed_s):
            self._thread.abandon("the engine is stuck")
            self._on_engine_failed(InvariantViolated("a step of the engine did not end in time"))
        loss = self.facts.loss()
        if loss is not None:
            self._thread.abandon("the engine has lost a process")  # its step may wait for that one for ever
            self._on_engine_failed(loss)

    async def _stop(self) -> None:
        """Closes what an idle worker is made of, in the order in which it may still be used."""
        await self._links.close()
        self.sessions.close()
        await asyncio.to_thread(self._thread.settle, timeout_s=ENGINE_STOP_TIMEOUT_S)
        await asyncio.to_thread(self._thread.stop, timeout_s=ENGINE_STOP_TIMEOUT_S)

    # --- attempts ---

    def _leaving(self) -> WorkerUnavailable:
        return WorkerUnavailable(f"the {self.name} is leaving")

    def _check(self, spec: AttemptSpec[Sampling], *, num_new_tokens: int) -> None:
        """Raises InvalidRequest for what the model cannot compute, with `num_new_tokens` after the prompt."""
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
        """What the engine computes for an attempt, and the salt of its pages."""
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
        """Part of the names of its pages: pages are shared by attempts of one model and tenant."""
        return cache_salt(model=self.facts.fingerprint, tenant=spec.cache_salt)

    async def find_prefix(self, token_ids: list[int], sharers: str) -> KeptPages:
        """Returns the pages of the first of these tokens that are cached here for these sharers."""
        prefixes = self.prefixes
        if prefixes is None:
            return KeptPages((), ())
        salt = cache_salt(model=self.facts.fingerprint, tenant=sharers)
        return await asyncio.wrap_future(self.command(lambda: prefixes.find_prefix(token_ids, salt=salt)))

    def prefix_giver(self) -> PrefixGiver:
        """Returns what serves other workers that ask for pages."""
        page_size = self.facts.limits.page_size
        return PrefixGiver(self._links, self.find_prefix, incarnation=self.incarnation, page_size=page_size)

    def emit(self, attempt: A, payload: Payload) -> None:
        """Sends an event about an attempt to its gateway."""
        self.sessions.emit(attempt.session, *attempt.spec.key, payload)

    def begin_task(self, run: Coroutine[Any, Any, R], *, name: str | None = None) -> "asyncio.Task[R]":
        """Runs a coroutine as a task of this worker."""
        task = asyncio.create_task(run, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def abort_transfer(self, transfer: SendTransfer, reason: TandemError, then: Callable[[], None]) -> None:
        """Ends a transfer in a task of its own, which nobody cancels; calls `then` when nothing reads its pages."""

        def ended(abort: "asyncio.Task[None]") -> None:
            error = abort.exception()
            if error is not None:  # its pages may still be read, and the reader is not known
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
        """Has a command of the engine run between two steps; one that fails ends the worker."""
        return self._thread.submit(infallible(command))

    def _note_step(self, report: StepReport, *, num_sequences: int, num_tokens: int) -> None:
        """Notes how the pool is used and which named pages came and went, and a step that computed anything."""
        self._pages = report.pages
        if self._on_pages_changed is not None and any(report.changes):
            self._on_pages_changed(*report.changes)
        if num_sequences:
            self._metrics.note_step(seconds=report.seconds, num_sequences=num_sequences, num_tokens=num_tokens)

    def _on_engine_failed(self, error: BaseException) -> None:
        """Answers every attempt with an error and lets the process end: its results can no longer be trusted."""
        if self.failed.done():
            return
        logger.critical("the engine failed", exc_info=error)
        self._is_draining = True
        self._fail_all(InternalError(f"the {self.name} failed"))
        self.failed.set_exception(error)
