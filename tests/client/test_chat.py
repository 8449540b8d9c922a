"""Conversations through both clients: what is sent, what comes back, what happens when it breaks."""

from typing import Any

import grpc
import pytest
from tandem_client import (
    ChatRequest,
    Choice,
    FinishReason,
    InvalidRequest,
    Message,
    ServerError,
    Tool,
    ToolCall,
    Unavailable,
)

from protos import inference_pb2
from tests.client.conftest import FakeGateway, aborts, says

STOP, CALLS = inference_pb2.FINISH_REASON_STOP, inference_pb2.FINISH_REASON_TOOL_CALLS
HELLO = ChatRequest([Message("user", "hello")])


def part(choice: int = 0, *, end: int = 0, **delta: Any) -> Any:
    return inference_pb2.ChatResponse(
        request_id="server-id",
        choice=choice,
        delta=inference_pb2.ChatMessage(**delta),
        token_ids=[7],
        finish_reason=end,
    )


async def parts_of(stream: Any) -> list[Any]:
    async with stream:
        return [delta async for delta in stream]


async def test_a_conversation_reaches_the_gateway_whole(gateway: FakeGateway, connect: Any) -> None:
    gateway.steps.append(says(part(end=STOP), part(1, end=STOP)))
    call = ToolCall("f", "{}", "call_1", 0)
    request = ChatRequest(
        [
            Message("user", "hello", name="Ann"),
            Message("assistant", reasoning_content="hm", tool_calls=(call,)),
            Message("tool", "42", tool_call_id="call_1"),
        ],
        model="m",
        idempotency_key="k",
        max_tokens=9,
        tools=[Tool("f", "does it", {"type": "object"}, strict=True), Tool("g")],
        tool_choice="f",
        parallel_tool_calls=False,
        num_choices=2,
        chat_template_kwargs={"enable_thinking": False},
        continue_final_message=True,
        json_schema={"const": 1},
    )
    await parts_of(connect(gateway.address).stream_chat(request))
    seen = gateway.calls[0]
    assert seen.metadata["idempotency-key"] == "k"
    assert seen.request == inference_pb2.ChatRequest(
        model="m",
        sampling=inference_pb2.SamplingParams(max_tokens=9),
        messages=[
            inference_pb2.ChatMessage(role="user", content="hello", name="Ann"),
            inference_pb2.ChatMessage(
                role="assistant",
                reasoning_content="hm",
                tool_calls=[inference_pb2.ToolCall(id="call_1", name="f", arguments="{}")],
            ),
            inference_pb2.ChatMessage(role="tool", content="42", tool_call_id="call_1"),
        ],
        tools=[
            inference_pb2.Tool(name="f", description="does it", parameters='{"type": "object"}', strict=True),
            inference_pb2.Tool(name="g"),
        ],
        tool_choice=inference_pb2.ToolChoice(mode=inference_pb2.ToolChoice.MODE_REQUIRED, name="f"),
        parallel_tool_calls=False,
        num_choices=2,
        chat_template_kwargs={"enable_thinking": "false"},
        continue_final_message=True,
        response_format=inference_pb2.ResponseFormat(json_schema='{"const": 1}'),
    )


def test_every_field_of_a_conversation_is_in_the_request_class() -> None:
    sent = {field.name for field in inference_pb2.ChatRequest.DESCRIPTOR.fields}
    sent |= {field.name for field in inference_pb2.SamplingParams.DESCRIPTOR.fields}
    here = set(ChatRequest.__dataclass_fields__)
    assert here - sent == {"idempotency_key", "allow_fallback", "json_schema"}
    assert sent - here == {"sampling", "response_format"}


@pytest.mark.parametrize(("choice", "mode"), [("auto", None), ("none", 1), ("required", 2)])
async def test_a_choice_of_tools(gateway: FakeGateway, connect: Any, choice: str, mode: int | None) -> None:
    gateway.steps.append(says(part(end=STOP)))
    await parts_of(connect(gateway.address).stream_chat(ChatRequest([Message("user", "a")], tool_choice=choice)))
    request = gateway.calls[0].request
    assert request.HasField("tool_choice") is (mode is not None)
    assert request.tool_choice.mode == (mode or 0)


