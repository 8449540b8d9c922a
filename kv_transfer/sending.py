"""The sending worker's side: `SendLinks` keeps one Link per receiver, `SendTransfer` is one handoff on it.

Carries out what `protocol.sender` decides. Belongs to one event loop; page memory is read by the Link's own thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import grpc

from kv_transfer import measure as probing
from kv_transfer.device_pages import DevicePages, warm_up
from kv_transfer.doubting import LinkDoubts
from kv_transfer.page_bytes import PageGenerations, PageReader, wire_layout
from kv_transfer.protocol.actions import (
    Action,
    FailLink,
    PostChunk,
    ReportCommitted,
    ReportFailed,
    ReportGranted,
    ReportReleased,
    Send,
    SkipChunks,
)
from kv_transfer.protocol.counters import Counters, Reason
from kv_transfer.protocol.failures import again, error_from
from kv_transfer.protocol.messages import Abort, Hello, HelloAck, Message, TransferId, WireLayout, pages_per_frame
from kv_transfer.protocol.receiver import layouts_fit
from kv_transfer.protocol.sender import SenderLink
from kv_transfer.protocol.timing import Timeouts
from kv_transfer.send_thread import ChunkPoster
from kv_transfer.transports.base import AnySendChannel, ChannelBroken, DeviceSendChannel, RingSpec, Transport
from kv_transfer.transports.registry import AUTO, Reach, Transports, in_order
from kv_transfer.transports.tls import ChannelTls
from kv_transfer.wire import (
    LinkIdentity,
    MalformedMessage,
    Outbox,
    channel_key,
    from_wire,
    note_arithmetic,
    tick_until_cancelled,
    to_wire,
)
from protos import link_pb2, link_pb2_grpc, worker_pb2
from services.engine.cache.pages import PagePool
from services.runtime.clock import SYSTEM_CLOCK, Clock, Deadline
from services.runtime.errors import (
    DeadlineExceeded,
    LayoutMismatch,
    Overloaded,
    RequestCancelled,
    TandemError,
    TransferFailed,
    WorkerUnavailable,
)
from services.runtime.rpc import check_answer, error_from_rpc, make_channel, metadata_of, prove, refusal
from services.scheduling.links import Carried, LinkMeter, LinkMeters

OPENING_SHARE = 0.8
"""Of the time for a Link, that for opening one channel: there must be some left for the next one."""

CONNECT, PROBE = "/tandem.v1.Link/Connect", "/tandem.v1.Link/Probe"
"""Methods as proofs name them."""

_Call = grpc.aio.StreamStreamCall[link_pb2.LinkMessage, link_pb2.LinkMessage]
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HandoffStats:
    """What a handoff moved, and the time from the seal to the commit, which computing did not hide.

    `carried` is the part of its bytes, and of others' before them, that the link was never idle with, and the time of
    these. None: nothing can be said of the link.
    """

    num_pages: int
    num_bytes: int
    exposed_s: float
    transport: str
    carried: Carried | None = None


class SendTransfer:
    """One handoff, from the question for its pages to its end. Nothing is sent before they are `granted`.

    Pages that were sent must stay allocated and unchanged until `released`. If one is given to another use before it
    was read, the transfer fails.
    """

    def __init__(self, link: _SendLink, transfer_id: TransferId) -> None:
        loop = asyncio.get_running_loop()
        self.id = transfer_id
        self.num_cached_tokens = 0
        self.transport = link.transport
        self.released = asyncio.Event()
        """Set when nothing reads the pages any more, whatever became of the transfer."""
        self._link = link
        self._asked: asyncio.Future[None] = loop.create_future()
        self._granted: asyncio.Future[int | TandemError] = loop.create_future()
        self._outcome: asyncio.Future[ReportCommitted | TandemError] = loop.create_future()
        self._carried: Carried | None = None

    @property
    def error(self) -> TandemError | None:
        """Why the transfer failed, or None while it has not."""
        if not self._outcome.done():
            return None
        outcome = self._outcome.result()
        return outcome if isinstance(outcome, TandemError) else None

    async def granted(self) -> None:
        """Wait for the receiver's pages.

        Raises NoFreePages or the receiver's other refusal, WorkerUnavailable, TransferFailed, DeadlineExceeded.
        """
        outcome = await asyncio.shield(self._granted)
        if isinstance(outcome, TandemError):
            raise again(outcome)
        self.num_cached_tokens = outcome

    def send(self, first_page: int, page_ids: Sequence[int]) -> None:
        """Queue pages: `page_ids[0]` is page `first_page` of the sender's page table. Returns at once.

        Pages go in order and without gaps; the last may be partly filled. Those that the receiver has cached are left
        out. Raises what ended the transfer if it has ended, ValueError for pages out of order or beyond the tokens
        that were reserved, and InvariantViolated for pages that do not exist.
        """
        self._raise_if_ended()
        self._link.send(self.id, first_page, page_ids)

    async def seal(self, *, num_tokens: int, first_token_id: int, sampling_position: int) -> HandoffStats:
        """Say that all was sent and wait until the receiver owns it.

        Raises what ended the transfer: TransferFailed, WorkerUnavailable, DeadlineExceeded, or the receiver's refusal.
        When it returns or raises (other than by cancellation), nothing reads the pages any more.
        """
        self._raise_if_ended()
        started = self._link.now()
        self._link.seal(self.id, num_tokens, first_token_id, sampling_position)
        try:
            outcome = await asyncio.shield(self._outcome)
            await self.released.wait()
        except asyncio.CancelledError:
            self._link.abort(self.id, RequestCancelled("the handoff was cancelled"))
            raise
        if isinstance(outcome, TandemError):
            raise again(outcome)
        exposed_s = self._link.now() - started
        return HandoffStats(outcome.num_pages, outcome.num_bytes, exposed_s, self.transport, self._carried)

    async def abort(self, error: TandemError) -> None:
        """Give the transfer up, if it has not ended; return when nothing reads its pages any more. Idempotent."""
        self.give_up(error)
        await self.released.wait()

    def give_up(self, error: TandemError) -> None:
        """Give the transfer up, if it has not ended; its pages may still be read. Idempotent."""
        self._link.abort(self.id, error)

    def _raise_if_ended(self) -> None:
        if self.error is not None:
            raise again(self.error)
        if self._outcome.done():
            raise TransferFailed("the transfer was committed already")

    # What follows is called by the Link.

    async def _wait_asked(self) -> None:
        await asyncio.shield(self._asked)

    def _on_asked(self) -> None:
        if not self._asked.done():
            self._asked.set_result(None)

    def _on_granted(self, num_cached_tokens: int) -> None:
        if not self._granted.done():
            self._granted.set_result(num_cached_tokens)

    def _on_ended(self, outcome: ReportCommitted | TandemError, carried: Carried | None = None) -> None:
        self._carried = carried
        if not self._outcome.done():
            self._outcome.set_result(outcome)
        if not self._granted.done() and isinstance(outcome, TandemError):
            self._granted.set_result(outcome)
        self._on_asked()


class SendLinks:
    """The Links of a worker that sends, made on first use and again after they broke.

    `generations` is asked whether pages are still in the use they were sent in; `transports` are the channels to
    offer, best first. `auto` stands for all that these pages can use. The first Link to a receiver takes the first of
    them that opens, so that no request waits for a measurement; they are measured a little later, and where that finds
    a better one, a Link over it takes the place of the first. `meters` knows how fast pages get to each receiver: it
    learns from every handoff and measurement, and of receivers that nothing is sent to from probes of little traffic.
    `on_channels` is told, on the event loop, the channel to each receiver (by its worker id) whenever that changes.
    With `tls` pages leave the host encrypted or not at all.
    """

    def __init__(
        self,
        *,
        identity: LinkIdentity,
        pool: PagePool,
        generations: PageGenerations,
        transports: Sequence[str] = ("auto",),
        clock: Clock = SYSTEM_CLOCK,
        timeouts: Timeouts | None = None,
        counters: Counters | None = None,
        tls: ChannelTls | None = None,
        on_channels: Callable[[Mapping[str, str]], None] | None = None,
    ) -> None:
        self.counters = counters or Counters()
        self.meters = LinkMeters()
        self._identity = identity
        self._layout = wire_layout(
            pool.layout,
            fingerprint=identity.layout_fingerprint,
            exact=identity.exact,
            arithmetic=identity.arithmetic,
            tensor_parallel=identity.tensor_parallel,
            pipeline_parallel=identity.pipeline_parallel,
        )
        self._reader = PageReader(pool)
        self._generations = generations
        self._pool = pool
        warm_up(pool)
        self._available = Transports(pool.data.device, pool.layout.page_bytes, tls)
        self._transports = self._available.resolve(transports)
        self._is_auto = AUTO in transports
        self._reach = Reach(identity.host_id).at(pool.data.device)
        self._measured: dict[str, tuple[float, probing.Measured]] = {}
        self._unopened: dict[str, set[str]] = {}
        """By receiver, the transports that could not be opened: those of `auto`, until they are measured."""
        self._channels: dict[str, str] = {}
        self._on_channels = on_channels
        self._clock = clock
        self._timeouts = timeouts or Timeouts()
        self._links: dict[tuple[str, str], asyncio.Future[_SendLink]] = {}
        self._closing: set[asyncio.Event] = set()
        self._retired: set[_SendLink] = set()
        """Links that others have taken the place of, until they end."""
        self._improving: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._doubts = LinkDoubts(self.meters, self._measure_again, clock=self._clock)

    async def reserve(
        self, address: str, peer_incarnation: str, transfer_id: TransferId, *, num_tokens: int, deadline: Deadline
    ) -> SendTransfer:
        """Have pages set aside at the receiver: `ask`, and wait until they are granted.

        Raises what `ask` does, and NoFreePages or the receiver's other refusal.
        """
        transfer = await self.ask(address, peer_incarnation, transfer_id, num_tokens=num_tokens, deadline=deadline)
        try:
            await transfer.granted()
        except asyncio.CancelledError:
            transfer.give_up(RequestCancelled("the handoff was cancelled"))
            raise
        return transfer

    async def ask(
        self, address: str, peer_incarnation: str, transfer_id: TransferId, *, num_tokens: int, deadline: Deadline
    ) -> SendTransfer:
        """Ask the receiver that listens on `address` for pages for `num_tokens` tokens.

        Those are the tokens whose KV the pages hold: a prompt's, or also those of the beginning of its answer. Returns
        when the question has left this process, and so reaches the receiver whatever becomes of the process then.

        Raises WorkerUnavailable if it cannot be reached or is not that incarnation, LayoutMismatch, TransferFailed,
        DeadlineExceeded.
        """
        deadline.check()
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                link = await self._link_to(address, peer_incarnation)
                if link.is_retired:  # Another has just taken its place.
                    link = await self._link_to(address, peer_incarnation)
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed while the Link was made") from None
        return await link.ask(transfer_id, num_tokens, deadline)

    def peer_links(self) -> list[worker_pb2.PeerLink]:
        """Return what is believed now of the link to each receiver, for gateways."""
        now_s, told = self._clock.monotonic(), []
        for worker_id, meter in self.meters:
            link = worker_pb2.PeerLink(worker_id=worker_id, underway_bytes=round(meter.underway_bytes(now_s)))
            if meter.is_known:
                speed = meter.speed(now_s)
                link.speed.latency_s, link.speed.bytes_per_s = speed.latency_s, speed.bytes_per_s
            told.append(link)
        return told

    async def close(self) -> None:
        """Fail what runs, end all Links, return when no thread of theirs is left."""
        self._is_closed = True
        await self._doubts.close()
        for improving in self._improving:
            improving.cancel()
        await asyncio.gather(*self._improving, return_exceptions=True)
        for task in list(self._links.values()):
            if not task.done():
                task.cancel()
            elif not task.cancelled() and task.exception() is None:
                task.result().fail(WorkerUnavailable("the sending worker is shutting down"))
        for link in tuple(self._retired):
            link.fail(WorkerUnavailable("the sending worker is shutting down"))
        await asyncio.gather(*self._links.values(), return_exceptions=True)
        for ended in list(self._closing):
            await ended.wait()

    async def _link_to(self, address: str, peer_incarnation: str) -> _SendLink:
        if self._is_closed:
            raise WorkerUnavailable("the sending worker is shutting down")
        key = (address, peer_incarnation)
        place = self._links.get(key)
        if place is None:
            place = task = asyncio.create_task(self._dial(key))
            self._links[key] = task
            task.add_done_callback(lambda done: self._on_dialled(key, task))
        # Shielded: others may wait for the same Link, and a Link half made is worth finishing.
        return await asyncio.shield(place)

    def _on_dialled(self, key: tuple[str, str], task: asyncio.Task[_SendLink]) -> None:
        if task.cancelled() or task.exception() is not None:
            if self._links.get(key) is task:
                del self._links[key]
            return
        link = task.result()
        self._note_channel(link.receiver_id, link.transport)
        self._doubts.note(link.receiver_id, key, link.transport)
        if link.is_lost:
            self._forget(key, link)
        elif self._is_auto and len(self._transports) > 1 and not self._is_closed and not self._is_measured(key[0]):
            improving = asyncio.create_task(self._improve(key, link), name=f"measure {key[0]}")
            self._improving.add(improving)
            improving.add_done_callback(self._improving.discard)

    def _is_current(self, key: tuple[str, str], link: _SendLink) -> bool:
        """Whether who wants a Link to that receiver gets this one."""
        place = self._links.get(key)
        if place is None or not place.done() or place.cancelled() or place.exception() is not None:
            return False
        return place.result() is link

    def _forget(self, key: tuple[str, str], link: _SendLink) -> None:
        """The Link is lost. One that has only just been made is forgotten by `_on_dialled`."""
        self._retired.discard(link)
        if self._is_current(key, link):
            del self._links[key]
            self._note_channel(link.receiver_id, None)

    async def _improve(self, key: tuple[str, str], link: _SendLink) -> None:
        """Measure the channels to a receiver and, where another one is better, put a Link over it in its place."""
        await asyncio.sleep(probing.AFTER_S)
        if not self._is_current(key, link):
            return  # The next one has a measurement of its own.
        try:
            measured = await self._measure(key)
            if not measured.bytes_per_s:
                return
            self._measured[key[0]] = self._clock.monotonic(), measured
            measured.teach(self.meters.to(link.receiver_id).opinion, self._offer_to(key[0])[0], self._clock.monotonic())
            self._unopened.pop(key[0], None)
            if self._offer_to(key[0])[0] == link.transport or not self._is_current(key, link):
                return
            better = await self._dial(key)
        except (TandemError, grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:  # the last: its call has ended
            logger.info("the channels to %s were not measured, or not changed: %s", key[0], error)
            return
        if better.is_lost or better.transport == link.transport or not self._is_current(key, link):
            better.retire()
            return
        self._links[key] = place = asyncio.get_running_loop().create_future()
        place.set_result(better)
        self._note_channel(better.receiver_id, better.transport)
        self._doubts.note(better.receiver_id, key, better.transport)
        self._retired.add(link)
        link.retire()

    async def _dial(self, key: tuple[str, str]) -> _SendLink:
        offered = self._offer_to(key[0])
        try:
            async with asyncio.timeout(self._timeouts.connect_s):
                while True:
                    try:
                        return await self._dial_with(key, offered)
                    except _ChannelNotOpened as failure:
                        self._unopened.setdefault(key[0], set()).add(failure.transport)
                        offered = tuple(name for name in offered if name != failure.transport)
                        if not offered:
                            raise TransferFailed(failure.message) from failure
                        logger.warning("channel %s to %s: %s; trying %s", failure.transport, key[0], failure, offered)
        except TimeoutError:
            raise WorkerUnavailable("the receiver did not make a Link in time") from None
        except grpc.aio.AioRpcError as error:
            raise _link_error(error) from error

    def _is_measured(self, address: str) -> bool:
        measured_at, measured = self._measured.get(address, (0.0, None))
        return measured is not None and self._clock.monotonic() - measured_at <= probing.VALID_S

    def _offer_to(self, address: str) -> tuple[str, ...]:
        """Return the transports to offer to a receiver, best first as far as that is known."""
        if not self._is_auto:
            return self._transports
        if self._is_measured(address):
            _, measured = self._measured[address]
            return in_order(self._transports, measured.bytes_per_s)
        return tuple(sorted(self._transports, key=self._unopened.get(address, set()).__contains__))

    async def _measure_again(self, key: tuple[str, str], transport: str) -> probing.Measured:
        """Measure the channel that is in use with as little traffic as will do. Raises what `_measure` does."""
        return await self._measure(key, (transport,), most_bytes=probing.RETRY_BYTES)

    async def _measure(
        self, key: tuple[str, str], transports: tuple[str, ...] = (), *, most_bytes: int | None = None
    ) -> probing.Measured:
        address, peer_incarnation = key
        rpc_channel = make_channel(address)
        try:
            stub = link_pb2_grpc.LinkStub(rpc_channel)
            hello = self._hello(peer_incarnation, transports or self._transports)

            async def begin() -> _Call:
                proof = await prove(rpc_channel, PROBE, incarnation=peer_incarnation)
                call = stub.Probe(metadata=metadata_of(proof))
                await check_answer(proof, call)
                return call

            measured = await probing.measure(begin, hello, self._open_channel, most_bytes=most_bytes)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
            return probing.Measured()  # a receiver of an earlier version
        finally:
            await rpc_channel.close()
        logger.info("channels to %s: %s", address, measured)
        return measured

    def _hello(self, peer_incarnation: str, offered: tuple[str, ...]) -> Hello:
        return Hello(
            worker_id=self._identity.worker_id,
            incarnation=self._identity.incarnation,
            peer_incarnation=peer_incarnation,
            layout=self._layout,
            transports=offered,
            host_id=self._reach.host_id,
            gpu_id=self._reach.gpu_id,
            nccl=self._reach.nccl,
        )

    async def _dial_with(self, key: tuple[str, str], offered: tuple[str, ...]) -> _SendLink:
        address, peer_incarnation = key
        hello = self._hello(peer_incarnation, offered)
        rpc_channel = make_channel(address)
        call: _Call | None = None
        try:
            proof = await prove(rpc_channel, CONNECT, incarnation=peer_incarnation)
            call = link_pb2_grpc.LinkStub(rpc_channel).Connect(metadata=metadata_of(proof))
            await check_answer(proof, call)
            ack = await _greet(call, hello)
            self._check(hello, ack)
            channel = await self._open_channel(hello, ack)
        except BaseException:
            if call is not None:
                call.cancel()
            await rpc_channel.close()
            raise
        logger.info("handoff channel %s to %s at %s", ack.transport, ack.worker_id, address)
        note_arithmetic(self._layout, ack.layout, ack.worker_id)
        return self._adopt(key, _Opened(rpc_channel, call, channel, hello, ack))

    async def _open_channel(self, hello: Hello, ack: HelloAck) -> AnySendChannel:
        timeout_s = OPENING_SHARE * self._timeouts.connect_s
        return await _open_channel(self._available[ack.transport], hello, ack, timeout_s)

    def _note_channel(self, worker_id: str, transport: str | None) -> None:
        if transport is None:
            self._channels.pop(worker_id, None)
        else:
            self._channels[worker_id] = transport
        if self._on_channels is not None:
            self._on_channels(dict(self._channels))

    def _check(self, hello: Hello, ack: HelloAck) -> None:
        if ack.incarnation != hello.peer_incarnation:
            self.counters.count(Reason.STALE_INCARNATION)
            raise WorkerUnavailable("the receiver is not the incarnation that was meant")
        if not layouts_fit(ack.layout, hello.layout) or ack.ring_slot_bytes < hello.layout.page_bytes:
            self.counters.count(Reason.LAYOUT_MISMATCH)
            raise LayoutMismatch("the receiver's pages do not fit ours")
        if ack.transport not in hello.transports:
            raise MalformedMessage("the receiver chose a transport that was not offered")

    def _adopt(self, key: tuple[str, str], opened: _Opened) -> _SendLink:
        ended = asyncio.Event()
        self._closing.add(ended)

        def on_ended() -> None:
            self._closing.discard(ended)
            ended.set()

        link = _SendLink(
            opened,
            self._reader,
            self._generations,
            layout=self._layout,
            timeouts=self._timeouts,
            counters=self.counters,
            clock=self._clock,
            meter=self.meters.to(opened.ack.worker_id),
            on_lost=lambda: self._forget(key, link),
            on_ended=on_ended,
            device_pages=DevicePages(self._pool) if isinstance(opened.channel, DeviceSendChannel) else None,
        )
        return link


@dataclass(frozen=True, slots=True)
class _Opened:
    """The parts of a Link that is about to begin."""

    rpc_channel: grpc.aio.Channel
    call: _Call
    channel: AnySendChannel
    hello: Hello
    ack: HelloAck


class _ChannelNotOpened(TransferFailed):
    """The receiver answered, but the channel could not be opened."""

    def __init__(self, transport: str, message: str) -> None:
        super().__init__(message)
        self.transport = transport


class _SendLink:
    """One Link: carries out the machine's actions and tells it what happens."""

    def __init__(
        self,
        opened: _Opened,
        reader: PageReader,
        generations: PageGenerations,
        *,
        layout: WireLayout,
        timeouts: Timeouts,
        counters: Counters,
        clock: Clock,
        meter: LinkMeter,
        on_lost: Callable[[], None],
        on_ended: Callable[[], None],
        device_pages: DevicePages | None,
    ) -> None:
        self.transport = opened.ack.transport
        self.receiver_id = opened.ack.worker_id
        self.is_retired = False
        """Another Link has taken its place; it ends with its last transfer."""
        self.now = clock.monotonic
        self._opened = opened
        self._generations = generations
        self._counters = counters
        self._meter = meter
        self._page_bytes = layout.page_bytes
        self._on_lost = on_lost
        self._on_ended = on_ended
        self._loop = asyncio.get_running_loop()
        frame_pages = pages_per_frame(layout.page_bytes, opened.ack.ring_slot_bytes)
        self._machine = SenderLink(
            layout=layout, frame_pages=frame_pages, timeouts=timeouts, counters=counters, now=self.now()
        )
        self._handles: dict[TransferId, SendTransfer] = {}
        self._outbox = Outbox()
        self._poster = ChunkPoster(
            opened.channel,
            reader,
            generations,
            frame_pages=frame_pages,
            stall_s=timeouts.stall_s,
            on_posted=lambda chunk, digest: self._from_thread(self._on_posted, chunk, digest),
            on_skipped=lambda chunk: self._from_thread(self._on_skipped, chunk),
            on_stale=lambda chunk: self._from_thread(self._on_stale, chunk),
            on_broken=lambda error: self._from_thread(self._on_broken, error),
            on_ended=lambda: self._from_thread(self._on_poster_ended),
            device_pages=device_pages,
        )
        runs = (self._read(), self._write(), tick_until_cancelled(self._tick))
        self._tasks = [asyncio.create_task(run) for run in runs]
        for task in self._tasks:
            task.add_done_callback(self._on_task_ended)
        self._closing: asyncio.Task[None] | None = None

    @property
    def is_lost(self) -> bool:
        """Whether it has ended."""
        return self._machine.lost is not None

    def retire(self) -> None:
        """End with the last transfer that has begun."""
        self.is_retired = True
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if not self._handles:
            self.fail(WorkerUnavailable("another Link has taken its place"))

    async def ask(self, transfer_id: TransferId, num_tokens: int, deadline: Deadline) -> SendTransfer:
        """Begin a transfer; return when the receiver is sure to hear of it, or the transfer has ended."""
        at = self.now() + deadline.remaining_s()
        actions = self._machine.reserve(transfer_id, num_tokens, deadline=at, now=self.now())
        handle = SendTransfer(self, transfer_id)
        self._handles[transfer_id] = handle
        self._perform(actions)
        try:
            await handle._wait_asked()
        except asyncio.CancelledError:
            self.abort(transfer_id, RequestCancelled("the handoff was cancelled"))
            raise
        return handle

    def send(self, transfer_id: TransferId, first_page: int, page_ids: Sequence[int]) -> None:
        # First, as it raises for pages that do not exist, and nothing must have been announced then.
        generations = self._generations.generations(page_ids)
        for action in self._machine.send(transfer_id, first_page, page_ids):
            if isinstance(action, PostChunk):
                self._poster.submit(action, generations[len(page_ids) - len(action.page_ids) :])
                self._meter.sent(transfer_id, len(action.page_ids) * self._page_bytes, self.now())
            else:
                self._perform([action])

    def seal(self, transfer_id: TransferId, num_tokens: int, first_token_id: int, sampling_position: int) -> None:
        actions = self._machine.seal(
            transfer_id,
            num_tokens=num_tokens,
            first_token_id=first_token_id,
            sampling_position=sampling_position,
            now=self.now(),
        )
        self._meter.sealed(transfer_id)
        self._perform(actions)

    def abort(self, transfer_id: TransferId, error: TandemError) -> None:
        self._perform(self._machine.abort(transfer_id, error, self.now()))

    def fail(self, error: TandemError) -> None:
        """End the Link for good. Idempotent."""
        if self.is_lost:
            return
        level = logging.WARNING if self._machine.transfers else logging.INFO
        logger.log(level, "Link to %s is lost: %s", self._opened.ack.worker_id, error)
        if not self.is_retired or self._handles:
            self._counters.count(Reason.LINK_LOST)
        actions = self._machine.link_lost(error)
        self._on_lost()
        self._perform_last(actions)
        self._poster.stop()
        for task in self._tasks:
            task.cancel()
        self._outbox.close()

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Send():
                    self._send_message(action.message)
                case SkipChunks():
                    self._poster.skip(action.id)
                case ReportGranted():
                    self._handles[action.id]._on_granted(action.num_cached_tokens)
                case ReportCommitted():
                    self._handles[action.id]._on_ended(action, self._meter.arrived(action.id, self.now()))
                case ReportFailed():
                    self._meter.lost(action.id, self.now(), is_cut=self.is_lost)
                    self._handles[action.id]._on_ended(action.error)
                case ReportReleased():
                    self._poster.forget(action.id)
                    self._handles.pop(action.id).released.set()
                    if self.is_retired:
                        self._loop.call_soon(self._end_if_idle)
                case FailLink():
                    self.fail(action.error)
                case _:
                    raise AssertionError(f"{action} is none of the sender's")

    def _perform_last(self, actions: Sequence[Action]) -> None:
        """As `_perform`, when the Link is over: one transfer's trouble must not keep the others from ending."""
        for action in actions:
            try:
                self._perform([action])
            except Exception:
                logger.critical("the Link contradicts itself", exc_info=True)

    def _send_message(self, message: Message) -> None:
        try:
            self._outbox.put(message)
        except WorkerUnavailable as error:
            self._loop.call_soon(self.fail, error)

    def _tick(self) -> None:
        self._perform(self._machine.tick(self.now()))

    async def _read(self) -> None:
        while True:
            wire = await self._opened.call.read()
            if not isinstance(wire, link_pb2.LinkMessage):
                raise WorkerUnavailable("the receiver ended the Link")
            self._perform(self._machine.on_message(from_wire(wire), self.now()))

    async def _write(self) -> None:
        async for wire in self._outbox:
            await self._opened.call.write(wire)
            if wire.HasField("reserve"):
                self._on_asked(TransferId(wire.reserve.id.request_id, wire.reserve.id.attempt))

    def _on_asked(self, transfer_id: TransferId) -> None:
        handle = self._handles.get(transfer_id)
        if handle is not None:
            handle._on_asked()

    def _on_task_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, grpc.aio.AioRpcError):
            error = _link_error(error)
        if error is not None and not isinstance(error, TandemError):
            if not isinstance(error, asyncio.InvalidStateError):  # a write to a call that has just ended
                logger.error("a task of the Link failed", exc_info=error)
            error = WorkerUnavailable("the Link broke")
        self.fail(error or WorkerUnavailable("the Link was ended"))

    def _from_thread(self, call: Callable[..., None], *args: object) -> None:
        # The loop may be gone at the very end of the process; then nobody is left to be told.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._tell, call, *args)

    def _tell(self, call: Callable[..., None], *args: object) -> None:
        try:
            call(*args)
        except Exception:
            logger.critical("the Link contradicts itself", exc_info=True)
            self.fail(WorkerUnavailable("the Link broke"))

    def _on_posted(self, chunk: PostChunk, digest: bytes) -> None:
        self._perform(self._machine.chunk_posted(chunk.id, chunk.chunk_index, digest, self.now()))

    def _on_skipped(self, chunk: PostChunk) -> None:
        self._perform(self._machine.chunk_skipped(chunk.id))

    def _on_stale(self, chunk: PostChunk) -> None:
        self._perform(self._machine.chunk_stale(chunk.id, self.now()))

    def _on_broken(self, error: TandemError) -> None:
        self._counters.count(Reason.CHANNEL_BROKEN)
        self.fail(error)

    def _on_poster_ended(self) -> None:
        self.fail(WorkerUnavailable("the channel was closed"))
        self._perform_last(self._machine.channel_ended())
        self._closing = self._loop.create_task(self._close_call())

    async def _close_call(self) -> None:
        self._opened.call.cancel()
        await self._opened.rpc_channel.close()
        self._on_ended()


