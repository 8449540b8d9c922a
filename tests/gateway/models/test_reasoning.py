"""Reasoning at the beginning of an answer."""

import pytest

from gateway.models.answer_pieces import Content, Reasoning
from gateway.models.reasoning import ReasoningParser, has_reasoning

THOUGHT = {
    "opened": ("<think>\nHm, 2 < 3.\n</think>\n\nYes.", False, "Hm, 2 < 3.", "Yes."),
    "opened-by-the-prompt": ("Hm.\n</think>\n\nYes.\n", True, "Hm.", "Yes.\n"),
    "opened-twice": ("<think>Hm.</think>Yes.", True, "Hm.", "Yes."),
    "empty": ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
    "none": ("\nYes.", False, "", "\nYes."),
    "later": ("Yes. <think>no</think>", False, "", "Yes. <think>no</think>"),
    "unfinished": ("<think>\nHm. </thi", False, "Hm. </thi", ""),
    "unfinished-opening": ("<thi", False, "", "<thi"),
    "thought-only": ("<think>Hm.</think>\n", False, "Hm.", ""),
}


@pytest.mark.parametrize("row", THOUGHT, ids=THOUGHT)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_reasoning(row, size):
    text, is_inside, thought, said = THOUGHT[row]
    parser = ReasoningParser(is_inside=is_inside)
    pieces = [piece for start in range(0, len(text), size) for piece in parser.push(text[start : start + size])]
    pieces += parser.finish()
    assert "".join(piece.text for piece in pieces if isinstance(piece, Reasoning)) == thought
    assert "".join(piece.text for piece in pieces if isinstance(piece, Content)) == said


def test_it_is_known_whether_the_answer_proper_has_begun():
    parser = ReasoningParser()
    is_inside = []
    for part in (" ", "<think>", "a", "</think>", " ", "b"):
        parser.push(part)
        is_inside.append(parser.is_inside)
    assert is_inside == [False, True, True, True, True, False]
    assert ReasoningParser(is_inside=True).is_inside


def test_it_is_known_from_the_template():
    template = "{{ messages }}"
    assert not has_reasoning(template)
    assert has_reasoning(template + "{{ content.split('</think>') }}")
