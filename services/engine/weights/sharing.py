"""Shares memory between the processes of a host: one process allocates it, and the others receive its descriptors.

The first process to bind a name allocates the memory and sends it to each process that connects. The name is an
abstract Unix socket, which the kernel frees when its process ends. The memory lives as long as any process maps it. If
the process that owns the name ends, one of the processes that map the memory binds the name, so later processes still
find it.

A waiting process receives a message every second while the memory is being prepared. If it receives nothing for
`SILENCE_S` because the other process is suspended or stuck, it gives up and continues without sharing. Both sides check
the user of their peer: a process of another user receives no memory, and its messages are ignored.

Does not interpret the content of the memory. Requires Linux. On other systems, `join` fails.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from services.runtime.descriptors import receive_fds

SILENCE_S = 3.0
WAIT_EVERY_S = 1.0
_SEND_TIMEOUT_S = 1.0  # limit for a peer that does not read, while other peers wait
_RETRY_S = 0.05
_MAX_RETRIES = 100
_MAX_DESCRIPTION_BYTES = 1 << 16
_BACKLOG = 64

_WANT = b"want"
_WATCH = b"watch"
_WAIT = b"wait"
_PIECES = struct.Struct("<6sI")
_MARK = b"pieces"

logger = logging.getLogger(__name__)


class SharingFailed(OSError):
    """The memory cannot be received from another process, and other processes must not wait for this one."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of memory, and a description of its content (at most 64 KiB) in a format chosen by the caller."""

    description: bytes
    fd: int


class Sharing:
    """This process's part in sharing the memory of one name. Call `join`, then `offer` if this process is the first."""

    def __init__(self, name: str) -> None:
        """Expects `name` to be at most 100 ASCII characters. Processes with different names share nothing."""
        self._address = b"\0" + name.encode("ascii")
        self._pieces: tuple[Piece, ...] | None = None
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def join(self) -> tuple[Piece, ...] | None:
        """Returns the pieces of another process. Waits while that process prepares them.

        Returns None if this process is the first. It must then allocate the pieces and call `offer`. This object owns
        the descriptors. Raises SharingFailed.
        """
        for _ in range(_MAX_RETRIES):
            listener = self._bind()
            if listener is not None:
                self._start(listener, None)
                return None
            sock = self._connect()
            if sock is None:
                time.sleep(_RETRY_S)  # the owner is not listening yet, or just ended: no event reports either
                continue
            pieces = self._ask(sock)
            if pieces is not None:
                self._pieces = pieces
                self._start(None, sock)
                return pieces
        raise SharingFailed("the processes with the memory come and go")

    def offer(self, pieces: Sequence[Piece]) -> None:
        """Sends these pieces to all present and future peers that request them. This object owns the descriptors."""
        self._pieces = tuple(pieces)
        self._wake()

    def close(self) -> None:
        """Stops sharing. Mapped memory stays mapped. Processes that wait for this one stop waiting."""
        if self._is_closed:
            return
        self._is_closed = True
        self._wake()
        if self._thread is not None:
            self._thread.join()
        for sock in (self._wake_reader, self._wake_writer):
            sock.close()
        for piece in self._pieces or ():
            os.close(piece.fd)

    def _start(self, listener: socket.socket | None, sock: socket.socket | None) -> None:
        self._thread = threading.Thread(target=self._run, args=(listener, sock), name="tandem-sharing", daemon=True)
        self._thread.start()

    def _wake(self) -> None:
        self._wake_writer.send(b"\0")

    def _bind(self) -> socket.socket | None:
        """Binds the name. Returns None if another process has bound it."""
        sock = _new_socket()
        try:
            sock.bind(self._address)
            sock.listen(_BACKLOG)
        except OSError as error:
            sock.close()
            if error.errno == errno.EADDRINUSE:
                return None
            raise SharingFailed(f"no name can be taken: {error}") from error
        return sock

    def _connect(self) -> socket.socket | None:
        """Connects to the owner of the name.

        Returns None if it does not accept. Raises SharingFailed for another user.
        """
        sock = _new_socket()
        try:
            sock.settimeout(SILENCE_S)
            sock.connect(self._address)
        except OSError:
            sock.close()
            return None
        if _peer_uid(sock) != os.getuid():
            sock.close()
            raise SharingFailed("a process of another user has the name")
        return sock

    def _ask(self, sock: socket.socket) -> tuple[Piece, ...] | None:
        """Requests the pieces and waits for them. Returns None if the other process ends first."""
        pieces: list[Piece] = []
        try:
            sock.send(_WANT)
            message = sock.recv(_PIECES.size)
            while message == _WAIT:
                message = sock.recv(_PIECES.size)
            if message:
                mark, count = _PIECES.unpack(message)
                if mark != _MARK:
                    raise struct.error
                while len(pieces) < count and (piece := _receive_piece(sock)) is not None:
                    pieces.append(piece)
                if len(pieces) == count:
                    return tuple(pieces)
        except TimeoutError:
            _drop(sock, pieces)
            raise SharingFailed(f"the process with the memory said nothing for {SILENCE_S:g} s") from None
        except ConnectionError:
            pass
        except (OSError, struct.error):
            _drop(sock, pieces)
            raise SharingFailed("what the process with the name says is not understood") from None
        _drop(sock, pieces)
        return None

    def _run(self, listener: socket.socket | None, sock: socket.socket | None) -> None:
        is_said = False
        while listener is None and not self._is_closed:
            if sock is not None and self._has_ended(sock):
                sock.close()
                sock = None
            if sock is None and not self._is_closed:
                try:
                    listener = self._bind()
                    sock = self._watch() if listener is None else None
                except OSError as error:
                    if not is_said:
                        logger.warning("shared memory cannot be handed on now: %s", error)
                    is_said = True
                    self._sleep(WAIT_EVERY_S)
        if sock is not None:
            sock.close()
        if listener is not None:
            with listener:
                self._serve(listener)

    def _watch(self) -> socket.socket | None:
        """Connects to the current owner of the name, to detect its end. Returns None if the connection fails."""
        sock = self._connect()
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.send(_WATCH)
                return sock
            sock.close()
        self._sleep(_RETRY_S)
        return None

    def _has_ended(self, sock: socket.socket) -> bool:
        """Waits until the other process ends or this object is closed. Returns whether the other process ended."""
        with selectors.DefaultSelector() as selector:
            selector.register(sock, selectors.EVENT_READ)
            selector.register(self._wake_reader, selectors.EVENT_READ)
            selector.select()
        return not self._is_closed

    def _sleep(self, seconds: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_reader, selectors.EVENT_READ)
            selector.select(seconds)

    def _serve(self, listener: socket.socket) -> None:
        peers: set[socket.socket] = set()
        waiting: set[socket.socket] = set()
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            selector.register(self._wake_reader, selectors.EVENT_READ)

            def drop(peer: socket.socket) -> None:
                selector.unregister(peer)
                peers.discard(peer)
                waiting.discard(peer)
                peer.close()

            while not self._is_closed:
                for key, _ in selector.select(WAIT_EVERY_S if waiting else None):
                    if key.fileobj is listener:
                        peer = _accept(listener)
                        if peer is not None:
                            peers.add(peer)
                            selector.register(peer, selectors.EVENT_READ)
                    elif key.fileobj is self._wake_reader:
                        self._wake_reader.recv(64)
                    else:
                        peer = next(one for one in peers if one is key.fileobj)
                        message = _receive(peer)
                        if message == _WANT:
                            waiting.add(peer)
                        elif not message:
                            drop(peer)
                pieces = self._pieces  # read once, because another thread may call `offer` at any time
                for peer in list(waiting):
                    if not _give(peer, pieces):
                        drop(peer)
                    elif pieces is not None:
                        waiting.discard(peer)
            for peer in peers:
                peer.close()


