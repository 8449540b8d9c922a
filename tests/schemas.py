"""JSON schemas for tests, with answers that are short whatever is chosen; and some that cannot be served."""

from typing import Any

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "is_member": {"type": "boolean"},
    },
    "required": ["name", "age", "is_member"],
    "additionalProperties": False,
}
COLOURS: dict[str, Any] = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 4}
EITHER: dict[str, Any] = {
    "anyOf": [
        {"type": "null"},
        {
            "type": "object",
            "properties": {"kind": {"const": "point"}, "x": {"type": "integer", "minimum": -9, "maximum": 9}},
            "required": ["kind", "x"],
            "additionalProperties": False,
        },
    ]
}
CHAIN: dict[str, Any] = {
    "$defs": {
        "link": {
            "type": "object",
            "properties": {"id": {"type": "string", "pattern": "^[a-f0-9]{4}$"}, "next": {"$ref": "#/$defs/end"}},
            "required": ["id", "next"],
            "additionalProperties": False,
        },
        "end": {"anyOf": [{"$ref": "#/$defs/link"}, {"type": "null"}]},
    },
    "$ref": "#/$defs/link",
}
SHORT_TEXT: dict[str, Any] = {"type": "string", "minLength": 2, "maxLength": 6}

SCHEMAS = {"person": PERSON, "colours": COLOURS, "either": EITHER, "chain": CHAIN, "short-text": SHORT_TEXT}

UNUSABLE: dict[str, tuple[dict[str, Any], str]] = {
    "unique": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "not": ({"not": {"type": "string"}}, "not"),
    "if": ({"if": {"type": "string"}, "then": {}}, "if"),
    "contains": ({"type": "array", "contains": {"type": "string"}}, "contains"),
    "overlapping-oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    "remote-ref": ({"$ref": "http://example.org/schema"}, "http://example.org/schema"),
    "unknown-type": ({"type": "banana"}, "banana"),
    "unknown-format": ({"type": "string", "format": "banana"}, "banana"),
    "contradiction": ({"type": "integer", "minimum": 5, "maximum": 3}, "is greater than maximum"),
    "empty-enum": ({"enum": []}, "Unsatisfiable"),
    "open-group": ({"type": "string", "pattern": "("}, "regex"),
    "lookahead": ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
    "only-itself": ({"$ref": "#"}, "nothing can satisfy it"),
    "properties-list": ({"properties": [1]}, "properties must be an object"),
    "own-options": (
        {"oneOf": [{"type": "integer"}, {"type": "number"}], "x-guidance": {"coerce_one_of": True}},
        "oneOf",
    ),
    "lenient": ({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, "uniqueItems"),
}
"""A schema, and what the error must name."""
