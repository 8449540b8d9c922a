from array import array
from typing import Any

import pytest

from protos import inference_pb2, worker_pb2
from services.engine.steps.step import PromptReport, SampledToken
from services.runtime.errors import AlreadyExists, InvalidRequest
from services.runtime.sampling import SamplingParams
from worker.attempts import AttemptKey, AttemptTable, read_key, read_spec, tokens_message


def spec(**fields: Any) -> worker_pb2.SequenceSpec:
    given = {
        "id": worker_pb2.AttemptId(request_id="r", attempt=1),
        "prompt_token_ids": [1, 2],
        "sampling": inference_pb2.SamplingParams(max_tokens=3),
        "deadline_ms": 1000,
    }
    return worker_pb2.SequenceSpec(**(given | fields))


def test_a_spec_becomes_plain_data_with_the_defaults_of_absent_fields() -> None:
    read = read_spec(spec(emitted_token_ids=[9], traceparent="00-x"), SamplingParams)
    assert read.service_class == 2, "absent"
    assert [read_spec(spec(service_class=number), SamplingParams).service_class for number in (0, 4)] == [0, 4]
    assert read.key == AttemptKey("r", 1)
    assert (read.prompt_token_ids, read.emitted_token_ids, read.traceparent) == ([1, 2], [9], "00-x")
    assert read.sampling == SamplingParams(max_tokens=3, stop_token_ids=frozenset())
    assert (read.adapter, read_spec(spec(adapter="sql"), SamplingParams).adapter) == ("", "sql")
    assert 0.5 < read.deadline.remaining_s() <= 1.0


def test_zero_that_was_given_is_not_absent() -> None:
    sampling = inference_pb2.SamplingParams(max_tokens=3, temperature=0.0, logprobs=0)
    read = read_spec(spec(sampling=sampling), SamplingParams)
    assert read.sampling == SamplingParams(max_tokens=3, temperature=0.0, logprobs=0, stop_token_ids=frozenset())


def test_end_of_sequence_tokens_stop_unless_they_are_ignored() -> None:
    sampling = inference_pb2.SamplingParams(max_tokens=3, stop_token_ids=[5])
    assert read_spec(spec(sampling=sampling, eos_token_ids=[1]), SamplingParams).sampling.stop_token_ids == {1, 5}
    sampling.ignore_eos = True
    assert read_spec(spec(sampling=sampling, eos_token_ids=[1]), SamplingParams).sampling.stop_token_ids == {5}


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_token_ids": []},
        {"id": worker_pb2.AttemptId(request_id="", attempt=1)},
        {"id": worker_pb2.AttemptId(request_id="r", attempt=0)},
        {"sampling": inference_pb2.SamplingParams()},
    ],
)
def test_a_spec_that_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        read_spec(spec(**fields), SamplingParams)


def test_of_each_request_only_the_newest_attempt_is_known() -> None:
    table: AttemptTable[str] = AttemptTable()
    assert table.begin(AttemptKey("r", 1), "first") is None
    assert table.begin(AttemptKey("r", 3), "third") == "first"
    assert table.begin(AttemptKey("s", 1), "other") is None
    assert table.find(AttemptKey("r", 1)) is None
    assert table.find(AttemptKey("r", 3)) == "third"
    for late in (1, 2, 3):
        with pytest.raises(AlreadyExists):
            table.begin(AttemptKey("r", late), "late")
    table.end(AttemptKey("r", 1))
    assert len(table) == 2, "the end of a superseded attempt is not the end of the newest"
    table.end(AttemptKey("r", 3))
    table.end(AttemptKey("r", 3))
    assert list(table) == ["other"]


def test_a_key_is_read_from_a_message() -> None:
    assert read_key(worker_pb2.AttemptId(request_id="r", attempt=7)) == ("r", 7)


def test_what_is_reported_of_a_prompt_is_columns() -> None:
    report = PromptReport(2, array("d", [-1.0, -2.0]), array("I", [7, 8, 9, 10]), array("d", [-0.5, -1.5, -0.25, -4.0]))
    message = tokens_message(0, SampledToken(5, prompt=report))
    assert isinstance(message, worker_pb2.Tokens)
    columns = worker_pb2.Tokens.FromString(message.SerializeToString()).prompt_logprobs
    told = PromptReport(
        2, array("d", columns.logprobs), array("I", columns.top_token_ids), array("d", columns.top_logprobs)
    )
    assert (told, list(message.token_ids)) == (report, [5])
