"""The receiving worker's side of the handoff: `LinkReceiver` serves Links, agrees on a channel, and opens it.

`receive_link` handles an open Link. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import grpc

from kv_transfer.device_pages import warm_up
from kv_transfer.link_end import LinkSetup
from kv_transfer.link_slots import LinkSlots
from kv_transfer.measure import answer_rounds
from kv_transfer.protocol.counters import Reason
from kv_transfer.protocol.failures import abort_of
from kv_transfer.protocol.fence import Fence
from kv_transfer.protocol.messages import (
    PROTOCOL_VERSION,
    TOKEN_BYTES,
    Hello,
    HelloAck,
    TransferId,
)
from kv_transfer.protocol.receiver import ReceiverLink, link_fault
from kv_transfer.protocol.receiver_transfer import LinkTerms
from kv_transfer.receive_link import ReceiveLink, ReceiveTarget, Surroundings
from kv_transfer.transports.base import AnyReceiveChannel, Listener, RingSpec
from kv_transfer.transports.handshake import CHANNEL_ID_BYTES, PADDING_BYTES
from kv_transfer.transports.registry import DEVICE_NAMES, HOST_NETWORK, NETWORK_NAMES, Reach, choose
from kv_transfer.wire import MalformedMessage, channel_key, from_wire, note_arithmetic, to_wire
from protos import link_pb2, link_pb2_grpc
from services.runtime.errors import (
    ChannelUnreachable,
    InvariantViolated,
    LayoutMismatch,
    LinkRefused,
    PeerUnreachable,
    StaleIncarnation,
    TandemError,
    TransferFailed,
    WorkerUnavailable,
)

MAX_LINKS = 256
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RingConfig:
    """Size of the receiving ring of each Link.

    If a page of the sender is larger than a slot, the slot grows to the page size.

    Slots that stay in the processor's cache between the two copies halve the memory traffic.
    """

    slot_bytes: int = 2**20
    ring_bytes: int = 8 * 2**20
    device_slot_bytes: int = 8 * 2**20
    """Slot size of a device channel, in bytes.

    It is larger because each frame costs a few launches and waits, whatever its size.
    """

    def spec_for(self, page_bytes: int, *, is_on_device: bool = False) -> RingSpec:
        """Returns the ring for pages of this size."""
        if is_on_device:
            return RingSpec(4, max(self.device_slot_bytes, page_bytes))
        slot_bytes = max(self.slot_bytes, page_bytes)
        return RingSpec(min(64, max(4, self.ring_bytes // slot_bytes)), slot_bytes)


@dataclass(frozen=True, slots=True)
class ChannelAddress:
    """Addresses for channels that need one.

    All network channels listen on `host`. One of them listens on `port` (0 selects a free port): the channel for pages
    in host memory if there is one. If senders must use a different address, `advertise_host` and `advertise_port`
    override it.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertise_host: str | None = None
    advertise_port: int | None = None


