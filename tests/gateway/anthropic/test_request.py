"""Requests of Anthropic's API as calls, and what becomes of each of their members."""

import json

import pytest

from gateway.anthropic.request import MessagesRequest, in_own_words
from gateway.openai.requests import parse
from gateway.openai.vocabulary import WORDS, Refused
from services.runtime.errors import InvalidRequest

SOMETHING = "something"
USER = {"role": "user", "content": "a"}
TOOL = {"name": "clock", "input_schema": {"type": "object"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def parsed(**members):
    return parse(json.dumps({"messages": [USER], "max_tokens": 9, **members}).encode(), MessagesRequest)


def call_of(**members):
    return parsed(**members)[0].call()


def test_no_member_is_dropped_without_a_word():
    words = {name: word for name, word in WORDS[""].items() if name not in MessagesRequest.__struct_fields__}
    assert len(words) > 80
    for name, word in words.items():
        if isinstance(word, Refused):
            with pytest.raises(InvalidRequest) as refused:
                parsed(**{name: SOMETHING})
            assert refused.value.field == name
        else:
            assert parsed(**{name: SOMETHING})[1] == [name]
    assert parsed(nobody_knows_it=1)[1] == ["nobody_knows_it"]


@pytest.mark.parametrize(
    "members",
    [
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
        {"messages": [{**USER, "x": 1}]},
        {"system": [{"type": "text", "text": "a", "x": 1}]},
        {"tools": [{**TOOL, "x": 1}]},
        {"tools": [TOOL], "tool_choice": {"type": "auto", "x": 1}},
        {"thinking": {"type": "adaptive", "x": 1}},
        {"output_config": {"effort": "low", "x": 1}},
        {"metadata": {"x": 1}},
    ],
)
def test_inner_members_are_named_too(members):
    _, ignored = parsed(**members)
    assert [name.rpartition(".")[2] for name in ignored] == ["x"]


def test_options_of_another_servers_streams():
    """The usage is in every stream of this API."""
    request, ignored = parsed(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert (ignored, request.left_out()) == ([], ["stream_options.continuous_usage_stats"])
    for wrong in (2.01, [], "a", {"include_obfuscation": True}, {"include_usage": 1}):
        with pytest.raises(InvalidRequest, match=r"^stream_options"):
            parsed(stream=True, stream_options=wrong)[0].call()


def test_all_that_is_asked_for_reaches_the_call():
    call = call_of(
        system="s",
        tools=[TOOL],
        tool_choice={"type": "any"},
        stop_sequences=["x"],
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        metadata={"user_id": "me"},
        thinking={"type": "disabled"},
        output_config={"effort": "low"},
        chat_template_kwargs={"more": 1},
    )
    assert [message["role"] for message in call.messages] == ["system", "user"]
    assert (call.must_call, call.affinity_key, call.sampling.max_tokens) == ({"clock"}, "me", 9)
    assert call.sampling.stop == ["x"]
    assert (call.sampling.temperature, call.sampling.top_k, call.sampling.top_p) == (0.5, 3, 0.9)
    assert call.template_words == {"enable_thinking": False, "reasoning_effort": "low", "more": 1}
    assert call.template_fields == {
        "enable_thinking": "thinking",
        "reasoning_effort": "output_config.effort",
        "more": "chat_template_kwargs.more",
    }


@pytest.mark.parametrize("place", ["output_config", "output_format"])
def test_a_schema_is_the_form_of_the_answer(place):
    wanted = {"type": "json_schema", "schema": SCHEMA}
    call = call_of(**{place: {"format": wanted} if place == "output_config" else wanted})
    assert json.loads(call.sampling.json_schema) == SCHEMA


def test_two_schemas_are_refused():
    wanted = {"type": "json_schema", "schema": SCHEMA}
    with pytest.raises(InvalidRequest) as refused:
        call_of(output_config={"format": wanted}, output_format=wanted)
    assert refused.value.field == "output_format"


def test_counting_needs_no_bound():
    request, _ = parsed(max_tokens=None)
    assert request.counted_call().messages
    with pytest.raises(InvalidRequest) as refused:
        request.call()
    assert (refused.value.field, refused.value.code) == ("max_tokens", "missing_required_parameter")


@pytest.mark.parametrize(
    ("text", "own"),
    [
        ("tools[1].function.parameters must be", "tools[1].input_schema must be"),
        ("tools[1].function.name must be", "tools[1].name must be"),
        ("the schema in response_format must be", "the schema in output_config.format must be"),
        ("stop has 17 entries", "stop_sequences has 17 entries"),
    ],
)
def test_errors_are_in_the_words_of_this_api(text, own):
    assert in_own_words(text) == own
