"""Requests of OpenAI's Responses API, translated into chat requests.

Knows the spelling of POST /v1/responses and nothing of serving it, nor of what is stored.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gateway.limits import MAX_AFFINITY_CHARS, MAX_BODY_BYTES, check_affinity_key, check_text
from gateway.models.conversation import check_conversation, refuse, unsupported
from gateway.openai.chat import ENABLE_THINKING, PARALLEL, TEMPLATE_WORDS, ChatRequest
from gateway.openai.metadata import MAX_METADATA, Metadata, check_metadata
from gateway.openai.requests import EffortOption, RequestBody
from gateway.openai.responses_tools import chat_tools, left_out, told_name
from gateway.openai.shapes import UP_TO_THE_CONTEXT, flag, list_of, said, synonym
from gateway.requests.call import Call
from services.runtime.errors import InvalidRequest

_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (_LOGPROBS, "reasoning.encrypted_content")
"""What may be asked for beside the answer. Reasoning comes as text, so nothing is encrypted."""
_ROLES = ("user", "assistant", "system", "developer")
_ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")
_TEXT_PARTS = ("input_text", "output_text")

_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "context_management": (([],), "an input that is too long is refused, and not made shorter"),
    "moderation": ((), "this server has no moderation"),
    "n": ((1,), "a response is one answer; send several requests"),
    "prompt": ((), "this server stores no prompts; use instructions and input"),
    "truncation": (("auto", "disabled"), "an input that is too long is refused, and not cut"),
}
"""Members that ask for what is not served: the values that ask for nothing, and the reason."""

_MOVED = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
"""Members of the chat API whose absence would be noticed, and what to use instead."""

_RENAMED = (
    (re.compile(r"\bresponse_format\.json_schema\.schema\b"), "text.format.schema"),
    (re.compile(r"\bresponse_format(\.json_schema)?\b"), "text.format"),
    (re.compile(r"\bmax_(completion_)?tokens\b"), "max_output_tokens"),
    (re.compile(r"\b(tools\[\d+\]|tool_choice)\.function\b"), r"\1"),
    (re.compile(r"^messages\b"), "input"),
)
"""Names of members in the chat API's errors, and their names in this API."""


TEMPLATE_FIELDS: Mapping[str, str] = {"verbosity": "text.verbosity"}
"""Members for the chat template whose names differ from the chat API's."""


_NOT_KNOWN = [{"role": "user", "content": ""}]
"""Stands for a conversation whose beginning is not known yet."""


class _MovedMember(InvalidRequest):
    """An error that names a member of the chat API on purpose."""


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """`reasoning` of a request."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    """`text` of a request."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ConversationRef(msgspec.Struct, kw_only=True):
    """`conversation` of a request."""

    id: str


class ResponseStreamOptions(msgspec.Struct, kw_only=True):
    """`stream_options` of a request."""

    include_obfuscation: bool | None = None


Items = Annotated[list[Any], Meta(extra_json_schema=list_of({"type": "object"}))]
Refused = Annotated[Any, said("Refused: the message says what to use instead.")]


