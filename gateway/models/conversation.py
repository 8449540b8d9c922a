"""A chat's messages, with earlier calls and reasoning, checked and as chat templates take them.

Knows OpenAI's spelling, which templates follow, and nothing of HTTP or of how models write calls.
"""

import json
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any, Never

from gateway.limits import MAX_MESSAGES, MAX_NAME_CHARS, check_messages, check_text
from gateway.models.chat_template import CONTINUES
from gateway.models.json_objects import begins_object
from gateway.models.tokenizer import ModelTokenizer
from services.runtime.errors import InvalidRequest
from services.structured.lark import MAX_CALLS

MAX_TOOL_DEPTH = 64
"""The depth of a tool's schema and of a call's arguments: objects in objects."""

_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FUNCTION_NAME_RULE = f"1 to {MAX_NAME_CHARS} characters of [A-Za-z0-9_.-]"


def check_conversation(
    messages: Sequence[Any], tools: Sequence[Mapping[str, Any]] | None = None, *, max_chars: int
) -> list[dict[str, Any]]:
    """Returns what `check_messages` does, with calls and reasoning, as chat templates take them.

    An earlier call's arguments, which travel as JSON in a text, become the object that they stand for. `tools` count
    towards `max_chars` too.
    """
    # Refused before each of them is checked.
    plain = messages if len(messages) > MAX_MESSAGES else [_without_calls(message) for message in messages]
    checked = check_messages(plain, max_chars=max_chars)
    num_chars = sum(len(message["content"]) for message in checked) + len(json_text(tools or [], "tools"))
    call_ids: set[str] = set()
    for number, message in enumerate(messages):
        num_chars += _add_calls(checked[number], message, f"messages[{number}]")
        if checked[number]["role"] == "tool":
            checked[number]["tool_call_id"] = _checked_answer_id(message, call_ids, f"messages[{number}].tool_call_id")
        call_ids.update(call["id"] for call in checked[number].get("tool_calls", ()) if "id" in call)
    if num_chars > max_chars:
        raise InvalidRequest(
            f"messages and tools have {num_chars} characters: the text is longer than the model's context length: "
            f"at most {max_chars} can fit",
            field="messages",
            code="context_length_exceeded",
        )
    return checked


async def encode_conversation(
    tokenizer: ModelTokenizer,
    messages: Sequence[Any],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    max_chars: int,
    more: Mapping[str, Any] | None = None,
    tenant: str = "",
) -> list[int]:
    """Returns the token ids of a conversation, which is checked first; `more` are variables of the chat template.

    Raises InvalidRequest, also for a model that has no tools.
    """
    checked = check_conversation(messages, tools, max_chars=max_chars)
    if more and more.get(CONTINUES):
        _check_continued(checked[-1])
    has_calls = any("tool_calls" in message for message in checked)
    if (tools or has_calls) and tokenizer.tool_format is None:
        raise InvalidRequest(
            "this model's chat template has no tools, or has them in a way that this server does not know",
            field="tools" if tools else "messages",
            code="unsupported_parameter",
        )
    return await tokenizer.encode_chat(checked, tools, more=more or {}, tenant=tenant)


def _check_continued(last: Mapping[str, Any]) -> None:
    if last["role"] != "assistant" or "tool_calls" in last:
        raise InvalidRequest(
            "only a last message of the assistant's without tool_calls can be continued",
            field="messages",
            code="invalid_value",
        )


def _without_calls(message: Any) -> Any:
    if isinstance(message, dict) and message.get("role") == "assistant" and message.get("tool_calls"):
        return {key: value for key, value in message.items() if key != "tool_calls"}
    return message


def _add_calls(checked: dict[str, Any], message: Mapping[str, Any], name: str) -> int:
    """Adds what `check_messages` leaves out; returns the number of its characters."""
    num_chars = 0
    if checked["role"] != "assistant":
        return num_chars
    reasoning = message.get("reasoning_content")
    if reasoning is not None:
        if not isinstance(reasoning, str):
            refuse(f"{name}.reasoning_content", "a text")
        check_text(reasoning, field_name=f"{name}.reasoning_content")
        checked["reasoning_content"] = reasoning
        num_chars += len(reasoning)
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list) or len(calls) > MAX_CALLS:
            refuse(f"{name}.tool_calls", f"a list of at most {MAX_CALLS} calls")
        checked["tool_calls"] = [_checked_call(call, f"{name}.tool_calls[{n}]") for n, call in enumerate(calls)]
        num_chars += sum(len(call["function"]["arguments"]) for call in calls)
    return num_chars


