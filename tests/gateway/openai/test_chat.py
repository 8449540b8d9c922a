"""The chat API's answers, byte for byte, and as the types that the document describes."""

import json

import msgspec
import pytest

from gateway.openai.answers import ChatCompletion, ChatCompletionChunk
from gateway.openai.chat import ChatRequest, ChatWriter
from gateway.openai.requests import parse
from gateway.types import Delta, TokenLogprobs
from services.runtime.errors import InvalidRequest
from services.structured.form import ToolFormat
from tests.gateway.openai.writers import USAGE, events_of, whole_of, writer_of

BODY = {"messages": [{"role": "user", "content": "a"}]}
TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
START = (
    b'data: {"id":"chatcmpl-r","created":7,"model":"m\\"choices\\":[]","system_fingerprint":"fp",'
    b'"object":"chat.completion.chunk","choices":['
)


def chat(more=None, **settings):
    return writer_of(ChatWriter, ChatRequest, BODY | (more or {}), **settings)


def stream_of(writer, *texts):
    stream = writer.opening(0)
    for text in texts:
        stream += writer.chunk(0, Delta(0, [*map(ord, text)], text), None)
    return stream + writer.chunk(0, Delta(0, [], "", finish_reason="stop"), None)


def test_events_of_a_stream():
    assert stream_of(chat(), 'a"', "\n") == b"".join(
        START + choice + b"]}\n\n"
        for choice in (
            b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}',
            b'{"index":0,"delta":{"content":"a\\""},"logprobs":null,"finish_reason":null}',
            b'{"index":0,"delta":{"content":"\\n"},"logprobs":null,"finish_reason":null}',
            b'{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}',
        )
    )


def test_a_whole_answer():
    body = chat({"return_token_ids": True, "service_tier": "auto"}).whole([whole_of("A")])
    assert body == (
        b'{"id":"chatcmpl-r","created":7,"model":"m\\"choices\\":[]","system_fingerprint":"fp",'
        b'"service_tier":"default","object":"chat.completion","choices":[{"index":0,"message":'
        b'{"role":"assistant","content":"A","refusal":null},"logprobs":null,"finish_reason":"stop","token_ids":[65]}],'
        b'"usage":{"prompt_tokens":2,"completion_tokens":3,"total_tokens":5,'
        b'"prompt_tokens_details":{"cached_tokens":1}},"prompt_token_ids":[65,66]}'
    )


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_calls_are_what_the_types_say(size):
    writer = chat(TOOLS, tool_format=ToolFormat.HERMES)
    text = f"b{CALL}"
    events = events_of(stream_of(writer, *(text[at : at + size] for at in range(0, len(text), size))))
    deltas = [msgspec.json.decode(event, type=ChatCompletionChunk).choices[0].delta for event in events]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert "".join(delta.content or "" for delta in deltas) == "b"
    assert "".join(call.function.arguments for call in calls) == '{"a": 1}'
    assert [(call.type, call.function.name) for call in calls if call.id is not msgspec.UNSET] == [("function", "f")]
    whole = chat(TOOLS, tool_format=ToolFormat.HERMES).whole([whole_of(text)])
    (choice,) = msgspec.json.decode(whole, type=ChatCompletion).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "b"
    assert [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [
        (calls[0].id, "f", '{"a": 1}')
    ]


def test_an_answer_that_only_calls_has_no_content():
    whole = chat(TOOLS, tool_format=ToolFormat.HERMES).whole([whole_of(CALL)])
    assert msgspec.json.decode(whole, type=ChatCompletion).choices[0].message.content is None


def test_log_probabilities_are_those_of_the_tokens():
    writer = chat({"logprobs": True, "top_logprobs": 1})
    (event,) = events_of(writer.chunk(0, Delta(0, [65], "A", [TokenLogprobs(-0.5, [(66, -1.0)])]), USAGE))
    (choice,) = msgspec.json.decode(event, type=ChatCompletionChunk).choices
    (entry,) = choice.logprobs.content
    assert (entry.token, entry.logprob, entry.top_logprobs[0].token) == ("A", -0.5, "B")


def test_a_delta_that_shows_nothing_is_no_event():
    assert chat().chunk(0, Delta(0, [65], ""), None) == b""
    writer = chat(TOOLS | {"parallel_tool_calls": False}, tool_format=ToolFormat.HERMES)
    assert writer.chunk(0, Delta(0, [], CALL), None) != b""
    assert writer.chunk(0, Delta(0, [], CALL), None) == b""


@pytest.mark.parametrize("message", [None, 1, "a", []])
def test_a_message_that_is_no_object_is_refused_before_anything_reads_it(message):
    request, _ = parse(json.dumps({"messages": [{"role": "user", "content": "a"}, message]}).encode(), ChatRequest)
    with pytest.raises(InvalidRequest, match=r"messages\[1\] must be an object"):
        request.call()
