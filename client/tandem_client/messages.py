"""Between plain data and protobuf: nothing else in the package reads or fills a message of the API."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tandem_client.errors import InvalidRequest, ServerError
from tandem_client.protos import cluster_pb2, inference_pb2
from tandem_client.values import (
    Asked,
    ChatDelta,
    ChatRequest,
    Choice,
    Delta,
    FinishReason,
    GoneWorker,
    GpuHealth,
    Message,
    ModelInfo,
    Pages,
    Request,
    TokenLogprobs,
    Tool,
    ToolCall,
    TopLogprob,
    Topology,
    Trouble,
    Usage,
    Worker,
)

UNKNOWN = "unknown"

_FINISH_REASONS = {
    inference_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    inference_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    inference_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
    inference_pb2.FINISH_REASON_TOOL_CALLS: FinishReason.TOOL_CALLS,
}
_UNFIT = (TypeError, ValueError, OverflowError)
"""What protobuf raises for a value that a field cannot hold."""
_SHARED = ("request_id", "model", "priority", "tenant", "service_class", "cache_salt")
_SAMPLING = tuple(field.name for field in inference_pb2.SamplingParams.DESCRIPTOR.fields if field.name != "stop")


def generate_request(request: Request) -> inference_pb2.GenerateRequest:
    """The message. Raises InvalidRequest for a value that it cannot hold; what it can hold, the server judges."""
    try:
        message = inference_pb2.GenerateRequest(**_asked(request))
        if isinstance(request.prompt, str):
            message.text = request.prompt
        else:
            message.token_ids.SetInParent()
            message.token_ids.ids.extend(request.prompt)
    except _UNFIT as error:
        raise InvalidRequest(f"the request cannot be sent: {error}") from error
    return message


def chat_request(request: ChatRequest) -> inference_pb2.ChatRequest:
    """The message. Raises InvalidRequest for a value that it cannot hold; what it can hold, the server judges."""
    try:
        return inference_pb2.ChatRequest(
            **_asked(request),
            messages=map(_message, request.messages),
            tools=map(_tool, request.tools),
            tool_choice=_tool_choice(request.tool_choice),
            parallel_tool_calls=request.parallel_tool_calls,
            num_choices=request.num_choices,
            chat_template_kwargs={name: _json(value) for name, value in request.chat_template_kwargs.items()},
            continue_final_message=request.continue_final_message,
        )
    except (*_UNFIT, AttributeError) as error:  # where something else stands in place of a Message or a Tool
        raise InvalidRequest(f"the request cannot be sent: {error}") from error


def _asked(request: Asked) -> dict[str, Any]:
    """What both kinds of requests have in common, by the names of their messages' fields."""
    given: dict[str, Any] = {name: getattr(request, name) for name in _SAMPLING}
    fields = {name: getattr(request, name) for name in _SHARED}
    fields["sampling"] = inference_pb2.SamplingParams(stop=_texts(request.stop), **given)
    if request.json_schema is not None:
        fields["response_format"] = inference_pb2.ResponseFormat(json_schema=_schema_text(request.json_schema))
    return fields


def _message(message: Message) -> inference_pb2.ChatMessage:
    return inference_pb2.ChatMessage(
        role=message.role,
        content=message.content,
        name=message.name,
        reasoning_content=message.reasoning_content,
        tool_calls=[
            inference_pb2.ToolCall(id=call.id, name=call.name, arguments=call.arguments, index=call.index)
            for call in message.tool_calls
        ],
        tool_call_id=message.tool_call_id,
    )


def _tool(tool: Tool) -> inference_pb2.Tool:
    parameters = "" if tool.parameters is None else _schema_text(tool.parameters)
    return inference_pb2.Tool(name=tool.name, description=tool.description, parameters=parameters, strict=tool.strict)


def _tool_choice(choice: str) -> inference_pb2.ToolChoice | None:
    modes = {"none": inference_pb2.ToolChoice.MODE_NONE, "required": inference_pb2.ToolChoice.MODE_REQUIRED}
    if choice == "auto":
        return None
    if choice in modes:
        return inference_pb2.ToolChoice(mode=modes[choice])
    return inference_pb2.ToolChoice(mode=inference_pb2.ToolChoice.MODE_REQUIRED, name=choice)


def embed_request(inputs: Sequence[str | Sequence[int]], *, model: str, dimensions: int) -> inference_pb2.EmbedRequest:
    """The message. Raises InvalidRequest."""
    request = inference_pb2.EmbedRequest(model=model)
    try:
        request.dimensions = dimensions
        for given in inputs:
            if isinstance(given, str):
                request.inputs.add(text=given)
            else:
                request.inputs.add().token_ids.ids.extend(given)
    except _UNFIT as error:
        raise InvalidRequest(f"the texts cannot be sent: {error}", field="inputs") from error
    return request


def tokenize_request(text: str, *, model: str, without_special_tokens: bool) -> inference_pb2.TokenizeRequest:
    """The message. Raises InvalidRequest."""
    try:
        return inference_pb2.TokenizeRequest(model=model, text=text, without_special_tokens=without_special_tokens)
    except _UNFIT as error:
        raise InvalidRequest(f"the text cannot be sent: {error}", field="text") from error


def detokenize_request(
    token_ids: Sequence[int], *, model: str, with_special_tokens: bool
) -> inference_pb2.DetokenizeRequest:
    """The message. Raises InvalidRequest."""
    try:
        return inference_pb2.DetokenizeRequest(
            model=model, token_ids=token_ids, with_special_tokens=with_special_tokens
        )
    except _UNFIT as error:
        raise InvalidRequest(f"the token ids cannot be sent: {error}", field="token_ids") from error


