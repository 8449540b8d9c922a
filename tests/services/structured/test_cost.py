"""What is refused because its compilation would cost too much: in little time, and nothing that applications send."""

import json
from typing import Any

import pytest

from services.structured.cost import may_force_long_texts, too_complex
from services.structured.form import AnswerForm, CalledFunction, ToolCalls, ToolFormat
from services.structured.grammar import TooComplex, check_form
from tests.schemas import SCHEMAS


def texts(*patterns: str) -> list[dict[str, Any]]:
    return [{"type": "string", "pattern": pattern} for pattern in patterns]


COSTLY: dict[str, dict[str, Any]] = {
    "multiple": {"type": "integer", "multipleOf": 107_972_737},
    "multiple-without-type": {"multipleOf": 107_972_737},
    "combined-multiples": {"allOf": [{"type": "integer", "multipleOf": number} for number in (97, 101, 103, 107)]},
    "referred-multiples": {
        "$defs": {"a": {"multipleOf": 997}},
        "type": "integer",
        "multipleOf": 991,
        "$ref": "#/$defs/a",
    },
    "many-multiples": {"properties": {f"p{n}": {"type": "integer", "multipleOf": 9000 + n} for n in range(40)}},
    "optional-characters": {"type": "string", "pattern": "^" + "a?" * 20_000 + "$"},
    "combined-patterns": {"allOf": texts(*(f".*{n}.*" for n in range(40)))},
    "names": {"properties": {f"{n}": {} for n in range(6300)}, "additionalProperties": False},
    "required": {"required": [f"{n}" for n in range(9000)]},
    "name-patterns": {"patternProperties": {f"^a{n}$": {} for n in range(4500)}},
    "name-patterns-and-names": {
        "properties": {f"{n}": {} for n in range(2000)},
        "patternProperties": {f"^a{n}$": {} for n in range(2000)},
    },
    "large": {"allOf": [{"enum": list(range(first, first + 300))} for first in range(40)]},
}


@pytest.mark.parametrize("case", COSTLY)
def test_what_costs_too_much_is_refused_before_it_does(case: str) -> None:
    schema = json.dumps(COSTLY[case])
    call = ToolCalls(ToolFormat.HERMES, (CalledFunction("f", schema),))
    for form in (AnswerForm(schema), AnswerForm("", call)):
        with pytest.raises(TooComplex) as refused:
            check_form(form)
        assert refused.value.code == "grammar_too_complex"


USUAL: dict[str, dict[str, Any]] = {
    **SCHEMAS,
    "prices": {
        "properties": {
            "lines": {"items": {"properties": {"price": {"multipleOf": 0.01}, "grams": {"multipleOf": 25}}}},
            "total": {"allOf": [{"multipleOf": 0.05}, {"minimum": 0}]},
            "stock": {"multipleOf": 1_000_000_000},
        }
    },
    "as-pydantic-writes": {
        "$defs": {"Day": {"type": "string", "format": "date"}},
        "properties": {
            f"field_{n}": {"anyOf": [{"$ref": "#/$defs/Day"}, {"type": "null"}], "default": None, "title": f"Field {n}"}
            for n in range(300)
        },
    },
    "inherited": {
        "allOf": [
            {"properties": {f"time_{n}": {"type": "string", "format": "date-time"} for n in range(20)}},
            {"properties": {"id": {"type": "string", "format": "uuid"}}},
        ]
    },
    "many-patterns": {"properties": {f"p{n}": {"type": "string", "pattern": f"^[a-z]{{{n}}}$"} for n in range(1, 99)}},
    "data": {"enum": [{"pattern": 1, "multipleOf": "x", "properties": 2, "required": True, "allOf": {}}]},
}


@pytest.mark.parametrize("case", USUAL)
def test_what_applications_send_costs_little(case: str) -> None:
    assert too_complex([USUAL[case]]) is None
    check_form(AnswerForm(json.dumps(USUAL[case])))


def test_schemas_of_one_call_count_together() -> None:
    one = {"type": "object", "properties": {"a": {"multipleOf": 9973}}}
    assert too_complex([one, one]) is None
    assert too_complex([one, one, one]) is not None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0, -5, 10**400, 1e-300, True])
def test_odd_numbers_are_left_to_the_library(value: Any) -> None:
    too_complex([{"multipleOf": value}])


LONG: dict[str, dict[str, Any]] = {
    "enum": {"enum": ["short", "x" * 60_000]},
    "const": {"const": {"a": ["y" * 30_000]}},
    "const that looks like a description": {"const": {"description": "y" * 60_000}},
    "name": {"type": "object", "properties": {"p" * 30_000: {}}, "required": ["p" * 30_000]},
    "pattern": {"type": "string", "pattern": "^" + "ab" * 2000 + "$"},
    "repetition": {"type": "string", "pattern": "^(abcdefgh){2000}$"},
    "least length": {"type": "string", "pattern": "^x*$", "minLength": 20_000},
    "number": {"const": 10**400},
    "deep": {"properties": {"a": {"anyOf": [{"type": "null"}, {"items": {"const": "z" * 20_000}}]}}},
}


@pytest.mark.parametrize("case", LONG)
def test_texts_that_would_be_dear_to_force_are_found(case: str) -> None:
    assert may_force_long_texts([{}, LONG[case]])


@pytest.mark.parametrize("case", sorted(SCHEMAS.keys() - {"chain"}))
def test_usual_schemas_have_none(case: str) -> None:
    described = {"title": "t" * 500, "properties": {"a": {"description": "d" * 500, **SCHEMAS[case]}}}
    assert not may_force_long_texts([described])
