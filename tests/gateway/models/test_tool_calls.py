"""Calls and reasoning in answers: what is found does not depend on how the text is cut, and nothing is lost."""

import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.models.answer_pieces import Arguments, CallStart, Content, Reasoning
from gateway.models.json_objects import MAX_DEPTH
from gateway.models.tool_calls import AnswerParser, tool_format_of
from services.structured.form import ToolFormat
from tests.examples import examples

NAMES = frozenset({"weather", "f", "größe"})
HERMES, LLAMA3, MISTRAL = ToolFormat.HERMES, ToolFormat.LLAMA3, ToolFormat.MISTRAL
FORMATS = [HERMES, LLAMA3, MISTRAL]

many = settings(max_examples=examples(400), deadline=None, suppress_health_check=[HealthCheck.too_slow])


def parser_of(tool_format, **settings_):
    return AnswerParser(tool_format=tool_format, names=NAMES, **settings_)


def joined(pieces):
    """The pieces, with neighbours of one kind and of one call joined."""
    result = []
    for piece in pieces:
        last = result[-1] if result else None
        if isinstance(last, Content) and isinstance(piece, Content):
            result[-1] = Content(last.text + piece.text)
        elif isinstance(last, Reasoning) and isinstance(piece, Reasoning):
            result[-1] = Reasoning(last.text + piece.text)
        elif isinstance(last, Arguments) and isinstance(piece, Arguments) and last.index == piece.index:
            result[-1] = Arguments(last.index, last.text + piece.text)
        else:
            result.append(piece)
    return result


def parse(parser, parts):
    """All pieces, neighbours joined, and what had been given out after each part."""
    pieces, so_far = [], []
    for part in parts:
        pieces += parser.push(part)
        so_far.append(joined(pieces))
    return joined(pieces + parser.finish()), so_far


def whole(tool_format, text, **settings_):
    return parse(parser_of(tool_format, **settings_), [text])[0]


def content_of(pieces):
    return "".join(piece.text for piece in pieces if isinstance(piece, Content))


def calls_of(pieces):
    names = [piece.name for piece in pieces if isinstance(piece, CallStart)]
    arguments = [""] * len(names)
    for piece in pieces:
        if isinstance(piece, Arguments):
            arguments[piece.index] += piece.text
    return list(zip(names, arguments, strict=True))


def written(tool_format, calls, *, key=None, separator="\n"):
    """Calls as a model of this format writes them; arguments are texts."""
    key = key or ("parameters" if tool_format is LLAMA3 else "arguments")
    objects = [f'{{"name": {json.dumps(name)}, "{key}": {arguments}}}' for name, arguments in calls]
    if tool_format is HERMES:
        return separator.join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
    if tool_format is LLAMA3:
        return "; ".join(objects)
    return f"[TOOL_CALLS][{', '.join(objects)}]"


# --- what is found ---------------------------------------------------------------------------------------------------

FOUND = {
    "hermes": (
        HERMES,
        'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "n": [1, -2.5e3]}}\n</tool_call>',
        "Let me look.",
        [("weather", '{"city": "Köln", "n": [1, -2.5e3]}')],
    ),
    "hermes-two": (
        HERMES,
        '<tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>',
        "",
        [("f", "{}"), ("f", '{"a":1}')],
    ),
    "hermes-text-after": (
        HERMES,
        '<tool_call>{"name":"f","arguments":{}}</tool_call>\n\nDone. ',
        "Done.",
        [("f", "{}")],
    ),
    "hermes-without-close": (HERMES, '<tool_call>{"name":"f","arguments":{}}', "", [("f", "{}")]),
    "hermes-next-without-close": (
        HERMES,
        '<tool_call>{"name":"f","arguments":{}}\n<tool_call>{"name":"weather","arguments":{}}</tool_call>',
        "",
        [("f", "{}"), ("weather", "{}")],
    ),
    "arguments-first": (HERMES, '<tool_call>{"arguments": {"a": {}}, "name": "f"}', "", [("f", '{"a": {}}')]),
    "escaped-name": (HERMES, '<tool_call>{"name": "gr\\u00f6\\u00dfe", "arguments": {}}', "", [("größe", "{}")]),
    "tag-in-arguments": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>\\"}"}}</tool_call>',
        "",
        [("f", '{"x": "</tool_call>\\"}"}')],
    ),
    "llama3": (LLAMA3, '{"name": "f", "parameters": {"a": null}}', "", [("f", '{"a": null}')]),
    "llama3-tag": (LLAMA3, '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
    "llama3-typed": (LLAMA3, ' {"type": "function", "name": "f", "parameters": {}}\n', "", [("f", "{}")]),
    "llama3-several": (
        LLAMA3,
        '{"name": "f", "parameters": {}}; {"name": "weather", "parameters": {}}\n{"name": "f", "parameters": {}}',
        "",
        [("f", "{}"), ("weather", "{}"), ("f", "{}")],
    ),
    "llama3-after-text": (
        LLAMA3,
        'I call.\n<|python_tag|>{"name": "f", "parameters": {}}',
        "I call.",
        [("f", "{}")],
    ),
    "mistral": (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}}]', "", [("f", '{"a": "]"}')]),
    "mistral-several": (
        MISTRAL,
        'Well.[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abcdefghi"},\n{"name": "weather", "arguments": {}}]',
        "Well.",
        [("f", "{}"), ("weather", "{}")],
    ),
}


