"""Spans reach a real collector as the `OTEL_` variables say, and none that is away, slow or wrong costs a request."""

import asyncio
import logging
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from services.runtime import otlp, rpc, telemetry
from services.runtime.telemetry import Event, Link, Span, TraceContext
from services.runtime.tls import Identity
from services.runtime.version import version
from tests.certificates import Authority
from tests.waiting import until

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def _shut_down() -> Iterator[None]:
    yield
    telemetry.shutdown()


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A server that takes connections and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def span(name: str, context: TraceContext, parent_id: int = 0, **said: Any) -> Span:
    return Span(name, context, parent_id, 10**18, 10**18 + 5, **said)


def root() -> TraceContext:
    context = telemetry.root(None)
    assert context is not None
    return context


async def test_spans_arrive_with_all_that_they_say(otlp_receiver: Any) -> None:
    telemetry.setup("gateway", otlp_receiver.url, instance_id="g0")
    parent = telemetry.extract(TRACEPARENT, "a=1,b=2")
    context = telemetry.root(parent)
    assert parent is not None
    assert context is not None
    assert (context.trace_id, context.is_sampled, context.state) == (int(TRACE_ID, 16), True, "a=1,b=2")
    said = {"gen_ai.request.model": "demo", "n": 3, "s": 0.5, "is": True, "words": ["a", "b"], "long": "x" * 1000}
    event = Event("retry", 10**18 + 2, {"tandem.reason": "worker_lost"})
    link = Link(telemetry.sibling(context, 7), {"tandem.attempt": 1})
    spans = [span("request", context, parent.span_id, attributes=said, events=[event], links=[link], is_server=True)]
    telemetry.export(spans)
    child = context._replace(span_id=telemetry.new_span_id())
    telemetry.export([span("kv_transfer.send", child, context.span_id, error_type="ValueError", is_failed=True)])
    await otlp_receiver.wait_for(2)
    request, transfer = otlp_receiver.by_name("request"), otlp_receiver.by_name("kv_transfer.send")
    assert (request.resource["service.name"], request.trace_id, request.parent_id) == (
        "gateway",
        TRACE_ID,
        "b7ad6b7169203331",
    )
    assert (request.start_unix_ns, request.end_unix_ns, request.kind) == (10**18, 10**18 + 5, "SPAN_KIND_SERVER")
    assert request.state == "a=1,b=2"
    words = request.attributes.pop("words")
    assert [value.string_value for value in words.values] == ["a", "b"]
    assert request.attributes == {"gen_ai.request.model": "demo", "n": 3, "s": 0.5, "is": True, "long": "x" * 256}
    assert request.events == [("retry", 10**18 + 2, {"tandem.reason": "worker_lost"})]
    assert request.links == [(f"{(context.span_id + 7) % 2**64:016x}", {"tandem.attempt": 1})]
    assert transfer.parent_id == request.span_id != transfer.span_id
    assert transfer.is_error
    assert not request.is_error
    assert transfer.attributes == {"error.type": "ValueError"}, "not its text, which may quote a client"


async def test_shutdown_sends_what_is_queued(otlp_receiver: Any) -> None:
    telemetry.setup("gateway", otlp_receiver.url)
    telemetry.export([span("request", root())])
    await asyncio.to_thread(telemetry.shutdown)
    assert [span.name for span in otlp_receiver.spans] == ["request"]


async def test_a_collector_is_believed_as_the_clusters_own_processes_are(
    tls_otlp_receiver: Any, authority: Authority
) -> None:
    rpc.set_identity(Identity(authority.issue("gateway", roles=["gateway"]), roles=["gateway"]))
    try:
        telemetry.setup("gateway", tls_otlp_receiver.url)
    finally:
        rpc.set_identity(None)
    telemetry.export([span("request", root())])
    await tls_otlp_receiver.wait_for(1)


async def test_the_variables_name_the_collector_and_what_it_is_sent(
    otlp_receiver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", otlp_receiver.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret%20word,other=2")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test,service.namespace=ours")
    telemetry.setup("gateway", None)
    telemetry.export([span("request", root())])
    await otlp_receiver.wait_for(1)
    assert otlp_receiver.metadata["x-key"] == "secret word"
    resource = otlp_receiver.spans[0].resource
    assert resource["service.name"] == "mine"
    assert (resource["deployment.environment.name"], resource["service.namespace"]) == ("test", "ours")


async def test_the_resource_says_which_process_it_is(otlp_receiver: Any) -> None:
    telemetry.setup("decode-worker", otlp_receiver.url, instance_id="decode-0")
    telemetry.export([span("decode.steps", root())])
    await otlp_receiver.wait_for(1)
    resource = otlp_receiver.spans[0].resource
    assert resource["service.name"] == "decode-worker"
    assert resource["service.namespace"] == "tandem"
    assert resource["service.instance.id"] == "decode-0"
    assert resource["service.version"] == version()
    assert resource["host.name"] == socket.gethostname()
    assert resource["telemetry.sdk.name"] == "opentelemetry"


