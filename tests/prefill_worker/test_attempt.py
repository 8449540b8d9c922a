"""What is told of a prompt's chunks, and which prompts need a grammar."""

from typing import Any, cast

from prefill_worker.attempt import MAX_TOLD_CHUNKS, PrefillAttempt
from services.engine.cache.pages import PageChanges, PageCounts
from services.runtime.clock import Deadline
from services.runtime.errors import RequestCancelled
from services.structured.form import AnswerForm
from worker.attempts import AttemptKey, AttemptSpec
from worker.engine import ComputedChunk, PrefillReport
from worker.spans import AttemptSpans


def attempt(**fields: Any) -> PrefillAttempt:
    given: dict[str, Any] = {"emitted_token_ids": []} | fields
    spec: AttemptSpec[Any] = AttemptSpec(
        AttemptKey("r", 1), [1, 2, 3], sampling=None, deadline=Deadline.after(30), traceparent="", **given
    )
    return PrefillAttempt(spec, cast(Any, None), AttemptSpans(None), "decode:1", "d" * 32, 0.0)


def note(one: PrefillAttempt, start_unix_ns: int, end_unix_ns: int, num_tokens: int) -> None:
    report = PrefillReport(start_unix_ns, end_unix_ns, PageCounts(1, 1, 0, 0, 0), PageChanges.none(), ())
    one.note_chunk(report, ComputedChunk("r", 0, num_tokens, 0, (), False, None, None))


def test_chunks_are_told_from_the_moment_at_which_the_gateway_heard_of_the_beginning() -> None:
    one = attempt()
    one.started_unix_ns = 1_000_000_000
    note(one, 500_000_000, 1_500_000_000, 16)
    note(one, 2_000_000_000, 2_250_000_000, 8)
    told = [(chunk.began_s, chunk.spent_s, chunk.num_tokens) for chunk in one.told_chunks()]
    assert told == [(0.0, 1.0, 16), (1.0, 0.25, 8)]
    assert one.chunks.qsize() == 2


def test_the_first_chunks_of_many_are_told_and_all_are_followed() -> None:
    one = attempt()
    for number in range(MAX_TOLD_CHUNKS + 5):
        note(one, number, number + 1, 1)
    assert len(one.told_chunks()) == MAX_TOLD_CHUNKS
    assert one.chunks.qsize() == MAX_TOLD_CHUNKS + 5


def test_only_what_samples_a_token_of_a_form_needs_a_grammar() -> None:
    form = AnswerForm("json_schema", "{}")
    assert attempt(form=form).needs_grammar
    assert not attempt(form=form, emitted_token_ids=[7]).needs_grammar
    assert not attempt().needs_grammar


def test_an_attempt_counts_as_cancelled_until_it_ends_otherwise() -> None:
    one = attempt()
    assert one.outcome == "cancelled"
    assert isinstance(one.abort_reason, RequestCancelled)
    one.end("handed_off", None)
    assert (one.outcome, one.abort_reason) == ("handed_off", None)
