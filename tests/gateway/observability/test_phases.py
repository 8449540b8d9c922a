"""Phases of an answer: what ended them, and whose fault it was."""

import asyncio

import pytest

from gateway.observability.phases import AttemptFacts
from gateway.observability.tracing import Origin, Tracing
from gateway.topology.events import DecodeStarted, PrefillStarted
from services.runtime.clock import ManualClock
from services.runtime.errors import (
    DeadlineExceeded,
    GrammarExhausted,
    InvalidRequest,
    Overloaded,
    RateLimited,
    RequestCancelled,
    WorkerLost,
)
from services.scheduling.routing.route import Route
from tests.kept_spans import KeptSpans


@pytest.fixture
def spans(monkeypatch):
    return KeptSpans.install(monkeypatch)


def begin(clock):
    return Tracing(clock=clock).begin(None, arrived_s=clock.monotonic(), arrived_unix_ns=clock.unix_ns())


def test_an_answer_that_was_left_has_an_end_and_may_end_later(spans):
    clock = ManualClock()
    request = begin(clock)
    answer = request.answer(0, "tiny")
    clock.advance(0.5)
    request.finish(Overloaded("full"), dict)
    clock.advance(0.5)
    answer.end(None, num_tokens=1)
    request.finish(None, dict)
    whole, trace = spans.one("request"), spans.spans
    (queue, _) = trace
    assert (queue.start_unix_ns, queue.end_unix_ns) == (whole.start_unix_ns, whole.end_unix_ns)
    assert [span.name for span in trace] == ["queue", whole.name]
    assert whole.end_unix_ns - whole.start_unix_ns == 500_000_000


@pytest.mark.parametrize(
    ("error", "error_type", "is_failed", "status"),
    [
        (InvalidRequest("no"), "InvalidRequest", False, 400),
        (GrammarExhausted("no"), "GrammarExhausted", False, 400),
        (RateLimited("no"), "RateLimited", False, 429),
        (Overloaded("no"), "Overloaded", True, 503),
        (WorkerLost("no"), "WorkerLost", True, 503),
        (DeadlineExceeded("no"), "DeadlineExceeded", True, 504),
        (RuntimeError("no"), "RuntimeError", True, 500),
        (RequestCancelled("no"), "", False, None),
        (asyncio.CancelledError(), "", False, None),
    ],
)
@pytest.mark.parametrize("has_token", [False, True])
def test_the_status_is_an_error_where_the_server_is_at_fault(spans, error, error_type, is_failed, status, has_token):
    clock = ManualClock()
    request = begin(clock)
    request.origin = Origin(http_route="/v1/completions", is_streamed=True)
    answer = request.answer(0, "tiny")
    if has_token:
        answer.has_token()
    answer.end(error, num_tokens=0)
    request.finish(error, dict)
    whole = spans.one("request")
    for span in (spans.one("queue"), whole):
        assert (span.error_type, span.is_failed) == (error_type, is_failed)
    # A stream that has begun has begun with 200, whatever comes then.
    assert whole.attributes.get("http.response.status_code") == (200 if has_token else status)
    assert whole.attributes["http.route"] == "/v1/completions"


def test_a_method_of_grpc_ends_with_its_own_status(spans):
    clock = ManualClock()
    request = begin(clock)
    request.origin = Origin(rpc_method="tandem.v1.Inference/Generate")
    request.answer(0, "tiny").has_token()
    request.finish(WorkerLost("no"), dict)
    assert spans.one("request").attributes["rpc.response.status_code"] == "UNAVAILABLE"


ROUTE = Route(None, (), True, "remote_is_cheaper", 0.5, 0.01, 0, {})


def placed_answer(clock, request):
    """Asked at 1 s, taken at 1.1 s, and heard to compute."""
    answer = request.answer(0, "tiny")
    clock.advance(1)
    asked_s = clock.monotonic()
    clock.advance(0.1)
    facts = AttemptFacts(1, request.for_attempt(), 3, 0, "d", False, prefill_worker="p")
    answer.placed(facts, ROUTE, asked_s=asked_s, predicted_queue_s=None)
    return answer, facts


def test_phases_begin_when_workers_say_that_they_did_and_have_no_gap(spans):
    clock = ManualClock()
    began_unix_ns = clock.unix_ns()
    request = begin(clock)
    answer, facts = placed_answer(clock, request)
    facts.prefill_started = PrefillStarted(0.0, began_unix_ns=began_unix_ns + 1_050_000_000)
    clock.advance(1)
    answer.goes_on("kv_transfer", facts, num_tokens=1)
    clock.advance(0.1)
    facts.decode_started = DecodeStarted(began_unix_ns=began_unix_ns + 2_080_000_000)
    answer.goes_on("decode", facts, num_tokens=1)
    clock.advance(1)
    answer.end(None, num_tokens=5)
    request.finish(None, dict)
    seen = [
        (span.name, (span.start_unix_ns - began_unix_ns) // 10**6, (span.end_unix_ns - began_unix_ns) // 10**6)
        for span in spans.spans[:-1]
    ]
    assert seen == [
        ("queue", 0, 1000),
        ("route", 1000, 1050),
        ("prefill", 1050, 2080),
        ("kv_transfer", 2080, 2080),
        ("decode", 2080, 3200),
    ]
    assert spans.one("decode").attributes["tandem.actual_s"] == pytest.approx(1.12)


def test_no_phase_begins_before_its_workers_were_asked_whatever_they_say(spans):
    clock = ManualClock()
    request = begin(clock)
    answer, facts = placed_answer(clock, request)
    facts.prefill_started = PrefillStarted(0.0, began_unix_ns=1)
    clock.advance(1)
    answer.end(None, num_tokens=1)
    request.finish(None, dict)
    queue, route, prefill = spans.spans[:3]
    assert queue.end_unix_ns - queue.start_unix_ns == 1_000_000_000
    assert route.start_unix_ns == route.end_unix_ns == prefill.start_unix_ns == queue.end_unix_ns


@pytest.mark.parametrize(("started", "decoding"), [(False, False), (True, False), (True, True)])
def test_what_was_heard_of_an_attempt_is_told_where_it_is_sampled(spans, started, decoding):
    _, facts = placed_answer(ManualClock(), begin(ManualClock()))
    facts.prefill_started = PrefillStarted(0.0) if started else None
    facts.decode_started = DecodeStarted() if decoding else None
    assert facts.heard == (started, decoding)
    facts.trace = facts.trace._replace(is_sampled=False)
    assert facts.heard is None