async def test_the_flag_goes_before_the_variables(otlp_receiver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:1")
    telemetry.setup("gateway", otlp_receiver.url)
    telemetry.export([span("request", root())])
    await otlp_receiver.wait_for(1)


@pytest.mark.parametrize("by_flag", [True, False])
async def test_spans_go_over_http_too(http_collector: Any, monkeypatch: pytest.MonkeyPatch, by_flag: bool) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    if not by_flag:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", http_collector.url)
    telemetry.setup("gateway", http_collector.url if by_flag else None)
    telemetry.export([span("request", root(), attributes={"n": 1})])
    await asyncio.to_thread(telemetry.shutdown)
    (received,) = http_collector.spans
    assert (received.name, received.attributes) == ("request", {"n": 1})
    assert http_collector.paths == ["/v1/traces"]
    assert (http_collector.headers["x-key"], http_collector.headers["content-encoding"]) == ("secret", "gzip")


async def test_the_certificate_of_the_variables_goes_before_the_clusters(
    tls_otlp_receiver: Any, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = authority.issue("somebody")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(authority.path))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_KEY", str(files.key))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", str(files.cert))
    telemetry.setup("gateway", tls_otlp_receiver.url)
    telemetry.export([span("request", root())])
    await tls_otlp_receiver.wait_for(1)


async def test_texts_are_cut_off_and_an_error_of_a_client_leaves_the_status_alone(otlp_receiver: Any) -> None:
    telemetry.setup("gateway", otlp_receiver.url)
    telemetry.export([span("request", root(), attributes={"long": "x" * 1000}, error_type="InvalidRequest")])
    await otlp_receiver.wait_for(1)
    (received,) = otlp_receiver.spans
    assert received.attributes == {"long": "x" * 256, "error.type": "InvalidRequest"}
    assert not received.is_error


async def test_a_value_that_no_message_can_hold_is_left_out(otlp_receiver: Any, caplog: Any) -> None:
    telemetry.setup("gateway", otlp_receiver.url)
    telemetry.export([span("request", root(), attributes={"n": 2**70, "m": 1})])
    await otlp_receiver.wait_for(1)
    assert otlp_receiver.spans[0].attributes == {"m": 1}


async def test_a_clients_tracestate_that_is_no_list_is_not_logged(otlp_receiver: Any, caplog: Any) -> None:
    telemetry.setup("gateway", otlp_receiver.url)
    parent = telemetry.extract(TRACEPARENT, "a client's words")
    context = telemetry.root(parent)
    assert context is not None
    telemetry.export([span("request", context)])
    await otlp_receiver.wait_for(1)
    assert "words" not in caplog.text


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
@pytest.mark.parametrize("collector", ["away", "slow", "wrong"])
async def test_a_collector_that_takes_nothing_costs_nobody_anything(
    collector: str,
    protocol: str,
    otlp_receiver: Any,
    http_collector: Any,
    silent: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    otlp_receiver.delay_s = 0.0 if collector == "wrong" else 30.0
    otlp_receiver.refuses, http_collector.status = grpc.StatusCode.UNAVAILABLE, 503
    slow = otlp_receiver.url if protocol == "grpc" else f"http://127.0.0.1:{silent.getsockname()[1]}"
    wrong = otlp_receiver.url if protocol == "grpc" else http_collector.url
    telemetry.setup("gateway", {"away": "http://127.0.0.1:1", "slow": slow, "wrong": wrong}[collector])
    context = root()
    for _ in range(2 * otlp.MAX_QUEUED_SPANS):
        telemetry.export([span("request", context)])
    num_exported, num_dropped = telemetry.counts()
    assert num_exported == 0
    assert num_dropped >= otlp.MAX_QUEUED_SPANS - 2 * otlp.MAX_BATCH_SPANS, "the queue has its bound"
    await asyncio.to_thread(telemetry.shutdown)
    lines = [record for record in caplog.records if record.name.startswith("opentelemetry")]
    assert len(lines) <= 2
    assert all(record.levelno == logging.WARNING for record in lines)


async def test_a_collector_that_comes_late_gets_the_spans(otlp_receiver: Any) -> None:
    otlp_receiver.refuses = grpc.StatusCode.UNAVAILABLE
    telemetry.setup("gateway", otlp_receiver.url)
    telemetry.export([span("request", root())])
    await until(lambda: otlp_receiver.num_calls)
    otlp_receiver.refuses = None
    await otlp_receiver.wait_for(1)
    await until(lambda: telemetry.counts() == (1, 0))


async def test_spans_that_a_collector_refuses_for_good_are_counted(otlp_receiver: Any) -> None:
    otlp_receiver.refuses = grpc.StatusCode.UNAUTHENTICATED
    telemetry.setup("gateway", otlp_receiver.url)
    telemetry.export([span("request", root()), span("queue", root())])
    await until(lambda: telemetry.counts() == (0, 2))


async def test_what_comes_after_the_end_is_dropped(otlp_receiver: Any) -> None:
    telemetry.setup("gateway", otlp_receiver.url)
    exporter, context = telemetry._exporter, root()
    assert exporter is not None
    await asyncio.to_thread(telemetry.shutdown)
    exporter.add([span("request", context)])
    assert exporter.num_dropped == 1
