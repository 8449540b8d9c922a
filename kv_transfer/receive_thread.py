"""The thread that reads the frames of one Link from its channel, verifies them in the ring, and copies them into pages.

The `PlacementTable` decides which frame belongs where. This module holds the table's lock and makes the copies.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
import xxhash

from kv_transfer.device_pages import DevicePages
from kv_transfer.link_end import LinkSetup
from kv_transfer.page_bytes import Destination, PageWriter
from kv_transfer.protocol.actions import Place
from kv_transfer.protocol.counters import Reason
from kv_transfer.protocol.frames import Drop, PlacementEvent, PlacementTable, Verdict, Wait, Write
from kv_transfer.protocol.messages import TransferId
from kv_transfer.protocol.receiver_transfer import LinkTerms
from kv_transfer.transports.base import (
    ChannelBroken,
    ChannelEnded,
    Countdown,
    DeviceFrame,
    DeviceReceiveChannel,
    Frame,
    ReceiveChannel,
)
from services.runtime.errors import InvariantViolated, TandemError

_IDLE_POLL_S = 1.0
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Reservation:
    """The pages of a transfer, and their generations at reservation time."""

    destination: Destination
    generations: tuple[int, ...]
    mark: torch.cuda.Event | None


class FramePlacer:
    """Owns the receiving channel. The callbacks run on its thread. The other methods belong to the event loop's thread.

    `on_events(events)` reports the results of chunks. `on_dropped(reason)` reports an unwanted frame. `on_ended(error)`
    is the last call, after the channel has closed and all copies have ended.
    """

    def __init__(
        self,
        channel: ReceiveChannel | DeviceReceiveChannel,
        setup: LinkSetup,
        *,
        terms: LinkTerms,
        on_events: Callable[[list[PlacementEvent]], None],
        on_dropped: Callable[[Reason], None],
        on_ended: Callable[[TandemError], None],
    ) -> None:
        self._channel = channel
        self._device_pages = DevicePages(setup.pool) if isinstance(channel, DeviceReceiveChannel) else None
        self._writer = PageWriter(setup.pool, terms.sender)
        self._generations = setup.generations
        self._table = PlacementTable(frame_pages=terms.frame_pages, page_bytes=terms.sender.page_bytes)
        self._stall_s = setup.timeouts.stall_s
        self._on_events = on_events
        self._on_dropped = on_dropped
        self._on_ended = on_ended
        self._changed = threading.Condition()
        self._reservations: dict[TransferId, _Reservation] = {}
        self._is_stopped = False
        self.is_broken = False
        """Whether the channel broke before either side ended it. Final once `on_ended` is called."""
        self._thread = threading.Thread(target=self._run, name="tandem-place", daemon=True)

    def start(self) -> None:
        """Starts receiving frames."""
        self._thread.start()

    @property
    def num_frames_seen(self) -> int:
        """Total number of frames that a chunk has claimed."""
        return self._table.num_frames_seen

    def open(self, transfer_id: TransferId, destination: Destination) -> None:
        """Sets the destination pages of a transfer, before its first chunk is added.

        Raises InvariantViolated if the pages cannot hold the transfer's tokens. Then none of them is ever written to.
        """
        self._writer.check(destination)
        # The previous user of the pages may have launched work that still reads them.
        mark = self._device_pages.mark() if self._device_pages is not None else None
        reservation = _Reservation(destination, self._generations.generations(destination.page_ids), mark)
        with self._changed:
            self._reservations[transfer_id] = reservation

    def is_current(self, transfer_id: TransferId) -> bool:
        """Returns whether no page of a transfer has been reused since `open`."""
        with self._changed:
            reservation = self._reservations[transfer_id]
        return self._is_current(reservation, slice(None))

    def forget(self, transfer_id: TransferId) -> None:
        """Forgets a transfer, for which nothing is placed from now on."""
        with self._changed:
            self._reservations.pop(transfer_id, None)

    def add(self, place: Place) -> list[PlacementEvent]:
        """See PlacementTable.add."""
        with self._changed:
            events = self._table.add(place)
            self._changed.notify()
        return events

    def revoke(self, transfer_id: TransferId) -> list[PlacementEvent]:
        """See PlacementTable.revoke."""
        with self._changed:
            return self._table.revoke(transfer_id)

    def stop(self) -> None:
        """Breaks the channel off. Idempotent, does not block."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()
        self._channel.shutdown()

    def _run(self) -> None:
        error: TandemError = ChannelBroken("the channel was closed")
        try:
            while not self._is_stopped:
                frame = self._channel.poll(timeout_s=_IDLE_POLL_S)
                if frame is not None:
                    self._take(frame)
        except ChannelBroken as broken:
            # Copy the error: the traceback of the original would keep the ring alive.
            error = broken.again()
            self.is_broken = not self._is_stopped and not isinstance(broken, ChannelEnded)
        except Exception:
            logger.exception("placing a frame failed")
            error = ChannelBroken("placing a frame failed")
            self.is_broken = True
        finally:
            self._channel.shutdown()
            self._channel.close()
            with self._changed:
                events = self._table.close()
            self._on_events(events)
            self._on_ended(error)

    def _take(self, frame: Frame | DeviceFrame) -> None:
        verdict = self._verdict_on(frame)
        match verdict:
            case Write():
                self._write(frame, verdict)
            case Drop(reason=Reason() as reason):
                self._on_dropped(reason)
            case _:
                pass
        self._channel.release(frame.slot)

    def _verdict_on(self, frame: Frame | DeviceFrame) -> Verdict:
        """Waits until a header claims the frame.

        The sender sends headers first, so a long wait means that the sender is faulty.
        """
        countdown = Countdown(self._stall_s)
        with self._changed:
            verdict, events = self._table.begin(frame.seq, frame.num_bytes)
            while isinstance(verdict, Wait):
                self._tell(events)
                is_due = self._table.can_be_claimed(frame.seq, frame.num_bytes)
                # Wait for the full timeout, however many other chunks are announced in the meantime.
                if not is_due or not self._changed.wait(countdown.remaining_s()):
                    raise ChannelBroken("a frame came that no chunk announced")
                if self._is_stopped:
                    raise ChannelBroken("the channel was closed")
                verdict, events = self._table.begin(frame.seq, frame.num_bytes)
        self._tell(events)
        return verdict

    def _write(self, frame: Frame | DeviceFrame, write: Write) -> None:
        verified: bytes | None = None
        fault = Reason.CHECKSUM_MISMATCH
        try:
            digest = self._digest_of(frame)
            reservation = self._reservations[write.id]
            destination = reservation.destination
            places = self._writer.places(write.first_page, write.num_pages, destination)
            if digest == frame.digest and not self._is_current(reservation, places):
                fault = Reason.STALE_GENERATION
            elif digest == frame.digest:
                self._copy(frame, write.first_page, reservation)
                verified = digest
        finally:
            with self._changed:
                events = self._table.finish(frame.seq, verified, fault)
            self._tell(events)

    def _digest_of(self, frame: Frame | DeviceFrame) -> bytes:
        if isinstance(frame, Frame):
            return xxhash.xxh3_128_digest(frame.data.data)
        return self._pages_for(frame).digest(frame.data)

    def _copy(self, frame: Frame | DeviceFrame, first_page: int, reservation: _Reservation) -> None:
        if isinstance(frame, Frame):
            self._writer.write(frame.data, first_page, reservation.destination)
            return
        with self._pages_for(frame).working(reservation.mark):
            self._writer.write(frame.data, first_page, reservation.destination)

    def _pages_for(self, frame: DeviceFrame) -> DevicePages:
        if self._device_pages is None:
            raise InvariantViolated(f"frame {frame.seq} came on a device channel, which needs device pages")
        return self._device_pages

    def _is_current(self, reservation: _Reservation, places: slice) -> bool:
        page_ids = reservation.destination.page_ids[places]
        return self._generations.generations(page_ids) == reservation.generations[places]

    def _tell(self, events: list[PlacementEvent]) -> None:
        if events:
            self._on_events(events)
