"""Conversations over gRPC: from the message to the call that it makes, and from answers to messages.

What a conversation may be is judged where HTTP's is (`gateway.openai.chat`); only the spelling is another.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from google.protobuf.message import Message

from gateway.edge.grpc_messages import LENGTH, STOP, TOOL_CALLS, form_of, logprobs_of, usage_of
from gateway.forms.answer_parts import AnswerParts
from gateway.limits import GRPC_PREFIX
from gateway.models.answer_pieces import Arguments, CallStart, Content, Piece
from gateway.models.conversation import refuse
from gateway.models.tokenizer import ModelTokenizer
from gateway.models.tool_calls import AnswerParser
from gateway.openai.chat import ChatRequest
from gateway.openai.writer import Whole
from gateway.requests.call import Call
from gateway.types import AskedSampling, Delta
from protos import inference_pb2
from services.runtime.sampling_wire import read_sampling

_MODES = {
    inference_pb2.ToolChoice.MODE_UNSPECIFIED: None,
    inference_pb2.ToolChoice.MODE_NONE: "none",
    inference_pb2.ToolChoice.MODE_REQUIRED: "required",
}


def chat_call(request: inference_pb2.ChatRequest) -> Call:
    """Returns the call as far as the message says it. Raises InvalidRequest."""
    if request.sampling.HasField("prompt_logprobs"):
        refuse("sampling.prompt_logprobs", "absent: log-probabilities of prompts are those of Generate")
    tools, choice = _tools(request.tools), _tool_choice(request)
    chat = ChatRequest(
        model=request.model,
        messages=[_message(message) for message in request.messages],
        n=request.num_choices or None,
        priority=request.priority,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=request.parallel_tool_calls if request.HasField("parallel_tool_calls") else None,
        chat_template_kwargs=_variables(request.chat_template_kwargs),
        continue_final_message=request.continue_final_message,
    )
    call = chat.call()
    call.sampling = AskedSampling(**read_sampling(request.sampling))
    call.sampling.json_schema, call.sampling.form_field = form_of(request.response_format)
    call.field_prefix = GRPC_PREFIX
    return call


class ChatReader:
    """Finds in the answers to a call what their messages have: text, thoughts, calls."""

    def __init__(
        self, tokenizer: ModelTokenizer, call: Call, *, request_id: str, prompts: Sequence[Sequence[int]]
    ) -> None:
        self._parts = AnswerParts(
            tokenizer,
            call.tools,
            request_id=request_id,
            prompts=prompts,
            is_strict=bool(call.strict_tools),
            is_forced=bool(call.must_call),
        )
        self._request_id = request_id
        self._is_parallel = call.parallel_tool_calls
        self._parsers: dict[int, AnswerParser] = {}

    def response(self, choice: int, delta: Delta) -> inference_pb2.ChatResponse:
        """Returns the message for the next part of an answer."""
        response = inference_pb2.ChatResponse(
            request_id=self._request_id,
            choice=choice,
            token_ids=delta.token_ids,
            logprobs=logprobs_of(delta.logprobs) if delta.logprobs is not None else (),
        )
        if choice not in self._parsers:
            self._parsers[choice] = self._parts.parser(choice)
            response.delta.role = "assistant"
        parser = self._parsers[choice]
        self._add(response.delta, parser.push(delta.text, delta.token_ids), choice)
        if delta.finish_reason is not None:
            self._add(response.delta, parser.finish(), choice)
            is_call = delta.finish_reason == "stop" and parser.num_complete_calls
            response.finish_reason = TOOL_CALLS if is_call else STOP if delta.finish_reason == "stop" else LENGTH
        if delta.usage is not None:
            response.usage.CopyFrom(usage_of(delta.usage))
        return response

    def whole(self, answer: Whole) -> inference_pb2.ChatResponse:
        """Returns the message for all of an answer."""
        delta = Delta(0, answer.token_ids, answer.text, answer.logprobs, answer.finish_reason, answer.usage)
        response = self.response(answer.index, delta)
        calls: dict[int, inference_pb2.ToolCall] = {}
        for part in response.delta.tool_calls:
            if part.index in calls:
                calls[part.index].arguments += part.arguments
            else:
                calls[part.index] = part
        response.delta.ClearField("tool_calls")
        response.delta.tool_calls.extend(calls.values())
        return response

    def _add(self, message: inference_pb2.ChatMessage, pieces: Iterable[Piece], choice: int) -> None:
        for piece in pieces:
            if isinstance(piece, CallStart | Arguments):
                # The client asked for one call at a time and gets the first; the model was not told of the wish.
                if not piece.index or self._is_parallel:
                    self._add_call(message, piece, choice)
            elif isinstance(piece, Content):
                message.content += piece.text
            else:
                message.reasoning_content += piece.text

    def _add_call(self, message: inference_pb2.ChatMessage, piece: CallStart | Arguments, choice: int) -> None:
        if isinstance(piece, CallStart):
            message.tool_calls.add(index=piece.index, id=self._parts.call_id(choice, piece.index), name=piece.name)
        else:
            message.tool_calls.add(index=piece.index, arguments=piece.text)


def _message(message: inference_pb2.ChatMessage) -> dict[str, Any]:
    """Returns the message as the chat API has it; a text that is empty is absent where only some roles have it."""
    read: dict[str, Any] = {"role": message.role, "content": message.content}
    for name in ("name", "reasoning_content", "tool_call_id"):
        if getattr(message, name):
            read[name] = getattr(message, name)
    if message.tool_calls:
        read["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return read


def _tools(tools: Sequence[inference_pb2.Tool]) -> list[dict[str, Any]] | None:
    read = []
    for number, tool in enumerate(tools):
        function: dict[str, Any] = {"name": tool.name, "strict": tool.strict}
        if tool.description:
            function["description"] = tool.description
        if tool.parameters:
            function["parameters"] = _json(tool.parameters, f"tools[{number}].parameters")
        read.append({"type": "function", "function": function})
    return read or None


def _tool_choice(request: inference_pb2.ChatRequest) -> Any:
    choice = request.tool_choice
    if choice.mode not in _MODES:
        refuse("tool_choice.mode", "one of those of ToolChoice")
    if not choice.name:
        return _MODES[choice.mode]
    if choice.mode != inference_pb2.ToolChoice.MODE_REQUIRED:
        refuse("tool_choice.name", "absent, or with MODE_REQUIRED")
    return {"type": "function", "function": {"name": choice.name}}


def _variables(variables: Mapping[str, str]) -> dict[str, Any]:
    return {name: _json(text, f"chat_template_kwargs[{name[:64]!r}]") for name, text in variables.items()}


def _json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        refuse(name, "JSON")


def without_name(request: Message) -> bytes:
    """Returns what a request asks for, without the name that its client gave it."""
    body = type(request)()
    body.CopyFrom(request)
    body.ClearField("request_id")
    return body.SerializeToString(deterministic=True)
