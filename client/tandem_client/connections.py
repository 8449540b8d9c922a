"""Where the gateways are and how to connect to them: addresses, TLS, channel options, metadata. Opens nothing."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from tandem_client.errors import InvalidRequest

MAX_MESSAGE_BYTES = 16 * 2**20
"""As the gateway's."""

Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM for a connection over TLS; with `cert` and `key` the client proves its identity, too."""

    ca: str | Path | None = None
    """Certificates that sign the gateway's; those that gRPC comes with if None."""
    cert: str | Path | None = None
    """The client's own certificate, with the chain above it."""
    key: str | Path | None = None
    """Its private key."""
    server_name: str | None = None
    """Name in the gateway's certificate where it is not the host in its address."""

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key must be given together")

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files. Raises OSError."""
        return grpc.ssl_channel_credentials(_bytes_of(self.ca), _bytes_of(self.key), _bytes_of(self.cert))


def _bytes_of(path: str | Path | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()


def addresses_of(addresses: str | Sequence[str]) -> tuple[str, ...]:
    """Gateways as `host:port`, from one of them, several separated by commas, or a sequence."""
    given = addresses.split(",") if isinstance(addresses, str) else addresses
    found = tuple(address.strip() for address in given)
    if not found or not all(found):
        raise ValueError(f"addresses are {addresses!r} but must name at least one host:port, and none may be empty")
    return found


def channel_options(tls: Tls | None) -> list[tuple[str, str | int]]:
    """A connection that notices a dead gateway within half a minute, comes back fast, and leaves retries to us."""
    options: list[tuple[str, str | int]] = [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        # Without this one a gateway whose kernel still answers is noticed after 60 s.
        ("grpc.http2.ping_timeout_ms", 10_000),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # The time that connecting may take too: an address that swallows packets must not eat a call's whole deadline.
        ("grpc.min_reconnect_backoff_ms", 3000),
        ("grpc.max_reconnect_backoff_ms", 3000),
        ("grpc.enable_retries", 0),
        # Clients in one process must not share connections: closing one would not close its.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if tls is not None and tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return options


_KEY = re.compile(r"[0-9a-z_.-]+")
_VALUE = re.compile(r"[\x20-\x7e]*")
_OWN = frozenset({"authorization", "idempotency-key", "x-allow-fallback"})


def metadata_of(given: Mapping[str, str | bytes] | None, *, api_key: str | None = None) -> Metadata:
    """Metadata as gRPC takes it. Raises InvalidRequest for what it could not send, without showing any value."""
    pairs: list[tuple[str, str | bytes]] = []
    for key, value in (given or {}).items():
        if _KEY.fullmatch(key) is None or key.startswith("grpc-"):
            raise InvalidRequest(
                f"{key!r} is no name of metadata: lower-case letters, digits, _ . -, not grpc-…", field=key
            )
        if key in _OWN:
            raise InvalidRequest(f"{key!r} is not given as metadata: there is a field or an argument for it", field=key)
        if key.endswith("-bin") != isinstance(value, bytes):
            raise InvalidRequest(
                f"the metadata {key!r} must be bytes if its name ends with -bin, and else text", field=key
            )
        if isinstance(value, str):
            checked_text(value, field=key)
        pairs.append((key, value))
    if api_key is not None:
        if not api_key or " " in api_key:
            raise InvalidRequest("the API key must not be empty or hold spaces", field="api_key")
        pairs.append(("authorization", f"Bearer {checked_text(api_key, field='api_key')}"))
    return tuple(pairs)


def checked_text(value: str, *, field: str) -> str:
    """The text, if it can be sent as metadata. Raises InvalidRequest, which does not show it."""
    if _VALUE.fullmatch(value) is None:
        raise InvalidRequest(f"{field} must be printable ASCII", field=field)
    return value


def pairs_of(metadata: Any) -> Sequence[tuple[str, str | bytes]]:
    """Received metadata as plain pairs; gRPC's own class has no useful type."""
    return tuple(metadata or ())
