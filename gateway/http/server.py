"""uvicorn as this gateway needs it: bound by us, with a bound on connections, without signals. Knows no route."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn

from gateway.http.connections import MAX_CONNECTIONS, Connections
from gateway.http.protocol import HttpProtocol
from services.runtime.addresses import join_host_port
from services.runtime.errors import ConfigError
from services.runtime.tls import Identity

BACKLOG = 2048
KEEP_ALIVE_S = 75
STARTUP_TIMEOUT_S = 10.0
UNREAD_LIMIT_MS = 60_000


class HttpServer:
    """Serves one ASGI application on one address; with an identity over TLS and nothing else.

    It has at most `max_connections`: beyond them the oldest idle one ends for each new one.
    """

    def __init__(self, app: Any, *, identity: Identity | None = None, max_connections: int = MAX_CONNECTIONS) -> None:
        self.connections = Connections(max_connections)
        protocol = partial(HttpProtocol, connections=self.connections)
        config = uvicorn.Config(
            app,
            loop="none",
            http=cast(type[asyncio.Protocol], protocol),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            date_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            ssl_context_factory=None if identity is None else lambda *_: identity.http_context(),
        )
        self._config = config
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None
        self._unix_path: Path | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens and says on which port; 0 picks a free one. Raises ConfigError where the address cannot be had."""
        listener = _bind(host, port)
        await self._listen(listener)
        return int(listener.getsockname()[1])

    async def start_on_socket(self, path: Path) -> None:
        """Listens on a Unix socket that only processes of this user can open. Raises ConfigError."""
        listener = _bind_unix(path)
        self._unix_path = path
        await self._listen(listener)

    async def _listen(self, listener: socket.socket) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name="http-server")
        async with asyncio.timeout(STARTUP_TIMEOUT_S):
            await self._server.listening.wait()

    def begin_to_leave(self) -> None:
        """Still takes connections and requests; each answer now says that its connection ends with it."""
        self.connections.is_leaving = True

    def close_listener(self) -> None:
        """Closes the port: the kernel refuses new connections, and open ones stay."""
        for server in self._server.servers:
            server.close()

    async def stop(self, grace_s: float) -> None:
        """Takes no new connection, waits up to `grace_s` for running requests, then cancels them."""
        if self._task is None:
            return
        self._config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._server.leaving.set()
        await self._task
        if self._unix_path is not None:
            self._unix_path.unlink(missing_ok=True)


class _Server(uvicorn.Server):
    """Says when it listens; the process' signals are handled in `__main__`."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self.leaving = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    async def main_loop(self) -> None:
        """Waits until it is to end. uvicorn's own looks ten times a second, and sets headers that this has not."""
        await self.leaving.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends at once where nobody is connected: uvicorn's own sleeps a tenth of a second before it looks."""
        for listener in (*self.servers, *(sockets or ())):
            listener.close()
        await asyncio.sleep(0)  # a connection that has just been accepted is noted by then
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {join_host_port(host, port)}: {error.strerror}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Accepted sockets inherit it: what a dropped client never takes does not stay in memory.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_LIMIT_MS)
        listener.bind(address)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {join_host_port(host, port)}: {error.strerror}") from error
    return listener


def _bind_unix(path: Path) -> socket.socket:
    """Binds a socket that only this user can connect to once it listens. Removes what a dead process has left."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and not _is_answered(path):
            path.unlink()
        listener.bind(str(path))
        path.chmod(0o600)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {path}: {error.strerror or error}") from error
    return listener


def _is_answered(path: Path) -> bool:
    """Returns whether a process listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        try:
            caller.connect(str(path))
        except ConnectionRefusedError:
            return False
    return True
