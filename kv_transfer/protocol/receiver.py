"""State machine for the receiving side of a Link. `receiver_transfer` has the machine for each transfer.

Does no I/O and reads no clock: turns events and the current time into actions. Does not depend on tensors, threads, or
RPC.
"""

from __future__ import annotations

from kv_transfer.protocol.actions import (
    AbandonPages,
    Action,
    FailLink,
    Send,
    Supersede,
)
from kv_transfer.protocol.counters import Counters, Reason
from kv_transfer.protocol.failures import peer_error_from
from kv_transfer.protocol.fence import Fence
from kv_transfer.protocol.frames import ChunkLost, PlacementEvent
from kv_transfer.protocol.messages import (
    Abort,
    AbortAck,
    ChunkHeader,
    Committed,
    Heartbeat,
    Hello,
    Message,
    Reserve,
    Retire,
    Seal,
    TransferId,
    WireLayout,
)
from kv_transfer.protocol.receiver_transfer import LinkTerms, ReceiverState, ReceiverTransfer, place_for
from kv_transfer.protocol.timing import Liveness, Timeouts
from services.runtime.errors import TandemError, TransferFailed, TransferStalled

# Number of checksum mismatches on one channel after which all its transfers fail.
MAX_CHECKSUM_MISMATCHES = 3


