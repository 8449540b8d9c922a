#!/usr/bin/env python3
"""Fills in the tables of docs/api.md: of HTTP from the OpenAPI document, of gRPC from the comments of the protos.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; all else on the page is written by hand.

usage: tools/api_reference.py [--check]      (--check: exit status 1 if the file is not what would be written)
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gateway.openai.vocabulary import WORDS, Refused  # noqa: E402
from gateway.openapi.document import document  # noqa: E402 - the path comes first
from gateway.openapi.operation import ANSWER_HEADERS, REQUEST_HEADERS  # noqa: E402
from gateway.openapi.operations import OPERATIONS  # noqa: E402

PAGE = ROOT / "docs" / "api.md"
SCHEMAS: dict[str, Any] = document(asks_for_keys=False)["components"]["schemas"]
PROTOS = (ROOT / "protos" / "inference.proto", ROOT / "protos" / "cluster.proto")


def page(text: str) -> str:
    """The page with its tables filled in."""
    return re.sub(
        r"(<!-- table: ([^>]+) -->\n).*?(<!-- end -->)",
        lambda found: found[1] + "\n".join(_table(*found[2].split())) + "\n" + found[3],
        text,
        flags=re.DOTALL,
    )


def _table(kind: str, *names: str) -> list[str]:
    makers: dict[str, Callable[..., list[str]]] = {
        "routes": _routes,
        "fields": _fields,
        "headers": _headers,
        "refused": _refused,
        "harmless": _harmless,
        "grpc": _grpc,
    }
    return makers[kind](*names)


def _rows(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    names = list(head)
    lines = [names, ["---"] * len(names), *([str(cell) for cell in row] for row in rows)]
    return ["| " + " | ".join(cell.replace("\n", " ") for cell in line) + " |" for line in lines]


def _routes() -> list[str]:
    def who(needs_key: bool, needs_admin: bool) -> str:
        return "admin" if needs_admin else "any" if needs_key else "none"

    return _rows(
        ("route", "key", "what it does", "statuses"),
        (
            (
                f"`{each.method.upper()} {each.path}`",
                who(each.needs_key, each.needs_admin),
                each.summary,
                " ".join(map(str, sorted({*each.errors, *(status for status, _ in each.others), *_fine(each.answer)}))),
            )
            for each in OPERATIONS
        ),
    )


def _fine(answer: Any) -> set[int]:
    return set() if answer is None else {200}


def _fields(*types: str) -> list[str]:
    """Fields of one type; of several, those that all have alike. `A-B`: those that A has and B has not alike."""
    name, _, without = types[0].partition("-")
    own = SCHEMAS[name]["properties"]
    if without:
        others = SCHEMAS[without]["properties"]
        shown = {field: schema for field, schema in own.items() if others.get(field) != schema}
    else:
        shown = {
            field: schema
            for field, schema in own.items()
            if all(SCHEMAS[other]["properties"].get(field) == schema for other in types[1:])
        }
    required = SCHEMAS[name].get("required", ())
    return _rows(
        ("field", "type", "default", "bounds", "meaning"),
        (
            (
                f"`{field}`",
                _type(schema),
                "required" if field in required else _default(schema),
                _bounds(schema),
                schema.get("description", ""),
            )
            for field, schema in sorted(shown.items())
        ),
    )


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(each) for each in schema["anyOf"] if each != {"type": "null"}))
    if "enum" in schema and "type" not in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    kinds = schema.get("type", "any")
    kinds = [kinds] if isinstance(kinds, str) else [kind for kind in kinds if kind != "null"]
    words = [f"list of {_type(schema['items'])}" if kind == "array" and "items" in schema else kind for kind in kinds]
    return " or ".join(words)


def _default(schema: dict[str, Any]) -> str:
    return f"`{json.dumps(schema['default'])}`" if "default" in schema else ""


def _number(number: float) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)


def _bounds(schema: dict[str, Any]) -> str:
    parts = []
    if "minimum" in schema:
        low = f"[{_number(schema['minimum'])}"
        parts.append(f"{low}, {_number(schema['maximum'])}]" if "maximum" in schema else f"{low}, ∞)")
    for rule, words in (
        ("maxItems", "at most {} entries"),
        ("maxProperties", "at most {} entries"),
        ("maxLength", f"{schema.get('minLength', 0)} to {{}} characters"),
        ("pattern", "`{}`"),
    ):
        if rule in schema:
            parts.append(words.format(str(schema[rule]).replace("|", "\\|")))
    if "type" in schema and "enum" in schema:
        parts.append(" ".join(f"`{value}`" for value in schema["enum"] if value))
    for alternative in (*schema.get("anyOf", ()), schema.get("additionalProperties")):
        if isinstance(alternative, dict) and (words := _bounds(alternative)):
            parts.append(words)
    return ", ".join(dict.fromkeys(parts))


def _headers(which: str) -> list[str]:
    table = REQUEST_HEADERS if which == "request" else ANSWER_HEADERS
    return _rows(
        ("header", "bounds", "meaning"),
        ((f"`{name}`", _bounds(schema), meaning) for name, (meaning, schema) in table.items()),
    )


def _refused() -> list[str]:
    return _rows(
        ("member", "passes", "what to do instead"),
        (
            (
                f"`{place}.{name}`" if place else f"`{name}`",
                " ".join(f"`{json.dumps(value)}`" for value in word.passes),
                word.instead,
            )
            for place, words in WORDS.items()
            for name, word in words.items()
            if isinstance(word, Refused)
        ),
    )


def _harmless() -> list[str]:
    return _rows(
        ("member", "why it changes nothing"),
        (
            (f"`{place}.{name}`" if place else f"`{name}`", word.because)
            for place, words in WORDS.items()
            for name, word in words.items()
            if not isinstance(word, Refused)
        ),
    )


def _grpc(*names: str) -> list[str]:
    """Methods of the services, or fields of one message, with the comments of the protos."""
    text = "".join(path.read_text() for path in PROTOS)
    if names == ("methods",):
        return _rows(
            ("method", "request", "answer", "what it does"),
            (
                (f"`{rpc}`", f"`{asked}`", f"{stream}`{answer}`", _joined(comment))
                for comment, rpc, asked, stream, answer in re.findall(
                    r"((?:  //.*\n)+)  rpc (\w+)\((\w+)\) returns \((stream )?(\w+)\)", text
                )
            ),
        )
    (name,) = names
    found = re.search(rf"\nmessage {name} \{{\n(.*?)\n\}}", text, re.DOTALL)
    assert found is not None, name
    return _rows(
        ("field", "type", "meaning"),
        (
            (f"`{field}`", f"`{kind}`", _joined(comment))
            for comment, kind, field in re.findall(
                r"((?: +//.*\n)+) +((?:optional |repeated )?[\w<>, ]+?) (\w+) = \d+;", found[1]
            )
        ),
    )


def _joined(comment: str) -> str:
    return " ".join(line.strip().removeprefix("//").strip() for line in comment.splitlines()).replace("|", "\\|")


def main() -> int:
    """Writes or compares."""
    text = PAGE.read_text()
    if "--check" in sys.argv[1:]:
        return 0 if page(text) == text else 1
    PAGE.write_text(page(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
