"""Every number that the plans of this project name, beside what is reached: `python -m benchmarks.seeds [--write]`.

Each part runs in a process of its own, one after the other, and gives rows: what is measured, what is wanted, what is
reached. What needs a GPU says so where no GPU is found. `--write` puts the table into docs/benchmarks.md;
rows of parts that were not measured stay there.

- queue: 1,000 requests in and out, best of the rounds, the slower of one class and five classes;
- batching: a decode worker's loop with a model that answers at once, so that what is left is its bookkeeping;
- gateway: one gateway on one core, with instant workers; Redis, workers and clients share another core. Requests come
  at a rate, whether others have been answered or not, and a latency counts from the time at which one was due;
- scaling: the simulator, which has the gateway's own policies, under a backlog (`planning/simulator`);
- memory: the page allocator alone; lengths are those of a recorded workload;
- speculation, utilisation: the engine with the demo model, each in turn with what it is compared with.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import uvloop

from benchmarks.report import commit, machine
from benchmarks.seeds_table import DOCUMENT, Row, rows_of, table, with_others, with_table

TRACE = Path(__file__).with_name("traces") / "azure2023_conv_first40min.csv.gz"

MAX_QUEUE_MS, NUM_QUEUED = 1.0, (0, 10_000)
MAX_BATCHING_MS, MIN_EFFICIENCY, BATCH = 5.0, 0.95, 128
MAX_OVERHEAD = 0.01
RATES, RATE_AIM, MAX_P99_MS, RATE_S = (100, 250, 500, 1000), 1000, 100.0, 6.0
CONTIGUOUS_RATIO = 3.0
NUM_WORKERS, NUM_SIMULATED = (1, 2, 4), 1500
NUM_PAGES, NUM_MOVES, PAGE_TOKENS = 100_000, 200_000, 16
UTILISATION_AIM = 0.9


# --- parts ---


def queue() -> list[Row]:
    """Measures a queue that is empty, and one in which 10,000 wait."""
    from benchmarks.queue import NUM_PAIRS, heap_round, queue_round
    from services.scheduling.queue import STRATEGIES

    rows = []
    for num_waiting in NUM_QUEUED:
        heap = heap_round(num_waiting)
        for strategy in STRATEGIES:
            taken_ms = []
            for is_mixed in (False, True):
                run = queue_round(strategy, num_waiting, is_mixed=is_mixed)
                taken_ms.append(sorted(run() * 1e3 for _ in range(60)))
            best, median = max(times[0] for times in taken_ms), max(map(statistics.median, taken_ms))
            what = f"{strategy}: {NUM_PAIRS:,} in and out, {num_waiting:,} waiting"
            reached = f"{best:.2f} ms (median {median:.2f})"
            rows.append(Row("queue", what, f"< {MAX_QUEUE_MS:g} ms", reached, best < MAX_QUEUE_MS))
        heap_ms = min(heap() * 1e3 for _ in range(60))
        rows.append(
            Row("queue", f"for comparison: a bare heap of tuples, {num_waiting:,} waiting", "", f"{heap_ms:.2f} ms")
        )
    return rows


class _InstantRunner:
    """A model that answers at once; keeps when each step was handed to it, and how many of its rows gave a token."""

    replays_in_chunks = True

    def __init__(self) -> None:
        self.handed_s: list[float] = []
        self.num_tokens: list[int] = []

    def prepare(self, plan: Any) -> Any:
        return plan

    def compute(self, plan: Any) -> Any:
        from services.engine.steps.step import SampledToken, StepOutcome, StepResult

        self.handed_s.append(time.perf_counter())
        token = SampledToken(7)
        outcomes: list[StepOutcome] = [token if item.is_sampled else None for item in plan.items]
        self.num_tokens.append(len(outcomes) - outcomes.count(None))
        return StepResult(outcomes)


def batching(num_requests: int = 8 * BATCH) -> list[Row]:
    """Puts 128 requests into an empty batch; then has many wait for places in it."""
    from decode_worker.engine_loop import DecodeLoop
    from decode_worker.pages import DecodePages
    from decode_worker.scheduler import BatchScheduler
    from services.engine.cache.pages import PageAllocator
    from services.engine.steps.sequence import Sampling, Sequence
    from services.runtime.clock import SYSTEM_CLOCK

    def loop_of(runner: _InstantRunner) -> tuple[DecodeLoop, BatchScheduler]:
        scheduler = BatchScheduler(max_batch=BATCH, step_tokens=512, num_pages=NUM_PAGES, page_size=PAGE_TOKENS)
        pages = DecodePages(PageAllocator(NUM_PAGES), page_size=PAGE_TOKENS, clock=SYSTEM_CLOCK, is_exact=True)
        loop = DecodeLoop(
            runner=cast(Any, runner),
            pages=pages,
            scheduler=scheduler,
            clock=SYSTEM_CLOCK,
            on_report=lambda report: None,
        )
        return loop, scheduler

    def sequence(key: int, num_tokens: int) -> Sequence:
        return Sequence(key, [1, 2, 3, key % 1000], sampling=Sampling(max_tokens=num_tokens, temperature=0.0))

    formed_ms, steps_ms = [], []
    for _ in range(20):
        runner = _InstantRunner()
        loop, _ = loop_of(runner)
        new = [sequence(key, 64) for key in range(BATCH)]
        began_s = time.perf_counter()
        for one in new:
            loop.start(one, salt=b"")
        loop.step()
        formed_ms.append((runner.handed_s[0] - began_s) * 1e3)
        for _ in range(20):
            began_s = time.perf_counter()
            loop.step()
            steps_ms.append((time.perf_counter() - began_s) * 1e3)

    rng, runner = random.Random(1), _InstantRunner()
    loop, scheduler = loop_of(runner)
    for key in range(num_requests):
        loop.start(sequence(key, rng.randrange(16, 256)), salt=b"")
    while scheduler.num_waiting or not runner.num_tokens:
        loop.step()
    efficiency = statistics.mean(runner.num_tokens) / BATCH
    aim_ms = f"< {MAX_BATCHING_MS:g} ms"
    formed, each = statistics.median(formed_ms), statistics.median(steps_ms)
    return [
        Row("batching", f"{BATCH} new requests become a batch", aim_ms, f"{formed:.2f} ms", formed < MAX_BATCHING_MS),
        Row("batching", f"a step of {BATCH} beside the model", aim_ms, f"{each:.2f} ms", each < MAX_BATCHING_MS),
        Row(
            "batching",
            f"places of a batch of {BATCH} that give a token in a step while others wait; answers of 16 to 255 tokens",
            f">= {MIN_EFFICIENCY:.0%}",
            f"{efficiency:.1%}",
            efficiency >= MIN_EFFICIENCY,
        ),
    ]


def gateway() -> list[Row]:
    """Measures what a request costs a gateway, the shares of it that the seeds name, and latencies at rates."""
    from benchmarks.gateway import ANSWER_TOKENS, WHOLE, await_ready, fake_workers, gateway_process, measure_load
    from services.cluster.embedded_redis import EmbeddedRedis

    with EmbeddedRedis() as redis, gateway_process(redis.url) as (pid, port):
        with fake_workers(redis.url, step_ms=1.0, tokens_per_step=ANSWER_TOKENS):
            await_ready(port)
            load = measure_load(pid, port, WHOLE, 4.0)
            rows = [
                Row("gateway", "requests/s of one core, 64 clients in closed loops", "", f"{load.per_wall_s:.0f}"),
                *_shares(1 / load.per_cpu_s, ANSWER_TOKENS),
            ]
            for rate in RATES:
                client = subprocess.run(
                    [
                        sys.executable,
                        "-m",
                        "benchmarks.seeds",
                        "--role",
                        "rate",
                        "--port",
                        str(port),
                        "--rate",
                        str(rate),
                    ],
                    check=True,
                    capture_output=True,
                    text=True,
                )
                rows.append(_at_rate(rate, **json.loads(client.stdout)))
    return rows


def _shares(request_s: float, num_tokens: int) -> list[Row]:
    """Returns what routing, health and metrics take of the gateway's processor time of a request."""
    from benchmarks import metrics
    from benchmarks.routing import gateway_s, health_s
    from services.scheduling.routing.policies import POLICY_NAMES

    best_us = {name: min(each) for name, each in metrics.measure({"token": metrics.tokens_here()}, 20).items()}
    found = {
        "balancing: a choice among 4 + 4 workers": asyncio.run(gateway_s(POLICY_NAMES[0], random.Random(1), 4, 4, 200)),
        "health: the signals of 8 workers, judged": health_s(8),
        f"metrics: of a request with {num_tokens} tokens": num_tokens * best_us["token"] / 1e6,
    }
    return [
        Row(
            "gateway",
            f"{name}, of the {request_s * 1e6:.0f} µs of a request",
            f"< {MAX_OVERHEAD:.0%}",
            f"{taken_s / request_s:.2%} ({taken_s * 1e6:.1f} µs)",
            taken_s / request_s < MAX_OVERHEAD,
        )
        for name, taken_s in found.items()
    ]


