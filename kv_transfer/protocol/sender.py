"""State machines for the sending side of a Link: `SenderTransfer` for one transfer, `SenderLink` for all of them.

Does no I/O and reads no clock: turns events and the current time into actions. Does not depend on tensors, threads, or
RPC.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

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
from kv_transfer.protocol.counters import Counters, Reason
from kv_transfer.protocol.failures import abort_of, peer_error_from
from kv_transfer.protocol.messages import (
    Abort,
    AbortAck,
    ChunkHeader,
    Committed,
    Granted,
    Heartbeat,
    Message,
    Reserve,
    Retire,
    Seal,
    TransferId,
    WireLayout,
    seal_digest,
)
from kv_transfer.protocol.timing import Liveness, Timeouts
from services.runtime.errors import DeadlineExceeded, TandemError, TransferFailed


class SenderState(Enum):
    """State of a transfer at the sender."""

    RESERVING = auto()
    STREAMING = auto()
    SEALING = auto()  # all pages are queued; the manifest waits until the last page is posted
    SEALED = auto()
    COMMITTED = auto()
    FAILED = auto()


_ENDED = frozenset({SenderState.COMMITTED, SenderState.FAILED})


@dataclass(frozen=True, slots=True)
class _SealRequest:
    first_token_id: int
    sampling_position: int


class SenderTransfer:
    """One transfer. A posted chunk is `outstanding` until the channel reports its result.

    The pages may be read in any state while a chunk is outstanding, so `ReportReleased` waits until none is.
    """

    def __init__(
        self, transfer_id: TransferId, num_tokens: int, *, layout: WireLayout, deadline: float, timeouts: Timeouts
    ) -> None:
        self.id = transfer_id
        self.num_tokens = num_tokens
        self.state = SenderState.RESERVING
        self.error: TandemError | None = None
        self.is_released = False
        self._page_size = layout.page_size
        self._page_bytes = layout.page_bytes
        self._num_pages_total = layout.num_pages_for(num_tokens)
        self._deadline = deadline
        self._timeouts = timeouts
        self._step_deadline = 0.0
        self._next_page = 0
        self._num_pages_sent = 0
        self._digests: list[bytes | None] = []
        self._ranges: list[tuple[int, int]] = []
        self._num_outstanding = 0
        self._seal: _SealRequest | None = None
        self._owes_ack = False
        self._awaits_ack = False

    @property
    def is_over(self) -> bool:
        """Whether the state machine can be deleted."""
        return self.state in _ENDED and self.is_released and not self._awaits_ack

    def start(self, now: float) -> list[Action]:
        """Requests pages from the receiver."""
        self._step_deadline = now + self._timeouts.reserve_s
        remaining_ms = max(0, int((self._deadline - now) * 1000))
        return [Send(Reserve(self.id, self.num_tokens, remaining_ms))]

    def on_granted(self, message: Granted) -> list[Action]:
        """Handles the grant. A repeated or late grant has no effect."""
        if self.state is not SenderState.RESERVING:
            return []
        cached = message.num_cached_tokens
        if cached % self._page_size or not 0 <= cached <= self.num_tokens:
            return self.fail(TransferFailed(f"the receiver granted an impossible prefix of {cached} tokens"))
        self.state = SenderState.STREAMING
        self._next_page = cached // self._page_size
        return [ReportGranted(self.id, cached)]

    def send(self, first_page: int, page_ids: Sequence[int], first_seq: int) -> list[Action]:
        """Announces and posts pages. Skips pages that the receiver has cached.

        Raises TransferFailed if the transfer has ended, and ValueError if pages are out of order or too many.
        """
        if self.state is not SenderState.STREAMING:
            raise self._refusal("pages were sent")
        skip = max(0, min(len(page_ids), self._next_page - first_page)) if self._num_pages_sent == 0 else 0
        first_page, wanted = first_page + skip, tuple(page_ids[skip:])
        if not wanted:
            return []
        if first_page != self._next_page or first_page + len(wanted) > self._num_pages_total:
            raise ValueError(
                f"pages {first_page}..{first_page + len(wanted) - 1} were sent when page {self._next_page} "
                f"of {self._num_pages_total} was next"
            )
        chunk_index = len(self._digests)
        self._digests.append(None)
        self._ranges.append((first_page, len(wanted)))
        self._num_outstanding += 1
        self._next_page += len(wanted)
        self._num_pages_sent += len(wanted)
        num_bytes = len(wanted) * self._page_bytes
        header = ChunkHeader(self.id, chunk_index, first_seq, first_page, len(wanted), num_bytes)
        return [Send(header), PostChunk(self.id, chunk_index, first_seq, first_page, wanted)]

    def seal(self, *, num_tokens: int, first_token_id: int, sampling_position: int, now: float) -> list[Action]:
        """Closes the manifest. Raises TransferFailed if the transfer has ended, and ValueError if pages are missing."""
        if self.state is not SenderState.STREAMING:
            raise self._refusal("a seal came")
        if num_tokens != self.num_tokens or self._next_page != self._num_pages_total:
            raise ValueError(
                f"sealed {num_tokens} of {self.num_tokens} tokens with {self._next_page} "
                f"of {self._num_pages_total} pages sent"
            )
        self.state = SenderState.SEALING
        self._step_deadline = now + self._timeouts.commit_s
        self._seal = _SealRequest(first_token_id, sampling_position)
        return self._seal_when_posted(now)

    def on_chunk_posted(self, chunk_index: int, digest: bytes, now: float) -> list[Action]:
        """Records that the channel has accepted a whole chunk, whose pages are no longer read."""
        self._digests[chunk_index] = digest
        self._num_outstanding -= 1
        if self.state is SenderState.SEALING:
            # Restart the commit timeout. Time spent in the queue behind other transfers is bounded by the stall timeout
            # and by the request's deadline.
            self._step_deadline = now + self._timeouts.commit_s
        return self._seal_when_posted(now) + self._release_when_idle()

    def on_chunk_skipped(self) -> list[Action]:
        """Records that the channel skipped a chunk or broke. The chunk's pages are no longer read."""
        self._num_outstanding -= 1
        return self._release_when_idle()

    def on_chunk_stale(self, now: float) -> list[Action]:
        """Fails the transfer, because pages of a chunk were reused before they were read."""
        self._num_outstanding -= 1
        error = TransferFailed("pages were given to another use while they were sent")
        return self.fail(error, now=now) + self._release_when_idle()

    def on_committed(self) -> list[Action]:
        """Records that the receiver owns the pages."""
        if self.state is not SenderState.SEALED:
            return []
        self.state = SenderState.COMMITTED
        num_bytes = self._num_pages_sent * self._page_bytes
        return [ReportCommitted(self.id, self._num_pages_sent, num_bytes), *self._release_when_idle()]

    def on_abort(self, message: Abort) -> list[Action]:
        """Handles an abort from the receiver. Acknowledges it once this side no longer reads the pages."""
        if self.state in _ENDED:
            return [Send(AbortAck(self.id))] if self.is_released else []
        self._owes_ack = True
        return self._fail(peer_error_from(message))

    def on_abort_ack(self) -> list[Action]:
        """Records that the receiver no longer holds anything for the transfer."""
        self._awaits_ack = False
        return []

    def fail(self, error: TandemError, *, now: float | None = None, tell_peer: bool = True) -> list[Action]:
        """Fails the transfer, for a reason from any side. Idempotent."""
        if self.state in _ENDED:
            return []
        actions: list[Action] = []
        if tell_peer:
            self._awaits_ack = now is not None
            self._step_deadline = (now or 0.0) + self._timeouts.abort_s
            actions.append(Send(abort_of(self.id, error)))
        return actions + self._fail(error)

    def on_link_lost(self, error: TandemError) -> list[Action]:
        """Fails the transfer, because no reply can arrive."""
        self._awaits_ack = False
        return self.fail(error, tell_peer=False)

    def on_channel_ended(self) -> list[Action]:
        """Handles the end of the channel. Does not wait for chunks without a result, which are unexpected."""
        self._num_outstanding = 0
        return self._release_when_idle()

    def tick(self, now: float, counters: Counters) -> list[Action]:
        """Checks timeouts."""
        if self._awaits_ack and now >= self._step_deadline:
            self._awaits_ack = False
        if self.state in _ENDED:
            return []
        if now >= self._deadline:
            counters.count(Reason.DEADLINE)
            return self.fail(DeadlineExceeded("the request's deadline passed during the handoff"), now=now)
        waits = self.state is SenderState.RESERVING or (
            self.state in (SenderState.SEALED, SenderState.SEALING) and self._num_outstanding == 0
        )
        if waits and now >= self._step_deadline:
            doing = "reserve" if self.state is SenderState.RESERVING else "commit"
            return self.fail(TransferFailed(f"the receiver did not answer in time to {doing}"), now=now)
        return []

    def _refusal(self, what: str) -> TandemError:
        if self.error is not None:
            return self.error.again()
        return TransferFailed(f"{what} while the transfer was {self.state.name.lower()}")

    def _seal_when_posted(self, now: float) -> list[Action]:
        if self.state is not SenderState.SEALING or self._num_outstanding or self._seal is None:
            return []
        self.state = SenderState.SEALED
        self._step_deadline = now + self._timeouts.commit_s
        manifest = Seal(
            id=self.id,
            num_chunks=len(self._digests),
            num_pages=self._num_pages_sent,
            num_bytes=self._num_pages_sent * self._page_bytes,
            num_tokens=self.num_tokens,
            digest=b"",
            first_token_id=self._seal.first_token_id,
            sampling_position=self._seal.sampling_position,
        )
        each = zip(self._ranges, self._digests, strict=True)
        chunks = [(*pages, digest) for pages, digest in each if digest is not None]
        return [Send(replace(manifest, digest=seal_digest(manifest, chunks)))]

    def _fail(self, error: TandemError) -> list[Action]:
        self.state = SenderState.FAILED
        self.error = error
        return [SkipChunks(self.id), ReportFailed(self.id, error), *self._release_when_idle()]

    def _release_when_idle(self) -> list[Action]:
        if self.state not in _ENDED or self._num_outstanding or self.is_released:
            return []
        self.is_released = True
        actions: list[Action] = [ReportReleased(self.id)]
        if self._owes_ack:
            actions.append(Send(AbortAck(self.id)))
        return actions


