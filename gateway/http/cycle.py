"""One request of a connection and its answer: uvicorn's cycle, with a body that counts while nobody asks for it.

Knows neither parsing nor other connections.
"""

from collections.abc import Sequence
from typing import Any

from uvicorn.protocols.http.httptools_impl import HEADER_VALUE_RE, STATUS_LINE, RequestResponseCycle

_LAST_CHUNK = b"0\r\n\r\n"


class Cycle(RequestResponseCycle):
    """A request whose body counts until its application has asked for it, and whose answer takes few writes."""

    unread: Any
    is_wanted = False
    """Whether the application has asked for the body."""
    has_length = True
    """Whether the client knows where the body ends before the connection does."""
    _head = b""
    """The head of the answer until it is sent with the first piece of the body: two writes are two packets."""

    async def send(self, message: Any) -> None:
        """Sends as uvicorn's does, but for the head, which waits for the first piece of the body."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if not self.response_started:
            self._head = self._begin(message["status"], list(message.get("headers", ())))
            return
        if self.response_complete:
            raise RuntimeError("the answer is complete")
        head, self._head = self._head, b""
        body, more_body = message.get("body", b""), message.get("more_body", False)
        if self.scope["method"] == "HEAD":
            body, self.expected_content_length = b"", 0
        elif self.chunked_encoding:
            body = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + (b"" if more_body else _LAST_CHUNK)
        elif self.has_length:
            self.expected_content_length -= len(body)
            if self.expected_content_length < 0 or (self.expected_content_length and not more_body):
                raise RuntimeError("the body of the answer has another length than its head says")
        self.transport.write(head + body)
        if not more_body:
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()

    def _begin(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
        """Returns the head of the answer. Raises RuntimeError for a value that would end its line."""
        self.response_started = True
        self.waiting_for_100_continue = False
        parts, closes = [STATUS_LINE[status]], False
        if HEADER_VALUE_RE.search(b" ".join([value for _, value in headers])):
            raise RuntimeError("a header of the answer has a value that no header may have")
        for name, value in headers:
            if name == b"content-length":
                self.expected_content_length, self.chunked_encoding = int(value), False
            elif name == b"connection" and value == b"close":
                self.keep_alive, closes = False, True
            parts += (name, b": ", value, b"\r\n")
        if not (self.keep_alive or closes):
            parts.append(b"connection: close\r\n")
        if self.chunked_encoding is None and self.scope["method"] != "HEAD" and status not in (204, 304):
            # HTTP/1.0 has no chunks: there the end of the connection is the end of the body.
            self.chunked_encoding = self.scope["http_version"] != "1.0"
            self.has_length = self.chunked_encoding
            if self.chunked_encoding:
                parts.append(b"transfer-encoding: chunked\r\n")
        parts.append(b"\r\n")
        return b"".join(parts)

    async def receive(self) -> Any:
        """Receives as uvicorn's does, but reads only a body: what comes after it has to wait for the answer."""
        self.is_wanted = True
        if self.waiting_for_100_continue and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.waiting_for_100_continue = False
        if not self.disconnected and not self.response_complete:
            if self.more_body:
                self.flow.resume_reading()
            await self.message_event.wait()
            self.message_event.clear()
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        body = bytes(self.body)
        self.unread.give(len(body))
        self.body = bytearray()
        return {"type": "http.request", "body": body, "more_body": self.more_body}
