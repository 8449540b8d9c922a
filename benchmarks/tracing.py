"""What traces cost: tokens/s of whole clusters without and with them, and the CPU time of a request's spans.

`python -m benchmarks.tracing [--rounds 6] [--seconds 4] [--json FILE]`. Two clusters stand side by side, one without
traces and one that traces what its client asks it to, and one at a time gets the same load of short streams, where
spans per token are many. Each round asks all in turn, in another order; the ratios are of the same round. That of
traced requests is to those of the same cluster that are not: two clusters that differ in nothing differ by percents.
Tokens are given per second of wall time, and per second of CPU time of all processes of their cluster: on a busy
machine the second is the one to trust. The collector is a process that reads nothing of what it gets.

The CPU time of spans is that of one thread: of the numbers that a request writes down, of the spans that are made of
them at its end and queued for the SDK of OpenTelemetry, and of the message that the SDK's thread encodes.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import grpc
import uvloop
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from benchmarks import gateway
from benchmarks.cluster import Cluster, request, running_cluster
from demo import DEMO_MODEL
from gateway.observability.phases import AttemptFacts
from gateway.observability.tracing import RequestSpans, Tracing
from gateway.topology.events import HandedOff, PrefillStarted
from services.cluster.embedded_redis import EmbeddedRedis
from services.runtime import otlp, telemetry
from services.runtime.clock import SYSTEM_CLOCK
from services.runtime.telemetry import Span, TraceContext
from services.scheduling.disaggregation import DisaggregationSettings
from services.scheduling.routing.price import RoutingSettings
from services.scheduling.routing.route import Route
from services.scheduling.routing.router import Router
from services.scheduling.routing.views import RouteRequest, WorkerView

LIMIT = 0.97
"""Least ratio of tokens/s with all requests traced to those without traces."""
ARMS = {"off": "off", "not asked for": "off", "all": "not asked for"}
"""What is measured, and what its ratio is to."""
NUM_STREAMS = 16
"""At a time."""
PROMPT_TOKENS, NEW_TOKENS = 48, 16
NUM_REQUESTS = 2000
"""For the CPU time of spans."""
CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure, print, and write the figures as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="checkpoint folder (default: the demo model)")
    parser.add_argument("--rounds", type=int, default=6, help="times that each gets the load")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help="tokens of each answer")
    parser.add_argument("--seconds", type=float, default=4.0, help="time of each load")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--collector", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.collector:
        serve_collector()
        return
    figures: dict[str, Any] = {"spans_us": measure_spans()}
    figures["gateway"] = measure_gateways(arguments.rounds, arguments.seconds)
    figures["tokens"] = measure_tokens(arguments.model, arguments.rounds, arguments.seconds, arguments.new_tokens)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


# --- gateways with instant workers ------------------------------------------------------------------------------------


def measure_gateways(rounds: int, seconds: float) -> dict[str, Any]:
    """CPU time and throughput of saturated gateways by their share of traced requests, as ratios to one without."""
    loads: dict[str, list[gateway.Load]] = {}
    with contextlib.ExitStack() as stack:
        redis, otlp = stack.enter_context(EmbeddedRedis()), stack.enter_context(collector())
        ports = {"off": stack.enter_context(gateway.gateway_process(redis.url))}
        for share in ("0", "0.1", "1"):
            flags = ("--otlp", otlp, "--trace-sample", share)
            ports[share] = stack.enter_context(gateway.gateway_process(redis.url, *flags))
        stack.enter_context(gateway.fake_workers(redis.url, step_ms=1.0, tokens_per_step=gateway.ANSWER_TOKENS))
        for _, port in ports.values():
            gateway.await_ready(port)
        for _ in range(rounds):
            for share in random.sample(list(ports), len(ports)):
                loads.setdefault(share, []).append(gateway.measure_load(*ports[share], gateway.WHOLE, seconds))
    figures: dict[str, Any] = {}
    for share in ports:
        pairs = list(zip(loads[share], loads["off"], strict=True))
        figures[share] = {
            "cpu_us": statistics.median(1e6 / load.per_cpu_s for load in loads[share]),
            "cpu_ratio": statistics.median(off.per_cpu_s / load.per_cpu_s for load, off in pairs),
            "requests_ratio": statistics.median(load.per_wall_s / off.per_wall_s for load, off in pairs),
        }
        print(
            "gateway, traced {0:>3}: {cpu_us:5.0f} us of CPU a request, {cpu_ratio:.2f} of 'off'; "
            "{requests_ratio:.2f} of its requests/s".format(share, **figures[share])
        )
    return figures


# --- whole clusters ---------------------------------------------------------------------------------------------------


def measure_tokens(model: Path, rounds: int, seconds: float, num_new: int) -> dict[str, Any]:
    """Tokens/s of each arm, and the ratios to the one without traces."""
    walls: dict[str, list[float]] = {arm: [] for arm in ARMS}
    cpus: dict[str, list[float]] = {arm: [] for arm in ARMS}
    os.environ["TANDEM_TTFT_TARGET_S"] = "0"  # nothing is refused, however slow the machine is
    with contextlib.ExitStack() as stack:
        otlp = ("--otlp", stack.enter_context(collector()))
        off = stack.enter_context(running_cluster(model=model))
        on = stack.enter_context(running_cluster("--trace-sample", "0", *otlp, model=model))
        clusters = {"off": off, "not asked for": on, "all": on}
        order = list(ARMS)
        for number in range(rounds + 1):
            random.shuffle(order)
            for arm in order:
                per_wall_s, per_cpu_s = uvloop.run(token_rate(clusters[arm], seconds, num_new, is_traced=arm == "all"))
                if number:  # the first round only warms up
                    walls[arm].append(per_wall_s)
                    cpus[arm].append(per_cpu_s)
        exported, dropped = exported_and_dropped(on)
    figures: dict[str, Any] = {}
    print(f"{NUM_STREAMS} streams at a time, {PROMPT_TOKENS} prompt tokens, {num_new} new ones; {rounds} rounds")
    for arm, base in ARMS.items():
        wall = statistics.median(a / b for a, b in zip(walls[arm], walls[base], strict=True))
        cpu = statistics.median(a / b for a, b in zip(cpus[arm], cpus[base], strict=True))
        figures[arm] = {
            "tok_s": statistics.median(walls[arm]),
            "tok_cpu_s": statistics.median(cpus[arm]),
            "ratio": wall,
            "cpu_ratio": cpu,
        }
        print(
            f"traces {arm:13}: {figures[arm]['tok_s']:7.0f} tok/s, {wall:.3f} of {base!r}; of CPU time "
            f"{figures[arm]['tok_cpu_s']:7.0f} tok/s, {cpu:.3f}" + (f" (limit {LIMIT})" if arm == "all" else "")
        )
    figures["gateway_spans"] = {"exported": exported, "dropped": dropped}
    print(f"the gateway's spans: {exported:.0f} exported, {dropped:.0f} dropped")
    return figures


async def token_rate(cluster: Cluster, seconds: float, num_new: int, *, is_traced: bool) -> tuple[float, float]:
    """Tokens per second of wall time and of the cluster's CPU time."""
    began_s, began_cpu_s, num_tokens = time.monotonic(), cpu_s(cluster.process.pid), 0

    async def ask(number: int) -> None:
        nonlocal num_tokens
        while time.monotonic() - began_s < seconds:
            prompt = [random.randrange(5, 250) for _ in range(PROMPT_TOKENS)]  # nothing of it is cached
            message = request(prompt, max_tokens=num_new, ignore_eos=True, seed=number)
            # A client's own sampled trace is traced, whatever the gateway's share.
            trace = f"00-{random.getrandbits(128):032x}-{random.getrandbits(64):016x}-01"
            metadata = (("traceparent", trace),) if is_traced else ()
            async for response in stub.Generate(message, timeout=60, metadata=metadata):
                num_tokens += len(response.token_ids)

    async with cluster.inference() as stub:
        await asyncio.gather(*map(ask, range(NUM_STREAMS)))
    took_s = time.monotonic() - began_s
    return num_tokens / took_s, num_tokens / max(1e-9, cpu_s(cluster.process.pid) - began_cpu_s)


