"""One call's JSON object, read character by character."""

import pytest

from gateway.models.call_reader import MAX_NAME_CHARS, CallReader, State

WHOLE = '{"name": "f", "arguments": {"a": [1, "}"]}}'


def test_arguments_come_while_they_are_written():
    reader = CallReader({"f"})
    taken = []
    for char in WHOLE:
        num_read, state = reader.read(char)
        assert num_read == 1
        taken.append(reader.take_arguments())
    assert state is State.DONE
    assert "".join(taken) == '{"a": [1, "}"]}'
    assert taken[WHOLE.index("[")] == "["
    assert reader.is_announced
    assert reader.has_arguments
    assert reader.held == ""


@pytest.mark.parametrize(
    "text",
    [
        '{"arguments": {"a": [1, "}"]}, "name": "f"}',
        '{"id": "x", "type": "function", "name": "f", "parameters": {"a": [1, "}"]}}',
        ' {"name": "f"}'.strip().replace("}", ', "arguments" : {"a": [1, "}"]} }'),
    ],
)
def test_the_order_of_members_does_not_matter(text):
    reader = CallReader({"f"})
    assert reader.read(text + "rest") == (len(text), State.DONE)
    assert reader.name == "f"
    assert reader.take_arguments() == '{"a": [1, "}"]}'


BROKEN = {
    "other-name": ('{"name": "g"', '"'),
    "other-member": ('{"names"', '"'),
    "twice": ('{"name": "f", "name"', '"'),
    "no-object": ("[", "["),
    "arguments-of-a-list": ('{"name": "f", "arguments": [', "["),
    "no-arguments": ('{"name": "f"}', "}"),
    "long-name": ('{"name": "' + "f" * (6 * MAX_NAME_CHARS + 1), "f"),
    "bad-escape": (r'{"name": "\x"', '"'),
}


@pytest.mark.parametrize("row", BROKEN, ids=BROKEN)
def test_what_breaks_the_form_is_held(row):
    text, last = BROKEN[row]
    reader = CallReader({"f"})
    num_read, state = reader.read(text)
    assert state is State.BROKEN
    assert text[num_read:] == last
    assert reader.held == text[:num_read] or reader.name == "f"
