"""State machine for one transfer at the receiver: its reservation, its chunks, its seal, and its end.

Does no I/O and reads no clock: turns events and the current time into actions. Does not depend on tensors, threads,
RPC, or other transfers of its Link.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from math import inf, lcm

from kv_transfer.protocol.actions import (
    AbandonPages,
    Action,
    CommitPages,
    Place,
    ReleasePages,
    ReportEnded,
    ReservePages,
    Revoke,
    Send,
)
from kv_transfer.protocol.counters import Counters, Reason
from kv_transfer.protocol.failures import abort_of, peer_error_from
from kv_transfer.protocol.frames import ChunkLost, ChunkPlaced, ChunkRevoked, PlacementEvent
from kv_transfer.protocol.messages import (
    Abort,
    AbortAck,
    ChunkHeader,
    Committed,
    Granted,
    Reserve,
    Seal,
    WireLayout,
    pages_per_frame,
    seal_digest,
)
from services.runtime.errors import DeadlineExceeded, TandemError, TransferFailed


class ReceiverState(Enum):
    """State of a transfer at the receiver."""

    RESERVING = auto()
    STREAMING = auto()
    COMMITTING = auto()
    COMMITTED = auto()
    FAILED = auto()


_ENDED = frozenset({ReceiverState.COMMITTED, ReceiverState.FAILED})


@dataclass(frozen=True, slots=True)
class LinkTerms:
    """The parameters that both sides agreed on when the Link was opened."""

    sender: WireLayout
    receiver: WireLayout
    slot_bytes: int

    @property
    def frame_pages(self) -> int:
        """Number of the sender's pages in one frame."""
        return pages_per_frame(self.sender.page_bytes, self.slot_bytes)

    def usable_prefix(self, num_cached_tokens: int) -> int:
        """Returns the length of the cached prefix, rounded down to a page boundary of both sides."""
        return num_cached_tokens - num_cached_tokens % lcm(self.sender.page_size, self.receiver.page_size)


