"""Two gigabytes of requests: each sent before the answer to the one before it, or named and left at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import secrets
import socket
import time
from collections.abc import Sequence

from tests.attack.base import ATTACKER, MIB, Row, Target, attack, memory_row

SENT_MIB = 2000
MOST_S = 90.0
NUM_READING, NUM_SILENT = 4, 64
NUM_LEAVING = 12
NUM_PROMPTS, PROMPT_TOKENS = 128, 2000
RUNNING_MIB, BODIES_MIB, KEPT_MIB = 256, 64, 64
"""The bounds that the documents state: a tenant's named requests that run, its bodies, and what nobody reads."""
RECEIVE_BYTES = 4096


@attack(18)
async def pipelines_of_gigabytes(target: Target) -> Sequence[Row]:
    """Requests with bodies, each sent before the answer to the one before it, whose answers are read or not."""
    body = b'{"prompt": "a"}'.ljust(60_000)
    key = f"Authorization: Bearer {target.keys[ATTACKER]}\r\n" if target.keys else ""
    head = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{key}"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    return [
        await memory_row(target, "requests in pipelines, answers read", lambda: _pipelined(target, request, True)),
        await memory_row(target, "requests in pipelines, answers not read", lambda: _pipelined(target, request, False)),
    ]


async def _pipelined(target: Target, request: bytes, is_reading: bool) -> int:
    loop, until_s, num_bytes = asyncio.get_running_loop(), time.monotonic() + MOST_S, 0

    async def drain(sock: socket.socket) -> None:
        while await loop.sock_recv(sock, 2**16):
            pass

    async def send_on_one() -> None:
        nonlocal num_bytes
        with socket.socket() as sock:
            if not is_reading:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
            sock.setblocking(False)
            await loop.sock_connect(sock, target.address)
            reading = asyncio.ensure_future(drain(sock) if is_reading else asyncio.sleep(MOST_S))
            try:
                while num_bytes < SENT_MIB * MIB:
                    await loop.sock_sendall(sock, request)
                    num_bytes += len(request)
            finally:
                reading.cancel()
                await asyncio.wait((reading,))

    async def send() -> None:
        while num_bytes < SENT_MIB * MIB:
            with contextlib.suppress(OSError):
                await send_on_one()

    senders = [asyncio.create_task(send()) for _ in range(NUM_READING if is_reading else NUM_SILENT)]
    await asyncio.wait(senders, timeout=max(0.0, until_s - time.monotonic()))
    for sender in senders:
        sender.cancel()
    await asyncio.wait(senders)
    return num_bytes


@attack(7)
async def named_requests_left_at_once(target: Target) -> Sequence[Row]:
    """Named requests with many long prompts, each with a new name, whose clients leave within 0.3 s."""
    prompts = [[10 + 7919 * (place + 31 * row) % 1900 for place in range(PROMPT_TOKENS)] for row in range(NUM_PROMPTS)]
    body = json.dumps({"prompt": prompts, "max_tokens": 4}).encode()
    what = f"named requests of {NUM_PROMPTS} prompts of {PROMPT_TOKENS:,} tokens, left at once"
    bound_mib = RUNNING_MIB + BODIES_MIB + KEPT_MIB
    row = await memory_row(target, what, lambda: _named(target, body), bound_mib=bound_mib, kept_mib=KEPT_MIB)
    return [row]


async def _named(target: Target, body: bytes) -> int:
    loop, until_s, num_bytes = asyncio.get_running_loop(), time.monotonic() + MOST_S, 0
    key = f"Authorization: Bearer {target.keys[ATTACKER]}\r\n" if target.keys else ""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{key}"

    async def send_and_leave() -> None:
        nonlocal num_bytes
        name = f"X-Request-Id: {secrets.token_hex(8)}\r\nContent-Length: {len(body)}\r\n\r\n"
        with contextlib.suppress(OSError, TimeoutError), socket.socket() as sock:
            sock.setblocking(False)
            async with asyncio.timeout(until_s - time.monotonic()):
                await loop.sock_connect(sock, target.address)
                await loop.sock_sendall(sock, f"{head}{name}".encode() + body)
                num_bytes += len(body)
                await asyncio.sleep(random.random() * 0.3)

    async def client() -> None:
        while num_bytes < SENT_MIB * MIB and time.monotonic() < until_s:
            await send_and_leave()

    await asyncio.gather(*(client() for _ in range(NUM_LEAVING)))
    return num_bytes
