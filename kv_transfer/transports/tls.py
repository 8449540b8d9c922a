"""The `tcp` channel with encryption after the handshake: TLS 1.3 over the proven connection.

Both ends present certificates of the cluster's CA. They then prove the channel's token again, over the transcript of
this TLS handshake. A man in the middle that also has a certificate takes part in two handshakes, so it cannot produce
this proof.
"""

from __future__ import annotations

import hmac
import socket
import ssl
from collections.abc import Sequence
from typing import Protocol

from kv_transfer.transports.base import (
    AnyReceiveChannel,
    ChannelBroken,
    ChannelEnded,
    ChannelKey,
    Countdown,
    Listener,
    RingSpec,
    SendChannel,
    Transport,
)
from kv_transfer.transports.handshake import (
    HANDSHAKE_TIMEOUT_S,
    PROOF_BYTES,
    keep_alive,
    prove_to_receiver,
    receive_exactly,
)
from kv_transfer.transports.tcp import POLL_S, TcpListener, TcpReceiveChannel, TcpSendChannel, connect
from services.runtime.errors import ConfigError

JOINED_BYTES = 1 << 14
"""Maximum size of a TLS record. Each call produces a record, so smaller pieces are joined."""


class ChannelTls(Protocol):
    """Provides the certificates; for example services.runtime.tls.Identity."""

    def channel_context(self, *, is_server: bool) -> ssl.SSLContext:
        """Returns the context for one channel, with the current certificate files."""
        ...


class TlsTransport(Transport):
    """TCP with TLS 1.3."""

    name = "tls"

    def __init__(self, tls: ChannelTls) -> None:
        self._tls = tls

    def listen(self, host: str, port: int) -> Listener:
        """Listens on exactly this address. Port 0 selects a free port."""
        return TcpListener(host, port, self._make_ready)

    def open(self, address: str, key: ChannelKey, ring: RingSpec, *, timeout_s: float) -> SendChannel:
        """Opens a channel to `host:port`."""
        countdown = Countdown(timeout_s)
        sock = connect(address, countdown)
        try:
            prove_to_receiver(sock, key, countdown)
            sock = encrypted = self._wrap(sock, is_server=False)
            encrypted.sendall(_proof(key, b"sender", encrypted))
            answer = receive_exactly(encrypted, PROOF_BYTES, countdown)
            if not hmac.compare_digest(answer, _proof(key, b"receiver", encrypted)):
                raise ChannelBroken("the receiver did not prove that the encrypted connection ends at it")
            return TlsSendChannel(encrypted, ring)
        except OSError as error:
            sock.close()
            raise ChannelBroken(f"the channel to {address} broke during the handshake: {error}") from error
        except ChannelBroken:
            sock.close()
            raise

    def _make_ready(self, sock: socket.socket, ring: RingSpec, key: ChannelKey) -> AnyReceiveChannel:
        countdown = Countdown(HANDSHAKE_TIMEOUT_S)
        sock.settimeout(countdown.remaining_s())
        encrypted = self._wrap(sock, is_server=True)
        try:
            if not hmac.compare_digest(
                receive_exactly(encrypted, PROOF_BYTES, countdown), _proof(key, b"sender", encrypted)
            ):
                raise ChannelBroken("the sender did not prove that the encrypted connection ends at it")
            encrypted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(encrypted)
            channel = TlsReceiveChannel(encrypted, ring)
            encrypted.sendall(_proof(key, b"receiver", encrypted))
        except BaseException:
            encrypted.close()
            raise
        return channel

    def _wrap(self, sock: socket.socket, *, is_server: bool) -> ssl.SSLSocket:
        """Performs the TLS handshake within the socket's timeout. Raises OSError and ChannelBroken."""
        try:
            context = self._tls.channel_context(is_server=is_server)
        except ConfigError as error:
            raise ChannelBroken(error.message) from error
        return context.wrap_socket(sock, server_side=is_server)


class TlsSendChannel(TcpSendChannel):
    """Encrypts frames. Joins small pieces of a frame."""

    _socket: ssl.SSLSocket

    def shutdown(self) -> None:
        """See SendChannel."""
        _shutdown(self._socket)

    def _set_timeout(self, option: int) -> None:
        self._socket.settimeout(POLL_S)

    def _send(self, pieces: list[memoryview]) -> int:
        try:
            # If nothing was sent, the next call passes the same bytes again, as TLS requires.
            return self._socket.send(_joined(pieces))
        except (TimeoutError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return 0
        except OSError as error:
            raise ChannelBroken(f"the connection broke: {error}") from error


class TlsReceiveChannel(TcpReceiveChannel):
    """Decrypts received frames directly into a slot of its ring."""

    _socket: ssl.SSLSocket

    def _set_timeout(self, option: int) -> None:
        self._socket.settimeout(POLL_S)

    def _receive_some(self, target: memoryview) -> int:
        try:
            num_received = self._socket.recv_into(target)
        except (TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0
        except OSError as error:
            raise ChannelBroken(f"the connection broke: {error}") from error
        if num_received == 0:
            raise ChannelEnded("the sender closed the channel")
        return num_received

    def shutdown(self) -> None:
        """See ReceiveChannel."""
        with self._has_free:
            self._is_shut = True
            self._has_free.notify_all()
        _shutdown(self._socket)


def _joined(pieces: Sequence[memoryview]) -> memoryview | bytes:
    if len(pieces) == 1 or pieces[0].nbytes >= JOINED_BYTES:
        return pieces[0]
    taken, num_bytes = 0, 0
    while taken < len(pieces) and num_bytes < JOINED_BYTES:
        num_bytes += pieces[taken].nbytes
        taken += 1
    return b"".join(pieces[:taken])


def _shutdown(sock: ssl.SSLSocket) -> None:
    """Shuts down the connection below TLS. SSLSocket.shutdown would make a reader in another thread skip decryption."""
    try:
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:
        return  # already disconnected or closed


def _proof(key: ChannelKey, role: bytes, sock: ssl.SSLSocket) -> bytes:
    """Returns an HMAC over the client's Finished message, which depends on the whole transcript of this TLS handshake.

    See RFC 8446, section 4.4.4.
    """
    finished = sock.get_channel_binding("tls-unique")
    if finished is None:
        raise ChannelBroken("the TLS handshake has not ended")
    text = b"|".join((b"tandem channel over TLS", role, key.channel_id, finished, key.binding))
    return hmac.digest(key.token, text, "sha256")
