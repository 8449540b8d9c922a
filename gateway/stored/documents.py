"""Responses and their events as data: the items that a response begins with, and members that are filled in later.

Pure. Knows OpenAI's spelling and no store.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

ENDS = (b"response.completed", b"response.incomplete", b"response.failed")
"""Types of the events that end a stream, and have the whole response."""
_HELD = (*ENDS, b"error")
_WITH_RESPONSE = (*ENDS, b"response.created", b"response.in_progress")
_ITEM_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_ITEM_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Event(NamedTuple):
    """A server-sent event: its type, and all of its bytes with the blank line after it."""

    kind: bytes
    data: bytes

    @property
    def is_last(self) -> bool:
        """Whether it belongs to the end of its stream."""
        return self.kind in _HELD


class EventSplitter:
    """Divides a stream of bytes into events; comments are passed over."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, data: bytes) -> list[Event]:
        """Returns the events that these bytes complete."""
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        return [_event(block) for block in blocks if not block.startswith(b":")]


def with_members(event: Event, members: Mapping[str, Any]) -> Event:
    """Returns the event with these members in its response, where it has one."""
    if event.kind not in _WITH_RESPONSE:
        return event
    lines = event.data.removesuffix(b"\n\n").split(b"\n")
    payload = msgspec.json.decode(_data_of(lines))
    payload["response"] |= members
    encoded = [b"data: " + msgspec.json.encode(payload) if line.startswith(b"data: ") else line for line in lines]
    return Event(event.kind, b"\n".join(encoded) + b"\n\n")


def response_of(event: Event) -> bytes:
    """Returns the response in an event of `ENDS`, as JSON."""
    return bytes(msgspec.json.decode(_data_of(event.data.split(b"\n")), type=_WithResponse).response)


def id_of(event: bytes) -> str:
    """Returns the id of an event, or an empty text."""
    return next((line[4:].decode() for line in event.split(b"\n") if line.startswith(b"id: ")), "")


def failed_event(document: bytes, number: int) -> bytes:
    """Returns the last event of a stream whose response has failed."""
    payload = {"type": "response.failed", "sequence_number": number, "response": msgspec.Raw(document)}
    return b"event: response.failed\ndata: " + msgspec.json.encode(payload) + b"\n\n"


def changed(document: bytes, **members: Any) -> bytes:
    """Returns a JSON object with these members instead of its own."""
    return msgspec.json.encode(msgspec.json.decode(document) | members)


def input_items(asked: str | Sequence[Any], owner_id: str, *, keeps_ids: bool = True) -> list[dict[str, Any]]:
    """Returns input, which is checked, as a list of items with ids. What no model is told is left out.

    The ids follow from that of the owner; those that a client gave are kept if `keeps_ids`.
    """
    if isinstance(asked, str):
        asked = [{"role": "user", "content": asked}]
    return [_item(item, f"{owner_id}/{number}", keeps_id=keeps_ids) for number, item in enumerate(asked)]


def _item(item: Mapping[str, Any], name: str, *, keeps_id: bool) -> dict[str, Any]:
    kind = item.get("type") or "message"
    given, item_id = item.get("id"), f"{_ITEM_PREFIXES[kind]}_{hashlib.sha256(name.encode()).hexdigest()[:24]}"
    if keeps_id and isinstance(given, str) and _ITEM_ID.fullmatch(given):
        item_id = given
    known: dict[str, Any] = {"id": item_id, "type": kind, "status": "completed"}
    if kind == "message":
        part = "output_text" if item["role"] == "assistant" else "input_text"
        return {**known, "role": item["role"], "content": _parts(item["content"], part)}
    if kind == "reasoning":
        return {**known, "summary": [], "content": _parts(item.get("content") or [], "reasoning_text")}
    if kind == "function_call_output":
        output = item["output"]
        shown = output if isinstance(output, str) else _parts(output, "input_text")
        return {**known, "call_id": item["call_id"], "output": shown}
    namespace = {"namespace": item["namespace"]} if item.get("namespace") else {}
    return {**known, "call_id": item["call_id"], **namespace, "name": item["name"], "arguments": item["arguments"]}


def _parts(content: str | Sequence[Mapping[str, Any]], kind: str) -> list[dict[str, Any]]:
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    more: dict[str, Any] = {"annotations": []} if kind == "output_text" else {}
    return [{"type": kind, "text": text, **more} for text in texts]


class _WithResponse(msgspec.Struct):
    response: msgspec.Raw


def _event(block: bytes) -> Event:
    return Event(block.partition(b"\n")[0].removeprefix(b"event: "), block + b"\n\n")


def _data_of(lines: Sequence[bytes]) -> bytes:
    return next(line for line in lines if line.startswith(b"data: "))[6:]
