"""What the parsers of answers share."""

import pytest

from gateway.models.answer_pieces import SPACE, num_certain, without_spaces


@pytest.mark.parametrize(
    ("text", "expected"), [("", 0), ("abc", 3), ("ab<", 2), ("a<tool", 1), ("<tool_call", 0), ("<<to", 1), ("<to<", 3)]
)
def test_the_beginning_of_a_mark_is_not_certain(text, expected):
    assert num_certain(text, "<tool_call>") == expected


def test_a_whole_mark_is_no_beginning():
    assert num_certain("a<t>", "<t>") == 4


def test_white_space_is_kept_apart():
    spaces = ["\n"]
    assert without_spaces(" \t a ", spaces) == "a "
    assert without_spaces("b", spaces) == "b"
    assert spaces == ["\n", " \t "]
    assert without_spaces(";; c", spaces, SPACE + ";") == "c"
    assert without_spaces(" ", spaces) == ""
    assert spaces[2:] == [";; ", " "]
