"""What prompts do to answers that run beside them, and how many users are content: the reason for two phases.

    python -m benchmarks.interference [--json FILE] [--svg FILE]

Two systems on the same cores, asked in turn, point by point: 1P1D with half of the cores each, and one process with all
of them, which computes prompts in chunks together with its steps (`--chunks 512,128` measures it with each size). The
model is the random Llama of `benchmarks.engine`.

Some streams run all the time, one after the other; they are disturbed. Beside them prompts of 1,000 tokens come
at random (a Poisson process with a seed: the same times for all systems), and each is answered with 64 tokens. Printed
are, for each rate, the gaps between tokens of the streams, the times to the first token of the prompts, and goodput:
requests a second that meet the targets, which are the same for all systems. A request meets them if its first token
comes within --ttft-factor times, and 95 % of its gaps within --itl-factor times, of what the better system needs when
nothing else runs. Rates are parts of what one process could compute if it did nothing but prompts.

The time of a point is that in which prompts arrive; what they then need to be answered counts for them, not for the
streams' gaps.
"""

import argparse
import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from benchmarks.cluster import running_cluster
from benchmarks.engine import VOCABULARY
from benchmarks.load import Endpoint, Targets, Timing, ask_at, ours, percentile, poisson
from benchmarks.plot import Chart, svg_file
from benchmarks.random_model import FIRST_TOKEN_ID, make_served_model
from benchmarks.report import Ratio, add_arguments, leave
from cli.cores import this_machine
from planning.simulator.html_report import Curve

PROMPT_TOKENS, NEW_TOKENS = 1000, 64
STREAM_PROMPT_TOKENS, STREAM_TOKENS = 64, 512
LONE_REQUESTS = 4
WARM_UP_S = 3.0
RETRY_S = 1.0
TWO = "1P1D"
DRAIN_TIMEOUT_S = 30.0
"""A request that is not answered this long after the last one was sent has failed."""


@dataclass(frozen=True)
class Point:
    """One system at one rate. Seconds, and requests a second."""

    system: str
    load: float
    rate: float
    num_requests: int
    num_failed: int
    itl_p50_s: float
    itl_p99_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    goodput: float
    stream_tokens_per_s: float


@dataclass(frozen=True)
class Unloaded:
    """One system when there is one request at a time: its first token alone, and its gaps beside the streams."""

    ttft_s: float
    itl_s: float