class ResponsesRequest(RequestBody, kw_only=True):
    """Body of POST /v1/responses. Members without a meaning here are repeated in the response."""

    REQUIRED = ("input",)

    input: Annotated[
        str | Items | None, said("A text, or a list of items: messages, calls of functions, their outputs, reasoning.")
    ] = None
    instructions: Annotated[str | None, said("A system message before the input.")] = None
    max_output_tokens: Annotated[int | None, UP_TO_THE_CONTEXT] = None
    stream_options: Annotated[ResponseStreamOptions | None, said("Only with `stream`.")] = None
    tools: Annotated[
        list[Any] | None,
        said(
            "Functions that the model may call: type, name, description, parameters; or namespaces of such. Tools that "
            "run on OpenAI's servers, such as `web_search`, are left out, which `X-Tandem-Ignored` says."
        ),
    ] = None
    tool_choice: Annotated[Any, said("As of chats, in the words of this API.")] = None
    parallel_tool_calls: Annotated[bool | None, PARALLEL] = None
    max_tool_calls: Annotated[int | None, said("A bound for tools that run on a server, as no tool does here.")] = None
    text: Annotated[
        TextOptions | None,
        said("`format` is the form of the answer, as `response_format` of chats; `verbosity` as of chats."),
    ] = None
    reasoning: Annotated[
        ReasoningOptions | None,
        said("`effort` is told to the chat template as `reasoning_effort`, where it knows that."),
    ] = None
    include: Annotated[list[str] | None, said("`message.output_text.logprobs`, `reasoning.encrypted_content`.")] = None
    top_logprobs: Annotated[int | None, synonym("logprobs", "This many likeliest tokens at each place.")] = None
    metadata: Annotated[Metadata | None, said("Given back.", maxProperties=MAX_METADATA)] = None
    store: Annotated[
        bool | None,
        flag("The response is kept for `--stored-answer-s`; the answer's `store` says whether it is.", default=True),
    ] = None
    background: Annotated[
        bool | None,
        flag("The answer is the response while it waits; it is generated without a reader, and fetched by its id."),
    ] = None
    previous_response_id: Annotated[
        str | None, said("The input and the output of this stored response come before the input.")
    ] = None
    conversation: Annotated[
        str | ConversationRef | None,
        said(
            "The items of this stored conversation come before the input, and those of input and output are added to "
            "it when the response is complete. An id, or an object with it."
        ),
    ] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, TEMPLATE_WORDS] = None
    enable_thinking: Annotated[bool | None, ENABLE_THINKING] = None
    safety_identifier: Annotated[str | None, said("Given back.", maxLength=MAX_AFFINITY_CHARS)] = None
    context_management: Refused = None
    moderation: Refused = None
    prompt: Refused = None
    truncation: Refused = None
    max_completion_tokens: Refused = None
    max_tokens: Refused = None
    messages: Refused = None
    n: Refused = None
    reasoning_effort: Refused = None
    response_format: Refused = None

    def call(self, *, before: Sequence[Any] | None = None) -> Call:
        """Returns the call that it asks for, with the items `before` its own. Raises InvalidRequest.

        Without those of the response or the conversation that it continues, a call has no messages of its own yet.
        """
        self._check_unserved()
        self._check_options()
        shared = {name: getattr(self, name) for name in RequestBody.__struct_fields__ if name != "stream_options"}
        chat = ChatRequest(
            **shared,
            messages=self._messages(before),
            max_completion_tokens=self.max_output_tokens,
            tools=self.chat_tools(),
            tool_choice=self.chat_tool_choice(),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=self._response_format(),
            chat_template_kwargs=self.chat_template_kwargs,
            enable_thinking=self.enable_thinking,
            reasoning=None if self.reasoning is None else EffortOption(effort=self.reasoning.effort),
            verbosity=None if self.text is None else self.text.verbosity,
            logprobs=self.has_logprobs,
            top_logprobs=self.top_logprobs if self.has_logprobs else None,
        )
        call = chat.call()
        if call.tools and self.has_logprobs:
            raise unsupported(
                "top_logprobs" if self.top_logprobs else "include",
                "the log-probabilities of an answer that may call tools are not divided among its items",
            )
        call.prompt_field = "input"
        return call

    def check_stateless(self) -> None:
        """Raises InvalidRequest for a request that needs a stored response, for where none is kept."""
        if self.previous_response_id is not None:
            raise unsupported("previous_response_id", "no responses are stored here; send the conversation as input")
        if self.background:
            raise unsupported("background", "no responses are stored here, so the answer comes while the client waits")
        if self.conversation is not None:
            raise unsupported("conversation", "no conversations are stored here; send all of it as input")

    @property
    def conversation_id(self) -> str | None:
        """The id of the conversation that it continues."""
        return self.conversation.id if isinstance(self.conversation, ConversationRef) else self.conversation

    @property
    def has_logprobs(self) -> bool:
        """Whether log-probabilities of the answer proper are asked for."""
        return bool(self.top_logprobs) or _LOGPROBS in (self.include or ())

    def chat_tools(self) -> list[dict[str, Any]] | None:
        """Returns the tools as the chat API spells them. Raises InvalidRequest for those that are not functions."""
        return None if self.tools is None else chat_tools(self.tools)

    def left_out(self) -> list[str]:
        """Returns the kinds of tools that the model is not told of, because no server but OpenAI's runs them."""
        return left_out(self.tools or ())

    def shown_tools(self) -> list[dict[str, Any]]:
        """Returns the tools as the response repeats them."""
        return [{"type": "function", **tool["function"]} for tool in self.chat_tools() or ()]

    def shown_tool_choice(self) -> Any:
        """Returns `tool_choice` as the response repeats it."""
        choice = self.chat_tool_choice()
        return {"type": "function", **choice["function"]} if isinstance(choice, dict) else choice or "auto"

    def shown_format(self) -> dict[str, Any]:
        """Returns `text.format` as the response repeats it."""
        wanted = self._response_format() or {}
        return {"type": wanted.get("type", "text"), **wanted.get("json_schema", {})}

    def chat_tool_choice(self) -> Any:
        """Returns `tool_choice` as the chat API spells it. Raises InvalidRequest for a tool that is not a function."""
        choice = self.tool_choice
        if not isinstance(choice, dict):
            # Every response says so, also one without tools.
            return None if choice == "auto" else choice
        if choice.get("type") != "function":
            refuse("tool_choice", 'none, auto, required or {"type": "function", "name": …}')
        return {"type": "function", "function": {"name": told_name(choice.get("namespace"), choice.get("name"))}}

    def _check_unserved(self) -> None:
        for name, instead in _MOVED.items():
            if getattr(self, name) is not None:
                raise _MovedMember(
                    f"{name} is no member of this API; use {instead}", field=name, code="unsupported_parameter"
                )
        for name, (neutral, reason) in _REFUSED.items():
            value = getattr(self, name)
            if value is not None and value not in neutral:
                raise unsupported(name, reason)
        if self.reasoning is not None:
            for name in ("summary", "generate_summary"):
                if getattr(self.reasoning, name) not in (None, "auto"):
                    raise unsupported(f"reasoning.{name}", "reasoning comes as it is, without summaries")

    def _check_options(self) -> None:
        if self.conversation is not None and self.previous_response_id is not None:
            raise InvalidRequest(
                "conversation and previous_response_id cannot be used together",
                field="conversation",
                code="invalid_value",
            )
        if self.safety_identifier:
            check_affinity_key(self.safety_identifier, field_name="safety_identifier")
        for name in self.include or ():
            if name not in _INCLUDABLE:
                raise InvalidRequest(
                    f"include can have {', '.join(_INCLUDABLE)}, and nothing else",
                    field="include",
                    code="unsupported_parameter",
                )
        check_metadata(self.metadata or {})

    def _messages(self, before: Sequence[Any] | None) -> list[dict[str, Any]]:
        if self.input is None:
            raise InvalidRequest("input is missing", field="input", code="missing_required_parameter")
        place = "conversation" if self.conversation is not None else "previous_response_id"
        if before is None and getattr(self, place) is not None:
            return _NOT_KNOWN
        conversation = _Conversation()
        if self.instructions is not None:
            check_text(self.instructions, field_name="instructions")
            conversation.say("system", self.instructions)
        for item in before or ():
            conversation.add(item, place)
        if isinstance(self.input, str):
            check_text(self.input, field_name="input")
            conversation.say("user", self.input)
        else:
            if not self.input:
                raise InvalidRequest("input is empty; at least one item is needed", field="input")
            for number, item in enumerate(self.input):
                conversation.add(item, f"input[{number}]")
        return conversation.messages

    def _response_format(self) -> dict[str, Any] | None:
        wanted = None if self.text is None else self.text.format
        if wanted is None or wanted.get("type") != "json_schema":
            return None if wanted is None else {"type": wanted.get("type")}
        schema = {key: wanted[key] for key in ("name", "schema", "strict", "description") if key in wanted}
        description = schema.get("description")
        if not isinstance(description, str | None):
            refuse("text.format.description", "a text")
        check_text(description or "", field_name="text.format.description")
        return {"type": "json_schema", "json_schema": schema}


