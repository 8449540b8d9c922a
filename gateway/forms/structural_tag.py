"""Structural tags: text in which certain beginnings oblige the model to keep to a form up to an end.

Knows the words of vLLM, SGLang and XGrammar, older (`structures` and `triggers`) and newer (`format`), and writes them
as a grammar in llguidance's form of Lark, which is judged where clients' own grammars are. Pure.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gateway.models.conversation import refuse
from services.runtime.errors import InvalidRequest
from services.structured.grammar_text import GRAMMAR

MAX_PARTS = 256
"""Tags, elements and triggers of one structural tag."""
_ANY = r"/(.|\n)*/"


def grammar_of(asked: Mapping[str, Any], name: str) -> str:
    """Returns the grammar, marked as clients' grammars are. `name` is the member that holds it in the request.

    Raises InvalidRequest.
    """
    if asked.get("format") is not None:
        return GRAMMAR + _Rules().text(asked["format"], f"{name}.format")
    tags = [
        {"begin": each.get("begin"), "content": {"type": "json_schema", "json_schema": each.get("schema")}}
        | {"end": each.get("end")}
        for each in _objects(asked.get("structures"), f"{name}.structures")
    ]
    triggered = {"type": "triggered_tags", "triggers": asked.get("triggers"), "tags": tags}
    try:
        return GRAMMAR + _Rules().text(triggered, name)
    except InvalidRequest as error:
        for newer, older in ((".tags[", ".structures["), (".content.json_schema", ".schema")):
            error.message = error.message.replace(newer, older)
            error.field = error.field and error.field.replace(newer, older)
        raise


class _Rules:
    """The rules of a grammar, each of which has a number as its name."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._num_parts = 0

    def text(self, wanted: Any, name: str) -> str:
        """Returns the grammar of a format. Raises InvalidRequest that names what is wrong."""
        start = self._format(wanted, name, end=None)
        return "\n".join([f"start: {start}", *self._lines, ""])

    def _rule(self, body: str, attributes: str = "", *, is_terminal: bool = False) -> str:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            refuse("structural_tag", f"made of at most {MAX_PARTS} parts")
        rule = f"{'T' if is_terminal else 'r'}{self._num_parts}"
        self._lines.append(f"{rule}{attributes}: {body}")
        return rule

    def _format(self, wanted: Any, name: str, *, end: str | None) -> str:
        """Returns the rule for a format; one of any text goes up to `end`, which comes with it."""
        if not isinstance(wanted, dict) or wanted.get("type") not in _FORMATS:
            refuse(f"{name}.type", f"one of {', '.join(_FORMATS)}")
        kind = wanted["type"]
        if kind == "any_text":
            return self._rule(_ANY, is_terminal=True) if end is None else self._until(end)
        if kind == "triggered_tags":
            rule = self._triggered(wanted, name)
        elif kind == "tags_with_separator":
            rule = self._separated(wanted, name)
        elif kind == "tag":
            rule = self._tag(wanted, name, _text(wanted.get("begin"), f"{name}.begin"))
        elif kind in ("sequence", "or"):
            places = enumerate(_objects(wanted.get("elements"), f"{name}.elements"))
            parts = [self._format(each, f"{name}.elements[{number}]", end=None) for number, each in places]
            rule = self._rule((" " if kind == "sequence" else " | ").join(parts))
        else:
            rule = self._rule(_plain(wanted, name))
        return rule if end is None else self._rule(f"{rule} {_quoted(end)}")

    def _until(self, end: str) -> str:
        return self._rule(_ANY, f"[suffix={_quoted(end)}]")

    def _tag(self, tag: Mapping[str, Any], name: str, begin: str) -> str:
        """Returns the rule for a tag from `begin` on, which may be the rest of its beginning."""
        ends = tag.get("end")
        if isinstance(ends, list) and len(ends) == 1:
            (ends,) = ends
        content = self._format(tag.get("content"), f"{name}.content", end=_text(ends, f"{name}.end"))
        return self._rule(f"{_quoted(begin)} {content}" if begin else content)

    def _triggered(self, wanted: Mapping[str, Any], name: str) -> str:
        triggers = [_text(each, f"{name}.triggers") for each in _list(wanted.get("triggers"), f"{name}.triggers")]
        tags = [*enumerate(_objects(wanted.get("tags"), f"{name}.tags"))]
        free: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for number, tag in tags:
            place = f"{name}.tags[{number}]"
            begin = _text(tag.get("begin"), f"{place}.begin")
            found = [trigger for trigger in triggers if begin.startswith(trigger)]
            if len(found) != 1:
                refuse(f"{place}.begin", "a text that begins with exactly one of the triggers")
            free[found[0]].append(self._tag(tag, place, begin.removeprefix(found[0])))
        parts = [f"{self._until(trigger)} ({' | '.join(rest)})" for trigger, rest in free.items() if rest]
        is_needed, is_last = _flag(wanted, "at_least_one", name), _flag(wanted, "stop_after_first", name)
        once = self._rule(" | ".join(parts))
        if is_last:
            return once if is_needed else self._rule(f"{once} | {self._without(triggers)}")
        return self._rule(f"{once}{'+' if is_needed else '*'} {self._without(triggers)}")

    def _without(self, triggers: Sequence[str]) -> str:
        """Returns the terminal for text that has none of the triggers."""
        any_text = self._rule(_ANY, is_terminal=True)
        found = self._rule(f"{any_text} ({' | '.join(map(_quoted, triggers))}) {any_text}", is_terminal=True)
        return self._rule(f"~{found}", is_terminal=True)

    def _separated(self, wanted: Mapping[str, Any], name: str) -> str:
        tags = [
            self._tag(tag, f"{name}.tags[{number}]", _text(tag.get("begin"), f"{name}.tags[{number}].begin"))
            for number, tag in enumerate(_objects(wanted.get("tags"), f"{name}.tags"))
        ]
        once = self._rule(" | ".join(tags))
        separator = _text(wanted.get("separator"), f"{name}.separator")
        many = once if _flag(wanted, "stop_after_first", name) else f"{once} ({_quoted(separator)} {once})*"
        return self._rule(many if _flag(wanted, "at_least_one", name) else f"({many})?")


_FORMATS = (
    *("const_string", "json_schema", "regex", "any_text", "sequence", "or", "tag", "triggered_tags"),
    "tags_with_separator",
)


def _plain(wanted: Mapping[str, Any], name: str) -> str:
    if wanted["type"] == "const_string":
        return _quoted(_text(wanted.get("value"), f"{name}.value"))
    if wanted["type"] == "regex":
        pattern = _text(wanted.get("pattern"), f"{name}.pattern")
        return "/" + pattern.replace("\\/", "/").replace("/", "\\/").replace("\n", "\\n") + "/"
    schema = wanted.get("json_schema")
    if not isinstance(schema, dict):
        refuse(f"{name}.json_schema", "a JSON schema, which is an object")
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value:
        refuse(name, "a text that is not empty")
    return value


def _flag(wanted: Mapping[str, Any], member: str, name: str) -> bool:
    value = wanted.get(member)
    if not isinstance(value, bool | None):
        refuse(f"{name}.{member}", "true or false")
    return bool(value)


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        refuse(name, "a list that is not empty")
    return value


def _objects(value: Any, name: str) -> Iterator[dict[str, Any]]:
    for number, each in enumerate(_list(value, name)):
        if not isinstance(each, dict):
            refuse(f"{name}[{number}]", "an object")
        yield each
