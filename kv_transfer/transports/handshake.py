"""The handshake in which both ends of a socket prove that they hold the channel's single-use token, without sending it.

    sender   → MAGIC, channel id, nonce
    receiver → nonce, HMAC(token, "receiver" …)
    sender   → HMAC(token, "sender" …), padding
    receiver → PADDED, if there was padding
    receiver → READY (with a file descriptor, if the transport passes one)

The padding is larger than the packets of common networks. It detects a path that loses full-size packets before any
page depends on that path.

All messages have fixed sizes. The receiver's side is an `Acceptor`: one thread that serves any number of
unauthenticated peers without waiting for any of them, and drops peers that do not finish in time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import logging
import secrets
import selectors
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import TypeAlias

from kv_transfer.transports.base import (
    AnyReceiveChannel,
    ChannelBroken,
    ChannelKey,
    ChannelTimeout,
    Countdown,
    LargePacketsLost,
    RingSpec,
)

MAGIC = b"TANDEMk1"
READY = b"\x01"
PADDED = b"\x03"
CHANNEL_ID_BYTES = 16
NONCE_BYTES = 32
PROOF_BYTES = 32
HANDSHAKE_TIMEOUT_S = 2.0
PADDING_BYTES = 12 * 1024
"""Size of the padding.

More than a jumbo frame of 9,000 bytes, and less than the ten packets that a new TCP connection sends at once.
"""
MAX_PADDING_BYTES = 64 * 1024
PADDING_TIMEOUT_S = 1.5
"""Time for the receiver's kernel to acknowledge the padding, in seconds.

Allows three retransmissions on a common network.
"""
IDLE_S = 1
"""Idle time after which the kernel probes a connection, and the interval between its probes, in seconds."""
MAX_UNANSWERED = 5
"""Number of unanswered probes after which the kernel drops a connection, so that it fails while it is idle."""
MAX_STRANGERS = 128

_HELLO_BYTES = len(MAGIC) + CHANNEL_ID_BYTES + NONCE_BYTES
Finish: TypeAlias = Callable[[socket.socket, RingSpec, ChannelKey], AnyReceiveChannel]
logger = logging.getLogger(__name__)


def keep_alive(sock: socket.socket) -> None:
    """Enables TCP keepalive on an idle connection, so that firewalls on the path do not drop its state.

    Without keepalive, the next frame after a quiet hour is lost silently, and the sender loses time until it notices. A
    stopped process still replies, because its kernel does.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, MAX_UNANSWERED)


def prove_to_receiver(sock: socket.socket, key: ChannelKey, countdown: Countdown) -> None:
    """Runs the sender's side of the handshake up to, but not including, READY. Raises ChannelBroken."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    sock.settimeout(countdown.remaining_s())
    sock.sendall(MAGIC + key.channel_id + nonce)
    answer = receive_exactly(sock, NONCE_BYTES + PROOF_BYTES, countdown)
    peer_nonce, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(key, b"receiver", nonce, peer_nonce)):
        raise ChannelBroken("the receiver did not prove that it holds the channel's token")
    sock.sendall(_proof(key, b"sender", nonce, peer_nonce))
    if key.padding_bytes:
        _pad(sock, key.padding_bytes, countdown)


def _pad(sock: socket.socket, num_bytes: int, countdown: Countdown) -> None:
    """Sends padding and waits for its acknowledgement. Raises LargePacketsLost if full-size packets do not arrive."""
    limit_s = min(PADDING_TIMEOUT_S, countdown.remaining_s())
    sock.settimeout(limit_s)
    try:
        sock.sendall(bytes(num_bytes))
        answer = receive_exactly(sock, len(PADDED), Countdown(limit_s))
    except (TimeoutError, ChannelTimeout):
        num_lost = unacknowledged_bytes(sock)
        if num_lost:
            raise LargePacketsLost(
                f"{num_lost} of {num_bytes} bytes of padding were not acknowledged within {limit_s:.3g} s, "
                "although small packets arrive: full-size packets are lost on the way"
            ) from None
        # The path works, but the receiver's process is busy.
        answer = receive_exactly(sock, len(PADDED), countdown)
    if answer != PADDED:
        raise ChannelBroken("the receiver did not acknowledge the padding")


def unacknowledged_bytes(sock: socket.socket) -> int:
    """Returns the number of sent bytes that the peer's kernel has not acknowledged."""
    (num_bytes,) = struct.unpack("@i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))
    return int(num_bytes)


def receive_exactly(sock: socket.socket, num_bytes: int, countdown: Countdown) -> bytes:
    """Receives exactly `num_bytes`. Raises ChannelBroken if the stream ends or the time runs out."""
    data = b""
    while len(data) < num_bytes:
        sock.settimeout(countdown.remaining_s())
        piece = sock.recv(num_bytes - len(data))
        if not piece:
            raise ChannelBroken("the peer closed the channel during the handshake")
        data += piece
    return data


@dataclass(slots=True)
class _Expected:
    key: ChannelKey
    ring: RingSpec
    channel: Future[AnyReceiveChannel]


@dataclass(slots=True)
class _Stranger:
    sock: socket.socket
    deadline: float
    received: bytes = b""
    expected: _Expected | None = None
    nonce: bytes = b""
    own_nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))
    is_proven: bool = False
    num_padding_bytes: int = 0
    """Bytes of padding that have not arrived yet."""