def _schema_text(schema: Mapping[str, Any] | str) -> str:
    return schema if isinstance(schema, str) else _json(dict(schema))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _texts(texts: Iterable[str]) -> list[str]:
    """One text alone is a sequence of its characters, and never meant."""
    if isinstance(texts, str):
        raise TypeError("stop is a text but must be a sequence of texts")
    return list(texts)


def delta_of(message: inference_pb2.GenerateResponse) -> Delta:
    """A part of an answer."""
    return Delta(
        text=message.text,
        token_ids=tuple(message.token_ids),
        first_index=message.first_index,
        logprobs=_logprobs(message.logprobs),
        prompt_logprobs=_logprobs(message.prompt_logprobs),
        finish_reason=_finish_reason(message.finish_reason),
        usage=_usage(message.usage) if message.HasField("usage") else None,
    )


def chat_delta_of(message: inference_pb2.ChatResponse) -> ChatDelta:
    """A part of one answer to a conversation."""
    return ChatDelta(
        choice=message.choice,
        message=_message_of(message.delta),
        token_ids=tuple(message.token_ids),
        logprobs=_logprobs(message.logprobs),
        finish_reason=_finish_reason(message.finish_reason),
        usage=_usage(message.usage) if message.HasField("usage") else None,
    )


def choice_of(message: inference_pb2.ChatResponse) -> Choice:
    """A whole answer to a conversation. Raises ServerError where it does not say that it is whole."""
    delta = chat_delta_of(message)
    if delta.finish_reason is None:
        raise ServerError("the server sent an answer without its end")
    return Choice(delta.message, delta.token_ids, delta.logprobs, delta.finish_reason, delta.usage)


def _message_of(message: inference_pb2.ChatMessage) -> Message:
    return Message(
        # A part that does not begin an answer names nobody.
        role=message.role or "assistant",
        content=message.content,
        name=message.name,
        reasoning_content=message.reasoning_content,
        tool_calls=tuple(ToolCall(call.name, call.arguments, call.id, call.index) for call in message.tool_calls),
        tool_call_id=message.tool_call_id,
    )


def _finish_reason(reason: "inference_pb2.FinishReason.ValueType") -> FinishReason | None:
    return _FINISH_REASONS.get(reason, FinishReason.UNKNOWN) if reason else None


def _logprobs(entries: Iterable[inference_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(entry.logprob, tuple(TopLogprob(top.token_id, top.logprob) for top in entry.top))
        for entry in entries
    )


def _usage(message: inference_pb2.Usage) -> Usage:
    return Usage(
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
        completion_tokens=message.completion_tokens,
        queue_s=message.queue_s,
        prefill_s=message.prefill_s,
        transfer_s=message.transfer_s,
        decode_s=message.decode_s,
    )


def models_of(message: inference_pb2.ListModelsResponse) -> tuple[ModelInfo, ...]:
    """The served models."""
    return tuple(
        ModelInfo(model.name, model.context_length_tokens, model.vocab_size, model.created_unix_s, model.parent)
        for model in message.models
    )


_ROLES = {cluster_pb2.WORKER_ROLE_PREFILL: "prefill", cluster_pb2.WORKER_ROLE_DECODE: "decode"}
_STATES = {
    state: name.removeprefix("WORKER_STATE_").lower() for name, state in cluster_pb2.WorkerState.items() if state
}
_GPU_STATES = {
    cluster_pb2.GPU_STATE_OK: "ok",
    cluster_pb2.GPU_STATE_DEGRADED: "degraded",
    cluster_pb2.GPU_STATE_OUT: "out",
}


def topology_of(message: cluster_pb2.Topology) -> Topology:
    """A cluster at one moment."""
    return Topology(
        workers=tuple(_worker(worker) for worker in message.workers),
        queued=message.requests.queued,
        running=message.requests.running,
        troubles=tuple(
            Trouble(one.kind, one.subject, one.cause, one.remedy, one.since_unix_s) for one in message.troubles
        ),
        gone=tuple(map(_gone, message.gone)),
        pools=tuple(pool.name for pool in message.pools),
    )


def _gone(message: cluster_pb2.GoneWorker) -> GoneWorker:
    role = _ROLES.get(message.role, UNKNOWN)
    return GoneWorker(message.id, role, message.model, message.host, message.address, message.since_unix_s)


def state_of(message: cluster_pb2.DrainResponse) -> str:
    """A worker's state after it was told to leave."""
    return _STATES.get(message.state, UNKNOWN)


def _worker(message: cluster_pb2.Worker) -> Worker:
    pages, gpu = message.pages, message.gpu
    return Worker(
        id=message.id,
        role=_ROLES.get(message.role, UNKNOWN),
        pid=message.pid,
        host=message.host,
        address=message.address,
        incarnation=message.incarnation,
        state=_STATES.get(message.state, UNKNOWN),
        model=message.model,
        exact=message.exact,
        pages=Pages(pages.total, pages.free, pages.cached, pages.reserved, pages.used),
        running=message.running,
        waiting=message.waiting,
        arithmetic=message.arithmetic,
        gpu=GpuHealth(_GPU_STATES.get(gpu.state, UNKNOWN), gpu.weight, tuple(gpu.reasons))
        if message.HasField("gpu")
        else None,
        tensor_parallel=message.tensor_parallel,
        pipeline_parallel=message.pipeline_parallel,
        left_out=message.left_out,
        identity=message.identity,
        region=message.region,
        pool=message.pool,
    )
