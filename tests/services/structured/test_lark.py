"""Forms of more than one schema: whatever their grammars allow is what a gateway reads as that form."""

import json
import random
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from demo import DEMO_MODEL
from gateway.models.answer_pieces import Arguments, CallStart, Content
from gateway.models.answer_pieces import Reasoning as Thoughts
from gateway.models.tool_calls import AnswerParser
from services.structured.form import AnswerForm, CalledFunction, Reasoning, ToolCalls, ToolFormat
from services.structured.grammar import Grammars, UnusableSchema, check_form
from services.structured.lark import MAX_CALLS
from tests.examples import examples
from tests.json_schema import assert_keeps_to
from tests.schemas import UNUSABLE

EOS = (1, 2)
MARKS = ("[TOOL_CALLS]", "<tool_call>", "</tool_call>", "<think>", "</think>")
TRIP: dict[str, Any] = {
    "type": "object",
    "properties": {"to": {"enum": ["Köln", "<tool_call>", "</think>"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["to"],
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMA_OF = {"trip": TRIP, "trip.now": NOTHING, "a-b_c": {**NOTHING, "properties": {"x": {"const": "}}"}}}}
FUNCTIONS = tuple(CalledFunction(name, json.dumps(schema)) for name, schema in SCHEMA_OF.items())
VALUE: dict[str, Any] = {"type": "array", "items": {"type": "boolean"}, "maxItems": 4}

FORMS = [
    AnswerForm(json.dumps(VALUE) if has_value else "", ToolCalls(tool_format, FUNCTIONS, is_parallel), reasoning)
    for tool_format, is_parallel, has_value, reasoning in product(ToolFormat, (True, False), (True, False), Reasoning)
] + [AnswerForm(json.dumps(VALUE), None, reasoning) for reasoning in Reasoning]


OPTIONAL = [
    AnswerForm("", ToolCalls(tool_format, FUNCTIONS, is_parallel, is_optional=True), reasoning)
    for tool_format, is_parallel, reasoning in product(
        (ToolFormat.HERMES, ToolFormat.MISTRAL), (True, False), (Reasoning.NONE, Reasoning.MAY_COME)
    )
]


class Model(NamedTuple):
    """A tokenizer and its grammars."""

    tokenizer: Tokenizer
    grammars: Grammars


@pytest.fixture(scope="module", params=["texts", "tokens"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The marks around calls and thoughts are texts like any other, or tokens of their own."""
    return make_model(tmp_path_factory, has_mark_tokens=request.param == "tokens")


@pytest.fixture(scope="module")
def model_with_marks(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(tmp_path_factory, has_mark_tokens=True)


def make_model(tmp_path_factory: pytest.TempPathFactory, *, has_mark_tokens: bool) -> Model:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    if has_mark_tokens:
        tokenizer.add_special_tokens([AddedToken(MARKS[0], special=True)])
        tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS[1:]])
    path: Path = tmp_path_factory.mktemp("model") / "tokenizer.json"
    tokenizer.save(str(path))
    return Model(tokenizer, Grammars(path, vocab_size=tokenizer.get_vocab_size()))


def token_set(bits: bytes) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")).tolist())


def walk(model: Model, form: AnswerForm, choose: Callable[[list[int]], int], most: int = 400) -> tuple[str, bool]:
    """The text of an answer, and whether it was complete within `most` tokens."""
    state = model.grammars.begin(form, eos_token_ids=EOS)
    tokens: list[int] = []
    while len(tokens) < most:
        allowed = token_set(state.allowed())
        assert allowed, "there is always a way on"
        assert bool(allowed & {*EOS}) == state.is_complete
        token = choose(sorted(allowed))
        if token in EOS:
            break
        tokens.append(token)
        state.advance([token])
    replayed = model.grammars.begin(form, eos_token_ids=EOS, token_ids=tokens)
    assert replayed.allowed() == state.allowed()
    return model.tokenizer.decode(tokens, skip_special_tokens=False), state.is_complete


def read(form: AnswerForm, text: str) -> tuple[list[tuple[str, str]], str, str]:
    """Calls, content and thoughts, as a gateway finds them."""
    parser = AnswerParser(
        tool_format=None if form.tool_calls is None else form.tool_calls.tool_format,
        names=SCHEMA_OF.keys(),
        has_reasoning=form.reasoning is not Reasoning.NONE,
        is_reasoning=form.reasoning is Reasoning.IS_OPEN,
    )
    calls: list[tuple[str, str]] = []
    content = thoughts = ""
    for piece in [*parser.push(text), *parser.finish()]:
        match piece:
            case CallStart(name=name):
                calls.append((name, ""))
            case Arguments(text=more):
                calls[-1] = (calls[-1][0], calls[-1][1] + more)
            case Content(text=more):
                content += more
            case Thoughts(text=more):
                thoughts += more
    assert parser.num_complete_calls == len(calls)
    return calls, content, thoughts


def check(form: AnswerForm, text: str) -> int:
    """What a gateway makes of a complete answer is what was asked for; the number of calls."""
    calls, content, _ = read(form, text)
    if calls:
        assert form.tool_calls is not None
        assert not content
        assert len(calls) == 1 or (form.tool_calls.is_parallel and form.tool_calls.tool_format is not ToolFormat.LLAMA3)
        for name, arguments in calls:
            assert_keeps_to(json.loads(arguments), SCHEMA_OF[name])
    else:
        assert form.json_schema, "calls had to be made"
        assert_keeps_to(json.loads(content), VALUE)
    return len(calls)


@settings(max_examples=examples(80), deadline=None)
@given(st.sampled_from(FORMS), st.integers(0, 2**32))
def test_whatever_is_allowed_is_read_as_the_form(model: Model, form: AnswerForm, seed: int) -> None:
    source = random.Random(seed)
    thoughts_end = {model.tokenizer.encode(text, add_special_tokens=False).ids[0] for text in ("</think>", "<")}

    def choose(allowed: list[int]) -> int:
        ends = thoughts_end & set(allowed)
        return source.choice(sorted(ends)) if ends and source.random() < 0.3 else source.choice(allowed)

    text, is_complete = walk(model, form, choose)
    if is_complete:
        check(form, text)


@settings(max_examples=examples(40), deadline=None)
@given(st.sampled_from(OPTIONAL), st.integers(0, 2**32))
def test_calls_after_any_text_are_as_strict(model_with_marks: Model, form: AnswerForm, seed: int) -> None:
    source, model = random.Random(seed), model_with_marks
    marks = {model.tokenizer.get_vocab()[mark] for mark in MARKS}

    def choose(allowed: list[int]) -> int:
        wanted = sorted(marks & set(allowed))
        return source.choice(wanted) if wanted and source.random() < 0.3 else source.choice(allowed)

    text, is_complete = walk(model, form, choose)
    if is_complete:
        calls, content, _ = read(form, text)
        assert (bool(calls)) == any(mark in text for mark in MARKS[:2])
        for name, arguments in calls:
            assert_keeps_to(json.loads(arguments), SCHEMA_OF[name])
        assert not any(mark in content for mark in MARKS[:3])


@pytest.mark.parametrize("tool_format", [ToolFormat.HERMES, ToolFormat.MISTRAL])
def test_text_calls_or_both(model_with_marks: Model, tool_format: ToolFormat) -> None:
    form = AnswerForm("", ToolCalls(tool_format, FUNCTIONS, is_optional=True))
    call = WRITTEN[tool_format][0]
    for text in ("", "Let me see: {[ <tool", '{"name": "trip"}', call, f"Let me see.\n{call}", SEVERAL[tool_format]):
        assert is_allowed(model_with_marks, form, text)
    for text in (call[:-1], f"Well. {call} So.", call.replace("trip", "other"), call.replace("Köln", "Bonn")):
        assert not is_allowed(model_with_marks, form, text)


WRITTEN = {
    ToolFormat.HERMES: [
        '<tool_call>\n{"name": "trip", "arguments": {"to": "Köln", "days": 3}}\n</tool_call>',
        '<tool_call>\n{"name": "trip.now", "arguments": {}}\n</tool_call>',
    ],
    ToolFormat.LLAMA3: ['{"name": "trip", "parameters": {"to":"Köln"}}'],
    ToolFormat.MISTRAL: [
        '[TOOL_CALLS] [{"name": "trip", "arguments": {"to": "Köln"}}]',
        '[TOOL_CALLS][{"name": "a-b_c", "arguments": {"x": "}}"}}]',
    ],
}
SEVERAL = {
    ToolFormat.HERMES: "\n".join(WRITTEN[ToolFormat.HERMES]),
    ToolFormat.LLAMA3: '{"name": "trip.now", "parameters": {}}; {"name": "trip.now", "parameters": {}}',
    ToolFormat.MISTRAL: '[TOOL_CALLS] [{"name": "trip.now", "arguments": {}}, {"name": "trip.now", "arguments": {}}]',
}
OTHERS = ["Let me see.", "[true]", "<think>Hm.</think>", " ", "{}", '{"name": "other", "arguments": {}}']


def is_allowed(model: Model, form: AnswerForm, text: str) -> bool:
    """Whether it is a whole answer."""
    tokens = model.tokenizer.encode(text, add_special_tokens=False).ids
    return model.grammars.begin(form, eos_token_ids=EOS, token_ids=tokens).is_complete


@pytest.mark.parametrize("tool_format", ToolFormat)
def test_calls_as_models_write_them(model: Model, tool_format: ToolFormat) -> None:
    one = AnswerForm("", ToolCalls(tool_format, FUNCTIONS, is_parallel=False))
    several = AnswerForm("", ToolCalls(tool_format, FUNCTIONS))
    for text in WRITTEN[tool_format]:
        assert is_allowed(model, one, text)
        assert is_allowed(model, several, text)
        assert check(one, text) == 1
        assert not is_allowed(model, one, text[:-1])
        assert not is_allowed(model, one, "I call. " + text)
    # Templates of Llama 3 refuse a conversation with two calls in one message.
    assert is_allowed(model, several, SEVERAL[tool_format]) == (tool_format is not ToolFormat.LLAMA3)
    assert not is_allowed(model, one, SEVERAL[tool_format])
    for text in [*OTHERS, *(text for each in ToolFormat if each is not tool_format for text in WRITTEN[each])]:
        assert not is_allowed(model, several, text)


@pytest.mark.parametrize("tool_format", ToolFormat)
def test_either_calls_or_a_value(model: Model, tool_format: ToolFormat) -> None:
    form = AnswerForm(json.dumps(VALUE), ToolCalls(tool_format, FUNCTIONS))
    for text in (WRITTEN[tool_format][0], "[true, false]"):
        assert is_allowed(model, form, text)
        check(form, text)
    for text in ("[5]", WRITTEN[tool_format][0] + "[true]", "[true]" + WRITTEN[tool_format][0], "Let me see."):
        assert not is_allowed(model, form, text)


@pytest.mark.parametrize("calls", [None, ToolCalls(ToolFormat.HERMES, FUNCTIONS)], ids=["value", "calls"])
def test_thoughts_come_first(model: Model, calls: ToolCalls | None) -> None:
    end = "[true]" if calls is None else WRITTEN[ToolFormat.HERMES][0]
    schema = json.dumps(VALUE) if calls is None else ""
    none, may, is_open = (AnswerForm(schema, calls, reasoning) for reasoning in Reasoning)
    thought = "\nIs 2 < 3?\n [5], </thin\n</think>\n\n" + end
    assert [is_allowed(model, form, end) for form in (none, may, is_open)] == [True, True, False]
    assert [is_allowed(model, form, "<think>" + thought) for form in (none, may)] == [False, True]
    assert [is_allowed(model, form, thought) for form in (none, may, is_open)] == [False, False, True]
    assert read(may, "<think>" + thought)[2] == read(is_open, thought)[2] == "Is 2 < 3?\n [5], </thin"
    assert not is_allowed(model, may, "<think>" + thought.removesuffix(end))


@pytest.mark.parametrize("tool_format", [ToolFormat.HERMES, ToolFormat.MISTRAL])
def test_calls_have_an_end(model: Model, tool_format: ToolFormat) -> None:
    """As many as a conversation may have in one message, so that the answer can be sent back."""
    form = AnswerForm("", ToolCalls(tool_format, (CalledFunction("f", json.dumps({"const": {}, **NOTHING})),)))
    calls = ['{"name": "f", "arguments": {}}'] * MAX_CALLS
    begin, separator, end = {
        ToolFormat.HERMES: ("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
        ToolFormat.MISTRAL: ("[TOOL_CALLS] [", ", ", "]"),
    }[tool_format]
    assert is_allowed(model, form, begin + separator.join(calls) + end)
    assert not is_allowed(model, form, begin + separator.join([*calls, calls[0]]) + end)


def test_a_schema_cannot_change_how_it_is_compiled(model: Model) -> None:
    lenient = {"type": "object", "properties": {}, "x-guidance": {"lenient": True}, "uniqueItems": True}
    for schema in (lenient, {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}):
        form = AnswerForm("", ToolCalls(ToolFormat.HERMES, (CalledFunction("f", json.dumps(schema)),)))
        with pytest.raises(UnusableSchema, match="uniqueItems"):
            check_form(form)
        with pytest.raises(UnusableSchema, match="uniqueItems"):
            model.grammars.begin(form, eos_token_ids=EOS)


@pytest.mark.parametrize("case", UNUSABLE)
def test_what_cannot_be_used_is_said_as_for_a_schema_alone(case: str) -> None:
    schema, named = UNUSABLE[case]
    form = AnswerForm("", ToolCalls(ToolFormat.HERMES, (CalledFunction("f", json.dumps(schema)),)))
    with pytest.raises(UnusableSchema, match=named) as caught:
        check_form(form)
    with pytest.raises(UnusableSchema) as alone:
        check_form(AnswerForm(json.dumps(schema)))
    assert caught.value.message == alone.value.message


@pytest.mark.parametrize("schema", ["", "[1]", "5", '{"a":', '{"a":' * 5000 + "1" + "}" * 5000])
def test_parameters_that_are_no_schema(schema: str) -> None:
    for tool_format in ToolFormat:
        with pytest.raises(UnusableSchema):
            check_form(AnswerForm("", ToolCalls(tool_format, (CalledFunction("f", schema),))))


def test_as_many_functions_as_there_may_be_are_usable() -> None:
    many = tuple(CalledFunction(f"function_{n}", json.dumps(TRIP)) for n in range(128))
    check_form(AnswerForm("", ToolCalls(ToolFormat.HERMES, many)))
