"""Half of what a cluster can serve to ten times as much: `python -m benchmarks.loads [--factors 1 5] [--json FILE]`.

On one cluster (the demo model), with real processes:

1. cold: a burst before anything else, so that nothing has been seen to drain;
2. for each factor, the capacity (tokens that are computed in closed loops of batch work, before and after, over those
   of an answer) and an open loop at that many times the capacity, half of it batch work, three tenths of the rest
   interactive. A refused request is not sent again;
3. stall: bursts that are served in time, all decode workers stopped for some seconds under one of them, the same bursts
   again.

An answer is good if its first token came within --slo-ttft seconds, one of batch work whenever it is complete. Shares
are of requests that are not batch work: `refused` of all, `late` of those that were let in. `good_over_capacity` is the
product of two: `useful` is the share of the computed tokens that good answers needed, and `computed_over_capacity` is
how much was computed at all; `spent` has what each program did in a second.

The load generator has a core of its own, since clients are other machines' work; with --together it shares all cores
with the cluster.
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

from benchmarks.account import Account, keep_account, within
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

    async def capacity(self) -> Account:
        """Returns what is computed where more always wait than can be served."""
        seconds = self._arguments.capacity_seconds
        keeping = asyncio.create_task(keep_account(self._cluster, after_s=seconds / 3, for_s=seconds * 2 / 3))
        await self.load().closed_loop(CAPACITY_CLIENTS, "batch", seconds)
        return await keeping

    async def at(self, factor: float) -> dict[str, Any]:
        """Runs the open loop at `factor` times the capacity."""
        before = await self.capacity()
        load, seconds = self.load(), self._arguments.seconds
        rate = factor * self._answers_per_s(before)
        rates = {"batch": BATCH_SHARE * rate, "interactive": INTERACTIVE_SHARE * rate}
        rates["normal"] = rate - sum(rates.values())
        keeping = asyncio.create_task(keep_account(self._cluster, after_s=seconds / 4, for_s=seconds * 3 / 4))
        await load.open_loop(rates, seconds)
        spent = await keeping
        await load.leave("batch")
        await load.rest()
        after = await self.capacity()
        num_good = sum(within(spent, tally.good_at_s) for tally in load.tallies.values())
        capacities = [self._answers_per_s(one) for one in (before, after)]
        capacity, computed_per_s = statistics.fmean(capacities), self._answers_per_s(spent)
        batch = load.tallies["batch"]
        return {
            "factor": factor,
            "capacity_per_s": capacities,
            "good_over_capacity": num_good / spent.seconds / capacity,
            "useful": num_good / spent.seconds / computed_per_s,
            "computed_over_capacity": computed_per_s / capacity,
            **self._shares(load),
            "batch_refused": len(batch.refusals_s),
            "batch_sent": batch.num_sent,
            "others": dict(sum((tally.others for tally in load.tallies.values()), Counter())),
            "spent": spent.figures(),
            "spent_at_capacity": [one.figures() for one in (before, after)],
        }

    def _answers_per_s(self, account: Account) -> float:
        """Returns the answers for which these tokens suffice: what goes through the model is all of it but the last."""
        num_tokens = self._arguments.prompt_tokens + self._arguments.new_tokens - 1
        return account.computed_tokens / account.seconds / num_tokens

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
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in below}
    return [pid for pid, command in commands.items() if b"--role=decode" in command or b"decode_worker" in command]


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
        if not arguments.stall_seconds:
            return figures
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
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--burst", type=int, default=60, help="requests of the cold burst")
    parser.add_argument("--stall-burst", type=int, default=6, help="requests of the bursts around the stall")
    parser.add_argument("--stall-seconds", type=float, default=2.5, help="0: the phase is left out")
    parser.add_argument("--prefill", type=int, default=1, help="prefill workers")
    parser.add_argument("--decode", type=int, default=1, help="decode workers")
    parser.add_argument("--together", action="store_true", help="the load generator shares all cores with the cluster")
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    add_arguments(parser)
    arguments = parser.parse_args()
    flags = ("--threads", "1", "--kv-memory", "64MiB", "--metrics-port", "0")
    cores = sorted(os.sched_getaffinity(0))
    if not arguments.together and len(cores) > 1:
        os.sched_setaffinity(0, cores[1:])  # what the cluster's processes inherit
    with running_cluster(*flags, model=arguments.model, prefill=arguments.prefill, decode=arguments.decode) as cluster:
        if not arguments.together:
            os.sched_setaffinity(0, cores[:1])
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
