"""Phases of an answer: what ended them, and whose fault it was."""

import asyncio

import pytest

from gateway.observability.tracing import Origin, Tracing
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
