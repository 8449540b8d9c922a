"""Messages with earlier calls, as chat templates take them."""

import pytest

from gateway.models.conversation import MAX_TOOL_DEPTH, check_conversation, json_text
from services.runtime.errors import InvalidRequest
from tests.gateway.test_chat_tools import ASKED


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ('{"city": "Kö', {"city": "Kö"}),
        ('{"city": "K\\', {}),
        ('{"city"', {}),
        ("{", {}),
        ('{"city": "Köln", "days": [1, {"a": tr', {"city": "Köln", "days": [1, {}]}),
        ('{"city": "Köln", "da', {"city": "Köln"}),
        ('{"a": -', {}),
    ],
)
def test_our_own_half_written_arguments_are_taken_back(written, meant):
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": written}}
    conversation = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}]
    checked = check_conversation(conversation, max_chars=1000)
    assert checked[1]["tool_calls"][0]["function"]["arguments"] == meant


def test_json_is_nested_as_deep_as_the_bound_and_no_deeper():
    nested: object = "leaf"
    for _ in range(MAX_TOOL_DEPTH - 1):
        nested = [nested]
    assert json_text(nested, "tools").count("[") == MAX_TOOL_DEPTH - 1
    with pytest.raises(InvalidRequest) as refused:
        json_text([nested], "tools")
    assert (refused.value.field, refused.value.code) == ("tools", "invalid_value")


def test_a_tools_answer_names_a_call_before_it():
    said = {"role": "tool", "content": "12:00", "tool_call_id": "call_1"}
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert check_conversation([*ASKED, asked, said], max_chars=1000)[2]["tool_call_id"] == "call_1"
    with pytest.raises(InvalidRequest) as refused:
        check_conversation([*ASKED, said, asked], max_chars=1000)
    assert refused.value.field == "messages[1].tool_call_id"
