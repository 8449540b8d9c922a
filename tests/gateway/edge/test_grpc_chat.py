"""Conversations over gRPC: the answers of HTTP, whole and streamed, with calls, thoughts, forms, several at once."""

import json

import grpc
import pytest

from gateway.edge.grpc_chat import chat_call
from protos import inference_pb2, inference_pb2_grpc
from services.runtime.errors import InvalidRequest
from tests.gateway.test_chat_tools import ARGUMENTS, ASKED, TOOLS, folder_of, serve
from tests.waiting import HANG_LIMIT_S

__all__ = ["folder_of", "serve"]  # fixtures

LIMIT_S = HANG_LIMIT_S
MODES = inference_pb2.ToolChoice
TOLD = [
    inference_pb2.Tool(
        name=tool["function"]["name"],
        description=tool["function"].get("description", ""),
        parameters=json.dumps(tool["function"]["parameters"]) if "parameters" in tool["function"] else "",
        strict=tool["function"].get("strict", False),
    )
    for tool in TOOLS
]
SAMPLING = inference_pb2.SamplingParams(max_tokens=300, seed=1)


def asked(**more):
    messages = [inference_pb2.ChatMessage(**message) for message in ASKED]
    return inference_pb2.ChatRequest(messages=more.pop("messages", messages), sampling=SAMPLING, **more)


@pytest.fixture
async def stub_of():
    channels = []

    def make(system):
        channels.append(grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}"))
        return inference_pb2_grpc.InferenceStub(channels[-1])

    yield make
    for channel in channels:
        await channel.close()


def put_together(responses):
    """What a client makes of the parts of one answer."""
    made = inference_pb2.ChatMessage()
    for response in responses:
        delta = response.delta
        made.role += delta.role
        made.content += delta.content
        made.reasoning_content += delta.reasoning_content
        for part in delta.tool_calls:
            if part.index == len(made.tool_calls):
                made.tool_calls.append(part)
            else:
                made.tool_calls[part.index].arguments += part.arguments
    return made


@pytest.mark.parametrize("kind", ["hermes", "thinks"])
async def test_an_answer_is_the_same_whole_streamed_and_over_http(serve, stub_of, kind):
    system = await serve(kind)
    stub = stub_of(system)
    whole = (await stub.ChatUnary(asked(tools=TOLD), timeout=LIMIT_S)).choices[0]
    parts = [part async for part in stub.Chat(asked(tools=TOLD), timeout=LIMIT_S)]
    assert put_together(parts) == whole.delta or [call.id for call in whole.delta.tool_calls]
    assert put_together(parts).content == whole.delta.content == "Let me see."
    assert whole.delta.role == "assistant"
    assert whole.delta.reasoning_content == ("Hm, 2 < 3." if kind == "thinks" else "")
    assert [(call.name, call.arguments) for call in whole.delta.tool_calls] == [("weather", ARGUMENTS), ("clock", "{}")]
    assert whole.finish_reason == parts[-1].finish_reason == inference_pb2.FINISH_REASON_TOOL_CALLS
    assert [token for part in parts for token in part.token_ids] == list(whole.token_ids)
    body = {"messages": ASKED, "tools": TOOLS, "max_tokens": 300}
    http = (await system.http.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
    assert http["content"] == whole.delta.content
    prompts = {tuple(attempt.spec.prompt_token_ids) for attempt in system.workers["decode-0"].attempts}
    assert len(prompts) == 1, "one prompt, whichever API it came by"


async def test_a_conversation_with_calls_comes_back(serve, stub_of):
    system = await serve("hermes")
    stub = stub_of(system)
    answer = (await stub.ChatUnary(asked(tools=TOLD), timeout=LIMIT_S)).choices[0].delta
    results = [
        inference_pb2.ChatMessage(role="tool", content="fine", tool_call_id=call.id) for call in answer.tool_calls
    ]
    messages = [*(inference_pb2.ChatMessage(**message) for message in ASKED), answer, *results]
    again = await stub.ChatUnary(asked(messages=messages, tools=TOLD), timeout=LIMIT_S)
    assert again.choices[0].delta.content == answer.content


async def test_several_answers_each_end_with_their_usage(serve, stub_of):
    stub = stub_of(await serve("hermes", "One, two."))
    parts = [part async for part in stub.Chat(asked(num_choices=3), timeout=LIMIT_S)]
    for choice in range(3):
        own = [part for part in parts if part.choice == choice]
        assert put_together(own).content == "One, two."
        assert own[-1].finish_reason == inference_pb2.FINISH_REASON_STOP
        assert own[-1].usage.completion_tokens > 1
    whole = await stub.ChatUnary(asked(num_choices=3), timeout=LIMIT_S)
    assert [(each.choice, each.delta.content) for each in whole.choices] == [(n, "One, two.") for n in range(3)]


async def test_a_request_with_a_key_is_computed_once(serve, stub_of):
    system = await serve("hermes", "One, two.")
    stub = stub_of(system)
    key = (("idempotency-key", "mine"),)
    first, second = [await stub.ChatUnary(asked(), metadata=key, timeout=LIMIT_S) for _ in range(2)]
    assert first == second
    assert len(system.workers["decode-0"].attempts) == 1


@pytest.mark.parametrize(
    ("form", "json_schema", "field"),
    [
        ({"regex": "[0-9]+"}, "%regex\n[0-9]+", "response_format.regex"),
        ({"grammar": 'start: "a"'}, '%grammar\nstart: "a"', "response_format.grammar"),
        ({"choices": inference_pb2.Choices(texts=["a", "b"])}, '%choices\n["a", "b"]', "response_format.choices"),
        ({"json_schema": '{"type": "object"}'}, '{"type":"object"}', "response_format"),
        ({}, "", "response_format"),
    ],
)
def test_forms(form, json_schema, field):
    call = chat_call(asked(response_format=inference_pb2.ResponseFormat(**form)))
    assert (call.sampling.json_schema, call.sampling.form_field) == (json_schema, field)


def test_what_the_message_says_reaches_the_call():
    call = chat_call(
        asked(
            tools=TOLD,
            tool_choice=MODES(mode=MODES.MODE_REQUIRED, name="clock"),
            parallel_tool_calls=False,
            chat_template_kwargs={"enable_thinking": "false", "reasoning_effort": '"high"'},
            continue_final_message=True,
        )
    )
    assert (call.must_call, call.strict_tools, call.parallel_tool_calls) == ({"clock"}, {"weather"}, False)
    words = {"enable_thinking": False, "reasoning_effort": "high", "continue_final_message": True}
    assert call.template_words == words
    assert (call.sampling.max_tokens, call.sampling.seed) == (300, 1)


REFUSED = {
    "parameters": ({"tools": [inference_pb2.Tool(name="a", parameters="{")]}, "tools[0].parameters"),
    "a name without a must": ({"tools": TOLD, "tool_choice": MODES(name="clock")}, "tool_choice.name"),
    "an unknown mode": ({"tools": TOLD, "tool_choice": MODES(mode=9)}, "tool_choice.mode"),
    "a variable": ({"chat_template_kwargs": {"enable_thinking": "no"}}, "chat_template_kwargs['enable_thinking']"),
    "a prompt's": ({"sampling": None}, "sampling.prompt_logprobs"),
}


@pytest.mark.parametrize("row", REFUSED)
def test_mistakes_are_named(row):
    more, field = REFUSED[row]
    request = asked(**{name: value for name, value in more.items() if value is not None})
    if row == "a prompt's":
        request.sampling.prompt_logprobs = 1
    with pytest.raises(InvalidRequest) as refused:
        chat_call(request)
    assert refused.value.field == field


async def test_mistakes_are_invalid_arguments(serve, stub_of):
    stub = stub_of(await serve("hermes", "One."))
    for request in (asked(messages=[]), asked(messages=[inference_pb2.ChatMessage(role="nobody")])):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ChatUnary(request, timeout=LIMIT_S)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "messages" in refused.value.details()