def _at_rate(rate: int, *, answered: int, refused: int, latencies_ms: list[float]) -> Row:
    from benchmarks.load import percentile

    shown = ", ".join(f"P{share:g} {percentile(latencies_ms, share):.1f}" for share in (50, 90, 99, 99.9))
    is_held = not refused and percentile(latencies_ms, 99) < MAX_P99_MS
    reached = f"{answered / RATE_S:.0f}/s answered, {refused} refused; {shown} ms"
    aim = f"P99 < {MAX_P99_MS:g} ms" if rate == RATE_AIM else ""
    return Row("gateway", f"{rate:,} requests/s", aim, reached, is_held if aim else None)


def scaling(num_requests: int = NUM_SIMULATED) -> list[Row]:
    """Has 1, 2 and 4 workers of each role work off a backlog, in virtual time."""
    from cli.replay import ReplaySettings, cluster_spec
    from planning.simulator.cluster import simulate
    from planning.simulator.profiles import profile
    from planning.simulator.traces import Trace, TraceRequest, read_trace

    lengths = read_trace(TRACE).requests
    speeds, rows, alone_per_s = profile("llama-3.1-8b"), [], 0.0
    for num in NUM_WORKERS:
        some = lengths[: num * num_requests]
        trace = Trace(
            "backlog", "csv", 0, tuple(TraceRequest(0.0, one.num_prompt_tokens, one.num_output_tokens) for one in some)
        )
        settings = ReplaySettings(trace=TRACE, prefill=num, decode=num, max_queued_requests=len(some))
        run = simulate(trace, cluster_spec(settings, trace, speeds=speeds), "hybrid")
        per_s = len(some) / run.end_s
        alone_per_s = alone_per_s or per_s
        tokens = Counter[str]()
        for job in run.jobs:
            tokens[job.decode_worker] += job.num_output_tokens
        most = max(tokens.values()) / statistics.mean(tokens.values())
        reached = f"{per_s:.1f} requests/s, {per_s / alone_per_s:.2f} × one; the busiest has {most:.2f} × its share"
        rows.append(Row("scaling (simulated)", f"{num} prefill and {num} decode workers", "", reached))
    return rows


