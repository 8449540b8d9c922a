"""Tools and earlier calls of a chat request, checked and as chat templates expect them.

Knows OpenAI's spelling, which templates follow, and nothing of HTTP or of how models write calls.
"""

import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Never

from gateway.limits import MAX_MESSAGES, MAX_NAME_CHARS, check_messages, check_text
from gateway.models.json_objects import begins_object
from gateway.models.tokenizer import ModelTokenizer
from services.runtime.errors import InvalidRequest
from services.structured.form import CalledFunction
from services.structured.grammar import ANY_OBJECT
from services.structured.lark import MAX_CALLS

MAX_TOOLS = 128
MAX_TOOL_DEPTH = 64
"""The depth of a tool's schema and of a call's arguments: objects in objects."""

_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""The parameters of a function without a schema: it takes none."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NAME_RULE = f"1 to {MAX_NAME_CHARS} characters of [A-Za-z0-9_.-]"


def offered_tools(tools: Sequence[Any] | None, choice: Any) -> list[dict[str, Any]] | None:
    """Returns the tools that the model is told of; None where none may be called.

    Raises InvalidRequest for a wrong tool or `tool_choice`.
    """
    offered = _checked_tools(tools or [])
    chosen = _read_choice(choice)
    if chosen.mode == "none":
        return None
    if not offered and choice is not None:
        raise InvalidRequest("tool_choice needs tools", field="tool_choice", code="invalid_value")
    if not chosen.names <= names_of(offered):
        raise InvalidRequest("tool_choice names a tool that is not in tools", field="tool_choice", code="invalid_value")
    if chosen.is_all_others_hidden:
        offered = [tool for tool in offered if tool["function"]["name"] in chosen.names]
    return offered or None


def forced_names(offered: Sequence[Mapping[str, Any]] | None, choice: Any) -> frozenset[str]:
    """Returns the names of those offered tools of which at least one must be called; empty: none must."""
    chosen = _read_choice(choice)
    if not offered or chosen.mode != "required":
        return frozenset()
    return chosen.names or names_of(offered)


def is_named(choice: Any) -> bool:
    """Returns whether it names the function to call, which is then called once."""
    return isinstance(choice, Mapping) and choice.get("type") == "function"


def strict_names(tools: Sequence[Any] | None) -> frozenset[str]:
    """Returns the names of those checked tools whose arguments must keep to their schemas in any call."""
    return frozenset(tool["function"]["name"] for tool in tools or () if tool["function"].get("strict"))


def called_functions(
    tools: Sequence[Mapping[str, Any]], names: Set[str], *, strict: Set[str]
) -> tuple[CalledFunction, ...]:
    """Returns the checked tools of these names, with what their arguments keep to: any object if not strict.

    Raises InvalidRequest for parameters that are not an object, as arguments always are one.
    """
    functions = (tool["function"] for tool in tools if tool["function"]["name"] in names)
    return tuple(
        CalledFunction(function["name"], _parameters(function) if function["name"] in strict else ANY_OBJECT)
        for function in functions
    )


def _parameters(function: Mapping[str, Any]) -> str:
    parameters = function.get("parameters") or _NO_PARAMETERS
    kind = parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        _fail("tools", f"functions whose parameters are an object, which those of {function['name']} are not")
    closed = closed_objects({**parameters, "type": "object"})
    return json.dumps(closed, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def closed_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema whose objects that name properties allow no others, unless they say otherwise.

    Where several schemas hold for one object, none of them names all properties: those stay as they are, and so does a
    schema with `allOf`, whose definitions may be parts of such.
    """
    return {**schema} if _has_word(schema, "allOf") else _closed(schema)


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    closed = {**schema}
    is_whole = _COMBINING.isdisjoint(schema)
    if is_whole and isinstance(schema.get("properties"), dict) and _OPENING.isdisjoint(schema):
        closed["additionalProperties"] = False
    for word, value in schema.items():
        if word in _MAPS_OF_SCHEMAS and isinstance(value, dict):
            closed[word] = {name: _closed_value(inner) for name, inner in value.items()}
        elif word in _LISTS_OF_SCHEMAS and isinstance(value, list) and "properties" not in schema:
            closed[word] = [_closed_value(inner) for inner in value]
        elif word in _SCHEMAS:
            closed[word] = _closed_value(value)
    return closed


def _closed_value(value: Any) -> Any:
    return _closed(value) if isinstance(value, dict) else value


def _has_word(value: Any, word: str) -> bool:
    """Returns whether any object of it does, at any depth, which was bounded before."""
    if isinstance(value, dict):
        return word in value or any(_has_word(inner, word) for inner in value.values())
    return isinstance(value, list) and any(_has_word(inner, word) for inner in value)


_COMBINING = frozenset({"anyOf", "oneOf", "$ref", "not", "if", "dependentSchemas"})
_OPENING = frozenset({"additionalProperties", "unevaluatedProperties"})
_MAPS_OF_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_LISTS_OF_SCHEMAS = frozenset({"anyOf", "oneOf", "prefixItems"})
_SCHEMAS = frozenset({"items", "additionalProperties"})


def names_of(tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Returns the names of checked tools."""
    return frozenset(tool["function"]["name"] for tool in tools)


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
    num_chars = sum(len(message["content"]) for message in checked) + len(_text(tools or [], "tools"))
    call_ids: set[str] = set()
    for number, message in enumerate(messages):
        num_chars += _add_calls(checked[number], message, f"messages[{number}]")
        if checked[number]["role"] == "tool":
            checked[number]["tool_call_id"] = _checked_answer_id(message, call_ids, f"messages[{number}].tool_call_id")
        call_ids.update(call["id"] for call in checked[number].get("tool_calls", ()) if "id" in call)
    if num_chars > max_chars:
        raise InvalidRequest(
            f"messages and tools have {num_chars} characters; "
            f"more than {max_chars} cannot fit into the model's context",
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
    has_calls = any("tool_calls" in message for message in checked)
    if (tools or has_calls) and tokenizer.tool_format is None:
        raise InvalidRequest(
            "this model's chat template has no tools, or has them in a way that this server does not know",
            field="tools" if tools else "messages",
            code="unsupported_parameter",
        )
    return await tokenizer.encode_chat(checked, tools, more=more or {}, tenant=tenant)


def _checked_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(tools)} entries; the most is {MAX_TOOLS}", field="tools")
    checked = [_checked_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools)]
    if len(names_of(checked)) != len(checked):
        raise InvalidRequest("two of the tools have the same name", field="tools", code="invalid_value")
    return checked


