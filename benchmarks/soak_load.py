"""Generates a light load from many tenants, for `gateway_soak`."""

import asyncio
import itertools
import signal
import sys
from collections import Counter
from typing import Any

import httpx
import uvloop

from services.runtime import process

MAX_AT_ONCE = 200
ROW = '{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "MODEL", "prompt": "a"}}\n'


def key_of(tenant: int) -> str:
    """Returns a tenant's API key."""
    return f"key-of-tenant-{tenant:05d}"


def offer(port: int, *, num_tenants: int, num_models: int, per_s: float) -> None:
    """Sends requests of all tenants in turn until SIGTERM. Then prints the number of calls by kind and status."""
    process.die_with_parent()
    uvloop.run(_offer(port, num_tenants, num_models, per_s))


async def _offer(port: int, num_tenants: int, num_models: int, per_s: float) -> None:
    stop, ends = asyncio.Event(), Counter[str]()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    limits = httpx.Limits(max_connections=MAX_AT_ONCE, max_keepalive_connections=MAX_AT_ONCE)
    running: set[asyncio.Task[None]] = set()
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False, limits=limits
    ) as client:
        for number in itertools.count():
            if stop.is_set():
                break
            if len(running) < MAX_AT_ONCE:
                headers = {"authorization": f"Bearer {key_of(number % num_tenants)}"}
                model = f"bench-{number % num_models}"
                task = asyncio.create_task(_call(client, number, model, headers, ends))
                running.add(task)
                task.add_done_callback(running.discard)
            await asyncio.sleep(1 / per_s)
        await asyncio.wait(running or {asyncio.create_task(asyncio.sleep(0))}, timeout=10)
    sys.stdout.write(f"calls by kind and status: {dict(sorted(ends.items()))}\n")


async def _call(
    client: httpx.AsyncClient, number: int, model: str, headers: dict[str, str], ends: Counter[str]
) -> None:
    kind = ("completion", "stream", "named", "stored", "background", "conversation")[number % 6]
    text = f"request {number} " + "of some length " * (number % 40)
    chat = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 24}
    path, body = "/v1/chat/completions", dict[str, Any](chat)
    if kind == "stream":
        body["stream"] = True
    elif kind == "named":
        headers |= {"idempotency-key": f"call-{number}"}
    elif kind in ("stored", "background", "conversation"):
        path, body = "/v1/responses", {"model": model, "input": text, "max_output_tokens": 24, "store": True}
        body["background"] = kind == "background"
    try:
        if number % 600 == 7:
            kind = "batch"
            status = await _batch(client, model, headers)
        else:
            status = (await client.post(path, json=body, headers=headers)).status_code
    except httpx.HTTPError as error:
        ends[f"{kind} {type(error).__name__}"] += 1
    else:
        ends[f"{kind} {status}"] += 1


async def _batch(client: httpx.AsyncClient, model: str, headers: dict[str, str]) -> int:
    """Uploads a file of one row and creates a batch from it. Returns the HTTP status."""
    content = ROW.replace("MODEL", model).encode()
    made = await client.post(
        "/v1/files", headers=headers, files={"file": ("rows.jsonl", content)}, data={"purpose": "batch"}
    )
    if made.status_code != 200:
        return made.status_code
    order = {"input_file_id": made.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    return (await client.post("/v1/batches", json=order, headers=headers)).status_code
