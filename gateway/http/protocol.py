"""One connection of the HTTP server: uvicorn's protocol with bounds on everything that a client can make it hold.

A message is parsed up to its end and no further: what a client sends after it waits, as bytes, until the answer is
complete, so answers and refusals keep the order of requests. Knows no route, and nothing of what requests mean.
"""

import asyncio
import urllib.parse
from http import HTTPStatus
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.http.connections import EXTENSION, Connection, Connections
from gateway.http.cycle import Cycle
from gateway.http.reading_turns import Flow, Read
from gateway.http.refusals import (
    LARGE_HEAD,
    MANY_CONNECTIONS,
    MANY_HEADERS,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MUCH_FRAMING,
    NO_ROOM,
    NOT_HTTP,
    OTHER_VERSION,
    Refusal,
)
from gateway.requests.seeds import refused_id

MAX_FRAMING_BYTES = 16 * 1024
"""The most for sizes and extensions of chunks, and trailers, of one body, beyond what its chunks may need."""
FRAMING_BYTES_PER_BODY_BYTE = 8
"""The overhead that chunks may need: one of one byte has five bytes around it."""
MAX_FED_BYTES = 16 * 1024
"""The most of a body in chunks that httptools has at a time: it calls us for each chunk."""
MAX_PARTS = 2000
"""The most parts of a body that are parsed in one turn, such as chunks of a byte each: about a millisecond."""
MAX_LATER_BYTES = 256 * 1024
"""The most for requests that a client sends before the answer to an earlier one is complete: about one read."""
HEAD_TIMEOUT_S = 30.0
"""The time from the beginning of a connection, or of a later request, to the end of the request's head."""
LINGER_S = 2.0
"""Time in which the rest of a refused request is read and dropped: closing at once would reset the connection before
the client has read why."""
RETRY_AFTER_S = 1

_HEAD_END = b"\r\n\r\n"
_CHUNKS_END = b"\r\n0\r\n\r\n"
_WITHOUT_BODY = frozenset({"GET", "HEAD", "DELETE", "OPTIONS"})
"""Methods of which no route reads a body: what comes is dropped."""


class _RefusedError(Exception):
    """Ends the parsing of a message; httptools makes an error of its own of it."""