def memory() -> list[Row]:
    """Fills the pool with requests of recorded lengths, then wears it out."""
    from planning.simulator.traces import read_trace
    from services.engine.cache.pages import PageAllocator
    from services.engine.cache.pool import num_pages_for
    from services.runtime.errors import NoFreePages

    sizes = [one.num_prompt_tokens + one.num_output_tokens for one in read_trace(TRACE).requests]
    allocator, num_held, num_tokens = PageAllocator(NUM_PAGES), 0, 0
    try:
        for size in sizes:
            allocator.allocate(num_pages_for(size, PAGE_TOKENS), state="used")
            num_held, num_tokens = num_held + 1, num_tokens + size
    except NoFreePages:
        pass
    num_contiguous = NUM_PAGES * PAGE_TOKENS // max(sizes)
    held_tokens = (NUM_PAGES - allocator.num_free_pages) * PAGE_TOKENS
    ratio, filled = num_held / num_contiguous, num_tokens / held_tokens
    return [
        Row(
            "memory",
            f"whole answers in memory, over room for the longest ({max(sizes):,} tokens) for each",
            f">= {CONTIGUOUS_RATIO:g} ×",
            f"{ratio:.1f} × ({num_held:,} against {num_contiguous:,}); {filled:.1%} of the pages filled",
            ratio >= CONTIGUOUS_RATIO,
        ),
        compaction(),
    ]


