"""The connections of one HTTP server: what a request may know of its own, and what all may hold and take together.

Knows no HTTP beyond that connections have requests.
"""

from collections.abc import Callable, MutableMapping
from typing import Any, Protocol

import uvicorn.protocols.http.httptools_impl as httptools_impl

from gateway.http.reading_turns import ReadingTurns

EXTENSION = "tandem"
"""The ASGI extension in which a request finds its connection."""
MAX_CONNECTIONS = 10_000
MAX_UNREAD_BYTES = 32 * 2**20
"""The most for the bodies of all requests together that came before the application asked for them."""
MAX_LATER_BYTES = 16 * 2**20
"""The most for requests of all connections together that came before the answer to an earlier one was complete."""


class Connection:
    """What a request may know of its connection: `on_lost` is called when the client goes away, `is_lost` says it did.

    ASGI's own way is a task that waits for `http.disconnect`, which costs as much as parsing the request. And as ASGI
    has messages for everything, a piece of an answer under way may be written here instead.
    """

    def __init__(self, protocol: httptools_impl.HttpToolsProtocol | None = None) -> None:
        self.on_lost: Callable[[], None] | None = None
        self.is_lost = False
        self._protocol = protocol

    def can_write(self) -> bool:
        """Returns whether the answer being sent may call `write_chunk`: the client takes what it gets."""
        protocol = self._protocol
        return protocol is not None and not protocol.flow.write_paused and not protocol.transport.is_closing()

    @property
    def has_whole_body(self) -> bool:
        """Whether the body of the present request has arrived; reading it waits for nothing."""
        protocol = self._protocol
        return protocol is not None and not protocol.cycle.more_body

    def write_chunk(self, data: bytes) -> None:
        """Writes a piece of an answer whose head was sent and whose length was not told."""
        protocol = self._protocol
        assert protocol is not None
        chunk = b"%x\r\n%b\r\n" % (len(data), data) if protocol.cycle.chunked_encoding else data
        protocol.transport.write(chunk)

    def lose(self) -> None:
        """Notes that the client has left, or gets no further answer; the request lets go of the connection."""
        self.is_lost = True
        self._protocol = None
        if self.on_lost is not None:
            self.on_lost()


def connection_of(scope: MutableMapping[str, Any]) -> Connection:
    """Returns the connection that a request came on."""
    connection: Connection = scope["extensions"][EXTENSION]["connection"]
    return connection


def in_process_scope(method: str, path: str, headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    """Returns the scope of a request without a connection: no client leaves it, but its task may be cancelled."""
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
        "extensions": {EXTENSION: {"connection": Connection()}},
    }


class Abortable(Protocol):
    """A connection that may be ended at once."""

    def abort(self) -> None:
        """Ends it."""


class Budget:
    """Bytes that all connections hold for one purpose: at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes

    def take(self, num_bytes: int) -> bool:
        """Takes some. Returns False if they have no room."""
        if self.num_bytes + num_bytes > self._max_bytes:
            return False
        self.num_bytes += num_bytes
        return True

    def give(self, num_bytes: int) -> None:
        """Gives some back."""
        self.num_bytes -= num_bytes


class Connections:
    """All connections of one server. Where there are `max_connections`, the oldest idle one ends for a new one.

    Those that have never sent a whole head of a request end before those between two requests.
    """

    def __init__(self, max_connections: int = MAX_CONNECTIONS) -> None:
        self.max_connections = max_connections
        self.num_open = 0
        self.num_ended = 0
        """The number of idle connections that were ended for new ones."""
        self.num_refused = 0
        """The number of new connections that were refused because no other was idle."""
        self.is_leaving = False
        """Whether each connection ends with its next answer, which says so, and its client connects elsewhere."""
        self.unread = Budget(MAX_UNREAD_BYTES)
        self.later = Budget(MAX_LATER_BYTES)
        self.turns = ReadingTurns()
        self._silent: dict[Abortable, None] = {}
        self._idle: dict[Abortable, None] = {}

    def enter(self, one: Abortable) -> bool:
        """Adds a new, idle connection. Returns False if it has no room; `leave` has to be called all the same."""
        has_room = self.num_open < self.max_connections or self._end_oldest()
        self.num_open += 1
        if has_room:
            self._silent[one] = None
        else:
            self.num_refused += 1
        return has_room

    def leave(self, one: Abortable) -> None:
        """Removes a connection that has ended."""
        self.num_open -= 1
        self.mark_busy(one)

    def mark_busy(self, one: Abortable) -> None:
        """Notes that the head of a request has arrived."""
        if self._idle.pop(one, self) is self:
            self._silent.pop(one, None)

    def mark_idle(self, one: Abortable) -> None:
        """Notes that a request and its answer are complete."""
        self._idle[one] = None

    def _end_oldest(self) -> bool:
        for group in (self._silent, self._idle):
            if group:
                oldest = next(iter(group))
                del group[oldest]
                self.num_ended += 1
                oldest.abort()
                return True
        return False
