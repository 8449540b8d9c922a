"""Regular expressions, choices and grammars of clients: what they allow, what is refused, what none of them can do."""

import json
import subprocess
import sys

import pytest

from services.runtime.errors import InvalidRequest
from services.structured.form import AnswerForm, CalledFunction, Reasoning, ToolCalls, ToolFormat
from services.structured.grammar import TooComplex, UnusableSchema, check_form
from services.structured.grammar_text import (
    MARK,
    MAX_NESTING,
    TOKENS,
    lark_of_choices,
    lark_of_grammar,
    lark_of_regex,
    rules_in,
    tokens_form,
)
from tests.waiting import HANG_LIMIT_S

ARITHMETIC = """
// an expression
?start: sum
sum: term ("+" term)*   # left to right
term: NUMBER | "(" sum ")"
%import common.INT
NUMBER: INT
%ignore / +/
"""
CHESS = 'root ::= "1. " move " " move "\\n"\nmove ::= [a-h] [1-8] | "O-O" "-O"?\n'
INSIDE = (
    '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}'
)
JSON_INSIDE = f'start: "answer: " value\nvalue: %json {INSIDE}'


def accepts(grammars, tokenizer, form, text):
    """Whether this is a whole answer; None: it is not even the beginning of one."""
    state = grammars.begin(form, eos_token_ids=(1, 2))
    for token_id in tokenizer.encode(text, add_special_tokens=False).ids:
        if not state.allowed()[token_id // 8] >> token_id % 8 & 1:
            return None
        state.advance([token_id])
    return state.is_complete


@pytest.mark.parametrize(
    ("form_text", "whole", "begun", "wrong"),
    [
        (lark_of_regex(r"\d{3}-[a-c]+"), "123-abc", "12", "x"),
        (lark_of_regex("^(yes|no)$"), "yes", "y", "maybe"),
        (lark_of_regex("a/b\n[/]?"), "a/b\n/", "a/", "a\\"),
        (lark_of_choices(["red", "redder", 'a "quoted" one', "naïve\n"]), "redder", "a ", "green"),
        (lark_of_grammar(ARITHMETIC), "1+(2+ 3)", "1+(", "+"),
        (lark_of_grammar(CHESS), "1. e4 O-O\n", "1. e4", "2"),
        (lark_of_grammar('root ::= "\\u0041BC" [\\u00e9-\\u00ff]'), "ABCé", "AB", "A\u041bC"),
        (lark_of_grammar(JSON_INSIDE), 'answer: {"a": 5}', "answer: {", "answer: []"),
        (lark_of_grammar('start: "x" calls\ncalls: TEXT\nTEXT: "y"\nthoughts: "z"'), "xy", "x", "y"),
    ],
)
def test_an_answer_keeps_to_it(grammars, demo_tokenizer, form_text, whole, begun, wrong):
    form = AnswerForm(form_text)
    check_form(form)
    assert form_text.startswith(MARK)
    assert accepts(grammars, demo_tokenizer, form, whole)
    assert accepts(grammars, demo_tokenizer, form, begun) is False
    assert accepts(grammars, demo_tokenizer, form, wrong) is None
    thinking = AnswerForm(form_text, reasoning=Reasoning.IS_OPEN)
    check_form(thinking)
    assert accepts(grammars, demo_tokenizer, thinking, "so</think>" + whole)


def test_beside_tools_either_is_allowed(grammars, demo_tokenizer):
    calls = ToolCalls(ToolFormat.HERMES, (CalledFunction("look", '{"type":"object"}'),))
    form = AnswerForm(lark_of_choices(["yes", "no"]), calls)
    check_form(form)
    assert accepts(grammars, demo_tokenizer, form, "yes")
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    assert accepts(grammars, demo_tokenizer, form, call)
    assert accepts(grammars, demo_tokenizer, form, "may") is None


@pytest.mark.parametrize(
    ("make", "text", "words"),
    [
        (lark_of_regex, "", "empty"),
        (lark_of_choices, [], "1 to"),
        (lark_of_choices, ["a", 5], "text"),
        (lark_of_choices, [""], "text"),
        (lark_of_choices, ["a"] * 2001, "1 to"),
        (lark_of_grammar, "", "no rule named start"),
        (lark_of_grammar, 'begin: "a"', "no rule named start"),
        (lark_of_grammar, "start: <|end|>", "names a token"),
        (lark_of_grammar, "start: <[17]>", "names a token"),
        (lark_of_grammar, 'start[temperature=2.0]: "a"', "temperature"),
        (lark_of_grammar, "start: @other", "references"),
        (lark_of_grammar, "start: %json {", "not valid JSON"),
        (lark_of_grammar, "start: %json 5", "%json is not supported"),
        (lark_of_grammar, 'start: %json {"properties": [1]}', "properties must be"),
        (lark_of_grammar, 'start: %lark { start: "a" }', "%lark is not supported"),
        (lark_of_grammar, '%llguidance {"allow_invalid_utf8": true}\nstart: "a"', "options"),
        (lark_of_grammar, 'start: "open', "cannot be read"),
        (lark_of_grammar, 'root ::= "\\', "out of range"),
        (lark_of_grammar, "root ::= other", "other"),
        (lark_of_grammar, "root ::= " + "(" * 3000 + '"a"' + ")" * 3000, "too deeply"),
        (lark_of_grammar, 'root ::= "\\uD800"', "no character"),
        (lark_of_grammar, "start: t0\n" + "\n".join(f"t{n}: t{n + 1}" for n in range(MAX_NESTING)), "more than"),
        (lark_of_grammar, "start: " + "(" * 600 + '"a"' + ")" * 600, "more than"),
        (lark_of_grammar, "start: /" + "(" * 600 + "a" + ")" * 600 + "/", "more than"),
        (lark_of_grammar, 'start: %json {"a": ' + "[" * 99 + "]" * 99 + "}", "levels deep"),
    ],
)
def test_what_is_refused_where_it_is_read(make, text, words):
    with pytest.raises(InvalidRequest, match=words) as caught:
        make(text)
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("form_text", "kind", "words"),
    [
        (lark_of_regex("(?=a)b"), UnusableSchema, "look-ahead"),
        (lark_of_regex("("), UnusableSchema, "regex"),
        (lark_of_grammar("start: other"), UnusableSchema, "other"),
        (lark_of_grammar("start: start"), UnusableSchema, "[a-z]"),
        (
            lark_of_grammar("start: T0\n" + "\n".join(f"T{n}: T{n + 1} T{n + 1}" for n in range(30)) + '\nT30: "a"'),
            TooComplex,
            "too big",
        ),
        (MARK + "u_start: <[1]>", UnusableSchema, "names a token"),
    ],
)
def test_what_is_refused_where_it_is_compiled(form_text, kind, words):
    with pytest.raises(kind, match=words):
        check_form(AnswerForm(form_text))


