"""The worker's side of sessions: one stream per gateway, commands in, one batch of events per engine step out.

Does not depend on the commands or the engine. All methods except `emit_many` belong to the event loop.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from protos import worker_pb2
from services.runtime import status
from services.runtime.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    StaleIncarnation,
    TandemError,
    WorkerUnavailable,
)
from services.structured.form_places import NUM_PLACES, KeptForms

LINK_NOISE, LINK_NOISE_BYTES = 0.1, 2**18
"""Tolerated errors of reported links: the relative error of an estimate, and the error of in-flight bytes."""
COUNTS_S = 1.0
"""Interval at which the worker's counts are checked, in seconds."""

logger = logging.getLogger(__name__)


class NewTokens(NamedTuple):
    """Tokens of a response without details.

    Nearly all events are of this kind, so they are not protobuf messages yet.
    """

    first_index: int
    token_ids: list[int]


class StepTokens(NamedTuple):
    """One token each of many attempts of a session, in lists of the same length. Most steps are of this kind.

    `handles` are the handles from the attempts' Admit. `indexes` are the positions of the tokens in their responses.
    """

    handles: list[int]
    indexes: list[int]
    token_ids: list[int]


Payload: TypeAlias = (
    NewTokens
    | StepTokens
    | worker_pb2.Admitted
    | worker_pb2.Refused
    | worker_pb2.OpeningLink
    | worker_pb2.PrefillStarted
    | worker_pb2.Tokens
    | worker_pb2.HandedOff
    | worker_pb2.DecodeStarted
    | worker_pb2.Finished
    | worker_pb2.Failed
    | worker_pb2.Paused
    | worker_pb2.Cancelled
    | worker_pb2.Embedded
)

_FIELD_OF_PAYLOAD: dict[type[Any], str] = {
    worker_pb2.Admitted: "admitted",
    worker_pb2.Refused: "refused",
    worker_pb2.OpeningLink: "opening_link",
    worker_pb2.PrefillStarted: "prefill_started",
    worker_pb2.Tokens: "tokens",
    worker_pb2.HandedOff: "handed_off",
    worker_pb2.DecodeStarted: "decode_started",
    worker_pb2.Finished: "finished",
    worker_pb2.Failed: "failed",
    worker_pb2.Cancelled: "cancelled",
    worker_pb2.Paused: "paused",
    worker_pb2.Embedded: "embedded",
}


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits on how much memory and time of a worker a gateway may use."""

    beat_s: float = 1.0
    """Maximum interval between messages, in seconds. After it, a message with only the load is sent."""
    hello_timeout_s: float = 5.0
    max_pending_events: int = 65_536
    """Maximum number of events that wait for a slow gateway. Beyond it, the session is closed. Each attempt's token
    counts as one event."""
    max_events_per_message: int = 4096
    max_sessions: int = 64
    load_s: float = 0.02
    """Minimum interval of load reports in messages that contain only tokens, in seconds."""
    links_s: float = 0.1
    """Minimum interval of link updates, in seconds."""


@dataclass(eq=False, slots=True)
class Session:
    """One open stream from one gateway process."""

    session_id: int
    gateway_incarnation: str
    is_closed: bool = False
    error: TandemError | None = None
    """Reason why it was closed. None if the gateway disconnected."""
    pending: list["Emission"] = field(default_factory=list)
    num_pending: int = 0
    """Events in `pending`. Each attempt's token counts as one."""
    load_sent_s: float = -math.inf
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    told_gpu: worker_pb2.GpuFacts | None = None
    """Last GPU readings sent to the gateway."""
    told_links: dict[str, worker_pb2.PeerLink] = field(default_factory=dict)
    """Last link reports sent to the gateway, by the worker at the other end."""
    links_sent_s: float = -math.inf
    told_counts: worker_pb2.WorkerCounts | None = None
    """Last counts sent to the gateway."""
    counts_at_s: float = -math.inf
    """Time of the last check of the counts."""
    forms: KeptForms = field(default_factory=KeptForms)
    is_told_places: bool = False
    """Whether the gateway has received the number of constraint slots."""
    left_out: str = ""
    """Why the gateway excludes this worker. Empty if it does not."""


