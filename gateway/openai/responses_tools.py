"""Tools of OpenAI's Responses API as the chat API has them: functions, those of namespaces too.

A function of a namespace is told to the model under a name that has both, and called by its client under its own. Tools
that only OpenAI's servers run are left out, and the answer's headers say so. Pure.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gateway.models.conversation import check_function_name, refuse, unsupported

LEFT_OUT = frozenset(
    {"web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"}
    | {"file_search", "code_interpreter", "image_generation", "mcp", "tool_search"}
)
"""Types of tools that run on the server; a model that is not told of them answers without them."""
_MEMBERS = ("name", "description", "parameters", "strict")


def chat_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns the tools as the chat API spells them, without those of LEFT_OUT. Raises InvalidRequest."""
    return [
        {"type": "function", "function": {**function, "name": told_name(namespace, function.get("name"))}}
        for namespace, function in _functions(tools)
    ]


def left_out(tools: Sequence[Any]) -> list[str]:
    """Returns the types of tools that the model is not told of, as members of the request."""
    kinds = (tool.get("type") for tool in tools if isinstance(tool, dict))
    return list(dict.fromkeys(f"tools.{kind}" for kind in kinds if kind in LEFT_OUT))


def own_names(tools: Sequence[Any]) -> dict[str, tuple[str, str]]:
    """Returns the namespace and the own name of each function that has a namespace, by the name that models are told.

    The tools are checked.
    """
    return {
        told_name(namespace, function["name"]): (namespace, function["name"])
        for namespace, function in _functions(tools)
        if namespace
    }


def told_name(namespace: str | None, name: Any) -> Any:
    """Returns the name under which models know a function; what is no text stays for others to refuse."""
    return f"{namespace.rstrip('_')}__{name}" if namespace and isinstance(name, str) else name


def _functions(tools: Sequence[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each function with its namespace, or an empty text. Raises InvalidRequest."""
    for number, tool in enumerate(tools):
        name = f"tools[{number}]"
        if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
            refuse(name, '{"type": "function", "name": …, "parameters": …}')
        if tool["type"] == "namespace":
            yield from _functions_of_namespace(tool, name)
        elif tool["type"] not in LEFT_OUT:
            yield "", _function(tool, name)


def _functions_of_namespace(tool: Mapping[str, Any], name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    check_function_name(tool.get("name"), f"{name}.name")
    inner = tool.get("tools")
    if not isinstance(inner, list) or not all(isinstance(each, dict) for each in inner):
        refuse(f"{name}.tools", "a list of functions")
    for number, each in enumerate(inner):
        yield tool["name"], _function(each, f"{name}.tools[{number}]")


def _function(tool: Mapping[str, Any], name: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise unsupported(f"{name}.type", "this server knows functions alone, which the client runs")
    if not isinstance(tool.get("strict"), bool | None):
        refuse(f"{name}.strict", "true or false")
    return {key: tool[key] for key in _MEMBERS if key in tool}