class HttpProtocol(HttpToolsProtocol):
    """httptools itself reads a head, trailers and whatever is between chunks without any bound."""

    cycle: Cycle
    flow: Flow

    def __init__(self, *args: Any, connections: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._all = connections
        self._connection = Connection(self)
        self._is_in_head = False
        """Whether a head has begun and is not complete."""
        self._is_in_message = False
        """Whether a head is complete and its body is not."""
        self._num_head_bytes = 0
        self._tail = b""
        """The last parsed bytes of the part whose end is searched for."""
        self._body_left_bytes = -1
        """What is left of a body whose length was told; -1: it comes in chunks."""
        self._num_body_bytes = 0
        self._num_parts = 0
        """Parts of the body that this turn has parsed."""
        self._framing_room_bytes = 0
        self._later = b""
        self._is_deaf = False
        """Whether all further input is dropped, because the connection ends with the present answer."""
        self._refusal = NOT_HTTP
        self._head_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Takes a new connection, from which the head of its first request is expected."""
        super().connection_made(transport)
        self.flow = Flow(transport, on_turn=self._go_on)
        if self._all.enter(self):
            self._expect_head()
        else:
            self._refuse(MANY_CONNECTIONS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Frees everything that a client which has left made us hold, at once or when its request has ended."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._end_head_timer()
        self._end_linger_timer()
        self._drop_later()
        self._all.leave(self)
        self._all.turns.leave(self.flow)
        self.flow.on_turn = None
        self._connection.lose()
        if self.cycle is not None:
            self._drop_body(self.cycle)
        # A request that still runs holds its scope, and the scope this: without the cycle all is free at its end.
        self.cycle = self.scope = self.headers = None  # type: ignore[assignment]

    def abort(self) -> None:
        """Ends the connection at once."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Takes bytes of a client, and parses them if it is their turn."""
        self._unset_keepalive_if_required()
        if self._is_deaf:
            self._all.turns.note_read(self.flow, Read(len(data)), is_wanted=False)
            return
        if self._later:
            self._put_off(data)
            self.flow.pause_reading()
        else:
            self._take(data)

    def _go_on(self) -> None:
        """Parses what waited for this turn, and not for an answer."""
        if self._later and not self._is_answer_owed():
            self._take(self._drop_later())

    def _take(self, data: bytes) -> None:
        """Parses up to the end of a message whose answer is owed, or of what one turn may have; the rest waits."""
        start, size, self._num_parts = 0, len(data), 0
        try:
            while start < size and not self._is_deaf:
                if self._is_answer_owed():
                    self._put_off(data[start:])
                    self.flow.pause_reading()
                    return
                if self._num_parts > MAX_PARTS and self._is_in_message:
                    self._put_off(data[start:])
                    break
                end = self._end_of_piece(data, start)
                self._feed(data if end - start == size else data[start:end])
                self._num_parts += 1
                start = end
        except (httptools.HttpParserError, _RefusedError):
            self._refuse(self._refusal)
            return
        if self._is_in_message:
            if not self.cycle.is_wanted and not self.cycle.response_complete:
                # The door is asked first. What was read with the head is all that is held until then.
                self.flow.pause_reading()
            read = Read(start, self._num_parts, num_left=self._body_left_bytes, is_cut=start < size)
            self._all.turns.note_read(self.flow, read, is_wanted=not self.cycle.response_started)
        elif not self._is_answer_owed():
            self._expect_head()

    def _is_answer_owed(self) -> bool:
        """Returns whether a whole request has come that is not answered."""
        return self.cycle is not None and not self._is_in_message and not self.cycle.response_complete

    def _end_of_piece(self, data: bytes, start: int) -> int:
        """Returns where parsing has to stop, so that no message begins in the same step in which another ends."""
        if not self._is_in_message:
            end = self._end_after(_HEAD_END, data, start)
            self._num_head_bytes += end - start
            if self._num_head_bytes > MAX_HEAD_BYTES:
                raise self._refused(LARGE_HEAD)
            return end
        if self._body_left_bytes < 0:
            return self._end_after(_CHUNKS_END, data, start, max_bytes=MAX_FED_BYTES)
        return min(len(data), start + self._body_left_bytes)

    def _end_after(self, mark: bytes, data: bytes, start: int, *, max_bytes: int = MAX_LATER_BYTES) -> int:
        """Returns the end of the next mark, which may have begun in bytes before these; or of the first `max_bytes`."""
        keep, stop = len(mark) - 1, min(len(data), start + max_bytes)
        found = (self._tail + data[start : start + keep]).find(mark) if self._tail else -1
        if found >= 0:
            end = start + found + len(mark) - len(self._tail)
        else:
            found = data.find(mark, start, stop)
            end = found + len(mark) if found >= 0 else stop
        self._tail = (self._tail + data[max(start, end - keep) : end])[-keep:]
        return end

    def _feed(self, data: bytes) -> None:
        is_chunked = self._is_in_message and self._body_left_bytes < 0
        num_before = self._num_body_bytes
        rest: bytes | None = data
        while rest is not None:
            rest = self._parse(rest)
        if is_chunked:
            num_body = self._num_body_bytes - num_before
            self._framing_room_bytes += (FRAMING_BYTES_PER_BODY_BYTE + 1) * num_body - len(data)
            if self._framing_room_bytes < 0:
                raise self._refused(MUCH_FRAMING)

    def _parse(self, data: bytes) -> bytes | None:
        """Parses. Returns what is left after a head that asks for another protocol, which is ignored."""
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
            return data[upgrade.args[0] :] or None
        return None

    def _should_upgrade(self) -> bool:
        """Returns whether a head for which httptools, which then skips the body, sees an upgrade is to be read again.

        uvicorn begins no request for it then. CONNECT is such a head too, and refused as it is.
        """
        return bool(self.parser.get_method() != b"CONNECT")

    def on_message_begin(self) -> None:
        """Takes note of a request's first byte, from httptools."""
        if self.cycle is not None and not self.cycle.response_complete:
            # After trailers or extensions the end of the body was not found; a client may send this again.
            self._end_with_answer()
            raise _RefusedError
        super().on_message_begin()
        self.scope["extensions"] = {EXTENSION: {"connection": self._connection}}
        self._is_in_head = True
        self._body_left_bytes = -1

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header or a trailer from httptools."""
        if not self._is_in_head:
            return  # a trailer: what a proxy looked at in the head must not come again here (RFC 9110, 6.5.1)
        if len(self.headers) >= MAX_HEADERS:
            raise self._refused(MANY_HEADERS)
        name = name.lower()
        if name == b"content-length":
            self._body_left_bytes = int(value)
        elif name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Starts the application of a request whose head is complete."""
        self._end_head_timer()
        self._is_in_head = False
        self._num_head_bytes = 0
        parser = self.parser
        method = parser.get_method().decode("ascii")
        if parser.should_upgrade() and self._should_upgrade():
            return
        self._is_in_message = True
        self._framing_room_bytes = MAX_FRAMING_BYTES
        self._tail = b"\r\n"  # the mark of the end of chunks begins with the end of a line
        self._all.mark_busy(self)
        scope = self.scope
        scope["method"] = method
        http_version = parser.get_http_version()
        if http_version not in ("1.1", "1.0"):
            raise self._refused(OTHER_VERSION)
        if http_version != "1.1":
            scope["http_version"] = http_version
        url = httptools.parse_url(self.url)
        scope["raw_path"] = url.path
        path = url.path.decode("ascii")
        scope["path"] = urllib.parse.unquote(path) if "%" in path else path
        scope["query_string"] = url.query or b""
        self.cycle = Cycle(
            scope=scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=http_version != "1.0"
            and parser.should_keep_alive()
            and method != "CONNECT"
            and not self._all.is_leaving,
            on_response=self.on_response_complete,
        )
        self.cycle.unread = self._all.unread
        self._start_asgi_task(self.cycle, self.app)

    def on_body(self, body: bytes) -> None:
        """Takes a piece of a body from httptools."""
        num_bytes = len(body)
        self._num_body_bytes += num_bytes
        self._num_parts += 1
        if self._body_left_bytes > 0:
            self._body_left_bytes -= num_bytes
        cycle = self.cycle
        if cycle.response_complete or cycle.scope["method"] in _WITHOUT_BODY:
            return
        if not self._all.unread.take(num_bytes):
            raise self._refused(NO_ROOM)
        cycle.body += body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        """Takes note of a request's end, from httptools."""
        if self.parser.should_upgrade() and self._should_upgrade():
            return
        self._is_in_message = False
        self._tail = b""
        self._end_linger_timer()
        cycle = self.cycle
        if cycle.response_complete:
            self._all.mark_idle(self)
        else:
            cycle.more_body = False
            cycle.message_event.set()
            # Whatever the size of its last part: unless the socket is read, nobody hears that the client has left.
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """Parses what came after a request whose answer is complete."""
        self._drop_body(self.cycle)
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._is_in_message:
            # Nobody reads the rest of this body.
            self._linger_timer = self.loop.call_later(LINGER_S, self.transport.close)
            return
        self._all.mark_idle(self)
        if self._later:
            self._unset_keepalive_if_required()
            later = self._drop_later()
            self._take(later)

    def _put_off(self, data: bytes) -> None:
        """Keeps what was sent before its turn. Where that is too much, the connection ends with the present answer."""
        if len(self._later) + len(data) > MAX_LATER_BYTES or not self._all.later.take(len(data)):
            self._end_with_answer()
        else:
            self._later += data

    def _drop_later(self) -> bytes:
        later, self._later = self._later, b""
        self._all.later.give(len(later))
        return later

    def _drop_body(self, cycle: Cycle) -> None:
        """Drops what has arrived of a body that will not be asked for."""
        self._all.unread.give(len(cycle.body))
        cycle.body = bytearray()

    def _end_with_answer(self) -> None:
        self._drop_later()
        self._is_deaf = True
        self.cycle.keep_alive = False

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up)

    def _end_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_linger_timer(self) -> None:
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self._is_in_head or self._num_head_bytes:
            self._refuse(Refusal(408, f"the head did not arrive within {HEAD_TIMEOUT_S:g} s", "request_timeout"))
        else:
            self.transport.close()

    def _refused(self, refusal: Refusal) -> _RefusedError:
        self._refusal = refusal
        return _RefusedError(refusal.code)

    def _refuse(self, refusal: Refusal) -> None:
        """Answers what is no request, unless it is the end of one that is answered already, and ends the connection."""
        if self._is_deaf or self.transport.is_closing():
            return
        self._is_deaf = True
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started:
                self.transport.close()
                return
            # Its application waits for the rest of a body: for it the client has gone.
            cycle.disconnected = True
            cycle.message_event.set()
            self._connection.lose()
        error = {"message": refusal.message, "type": refusal.kind, "param": None, "code": refusal.code}
        body = msgspec.json.encode({"error": error})
        retry = f"retry-after: {RETRY_AFTER_S}\r\n" if refusal.status == HTTPStatus.SERVICE_UNAVAILABLE else ""
        head = (
            f"HTTP/1.1 {refusal.status:d} {HTTPStatus(refusal.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nx-request-id: {refused_id(None)}\r\n{retry}connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self._linger()

    def _linger(self) -> None:
        """Says that no more will be sent, and drops for a moment what still comes."""
        self._end_head_timer()
        self._end_linger_timer()
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.write_eof()
        self.flow.resume_reading()
        self._linger_timer = self.loop.call_later(LINGER_S, self.transport.close)
