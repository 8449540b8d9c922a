"""What strangers may make the gateway hold and do: heads, framing, trailers, pipelines, numbers of connections."""

import asyncio
import gc
import re
import weakref

import pytest

from gateway.access.keys import digest_of_key, new_key
from gateway.http import protocol as http_protocol
from gateway.http.protocol import MAX_FED_BYTES, MAX_FRAMING_BYTES, MAX_PARTS, HttpProtocol
from gateway.http.reading_turns import SMALL_BYTES
from gateway.http.refusals import MAX_HEAD_BYTES, MAX_HEADERS
from tests.waiting import HANG_LIMIT_S

BODY = b'{"prompt": "a"}'
JSON = b"content-type: application/json\r\n"
LINE = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n" + JSON
CHUNKED = LINE + b"transfer-encoding: chunked\r\n\r\n"
WHOLE = LINE + b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY)
PROBE = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture
async def system(make_system, worker_type, pair_type, tokenizer):
    system = await make_system()
    pair = pair_type([*tokenizer.encode("ok", add_special_tokens=False).ids, 1])
    await system.add(worker_type("decode", "decode-0", pair.decode))
    return system


class Caller:
    """A raw connection to the HTTP port."""

    def __init__(self, system):
        self._port = system.gateway.http_port

    async def __aenter__(self):
        self.reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_):
        self._writer.close()

    def send(self, data):
        self._writer.write(data)

    async def answer(self):
        """Status, head and body of the next answer."""
        async with asyncio.timeout(HANG_LIMIT_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            body = await self.reader.readexactly(int(length[1]))
        return int(head.split()[1]), head, body

    async def rest(self):
        async with asyncio.timeout(HANG_LIMIT_S):
            return await self.reader.read()


def protocols():
    return [one for one in gc.get_objects() if type(one) is HttpProtocol]


def head_of(num_bytes, path=b"/health"):
    """A head of exactly this length."""
    head = b"GET " + path + b" HTTP/1.1\r\nhost: localhost\r\nx: \r\n\r\n"
    return head.replace(b"x: ", b"x: " + b"a" * (num_bytes - len(head)))


@pytest.mark.parametrize("path", [b"/health", b"/v1/models", b"/nowhere"])
async def test_a_head_may_have_16_kib_and_not_a_byte_more_however_it_comes(system, path):
    for num_bytes, is_refused in ((MAX_HEAD_BYTES, False), (MAX_HEAD_BYTES + 1, True), (120_000, True)):
        async with Caller(system) as caller:
            caller.send(head_of(num_bytes, path))
            assert ((await caller.answer())[0] == 431) is is_refused, num_bytes


async def test_a_head_is_measured_across_reads(system):
    async with Caller(system) as caller:
        head = head_of(MAX_HEAD_BYTES + 1)
        for part in (head[:100], head[100:-3], head[-3:]):
            caller.send(part)
            await asyncio.sleep(0)
        assert (await caller.answer())[0] == 431


@pytest.mark.parametrize("path", [b"/health", b"/v1/models", b"/dashboard"])
async def test_a_head_may_have_100_headers_on_every_route(system, path):
    for num_more, is_refused in ((MAX_HEADERS - 1, False), (MAX_HEADERS, True)):
        async with Caller(system) as caller:
            caller.send(b"GET " + path + b" HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * num_more + b"\r\n")
            assert ((await caller.answer())[0] == 431) is is_refused


async def test_trailers_are_no_headers(make_system, tmp_path):
    key = new_key()
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[key]]\nsha256 = "{digest_of_key(key)}"\ntenant = "a"\n')
    system = await make_system(api_keys=keys)
    chunks = b"%x\r\n%b\r\n0\r\nauthorization: Bearer %b\r\n\r\n" % (len(BODY), BODY, key.encode())
    async with Caller(system) as caller:
        caller.send(CHUNKED.replace(b"/v1/completions", b"/tokenize") + chunks)
        assert (await caller.answer())[0] == 401


async def test_a_body_with_a_few_trailers_and_extensions_is_read(system):
    async with Caller(system) as caller:
        caller.send(CHUNKED + b"%x;a=b\r\n%b\r\n0\r\nx-checksum: 1\r\n\r\n" % (len(BODY), BODY))
        assert (await caller.answer())[0] == 200
        caller.send(WHOLE)
        assert (await caller.answer())[0] == 200


ENDLESS = {
    "trailers": (b"0\r\n", b"a: b\r\n" * 100),
    "long trailers": (b"0\r\n", b"a: " + b"b" * 4000 + b"\r\n"),
    "one trailer": (b"0\r\na: ", b"b" * 4000),
    "one extension": (b"5;a=", b"b" * 4000),
    "extensions": (b"", b"1;" + b"b" * 1000 + b"\r\n \r\n"),
    "one size": (b"0", b"0" * 4000),
}


@pytest.mark.parametrize("row", ENDLESS)
async def test_what_is_beside_a_body_has_an_end(system, row):
    first, more = ENDLESS[row]
    async with Caller(system) as caller:
        caller.send(CHUNKED + first)
        for _ in range(2 * MAX_FRAMING_BYTES // len(more) + 200):
            caller.send(more)
        status, head, _ = await caller.answer()
        assert status == 400
        assert b"connection: close" in head
        assert await caller.rest() == b""


async def test_pipelined_requests_are_answered_in_their_order(system):
    async with Caller(system) as caller:
        caller.send(PROBE * 1500 + WHOLE + PROBE)
        for _ in range(1500):
            assert b"alive" in (await caller.answer())[2]
        assert b"ok" in (await caller.answer())[2]
        assert b"alive" in (await caller.answer())[2]


BROKEN_LATER = {
    "a head too large": (b"GET / HTTP/1.1\r\nx: " + b"a" * 20_000, 431),
    "no HTTP": (b"\x16\x03\r\n\r\n", 400),
}


@pytest.mark.parametrize("row", BROKEN_LATER)
async def test_a_refusal_never_overtakes_the_answers_that_are_owed(system, row):
    broken, status = BROKEN_LATER[row]
    decode, may_go_on = system.workers["decode-0"], asyncio.Event()
    say_ok = decode.script

    async def wait(attempt):
        await may_go_on.wait()
        await say_ok(attempt)

    decode.script = wait
    async with Caller(system) as caller:
        caller.send(WHOLE + PROBE * 3 + broken)
        await system.until(lambda: bool(decode.attempts))
        may_go_on.set()
        found = [await caller.answer() for _ in range(5)]
        assert [each[0] for each in found] == [200, 200, 200, 200, status]
        assert b"ok" in found[0][2]
        assert await caller.rest() == b""


async def test_more_pipelined_bytes_than_may_wait_end_the_connection_after_the_answer(system, monkeypatch):
    monkeypatch.setattr(http_protocol, "MAX_LATER_BYTES", 1000)
    async with Caller(system) as caller:
        caller.send(WHOLE + PROBE * 100)
        assert (await caller.answer())[0] == 200
        assert await caller.rest() == b""
    await system.until(lambda: system.gateway._http.connections.later.num_bytes == 0)


async def test_pipelined_bytes_of_all_connections_have_a_bound(system):
    later = system.gateway._http.connections.later
    later._max_bytes = 100
    async with Caller(system) as caller:
        caller.send(WHOLE + PROBE * 100)
        assert (await caller.answer())[0] == 200
        assert await caller.rest() == b""
    assert later.num_bytes == 0


async def test_a_request_after_trailers_is_left_to_be_sent_again(system):
    """Where it begins is unknown then; it must not be taken for another request."""
    async with Caller(system) as caller:
        caller.send(CHUNKED + b"%x\r\n%b\r\n0\r\na: b\r\n\r\n" % (len(BODY), BODY) + PROBE)
        assert (await caller.answer())[0] == 200
        assert await caller.rest() == b""


async def test_no_more_of_a_body_is_read_than_came_with_its_head_before_the_key_is_known(make_system, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[key]]\nsha256 = "{digest_of_key(new_key())}"\ntenant = "a"\n')
    system = await make_system(api_keys=keys)
    api, most = system.gateway.api, 0
    authenticate, unread = api._door.authenticate, system.gateway._http.connections.unread

    def spy(authorization):
        nonlocal most
        most = max(most, unread.num_bytes)
        return authenticate(authorization)

    api._door.authenticate = spy
    async with Caller(system) as caller:
        caller.send(LINE + b"content-length: 8000000\r\n\r\n" + b" " * 8_000_000)
        assert (await caller.answer())[0] == 401
    assert 0 < most <= 256 * 1024
    await system.until(lambda: unread.num_bytes == 0)
    assert api._bodies.num_bytes == 0


async def test_bodies_that_nobody_has_asked_for_have_a_bound(system):
    connections = system.gateway._http.connections
    connections.unread._max_bytes = 100
    async with Caller(system) as caller:
        caller.send(LINE + b"content-length: 1000\r\n\r\n" + b" " * 1000)
        status, head, _ = await caller.answer()
        assert status == 503
        assert b"retry-after: 1" in head
    connections.unread._max_bytes = 10_000
    async with Caller(system) as caller:
        caller.send(WHOLE)
        assert (await caller.answer())[0] == 200
    assert connections.unread.num_bytes == 0


LONG_BYTES = SMALL_BYTES + 4000
"""A body from which much is left after its first read."""


async def test_long_bodies_wait_for_their_turn_and_whole_requests_do_not(system):
    turns = system.gateway._http.connections.turns
    rate, turns._bytes_per_s = turns._bytes_per_s, 1.0
    async with Caller(system) as read, Caller(system) as dropped, Caller(system) as whole:
        read.send(LINE + b"content-length: %d\r\n\r\n" % LONG_BYTES + b" " * 2000)
        await system.until(lambda: len(turns._wanted) == 1)
        dropped.send(head_of(MAX_HEAD_BYTES + 1))
        assert (await dropped.answer())[0] == 431
        dropped.send(b" " * 2000)
        await system.until(lambda: len(turns._dropped) == 1)
        whole.send(WHOLE)
        assert (await whole.answer())[0] == 200
        assert len(turns._wanted) == len(turns._dropped) == 1
        turns._bytes_per_s, turns._paid_until_s = rate, 0.0
        turns._timer.cancel()
        turns._give()
        read.send(b" " * (LONG_BYTES - 2000 - len(BODY)) + BODY)
        assert (await read.answer())[0] == 200
    await system.until(lambda: not turns._wanted and not turns._dropped)


@pytest.mark.parametrize("chunk", [b" " * 60_000, b" ", b"\r\n0\r\n\r\n" * 9000], ids=["large", "of a byte", "of ends"])
async def test_a_body_of_many_parts_is_parsed_in_turns_and_arrives_whole(system, monkeypatch, chunk):
    """Each turn parses so much and no more; the answer and that of the next request come as for any other body."""
    parts_of_turns, bodies = [], []
    take, on_body = HttpProtocol._take, HttpProtocol.on_body

    def noted_take(self, data):
        take(self, data)
        parts_of_turns.append(self._num_parts)

    def noted_body(self, body):
        on_body(self, body)
        bodies.append(bytes(body))

    monkeypatch.setattr(HttpProtocol, "_take", noted_take)
    monkeypatch.setattr(HttpProtocol, "on_body", noted_body)
    chunks = [chunk] * (200_000 // len(chunk))
    framed = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in [*chunks, BODY])
    async with Caller(system) as caller:
        caller.send(CHUNKED + framed + b"0\r\n\r\n" + PROBE)
        status, _, _ = await caller.answer()
        assert b"".join(bodies) == b"".join(chunks) + BODY
        assert status == (400 if chunk.strip(b" ") else 200)
        assert (await caller.answer())[0] == 200
    assert max(parts_of_turns) <= MAX_PARTS + MAX_FED_BYTES // len(b"1\r\n \r\n") + 1
    assert (len(parts_of_turns) > 5) is (len(framed) // len(chunk) > MAX_PARTS or b"0" in chunk)


async def test_the_body_of_a_request_that_has_none_is_dropped(system):
    async with Caller(system) as caller:
        caller.send(
            b"GET /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n" + b" " * 100_000 + PROBE
        )
        assert (await caller.answer())[0] == 200
        assert (await caller.answer())[0] == 200
    assert system.gateway._http.connections.unread.num_bytes == 0


async def test_an_answered_request_is_not_read_for_ever(system, monkeypatch):
    monkeypatch.setattr(http_protocol, "LINGER_S", 0.2)
    async with Caller(system) as caller:
        caller.send(b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000\r\n\r\n" + b" " * 100_000)
        assert (await caller.answer())[0] == 404
        assert await caller.rest() == b""


async def test_line_ends_between_requests_keep_no_connection_open(system, monkeypatch):
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.2)
    async with Caller(system) as caller:
        caller.send(PROBE)
        await caller.answer()
        caller.send(b"\r\n")
        await caller.rest()


async def test_nothing_of_a_connection_is_left_when_its_client_has_gone(system):
    """Memory is freed without the collector of cycles, which hardly ever runs in an idle gateway."""
    gc.collect()
    gc.disable()
    try:
        callers = []
        for data in (
            CHUNKED + b"0\r\n" + b"a: b\r\n" * 50,
            WHOLE,
            PROBE,
            WHOLE[:-1],
            PROBE[:-2],
            b"GET / HTTP/1.1\r\n",
        ):
            caller = await Caller(system).__aenter__()
            caller.send(data)
            callers.append(caller)
        await system.until(lambda: len(protocols()) >= len(callers))
        left = [weakref.ref(each) for each in protocols()]
        for caller in callers:
            await caller.__aexit__()
        await system.http.aclose()
        await system.until(lambda: not any(each() for each in left))
    finally:
        gc.enable()


async def empty_server(system, max_connections):
    """The connections of a gateway that has none open and may have `max_connections`."""
    connections = system.gateway._http.connections
    await system.http.aclose()
    await system.until(lambda: connections.num_open == 0)
    connections.max_connections = max_connections
    return connections


async def test_where_connections_are_many_the_oldest_idle_ones_end(system):
    connections = await empty_server(system, 3)
    async with Caller(system) as kept, Caller(system) as first, Caller(system) as second:
        kept.send(PROBE)
        await kept.answer()
        await system.until(lambda: connections.num_open == 3)
        for silent in (first, second):
            async with Caller(system) as late:
                late.send(PROBE)
                assert (await late.answer())[0] == 200
                assert await silent.rest() == b""
                # A connection that has asked before stays while others have not.
                kept.send(PROBE)
                assert (await kept.answer())[0] == 200
            # The one that has left makes room, which another silent one takes.
            await system.until(lambda: connections.num_open < 3)
            connections.max_connections = connections.num_open
    assert connections.num_ended == 2
    assert connections.num_refused == 0


async def test_where_all_connections_are_busy_a_new_one_is_refused(system):
    connections = await empty_server(system, 1)
    async with Caller(system) as busy:
        busy.send(WHOLE[:-1])
        await system.until(lambda: connections.num_open == 1 and not connections._silent)
        async with Caller(system) as refused:
            status, head, body = await refused.answer()
            assert status == 503
            assert b"retry-after: 1" in head
            assert b"overloaded_error" in body
        busy.send(WHOLE[-1:])
        assert (await busy.answer())[0] == 200
    assert connections.num_refused == 1


async def test_another_version_is_refused(system):
    async with Caller(system) as caller:
        caller.send(PROBE.replace(b"HTTP/1.1", b"HTTP/2.0"))
        status, head, _ = await caller.answer()
    assert status in (400, 505), head
