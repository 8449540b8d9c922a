"""One long-lived bidirectional stream to one incarnation of one worker, shared by all requests that run there.

Knows no request's life: each attempt opens a sink, gets plain events for exactly that attempt, and closes it; an event
without a sink is dropped and counted.
"""

import asyncio
import contextlib
import itertools
import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, cast

import grpc
import msgspec

from gateway.topology.books import Books
from gateway.topology.counts import Counts, read_counts
from gateway.topology.events import AttemptKey, Emitted, Event, Failed, Heard, PullOrder, SequenceOrder
from gateway.topology.pacing import Lateness, Pace
from gateway.topology.reports import WorkerLoad, read_gpu, read_links, read_load
from gateway.topology.wire import EVENT_READERS, attempt_id, sequence_spec, write_vector_order
from protos import worker_pb2, worker_pb2_grpc
from services.runtime import reach, rpc
from services.runtime.clock import SYSTEM_CLOCK
from services.runtime.errors import Overloaded, TandemError, WorkerLost, WorkerUnavailable
from services.runtime.gpu_facts import GpuFacts
from services.runtime.membership import Proof
from services.scheduling.links import NO_LINKS, PeerLinks
from services.structured.form_places import SentForms

CONNECT_TIMEOUT_S = 3.0
SILENCE_LIMIT_S = 2.7
"""Workers speak at least once a second; one that was silent for this long counts as dead, unless it still renews its
lease. With the time between two looks at it, that is within 3 s of its last word."""
SLOW_LIMIT_S = 6.0
"""The limit for a worker that renews its lease: it lives, but has too little time on a busy machine, or the network to
it is stuck. The answers that it owes wait as long."""
MAX_OUTGOING_COMMANDS = 16_384
MAX_COMMANDS_BYTES = 2**20
"""Commands that wait together go down in one message, until it is this large."""
GATHER_S = 0.001
"""Commands wait this long after a message for more of them: a message costs this process more than ten commands."""

FEW_RUNNING = 8
"""Up to this many running answers, it is worth asking how long each may still take."""

_HANDLES = itertools.count(1)

logger = logging.getLogger(__name__)


class EventSink(Protocol):
    """Where the events of one attempt go."""

    def deliver(self, session: "WorkerSession", event: Event) -> None:
        """Takes one event; must not block or raise."""
        ...

    def num_left(self) -> int:
        """Returns the number of tokens that the attempt's answer may still have."""
        ...


class Peer(msgspec.Struct, frozen=True):
    """The process that a session is for."""

    worker_id: str
    incarnation: str
    address: str


class Unreachable(WorkerUnavailable):
    """A worker cannot be reached; `obstacle` says why."""

    def __init__(self, peer: Peer, obstacle: reach.Obstacle) -> None:
        super().__init__(f"{peer.worker_id} cannot be reached: {obstacle.cause}")
        self.obstacle = obstacle


