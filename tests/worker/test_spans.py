"""Spans of an attempt lie within those of the gateway: in its time, and without what it has not heard of."""

import asyncio
from typing import Any

import pytest

from kv_transfer.send_link import HandoffStats
from protos import worker_pb2
from services.runtime import telemetry
from services.runtime.clock import Deadline
from services.runtime.errors import RequestCancelled, TransferFailed
from services.runtime.telemetry import DECODE_SPAN, Event, Span
from services.scheduling.links import Carried
from tests.kept_spans import KeptSpans
from worker.attempts import AttemptKey, AttemptSpec
from worker.spans import AttemptSpans, clock_ahead_ns

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PREFILL_SPAN = 0xB7AD6B7169203331
MS = 1_000_000


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> KeptSpans:
    return KeptSpans.install(monkeypatch)


def of_a_trace(**given: int) -> AttemptSpans:
    return AttemptSpans(telemetry.sampled(TRACEPARENT, ""), **given)


def times(*spans: Span) -> list[tuple[str, int, int]]:
    return [(span.name, span.start_unix_ns, span.end_unix_ns) for span in spans]


def test_a_chunk_says_what_it_computed_and_is_exported_when_the_attempt_ends(kept: KeptSpans) -> None:
    spans = of_a_trace()
    spans.chunk(10, 30, start=16, num_tokens=8)
    assert not kept.spans, "the gateway may give the attempt up in a moment that was before the chunk's end"
    spans.export()
    spans.export()
    span = kept.one("prefill.chunk")
    assert (span.start_unix_ns, span.end_unix_ns, span.parent_id) == (10, 30, PREFILL_SPAN)
    assert span.attributes == {"tandem.start": 16, "tandem.tokens": 8}


def test_without_a_trace_nothing_is_recorded_or_told(kept: KeptSpans) -> None:
    spans = AttemptSpans(None, clock_ahead_ns=5)
    spans.chunk(10, 30, start=0, num_tokens=8)
    spans.sending(10, 30)
    spans.steps(10, 30, attributes={})
    spans.export()
    assert kept.spans == []
    assert (spans.are_kept, spans.told_unix_ns(10)) == (False, 0)


def test_a_sending_says_how_fast_it_was_if_that_is_known(kept: KeptSpans) -> None:
    spans = of_a_trace()
    spans.sending(10, 30, sent=HandoffStats(3, 4000, 0.25, "tcp", Carried(2_000_000_000, 0.5)))
    spans.sending(10, 30, sent=HandoffStats(3, 4000, 0.25, "tcp"))
    spans.export()
    fast, unknown = kept.named("kv_transfer.send")
    assert fast.attributes == {
        "tandem.kv.pages": 3,
        "tandem.kv.bytes": 4000,
        "tandem.kv.transport": "tcp",
        "tandem.kv.exposed_s": 0.25,
        "tandem.kv.gb_per_s": 4.0,
    }
    assert "tandem.kv.gb_per_s" not in unknown.attributes


@pytest.mark.parametrize(("is_move", "phase"), [(False, PREFILL_SPAN), (True, PREFILL_SPAN + DECODE_SPAN)])
def test_a_sending_outlasts_its_phase_so_it_is_under_the_request(kept: KeptSpans, is_move: bool, phase: int) -> None:
    for spans in (of_a_trace(request_span_id=7), of_a_trace()):
        spans.sending(10, 30, is_move=is_move)
        spans.export()
    known, unknown = kept.spans
    assert (known.parent_id, [link.context.span_id for link in known.links]) == (7, [phase])
    assert (unknown.parent_id, list(unknown.links)) == (phase, []), "a gateway that does not name the request's span"


@pytest.mark.parametrize("error", [asyncio.CancelledError(), RequestCancelled("x")])
def test_a_sending_that_was_cancelled_is_no_failure(kept: KeptSpans, error: BaseException) -> None:
    spans = of_a_trace()
    spans.sending(10, 30, error=error)
    spans.export()
    span = kept.one("kv_transfer.send")
    assert span.attributes == {"tandem.is_cancelled": True}
    assert not span.error_type


