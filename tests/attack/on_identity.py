"""Workers that differ under one name, and innocents beside deaths: nobody gets another model's tokens, or a refusal."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import redis.asyncio

from services.cluster.keys import Keys
from tests.attack.base import Row, Target, attack
from tests.faults.client import Answer, Broken, Refused, http_generate, http_json
from tests.faults.harness import CLUSTER, DEMO_MODEL, REPOSITORY, FaultCluster

DRAFT = REPOSITORY / "demo" / "draft"
MODEL_NAME = "mixed"
NUM_ASKED = 24
NUM_BROKEN_OFF = 6
KILL_AFTER_TOKENS = 20
WAIT_S = 60.0
GONE_S = 8.0


@attack(4, alone=True)
async def another_dtype(_: Target) -> list[Row]:
    """A worker in float32 beside one in bfloat16: an answer that loses its worker must not continue there."""
    with _cluster({"decode-1": ["--dtype=float32"]}, flags=["--failover-wait-s=3"]) as mixed:
        await mixed.ready()
        exact = [worker["exact"] for worker in await _workers(mixed)]
        rows = [Row("float32 beside bfloat16: exact in /cluster", "false", f"{exact}", not any(exact))]
        body = _body(3, max_tokens=400, temperature=1.0, ignore_eos=True)
        wanted = {}
        for name, other in itertools.permutations(("decode-0", "decode-1")):
            await _stop(mixed, other)
            wanted[name] = (await _ask(mixed, body)).choice(0).token_ids
            mixed.start(other)
            await mixed.ready()
        num_other = num_whole = 0
        for _ in range(NUM_BROKEN_OFF):
            token_ids, name = await _lose_the_worker(mixed, body)
            num_whole += len(token_ids) == len(wanted[name])
            num_other += token_ids != wanted[name][: len(token_ids)]
        said = f"{num_other} of {NUM_BROKEN_OFF} have other tokens ({num_whole} continued to their end)"
        rows.append(
            Row("kill -9 after 20 tokens; the other dtype is left", "0 continue otherwise", said, num_other == 0)
        )
        return rows


@attack(14, alone=True)
async def other_models_under_the_name(_: Target) -> list[Row]:
    """Workers with other weights, with another vocabulary and with another tokenizer take the served model's name."""
    with tempfile.TemporaryDirectory(prefix="tandem-attack-") as folder:
        strangers = {
            "other weights": DRAFT,
            "a vocabulary of 512": _small_model(Path(folder, "small")),
            "another tokenizer": _other_tokenizer(Path(folder, "tokenizer")),
        }
        return [row for what, path in strangers.items() for row in await _beside(what, path)]


@attack(3, alone=True)
async def a_quarantine_beside_every_field(_: Target) -> list[Row]:
    """Somebody's request is in quarantine: every other kind of request must be served all the same."""
    bodies: list[dict[str, Any]] = [
        {"logit_bias": {"5": 1}},
        {"stop": ["zzz"], "logprobs": 1},
        {"response_format": {"type": "json_object"}},
        {"stop_token_ids": [7], "top_k": 5, "repetition_penalty": 1.1},
    ]
    with FaultCluster(prefill=0, decode=1) as one:
        await one.ready()
        async with redis.asyncio.Redis.from_url(one.redis.url) as client:
            now_ms = int((await client.time())[0]) * 1000
            await client.zadd(Keys(CLUSTER).quarantine, {"a" * 64: now_ms + 600_000})
        await asyncio.sleep(2.0)  # gateways look once a second
        outcomes = [await _outcome(one, {"prompt": "def f(", "max_tokens": 8, **body}) for body in bodies]
    num_served = outcomes.count("200")
    return [
        Row(
            "bias, stop, form, penalties beside one entry",
            "served",
            f"{', '.join(outcomes)}",
            num_served == len(bodies),
        )
    ]


@attack(16, alone=True)
async def two_deaths_by_chance(_: Target) -> list[Row]:
    """Two workers are killed under a request that has no token yet: it must not be taken for the cause."""
    flags = {"decode": ["--chunk-tokens=16"], "gateway": ["--ttft-target-s=0"]}
    with FaultCluster(prefill=0, decode=4, flags=flags) as four:
        await four.ready()
        prompt = list(range(300, 2000))
        asked = asyncio.create_task(_outcome(four, {"prompt": prompt, "max_tokens": 4, "temperature": 0}))
        killed: list[str] = []
        while len(killed) < 2 and not asked.done():
            busy = [worker["id"] for worker in await _workers(four) if worker["running"] + worker["waiting"]]
            for name in set(busy) - set(killed):
                four.kill(name)
                killed.append(name)
            await asyncio.sleep(0.01)
        outcome = await asked
        again = await _outcome(four, {"prompt": prompt, "max_tokens": 4, "temperature": 0})
    said = f"{outcome}, then {again} ({len(killed)} workers killed under it)"
    held = (outcome, again) == ("200", "200") if len(killed) == 2 else None
    return [Row("two workers killed before its first token", "200, and 200 again", said, held)]


