"""One Link at the receiver: what arrives is put into pages that the worker gives it.

Carries out what `protocol.receiver` decides. Belongs to one event loop; page memory is written by the Link's thread.
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
    """Pages that a worker set aside, in the order of the tokens.

    The first `num_cached_tokens` tokens, a multiple of the page size, are cached already and are never written to.
    """

    page_ids: Sequence[int]
    num_cached_tokens: int


class ReceiveTarget(Protocol):
    """What the receiving worker does for a transfer. All of it is called on the event loop.

    An answer that takes longer than `Timeouts.worker_s` fails the transfer; when it comes it is still followed by
    `release` or `abandon`, so that no page is lost.
    """

    async def reserve(self, transfer_id: TransferId, num_tokens: int) -> Reserved:
        """Set pages aside. Raises the refusal that the sender is told."""
        ...

    async def commit(self, transfer_id: TransferId, *, first_token_id: int, sampling_position: int) -> None:
        """Take the verified pages over. If it raises, it has not, and `release` follows."""
        ...

    async def release(self, transfer_id: TransferId, error: TandemError) -> None:
        """Take unused pages back: the transfer failed, and nothing writes to them. Never after a commit."""
        ...

    async def abandon(self, transfer_id: TransferId, error: TandemError) -> None:
        """After a commit: the sender had given up before it knew. End what was begun; nobody waits for it.

        May come more than once, and for a transfer whose work has ended.
        """
        ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a Link at the receiver works with."""

    setup: LinkSetup
    peer: str
    terms: LinkTerms
    abort_anywhere: Callable[[TransferId, TandemError], None]
    on_ended: Callable[[ReceiveLink], None]


class ReceiveLink(LinkEnd):
    """One Link: carries out the machine's actions and tells it what happens."""

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
        """Transfers that are not over."""
        return len(self._machine.transfers)

    @property
    def idle_since_s(self) -> float | None:
        """Time of the end of its last transfer or of the last request to end, or None while a transfer runs."""
        return self._last_used_s if self._machine.is_idle else None

    @property
    def is_leaving(self) -> bool:
        """Whether the Link is lost, or its sender is about to end it; see `SlotHolder`."""
        if self._machine.lost is not None:
            return True
        return self._machine.is_retiring and self._now() - self._last_used_s < ROOM_TIMEOUT_S

    def retire(self) -> None:
        """Asks the sender to end the Link, if it is idle. Counts as a use, so that other Links are asked next."""
        self._last_used_s = self._now()
        self._perform(self._machine.retire())

    def start(self, requests: AsyncIterator[link_pb2.LinkMessage]) -> None:
        """Begins to receive, from the channel and from the sender's messages."""
        self._placer.start()
        for run in (self._read(requests), tick_until_cancelled(self._tick)):
            task = asyncio.create_task(run)
            task.add_done_callback(self._on_task_ended)
            self._tasks.append(task)

    def abort(self, transfer_id: TransferId, error: TandemError) -> None:
        """Gives a transfer up, if it runs here; as `LinkReceiver.abort`."""
        self._perform(self._machine.abort(transfer_id, error))

    def fail(self, error: TandemError) -> None:
        """End the Link for good. Idempotent. What it holds is given back in the background."""
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
        except Exception as error:  # noqa: BLE001 - the boundary to the worker: every Reserve gets an answer
            self._perform(self._machine.reserve_failed(action.id, _told(error, "reserve")))
            return
        page_ids = tuple(reserved.page_ids)
        destination = Destination(page_ids, reserved.num_cached_tokens, action.num_tokens)
        try:
            self._placer.open(action.id, destination)
        except InvariantViolated:
            # The pages go back to the worker that named them.
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
        except Exception as error:  # noqa: BLE001 - the boundary to the worker: every Seal gets an answer
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
        # The sender may have felt it, and ended the Link, before we hear of it here.
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
    """Return what the sender is told of the worker's failure; texts of unknown errors stay here."""
    if isinstance(error, TandemError) and not isinstance(error, InvariantViolated):
        return error
    logger.error("the worker failed to %s", doing, exc_info=error)
    return TransferFailed(f"the receiving worker failed to {doing}")