def _checked_tool(tool: Any, name: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        _fail(name, '{"type": "function", "function": {…}}')
    function = tool["function"]
    _check_name(function.get("name"), f"{name}.function.name")
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        _fail(f"{name}.function.description", "a text")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        _fail(f"{name}.function.parameters", "a JSON schema, which is an object")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        _fail(f"{name}.function.strict", "true or false")
    _text(function, f"{name}.function")
    # `strict` is a wish to the server, not something that a model should read.
    told = {key: value for key, value in function.items() if key != "strict" and value is not None}
    return {"type": "function", "function": told}


@dataclass(frozen=True, slots=True)
class _Choice:
    """A choice: `mode` is auto, required or none; `names` are the only tools that may be called, empty: all."""

    mode: str
    names: frozenset[str] = frozenset()
    is_all_others_hidden: bool = False
    """Whether the model is told of those tools only."""


def _read_choice(choice: Any) -> _Choice:
    if choice is None:
        return _Choice("auto")
    if choice in ("none", "auto", "required"):
        return _Choice(choice)
    if isinstance(choice, dict) and choice.get("type") == "function":
        return _Choice("required", frozenset({_named(choice, "tool_choice")}))
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed_tools(choice.get("allowed_tools"))
    _fail(
        "tool_choice",
        'none, auto, required, {"type": "function", "function": {"name": …}} '
        'or {"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}',
    )


def _allowed_tools(allowed: Any) -> _Choice:
    name = "tool_choice.allowed_tools"
    if not isinstance(allowed, dict) or allowed.get("mode") not in ("auto", "required"):
        _fail(name, '{"mode": "auto" or "required", "tools": […]}')
    tools = allowed.get("tools")
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        _fail(f"{name}.tools", f"a list of 1 to {MAX_TOOLS} tools")
    names = frozenset(_named(tool, f"{name}.tools[{number}]") for number, tool in enumerate(tools))
    return _Choice(allowed["mode"], names, is_all_others_hidden=True)


def _named(choice: Any, name: str) -> str:
    """Returns the name in {"type": "function", "function": {"name": …}}."""
    is_function = isinstance(choice, dict) and choice.get("type") == "function"
    if not is_function or not isinstance(choice.get("function"), dict):
        _fail(name, '{"type": "function", "function": {"name": …}}')
    called = choice["function"].get("name")
    _check_name(called, f"{name}.function.name")
    return str(called)


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
            _fail(f"{name}.reasoning_content", "a text")
        check_text(reasoning, field_name=f"{name}.reasoning_content")
        checked["reasoning_content"] = reasoning
        num_chars += len(reasoning)
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list) or len(calls) > MAX_CALLS:
            _fail(f"{name}.tool_calls", f"a list of at most {MAX_CALLS} calls")
        checked["tool_calls"] = [_checked_call(call, f"{name}.tool_calls[{n}]") for n, call in enumerate(calls)]
        num_chars += sum(len(call["function"]["arguments"]) for call in calls)
    return num_chars


def _checked_call(call: Any, name: str) -> dict[str, Any]:
    is_function = isinstance(call, dict) and call.get("type", "function") == "function"
    if not is_function or not isinstance(call.get("function"), dict):
        _fail(name, '{"id": …, "type": "function", "function": {"name": …, "arguments": …}}')
    function = call["function"]
    _check_name(function.get("name"), f"{name}.function.name")
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
        _fail(name, "a text that holds a JSON object")
    try:
        # Models and clients write nothing for a function without parameters.
        value = json.loads(text or "{}", parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        value = _completed(text)
    if not isinstance(value, dict):
        _fail(name, "a text that holds a JSON object")
    _text(value, name)
    return value


def _completed(text: str) -> dict[str, Any] | None:
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
        _fail(name, f"a text of 1 to {MAX_NAME_CHARS} characters")
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
        _fail(name, "the id of a call in tool_calls of an assistant's message before it")
    return checked


def _check_name(value: Any, name: str) -> None:
    if not isinstance(value, str) or _NAME.fullmatch(value) is None:
        _fail(name, _NAME_RULE)


def _text(value: Any, name: str) -> str:
    """Returns JSON for it. Raises InvalidRequest where a template could not write it."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_TOOL_DEPTH:
            _fail(name, f"nested at most {MAX_TOOL_DEPTH} deep")
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


def _fail(name: str, rule: str) -> Never:
    raise InvalidRequest(f"{name} must be {rule}", field=name, code="invalid_value")
