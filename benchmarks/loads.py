"""Half of what a cluster can serve to ten times as much: `python -m benchmarks.loads [--factors 1 5] [--json FILE]`.

On one cluster (the demo model), with real processes:

1. cold: a burst before anything else, so that nothing has been seen to drain;
2. for each factor, the capacity (closed loops of batch work, before and after) and an open loop at that many times the
   capacity, half of it batch work, three tenths of the rest interactive. A refused request is not sent again;
3. stall: bursts that are served in time, all decode workers stopped for some seconds under one of them, the same bursts
   again.

An answer is good if its first token came within --slo-ttft seconds, one of batch work whenever it is complete. Shares
are of requests that are not batch work: `refused` of all, `late` of those that were let in.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import uvloop

from benchmarks.cluster import Cluster, running_cluster
from benchmarks.overload import NUM_CONNECTIONS, Load, Shape, descendants, warm_up
from benchmarks.report import Ratio, add_arguments, leave
from demo import DEMO_MODEL
from protos import inference_pb2_grpc

BATCH_SHARE, INTERACTIVE_SHARE = 0.5, 0.15
CAPACITY_CLIENTS = 32
BURST_GAP_S = 9.0
NUM_BURSTS = 3
"""Before a stall, and again after it."""
URGENT = ("interactive", "normal")


class Phases:
    """The phases of one run on one cluster."""

    def __init__(self, cluster: Cluster, stubs: list[Any], arguments: argparse.Namespace) -> None:
        self._cluster = cluster
        self._stubs = stubs
        self._arguments = arguments
        self._num_loads = 0

    def load(self) -> Load:
        """A load generator with tallies of its own."""
        self._num_loads += 1
        arguments = self._arguments
        shape = Shape(arguments.prompt_tokens, arguments.new_tokens)
        return Load(self._cluster, self._stubs, shape, slo_ttft_s=arguments.slo_ttft, seed=self._num_loads)

    async def cold(self) -> dict[str, Any]:
        """A burst at a gateway that has served nothing."""
        load = self.load()
        return await self._burst(load, self._arguments.burst)

    async def capacity_per_s(self) -> float:
        """Answers per second where more always wait than can be served."""
        load, seconds = self.load(), self._arguments.capacity_seconds
        began_s = time.monotonic()
        await load.closed_loop(CAPACITY_CLIENTS, "batch", seconds)
        ends_s = [at_s for at_s in load.tallies["batch"].good_at_s if began_s + seconds / 3 <= at_s < began_s + seconds]
        return len(ends_s) / (seconds * 2 / 3)

    async def at(self, factor: float) -> dict[str, Any]:
        """Runs the open loop at `factor` times the capacity."""
        before_per_s = await self.capacity_per_s()
        load, seconds = self.load(), self._arguments.seconds
        rate = factor * before_per_s
        rates = {"batch": BATCH_SHARE * rate, "interactive": INTERACTIVE_SHARE * rate}
        rates["normal"] = rate - sum(rates.values())
        began_s = time.monotonic()
        await load.open_loop(rates, seconds)
        end_s = time.monotonic()
        await load.leave("batch")
        await load.rest()
        after_per_s = await self.capacity_per_s()
        from_s = began_s + seconds / 4
        num_good = sum(from_s <= at_s < end_s for tally in load.tallies.values() for at_s in tally.good_at_s)
        capacity = statistics.fmean((before_per_s, after_per_s))
        batch = load.tallies["batch"]
        return {
            "factor": factor,
            "capacity_per_s": (before_per_s, after_per_s),
            "good_over_capacity": num_good / (end_s - from_s) / capacity,
            **self._shares(load),
            "batch_refused": len(batch.refusals_s),
            "batch_sent": batch.num_sent,
            "others": dict(sum((tally.others for tally in load.tallies.values()), Counter())),
        }

    async def around_a_stall(self) -> dict[str, Any]:
        """Bursts before, under and after a stop of all decode workers."""
        bursts = [await self._rested_burst() for _ in range(NUM_BURSTS)]
        pids = decode_pids(self._cluster)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            load = self.load()
            under = asyncio.create_task(self._burst(load, self._arguments.stall_burst))
            await asyncio.sleep(self._arguments.stall_seconds)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        stalled = await under
        await asyncio.sleep(BURST_GAP_S / 3)
        return {
            "before": bursts,
            "under": stalled,
            "after": [await self._rested_burst() for _ in range(NUM_BURSTS)],
        }

    async def _rested_burst(self) -> dict[str, Any]:
        began_s = time.monotonic()
        result = await self._burst(self.load(), self._arguments.stall_burst)
        await asyncio.sleep(max(0.0, began_s + BURST_GAP_S - time.monotonic()))
        return result

    async def _burst(self, load: Load, num: int) -> dict[str, Any]:
        for _ in range(num):
            load.send("normal")
        await load.rest()
        tally = load.tallies["normal"]
        return {
            "sent": num,
            "refused": len(tally.refusals_s),
            "late": sum(ttft_s > self._arguments.slo_ttft for ttft_s in tally.ttfts_s),
            "longest_ttft_s": round(max(tally.ttfts_s, default=0.0), 2),
        }

    def _shares(self, load: Load) -> dict[str, float]:
        urgent = [load.tallies[name] for name in URGENT if name in load.tallies]
        sent = sum(tally.num_sent for tally in urgent)
        ttfts_s = [ttft_s for tally in urgent for ttft_s in tally.ttfts_s]
        late = sum(ttft_s > self._arguments.slo_ttft for ttft_s in ttfts_s)
        refused = sum(len(tally.refusals_s) for tally in urgent)
        return {"refused": refused / max(1, sent), "late": late / max(1, len(ttfts_s))}


def decode_pids(cluster: Cluster) -> list[int]:
    """The processes of decode workers."""
    below = [pid for pid in descendants(cluster.process.pid) if pid != cluster.process.pid]
    return [pid for pid in below if b"decode_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def measure(cluster: Cluster, arguments: argparse.Namespace) -> dict[str, Any]:
    """All phases that were asked for."""
    async with contextlib.AsyncExitStack() as stack:
        stubs = []
        for _ in range(NUM_CONNECTIONS):
            channel = grpc.aio.insecure_channel(cluster.grpc, options=[("grpc.use_local_subchannel_pool", 1)])
            stubs.append(inference_pb2_grpc.InferenceStub(await stack.enter_async_context(channel)))
        phases = Phases(cluster, stubs, arguments)
        figures: dict[str, Any] = {"cold": await phases.cold()}
        show("cold", figures["cold"])
        await warm_up(phases.load())
        figures["factors"] = []
        for factor in arguments.factors:
            figures["factors"].append(await phases.at(factor))
            show(f"{factor:g} x", figures["factors"][-1])
        figures["stall"] = await phases.around_a_stall()
        for name, result in figures["stall"].items():
            show(f"stall, {name}", result)
    return figures


def show(name: str, result: Any) -> None:
    """One line of the report."""
    if isinstance(result, dict):
        result = {key: round(value, 3) if isinstance(value, float) else value for key, value in result.items()}
    print(f"{name}: {result}", flush=True)


def main() -> None:
    """Measure, print, and write the figures as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factors", type=float, nargs="*", default=[0.5, 1.0, 2.0, 5.0, 10.0], metavar="F")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each open loop")
    parser.add_argument("--capacity-seconds", type=float, default=15.0, help="length of each closed loop")
    parser.add_argument("--slo-ttft", type=float, default=5.0, help="time to first token of a good answer, in seconds")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--burst", type=int, default=60, help="requests of the cold burst")
    parser.add_argument("--stall-burst", type=int, default=6, help="requests of the bursts around the stall")
    parser.add_argument("--stall-seconds", type=float, default=2.5)
    parser.add_argument("--prefill", type=int, default=1, help="prefill workers")
    parser.add_argument("--decode", type=int, default=1, help="decode workers")
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    add_arguments(parser)
    arguments = parser.parse_args()
    flags = ("--threads", "1", "--kv-memory", "64MiB")
    with running_cluster(*flags, model=arguments.model, prefill=arguments.prefill, decode=arguments.decode) as cluster:
        figures = uvloop.run(measure(cluster, arguments))
    ratios = {}
    for result in figures["factors"]:
        name = f"at {result['factor']:g} times the capacity"
        aim = 0.9 if result["factor"] >= 2 else None
        ratios[f"good answers over the capacity {name}"] = Ratio(result["good_over_capacity"], aim)
        ratios[f"late of those let in {name}"] = Ratio(result["late"], 0.1, lower_is_better=True)
    leave(arguments, "loads", figures, ratios)


if __name__ == "__main__":
    main()
