"""Tools of a chat request and the choice among them, checked; the functions that an answer's form knows.

Knows OpenAI's spelling, and nothing of HTTP or of how models write calls.
"""

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from gateway.models.conversation import check_function_name, json_text, refuse
from services.runtime.errors import InvalidRequest
from services.structured.form import CalledFunction
from services.structured.grammar import ANY_OBJECT

MAX_TOOLS = 128

_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""The parameters of a function without a schema: it takes none."""


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
        refuse("tools", f"functions whose parameters are an object, which those of {function['name']} are not")
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


def _checked_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(tools)} entries; the most is {MAX_TOOLS}", field="tools")
    checked = [_checked_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools)]
    if len(names_of(checked)) != len(checked):
        raise InvalidRequest("two of the tools have the same name", field="tools", code="invalid_value")
    return checked


def _checked_tool(tool: Any, name: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        refuse(name, '{"type": "function", "function": {…}}')
    function = tool["function"]
    check_function_name(function.get("name"), f"{name}.function.name")
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        refuse(f"{name}.function.description", "a text")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        refuse(f"{name}.function.parameters", "a JSON schema, which is an object")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        refuse(f"{name}.function.strict", "true or false")
    json_text(function, f"{name}.function")
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
    refuse(
        "tool_choice",
        'none, auto, required, {"type": "function", "function": {"name": …}} '
        'or {"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}',
    )


def _allowed_tools(allowed: Any) -> _Choice:
    name = "tool_choice.allowed_tools"
    if not isinstance(allowed, dict) or allowed.get("mode") not in ("auto", "required"):
        refuse(name, '{"mode": "auto" or "required", "tools": […]}')
    tools = allowed.get("tools")
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        refuse(f"{name}.tools", f"a list of 1 to {MAX_TOOLS} tools")
    names = frozenset(_named(tool, f"{name}.tools[{number}]") for number, tool in enumerate(tools))
    return _Choice(allowed["mode"], names, is_all_others_hidden=True)


def _named(choice: Any, name: str) -> str:
    """Returns the name in {"type": "function", "function": {"name": …}}."""
    is_function = isinstance(choice, dict) and choice.get("type") == "function"
    if not is_function or not isinstance(choice.get("function"), dict):
        refuse(name, '{"type": "function", "function": {"name": …}}')
    called = choice["function"].get("name")
    check_function_name(called, f"{name}.function.name")
    return str(called)
