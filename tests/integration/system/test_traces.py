"""One request's spans, from every process, in a real OTLP receiver under the client's trace id."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from benchmarks.cluster import request, running_cluster

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENT_SPAN_ID = "00f067aa0ba902b7"
EXPORT_TIMEOUT_S = 20.0


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span with the name of the service that made it."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []

    def Export(self, request: Any, context: Any) -> Any:
        for group in request.resource_spans:
            names = [a.value.string_value for a in group.resource.attributes if a.key == "service.name"]
            for scope in group.scope_spans:
                self.spans += [(names[0], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def of_trace(self, trace_id: str) -> dict[str, list[tuple[str, Span]]]:
        found: dict[str, list[tuple[str, Span]]] = {}
        for service, span in list(self.spans):
            if span.trace_id.hex() == trace_id:
                found.setdefault(span.name, []).append((service, span))
        return found


@pytest.fixture
def receiver() -> Iterator[tuple[Receiver, str]]:
    server = grpc.server(ThreadPoolExecutor(4))
    receiver = Receiver()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield receiver, f"http://127.0.0.1:{port}"
    server.stop(None).wait(5)


def test_every_phase_is_a_span_of_the_clients_trace(receiver: tuple[Receiver, str]) -> None:
    spans, url = receiver
    with running_cluster("--otlp", url, "--chunk-tokens", "64") as cluster:
        asyncio.run(generate(cluster))
        expected = {"request", "queue", "route", "prefill", "prefill.chunk", "kv_transfer", "decode"}
        deadline = time.monotonic() + EXPORT_TIMEOUT_S
        while not expected <= spans.of_trace(TRACE_ID).keys():
            assert time.monotonic() < deadline, f"only {sorted(spans.of_trace(TRACE_ID))} arrived"
            time.sleep(0.1)
        trace = spans.of_trace(TRACE_ID)

    root = trace["request"][0][1]
    assert root.parent_span_id.hex() == CLIENT_SPAN_ID
    for name in ("queue", "route", "prefill", "kv_transfer", "decode"):
        (_, span) = trace[name][0]
        assert len(trace[name]) == 1, f"{name} occurs {len(trace[name])} times"
        assert span.parent_span_id == root.span_id, name
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano, name
    (prefill,) = trace["prefill"]
    assert len(trace["prefill.chunk"]) == 4, "200 tokens in chunks of 64"
    assert all(chunk.parent_span_id == prefill[1].span_id for _, chunk in trace["prefill.chunk"])
    processes = {name: trace[name][0][0] for name in ("request", "prefill", "decode")}
    assert len(set(processes.values())) == 3, f"three kinds of service took part: {processes}"


async def generate(cluster: Any) -> None:
    metadata = (("traceparent", f"00-{TRACE_ID}-{CLIENT_SPAN_ID}-01"),)
    async with cluster.inference() as stub:
        message = request([n % 250 + 5 for n in range(200)], max_tokens=8, ignore_eos=True)
        async for _ in stub.Generate(message, timeout=60, metadata=metadata):
            pass
