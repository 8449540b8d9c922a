"""The encoder of spans makes what the SDK's makes."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from services.runtime.otlp_encoding import encode

TEXTS = st.text(max_size=8)
SCALARS = TEXTS | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
ATTRIBUTES = st.dictionaries(TEXTS, SCALARS | st.lists(TEXTS, max_size=3), max_size=4)
TIMES = st.integers(0, 2**63)
CONTEXTS = st.builds(
    SpanContext,
    st.integers(1, 2**128 - 1),
    st.integers(1, 2**64 - 1),
    is_remote=st.booleans(),
    trace_flags=st.just(TraceFlags(TraceFlags.SAMPLED)),
    trace_state=st.sampled_from([None, TraceState([("a", "1"), ("b", "2")])]),
)
STATUSES = st.sampled_from([Status(StatusCode.UNSET), Status(StatusCode.ERROR), Status(StatusCode.ERROR, "why")])
RESOURCE = Resource({"service.name": "gateway", "number": 3, "words": ("a", "b")}, "https://schema")
SCOPE = InstrumentationScope("tandem", "1.0")


@st.composite
def spans(draw: Any) -> ReadableSpan:
    return ReadableSpan(
        name=draw(TEXTS),
        context=draw(CONTEXTS),
        parent=draw(st.none() | CONTEXTS),
        resource=RESOURCE,
        attributes=draw(ATTRIBUTES),
        events=draw(st.lists(st.builds(Event, TEXTS, ATTRIBUTES, TIMES), max_size=2)),
        links=draw(st.lists(st.builds(Link, CONTEXTS, ATTRIBUTES), max_size=2)),
        kind=draw(st.sampled_from(SpanKind)),
        status=draw(STATUSES),
        start_time=draw(TIMES),
        end_time=draw(TIMES),
        instrumentation_scope=draw(st.just(SCOPE)),
    )


@given(st.lists(spans(), max_size=3))
def test_it_is_what_the_sdk_makes_of_the_spans(some: list[ReadableSpan]) -> None:
    assert encode(some) == encode_spans(some)


def test_an_attribute_that_no_message_can_hold_is_left_out(caplog: Any) -> None:
    context = SpanContext(1, 2, is_remote=False)
    attributes = {"n": 2**70, "words": ["a", 2**70], "half": "\ud800", "m": 1}
    span = ReadableSpan("s", context, resource=RESOURCE, attributes=attributes, instrumentation_scope=SCOPE)
    (message,) = encode([span]).resource_spans[0].scope_spans[0].spans
    assert [(entry.key, entry.value.int_value) for entry in message.attributes] == [("m", 1)]
    assert len(caplog.records) == 3