def _cluster(
    worker_flags: dict[str, Sequence[str]], *, flags: Sequence[str] = (), decode: int = 2, model: Path = DEMO_MODEL
) -> FaultCluster:
    named = f"--model-name={MODEL_NAME}"
    gateway = ["--local-prefill-tokens=100000", *flags]
    return FaultCluster(
        prefill=0, decode=decode, model=model, worker_flags=worker_flags,
        flags={"gateway": [named, *gateway], "decode": [named]},
    )  # fmt: skip


async def _workers(cluster: FaultCluster) -> list[dict[str, Any]]:
    topology = await cluster.topology()
    return [worker for worker in topology["workers"] if worker["state"] in ("ready", "left_out")]


def _body(seed: int, **more: Any) -> dict[str, Any]:
    return {"prompt": f"def f{seed}(", "seed": seed, "stream": True, "return_token_ids": True, "temperature": 0, **more}


async def _ask(cluster: FaultCluster, body: dict[str, Any]) -> Answer:
    answer = Answer()
    await asyncio.wait_for(http_generate(cluster["gateway-0"].http, body, answer), WAIT_S)
    return answer


async def _outcome(cluster: FaultCluster, body: dict[str, Any]) -> str:
    try:
        await http_json(cluster["gateway-0"].http, "/v1/completions", body, timeout_s=WAIT_S)
    except Refused as error:
        found = json.loads(error.body)["error"]
        return f"{error.status} {found['code']}"
    except (Broken, TimeoutError) as error:
        return repr(error)
    return "200"


async def _lose_the_worker(cluster: FaultCluster, body: dict[str, Any]) -> tuple[list[int], str]:
    """The tokens of an answer whose worker is killed after some tokens, and that worker, which is back then."""
    answer = Answer()
    running = asyncio.create_task(http_generate(cluster["gateway-0"].http, body, answer))
    async with asyncio.timeout(WAIT_S):
        while len(answer.choice(0).token_ids) < KILL_AFTER_TOKENS:  # noqa: ASYNC110 - the client fills it
            await asyncio.sleep(0.005)
        name = ""
        while not name:
            busy = [worker["id"] for worker in await _workers(cluster) if worker["running"]]
            name = busy[0] if busy else ""
        cluster.kill(name, signal.SIGKILL)
        with contextlib.suppress(Refused, Broken):
            await running
    await cluster.replace(name)
    await cluster.ready()
    return answer.choice(0).token_ids, name


async def _stop(cluster: FaultCluster, name: str) -> None:
    cluster.kill(name)
    await cluster.ended(name)
    await _until(cluster, lambda workers: name not in [worker["id"] for worker in workers])


async def _until(cluster: FaultCluster, holds: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            with contextlib.suppress(Broken, Refused):  # the gateway may be starting
                if holds(await _workers(cluster)):
                    return
            await asyncio.sleep(0.05)


async def _beside(what: str, folder: Path) -> list[Row]:
    """Answers while a worker with this folder has joined the one that serves the model."""
    with _cluster({"decode-1": [f"--model={folder}"]}) as mixed:
        await _until(mixed, lambda workers: len(workers) == 2)
        bodies = [_body(seed, max_tokens=12) for seed in range(NUM_ASKED)]
        got = await asyncio.gather(*(_tokens_or_error(mixed, body) for body in bodies))
        states = {worker["id"]: worker for worker in await _workers(mixed)}
        await _stop(mixed, "decode-1")
        wanted = [await _tokens_or_error(mixed, body) for body in bodies]
        end_s = time.monotonic() + GONE_S  # its lease must end first
        gone = False
        while not gone and time.monotonic() < end_s:
            gone = "was left out has gone" in "\n".join(mixed.lines("gateway-0"))
            await asyncio.sleep(0.1)
        num_wrong = sum(one != other for one, other in zip(got, wanted, strict=True))
        logs = ["left out" in "\n".join(mixed.lines("gateway-0")), "no work" in "\n".join(mixed.lines("decode-1"))]
    reason = states["decode-1"].get("left_out", "")
    said = f"{num_wrong} of {NUM_ASKED} wrong or refused"
    told = f"/cluster: {reason or 'nothing'}; in the log of gateway, worker: {logs}; its end: {gone}"
    return [
        Row(f"{what}: answers beside it", "0 from the wrong one", said, num_wrong == 0),
        Row(f"{what}: which places say so", "both logs and /cluster", told, bool(reason) and all(logs) and gone),
    ]


async def _tokens_or_error(cluster: FaultCluster, body: dict[str, Any]) -> list[int] | str:
    try:
        return (await _ask(cluster, body)).choice(0).token_ids
    except (Refused, Broken, TimeoutError) as error:
        return repr(error)


def _small_model(folder: Path) -> Path:
    """A model of 512 tokens with random weights, and the files of the demo model beside them."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(DRAFT, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 512}))
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.shape[0] == config["vocab_size"]:
            tensors[name] = tensor[:512].clone(memory_format=torch.contiguous_format)
    save_file(tensors, folder / "model.safetensors")
    return folder


def _other_tokenizer(folder: Path) -> Path:
    """The demo model with two tokens that have changed places."""
    shutil.copytree(DEMO_MODEL, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, other = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder
