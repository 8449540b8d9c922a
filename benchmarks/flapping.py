"""What a worker that stops and continues costs requests: `python -m benchmarks.flapping [--periods 3:3 4:4 5:5]`.

A cluster of 1P2D under a steady load; for each `STOPPED:RUNNING` in seconds, one decode worker is stopped (SIGSTOP) and
continued in turn. A request is slow if its last token comes more than `SLOW_S` later than the median of requests before
the first stop. Aim: at most 5 of 60 requests are slow.
"""

import argparse
import asyncio
import os
import random
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.cluster import Cluster, collect, request, running_cluster
from benchmarks.report import Ratio, add_arguments, leave
from demo import DEMO_MODEL

SLOW_S = 0.5
NUM_BEFORE = 12
"""Requests before the first stop, which tell how long one usually takes."""
MOST_SLOW = 5 / 60
REST_S = 12.0
"""Between two periods: the longest time for which a worker is kept out after all of this."""


async def flap(pid: int, stopped_s: float, running_s: float) -> None:
    """Stops and continues a process until it is cancelled; it runs at the end."""
    try:
        while True:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(stopped_s)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(running_s)
    finally:
        os.kill(pid, signal.SIGCONT)


class Requests:
    """Requests at a steady rate, and how long each took."""

    def __init__(self, stub: Any, arguments: argparse.Namespace) -> None:
        self._stub = stub
        self._arguments = arguments
        self._chance = random.Random(arguments.seed)

    async def send(self, num: int) -> list[float]:
        """Returns the seconds that each of `num` requests took. Raises what a request that failed raised."""
        taken = []
        for _ in range(num):
            taken.append(asyncio.create_task(self._one()))
            await asyncio.sleep(1 / self._arguments.rate)
        return await asyncio.gather(*taken)

    async def _one(self) -> float:
        arguments, began_s = self._arguments, time.monotonic()
        prompt = [self._chance.randrange(10, 2000) for _ in range(arguments.prompt_tokens)]
        message = request(prompt, max_tokens=arguments.new_tokens, temperature=0.0, ignore_eos=True)
        await collect(self._stub, message)
        return time.monotonic() - began_s


async def measure(cluster: Cluster, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Each period on one cluster, in the order given."""
    workers = {worker["id"]: worker["pid"] for worker in cluster.get("/cluster")["workers"]}
    figures = []
    async with cluster.inference() as stub:
        requests = Requests(stub, arguments)
        await requests.send(NUM_BEFORE)  # the first ones measure the workers
        usual_s = statistics.median(await requests.send(NUM_BEFORE))
        for number, (stopped_s, running_s) in enumerate(arguments.periods):
            if number:
                await asyncio.sleep(REST_S)
            flapping = asyncio.create_task(flap(workers[arguments.worker], stopped_s, running_s))
            try:
                taken_s = await requests.send(arguments.requests)
            finally:
                flapping.cancel()
                await asyncio.wait((flapping,))
            num_slow = sum(time_s > usual_s + SLOW_S for time_s in taken_s)
            figure = {
                "stopped_s": stopped_s,
                "running_s": running_s,
                "requests": len(taken_s),
                "slow": num_slow,
                "worst_s": round(max(taken_s), 2),
                "usual_s": round(usual_s, 3),
            }
            print(figure, flush=True)
            figures.append(figure)
    return figures


def period(text: str) -> tuple[float, float]:
    """Returns the seconds of `STOPPED:RUNNING`. Raises ValueError."""
    stopped_s, running_s = map(float, text.split(":"))
    return stopped_s, running_s


def main() -> None:
    """Measure, print, and write the figures as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--periods", type=period, nargs="+", default=[(3.0, 3.0), (4.0, 4.0), (5.0, 5.0)])
    parser.add_argument("--requests", type=int, default=60, help="in each period")
    parser.add_argument("--rate", type=float, default=3.0, help="requests per second")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--worker", default="decode-0")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    add_arguments(parser)
    arguments = parser.parse_args()
    with running_cluster("--threads", "1", model=arguments.model, prefill=1, decode=2) as cluster:
        figures = uvloop.run(measure(cluster, arguments))
    ratios = {}
    for one in figures:
        name = f"slow requests, a worker stopped {one['stopped_s']:g} s and running {one['running_s']:g} s in turn"
        ratios[name] = Ratio(one["slow"] / one["requests"], MOST_SLOW, lower_is_better=True)
    leave(arguments, "flapping", {"periods": figures}, ratios)


if __name__ == "__main__":
    main()
