from typing import Any

import pytest

from protos import worker_pb2
from services.runtime.errors import InvalidRequest
from services.structured.form import (
    AnswerForm,
    CalledFunction,
    Reasoning,
    ToolCalls,
    ToolFormat,
    read_form,
    write_form,
)

FUNCTIONS = (CalledFunction("a", '{"type":"object"}'), CalledFunction("é", "{}"))
FORMS = [
    None,
    AnswerForm("{}"),
    AnswerForm("{}", None, Reasoning.MAY_COME),
    AnswerForm("", ToolCalls(ToolFormat.HERMES, FUNCTIONS)),
    AnswerForm("{}", ToolCalls(ToolFormat.LLAMA3, FUNCTIONS[:1], is_parallel=False), Reasoning.IS_OPEN),
    AnswerForm("", ToolCalls(ToolFormat.MISTRAL, FUNCTIONS, is_optional=True)),
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_what_is_written_is_read(form: AnswerForm | None) -> None:
    message = worker_pb2.SequenceSpec()
    write_form(form, message)
    read = read_form(worker_pb2.SequenceSpec.FromString(message.SerializeToString()))
    assert read == form
    assert hash(read) == hash(form)


def test_what_an_older_gateway_writes_is_read() -> None:
    """It knows schemas only."""
    assert read_form(worker_pb2.SequenceSpec(json_schema='{"const":1}')) == AnswerForm('{"const":1}')


@pytest.mark.parametrize(
    "fields",
    [
        {"json_schema": "{}", "reasoning": "sometimes"},
        {"tool_calls": {"tool_format": "xml", "functions": [{"name": "f", "parameters": "{}"}]}},
        {"tool_calls": {"functions": [{"name": "f", "parameters": "{}"}]}},
        {"tool_calls": {"tool_format": "hermes"}},
    ],
    ids=str,
)
def test_what_is_not_known_is_refused(fields: dict[str, Any]) -> None:
    """A newer gateway may ask for what this worker cannot do; any other answer would be wrong."""
    with pytest.raises(InvalidRequest):
        read_form(worker_pb2.SequenceSpec(**fields))


def test_bytes_of_all_texts() -> None:
    assert AnswerForm('{"é":1}').num_bytes == 8
    assert AnswerForm("{}", ToolCalls(ToolFormat.HERMES, FUNCTIONS)).num_bytes == 2 + 1 + 17 + 2 + 2
