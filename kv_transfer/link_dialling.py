"""Opens a Link to a receiver: the control stream, the agreement on a payload channel, and that channel.

Belongs to one event loop. Owns no Link. Remembers only how well each transport to each receiver works.
"""

from __future__ import annotations

import asyncio
import logging

import grpc

from kv_transfer import measure as probing
from kv_transfer.link_end import LinkSetup
from kv_transfer.link_errors import dial_error, firewall_advice, is_silence
from kv_transfer.link_retries import LinkKey
from kv_transfer.protocol.counters import Reason
from kv_transfer.protocol.failures import error_from
from kv_transfer.protocol.messages import Abort, Hello, HelloAck
from kv_transfer.send_link import Call, Opened
from kv_transfer.transports.base import (
    AnySendChannel,
    ChannelBroken,
    ChannelNotConnected,
    LargePacketsLost,
    RingSpec,
    Transport,
)
from kv_transfer.transports.registry import AUTO, in_order
from kv_transfer.wire import MalformedMessage, channel_key, from_wire, note_arithmetic, to_wire
from protos import link_pb2, link_pb2_grpc
from services.runtime.errors import (
    ChannelUnreachable,
    LayoutMismatch,
    PeerUnreachable,
    StaleIncarnation,
    TandemError,
    TransferFailed,
)
from services.runtime.rpc import check_answer, make_channel, metadata_of, prove, write_if_open

OPENING_SHARE = 0.8
"""Fraction of the Link's connection timeout that one channel may use to open. The rest is left for the next channel."""
MAX_SILENT_DIALS = 3
"""Number of connection attempts. gRPC allows half a second for each, so a single lost packet makes one fail."""
CONNECT = "/tandem.v1.Link/Connect"
"""Name of the method in proofs."""
MTU_ADVICE = (
    "lower the MTU of this machine's network interface to that of the path, clamp the MSS of TCP on the way, or set "
    "the sysctl net.ipv4.tcp_mtu_probing=2 on both machines"
)

logger = logging.getLogger(__name__)


class ChannelNotOpened(TransferFailed):
    """Raised if the receiver agreed on a channel that could not be opened."""

    def __init__(self, transport: str, reason: ChannelBroken, unreachable: ChannelUnreachable) -> None:
        super().__init__(reason.message)
        self.transport = transport
        self.unreachable = unreachable


