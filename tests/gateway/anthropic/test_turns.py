"""Anthropic's conversations and tools become those of chats, or are refused by the names that they have there."""

import pytest

from gateway.anthropic.turns import chat_messages, chat_tool_choice, chat_tools, left_out
from services.runtime.errors import InvalidRequest

USER = {"role": "user", "content": "a"}
USE = {"type": "tool_use", "id": "toolu_1", "name": "clock", "input": {"at": "Köln"}}
CALL = {"id": "toolu_1", "type": "function", "function": {"name": "clock", "arguments": '{"at":"Köln"}'}}
TOOL = {"name": "clock", "description": "Tells.", "input_schema": {"type": "object"}, "cache_control": {}}


def text(value):
    return {"type": "text", "text": value}


def result(content, **more):
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **more}


CONVERSATIONS = {
    "text": (None, [USER], [{"role": "user", "content": [text("a")]}]),
    "system": (
        "s",
        [USER],
        [{"role": "system", "content": [text("s")]}, {"role": "user", "content": [text("a")]}],
    ),
    "system in parts": (
        [text("s"), {**text("t"), "cache_control": {"type": "ephemeral"}}],
        [USER],
        [{"role": "system", "content": [text("s"), text("t")]}, {"role": "user", "content": [text("a")]}],
    ),
    "turns are merged": (
        None,
        [USER, USER, {"role": "assistant", "content": "b"}, {"role": "assistant", "content": [text("c")]}],
        [{"role": "user", "content": [text("a"), text("a")]}, {"role": "assistant", "content": "bc"}],
    ),
    "a call and its result": (
        None,
        [
            USER,
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "Hm", "signature": "x"}, text("b"), USE],
            },
            {"role": "user", "content": [result([text("1"), text("2")], is_error=True), text("and?")]},
        ],
        [
            {"role": "user", "content": [text("a")]},
            {"role": "assistant", "content": "b", "reasoning_content": "Hm", "tool_calls": [CALL]},
            {"role": "tool", "content": "1\n2", "tool_call_id": "toolu_1"},
            {"role": "user", "content": [text("and?")]},
        ],
    ),
    "a result without content": (
        None,
        [USER, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [result(None)]}],
        [
            {"role": "user", "content": [text("a")]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "", "tool_call_id": "toolu_1"},
        ],
    ),
    "a document of text": (
        None,
        [{"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "d"}}]}],
        [{"role": "user", "content": [text("d")]}],
    ),
    "thoughts that nobody can read": (
        None,
        [USER, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, text("b")]}],
        [{"role": "user", "content": [text("a")]}, {"role": "assistant", "content": "b"}],
    ),
}


@pytest.mark.parametrize("row", CONVERSATIONS, ids=CONVERSATIONS)
def test_conversations(row):
    system, messages, expected = CONVERSATIONS[row]
    assert chat_messages(system, messages) == expected


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
REFUSED = {
    "no messages": (None, [], "messages"),
    "role": (None, [{"role": "tool", "content": "a"}], "messages[0].role"),
    "text": (None, [{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    "half a pair": (None, [{"role": "user", "content": "\ud800"}], "messages[0].content[0].text"),
    "type of a question": (None, [{"role": "user", "content": [{"type": {}}]}], "messages[0].content[0].type"),
    "type of an answer": (None, [{"role": "assistant", "content": [{"type": []}]}], "messages[0].content[0].type"),
    "type of a system's": ([{"type": [1]}], [{"role": "user", "content": "a"}], "system[0].type"),
    "image": (None, [{"role": "user", "content": [IMAGE]}], "messages[0].content[0]"),
    "image of a tool": (None, [{"role": "user", "content": [result([IMAGE])]}], "messages[0].content[0].content[0]"),
    "empty": (None, [{"role": "user", "content": []}], "messages[0].content"),
    "use by a user": (None, [{"role": "user", "content": [USE]}], "messages[0].content[0].type"),
    "result of an assistant": (None, [{"role": "assistant", "content": [result("a")]}], "messages[0].content[0].type"),
    "input": (None, [{"role": "assistant", "content": [{**USE, "input": "{}"}]}], "messages[0].content[0].input"),
    "system": ({"text": "a"}, [USER], "system"),
}


@pytest.mark.parametrize("row", REFUSED, ids=REFUSED)
def test_mistakes_are_named_by_their_block(row):
    system, messages, field = REFUSED[row]
    with pytest.raises(InvalidRequest) as refused:
        chat_messages(system, messages)
    assert refused.value.field == field
    assert field in str(refused.value)


def test_tools():
    tools = [TOOL, {"type": "web_search_20250305", "name": "web_search"}, {**TOOL, "type": "custom", "strict": True}]
    plain = {"name": "clock", "description": "Tells.", "parameters": {"type": "object"}}
    assert chat_tools(tools) == [
        {"type": "function", "function": plain},
        {"type": "function", "function": {**plain, "strict": True}},
    ]
    assert left_out(tools) == ["tools.web_search_20250305"]
    for tool, field in (
        ({"type": "bash_20250124", "name": "bash"}, "tools[0].type"),
        ({"name": "a"}, "tools[0].input_schema"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            chat_tools([tool])
        assert refused.value.field == field


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, (None, None)),
        ({"type": "auto"}, (None, None)),
        ({"type": "auto", "disable_parallel_tool_use": True}, (None, False)),
        ({"type": "any", "disable_parallel_tool_use": False}, ("required", True)),
        ({"type": "none"}, ("none", None)),
        ({"type": "tool", "name": "clock"}, ({"type": "function", "function": {"name": "clock"}}, False)),
    ],
)
def test_choices(choice, expected):
    assert chat_tool_choice(choice) == expected


@pytest.mark.parametrize(
    "choice", [{"type": "required"}, {}, {"type": []}, {"type": "auto", "disable_parallel_tool_use": 1}]
)
def test_wrong_choices(choice):
    with pytest.raises(InvalidRequest):
        chat_tool_choice(choice)
