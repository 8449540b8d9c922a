"""What both workers do between their sessions and their engine thread, whatever they compute.

Knows no role: a worker says what an attempt of its own is and how one ends.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, Generic, Protocol, TypeVar

from kv_transfer.sending import SendLinks
from protos import worker_pb2
from services.engine.cache.pages import PageCounts
from services.engine.engine import EngineParts, check_fits, check_token_ids
from services.engine.steps.sequence import Sampling
from services.engine.thread import EngineThread, StepWatch
from services.runtime.clock import Clock
from services.runtime.errors import InternalError, InvalidRequest, InvariantViolated, TandemError
from services.runtime.page_keys import PageKey
from services.structured.compiler import GrammarCompiler
from services.structured.grammar import Grammars
from worker.attempts import AttemptSpec, AttemptTable
from worker.host import on_this_loop
from worker.metrics import Load, WorkerMetrics
from worker.sessions import CommandHandler, Payload, Session, SessionServer

ENGINE_STOP_TIMEOUT_S = 10.0

PagesChanged = Callable[[tuple[PageKey, ...], tuple[PageKey, ...]], None]
"""Called on the event loop with the keys of pages that have come to be found here, and of those that no longer are."""

logger = logging.getLogger(__name__)


class OfSession(Protocol):
    """What is needed of an attempt."""

    spec: AttemptSpec[Sampling]
    session: Session


A = TypeVar("A", bound=OfSession)


class Loop(Protocol):
    """What runs on the engine thread."""

    def step(self) -> bool:
        """Computes; whether there is more."""
        ...

    def check_books(self) -> None:
        """Raises InvariantViolated where pages are held by nobody."""
        ...


class EngineWorker(ABC, Generic[A]):
    """Attempts, sessions with gateways, and an engine thread whose end is the worker's. Made on the event loop.

    `grammars` are for answers that must have a form, which are refused without.
    """

    name: ClassVar[str]
    """As in messages."""
    sessions: SessionServer
    _engine: EngineThread
    _step_watch: StepWatch

    def __init__(
        self,
        *,
        parts: EngineParts,
        links: SendLinks,
        metrics: WorkerMetrics,
        grammars: Grammars | None,
        on_pages_changed: PagesChanged | None,
        clock: Clock,
    ) -> None:
        self._parts = parts
        self._links = links
        self._metrics = metrics
        self._grammars = None if grammars is None else GrammarCompiler(grammars)
        self._on_pages_changed = on_pages_changed
        self._clock = clock
        self._page_size = parts.pool.layout.page_size
        self._attempts: AttemptTable[A] = AttemptTable()
        self._pages = parts.allocator.counts()
        self._is_draining = False
        self._event_loop = asyncio.get_running_loop()
        self.drain_requested = asyncio.Event()
        self.failed: asyncio.Future[None] = self._event_loop.create_future()

    def _open_sessions(
        self,
        incarnation: str,
        handlers: Mapping[str, CommandHandler],
        *,
        gpu: Callable[[], worker_pb2.GpuFacts | None] | None,
        links: Callable[[], Iterable[worker_pb2.PeerLink]] | None = None,
    ) -> None:
        self.sessions = SessionServer(
            incarnation=incarnation,
            handlers={**handlers, "drain": self._on_drain},
            load=lambda: self.load().to_message(is_draining=self._is_draining),
            on_session_closed=self._on_session_closed,
            gpu=gpu,
            links=links,
            counts=self._metrics.counts,
        )

    def _start_engine(self, loop: Loop, *, step_timeout_s: float) -> None:
        self._engine = EngineThread(loop.step, on_fatal=on_this_loop(self._on_engine_failed), on_idle=loop.check_books)
        self._step_watch = StepWatch(self._engine, timeout_s=step_timeout_s)
        self._engine.start()

    @abstractmethod
    def load(self) -> Load:
        """How busy the worker is now."""

    @abstractmethod
    def _fail_all(self, error: TandemError) -> None:
        """Answers and ends every attempt."""

    @abstractmethod
    def _lose(self, attempt: A) -> None:
        """Ends an attempt of a session that is closed: there is nobody to answer to."""

    def begin_drain(self) -> None:
        """Takes nothing new from here on; what was taken is finished."""
        self._is_draining = True
        self.sessions.load_changed()

    def check_engine(self, elapsed_s: float) -> None:
        """Fails the worker if a step does not end; called again and again, `elapsed_s` after the last time."""
        if self._step_watch.is_stuck(elapsed_s):
            self._engine.abandon("the engine is stuck")
            self._on_engine_failed(InvariantViolated("a step of the engine did not end in time"))
        loss = self._parts.loss
        if loss is not None:
            self._on_engine_failed(loss)

    async def _stop(self) -> None:
        """Closes what an idle worker is made of, in the order in which it may still be used."""
        await self._links.close()
        self.sessions.close()
        await asyncio.to_thread(self._engine.settle, timeout_s=ENGINE_STOP_TIMEOUT_S)
        await asyncio.to_thread(self._engine.stop, timeout_s=ENGINE_STOP_TIMEOUT_S)

    def _check(self, spec: AttemptSpec[Sampling], *, num_new_tokens: int) -> None:
        """Raises InvalidRequest for what the model cannot compute, with `num_new_tokens` after the prompt."""
        config = self._parts.model_config
        check_fits(config, self._parts.pool, len(spec.prompt_token_ids), num_new_tokens)
        check_token_ids(config, spec.prompt_token_ids)
        check_token_ids(config, spec.emitted_token_ids, field="emitted_token_ids")
        check_token_ids(config, spec.sampling.logit_bias, field="logit_bias")
        if spec.form is not None and self._grammars is None:
            raise InvalidRequest("this worker has no grammars", field="json_schema")

    async def _on_drain(self, session: Session, message: worker_pb2.DrainWorker) -> None:
        self.drain_requested.set()

    def _on_session_closed(self, session: Session) -> None:
        for attempt in self._attempts:
            if attempt.session is session:
                self._lose(attempt)

    def _emit(self, attempt: A, payload: Payload) -> None:
        self.sessions.emit(attempt.session, *attempt.spec.key, payload)

    def _note_pages(self, pages: PageCounts, changes: tuple[tuple[PageKey, ...], tuple[PageKey, ...]]) -> None:
        """After each step: how the pool is used, and which named pages came and went."""
        self._pages = pages
        if self._on_pages_changed is not None and any(changes):
            self._on_pages_changed(*changes)

    def _on_engine_failed(self, error: BaseException) -> None:
        """Answers every attempt with an error and lets the process end: its results can no longer be trusted."""
        if self.failed.done():
            return
        logger.critical("the engine failed", exc_info=error)
        self._is_draining = True
        self._fail_all(InternalError(f"the {self.name} failed"))
        self.failed.set_exception(error)