class WorkerSession(ABC):
    """A stream to one worker process; it breaks once and is then thrown away.

    `on_change` is called when it comes up, when it breaks and after each report of load. `pace` says how long tokens of
    an answer wait for one another.
    """

    def __init__(
        self, peer: Peer, *, gateway_incarnation: str, on_change: Callable[["WorkerSession"], None], pace: Pace
    ) -> None:
        self.peer = peer
        self.load = WorkerLoad()
        self.gpu: GpuFacts | None = None
        """What the worker's GPU reports; a new object with each report that has it. None: nothing was reported."""
        self.links: PeerLinks = NO_LINKS
        """The measured links to other workers; a new object with each report of them."""
        self.counts: Counts | None = None
        """What the worker has counted since it started; None: it has not reported that."""
        self.books = Books()
        self.is_up = self.has_ended = False
        self.num_dropped_events = 0
        self._hello = worker_pb2.SessionHello(
            gateway_incarnation=gateway_incarnation, worker_incarnation=peer.incarnation
        )
        self._on_change = on_change
        self._sinks: dict[tuple[str, int], EventSink] = {}
        self._handles: dict[AttemptKey, int] = {}
        """The handles of open attempts whose tokens may come together with those of others."""
        self._sinks_by_handle: dict[int, EventSink] = {}
        self._pace = pace
        self._lateness = Lateness()
        self._forms = SentForms()
        self._held: dict[int, Emitted] = {}
        """Tokens that wait for more of the same answer, by handle."""
        self._outgoing: deque[Any] = deque()
        self._wake_writer: asyncio.Future[None] | None = None
        self._is_told_left_out = False
        self._call: Any = None
        self._heard_at_s = 0.0
        self._worked_at_s = 0.0

    @property
    def num_open_attempts(self) -> int:
        """Attempts of this gateway that run there."""
        return len(self._sinks)

    async def run(self) -> None:
        """Connects and serves until the stream breaks; then every open attempt has got its Failed.

        Raises WorkerUnavailable with the reason; never returns normally.
        """
        error: TandemError = WorkerUnavailable(f"the session to {self.peer.worker_id} was closed")
        try:
            async with rpc.make_channel(self.peer.address) as channel:
                await self._serve(channel)
        except grpc.aio.AioRpcError as rpc_error:
            error = rpc.refusal(rpc_error) or Unreachable(self.peer, rpc.obstacle_of(rpc_error))
        except TimeoutError:
            error = Unreachable(self.peer, reach.SILENT)
        except WorkerUnavailable as own_error:
            error = own_error
        except asyncio.CancelledError:
            # gRPC tells the reader of a call that `check_silence` has ended as if this very task were cancelled.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            error = WorkerUnavailable(f"{self.peer.worker_id} was silent for too long")
        finally:
            self._break(error)
        raise error

    def steps_left(self) -> float:
        """Returns after how many steps all that runs there has ended by its limits.

        Infinity: unknown, since some are other gateways', or so many run that new ones replace those that end.
        """
        if not 0 < self.load.running <= len(self._sinks) <= FEW_RUNNING:
            return math.inf
        return max(sink.num_left() for sink in self._sinks.values())

    def open(self, key: AttemptKey, sink: EventSink) -> None:
        """Sends the attempt's events to `sink` from now on. Raises WorkerUnavailable if the stream is broken."""
        if not self.is_up:
            raise WorkerUnavailable(f"{self.peer.worker_id} is not connected")
        self._sinks[key] = sink

    def close(self, key: AttemptKey) -> None:
        """Drops whatever still comes for the attempt."""
        handle = self._handles.pop(key, 0)
        self._sinks.pop(key, None)
        self._sinks_by_handle.pop(handle, None)
        self._held.pop(handle, None)

    def cancel(self, key: AttemptKey, heard: Heard | None = None) -> None:
        """Closes the attempt and tells the worker to free what it holds. A broken session has freed it already.

        `heard`: what is known of the attempt here, if it has spans.
        """
        self.close(key)
        if self.is_up:
            cancel = worker_pb2.Cancel(id=attempt_id(key))
            if heard is not None:
                cancel.sent_unix_ns = SYSTEM_CLOCK.unix_ns()
                cancel.has_heard_prefill, cancel.has_heard_decode = heard
            self._send(self._command(cancel=cancel), is_bounded=False)

    def cancel_and_ask(self, key: AttemptKey) -> None:
        """Cancels at the worker only: the attempt stays open for Cancelled, which follows whatever the worker knows.

        Raises WorkerUnavailable if the stream is broken.
        """
        cancel = worker_pb2.Cancel(id=attempt_id(key), wants_word=True)
        self._send(self._command(cancel=cancel), is_bounded=False)

    def drain(self) -> None:
        """Tells the worker to take nothing new, finish and exit. Raises WorkerUnavailable if the stream is broken."""
        self._send(self._command(drain=worker_pb2.DrainWorker()))

    def check_silence(self, now_s: float, *, is_lease_renewed: bool = False) -> None:
        """Breaks the session if the worker has been silent for too long; `now_s` is the event loop's time."""
        limit_s = SLOW_LIMIT_S if is_lease_renewed else SILENCE_LIMIT_S
        if self.is_up and now_s - self._heard_at_s > limit_s:
            logger.warning("worker is silent", extra={"worker": self.peer.worker_id})
            self._break(WorkerUnavailable(f"{self.peer.worker_id} was silent for {limit_s:g} s"))
            self._call.cancel()

    def tell_left_out(self, reason: str) -> None:
        """Has the worker write down, once, why this gateway gives it no work."""
        if self.is_up and not self._is_told_left_out:
            self._is_told_left_out = True
            self._send(self._command(left_out=worker_pb2.LeftOut(reason=reason)), is_bounded=False)

    def forgive_silence(self, slept_s: float) -> None:
        """Takes a time off the worker's silence, in which this process did not listen."""
        self._heard_at_s += slept_s

    def has_worked_since(self, time_s: float) -> bool:
        """Whether the worker had something to do after this time of the event loop, as far as it has said."""
        return self._worked_at_s > time_s

    def has_spoken_since(self, time_s: float) -> bool:
        """Whether a message came after this time of the event loop."""
        return self._heard_at_s > time_s

    _method: str
    """The full name of the stream's method."""

    @abstractmethod
    def _open_stream(self, channel: grpc.aio.Channel, proof: Proof | None) -> Any: ...

    @abstractmethod
    def _command(self, **command: Any) -> Any: ...

    @abstractmethod
    def _commands(self, commands: list[Any]) -> Any: ...

    async def _serve(self, channel: grpc.aio.Channel) -> None:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            proof = await rpc.prove(channel, self._method, incarnation=self.peer.incarnation)
        self._call = call = self._open_stream(channel, proof)
        writer: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await rpc.check_answer(proof, call)
                await rpc.write_if_open(call, self._commands([self._command(hello=self._hello)]))
                first = await call.read()
            self._take(first)
            self._come_up()
            writer = asyncio.create_task(self._write_commands(call))
            while True:
                self._take(await call.read())
        finally:
            call.cancel()
            if writer is not None:
                writer.cancel()
                with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await writer

    def _come_up(self) -> None:
        self.is_up = True
        self._on_change(self)

    def _take(self, message: Any) -> None:
        """Hands a message's events to their sinks. Raises WorkerUnavailable at the end of the stream."""
        if message is grpc.aio.EOF:
            raise WorkerUnavailable(f"{self.peer.worker_id} ended the session")
        if message.worker_incarnation != self.peer.incarnation:
            raise WorkerUnavailable(f"{self.peer.worker_id} was restarted")
        self._heard_at_s = asyncio.get_running_loop().time()
        for event in message.events:
            kind = event.WhichOneof("event")
            if kind == "step_tokens":
                self._take_step(event.step_tokens)
                continue
            named = event.id
            key = named.request_id, named.attempt
            sink = self._sinks.get(key)
            if sink is None:
                self.num_dropped_events += 1
                continue
            if self._held:
                self._release(self._handles.get(AttemptKey(*key), 0))
            if kind is not None:
                sink.deliver(self, EVENT_READERS[kind](getattr(event, kind)))
        if message.form_places:
            self._forms.num_places = message.form_places
        if message.HasField("gpu"):
            self.gpu = read_gpu(message.gpu)
        if message.links:
            self.links = read_links(self.links, message.links)
        if message.HasField("counts"):
            self.counts = read_counts(message.counts)
        if message.HasField("load"):
            self.load = read_load(message.load)
            if self.load.clock_ahead_s is not None:
                self._pace.note_late(self._lateness.of(self.load.clock_ahead_s, self._heard_at_s))
            if self.load.running or self.load.waiting:
                self._worked_at_s = self._heard_at_s
            if self.is_up:
                self._on_change(self)

    def _take_step(self, step: worker_pb2.StepTokens) -> None:
        """Hands each attempt its token. Raises WorkerUnavailable if tokens cannot be matched with attempts."""
        handles, indexes, token_ids = list(step.handles), list(step.indexes), list(step.token_ids)
        if not len(handles) == len(indexes) == len(token_ids):
            raise WorkerUnavailable(f"{self.peer.worker_id} sent tokens that cannot be told apart")
        is_held = self._pace.hold_s > 0 or bool(self._held)
        for handle, index, token_id in zip(handles, indexes, token_ids, strict=True):
            sink = self._sinks_by_handle.get(handle)
            if sink is None:
                self.num_dropped_events += 1
            elif is_held:
                self._hold(handle, index, token_id)
            else:
                sink.deliver(self, Emitted(index, [token_id], None))

    def _hold(self, handle: int, index: int, token_id: int) -> None:
        """Keeps a token until the first held one has waited long enough, or another event of its answer comes."""
        held = self._held.get(handle)
        if held is not None and held.first_index + len(held.token_ids) == index:
            held.token_ids.append(token_id)
            return
        if held is not None:
            self._release(handle)
        if not self._held:
            asyncio.get_running_loop().call_later(self._pace.hold_s, self._release_all)
        self._held[handle] = Emitted(index, [token_id], None)

    def _release(self, handle: int) -> None:
        tokens, sink = self._held.pop(handle, None), self._sinks_by_handle.get(handle)
        if tokens is not None and sink is not None:
            sink.deliver(self, tokens)

    def _release_all(self) -> None:
        for handle in list(self._held):
            self._release(handle)

    def _send(self, command: Any, *, is_bounded: bool = True) -> None:
        """Sends a command. `is_bounded` is false for one that ends what was sent within the bound: it must not fail."""
        if not self.is_up:
            raise WorkerUnavailable(f"{self.peer.worker_id} is not connected")
        if is_bounded and len(self._outgoing) >= MAX_OUTGOING_COMMANDS:
            raise Overloaded(f"{self.peer.worker_id} does not take commands fast enough")
        self._outgoing.append(command)
        if self._wake_writer is not None and not self._wake_writer.done():
            self._wake_writer.set_result(None)

    def _send_order(self, order: SequenceOrder, sequence: worker_pb2.SequenceSpec, command: Any) -> None:
        """Sends a command with an order in its `sequence`."""
        form = order.sampling.form
        sequence.CopyFrom(sequence_spec(order))
        self._forms.write(form, sequence)
        self._send(command)
        self._forms.note_sent(form, sequence)

    def _tell_clock(self, order: SequenceOrder, clock: worker_pb2.SpanClock) -> None:
        """Fills in what the worker needs to tell the times of an attempt's spans by the clock here."""
        ahead_s = self._lateness.most_ahead_s
        if order.trace is not None and order.trace.is_sampled and math.isfinite(ahead_s):
            clock.sent_unix_ns, clock.ahead_ns = SYSTEM_CLOCK.unix_ns(), round(ahead_s * 1e9)

    async def _write_commands(self, call: Any) -> None:
        loop, written_s = asyncio.get_running_loop(), -math.inf
        try:
            while True:
                if self._outgoing and SYSTEM_CLOCK.monotonic() - written_s < GATHER_S:
                    await asyncio.sleep(GATHER_S)
                if self._outgoing:
                    written_s = SYSTEM_CLOCK.monotonic()
                    await call.write(self._next_message())
                else:
                    self._wake_writer = loop.create_future()
                    await self._wake_writer
        except Exception:  # a session without its writer must not stay up
            call.cancel()
            raise

    def _next_message(self) -> Any:
        commands = [self._outgoing.popleft()]
        size_bytes = commands[0].ByteSize()
        while self._outgoing and size_bytes < MAX_COMMANDS_BYTES:
            commands.append(self._outgoing.popleft())
            size_bytes += commands[-1].ByteSize()
        return self._commands(commands)

    def _break(self, error: TandemError) -> None:
        self.has_ended = True
        self._release_all()
        was_up, self.is_up = self.is_up, False
        sinks, self._sinks = self._sinks, {}
        self._handles.clear()
        self._sinks_by_handle.clear()
        self._outgoing.clear()
        # A worker that has said that it leaves ended its session on purpose, and with it what it had not finished.
        told = error if self.load.is_draining else WorkerLost(error.message)
        for sink in sinks.values():
            sink.deliver(self, Failed(told))
        if was_up:
            self._on_change(self)


