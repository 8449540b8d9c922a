"""Attacks on the HTTP port: what a client, with a key or without, can make the gateway hold, believe and do.

Knows addresses and keys, and nothing of how the gateway is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx

from tests.attack.base import ADMIN, ATTACKER, MIB, VICTIM, Row, Target, attack, cluster, memory_row
from tests.free_ports import free_port

SENT_MIB = 2000
"""By each attack on memory; what was found took 50 MiB for a gigabyte."""
FLOOD_S = 60.0
NUM_FLOODING = 4
RETRY_S = 0.2
SHARE_MIB = 64
"""What a tenant's bodies may take at the defaults: a quarter of `--body-memory`."""
FILLING_S = 4.0
"""The time in which a share is filled: bodies that stand still are ended after 5 s."""
HELD = 'tandem_http_request_bytes{what="bodies"}'
ANSWER_S = 15.0
LINE = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = LINE + b"Transfer-Encoding: chunked\r\n\r\n"
PROBE = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@contextlib.asynccontextmanager
async def _caller(target: Target) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*target.address)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def _status(reader: asyncio.StreamReader) -> int:
    """Reads the next answer with its body, and returns its status; 0: the connection ended, or nothing came."""
    try:
        async with asyncio.timeout(ANSWER_S):
            head = await reader.readuntil(b"\r\n\r\n")
            for line in head.lower().split(b"\r\n"):
                if line.startswith(b"content-length: "):
                    await reader.readexactly(int(line[16:]))
            return int(head.split()[1])
    except (TimeoutError, OSError, asyncio.IncompleteReadError):
        return 0


async def _ask(target: Target, data: bytes) -> int:
    async with _caller(target) as (reader, writer):
        writer.write(data)
        return await _status(reader)


async def _flood(target: Target, head: bytes, more: bytes) -> int:
    """Sends 2 GB after heads, on as many connections as it takes for that; how many bytes went out."""
    num_bytes, until = 0, time.monotonic() + FLOOD_S

    async def send_on_one() -> None:
        nonlocal num_bytes
        async with _caller(target) as (_, writer), asyncio.timeout(ANSWER_S):
            writer.write(head)
            while num_bytes < SENT_MIB * MIB and time.monotonic() < until:
                writer.write(more)
                await writer.drain()
                num_bytes += len(more)

    async def send() -> None:
        while num_bytes < SENT_MIB * MIB and time.monotonic() < until:
            with contextlib.suppress(OSError, TimeoutError):
                await send_on_one()

    await asyncio.gather(*(send() for _ in range(NUM_FLOODING)))
    return num_bytes


@attack(1, 20)
async def endless_framing(target: Target) -> Sequence[Row]:
    """What is beside a chunked body: no key is shown."""
    rows = []
    for what, first, more in (
        ("small trailers without end, no key", b"0\r\n", b"a: b\r\n" * 9600),
        ("long trailers without end, no key", b"0\r\n", (b"a: " + b"b" * 4000 + b"\r\n") * 16),
        ("one chunk extension without end, no key", b"5;a=", b"b" * 65536),
    ):
        rows.append(await memory_row(target, what, lambda f=first, m=more: _flood(target, CHUNKED + f, m)))
    key = LINE + f"Authorization: Bearer {target.keys.get(ATTACKER, '')}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    flood = lambda: _flood(target, key + b"0\r\n", b"a: b\r\n" * 9600)  # noqa: E731
    rows.append(await memory_row(target, "small trailers without end, a good key", flood))
    return rows


@attack(1)
async def unread_bodies(target: Target) -> Sequence[Row]:
    """Bodies of which nobody has asked for more, on many connections; no key is shown."""

    async def flood() -> int:
        head = LINE + b"Content-Length: 8000000\r\n\r\n"
        sent = await asyncio.gather(*(_flood_once(target, head + b" " * 200_000) for _ in range(1000)))
        return sum(sent)

    return [await memory_row(target, "1,000 connections with 200 KB of a body, no key", flood)]


async def _flood_once(target: Target, data: bytes) -> int:
    with contextlib.suppress(OSError, TimeoutError):
        async with _caller(target) as (reader, writer), asyncio.timeout(ANSWER_S):
            writer.write(data)
            await reader.read(100)
    return len(data)