class ReceiverLink:
    """All transfers of one Link at the receiver, the claims on its channel, and the liveness of the peer.

    After `link_lost`, only the events that complete pending actions are expected.
    """

    def __init__(self, *, terms: LinkTerms, fence: Fence, timeouts: Timeouts, counters: Counters, now: float) -> None:
        self._terms = terms
        self._fence = fence
        self._timeouts = timeouts
        self._counters = counters
        self._liveness = Liveness(timeouts, now)
        self._transfers: dict[TransferId, ReceiverTransfer] = {}
        self._next_seq = 0
        self._num_frames_seen = 0
        self._last_progress = now
        self._num_checksum_mismatches = 0
        self.lost: TandemError | None = None
        self.is_retiring = False
        """Whether the sender was requested to end the Link and has started no transfer since."""

    @property
    def is_idle(self) -> bool:
        """Whether no transfer is running."""
        return not self._transfers

    @property
    def transfers(self) -> tuple[ReceiverTransfer, ...]:
        """The transfers that have not ended."""
        return tuple(self._transfers.values())

    def on_message(self, message: Message, now: float) -> list[Action]:
        """Handles a message from the sender."""
        self._liveness.heard(now)
        match message:
            case Heartbeat():
                return []
            case Reserve():
                return self._on_reserve(message, now)
            case ChunkHeader():
                return self._on_chunk(message, now)
            case Seal():
                return self._on_seal(message)
            case Abort(id=TransferId()) | AbortAck():
                return self._on_abort(message)
            case _:
                self._counters.count(Reason.PROTOCOL_VIOLATION)
                return [FailLink(TransferFailed(f"the sender sent {type(message).__name__} out of turn"))]

    def reserved(self, transfer_id: TransferId, num_pages: int, num_cached_tokens: int) -> list[Action]:
        """Completes ReservePages."""
        return self._step(transfer_id, self._transfers[transfer_id].on_reserved(num_pages, num_cached_tokens))

    def reserve_failed(self, transfer_id: TransferId, error: TandemError) -> list[Action]:
        """Completes ReservePages with an error."""
        return self._step(transfer_id, self._transfers[transfer_id].on_reserve_failed(error))

    def placement(self, event: PlacementEvent) -> list[Action]:
        """Completes Place with `ChunkPlaced`, `ChunkLost`, or `ChunkRevoked`."""
        actions = self._step(event.id, self._transfers[event.id].on_placement(event))
        if isinstance(event, ChunkLost) and event.reason is Reason.CHECKSUM_MISMATCH:
            self._num_checksum_mismatches += 1
            if self._num_checksum_mismatches >= MAX_CHECKSUM_MISMATCHES:
                actions.append(FailLink(TransferFailed("the channel corrupts what it carries")))
        return actions

    def committed(self, transfer_id: TransferId) -> list[Action]:
        """Completes CommitPages."""
        return self._step(transfer_id, self._transfers[transfer_id].on_committed())

    def commit_failed(self, transfer_id: TransferId, error: TandemError) -> list[Action]:
        """Completes CommitPages with an error."""
        return self._step(transfer_id, self._transfers[transfer_id].on_commit_failed(error))

    def released(self, transfer_id: TransferId) -> list[Action]:
        """Completes ReleasePages."""
        return self._step(transfer_id, self._transfers[transfer_id].on_released())

    def abort(self, transfer_id: TransferId, error: TandemError) -> list[Action]:
        """Aborts a transfer on behalf of this side. Idempotent. Unknown transfers have already ended."""
        transfer = self._transfers.get(transfer_id)
        return [] if transfer is None else self._step(transfer_id, transfer.fail(error))

    def retire(self) -> list[Action]:
        """Requests that the sender end the Link, if no transfer runs here.

        Only the sender can know of a transfer in transit.
        """
        if self._transfers or self.lost is not None:
            return []
        self.is_retiring = True
        return [Send(Retire())]

    def link_lost(self, error: TandemError) -> list[Action]:
        """Fails every transfer, because the stream or the channel broke, or the peer fell silent. Idempotent."""
        if self.lost is not None:
            return []
        self.lost = error
        if not self.is_retiring:
            self._counters.count(Reason.LINK_LOST)
        actions: list[Action] = []
        for transfer_id, transfer in list(self._transfers.items()):
            actions += self._step(transfer_id, transfer.fail(error, tell_peer=False))
        return actions

    def channel_ended(self) -> list[Action]:
        """Handles the end of the thread that placed frames, after `link_lost`. No page is written to from now on."""
        actions: list[Action] = []
        for transfer_id, transfer in list(self._transfers.items()):
            actions += self._step(transfer_id, transfer.on_channel_ended())
        return actions

    def tick(self, now: float, num_frames_seen: int) -> list[Action]:
        """Checks timeouts. Call it several times a second. `num_frames_seen` grows while the channel makes progress."""
        if self.lost is not None:
            return []
        if self._liveness.is_silent(now):
            self._counters.count(Reason.PEER_SILENT)
            return [FailLink(TransferFailed("the sender fell silent"))]
        if self._is_stalled(now, num_frames_seen):
            self._counters.count(Reason.CHANNEL_BROKEN)
            return [FailLink(TransferStalled("the channel owes pages and does not move"))]
        actions: list[Action] = [Send(Heartbeat())] if self._liveness.beat_due(now) else []
        for transfer_id, transfer in list(self._transfers.items()):
            actions += self._step(transfer_id, transfer.tick(now))
        return actions

    def _on_reserve(self, message: Reserve, now: float) -> list[Action]:
        self.is_retiring = False
        running = self._transfers.get(message.id)
        if running is not None:
            return self._step(message.id, running.on_reserve(message))
        if message.num_tokens < 1:
            self._counters.count(Reason.PROTOCOL_VIOLATION)
            return [Send(Abort(message.id, "TransferFailed", "a transfer needs at least one token"))]
        admittance = self._fence.enter(message.id)
        if not admittance.is_current:
            self._counters.count(Reason.STALE_ATTEMPT)
            return [Send(Abort(message.id, "TransferFailed", "the attempt is over or an older one"))]
        actions: list[Action] = []
        if admittance.superseded is not None:
            self._counters.count(Reason.SUPERSEDED_ATTEMPT)
            actions.append(Supersede(admittance.superseded))
        transfer = ReceiverTransfer(message, self._terms, self._counters, now, worker_s=self._timeouts.worker_s)
        self._transfers[message.id] = transfer
        return actions + transfer.start()

    def _on_chunk(self, header: ChunkHeader, now: float) -> list[Action]:
        if header.num_pages < 1:
            self._counters.count(Reason.PROTOCOL_VIOLATION)
            return [FailLink(TransferFailed("the sender announced a chunk without pages"))]
        is_fresh = header.channel_seq >= self._next_seq
        if is_fresh:
            self._next_seq = header.channel_seq + -(-header.num_pages // self._terms.frame_pages)
        if not any(transfer.awaits_payload for transfer in self._transfers.values()):
            self._last_progress = now
        transfer = self._transfers.get(header.id)
        if transfer is None:
            self._counters.count(Reason.LATE_MESSAGE if is_fresh else Reason.DUPLICATE_CHUNK)
            return [place_for(header, self._terms, is_wanted=False)] if is_fresh else []
        return self._step(header.id, transfer.on_chunk(header, is_fresh=is_fresh))

    def _on_seal(self, message: Seal) -> list[Action]:
        transfer = self._transfers.get(message.id)
        if transfer is not None:
            return self._step(message.id, transfer.on_seal(message))
        if self._fence.is_committed(message.id):
            return [Send(Committed(message.id))]
        self._counters.count(Reason.UNKNOWN_TRANSFER)
        return [Send(Abort(message.id, "TransferFailed", "the transfer is not known here"))]

    def _on_abort(self, message: Abort | AbortAck) -> list[Action]:
        transfer = self._transfers.get(message.id) if message.id is not None else None
        if isinstance(message, AbortAck):
            return []
        if message.id is None:
            return []
        if transfer is not None:
            return self._step(message.id, transfer.on_abort(message))
        if self._fence.is_committed(message.id):
            # The abort crossed our Committed: for the sender and its caller, the transfer has failed.
            return [AbandonPages(message.id, peer_error_from(message)), Send(AbortAck(message.id))]
        # Messages on the Link stay in order, so a later Reserve of this attempt is a replay.
        self._fence.close(message.id)
        return [Send(AbortAck(message.id))]

    def _is_stalled(self, now: float, num_frames_seen: int) -> bool:
        owes = any(transfer.awaits_payload for transfer in self._transfers.values())
        if num_frames_seen != self._num_frames_seen or not owes:
            self._num_frames_seen = num_frames_seen
            self._last_progress = now
        return now - self._last_progress >= self._timeouts.stall_s

    def _step(self, transfer_id: TransferId, actions: list[Action]) -> list[Action]:
        transfer = self._transfers[transfer_id]
        if transfer.is_over:
            del self._transfers[transfer_id]
            self._fence.leave(transfer_id, is_committed=transfer.state is ReceiverState.COMMITTED)
        return actions


def link_fault(hello: Hello, *, layout: WireLayout, incarnation: str, protocol_version: int) -> Reason | None:
    """Returns why this sender must be rejected, or None if the pair is valid."""
    if hello.peer_incarnation != incarnation:
        return Reason.STALE_INCARNATION
    if hello.protocol_version != protocol_version or hello.layout.difference(layout):
        return Reason.LAYOUT_MISMATCH
    return None