@pytest.mark.parametrize("row", FOUND, ids=FOUND)
def test_found(row):
    tool_format, text, content, calls = FOUND[row]
    pieces = whole(tool_format, text)
    assert (content_of(pieces), calls_of(pieces)) == (content, calls)


PLAIN = {
    "text": (HERMES, "Just <b>text</b>, and 1 < 2.\n"),
    "unknown-name": (HERMES, '<tool_call>{"name": "rm_rf", "arguments": {}}</tool_call>'),
    "no-name": (HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
    "no-arguments": (HERMES, '<tool_call>{"name": "f"}</tool_call>'),
    "name-twice": (HERMES, '<tool_call>{"name": "f", "name": "f", "arguments": {}}</tool_call>'),
    "other-member": (HERMES, '<tool_call>{"name": "f", "code": "x", "arguments": {}}</tool_call>'),
    "arguments-text": (HERMES, '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>'),
    "arguments-list": (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    "not-json": (HERMES, "<tool_call>f(1)</tool_call>"),
    "single-quotes": (HERMES, "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>"),
    "bad-arguments-first": (HERMES, '<tool_call>{"arguments": {"a": 01}, "name": "f"}</tool_call>'),
    "cut-before-arguments": (HERMES, 'Hm. <tool_call>\n{"name": "f", "argu'),
    "cut-in-marker": (HERMES, "Hm.\n<tool_c"),
    "marker-alone": (HERMES, " <tool_call> "),
    "marker-again": (HERMES, "<tool_call><tool_call>\n<tool_call"),
    "llama3-answer-in-json": (LLAMA3, '{"name": "Ada", "parameters": {"born": 1815}}'),
    "llama3-json": (LLAMA3, '{"temperature": 5, "parameters": {}}'),
    "llama3-builtin": (LLAMA3, '<|python_tag|>brave_search.call(query="x")'),
    "llama3-late": (LLAMA3, 'See: {"name": "f", "parameters": {}}'),
    "mistral-no-marker": (MISTRAL, '[{"name": "f", "arguments": {}}]'),
    "mistral-no-list": (MISTRAL, '[TOOL_CALLS]{"name": "f", "arguments": {}}'),
    "mistral-empty": (MISTRAL, "[TOOL_CALLS][]"),
    "spaces": (LLAMA3, " \n "),
}


@pytest.mark.parametrize("row", PLAIN, ids=PLAIN)
def test_what_is_no_call_is_content_to_the_last_character(row):
    tool_format, text = PLAIN[row]
    assert whole(tool_format, text) == [Content(text)]


BROKEN_LATER = {
    "value": ('<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>', '{"a": ', "oops}}</tool_call>", 0),
    "cut": ('<tool_call>{"name": "f", "arguments": {"a": "b', '{"a": "b', "", 0),
    "newline": ('<tool_call>{"name": "f", "arguments": {"a": "\n', '{"a": "', "", 0),
    "after": ('<tool_call>{"name": "f", "arguments": {}, "x": 1}</tool_call>', "{}", ', "x": 1}</tool_call>', 1),
}


@pytest.mark.parametrize("row", BROKEN_LATER, ids=BROKEN_LATER)
def test_what_breaks_after_the_call_was_announced_ends_it_and_the_rest_is_content(row):
    text, arguments, rest, num_complete = BROKEN_LATER[row]
    parser = parser_of(HERMES)
    pieces, _ = parse(parser, [text])
    assert calls_of(pieces) == [("f", arguments)]
    assert content_of(pieces) == rest
    assert parser.num_complete_calls == num_complete


def test_arguments_are_passed_on_while_they_are_written():
    parser = parser_of(HERMES)
    assert parser.push('<tool_call>{"name": "f", "arguments": ') == []
    assert parser.push("{") == [CallStart(0, "f"), Arguments(0, "{")]
    assert parser.push('"a": [1,') == [Arguments(0, '"a": [1,')]
    assert parser.push(" 2]}}") == [Arguments(0, " 2]}")]
    assert parser.push("\n</tool_call>") == []
    assert (parser.finish(), parser.num_complete_calls) == ([], 1)


def test_text_is_held_back_only_while_it_may_begin_a_call():
    parser = parser_of(HERMES)
    assert parser.push("a <") == [Content("a")]
    assert parser.push("tool_ca") == []
    assert parser.push("k") == [Content(" <tool_cak")]


# --- properties ------------------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "</think>", "}", '"']),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
arguments_texts = st.builds(
    lambda value, indent, ascii_: json.dumps(value, indent=indent, ensure_ascii=ascii_),
    st.dictionaries(st.text(max_size=5), json_values, max_size=3),
    st.sampled_from([None, 0, 2]),
    st.booleans(),
)
calls_lists = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), arguments_texts), min_size=1, max_size=3)
plain_texts = st.text("ab .\n", max_size=12).map(str.strip)
fragments = st.lists(
    st.sampled_from(
        [
            *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<think>", "</think>", "<tool_", "<|py"),
            *('{"name": "f", ', '"arguments": {', '"parameters": {}}', '{"name"', "}}", "}", "]", "[", ",", ";", '"'),
            *('{"name": "f", "arguments": {}}', '{"name":"weather","parameters":{"a":[1,2]}}', "text", " ", "\n", "ü"),
            *('"a": 1', "[TOOL", "\\", "-", "null", "1e"),
        ]
    )
    | st.text(max_size=3),
    max_size=14,
).map("".join)


