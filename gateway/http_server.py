"""uvicorn as this gateway needs it: bound by us, bounded request heads, no signals, OpenAI's words for broken HTTP.

Knows no route.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator, MutableMapping
from http import HTTPStatus
from typing import Any

import httptools
import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.runtime.config import join_host_port
from services.runtime.errors import ConfigError
from services.runtime.tls import Identity

MAX_HEAD_BYTES = 16 * 1024
"""Request line and headers together."""
BACKLOG = 2048
KEEP_ALIVE_S = 75
HEAD_TIMEOUT_S = 30.0
"""From the beginning of a connection, or of a later request, to the end of the request's head."""
MAX_CONNECTIONS = 10_000
RETRY_AFTER_S = 1
STARTUP_TIMEOUT_S = 10.0
UNREAD_LIMIT_MS = 60_000

_EXTENSION = "tandem"


class Connection:
    """What a request may know of its connection: `on_lost` is called when the client goes away, `is_lost` says it did.

    ASGI's own way is a task that waits for `http.disconnect`, which costs as much as parsing the request. And as ASGI
    has messages for everything, a piece of an answer under way may be written here instead.
    """

    def __init__(self, protocol: HttpToolsProtocol | None = None) -> None:
        self.on_lost: Callable[[], None] | None = None
        self.is_lost = False
        self._protocol = protocol

    def can_write(self) -> bool:
        """Whether `write_chunk` may be called, by the answer that is being sent: the client takes what it gets."""
        protocol = self._protocol
        return protocol is not None and not protocol.flow.write_paused and not protocol.transport.is_closing()

    def write_chunk(self, data: bytes) -> None:
        """Writes a piece of an answer whose head was sent and whose length was not told."""
        assert self._protocol is not None
        self._protocol.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def connection_of(scope: MutableMapping[str, Any]) -> Connection:
    """The connection that a request came on."""
    connection: Connection = scope["extensions"][_EXTENSION]["connection"]
    return connection


def in_process_scope(method: str, path: str, headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    """The scope of a request that came on no connection: its client never leaves, but its task may be cancelled."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
        "state": {},
        "extensions": {_EXTENSION: {"connection": Connection()}},
    }


class HttpServer:
    """Serves one ASGI application on one address; with an identity over TLS and nothing else."""

    def __init__(self, app: Any, *, identity: Identity | None = None) -> None:
        config = uvicorn.Config(
            app,
            loop="none",
            http=_BoundedProtocol,
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

    async def start(self, host: str, port: int) -> int:
        """Listens and says on which port; 0 picks a free one. Raises ConfigError where the address cannot be had."""
        listener = _bind(host, port)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name="http-server")
        async with asyncio.timeout(STARTUP_TIMEOUT_S):
            await self._server.listening.wait()
        return int(listener.getsockname()[1])

    async def stop(self, grace_s: float) -> None:
        """Takes no new connection, waits up to `grace_s` for running requests, then cancels them."""
        if self._task is None:
            return
        self._config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._server.leaving.set()
        await self._task


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

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _BoundedProtocol(HttpToolsProtocol):
    """httptools itself reads a head of any length into memory, and uvicorn waits for one for ever."""

    _num_head_bytes = 0
    _is_in_head = False
    _connection: Connection
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        self._connection = Connection(self)
        super().connection_made(transport)
        if len(self.server_state.connections) > MAX_CONNECTIONS:
            self._refuse(503, "too many connections", "server_overloaded", kind="overloaded_error")
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end_head()
        self._connection.is_lost = True
        if self._connection.on_lost is not None:
            self._connection.on_lost()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        rest: memoryview | None = memoryview(data)
        try:
            while rest is not None:
                rest = self._feed(rest)
        except httptools.HttpParserError:
            self.send_400_response("")
            return
        if not self._is_in_head:
            return
        self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, "the head of the request is too large", "request_head_too_large")

    def _feed(self, data: memoryview) -> memoryview | None:
        """Parses; what is left of it after a head that wishes for another protocol, which is read without the wish."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if not self._should_upgrade():
                return None
            headers = [b"%b: %b\r\n" % pair for pair in self.headers if pair[0] != b"upgrade"]
            line = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.scope["http_version"].encode())
            # A parser that has seen `Connection: close` takes no second head.
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.parser.feed_data(line + b"".join(headers) + b"\r\n")
            return data[upgrade.args[0] :]
        return None

    def _should_upgrade(self) -> bool:
        """Whether a head for which httptools, which then skips the body, sees an upgrade is to be read again.

        uvicorn begins no request for it then. CONNECT is such a head too, and refused as it is.
        """
        return bool(self.parser.get_method() != b"CONNECT")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {_EXTENSION: {"connection": self._connection}}
        self._is_in_head = True
        self._num_head_bytes = 0
        self._expect_head()

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up)

    def _end_head(self) -> None:
        self._is_in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            # An earlier request of the connection is still being answered, and must not be written into.
            self._expect_head()
        elif self._is_in_head:
            self._refuse(408, f"the head did not arrive within {HEAD_TIMEOUT_S:g} s", "request_timeout")
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "the request is not valid HTTP", "invalid_http")

    def _refuse(self, status: int, message: str, code: str, *, kind: str = "invalid_request_error") -> None:
        body = msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": code}})
        retry = f"retry-after: {RETRY_AFTER_S}\r\n" if status == 503 else ""
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n{retry}connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


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
