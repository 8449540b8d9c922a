"""One source of answers: named or not, whole or in parts, over either API, they are the same."""

import asyncio
import contextlib
import json
import re
from types import SimpleNamespace

import grpc
import pytest

from gateway.edge.generate import _PlainAnswers
from gateway.requests.delivery import FastPath
from gateway.types import Delta, TokenLogprobs, Usage
from protos import inference_pb2, inference_pb2_grpc

USAGE = Usage(3, 0, 2, 0.0, 0.0, 0.0, 0.0)
BODY = {"prompt": [5, 6, 7], "n": 2, "seed": 3, "max_tokens": 100, "logprobs": 1}


def delta(index, *token_ids, text="x", **fields):
    return Delta(index, list(token_ids), text, [TokenLogprobs(-1.0, []) for _ in token_ids], **fields)


def last(index):
    return Delta(index, [], "", None, "stop", USAGE)


def plain(*streams):
    """Answers of which each gives its deltas to its fast path while that takes them."""

    async def run(path, deltas):
        for number, each in enumerate(deltas):
            await asyncio.sleep(0)
            if number and number < len(deltas) - 1 and path.take is not None and path.take(each):
                continue
            yield each

    paths = [FastPath() for _ in streams]
    specs = [SimpleNamespace(choice=number, prompt_token_ids=[5, 6, 7]) for number in range(len(streams))]
    accepted = SimpleNamespace(
        request_id="r", model="tiny", fallback="", span=SimpleNamespace(told_traceparent=""), specs=specs
    )
    return _PlainAnswers(accepted, [run(*each) for each in zip(paths, streams, strict=True)], paths)


async def parts_of(answers, take_now=None):
    async with contextlib.aclosing(answers.parts(take_now)) as parts:
        return [part async for part in parts]


async def test_a_whole_answer_has_every_delta_in_order_whichever_way_it_came():
    answers = plain(
        [delta(0, 1, text="a"), delta(1, 2, text="b"), last(2)], [delta(0, 7, text="c"), delta(1, 8, text="d"), last(2)]
    )
    first, second = await answers.wholes()
    assert (first.index, first.token_ids, first.text, len(first.logprobs)) == (0, [1, 2], "ab", 2)
    assert (second.index, second.token_ids, second.text) == (1, [7, 8], "cd")
    assert {(whole.finish_reason, whole.usage) for whole in (first, second)} == {("stop", USAGE)}


async def test_a_delta_that_is_taken_at_once_is_no_part():
    taken = []
    answers = plain([delta(0, 1), delta(1, 2), last(2)])
    parts = await parts_of(answers, lambda each: taken.append(each.first_index) or True)
    assert taken == [1]
    assert [(part.choice, part.is_first, part.delta.first_index) for part in parts] == [(0, True, 0), (0, False, 2)]
    assert answers.usages() == [(USAGE, [5, 6, 7])]


async def test_what_is_not_taken_is_a_part():
    parts = await parts_of(plain([delta(0, 1), delta(1, 2), last(2)]), lambda each: False)
    assert [part.delta.first_index for part in parts] == [0, 1, 2]


async def test_nothing_of_several_answers_is_taken_at_once():
    def take_now(each):
        raise AssertionError

    parts = await parts_of(plain([delta(0, 1), delta(1, 2), last(2)], [delta(0, 7), last(1)]), take_now)
    assert sorted((part.choice, part.delta.first_index) for part in parts) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert sorted(part.choice for part in parts if part.is_first) == [0, 1]


@pytest.fixture
async def system(make_system, pair_type, tokenizer):
    system = await make_system()
    answer = tokenizer.encode("hello world, naïve café 🙂", add_special_tokens=False).ids
    await system.add_pair(pair_type([*answer, 1]))
    return system


def events_of(text):
    """The events of a stream, which have ids where it has a name."""
    *events, done = re.findall(r"^data: (.*)$", text, re.MULTILINE)
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def merged(events):
    """Text, tokens and reason of each choice of a stream."""
    choices = {}
    for choice in (choice for event in events for choice in event["choices"]):
        text, tokens, reason = choices.get(choice["index"], ("", [], None))
        tokens = [*tokens, *((choice["logprobs"] or {}).get("tokens", ()))]
        choices[choice["index"]] = (text + choice["text"], tokens, reason or choice["finish_reason"])
    return choices


async def test_a_named_answer_is_the_plain_one(system):
    bodies = [
        (await system.http.post("/v1/completions", json=BODY, headers=headers)).json()
        for headers in ({}, {"idempotency-key": "k"}, {"idempotency-key": "k"})
    ]
    assert bodies[0]["choices"] == bodies[1]["choices"] == bodies[2]["choices"]
    assert bodies[0]["usage"] == bodies[1]["usage"] == bodies[2]["usage"]
    streamed = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
    events = [
        events_of((await system.http.post("/v1/completions", json=streamed, headers=headers)).text)
        for headers in ({}, {"x-request-id": "mine"})
    ]
    whole = {
        choice["index"]: (choice["text"], choice["logprobs"]["tokens"], choice["finish_reason"])
        for choice in bodies[0]["choices"]
    }
    assert merged(events[0]) == merged(events[1]) == whole
    assert events[0][-1]["usage"] == events[1][-1]["usage"] == bodies[0]["usage"]


@pytest.mark.parametrize("name", ["", "mine"])
async def test_a_unary_answer_is_the_streamed_one(system, name):
    request = inference_pb2.GenerateRequest(text="hello", sampling=inference_pb2.SamplingParams(max_tokens=100, seed=3))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        inference = inference_pb2_grpc.InferenceStub(channel)
        request.request_id = name
        whole = await inference.GenerateUnary(request)
        request.request_id = name and "other"
        parts = [part async for part in inference.Generate(request)]
    assert whole.text == "".join(part.text for part in parts)
    assert list(whole.token_ids) == [token for part in parts for token in part.token_ids]
    assert (whole.finish_reason, whole.first_index) == (parts[-1].finish_reason, 0)
    assert whole.usage.completion_tokens == parts[-1].usage.completion_tokens == len(whole.token_ids)
    assert (whole.request_id == name) is bool(name)
