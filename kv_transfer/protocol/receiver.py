"""The receiving side of a Link as a state machine: one `ReceiverTransfer` per transfer, one `ReceiverLink` over them.

Does no I/O and reads no clock: events and the time go in, actions come out. Knows nothing of tensors, threads or RPC.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from math import inf, lcm

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
from kv_transfer.protocol.counters import Counters, Reason
from kv_transfer.protocol.failures import abort_of, error_from
from kv_transfer.protocol.fence import Fence
from kv_transfer.protocol.frames import ChunkLost, ChunkPlaced, ChunkRevoked, PlacementEvent
from kv_transfer.protocol.messages import (
    Abort,
    AbortAck,
    ChunkHeader,
    Committed,
    Granted,
    Heartbeat,
    Hello,
    Message,
    Reserve,
    Seal,
    TransferId,
    WireLayout,
    pages_per_frame,
    seal_digest,
)
from kv_transfer.protocol.timing import Liveness, Timeouts
from services.runtime.errors import DeadlineExceeded, TandemError, TransferFailed, TransferStalled, WorkerUnavailable

# Wrong checksums that one channel may deliver before it is given up for all transfers.
MAX_CHECKSUM_MISMATCHES = 3


class ReceiverState(Enum):
    """Where a transfer stands at the receiver."""

    RESERVING = auto()
    STREAMING = auto()
    COMMITTING = auto()
    COMMITTED = auto()
    FAILED = auto()


_ENDED = frozenset({ReceiverState.COMMITTED, ReceiverState.FAILED})


@dataclass(frozen=True, slots=True)
class LinkTerms:
    """What both sides agreed on when the Link was made."""

    sender: WireLayout
    receiver: WireLayout
    slot_bytes: int

    @property
    def frame_pages(self) -> int:
        """Pages of the sender in one frame."""
        return pages_per_frame(self.sender.page_bytes, self.slot_bytes)

    def usable_prefix(self, num_cached_tokens: int) -> int:
        """Return the part of a cached prefix that ends on a page border of both sides."""
        return num_cached_tokens - num_cached_tokens % lcm(self.sender.page_size, self.receiver.page_size)


class ReceiverTransfer:
    """One transfer. The reserved pages may be written to as long as a chunk is `outstanding` at the channel.

    They are released once, when no chunk is, and never after `CommitPages` succeeded. The worker owes an answer to
    each question within `worker_s`; one that comes later is taken all the same, so that no page is lost.
    """

    def __init__(self, reserve: Reserve, terms: LinkTerms, counters: Counters, now: float, *, worker_s: float) -> None:
        self.id = reserve.id
        self.num_tokens = reserve.num_tokens
        self.state = ReceiverState.RESERVING
        self.error: TandemError | None = None
        self.is_over = False
        self._terms = terms
        self._counters = counters
        self._deadline = now + reserve.deadline_ms / 1000
        self._num_cached_tokens = 0
        self._holds_pages = False
        self._headers: dict[int, ChunkHeader] = {}
        self._digests: dict[int, bytes] = {}
        self._covered = bytearray()
        self._num_outstanding = 0
        self._seal: Seal | None = None
        self._owes_ack = False
        self._worker_s = worker_s
        self._question: str | None = None
        self._asked_at: float | None = None
        self._given_up: TandemError | None = None

    def start(self) -> list[Action]:
        """Ask the worker for pages."""
        return [self._ask("reserve", ReservePages(self.id, self.num_tokens))]

    def on_reserved(self, num_pages: int, num_cached_tokens: int) -> list[Action]:
        """The worker set pages aside; if the transfer failed meanwhile, they go straight back."""
        self._question = None
        self._holds_pages = True
        if self.state is ReceiverState.FAILED:
            return self._release_when_idle()
        if num_pages * self._terms.receiver.page_size < self.num_tokens or num_cached_tokens > self.num_tokens:
            return self.fail(TransferFailed("the reservation does not hold the tokens"))
        self.state = ReceiverState.STREAMING
        # Only now that the worker accepted the size is memory taken in proportion to it.
        self._covered = bytearray(self._terms.sender.num_pages_for(self.num_tokens))
        self._num_cached_tokens = self._terms.usable_prefix(num_cached_tokens)
        self._mark_covered(0, self._num_cached_tokens // self._terms.sender.page_size)
        return [self._granted()]

    def on_reserve_failed(self, error: TandemError) -> list[Action]:
        """The worker has no pages for it."""
        self._question = None
        if self.state is ReceiverState.FAILED:
            return self._end()
        self.state = ReceiverState.FAILED
        self.error = error
        return [Send(abort_of(self.id, error)), *self._end()]

    def on_reserve(self, message: Reserve) -> list[Action]:
        """An attempt asks again: the answer is the same, nothing is set aside twice."""
        self._counters.count(Reason.DUPLICATE_RESERVE)
        if self.state is ReceiverState.STREAMING and message.num_tokens == self.num_tokens:
            return [self._granted()]
        return []

    def on_chunk(self, header: ChunkHeader, *, is_fresh: bool) -> list[Action]:
        """A chunk is announced. `is_fresh` says that no earlier header claimed its frames.

        Whatever happens to the transfer, the frames of a fresh header are claimed, so that the channel continues.
        """
        if self._headers.get(header.chunk_index) == header:
            self._counters.count(Reason.DUPLICATE_CHUNK)
            return []
        place = [self._place(header, is_wanted=False)] if is_fresh else []
        if self.state in _ENDED or self.state is ReceiverState.COMMITTING:
            self._counters.count(Reason.LATE_MESSAGE)
            return list(place)
        fault = self._fault_of(header, is_fresh=is_fresh)
        if fault is not None:
            self._counters.count(fault)
            return [*place, *self.fail(TransferFailed(f"the sender announced a wrong chunk: {fault}"))]
        self._headers[header.chunk_index] = header
        self._mark_covered(header.first_page, header.num_pages)
        self._num_outstanding += 1
        return [self._place(header, is_wanted=True)]

    def on_placement(self, event: PlacementEvent) -> list[Action]:
        """The channel answered for a chunk."""
        self._num_outstanding -= 1
        match event:
            case ChunkPlaced():
                self._digests[event.chunk_index] = event.digest
                return self._commit_when_complete() + self._release_when_idle()
            case ChunkLost():
                self._counters.count(event.reason)
                error = TransferFailed(f"chunk {event.chunk_index} did not arrive whole: {event.reason}")
                return self.fail(error) + self._release_when_idle()
            case ChunkRevoked():
                # Without a revocation of ours the sender gave up or the channel broke; its abort or link_lost says why.
                return self._commit_when_complete() + self._release_when_idle()

    def on_seal(self, seal: Seal) -> list[Action]:
        """The manifest arrived; it is checked when every chunk that was announced is in place."""
        if self.state is not ReceiverState.STREAMING or self._seal is not None:
            self._counters.count(Reason.LATE_MESSAGE)
            return []
        self._seal = seal
        return self._commit_when_complete()

    def on_committed(self) -> list[Action]:
        """The worker took the pages over; from here on they are its own.

        A sender that gave up meanwhile has told of a failure, or was told of one; so it stays one.
        """
        self._question = None
        self.state = ReceiverState.COMMITTED
        self._holds_pages = False
        outcome = Send(Committed(self.id)) if self._given_up is None else AbandonPages(self.id, self._given_up)
        return [outcome, *self._end()]

    def on_commit_failed(self, error: TandemError) -> list[Action]:
        """The worker would not take the pages."""
        self._question = None
        self.state = ReceiverState.STREAMING
        return self.fail(self._given_up or error, tell_peer=self._given_up is None)

    def on_abort(self, message: Abort) -> list[Action]:
        """The sender gave up. It is told when nothing is held for it."""
        self._owes_ack = True
        error = error_from(message)
        if self.state is ReceiverState.COMMITTING:
            self._given_up = self._given_up or error
            return []
        return self.fail(error, tell_peer=False)

    def on_channel_ended(self) -> list[Action]:
        """Nothing is placed from now on. Chunks that were not answered for, which should not be, are not waited for."""
        self._num_outstanding = 0
        return self._release_when_idle()

    def on_released(self) -> list[Action]:
        """The pages are back."""
        self._question = None
        return self._end()

    def fail(self, error: TandemError, *, tell_peer: bool = True) -> list[Action]:
        """Give up, from whatever side the reason came. Idempotent.

        While the worker takes the pages over it is too late: what it answers stands.
        """
        if self.state in _ENDED or self.state is ReceiverState.COMMITTING:
            return []
        self.state = ReceiverState.FAILED
        self.error = error
        actions: list[Action] = [Send(abort_of(self.id, error))] if tell_peer else []
        actions.append(Revoke(self.id))
        return actions + self._release_when_idle()

    def tick(self, now: float) -> list[Action]:
        """Look at the clock."""
        actions = self._judge_worker(now)
        if self.state in _ENDED or self.state is ReceiverState.COMMITTING or now < self._deadline:
            return actions
        self._counters.count(Reason.DEADLINE)
        return actions + self.fail(DeadlineExceeded("the request's deadline passed during the handoff"))

    @property
    def awaits_payload(self) -> bool:
        """Whether the channel owes something to it."""
        return self._num_outstanding > 0

    def _ask(self, question: str, action: Action) -> Action:
        """The worker owes an answer from now on; the next tick says when that was."""
        self._question, self._asked_at = question, None
        return action

    def _judge_worker(self, now: float) -> list[Action]:
        """Give up, once, if the worker owes an answer for too long.

        Where it takes the pages over, the sender is told, and a commit that still succeeds is abandoned. Pages that it
        does not give back stay a transfer's that is not over: nobody waits for it, and nobody says that they are free.
        """
        if self._question is None:
            return []
        self._asked_at = now if self._asked_at is None else self._asked_at
        if now - self._asked_at < self._worker_s:
            return []
        self._asked_at = inf
        self._counters.count(Reason.WORKER_SILENT)
        error = TransferFailed(f"the receiving worker did not {self._question} in time")
        if self.state is not ReceiverState.COMMITTING:
            return self.fail(error)
        if self._given_up is not None:
            return []
        self._given_up = error
        return [Send(abort_of(self.id, error))]

    def _granted(self) -> Action:
        return Send(Granted(self.id, self._num_cached_tokens))

    def _place(self, header: ChunkHeader, *, is_wanted: bool) -> Place:
        return place_for(header, self._terms, is_wanted=is_wanted)

    def _fault_of(self, header: ChunkHeader, *, is_fresh: bool) -> Reason | None:
        first, end = header.first_page, header.first_page + header.num_pages
        if header.num_bytes != header.num_pages * self._terms.sender.page_bytes:
            return Reason.WRONG_SIZE
        if header.chunk_index in self._headers or not is_fresh:
            return Reason.CONFLICTING_CHUNK
        if end > len(self._covered) or first * self._terms.sender.page_size < self._num_cached_tokens:
            return Reason.OUTSIDE_RESERVATION
        if any(self._covered[first:end]):
            return Reason.CONFLICTING_CHUNK
        return None

    def _mark_covered(self, first_page: int, num_pages: int) -> None:
        self._covered[first_page : first_page + num_pages] = b"\x01" * num_pages

    def _commit_when_complete(self) -> list[Action]:
        seal = self._seal
        if self.state is not ReceiverState.STREAMING or seal is None:
            return []
        if self._num_outstanding or len(self._headers) < seal.num_chunks:
            return []
        if not self._matches(seal):
            self._counters.count(Reason.SEAL_MISMATCH)
            return self.fail(TransferFailed("what arrived is not what was sealed"))
        self.state = ReceiverState.COMMITTING
        return [self._ask("commit", CommitPages(self.id, seal.first_token_id, seal.sampling_position))]

    def _matches(self, seal: Seal) -> bool:
        in_order = range(seal.num_chunks)
        return (
            set(self._digests) == set(in_order)
            and seal.num_tokens == self.num_tokens
            and seal.num_pages == sum(header.num_pages for header in self._headers.values())
            and seal.num_bytes == sum(header.num_bytes for header in self._headers.values())
            and all(self._covered)
            and seal.digest == seal_digest(seal, map(self._sealed_chunk, in_order))
        )

    def _sealed_chunk(self, chunk_index: int) -> tuple[int, int, bytes]:
        header = self._headers[chunk_index]
        return header.first_page, header.num_pages, self._digests[chunk_index]

    def _release_when_idle(self) -> list[Action]:
        if self.state is not ReceiverState.FAILED or not self._holds_pages or self._num_outstanding:
            return []
        self._holds_pages = False
        error = self.error or TransferFailed("the transfer failed")
        return [self._ask("release", ReleasePages(self.id, error))]

    def _end(self) -> list[Action]:
        self.is_over = True
        is_committed = self.state is ReceiverState.COMMITTED
        actions: list[Action] = [ReportEnded(self.id, None if is_committed else self.error)]
        if self._owes_ack:
            actions.append(Send(AbortAck(self.id)))
        return actions


class ReceiverLink:
    """All transfers of one Link at the receiver, the claims on its channel, and whether the peer lives.

    After `link_lost` only answers to actions that are under way are expected.
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

    @property
    def transfers(self) -> tuple[ReceiverTransfer, ...]:
        """Those that are not over."""
        return tuple(self._transfers.values())

    def on_message(self, message: Message, now: float) -> list[Action]:
        """Something arrived on the Link."""
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
                return [FailLink(WorkerUnavailable(f"the sender sent {type(message).__name__} out of turn"))]

    def reserved(self, transfer_id: TransferId, num_pages: int, num_cached_tokens: int) -> list[Action]:
        """Answer to ReservePages."""
        return self._step(transfer_id, self._transfers[transfer_id].on_reserved(num_pages, num_cached_tokens))

    def reserve_failed(self, transfer_id: TransferId, error: TandemError) -> list[Action]:
        """Answer to ReservePages."""
        return self._step(transfer_id, self._transfers[transfer_id].on_reserve_failed(error))

    def placement(self, event: PlacementEvent) -> list[Action]:
        """Answer to Place: `ChunkPlaced`, `ChunkLost` or `ChunkRevoked`."""
        actions = self._step(event.id, self._transfers[event.id].on_placement(event))
        if isinstance(event, ChunkLost) and event.reason is Reason.CHECKSUM_MISMATCH:
            self._num_checksum_mismatches += 1
            if self._num_checksum_mismatches >= MAX_CHECKSUM_MISMATCHES:
                actions.append(FailLink(TransferFailed("the channel corrupts what it carries")))
        return actions

    def committed(self, transfer_id: TransferId) -> list[Action]:
        """Answer to CommitPages."""
        return self._step(transfer_id, self._transfers[transfer_id].on_committed())

    def commit_failed(self, transfer_id: TransferId, error: TandemError) -> list[Action]:
        """Answer to CommitPages."""
        return self._step(transfer_id, self._transfers[transfer_id].on_commit_failed(error))

    def released(self, transfer_id: TransferId) -> list[Action]:
        """Answer to ReleasePages."""
        return self._step(transfer_id, self._transfers[transfer_id].on_released())

    def abort(self, transfer_id: TransferId, error: TandemError) -> list[Action]:
        """Our own side gives a transfer up. Idempotent; unknown transfers are over already."""
        transfer = self._transfers.get(transfer_id)
        return [] if transfer is None else self._step(transfer_id, transfer.fail(error))

    def link_lost(self, error: TandemError) -> list[Action]:
        """The stream or the channel broke, or the peer fell silent: every transfer fails. Idempotent."""
        if self.lost is not None:
            return []
        self.lost = error
        self._counters.count(Reason.LINK_LOST)
        actions: list[Action] = []
        for transfer_id, transfer in list(self._transfers.items()):
            actions += self._step(transfer_id, transfer.fail(error, tell_peer=False))
        return actions

    def channel_ended(self) -> list[Action]:
        """After `link_lost`: the thread that placed frames has ended, and no page is written to."""
        actions: list[Action] = []
        for transfer_id, transfer in list(self._transfers.items()):
            actions += self._step(transfer_id, transfer.on_channel_ended())
        return actions

    def tick(self, now: float, num_frames_seen: int) -> list[Action]:
        """Look at the clock; call it several times a second. `num_frames_seen` grows when the channel moves."""
        if self.lost is not None:
            return []
        if self._liveness.is_silent(now):
            self._counters.count(Reason.PEER_SILENT)
            return [FailLink(WorkerUnavailable("the sender fell silent"))]
        if self._is_stalled(now, num_frames_seen):
            self._counters.count(Reason.CHANNEL_BROKEN)
            return [FailLink(TransferStalled("the channel owes pages and does not move"))]
        actions: list[Action] = [Send(Heartbeat())] if self._liveness.beat_due(now) else []
        for transfer_id, transfer in list(self._transfers.items()):
            actions += self._step(transfer_id, transfer.tick(now))
        return actions

    def _on_reserve(self, message: Reserve, now: float) -> list[Action]:
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
            # It crossed our Committed: for the sender, and the caller that asked it, the transfer has failed.
            return [AbandonPages(message.id, error_from(message)), Send(AbortAck(message.id))]
        # It may overtake nothing on the Link, so a Reserve of this attempt that comes later is a replay.
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


def place_for(header: ChunkHeader, terms: LinkTerms, *, is_wanted: bool) -> Place:
    """Return the claim of a header on its frames."""
    return Place(
        id=header.id,
        chunk_index=header.chunk_index,
        first_seq=header.channel_seq,
        num_frames=-(-header.num_pages // terms.frame_pages),
        first_page=header.first_page,
        num_pages=header.num_pages,
        is_wanted=is_wanted,
    )


def link_fault(hello: Hello, *, layout: WireLayout, incarnation: str, protocol_version: int) -> Reason | None:
    """Return why this sender must not be paired with us, or None if it may."""
    if hello.peer_incarnation != incarnation:
        return Reason.STALE_INCARNATION
    if hello.protocol_version != protocol_version or hello.layout.difference(layout):
        return Reason.LAYOUT_MISMATCH
    return None