def compaction(num_pages: int = NUM_PAGES, num_moves: int = NUM_MOVES) -> Row:
    """Takes and gives back pages at random, then asks for all that are free at once."""
    from services.engine.cache.pages import PageAllocator

    rng, allocator, held = random.Random(1), PageAllocator(num_pages), list[list[int]]()
    for _ in range(num_moves):
        wanted = rng.randrange(1, 256)
        if wanted <= allocator.num_available_pages and rng.random() < 0.55:
            held.append(allocator.allocate(wanted, state="used"))
        elif held:
            place = rng.randrange(len(held))
            held[place], held[-1] = held[-1], held[place]
            allocator.release(held.pop())
    num_free = allocator.num_available_pages
    began_s = time.perf_counter()
    pages = sorted(allocator.allocate(num_free, state="used"))
    took_ms = (time.perf_counter() - began_s) * 1e3
    num_runs = 1 + sum(after != page + 1 for page, after in itertools.pairwise(pages))
    is_whole = len(set(pages)) == num_free and not allocator.num_available_pages
    what = f"after {num_moves:,} random moves, one request of all free pages"
    reached = f"{len(pages):,} of {num_free:,} pages in {took_ms:.1f} ms, from {num_runs:,} places"
    return Row("memory", what, "all, nothing moved", reached, is_whole)


def speculation() -> list[Row]:
    """Compares decoding with and without guesses, one request at a time."""
    flags = ("--prompts", "10", "--batches", "1", "--temperatures", "0", "--equal", "60", "--modes", "ngram,draft")
    return _ratios("speculation", "speculative", *flags)


def utilisation() -> list[Row]:
    """Measures the share of an engine's own tokens/s that a cluster delivers; on a GPU, what it does of its limits."""
    import torch

    from benchmarks.system import BATCH as STREAMS
    from benchmarks.system import measure_decode
    from demo import DEMO_MODEL

    share = measure_decode(DEMO_MODEL, 4)["ratio"]
    what = f"a cluster's tokens/s with {STREAMS} streams, over the bare engine's"
    row = Row("utilisation", what, f">= {UTILISATION_AIM:g}", f"{share:.2f}", share >= UTILISATION_AIM)
    if torch.cuda.is_available():
        return [row, *_ratios("utilisation", "gpu")]
    return [row, Row("utilisation", "of a GPU's memory and arithmetic, by prefill and decode", "", "needs a GPU")]


PARTS: dict[str, Callable[[], list[Row]]] = {
    part.__name__: part for part in (queue, batching, gateway, scaling, memory, speculation, utilisation)
}


