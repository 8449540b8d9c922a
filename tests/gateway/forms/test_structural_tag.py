"""Structural tags as grammars: text is free until a trigger, then keeps to its tag's form up to its end."""

import pytest
from tokenizers import Tokenizer

from demo import DEMO_MODEL
from gateway.forms.response_format import form_in
from gateway.forms.structural_tag import grammar_of
from services.runtime.errors import InvalidRequest
from services.structured.form import AnswerForm
from services.structured.grammar import Grammars
from services.structured.grammar_text import lark_of

NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
OLD = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=one>", "schema": NUMBER, "end": "</f>"},
        {"begin": "<f=two>", "schema": {"type": "array", "items": {"type": "boolean"}}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}
TAG = {"type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]+"}, "end": "</n>"}
THOUGHT = {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}


def new(**wanted):
    return {"type": "structural_tag", "format": wanted}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def grammars():
    return Grammars(DEMO_MODEL / "tokenizer.json", vocab_size=2048)


def accepts(grammars, tokenizer, asked, text):
    """Whether this is a whole answer; None: it is not even the beginning of one."""
    state = grammars.begin(AnswerForm(lark_of(grammar_of(asked, "structural_tag"))), eos_token_ids=(1, 2))
    for token_id in tokenizer.encode(text, add_special_tokens=False).ids:
        if not state.allowed()[token_id // 8] >> token_id % 8 & 1:
            return None
        state.advance([token_id])
    return state.is_complete


ACCEPTED = [
    (OLD, "no tag at all", True),
    (OLD, 'So <f=one>{"a":1}</f> and <f=two>[true]</f>, done', True),
    (OLD, 'So <f=one>{"a":1}', False),
    (OLD, 'So <f=one>{"b":1}', None),
    (OLD, "So <f=three>", None),
    (OLD, "So <f=two>[1", None),
    (new(type="const_string", value="yes"), "yes", True),
    (new(type="const_string", value="yes"), "no", None),
    (new(type="json_schema", json_schema=NUMBER), '{"a":1}', True),
    (new(type="sequence", elements=[THOUGHT, TAG]), "<t>hm, 2 < 3</t><n>12</n>", True),
    (new(type="sequence", elements=[THOUGHT, TAG]), "<t>hm</t>12", None),
    (new(type="sequence", elements=[TAG, {"type": "any_text"}]), "<n>1</n> and so on", True),
    (new(type="or", elements=[TAG, {"type": "const_string", "value": "none"}]), "none", True),
    (new(type="triggered_tags", triggers=["<n>"], tags=[TAG], at_least_one=True), "nothing", False),
    (new(type="triggered_tags", triggers=["<n>"], tags=[TAG], at_least_one=True), "a <n>1</n> b", True),
    (new(type="triggered_tags", triggers=["<n>"], tags=[TAG], stop_after_first=True), "a <n>1</n>", True),
    (new(type="triggered_tags", triggers=["<n>"], tags=[TAG], stop_after_first=True), "a <n>1</n> b", None),
    (new(type="triggered_tags", triggers=["<n>", "<t>"], tags=[TAG, THOUGHT]), "a <t>x</t> b <n>y", None),
    (new(type="triggered_tags", triggers=["<n>", "<t>"], tags=[TAG, THOUGHT]), "a <t>x</t> b <n>1</n>", True),
    (new(type="tags_with_separator", tags=[TAG], separator=", "), "<n>1</n>, <n>2</n>", True),
    (new(type="tags_with_separator", tags=[TAG], separator=", "), "<n>1</n><n>", None),
    (new(type="tags_with_separator", tags=[TAG], separator=", "), "", True),
    (new(type="tags_with_separator", tags=[TAG], separator=", ", at_least_one=True), "", False),
]


@pytest.mark.parametrize(("asked", "text", "expected"), ACCEPTED)
def test_what_answers_may_be(grammars, tokenizer, asked, text, expected):
    assert accepts(grammars, tokenizer, asked, text) is expected


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"structures": [], "triggers": ["<f="]}, "s.structures"),
        ({"structures": [{"begin": "<g>", "schema": {}, "end": "</g>"}], "triggers": ["<f="]}, "s.structures[0].begin"),
        (
            {"structures": [{"begin": "<f=", "schema": 1, "end": "</f>"}], "triggers": ["<f="]},
            "s.structures[0].schema",
        ),
        ({"structures": [{"begin": "<f=", "schema": {}, "end": ""}], "triggers": ["<f="]}, "s.structures[0].end"),
        ({"structures": [{"begin": "<f=", "schema": {}, "end": "x"}], "triggers": []}, "s.triggers"),
        ({"format": {"type": "grammar"}}, "s.format.type"),
        ({"format": {"type": "sequence", "elements": [{"type": "regex"}]}}, "s.format.elements[0].pattern"),
        ({"format": {"type": "or", "elements": [{"type": "const_string", "value": "a"}] * 300}}, "structural_tag"),
    ],
)
def test_mistakes_are_named(asked, field):
    with pytest.raises(InvalidRequest) as refused:
        grammar_of(asked, "s")
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({"response_format": OLD}, "response_format"),
        ({"structured_outputs": {"structural_tag": OLD}}, "structured_outputs"),
        ({"structural_tag": OLD}, "structural_tag"),
    ],
)
def test_each_word_for_them_is_served(members, field):
    assert form_in(members) == (grammar_of(OLD, "x"), field)