@attack(17)
async def trailers_as_headers(target: Target) -> Sequence[Row]:
    """A key behind a body."""
    body = b'{"prompt": "a"}'
    key = target.keys[ATTACKER].encode()
    head = CHUNKED.replace(b"/v1/completions", b"/tokenize")
    status = await _ask(target, head + b"%x\r\n%b\r\n0\r\nAuthorization: Bearer %b\r\n\r\n" % (len(body), body, key))
    return [Row("Authorization as a trailer", "401 or 400", str(status), status in (400, 401))]


@attack(18)
async def pipelines(target: Target) -> Sequence[Row]:
    """Many requests in one write."""
    async with _caller(target) as (reader, writer):
        writer.write(PROBE * 5001)
        found = [await _status(reader) for _ in range(3)]
        num_right = found.count(200)
        while found == [200] * 3 and num_right < 5001 and await _status(reader) == 200:
            num_right += 1
    expected, happened = "200 for each, or an end after some", f"{num_right}, first {found}"
    rows = [Row("5,001 probes in one write", expected, happened, found == [200] * 3)]
    async with _caller(target) as (reader, writer):
        writer.write(PROBE * 3 + b"GET / HTTP/1.1\r\nx: " + b"a" * 20_000)
        found = [await _status(reader) for _ in range(4)]
    rows.append(Row("3 probes, then a head of 20 KB", "200, 200, 200, 431", str(found), found == [200, 200, 200, 431]))
    return rows


@attack(19)
async def large_heads(target: Target) -> Sequence[Row]:
    """Heads beyond 16 KiB and 100 headers, in one write."""
    rows = []
    for num_bytes in (20_000, 60_000, 120_000):
        status = await _ask(target, PROBE[:-2] + b"x: " + b"a" * num_bytes + b"\r\n\r\n")
        rows.append(Row(f"a head of {num_bytes} bytes", "431", str(status), status == 431))
    key = f"Authorization: Bearer {target.keys.get(ATTACKER, '')}\r\n".encode()
    head = PROBE[:-2].replace(b"/health", b"/v1/models") + key
    status = await _ask(target, head + b"a: b\r\n" * 150 + b"\r\n")
    rows.append(Row("150 headers on GET /v1/models", "431", str(status), status == 431))
    return rows


@attack(8)
async def bodies_of_one_tenant(target: Target) -> Sequence[Row]:
    """One tenant's bodies without their ends, until all memory for bodies is taken."""
    key = f"Authorization: Bearer {target.keys[ATTACKER]}\r\n".encode()
    size = 8 * MIB

    async def hold(num_missing: int, num_bytes: int) -> None:
        data = LINE + key + b"Content-Length: %d\r\n\r\n" % num_bytes + b" " * (num_bytes - num_missing)
        while True:  # What is refused comes again, until nothing is left.
            with contextlib.suppress(OSError):
                async with _caller(target) as (reader, writer):
                    writer.write(data)
                    await writer.drain()
                    await reader.read(1)
            await asyncio.sleep(RETRY_S)

    tasks = [asyncio.create_task(hold(1, size)) for _ in range(40)]
    tasks += [asyncio.create_task(hold(1, 60_000)) for _ in range(600)]
    most, looks = 0, asyncio.create_task(_most_held(target))
    try:
        await asyncio.sleep(3)
        async with target.client(VICTIM, timeout_s=20) as http:
            small = [(await http.post("/tokenize", json={"prompt": "hello"})).status_code for _ in range(20)]
            long = (await http.post("/tokenize", json={"prompt": "x " * 200_000})).status_code
    finally:
        for task in (looks, *tasks):
            task.cancel()
        most, *_ = await asyncio.gather(looks, *tasks, return_exceptions=True)
    held = small == [200] * 20 and long == 200
    return [
        Row("20 small requests and a long one of another tenant", "200", f"{small.count(200)} of 20, {long}", held),
        Row("what is held of bodies meanwhile", f"at most {SHARE_MIB} MiB, a tenant's share", f"{most / MIB:.1f} MiB",
            0 < most <= (SHARE_MIB + 1) * MIB),
        *await _beyond_a_full_share(target, key, size),
    ]  # fmt: skip


