"""Clusters of real processes of which the bottleneck is known, and what their gateways say: `python -m
benchmarks.bottlenecks [CASE …]`.

- pages: a decode worker with few KV pages;
- prefill: long prompts and short answers; decode: the other way round, and a worker that gets a third of its time;
- gateway: workers that compute nothing, and as many requests as one thread can serve;
- link: a decode worker behind 40 Mbit/s, on machines that `tests.machines` makes, which needs root.

Each is asked by as many clients as fill it, one request after the other. Exit code 1 if anything else than the known
bottleneck is told at the end.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.cluster import running_cluster
from benchmarks.gateway import ANSWER_TOKENS, WHOLE, WHOLE_STEP_MS, await_ready, fake_workers, gateway_process
from benchmarks.load import Endpoint
from benchmarks.report import add_arguments, leave
from benchmarks.slow_worker import Throttle
from demo import DEMO_MODEL
from services.cluster.embedded_redis import EmbeddedRedis

LOOKS = 30
"""Looks at what is told, one a second; the first ones come before anything can be told."""
ENOUGH = 0.8
"""The share of the last third of them that must name the bottleneck."""
MBIT = 40.0
RUNNING_SHARE = 1 / 3
"""The part of its time that the slow decode worker gets."""
EXPECTED = {
    "pages": ("decode", "pages"),
    "prefill": ("prefill", "compute"),
    "decode": ("decode", "compute"),
    "gateway": ("gateway", "compute"),
    "link": ("prefill", "link"),
}

Look = Callable[[], Any]


@contextlib.asynccontextmanager
async def clients(url: str, *, number: int, prompt_tokens: int, new_tokens: int) -> AsyncIterator[None]:
    """Clients that ask one request after the other, each with a prompt of its own."""
    chance = random.Random(1)
    fields = {"temperature": 0, "ignore_eos": True, "stream": True}
    endpoint = Endpoint(
        f"{url}/v1/completions", lambda prompt, tokens: {"prompt": list(prompt), "max_tokens": tokens, **fields}
    )

    async def ask_for_ever() -> None:
        while True:
            timing = await endpoint.ask([chance.randrange(300, 2000) for _ in range(prompt_tokens)], new_tokens)
            if timing.failure:
                await asyncio.sleep(0.5)  # it was told to come later

    tasks = [asyncio.create_task(ask_for_ever()) for _ in range(number)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def follow(look: Look) -> list[Any]:
    """What is told, each second."""
    told = []
    for _ in range(LOOKS):
        time.sleep(1.0)
        told.append(look())
    return told


def looking(url: str) -> Look:
    """Looks at a gateway's /cluster."""

    def look() -> Any:
        with urllib.request.urlopen(f"{url}/cluster", timeout=10) as response:
            found = json.load(response)["bottlenecks"]
        return found[0] if found else None

    return look


async def of_workers(case: str) -> list[Any]:
    """Few pages, or one slow worker."""
    flags = ["--threads", "1", "--kv-pages", "48" if case == "pages" else "2048"]
    load = {"number": 16, "prompt_tokens": 900, "new_tokens": 2} if case == "prefill" else {"number": 24}
    load = {"prompt_tokens": 40, "new_tokens": 120, **load}
    settings = {"TANDEM_LOCAL_PREFILL_TOKENS": "0", "TANDEM_MAX_BATCH": "64" if case == "pages" else "16"}
    with running_cluster(*flags, model=DEMO_MODEL, settings=settings) as cluster:
        workers = cluster.get("/cluster")["workers"]
        pids = [int(worker["pid"]) for worker in workers if worker["role"] == case == "decode"]
        async with clients(cluster.http, **load):
            throttles = [Throttle(pid, running_share=RUNNING_SHARE) for pid in pids]
            try:
                return await asyncio.to_thread(follow, looking(cluster.http))
            finally:
                for throttle in throttles:
                    await throttle.stop()


def of_gateway() -> list[Any]:
    """Answers of one piece, as fast as one thread can serve them."""
    with EmbeddedRedis() as redis, gateway_process(redis.url) as (_, port):
        with fake_workers(redis.url, step_ms=WHOLE_STEP_MS, tokens_per_step=ANSWER_TOKENS):
            await_ready(port)
            command = [sys.executable, "-m", "benchmarks.gateway", "--role", "client", "--port", str(port)]
            command += ["--request", json.dumps(WHOLE)]
            with subprocess.Popen([*command, "--seconds", str(LOOKS + 3)], stdout=subprocess.DEVNULL) as client:
                try:
                    return follow(looking(f"http://127.0.0.1:{port}"))
                finally:
                    client.terminate()


def of_link() -> list[Any]:
    """A slow link."""
    from tests.machines import bed
    from tests.machines.link import Conditions
    from tests.machines.network import Network
    from tests.machines.prices import make_model

    names = bed.machine_names(gateways=1, prefill=1, decode=1)
    flags = {"gateway": ["--local-prefill-tokens=0"]}
    with tempfile.TemporaryDirectory() as folder, Network(names) as network:
        bed.become_clients(network)
        network.set(["prefill-0"], ["decode-0"], Conditions(bytes_per_s=MBIT * 125_000, delay_s=0.001))
        model = make_model(Path(folder), 3)
        with bed.Bed(
            network=network, gateways=1, prefill=1, decode=1, kv_pages=2048, flags=flags, model=model
        ) as cluster:

            async def run() -> list[Any]:
                await cluster.ready()
                url = f"http://{cluster['gateway-0'].http}"
                async with clients(url, number=8, prompt_tokens=400, new_tokens=8):
                    return await asyncio.to_thread(follow, looking(url))

            return asyncio.run(run())


def run_case(case: str) -> Mapping[str, Any]:
    """Runs one case, in a process of its own."""
    if case == "link":
        told = of_link()
    elif case == "gateway":
        told = of_gateway()
    else:
        told = asyncio.run(of_workers(case))
    named = [None if one is None else (one["role"], one["resource"]) for one in told]
    last = named[-LOOKS // 3 :]
    return {
        "expected": EXPECTED[case],
        "share": sum(one == EXPECTED[case] for one in last) / len(last),
        "first_after_s": next((second for second, one in enumerate(named, 1) if one == EXPECTED[case]), None),
        "others": sorted({one for one in named if one not in (None, EXPECTED[case])}),
        "told": told[-1],
    }


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[[], *EXPECTED], default=[])
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    add_arguments(parser)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(run_case(arguments.cases[0])))
        return 0
    figures = {}
    for case in arguments.cases or EXPECTED:
        command = [sys.executable, "-m", "benchmarks.bottlenecks", case, "--one"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ)
        figures[case] = found = json.loads(done.stdout)
        said = "nothing" if found["told"] is None else found["told"]["said"]
        print(
            f"{case:8} named in {found['share']:.0%} of the last looks, first after {found['first_after_s']} s: {said}"
        )
        for one in found["told"]["loads"] if found["told"] else ():
            print(f"{'':8} {one['role']} {one['resource']}: {one['load']:.2f}")
    leave(arguments, "bottlenecks", figures, {})
    return 0 if all(found["share"] >= ENOUGH for found in figures.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
