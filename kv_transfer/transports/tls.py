"""The channel `tcp` with everything after the handshake encrypted: TLS 1.3 over the connection that has been proven.

Both ends show certificates of the cluster's CA, and prove the channel's token once more over what this very TLS
handshake has computed. Somebody in between with a certificate too has two handshakes, and so no such proof.
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
"""Most bytes of a TLS record. Each call makes one, so smaller pieces are sent together."""


class ChannelTls(Protocol):
    """Where the certificates are; services.runtime.tls.Identity is one."""

    def channel_context(self, *, is_server: bool) -> ssl.SSLContext:
        """For one channel, with the files as they are now."""
        ...


class TlsTransport(Transport):
    """TCP with TLS 1.3."""

    name = "tls"

    def __init__(self, tls: ChannelTls) -> None:
        self._tls = tls

    def listen(self, host: str, port: int) -> Listener:
        """Listen on exactly this address. Port 0 takes a free one."""
        return TcpListener(host, port, self._make_ready)

    def open(self, address: str, key: ChannelKey, ring: RingSpec, *, timeout_s: float) -> SendChannel:
        """Open a channel to `host:port`."""
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
        """Shakes hands within the socket's time limit. Raises OSError, ChannelBroken."""
        try:
            context = self._tls.channel_context(is_server=is_server)
        except ConfigError as error:
            raise ChannelBroken(error.message) from error
        return context.wrap_socket(sock, server_side=is_server)


class TlsSendChannel(TcpSendChannel):
    """Encrypts what it writes; the pieces of a frame are joined where they are small."""

    _socket: ssl.SSLSocket

    def shutdown(self) -> None:
        """See SendChannel."""
        _shutdown(self._socket)

    def _set_timeout(self, option: int) -> None:
        self._socket.settimeout(POLL_S)

    def _send(self, pieces: list[memoryview]) -> int:
        try:
            # Where nothing was taken the same bytes come again, as TLS asks for it.
            return self._socket.send(_joined(pieces))
        except (TimeoutError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return 0
        except OSError as error:
            raise ChannelBroken(f"the connection broke: {error}") from error


class TlsReceiveChannel(TcpReceiveChannel):
    """Decrypts what it receives straight into a slot of its ring."""

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
    """Ends the connection below TLS: SSLSocket's own would let a reader in another thread skip decrypting."""
    try:
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:
        return  # no longer connected, or closed: that is what was wanted


def _proof(key: ChannelKey, role: bytes, sock: ssl.SSLSocket) -> bytes:
    """Over the client's Finished message, which is an HMAC of this handshake's whole transcript (RFC 8446, 4.4.4)."""
    finished = sock.get_channel_binding("tls-unique")
    if finished is None:
        raise ChannelBroken("the TLS handshake has not ended")
    text = b"|".join((b"tandem channel over TLS", role, key.channel_id, finished, key.binding))
    return hmac.digest(key.token, text, "sha256")
