"""Announces the content of ring slots over a socket: the control side of channels whose payload travels between GPUs.

    sender   → seq, slot, bytes, digest     (the slot is filled, or will be by a transfer in flight)
    receiver → slot                         (the slot may be filled again)

Messages have fixed sizes and never pile up, because there are at most as many in transit as slots. The end of the
socket means the end of the peer: the socket detects a dead process immediately, and a GPU does not detect it at all.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from dataclasses import dataclass

from kv_transfer.transports.base import ChannelBroken, ChannelEnded, ChannelTimeout, Countdown, RingSpec

_POSTED = struct.Struct("<QIQ16s")  # seq, slot, bytes, digest
_RELEASED = struct.Struct("<I")  # slot


@dataclass(frozen=True, slots=True)
class Posted:
    """A filled slot."""

    seq: int
    slot: int
    num_bytes: int
    digest: bytes


class SenderSlots:
    """The sender's view of the ring. For use by one thread, except for `shutdown`."""

    def __init__(self, sock: socket.socket, ring: RingSpec) -> None:
        self._messages = _Messages(sock, _RELEASED.size)
        self._ring = ring
        self._free = list(range(ring.num_slots))
        self._in_flight: set[int] = set()

    def take(self, num_bytes: int, timeout_s: float) -> int:
        """Waits for a free slot. Raises ChannelTimeout, ChannelBroken, and ValueError if the frame exceeds a slot."""
        if num_bytes > self._ring.slot_bytes:
            raise ValueError("the bytes of a frame do not fit into one slot")
        self.collect()
        if not self._free:
            self._take_back(self._messages.receive(timeout_s))
        if not self._free:
            raise ChannelTimeout("the receiver released no ring slot in time")
        return self._free.pop()

    def post(self, posted: Posted) -> None:
        """Announces a filled slot. Raises ChannelBroken."""
        self._in_flight.add(posted.slot)
        self._messages.send(_POSTED.pack(posted.seq, posted.slot, posted.num_bytes, posted.digest))

    def collect(self) -> None:
        """Collects all slots that were released so far.

        Raises ChannelBroken, for example if the receiver has disconnected.
        """
        while (message := self._messages.receive(0.0)) is not None:
            self._take_back(message)

    def shutdown(self) -> None:
        """Ends the channel for both sides and wakes all waiting threads. Idempotent, does not block."""
        self._messages.shutdown()

    def close(self) -> None:
        """Closes the socket. Idempotent."""
        self._messages.close()

    def _take_back(self, message: bytes | None) -> None:
        if message is None:
            return
        (slot,) = _RELEASED.unpack(message)
        if slot not in self._in_flight:
            raise ChannelBroken("the receiver released a slot that it does not hold")
        self._in_flight.remove(slot)
        self._free.append(slot)


class ReceiverSlots:
    """The receiver's view of the ring. One thread calls `next`. Any thread may call `release` and `shutdown`."""

    def __init__(self, sock: socket.socket, ring: RingSpec) -> None:
        self._messages = _Messages(sock, _POSTED.size)
        self._ring = ring
        self._lock = threading.Lock()
        self._held: set[int] = set()

    def next(self, timeout_s: float) -> Posted | None:
        """Returns the next filled slot, or None if none is announced in time. Raises ChannelBroken."""
        message = self._messages.receive(timeout_s)
        if message is None:
            return None
        posted = Posted(*_POSTED.unpack(message))
        with self._lock:
            is_free = posted.slot < self._ring.num_slots and posted.slot not in self._held
            if not is_free or posted.num_bytes > self._ring.slot_bytes:
                raise ChannelBroken("the sender posted a slot that is not its own, or more than it holds")
            self._held.add(posted.slot)
        return posted

    def release(self, slot: int) -> None:
        """Frees the slot for a new frame. Does not report that the sender has disconnected; `next` does."""
        with self._lock:
            if slot not in self._held:
                raise ValueError(f"ring slot {slot} was released twice")
            self._held.remove(slot)
        try:
            self._messages.send(_RELEASED.pack(slot))
        except ChannelBroken:
            return

    def shutdown(self) -> None:
        """Ends the channel for both sides and wakes all waiting threads. Idempotent, does not block."""
        self._messages.shutdown()

    def close(self) -> None:
        """Closes the socket. Idempotent."""
        self._messages.close()


class _Messages:
    """Fixed-size messages in each direction, on a stream socket or in packets."""

    def __init__(self, sock: socket.socket, incoming_bytes: int) -> None:
        self._socket = sock
        self._incoming_bytes = incoming_bytes
        self._received = b""
        sock.setblocking(False)

    def send(self, message: bytes) -> None:
        try:
            num_sent = self._socket.send(message, socket.MSG_NOSIGNAL)
        except OSError as error:
            raise ChannelBroken(f"the other side of the channel is gone: {error}") from error
        if num_sent != len(message):
            raise ChannelBroken("the other side of the channel does not read what it is told")

    def receive(self, timeout_s: float) -> bytes | None:
        """Returns one whole message, or None if it does not arrive in time. Raises ChannelBroken."""
        countdown = Countdown(max(timeout_s, 0.0))
        while True:
            try:
                piece = self._socket.recv(self._incoming_bytes - len(self._received))
            except BlockingIOError:
                if not self._wait_readable(countdown):
                    return None
                continue
            except OSError as error:
                # If the peer ends with unread messages from us, its regular end looks like an error.
                raise ChannelEnded(f"the other side of the channel is gone: {error}") from error
            self._received += piece
            if not piece:
                torn = ChannelBroken("the other side closed the channel within a message")
                raise torn if self._received else ChannelEnded("the other side closed the channel")
            if len(self._received) == self._incoming_bytes:
                message, self._received = self._received, b""
                return message

    def shutdown(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # already disconnected or closed

    def close(self) -> None:
        self._socket.close()

    def _wait_readable(self, countdown: Countdown) -> bool:
        try:
            remaining_s = countdown.remaining_s()
        except ChannelTimeout:
            return False
        poller = select.poll()
        try:
            poller.register(self._socket, select.POLLIN)
        except (ValueError, OSError) as error:
            raise ChannelBroken("the channel is closed") from error
        return bool(poller.poll(remaining_s * 1000))