def _checked_call(call: Any, name: str) -> dict[str, Any]:
    is_function = isinstance(call, dict) and call.get("type", "function") == "function"
    if not is_function or not isinstance(call.get("function"), dict):
        refuse(name, '{"id": …, "type": "function", "function": {"name": …, "arguments": …}}')
    function = call["function"]
    check_function_name(function.get("name"), f"{name}.function.name")
    checked: dict[str, Any] = {
        "type": "function",
        "function": {
            "name": function["name"],
            "arguments": _arguments(function.get("arguments"), f"{name}.function.arguments"),
        },
    }
    if call.get("id") is not None:
        checked["id"] = _checked_id(call["id"], f"{name}.id")
    return checked


def _arguments(text: Any, name: str) -> dict[str, Any]:
    """Returns the object that an earlier call's arguments stand for."""
    if not isinstance(text, str):
        refuse(name, "a text that holds a JSON object")
    try:
        # Models and clients write nothing for a function without parameters.
        value = json.loads(text or "{}", parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        value = completed_object(text)
    if not isinstance(value, dict):
        refuse(name, "a text that holds a JSON object")
    json_text(value, name)
    return value


def completed_object(text: str) -> dict[str, Any] | None:
    """Returns the object that begins like this, as far as its values are complete; None if no object does.

    An answer that `max_tokens` cut ends within a call, and comes back with the conversation.
    """
    if not begins_object(text):
        return None
    closers: list[str] = []
    cuts: list[tuple[int, str]] = []
    is_in_string = is_escaped = False
    for position, char in enumerate(text):
        if is_in_string:
            is_in_string = is_escaped or char != '"'
            is_escaped = char == "\\" and not is_escaped
        elif char == '"':
            is_in_string = True
        elif char in "{[":
            closers.append("}" if char == "{" else "]")
        elif char in "}]":
            closers.pop()
        if not is_in_string and char in "{[}],":
            cuts.append((position + (char != ","), "".join(reversed(closers))))
            del cuts[:-2]
    whole = text + ('"' if is_in_string and not is_escaped else "") + "".join(reversed(closers))
    for attempt in (whole, *(text[:end] + ending for end, ending in reversed(cuts))):
        try:
            value = json.loads(attempt, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            continue
        return value if isinstance(value, dict) else None
    return {}


def _refuse_constant(name: str) -> Never:
    raise ValueError(name)


def _checked_id(value: Any, name: str) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_NAME_CHARS:
        refuse(name, f"a text of 1 to {MAX_NAME_CHARS} characters")
    check_text(value, field_name=name)
    return value


def _checked_answer_id(message: Mapping[str, Any], call_ids: Set[str], name: str) -> str:
    """Returns the id of the call that a tool's message answers."""
    call_id = message.get("tool_call_id")
    if call_id is None:
        raise InvalidRequest(
            f"{name} is missing: it is the id of the call that the message answers",
            field=name,
            code="missing_required_parameter",
        )
    checked = _checked_id(call_id, name)
    if checked not in call_ids:
        refuse(name, "the id of a call in tool_calls of an assistant's message before it")
    return checked


def check_function_name(value: Any, name: str) -> None:
    """Raises InvalidRequest unless the value is the name of a function; `name` is the member that holds it."""
    if not isinstance(value, str) or _FUNCTION_NAME.fullmatch(value) is None:
        refuse(name, _FUNCTION_NAME_RULE)


def json_text(value: Any, name: str) -> str:
    """Returns JSON for a member of the request. Raises InvalidRequest where a template could not write it."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_TOOL_DEPTH:
            refuse(name, f"nested at most {MAX_TOOL_DEPTH} deep")
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"a number in {name} is not finite", field=name, code="invalid_value") from error
    check_text(text, field_name=name)
    return text


def refuse(name: str, rule: str) -> Never:
    """Raises InvalidRequest for a member that does not keep to the rule, which continues "must be"."""
    raise InvalidRequest(f"{name} must be {rule}", field=name, code="invalid_value", rule=f"must be {rule}")


def unsupported(name: str, reason: str) -> InvalidRequest:
    """Returns the error for a member that asks for what is not served."""
    return InvalidRequest(f"{name} is not supported: {reason}", field=name, code="unsupported_parameter")
