"""One HTTP request and its answer, on ASGI itself: bodies within their limits, events, clients that leave, errors.

Knows no route, and of an answer only that it is a body or events.
"""

import asyncio
import contextlib
import functools
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, MutableMapping, Set
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import Any

import msgspec
from starlette.responses import Response

from gateway.http.bodies import SMALL_BODY_BYTES, Claim
from gateway.http.connections import connection_of
from gateway.http.ids import HEADER as ID_HEADER
from gateway.limits import MAX_BODY_BYTES, MAX_BODY_READ_S
from gateway.observability.metrics import Metrics
from gateway.observability.request_log import RequestLog, code_of
from gateway.requests.call import TenantTicket
from gateway.requests.seeds import refused_id
from services.runtime import status
from services.runtime.errors import (
    InvalidRequest,
    RateLimited,
    RequestCancelled,
    TandemError,
    Unauthenticated,
    forget_frames,
)

MAX_URL_BYTES = 8 * 1024
LINGER_S = 2.0
MIN_BODY_BYTES_PER_S = 16 * 1024
"""The least rate of a body that holds more than a small one may, looked at every BODY_LOOK_S."""
BODY_LOOK_S = 5.0
SLOW_CLIENT_LIMIT_S = 30.0
"""The time after which a client that takes nothing is dropped."""

_JSON = "application/json"

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
HeaderPairs = list[tuple[bytes, bytes]]
WriteError = Callable[[Mapping[str, Any], int], bytes]
"""Makes the body of an answer from OpenAI's error object and the status."""


class HttpRefusal(InvalidRequest):
    """A request that HTTP's own rules refuse, with the status for it. Its connection is closed."""

    def __init__(self, message: str, *, http_status: int, code: str) -> None:
        super().__init__(message, code=code)
        self.http_status = http_status


@dataclass(frozen=True, slots=True)
class StreamPace:
    """When a stream of events shows that it is alive, in seconds of silence."""

    head_after_s: float = 2.0
    """Time until its head leaves without an event; an error before that still has a status of its own."""
    comment_every_s: float = 15.0
    """Time between two signs of life."""


class Exchange:
    """One request and its answer, on ASGI itself: this path is the one that every token takes."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.path: str = scope["path"]
        self.has_started = False
        self.is_unread = True
        """Whether the end of the body has not been seen yet."""
        self.headers: HeaderPairs = scope["headers"]
        self._first_values = dict(reversed(self.headers))
        self._connection = connection_of(scope)
        self._url_bytes = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        self._receive = receive
        self._send = send
        self._answer_headers: HeaderPairs = []
        self.has_id = False
        """Whether the client is told the request's id."""
        self._sending_since_s: float | None = None
        self._num_events = 0
        self._heart: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._answered_by: asyncio.Task[Any] | None = None
        """The task that a lost client ends."""
        self._is_client_lost = False
        self._body_until_s = 0.0
        self._slow_body = ""

    def header(self, name: bytes) -> str:
        """Returns the value of a header, or an empty text."""
        return self.optional_header(name) or ""

    def joined(self, name: str) -> str:
        """Returns the values of a header, with commas between them."""
        key = name.encode()
        return ",".join(self.all_headers(key)) if key in self._first_values else ""

    def has_any(self, names: Set[bytes]) -> bool:
        """Returns whether the request has one of these headers."""
        return not names.isdisjoint(self._first_values)

    def optional_header(self, name: bytes) -> str | None:
        """Returns the value of a header; None if it is absent."""
        value = self._first_values.get(name)
        return None if value is None else value.decode("latin-1")

    def all_headers(self, name: bytes) -> list[str]:
        """Returns all values of a header."""
        return header_values(self.headers, name)

    def add_limits(self, ticket: TenantTicket | None) -> None:
        """Tells what is left of the tenant's limits."""
        if ticket is not None:
            for name, value in ticket.headers:
                self.add_header(name.encode(), value)

    def add_trace(self, traceparent: str) -> None:
        """Tells the client which span is its request's, if any is."""
        if traceparent:
            self.add_header(b"traceparent", traceparent)

    def name(self, request_id: str, *, headers: tuple[bytes, ...] = (ID_HEADER,)) -> None:
        """Tells the client the request's id."""
        self.has_id = True
        for header in headers:
            self.add_header(header, request_id)

    def add_header(self, name: bytes, value: str) -> None:
        """Adds a header to the answer."""
        self._answer_headers.append((name, value.encode("latin-1")))

    async def read_body(self, claim: Claim) -> bytes:
        """Returns the whole body. Raises HttpRefusal for what is no body of ours, before reading more than is allowed.

        It has MAX_BODY_READ_S to come. One that holds more than a small body may has to come at a least rate too.
        """
        self._check_head()
        claim.is_given_up = self._is_lost
        if self._connection.has_whole_body:
            return await self._receive_body(claim)
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        self._body_until_s = loop.time() + MAX_BODY_READ_S
        self._timer = loop.call_later(min(BODY_LOOK_S, MAX_BODY_READ_S), self._check_body, task, claim, 0)
        try:
            return await self._receive_body(claim)
        except asyncio.CancelledError:
            if self._is_client_lost and task.uncancel() == 0:
                raise HttpRefusal(self._slow_body, http_status=408, code="request_timeout") from None
            raise
        finally:
            self._timer.cancel()

    def _is_lost(self) -> bool:
        return self._connection.is_lost

    def _check_body(self, task: "asyncio.Task[Any]", claim: Claim, num_before: int) -> None:
        """Ends a body that takes too long. `num_before` bytes had come at the last look."""
        loop = asyncio.get_running_loop()
        left_s = self._body_until_s - loop.time()
        if left_s <= 0:
            self._slow_body = f"the body did not arrive within {MAX_BODY_READ_S:g} s"
            self._lose_client(task)
        elif claim.num_bytes > SMALL_BODY_BYTES and claim.num_bytes - num_before < MIN_BODY_BYTES_PER_S * BODY_LOOK_S:
            self._slow_body = f"the body came at less than {MIN_BODY_BYTES_PER_S} bytes a second"
            self._lose_client(task)
        else:
            self._timer = loop.call_later(min(BODY_LOOK_S, left_s), self._check_body, task, claim, claim.num_bytes)

    async def answer(
        self, http_status: int, body: bytes, extra: HeaderPairs | None = None, *, is_unread: bool = False
    ) -> None:
        """Sends a complete answer. `is_unread`: the request's body was not read, and its sender may still be at it."""
        if not self.has_id:
            self.name(refused_id(self.optional_header(ID_HEADER)))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *self._answer_headers,
            *(extra or ()),
        ]
        self.has_started = True
        await self._send({"type": "http.response.start", "status": http_status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": is_unread})
        if is_unread:
            await self._discard_body()
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def answer_in_parts(self, parts: AsyncIterator[bytes]) -> None:
        """Sends a complete answer whose length is unknown; each part is asked for once the client takes the others."""
        self.has_started = True
        self._check_progress()
        headers = [(b"content-type", b"application/json"), *self._answer_headers]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        async for part in parts:
            self._sending_since_s = asyncio.get_running_loop().time()
            await self._send({"type": "http.response.body", "body": part, "more_body": True})
            self._sending_since_s = None
        await self.end_events()

    async def send_event(self, event: bytes) -> None:
        """Sends server-sent events; begins the answer with the first."""
        if not self.has_started:
            self.has_started = True
            self._check_progress()
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
                *self._answer_headers,
            ]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self._num_events += 1
        self._sending_since_s = asyncio.get_running_loop().time()
        await self._send({"type": "http.response.body", "body": event, "more_body": True})
        self._sending_since_s = None

    def can_send_event_now(self) -> bool:
        """Returns whether `send_event_now` may be called: the answer has begun, and nothing waits before it."""
        return self.has_started and self._connection.can_write()

    def send_event_now(self, event: bytes) -> None:
        """Sends server-sent events without waiting for anything."""
        self._num_events += 1
        self._connection.write_chunk(event)

    @contextlib.contextmanager
    def kept_alive(self, pace: StreamPace, *, first: Callable[[], bytes], comment: bytes) -> Iterator[None]:
        """Sends `first()` if no event has been sent after a while, and `comment` whenever none has for long."""
        self._heart = asyncio.get_running_loop().call_later(pace.head_after_s, self._beat, pace, first, comment, 0)
        try:
            yield
        finally:
            self._heart.cancel()

    def _beat(self, pace: StreamPace, first: Callable[[], bytes], comment: bytes, num_before: int) -> None:
        """Looks whether anything was sent since the last time, when the client had `num_before` events."""
        is_silent = self._num_events == num_before and self._connection.can_write()
        loop = asyncio.get_running_loop()
        if is_silent and self.has_started:
            self.send_event_now(comment)
        elif is_silent:
            self._send_at_once(first())
        self._heart = loop.call_later(pace.comment_every_s, self._beat, pace, first, comment, self._num_events)

    def _send_at_once(self, event: bytes) -> None:
        """Sends what begins an answer: no other event may come before it, and none was written that could wait."""
        sending = self.send_event(event)
        try:
            sending.send(None)
        except StopIteration:
            return
        sending.close()
        raise RuntimeError("a client that takes what it gets made its server wait")

    async def end_events(self) -> None:
        """Ends a stream of events."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def __enter__(self) -> None:
        """Raises RequestCancelled in this task, until the block is left, if the client goes away or takes nothing."""
        task = asyncio.current_task()
        assert task is not None
        if self._connection.is_lost:
            raise RequestCancelled("the client left")
        self._answered_by = task
        self._connection.on_lost = functools.partial(self._lose_client, task)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        task, self._answered_by = self._answered_by, None
        self._connection.on_lost = None
        if self._timer is not None:
            self._timer.cancel()
        if isinstance(error, asyncio.CancelledError) and self._is_client_lost and task and task.uncancel() == 0:
            raise RequestCancelled("the client left") from None

    def _check_progress(self) -> None:
        """Looks now and then whether one piece of a stream has been on its way for too long."""
        loop = asyncio.get_running_loop()
        since_s = self._sending_since_s
        if self._answered_by is None:
            return
        if since_s is not None and loop.time() - since_s > SLOW_CLIENT_LIMIT_S:
            self._lose_client(self._answered_by)
        else:
            self._timer = loop.call_later(SLOW_CLIENT_LIMIT_S / 4, self._check_progress)

    def _lose_client(self, task: "asyncio.Task[Any]") -> None:
        if not self._is_client_lost:
            # Told again, the task would break off what it does to end.
            self._is_client_lost = True
            task.cancel()

    async def _discard_body(self) -> None:
        """Reads on for a moment: closing at once would reset the connection before the answer is read."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while (await self._receive()).get("more_body"):
                    pass

    def _check_head(self) -> None:
        if self._url_bytes > MAX_URL_BYTES:
            raise HttpRefusal("the URL is too long", http_status=414, code="url_too_long")
        encoding = self._first_values.get(b"content-encoding")
        if encoding and encoding.lower() != b"identity":
            raise HttpRefusal("send the body without content-encoding", http_status=415, code="unsupported_encoding")
        check_json_type(self.header(b"content-type"))
        length = self.header(b"content-length")
        if length:
            self._check_size(int(length) if length.isascii() and length.isdigit() else MAX_BODY_BYTES + 1)

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > MAX_BODY_BYTES:
            raise HttpRefusal(
                f"the body must have at most {MAX_BODY_BYTES} bytes", http_status=413, code="request_too_large"
            )

    async def _receive_body(self, claim: Claim) -> bytes:
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise RequestCancelled("the client left")
            part: bytes = message.get("body", b"")
            self._check_size(len(body) + len(part))
            claim.add(len(part))
            if not message.get("more_body"):
                self.is_unread = False
                return bytes(body + part) if body else part
            body += part


class Endpoint:
    """An ASGI endpoint that answers every error: with OpenAI's object, unless `write_error` makes another of it."""

    def __init__(
        self,
        serve: Callable[[Exchange], Awaitable[None]],
        metrics: Metrics,
        log: RequestLog,
        *,
        write_error: WriteError | None = None,
    ) -> None:
        self._serve = serve
        self._write_error = write_error or _openai_body
        self._metrics = metrics
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        exchange = Exchange(scope, receive, send)
        try:
            await self._serve(exchange)
        except RequestCancelled:
            return
        except Exception as error:  # noqa: BLE001 - the boundary: every request gets an answer
            self._metrics.note_refusal(note_error(error))
            request_id = refused_id(exchange.optional_header(ID_HEADER))
            if isinstance(error, TandemError):
                request_id = self._log.note_refusal(error, request_id=request_id)
            if not exchange.has_started:
                if not exchange.has_id:
                    exchange.name(request_id)
                is_unread = exchange.is_unread or isinstance(error, HttpRefusal)
                headers = _error_headers(error, closes=is_unread)
                http_status = _http_status(error)
                body = self._write_error(status.openai_error(error), http_status)
                await exchange.answer(http_status, body, headers, is_unread=is_unread)


def check_json_type(content_type: str) -> None:
    """Raises HttpRefusal for a body that is not said to be JSON, as what a form in a web page sends never is."""
    if content_type != _JSON and content_type.partition(";")[0].strip().lower() != _JSON:
        raise HttpRefusal(
            "send the header Content-Type: application/json", http_status=415, code="unsupported_media_type"
        )


def note_error(error: Exception) -> str:
    """Logs what is not the client's business, and ends what the error keeps in memory. Returns its public code."""
    if not isinstance(error, TandemError):
        logger.error("a request failed", exc_info=error)
    forget_frames(error)
    return code_of(error)


def _http_status(error: BaseException) -> int:
    return error.http_status if isinstance(error, HttpRefusal) else status.http_status(error)


def _openai_body(openai_error: Mapping[str, Any], http_status: int) -> bytes:
    return msgspec.json.encode(openai_error)


def header_values(headers: HeaderPairs, name: bytes) -> list[str]:
    """Returns all values of a header."""
    return [value.decode("latin-1") for key, value in headers if key == name]


def _error_headers(error: BaseException, *, closes: bool = False) -> HeaderPairs:
    headers: HeaderPairs = []
    if closes:
        headers.append((b"connection", b"close"))
    if isinstance(error, Unauthenticated):
        headers.append((b"www-authenticate", b'Bearer realm="tandem"'))
    if isinstance(error, RateLimited):
        headers += [(name.encode(), value.encode()) for name, value in error.headers]
    retry_after_s = status.retry_after_s(error)
    if retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(retry_after_s))))
    elif _http_status(error) == HTTPStatus.CONFLICT:
        # OpenAI's clients send again what met a conflict, and another body would meet it for as long as they do.
        headers.append((b"x-should-retry", b"false"))
    return headers


def error_answer(error: Exception) -> Response:
    """Returns the answer to an error, for routes that are Starlette's."""
    headers = {key.decode(): value.decode() for key, value in _error_headers(error)}
    http_status = _http_status(error)
    return Response(
        _openai_body(status.openai_error(error), http_status), http_status, headers, media_type="application/json"
    )
