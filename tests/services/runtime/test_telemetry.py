"""Spans reach a real OTLP collector, never cost a request anything, and carry no text of a client."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace

from services.runtime import telemetry
from tests.stopwatch import Stopwatch

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def _shut_down() -> Iterator[None]:
    yield
    telemetry.shutdown()


async def test_spans_arrive_with_their_parents_and_times(otlp_receiver: Any) -> None:
    telemetry.setup("gateway", otlp_receiver.url, instance_id="g0")
    root = telemetry.start_span("request", telemetry.extract(TRACEPARENT), attributes={"gen_ai.request.model": "demo"})
    wire = telemetry.inject(root)
    assert wire.startswith(f"00-{TRACE_ID}-")
    prefill = telemetry.record_span("prefill", 10**18, 10**18 + 5, parent=telemetry.extract(wire))
    telemetry.record_span("prefill.chunk", 10**18 + 1, 10**18 + 2, parent=prefill, attributes={"tandem.tokens": 64})
    telemetry.record_span("kv_transfer", 10**18, 10**18 + 9, parent=root, error=ValueError("a client's words"))
    root.end()
    spans = await otlp_receiver.wait_for(4)
    assert {span.trace_id for span in spans} == {TRACE_ID}
    assert {span.service for span in spans} == {"gateway"}
    request, chunk = otlp_receiver.by_name("request"), otlp_receiver.by_name("prefill.chunk")
    assert request.parent_id == "b7ad6b7169203331"
    assert request.attributes == {"gen_ai.request.model": "demo"}
    assert otlp_receiver.by_name("prefill").parent_id == request.span_id
    assert chunk.parent_id == otlp_receiver.by_name("prefill").span_id
    assert (chunk.start_unix_ns, chunk.end_unix_ns) == (10**18 + 1, 10**18 + 2)
    transfer = otlp_receiver.by_name("kv_transfer")
    assert transfer.is_error
    assert transfer.attributes == {"error.type": "ValueError"}


async def test_shutdown_sends_what_is_queued(otlp_receiver: Any) -> None:
    telemetry.setup("gateway", otlp_receiver.url)
    telemetry.start_span("request").end()
    await asyncio.to_thread(telemetry.shutdown)
    assert [span.name for span in otlp_receiver.spans] == ["request"]


async def test_a_span_without_parent_begins_a_trace(otlp_receiver: Any) -> None:
    telemetry.setup("gateway", otlp_receiver.url)
    one, two = telemetry.start_span("request"), telemetry.start_span("request")
    assert one.get_span_context().trace_id != two.get_span_context().trace_id
    assert telemetry.extract(telemetry.inject(one)) != {}
    one.end()
    two.end()


async def test_what_the_client_did_not_sample_is_not_recorded(otlp_receiver: Any) -> None:
    telemetry.setup("gateway", otlp_receiver.url)
    unsampled = telemetry.start_span("request", telemetry.extract(TRACEPARENT[:-1] + "0"))
    assert not unsampled.is_recording()
    assert telemetry.inject(unsampled).endswith("-00")


def test_without_a_collector_the_context_still_passes() -> None:
    telemetry.setup("gateway", None)
    span = telemetry.start_span("request", telemetry.extract(TRACEPARENT))
    assert telemetry.inject(span) == TRACEPARENT
    assert telemetry.inject(telemetry.start_span("request")) == ""
    telemetry.record_span("prefill", 1, 2, parent=None, error=RuntimeError("x"))
    telemetry.shutdown()


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "nonsense",
        "00-" + "0" * 32 + "-b7ad6b7169203331-01",
        f"00-{TRACE_ID}-" + "0" * 16 + "-01",
        f"ff-{TRACE_ID}-b7ad6b7169203331-01",
        f"00-{TRACE_ID.upper()}-b7ad6b7169203331-01",
        f"00-{TRACE_ID}-b7ad6b7169203331-01-extra",
        f"00-{TRACE_ID}-b7ad6b7169203331",
        f"00-{TRACE_ID}-b7ad6b716920333x-01",
        f"00-{TRACE_ID[:-1]}\u0661-b7ad6b7169203331-01",
        "-" * 1000,
    ],
)
def test_a_bad_traceparent_is_no_parent(traceparent: str) -> None:
    assert telemetry.extract(traceparent) == {}


def test_a_future_version_is_understood_as_far_as_it_goes() -> None:
    context = telemetry.extract(f"01-{TRACE_ID}-b7ad6b7169203331-01-extra")
    assert trace.get_current_span(context).get_span_context().trace_id == int(TRACE_ID, 16)


@pytest.mark.parametrize("collector", ["nobody", "slow"])
async def test_a_collector_that_is_away_or_slow_delays_nothing(collector: str, otlp_receiver: Any) -> None:
    otlp_receiver.delay_s = 30.0
    telemetry.setup("gateway", "http://127.0.0.1:1" if collector == "nobody" else otlp_receiver.url)
    stopwatch = Stopwatch()
    for _ in range(2 * telemetry.MAX_QUEUED_SPANS):
        telemetry.start_span("request").end()
    assert stopwatch.elapsed_s() < 5
    began_s = time.monotonic()
    await asyncio.to_thread(telemetry.shutdown)
    assert time.monotonic() - began_s < telemetry.SHUTDOWN_TIMEOUT_S + 2


def test_it_is_set_up_once() -> None:
    telemetry.setup("gateway", "http://127.0.0.1:1")
    with pytest.raises(RuntimeError, match="already"):
        telemetry.setup("gateway", "http://127.0.0.1:1")
