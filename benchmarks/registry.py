"""Measures the cost of a gateway that follows the registry and the published pages, by number of workers.

    python -m benchmarks.registry [--workers 1000 4000] [--seconds 20]

It starts a Redis, registers workers with leases that outlast the run, and follows them as a gateway does. The workers
do not change. It prints the CPU time of the Redis process and of the event loop's thread as shares of the elapsed time,
and the number of commands that Redis ran.
"""

import argparse
import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import Any

import redis

from gateway.topology.prefix_view import PrefixView
from services.cluster.embedded_redis import EmbeddedRedis
from services.cluster.prefix_index import PrefixIndex, PrefixPublisher
from services.cluster.redis_store import Store
from services.cluster.registry import WorkerLease, WorkerRecord, new_incarnation, watch_workers
from services.runtime.clock import SYSTEM_CLOCK
from services.runtime.identity import AnswerIdentity

CLUSTER = "bench"
LEASE_S = 3600.0
IDENTITY = AnswerIdentity("tandem/1", "w" * 64, "c" * 64, "bfloat16", "k" * 100, "128256/" + "t" * 64, "llguidance/1")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.registry", description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1000, 4000], help="numbers of workers, one run each")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each measurement")
    arguments = parser.parse_args()
    print(f"{'workers':>8}{'Redis':>9}{'event loop':>12}{'commands/s':>12}{'until read':>12}")
    for num_workers in arguments.workers:
        with EmbeddedRedis() as server:
            register(server.url, num_workers)
            asyncio.run(follow(server, num_workers, arguments.seconds))


def register(url: str, num_workers: int) -> None:
    """Registers workers without published pages, over one connection."""
    with redis.Redis.from_url(url) as client:
        for number in range(num_workers):
            record = worker_record(number)
            lease: Any = WorkerLease(url, cluster=CLUSTER, record=record, ttl_s=LEASE_S)
            publisher: Any = PrefixPublisher(url, cluster=CLUSTER, record=record, ttl_s=LEASE_S)
            lease._client = publisher._client = client
            lease._renew()
            publisher._publish()


def worker_record(number: int) -> WorkerRecord:
    """Returns a worker's record. Odd numbers are prefill workers, and even numbers are decode workers."""
    role: Any = "prefill" if number % 2 else "decode"
    return WorkerRecord(
        id=f"{role}-{number}",
        role=role,
        pid=number,
        host=f"machine-{number // 8}.cluster.example",
        address=f"10.0.{number // 250}.{number % 250}:50051",
        incarnation=new_incarnation(),
        started_unix_ns=SYSTEM_CLOCK.unix_ns(),
        state="ready",
        model="bench",
        exact=True,
        identity=IDENTITY.text,
        page_size=16,
        layout_fingerprint="f" * 64,
        max_sequence_tokens=131_072,
        pages_total=10_000,
        pages_free=10_000,
    )


async def follow(server: EmbeddedRedis, num_workers: int, seconds: float) -> None:
    """Follows the workers until all are known. Then measures for `seconds`."""
    store, pages = Store(server.url, cluster=CLUSTER, timeout_s=5.0), Store(server.url, cluster=CLUSTER, timeout_s=5.0)
    view, known = PrefixView(PrefixIndex(pages)), asyncio.Event()
    began_s = time.perf_counter()
    watching = asyncio.create_task(_watch(store, num_workers, known))
    view.start()
    await known.wait()
    read_s = time.perf_counter() - began_s
    while view.is_stale or len(view.worker_ids) < num_workers:  # noqa: ASYNC110 - the view has no event to wait for
        await asyncio.sleep(0.1)
    before = _figures(server)
    await asyncio.sleep(seconds)
    elapsed_s, redis_s, loop_s, commands = (
        after - earlier for after, earlier in zip(_figures(server), before, strict=True)
    )
    print(
        f"{num_workers:>8}{redis_s / elapsed_s:>9.2%}{loop_s / elapsed_s:>12.2%}{commands / elapsed_s:>12,.0f}"
        f"{read_s:>10.2f} s",
        flush=True,
    )
    watching.cancel()
    await asyncio.wait((watching,))
    await view.close()
    for opened in (store, pages):
        await opened.close()


async def _watch(store: Store, num_workers: int, known: asyncio.Event) -> None:
    async with contextlib.aclosing(watch_workers(store)) as memberships:
        async for membership in memberships:
            if len(membership.workers) == num_workers:
                known.set()


def _figures(server: EmbeddedRedis) -> tuple[float, float, float, float]:
    """Returns the time, the CPU times of Redis and of this thread, and the number of commands, including scripts'."""
    fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
    redis_s = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    with redis.Redis.from_url(server.url) as client:
        commands = sum(stats["calls"] for stats in client.info("commandstats").values())
    return time.perf_counter(), redis_s, time.thread_time(), commands


if __name__ == "__main__":
    main()
