"""Contexts of traces: what a client sends is read, a sampler decides, and workers keep to that."""

from collections.abc import Iterator
from typing import Any

import pytest

from services.runtime import telemetry
from services.runtime.errors import ConfigError
from services.runtime.telemetry import Span, TraceContext

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


SAMPLERS = [
    # sampler, its argument, (without parent, with one that is sampled, with one that is not)
    ("", "", (1.0, 1.0, 0.0)),
    ("always_on", "", (1.0, 1.0, 1.0)),
    ("always_off", "", (0.0, 0.0, 0.0)),
    ("parentbased_always_off", "", (0.0, 1.0, 0.0)),
    ("parentbased_traceidratio", "0.25", (0.25, 1.0, 0.0)),
    ("traceidratio", "0.25", (0.25, 0.25, 0.25)),
]


@pytest.mark.parametrize(("sampler", "argument", "shares"), SAMPLERS)
def test_the_sampler_of_the_environment_decides(
    monkeypatch: pytest.MonkeyPatch, sampler: str, argument: str, shares: tuple[float, ...]
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler or "parentbased_always_on")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", argument)
    telemetry.setup("gateway", "http://127.0.0.1:1")
    for flags, share in zip((None, "01", "00"), shares, strict=True):
        count = 0
        for number in range(2000):
            parent = None if flags is None else TraceContext(number * 2**64 // 2000 + 2**100, 7, flags == "01")
            context = telemetry.root(parent)
            assert context is not None
            count += context.is_sampled
            # A worker keeps to what the gateway has decided, whatever its own environment says.
            assert (telemetry.sampled(telemetry.inject(context)) is not None) is context.is_sampled
        assert count / 2000 == pytest.approx(share, abs=0.05)


def test_the_flag_goes_before_the_sampler_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    telemetry.setup("gateway", "http://127.0.0.1:1", sample=1.0)
    assert root().is_sampled


@pytest.mark.parametrize(
    ("variables", "url", "is_on"),
    [
        ({}, None, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, None, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"}, None, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, None, False),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, None, True),
        ({"OTEL_TRACES_EXPORTER": "none"}, "http://127.0.0.1:1", False),
        ({"OTEL_SDK_DISABLED": "TRUE"}, "http://127.0.0.1:1", False),
        ({"OTEL_SDK_DISABLED": "false"}, "http://127.0.0.1:1", True),
    ],
)
def test_where_spans_are_recorded(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], url: str | None, is_on: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    telemetry.setup("gateway", url)
    assert telemetry.is_on() is is_on


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "-1"),
        ("OTEL_PROPAGATORS", "tracecontext,pigeon"),
    ],
)
def test_a_variable_with_a_wrong_value_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="OTEL_"):
        telemetry.setup("gateway", "http://127.0.0.1:1")
    assert not telemetry.is_on()


def test_a_password_in_the_url_is_neither_used_nor_shown() -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as caught:
        telemetry.setup("gateway", "https://me:t0ken@127.0.0.1:1")
    assert "t0ken" not in str(caught.value)


W3C = {"traceparent": TRACEPARENT, "tracestate": "a=1"}


@pytest.mark.parametrize(
    ("propagators", "told"),
    [
        ("", (TRACEPARENT, "a=1")),
        ("tracecontext,baggage", (TRACEPARENT, "a=1")),
        ("none", ("", "")),
        ("b3", (TRACEPARENT.replace("b7ad6b7169203331", "0000000000000b03"), "")),
        ("tracecontext,b3", (TRACEPARENT.replace("b7ad6b7169203331", "0000000000000b03"), "")),
    ],
)
def test_a_clients_headers_are_read_as_the_propagators_say(
    monkeypatch: pytest.MonkeyPatch, propagators: str, told: tuple[str, str]
) -> None:
    monkeypatch.setenv("OTEL_PROPAGATORS", propagators)
    telemetry.setup("gateway", "http://127.0.0.1:1")
    headers = {**W3C, "b3": f"{TRACE_ID}-0000000000000b03-1"}
    assert telemetry.from_client(lambda name: headers.get(name.lower(), "")) == told
    assert telemetry.from_client(lambda name: "") == ("", "")
