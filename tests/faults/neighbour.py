"""Answers of a `tandem up` at its defaults beside a program that computes on every core. Knows no case and no table."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from benchmarks.cluster import Answer, Cluster, collect, request
from benchmarks.neighbour import busy_program

FAIR_FACTOR = 2.0
"""A program with a thread on each core leaves half of each."""
NUM_PROMPTS = 6
NUM_CLIENTS = 2
ANSWER_TIMEOUT_S = 40.0
LOOK_EVERY_S = 1.0
LOSSES = ('"session ended"', '"worker is silent"')
"""What the gateway's log says of a worker that it has lost."""


@dataclass
class Found:
    """What was seen beside the busy program."""

    num_answers: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    """Requests without an answer, by status."""
    different: list[str] = field(default_factory=list)
    """Answers whose tokens are not those of the same request alone."""
    lost_workers: list[str] = field(default_factory=list)
    alone_s: float = 0.0
    """Median time per token of one client before the busy program began, and beside it."""
    beside_s: float = 0.0
    worst_ttft_s: float = 0.0

    @property
    def factor(self) -> float:
        """How many times as long a token takes beside the busy program."""
        return self.beside_s / self.alone_s


def requests(chance: random.Random) -> list[Any]:
    """Seeded requests of several lengths, some of which are handed over."""
    lengths = [8, 40, 64, 200, 500, 900][:NUM_PROMPTS]
    return [
        request([chance.randrange(10, 2000) for _ in range(length)], seed=number, temperature=1.0, max_tokens=200)
        for number, length in enumerate(lengths)
    ]


async def beside_busy_program(
    cluster: Cluster, gateway_log: Path, *, seconds: float, threads_per_core: int = 1, chance: random.Random
) -> Found:
    """Each request alone, then all of them again and again while the other program runs."""
    found, specs = Found(), requests(chance)
    async with cluster.inference() as stub:
        await collect(stub, specs[0], timeout_s=ANSWER_TIMEOUT_S)  # the first of a cluster compiles and connects
        alone = [await collect(stub, spec, timeout_s=ANSWER_TIMEOUT_S) for spec in specs]
        found.alone_s = statistics.median(map(tpot_s, alone))
        begun_bytes = len(await asyncio.to_thread(gateway_log.read_bytes))
        before = _ready(cluster)
        tpots_s: list[float] = []
        with busy_program(threads_per_core * len(os.sched_getaffinity(0))):
            async with _watching(cluster, before, found):
                end_s = time.monotonic() + seconds
                await asyncio.gather(
                    *(_client(stub, n, specs, alone, end_s, found, tpots_s) for n in range(NUM_CLIENTS))
                )
    found.beside_s = statistics.median(tpots_s) if tpots_s else float("inf")
    said = await asyncio.to_thread(gateway_log.read_bytes)
    lines = said[begun_bytes:].decode(errors="replace").splitlines()
    found.lost_workers += [line for line in lines if any(loss in line for loss in LOSSES)]
    return found


def tpot_s(answer: Answer) -> float:
    """Mean time per token after the first."""
    return (answer.arrivals_s[-1][0] - answer.ttft_s) / max(1, len(answer.token_ids) - 1)


async def _client(
    stub: Any,
    number: int,
    specs: Sequence[Any],
    alone: Sequence[Answer],
    end_s: float,
    found: Found,
    tpots_s: list[float],
) -> None:
    turn = number
    while time.monotonic() < end_s:
        index = turn % len(specs)
        turn += 1
        try:
            answer = await collect(stub, specs[index], timeout_s=ANSWER_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            found.failures[f"{error.code().name}: {error.details()}"] += 1
            continue
        found.num_answers += 1
        found.worst_ttft_s = max(found.worst_ttft_s, answer.ttft_s)
        tpots_s.append(tpot_s(answer))
        if (answer.token_ids, answer.finish_reason) != (alone[index].token_ids, alone[index].finish_reason):
            pairs = zip(answer.token_ids, alone[index].token_ids, strict=False)
            at = next((place for place, (one, other) in enumerate(pairs) if one != other), -1)
            found.different.append(f"request {index} at token {at}")


@contextlib.asynccontextmanager
async def _watching(cluster: Cluster, before: dict[str, str], found: Found) -> AsyncIterator[None]:
    """Notes workers that are not in rotation while the block runs."""

    async def watch() -> None:
        while True:
            missing = before.items() - (await asyncio.to_thread(_ready, cluster)).items()
            found.lost_workers += [worker_id for worker_id, _ in missing]
            await asyncio.sleep(LOOK_EVERY_S)

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher


def _ready(cluster: Cluster) -> dict[str, str]:
    workers = cluster.get("/cluster")["workers"]
    return {worker["id"]: worker["incarnation"] for worker in workers if worker["state"] == "ready"}
