"""One HTTP request and its answer: heads and bodies within their bounds, events, and clients that leave."""

import asyncio

import pytest

from gateway.http.bodies import Bodies
from gateway.http.connections import connection_of, in_process_scope
from gateway.http.exchange import Endpoint, Exchange, HttpRefusal, StreamPace
from gateway.limits import MAX_BODY_BYTES
from services.runtime.errors import InvalidRequest, RateLimited, RequestCancelled, Unauthenticated

JSON = (b"content-type", b"application/json")


class Told:
    """What metrics and log are told of refusals."""

    def __init__(self):
        self.codes = []

    def note_refusal(self, what, request_id=""):
        self.codes.append(what)
        return request_id


class Caller:
    """The client's side of one exchange."""

    def __init__(self, *headers, messages=(), path="/v1/completions"):
        self.scope = in_process_scope("POST", path, [*headers])
        self.messages = list(messages)
        self.sent = []

    async def receive(self):
        return self.messages.pop(0)

    async def send(self, message):
        self.sent.append(message)

    def exchange(self):
        return Exchange(self.scope, self.receive, self.send)

    async def read(self):
        with Bodies(2 * MAX_BODY_BYTES).claim() as claim:
            return await self.exchange().read_body(claim)


def piece(body, *, more=False):
    return {"type": "http.request", "body": body, "more_body": more}


async def test_a_body_in_pieces_is_one():
    assert await Caller(JSON, messages=[piece(b"ab", more=True), piece(b"c")]).read() == b"abc"


@pytest.mark.parametrize(
    ("caller", "status", "code"),
    [
        (Caller((b"content-type", b"text/plain")), 415, "unsupported_media_type"),
        (Caller(JSON, (b"content-encoding", b"gzip")), 415, "unsupported_encoding"),
        (Caller(JSON, path="/" + "x" * 9000), 414, "url_too_long"),
        (Caller(JSON, (b"content-length", b"%d" % (MAX_BODY_BYTES + 1))), 413, "request_too_large"),
        (Caller(JSON, (b"content-length", b"some")), 413, "request_too_large"),
        (
            Caller(JSON, messages=[piece(b"x" * MAX_BODY_BYTES, more=True), piece(b"x")]),
            413,
            "request_too_large",
        ),
    ],
)
async def test_what_no_body_may_be_is_refused(caller, status, code):
    with pytest.raises(HttpRefusal) as refused:
        await caller.read()
    assert (refused.value.http_status, refused.value.code) == (status, code)


async def test_a_body_that_does_not_come_ends_as_a_timeout(monkeypatch):
    monkeypatch.setattr("gateway.http.exchange.MAX_BODY_READ_S", 0.01)
    caller = Caller(JSON)
    caller.receive = lambda: asyncio.Event().wait()
    with pytest.raises(HttpRefusal) as refused:
        await caller.read()
    assert refused.value.http_status == 408


async def test_a_client_that_leaves_its_body_unfinished_is_cancelled():
    with pytest.raises(RequestCancelled):
        await Caller(JSON, messages=[piece(b"a", more=True), {"type": "http.disconnect"}]).read()


async def test_events_begin_with_a_head_and_end_once():
    caller = Caller()
    exchange = caller.exchange()
    exchange.add_header(b"x-request-id", "mine")
    assert not exchange.can_send_event_now()
    await exchange.send_event(b"data: 1\n\n")
    await exchange.send_event(b"data: 2\n\n")
    await exchange.end_events()
    start, *bodies = caller.sent
    assert dict(start["headers"])[b"x-request-id"] == b"mine"
    assert [(message["body"], message["more_body"]) for message in bodies] == [
        (b"data: 1\n\n", True),
        (b"data: 2\n\n", True),
        (b"", False),
    ]


async def test_parts_are_made_as_the_client_takes_them_and_one_that_takes_none_is_lost(monkeypatch):
    monkeypatch.setattr("gateway.http.exchange.SLOW_CLIENT_LIMIT_S", 0.1)
    caller, made = Caller(), []
    takes = asyncio.Semaphore(3)  # the head and two parts

    async def send(message):
        await takes.acquire()
        caller.sent.append(message)

    async def parts():
        for number in range(9):
            made.append(number)
            yield b"%d" % number

    exchange = Exchange(caller.scope, caller.receive, send)
    with pytest.raises(RequestCancelled), exchange:
        await exchange.answer_in_parts(parts())
    assert made == [0, 1, 2], "the third one is on its way"
    start, *bodies = caller.sent
    assert (start["status"], b"content-length" in dict(start["headers"])) == (200, False)
    assert [(message["body"], message["more_body"]) for message in bodies] == [(b"0", True), (b"1", True)]


@pytest.mark.parametrize(
    ("error", "status", "header"),
    [
        (InvalidRequest("no"), 400, None),
        (Unauthenticated("who?"), 401, (b"www-authenticate", b'Bearer realm="tandem"')),
        (RateLimited("later", retry_after_s=1.2), 429, (b"retry-after", b"2")),
        (ValueError("a fault of ours"), 500, None),
    ],
)
async def test_every_error_is_an_answer(error, status, header):
    async def fail(exchange):
        exchange.is_unread = False
        raise error

    caller, told = Caller(JSON), Told()
    await Endpoint(fail, told, told)(caller.scope, caller.receive, caller.send)
    start, body = caller.sent
    assert start["status"] == status
    assert header is None or header in start["headers"]
    assert b"fault of ours" not in body["body"]
    assert told.codes


async def test_a_client_that_left_gets_no_answer():
    async def leave(exchange):
        with exchange:
            connection_of(caller.scope).lose()
            await asyncio.Event().wait()

    caller, told = Caller(JSON), Told()
    await Endpoint(leave, told, told)(caller.scope, caller.receive, caller.send)
    assert (caller.sent, told.codes) == ([], [])


async def test_a_client_that_takes_nothing_and_then_leaves_is_lost_once():
    scope = in_process_scope("POST", "/v1/completions", [])
    began, is_cleaning, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def serve():
        with Exchange(scope, None, None):
            try:
                began.set()
                await asyncio.Event().wait()
            finally:
                is_cleaning.set()
                await may_end.wait()

    serving = asyncio.create_task(serve())
    await began.wait()
    connection_of(scope).on_lost()
    await is_cleaning.wait()
    connection_of(scope).on_lost()
    may_end.set()
    with pytest.raises(RequestCancelled):
        await serving


async def test_signs_of_life_come_only_in_silence():
    caller = Caller()
    exchange = caller.exchange()
    with exchange.kept_alive(StreamPace(0.0, 0.01), first=lambda: b"first", comment=b"comment"):
        await asyncio.sleep(0.05)
    assert caller.sent == [], "a client that takes nothing is sent nothing"
