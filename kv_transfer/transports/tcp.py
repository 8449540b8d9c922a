"""Channel between two machines over one TCP connection: a small header, then the payload directly into a ring slot.

The sender's pages are written to the socket without a copy. The connection's flow control provides backpressure.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TypeAlias

import numpy as np

from kv_transfer.transports.base import (
    AnyReceiveChannel,
    Bytes,
    ChannelBroken,
    ChannelEnded,
    ChannelKey,
    ChannelNotConnected,
    ChannelTimeout,
    Countdown,
    Frame,
    Listener,
    ReceiveChannel,
    RingSpec,
    SendChannel,
    Transport,
)
from kv_transfer.transports.handshake import READY, Acceptor, Finish, keep_alive, prove_to_receiver, receive_exactly
from services.runtime.dialling import dial

_HEADER = struct.Struct("<QQ16s")  # seq, bytes, digest
_MAX_BUFFERS = 512  # for one sendmsg; the system's limit is 1024
_BACKLOG = 64
# Timeout for a sender that stops in the middle of a frame, in seconds.
_STALL_S = 5.0
POLL_S = 0.25
CONNECT_TIMEOUT_S = 1.5
"""Timeout for connecting a channel, in seconds. Within it, `dial` sends enough packets to tolerate the loss of some."""
_Address: TypeAlias = tuple[str, int]


class TcpTransport(Transport):
    """Plain TCP."""

    name = "tcp"

    def listen(self, host: str, port: int) -> Listener:
        """Listens on exactly this address. Port 0 selects a free port."""
        return TcpListener(host, port, _make_ready)

    def open(self, address: str, key: ChannelKey, ring: RingSpec, *, timeout_s: float) -> SendChannel:
        """Opens a channel to `host:port`."""
        countdown = Countdown(timeout_s)
        sock = connect(address, countdown)
        try:
            prove_to_receiver(sock, key, countdown)
            if receive_exactly(sock, len(READY), countdown) != READY:
                raise ChannelBroken("the receiver did not get ready")
            return TcpSendChannel(sock, ring)
        except OSError as error:
            sock.close()
            raise ChannelBroken(f"the channel to {address} broke during the handshake: {error}") from error
        except ChannelBroken:
            sock.close()
            raise


class TcpSendChannel(SendChannel):
    """Writes the header and the buffers to the connection in as few system calls as possible."""

    def __init__(self, sock: socket.socket, ring: RingSpec) -> None:
        self._socket = sock
        self._ring = ring
        self._set_timeout(socket.SO_SNDTIMEO)

    def post(self, seq: int, digest: bytes, buffers: Sequence[Bytes], *, timeout_s: float) -> None:
        """See SendChannel."""
        num_bytes = sum(buffer.size for buffer in buffers)
        if num_bytes > self._ring.slot_bytes:
            raise ValueError("the buffers of a frame do not fit into one slot")
        pieces = [memoryview(_HEADER.pack(seq, num_bytes, digest)), *(buffer.data for buffer in buffers)]
        last_progress = time.monotonic()
        while pieces:
            num_sent = self._send(pieces)
            now = time.monotonic()
            if num_sent:
                last_progress = now
                pieces = _rest_of(pieces, num_sent)
            elif now - last_progress > timeout_s:
                raise ChannelTimeout("the receiver took no bytes in time")

    def shutdown(self) -> None:
        """See SendChannel."""
        _shutdown(self._socket)

    def close(self) -> None:
        """See SendChannel."""
        self._socket.close()

    def _set_timeout(self, option: int) -> None:
        _set_timeout(self._socket, option, POLL_S)

    def _send(self, pieces: list[memoryview]) -> int:
        """Returns how many bytes of the pieces the connection accepted, from the start.

        Returns 0 if it accepted none for a while.
        """
        try:
            return self._socket.sendmsg(pieces[:_MAX_BUFFERS], [], socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ChannelBroken(f"the connection broke: {error}") from error


class TcpReceiveChannel(ReceiveChannel):
    """Receives each frame into a free slot of its ring."""

    def __init__(self, sock: socket.socket, ring: RingSpec) -> None:
        self._socket = sock
        self._ring = ring
        self._slots: Bytes | None = np.zeros(ring.num_slots * ring.slot_bytes, dtype=np.uint8)
        self._has_free = threading.Condition()
        self._free = list(range(ring.num_slots))
        self._is_shut = False
        self._header = memoryview(bytearray(_HEADER.size))
        self._set_timeout(socket.SO_RCVTIMEO)

    def poll(self, *, timeout_s: float) -> Frame | None:
        """See ReceiveChannel."""
        end = time.monotonic() + timeout_s
        slots, slot = self._slots, self._take_slot(timeout_s)
        if slots is None:
            raise ChannelBroken("the channel is closed")
        if slot is None:
            return None
        if not self._receive_header(end):
            self.release(slot)
            return None
        seq, num_bytes, digest = _HEADER.unpack(self._header)
        if num_bytes > self._ring.slot_bytes:
            raise ChannelBroken(f"the sender announced a frame of {num_bytes} bytes, more than a slot holds")
        start = slot * self._ring.slot_bytes
        data = slots[start : start + num_bytes]
        self._receive_all(data.data)
        return Frame(seq, digest, slot, data)

    def release(self, slot: int) -> None:
        """See ReceiveChannel."""
        with self._has_free:
            if slot in self._free:
                raise ValueError(f"ring slot {slot} was released twice")
            self._free.append(slot)
            self._has_free.notify()

    def shutdown(self) -> None:
        """See ReceiveChannel."""
        with self._has_free:
            self._is_shut = True
            self._has_free.notify_all()
        _shutdown(self._socket)

    def close(self) -> None:
        """See ReceiveChannel."""
        self._slots = None
        self._socket.close()

    def _set_timeout(self, option: int) -> None:
        _set_timeout(self._socket, option, POLL_S)

    def _take_slot(self, timeout_s: float) -> int | None:
        with self._has_free:
            self._has_free.wait_for(lambda: self._free or self._is_shut, timeout_s)
            if self._is_shut:
                raise ChannelBroken("the channel was shut down")
            return self._free.pop() if self._free else None

    def _receive_header(self, end: float) -> bool:
        """Waits for a header until `end`. Completes a header that has started to arrive. Returns False on timeout."""
        while True:
            num_received = self._receive_some(self._header)
            if num_received:
                self._receive_all(self._header[num_received:])
                return True
            if time.monotonic() >= end:
                return False

    def _receive_all(self, target: memoryview) -> None:
        last_progress = time.monotonic()
        while target.nbytes:
            try:
                num_received = self._receive_some(target)
            except ChannelEnded as error:
                raise ChannelBroken("the sender closed the channel in the middle of a frame") from error
            target = target[num_received:]
            if num_received:
                last_progress = time.monotonic()
            elif time.monotonic() - last_progress > _STALL_S:
                raise ChannelTimeout("the sender stopped in the middle of a frame")

    def _receive_some(self, target: memoryview) -> int:
        """Returns the number of bytes received, or 0 if none arrived for a while."""
        try:
            num_received = self._socket.recv_into(target, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ChannelBroken(f"the connection broke: {error}") from error
        if num_received == 0:
            raise ChannelEnded("the sender closed the channel")
        return num_received


class TcpListener(Listener):
    """Listens on exactly one address. `finish` turns a proven connection into a channel; see `Acceptor`."""

    def __init__(self, host: str, port: int, finish: Finish) -> None:
        sock = listen(host, port)
        self._address: _Address = sock.getsockname()[:2]
        self._acceptor = Acceptor(sock, finish, name=f"tcp-{self._address[1]}")

    @property
    def address(self) -> str:
        """See Listener."""
        host, port = self._address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def expect(self, key: ChannelKey, ring: RingSpec) -> Future[AnyReceiveChannel]:
        """See Listener."""
        return self._acceptor.expect(key, ring)

    def close(self) -> None:
        """See Listener."""
        self._acceptor.close()


def connect(address: str, countdown: Countdown) -> socket.socket:
    """Connects to `host:port`, at the host's first address that responds. Raises ChannelBroken."""
    host, port = split_address(address)
    try:
        sock = dial(host, port, timeout_s=min(CONNECT_TIMEOUT_S, countdown.remaining_s()))
    except OSError as error:
        raise ChannelNotConnected(f"no connection to {address}: {error.strerror or error}") from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(sock)
    return sock