def main() -> None:
    """Measure, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", default="0.15,0.3,0.45,0.6", help="rates, as parts of what one process can compute")
    parser.add_argument("--seconds", type=float, default=20.0, help="time of each point")
    parser.add_argument("--streams", type=int, default=4, help="streams that run all the time")
    parser.add_argument("--chunks", default="512", help="chunks of the one process, in tokens")
    parser.add_argument("--ttft-factor", type=float, default=5.0, help="target of the first token, see above")
    parser.add_argument("--itl-factor", type=float, default=3.0, help="target of the gaps, see above")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw the sweep into this file")
    add_arguments(parser)
    arguments = parser.parse_args()
    chunks = [int(chunk) for chunk in arguments.chunks.split(",")]
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder, ExitStack() as stack:
        model = make_served_model(Path(folder) / "random-llama", arguments.dtype)
        systems = start_systems(model, chunks, stack)
        unloaded = {name: uvloop.run(measure_unloaded(name, system, arguments)) for name, system in systems.items()}
        targets = targets_from(list(unloaded.values()), arguments.ttft_factor, arguments.itl_factor)
        print(f"targets: first token {targets.ttft_s * 1e3:.0f} ms, gaps {targets.itl_s * 1e3:.1f} ms", flush=True)
        highest = 1 / min(unloaded[name].ttft_s for name in systems if name != TWO)
        points: list[Point] = []
        for load in map(float, arguments.loads.split(",")):
            for name, system in systems.items():
                points.append(uvloop.run(measure(name, system, load, load * highest, targets, arguments)))
                print(_shown(points[-1]), flush=True)
    ratios = compare(points)
    report(points, ratios)
    if arguments.svg is not None:
        arguments.svg.write_text(draw(points))
    figures = {
        "dtype": arguments.dtype,
        "targets": asdict(targets),
        "unloaded": {name: asdict(one) for name, one in unloaded.items()},
        "points": [asdict(point) for point in points],
    }
    leave(arguments, "interference", figures, ratios)


def start_systems(model: Path, chunks: Sequence[int], stack: ExitStack) -> dict[str, Endpoint]:
    """All of them, ready; they end with the stack. A system that is not asked computes nothing."""
    num_cores = this_machine().num_cores
    half, all_cores = ("--threads", str(max(1, num_cores // 2))), ("--threads", str(num_cores))
    systems = {TWO: ours(stack.enter_context(running_cluster(*half, model=model)).http)}
    print(f"{TWO} is ready", flush=True)
    for chunk in chunks:
        name = f"one process, chunks of {chunk}"
        flags = (*all_cores, "--chunk-tokens", str(chunk))
        systems[name] = ours(stack.enter_context(running_cluster(*flags, model=model, prefill=0)).http)
        print(f"{name} is ready", flush=True)
    return systems


async def measure_unloaded(name: str, system: Endpoint, arguments: argparse.Namespace) -> Unloaded:
    """First tokens of lone prompts, gaps of the streams with nothing beside them."""
    rng = random.Random(arguments.seed)
    await ask(system, rng)  # the first one warms up
    lone = [await ask(system, rng) for _ in range(LONE_REQUESTS)]
    async with _Streams(system, arguments.streams, rng) as streams:
        await asyncio.sleep(WARM_UP_S)
        begin_s = time.monotonic()
        await asyncio.sleep(WARM_UP_S)
        itls_s, _ = streams.between(begin_s, time.monotonic())
    failed = next((answer.failure for answer in lone if answer.failure), "" if itls_s else "the streams stand still")
    if failed:
        raise SystemExit(f"{name} fails with nothing beside it: {failed}")
    found = Unloaded(statistics.median(answer.ttft_s for answer in lone), percentile(itls_s, 50))
    print(f"{name}, unloaded: first token {found.ttft_s * 1e3:.0f} ms, gaps {found.itl_s * 1e3:.1f} ms", flush=True)
    return found


def targets_from(unloaded: Sequence[Unloaded], ttft_factor: float, itl_factor: float) -> Targets:
    """Returns one set of targets for all systems, from the better one's unloaded times."""
    return Targets(ttft_factor * min(one.ttft_s for one in unloaded), itl_factor * min(one.itl_s for one in unloaded))


async def measure(
    name: str, system: Endpoint, load: float, rate: float, targets: Targets, arguments: argparse.Namespace
) -> Point:
    """One system at one rate, with the same arrivals and prompts for each system."""
    rng = random.Random(f"{arguments.seed} {load}")
    times_s = poisson(rate, arguments.seconds, rng)
    async with _Streams(system, arguments.streams, rng) as streams:
        await asyncio.sleep(WARM_UP_S)
        begin_s = time.monotonic()
        answers = await ask_at(times_s, lambda: ask(system, rng))
        itls_s, num_tokens = streams.between(begin_s, begin_s + arguments.seconds)
    whole = [answer for answer in answers if not answer.failure]
    ttfts_s = [answer.ttft_s for answer in whole]
    return Point(
        system=name,
        load=load,
        rate=rate,
        num_requests=len(answers),
        num_failed=len(answers) - len(whole),
        itl_p50_s=percentile(itls_s, 50),
        itl_p99_s=percentile(itls_s, 99),
        ttft_p50_s=percentile(ttfts_s, 50),
        ttft_p99_s=percentile(ttfts_s, 99),
        goodput=targets.goodput(answers, arguments.seconds),
        stream_tokens_per_s=num_tokens / arguments.seconds,
    )


async def ask(system: Endpoint, rng: random.Random) -> Timing:
    """One prompt that nobody sent before."""
    return await system.ask(_prompt(rng, PROMPT_TOKENS), NEW_TOKENS, timeout_s=DRAIN_TIMEOUT_S)


def _prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(FIRST_TOKEN_ID, VOCABULARY) for _ in range(num_tokens)]


