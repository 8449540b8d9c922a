"""Which keywords of a schema are refused, and that the place is named; what applications write passes."""

from typing import Any

import pytest

from services.structured.keywords import first_mistake
from tests.schemas import SCHEMAS, UNUSABLE

WRONG: dict[str, tuple[Any, str]] = {
    "negative multiple": ({"multipleOf": -1}, "multipleOf must be a number greater than 0, not -1"),
    "definitions": ({"$defs": 5}, r"$defs must be an object, not 5"),
    "items crossed": ({"minItems": 3, "maxItems": 1}, "minItems (3) is greater than maxItems (1)"),
    "numbers crossed": ({"minimum": 0.5, "maximum": 0}, "minimum (0.5) is greater than maximum (0)"),
    "deep": (
        {"properties": {"a": {"anyOf": [{}, {"items": {"minLength": -2}}]}}},
        "properties.a.anyOf[1].items.minLength must be an integer of at least 0, not -2",
    ),
    "deep crossed": (
        {"$defs": {"a": {"minLength": 2, "maxLength": 1}}},
        "$defs.a: minLength (2) is greater than maxLength (1)",
    ),
    "half": ({"maxItems": 2.5}, "maxItems must be an integer of at least 0, not 2.5"),
    "type": ({"type": "strin"}, "type must be the name of a type or a list of different ones, not 'strin'"),
    "types": ({"type": ["null", "null"]}, "type must be the name of a type or a list of different ones, not a list"),
    "required": (
        {"properties": {"a": {"required": True}}},
        "properties.a.required must be a list of different names, not true",
    ),
    "property": ({"properties": {"a": 5}}, "properties.a must be an object or a boolean, not 5"),
    "additional": ({"additionalProperties": None}, "additionalProperties must be an object or a boolean, not null"),
    "tuple": ({"items": [{"type": "string"}, 5]}, "items[1] must be an object or a boolean, not 5"),
    "description": ({"description": 5}, "description must be a string, not 5"),
    "pattern": ({"pattern": {}}, "pattern must be a string, not an object"),
    "not a schema": ([1], "the schema must be an object or a boolean, not a list"),
    "large": ({"minLength": -(10**4000)}, "minLength must be an integer of at least 0, not so large a number"),
    "infinite": ({"maximum": float("inf")}, "maximum must be a number, not inf"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_keyword_is_named_with_its_place_and_its_rule(case: str) -> None:
    schema, said = WRONG[case]
    assert first_mistake(schema) == said


RIGHT: dict[str, Any] = {
    **SCHEMAS,
    "unknown keywords": {"x-own": 5, "nullable": True, "example": {}, "enumNames": 1},
    "older drafts": {
        "items": [{"type": "string"}],
        "exclusiveMinimum": True,
        "dependencies": {"a": ["b"], "c": {"type": "object"}},
    },
    "names that are keywords": {"properties": {"multipleOf": {"type": "integer"}, "required": True}},
    "values that look like schemas": {"const": {"multipleOf": -1}, "enum": [{"minItems": 2, "maxItems": 1}]},
    "whole numbers": {"minLength": 2.0, "maxLength": 10**400},
    "annotations": {"title": "t", "description": "d", "default": 5, "examples": [5], "deprecated": False},
}


@pytest.mark.parametrize("case", RIGHT)
def test_what_applications_write_passes(case: str) -> None:
    assert first_mistake(RIGHT[case]) is None


def test_a_schema_as_deep_as_json_can_be_needs_no_stack() -> None:
    schema: Any = {"multipleOf": 0}
    for _ in range(5000):
        schema = {"not": schema}
    assert "multipleOf must be" in (first_mistake(schema) or "")


@pytest.mark.parametrize("value", [None, True, -1, 0.5, "text", [], [1], {}, {"a": 1}, float("nan")])
def test_no_value_of_any_keyword_raises(value: Any) -> None:
    words = ("type", "enum", "required", "items", "dependencies", "dependentRequired", "minimum", "maximum", "minItems")
    for word in words:
        for schema in ({word: value}, {word: value, "maximum": 1, "maxItems": 1}, {"anyOf": [{word: value}]}):
            first_mistake(schema)


def test_what_the_library_refuses_is_left_to_it() -> None:
    assert first_mistake(UNUSABLE["remote-ref"][0]) is None
