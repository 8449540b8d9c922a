"""Has 1,000 traces of a cluster checked: `python -m tests.traces.run [--requests 1000] [--kill] [--json FILE]`.

A 1P2D cluster of the demo model exports all of them over OTLP to a collector in this process. The requests are chats
and completions, streamed and not, with several answers, with prompts that go to the prefill worker and that do not,
refused ones of several kinds, and clients that leave. With --kill a decode worker is killed under a third of them.
"""

import argparse
import asyncio
import json
import os
import random
import secrets
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from benchmarks.cluster import Cluster, running_cluster
from tests.traces.check import Received, problems

CLIENTS = 6
EXPORT_TIMEOUT_S = 30.0
QUIET_S = 3.0
WORDS = ("def", "class", "return", "for", "in", "range", "import", "self", "print", "value", "index", "name", "open")


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span that any process exports."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.last_s = time.monotonic()

    def Export(self, request: Any, context: Any) -> Any:
        """Takes a batch."""
        for group in request.resource_spans:
            resource = _plain(group.resource.attributes)
            for scope in group.scope_spans:
                self.spans += [_received(span, resource) for span in scope.spans]
        self.last_s = time.monotonic()
        return trace_service_pb2.ExportTraceServiceResponse()


def _received(span: Any, resource: dict[str, Any]) -> Received:
    ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
    times = (span.start_time_unix_nano, span.end_time_unix_nano)
    return Received(span.name, *ids, *times, span.kind, span.status.code, _plain(span.attributes), resource)


def _plain(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def body_of(draw: random.Random) -> tuple[str, str, dict[str, Any]]:
    """A request: its kind, its route and its body."""
    kind = draw.choices(
        ["chat", "completion", "several", "bad field", "no model", "too long", "leaves", "texts"],
        [25, 25, 8, 8, 8, 6, 10, 10],
    )[0]
    text = " ".join(draw.choices(WORDS, k=draw.choice((3, 20, 200))))
    body: dict[str, Any] = {
        "model": "tandem-demo",
        "max_tokens": draw.choice((1, 2, 12, 40)),
        "stream": draw.random() < 0.5,
    }
    if kind == "bad field":
        body["temperature"] = 99
    if kind == "no model":
        body["model"] = draw.choice(("nobody", "x" * 300))
    if kind == "too long":
        body["max_tokens"] = 10_000_000
    if kind == "several":
        body["n"] = 3
    if kind == "leaves":
        body |= {"stream": True, "max_tokens": 300, "ignore_eos": True}
    if kind == "texts":
        return kind, "/v1/embeddings", {"model": body["model"], "input": [text] * draw.choice((1, 3, 40))}
    if kind in ("chat", "bad field"):
        return kind, "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}
    return kind, "/v1/completions", {**body, "prompt": text}


async def ask(client: httpx.AsyncClient, draw: random.Random, clients_spans: dict[str, str]) -> str:
    """Sends one request under a trace of its own; returns its kind and what came of it."""
    kind, route, body = body_of(draw)
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    clients_spans[trace_id] = span_id
    headers = {"traceparent": f"00-{trace_id}-{span_id}-01"}
    async with client.stream("POST", route, json=body, headers=headers) as answer:
        if kind == "leaves" and answer.status_code == 200:
            async for _ in answer.aiter_lines():
                return f"{kind} 200"
        await answer.aread()
    return f"{kind} {answer.status_code}"


async def load(cluster: Cluster, arguments: argparse.Namespace, clients_spans: dict[str, str]) -> Counter[str]:
    """Sends all requests; kills a worker under them where that is asked for."""
    draw, outcomes, left = random.Random(arguments.seed), Counter[str](), iter(range(arguments.requests))
    async with httpx.AsyncClient(base_url=cluster.http, timeout=60, trust_env=False) as client:

        async def one_client() -> None:
            for number in left:
                if arguments.kill and number == arguments.requests // 3:
                    workers = (await client.get("/cluster")).json()["workers"]
                    os.kill(next(one["pid"] for one in workers if one["role"] == "decode"), signal.SIGKILL)
                outcomes[await ask(client, draw, clients_spans)] += 1

        await asyncio.gather(*(one_client() for _ in range(CLIENTS)))
    return outcomes


def main() -> int:
    """Runs the load, waits for the spans, prints what is wrong; the exit code is 1 where anything is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000, help="number of traces")
    parser.add_argument("--seed", type=int, default=1, help="of the requests")
    parser.add_argument("--kill", action="store_true", help="kill a decode worker under the load")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    server, collector = grpc.server(ThreadPoolExecutor(4)), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    clients_spans: dict[str, str] = {}
    with running_cluster("--otlp", url, "--chunk-tokens", "64", "--embeddings", "on", decode=2) as cluster:
        outcomes = asyncio.run(load(cluster, arguments, clients_spans))
        give_up_s = time.monotonic() + EXPORT_TIMEOUT_S
        while time.monotonic() < give_up_s and time.monotonic() - collector.last_s < QUIET_S:
            time.sleep(0.1)
    server.stop(None).wait(5)
    found = list(problems(collector.spans, client_spans=clients_spans))
    num_traces = len({span.trace_id for span in collector.spans})
    kinds = Counter(sentence.partition(" ")[2].partition(": begins")[0] for sentence in found)
    print(f"{sum(outcomes.values())} requests: {dict(sorted(outcomes.items()))}")
    print(f"{num_traces} traces, {len(collector.spans)} spans, {len(found)} problems")
    for kind, number in kinds.most_common(20):
        print(f"  {number} x {kind}")
    if arguments.json is not None:
        figures = {
            "traces": num_traces,
            "spans": len(collector.spans),
            "problems": found,
            "outcomes": outcomes,
        }
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    is_complete = num_traces == len(clients_spans)
    if not is_complete:
        print(f"  {len(clients_spans) - num_traces} requests have no trace")
    return 0 if is_complete and not found else 1


if __name__ == "__main__":
    sys.exit(main())