async def test_a_stream_ends_with_its_last_answer(gateway: FakeGateway, connect: Any) -> None:
    call = inference_pb2.ToolCall(index=0, id="call_1", name="f")
    gateway.steps.append(
        says(
            part(1, content="b"),
            part(0, reasoning_content="hm"),
            part(1, end=STOP),
            part(0, tool_calls=[call], end=CALLS),
        )
    )
    deltas = await parts_of(connect(gateway.address).stream_chat(ChatRequest([Message("user", "a")], num_choices=2)))
    assert [(delta.choice, delta.message.content, delta.finish_reason) for delta in deltas] == [
        (1, "b", None),
        (0, "", None),
        (1, "", FinishReason.STOP),
        (0, "", FinishReason.TOOL_CALLS),
    ]
    assert deltas[1].message.reasoning_content == "hm"
    assert deltas[3].message.tool_calls == (ToolCall("f", "", "call_1", 0),)


async def test_a_stream_that_ends_without_all_answers_is_an_error(gateway: FakeGateway, connect: Any) -> None:
    gateway.steps.append(says(part(0, end=STOP)))
    with pytest.raises(Unavailable):
        await parts_of(connect(gateway.address).stream_chat(ChatRequest([Message("user", "a")], num_choices=2)))


async def test_a_stream_that_breaks_is_asked_for_again_only_before_its_first_part(
    gateway: FakeGateway, connect: Any
) -> None:
    unavailable = grpc.StatusCode.UNAVAILABLE
    gateway.steps += [aborts(code=unavailable), aborts(part(content="a"), code=unavailable)]
    stream = connect(gateway.address).stream_chat(ChatRequest([Message("user", "a")], idempotency_key="k"))
    assert (await stream.__anext__()).message.content == "a"
    with pytest.raises(Unavailable):
        await stream.__anext__()
    assert gateway.methods == ["Chat", "Chat"]


async def test_whole_answers(gateway: FakeGateway, connect: Any) -> None:
    whole = part(role="assistant", content='{"a": 1}', end=STOP)
    response = inference_pb2.ChatUnaryResponse(request_id="r", choices=[whole])
    gateway.steps += [aborts(code=grpc.StatusCode.UNAVAILABLE), says(response)]
    chat = await connect(gateway.address).chat(HELLO)
    assert gateway.methods == ["ChatUnary", "ChatUnary"]
    assert chat.choices == (Choice(Message("assistant", '{"a": 1}'), (7,), (), FinishReason.STOP, None),)
    assert (chat.request_id, chat.message.role, chat.choices[0].json()) == ("r", "assistant", {"a": 1})


async def test_half_an_answer_is_no_whole_one(gateway: FakeGateway, connect: Any) -> None:
    gateway.steps.append(says(inference_pb2.ChatUnaryResponse(choices=[part(content="a")])))
    with pytest.raises(ServerError):
        await connect(gateway.address).chat(HELLO)


@pytest.mark.parametrize(
    "request_",
    [
        ChatRequest([Message("user", 5)]),  # type: ignore[arg-type]
        ChatRequest([Message("user", "a")], num_choices=-1),
        ChatRequest([Message("user", "a")], chat_template_kwargs={"a": object()}),
        ChatRequest([Message("user", "a")], tools=[Tool("f", parameters={"a": float("nan")})]),
        ChatRequest(["a"]),  # type: ignore[list-item]
    ],
)
async def test_what_cannot_be_sent_is_refused_here(gateway: FakeGateway, connect: Any, request_: ChatRequest) -> None:
    with pytest.raises(InvalidRequest):
        await connect(gateway.address).chat(request_)
    assert not gateway.calls
