"""Requests of the Responses API become those of chats, or are refused by the names that they have there."""

import copy
import functools
import json
import operator
from typing import Any

import pytest

from gateway.openai.requests import parse
from gateway.openai.responses_request import ResponsesRequest, check_items, own_words
from services.runtime import status
from services.runtime.errors import InvalidRequest
from tests.gateway.test_chat_tools import WEATHER

ASKED = "How is it?"
TOOLS = [{"type": "function", **WEATHER["function"]}, {"type": "function", "name": "clock"}]
LOGPROBS = "message.output_text.logprobs"
UNSUPPORTED = "unsupported_parameter"
USER = {"role": "user", "content": "a"}


def call_item(call_id, **more):
    return {"type": "function_call", "call_id": call_id, "name": "clock", "arguments": "{}", **more}


def output_item(call_id, output="fine"):
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def text_part(text, kind="input_text"):
    return {"type": kind, "text": text}


def called(call_id):
    return {"id": call_id, "type": "function", "function": {"name": "clock", "arguments": "{}"}}


CONVERSATIONS = {
    "text": ("a", [USER]),
    "parts": (
        [{"type": "message", "role": "user", "content": [text_part("a"), text_part("b")]}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    ),
    "roles": (
        [{"role": "developer", "content": "x"}, {"role": "system", "content": "y"}, USER],
        [{"role": "developer", "content": "x"}, {"role": "system", "content": "y"}, USER],
    ),
    "answer": (
        [USER, {"role": "assistant", "content": [text_part("b", "output_text")], "id": "msg_1", "status": "completed"}],
        [USER, {"role": "assistant", "content": [{"type": "text", "text": "b"}]}],
    ),
    "two answers": (
        [USER, {"role": "assistant", "content": "b"}, {"role": "assistant", "content": "c"}],
        [USER, {"role": "assistant", "content": "b"}, {"role": "assistant", "content": "c"}],
    ),
    "calls in a row": (
        [USER, call_item("1"), call_item("2"), output_item("1"), output_item("2", [text_part("b")]), USER],
        [
            USER,
            {"role": "assistant", "tool_calls": [called("1"), called("2")]},
            {"role": "tool", "content": "fine", "tool_call_id": "1"},
            {"role": "tool", "content": [{"type": "text", "text": "b"}], "tool_call_id": "2"},
            USER,
        ],
    ),
    "calls in turn": (
        [USER, call_item("1"), output_item("1"), call_item("2"), output_item("2")],
        [
            USER,
            {"role": "assistant", "tool_calls": [called("1")]},
            {"role": "tool", "content": "fine", "tool_call_id": "1"},
            {"role": "assistant", "tool_calls": [called("2")]},
            {"role": "tool", "content": "fine", "tool_call_id": "2"},
        ],
    ),
    "words after a call": (
        [USER, call_item("1"), {"role": "assistant", "content": "b"}],
        [USER, {"role": "assistant", "tool_calls": [called("1")]}, {"role": "assistant", "content": "b"}],
    ),
    "reasoning": (
        [
            USER,
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [text_part("h", "reasoning_text")]},
            {"role": "assistant", "content": "b"},
            call_item("1"),
            {"type": "reasoning", "summary": [], "content": [text_part("i", "reasoning_text")]},
            call_item("2"),
        ],
        [
            USER,
            {"role": "assistant", "reasoning_content": "h", "content": "b", "tool_calls": [called("1")]},
            {"role": "assistant", "reasoning_content": "i", "tool_calls": [called("2")]},
        ],
    ),
    "reasoning of another server": (
        [
            USER,
            {"type": "reasoning", "id": "rs_1", "summary": [text_part("s", "summary_text")], "encrypted_content": "x"},
        ],
        [USER],
    ),
}


def call_for(**body):
    request, _ = parse(json.dumps({"input": ASKED, **body}).encode(), ResponsesRequest)
    return request.call()


@pytest.mark.parametrize("row", CONVERSATIONS, ids=CONVERSATIONS)
def test_items_become_messages(row):
    items, messages = CONVERSATIONS[row]
    assert call_for(input=items).messages == messages
    assert call_for(input=items, instructions="i").messages == [{"role": "system", "content": "i"}, *messages]


def test_options_become_those_of_a_chat():
    call = call_for(
        model="m",
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.25,
        seed=3,
        tools=TOOLS,
        user="u",
        service_class="batch",
    )
    assert (call.operation, call.model, call.affinity_key, call.service_class) == ("chat", "m", "u", "batch")
    sampling = call.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed) == (7, 0.5, 0.25, 3)
    assert [tool["function"]["name"] for tool in call.tools] == ["weather", "clock"]
    assert call_for(user="u", prompt_cache_key="k").affinity_key == "k"
    assert call_for(tools=TOOLS, tool_choice="none").tools is None