class DecodeSession(WorkerSession):
    """The stream to a decode worker."""

    _method = "/tandem.v1.DecodeWorker/Session"

    def admit(self, order: SequenceOrder, *, is_local_prefill: bool, is_from_decode: bool = False) -> None:
        """Asks for capacity; Admitted or Declined follows. `is_from_decode`: another decode worker has the pages.

        The attempt is open.
        """
        handle, command = next(_HANDLES), worker_pb2.DecodeCommand()
        admit = command.admit
        admit.local_prefill, admit.from_decode, admit.handle = is_local_prefill, is_from_decode, handle
        self._tell_clock(order, admit.span_clock)
        self._send_order(order, admit.sequence, command)
        self._handles[order.key], self._sinks_by_handle[handle] = handle, self._sinks[order.key]

    def pause(self, key: AttemptKey) -> None:
        """Takes the sequence out of the batch; Paused follows its last tokens, unless it ends with them."""
        self._send(worker_pb2.DecodeCommand(pause=worker_pb2.Pause(id=attempt_id(key))))

    def unpause(self, key: AttemptKey) -> None:
        """Puts the sequence back into the batch."""
        self._send(worker_pb2.DecodeCommand(unpause=worker_pb2.Unpause(id=attempt_id(key))), is_bounded=False)

    def hand_over(self, key: AttemptKey, *, next_attempt: int, decode: Peer) -> None:
        """Has a paused sequence's pages sent to `decode`, which has admitted `next_attempt`. HandedOff or Failed."""
        hand_over = worker_pb2.HandOver(
            id=attempt_id(key),
            next_attempt=next_attempt,
            decode_address=decode.address,
            decode_incarnation=decode.incarnation,
        )
        self._send(worker_pb2.DecodeCommand(hand_over=hand_over))

    def _open_stream(self, channel: grpc.aio.Channel, proof: Proof | None) -> Any:
        return cast(Any, worker_pb2_grpc.DecodeWorkerStub(channel)).Session(metadata=rpc.metadata_of(proof))

    def _command(self, **command: Any) -> worker_pb2.DecodeCommand:
        return worker_pb2.DecodeCommand(**command)

    def _commands(self, commands: list[worker_pb2.DecodeCommand]) -> worker_pb2.DecodeCommands:
        return worker_pb2.DecodeCommands(commands=commands)


