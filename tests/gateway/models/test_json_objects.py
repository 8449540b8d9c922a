"""JSON objects that are checked character by character."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.models.json_objects import MAX_DEPTH, ObjectChecker, begins_object
from tests.examples import examples

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
objects = st.builds(
    lambda value, indent, ascii_: json.dumps(value, indent=indent, ensure_ascii=ascii_),
    st.dictionaries(st.text(max_size=5), values, max_size=3),
    st.sampled_from([None, 0, 2]),
    st.booleans(),
)


@settings(max_examples=examples(400), deadline=None)
@given(st.text('{}[]":,.+-eE0123456789 \n\\utrufalsn', max_size=30) | objects, st.data())
def test_checker_agrees_with_the_library(text, data):
    """A whole object is one for `json` too, and what it refuses no text can complete."""
    if data.draw(st.booleans()) and len(text) > 1:
        place = data.draw(st.integers(1, len(text) - 1))
        text = text[:place] + data.draw(st.sampled_from(['"', "}", ",", "0", "\n", "x", "-"])) + text[place + 1 :]
    text = text if text.startswith("{") else "{" + text
    checker = ObjectChecker()
    for position, char in enumerate(text):
        if not checker.take(char):
            with pytest.raises(json.JSONDecodeError):
                json.loads(text)
            return
        if checker.is_complete:
            value, end = json.JSONDecoder(parse_constant=lambda name: pytest.fail(name)).raw_decode(text)
            assert isinstance(value, dict)
            assert end == position + 1
            return
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)


@given(objects)
def test_each_beginning_of_an_object_begins_one(text):
    assert all(begins_object(text[:end]) for end in range(len(text) + 1))
    assert not begins_object(text + " ")


@pytest.mark.parametrize("text", ["x", " {", "[", '{"a" 1', "{1", '{"a": 01', '{"a": tru}', '{"a": "\n'])
def test_other_text_begins_none(text):
    assert not begins_object(text)


def test_objects_are_nested_to_a_depth():
    assert begins_object('{"a":' * MAX_DEPTH)
    assert not begins_object('{"a":' * (MAX_DEPTH + 1))
