"""Decides which frames of a channel may be written into which pages at this moment.

The receiver's state machine adds a `Place` for each chunk and can revoke it. The thread that reads the channel calls
`begin` before it copies a frame, and `finish` after the copy. Between the two calls, a revoked chunk still counts as
being written to. Pure and without locks: the owner serializes the calls.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import TypeAlias

from kv_transfer.protocol.actions import Place
from kv_transfer.protocol.counters import Reason
from kv_transfer.protocol.messages import TransferId, chain_digest


@dataclass(frozen=True, slots=True)
class ChunkPlaced:
    """All frames of the chunk were verified and copied. `digest` is the chain of the frame digests."""

    id: TransferId
    chunk_index: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class ChunkLost:
    """The chunk cannot be completed. No more of it is written."""

    id: TransferId
    chunk_index: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class ChunkRevoked:
    """The chunk was revoked, or skipped by the sender. No more of it is written."""

    id: TransferId
    chunk_index: int


PlacementEvent: TypeAlias = ChunkPlaced | ChunkLost | ChunkRevoked


@dataclass(frozen=True, slots=True)
class Wait:
    """No chunk claims the frame yet, because its header is still in transit. Call again after the next `add`."""


@dataclass(frozen=True, slots=True)
class Drop:
    """The frame must be discarded. `reason` is None if an event already reports the cause."""

    reason: Reason | None


@dataclass(frozen=True, slots=True)
class Write:
    """The frame may be copied if its digest is correct. After the copy, call `finish`.

    The frame holds `num_pages` pages, from page `first_page` of the sender's page table on.
    """

    id: TransferId
    first_page: int
    num_pages: int


Verdict: TypeAlias = Wait | Drop | Write


@dataclass(slots=True, order=True)
class _Ticket:
    first_seq: int
    place: Place = field(compare=False)
    is_wanted: bool = field(compare=False)
    is_busy: bool = field(compare=False, default=False)
    digests: list[bytes] = field(compare=False, default_factory=list)

    @property
    def end_seq(self) -> int:
        return self.first_seq + self.place.num_frames


class PlacementTable:
    """The chunks whose frames the channel has yet to deliver, in the order of their frames.

    Each frame carries `frame_pages` pages of `page_bytes`. The last frame of a chunk may carry fewer.
    """

    def __init__(self, *, frame_pages: int, page_bytes: int) -> None:
        self._frame_pages = frame_pages
        self._page_bytes = page_bytes
        self._tickets: list[_Ticket] = []
        self._last_seq = -1
        self._is_closed = False
        self._end_seq = 0
        self.num_frames_seen = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def add(self, place: Place) -> list[PlacementEvent]:
        """Registers the frames that a chunk header claims. If they have already passed, the chunk is lost."""
        ticket = _Ticket(place.first_seq, place, place.is_wanted)
        self._end_seq = max(self._end_seq, ticket.end_seq)
        if self._is_closed:
            return [ChunkRevoked(place.id, place.chunk_index)] if place.is_wanted else []
        if place.first_seq <= self._last_seq:
            return self._lose(ticket, Reason.LOST_FRAME)
        insort(self._tickets, ticket)
        return []

    def revoke(self, transfer_id: TransferId) -> list[PlacementEvent]:
        """Stops copying for this transfer.

        If one of its frames is being copied, `finish` reports that frame's chunk.
        """
        events: list[PlacementEvent] = []
        for ticket in self._tickets:
            if ticket.place.id == transfer_id and ticket.is_wanted:
                ticket.is_wanted = False
                if not ticket.is_busy:
                    events.append(ChunkRevoked(transfer_id, ticket.place.chunk_index))
        return events

    def begin(self, seq: int, num_bytes: int) -> tuple[Verdict, list[PlacementEvent]]:
        """Decides about the frame that waits in the ring. After a Write, no other frame may begin before `finish`.

        An empty frame stands for the rest of its chunk, which the sender skipped.
        """
        if seq <= self._last_seq:
            return Drop(Reason.REPLAYED_FRAME), []
        events = self._pass_over(seq)
        if not self._tickets or self._tickets[0].first_seq > seq:
            return Wait(), events
        ticket = self._tickets[0]
        self.num_frames_seen += 1
        if num_bytes == 0:
            return Drop(None), events + self._withdraw(ticket)
        self._last_seq = seq
        offset = seq - ticket.first_seq
        first_page = offset * self._frame_pages
        num_pages = min(self._frame_pages, ticket.place.num_pages - first_page)
        # Count each dropped frame once: a chunk lost here is counted by its event, and a revoked chunk by its late
        # frames.
        verdict: Verdict = Drop(None if ticket.is_wanted else Reason.LATE_FRAME)
        if ticket.is_wanted and offset != len(ticket.digests):
            events += self._lose(ticket, Reason.LOST_FRAME)
        elif ticket.is_wanted and num_bytes != num_pages * self._page_bytes:
            events += self._lose(ticket, Reason.WRONG_SIZE)
        elif ticket.is_wanted:
            ticket.is_busy = True
            return Write(ticket.place.id, ticket.place.first_page + first_page, num_pages), events
        self._drop_if_last(ticket, seq)
        return verdict, events

    def can_be_claimed(self, seq: int, num_bytes: int) -> bool:
        """Returns whether the header of a waiting frame can still arrive.

        Frame numbers and headers have no gaps, so the next header claims the frames right after the last claim. Only an
        empty frame can have a higher number, because it has the last number of its chunk.
        """
        return num_bytes == 0 or seq <= self._end_seq

    def finish(self, seq: int, digest: bytes | None, fault: Reason = Reason.CHECKSUM_MISMATCH) -> list[PlacementEvent]:
        """Records the end of a frame's copy. `digest` is None if the frame was not copied, because of `fault`."""
        ticket = self._tickets[0]
        place = ticket.place
        ticket.is_busy = False
        is_last = self._drop_if_last(ticket, seq)
        if not ticket.is_wanted:
            return [ChunkRevoked(place.id, place.chunk_index)]
        if digest is None:
            return self._lose(ticket, fault)
        ticket.digests.append(digest)
        return [ChunkPlaced(place.id, place.chunk_index, chain_digest(ticket.digests))] if is_last else []

    def close(self) -> list[PlacementEvent]:
        """Revokes all remaining chunks after the channel has closed and all copies have ended."""
        events: list[PlacementEvent] = [
            ChunkRevoked(ticket.place.id, ticket.place.chunk_index)
            for ticket in self._tickets
            if ticket.is_wanted or ticket.is_busy
        ]
        self._tickets.clear()
        self._is_closed = True
        return events

    def _pass_over(self, seq: int) -> list[PlacementEvent]:
        events: list[PlacementEvent] = []
        while self._tickets and self._tickets[0].end_seq <= seq:
            events += self._lose(self._tickets.pop(0), Reason.LOST_FRAME)
        return events

    def _withdraw(self, ticket: _Ticket) -> list[PlacementEvent]:
        self._last_seq = ticket.end_seq - 1
        self._tickets.pop(0)
        return [ChunkRevoked(ticket.place.id, ticket.place.chunk_index)] if ticket.is_wanted else []

    def _lose(self, ticket: _Ticket, reason: Reason) -> list[PlacementEvent]:
        if not ticket.is_wanted:
            return []
        ticket.is_wanted = False
        return [ChunkLost(ticket.place.id, ticket.place.chunk_index, reason)]

    def _drop_if_last(self, ticket: _Ticket, seq: int) -> bool:
        is_last = seq == ticket.end_seq - 1
        if is_last:
            self._tickets.remove(ticket)
        return is_last
