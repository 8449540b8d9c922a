"""What is counted of an answer, and the span that it becomes."""

from typing import Any, cast

import pytest

from decode_worker.attempt import MAX_SPAN_EVENTS, DecodeAttempt
from services.engine.cache.pages import PageChanges, PageCounts
from services.runtime import telemetry
from services.runtime.clock import Deadline
from services.runtime.errors import TransferFailed
from tests.kept_spans import KeptSpans, events_of
from worker.attempts import AttemptKey, AttemptSpec
from worker.engine import Advance, DecodeReport, Guesses, Preemption
from worker.spans import AttemptSpans

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def attempt(*, is_traced: bool = True, from_decode: bool = False) -> DecodeAttempt:
    spec: AttemptSpec[Any] = AttemptSpec(
        AttemptKey("r", 1), [1, 2, 3], [4, 5], cast(Any, None), Deadline.after(30), traceparent=""
    )
    spans = AttemptSpans(telemetry.sampled(TRACEPARENT, "") if is_traced else None)
    return DecodeAttempt(spec, cast(Any, None), spans, 0.0, from_decode, is_local=False)


def report(start_unix_ns: int, num_sequences: int) -> DecodeReport:
    advances = tuple(Advance(key, 0, 1, 0, None, None) for key in range(num_sequences))
    return DecodeReport(
        start_unix_ns, start_unix_ns + 5, PageCounts(1, 1, 0, 0, 0), PageChanges.none(), advances, (), 0, 0, 0
    )


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> KeptSpans:
    return KeptSpans.install(monkeypatch)


def test_a_prompts_pages_come_from_a_prefill_worker_and_an_answers_too_from_a_decode_worker() -> None:
    assert attempt().num_tokens_to_come == 3
    assert attempt(from_decode=True).num_tokens_to_come == 4, "all but the last token"


def test_steps_are_one_span_with_their_neighbours(kept: KeptSpans) -> None:
    one = attempt()
    one.num_tokens = 7
    one.note_step(report(100, 1))
    one.note_step(report(200, 4))
    one.note_guesses(Guesses("ngram", 3, 2))
    one.note_guesses(Guesses("draft", 2, 0))
    one.note_preemption(Preemption("r", "swapped"), 150)
    one.note_steps(None)
    one.spans.export()
    span = kept.one("decode.steps")
    assert (span.start_unix_ns, span.end_unix_ns, span.error_type) == (100, 205, "")
    assert span.attributes == {
        "tandem.tokens": 7,
        "tandem.steps": 2,
        "tandem.batch_mean": 2.5,
        "tandem.batch_max": 4,
        "tandem.preemptions": 1,
        "tandem.proposed": 5,
        "tandem.accepted": 2,
    }
    assert events_of(span) == [("preempted", {"tandem.reason": "swapped", "tandem.tokens": 7})]


def test_a_failure_makes_it_a_failed_span(kept: KeptSpans) -> None:
    one = attempt()
    one.note_step(report(100, 1))
    one.note_steps(TransferFailed("x"))
    one.spans.export()
    assert kept.one("decode.steps").error_type


def test_what_was_in_no_step_or_has_no_trace_is_no_span(kept: KeptSpans) -> None:
    idle = attempt()
    untraced = attempt(is_traced=False)
    untraced.note_step(report(100, 1))
    for one in (idle, untraced):
        one.note_steps(None)
        one.spans.export()
    assert kept.spans == []
    assert untraced.decoding_since_unix_ns == 100


def test_an_attempt_that_is_preempted_without_end_keeps_a_bounded_number_of_events(kept: KeptSpans) -> None:
    one = attempt()
    one.note_step(report(100, 1))
    for number in range(2 * MAX_SPAN_EVENTS):
        one.note_preemption(Preemption("r", "place"), number)
    one.note_steps(None)
    one.spans.export()
    span = kept.one("decode.steps")
    assert len(span.events) == MAX_SPAN_EVENTS
    assert span.attributes["tandem.preemptions"] == 2 * MAX_SPAN_EVENTS
