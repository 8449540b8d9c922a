"""Attacks with names: what named requests make Redis and the gateway hold, and whose a request's name is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence

import httpx
import redis

from gateway.named.journal import name_of
from services.cluster.embedded_redis import EmbeddedRedis
from tests.attack.base import ATTACKER, VICTIM, Row, Target, attack, cluster

NUM_REQUESTS = 49
FILE_BYTES = 20 * 2**20
MAX_REDIS_GROWTH_MIB = 32
MAX_GATEWAY_GROWTH_MIB = 64
QUIET_S = 30.0
"""Most time until nothing of the attacker runs."""


@attack(7, alone=True)
async def named_requests_fill_redis(_: Target) -> Sequence[Row]:
    """One tenant's named requests with large schemas and many answers, beside another tenant's file."""
    with EmbeddedRedis() as server, redis.Redis.from_url(server.url) as client:
        async with cluster(f"--redis={server.url}") as target:
            async with target.client(VICTIM) as victim:
                content = secrets.token_bytes(FILE_BYTES // 2).hex().encode()
                form = {"purpose": "batch"}
                sent = await victim.post("/v1/files", data=form, files={"file": ("rows.jsonl", content)})
                sent.raise_for_status()
                before, rss_mib = client.info(), target.rss_mib()
                codes = await _flood(target)
                after, grown_mib = client.info(), target.rss_mib() - rss_mib
                is_whole = await _content(victim, sent.json()["id"]) == content
                answered = await victim.post("/v1/completions", json=_short(), headers={"x-request-id": "mine"})
    redis_mib = (after["used_memory"] - before["used_memory"]) / 2**20
    evicted = after["evicted_keys"] - before["evicted_keys"]
    what = f"{NUM_REQUESTS} named requests of 67 KiB with 128 answers each"
    return [
        Row(what, f"Redis grows by less than {MAX_REDIS_GROWTH_MIB} MiB, 0 keys evicted",
            f"{redis_mib:+.1f} MiB, {evicted} evicted; answers {_counted(codes)}",
            redis_mib < MAX_REDIS_GROWTH_MIB and not evicted),
        Row(what, f"the gateway grows by less than {MAX_GATEWAY_GROWTH_MIB} MiB", f"{grown_mib:+.0f} MiB",
            grown_mib < MAX_GATEWAY_GROWTH_MIB),
        Row("another tenant's file of 20 MiB", "complete", "complete" if is_whole else "breaks off", is_whole),
        Row("another tenant's named request", "200", str(answered.status_code), answered.status_code == 200),
    ]  # fmt: skip


@attack(11)
async def names_of_another_tenant(target: Target) -> Sequence[Row]:
    """One name used by several at the same time: running ids, and the ids that are made of idempotency keys."""
    rows = []
    async with target.client(VICTIM) as victim, target.client(ATTACKER) as attacker:
        async with _running(victim, {"x-request-id": "order-1"}):
            code = (
                await attacker.post("/v1/completions", json=_short(), headers={"x-request-id": "order-1"})
            ).status_code
            rows.append(
                Row("the id of another tenant's running request", "200: it tells nothing", str(code), code == 200)
            )
            same = await victim.post("/v1/completions", json=_short(), headers={"x-request-id": "order-1"})
            rows.append(
                Row("the id of one's own running request", "409", str(same.status_code), same.status_code == 409)
            )
        async with _running(attacker, {"x-request-id": "order-77"}):
            answer = await victim.post("/v1/completions", json=_short(), headers={"x-request-id": "order-77"})
            shown = answer.headers.get("x-request-id")
            rows.append(
                Row("an id that another tenant holds", "200, own id in the answer", f"{answer.status_code}, {shown}",
                    answer.status_code == 200 and shown == "order-77")
            )  # fmt: skip
        guessed = "key-" + name_of("key", VICTIM, "invoice-7")
        with contextlib.suppress(httpx.HTTPStatusError):
            async with _running(attacker, {"x-request-id": guessed}):
                pass
        holding = asyncio.create_task(attacker.post("/v1/completions", json=_long(), headers={"x-request-id": guessed}))
        try:
            await asyncio.sleep(0)
            answer = await victim.post("/v1/completions", json=_short(), headers={"idempotency-key": "invoice-7"})
        finally:
            holding.cancel()
            await asyncio.wait((holding,))
        what = "an idempotency key whose derived id another tenant sends as its own"
        rows.append(Row(what, "200", str(answer.status_code), answer.status_code == 200))
    return rows


async def _flood(target: Target) -> list[int]:
    """The attacker's requests one after the other; 0 where the client was told nothing in time and left."""
    described = {f"m{number:03}": {"type": "string", "description": "d" * 30} for number in range(880)}
    schema = {"type": "object", "properties": described}
    body = {
        "model": "tandem-demo",
        "prompt": [f"number {number}" for number in range(8)],
        "n": 16,
        "max_tokens": 1,
        "temperature": 0.9,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
    }
    content = json.dumps(body, separators=(",", ":"))
    codes = []
    async with target.client(ATTACKER) as attacker:
        for number in range(NUM_REQUESTS):
            headers = {"x-request-id": f"flood-{number}", "content-type": "application/json"}
            try:
                answer = await attacker.post("/v1/completions", content=content, headers=headers)
                codes.append(answer.status_code)
            except httpx.TimeoutException:
                codes.append(0)
    return codes


@contextlib.asynccontextmanager
async def _running(client: httpx.AsyncClient, headers: dict[str, str]) -> AsyncIterator[None]:
    """A request that has begun to answer, and is left with the block. Raises HTTPStatusError if it is refused."""
    async with client.stream("POST", "/v1/completions", json=_long(), headers=headers) as answer:
        answer.raise_for_status()
        lines = answer.aiter_lines()
        await anext(lines)
        yield


async def _content(client: httpx.AsyncClient, file_id: str) -> bytes:
    """What is left of a file."""
    started_s = time.monotonic()
    parts = []
    with contextlib.suppress(httpx.HTTPError):
        async with client.stream("GET", f"/v1/files/{file_id}/content") as answer:
            async for part in answer.aiter_bytes():
                parts.append(part)
                if time.monotonic() - started_s > QUIET_S:
                    break
    return b"".join(parts)


def _short() -> dict[str, object]:
    return {"model": "tandem-demo", "prompt": "def f(", "max_tokens": 4, "temperature": 0}


def _long() -> dict[str, object]:
    return {"model": "tandem-demo", "prompt": "def f(", "max_tokens": 1500, "ignore_eos": True, "stream": True}


def _counted(codes: Sequence[int]) -> str:
    return ", ".join(f"{codes.count(code)} x {code}" for code in sorted(set(codes)))
