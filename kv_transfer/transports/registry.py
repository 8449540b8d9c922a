"""Which transports there are, and which of them two workers should use."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

from kv_transfer.transports.base import Transport
from kv_transfer.transports.loopback import LoopbackTransport
from kv_transfer.transports.shm import ShmTransport
from kv_transfer.transports.tcp import TcpTransport
from services.runtime.errors import ConfigError

AUTO = "auto"
_TRANSPORTS: dict[str, Transport] = {
    transport.name: transport for transport in (LoopbackTransport(), ShmTransport(), TcpTransport())
}
# Only these reach no further than one host.
_SAME_HOST = frozenset({"loopback", "shm"})


def transport_named(name: str) -> Transport:
    """Return the transport of this name. Raises KeyError."""
    return _TRANSPORTS[name]


def resolve(names: Sequence[str]) -> tuple[str, ...]:
    """Return the transports to offer, best first; `auto` stands for shm where there is any, then tcp.

    Raises ConfigError for an unknown name.
    """
    resolved: list[str] = []
    for name in names:
        if name != AUTO and name not in _TRANSPORTS:
            raise ConfigError(f"transport: {name!r} is not one of {', '.join((AUTO, *sorted(_TRANSPORTS)))}")
        best = ["shm", "tcp"] if ShmTransport.is_supported() else ["tcp"]
        resolved += best if name == AUTO else [name]
    return tuple(dict.fromkeys(resolved))


def choose(offered: Sequence[str], available: Sequence[str], *, is_same_host: bool) -> str | None:
    """Return the first offered transport that the other side has too and that reaches it, or None."""
    for name in offered:
        if name in available and (is_same_host or name not in _SAME_HOST):
            return name
    return None


def local_host_id() -> str:
    """Return a name for this host's reach of shared memory: its boot and its network namespace.

    Two containers of one machine share the boot but not the namespace that the doorbell's socket lives in.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot_id = file.read().strip()
        namespace = os.readlink("/proc/self/ns/net")
    except OSError:
        # Not Linux: no shared memory either, so a name that equals no other is right.
        return f"process-{os.getpid()}"
    return hashlib.sha256(f"{boot_id} {namespace}".encode()).hexdigest()[:32]