class ReceiverTransfer:
    """One transfer. The reserved pages may be written to while a chunk is `outstanding` at the channel.

    They are released exactly once, when no chunk is outstanding, and never after a successful `CommitPages`. The worker
    must complete each requested action within `worker_s`. A late completion is still processed, so that no page leaks.
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
        """Requests pages from the worker."""
        return [self._ask("reserve", ReservePages(self.id, self.num_tokens))]

    def on_reserved(self, num_pages: int, num_cached_tokens: int) -> list[Action]:
        """Handles the reservation. If the transfer has failed in the meantime, releases the pages immediately."""
        self._question = None
        self._holds_pages = True
        if self.state is ReceiverState.FAILED:
            return self._release_when_idle()
        if num_pages * self._terms.receiver.page_size < self.num_tokens or num_cached_tokens > self.num_tokens:
            return self.fail(TransferFailed("the reservation does not hold the tokens"))
        self.state = ReceiverState.STREAMING
        # Allocate memory in proportion to the transfer's size only now that the worker has accepted the size.
        self._covered = bytearray(self._terms.sender.num_pages_for(self.num_tokens))
        self._num_cached_tokens = self._terms.usable_prefix(num_cached_tokens)
        self._mark_covered(0, self._num_cached_tokens // self._terms.sender.page_size)
        return [self._granted()]

    def on_reserve_failed(self, error: TandemError) -> list[Action]:
        """Fails the transfer, because the worker could not reserve pages."""
        self._question = None
        if self.state is ReceiverState.FAILED:
            return self._end()
        self.state = ReceiverState.FAILED
        self.error = error
        return [Send(abort_of(self.id, error)), *self._end()]

    def on_reserve(self, message: Reserve) -> list[Action]:
        """Handles a duplicate Reserve. Repeats the grant and reserves nothing twice."""
        self._counters.count(Reason.DUPLICATE_RESERVE)
        if self.state is ReceiverState.STREAMING and message.num_tokens == self.num_tokens:
            return [self._granted()]
        return []

    def on_chunk(self, header: ChunkHeader, *, is_fresh: bool) -> list[Action]:
        """Handles a chunk header. `is_fresh` means that no earlier header claimed its frames.

        The frames of a fresh header are claimed in every state of the transfer, so that the channel makes progress.
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
        """Handles the result for a chunk from the channel."""
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
                # If we did not revoke the chunk, the sender gave up or the channel broke. Its abort or `link_lost`
                # carries the reason.
                return self._commit_when_complete() + self._release_when_idle()

    def on_seal(self, seal: Seal) -> list[Action]:
        """Handles the manifest. It is verified once every announced chunk is placed."""
        if self.state is not ReceiverState.STREAMING or self._seal is not None:
            self._counters.count(Reason.LATE_MESSAGE)
            return []
        self._seal = seal
        return self._commit_when_complete()

    def on_committed(self) -> list[Action]:
        """Handles the worker's takeover of the pages, which the worker owns from now on.

        If the transfer was given up during the commit, one side has already reported the failure to the other. Then it
        stays failed for the sender, and the worker must abandon the pages.
        """
        self._question = None
        self.state = ReceiverState.COMMITTED
        self._holds_pages = False
        outcome = Send(Committed(self.id)) if self._given_up is None else AbandonPages(self.id, self._given_up)
        return [outcome, *self._end()]

    def on_commit_failed(self, error: TandemError) -> list[Action]:
        """Fails the transfer, because the worker rejected the pages."""
        self._question = None
        self.state = ReceiverState.STREAMING
        return self.fail(self._given_up or error, tell_peer=self._given_up is None)

    def on_abort(self, message: Abort) -> list[Action]:
        """Handles an abort from the sender. Acknowledges it after the reserved pages are released."""
        self._owes_ack = True
        error = peer_error_from(message)
        if self.state is ReceiverState.COMMITTING:
            self._given_up = self._given_up or error
            return []
        return self.fail(error, tell_peer=False)

    def on_channel_ended(self) -> list[Action]:
        """Handles the end of the channel. Does not wait for chunks without a result, which are unexpected."""
        self._num_outstanding = 0
        return self._release_when_idle()

    def on_released(self) -> list[Action]:
        """Ends the transfer after its pages are released."""
        self._question = None
        return self._end()

    def fail(self, error: TandemError, *, tell_peer: bool = True) -> list[Action]:
        """Fails the transfer, for a reason from any side. Idempotent.

        Has no effect while the worker commits the pages: then the worker's result decides.
        """
        if self.state in _ENDED or self.state is ReceiverState.COMMITTING:
            return []
        self.state = ReceiverState.FAILED
        self.error = error
        actions: list[Action] = [Send(abort_of(self.id, error))] if tell_peer else []
        actions.append(Revoke(self.id))
        return actions + self._release_when_idle()

    def tick(self, now: float) -> list[Action]:
        """Checks timeouts."""
        actions = self._judge_worker(now)
        if self.state in _ENDED or self.state is ReceiverState.COMMITTING or now < self._deadline:
            return actions
        self._counters.count(Reason.DEADLINE)
        return actions + self.fail(DeadlineExceeded("the request's deadline passed during the handoff"))

    @property
    def awaits_payload(self) -> bool:
        """Whether the channel has yet to deliver payload for this transfer."""
        return self._num_outstanding > 0

    def _ask(self, question: str, action: Action) -> Action:
        """Starts waiting for the worker to complete the action. The next tick records the start time."""
        self._question, self._asked_at = question, None
        return action

    def _judge_worker(self, now: float) -> list[Action]:
        """Fails the transfer, once, if the worker takes too long to complete an action.

        During a commit, notifies the sender of the failure. A commit that still succeeds later is then abandoned. If
        the worker does not release the pages, the transfer never ends. No peer waits for such a transfer, and its pages
        are never reported as free.
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


def place_for(header: ChunkHeader, terms: LinkTerms, *, is_wanted: bool) -> Place:
    """Returns the action that claims the header's frames."""
    return Place(
        id=header.id,
        chunk_index=header.chunk_index,
        first_seq=header.channel_seq,
        num_frames=-(-header.num_pages // terms.frame_pages),
        first_page=header.first_page,
        num_pages=header.num_pages,
        is_wanted=is_wanted,
    )