async def _beyond_a_full_share(target: Target, key: bytes, size: int) -> list[Row]:
    """Bodies without their last byte until one finds no room; then whole ones, before and after their ends.

    While many come at once, those that are refused keep making room, and a body of the attacker's own may find some.
    """
    body = b'{"prompt": "x"}'.ljust(size)
    head = LINE.replace(b"/v1/completions", b"/tokenize") + key + b"Content-Length: %d\r\n\r\n" % size
    async with contextlib.AsyncExitStack() as stack, target.client(ADMIN) as http:
        async with asyncio.timeout(FILLING_S):
            while await _held_bytes(http) > MIB:  # noqa: ASYNC110 - the gateway tells no event
                await asyncio.sleep(0.02)
        num_held, until_s = 0, time.monotonic() + FILLING_S
        while time.monotonic() < until_s:
            reader, writer = await stack.enter_async_context(_caller(target))
            writer.write(head + body[:-1])
            refused = asyncio.ensure_future(reader.read(1))
            while not refused.done() and await _held_bytes(http) < (num_held + 1) * (size - 1):  # noqa: ASYNC110 - nor that
                await asyncio.sleep(0.02)
            if refused.done():
                break
            refused.cancel()
            num_held += 1
        async with target.client(ATTACKER) as own:
            json_type = {"content-type": "application/json"}
            beyond = await own.post("/tokenize", content=body, headers=json_type)
            await stack.aclose()
            until_s = time.monotonic() + 1.0
            while (later := await own.post("/tokenize", content=body, headers=json_type)).status_code != 200:
                if time.monotonic() > until_s:
                    break
    told = (
        f"{num_held} of {size / MIB:g} MiB held, {beyond.status_code}, Retry-After {beyond.headers.get('retry-after')}"
    )
    is_told = beyond.status_code in (429, 503) and "retry-after" in beyond.headers
    return [
        Row("the attacker's own long one where its share is taken", "429 or 503 with Retry-After", told, is_told),
        Row("the same a second after they have gone", "200", str(later.status_code), later.status_code == 200),
    ]


async def _most_held(target: Target) -> int:
    """Looks until it is cancelled; the most bytes of bodies that the gateway held."""
    most = 0
    with contextlib.suppress(asyncio.CancelledError):
        async with target.client(ADMIN) as http:
            while True:
                most = max(most, await _held_bytes(http))
                await asyncio.sleep(0.05)
    return most


async def _held_bytes(http: httpx.AsyncClient) -> int:
    lines = (await http.get("/metrics")).text.splitlines()
    return int(float(next(line for line in lines if line.startswith(HELD)).split()[1]))


@attack(12, alone=True)
async def pages_of_other_sites(target: Target) -> Sequence[Row]:
    """What a web page can do that its visitor's browser shows: DNS rebinding, and requests without it."""
    port = free_port()
    rows = []
    async with cluster(f"--admin-port={port}", has_keys=False) as own, own.client() as http:
        evil = {"host": "evil.example:8000"}
        for base in (own.http, f"http://127.0.0.1:{port}"):
            paths = ["/cluster", "/metrics", "/dashboard/data", "/dashboard/requests"]
            paths += ["/v1/files"] if base == own.http else []
            found = [(await http.get(base + path, headers=evil)).status_code for path in paths]
            name = "the HTTP port" if base == own.http else "--admin-port"
            rows.append(Row(f"Host: evil.example at {name}", "403 for each page", str(found), set(found) == {403}))
        body = {"prompt": "a", "max_tokens": 1}
        status = (await http.post("/v1/completions", json=body, headers={"origin": "https://evil.example"})).status_code
        rows.append(Row("Origin: https://evil.example", "403", str(status), status == 403))
        form = {"purpose": (None, "batch"), "file": ("rows.jsonl", b"{}")}
        from_page = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}
        status = (await http.post("/v1/files", files=form, headers=from_page)).status_code
        rows.append(Row("a form of another site that stores a file", "403", str(status), status == 403))
        for kind in (None, "text/plain"):
            headers = {} if kind is None else {"content-type": kind}
            data = json.dumps(body).encode()
            status = (await http.post("/v1/completions", content=data, headers=headers)).status_code
            rows.append(Row(f"generating with content type {kind}", "415", str(status), status == 415))
        told = await http.options("/v1/completions", headers={**from_page, "access-control-request-method": "POST"})
        is_let_in = "access-control-allow-origin" in told.headers
        rows.append(Row("a preflight of another site", "nothing allowed", str(told.status_code), not is_let_in))
        mine = (await http.get("/v1/models", headers={"origin": own.http, "host": f"localhost:{port}"})).status_code
        good = (await http.get("/v1/models")).status_code
        rows.append(Row("its own address", "200", f"{good}; another port's page {mine}", good == 200))
    return rows