def test_what_was_written_here_stays_as_it_is():
    text = lark_of_grammar(ARITHMETIC + '\nother: %json {"type": "null"}')
    assert rules_in(text, {"coerce_one_of": False}) == text.removeprefix(MARK).replace(
        '"x-guidance": {}', '"x-guidance": {"coerce_one_of": false}'
    )


def test_clients_cannot_set_options_of_the_compiler():
    text = lark_of_grammar('start: %json {"type": "null", "x-guidance": {"coerce_one_of": true}}')
    assert "coerce" not in text


def test_white_space_is_as_a_grammar_asks(grammars, demo_tokenizer):
    """Programs that read an answer by their own grammar, as guidance does, fail where it was made by another."""
    asked = {"whitespace_flexible": False, "whitespace_pattern": None, "key_separator": ": ", "item_separator": ", "}
    schema = {"type": "array", "items": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}}
    allowed = {}
    for options in ({}, asked):
        text = lark_of_grammar("start: %json " + json.dumps({**schema, "x-guidance": options}))
        for answer in ('[{"a": 1}, {"a": 1}]', '[{"a":1},{"a":1}]', '[{"a": 1},\n{"a": 1}]'):
            state = grammars.begin(AnswerForm(text), eos_token_ids=(1, 2))
            state.advance(demo_tokenizer.encode(answer, add_special_tokens=False).ids)
            allowed[bool(options), answer] = state.is_complete
    assert [*allowed.values()] == [True, True, True, True, False, False]


def test_white_space_cannot_be_a_pattern():
    with pytest.raises(InvalidRequest, match="whitespace_pattern"):
        lark_of_grammar('start: %json {"type": "null", "x-guidance": {"whitespace_pattern": "x"}}')


@pytest.mark.parametrize(
    ("token_ids", "text", "first", "may_end"),
    [
        ([7, 5, 8, 9, 5], "5,7-9", {5, 7, 8, 9}, False),
        ([5, 2, 1], "1-2,5", {1, 2, 5}, True),
        ([1], "1", {1, 2}, True),
        ([0, 2047], "0,2047", {0, 2047}, False),
    ],
)
def test_tokens_that_are_allowed(grammars, token_ids, text, first, may_end):
    form = AnswerForm(tokens_form(token_ids))
    assert form.json_schema == TOKENS + text
    check_form(form)
    state = grammars.begin(form, eos_token_ids=(1, 2))

    def allowed():
        bits = state.allowed()
        return {token_id for token_id in range(len(bits) * 8) if bits[token_id // 8] >> token_id % 8 & 1}

    for _ in range(50):
        assert (allowed(), state.is_complete) == (first, may_end)
        if others := first - {1, 2}:
            state.advance([max(others)])


@pytest.mark.parametrize("text", ["", "a", "1,", "1-", "-1", "1 2", "1]>* | <[3", "1" * 11])
def test_a_list_of_tokens_is_not_believed(grammars, text):
    with pytest.raises(UnusableSchema, match="no list of token ids"):
        grammars.begin(AnswerForm(TOKENS + text), eos_token_ids=(1, 2))


def test_the_deepest_that_is_allowed_does_not_end_the_process():
    rules = "start: t0\n" + "\n".join(f"t{n}: t{n + 1}" for n in range(MAX_NESTING - 3)) + f'\nt{MAX_NESTING - 3}: "a"'
    program = f"from services.structured.grammar import *; check_form(AnswerForm({lark_of_grammar(rules)!r}))"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=HANG_LIMIT_S)


def test_an_ambiguous_grammar_fails_before_a_token_costs_much(grammars, demo_tokenizer):
    form = AnswerForm(lark_of_grammar('start: a\na: a a a | "a" | "b" |'))
    check_form(form)
    state = grammars.begin(form, eos_token_ids=(1, 2))
    for token_id in demo_tokenizer.encode("ab" * 300, add_special_tokens=False).ids:
        if not state.allowed():
            return
        state.advance([token_id])
    pytest.fail("it never failed")


def test_forms_of_before_are_what_they_were():
    schema = json.dumps({"type": "object"})
    check_form(AnswerForm(schema))
    assert not AnswerForm(schema).json_schema.startswith(MARK)
