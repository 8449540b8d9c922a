"""The sending worker's side of the handoff: `SendLinks` maintains one Link per receiver, over the fastest channel.

`send_link` handles an open Link. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

import grpc

from kv_transfer import measure as probing
from kv_transfer.device_pages import warm_up
from kv_transfer.doubting import LinkDoubts
from kv_transfer.link_dialling import LinkDialler
from kv_transfer.link_end import LinkSetup
from kv_transfer.link_retries import LinkKey, LinkRetries
from kv_transfer.protocol.messages import TransferId
from kv_transfer.send_link import Call, Opened, SendLink, SendTransfer
from protos import link_pb2_grpc, worker_pb2
from services.runtime.clock import Deadline
from services.runtime.errors import (
    ChannelUnreachable,
    DeadlineExceeded,
    PeerUnreachable,
    RequestCancelled,
    TandemError,
    WorkerUnavailable,
)
from services.runtime.rpc import check_answer, make_channel, metadata_of, prove
from services.scheduling.links import LinkMeters

SLOW_DIAL_S = 0.8
"""A failed dial that took at least this long, in seconds, is retried in the background.

No further request waits for it.
"""

PROBE = "/tandem.v1.Link/Probe"
"""Name of the method in proofs."""

logger = logging.getLogger(__name__)


class SendLinks:
    """The Links of a sending worker. They are opened on first use, and opened again after a failure.

    If the setup's transports are `auto`, the first Link to a receiver uses the first transport that opens, so that no
    request waits for a measurement. The transports are measured shortly afterwards. If another transport is better, a
    Link over it replaces the first Link. `meters` estimates the speed of the link to each receiver. It learns from
    every handoff and every measurement, and from low-traffic probes of idle links. `on_channels` is called on the event
    loop with the channel to each receiver, by worker ID, whenever a channel changes.
    """

    def __init__(self, setup: LinkSetup, *, on_channels: Callable[[Mapping[str, str]], None] | None = None) -> None:
        self.counters = setup.counters
        self.meters = LinkMeters()
        self._setup = setup
        warm_up(setup.pool)
        self._dialler = LinkDialler(setup)
        self._channels: dict[str, str] = {}
        self._on_channels = on_channels
        self._clock = setup.clock
        self._links: dict[LinkKey, asyncio.Future[SendLink]] = {}
        self._closing: set[asyncio.Event] = set()
        self._retired: set[SendLink] = set()
        """Replaced Links that have not ended."""
        self._improving: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._doubts = LinkDoubts(self.meters, self._measure_again, clock=self._clock)
        self._retries = LinkRetries(self._open_link, clock=self._clock)

    async def reserve(
        self, address: str, peer_incarnation: str, transfer_id: TransferId, *, num_tokens: int, deadline: Deadline
    ) -> SendTransfer:
        """Reserves pages at the receiver: calls `ask`, and waits until the pages are granted.

        Raises the errors of `ask`, NoFreePages, and other refusals of the receiver.
        """
        transfer = await self.ask(address, peer_incarnation, transfer_id, num_tokens=num_tokens, deadline=deadline)
        try:
            await transfer.granted()
        except asyncio.CancelledError:
            transfer.give_up(RequestCancelled("the handoff was cancelled"))
            raise
        return transfer

    def has_link(self, address: str, peer_incarnation: str) -> bool:
        """Returns whether a Link to this receiver is open, so that `ask` does not have to open it first."""
        place = self._links.get((address, peer_incarnation))
        return place is not None and place.done()

    async def ask(
        self, address: str, peer_incarnation: str, transfer_id: TransferId, *, num_tokens: int, deadline: Deadline
    ) -> SendTransfer:
        """Requests pages for `num_tokens` tokens from the receiver that listens on `address`.

        `num_tokens` counts the tokens whose KV the pages hold: the prompt, and for a running sequence the start of its
        response. Returns when the request has left this process. From then on it reaches the receiver even if this
        process dies, unless the receiver notices the broken connection before it has read the request.

        Raises PeerUnreachable, or its subclass LinkRefused or ChannelUnreachable, if no Link can be opened. Raises
        StaleIncarnation, NotProven, or LayoutMismatch if the receiver is not the expected worker. Also raises
        DeadlineExceeded, and WorkerUnavailable if this worker is shutting down.
        """
        deadline.check()
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                link = await self._link_to(address, peer_incarnation)
                while link.is_retired:  # retired since it was opened
                    link = await self._link_to(address, peer_incarnation)
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed while the Link was made") from None
        return await link.ask(transfer_id, num_tokens, deadline)

    def peer_links(self) -> list[worker_pb2.PeerLink]:
        """Returns the current estimate of the link to each receiver, for gateways."""
        now_s, told = self._clock.monotonic(), []
        for worker_id, meter in self.meters:
            link = worker_pb2.PeerLink(worker_id=worker_id, underway_bytes=round(meter.underway_bytes(now_s)))
            if meter.is_known:
                speed = meter.speed(now_s)
                link.speed.latency_s, link.speed.bytes_per_s = speed.latency_s, speed.bytes_per_s
            told.append(link)
        return told

    async def close(self) -> None:
        """Fails running transfers and ends all Links. Returns once all their threads have ended."""
        self._is_closed = True
        await self._doubts.close()
        await self._retries.close()
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
            error = self._retries.error_for(key)
            if error is not None:
                raise error
            place = task = asyncio.create_task(self._dial(key))
            self._links[key] = task
            task.add_done_callback(lambda done: self._on_dialled(key, task))
        # Shielded: other callers may wait for the same Link, and a Link that is being opened is worth finishing.
        return await asyncio.shield(place)

    def _on_dialled(self, key: LinkKey, task: asyncio.Task[SendLink]) -> None:
        if task.cancelled() or task.exception() is not None:
            if self._links.get(key) is task:
                del self._links[key]
            return
        self._note_link(key, task.result())

    def _note_link(self, key: LinkKey, link: SendLink) -> None:
        self._note_channel(link.receiver_id, link.transport)
        self._doubts.note(link.receiver_id, key, link.transport)
        if link.is_lost:
            self._forget(key, link)
        elif self._dialler.wants_measurement(key[0]) and not self._is_closed:
            improving = asyncio.create_task(self._improve(key, link), name=f"measure {key[0]}")
            self._improving.add(improving)
            improving.add_done_callback(self._improving.discard)

    async def _open_link(self, key: LinkKey) -> None:
        """Opens a Link in the background. Raises the errors of `ask`.

        It cannot replace a Link, because `_link_to` opens no Link while `_retries` has a failure of the receiver.
        """
        link = await self._make(key)
        if self._is_closed:
            link.retire()
            return
        self._put(key, link)
        self._note_link(key, link)

    async def _dial(self, key: LinkKey) -> SendLink:
        """Opens a Link for a request.

        Retries in the background after a slow failure or if the payload channel is unreachable.
        """
        start_s = self._clock.monotonic()
        try:
            return await self._make(key)
        except PeerUnreachable as error:
            is_slow = self._clock.monotonic() - start_s >= SLOW_DIAL_S
            if (is_slow or isinstance(error, ChannelUnreachable)) and not self._is_closed:
                self._retries.failed(key, error)
            raise

    async def _make(self, key: LinkKey) -> SendLink:
        return self._adopt(key, await self._dialler.dial(key))

    def _put(self, key: LinkKey, link: SendLink) -> None:
        self._links[key] = place = asyncio.get_running_loop().create_future()
        place.set_result(link)

    def _is_current(self, key: LinkKey, link: SendLink) -> bool:
        """Returns whether callers that need a Link to that receiver get this Link."""
        place = self._links.get(key)
        if place is None or not place.done() or place.cancelled() or place.exception() is not None:
            return False
        return place.result() is link

    def _forget(self, key: LinkKey, link: SendLink) -> None:
        """Removes a lost Link. If the Link has only just been opened, `_on_dialled` removes it instead."""
        self._retired.discard(link)
        if self._is_current(key, link):
            del self._links[key]
            self._note_channel(link.receiver_id, None)

    async def _improve(self, key: LinkKey, link: SendLink) -> None:
        """Measures the channels to a receiver.

        If another channel is better, replaces the Link with a Link over that channel.
        """
        await asyncio.sleep(probing.AFTER_S)
        if not self._is_current(key, link):
            return  # the Link that replaced it is measured separately
        try:
            measured = await self.measure(key)
            if not measured.bytes_per_s:
                return
            self._dialler.note_measured(key[0], measured)
            best = self._dialler.offer_to(key[0])[0]
            measured.teach(self.meters.to(link.receiver_id).opinion, best, self._clock.monotonic())
            if best == link.transport or not self._is_current(key, link):
                return
            better = await self._make(key)
        except (TandemError, grpc.aio.AioRpcError) as error:
            logger.info("the channels to %s were not measured, or not changed: %s", key[0], error)
            return
        if better.is_lost or better.transport == link.transport or not self._is_current(key, link):
            better.retire()
            return
        self._put(key, better)
        self._note_channel(better.receiver_id, better.transport)
        self._doubts.note(better.receiver_id, key, better.transport)
        self._retired.add(link)
        link.retire()

    async def _measure_again(self, key: LinkKey, transport: str) -> probing.Measured:
        """Measures the channel in use with as little traffic as possible. Raises the errors of `measure`."""
        return await self.measure(key, (transport,), most_bytes=probing.RETRY_BYTES)

    async def measure(
        self, key: LinkKey, transports: tuple[str, ...] = (), *, most_bytes: int | None = None
    ) -> probing.Measured:
        """Measures the channels to a receiver, given its address and incarnation, with rounds of at most `most_bytes`.

        Measures all channels if no `transports` are given. Raises gRPC's error if the receiver cannot be reached,
        NotProven, and the receiver's refusal.
        """
        address, peer_incarnation = key
        rpc_channel = make_channel(address)
        try:
            stub = link_pb2_grpc.LinkStub(rpc_channel)
            hello = self._dialler.hello(peer_incarnation, transports or self._dialler.transports)

            async def begin() -> Call:
                proof = await prove(rpc_channel, PROBE, incarnation=peer_incarnation)
                call = stub.Probe(metadata=metadata_of(proof))
                await check_answer(proof, call)
                return call

            measured = await probing.measure(begin, hello, self._dialler.open_channel, most_bytes=most_bytes)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
            return probing.Measured()  # a receiver of an earlier version
        finally:
            await rpc_channel.close()
        logger.info("channels to %s: %s", address, measured)
        return measured

    def _note_channel(self, worker_id: str, transport: str | None) -> None:
        if transport is None:
            self._channels.pop(worker_id, None)
        else:
            self._channels[worker_id] = transport
        if self._on_channels is not None:
            self._on_channels(dict(self._channels))

    def _adopt(self, key: LinkKey, opened: Opened) -> SendLink:
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