def cuts(text, places):
    """The text in parts that end at these places."""
    ends = sorted(min(place, len(text)) for place in places)
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


places = st.lists(st.integers(0, 200), max_size=8)
flags = st.sampled_from([{}, {"has_reasoning": True}, {"has_reasoning": True, "is_reasoning": True}])


@many
@given(st.sampled_from([*FORMATS, None]), flags, fragments, places)
def test_any_cut_gives_the_same_and_has_given_the_same_at_every_place(tool_format, flags, text, places):
    """Being the same at every place lets a stream be resumed: what a reader saw depends on the text so far only."""
    characters, after = parse(parser_of(tool_format, **flags), text)
    pieces, so_far = parse(parser_of(tool_format, **flags), parts := cuts(text, places))
    assert pieces == characters == whole(tool_format, text, **flags)
    num_chars = 0
    for part, given_out in zip(parts, so_far, strict=True):
        num_chars += len(part)
        assert given_out == (after[num_chars - 1] if num_chars else [])


@many
@given(st.sampled_from(FORMATS), plain_texts, calls_lists, plain_texts, places)
def test_calls_come_out_as_they_were_written(tool_format, before, calls, after, places):
    if tool_format is LLAMA3 and before:
        before += "<|python_tag|>"
    text = f"{before}\n{written(tool_format, calls)}\n{after}"
    parser = parser_of(tool_format)
    pieces, _ = parse(parser, cuts(text, places))
    assert calls_of(pieces) == calls
    assert parser.num_complete_calls == len(calls)
    assert re.sub(r"\s+", " ", content_of(pieces)) == re.sub(
        r"\s+", " ", f"{before.removesuffix('<|python_tag|>')} {after}"
    ).strip().replace("  ", " ")


@many
@given(st.sampled_from(FORMATS), fragments)
def test_nothing_is_lost(tool_format, text):
    """All of the text is in the pieces, in its order, but for the frames of calls and white space beside them."""
    pieces = whole(tool_format, text)
    if not calls_of(pieces):
        assert content_of(pieces) == text
        return
    visible = "".join(piece.text for piece in pieces if not isinstance(piece, CallStart))
    characters = iter(text)
    assert all(character in characters for character in visible)
    frames = len(re.sub(r"\s", "", text)) - len(re.sub(r"\s", "", visible))
    longest = len('<tool_call>[TOOL_CALLS][{"name":"weather","parameters":}</tool_call>,;]')
    assert 0 < frames <= longest * len(calls_of(pieces))


