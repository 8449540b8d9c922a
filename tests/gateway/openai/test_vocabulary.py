"""Every member of a request that any server's clients send: each is served, refused by name, or ignored by name."""

import json

import pytest

from gateway.openai.chat import ChatRequest
from gateway.openai.completions import CompletionRequest
from gateway.openai.requests import parse
from gateway.openai.responses_request import ResponsesRequest, in_own_words
from gateway.openai.vocabulary import INNER_FIELDS, WORDS, Refused
from services.runtime.errors import InvalidRequest
from services.structured.grammar_text import MARK

OK = [{"role": "user", "content": "hi"}]
ENDPOINTS = {
    "/v1/completions": (CompletionRequest, {"prompt": "hi", "max_tokens": 2}),
    "/v1/chat/completions": (ChatRequest, {"messages": OK, "max_tokens": 2}),
    "/v1/responses": (ResponsesRequest, {"input": "hi", "max_output_tokens": 2}),
}
SOMETHING = "something"
"""What no word lets pass."""


@pytest.fixture
async def system(make_system, worker_type, pair_type, tokenizer):
    system = await make_system()
    await system.add_pair(pair_type([*tokenizer.encode("ok", add_special_tokens=False).ids, 1]))
    return system


async def post(system, path, /, **members):
    body = {**ENDPOINTS[path][1], **members}
    return await system.http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})


def words_of(path):
    fields = ENDPOINTS[path][0].__struct_fields__
    return {name: word for name, word in WORDS[""].items() if name not in fields}


# --- each member, at a gateway ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_what_would_change_the_answer_is_refused_by_name(system, path):
    for name, word in words_of(path).items():
        if not isinstance(word, Refused):
            continue
        answer = await post(system, path, **{name: SOMETHING})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, name, "unsupported_parameter"), error
        assert name in error["message"]
        assert (in_own_words(word.instead) if path == "/v1/responses" else word.instead) in error["message"]


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_what_asks_for_nothing_passes(system, path):
    for name, word in words_of(path).items():
        for value in (*word.passes, None) if isinstance(word, Refused) else ():
            answer = await post(system, path, **{name: value})
            assert answer.status_code == 200, (name, value, answer.text)
            assert "x-tandem-ignored" not in answer.headers


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_what_is_harmless_is_ignored_by_name(system, path):
    harmless = [name for name, word in words_of(path).items() if not isinstance(word, Refused)]
    assert len(harmless) > 20
    for name in (*harmless, "no_server_knows_it"):
        answer = await post(system, path, **{name: SOMETHING})
        assert (answer.status_code, answer.headers.get("x-tandem-ignored")) == (200, name), answer.text


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_what_is_served_is_looked_at(system, path):
    """A wrong value is refused by name; what a right one does is tested where it is served."""
    for name in ENDPOINTS[path][0].__struct_fields__:
        answers = [await post(system, path, **{name: wrong}) for wrong in ({"no": "such"}, 5)]
        refused = [answer.json()["error"]["param"] for answer in answers if answer.status_code == 400]
        assert any((param or "").startswith(name) for param in refused), (name, [answer.text for answer in answers])


# --- members within members -------------------------------------------------------------------------------------------

INNER = {
    "response_format": lambda more: {"response_format": {"type": "json_object", **more}},
    "response_format.json_schema": lambda more: {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, **more}}
    },
    "stream_options": lambda more: {"stream": True, "stream_options": more},
    "structured_outputs": lambda more: {"structured_outputs": {"regex": "a", **more}},
    "messages": lambda more: {"messages": [*OK, {"role": "user", "content": "a", **more}]},
    "messages.content": lambda more: {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a", **more}]}]
    },
    "messages.tool_calls": lambda more: {
        "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}, **more}]}]
    },
    "messages.tool_calls.function": lambda more: {
        "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}", **more}}]}]
    },
    "tools": lambda more: {"tools": [{"type": "function", "function": {"name": "f"}, **more}]},
    "reasoning": lambda more: {"input": "a", "reasoning": more},
    "conversation": lambda more: {"input": "a", "conversation": {"id": "conv_1", **more}},
    "text": lambda more: {"input": "a", "text": more},
    "text.format": lambda more: {"input": "a", "text": {"format": {"type": "text", **more}}},
    "input": lambda more: {"input": [{"role": "user", "content": "a", **more}]},
    "input.content": lambda more: {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "a", **more}]}]
    },
}