class LinkReceiver(link_pb2_grpc.LinkServicer):
    """Serves `tandem.v1.Link`. Add it to the worker's gRPC server.

    Raises OSError if the port of `address` is in use. `abort` and `close` belong to the event loop's thread.
    """

    def __init__(
        self,
        setup: LinkSetup,
        target: ReceiveTarget,
        *,
        address: ChannelAddress | None = None,
        ring: RingConfig | None = None,
    ) -> None:
        self.counters = setup.counters
        self._setup = setup
        self._target = target
        warm_up(setup.pool)
        self._transports = setup.available.resolve(setup.transports)
        self._address = address or ChannelAddress()
        self._ring = ring or RingConfig()
        self._layout = setup.layout
        self._fence = Fence()
        self._probing = asyncio.Lock()
        self._listeners: dict[str, Listener] = {}
        self._slots: LinkSlots[ReceiveLink] = LinkSlots(MAX_LINKS)
        self._is_closed = False
        # Opened at startup, so that a port conflict fails the start, and operators can test the port before a sender
        # needs it.
        self._on_port = next((name for name in (*HOST_NETWORK, "nccl") if name in self._transports), "")
        self.network_address = ""
        """The host:port on which senders on other hosts open the payload channel.

        Empty if no transport leaves the host, or if NCCL is the only one that does and no port is set.
        """
        if self._on_port and (self._address.port or self._on_port in HOST_NETWORK):
            self.network_address = self._advertised(self._listener(self._on_port).address, self._on_port)

    @property
    def num_transfers(self) -> int:
        """Number of transfers that have not ended."""
        return sum(link.num_transfers for link in self._links)

    @property
    def _links(self) -> tuple[ReceiveLink, ...]:
        return self._slots.links

    def abort(self, transfer_id: TransferId, error: TandemError) -> None:
        """Aborts a transfer if it is running. `release` follows once its pages are no longer written to. Idempotent.

        Later messages for this attempt are rejected. Does not stop a transfer that is being committed.
        """
        self._fence.close(transfer_id)
        for link in self._links:
            link.abort(transfer_id, error)

    async def close(self) -> None:
        """Ends all Links, releases all pages, and stops listening.

        Returns once every Link has ended, or after a timeout if the worker does not release its pages.
        """
        self._is_closed = True
        for link in self._links:
            link.fail(WorkerUnavailable("the receiving worker is shutting down"))
        try:
            async with asyncio.timeout(self._setup.timeouts.commit_s):
                for link in self._links:
                    await link.ended.wait()
        except TimeoutError:
            logger.error("%d Links did not end: the worker does not answer for their pages", len(self._links))
        for listener in self._listeners.values():
            await asyncio.to_thread(listener.close)
        self._listeners.clear()

    async def Connect(
        self,
        request_iterator: AsyncIterator[link_pb2.LinkMessage],
        context: grpc.aio.ServicerContext[link_pb2.LinkMessage, link_pb2.LinkMessage],
    ) -> AsyncIterator[link_pb2.LinkMessage]:
        """Serves one Link, from its hello to its end."""
        requests = aiter(request_iterator)
        hello = await self._receive_hello(requests)
        refusal = self._refusal_of(hello)
        if refusal is None and not await self._slots.claim():
            me = self._setup.identity.worker_id
            refusal = LinkRefused(
                f"{me} already has {MAX_LINKS} Links, the most that a worker accepts, and all are in use"
            )
        if refusal is not None:
            logger.warning("Link refused", extra={"peer": hello.worker_id, "reason": refusal.message})
            yield to_wire(abort_of(None, refusal))
            return
        with self._slots.opening():
            self._check_open()  # `close` may have run while `claim` waited
            terms, ack = self._terms_for(hello)
            with self._expected(hello, ack) as opening:
                yield to_wire(ack)
                channel = await self._await_channel(opening)
                self._check_open()
            link = self._begin(hello, ack.transport, terms, channel)
        try:
            link.start(requests)
            async for wire in link.outbox:
                yield wire
        finally:
            link.fail(TransferFailed("the sender ended the Link"))

    async def Probe(
        self,
        request_iterator: AsyncIterator[link_pb2.LinkMessage],
        context: grpc.aio.ServicerContext[link_pb2.LinkMessage, link_pb2.LinkMessage],
    ) -> AsyncIterator[link_pb2.LinkMessage]:
        """Opens one channel after another for the sender to measure; see `measure`."""
        requests = aiter(request_iterator)
        async with self._probing:  # concurrent measurements would distort each other
            while True:
                hello = await self._receive_hello(requests)
                refusal = self._refusal_of(hello)
                if refusal is not None:
                    yield to_wire(abort_of(None, refusal))
                    return
                _, ack = self._terms_for(hello)
                with self._expected(hello, ack) as opening:
                    yield to_wire(ack)
                    channel = await self._await_channel(opening)
                async for probed in answer_rounds(channel, _ring_of(ack)):
                    yield probed

    def _check_open(self) -> None:
        if self._is_closed:
            raise WorkerUnavailable("the receiving worker is shutting down")

    @contextlib.contextmanager
    def _expected(self, hello: Hello, ack: HelloAck) -> Iterator[Future[AnyReceiveChannel]]:
        """Waits for the sender to open its channel. On an error, withdraws the offer or closes the channel."""
        opening = self._listeners[ack.transport].expect(channel_key(hello, ack), _ring_of(ack))
        try:
            yield opening
        except BaseException:
            _withdraw(opening)
            raise

    async def _await_channel(self, opening: Future[AnyReceiveChannel]) -> AnyReceiveChannel:
        try:
            async with asyncio.timeout(self._setup.timeouts.connect_s):
                return await asyncio.wrap_future(opening)
        except TimeoutError:
            raise PeerUnreachable("the sender did not open its channel in time") from None

    async def _receive_hello(self, requests: AsyncIterator[link_pb2.LinkMessage]) -> Hello:
        try:
            async with asyncio.timeout(self._setup.timeouts.connect_s):
                hello = from_wire(await anext(requests))
        except (TimeoutError, StopAsyncIteration):
            raise PeerUnreachable("the sender did not introduce itself in time") from None
        except MalformedMessage:
            self.counters.count(Reason.PROTOCOL_VIOLATION)
            raise
        if not isinstance(hello, Hello):
            self.counters.count(Reason.PROTOCOL_VIOLATION)
            raise MalformedMessage("a Link begins with a hello")
        return hello

    def _refusal_of(self, hello: Hello) -> TandemError | None:
        if self._is_closed:
            return WorkerUnavailable("the receiving worker is shutting down")
        fault = link_fault(
            hello, layout=self._layout, incarnation=self._setup.identity.incarnation, protocol_version=PROTOCOL_VERSION
        )
        if fault is not None:
            self.counters.count(fault)
        if fault is Reason.STALE_INCARNATION:
            return StaleIncarnation("the receiver is not the incarnation that was meant")
        if fault is not None:
            difference = self._layout.difference(hello.layout) or "it speaks another version of the protocol"
            return LayoutMismatch(f"the sender's pages do not fit the receiver's: {difference}")
        if self._choose(hello) is None:
            return self._no_common_transport(hello)
        return None

    def _no_common_transport(self, hello: Hello) -> ChannelUnreachable:
        me = self._setup.identity.worker_id
        where = "the same host" if hello.host_id == self._setup.reach.host_id else "different hosts"
        return ChannelUnreachable(
            f"{hello.worker_id} and {me}, on {where}, have no transport in common: {hello.worker_id} offers "
            f"{', '.join(hello.transports) or 'none'}, and {me} accepts {', '.join(self._transports)}; "
            "start both with --transport auto"
        )

    def _choose(self, hello: Hello) -> str | None:
        sender = Reach(hello.host_id, hello.gpu_id, hello.nccl)
        return choose(hello.transports, self._transports, sender=sender, receiver=self._setup.reach)

    def _terms_for(self, hello: Hello) -> tuple[LinkTerms, HelloAck]:
        transport = self._choose(hello)
        if transport is None:
            raise InvariantViolated("a Link without a common transport was not refused")
        listener = self._listener(transport)
        ring = self._ring.spec_for(hello.layout.page_bytes, is_on_device=transport in DEVICE_NAMES)
        ack = HelloAck(
            worker_id=self._setup.identity.worker_id,
            incarnation=self._setup.identity.incarnation,
            layout=self._layout,
            transport=transport,
            channel_address=self._advertised(listener.address, transport),
            channel_id=secrets.token_hex(CHANNEL_ID_BYTES),
            channel_token=secrets.token_bytes(TOKEN_BYTES),
            ring_slots=ring.num_slots,
            ring_slot_bytes=ring.slot_bytes,
            padding_bytes=PADDING_BYTES if hello.sends_padding and transport in NETWORK_NAMES else 0,
        )
        return LinkTerms(sender=hello.layout, receiver=self._layout, slot_bytes=ring.slot_bytes), ack

    def _listener(self, transport: str) -> Listener:
        listener = self._listeners.get(transport)
        if listener is None:
            port = self._address.port if transport == self._on_port else 0
            listener = self._listeners[transport] = self._setup.available[transport].listen(self._address.host, port)
        return listener

    def _advertised(self, address: str, transport: str) -> str:
        host, separator, port = address.rpartition(":")
        if not separator or not host:
            return address
        advertised = self._address.advertise_host
        if advertised is not None:
            host = f"[{advertised}]" if ":" in advertised else advertised
        if self._address.advertise_port is not None and transport == self._on_port:
            port = str(self._address.advertise_port)
        return f"{host}:{port}"

    def _begin(self, hello: Hello, transport: str, terms: LinkTerms, channel: AnyReceiveChannel) -> ReceiveLink:
        machine = ReceiverLink(
            terms=terms,
            fence=self._fence,
            timeouts=self._setup.timeouts,
            counters=self.counters,
            now=self._setup.clock.monotonic(),
        )
        around = Surroundings(self._setup, hello.worker_id, terms, self.abort, self._slots.remove)
        link = ReceiveLink(machine, channel, self._target, around)
        self._slots.add(link)
        logger.info("handoff channel %s from %s", transport, hello.worker_id)
        note_arithmetic(self._layout, hello.layout, hello.worker_id)
        return link


def _ring_of(ack: HelloAck) -> RingSpec:
    return RingSpec(ack.ring_slots, ack.ring_slot_bytes)


def _withdraw(opening: Future[AnyReceiveChannel]) -> None:
    """Withdraws the offer of a channel that is no longer needed, or closes the channel if it is open."""
    if not opening.cancel() and opening.exception() is None:
        opening.result().shutdown()
        opening.result().close()
