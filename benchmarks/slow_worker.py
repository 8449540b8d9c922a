"""How long a worker that has become slow still gets work: `python -m benchmarks.slow_worker [--rounds 5]`.

A cluster of 2P2D under a steady load; one worker is made slow by stopping its process for most of every 50 ms, as a
throttled processor or a noisy neighbour would. Measured by the gateway's own count of attempts that each worker took:

- out: from the fault to the last attempt that was not a probe (aim 3 s);
- back: from the recovery until the worker gets its share again (aim 10 s).

The limit of the first is the time in which the worker gives its first late answers.
"""

import argparse
import asyncio
import os
import random
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.cluster import Cluster, collect, request, running_cluster
from benchmarks.report import add_arguments, leave
from demo import DEMO_MODEL

PERIOD_S = 0.05
RUNNING_SHARE = 0.1
SLOW_S = 10.0
RECOVERY_LIMIT_S = 20.0
PROBES_PER_S = 1.0
"""More attempts than this are work."""
SAMPLE_S = 0.1


class Throttle:
    """Lets a process run for a small part of the time."""

    def __init__(self, pid: int, *, running_share: float = RUNNING_SHARE) -> None:
        self._pid = pid
        self._running_share = running_share
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            while True:
                os.kill(self._pid, signal.SIGSTOP)
                await asyncio.sleep(PERIOD_S * (1 - self._running_share))
                os.kill(self._pid, signal.SIGCONT)
                await asyncio.sleep(PERIOD_S * self._running_share)
        finally:
            os.kill(self._pid, signal.SIGCONT)

    async def stop(self) -> None:
        """Lets it run as ever."""
        self._task.cancel()
        await asyncio.wait((self._task,))


def attempts(cluster: Cluster, worker_id: str) -> int:
    """Attempts that a worker has taken."""
    with urllib.request.urlopen(cluster.http + "/metrics", timeout=10) as response:
        for line in response.read().decode().splitlines():
            if line.startswith("tandem_sent_attempts_total{") and f'worker="{worker_id}"' in line:
                return round(float(line.rpartition(" ")[2]))
    return 0


async def follow(cluster: Cluster, worker_id: str, seconds: float) -> list[tuple[float, int]]:
    """(time since now, attempts so far), several times a second."""
    began_s, samples = time.monotonic(), []
    while (elapsed_s := time.monotonic() - began_s) < seconds:
        samples.append((elapsed_s, await asyncio.to_thread(attempts, cluster, worker_id)))
        await asyncio.sleep(SAMPLE_S)
    return samples


def last_work_s(samples: list[tuple[float, int]]) -> float:
    """When more than a probe came for the last time: two attempts or more within a second."""
    last_s = 0.0
    for index, (at_s, count) in enumerate(samples):
        earlier = [before for before_s, before in samples[:index] if at_s - before_s <= 1.0 / PROBES_PER_S]
        if earlier and count - earlier[0] >= 2 and count > samples[index - 1][1]:
            last_s = at_s
    return last_s


def back_s(samples: list[tuple[float, int]], rate_per_s: float) -> float:
    """When it has got half of its usual share for a second, at the beginning of that second."""
    for at_s, count in samples:
        later = [after for after_s, after in samples if at_s <= after_s <= at_s + 1.0]
        if later and later[-1] - count >= max(2.0, 0.5 * rate_per_s):
            return at_s
    return float("inf")


async def measure(cluster: Cluster, worker_id: str, arguments: argparse.Namespace, seed: int) -> dict[str, float]:
    """One fault and recovery of one worker under load."""
    rng = random.Random(seed)
    pid = next(worker["pid"] for worker in cluster.get("/cluster")["workers"] if worker["id"] == worker_id)
    async with cluster.inference() as stub:
        tasks: set[asyncio.Task[Any]] = set()

        async def load() -> None:
            while True:
                prompt = [rng.randrange(10, 2000) for _ in range(arguments.prompt_tokens)]
                message = request(prompt, max_tokens=arguments.new_tokens, temperature=0.0, ignore_eos=True)
                task = asyncio.create_task(collect(stub, message))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                await asyncio.sleep(rng.expovariate(arguments.rate))

        loading = asyncio.create_task(load())
        try:
            before = await follow(cluster, worker_id, 4.0)
            usual_per_s = (before[-1][1] - before[0][1]) / before[-1][0]
            throttle = Throttle(pid)
            try:
                slow = await follow(cluster, worker_id, SLOW_S)
            finally:
                await throttle.stop()
            after = await follow(cluster, worker_id, RECOVERY_LIMIT_S)
        finally:
            loading.cancel()
            await asyncio.wait((loading,))
            results = await asyncio.gather(*tasks, return_exceptions=True)
    failed = [result for result in results if isinstance(result, BaseException)]
    return {
        "usual_per_s": usual_per_s,
        "out_s": last_work_s(slow),
        "back_s": back_s(after, usual_per_s),
        "failed": len(failed),
    }


def main() -> None:
    """Measure, print, and write the figures as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=12.0, help="requests per second")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--workers", nargs="+", default=["decode-1", "prefill-1"])
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    add_arguments(parser)
    arguments = parser.parse_args()
    figures: dict[str, list[dict[str, float]]] = {}
    # Prompts go to prefill workers whatever their length, or there would be nothing to see of these.
    os.environ["TANDEM_LOCAL_PREFILL_TOKENS"] = "0"
    with running_cluster("--threads", "1", model=arguments.model, prefill=2, decode=2) as cluster:
        for worker_id in arguments.workers:
            for number in range(arguments.rounds):
                figure = uvloop.run(measure(cluster, worker_id, arguments, seed=number))
                figures.setdefault(worker_id, []).append(figure)
                words = ", ".join(f"{name} {value:.2f}" for name, value in figure.items())
                print(f"{worker_id}, round {number + 1}: {words} (aim: out 3 s, back 10 s)", flush=True)
    leave(arguments, "slow_worker", figures, {})


if __name__ == "__main__":
    main()
