"""One request's spans, from every process, in a real OTLP receiver under the client's trace id."""

import asyncio
import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from benchmarks.cluster import Cluster, request, running_cluster
from tests.waiting import HANG_LIMIT_S

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENT_SPAN_ID = "00f067aa0ba902b7"
EXPORT_TIMEOUT_S = HANG_LIMIT_S
PHASES = ["queue", "route", "prefill", "kv_transfer", "decode"]
# So many tokens that the prefill worker's word of the handoff comes before the last of them, on a busy machine too.
NUM_PROMPT_TOKENS, CHUNK_TOKENS, NUM_TOKENS = 200, 64, 160
CLOCK_NS = 1_000_000
"""What two readings of this machine's clock in two processes may differ by, each rounded and slewed."""


@dataclass(frozen=True)
class Received:
    """A span with the service that made it and its attributes as plain values."""

    service: str
    span: Span
    said: dict[str, Any]

    @property
    def seconds(self) -> float:
        return (self.span.end_time_unix_nano - self.span.start_time_unix_nano) / 1e9

    def is_child_of(self, other: "Received") -> bool:
        return self.span.parent_span_id == other.span.span_id


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span with the name of the service that made it."""

    def __init__(self) -> None:
        self.spans: list[Received] = []

    def Export(self, request: Any, context: Any) -> Any:
        for group in request.resource_spans:
            service = _plain(group.resource.attributes)["service.name"]
            for scope in group.scope_spans:
                self.spans += [Received(service, span, _plain(span.attributes)) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def of_trace(self, trace_id: str) -> dict[str, list[Received]]:
        found: dict[str, list[Received]] = {}
        for received in list(self.spans):
            if received.span.trace_id.hex() == trace_id:
                is_request = received.span.kind == Span.SPAN_KIND_SERVER
                found.setdefault("request" if is_request else received.span.name, []).append(received)
        return found


def _plain(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@pytest.fixture
def receiver() -> Iterator[tuple[Receiver, str]]:
    server = grpc.server(ThreadPoolExecutor(4))
    receiver = Receiver()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield receiver, f"http://127.0.0.1:{port}"
    server.stop(None).wait(5)


def test_one_request_is_one_trace_of_all_processes(
    receiver: tuple[Receiver, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_LOCAL_PREFILL_TOKENS", "0")  # the prompt goes to the prefill worker, whatever is cheaper
    spans, url = receiver
    with running_cluster("--otlp", url, "--chunk-tokens", str(CHUNK_TOKENS), "--trace-sample", "0") as cluster:
        client_s, told = asyncio.run(_ask_over_grpc(cluster))
        # It is not in the sample, and its client has not decided. It comes second: where another prompt has just come,
        # steps are as short as is good for more of them, and a slow machine's have less than a whole chunk.
        _ask_over_http(cluster)
        expected = {"request", *PHASES, "prefill.chunk", "kv_transfer.send", "decode.steps"}
        deadline = time.monotonic() + EXPORT_TIMEOUT_S
        while not expected <= spans.of_trace(TRACE_ID).keys():
            assert time.monotonic() < deadline, f"only {sorted(spans.of_trace(TRACE_ID))} arrived"
            time.sleep(0.1)
        trace = spans.of_trace(TRACE_ID)

    assert {received.span.trace_id.hex() for received in spans.spans} == {TRACE_ID}
    assert trace.keys() == expected
    (root,) = trace["request"]
    assert root.span.parent_span_id.hex() == CLIENT_SPAN_ID
    assert root.span.name == "text_completion tandem-demo"
    assert told == f"00-{TRACE_ID}-{root.span.span_id.hex()}-01"
    assert all(len(trace[name]) == 1 for name in PHASES)
    phases = [trace[name][0] for name in PHASES]
    assert all(phase.is_child_of(root) for phase in phases)
    assert phases[0].span.start_time_unix_nano == root.span.start_time_unix_nano
    for one, other in itertools.pairwise(phases):
        assert one.span.end_time_unix_nano == other.span.start_time_unix_nano
    assert sum(phase.seconds for phase in phases) == pytest.approx(root.seconds, rel=0.02)
    assert root.seconds <= client_s

    _queue, route, prefill, transfer, decode = phases
    chunks, (sending,), (steps,) = trace["prefill.chunk"], trace["kv_transfer.send"], trace["decode.steps"]
    assert {root.service, *(phase.service for phase in phases)} == {"gateway"}
    assert {chunk.service for chunk in chunks} == {sending.service} == {"prefill-worker"}
    assert steps.service == "decode-worker"
    assert all(chunk.is_child_of(prefill) for chunk in chunks)
    assert sending.is_child_of(root), "it lasts longer than the phase in which it begins"
    assert [link.span_id for link in sending.span.links] == [prefill.span.span_id]
    assert steps.is_child_of(decode)
    for part in (*chunks, sending):
        assert prefill.span.start_time_unix_nano - CLOCK_NS <= part.span.start_time_unix_nano
    assert all(chunk.span.end_time_unix_nano <= prefill.span.end_time_unix_nano + CLOCK_NS for chunk in chunks)
    assert decode.span.start_time_unix_nano - CLOCK_NS <= steps.span.start_time_unix_nano
    assert steps.span.end_time_unix_nano <= decode.span.end_time_unix_nano + CLOCK_NS

    assert [chunk.said["tandem.tokens"] for chunk in chunks] == [64, 64, 64, 8]
    assert sending.said["tandem.kv.pages"] == transfer.said["tandem.kv.pages"] == -(-NUM_PROMPT_TOKENS // 16)
    assert sending.said["tandem.kv.bytes"] == transfer.said["tandem.kv.bytes"] > 0
    # Measured where the link was never idle: a stall of the machine there says nothing of the whole span.
    assert sending.said["tandem.kv.gb_per_s"] > 0
    assert steps.said["tandem.batch_mean"] == steps.said["tandem.batch_max"] == 1
    assert decode.said["tandem.tokens"] == steps.said["tandem.tokens"] == NUM_TOKENS - 1
    assert route.said["tandem.reason"] == "long_prompt"
    for phase in (prefill, transfer, decode):
        assert phase.said["tandem.predicted_s"] > 0
        assert phase.said["tandem.actual_s"] == pytest.approx(phase.seconds, abs=1e-5)
    usage = ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens")
    assert [root.said[name] for name in usage] == [NUM_PROMPT_TOKENS, NUM_TOKENS]
    assert "first_token" in [event.name for event in root.span.events]


def _ask_over_http(cluster: Cluster) -> None:
    cluster.post("/v1/completions", {"prompt": "def f(", "max_tokens": 4})


async def _ask_over_grpc(cluster: Cluster) -> tuple[float, Any]:
    """Seconds as the client sees them, and the `traceparent` that it was told."""
    metadata = (("traceparent", f"00-{TRACE_ID}-{CLIENT_SPAN_ID}-01"),)
    async with cluster.inference() as stub:
        prompt = [n % 250 + 5 for n in range(NUM_PROMPT_TOKENS)]
        began_s = time.monotonic()
        call = stub.Generate(
            request(prompt, max_tokens=NUM_TOKENS, ignore_eos=True), timeout=HANG_LIMIT_S, metadata=metadata
        )
        async for _ in call:
            pass
        return time.monotonic() - began_s, dict(await call.initial_metadata())["traceparent"]
