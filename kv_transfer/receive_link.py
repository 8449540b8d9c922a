"""One Link at the receiver: writes arriving frames into pages that the worker has reserved.

Executes the actions of `protocol.receiver`. Belongs to one event loop. The Link's thread writes page memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kv_transfer.link_end import LinkEnd, LinkSetup
from kv_transfer.link_slots import ROOM_TIMEOUT_S
from kv_transfer.page_bytes import Destination
from kv_transfer.protocol.actions import (
    AbandonPages,
    Action,
    CommitPages,
    FailLink,
    Place,
    ReleasePages,
    ReportEnded,
    ReservePages,
    Revoke,
    Send,
    Supersede,
)
from kv_transfer.protocol.counters import Reason
from kv_transfer.protocol.frames import PlacementEvent
from kv_transfer.protocol.messages import TransferId
from kv_transfer.protocol.receiver import ReceiverLink
from kv_transfer.protocol.receiver_transfer import LinkTerms
from kv_transfer.receive_thread import FramePlacer
from kv_transfer.transports.base import AnyReceiveChannel
from kv_transfer.wire import MalformedMessage, from_wire, tick_until_cancelled
from protos import link_pb2
from services.runtime.errors import InvariantViolated, TandemError, TransferFailed

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reserved:
    """Pages that a worker has reserved, in the order of the tokens.

    The first `num_cached_tokens` tokens, a multiple of the page size, are already cached and are never written to.
    """

    page_ids: Sequence[int]
    num_cached_tokens: int


class ReceiveTarget(Protocol):
    """The receiving worker's part of a transfer. All methods run on the event loop.

    A call that takes longer than `Timeouts.worker_s` fails the transfer. When the call returns, `release` or `abandon`
    still follows, so that no page leaks.
    """

    async def reserve(self, transfer_id: TransferId, num_tokens: int) -> Reserved:
        """Reserves pages. Raises the refusal that is sent to the sender."""
        ...

    async def commit(self, transfer_id: TransferId, *, first_token_id: int, sampling_position: int) -> None:
        """Takes ownership of the verified pages. If it raises, it has not, and `release` follows."""
        ...

    async def release(self, transfer_id: TransferId, error: TandemError) -> None:
        """Frees the unused pages of a failed transfer, which are no longer written to. Never called after a commit."""
        ...

    async def abandon(self, transfer_id: TransferId, error: TandemError) -> None:
        """Stops the work that a commit has started, because the sender gave up before it received the commit.

        May be called more than once, and for a transfer whose work has ended.
        """
        ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The dependencies of a Link at the receiver."""

    setup: LinkSetup
    peer: str
    terms: LinkTerms
    abort_anywhere: Callable[[TransferId, TandemError], None]
    on_ended: Callable[[ReceiveLink], None]


