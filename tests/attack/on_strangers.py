"""Strangers: another user of the machine at the workers' ports, somebody at Redis, and readers of command lines."""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import redis

from services.cluster.embedded_redis import EmbeddedRedis
from services.cluster.keys import Keys
from services.cluster.registry import WorkerRecord, new_incarnation
from services.runtime.clock import SYSTEM_CLOCK
from services.runtime.page_keys import sharers
from tests.attack.base import ADMIN, REPOSITORY, VICTIM, Row, Target, attack, cluster, worker_pids
from tests.attack.stranger import REFUSED

NOBODY = 65534
PROMPT_TOKENS, ANSWER_TOKENS = 320, 16
TRIES = {
    "wrong_answers": "fill another's cache with noise: Admit, Link, pages, seal",
    "prompts_of_others": "Admit under another's salt, to learn what is cached",
    "computing": "Admit without key, tenant or limit",
    "keeping_gateways_out": "64 sessions at once, to take the gateways' places",
    "dialling": "Prefill with an address of the stranger's",
    "replaying": "metadata of the right form, with random proofs",
    "reflection": "list the worker's services",
    "ending_workers": "DrainWorker",
}
FORGED_FOR_S = 6.0
"""For this long a record written by hand is kept in Redis: gateways look at it once a second."""


@attack(5)
async def other_users(target: Target) -> Sequence[Row]:
    """Everything that a user of the machine can do to workers with their addresses alone."""
    if os.getuid() != 0:
        return [Row("calls of another uid", REFUSED, "needs root, to become another user", None)]
    prompt = [random.randrange(10, 1500) for _ in range(PROMPT_TOKENS)]
    before = await _answer(target, prompt, salt=secrets.token_hex(8))
    workers = await _workers(target)
    salt = sharers(tenant=VICTIM if target.keys else "")
    facts = {"uid": NOBODY, "tries": list(TRIES), "prompt": prompt, "salt": salt, **workers}
    happened = await _stranger(facts)
    rows = [
        Row(f"uid {NOBODY}: {what}", REFUSED, happened[name], happened[name] == REFUSED) for name, what in TRIES.items()
    ]
    after = await _answer(target, prompt)
    return [
        *rows,
        Row("the next answer to that prompt", "the same tokens", _difference(before, after), before == after),
    ]


@attack(5, alone=True)
async def somebody_at_redis(_: Target) -> Sequence[Row]:
    """A record of a worker, written by somebody who reaches Redis but has not the configured secret."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis() as server:
        file = Path(folder, "secret")
        file.write_text(secrets.token_hex(32) + "\n")
        file.chmod(0o600)
        async with (
            cluster(f"--redis={server.url}", f"--cluster-secret-file={file}") as own,
            _listener() as (port, taken),
        ):
            real = (await _workers(own))["decode"]
            client = redis.Redis.from_url(server.url)
            until_s = asyncio.get_running_loop().time() + FORGED_FOR_S
            while asyncio.get_running_loop().time() < until_s:
                _forge(client, real, f"127.0.0.1:{port}")
                await _answer(own, [random.randrange(10, 1500) for _ in range(20)])
            client.close()
        num_connections, num_bytes = len(taken), sum(map(len, taken))
    happened = f"{num_connections} connections, {num_bytes} bytes"
    return [Row("a worker's record written by hand into Redis", "no connection", happened, not taken)]


@attack(13, alone=True)
async def readers_of_command_lines(_: Target) -> Sequence[Row]:
    """The password of Redis: in command lines, in logs, in /cluster and in what doctor says."""
    password = "pw" + secrets.token_hex(12)
    with tempfile.TemporaryDirectory() as logs, EmbeddedRedis() as server:
        admin = redis.Redis.from_url(server.url)
        admin.config_set("requirepass", password)
        url = server.url.replace("unix://", f"unix://:{password}@", 1)
        async with cluster(f"--log-dir={logs}", environment={"TANDEM_REDIS": url}) as own:
            pids = [own.up_pid, own.gateway_pid, *worker_pids(own).values()]
            lines = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids)
            async with own.client(ADMIN) as client:
                page = (await client.get("/cluster")).content + (await client.get("/metrics")).content
            doctor = await _doctor(own, url)
        written = b"".join(file.read_bytes() for file in Path(logs).rglob("*") if file.is_file())
        admin.config_set("requirepass", "")  # its owner ends it without one
        admin.close()
    found = {"command lines": lines, "logs": written, "/cluster and /metrics": page, "doctor": doctor}
    return [
        Row(f"the password of Redis in {where}", "not there", "there" if password.encode() in text else "not there",
            password.encode() not in text)
        for where, text in found.items()
    ]  # fmt: skip


async def _answer(target: Target, prompt: list[int], *, salt: str = "") -> list[int]:
    body: dict[str, Any] = {"model": "tandem-demo", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    body |= {"return_token_ids": True, "ignore_eos": True} | ({"cache_salt": salt} if salt else {})
    async with target.client(VICTIM) as client:
        answer = await client.post("/v1/completions", json=body)
        answer.raise_for_status()
    return list(answer.json()["choices"][0]["token_ids"])


async def _workers(target: Target) -> dict[str, dict[str, str]]:
    """Address, incarnation and layout by role: what /proc/net/tcp, a try and the model's files tell anybody."""
    async with target.client(ADMIN) as client:
        listed = (await client.get("/cluster")).json()["workers"]
    return {each["role"]: {key: each[key] for key in ("id", "address", "incarnation", "layout")} for each in listed}