def parsed(place, more):
    members = INNER[place](more)
    body_type = ResponsesRequest if "input" in members else ChatRequest
    body = members if "input" in members else {"messages": OK, **members}
    return parse(json.dumps(body).encode(), body_type)


@pytest.mark.parametrize("place", INNER_FIELDS)
def test_inner_members(place):
    assert parsed(place, {"no_server_knows_it": 1})[1] == [f"{place}.no_server_knows_it"]
    assert parsed(place, {"no_server_knows_it": None})[1] == []
    for name, word in WORDS.get(place, {}).items():
        if not isinstance(word, Refused):
            assert parsed(place, {name: SOMETHING})[1] == [f"{place}.{name}"]
            continue
        with pytest.raises(InvalidRequest, match=name) as caught:
            parsed(place, {name: SOMETHING})
        assert caught.value.field.split(".")[-1] == name
        for value in (*word.passes, None):
            assert parsed(place, {name: value})[1] == []


async def test_an_inner_member_is_refused_by_its_place(system):
    items = [*OK, {"role": "assistant", "content": "He", "prefix": True}]
    error = (await post(system, "/v1/responses", input=items)).json()["error"]
    assert (error["param"], error["code"]) == ("input[1].prefix", "unsupported_parameter")
    items[1]["prefix"] = False
    assert (await post(system, "/v1/responses", input=items)).status_code == 200


def test_at_most_so_many_are_named_and_each_once():
    body = {"prompt": "a", **{f"unknown{n}": n for n in range(99)}}
    assert len(parse(json.dumps(body).encode(), CompletionRequest)[1]) == 16
    twice = {"messages": [{"role": "user", "content": "a", "x": 1}, {"role": "user", "content": "a", "x": 1}]}
    assert parse(json.dumps(twice).encode(), ChatRequest)[1] == ["messages.x"]


# --- forms ------------------------------------------------------------------------------------------------------------

FORMS = {
    "regex": ({"regex": "a|b"}, "u_start: /a|b/"),
    "guided_regex": ({"guided_regex": "a"}, "u_start: /a/"),
    "guided_choice": ({"guided_choice": ["red", "blue"]}, '"red" | "blue"'),
    "ebnf": ({"ebnf": 'root ::= "x" [0-9]'}, "[0-9]"),
    "grammar": ({"grammar": 'root ::= "x"'}, '"x"'),
    "guided_grammar": ({"guided_grammar": 'start: "x"'}, 'u_start: "x"'),
    "structured_outputs-regex": ({"structured_outputs": {"regex": "a"}}, "u_start: /a/"),
    "structured_outputs-choice": ({"structured_outputs": {"choice": ["a", "b"]}}, '"a" | "b"'),
    "structured_outputs-grammar": ({"structured_outputs": {"grammar": 'start: "x"'}}, 'u_start: "x"'),
    "structured_outputs-json": ({"structured_outputs": {"json": {"type": "null"}}}, '{"type":"null"}'),
    "structured_outputs-json-text": ({"structured_outputs": {"json": '{"type": "null"}'}}, '{"type":"null"}'),
    "structured_outputs-json_object": ({"structured_outputs": {"json_object": True}}, '{"type":"object"}'),
    "guided_json": ({"guided_json": {"type": "null"}}, '{"type":"null"}'),
    "json_schema": ({"json_schema": {"type": "null"}}, '{"type":"null"}'),
    "format-json_object": ({"response_format": {"type": "json_object", "schema": {"type": "null"}}}, '{"type":"null"}'),
    "format-json_schema": ({"response_format": {"type": "json_schema", "schema": {"type": "null"}}}, '{"type":"null"}'),
    "format-regex": ({"response_format": {"type": "regex", "pattern": "a"}}, "u_start: /a/"),
    "format-grammar": ({"response_format": {"type": "grammar", "grammar": 'root ::= "x"'}}, '"x"'),
}