class _Streams:
    """So many clients that read long answers, one after the other, as long as the scope lasts."""

    def __init__(self, system: Endpoint, number: int, rng: random.Random) -> None:
        self._system = system
        self._number = number
        self._seed = rng.random()
        self._answers: list[Timing] = []

    async def __aenter__(self) -> "_Streams":
        self._tasks = [asyncio.create_task(self._read_on(number)) for number in range(self._number)]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read_on(self, number: int) -> None:
        rng = random.Random(f"{self._seed} {number}")
        while True:
            answer = Timing(0.0)
            self._answers.append(answer)
            await self._system.ask(_prompt(rng, STREAM_PROMPT_TOKENS), STREAM_TOKENS, into=answer)
            if answer.failure:
                await asyncio.sleep(RETRY_S)

    def between(self, begin_s: float, end_s: float) -> tuple[list[float], int]:
        """Gaps that began in this time, and tokens that came in it. A gap that has not ended lasts until now."""
        now_s = time.monotonic()
        itls_s, num_tokens = [], 0
        for answer in self._answers:
            num_tokens += sum(count for time_s, count in answer.arrivals_s if begin_s <= time_s < end_s)
            times_s = [time_s for time_s, _ in answer.arrivals_s]
            if times_s and answer.num_tokens < STREAM_TOKENS:
                times_s.append(now_s)
            itls_s += [later - earlier for earlier, later in itertools.pairwise(times_s) if begin_s <= earlier < end_s]
        return itls_s, num_tokens


def compare(points: Sequence[Point]) -> dict[str, Ratio]:
    """1P1D over the best one process at each rate."""
    ratios = {}
    for load in sorted({point.load for point in points}):
        (two,) = (point for point in points if point.load == load and point.system == TWO)
        ones = [point for point in points if point.load == load and point.system != TWO]
        for field in ("itl_p99_s", "itl_p50_s", "ttft_p50_s", "ttft_p99_s"):
            best = min(getattr(one, field) for one in ones)
            name = f"{field.removesuffix('_s')} at {load:g}, 1P1D over one process"
            ratios[name] = Ratio(getattr(two, field) / best, lower_is_better=True)
        best_goodput = max(one.goodput for one in ones)
        if best_goodput:
            ratios[f"goodput at {load:g}, 1P1D over one process"] = Ratio(two.goodput / best_goodput)
    return ratios


def report(points: Sequence[Point], ratios: Mapping[str, Ratio]) -> None:
    """A table, and in words where each of the two is the better choice."""
    print()
    for name, ratio in ratios.items():
        better = ratio.value < 1 if ratio.lower_is_better else ratio.value > 1
        print(f"{name:48s} {ratio.value:6.2f}  {TWO if better else 'one process'} is better")
    for system in dict.fromkeys(point.system for point in points):
        best = max((point for point in points if point.system == system), key=lambda point: point.goodput)
        print(f"highest goodput of {system}: {best.goodput:.2f} requests/s, at {best.rate:.2f} sent")


def draw(points: Sequence[Point]) -> str:
    """The sweep as one SVG file: gaps, first tokens and goodput over the rate."""
    systems = list(dict.fromkeys(point.system for point in points))

    def curves(field: str, scale: float) -> list[Curve]:
        return [
            Curve(name, [(point.rate, getattr(point, field) * scale) for point in points if point.system == name])
            for name in systems
        ]

    sent = "prompts of 1,000 tokens a second"
    return svg_file(
        [
            Chart("Gaps between tokens, p99", sent, "milliseconds", curves("itl_p99_s", 1e3)),
            Chart("Time to the first token, p99", sent, "milliseconds", curves("ttft_p99_s", 1e3)),
            Chart("Time to the first token, p50", sent, "milliseconds", curves("ttft_p50_s", 1e3)),
            Chart("Goodput", sent, "requests a second", curves("goodput", 1.0)),
        ]
    )


def _shown(point: Point) -> str:
    failed = f", {point.num_failed} failed" if point.num_failed else ""
    return (
        f"{point.rate:5.2f} prompts/s, {point.system:28s} ITL p50 {point.itl_p50_s * 1e3:6.1f} ms, "
        f"p99 {point.itl_p99_s * 1e3:6.1f} ms; TTFT p50 {point.ttft_p50_s * 1e3:5.0f} ms, "
        f"p99 {point.ttft_p99_s * 1e3:5.0f} ms; goodput {point.goodput:.2f}/s; "
        f"streams {point.stream_tokens_per_s:.0f} tok/s{failed}"
    )


if __name__ == "__main__":
    main()
