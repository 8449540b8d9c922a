"""Members that mean the same in the words of several servers."""

import json

import pytest

from gateway.openai.completions import CompletionRequest
from gateway.openai.requests import parse
from services.runtime.errors import InvalidRequest


def sampling_of(**body):
    return parse(json.dumps({"prompt": "a", **body}).encode(), CompletionRequest)[0].call().sampling


@pytest.mark.parametrize(
    ("word", "name", "value"),
    [
        ("max_new_tokens", "max_tokens", 7),
        ("n_predict", "max_tokens", 7),
        ("num_predict", "max_tokens", 7),
        ("max_tokens_to_sample", "max_tokens", 7),
        ("min_new_tokens", "min_tokens", 3),
        ("repeat_penalty", "repetition_penalty", 1.5),
        ("stop_sequences", "stop", ["x"]),
        ("ebnf", "json_schema", None),
    ],
)
def test_a_synonym_means_what_its_name_means(word, name, value):
    if word == "ebnf":
        grammar = 'start: "a"'
        assert sampling_of(ebnf=grammar).json_schema == sampling_of(grammar=grammar).json_schema != ""
        return
    assert getattr(sampling_of(**{word: value}), name) == value
    assert getattr(sampling_of(**{word: value, name: value}), name) == value


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"max_tokens": 5, "max_new_tokens": 6}, "max_new_tokens"),
        ({"n_predict": 5, "num_predict": 6}, "num_predict"),
        ({"max_tokens": 5, "n_predict": -1}, "max_tokens"),
        ({"min_tokens": 1, "min_new_tokens": 2}, "min_new_tokens"),
        ({"repetition_penalty": 1, "repeat_penalty": 2}, "repeat_penalty"),
        ({"stop": ["a"], "stop_sequences": ["b"]}, "stop_sequences"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
    ],
)
def test_what_differs_or_is_out_of_bounds_is_named_as_the_client_wrote_it(body, field):
    with pytest.raises(InvalidRequest) as refused:
        sampling_of(**body)
    assert refused.value.field == field
    assert field in refused.value.message or "another asks for no bound" in refused.value.message


@pytest.mark.parametrize("value", [-1, -2])
def test_some_values_ask_for_as_many_as_fit(value):
    assert sampling_of(n_predict=value).max_tokens is None
    assert sampling_of().max_tokens == 16


def test_an_empty_text_stops_nothing():
    assert sampling_of(stop="").stop == ()
    assert sampling_of(stop="x").stop == ["x"]