def _ratios(part: str, benchmark: str, *flags: str) -> list[Row]:
    """Runs another benchmark and returns its ratios."""
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        file = Path(folder) / "run.json"
        command = [sys.executable, "-m", f"benchmarks.{benchmark}", "--json", str(file), *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found = json.loads(file.read_text())["ratios"]
    rows = []
    for name, one in found.items():
        sign, aim = "<=" if one["lower_is_better"] else ">=", one["aim"]
        is_met = None if aim is None else (one["value"] <= aim if one["lower_is_better"] else one["value"] >= aim)
        rows.append(Row(part, name, "" if aim is None else f"{sign} {aim:g}", f"{one['value']:.2f}", is_met))
    return rows


# --- requests at a rate ---


class _Client(asyncio.Protocol):
    """A connection that carries one request at a time; `done` is called with whether it was answered."""

    def __init__(self, done: Callable[["_Client", bool], None]) -> None:
        self._done = done
        self._received = b""
        self.transport: Any = None
        self.due_s = 0.0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if end and len(body) >= int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]):
            self._received = b""
            self._done(self, head.startswith(b"HTTP/1.1 200"))


async def ask_at_rate(port: int, request: bytes, rate: float, duration_s: float) -> dict[str, Any]:
    """Sends requests at random times of this rate, each on a connection that is free or new.

    Returns how many were answered and refused, and the latencies in milliseconds from when each was due.
    """
    loop, rng = asyncio.get_running_loop(), random.Random(1)
    idle: list[_Client] = []
    latencies_ms: list[float] = []
    num_refused = num_sent = 0
    is_answered_all = asyncio.Event()

    def done(client: _Client, is_answered: bool) -> None:
        nonlocal num_refused
        idle.append(client)
        if is_answered:
            latencies_ms.append((loop.time() - client.due_s) * 1e3)
        else:
            num_refused += 1
        if loop.time() >= began_s + duration_s and len(latencies_ms) + num_refused == num_sent:
            is_answered_all.set()

    async def send(due_s: float) -> None:
        if not idle:
            _, client = await loop.create_connection(lambda: _Client(done), "127.0.0.1", port)
        else:
            client = idle.pop()
        client.due_s = due_s
        client.transport.write(request)

    began_s = due_s = loop.time()
    async with asyncio.timeout(10 * duration_s), asyncio.TaskGroup() as group:
        while (due_s := due_s + rng.expovariate(rate)) < began_s + duration_s:
            await asyncio.sleep(due_s - loop.time())
            group.create_task(send(due_s))
            num_sent += 1
        await asyncio.sleep(began_s + duration_s - loop.time())
        if len(latencies_ms) + num_refused < num_sent:
            await is_answered_all.wait()
    return {"answered": len(latencies_ms), "refused": num_refused, "latencies_ms": latencies_ms}


def _run(parts: Sequence[str]) -> list[Row]:
    rows: list[Row] = []
    for name in parts:
        print(f"{name} …", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "benchmarks.seeds", "--role", "part", name]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        rows += [Row(**one) for one in json.loads(output.splitlines()[-1])]
    return rows


def main() -> None:
    """Measures the parts and shows the table; the hidden roles are the processes that a run consists of."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)}; all of them where none is named")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    parser.add_argument("--role", choices=("run", "part", "rate"), default="run", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, default=0.0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if arguments.role == "part":
        print(json.dumps([asdict(row) for name in arguments.parts for row in PARTS[name]()]))
        return
    if arguments.role == "rate":
        from benchmarks.gateway import WHOLE, http_request

        request = http_request(json.dumps(WHOLE).encode())
        print(json.dumps(uvloop.run(ask_at_rate(arguments.port, request, arguments.rate, RATE_S))))
        return
    rows = _run(arguments.parts or list(PARTS))
    one = machine()
    where = f"{one['cpu']}, {one['cores']} cores; {datetime.now(UTC).date()}, {commit() or 'no commit'}.\n\n"
    print(where + table(rows))
    if arguments.write:
        document = DOCUMENT.read_text()
        others = f"Only measured now: {', '.join(arguments.parts)}.\n\n" if arguments.parts else ""
        DOCUMENT.write_text(
            with_table(document, where + others + table(with_others(rows, rows_of(document), order=[*PARTS])))
        )


if __name__ == "__main__":
    main()
