"""Anthropic's messages and tools as the chat API has them. Pure: what clients wrote in, checked data out.

A user's message with results of tools becomes a message of each tool, and consecutive messages of one role become one
turn, as Anthropic's API has it. Every mistake is an InvalidRequest that names the block in its own words.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.limits import MAX_MESSAGES, check_text
from gateway.models.conversation import refuse, unsupported

SERVER_TOOLS = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "mcp_toolset", "advisor_")
"""Beginnings of the types of tools that run on Anthropic's servers; a model that is not told of them does without."""
_UNSEEN_BLOCKS = frozenset({"redacted_thinking"})
"""Blocks that say nothing to any other model."""
_TEXT_ONLY = "this server reads and writes text only"


def chat_messages(system: Any, messages: Any) -> list[dict[str, Any]]:
    """Returns the conversation as the chat API has it. Raises InvalidRequest."""
    if not isinstance(messages, list) or not messages:
        refuse("messages", "a list of at least one message")
    if len(messages) > MAX_MESSAGES:
        refuse("messages", f"a list of at most {MAX_MESSAGES} messages")
    conversation = _Conversation()
    if system not in (None, "", []):
        conversation.say("system", _texts(system, "system"))
    for number, message in enumerate(messages):
        conversation.add(message, f"messages[{number}]")
    return conversation.messages


def chat_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns the tools that the model is told of, as the chat API spells them. Raises InvalidRequest."""
    told = []
    for number, tool in enumerate(tools):
        name = f"tools[{number}]"
        if not isinstance(tool, dict):
            refuse(name, '{"name": …, "input_schema": …}')
        if _runs_on_server(tool):
            continue
        if tool.get("type") not in (None, "custom"):
            raise unsupported(f"{name}.type", "a model knows the tools that it is told of, with an input_schema")
        if not isinstance(tool.get("input_schema"), dict):
            refuse(f"{name}.input_schema", "a JSON schema, which is an object")
        function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
        function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
        told.append({"type": "function", "function": function})
    return told


def left_out(tools: Sequence[Any]) -> list[str]:
    """Returns the types of tools that the model is not told of, as members of the request."""
    found = (f"tools.{tool['type']}" for tool in tools if isinstance(tool, dict) and _runs_on_server(tool))
    return list(dict.fromkeys(found))


def chat_tool_choice(choice: Any) -> tuple[Any, bool | None]:
    """Returns `tool_choice` as the chat API spells it, and whether several calls may be made. Raises InvalidRequest."""
    if choice is None:
        return None, None
    kind = choice.get("type") if isinstance(choice, dict) else None
    if not isinstance(kind, str) or kind not in _CHOICES:
        refuse("tool_choice", f'{{"type": …}} with a type of {", ".join(_CHOICES)}')
    disabled = choice.get("disable_parallel_tool_use")
    if not isinstance(disabled, bool | None):
        refuse("tool_choice.disable_parallel_tool_use", "true or false")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}, False
    return _CHOICES[kind], None if disabled is None else not disabled


_CHOICES = {"auto": None, "any": "required", "tool": "", "none": "none"}


def _runs_on_server(tool: Mapping[str, Any]) -> bool:
    kind = tool.get("type")
    return isinstance(kind, str) and kind.startswith(SERVER_TOOLS)


class _Conversation:
    """The messages so far; the last one may grow."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def say(self, role: str, texts: Sequence[str]) -> None:
        """Adds texts of a system or user to the last message, if it is of that role, or as a new one."""
        parts = [{"type": "text", "text": text} for text in texts]
        last = self.messages[-1] if self.messages else {}
        if last.get("role") == role:
            last["content"] += parts
        else:
            self.messages.append({"role": role, "content": parts})

    def add(self, message: Any, name: str) -> None:
        """Adds one message. Raises InvalidRequest that names it."""
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant", "system"):
            refuse(f"{name}.role", "user or assistant")
        blocks = _blocks(message.get("content"), f"{name}.content", may_be_empty=role == "assistant")
        for number, block in enumerate(blocks):
            place = f"{name}.content[{number}]"
            if role == "assistant":
                self._add_answer(block, place)
            elif block.get("type") == "tool_result" and role == "user":
                self._add_result(block, place)
            else:
                self.say(role, [_text_of(block, place)])
        if role == "assistant" and not blocks:
            self._turn()

    def _add_answer(self, block: Mapping[str, Any], name: str) -> None:
        kind = block.get("type")
        if kind in _UNSEEN_BLOCKS:
            return
        turn = self._turn()
        if kind == "thinking":
            turn["reasoning_content"] = turn.get("reasoning_content", "") + _text(block, "thinking", name)
        elif kind == "tool_use":
            turn.setdefault("tool_calls", []).append(_call(block, name))
        else:
            turn["content"] = (turn["content"] or "") + _text_of(block, name)

    def _add_result(self, block: Mapping[str, Any], name: str) -> None:
        content = block.get("content")
        texts = [] if content is None else _texts(content, f"{name}.content")
        call_id = block.get("tool_use_id")
        if not isinstance(call_id, str):
            refuse(f"{name}.tool_use_id", "the id of a tool_use block before it")
        self.messages.append({"role": "tool", "content": "\n".join(texts), "tool_call_id": call_id})

    def _turn(self) -> dict[str, Any]:
        """Returns the assistant's message that grows, or a new one."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": None})
        return self.messages[-1]


def _call(block: Mapping[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(block.get("input"), dict):
        refuse(f"{name}.input", "an object")
    for member in ("id", "name"):
        _text(block, member, name)
    arguments = msgspec.json.encode(block["input"]).decode()
    return {"id": block["id"], "type": "function", "function": {"name": block["name"], "arguments": arguments}}


def _texts(content: Any, name: str) -> list[str]:
    """Returns the texts of what may have nothing else: a system prompt, or the result of a tool."""
    blocks = _blocks(content, name, may_be_empty=True)
    return [_text_of(block, f"{name}[{number}]") for number, block in enumerate(blocks)]


def _blocks(content: Any, name: str, *, may_be_empty: bool) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content or not may_be_empty else []
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        refuse(name, "a text or a list of blocks")
    if not content and not may_be_empty:
        refuse(name, "a text or a list of at least one block")
    for number, block in enumerate(content):
        if not isinstance(block.get("type"), str):
            refuse(f"{name}[{number}].type", "the type of a block, which is a text")
    return content


def _text_of(block: Mapping[str, Any], name: str) -> str:
    """Returns the text of a block of text, or of a document that is one."""
    kind: str = block["type"]
    if kind == "text":
        return _text(block, "text", name)
    source = block.get("source")
    if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        return _text(source, "data", f"{name}.source")
    if kind in ("image", "document", "search_result", "container_upload"):
        raise unsupported(name, _TEXT_ONLY)
    raise unsupported(f"{name}.type", f"{kind[:64]!r} is no block that may stand here")


def _text(block: Mapping[str, Any], member: str, name: str) -> str:
    text = block.get(member)
    if not isinstance(text, str):
        refuse(f"{name}.{member}", "a text")
    check_text(text, field_name=f"{name}.{member}")
    return text