async def _stranger(facts: dict[str, Any]) -> dict[str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.attack.stranger",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=REPOSITORY,
    )  # fmt: skip
    output, _ = await process.communicate(json.dumps(facts).encode() + b"\n")
    told = dict(json.loads(line) for line in output.splitlines())
    return {name: told.get(name, "nothing: the stranger's program ended") for name in facts["tries"]}


def _difference(before: list[int], after: list[int]) -> str:
    return "the same tokens" if before == after else f"{before[:4]} became {after[:4]}"


def _forge(client: redis.Redis, real: dict[str, str], address: str) -> None:
    """Writes a record as a worker's lease does, as well as somebody who has read the code can."""
    keys = Keys("default")
    raw = client.hget(keys.worker(real["id"]), "record")
    if not isinstance(raw, bytes):
        return  # between two renewals
    record = msgspec.structs.replace(
        msgspec.json.decode(raw, type=WorkerRecord),
        id="forged-0", address=address, incarnation=new_incarnation(), started_unix_ns=SYSTEM_CLOCK.unix_ns(),
    )  # fmt: skip
    fields = {"order": record.order, "record": msgspec.json.encode(record), "state": "ready", "proof": b"00" * 32}
    client.hset(keys.worker("forged-0"), mapping=fields)
    client.pexpire(keys.worker("forged-0"), 3000)
    leases, changes, _ = keys.workers
    now_us = SYSTEM_CLOCK.unix_ns() // 1000
    client.zadd(leases, {"forged-0": now_us // 1000 + 3000})
    client.zadd(changes, {"forged-0": now_us})
    client.publish(keys.workers_changed, "forged-0")


@asynccontextmanager
async def _listener() -> AsyncIterator[tuple[int, list[bytes]]]:
    """A port, and what came in over each connection to it."""
    taken: list[bytes] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taken.append(await reader.read(1 << 16))
        writer.close()

    async with await asyncio.start_server(take, "127.0.0.1", 0, family=socket.AF_INET) as server:
        yield server.sockets[0].getsockname()[1], taken


async def _doctor(target: Target, url: str) -> bytes:
    environment = {**os.environ, "TANDEM_REDIS": url, "TANDEM_API_KEY": target.keys.get(ADMIN, "")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cli.main", "doctor", f"--url={target.http}",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=REPOSITORY, env=environment,
    )  # fmt: skip
    output, _ = await process.communicate()
    return output