def cpu_s(parent: int) -> float:
    """CPU time so far of a process and its children (proc(5), stat)."""
    ticks = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # a process that has just ended
            fields = file.read_text().rpartition(")")[2].split()
            if parent in (int(fields[1]), int(file.parent.name)):
                ticks += int(fields[11]) + int(fields[12])
    return ticks / CLOCK_TICKS_PER_S


def exported_and_dropped(cluster: Cluster) -> tuple[float, float]:
    """Spans of a cluster's gateway."""
    with urllib.request.urlopen(cluster.http + "/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line.startswith("tandem_spans_"))
    return float(values["tandem_spans_exported_total"]), float(values["tandem_spans_dropped_total"])


@contextlib.contextmanager
def collector() -> Iterator[str]:
    """A collector in a process of its own; its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.tracing", "--collector"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        with process.stdout as stdout:
            yield stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


def serve_collector() -> None:
    """Takes spans and looks at none, until it is ended."""
    answer = trace_service_pb2.ExportTraceServiceResponse().SerializeToString()
    handler = grpc.unary_unary_rpc_method_handler(lambda message, context: answer)
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Export": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"http://127.0.0.1:{port}", flush=True)
    server.wait_for_termination()


# --- the spans of a request -------------------------------------------------------------------------------------------


class Kept:
    """Stands in for the exporter: keeps the spans."""

    def __init__(self, *, samples_all: bool) -> None:
        self.samples_all = samples_all
        self.spans: list[Span] = []

    def is_sampled(self, trace_id: int, parent: TraceContext | None) -> bool:
        """Samples all or none."""
        return self.samples_all

    def add(self, spans: Sequence[Span]) -> None:
        """Takes spans."""
        self.spans += spans


class Nowhere(SpanExporter):
    """A collector that takes everything at once."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Does nothing."""
        return SpanExportResult.SUCCESS


def measure_spans() -> dict[str, float]:
    """Microseconds of CPU time for a request of one attempt at a prefill and a decode worker."""
    figures: dict[str, float] = {}
    route = some_route()
    for name, samples_all in (("not in the sample", False), ("in the sample", True)):
        kept = Kept(samples_all=samples_all)
        telemetry._exporter = cast(Any, kept)
        figures[name] = best_us(lambda: write_down(route))
    telemetry._exporter = None
    spans = [span for span in kept.spans if span.context.trace_id == kept.spans[-1].context.trace_id]
    exporter = otlp.Exporter(Nowhere(), resource=Resource.create({"service.name": "gateway"}), sampler=ALWAYS_ON)
    figures["queued for the SDK"] = best_us(lambda: exporter.add(spans))
    finished = [exporter._finished(span) for span in spans]
    exporter.close()
    figures["encoded by the SDK"] = best_us(lambda: encode_spans(finished).SerializeToString())
    print(f"CPU time of the gateway's {len(spans)} spans of a request, best of 5 rounds:")
    for name, each in figures.items():
        print(f"  {name:22} {each:7.1f} us")
    return figures


def best_us(work: Callable[[], object]) -> float:
    """CPU time of one call, in microseconds."""
    best = float("inf")
    for _ in range(5):
        began_s = time.thread_time()
        for _ in range(NUM_REQUESTS):
            work()
        best = min(best, time.thread_time() - began_s)
    return best / NUM_REQUESTS * 1e6


def some_route() -> Route:
    """A way as the router gives it, with all that is said of it."""
    router = Router(settings=RoutingSettings(disaggregation=DisaggregationSettings(local_prefill_tokens=0)))
    view = WorkerView("prefill-0", "p", 1000, 1000, 0, 0, 4096)
    decode = WorkerView("decode-0", "d", 1000, 1000, 0, 0, 4096)
    return router.route(RouteRequest(PROMPT_TOKENS, NEW_TOKENS), [view], [decode], now_s=0.0)[0]


def write_down(route: Route) -> None:
    """What `gateway.requests.lifecycle` does for one answer, from its arrival to its end."""
    arrived_s = SYSTEM_CLOCK.monotonic()
    request = TRACING.begin(None, arrived_s=arrived_s, arrived_unix_ns=SYSTEM_CLOCK.unix_ns())
    answer = request.answer(0, "demo")
    assert answer is not None
    attempt = some_attempt(request)
    answer.placed(attempt, route, asked_s=arrived_s, predicted_queue_s=0.0)
    answer.has_token()
    answer.goes_on("kv_transfer", attempt, num_tokens=1)
    answer.goes_on("decode", attempt, num_tokens=2, num_new=1)
    answer.end(None, num_tokens=NEW_TOKENS)
    request.finish(None, lambda: {"gen_ai.request.model": "demo", "gen_ai.usage.output_tokens": NEW_TOKENS})


TRACING = Tracing(clock=SYSTEM_CLOCK)


def some_attempt(request: RequestSpans) -> AttemptFacts:
    """An attempt that a prefill and a decode worker have taken."""
    return AttemptFacts(
        number=1,
        trace=request.for_attempt(),
        num_prompt_tokens=PROMPT_TOKENS,
        num_replayed_tokens=0,
        decode_worker="decode-0",
        is_move=False,
        prefill_worker="prefill-0",
        prefill_started=PrefillStarted(0.001, 0),
        handed_off=HandedOff(3, 98_304, 0.001, "shm"),
    )


if __name__ == "__main__":
    main()
