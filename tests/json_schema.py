"""Whether a value keeps to a JSON schema, for the keywords that the tests use; written without the grammar library."""

import re
from collections.abc import Callable, Mapping
from typing import Any

_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: _is_number(value) and float(value).is_integer(),
    "number": lambda value: _is_number(value),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}

_RULES: Mapping[str, Callable[[Any, Any], bool]] = {
    "enum": lambda value, allowed: value in allowed,
    "const": lambda value, wanted: value == wanted,
    "minimum": lambda value, bound: not _is_number(value) or value >= bound,
    "maximum": lambda value, bound: not _is_number(value) or value <= bound,
    "minLength": lambda value, bound: not isinstance(value, str) or len(value) >= bound,
    "maxLength": lambda value, bound: not isinstance(value, str) or len(value) <= bound,
    "pattern": lambda value, pattern: not isinstance(value, str) or re.search(pattern, value) is not None,
    "minItems": lambda value, bound: not isinstance(value, list) or len(value) >= bound,
    "maxItems": lambda value, bound: not isinstance(value, list) or len(value) <= bound,
    "required": lambda value, names: not isinstance(value, dict) or set(names) <= set(value),
}

_STRUCTURE = {"type", "properties", "additionalProperties", "items", "anyOf", "$ref", "$defs"}


def assert_keeps_to(value: Any, schema: Any, *, root: Any = None) -> None:
    """Raises AssertionError where it does not, and for a keyword that is not known here."""
    root = schema if root is None else root
    if isinstance(schema, bool):
        assert schema, "nothing is allowed here"
        return
    assert schema.keys() <= _STRUCTURE | _RULES.keys(), f"unknown keywords in {schema}"
    if "$ref" in schema:
        assert_keeps_to(value, _found(root, schema["$ref"]), root=root)
    if "type" in schema:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        assert any(_TYPES[name](value) for name in types), f"{value!r} is no {schema['type']}"
    for name, check in _RULES.items():
        if name in schema:
            assert check(value, schema[name]), f"{value!r} breaks {name} {schema[name]!r}"
    if "anyOf" in schema:
        assert any(keeps_to(value, one, root=root) for one in schema["anyOf"]), f"{value!r} fits no alternative"
    if isinstance(value, dict):
        for name, member in value.items():
            inner = schema.get("properties", {}).get(name, schema.get("additionalProperties", True))
            assert_keeps_to(member, inner, root=root)
    if isinstance(value, list):
        for item in value:
            assert_keeps_to(item, schema.get("items", True), root=root)


def keeps_to(value: Any, schema: Any, *, root: Any = None) -> bool:
    """Whether `assert_keeps_to` passes."""
    try:
        assert_keeps_to(value, schema, root=root)
    except AssertionError:
        return False
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _found(root: Any, reference: str) -> Any:
    for name in reference.removeprefix("#/").split("/"):
        root = root[name]
    return root
