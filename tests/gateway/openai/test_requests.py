"""Requests as they are parsed: strictly, and with the members that all of them share."""

import json

import msgspec
import pytest

from gateway.openai.chat import ChatRequest
from gateway.openai.completions import CompletionRequest
from gateway.openai.requests import LEAST_TOP_P, TokenizeRequest, parse, parse_members, parse_named
from services.runtime.errors import InvalidRequest


def call_of(**body):
    request, _ = parse(json.dumps({"prompt": "a", **body}).encode(), CompletionRequest)
    return request.call()


def test_cache_key_binds_requests_together_and_a_user_where_there_is_none():
    def affinity_of(body):
        request, ignored = parse(json.dumps({"messages": [], **body}).encode(), ChatRequest)
        assert not ignored
        return request.call().affinity_key

    assert affinity_of({"prompt_cache_key": "k", "user": "u"}) == "k"
    assert affinity_of({"user": "u"}) == "u"
    assert affinity_of({}) == ""


def test_members_that_both_apis_share_mean_the_same():
    shared = {"model": "m", "n": 2, "priority": 3, "service_class": "low", "tenant": "t", "cache_salt": "s"}
    chat, _ = parse(json.dumps({"messages": [], **shared, "allow_fallback": True}).encode(), ChatRequest)
    text = call_of(**shared, allow_fallback=True)
    fields = ("model", "num_choices", "priority", "service_class", "tenant", "cache_salt", "allow_fallback")
    expected = ["m", 2, 3, "low", "t", "s", True]
    assert [getattr(chat.call(), name) for name in fields] == [getattr(text, name) for name in fields] == expected


def test_null_is_absent():
    nulls = dict.fromkeys(CompletionRequest.__struct_fields__)
    call = call_of(**{**nulls, "prompt": "a"})
    assert call == call_of()


def test_zero_keeps_the_likeliest_alone():
    assert call_of(top_p=0).sampling.top_p == LEAST_TOP_P
    assert call_of(top_p=0.5).sampling.top_p == 0.5


@pytest.mark.parametrize(
    ("body", "field", "code"),
    [
        (b'{"prompt": "a", "prompt": "b"}', None, "duplicate_key"),
        (b'{"prompt": "a", "user": {"a": 1, "a": 2}}', None, "duplicate_key"),
        (b'{"prompt": "a", "n": NaN}', None, "invalid_json"),
        (b"[]", None, "invalid_json"),
        (b'{"prompt": "a", "n": "1"}', "n", "invalid_type"),
        (b'{"prompt": "a", "stream_options": {"include_usage": 1}}', "stream_options.include_usage", "invalid_type"),
        (b'{"prompt": "a", "model": ""}', "model", "invalid_value"),
        (b'{"prompt": "a", "service_tier": "best"}', "service_tier", "invalid_value"),
    ],
)
def test_parsing_is_strict(body, field, code):
    with pytest.raises(InvalidRequest) as refused:
        parse(body, CompletionRequest)
    assert (refused.value.field, refused.value.code) == (field, code)


def test_ignored_members_are_named():
    _, ignored = parse_members(b'{"prompt": "a", "more": 1, "model": "m"}', TokenizeRequest)
    assert ignored == ["more"]


def test_equal_bodies_have_one_spelling():
    *_, first = parse_named(b'{"prompt": "a", "n": 1}', CompletionRequest)
    *_, second = parse_named(b' {"n":1,\n"prompt":"a"}', CompletionRequest)
    *_, other = parse_named(b'{"prompt": "a", "n": 2}', CompletionRequest)
    assert first == second != other


@pytest.mark.parametrize("body_type", [ChatRequest, CompletionRequest])
def test_required_members_are_members(body_type):
    fields = {field.name: field for field in msgspec.structs.fields(body_type)}
    assert body_type.REQUIRED
    assert set(body_type.REQUIRED) <= fields.keys()
    with pytest.raises(InvalidRequest) as refused:
        parse(b"{}", body_type)[0].call()
    assert refused.value.field in body_type.REQUIRED
