"""What one long prompt does to the short ones beside it: `python -m benchmarks.long_prompt [--json FILE]`.

A whole 1P1D cluster serves short prompts that arrive at random, at a stated part of the rate that it can take. In turn,
slice by slice, there is or is not a client beside them that sends one long prompt after the other. Printed are the
TTFT percentiles of the short prompts in both, over all slices, and their ratio; the aim is a p99 of at most 1.3 times.
A pair of slices during which strangers used more than --strangers of a core does not count, and is measured again.

Before that the same is asked of the prefill loop alone, with the same model, by a clock that counts the processor time
of its thread: what strangers do to the machine does not show there, and neither does what other processes cost.

The demo model knows shorter contexts than the long prompt. It is given more positions here: what it says there is
worth nothing, and computing it takes as long.
"""

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.cluster import Cluster, collect, request, running_cluster
from benchmarks.load import percentile
from benchmarks.report import Ratio, add_arguments, leave
from demo import DEMO_MODEL
from prefill_worker.engine_loop import prefill_loop
from protos import inference_pb2_grpc
from services.engine.engine import EngineParts, load_engine
from services.engine.steps.sequence import Sampling, Sequence
from worker.engine import PrefillReport

SHORT_TOKENS = (64, 128)
SALT = bytes(32)
NEW_TOKENS = 2
"""Few: the question is how long prompts wait, and everything else shares the same cores."""
CONTEXT_TOKENS = 8192
CALIBRATION_S = 4.0
CALIBRATION_STREAMS = 8
SETTLE_S = 0.5
"""At the beginning of a slice, arrivals that do not count."""
AIM = 1.3


@dataclass
class Slices:
    """What was measured with, or without, the long prompts."""

    ttfts_s: list[float] = field(default_factory=list)
    long_ttfts_s: list[float] = field(default_factory=list)
    p99s_s: list[float] = field(default_factory=list)
    """P99 of the short prompts' first tokens, slice by slice."""

    def extend(self, other: "Slices") -> None:
        """Adds what was measured in another slice."""
        self.ttfts_s += other.ttfts_s
        self.long_ttfts_s += other.long_ttfts_s
        self.p99s_s += other.p99s_s

    def figures(self) -> dict[str, Any]:
        """Percentiles over all slices."""
        ordered = sorted(self.ttfts_s)
        figures: dict[str, Any] = {"num_short": len(ordered)}
        for percent in (50, 90, 99):
            figures[f"ttft_p{percent}_s"] = percentile(ordered, percent)
        if self.long_ttfts_s:
            figures |= {"num_long": len(self.long_ttfts_s), "long_ttft_p50_s": statistics.median(self.long_ttfts_s)}
        return figures


