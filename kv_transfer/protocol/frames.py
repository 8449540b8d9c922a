"""Which frames of a channel may be written into which pages right now.

The receiver's machine puts in a `Place` per chunk and revokes it; the reader of the channel asks before it copies a
frame and tells when the copy has ended. Between the two answers a revoked chunk still counts as written to. Pure and
without locks: the owner serialises the calls.
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
    """All frames of the chunk were verified and copied. `digest` chains those of its frames."""

    id: TransferId
    chunk_index: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class ChunkLost:
    """The chunk can no longer be completed, and nothing more is written for it."""

    id: TransferId
    chunk_index: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class ChunkRevoked:
    """After a Revoke, or because the sender left the chunk out: nothing more is written for it."""

    id: TransferId
    chunk_index: int


PlacementEvent: TypeAlias = ChunkPlaced | ChunkLost | ChunkRevoked


@dataclass(frozen=True, slots=True)
class Wait:
    """No chunk claims the frame yet: its header is still on the way. Ask again after the next `add`."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Do not copy the frame. `reason` is None where an event says it already."""

    reason: Reason | None


@dataclass(frozen=True, slots=True)
class Write:
    """Copy the frame, if its checksum is right: it holds pages `first_page` … of the sender. Then call `finish`."""

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
    """The chunks that the channel still owes, in the order of their frames.

    `frame_pages` pages of `page_bytes` travel in a frame; the last frame of a chunk may hold fewer.
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
        """A header claimed frames. If they went by already, the chunk is lost."""
        ticket = _Ticket(place.first_seq, place, place.is_wanted)
        self._end_seq = max(self._end_seq, ticket.end_seq)
        if self._is_closed:
            return [ChunkRevoked(place.id, place.chunk_index)] if place.is_wanted else []
        if place.first_seq <= self._last_seq:
            return self._lose(ticket, Reason.LOST_FRAME)
        insort(self._tickets, ticket)
        return []

    def revoke(self, transfer_id: TransferId) -> list[PlacementEvent]:
        """Copy nothing more for this transfer. A frame that is being copied now is answered for by `finish`."""
        events: list[PlacementEvent] = []
        for ticket in self._tickets:
            if ticket.place.id == transfer_id and ticket.is_wanted:
                ticket.is_wanted = False
                if not ticket.is_busy:
                    events.append(ChunkRevoked(transfer_id, ticket.place.chunk_index))
        return events

    def begin(self, seq: int, num_bytes: int) -> tuple[Verdict, list[PlacementEvent]]:
        """A frame waits in the ring. After a Write no other frame may begin before `finish`.

        An empty frame stands for the rest of its chunk, which the sender left out.
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
        # A chunk that is lost here is counted by its event; one that was given up before, by the frame.
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
        """Whether the header of a frame that has to wait can still come.

        Neither numbers nor headers leave a gap, so it claims what follows the last claim; only an empty frame has the
        number of its chunk's end.
        """
        return num_bytes == 0 or seq <= self._end_seq

    def finish(self, seq: int, digest: bytes | None, fault: Reason = Reason.CHECKSUM_MISMATCH) -> list[PlacementEvent]:
        """The copy of a frame ended. `digest` is None if nothing was copied, because of `fault`."""
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
        """The channel is gone and nothing is being copied: answer for all that is left."""
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
