"""One Link at the sender, and the handoffs on it. `SendTransfer` is one handoff.

Executes the actions of `protocol.sender`. Belongs to one event loop. The Link's own thread reads page memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from kv_transfer.link_end import LinkEnd, LinkSetup
from kv_transfer.link_errors import lost_link_error
from kv_transfer.protocol.actions import (
    Action,
    FailLink,
    PostChunk,
    ReportCommitted,
    ReportFailed,
    ReportGranted,
    ReportReleased,
    RetireLink,
    Send,
    SkipChunks,
)
from kv_transfer.protocol.counters import Reason
from kv_transfer.protocol.messages import Hello, HelloAck, TransferId, pages_per_frame
from kv_transfer.protocol.sender import SenderLink
from kv_transfer.send_thread import Answer, ChunkPoster
from kv_transfer.transports.base import AnySendChannel
from kv_transfer.wire import from_wire, tick_until_cancelled
from protos import link_pb2
from services.runtime.clock import Deadline
from services.runtime.errors import RequestCancelled, TandemError, TransferFailed
from services.scheduling.links import Carried, LinkMeter

Call: TypeAlias = grpc.aio.StreamStreamCall[link_pb2.LinkMessage, link_pb2.LinkMessage]
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HandoffStats:
    """Statistics of a handoff. `exposed_s` is the time from the seal to the commit, which no computation hid.

    `carried` is the bytes and the time of the latest continuous use of the link, which may include earlier transfers.
    None if the handoff does not allow a conclusion about the link's speed.
    """

    num_pages: int
    num_bytes: int
    exposed_s: float
    transport: str
    carried: Carried | None = None


class SendTransfer:
    """One handoff, from the request for its pages to its end. Nothing is sent before the pages are `granted`.

    Sent pages must stay allocated and unchanged until `released` is set. If one is reused before it was read, the
    transfer fails.
    """

    def __init__(self, link: SendLink, transfer_id: TransferId) -> None:
        loop = asyncio.get_running_loop()
        self.id = transfer_id
        self.num_cached_tokens = 0
        self.transport = link.transport
        self.released = asyncio.Event()
        """Set once the pages are no longer read, whatever the outcome of the transfer."""
        self._link = link
        self._asked: asyncio.Future[None] = loop.create_future()
        self._granted: asyncio.Future[int | TandemError] = loop.create_future()
        self._outcome: asyncio.Future[ReportCommitted | TandemError] = loop.create_future()
        self._carried: Carried | None = None

    @property
    def error(self) -> TandemError | None:
        """Error that failed the transfer, or None if it has not failed."""
        if not self._outcome.done():
            return None
        outcome = self._outcome.result()
        return outcome if isinstance(outcome, TandemError) else None

    async def granted(self) -> None:
        """Waits until the receiver has reserved pages.

        Raises NoFreePages or another refusal of the receiver, TransferFailed, DeadlineExceeded, or WorkerUnavailable if
        this worker is shutting down.
        """
        outcome = await asyncio.shield(self._granted)
        if isinstance(outcome, TandemError):
            raise outcome.again()
        self.num_cached_tokens = outcome

    def send(self, first_page: int, page_ids: Sequence[int], *, generations: Sequence[int] | None = None) -> None:
        """Queues pages without waiting: `page_ids[0]` is page `first_page` of the sender's page table.

        Send pages in order and without gaps. The last page may be partly filled. Pages that the receiver has cached are
        skipped. If the pages are not allocated to the caller, pass their expected `generations`. Raises the error that
        ended the transfer, ValueError if pages are out of order or beyond the reserved tokens, and InvariantViolated if
        pages do not exist.
        """
        self._raise_if_ended()
        self._link.send(self.id, first_page, page_ids, meant=generations)

    async def seal(self, *, num_tokens: int, first_token_id: int, sampling_position: int) -> HandoffStats:
        """Seals the transfer and waits until the receiver owns the pages.

        Raises the error that ended the transfer: TransferFailed, DeadlineExceeded, the receiver's refusal, or
        WorkerUnavailable if this worker is shutting down. When it returns or raises (other than by cancellation), the
        pages are no longer read.
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
            raise outcome.again()
        exposed_s = self._link.now() - started
        return HandoffStats(outcome.num_pages, outcome.num_bytes, exposed_s, self.transport, self._carried)

    async def abort(self, error: TandemError) -> None:
        """Aborts the transfer if it has not ended. Returns once its pages are no longer read. Idempotent."""
        self.give_up(error)
        await self.released.wait()

    def give_up(self, error: TandemError) -> None:
        """Aborts the transfer if it has not ended, without waiting: its pages may still be read. Idempotent."""
        self._link.abort(self.id, error)

    def _raise_if_ended(self) -> None:
        if self.error is not None:
            raise self.error.again()
        if self._outcome.done():
            raise TransferFailed("the transfer was committed already")

    # Only the Link calls the methods below.

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


@dataclass(frozen=True, slots=True)
class Opened:
    """The parts of a Link that is about to start."""

    rpc_channel: grpc.aio.Channel
    call: Call
    channel: AnySendChannel
    hello: Hello
    ack: HelloAck


