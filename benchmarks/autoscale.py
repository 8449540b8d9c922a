"""The autoscaler under load that comes and goes: `python -m benchmarks.autoscale [--copies 2] [--kill-every 7]`.

A cluster of `tandem up --autoscale` under a load that is low, high and low again. Every answer is greedy and compared
with the one that an idle cluster gave. With --copies 2 a second autoscaler runs beside the cluster's own one; with
--kill-every the one that acts is killed again and again. Aim: workers come and go, 0 failed, 0 different answers, every
order has its reason and is decided again in the same way from the log.
"""

import argparse
import asyncio
import contextlib
import io
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import redis
import uvloop

from benchmarks.cluster import Cluster, collect, request, running_cluster
from cli.autoscaler import ReplayDecisionsSettings
from cli.autoscaler import run as replay
from demo import DEMO_MODEL
from planning.autoscaler.decisions import Look, read_log
from services.cluster.embedded_redis import EmbeddedRedis

NUM_PROMPTS = 24
SCALING = ("--scale-every=1", "--scale-start-up=5", "--scale-settle=8", "--scale-give-up=60")


class Load:
    """Requests at given rates, and what became of them."""

    def __init__(self, stub: Any, arguments: argparse.Namespace) -> None:
        chance = random.Random(arguments.seed)
        self._prompts = [[chance.randrange(10, 2000) for _ in range(64)] for _ in range(NUM_PROMPTS)]
        self._stub = stub
        self._tokens = arguments.new_tokens
        self._expected: dict[int, list[int]] = {}
        self.num_answers = self.num_failed = self.num_different = 0

    async def learn(self) -> None:
        """Has each prompt answered alone."""
        for number in range(NUM_PROMPTS):
            self._expected[number] = await self._ask(number)

    async def send(self, rate_per_s: float, seconds: float) -> None:
        """Sends requests, and waits until all of them are answered."""
        tasks = []
        for number in range(round(rate_per_s * seconds)):
            tasks.append(asyncio.create_task(self._compare(number % NUM_PROMPTS)))
            await asyncio.sleep(1 / rate_per_s)
        await asyncio.gather(*tasks)

    async def _ask(self, number: int) -> list[int]:
        message = request(self._prompts[number], max_tokens=self._tokens, temperature=0.0, ignore_eos=True)
        return (await collect(self._stub, message)).token_ids

    async def _compare(self, number: int) -> None:
        self.num_answers += 1
        try:
            self.num_different += await self._ask(number) != self._expected[number]
        except (grpc.RpcError, AssertionError) as error:
            self.num_failed += 1
            print(f"failed: {error!r:.300}", flush=True)


def sizes(cluster: Cluster) -> tuple[int, int]:
    """Returns the workers that are ready, of each role."""
    ready = [worker["role"] for worker in cluster.get("/cluster")["workers"] if worker["state"] == "ready"]
    return ready.count("prefill"), ready.count("decode")


async def watch(cluster: Cluster, began_s: float) -> None:
    """Prints the number of workers whenever it changes, until it is cancelled."""
    last = None
    while True:
        now = await asyncio.to_thread(sizes, cluster)
        if now != last:
            print(f"{time.monotonic() - began_s:6.1f} s  {now[0]}:{now[1]} workers", flush=True)
        last = now
        await asyncio.sleep(0.25)


async def kill(server: EmbeddedRedis, every_s: float) -> None:
    """Kills the autoscaler that holds the lease, by the process id in its name, until it is cancelled."""
    num_killed = 0
    try:
        with redis.Redis.from_url(server.url) as connection:
            while True:
                await asyncio.sleep(every_s)
                holder = connection.get("tandem:{default}:autoscaler")
                if holder is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(holder.decode().split("/")[1]), signal.SIGKILL)
                        num_killed += 1
    finally:
        print(f"{num_killed} autoscalers killed while they acted", flush=True)


@contextlib.contextmanager
def second_copy(cluster: Cluster, server: EmbeddedRedis, decisions: Path, most: int) -> Iterator[None]:
    """Another autoscaler of the same cluster."""
    command = [sys.executable, "-m", "planning.autoscaler", "--gateways", cluster.http, "--actor", "up"]
    command += [f"--max-workers={most}", "--decisions", str(decisions), "--redis", server.url, *SCALING]
    with decisions.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield
        finally:
            process.terminate()
            process.wait(30)


async def measure(cluster: Cluster, server: EmbeddedRedis, arguments: argparse.Namespace) -> Load:
    """Runs the load once."""
    began_s = time.monotonic()
    async with cluster.inference() as stub:
        load = Load(stub, arguments)
        await load.learn()
        beside = [asyncio.create_task(watch(cluster, began_s))]
        if arguments.kill_every:
            beside.append(asyncio.create_task(kill(server, arguments.kill_every)))
        try:
            for rate, seconds in ((1.0, arguments.rest), (arguments.rate, arguments.busy), (0.5, 1.5 * arguments.rest)):
                print(f"{time.monotonic() - began_s:6.1f} s  {rate:g} requests/s", flush=True)
                await load.send(rate, seconds)
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
    return load


def tell(file: Path) -> bool:
    """Prints the orders of one autoscaler; returns whether its log is decided again as it was."""
    looks = [record for record in read_log(file) if isinstance(record, Look)]
    orders = [look for look in looks if look.done.startswith("ordered")]
    print(f"{file.name}: {len(looks)} looks, {len(orders)} orders")
    for look in orders:
        print(f"  {look.done}: {look.decision.reason}")
    return replay(ReplayDecisionsSettings(log=file), io.StringIO()) == 0


def main() -> None:
    """Runs the load and says whether everything held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=12.0, help="requests per second while it is busy")
    parser.add_argument("--busy", type=float, default=25.0, help="seconds")
    parser.add_argument("--rest", type=float, default=14.0, help="seconds before it, and two thirds of those after it")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--most", type=int, default=5, help="workers of both roles together")
    parser.add_argument("--tpot", type=float, default=0.003, help="seconds per token that the autoscaler keeps")
    parser.add_argument("--copies", type=int, choices=(1, 2), default=1)
    parser.add_argument("--kill-every", type=float, default=0.0, help="seconds; 0: nobody is killed")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    flags = [f"--autoscale=1:{arguments.most}", f"--scale-tpot={arguments.tpot}", "--max-batch=8", "--threads=1"]
    with tempfile.TemporaryDirectory(prefix="tandem-") as name, EmbeddedRedis() as server:
        logs, second = Path(name) / "logs", Path(name) / "second.jsonl"
        flags += ["--redis", server.url, "--log-dir", str(logs), *SCALING]
        with contextlib.ExitStack() as stack:
            cluster = stack.enter_context(running_cluster(*flags, model=DEMO_MODEL))
            if arguments.copies == 2:
                stack.enter_context(second_copy(cluster, server, second, arguments.most))
            load = uvloop.run(measure(cluster, server, arguments))
        files = [logs / "decisions.jsonl", *([second] if arguments.copies == 2 else [])]
        is_same = [tell(file) for file in files]
    print(f"{load.num_answers} answers: {load.num_failed} failed, {load.num_different} different; replayed: {is_same}")
    sys.exit(0 if load.num_failed == load.num_different == 0 and all(is_same) else 1)


if __name__ == "__main__":
    main()