@pytest.mark.parametrize("row", FORMS)
async def test_forms_reach_the_workers(system, row):
    members, expected = FORMS[row]
    paths = [path for path in ENDPOINTS if path != "/v1/responses" or "response_format" not in members]
    for path in paths:
        assert (await post(system, path, **members)).status_code == 200
        text = system.workers["decode-0"].attempts[-1].spec.json_schema
        assert expected in text
        assert text.startswith("{" if expected.startswith("{") else MARK)


@pytest.mark.parametrize(
    ("members", "name", "words"),
    [
        ({"regex": "("}, "regex", "regex cannot be used"),
        ({"regex": ""}, "regex", "empty"),
        ({"regex": "x" * 65536}, "regex", "at most"),
        ({"guided_choice": []}, "guided_choice", "1 to"),
        ({"guided_choice": "red"}, "guided_choice", ""),
        ({"ebnf": 'a ::= "b"'}, "ebnf", "root"),
        ({"grammar": "start: <|end|>"}, "grammar", "names a token"),
        ({"guided_json": "{"}, "guided_json", "guided_json is not valid JSON"),
        ({"guided_json": {"type": "banana"}}, "guided_json", "guided_json"),
        ({"json_schema": 5}, "json_schema", "object"),
        ({"structured_outputs": {}}, "structured_outputs", "one of"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "one of"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format", "does not go with"),
        ({"response_format": {"type": "yaml"}}, "response_format", "must be one of"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex", "both ask"),
        ({"regex": "a", "guided_json": {}}, "guided_json", "both ask"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos", "this regex"),
    ],
)
async def test_forms_that_are_refused(system, members, name, words):
    answer = await post(system, "/v1/chat/completions", **members)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, name)
    assert words in error["message"]


async def test_text_asks_for_no_form(system):
    assert (await post(system, "/v1/completions", regex="a", response_format={"type": "text"})).status_code == 200
    assert "/a/" in system.workers["decode-0"].attempts[-1].spec.json_schema


# --- other names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_other_servers_names_mean_the_same(system, path):
    own = next(name for name in ENDPOINTS[path][1] if name.startswith("max"))
    for name in ("max_new_tokens", "n_predict", "num_predict", "max_tokens_to_sample"):
        answer = await post(system, path, **{own: None, name: 3})
        assert answer.status_code == 200, answer.text
        assert system.workers["decode-0"].attempts[-1].spec.sampling.max_tokens == 3
        error = (await post(system, path, **{name: 3})).json()["error"]
        assert error["param"] == name
        assert "mean the same and differ" in error["message"]
        assert (await post(system, path, **{name: 2})).status_code == 200
        assert (await post(system, path, **{own: None, name: 0})).json()["error"]["param"] == name
    for name in ("n_predict", "num_predict"):
        assert (await post(system, path, **{own: None, name: -1})).status_code == 200
        assert system.workers["decode-0"].attempts[-1].spec.sampling.max_tokens > 400
    await post(system, path, min_new_tokens=1, repeat_penalty=1.5, stop_sequences=["zz"])
    sampling = system.workers["decode-0"].attempts[-1].spec.sampling
    assert (sampling.min_tokens, sampling.repetition_penalty) == (1, 1.5)
    for members, name in (
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"min_new_tokens": 1, "min_tokens": 2}, "min_new_tokens"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repeat_penalty"),
        ({"stop_sequences": ["a"], "stop": "b"}, "stop_sequences"),
    ):
        assert (await post(system, path, **members)).json()["error"]["param"] == name