class Emission(NamedTuple):
    """One event of one attempt of a session, or tokens of many attempts (without an attempt ID)."""

    session: Session
    request_id: str
    attempt: int
    payload: Payload

    @property
    def num_events(self) -> int:
        """Returns the number of attempts that it concerns."""
        return len(self.payload.handles) if type(self.payload) is StepTokens else 1


Commands: TypeAlias = worker_pb2.PrefillCommands | worker_pb2.DecodeCommands
CommandHandler: TypeAlias = Callable[[Session, Any], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Reports:
    """The worker's own state to report, in addition to the events of its attempts.

    `load` and `gpu` are called for nearly every message (see `SessionLimits.load_s`). GPU readings are sent if `gpu`
    returns a different object than before. A link is sent if it has changed by more than noise. `counts` is called once
    a second, and its result is sent if it has changed.
    """

    load: Callable[[], worker_pb2.WorkerLoad]
    gpu: Callable[[], worker_pb2.GpuFacts | None] | None = None
    links: Callable[[], Iterable[worker_pb2.PeerLink]] | None = None
    counts: Callable[[], worker_pb2.WorkerCounts] | None = None


class SessionServer:
    """Serves the `Session` RPC of a worker.

    `handlers` maps the name of each command in its oneof, except hello, to its handler. Commands of a session run one
    after the other, so a handler must not wait for an engine step. If a handler raises, the error is sent as Refused if
    the command contains a sequence, and logged otherwise. `on_session_closed` is called once per session, on the loop,
    when the session ends for any reason.
    """

    def __init__(
        self,
        *,
        incarnation: str,
        handlers: Mapping[str, CommandHandler],
        reports: Reports,
        on_session_closed: Callable[[Session], None],
        limits: SessionLimits | None = None,
    ) -> None:
        self._incarnation = incarnation
        self._handlers = dict(handlers)
        self._reports = reports
        self._on_session_closed = on_session_closed
        self._limits = limits or SessionLimits()
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._sessions: dict[str, Session] = {}
        self.first = asyncio.Event()
        """Set once a gateway has opened a session."""
        self._session_ids = itertools.count(1)

    @property
    def sessions(self) -> tuple[Session, ...]:
        """Returns the open sessions."""
        return tuple(self._sessions.values())

    async def serve(self, commands: AsyncIterator[Commands]) -> AsyncIterator[worker_pb2.StepEvents]:
        """Implements `Session`: `async for events in sessions.serve(request_iterator): yield events`.

        Raises StaleIncarnation if hello names another incarnation, InvalidRequest for a command out of order,
        Overloaded if the gateway does not read, and WorkerUnavailable if `close` ended the session.
        """
        one_by_one = _one_by_one(commands)
        session = await self._open(one_by_one)
        reader = asyncio.create_task(self._read(session, one_by_one), name=f"session-{session.session_id}")
        try:
            while not session.is_closed:
                session.wake.clear()
                yield self._take(session)
                if not session.pending:
                    await self._wait(session)
            while session.pending:
                yield self._take(session)
        finally:
            self._close(session, None)
            reader.cancel()
            await asyncio.wait((reader,))
        if session.error is not None:
            raise session.error

    def emit(self, session: Session, request_id: str, attempt: int, payload: Payload) -> None:
        """Sends one event. Events emitted before the next write are combined in one message."""
        self._enqueue((Emission(session, request_id, attempt, payload),))

    def emit_step(self, session: Session, tokens: StepTokens) -> None:
        """Sends tokens of many attempts as one event."""
        self._enqueue((Emission(session, "", 0, tokens),))

    def emit_many(self, emissions: Iterable[Emission]) -> None:
        """Sends events from any thread, for example all events of an engine step. Drops events of closed sessions."""
        if threading.get_ident() == self._loop_thread:
            self._enqueue(emissions)
            return
        # If the loop is closed, the process is exiting and no reader is left.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._enqueue, emissions)

    def load_changed(self) -> None:
        """Sends the load now, for example after a state change."""
        for session in self._sessions.values():
            session.load_sent_s = -math.inf
            session.wake.set()

    def close(self, error: TandemError | None = None) -> None:
        """Ends all sessions after the pending events.

        Gateways receive `error`, or a notice that the worker is leaving.
        """
        for session in self.sessions:
            self._close(session, error or WorkerUnavailable("the worker is leaving"), is_broken=False)

    async def _open(self, commands: AsyncIterator[Any]) -> Session:
        hello = await self._hello(commands)
        if hello.worker_incarnation not in ("", self._incarnation):
            raise StaleIncarnation("this worker has been restarted since")
        if not hello.gateway_incarnation:
            raise InvalidRequest("hello must name the gateway", field="gateway_incarnation")
        previous = self._sessions.get(hello.gateway_incarnation)
        if previous is not None:
            self._close(previous, StaleIncarnation("the gateway has opened another session"))
        if len(self._sessions) >= self._limits.max_sessions:
            raise Overloaded(f"this worker serves no more than {self._limits.max_sessions} gateways")
        session = Session(next(self._session_ids), hello.gateway_incarnation)
        self._sessions[session.gateway_incarnation] = session
        self.first.set()
        return session

    async def _hello(self, commands: AsyncIterator[Any]) -> worker_pb2.SessionHello:
        try:
            async with asyncio.timeout(self._limits.hello_timeout_s):
                first = await anext(commands)
        except TimeoutError:
            raise DeadlineExceeded("no hello came in time") from None
        except StopAsyncIteration:
            raise InvalidRequest("the session ended before its hello") from None
        if first.WhichOneof("command") != "hello":
            raise InvalidRequest("the first command must be hello", field="command")
        hello: worker_pb2.SessionHello = first.hello
        return hello

    async def _read(self, session: Session, commands: AsyncIterator[Any]) -> None:
        error: TandemError | None = None
        try:
            async for command in commands:
                await self._handle(session, command)
        except TandemError as broken:
            error = broken
        except Exception as broken:  # root of a loop: any failure of the reader ends the session
            if not session.is_closed:  # otherwise gRPC ended the stream, for example because the server stops
                logger.error("reading a session failed", exc_info=broken)
            error = WorkerUnavailable("the session broke")
        self._close(session, error)

    async def _handle(self, session: Session, command: Any) -> None:
        name = command.WhichOneof("command")
        if name == "left_out":
            session.left_out = command.left_out.reason
            found = {"gateway": session.gateway_incarnation[:8], "reason": session.left_out}
            logger.warning("a gateway gives this worker no work: it serves another model under that name", extra=found)
            return
        handler = self._handlers.get(name or "")
        if handler is None:
            raise InvalidRequest(f"a session does not take the command {name or 'without content'}", field="command")
        payload = getattr(command, name)
        try:
            if "sequence" in payload.DESCRIPTOR.fields_by_name:
                session.forms.restore(payload.sequence)
            await handler(session, payload)
        except Exception as error:  # a failed command must not end the session
            if not isinstance(error, TandemError) or not status.row_of(error).is_public:
                logger.error("a command failed", exc_info=error, extra={"command": name})
            if "sequence" in payload.DESCRIPTOR.fields_by_name:
                self.emit(session, payload.sequence.id.request_id, payload.sequence.id.attempt, refused(error))

    async def _wait(self, session: Session) -> None:
        # A bare timer instead of asyncio.timeout, because this runs once per engine step.
        beat = self._loop.call_later(self._limits.beat_s, session.wake.set)
        try:
            await session.wake.wait()
        finally:
            beat.cancel()

    def _enqueue(self, emissions: Iterable[Emission]) -> None:
        for emission in emissions:
            session = emission.session
            if session.is_closed:
                continue
            num_events = emission.num_events
            if session.num_pending + num_events > self._limits.max_pending_events:
                self._close(session, Overloaded("the session was cut off because it was not read"))
                continue
            session.num_pending += num_events
            session.pending.append(emission)
            session.wake.set()

    def _take(self, session: Session) -> worker_pb2.StepEvents:
        taken, session.pending = self._next_events(session)
        message = worker_pb2.StepEvents(worker_incarnation=self._incarnation)
        reports = self._reports
        now_s = self._loop.time()
        is_step = bool(taken) and all(type(emission.payload) is StepTokens for emission in taken)
        if not is_step or now_s - session.load_sent_s >= self._limits.load_s:
            session.load_sent_s = now_s
            message.load.CopyFrom(reports.load())
        if not session.is_told_places:
            session.is_told_places, message.form_places = True, NUM_PLACES
        gpu = None if reports.gpu is None else reports.gpu()
        if gpu is not None and gpu is not session.told_gpu:
            session.told_gpu = gpu
            message.gpu.CopyFrom(gpu)
        if reports.links is not None and now_s - session.links_sent_s >= self._limits.links_s:
            session.links_sent_s = now_s
            for link in reports.links():
                told = session.told_links.get(link.worker_id)
                if told is None or _is_other(told, link):
                    session.told_links[link.worker_id] = link
                    message.links.add().CopyFrom(link)
        if reports.counts is not None and now_s - session.counts_at_s >= COUNTS_S:
            session.counts_at_s = now_s
            counts = reports.counts()
            if counts != session.told_counts:
                session.told_counts = counts
                message.counts.CopyFrom(counts)
        for emission in taken:
            _add_event(message, emission)
        return message

    def _next_events(self, session: Session) -> tuple[list[Emission], list[Emission]]:
        """Returns the events for the next message and the remaining events."""
        pending, limit = session.pending, self._limits.max_events_per_message
        if session.num_pending <= limit:
            session.num_pending = 0
            return pending, []
        num_taken = num_events = 0
        while not num_taken or num_events + pending[num_taken].num_events <= limit:
            num_events += pending[num_taken].num_events
            num_taken += 1
        session.num_pending -= num_events
        return pending[:num_taken], pending[num_taken:]

    def _close(self, session: Session, error: TandemError | None, *, is_broken: bool = True) -> None:
        if session.is_closed:
            return
        session.is_closed = True
        session.error = error
        if session.left_out:
            logger.info("the gateway that gave this worker no work has gone", extra={"reason": session.left_out})
        if is_broken:
            session.pending.clear()
            session.num_pending = 0
        session.wake.set()
        if self._sessions.get(session.gateway_incarnation) is session:
            del self._sessions[session.gateway_incarnation]
        self._on_session_closed(session)


async def _one_by_one(messages: AsyncIterator[Commands]) -> AsyncIterator[Any]:
    async for message in messages:
        for command in message.commands:
            yield command


def refused(error: BaseException) -> worker_pb2.Refused:
    """Returns the event that rejects an attempt because of an error."""
    code, message = status.to_wire(error)
    delay_s = status.retry_after_s(error) or 0.0
    return worker_pb2.Refused(code=code, message=message, retry_after_ms=max(0, round(delay_s * 1000)))


def failed(error: BaseException) -> worker_pb2.Failed:
    """Returns the event that ends an accepted attempt because of an error."""
    code, message = status.to_wire(error)
    return worker_pb2.Failed(code=code, message=message)


def _is_other(told: worker_pb2.PeerLink, link: worker_pb2.PeerLink) -> bool:
    """Returns whether the link estimate has changed by more than noise since the last report."""
    if told.HasField("speed") != link.HasField("speed"):
        return True
    waited, waits = told.underway_bytes, link.underway_bytes
    if (waited == 0) != (waits == 0) or abs(waited - waits) > max(LINK_NOISE_BYTES, LINK_NOISE * waited):
        return True
    pairs = ((told.speed.latency_s, link.speed.latency_s), (told.speed.bytes_per_s, link.speed.bytes_per_s))
    return any(abs(before - now) > LINK_NOISE * before for before, now in pairs)


def _add_event(message: worker_pb2.StepEvents, emission: Emission) -> None:
    """Fills the event in place. Building it first and copying it takes two and a half times as long."""
    event = message.events.add()
    payload = emission.payload
    if type(payload) is StepTokens:
        step = event.step_tokens
        step.handles.extend(payload.handles)
        step.indexes.extend(payload.indexes)
        step.token_ids.extend(payload.token_ids)
        return
    event.id.request_id = emission.request_id
    event.id.attempt = emission.attempt
    if type(payload) is NewTokens:
        tokens = event.tokens
        tokens.first_index = payload.first_index
        tokens.token_ids.extend(payload.token_ids)
        return
    place: Any = getattr(event, _FIELD_OF_PAYLOAD[type(payload)])
    place.SetInParent()
    place.CopyFrom(payload)