class SendLink(LinkEnd):
    """One Link: executes the actions of its state machine and feeds events to it."""

    def __init__(
        self,
        opened: Opened,
        setup: LinkSetup,
        *,
        meter: LinkMeter,
        on_lost: Callable[[], None],
        on_ended: Callable[[], None],
    ) -> None:
        super().__init__(f"Link to {opened.ack.worker_id}")
        self.transport = opened.ack.transport
        self.receiver_id = opened.ack.worker_id
        self.is_retired = False
        """Whether the Link accepts no further transfers and ends with the last one."""
        self.now = setup.clock.monotonic
        self._opened = opened
        self._generations = setup.generations
        self._counters = setup.counters
        self._meter = meter
        self._page_bytes = setup.layout.page_bytes
        self._on_lost = on_lost
        self._on_ended = on_ended
        frame_pages = pages_per_frame(self._page_bytes, opened.ack.ring_slot_bytes)
        self._machine = SenderLink(
            layout=setup.layout,
            frame_pages=frame_pages,
            timeouts=setup.timeouts,
            counters=setup.counters,
            now=self.now(),
        )
        self._handles: dict[TransferId, SendTransfer] = {}
        self._poster = ChunkPoster(
            opened.channel,
            setup,
            frame_pages=frame_pages,
            on_answer=lambda chunk, answer: self._from_thread(self._on_answer, chunk, answer),
            on_broken=lambda error: self._from_thread(self._on_broken, error),
            on_ended=lambda: self._from_thread(self._on_poster_ended),
        )
        runs = (self._read(), self._write(), tick_until_cancelled(self._tick))
        self._tasks = [asyncio.create_task(run) for run in runs]
        for task in self._tasks:
            task.add_done_callback(self._on_task_ended)
        self._closing: asyncio.Task[None] | None = None

    @property
    def is_lost(self) -> bool:
        """Whether the Link has ended."""
        return self._machine.lost is not None

    def retire(self) -> None:
        """Ends the Link after the last of its current transfers."""
        self.is_retired = True
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if not self._handles:
            self.fail(TransferFailed("the Link was retired"))

    async def ask(self, transfer_id: TransferId, num_tokens: int, deadline: Deadline) -> SendTransfer:
        """Starts a transfer. Returns once the request is certain to reach the receiver, or the transfer has ended."""
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

    def send(
        self, transfer_id: TransferId, first_page: int, page_ids: Sequence[int], *, meant: Sequence[int] | None
    ) -> None:
        """Queues pages of a transfer; see `SendTransfer.send`."""
        # Do this first: it raises if pages do not exist, and then nothing must have been announced.
        generations = self._generations.generations(page_ids) if meant is None else tuple(meant)
        for action in self._machine.send(transfer_id, first_page, page_ids):
            if isinstance(action, PostChunk):
                self._poster.submit(action, generations[len(page_ids) - len(action.page_ids) :])
                self._meter.sent(transfer_id, len(action.page_ids) * self._page_bytes, self.now())
            else:
                self._perform([action])

    def seal(self, transfer_id: TransferId, num_tokens: int, first_token_id: int, sampling_position: int) -> None:
        """Seals a transfer whose pages are all queued."""
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
        """Aborts a transfer if it has not ended. Idempotent."""
        self._perform(self._machine.abort(transfer_id, error, self.now()))

    def fail(self, error: TandemError) -> None:
        """Ends the Link permanently. Idempotent."""
        if self.is_lost:
            return
        level = logging.WARNING if self._machine.transfers else logging.INFO
        logger.log(level, "%s ended: %s", self._name, error)
        if not self.is_retired or self._handles:
            self._counters.count(Reason.LINK_LOST)
        actions = self._machine.link_lost(error)
        self._on_lost()
        self._perform_last(actions)
        self._poster.stop()
        for task in self._tasks:
            task.cancel()
        self.outbox.close()

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
                case RetireLink():
                    self.retire()
                case _:
                    raise AssertionError(f"{action} is not an action of the sender")

    def _tick(self) -> None:
        self._perform(self._machine.tick(self.now()))

    async def _read(self) -> None:
        while True:
            wire = await self._opened.call.read()
            if not isinstance(wire, link_pb2.LinkMessage):
                raise TransferFailed("the receiver ended the Link")
            self._perform(self._machine.on_message(from_wire(wire), self.now()))

    async def _write(self) -> None:
        async for wire in self.outbox:
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
            error = lost_link_error(error)
        if error is not None and not isinstance(error, TandemError):
            if not isinstance(error, asyncio.InvalidStateError):  # a write to a call that has just ended
                logger.error("a task of the Link failed", exc_info=error)
            error = TransferFailed("the Link broke")
        self.fail(error or TransferFailed("the Link was ended"))

    def _on_answer(self, chunk: PostChunk, answer: Answer) -> None:
        if answer == "skipped":
            actions = self._machine.chunk_skipped(chunk.id)
        elif answer == "stale":
            actions = self._machine.chunk_stale(chunk.id, self.now())
        else:
            actions = self._machine.chunk_posted(chunk.id, chunk.chunk_index, answer, self.now())
        self._perform(actions)

    def _on_broken(self, error: TandemError) -> None:
        self._counters.count(Reason.CHANNEL_BROKEN)
        self.fail(error)

    def _on_poster_ended(self) -> None:
        self.fail(TransferFailed("the channel was closed"))
        self._perform_last(self._machine.channel_ended())
        self._closing = self._loop.create_task(self._close_call())

    async def _close_call(self) -> None:
        self._opened.call.cancel()
        await self._opened.rpc_channel.close()
        self._on_ended()
