"""Ten times more requests than the cluster can serve: `python -m benchmarks.overload [--seconds 120] [--json FILE]`.

Three phases on one cluster (2P2D, the demo model), so that every figure is a ratio of two that were taken in one run:

1. peak: as many clients as it takes, each asking again when it has its answer, or when it is told to; the best rate of
   good answers is the limit, since a closed loop never asks for more than it gets;
2. unloaded: interactive requests only, at the rate they have under overload;
3. overload: the same interactive requests, `normal` ones, and as many of `batch` as make it ten times the peak rate,
   whether or not anybody answers. A request that is refused is not sent again.

An answer is good if its first token came within --slo-ttft seconds; one that was batch is good whenever it is complete.
The load generator shares the machine's cores with the cluster: what it costs is part of every phase but the first.
"""

import argparse
import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import uvloop

from benchmarks.cluster import Cluster, running_cluster
from benchmarks.report import Ratio, add_arguments, leave
from demo import DEMO_MODEL
from protos import inference_pb2, inference_pb2_grpc
from services.runtime.interceptor import PUSHBACK_METADATA_KEY

INTERACTIVE_SHARE = 0.15
NORMAL_SHARE = 0.35
"""Shares of the peak rate: both could be served, and batch work fills the rest."""
CLOSED_LOOP_CLIENTS = (16, 32, 48)
NUM_CONNECTIONS = 17
"""A server takes at most 128 streams on each, and as many requests wait in its queue as that has places."""
REFUSALS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)


@dataclass(frozen=True)
class Shape:
    """What a request asks for, in tokens."""

    prompt_tokens: int
    new_tokens: int


@dataclass
class Tally:
    """What became of one class of requests in one phase. Times in seconds."""

    ttfts_s: list[float] = field(default_factory=list)
    refusals_s: list[float] = field(default_factory=list)
    good_at_s: list[float] = field(default_factory=list)
    """When each good answer was complete."""
    num_sent: int = 0
    num_complete: int = 0
    num_good: int = 0
    others: Counter[str] = field(default_factory=Counter)

    def figures(self, seconds: float) -> dict[str, Any]:
        """As numbers for the report."""
        return {
            "sent": self.num_sent,
            "complete": self.num_complete,
            "good_per_s": self.num_good / seconds,
            "refused": len(self.refusals_s),
            "refusal_p50_ms": 1e3 * percentile(self.refusals_s, 0.5),
            "refusal_p99_ms": 1e3 * percentile(self.refusals_s, 0.99),
            "ttft_p50_ms": 1e3 * percentile(self.ttfts_s, 0.5),
            "ttft_p99_ms": 1e3 * percentile(self.ttfts_s, 0.99),
            "others": dict(self.others),
        }


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed; NaN of none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