def test_what_failed_is_a_failed_span(kept: KeptSpans) -> None:
    spans = of_a_trace()
    spans.sending(10, 30, error=TransferFailed("x"))
    spans.steps(10, 30, attributes={}, error=TransferFailed("x"))
    spans.export()
    assert [(span.error_type, span.is_failed) for span in kept.spans] == [("TransferFailed", True)] * 2


def test_times_are_those_of_the_gateways_clock(kept: KeptSpans) -> None:
    spans = of_a_trace(clock_ahead_ns=100)
    spans.steps(1000, 2000, attributes={}, events=[Event("preempted", 1500)])
    spans.export()
    span = kept.one("decode.steps")
    assert times(span) == [("decode.steps", 900, 1900)]
    assert [event.unix_ns for event in span.events] == [1400]
    assert span.parent_id == PREFILL_SPAN + DECODE_SPAN
    assert spans.told_unix_ns(1000) == 900


@pytest.mark.parametrize(
    ("told_ahead_ms", "took_ms", "ahead_ms"),
    [
        (-1, 3, 0),  # One clock, and messages that took 1 ms and 3 ms.
        (0, 0, 0),
        (49, 53, 49),  # The clock here is 50 ms ahead.
        (-51, -47, -51),  # It is 50 ms behind.
        (49, 48, 48),  # It was set since the gateway measured: a command cannot come before it was sent.
    ],
)
def test_clocks_differ_by_what_messages_in_both_directions_cannot_explain(
    told_ahead_ms: int, took_ms: int, ahead_ms: int
) -> None:
    clock = worker_pb2.SpanClock(sent_unix_ns=1000 * MS, ahead_ns=told_ahead_ms * MS)
    assert clock_ahead_ns(clock, (1000 + took_ms) * MS) == ahead_ms * MS


def test_a_gateway_that_says_nothing_of_clocks_is_taken_to_have_the_same() -> None:
    assert clock_ahead_ns(worker_pb2.SpanClock(), 10**18) == 0


def test_an_attempt_has_the_spans_and_the_clock_that_its_message_names(kept: KeptSpans) -> None:
    spec: AttemptSpec[Any] = AttemptSpec(
        AttemptKey("r", 1), [1], [], None, Deadline.after(30), traceparent=TRACEPARENT, request_span_id=7
    )
    clock = worker_pb2.SpanClock(sent_unix_ns=1000 * MS, ahead_ns=49 * MS)
    spans = AttemptSpans.of(spec, clock, received_unix_ns=1052 * MS)
    spans.sending(1060 * MS, 1070 * MS)
    spans.export()
    span = kept.one("kv_transfer.send")
    assert (span.parent_id, *times(span)) == (7, ("kv_transfer.send", 1011 * MS, 1021 * MS))


def test_what_the_gateway_gave_up_ends_then_or_has_no_span(kept: KeptSpans) -> None:
    spans = of_a_trace()
    spans.chunk(10, 30, start=0, num_tokens=8)
    spans.chunk(30, 50, start=8, num_tokens=8)
    spans.chunk(50, 70, start=16, num_tokens=8)
    spans.steps(35, 60, attributes={})
    spans.give_up(worker_pb2.Cancel(sent_unix_ns=40, has_heard_prefill=True))
    spans.export()
    assert times(*kept.spans) == [("prefill.chunk", 10, 30), ("prefill.chunk", 30, 40)]


def test_steps_that_the_gateway_has_heard_of_keep_their_span(kept: KeptSpans) -> None:
    spans = of_a_trace()
    spans.chunk(10, 30, start=0, num_tokens=8)
    spans.steps(35, 60, attributes={})
    spans.give_up(worker_pb2.Cancel(sent_unix_ns=40, has_heard_decode=True))
    spans.export()
    assert times(*kept.spans) == [("decode.steps", 35, 40)]


def test_a_gateway_that_says_nothing_of_what_it_heard_gets_every_span(kept: KeptSpans) -> None:
    spans = of_a_trace()
    spans.steps(35, 60, attributes={})
    spans.give_up(worker_pb2.Cancel())
    spans.export()
    assert times(*kept.spans) == [("decode.steps", 35, 60)]