REFUSED = {
    "context_management": ({"context_management": [{"type": "compaction"}]}, "context_management", UNSUPPORTED),
    "moderation": ({"moderation": {"model": "m"}}, "moderation", UNSUPPORTED),
    "prompt": ({"prompt": {"id": "p"}}, "prompt", UNSUPPORTED),
    "top_logprobs": ({"top_logprobs": 21}, "top_logprobs", "invalid_value"),
    "top_logprobs-tools": ({"top_logprobs": 2, "tools": TOOLS}, "top_logprobs", UNSUPPORTED),
    "logprobs-tools": ({"include": [LOGPROBS], "tools": TOOLS}, "include", UNSUPPORTED),
    "truncation": ({"truncation": "middle"}, "truncation", UNSUPPORTED),
    "summary": ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", UNSUPPORTED),
    "obfuscation": (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        UNSUPPORTED,
    ),
    "stream_options": ({"stream_options": {"include_obfuscation": False}}, "stream_options", None),
    "include": ({"include": ["file_search_call.results"]}, "include", UNSUPPORTED),
    "service_tier": ({"service_tier": "best"}, "service_tier", "invalid_value"),
    "max_tokens": ({"max_tokens": 5}, "max_tokens", UNSUPPORTED),
    "messages": ({"messages": [USER]}, "messages", UNSUPPORTED),
    "n": ({"n": 2}, "n", UNSUPPORTED),
    "reasoning_effort": ({"reasoning_effort": "low"}, "reasoning_effort", UNSUPPORTED),
    "response_format": ({"response_format": {"type": "json_object"}}, "response_format", UNSUPPORTED),
    "suffix": ({"suffix": "a"}, "suffix", UNSUPPORTED),
    "custom-tool": ({"tools": [{"type": "custom", "name": "a"}]}, "tools[0].type", UNSUPPORTED),
    "tool-text": ({"tools": ["f"]}, "tools[0]", "invalid_value"),
    "tool-of-chat": ({"tools": [WEATHER]}, "tools[0].name", "invalid_value"),
    "tool-parameters": (
        {"tools": [{"type": "function", "name": "f", "parameters": []}]},
        "tools[0].parameters",
        "invalid_value",
    ),
    "tool-strict": ({"tools": [{**TOOLS[1], "strict": "yes"}]}, "tools[0].strict", "invalid_value"),
    "format-description": (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {}, "description": []}}},
        "text.format.description",
        "invalid_value",
    ),
    "choice-hosted": ({"tools": TOOLS, "tool_choice": {"type": "file_search"}}, "tool_choice", "invalid_value"),
    "choice-word": ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice", "invalid_value"),
    "choice-name": ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.name", "invalid_value"),
    "choice-unknown": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "name": "rm"}},
        "tool_choice",
        "invalid_value",
    ),
    "format-type": ({"text": {"format": {"type": "xml"}}}, "text.format", "invalid_value"),
    "format-name": (
        {"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}},
        "text.format",
        "invalid_value",
    ),
    "format-schema": (
        {"text": {"format": {"type": "json_schema", "name": "a"}}},
        "text.format",
        "missing_required_parameter",
    ),
    "format-description-surrogate": (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {}, "description": "\ud800"}}},
        "text.format.description",
        "invalid_encoding",
    ),
    "format-text": ({"text": {"format": "json"}}, "text.format", "invalid_type"),
    "text-text": ({"text": "json"}, "text", "invalid_type"),
    "input-missing": ({"input": None}, "input", "missing_required_parameter"),
    "input-empty": ({"input": []}, "input", None),
    "input-number": ({"input": 5}, "input", "invalid_type"),
    "input-surrogate": ({"input": "\ud800"}, "input", "invalid_encoding"),
    "item-text": ({"input": ["a"]}, "input[0]", "invalid_value"),
    "item-type": ({"input": [USER, {"type": 5}]}, "input[1].type", "invalid_value"),
    "item-nothing": ({"input": [{}]}, "input[0].type", "invalid_value"),
    "item-reference": ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type", UNSUPPORTED),
    "item-hosted-call": ({"input": [USER, {"type": "web_search_call"}]}, "input[1].type", UNSUPPORTED),
    "role": ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "invalid_value"),
    "content-missing": ({"input": [{"role": "user"}]}, "input[0].content", "invalid_value"),
    "content-empty": ({"input": [{"role": "user", "content": []}]}, "input[0].content", "invalid_value"),
    "image": (
        {"input": [{"role": "user", "content": [text_part("a"), {"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[1]",
        "invalid_value",
    ),
    "file": (
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
        "input[0].content[0]",
        "invalid_value",
    ),
    "part-of-chat": (
        {"input": [{"role": "user", "content": [text_part("a", "text")]}]},
        "input[0].content[0]",
        "invalid_value",
    ),
    "reasoning-content": ({"input": [{"type": "reasoning", "content": "a"}]}, "input[0].content", "invalid_value"),
    "reasoning-part": (
        {"input": [{"type": "reasoning", "content": [text_part("a")]}]},
        "input[0].content[0]",
        "invalid_value",
    ),
    "call-id-missing": (
        {"input": [USER, {"type": "function_call", "name": "f", "arguments": "{}"}]},
        "input[1].call_id",
        "missing_required_parameter",
    ),
    "call-id": ({"input": [USER, call_item("x" * 65)]}, "input[1].call_id", "invalid_value"),
    "call-name": ({"input": [USER, call_item("1", name="a b")]}, "input[1].name", "invalid_value"),
    "call-arguments": ({"input": [USER, call_item("1", arguments="[]")]}, "input[1].arguments", "invalid_value"),
    "output-without-call": ({"input": [USER, output_item("1")]}, "input[1].call_id", "invalid_value"),
    "output-missing": ({"input": [call_item("1"), output_item("1", None)]}, "input[1].output", "invalid_value"),
    "instructions-list": ({"instructions": [USER]}, "instructions", "invalid_type"),
    "metadata-many": ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "invalid_value"),
    "metadata-long": ({"metadata": {"a": "x" * 513}}, "metadata", "invalid_value"),
    "metadata-number": ({"metadata": {"a": 1}}, "metadata[...]", "invalid_type"),
    "cache-key": ({"prompt_cache_key": "x" * 257}, "prompt_cache_key", None),
    "user": ({"user": "x" * 257}, "user", None),
    "logit_bias": ({"logit_bias": {"a": 1}}, "logit_bias", "invalid_value"),
}


@pytest.mark.parametrize("row", REFUSED, ids=REFUSED)
def test_refused(row):
    body, field, code = REFUSED[row]
    with pytest.raises(InvalidRequest) as refused, own_words():
        call_for(**body)
    error = status.openai_error(refused.value)["error"]
    assert error["param"] == field, error
    assert code is None or error["code"] == code, error
    assert field.partition(".")[0] in error["message"]
    assert len(error["message"]) < 300


GIVEN_BACK = [
    *[
        [name]
        for name in ("instructions", "prompt_cache_key", "safety_identifier", "user", "service_tier", "tool_choice")
    ],
    ["metadata", "a"],
    ["reasoning", "effort"],
    ["text", "format", "type"],
    ["text", "format", "name"],
    ["text", "format", "schema", "title"],
    ["text", "format", "description"],
    ["tool_choice", "name"],
    ["tools", 0, "name"],
    ["tools", 0, "description"],
    ["tools", 0, "parameters", "title"],
]


WITH_ALL: dict[str, Any] = {
    "metadata": {},
    "reasoning": {},
    "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}},
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    "tool_choice": {"type": "function", "name": "f"},
}


@pytest.mark.parametrize("path", GIVEN_BACK, ids=lambda path: ".".join(map(str, path)))
def test_half_a_surrogate_pair_in_what_is_given_back_is_refused(path):
    call_for(**WITH_ALL)
    body = copy.deepcopy(WITH_ALL)
    *outer, last = path
    functools.reduce(operator.getitem, outer, body)[last] = "half \ud800"
    with pytest.raises(InvalidRequest) as refused, own_words():
        call_for(**body)
    assert status.openai_error(refused.value)["error"]["param"] is None or path[0] in refused.value.field


@pytest.mark.parametrize(
    "members", [{"background": True}, {"previous_response_id": "resp_1"}, {"conversation": "conv_1"}]
)
def test_what_needs_a_store_is_refused_without_one(members):
    request, _ = parse(json.dumps({"input": ASKED, **members}).encode(), ResponsesRequest)
    with pytest.raises(InvalidRequest) as refused:
        request.check_stateless()
    assert (refused.value.field, refused.value.code) == (*members, UNSUPPORTED)
    parse(json.dumps({"input": ASKED, "store": True}).encode(), ResponsesRequest)[0].check_stateless()


def test_a_conversation_is_named_by_its_id_or_by_an_object_with_it():
    for named in ("conv_1", {"id": "conv_1"}):
        assert (
            parse(json.dumps({"input": ASKED, "conversation": named}).encode(), ResponsesRequest)[0].conversation_id
            == "conv_1"
        )
    assert parse(json.dumps({"input": ASKED}).encode(), ResponsesRequest)[0].conversation_id is None


def test_items_are_checked_after_those_before_them():
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "o"}
    check_items([output], before=[call])
    check_items([call, output], before=[])
    for items, before, field in (([output], [], "items[0].call_id"), ([call], [output], "conversation.call_id")):
        with pytest.raises(InvalidRequest) as refused:
            check_items(items, before=before)
        assert refused.value.field == field