class LinkDialler:
    """Dials receivers, and offers each of them the transports in the order of their measured performance."""

    def __init__(self, setup: LinkSetup) -> None:
        self.transports = setup.available.resolve(setup.transports)
        self._setup = setup
        self._clock = setup.clock
        self._counters = setup.counters
        self._is_auto = AUTO in setup.transports
        self._measured: dict[str, tuple[float, probing.Measured]] = {}
        self._unopened: dict[str, set[str]] = {}
        """For each receiver, the transports of `auto` that failed to open when they were last tried or measured."""

    async def dial(self, key: LinkKey) -> Opened:
        """Opens the parts of a Link to a receiver.

        Raises the same errors as `SendLinks.ask`, except for the deadline.
        """
        address, me = key[0], self._setup.identity.worker_id
        offered, num_silent = self.offer_to(address), 0
        failures: list[str] = []
        try:
            async with asyncio.timeout(self._setup.timeouts.connect_s):
                while True:
                    try:
                        return await self._dial_with(key, offered)
                    except ChannelNotOpened as failure:
                        failures.append(failure.unreachable.message)
                        self._unopened.setdefault(address, set()).add(failure.transport)
                        offered = tuple(name for name in offered if name != failure.transport)
                        if not offered:
                            raise ChannelUnreachable("; ".join(failures)) from failure
                        found = {"transport": failure.transport, "address": address, "reason": failure.message}
                        logger.warning("channel not opened", extra=found)
                    except grpc.aio.AioRpcError as error:
                        num_silent += 1
                        if num_silent >= MAX_SILENT_DIALS or not is_silence(error):
                            raise
        except TimeoutError:
            limit_s = self._setup.timeouts.connect_s
            if failures:
                raise ChannelUnreachable("; ".join(failures)) from None
            late = f"{me} could not make a Link to the worker at {address} within {limit_s:.3g} s"
            raise PeerUnreachable(late) from None
        except ChannelUnreachable as error:
            # The remaining transports cannot connect these two workers, so the failed transports are the ones to fix.
            raise ChannelUnreachable("; ".join(failures) or error.message) from error
        except (grpc.aio.AioRpcError, TandemError) as error:
            raise dial_error(error, address, caller=me) from error

    def offer_to(self, address: str) -> tuple[str, ...]:
        """Returns the transports to offer to a receiver. The best are first, as far as measurements exist."""
        if not self._is_auto:
            return self.transports
        names = self.transports
        if self._is_measured(address):
            names = in_order(names, self._measured[address][1].bytes_per_s)
        return tuple(sorted(names, key=self._unopened.get(address, set()).__contains__))

    def wants_measurement(self, address: str) -> bool:
        """Returns whether several transports to a receiver are possible and no recent measurement has ranked them."""
        return self._is_auto and len(self.transports) > 1 and not self._is_measured(address)

    def note_measured(self, address: str, measured: probing.Measured) -> None:
        """Records the measured rates of the transports to a receiver, and which transports failed to open."""
        self._measured[address] = self._clock.monotonic(), measured
        self._unopened[address] = set(measured.failures)

    def hello(self, peer_incarnation: str, offered: tuple[str, ...]) -> Hello:
        """Returns the hello message of this worker."""
        return Hello(
            worker_id=self._setup.identity.worker_id,
            incarnation=self._setup.identity.incarnation,
            peer_incarnation=peer_incarnation,
            layout=self._setup.layout,
            transports=offered,
            host_id=self._setup.reach.host_id,
            gpu_id=self._setup.reach.gpu_id,
            nccl=self._setup.reach.nccl,
            sends_padding=True,
        )

    async def open_channel(self, hello: Hello, ack: HelloAck) -> AnySendChannel:
        """Opens the channel that a receiver offers. Raises ChannelNotOpened."""
        timeout_s = OPENING_SHARE * self._setup.timeouts.connect_s
        try:
            return await _open_in_thread(self._setup.available[ack.transport], hello, ack, timeout_s)
        except ChannelBroken as error:
            raise ChannelNotOpened(ack.transport, error, self._unreachable(ack, error)) from error

    def _is_measured(self, address: str) -> bool:
        measured_at, measured = self._measured.get(address, (0.0, None))
        return measured is not None and self._clock.monotonic() - measured_at <= probing.VALID_S

    async def _dial_with(self, key: LinkKey, offered: tuple[str, ...]) -> Opened:
        address, peer_incarnation = key
        hello = self.hello(peer_incarnation, offered)
        rpc_channel = make_channel(address)
        call: Call | None = None
        try:
            proof = await prove(rpc_channel, CONNECT, incarnation=peer_incarnation)
            call = link_pb2_grpc.LinkStub(rpc_channel).Connect(metadata=metadata_of(proof))
            await check_answer(proof, call)
            ack = await _greet(call, hello)
            self._check(hello, ack)
            channel = await self.open_channel(hello, ack)
        except BaseException:
            if call is not None:
                call.cancel()
            await rpc_channel.close()
            raise
        logger.info("handoff channel %s to %s at %s", ack.transport, ack.worker_id, address)
        note_arithmetic(self._setup.layout, ack.layout, ack.worker_id)
        return Opened(rpc_channel, call, channel, hello, ack)

    def _check(self, hello: Hello, ack: HelloAck) -> None:
        if ack.incarnation != hello.peer_incarnation:
            self._counters.count(Reason.STALE_INCARNATION)
            raise StaleIncarnation("the receiver is not the incarnation that was meant")
        difference = hello.layout.difference(ack.layout)
        if difference or ack.ring_slot_bytes < hello.layout.page_bytes:
            self._counters.count(Reason.LAYOUT_MISMATCH)
            difference = difference or "a page is larger than a slot of its ring"
            raise LayoutMismatch(f"the receiver's pages do not fit ours: {difference}")
        if ack.transport not in hello.transports:
            raise MalformedMessage("the receiver chose a transport that was not offered")

    def _unreachable(self, ack: HelloAck, error: ChannelBroken) -> ChannelUnreachable:
        me, address = self._setup.identity.worker_id, ack.channel_address
        at = f" at {address}" if ":" in address and address not in error.message else ""
        message = f"{ack.transport} channel from {me} to {ack.worker_id}{at} cannot be opened: {error.message}"
        if isinstance(error, ChannelNotConnected):
            message += f"; {firewall_advice(address, caller=me, peer=ack.worker_id)}"
        elif isinstance(error, LargePacketsLost):
            message += f"; {MTU_ADVICE}"
        return ChannelUnreachable(message)


async def _greet(call: Call, hello: Hello) -> HelloAck:
    """Sends the hello and returns the receiver's acknowledgement. Raises the receiver's refusal."""
    await write_if_open(call, to_wire(hello))
    wire = await call.read()
    if not isinstance(wire, link_pb2.LinkMessage):
        raise PeerUnreachable("the receiver ended the Link at once")
    match from_wire(wire):
        case HelloAck() as ack:
            return ack
        case Abort(id=None) as refusal:
            raise error_from(refusal)
        case _:
            raise MalformedMessage("the receiver did not introduce itself")


async def _open_in_thread(transport: Transport, hello: Hello, ack: HelloAck, timeout_s: float) -> AnySendChannel:
    key, ring = channel_key(hello, ack), RingSpec(ack.ring_slots, ack.ring_slot_bytes)
    opening = asyncio.get_running_loop().run_in_executor(
        None, lambda: transport.open(ack.channel_address, key, ring, timeout_s=timeout_s)
    )
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        # The thread continues, so the channel that it opens must be closed.
        opening.add_done_callback(_discard_channel)
        raise


def _discard_channel(opening: asyncio.Future[AnySendChannel]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().shutdown()
        opening.result().close()