def listen(host: str, port: int) -> socket.socket:
    """Listens on exactly this address. `::` includes IPv4, as for the worker's gRPC server. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    is_dual = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=is_dual)


def split_address(address: str) -> _Address:
    """Returns host and port of `host:port` or `[v6]:port`. Raises ChannelBroken."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ChannelBroken(f"{address!r} is not host:port")
    return host.strip("[]"), int(port)


def _make_ready(sock: socket.socket, ring: RingSpec, _: ChannelKey) -> ReceiveChannel:
    sock.setblocking(True)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(sock)
    channel = TcpReceiveChannel(sock, ring)
    sock.sendall(READY)
    return channel


def _set_timeout(sock: socket.socket, option: int, timeout_s: float) -> None:
    # Use the kernel's timeout: a Python timeout would make the socket non-blocking and cost a poll for each call.
    sock.setblocking(True)
    seconds = int(timeout_s)
    sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", seconds, int((timeout_s - seconds) * 1e6)))


def _rest_of(pieces: list[memoryview], num_sent: int) -> list[memoryview]:
    for index, piece in enumerate(pieces):
        if num_sent < piece.nbytes:
            return [piece[num_sent:], *pieces[index + 1 :]]
        num_sent -= piece.nbytes
    return []


def _shutdown(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # already disconnected or closed