class Strangers:
    """What programs that are not part of this benchmark take of the processors, from here on."""

    def __init__(self) -> None:
        self._begin_s = time.monotonic()
        self._begin_ticks = self._ticks()

    def cores(self) -> float:
        """Cores that they used on average."""
        used = self._ticks() - self._begin_ticks
        return used / os.sysconf("SC_CLK_TCK") / (time.monotonic() - self._begin_s)

    @staticmethod
    def _ticks() -> int:
        # user, nice, system; interrupts are served on anybody's behalf
        busy = sum(int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:4])
        parents, own = {}, {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    parents[int(entry.name)], own[int(entry.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
        return busy - sum(ticks for process, ticks in own.items() if _descends(process, os.getpid(), parents))


def _descends(process: int, from_process: int, parents: dict[int, int]) -> bool:
    while process != from_process and process in parents:
        process = parents[process]
    return process == from_process


def main() -> None:
    """Measure, print, and write the figures as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="pairs of slices that count")
    parser.add_argument("--max-rounds", type=int, default=20, help="pairs of slices at most")
    parser.add_argument("--strangers", type=float, default=0.1, help="cores that other programs may use")
    parser.add_argument("--slice-s", type=float, default=8.0, help="seconds of a slice")
    parser.add_argument("--long-tokens", type=int, default=4000, help="length of the long prompts")
    parser.add_argument("--load", type=float, default=0.4, help="part of the highest rate of short prompts")
    parser.add_argument("--rate", type=float, help="short prompts a second, instead of a part of the highest rate")
    parser.add_argument("--engine-only", action="store_true", help="without a cluster")
    parser.add_argument("--seed", type=int, default=1)
    add_arguments(parser)
    arguments = parser.parse_args()
    with _model() as model:
        figures = {"engine": measure_engine(model, arguments)}
        if not arguments.engine_only:
            with running_cluster("--threads", "1", model=model) as cluster:
                figures["system"] = uvloop.run(measure(cluster, arguments))
    ratios = {f"{name} p99": Ratio(part["p99_ratio"], AIM, lower_is_better=True) for name, part in figures.items()}
    leave(arguments, "long_prompt", figures, ratios)


@contextlib.contextmanager
def _model() -> Iterator[Path]:
    """The demo model with a longer context."""
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        model = shutil.copytree(DEMO_MODEL, Path(folder) / "demo-long")
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT_TOKENS}))
        yield model


class CpuClock:
    """Time as a thread sees it that is never interrupted; idle time is skipped."""

    def __init__(self) -> None:
        self._skipped_s = 0.0

    def monotonic(self) -> float:
        """Seconds."""
        return self._skipped_s + time.thread_time()

    def unix_ns(self) -> int:
        """Nanoseconds, for reports."""
        return int(self.monotonic() * 1e9)

    def skip_to(self, time_s: float) -> None:
        """Nothing happens until then."""
        self._skipped_s += max(0.0, time_s - self.monotonic())


def measure_engine(model: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The prefill loop alone, with and without long prompts, in turn; its load is a part of what it can compute."""
    parts = load_engine(model, threads=1, kv_memory_bytes=1 << 28)
    rng = random.Random(arguments.seed)
    gc.collect()
    gc.freeze()  # what the interpreter looks through after loading a model is not what is measured
    engine = _Engine(parts, rng)
    mean_s = engine.busy_s(arguments.slice_s / 4)
    engine.measured(0.1 / mean_s, arguments.slice_s / 4, arguments.long_tokens)  # it learns how long its steps take
    rate = arguments.load / mean_s
    slices = {False: Slices(), True: Slices()}
    for _ in range(arguments.rounds):
        for is_long in (False, True):
            measured = engine.measured(rate, arguments.slice_s, arguments.long_tokens if is_long else 0)
            slices[is_long].extend(measured)
    without, beside = slices[False].figures(), slices[True].figures()
    ratio = beside["ttft_p99_s"] / without["ttft_p99_s"]
    print(f"prefill loop alone, {rate:.0f} short prompts/s of {1 / mean_s:.0f}/s, by processor time")
    for name, figures in (("without", without), ("beside", beside)):
        print(f"{name:8} " + ", ".join(_shown(key, value) for key, value in figures.items()))
    print(f"p99 beside a prompt of {arguments.long_tokens}: {ratio:.2f} of that without (aim at most {AIM})")
    return {"rate": rate, "without": without, "beside": beside, "p99_ratio": ratio}


class _Engine:
    """The prefill loop and what is sent to it."""

    def __init__(self, parts: EngineParts, rng: random.Random) -> None:
        self._rng = rng
        self._long_tokens = 0
        self._clock = CpuClock()
        self._loop = prefill_loop(parts, chunk_tokens=512, clock=self._clock, on_report=self._on_report)
        self._keys = itertools.count()
        self._begun: dict[Hashable, tuple[float, int]] = {}
        self._measured = Slices()
        self._num_ended = 0

    def busy_s(self, slice_s: float) -> float:
        """Seconds per short prompt when there are always some."""
        begin_s = self._clock.monotonic()
        while self._clock.monotonic() < begin_s + slice_s:
            while len(self._begun) < CALIBRATION_STREAMS:
                self._begin(self._rng.randint(*SHORT_TOKENS), self._clock.monotonic())
            self._loop.step()
        elapsed_s = self._clock.monotonic() - begin_s
        self._end()
        return elapsed_s / self._num_ended

    def measured(self, rate: float, slice_s: float, long_tokens: int) -> Slices:
        """Times to first tokens in a slice."""
        self._measured = measured = Slices()
        self._long_tokens = long_tokens
        begin_s = next_s = self._clock.monotonic()
        if self._long_tokens:
            self._begin(self._long_tokens, begin_s)
        while (now_s := self._clock.monotonic()) < begin_s + slice_s:
            while next_s <= now_s:
                self._begin(self._rng.randint(*SHORT_TOKENS), next_s)
                next_s += self._rng.expovariate(rate)
            if not self._loop.step():
                self._clock.skip_to(next_s)
        self._end()
        measured.p99s_s.append(percentile(sorted(measured.ttfts_s), 99))
        return measured

    def _begin(self, num_tokens: int, arrived_s: float) -> None:
        key = next(self._keys)
        self._begun[key] = (arrived_s, num_tokens)
        token_ids = [self._rng.randrange(5, 1000) for _ in range(num_tokens)]
        sampling = Sampling(max_tokens=NEW_TOKENS, temperature=0.0)
        self._loop.begin(Sequence(key, token_ids, sampling=sampling), salt=SALT)

    def _end(self) -> None:
        for key in self._begun:
            self._loop.release(key)
        self._begun.clear()

    def _on_report(self, report: PrefillReport) -> None:
        for chunk in report.chunks:
            if chunk.is_last:
                arrived_s, num_tokens = self._begun.pop(chunk.key)
                self._loop.release(chunk.key)
                self._num_ended += 1
                is_long = num_tokens == self._long_tokens
                times_s = self._measured.long_ttfts_s if is_long else self._measured.ttfts_s
                times_s.append(self._clock.monotonic() - arrived_s)
                if is_long:
                    self._begin(self._long_tokens, self._clock.monotonic())


async def measure(cluster: Cluster, arguments: argparse.Namespace) -> dict[str, Any]:
    """All slices, in turn."""
    rng = random.Random(arguments.seed)
    slices = {False: Slices(), True: Slices()}
    async with cluster.inference() as stub:
        lone_s = [await _ttft_s(stub, rng, arguments.long_tokens) for _ in range(3)]
        highest = await _highest_rate(stub, rng)
        rate = arguments.rate or arguments.load * highest
        print(f"short prompts: at most {highest:.0f}/s, sent {rate:.0f}/s; a long prompt alone {min(lone_s):.2f} s")
        num_rounds = 0
        while len(slices[True].p99s_s) < arguments.rounds and num_rounds < arguments.max_rounds:
            num_rounds += 1
            strangers = Strangers()
            pair = [(is_long, await _slice(stub, rng, rate, arguments, is_long=is_long)) for is_long in (False, True)]
            cores = strangers.cores()
            print(f"round {num_rounds}: {_p99s(pair)}, strangers used {cores:.2f} cores", flush=True)
            if cores <= arguments.strangers:
                for is_long, measured in pair:
                    slices[is_long].extend(measured)
    if not slices[True].p99s_s:
        raise SystemExit("other programs kept the machine too busy to measure anything")
    without, beside = slices[False].figures(), slices[True].figures()
    for name, figures in (("without", without), ("beside", beside)):
        print(f"{name:8} " + ", ".join(_shown(key, value) for key, value in figures.items()))
    ratio = beside["ttft_p99_s"] / without["ttft_p99_s"]
    by_round = [b / a for a, b in zip(slices[False].p99s_s, slices[True].p99s_s, strict=True)]
    print(f"p99 beside a prompt of {arguments.long_tokens}: {ratio:.2f} of that without (aim at most {AIM})")
    print("by round: " + ", ".join(f"{value:.2f}" for value in by_round))
    return {
        "highest_rate": highest,
        "rate": rate,
        "long_alone_s": min(lone_s),
        "without": without,
        "beside": beside,
        "p50_ratio": beside["ttft_p50_s"] / without["ttft_p50_s"],
        "p99_ratio": ratio,
        "p99_ratio_by_round": by_round,
    }


def _p99s(pair: list[tuple[bool, Slices]]) -> str:
    return ", ".join(f"{'beside' if is_long else 'without'} p99 {m.p99s_s[0] * 1e3:.1f} ms" for is_long, m in pair)


def _shown(key: str, value: float) -> str:
    return f"{key[:-2]} {value * 1e3:.1f} ms" if key.endswith("_s") else f"{key} {value}"


async def _highest_rate(stub: "inference_pb2_grpc.InferenceAsyncStub", rng: random.Random) -> float:
    """Short prompts per second when a few clients ask as fast as they are answered."""
    for time_s in (CALIBRATION_S / 4, CALIBRATION_S):  # the first one only warms up
        begin_s = time.monotonic()

        async def ask(end_s: float) -> int:
            num = 0
            while time.monotonic() < end_s:
                await _ttft_s(stub, rng, rng.randint(*SHORT_TOKENS))
                num += 1
            return num

        nums = await asyncio.gather(*(ask(begin_s + time_s) for _ in range(CALIBRATION_STREAMS)))
        rate = sum(nums) / (time.monotonic() - begin_s)
    return rate


async def _slice(
    stub: "inference_pb2_grpc.InferenceAsyncStub",
    rng: random.Random,
    rate: float,
    arguments: argparse.Namespace,
    *,
    is_long: bool,
) -> Slices:
    """Short prompts as a Poisson process; every one that arrives after SETTLE_S counts, however long it takes."""
    measured = Slices()
    is_over = asyncio.Event()

    async def short(is_counted: bool) -> None:
        ttft_s = await _ttft_s(stub, rng, rng.randint(*SHORT_TOKENS))
        if is_counted:
            measured.ttfts_s.append(ttft_s)

    async def long() -> None:
        while not is_over.is_set():
            measured.long_ttfts_s.append(await _ttft_s(stub, rng, arguments.long_tokens))

    async with asyncio.TaskGroup() as tasks:
        if is_long:
            tasks.create_task(long())
        begin_s = next_s = time.monotonic()
        while next_s < begin_s + arguments.slice_s:
            await asyncio.sleep(next_s - time.monotonic())
            tasks.create_task(short(next_s >= begin_s + SETTLE_S))
            next_s += rng.expovariate(rate)
        is_over.set()
    measured.p99s_s.append(percentile(sorted(measured.ttfts_s), 99))
    return measured


async def _ttft_s(stub: "inference_pb2_grpc.InferenceAsyncStub", rng: random.Random, num_tokens: int) -> float:
    """Time to the first token of a prompt that no one has sent before."""
    token_ids = [rng.randrange(5, 1000) for _ in range(num_tokens)]
    return (await collect(stub, request(token_ids, max_tokens=NEW_TOKENS, ignore_eos=True))).ttft_s


if __name__ == "__main__":
    main()
