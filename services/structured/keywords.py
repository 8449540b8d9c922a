"""Says which keyword of a JSON schema is wrong: a value of another type than its own, or bounds that exclude all.

The grammar library skips a keyword that it does not need, whatever its value is, so a mistake there would pass as a
schema without that keyword. The table follows the vocabularies of draft 2020-12 (https://json-schema.org/specification)
and allows what older drafts wrote instead. Keywords that it does not name are allowed. Pure: a schema in, a reason out.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

MAX_SHOWN_CHARS = 60
_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})


def first_mistake(schema: Any) -> str | None:
    """The place and the rule of the first keyword that is wrong; None: no keyword is. Does not recurse."""
    waiting: list[tuple[str, Any]] = [("", schema)]
    while waiting:
        place, one = waiting.pop()
        if isinstance(one, bool):
            continue
        if not isinstance(one, dict):
            return f"{place or 'the schema'} must be an object or a boolean, not {_shown(one)}"
        for word, value in one.items():
            rule = _RULES.get(word)
            if rule is not None and not rule[0](value):
                return f"{_join(place, word)} must be {rule[1]}, not {_shown(value)}"
        crossed = _crossed_bounds(one)
        if crossed is not None:
            return f"{place}: {crossed}" if place else crossed
        waiting += reversed([*_inner(place, one)])
    return None


def _crossed_bounds(schema: Mapping[str, Any]) -> str | None:
    for low, high in _BOUNDS:
        if low in schema and high in schema and schema[low] > schema[high]:
            return f"{low} ({_shown(schema[low])}) is greater than {high} ({_shown(schema[high])})"
    return None


def _inner(place: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas in a schema whose own keywords are right."""
    for word, value in schema.items():
        if word in _SCHEMAS and not isinstance(value, list):
            yield _join(place, word), value
        elif word in _SCHEMAS or word in _LISTS_OF_SCHEMAS:
            for n, inner in enumerate(value):
                yield _join(place, f"{word}[{n}]"), inner
        elif word in _MAPS_OF_SCHEMAS:
            for name, inner in value.items():
                if not isinstance(inner, list):  # `dependencies` has lists of names too
                    yield _join(_join(place, word), name), inner


def _join(place: str, word: str) -> str:
    word = word if len(word) <= MAX_SHOWN_CHARS else word[: MAX_SHOWN_CHARS - 1] + "…"
    return f"{place}.{word}" if place else word


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and value.bit_length() > 256:  # Python refuses to write the largest
        return "so large a number"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 1] + "…"


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value) and len({*value}) == len(value)


def _is_type(value: Any) -> bool:
    return value in _TYPES if isinstance(value, str) else _is_names(value) and {*value} <= _TYPES


def _is_map_of_names(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_names, value.values()))


def _is(*types: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types)


_SCHEMA = (lambda value: isinstance(value, dict | bool), "an object or a boolean")
_MAP = (_is(dict), "an object")
_LIST = (_is(list), "a list")
_COUNT = (_is_count, "an integer of at least 0")
_NUMBER = (_is_number, "a number")
_BOUND = (lambda value: isinstance(value, bool) or _is_number(value), "a number")
_TEXT = (_is(str), "a string")
_FLAG = (_is(bool), "a boolean")

_COUNTS = ("Length", "Items", "Properties", "Contains")
_BOUNDS = (("minimum", "maximum"), *((f"min{what}", f"max{what}") for what in _COUNTS))
_LISTS_OF_SCHEMAS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_MAPS_OF_SCHEMAS = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
_SCHEMAS = frozenset(
    {"additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not"}
    | {"propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"}
)
_TEXTS = ("$anchor", "$comment", "$dynamicAnchor", "$dynamicRef", "$id", "$ref", "$schema", "contentEncoding")
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_SCHEMAS, _SCHEMA),
    # A list is what drafts before 2020-12 have for `prefixItems`.
    "items": (_is(dict, bool, list), "an object, a boolean or a list"),
    **dict.fromkeys(_LISTS_OF_SCHEMAS, _LIST),
    **dict.fromkeys(_MAPS_OF_SCHEMAS, _MAP),
    **dict.fromkeys((name for pair in _BOUNDS[1:] for name in pair), _COUNT),
    **dict.fromkeys(("minimum", "maximum"), _NUMBER),
    # Booleans are draft 4's.
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _BOUND),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number greater than 0"),
    "type": (_is_type, "the name of a type or a list of different ones"),
    "enum": _LIST,
    "examples": _LIST,
    "required": (_is_names, "a list of different names"),
    "dependentRequired": (_is_map_of_names, "an object of lists of different names"),
    **dict.fromkeys((*_TEXTS, "contentMediaType", "description", "format", "pattern", "title"), _TEXT),
    **dict.fromkeys(("deprecated", "readOnly", "uniqueItems", "writeOnly"), _FLAG),
}