class Load:
    """Sends requests and keeps the tallies of one phase."""

    def __init__(self, cluster: Cluster, stubs: Sequence[Any], shape: Shape, *, slo_ttft_s: float, seed: int) -> None:
        self._cluster = cluster
        self._stubs = stubs
        self._shape = shape
        self._slo_ttft_s = slo_ttft_s
        self._random = random.Random(seed)
        self._tasks: dict[asyncio.Task[float], str] = {}
        """Requests under way, and their classes."""
        self.tallies: dict[str, Tally] = {}

    async def one(self, service_class: str) -> float:
        """One request, to its answer or refusal. Returns after how many seconds it may be asked again."""
        tally = self.tallies.setdefault(service_class, Tally())
        tally.num_sent += 1
        message = self._message(service_class)
        # Urgent requests have a connection of their own: one that is full of waiting streams takes no more.
        is_urgent = service_class == "interactive"
        stub = self._stubs[0] if is_urgent else self._stubs[1 + tally.num_sent % (NUM_CONNECTIONS - 1)]
        started_s, ttft_s = time.monotonic(), 0.0
        try:
            async for response in stub.Generate(message, timeout=120):
                if response.token_ids and not ttft_s:
                    ttft_s = time.monotonic() - started_s
        except grpc.aio.AioRpcError as error:
            if error.code() in REFUSALS and not ttft_s:
                tally.refusals_s.append(time.monotonic() - started_s)
                return retry_after_s(error)
            tally.others[error.code().name] += 1
            return 0.0
        tally.ttfts_s.append(ttft_s)
        tally.num_complete += 1
        if service_class == "batch" or ttft_s <= self._slo_ttft_s:
            tally.num_good += 1
            tally.good_at_s.append(time.monotonic())
        return 0.0

    def _message(self, service_class: str) -> inference_pb2.GenerateRequest:
        tokens = self._random.choices(range(10, 2000), k=self._shape.prompt_tokens)
        return inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=tokens),
            sampling=inference_pb2.SamplingParams(max_tokens=self._shape.new_tokens, temperature=0.0, ignore_eos=True),
            service_class=service_class,
        )

    async def open_loop(self, rates: dict[str, float], seconds: float) -> None:
        """Poisson arrivals of each class at its rate, whatever happens to them; ends without waiting for answers."""
        end_s = time.monotonic() + seconds
        await asyncio.gather(*(self._arrivals(name, rate, end_s) for name, rate in rates.items() if rate > 0))

    async def closed_loop(self, num_clients: int, service_class: str, seconds: float) -> None:
        """Clients that ask again as soon as they have their answers."""
        end_s = time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < end_s:
                wait_s = await self.one(service_class)
                await asyncio.sleep(wait_s)

        await asyncio.gather(*(client() for _ in range(num_clients)))

    async def rest(self) -> None:
        """Waits for all answers that are still to come."""
        await asyncio.gather(*self._tasks)

    async def leave(self, *classes: str) -> None:
        """Gives up what is still to come, of these classes or of all."""
        tasks = [task for task, service_class in self._tasks.items() if not classes or service_class in classes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def send(self, service_class: str) -> None:
        """Sends one request, and waits for nothing."""
        task = asyncio.create_task(self.one(service_class))
        self._tasks[task] = service_class
        task.add_done_callback(self._tasks.pop)

    async def _arrivals(self, service_class: str, rate_per_s: float, end_s: float) -> None:
        next_s = time.monotonic()
        while True:
            next_s += self._random.expovariate(rate_per_s)
            if next_s >= end_s:
                return
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            self.send(service_class)


def retry_after_s(error: grpc.aio.AioRpcError) -> float:
    """What the server says of when to come again."""
    told = {key: value for key, value in error.trailing_metadata() or () if key == PUSHBACK_METADATA_KEY}
    return int(told.get(PUSHBACK_METADATA_KEY, 0)) / 1000


def resident_bytes(cluster: Cluster) -> int:
    """Memory of the cluster's processes: the one that was started, and all below it."""
    pages = 0
    for pid in descendants(cluster.process.pid):
        try:
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return pages * 4096


def descendants(pid: int) -> list[int]:
    """A process and all below it."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(below for child in children for below in descendants(int(child)))]


async def measure(cluster: Cluster, arguments: argparse.Namespace) -> dict[str, Any]:
    """All phases."""
    shape = Shape(arguments.prompt_tokens, arguments.new_tokens)
    async with contextlib.AsyncExitStack() as stack:
        stubs = []
        for _ in range(NUM_CONNECTIONS):
            channel = grpc.aio.insecure_channel(cluster.grpc, options=[("grpc.use_local_subchannel_pool", 1)])
            stubs.append(inference_pb2_grpc.InferenceStub(await stack.enter_async_context(channel)))

        def load(seed: int) -> Load:
            return Load(cluster, stubs, shape, slo_ttft_s=arguments.slo_ttft, seed=seed)

        await warm_up(load(0))
        peak, peak_rate = await find_peak(load, arguments.peak_seconds)
        interactive_rate = INTERACTIVE_SHARE * peak_rate
        unloaded = load(1)
        await unloaded.open_loop({"interactive": interactive_rate}, arguments.seconds / 2)
        await unloaded.rest()
        memory_before = resident_bytes(cluster)
        overloaded = load(2)
        memory: list[int] = []
        sampler = asyncio.create_task(sample(lambda: memory.append(resident_bytes(cluster))))
        rates = {"interactive": interactive_rate, "normal": NORMAL_SHARE * peak_rate}
        rates["batch"] = arguments.factor * peak_rate - sum(rates.values())
        started_s = time.monotonic()
        await overloaded.open_loop(rates, arguments.seconds)
        elapsed_s = time.monotonic() - started_s
        good = sum(tally.num_good for tally in overloaded.tallies.values())
        sampler.cancel()
        during = {name: tally.figures(elapsed_s) for name, tally in sorted(overloaded.tallies.items())}
        await overloaded.leave()
    return {
        "shape": {"prompt_tokens": shape.prompt_tokens, "new_tokens": shape.new_tokens},
        "peak": peak,
        "peak_good_per_s": peak_rate,
        "unloaded": unloaded.tallies["interactive"].figures(arguments.seconds / 2),
        "overload": during,
        "overload_good_per_s": good / elapsed_s,
        "memory_mib": [round(value / 2**20) for value in (memory_before, max(memory), memory[-1])],
    }


async def warm_up(load: Load) -> None:
    """Kernels compiled, channels open, speeds measured."""
    await load.closed_loop(8, "normal", 5.0)


async def find_peak(load: Callable[[int], Load], seconds: float) -> tuple[dict[str, Any], float]:
    """The best rate of good answers over numbers of clients."""
    rates: dict[str, Any] = {}
    for num_clients in CLOSED_LOOP_CLIENTS:
        phase = load(10 + num_clients)
        started_s = time.monotonic()
        await phase.closed_loop(num_clients, "normal", seconds)
        rates[str(num_clients)] = phase.tallies["normal"].num_good / (time.monotonic() - started_s)
    return rates, max(rates.values())


async def sample(take: Callable[[], None]) -> Awaitable[None]:
    """Takes a sample every second until it is cancelled."""
    while True:
        take()
        await asyncio.sleep(1.0)


def main() -> None:
    """Measure, print, and write the figures as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="length of the overload")
    parser.add_argument("--peak-seconds", type=float, default=15.0, help="length of each closed loop")
    parser.add_argument("--factor", type=float, default=10.0, help="offered load over the peak rate")
    parser.add_argument("--slo-ttft", type=float, default=5.0, help="time to first token of a good answer, in seconds")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prefill", type=int, default=2, help="prefill workers")
    parser.add_argument("--decode", type=int, default=2, help="decode workers")
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    add_arguments(parser)
    arguments = parser.parse_args()
    flags = ("--threads", "1", "--kv-memory", "64MiB")
    with running_cluster(*flags, model=arguments.model, prefill=arguments.prefill, decode=arguments.decode) as cluster:
        figures = uvloop.run(measure(cluster, arguments))
    show(figures)
    before, after = figures["unloaded"]["ttft_p99_ms"], figures["overload"]["interactive"]["ttft_p99_ms"]
    ratios = {
        "good answers over the peak": Ratio(figures["overload_good_per_s"] / figures["peak_good_per_s"], 0.9),
        "interactive TTFT p99 over unloaded": Ratio(after / before, 1.5, lower_is_better=True),
    }
    leave(arguments, "overload", figures, ratios)


def show(figures: dict[str, Any]) -> None:
    """The report."""
    peak, overload = figures["peak_good_per_s"], figures["overload_good_per_s"]
    loops = ", ".join(f"{rate:.1f} with {clients} clients" for clients, rate in figures["peak"].items())
    print(f"peak: {peak:.1f} good answers/s (closed loops: {loops})")
    print(f"overload: {overload:.1f} good answers/s, {overload / peak:.2f} of the peak (aim 0.90, the limit is 1)")
    for name, tally in figures["overload"].items():
        rounded = {key: round(value, 1) if isinstance(value, float) else value for key, value in tally.items()}
        print(f"  {name}: {rounded}")
    refusals = [tally["refusal_p99_ms"] for tally in figures["overload"].values() if tally["refused"]]
    print(f"refusals: p99 {max(refusals, default=float('nan')):.1f} ms (aim 50)")
    before, after = figures["unloaded"]["ttft_p99_ms"], figures["overload"]["interactive"]["ttft_p99_ms"]
    print(f"interactive TTFT p99: {after:.0f} ms, unloaded {before:.0f} ms, ratio {after / before:.2f} (aim 1.5)")
    print(f"memory before, most, last: {figures['memory_mib']} MiB")


if __name__ == "__main__":
    main()