def test_calls_are_looked_for_only_in_what_is_said():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    pieces = whole(HERMES, f"<think>{call}</think>{call}", has_reasoning=True)
    assert pieces == [Reasoning(call), CallStart(0, "f"), Arguments(0, "{}")]


# --- which format ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ('{{- "<tool_call>\\n{\\"name\\": <function-name>}" }}', HERMES),
        ("{{- '<tool_call>\\n<function=example>' }}", None),
        ('{{- "[TOOL_CALLS] [" }}', MISTRAL),
        ('{{- "[TOOL_CALLS]" + name + "[ARGS]" }}', None),
        ("""{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument}' }}""", LLAMA3),
        ("{{- '<|python_tag|>' + tool_call.name }}", LLAMA3),
        ("{% for tool in tools %}{{ tool }}{% endfor %}", None),
    ],
)
def test_format_is_what_the_template_teaches(template, expected):
    assert tool_format_of(template) is expected


# --- hostile text ----------------------------------------------------------------------------------------------------

HOSTILE = {
    "markers": (HERMES, "<tool_call>" * 20_000),
    "half-markers": (HERMES, "<tool_cal" * 20_000),
    "spaces": (HERMES, "<tool_call>" + " " * 100_000 + "x"),
    "long-name": (HERMES, '<tool_call>{"name": "' + "f" * 100_000),
    "long-key": (LLAMA3, '{"' + "k" * 100_000),
    "braces": (LLAMA3, "{" * 100_000),
    "deep-arguments-first": (HERMES, '<tool_call>{"arguments": ' + '{"a":' * (MAX_DEPTH + 1)),
    "lists": (MISTRAL, "[TOOL_CALLS][" * 10_000),
}


@pytest.mark.parametrize("row", HOSTILE, ids=HOSTILE)
def test_hostile_text_is_content_and_costs_no_more_than_any(row):
    tool_format, text = HOSTILE[row]
    parser, pieces = parser_of(tool_format), []
    for start in range(0, len(text), 4):
        pieces += parser.push(text[start : start + 4])
    pieces += parser.finish()
    assert content_of(pieces) == text


CALL = '{"name": "f", "arguments": {}}'
BEFORE_SPACES = {
    "first": (LLAMA3, {}, ""),
    "after-tag": (LLAMA3, {}, "<|python_tag|>"),
    "after-brace": (LLAMA3, {}, CALL),
    "between": (LLAMA3, {}, f"{CALL};{CALL}"),
    "in-content": (HERMES, {}, "a"),
    "after-mark": (HERMES, {}, "<tool_call>"),
    "before-end": (HERMES, {}, f"<tool_call>{CALL}"),
    "after-end": (HERMES, {}, f"<tool_call>{CALL}</tool_call>"),
    "before-list": (MISTRAL, {}, "[TOOL_CALLS]"),
    "in-list": (MISTRAL, {}, f"[TOOL_CALLS][{CALL}"),
    "after-comma": (MISTRAL, {}, f"[TOOL_CALLS][{CALL},"),
    "before-thoughts": (None, {"has_reasoning": True}, ""),
    "in-opened-thoughts": (None, {"has_reasoning": True, "is_reasoning": True}, ""),
    "thoughts-begin": (None, {"has_reasoning": True}, "<think>"),
    "in-thoughts": (None, {"has_reasoning": True}, "<think>a"),
    "after-thoughts": (None, {"has_reasoning": True}, "<think>a</think>"),
}


@pytest.mark.parametrize("row", BEFORE_SPACES, ids=BEFORE_SPACES)
@pytest.mark.parametrize("after", ["", "x"])
def test_much_white_space_in_small_parts_costs_no_more_than_other_text(row, after):
    """`logit_bias` can make a model write nothing but white space, and the event loop reads all of it."""
    tool_format, settings_, before = BEFORE_SPACES[row]
    spaces = " " * 64
    parser, pieces = parser_of(tool_format, **settings_), []
    for part in [before, *[spaces] * 12_000, after]:
        pieces += parser.push(part)
    pieces += parser.finish()
    assert joined(pieces) == whole(tool_format, before + spaces * 12_000 + after, **settings_)


def test_many_marks_in_one_part_cost_no_more_than_in_many():
    """An answer that is not streamed comes in one part."""
    text = "<tool_call>" * 60_000
    assert content_of(whole(HERMES, text)) == text
