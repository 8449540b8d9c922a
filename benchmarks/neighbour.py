"""A cluster beside a program that uses every core: `python -m benchmarks.neighbour [--seconds 10] [--json FILE]`.

Three phases on one `tandem up`, so that every figure is a ratio of two that were taken in one run:

1. alone: one answer after another, and how long a token takes;
2. beside: the same while a program in a session of its own computes on every core (`--busy`: threads for each core).
   The kernel owes such a program half of each core, so a token should take about twice as long;
3. full: as many answers at a time as `--clients` says and no other program. How quickly the gateway answers `/health`
   meanwhile is what its place before the workers is worth.

The measuring program takes priority over everything else where it may (root), so that its own waits are not counted.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import uvloop

from benchmarks.cluster import Cluster, collect, request, running_cluster
from benchmarks.report import Ratio, add_arguments, leave

PROMPT_TOKENS = 64
PROBE_INTERVAL_S = 0.02
BUSY = "while True: pass"


@contextlib.contextmanager
def busy_program(num_threads: int) -> Iterator[None]:
    """Processes that compute, all in one session, as those of one program do. They are ended on leaving."""
    script = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))\n"
        "for _ in range(int(sys.argv[1]) - 1):\n"
        "    if os.fork() == 0: break\n"
        f"{BUSY}\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(num_threads)], start_new_session=True)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


async def answers(cluster: Cluster, *, seconds: float, num_tokens: int, num_clients: int = 1) -> dict[str, Any]:
    """Closed loops of answers. Times in milliseconds; a failure is counted by its kind."""
    tpots_s: list[float] = []
    ttfts_s: list[float] = []
    failures: list[str] = []
    end_s = time.monotonic() + seconds

    async def client(number: int) -> None:
        turn = 0
        while time.monotonic() < end_s:
            turn += 1
            prompt = [10 + (7919 * (number * 1009 + turn) + 13 * place) % 1900 for place in range(PROMPT_TOKENS)]
            message = request(prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
            try:
                async with cluster.inference() as stub:
                    answer = await collect(stub, message, timeout_s=60)
            except grpc.aio.AioRpcError as error:
                failures.append(error.code().name)
                continue
            ttfts_s.append(answer.ttft_s)
            tpots_s.append((answer.arrivals_s[-1][0] - answer.ttft_s) / (num_tokens - 1))

    started_s = time.monotonic()
    await asyncio.gather(*(client(number) for number in range(num_clients)))
    elapsed_s = time.monotonic() - started_s
    return {
        "answers": len(tpots_s),
        "tokens_per_s": len(tpots_s) * num_tokens / elapsed_s,
        "tpot_ms": 1e3 * statistics.median(tpots_s) if tpots_s else float("nan"),
        "ttft_ms": 1e3 * statistics.median(ttfts_s) if ttfts_s else float("nan"),
        "worst_ttft_ms": 1e3 * max(ttfts_s, default=float("nan")),
        "failures": failures,
    }


async def probes(cluster: Cluster, stop: asyncio.Event) -> list[float]:
    """Seconds that `/health` takes, again and again until told to stop."""
    taken_s: list[float] = []
    async with httpx.AsyncClient(base_url=cluster.http, trust_env=False, timeout=30) as client:
        while not stop.is_set():
            started_s = time.monotonic()
            (await client.get("/health")).raise_for_status()
            taken_s.append(time.monotonic() - started_s)
            await asyncio.sleep(PROBE_INTERVAL_S)
    return sorted(taken_s)


async def full(cluster: Cluster, *, seconds: float, num_clients: int) -> dict[str, Any]:
    """All clients at once, with probes beside them."""
    stop = asyncio.Event()
    probing = asyncio.create_task(probes(cluster, stop))
    figures = await answers(cluster, seconds=seconds, num_tokens=128, num_clients=num_clients)
    stop.set()
    taken_s = await probing
    for name, place in (("p50", 0.5), ("p99", 0.99)):
        figures[f"health_{name}_ms"] = 1e3 * taken_s[int(place * (len(taken_s) - 1))]
    figures["health_worst_ms"] = 1e3 * taken_s[-1]
    return figures


def incarnations(cluster: Cluster) -> dict[str, str]:
    """Returns the incarnation of each worker in rotation."""
    return {w["id"]: w["incarnation"] for w in cluster.get("/cluster")["workers"] if w["state"] == "ready"}


def go_first() -> None:
    """Gives this process, and its session, priority over all others, where it may."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)
        with open("/proc/self/autogroup", "w") as file:
            file.write("-20")


async def measure(cluster: Cluster, *, seconds: float, num_clients: int, num_busy: int) -> dict[str, Any]:
    """The three phases."""
    await answers(cluster, seconds=1.0, num_tokens=16, num_clients=4)
    alone = await answers(cluster, seconds=seconds, num_tokens=256)
    before = incarnations(cluster)
    with busy_program(num_busy):
        beside = await answers(cluster, seconds=seconds, num_tokens=256)
        beside["workers_lost"] = len(before.items() - incarnations(cluster).items())
    loaded = await full(cluster, seconds=seconds, num_clients=num_clients)
    return {"alone": alone, "beside": beside, "full": loaded}


def main() -> None:
    """Measures, prints, and writes the figures as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each phase")
    parser.add_argument("--clients", type=int, default=32, help="answers at a time in the last phase")
    parser.add_argument("--busy", type=int, default=1, help="threads of the other program for each core")
    add_arguments(parser)
    arguments = parser.parse_args()
    go_first()
    num_busy = arguments.busy * len(os.sched_getaffinity(0))
    with running_cluster() as cluster:
        figures = uvloop.run(
            measure(cluster, seconds=arguments.seconds, num_clients=arguments.clients, num_busy=num_busy)
        )
    show(figures)
    factor = figures["beside"]["tpot_ms"] / figures["alone"]["tpot_ms"]
    ratios = {"time per token beside a busy program": Ratio(factor, 3.0, lower_is_better=True)}
    leave(arguments, "neighbour", figures, ratios)


def show(figures: dict[str, Any]) -> None:
    """The report."""
    for name, phase in figures.items():
        rounded = {key: round(value, 2) if isinstance(value, float) else value for key, value in phase.items()}
        print(f"{name}: {rounded}")


if __name__ == "__main__":
    main()
