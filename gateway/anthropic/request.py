"""Requests of Anthropic's Messages API, translated into chat requests. Knows their spelling and nothing of serving."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gateway.anthropic.turns import chat_messages, chat_tool_choice, chat_tools, left_out
from gateway.models.conversation import refuse, unsupported
from gateway.openai.chat import TEMPLATE_WORDS, ChatRequest
from gateway.openai.requests import RequestBody, StreamOptions
from gateway.openai.shapes import list_of, said
from gateway.requests.call import Call
from services.runtime.errors import InvalidRequest

_RENAMED = (
    (re.compile(r"\bresponse_format\.json_schema(\.schema)?\b"), "output_config.format.schema"),
    (re.compile(r"\bresponse_format\b"), "output_config.format"),
    (re.compile(r"\b(tools\[\d+\])\.function\.parameters\b"), r"\1.input_schema"),
    (re.compile(r"\b(tools\[\d+\]|tool_choice)\.function\b"), r"\1"),
    (re.compile(r"^stop\b"), "stop_sequences"),
)
"""Names of members in the chat API's errors, and their names in this API."""
TEMPLATE_FIELDS: Mapping[str, str] = {"enable_thinking": "thinking", "reasoning_effort": "output_config.effort"}
"""Members that set variables of the chat template, by the variables' names."""
_FORMAT_NAME = "output"

Blocks = Annotated[list[Any], Meta(extra_json_schema=list_of({"type": "object"}))]


class Thinking(msgspec.Struct, kw_only=True):
    """`thinking` of a request."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    """`output_config` of a request."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class MessageMetadata(msgspec.Struct, kw_only=True):
    """`metadata` of a request."""

    user_id: str | None = None


class MessagesRequest(RequestBody, kw_only=True):
    """Body of POST /v1/messages, and of POST /v1/messages/count_tokens, which needs no `max_tokens`."""

    REQUIRED = ("messages",)

    messages: Annotated[
        Blocks | None,
        said(
            "Turns of `user` and `assistant`, whose content is a text or blocks: text, tool_use, tool_result, "
            "thinking. A last one of the assistant is continued."
        ),
    ] = None
    system: Annotated[str | list[Any] | None, said("A text, or blocks of text, before the messages.")] = None
    max_tokens: Annotated[int | None, said("Most tokens of the answer; needed, but for counting.", minimum=1)] = None
    tools: Annotated[
        list[Any] | None,
        said(
            "Tools that the model may call: name, description, input_schema. Those that run on Anthropic's servers are "
            "left out, which `X-Tandem-Ignored` says."
        ),
    ] = None
    tool_choice: Annotated[
        dict[str, Any] | None, said("`type` is auto, any, tool (with `name`) or none; `disable_parallel_tool_use`.")
    ] = None
    thinking: Annotated[
        Thinking | None,
        said(
            "`enabled` or `disabled` is told to the chat template as `enable_thinking`, where it knows that; "
            "`adaptive` leaves it to the model. No budget is kept."
        ),
    ] = None
    output_config: Annotated[
        OutputConfig | None,
        said("`format` is a JSON schema of the answer; `effort` is told to the chat template as `reasoning_effort`."),
    ] = None
    output_format: Annotated[dict[str, Any] | None, said("The older name of `output_config.format`.")] = None
    metadata: Annotated[MessageMetadata | None, said("`user_id` is what `user` is elsewhere.")] = None
    stream_options: Annotated[StreamOptions | None, said("Only with `stream`, where the usage is always told.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, TEMPLATE_WORDS] = None

    def call(self) -> Call:
        """Returns the call that it asks for. Raises InvalidRequest."""
        if self.max_tokens is None:
            raise InvalidRequest("max_tokens is missing", field="max_tokens", code="missing_required_parameter")
        return self.counted_call()

    def counted_call(self) -> Call:
        """Returns the call, whose answer may be as long as fits where the request does not bound it."""
        if self.messages is None:
            raise InvalidRequest("messages is missing", field="messages", code="missing_required_parameter")
        shared = {name: getattr(self, name) for name in RequestBody.__struct_fields__ if name != "stream_options"}
        if self.user is None and self.metadata is not None:
            shared["user"] = self.metadata.user_id
        messages = chat_messages(self.system, self.messages)
        choice, is_parallel = chat_tool_choice(self.tool_choice)
        chat = ChatRequest(
            **shared,
            messages=messages,
            max_tokens=self.max_tokens,
            tools=self.chat_tools(),
            tool_choice=choice,
            parallel_tool_calls=is_parallel,
            response_format=self._response_format(),
            chat_template_kwargs=self.chat_template_kwargs,
            enable_thinking=self._thinks(),
            reasoning_effort=None if self.output_config is None else self.output_config.effort,
            continue_final_message=messages[-1]["role"] == "assistant",
        )
        call = chat.call()
        call.template_fields = {
            name: TEMPLATE_FIELDS.get(name, field) if "." not in field else field
            for name, field in call.template_fields.items()
        }
        return call

    def chat_tools(self) -> list[dict[str, Any]] | None:
        """Returns the tools as the chat API spells them. Raises InvalidRequest."""
        return None if self.tools is None else chat_tools(self.tools)

    def left_out(self) -> list[str]:
        """Returns the kinds of tools that the model is not told of, and other wishes that are not kept."""
        names = left_out(self.tools or ())
        if self.thinking is not None and self.thinking.budget_tokens is not None:
            names.append("thinking.budget_tokens")
        if self.stream_options is not None and self.stream_options.continuous_usage_stats:
            names.append("stream_options.continuous_usage_stats")
        return names

    def _thinks(self) -> bool | None:
        if self.thinking is None or self.thinking.type == "adaptive":
            return None
        if self.thinking.type not in ("enabled", "disabled"):
            refuse("thinking.type", "enabled, disabled or adaptive")
        return self.thinking.type == "enabled"

    def _response_format(self) -> dict[str, Any] | None:
        wanted = None if self.output_config is None else self.output_config.format
        if wanted is not None and self.output_format is not None:
            refuse("output_format", "absent where output_config has a format")
        wanted = wanted or self.output_format
        if wanted is None:
            return None
        if wanted.get("type") != "json_schema":
            raise unsupported("output_config.format.type", "the one format is json_schema")
        return {"type": "json_schema", "json_schema": {"name": _FORMAT_NAME, "schema": wanted.get("schema")}}


@contextlib.contextmanager
def own_words() -> Iterator[None]:
    """Renames members in errors of the block from the chat API's names to this API's."""
    try:
        yield
    except InvalidRequest as error:
        error.message = in_own_words(error.message)
        error.field = error.field and in_own_words(error.field)
        raise


def in_own_words(text: str) -> str:
    """Returns a text of the chat API with its members' names in this API."""
    for pattern, name in _RENAMED:
        text = pattern.sub(name, text)
    return text