class Acceptor:
    """Accepts connections on a listening socket.

    Passes each proven connection to `finish`, which turns it into a channel.

    `finish(sock, ring, key)` also sends READY. It may raise OSError, ChannelBroken, or torch's RuntimeError. It owns
    the socket from then on.
    """

    def __init__(
        self,
        listener: socket.socket,
        finish: Finish,
        *,
        name: str,
    ) -> None:
        self._listener = listener
        self._finish = finish
        self._lock = threading.Lock()
        self._expected: dict[bytes, _Expected] = {}
        self._strangers: dict[int, _Stranger] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._is_closed = False
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=f"tandem-accept-{name}", daemon=True)
        self._thread.start()

    def expect(self, key: ChannelKey, ring: RingSpec) -> Future[AnyReceiveChannel]:
        """Allows this key to be used once."""
        channel: Future[AnyReceiveChannel] = Future()
        with self._lock:
            if self._is_closed:
                raise ChannelBroken("the listener is closed")
            self._expected[key.channel_id] = _Expected(key, ring, channel)
        channel.add_done_callback(lambda _: self._forget(key.channel_id))
        return channel

    def close(self) -> None:
        """Stops accepting, ends the thread, drops unauthenticated peers, and withdraws all keys."""
        with self._lock:
            if self._is_closed:
                return
            self._wake_writer.send(b"\0")  # before the flag: the thread closes this socket once it sees the flag
            self._is_closed = True
            withdrawn = list(self._expected.values())
        for expected in withdrawn:
            expected.channel.cancel()
        self._thread.join()

    def _forget(self, channel_id: bytes) -> None:
        with self._lock:
            self._expected.pop(channel_id, None)

    def _run(self) -> None:
        try:
            while not self._is_closed:
                for event, _ in self._selector.select(self._next_timeout_s()):
                    if event.fileobj is self._listener:
                        self._accept()
                    elif event.fileobj is not self._wake_reader:
                        self._advance(self._strangers[event.fd])
                self._drop_late()
        finally:
            for stranger in list(self._strangers.values()):
                self._drop(stranger)
            self._selector.close()
            for sock in (self._listener, self._wake_reader, self._wake_writer):
                sock.close()

    def _next_timeout_s(self) -> float | None:
        if not self._strangers:
            return None
        return max(0.0, min(stranger.deadline for stranger in self._strangers.values()) - time.monotonic())

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            # The process is out of file descriptors and the backlog stays readable. Pause so that other code can close
            # some.
            logger.warning("cannot accept a channel: %s", error)
            time.sleep(0.05)
            return
        if len(self._strangers) >= MAX_STRANGERS:
            self._drop(min(self._strangers.values(), key=lambda stranger: stranger.deadline))
        sock.setblocking(False)
        stranger = _Stranger(sock, time.monotonic() + HANDSHAKE_TIMEOUT_S)
        self._strangers[sock.fileno()] = stranger
        self._selector.register(sock, selectors.EVENT_READ)

    def _advance(self, stranger: _Stranger) -> None:
        try:
            if stranger.is_proven:
                self._take_padding(stranger)
                return
            wanted = _HELLO_BYTES if stranger.expected is None else PROOF_BYTES
            piece = stranger.sock.recv(wanted - len(stranger.received))
            stranger.received += piece
            if not piece:
                self._drop(stranger)
            elif len(stranger.received) == wanted:
                message, stranger.received = stranger.received, b""
                if stranger.expected is None:
                    self._on_hello(stranger, message)
                else:
                    self._on_proof(stranger, stranger.expected, message)
        except BlockingIOError:
            return
        except OSError:
            self._drop(stranger)

    def _on_hello(self, stranger: _Stranger, message: bytes) -> None:
        channel_id = message[len(MAGIC) : len(MAGIC) + CHANNEL_ID_BYTES]
        with self._lock:
            # Removed at the first attempt, so a key works only once, whether the proof is valid or not.
            expected = self._expected.pop(channel_id, None)
        if not message.startswith(MAGIC) or expected is None:
            self._drop(stranger)
            return
        stranger.expected = expected
        stranger.nonce = message[-NONCE_BYTES:]
        proof = _proof(expected.key, b"receiver", stranger.nonce, stranger.own_nonce)
        stranger.sock.send(stranger.own_nonce + proof)

    def _on_proof(self, stranger: _Stranger, expected: _Expected, proof: bytes) -> None:
        if not hmac.compare_digest(proof, _proof(expected.key, b"sender", stranger.nonce, stranger.own_nonce)):
            self._drop(stranger)
            return
        stranger.is_proven = True
        stranger.num_padding_bytes = expected.key.padding_bytes
        if not stranger.num_padding_bytes:
            self._finish_stranger(stranger, expected)

    def _take_padding(self, stranger: _Stranger) -> None:
        num_bytes = len(stranger.sock.recv(stranger.num_padding_bytes))
        stranger.num_padding_bytes -= num_bytes
        if not num_bytes:
            self._drop(stranger)
        elif not stranger.num_padding_bytes and stranger.expected is not None:
            stranger.sock.send(PADDED)
            self._finish_stranger(stranger, stranger.expected)

    def _finish_stranger(self, stranger: _Stranger, expected: _Expected) -> None:
        self._release_stranger(stranger)
        try:
            channel = self._finish(stranger.sock, expected.ring, expected.key)
        except (OSError, ChannelBroken, RuntimeError) as error:  # RuntimeError: a GPU error in torch
            stranger.sock.close()
            _fail(expected.channel, ChannelBroken(f"the channel could not be set up: {error}"))
            return
        try:
            expected.channel.set_result(channel)
        except InvalidStateError:
            channel.shutdown()
            channel.close()

    def _drop_late(self) -> None:
        now = time.monotonic()
        for stranger in [each for each in self._strangers.values() if each.deadline <= now]:
            self._drop(stranger)

    def _drop(self, stranger: _Stranger) -> None:
        self._release_stranger(stranger)
        stranger.sock.close()
        if stranger.expected is not None:
            missing = f"{stranger.num_padding_bytes} bytes of padding did not arrive from the sender"
            unproven = "the sender did not prove that it holds the channel's token"
            _fail(stranger.expected.channel, ChannelBroken(missing if stranger.is_proven else unproven))

    def _release_stranger(self, stranger: _Stranger) -> None:
        self._selector.unregister(stranger.sock)
        del self._strangers[stranger.sock.fileno()]


def _proof(key: ChannelKey, role: bytes, sender_nonce: bytes, receiver_nonce: bytes) -> bytes:
    text = b"|".join((b"tandem channel", role, key.channel_id, sender_nonce, receiver_nonce, key.binding))
    return hmac.digest(key.token, text, "sha256")


def _fail(channel: Future[AnyReceiveChannel], error: ChannelBroken) -> None:
    with contextlib.suppress(InvalidStateError):
        channel.set_exception(error)