class ReceiveLink(LinkEnd):
    """One Link: executes the actions of its state machine and feeds events to it."""

    def __init__(
        self, machine: ReceiverLink, channel: AnyReceiveChannel, target: ReceiveTarget, around: Surroundings
    ) -> None:
        super().__init__(f"Link of {around.peer}")
        self.ended = asyncio.Event()
        self._machine = machine
        self._target = target
        self._around = around
        self._counters = around.setup.counters
        self._now = around.setup.clock.monotonic
        self._tasks: list[asyncio.Task[None]] = []
        self._works: set[asyncio.Task[None]] = set()
        self._last_used_s = self._now()
        self._is_placer_ended = False
        self._placer = FramePlacer(
            channel,
            around.setup,
            terms=around.terms,
            on_events=lambda events: self._from_thread(self._on_events, events),
            on_dropped=lambda reason: self._from_thread(self._counters.count, reason),
            on_ended=lambda error: self._from_thread(self._on_placer_ended, error),
        )

    @property
    def num_transfers(self) -> int:
        """Number of transfers that have not ended."""
        return len(self._machine.transfers)

    @property
    def idle_since_s(self) -> float | None:
        """Time of the last transfer's end or of the last retire request, whichever is later.

        None while a transfer runs.
        """
        return self._last_used_s if self._machine.is_idle else None

    @property
    def is_leaving(self) -> bool:
        """Whether the Link is lost, or its sender is about to end it; see `SlotHolder`."""
        if self._machine.lost is not None:
            return True
        return self._machine.is_retiring and self._now() - self._last_used_s < ROOM_TIMEOUT_S

    def retire(self) -> None:
        """Requests that the sender end the Link, if it is idle.

        Counts as a use, so that the next call picks a different Link.
        """
        self._last_used_s = self._now()
        self._perform(self._machine.retire())

    def start(self, requests: AsyncIterator[link_pb2.LinkMessage]) -> None:
        """Starts receiving from the channel and from the sender's messages."""
        self._placer.start()
        for run in (self._read(requests), tick_until_cancelled(self._tick)):
            task = asyncio.create_task(run)
            task.add_done_callback(self._on_task_ended)
            self._tasks.append(task)

    def abort(self, transfer_id: TransferId, error: TandemError) -> None:
        """Aborts a transfer if it runs on this Link; see `LinkReceiver.abort`."""
        self._perform(self._machine.abort(transfer_id, error))

    def fail(self, error: TandemError) -> None:
        """Ends the Link permanently. Idempotent. Releases its pages in the background."""
        if self._machine.lost is not None:
            return
        level = logging.WARNING if self._machine.transfers else logging.INFO
        logger.log(level, "%s is lost: %s", self._name, error)
        self._perform_last(self._machine.link_lost(error))
        self._placer.stop()
        for task in self._tasks:
            task.cancel()
        self.outbox.close()

    def _perform(self, actions: Sequence[Action]) -> None:
        if not self._machine.is_idle:
            self._last_used_s = self._now()
        for action in actions:
            match action:
                case Send():
                    self._send_message(action.message)
                case ReservePages():
                    self._begin_work(self._reserve(action))
                case Place():
                    self._on_events(self._placer.add(action))
                case Revoke():
                    self._on_events(self._placer.revoke(action.id))
                case CommitPages():
                    self._begin_work(self._commit(action))
                case ReleasePages():
                    self._begin_work(self._release(action))
                case AbandonPages():
                    self._begin_work(self._abandon(action))
                case Supersede():
                    self._around.abort_anywhere(action.id, TransferFailed("a newer attempt took its place"))
                case ReportEnded():
                    self._placer.forget(action.id)
                case FailLink():
                    self.fail(action.error)
                case _:
                    raise AssertionError(f"{action} is not an action of the receiver")

    async def _read(self, requests: AsyncIterator[link_pb2.LinkMessage]) -> None:
        async for wire in requests:
            self._perform(self._machine.on_message(from_wire(wire), self._now()))

    def _tick(self) -> None:
        self._perform(self._machine.tick(self._now(), self._placer.num_frames_seen))

    def _on_events(self, events: Sequence[PlacementEvent]) -> None:
        for event in events:
            self._perform(self._machine.placement(event))

    def _begin_work(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._works.add(task)
        task.add_done_callback(self._on_work_ended)

    async def _reserve(self, action: ReservePages) -> None:
        try:
            reserved = await self._target.reserve(action.id, action.num_tokens)
        except Exception as error:  # noqa: BLE001 - the boundary to the worker: every Reserve gets a reply
            self._perform(self._machine.reserve_failed(action.id, _told(error, "reserve")))
            return
        page_ids = tuple(reserved.page_ids)
        destination = Destination(page_ids, reserved.num_cached_tokens, action.num_tokens)
        try:
            self._placer.open(action.id, destination)
        except InvariantViolated:
            # Report a reservation without pages, so that the pages return to the worker that named them.
            logger.exception("transfer %s got unusable pages", action.id)
            self._perform(self._machine.reserved(action.id, 0, 0))
            return
        self._perform(self._machine.reserved(action.id, len(page_ids), reserved.num_cached_tokens))

    async def _commit(self, action: CommitPages) -> None:
        if not self._placer.is_current(action.id):
            self._counters.count(Reason.STALE_GENERATION)
            error = TransferFailed("reserved pages were given to another use")
            self._perform(self._machine.commit_failed(action.id, error))
            return
        try:
            await self._target.commit(
                action.id, first_token_id=action.first_token_id, sampling_position=action.sampling_position
            )
        except Exception as error:  # noqa: BLE001 - the boundary to the worker: every Seal gets a reply
            self._perform(self._machine.commit_failed(action.id, _told(error, "commit")))
        else:
            self._perform(self._machine.committed(action.id))

    async def _release(self, action: ReleasePages) -> None:
        try:
            await self._target.release(action.id, action.error)
        except Exception:
            logger.exception("pages of transfer %s could not be released", action.id)
        self._perform(self._machine.released(action.id))

    async def _abandon(self, action: AbandonPages) -> None:
        try:
            await self._target.abandon(action.id, action.error)
        except Exception:
            logger.exception("what was begun with the pages of transfer %s could not be ended", action.id)

    def _on_work_ended(self, task: asyncio.Task[None]) -> None:
        self._works.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("the %s contradicts itself", self._name, exc_info=error)
            self.fail(TransferFailed("the Link broke"))
        self._end_when_idle()

    def _on_task_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, MalformedMessage):
            self._counters.count(Reason.PROTOCOL_VIOLATION)
        if error is not None and not isinstance(error, TandemError):
            logger.error("a task of the Link failed", exc_info=error)
            error = TransferFailed("the Link broke")
        self.fail(error or TransferFailed("the sender ended the Link"))

    def _on_placer_ended(self, error: TandemError) -> None:
        # The sender may have noticed the failure and ended the Link before this side processes it.
        if self._placer.is_broken:
            self._counters.count(Reason.CHANNEL_BROKEN)
        self.fail(error)
        self._perform_last(self._machine.channel_ended())
        self._is_placer_ended = True
        self._end_when_idle()

    def _end_when_idle(self) -> None:
        if self._is_placer_ended and not self._works:
            self._around.on_ended(self)
            self.ended.set()


def _told(error: Exception, doing: str) -> TandemError:
    """Returns the error to send to the sender. Hides the message of unexpected errors."""
    if isinstance(error, TandemError) and not isinstance(error, InvariantViolated):
        return error
    logger.error("the worker failed to %s", doing, exc_info=error)
    return TransferFailed(f"the receiving worker failed to {doing}")