class PrefillSession(WorkerSession):
    """The stream to a prefill worker."""

    _method = "/tandem.v1.PrefillWorker/Session"

    def prefill(self, order: SequenceOrder, *, decode: Peer, pull: PullOrder | None = None) -> None:
        """Has the prompt computed and its pages sent to `decode`, which has admitted the attempt.

        With `pull`, its beginning is fetched before, as far as that succeeds.
        """
        command = worker_pb2.PrefillCommand()
        prefill = command.prefill
        prefill.decode_address, prefill.decode_incarnation = decode.address, decode.incarnation
        if pull is not None:
            prefill.pull.address, prefill.pull.incarnation = pull.address, pull.incarnation
            prefill.pull.own_address, prefill.pull.num_tokens = self.peer.address, pull.num_tokens
            prefill.pull.limit_ms = max(1, round(pull.limit_s * 1000))
        self._tell_clock(order, prefill.span_clock)
        self._send_order(order, prefill.sequence, command)

    def embed(self, order: SequenceOrder) -> None:
        """Has the prompt computed; Embedded follows. The attempt is open."""
        command = worker_pb2.PrefillCommand()
        write_vector_order(order, command.embed)
        self._tell_clock(order, command.embed.span_clock)
        self._send_order(order, command.embed.sequence, command)

    def _open_stream(self, channel: grpc.aio.Channel, proof: Proof | None) -> Any:
        return cast(Any, worker_pb2_grpc.PrefillWorkerStub(channel)).Session(metadata=rpc.metadata_of(proof))

    def _command(self, **command: Any) -> worker_pb2.PrefillCommand:
        return worker_pb2.PrefillCommand(**command)

    def _commands(self, commands: list[worker_pb2.PrefillCommand]) -> worker_pb2.PrefillCommands:
        return worker_pb2.PrefillCommands(commands=commands)
