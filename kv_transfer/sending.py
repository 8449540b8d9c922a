"""The sending worker's side: `SendLinks` makes and keeps one Link per receiver, over the channel that carries most.

What happens on a Link is in `send_link`. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

import grpc

from kv_transfer import measure as probing
from kv_transfer.device_pages import warm_up
from kv_transfer.doubting import LinkDoubts
from kv_transfer.link_end import LinkSetup
from kv_transfer.protocol.counters import Reason
from kv_transfer.protocol.failures import error_from
from kv_transfer.protocol.messages import Abort, Hello, HelloAck, TransferId
from kv_transfer.send_link import Call, Opened, SendLink, SendTransfer, link_error
from kv_transfer.transports.base import AnySendChannel, ChannelBroken, RingSpec, Transport
from kv_transfer.transports.registry import AUTO, in_order
from kv_transfer.wire import MalformedMessage, channel_key, from_wire, note_arithmetic, to_wire
from protos import link_pb2, link_pb2_grpc, worker_pb2
from services.runtime.clock import Deadline
from services.runtime.errors import (
    DeadlineExceeded,
    LayoutMismatch,
    RequestCancelled,
    TandemError,
    TransferFailed,
    WorkerUnavailable,
)
from services.runtime.rpc import check_answer, make_channel, metadata_of, prove, write_if_open
from services.scheduling.links import LinkMeters

OPENING_SHARE = 0.8
"""Share of the time for a Link that opening one channel may take: some must be left for the next one."""

CONNECT, PROBE = "/tandem.v1.Link/Connect", "/tandem.v1.Link/Probe"
"""Methods as proofs name them."""

logger = logging.getLogger(__name__)


class SendLinks:
    """The Links of a worker that sends, made on first use and again after they broke.

    Where the setup's transports are `auto`, the first Link to a receiver takes the first of them that opens, so that
    no request waits for a measurement; they are measured a little later, and where that finds a better one, a Link over
    it takes the place of the first. `meters` knows how fast pages get to each receiver: it learns from every handoff
    and measurement, and of receivers that nothing is sent to from probes of little traffic. `on_channels` is told, on
    the event loop, the channel to each receiver (by its worker id) whenever that changes.
    """

    def __init__(self, setup: LinkSetup, *, on_channels: Callable[[Mapping[str, str]], None] | None = None) -> None:
        self.counters = setup.counters
        self.meters = LinkMeters()
        self._setup = setup
        warm_up(setup.pool)
        self._transports = setup.available.resolve(setup.transports)
        self._is_auto = AUTO in setup.transports
        self._measured: dict[str, tuple[float, probing.Measured]] = {}
        self._unopened: dict[str, set[str]] = {}
        """By receiver, the transports that could not be opened: those of `auto`, until they are measured."""
        self._channels: dict[str, str] = {}
        self._on_channels = on_channels
        self._clock = setup.clock
        self._links: dict[tuple[str, str], asyncio.Future[SendLink]] = {}
        self._closing: set[asyncio.Event] = set()
        self._retired: set[SendLink] = set()
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
        when the question has left this process. It reaches the receiver even if the process dies then, unless that
        notices the broken connection before it has read the question.

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

    async def _link_to(self, address: str, peer_incarnation: str) -> SendLink:
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

    def _on_dialled(self, key: tuple[str, str], task: asyncio.Task[SendLink]) -> None:
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

    def _is_current(self, key: tuple[str, str], link: SendLink) -> bool:
        """Whether a caller that wants a Link to that receiver gets this one."""
        place = self._links.get(key)
        if place is None or not place.done() or place.cancelled() or place.exception() is not None:
            return False
        return place.result() is link

    def _forget(self, key: tuple[str, str], link: SendLink) -> None:
        """The Link is lost. One that has only just been made is forgotten by `_on_dialled`."""
        self._retired.discard(link)
        if self._is_current(key, link):
            del self._links[key]
            self._note_channel(link.receiver_id, None)

    async def _improve(self, key: tuple[str, str], link: SendLink) -> None:
        """Measure the channels to a receiver and, where another one is better, put a Link over it in its place."""
        await asyncio.sleep(probing.AFTER_S)
        if not self._is_current(key, link):
            return  # The next one has a measurement of its own.
        try:
            measured = await self.measure(key)
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

    async def _dial(self, key: tuple[str, str]) -> SendLink:
        offered = self._offer_to(key[0])
        try:
            async with asyncio.timeout(self._setup.timeouts.connect_s):
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
            raise link_error(error) from error

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
        """Measure the channel that is in use with as little traffic as will do. Raises what `measure` does."""
        return await self.measure(key, (transport,), most_bytes=probing.RETRY_BYTES)

    async def measure(
        self, key: tuple[str, str], transports: tuple[str, ...] = (), *, most_bytes: int | None = None
    ) -> probing.Measured:
        """Measure the channels to a receiver, by its address and incarnation, with rounds of `most_bytes` at most.

        No `transports` are all of them. Raises grpc's error where the receiver cannot be reached, NotProven, and its
        refusal.
        """
        address, peer_incarnation = key
        rpc_channel = make_channel(address)
        try:
            stub = link_pb2_grpc.LinkStub(rpc_channel)
            hello = self._hello(peer_incarnation, transports or self._transports)

            async def begin() -> Call:
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
            worker_id=self._setup.identity.worker_id,
            incarnation=self._setup.identity.incarnation,
            peer_incarnation=peer_incarnation,
            layout=self._setup.layout,
            transports=offered,
            host_id=self._setup.reach.host_id,
            gpu_id=self._setup.reach.gpu_id,
            nccl=self._setup.reach.nccl,
        )

    async def _dial_with(self, key: tuple[str, str], offered: tuple[str, ...]) -> SendLink:
        address, peer_incarnation = key
        hello = self._hello(peer_incarnation, offered)
        rpc_channel = make_channel(address)
        call: Call | None = None
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
        note_arithmetic(self._setup.layout, ack.layout, ack.worker_id)
        return self._adopt(key, Opened(rpc_channel, call, channel, hello, ack))

    async def _open_channel(self, hello: Hello, ack: HelloAck) -> AnySendChannel:
        timeout_s = OPENING_SHARE * self._setup.timeouts.connect_s
        return await _open_channel(self._setup.available[ack.transport], hello, ack, timeout_s)

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
        difference = hello.layout.difference(ack.layout)
        if difference or ack.ring_slot_bytes < hello.layout.page_bytes:
            self.counters.count(Reason.LAYOUT_MISMATCH)
            difference = difference or "a page is larger than a slot of its ring"
            raise LayoutMismatch(f"the receiver's pages do not fit ours: {difference}")
        if ack.transport not in hello.transports:
            raise MalformedMessage("the receiver chose a transport that was not offered")

    def _adopt(self, key: tuple[str, str], opened: Opened) -> SendLink:
        ended = asyncio.Event()
        self._closing.add(ended)

        def on_ended() -> None:
            self._closing.discard(ended)
            ended.set()

        link = SendLink(
            opened,
            self._setup,
            meter=self.meters.to(opened.ack.worker_id),
            on_lost=lambda: self._forget(key, link),
            on_ended=on_ended,
        )
        return link


class _ChannelNotOpened(TransferFailed):
    """The receiver answered, but the channel could not be opened."""

    def __init__(self, transport: str, message: str) -> None:
        super().__init__(message)
        self.transport = transport


async def _greet(call: Call, hello: Hello) -> HelloAck:
    """Introduce ourselves and return the answer. Raises the receiver's refusal."""
    await write_if_open(call, to_wire(hello))
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
        # The thread continues: what it opens must not stay open.
        opening.add_done_callback(_discard_channel)
        raise


def _discard_channel(opening: asyncio.Future[AnySendChannel]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().shutdown()
        opening.result().close()
