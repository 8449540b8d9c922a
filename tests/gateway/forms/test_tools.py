"""Tools and the choice among them, as models are told of them and forms of answers take them."""

import json

import pytest

from gateway.forms.tools import closed_objects, forced_names, is_named, names_of, offered_tools
from services.runtime.errors import InvalidRequest
from tests.gateway.test_chat_tools import CLOCK, TOLD_TOOLS, TOOLS

NAMED = {"type": "function", "function": {"name": "clock"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


@pytest.mark.parametrize(
    ("choice", "told", "forced"),
    [
        (None, TOLD_TOOLS, set()),
        ("auto", TOLD_TOOLS, set()),
        ("none", None, set()),
        ("required", TOLD_TOOLS, {"weather", "clock"}),
        (NAMED, TOLD_TOOLS, {"clock"}),
        (ALLOWED, [CLOCK], {"clock"}),
    ],
)
def test_a_choice_says_what_the_model_is_told_and_must_call(choice, told, forced):
    offered = offered_tools(TOOLS, choice)
    assert offered == told
    assert forced_names(offered, choice) == forced
    assert is_named(choice) == (choice is NAMED)
    assert names_of(told or []) >= forced


@pytest.mark.parametrize("choice", ["some", {"type": "function"}, {"type": "function", "function": {"name": "other"}}])
def test_other_choices_are_refused(choice):
    with pytest.raises(InvalidRequest) as refused:
        offered_tools(TOOLS, choice)
    assert refused.value.field.startswith("tool_choice")


OPEN = {"properties": {"a": {}}}
CLOSED = {**OPEN, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (OPEN, CLOSED),
        ({"properties": {}}, {"properties": {}, "additionalProperties": False}),
        ({"type": "object"}, {"type": "object"}),
        ({**OPEN, "additionalProperties": True}, {**OPEN, "additionalProperties": True}),
        ({**OPEN, "additionalProperties": OPEN}, {**OPEN, "additionalProperties": CLOSED}),
        ({"items": OPEN}, {"items": CLOSED}),
        ({"$defs": {"x": OPEN}, "$ref": "#/$defs/x"}, {"$defs": {"x": CLOSED}, "$ref": "#/$defs/x"}),
        ({"anyOf": [OPEN, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({**OPEN, "anyOf": [OPEN]}, {**OPEN, "anyOf": [OPEN]}),
        ({"properties": {"a": {"allOf": [OPEN, OPEN]}}}, {"properties": {"a": {"allOf": [OPEN, OPEN]}}}),
        ({"default": OPEN, "enum": [OPEN]}, {"default": OPEN, "enum": [OPEN]}),
    ],
)
def test_objects_that_name_properties_take_no_others(schema, closed):
    before = json.dumps(schema)
    assert closed_objects(schema) == closed
    assert json.dumps(schema) == before
