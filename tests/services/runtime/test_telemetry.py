"""Spans reach a real OTLP collector, never cost a request anything, and carry no text of a client."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from services.runtime import rpc, telemetry
from services.runtime.telemetry import Event, Link, Span, TraceContext
from services.runtime.tls import Identity
from tests.certificates import Authority
from tests.stopwatch import Stopwatch

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def _shut_down() -> Iterator[None]:
    yield
    telemetry.shutdown()


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
    telemetry.record("kv_transfer.send", context, 10**18, 10**18 + 9, error=ValueError("a client's words"))
    await otlp_receiver.wait_for(2)
    request, transfer = otlp_receiver.by_name("request"), otlp_receiver.by_name("kv_transfer.send")
    assert (request.service, request.trace_id, request.parent_id) == ("gateway", TRACE_ID, "b7ad6b7169203331")
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


async def test_a_span_without_parent_begins_a_trace(otlp_receiver: Any) -> None:
    telemetry.setup("gateway", otlp_receiver.url)
    one, two = root(), root()
    assert one.trace_id != two.trace_id
    assert one.is_sampled
    assert telemetry.extract(telemetry.inject(one)) == one


def test_a_parents_decision_is_kept_and_without_one_the_trace_id_decides() -> None:
    telemetry.setup("gateway", "http://127.0.0.1:1", sample=0.25)
    for flags, is_sampled in (("01", True), ("00", False)):
        child = telemetry.root(telemetry.extract(TRACEPARENT[:-2] + flags))
        assert child is not None
        assert child.is_sampled is is_sampled
        assert telemetry.inject(child).endswith(flags)
        assert (telemetry.sampled(telemetry.inject(child)) is not None) is is_sampled
    contexts = [root() for _ in range(4000)]
    assert all(context.is_sampled == (context.trace_id % 2**64 < 2**62) for context in contexts)
    assert 800 < sum(context.is_sampled for context in contexts) < 1200


@pytest.mark.parametrize(("sample", "is_sampled"), [(0.0, False), (1.0, True)])
def test_none_and_all_are_sampled(sample: float, is_sampled: bool) -> None:
    telemetry.setup("gateway", "http://127.0.0.1:1", sample=sample)
    assert {root().is_sampled for _ in range(100)} == {is_sampled}


def test_without_a_collector_the_context_still_passes() -> None:
    telemetry.setup("gateway", None)
    assert not telemetry.is_on()
    assert telemetry.inject(telemetry.root(telemetry.extract(TRACEPARENT))) == TRACEPARENT
    assert telemetry.inject(telemetry.root(None)) == ""
    assert telemetry.sampled(TRACEPARENT) is None
    telemetry.export([span("request", TraceContext(1, 2, True))])
    assert telemetry.counts() == (0, 0)
    telemetry.shutdown()


def test_ids_beside_one_another_are_never_zero() -> None:
    last = TraceContext(1, 2**64 - 1, True)
    assert [telemetry.sibling(last, n).span_id for n in (0, 1, 2)] == [2**64 - 1, 1, 1]


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
    assert telemetry.extract(traceparent) is None


def test_a_future_version_is_understood_as_far_as_it_goes() -> None:
    context = telemetry.extract(f"01-{TRACE_ID}-b7ad6b7169203331-01-extra")
    assert context is not None
    assert context.trace_id == int(TRACE_ID, 16)


@pytest.mark.parametrize(("state", "kept"), [("a=" + "1" * 510, True), ("a=" + "1" * 511, False), ("a=\n", False)])
def test_a_tracestate_that_nobody_must_pass_on_is_left_out(state: str, kept: bool) -> None:
    context = telemetry.extract(TRACEPARENT, state)
    assert context is not None
    assert context.state == (state if kept else "")


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


@pytest.mark.parametrize("collector", ["nobody", "slow"])
async def test_a_collector_that_is_away_or_slow_delays_nothing(collector: str, otlp_receiver: Any) -> None:
    otlp_receiver.delay_s = 30.0
    telemetry.setup("gateway", "http://127.0.0.1:1" if collector == "nobody" else otlp_receiver.url)
    context, stopwatch = root(), Stopwatch()
    for _ in range(2 * telemetry.MAX_QUEUED_SPANS):
        telemetry.export([span("request", context)])
    assert stopwatch.elapsed_s() < 5
    num_exported, num_dropped = telemetry.counts()
    assert num_exported == 0
    assert num_dropped >= telemetry.MAX_QUEUED_SPANS - telemetry.MAX_BATCH_SPANS, "the queue has its bound"
    began_s = time.monotonic()
    await asyncio.to_thread(telemetry.shutdown)
    assert time.monotonic() - began_s < telemetry.SHUTDOWN_TIMEOUT_S + 2


async def test_what_cannot_be_a_message_is_dropped_and_the_rest_goes_on(otlp_receiver: Any) -> None:
    telemetry.setup("gateway", otlp_receiver.url)
    telemetry.export([span("request", root(), attributes={"n": 2**70})])
    async with asyncio.timeout(10):
        while telemetry.counts()[1] == 0:  # noqa: ASYNC110 - another thread counts
            await asyncio.sleep(0.01)
    telemetry.export([span("request", root())])
    assert len(await otlp_receiver.wait_for(1)) == 1


def test_it_is_set_up_once() -> None:
    telemetry.setup("gateway", "http://127.0.0.1:1")
    with pytest.raises(RuntimeError, match="already"):
        telemetry.setup("gateway", "http://127.0.0.1:1")