def check_items(items: Sequence[Any], *, before: Sequence[Any]) -> None:
    """Raises InvalidRequest for items that cannot stand in a conversation after those `before`."""
    conversation = _Conversation()
    for item in before:
        conversation.add(item, "conversation")
    for number, item in enumerate(items):
        conversation.add(item, f"items[{number}]")


@contextlib.contextmanager
def own_words() -> Iterator[None]:
    """Renames members in errors of the block from the chat API's names to this API's."""
    try:
        yield
    except InvalidRequest as error:
        if not isinstance(error, _MovedMember):
            error.message = in_own_words(error.message)
            error.field = error.field and in_own_words(error.field)
        raise


class _Conversation:
    """Input items as chat messages; an assistant's reasoning, text and calls of one turn are one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._turn: dict[str, Any] | None = None
        """The assistant's message that the next item may belong to."""
        self._call_ids: set[str] = set()

    def say(self, role: str, content: str | list[dict[str, Any]]) -> None:
        """Adds a message of another role than the assistant's, whose texts are checked."""
        self.messages.append({"role": role, "content": content})
        self._turn = None

    def add(self, item: Any, name: str) -> None:
        """Adds one item. Raises InvalidRequest that names it."""
        if not isinstance(item, dict):
            refuse(name, "an object")
        kind = item.get("type")
        if kind is None and "role" in item:
            kind = "message"
        if kind not in _ITEM_TYPES:
            raise InvalidRequest(
                f"{name}.type must be one of {', '.join(_ITEM_TYPES)}: this server has no other tools than functions",
                field=f"{name}.type",
                code="unsupported_parameter" if isinstance(kind, str) else "invalid_value",
            )
        if kind == "message":
            self._add_message(item, name)
        elif kind == "reasoning":
            self._add_reasoning(item, name)
        elif kind == "function_call":
            self._add_call(item, name)
        else:
            self._add_output(item, name)

    def _add_message(self, item: Mapping[str, Any], name: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            refuse(f"{name}.role", f"one of {', '.join(_ROLES)}")
        content = _content(item.get("content"), f"{name}.content")
        if role != "assistant":
            self.say(role, content)
            return
        turn = self._turn_without("content", "tool_calls")
        turn["content"] = content

    def _add_reasoning(self, item: Mapping[str, Any], name: str) -> None:
        """Adds reasoning, unless only its summary or its encrypted form came, which say nothing to a model."""
        parts = item.get("content") or []
        if not isinstance(parts, list):
            refuse(f"{name}.content", "a list of parts")
        texts = [_part_text(part, f"{name}.content[{n}]", ("reasoning_text",)) for n, part in enumerate(parts)]
        if texts:
            turn = self._turn_without("reasoning_content", "content", "tool_calls")
            turn["reasoning_content"] = "\n".join(texts)

    def _add_call(self, item: Mapping[str, Any], name: str) -> None:
        call_id = item.get("call_id")
        namespace = item.get("namespace")
        if not isinstance(namespace, str | None):
            refuse(f"{name}.namespace", "a text")
        function = {"name": told_name(namespace, item.get("name")), "arguments": item.get("arguments")}
        call = {"id": call_id, "type": "function", "function": function}
        if call_id is None:
            raise InvalidRequest(
                f"{name}.call_id is missing", field=f"{name}.call_id", code="missing_required_parameter"
            )
        try:
            check_conversation([{"role": "assistant", "tool_calls": [call]}], max_chars=MAX_BODY_BYTES)
        except InvalidRequest as error:
            raise _about_call(error, name) from None
        self._turn_without().setdefault("tool_calls", []).append(call)
        self._call_ids.add(call_id)

    def _add_output(self, item: Mapping[str, Any], name: str) -> None:
        call_id = item.get("call_id")
        if not isinstance(call_id, str) or call_id not in self._call_ids:
            refuse(f"{name}.call_id", "the call_id of a function_call that comes before it")
        self.say("tool", _content(item.get("output"), f"{name}.output"))
        self.messages[-1]["tool_call_id"] = call_id

    def _turn_without(self, *members: str) -> dict[str, Any]:
        """Returns the assistant's turn, or a new one if the current one has any of these members."""
        if self._turn is None or any(member in self._turn for member in members):
            self._turn = {"role": "assistant"}
            self.messages.append(self._turn)
        return self._turn


def _content(content: Any, name: str) -> str | list[dict[str, Any]]:
    """Returns a message's content as the chat API has it."""
    if isinstance(content, str):
        check_text(content, field_name=name)
        return content
    if not isinstance(content, list) or not content:
        refuse(name, "a text or a list of text parts")
    texts = [_part_text(part, f"{name}[{number}]", _TEXT_PARTS) for number, part in enumerate(content)]
    return [{"type": "text", "text": text} for text in texts]


def _part_text(part: Any, name: str, kinds: Sequence[str]) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") in kinds else None
    if not isinstance(text, str):
        refuse(name, f'{{"type": "{kinds[0]}", "text": …}}; this server takes text only')
    check_text(text, field_name=name)
    return text


def _about_call(error: InvalidRequest, name: str) -> InvalidRequest:
    """Returns the error about a call of a message as one about the item that it came from."""
    call = "messages[0].tool_calls[0]"
    for told, own in ((f"{call}.function", name), (f"{call}.id", f"{name}.call_id"), (call, name)):
        error.message = error.message.replace(told, own)
        error.field = (error.field or name).replace(told, own)
    return error


def in_own_words(text: str) -> str:
    """Returns a text of the chat API with its members' names in this API."""
    for pattern, name in _RENAMED:
        text = pattern.sub(name, text)
    return text