async def _greet(call: _Call, hello: Hello) -> HelloAck:
    """Introduce ourselves and return the answer. Raises the receiver's refusal."""
    await call.write(to_wire(hello))
    wire = await call.read()
    if not isinstance(wire, link_pb2.LinkMessage):
        raise WorkerUnavailable("the receiver ended the Link at once")
    match from_wire(wire):
        case HelloAck() as ack:
            return ack
        case Abort(id=None) as refusal:
            raise error_from(refusal)
        case _:
            raise MalformedMessage("the receiver did not introduce itself")


async def _open_channel(transport: Transport, hello: Hello, ack: HelloAck, timeout_s: float) -> AnySendChannel:
    key, ring = channel_key(hello, ack), RingSpec(ack.ring_slots, ack.ring_slot_bytes)
    opening = asyncio.get_running_loop().run_in_executor(
        None, lambda: transport.open(ack.channel_address, key, ring, timeout_s=timeout_s)
    )
    try:
        return await asyncio.shield(opening)
    except ChannelBroken as error:
        raise _ChannelNotOpened(ack.transport, error.message) from error
    except asyncio.CancelledError:
        # The thread goes on: what it opens must not stay open.
        opening.add_done_callback(_discard_channel)
        raise


def _link_error(error: grpc.aio.AioRpcError) -> TandemError:
    """Return what the end of the stream means: the receiver's own reason, or that it cannot be reached."""
    refused = refusal(error)
    if refused is not None:
        return refused
    meant = error_from_rpc(error)
    is_reason = isinstance(meant, WorkerUnavailable | TransferFailed | LayoutMismatch | Overloaded)
    return meant if is_reason else WorkerUnavailable("the Link to the receiver broke")


def _discard_channel(opening: asyncio.Future[AnySendChannel]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().shutdown()
        opening.result().close()