@attack(12, alone=True)
async def operators_port_without_a_key(target: Target) -> Sequence[Row]:
    """`--admin-port` of a cluster that asks for keys."""
    port = free_port()
    async with cluster(f"--admin-port={port}") as own, httpx.AsyncClient(trust_env=False) as http:
        found = []
        for who in ("", ATTACKER, ADMIN):
            headers = {"authorization": f"Bearer {own.keys[who]}"} if who else {}
            found.append((await http.get(f"http://127.0.0.1:{port}/cluster", headers=headers)).status_code)
    return [Row("/cluster: no key, a tenant's, an admin's", "401, 403, 200", str(found), found == [401, 403, 200])]


@attack(15, alone=True)
async def many_idle_connections(target: Target) -> Sequence[Row]:
    """300 connections that send nothing, where 256 files may be open at first, and then as many as may ever be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    rows = []
    for what, limits in (("256 files, more allowed", (256, hard)), ("256 files", (256, 256))):
        if limits[1] < hard:
            rows.append(await _in_few_files(limits))
            continue
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        async with cluster() as own:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            rows.append(await _idle_row(own, what))
    return rows


async def _in_few_files(limits: tuple[int, int]) -> Row:
    """In a process of its own: a hard limit cannot be raised again."""
    code = (
        "import asyncio, json, resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, {limits})\n"
        "from tests.attack.base import cluster\n"
        "async def serve():\n"
        "    async with cluster(has_keys=False) as own:\n"
        "        print(json.dumps([own.http, own.gateway_pid]), flush=True)\n"
        "        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)\n"
        "asyncio.run(serve())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        http, pid = json.loads(await asyncio.wait_for(process.stdout.readline(), 120))
        return await _idle_row(Target(http, "", gateway_pid=pid), "256 files and never more")
    finally:
        process.stdin.write(b"\n")
        await asyncio.wait_for(process.wait(), 60)


async def _idle_row(own: Target, what: str) -> Row:
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(300):
            await stack.enter_async_context(_caller(own))
        statuses = [await _ask(own, PROBE) for _ in range(5)]
        answer = 0
        with contextlib.suppress(httpx.TransportError):
            async with own.client(VICTIM) as http:
                answer = (await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 4})).status_code
    happened = f"probes {statuses}, an answer {answer}"
    is_served = statuses == [200] * 5 and answer == 200
    return Row(f"{what}: 300 idle connections", "new ones are served", happened, is_served)


@attack(21)
async def odd_requests(target: Target) -> Sequence[Row]:
    """What was taken for something else than it says."""
    rows = []
    user = {"role": "user", "content": "a"}
    async with target.client(VICTIM) as http:
        data = b'{"prompt": "a", "max_tokens": 1}'
        status = (await http.post("/v1/completions", content=data)).status_code
        rows.append(Row("a POST without a content type", "415", str(status), status == 415))
        for name, tool in {
            "missing": {},
            "null": {"tool_call_id": None},
            "of no call": {"tool_call_id": "call_1"},
        }.items():
            messages = [user, {"role": "tool", "content": "b", **tool}]
            reply = await http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
            rows.append(Row(f"a tool_call_id {name}", "400", str(reply.status_code), reply.status_code == 400))
        reply = await http.post("/v1/completions", json={"model": "", "prompt": "a", "max_tokens": 1})
        rows.append(Row("an empty model", "400 or 404", str(reply.status_code), reply.status_code in (400, 404)))
    return rows


@attack(24, has_keys=False)
async def all_places_of_watchers(target: Target) -> Sequence[Row]:
    """One client opens more updates of the dashboard than there are places; then another comes."""
    ask = b"GET /dashboard/events HTTP/1.1\r\nHost: localhost\r\n\r\n"
    host, port = target.address
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(20):
            _, writer = await stack.enter_async_context(_caller(target))
            writer.write(ask)
        await asyncio.sleep(1.5)
        other = socket.create_connection((host, port), source_address=("127.0.0.2", 0))
        stack.callback(other.close)
        other.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(other, ask)
        async with asyncio.timeout(ANSWER_S):
            status = int((await loop.sock_recv(other, 4096)).split()[1])
    return [Row("updates for a second client", "200", str(status), status == 200)]