def _give(peer: socket.socket, pieces: tuple[Piece, ...] | None) -> bool:
    """Sends the pieces, or a message to wait for them. Returns False if the peer has ended or does not read."""
    try:
        if pieces is None:
            with contextlib.suppress(BlockingIOError):  # the peer has unread messages
                peer.send(_WAIT, socket.MSG_DONTWAIT)
            return True
        peer.send(_PIECES.pack(_MARK, len(pieces)))
        for piece in pieces:
            socket.send_fds(peer, [piece.description], [piece.fd])
    except OSError:
        return False
    return True


def _new_socket() -> socket.socket:
    try:
        return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        raise SharingFailed(f"no such sockets here: {error}") from error


def _accept(listener: socket.socket) -> socket.socket | None:
    try:
        peer, _ = listener.accept()
    except OSError:
        time.sleep(_RETRY_S)  # out of descriptors: the connection stays pending
        return None
    if _peer_uid(peer) != os.getuid():
        peer.close()
        return None
    peer.settimeout(_SEND_TIMEOUT_S)
    return peer


def _receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(len(_WATCH))
    except OSError:
        return b""


def _receive_piece(sock: socket.socket) -> Piece | None:
    description, fds = receive_fds(sock, _MAX_DESCRIPTION_BYTES, 1)
    if len(fds) != 1:
        return None
    return Piece(description, fds[0])


def _drop(sock: socket.socket, pieces: list[Piece]) -> None:
    sock.close()
    for piece in pieces:
        os.close(piece.fd)


def _peer_uid(sock: socket.socket) -> int:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", credentials)[1]
    return uid
