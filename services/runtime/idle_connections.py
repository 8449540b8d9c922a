"""Ends the idlest connections of a port before there are too many, for a library that can only refuse new ones.

The library owns its sockets and shows none. What the process has open is in /proc/self/fd, and what is shut down there
the library sees as left by its peer. Knows no gRPC beyond the way in which it writes addresses.
"""

import asyncio
import contextlib
import logging
import os
import socket
import stat
import struct
from collections import Counter
from collections.abc import Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import unquote

from services.runtime.background_tasks import supervise

LOOK_INTERVAL_S = 0.25
FULL_PART, ROOM_PART = 8, 4
"""When fewer than one part in FULL_PART of all connections is free, enough are ended to free one in ROOM_PART."""
_LAST_DATA_RECEIVED = struct.Struct("@52xI")
"""`tcpi_last_data_recv` of `struct tcp_info`: milliseconds."""

logger = logging.getLogger(__name__)

Peer = tuple[str, int]


class IdleConnections:
    """The idle connections of a server that takes at most `max_connections`. To be used on one event loop."""

    def __init__(self, max_connections: int) -> None:
        self.num_ended = 0
        self._max_connections = max_connections
        self._ports: set[int] = set()
        self._num_calls: Counter[str] = Counter()
        """The number of running calls, by the address from which they come."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="idle-connections")
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def call(self, peer: str) -> Iterator[None]:
        """The time of a call, in which its connection is not idle. `peer` is such as ipv4:127.0.0.1:5000."""
        self._num_calls[peer] += 1
        try:
            yield
        finally:
            self._num_calls[peer] -= 1
            if not self._num_calls[peer]:
                del self._num_calls[peer]

    def add_port(self, port: int) -> None:
        """Adds a port whose connections count."""
        self._ports.add(port)

    def start(self) -> None:
        """Begins to look, on the running loop."""
        if self._task is None:
            self._task = supervise(self._watch, name="idle-connections")

    async def close(self) -> None:
        """Stops looking."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        full = self._max_connections - self._max_connections // FULL_PART
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            if await loop.run_in_executor(self._thread, _num_files) < full:
                continue
            busy = {address for peer in self._num_calls if (address := _address_of(peer)) is not None}
            keep = self._max_connections - self._max_connections // ROOM_PART
            num_ended = await loop.run_in_executor(self._thread, _end_idlest, frozenset(self._ports), busy, full, keep)
            self.num_ended += num_ended
            if num_ended:
                logger.warning("idle gRPC connections were closed to make room", extra={"connections": num_ended})


def _num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _end_idlest(ports: Set[int], busy: Set[Peer], full: int, keep: int) -> int:
    """Ends idle connections until `keep` are left if `full` or more exist. Returns how many it has ended."""
    with contextlib.ExitStack() as stack:
        found: list[tuple[int, socket.socket]] = []
        num_connections = 0
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                connection = stack.enter_context(_socket_of(int(name)))
                peer = connection.getpeername()  # fails for one that only listens
                if connection.getsockname()[1] not in ports:
                    continue
                num_connections += 1
                if (_plain(peer[0]), peer[1]) not in busy:
                    found.append((_silence_ms(connection), connection))
        if num_connections < full:
            return 0
        found.sort(key=lambda one: one[0], reverse=True)
        chosen = found[: num_connections - keep]
        for _, connection in chosen:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        return len(chosen)


def _socket_of(fd: int) -> socket.socket:
    """Returns a duplicate of a TCP socket that another part of the process has open. Raises OSError otherwise."""
    if not stat.S_ISSOCK(os.stat(fd).st_mode):
        raise OSError("not a socket")
    # Looked at only now that it cannot become another one.
    own = socket.socket(fileno=os.dup(fd))
    if own.family not in (socket.AF_INET, socket.AF_INET6) or own.type != socket.SOCK_STREAM:
        own.close()
        raise OSError("not a TCP socket")
    return own


def _silence_ms(connection: socket.socket) -> int:
    """Returns the time since something last came."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA_RECEIVED.size)
    silence_ms: int = _LAST_DATA_RECEIVED.unpack(info)[0] if len(info) == _LAST_DATA_RECEIVED.size else 0
    return silence_ms


def _address_of(peer: str) -> Peer | None:
    """Returns the address that gRPC writes so: ipv4:127.0.0.1:5000, ipv6:%5B::1%5D:5000."""
    kind, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        return None
    return _plain(host.strip("[]")), int(port)


def _plain(host: str) -> str:
    """Returns an IPv4 address as such, also where the socket takes both kinds."""
    return host.removeprefix("::ffff:").partition("%")[0]