class SenderLink:
    """All transfers of one Link at the sender, the numbering of its channel's frames, and the liveness of the peer.

    `frame_pages` is the number of pages in one frame. After `link_lost`, only results of outstanding chunks are
    expected.
    """

    def __init__(
        self, *, layout: WireLayout, frame_pages: int, timeouts: Timeouts, counters: Counters, now: float
    ) -> None:
        self._layout = layout
        self._frame_pages = frame_pages
        self._timeouts = timeouts
        self._counters = counters
        self._liveness = Liveness(timeouts, now)
        self._transfers: dict[TransferId, SenderTransfer] = {}
        self._next_seq = 0
        self.lost: TandemError | None = None

    @property
    def transfers(self) -> tuple[SenderTransfer, ...]:
        """The transfers that have not ended."""
        return tuple(self._transfers.values())

    def reserve(self, transfer_id: TransferId, num_tokens: int, *, deadline: float, now: float) -> list[Action]:
        """Starts a transfer. Raises the error that ended the Link, and TransferFailed if it is already running."""
        if self.lost is not None:
            raise self.lost.again()
        if transfer_id in self._transfers:
            raise TransferFailed(f"transfer {transfer_id} runs already")
        if num_tokens < 1:
            raise ValueError("a transfer needs at least one token")
        transfer = SenderTransfer(
            transfer_id, num_tokens, layout=self._layout, deadline=deadline, timeouts=self._timeouts
        )
        self._transfers[transfer_id] = transfer
        return transfer.start(now)

    def send(self, transfer_id: TransferId, first_page: int, page_ids: Sequence[int]) -> list[Action]:
        """Streams pages. Raises the errors of `SenderTransfer.send`."""
        actions = self._get(transfer_id).send(first_page, page_ids, self._next_seq)
        for action in actions:
            if isinstance(action, PostChunk):
                self._next_seq += -(-len(action.page_ids) // self._frame_pages)
        return actions

    def seal(
        self, transfer_id: TransferId, *, num_tokens: int, first_token_id: int, sampling_position: int, now: float
    ) -> list[Action]:
        """Closes the manifest. Raises the errors of `SenderTransfer.seal`."""
        return self._get(transfer_id).seal(
            num_tokens=num_tokens, first_token_id=first_token_id, sampling_position=sampling_position, now=now
        )

    def abort(self, transfer_id: TransferId, error: TandemError, now: float) -> list[Action]:
        """Aborts a transfer. Idempotent. Unknown transfers have already ended."""
        transfer = self._transfers.get(transfer_id)
        return [] if transfer is None else self._settle(transfer_id, transfer.fail(error, now=now))

    def chunk_posted(self, transfer_id: TransferId, chunk_index: int, digest: bytes, now: float) -> list[Action]:
        """Completes PostChunk."""
        return self._settle(transfer_id, self._transfers[transfer_id].on_chunk_posted(chunk_index, digest, now))

    def chunk_skipped(self, transfer_id: TransferId) -> list[Action]:
        """Completes PostChunk after SkipChunks or FailLink."""
        return self._settle(transfer_id, self._transfers[transfer_id].on_chunk_skipped())

    def chunk_stale(self, transfer_id: TransferId, now: float) -> list[Action]:
        """Completes PostChunk if the pages have been reused. The transfer fails."""
        self._counters.count(Reason.STALE_GENERATION)
        return self._settle(transfer_id, self._transfers[transfer_id].on_chunk_stale(now))

    def on_message(self, message: Message, now: float) -> list[Action]:
        """Handles a message from the receiver."""
        self._liveness.heard(now)
        match message:
            case Heartbeat():
                return []
            case Granted() | Committed() | AbortAck():
                return self._on_answer(message)
            case Abort(id=TransferId() as transfer_id):
                transfer = self._transfers.get(transfer_id)
                if transfer is None:
                    return [Send(AbortAck(transfer_id))]
                return self._settle(transfer_id, transfer.on_abort(message))
            case Abort():
                return [FailLink(peer_error_from(message))]
            case Retire():
                return [] if self._transfers else [RetireLink()]
            case _:
                self._counters.count(Reason.PROTOCOL_VIOLATION)
                return [FailLink(TransferFailed(f"the receiver sent {type(message).__name__} out of turn"))]

    def link_lost(self, error: TandemError) -> list[Action]:
        """Fails every transfer, because the stream or the channel broke, or the peer fell silent. Idempotent."""
        if self.lost is not None:
            return []
        self.lost = error
        return self._settle_all(lambda transfer: transfer.on_link_lost(error))

    def channel_ended(self) -> list[Action]:
        """Handles the end of the thread that posted frames, after `link_lost`. No page is read from now on."""
        return self._settle_all(SenderTransfer.on_channel_ended)

    def tick(self, now: float) -> list[Action]:
        """Checks timeouts. Call it several times a second."""
        if self.lost is not None:
            return []
        if self._liveness.is_silent(now):
            self._counters.count(Reason.PEER_SILENT)
            return [FailLink(TransferFailed("the receiver fell silent"))]
        actions: list[Action] = [Send(Heartbeat())] if self._liveness.beat_due(now) else []
        return actions + self._settle_all(lambda transfer: transfer.tick(now, self._counters))

    def _get(self, transfer_id: TransferId) -> SenderTransfer:
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            raise TransferFailed(f"transfer {transfer_id} is over")
        return transfer

    def _on_answer(self, message: Granted | Committed | AbortAck) -> list[Action]:
        transfer = self._transfers.get(message.id)
        if transfer is None:
            self._counters.count(Reason.LATE_MESSAGE)
            return []
        match message:
            case Granted():
                return self._settle(message.id, transfer.on_granted(message))
            case Committed():
                return self._settle(message.id, transfer.on_committed())
            case AbortAck():
                return self._settle(message.id, transfer.on_abort_ack())

    def _settle_all(self, step: Callable[[SenderTransfer], list[Action]]) -> list[Action]:
        transfers = list(self._transfers.values())
        return [action for each in transfers for action in self._settle(each.id, step(each))]

    def _settle(self, transfer_id: TransferId, actions: list[Action]) -> list[Action]:
        if self._transfers[transfer_id].is_over:
            del self._transfers[transfer_id]
        return actions
