"""Channel between two processes of one host. The ring is memory that both map, with a Unix socket as the doorbell.

The receiver creates the memory as an anonymous file and passes it over the socket, which lives in the abstract
namespace. Neither has a name in the file system, so nothing is left behind, however the processes end. Linux only.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import select
import socket
import struct
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from kv_transfer.transports.base import (
    AnyReceiveChannel,
    Bytes,
    ChannelBroken,
    ChannelEnded,
    ChannelKey,
    ChannelTimeout,
    Countdown,
    Frame,
    Listener,
    ReceiveChannel,
    RingSpec,
    SendChannel,
    Transport,
)
from kv_transfer.transports.handshake import READY, Acceptor, prove_to_receiver
from services.runtime.descriptors import receive_fds

_POSTED = struct.Struct("<QIQ16s")  # seq, slot, bytes, digest
_RELEASED = struct.Struct("<I")  # slot
_SEALS = 0x0001 | 0x0002 | 0x0004  # F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW: the peer cannot truncate the mapped file
_BACKLOG = 64


class ShmTransport(Transport):
    """Shared memory with a socket as doorbell."""

    name = "shm"

    @staticmethod
    def is_supported() -> bool:
        """Returns whether this system has anonymous files and abstract sockets."""
        return sys.platform == "linux" and hasattr(os, "memfd_create")

    def listen(self, host: str, port: int) -> Listener:
        """Starts a listener under a random abstract name."""
        return _ShmListener()

    def open(self, address: str, key: ChannelKey, ring: RingSpec, *, timeout_s: float) -> SendChannel:
        """Opens a channel on this host."""
        countdown = Countdown(timeout_s)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            _connect(sock, address, countdown.remaining_s())
            prove_to_receiver(sock, key, countdown)
            sock.settimeout(countdown.remaining_s())
            return ShmSendChannel(sock, _receive_ring(sock, ring), ring)
        except OSError as error:
            sock.close()
            raise ChannelBroken(f"shared memory could not be opened: {error}") from error
        except ChannelBroken:
            sock.close()
            raise


class ShmSendChannel(SendChannel):
    """Copies buffers into a free slot of the receiver's ring, and signals it on the doorbell."""

    def __init__(self, sock: socket.socket, memory: mmap.mmap, ring: RingSpec) -> None:
        self._socket = sock
        self._ring = ring
        self._slots: Bytes | None = np.frombuffer(memory, dtype=np.uint8)
        self._free = list(range(ring.num_slots))
        self._in_flight: set[int] = set()
        sock.settimeout(None)

    def post(self, seq: int, digest: bytes, buffers: Sequence[Bytes], *, timeout_s: float) -> None:
        """See SendChannel."""
        slots = self._slots
        if slots is None:
            raise ChannelBroken("the channel is closed")
        slot = self._take_slot(timeout_s)
        start = end = slot * self._ring.slot_bytes
        for buffer in buffers:
            if end + buffer.size > start + self._ring.slot_bytes:
                raise ValueError("the buffers of a frame do not fit into one slot")
            slots[end : end + buffer.size] = buffer
            end += buffer.size
        self._in_flight.add(slot)
        _send(self._socket, _POSTED.pack(seq, slot, end - start, digest))

    def shutdown(self) -> None:
        """See SendChannel."""
        _shutdown(self._socket)

    def close(self) -> None:
        """See SendChannel."""
        self._slots = None
        self._socket.close()

    def _take_slot(self, timeout_s: float) -> int:
        if not self._free:
            _wait_readable(self._socket, timeout_s)
            self._collect()
        if not self._free:
            raise ChannelTimeout("the receiver released no ring slot in time")
        return self._free.pop()

    def _collect(self) -> None:
        """Collects all slots that the receiver has released so far."""
        while True:
            try:
                message = self._socket.recv(_RELEASED.size, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelBroken(f"the receiver is gone: {error}") from error
            if len(message) != _RELEASED.size:
                raise ChannelBroken("the receiver closed the channel")
            (slot,) = _RELEASED.unpack(message)
            if slot not in self._in_flight:
                raise ChannelBroken("the receiver released a slot that it does not hold")
            self._in_flight.remove(slot)
            self._free.append(slot)


class ShmReceiveChannel(ReceiveChannel):
    """Owns the ring. Returns frames as views of their slots."""

    def __init__(self, sock: socket.socket, memory: mmap.mmap, ring: RingSpec) -> None:
        self._socket = sock
        self._ring = ring
        self._slots: Bytes | None = np.frombuffer(memory, dtype=np.uint8)
        self._lock = threading.Lock()
        self._held: set[int] = set()
        sock.settimeout(None)

    def poll(self, *, timeout_s: float) -> Frame | None:
        """See ReceiveChannel."""
        slots = self._slots
        if slots is None:
            raise ChannelBroken("the channel is closed")
        if not _is_readable(self._socket, timeout_s):
            return None
        try:
            message = self._socket.recv(_POSTED.size + 1)
        except OSError as error:
            # If the sender ends with unread messages from us, its regular end looks like an error.
            raise ChannelEnded(f"the sender is gone: {error}") from error
        if not message:
            raise ChannelEnded("the sender closed the channel")
        if len(message) != _POSTED.size:
            raise ChannelBroken("the sender sent something that is no frame")
        seq, slot, num_bytes, digest = _POSTED.unpack(message)
        with self._lock:
            if slot >= self._ring.num_slots or slot in self._held or num_bytes > self._ring.slot_bytes:
                raise ChannelBroken("the sender posted a slot that is not its own, or more than it holds")
            self._held.add(slot)
        start = slot * self._ring.slot_bytes
        return Frame(seq, digest, slot, slots[start : start + num_bytes])

    def release(self, slot: int) -> None:
        """See ReceiveChannel."""
        with self._lock:
            self._held.remove(slot)
        try:
            self._socket.send(_RELEASED.pack(slot), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except OSError:
            # The sender has disconnected, or does not collect its slots. The next poll or its stall timeout reports
            # either case.
            return

    def shutdown(self) -> None:
        """See ReceiveChannel."""
        _shutdown(self._socket)

    def close(self) -> None:
        """See ReceiveChannel."""
        self._slots = None
        self._socket.close()


class _ShmListener(Listener):
    def __init__(self) -> None:
        self._name = f"tandem-{secrets.token_hex(16)}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.bind(b"\0" + self._name.encode())
            sock.listen(_BACKLOG)
        except OSError:
            sock.close()
            raise
        self._acceptor = Acceptor(sock, _offer_ring, name=self._name[:14])

    @property
    def address(self) -> str:
        return self._name

    def expect(self, key: ChannelKey, ring: RingSpec) -> Future[AnyReceiveChannel]:
        return self._acceptor.expect(key, ring)

    def close(self) -> None:
        self._acceptor.close()


def _connect(sock: socket.socket, address: str, timeout_s: float) -> None:
    # Use the kernel's timeout: with a Python timeout, a full backlog would be an immediate error instead of a wait.
    seconds = int(timeout_s)
    limit = struct.pack("@ll", seconds, int((timeout_s - seconds) * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    sock.connect(b"\0" + address.encode())


def _offer_ring(sock: socket.socket, ring: RingSpec, _: ChannelKey) -> ReceiveChannel:
    fd = os.memfd_create("tandem-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, ring.num_slots * ring.slot_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        memory = _map(fd, ring)
        socket.send_fds(sock, [READY], [fd])
    finally:
        os.close(fd)
    return ShmReceiveChannel(sock, memory, ring)


def _receive_ring(sock: socket.socket, ring: RingSpec) -> mmap.mmap:
    ready, fds = receive_fds(sock, len(READY), 1)
    try:
        if ready != READY or len(fds) != 1:
            raise ChannelBroken("the receiver did not offer its ring")
        if os.fstat(fds[0]).st_size != ring.num_slots * ring.slot_bytes:
            raise ChannelBroken("the offered ring does not have the size that was agreed")
        if fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ChannelBroken("the offered ring could be truncated while it is written to")
        return _map(fds[0], ring)
    finally:
        for fd in fds:
            os.close(fd)


def _map(fd: int, ring: RingSpec) -> mmap.mmap:
    # Populate at once: page faults would otherwise cost more than the copies of the first round.
    return mmap.mmap(fd, ring.num_slots * ring.slot_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _send(sock: socket.socket, message: bytes) -> None:
    try:
        sock.send(message, socket.MSG_NOSIGNAL)
    except OSError as error:
        raise ChannelBroken(f"the receiver is gone: {error}") from error


def _is_readable(sock: socket.socket, timeout_s: float) -> bool:
    poller = select.poll()
    try:
        poller.register(sock, select.POLLIN)
    except (ValueError, OSError) as error:
        raise ChannelBroken("the channel is closed") from error
    return bool(poller.poll(timeout_s * 1000))


def _wait_readable(sock: socket.socket, timeout_s: float) -> None:
    if not _is_readable(sock, timeout_s):
        raise ChannelTimeout("the receiver released no ring slot in time")


def _shutdown(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # already disconnected or closed
