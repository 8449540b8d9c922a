"""Bad requests, one test id per row: each gets its error with the field named, and the server keeps serving."""

import asyncio
import contextlib
import json
import math
import re
import socket
import sys
import threading
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from gateway.access.keys import digest_of_key, new_key
from gateway.forms.answer_forms import AnswerForms
from gateway.http import protocol as http_protocol
from gateway.models.catalog import load_catalog
from gateway.models.catalog_file import ModelEntry
from gateway.models.conversation import check_conversation
from gateway.observability.metrics import Metrics
from gateway.openai import requests as openai_requests
from gateway.openai.chat import ChatRequest
from gateway.openai.completions import CompletionRequest
from gateway.openai.requests import parse
from gateway.requests.lifecycle import Requests
from gateway.requests.policies import Policies
from gateway.requests.queue import AdmissionQueue, Lane
from gateway.topology.members import Topology
from protos import inference_pb2, inference_pb2_grpc, worker_pb2
from services.runtime import rpc, status
from services.runtime.errors import InvalidRequest
from services.scheduling.queue import RequestQueue
from services.scheduling.routing.router import Router
from tests.waiting import HANG_LIMIT_S

OK = [{"role": "user", "content": "hi"}]
JSON = {"content-type": "application/json"}
LINE = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
NAN, INF = math.nan, math.inf


@pytest.fixture
async def system(make_system, worker_type, pair_type, tokenizer):
    system = await make_system()
    pair = pair_type([*tokenizer.encode("ok", add_special_tokens=False).ids, 1])
    await system.add(worker_type("decode", "decode-0", pair.decode))
    return system


@pytest.fixture
def post(system):
    async def send(path, content, headers=None):
        return await system.http.post(
            path, content=content, headers={"content-type": "application/json", **(headers or {})}
        )

    return send


def check_error(response, status, *, code=None, param=None):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert response.headers["content-type"].startswith("application/json")
    if code is not None:
        assert error["code"] == code
    if param is not None:
        assert error["param"] == param


async def check_alive(system):
    assert (await system.complete()).json()["choices"][0]["text"] == "ok"


RAW_BODIES = {
    "empty": (b"", "invalid_json"),
    "truncated": (b'{"prompt": "a"', "invalid_json"),
    "trailing-garbage": (b'{"prompt": "a"} x', "invalid_json"),
    "two-documents": (b'{"prompt": "a"}{"prompt": "b"}', "invalid_json"),
    "not-an-object": (b'["prompt"]', "invalid_json"),
    "null": (b"null", "invalid_json"),
    "nested-bomb": (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json"),
    "nested-bomb-unknown-field": (b'{"prompt": "a", "x": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}", None),
    "duplicate-key": (b'{"prompt": "a", "prompt": "b"}', "duplicate_key"),
    "duplicate-key-escaped": (b'{"prompt": "a", "pro\\u006dpt": "b"}', "duplicate_key"),
    "duplicate-key-nested": (b'{"prompt": "a", "stream": true, "stream_options": {"x": 1, "x": 2}}', "duplicate_key"),
    "infinite-number": (b'{"prompt": "a", "temperature": 1e400}', "invalid_value"),
    "nan-literal": (b'{"prompt": "a", "temperature": NaN}', "invalid_json"),
    "infinity-literal": (b'{"prompt": "a", "temperature": -Infinity}', "invalid_json"),
    "5000-digits": (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "invalid_json"),
    "invalid-utf8": (b'{"prompt": "\xff\xfe"}', "invalid_encoding"),
    "overlong-utf8": (b'{"prompt": "\xc0\xaf"}', "invalid_encoding"),
    "utf16": ('{"prompt": "a"}'.encode("utf-16"), "invalid_encoding"),
    "utf16-without-bom": ('{"prompt": "a"}'.encode("utf-16-le"), "invalid_json"),
    "bom": (b'\xef\xbb\xbf{"prompt": "a"}', "invalid_json"),
    "lone-surrogate": (b'{"prompt": "\\ud800"}', "invalid_encoding"),
    "lone-surrogate-of-another-type": (b'{"prompt": "a", "allow_fallback": "\\ud800"}', "invalid_encoding"),
    "raw-control-character": (b'{"prompt": "a\x00b"}', "invalid_json"),
}


@pytest.mark.parametrize("row", RAW_BODIES, ids=RAW_BODIES)
async def test_bad_body(system, post, row):
    body, code = RAW_BODIES[row]
    check_error(await post("/v1/completions", body), 400, code=code)
    await check_alive(system)


# field → values; the error must name the field.
BAD_VALUES = {
    "temperature": [-1, 2.01, 1e308, "1", True, [1]],
    "top_p": [-0.1, 1.01, "1", True],
    "top_k": [-2, 2**31, 1.5, "1", True],
    "min_p": [-0.1, 1.1, "x"],
    "repetition_penalty": [0, -1, 10.1, True],
    "presence_penalty": [-2.1, 2.1, "0"],
    "frequency_penalty": [-2.1, 2.1],
    "n": [0, -1, 17, 129, 10**9, 1.5, True, "2"],
    "max_tokens": [-1, 0, 2**31, 2**63, 1.5, True, "5"],
    "min_tokens": [-1, 2**31, 1.5],
    "seed": [2**63, -(2**63) - 1, 1.5, "1", True],
    "stop": [[""], ["a"] * 17, ["a"] * 10_000, "x" * 257, ["é" * 129], [1], 5],
    "stop_token_ids": [[-1], [10**6], [1.0], [True], ["1"], [0] * 129],
    "typical_p": [0, -1, 0.5, "x"],
    "guided_grammar": ['root ::= root "a"', "(" * 1000],
    "guided_regex": [5, {}],
    "suffix": ["b"],
    "logit_bias": [
        {"1": 1e308},
        {"1": -1e308},
        {str(number): 1 for number in range(1025)},
        {"x": 1},
        {"-1": 1},
        {"1000000": 1},
        {"1": 5, "01": -5},
        {"0": 1, "-0": 1},
        {"1": 101},
        {"1": -101},
        {"1": True},
        {"1.0": 1},
        [1],
    ],
    "priority": [-101, 101, 1.5, "1"],
    "stream": ["yes", 1],
    "stream_options": [{"include_usage": True}],
    "user": ["u" * 257, 5],
    "service_class": ["urgent", "Normal", 1],
    "tenant": ["a b", "t" * 65, 5],
    "cache_salt": ["", "s" * 65, "half \ud800", 5],
    "model": [5],
    "return_token_ids": [1],
    "ignore_eos": ["true"],
}


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, values in BAD_VALUES.items() for value in values],
    ids=[f"{field}={str(value)[:30]}" for field, values in BAD_VALUES.items() for value in values],
)
@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_bad_value(check_request, api, field, value):
    body = {"prompt": "a"} if api == "completions" else {"messages": OK}
    error = await check_request(api, {**body, field: value})
    assert error.field is not None
    assert error.field.partition("[")[0].partition(".")[0] == field


ONLY_COMPLETIONS = {
    "prompt-missing": {},
    "prompt-null": {"prompt": None},
    "prompt-empty-list": {"prompt": []},
    "prompt-empty-ids": {"prompt": [[]]},
    "prompt-negative-id": {"prompt": [-1]},
    "prompt-id-outside": {"prompt": [10**6]},
    "prompt-id-2^31": {"prompt": [2**31]},
    "prompt-huge-id": {"prompt": [10**400]},
    "prompt-float-id": {"prompt": [1.0]},
    "prompt-bool-id": {"prompt": [True]},
    "prompt-mixed": {"prompt": ["a", [1]]},
    "prompt-mixed-ids": {"prompt": [1, "a"]},
    "prompt-nested": {"prompt": [[[1]]]},
    "prompt-object": {"prompt": {"a": 1}},
    "prompt-number": {"prompt": 5},
    "prompt-too-many": {"prompt": ["a"] * 129},
    "prompt-100k": {"prompt": ["a"] * 100_000},
    "prompt-one-too-many-with-n": {"prompt": ["a"] * 65, "n": 2},
    "prompt-10mb-text": {"prompt": "a" * 7_000_000},
    "best_of": {"prompt": "a", "best_of": 2},
    "best_of-less-than-n": {"prompt": "a", "n": 3, "best_of": 2},
    "logprobs-21": {"prompt": "a", "logprobs": 21},
    "logit_bias-many": {"prompt": "a", "logit_bias": {str(number): 1 for number in range(500_000)}},
    "best_of-21": {"prompt": "a", "best_of": 21, "stream": True},
    "logprobs-bool": {"prompt": "a", "logprobs": True},
    "echo": {"prompt": "a", "echo": True, "logprobs": 0, "stream": True},
    "suffix": {"prompt": "a", "suffix": "b"},
    "prompt_embeds": {"prompt": "a", "prompt_embeds": "AAAA"},
    "min-above-max": {"prompt": "a", "min_tokens": 5, "max_tokens": 4},
}


@pytest.mark.parametrize("row", ONLY_COMPLETIONS, ids=ONLY_COMPLETIONS)
async def test_bad_completion(check_request, row):
    error = await check_request("completions", ONLY_COMPLETIONS[row])
    assert error.field == row.partition("-")[0].replace("min", "min_tokens")


ONLY_CHAT = {
    "messages-missing": {},
    "messages-empty": {"messages": []},
    "messages-too-many": {"messages": OK * 2049},
    "messages-string": {"messages": "hi"},
    "message-string": {"messages": ["hi"]},
    "role-missing": {"messages": [{"content": "x"}]},
    "role-unknown": {"messages": [{"role": "zzz", "content": "x"}]},
    "role-list": {"messages": [{"role": ["user"], "content": "x"}]},
    "content-missing": {"messages": [{"role": "user"}]},
    "content-number": {"messages": [{"role": "user", "content": 5}]},
    "content-empty-parts": {"messages": [{"role": "user", "content": []}]},
    "part-image": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
    "part-data-url": {
        "messages": [
            {"role": "user", "content": [{"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,AA"}}]}
        ]
    },
    "part-audio": {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AA"}}]}]},
    "messages-100k": {"messages": OK * 100_000},
    "part-string": {"messages": [{"role": "user", "content": ["x"]}]},
    "content-surrogate": {"messages": [{"role": "user", "content": "\ud83d"}]},
    "name-number": {"messages": [{"role": "user", "content": "x", "name": 5}]},
    "name-long": {"messages": [{"role": "user", "content": "x", "name": "n" * 65}]},
    "tool_calls": {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "a"}]}]},
    "model-empty": {"messages": OK, "model": ""},
    "template-refuses": {"messages": [{"role": "user", "content": "not in this template"}]},
    "top_logprobs-21": {"messages": OK, "logprobs": True, "top_logprobs": 21},
    "top_logprobs-alone": {"messages": OK, "top_logprobs": 2},
    "logprobs-int": {"messages": OK, "logprobs": 1},
    "max-tokens-differ": {"messages": OK, "max_tokens": 5, "max_completion_tokens": 6},
    "max_completion_tokens-0": {"messages": OK, "max_completion_tokens": 0},
    "tools": {"messages": OK, "tools": [{"type": "function", "function": {"name": "f"}}]},
    "tool_choice": {"messages": OK, "tool_choice": "required"},
    "response_format": {"messages": OK, "response_format": {"type": "json_lines"}},
    "chat_template": {"messages": OK, "chat_template": "{{ 1 }}"},
    "chat_template_kwargs": {"messages": OK, "chat_template_kwargs": {"tools": True}},
    "modalities": {"messages": OK, "modalities": ["audio"]},
}


NAMED_IN_CHAT = {
    "message": "messages",
    "role": "messages[0].role",
    "content": "messages[0].content",
    "part": "messages[0].content[0]",
    "name": "messages[0].name",
    "tool_calls": "messages[0].tool_calls[0]",
    "template": "messages",
    "model": "model",
    "max": "max_completion_tokens",
}
"""What the error names, by the first word of a row; without an entry it is that word."""


@pytest.mark.parametrize("row", ONLY_CHAT, ids=ONLY_CHAT)
async def test_bad_chat(check_request, row):
    error = await check_request("chat", ONLY_CHAT[row])
    assert error.field == NAMED_IN_CHAT.get(row.partition("-")[0], row.partition("-")[0])


@pytest.fixture(scope="module")
def catalog(model_folder):
    return load_catalog([ModelEntry("tiny", model_folder)])


@pytest.fixture
def check_request(catalog):
    """Parses and accepts a body without any socket, and gives the InvalidRequest that must come of it."""
    requests = Requests(
        catalog=catalog,
        topology=Topology(gateway_incarnation="0" * 32, on_change=lambda: None),
        queues={"tiny": AdmissionQueue(lambda audience: Lane(RequestQueue(max_waiting=1)))},
        policies=Policies(router=Router("least_loaded")),
        placements=None,
        metrics=Metrics(),
        gateway_incarnation="0" * 32,
        quarantine=set(),
        form_of=AnswerForms().form_of,
    )

    async def accept(api, body):
        request, _ = parse(json.dumps(body).encode(), ChatRequest if api == "chat" else CompletionRequest)
        with await requests.accept(request.call()):
            pass

    async def check(api, body):
        with pytest.raises(InvalidRequest) as caught:
            await accept(api, body)
        assert status.http_status(caught.value) == 400
        assert len(caught.value.message) < 500
        return caught.value

    return check


def test_too_many_messages_are_refused_before_they_are_looked_at():
    class Unread(dict):
        def get(self, *_):
            raise AssertionError

    with pytest.raises(InvalidRequest, match="messages has 2049 entries"):
        check_conversation([Unread()] * 2049, max_chars=10)


GOOD = {
    "nul-in-prompt": {"prompt": "a\x00\x1b[31mb"},
    "zalgo": {"prompt": "Z̷̧͉̈́a̸̢͝l̵g̶o̴ \u202e reversed \u200d ﷺ"},
    "proto-keys": {"prompt": "a", "__proto__": {"x": 1}, "__class__": "y", "constructor": None},
    "unknown-field": {"prompt": "a", "some_new_field": 5},
    "tiny-temperature": {"prompt": "a", "temperature": 1e-45},
    "negative-seed": {"prompt": "a", "seed": -(2**63)},
    "largest-seed": {"prompt": "a", "seed": 2**63 - 1},
    "top_k-all": {"prompt": "a", "top_k": -1},
    "top_k-beyond-vocabulary": {"prompt": "a", "top_k": 2**31 - 1},
    "whole-float": {"prompt": "a", "temperature": 1},
    "limits": {
        "prompt": "a",
        "temperature": 2,
        "top_p": 1,
        "stop": ["x" * 256] * 16,
        "logit_bias": {"0": 100, "1": -100},
    },
    "nulls": {"prompt": "a", "temperature": None, "stop": None, "n": None, "stream_options": None, "tools": None},
    "refused-fields-asking-nothing": {
        "prompt": "a",
        "echo": False,
        "suffix": "",
        "best_of": 1,
        "response_format": {"type": "text"},
    },
    "user-256": {"prompt": "a", "user": "u" * 256},
    "service_class": {"prompt": "a", "service_class": "batch"},
    "tenant": {"prompt": "a", "tenant": "acme"},
    "cache_salt": {"prompt": "a", "cache_salt": "🧂" * 64},
    "n-16": {"prompt": "a", "n": 16},
    "128-prompts": {"prompt": ["a"] * 128},
    "image-link": {"prompt": "![x](http://169.254.169.254/latest)"},
    "ids": {"prompt": [0, 1, 2]},
    "lists-of-ids": {"prompt": [[0, 1], [2]]},
}


@pytest.mark.parametrize("row", GOOD, ids=GOOD)
async def test_odd_but_good(system, row):
    response = await system.http.post("/v1/completions", json=GOOD[row])
    assert response.status_code == 200, response.text
    if row == "unknown-field":
        assert response.headers["x-tandem-ignored"] == "some_new_field"


async def test_stop_on_the_first_token_is_an_empty_text(system):
    response = await system.http.post("/v1/completions", json={"prompt": "a", "stop": ["o"]})
    assert response.json()["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "status"), [(500, 12, 200), (500, 13, 400), (511, 1, 200), (512, 1, 400)]
)
async def test_context_edge(system, num_prompt, max_tokens, status):
    response = await system.http.post("/v1/completions", json={"prompt": [5] * num_prompt, "max_tokens": max_tokens})
    assert response.status_code == status
    if status == 400:
        check_error(response, 400, code="context_length_exceeded", param="prompt")


async def test_longer_than_any_pool_is_refused(make_system, worker_type, pair_type):
    system = await make_system()
    await system.add(worker_type("decode", "decode-0", pair_type([1]).decode, max_sequence_tokens=100))
    check_error(await system.complete(max_tokens=98), 400, code="context_length_exceeded")
    assert (await system.complete(max_tokens=97)).status_code == 200
    assert (await system.http.get("/v1/models")).json()["data"][0]["max_model_len"] == 100


async def test_chat_without_limit_fills_the_context(system):
    await system.chat("hi")
    spec = system.workers["decode-0"].attempts[0].spec
    assert spec.sampling.max_tokens == 512 - len(spec.prompt_token_ids)


async def test_unknown_model(system):
    check_error(await system.complete(model="nope"), 404, code="model_not_found", param="model")
    check_error(await system.http.get("/v1/models/nope"), 404, code="model_not_found")


ROUTES = {
    "get-on-post": ("GET", "/v1/completions", 405),
    "put": ("PUT", "/v1/chat/completions", 405),
    "post-on-get": ("POST", "/v1/models", 405),
    "trace": ("TRACE", "/v1/completions", 405),
    "unknown": ("GET", "/v2", 404),
    "root": ("GET", "/", 404),
    "slash-too-many": ("POST", "/v1/completions/", 404),
    "traversal": ("GET", "/v1/../../etc/passwd", 404),
    "get-tokenize": ("GET", "/tokenize", 405),
}


@pytest.mark.parametrize("row", ROUTES, ids=ROUTES)
async def test_route(system, row):
    method, path, status = ROUTES[row]
    response = await system.http.request(method, path)
    check_error(response, status, code="method_not_allowed" if status == 405 else "not_found")
    assert ("allow" in response.headers) == (status == 405)


HEADERS = {
    "gzip": ({"content-encoding": "gzip"}, 415),
    "form": ({"content-type": "application/x-www-form-urlencoded"}, 415),
    "xml": ({"content-type": "text/xml"}, 415),
    "text": ({"content-type": "text/plain"}, 415),
    "no-type": ({"content-type": ""}, 415),
    "range": ({"range": "bytes=0-1"}, 200),
    "charset": ({"content-type": "application/json; charset=utf-8"}, 200),
    "bad-request-id": ({"x-request-id": "a b"}, 400),
    "long-request-id": ({"x-request-id": "a" * 65}, 400),
    "nonsense-traceparent": ({"traceparent": "00-zz-zz-zz"}, 200),
    "101-headers": ({f"x-{n}": "1" for n in range(101)}, 431),
}


@pytest.mark.parametrize("row", HEADERS, ids=HEADERS)
async def test_header(system, post, row):
    headers, status = HEADERS[row]
    response = await post("/v1/completions", b'{"prompt": "a"}', headers)
    if status == 200:
        assert response.status_code == 200
    else:
        check_error(response, status)


async def test_body_over_the_limit_is_refused_before_it_is_read(system):
    head = LINE + b"content-length: %d\r\n\r\n"
    answer = await raw(system, head % (8 * 1024 * 1024 + 1))
    assert answer.startswith(b"HTTP/1.1 413")
    assert b'"request_too_large"' in answer
    assert b"connection: close" in answer


async def test_body_over_the_limit_in_chunks(system):
    async def chunks():
        for _ in range(9):
            yield b"x" * (1024 * 1024)

    response = await system.http.post("/v1/completions", content=chunks(), headers={"content-type": "application/json"})
    check_error(response, 413)


async def test_body_at_the_limit_is_read(system, post):
    body = json.dumps({"prompt": "a", "x": ""}).encode()
    full = body[:-2] + b"y" * (8 * 1024 * 1024 - len(body)) + b'"}'
    assert len(full) == 8 * 1024 * 1024
    assert (await post("/v1/completions", full)).status_code == 200
    check_error(await post("/v1/completions", full + b" "), 413)


LONG_BODIES = {
    "completions": ("/v1/completions", {"prompt": "a"}),
    "chat": ("/v1/chat/completions", {"messages": OK}),
    "responses": ("/v1/responses", {"input": "a"}),
    "input-tokens": ("/v1/responses/input_tokens", {"input": "a"}),
    "tokenize": ("/tokenize", {"messages": OK}),
    "detokenize": ("/detokenize", {"tokens": [5]}),
}


@pytest.mark.parametrize("row", LONG_BODIES, ids=LONG_BODIES)
@pytest.mark.parametrize("headers", [{}, {"x-request-id": "mine"}], ids=["unnamed", "named"])
async def test_long_bodies_are_decoded_once_and_beside_the_event_loop(system, post, monkeypatch, row, headers):
    path, body = LONG_BODIES[row]
    short = json.dumps(body)
    long = short + " " * (256 * 1024 - len(short))
    decoder, threads = openai_requests._JSON, []

    def spy(text):
        threads.append(threading.get_ident())
        return decoder.decode(text)

    for text, is_here in ((long, True), (long + " ", False)):
        threads.clear()
        with monkeypatch.context() as patched:
            patched.setattr(openai_requests, "_JSON", SimpleNamespace(decode=spy))
            response = await post(path, text.encode(), headers)
        assert response.status_code == 200, response.text
        assert [thread == threading.get_ident() for thread in threads] == [is_here]
        headers = {name: "another" for name in headers}


async def test_bodies_find_no_room_beyond_their_memory(make_system, worker_type, pair_type, tokenizer):
    room = 8 * 1024 * 1024
    system = await make_system(body_memory=room)
    pair = pair_type([*tokenizer.encode("ok", add_special_tokens=False).ids, 1])
    await system.add(worker_type("decode", "decode-0", pair.decode))
    bodies = system.gateway.api._bodies
    head = LINE + b"content-length: %d\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", system.gateway.http_port)
    held = ASKED.ljust(room - 1000)
    try:
        # What is announced only takes no room.
        writer.write(head % (len(held) + 1) + held)
        await system.until(lambda: bodies.num_bytes == len(held))
        assert (await system.http.post("/v1/completions", content=ASKED.ljust(1000), headers=JSON)).status_code == 200
        refused = await system.http.post("/v1/completions", content=ASKED.ljust(1001), headers=JSON)
        check_error(refused, 503, code="server_overloaded")
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["connection"] == "close"
        writer.write(b" ")
        assert await one_answer(reader) == (200, "ok")
    finally:
        writer.close()
    assert bodies.num_bytes == 0
    assert (await system.http.post("/v1/completions", content=ASKED.ljust(room), headers=JSON)).status_code == 200


async def test_the_room_of_a_body_that_is_broken_off_is_free_again(system):
    bodies = system.gateway.api._bodies
    head = LINE + b"content-length: 100\r\n\r\n"
    _, writer = await asyncio.open_connection("127.0.0.1", system.gateway.http_port)
    writer.write(head + ASKED)
    await system.until(lambda: bodies.num_bytes == len(ASKED))
    writer.close()
    await system.until(lambda: bodies.num_bytes == 0)


SLOW = {"long and slow": (100_000, True), "long and quick": (6_000_000, False), "small and slow": (1000, False)}


@pytest.mark.parametrize("row", SLOW)
async def test_a_long_body_has_to_come_at_a_least_rate(system, monkeypatch, row):
    """A small body may take its time, since it holds little memory."""
    num_bytes, is_refused = SLOW[row]
    monkeypatch.setattr("gateway.http.exchange.BODY_LOOK_S", 0.2)
    monkeypatch.setattr("gateway.http.exchange.MIN_BODY_BYTES_PER_S", 5_000_000)
    bodies = system.gateway.api._bodies
    reader, writer = await asyncio.open_connection("127.0.0.1", system.gateway.http_port)
    try:
        writer.write(LINE + b"content-length: %d\r\n\r\n" % (num_bytes + 1) + ASKED.ljust(num_bytes))
        await system.until(lambda: bodies.num_bytes == num_bytes)
        if not is_refused:
            writer.write(b" ")
        async with asyncio.timeout(HANG_LIMIT_S):
            assert (await reader.readline()).startswith(b"HTTP/1.1 408" if is_refused else b"HTTP/1.1 200")
        assert bodies.num_bytes == 0
    finally:
        writer.close()


async def test_one_tenants_unfinished_bodies_keep_out_no_other_tenant(make_system, tmp_path):
    keys = {tenant: new_key() for tenant in ("a", "b")}
    file = tmp_path / "keys.toml"
    file.write_text("".join(f'[[key]]\nsha256 = "{digest_of_key(key)}"\ntenant = "{t}"\n' for t, key in keys.items()))
    system = await make_system(api_keys=file, body_memory=64 * 2**20)
    bodies = system.gateway.api._bodies
    held = b" " * (8 * 2**20 - 1)
    head = LINE.replace(b"/v1/completions", b"/tokenize") + b"authorization: Bearer %b\r\ncontent-length: %d\r\n\r\n"
    async with contextlib.AsyncExitStack() as stack:
        readers = []
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", system.gateway.http_port)
            stack.callback(writer.close)
            writer.write(head % (keys["b"].encode(), len(held) + 1) + held)
            readers.append(reader)
        # One of them has the tenant's share: a quarter of the memory, which is more than one body and less than two.
        heads = [asyncio.create_task(reader.readuntil(b"\r\n\r\n")) for reader in readers]
        await system.until(lambda: sum(head.done() for head in heads) == 2)
        answers = [head.result() for head in heads if head.done()]
        stack.callback(lambda: [head.cancel() for head in heads])
        await system.until(lambda: bodies.num_bytes == len(held))
        assert all(answer.startswith(b"HTTP/1.1 429 ") and b"retry-after: 1" in answer for answer in answers)
        for body in ({"prompt": "small"}, {"prompt": "x " * 100_000}):
            mine = await system.http.post("/tokenize", json=body, headers={"authorization": f"Bearer {keys['a']}"})
            assert mine.status_code == 200, mine.text
    await system.until(lambda: bodies.num_bytes == 0)


async def test_body_in_tiny_chunks(system):
    async def chunks():
        for byte in b'{"prompt": "a", "max_tokens": 5}':
            yield bytes([byte])

    response = await system.http.post("/v1/completions", content=chunks(), headers={"content-type": "application/json"})
    assert response.status_code == 200


async def test_body_that_never_comes(system, monkeypatch):
    monkeypatch.setattr("gateway.http.exchange.MAX_BODY_READ_S", 0.3)
    head = LINE + b"content-length: 10\r\n\r\n{"
    answer = await raw(system, head)
    assert answer.startswith(b"HTTP/1.1 408")
    await check_alive(system)


async def test_body_that_was_announced_and_never_comes(system, monkeypatch):
    monkeypatch.setattr("gateway.http.exchange.MAX_BODY_READ_S", 0.3)
    head = LINE + b"content-length: 10\r\nexpect: 100-continue\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", system.gateway.http_port)
    writer.write(head)
    async with asyncio.timeout(HANG_LIMIT_S):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        assert (await reader.read(4096)).startswith(b"HTTP/1.1 408")
    writer.close()
    await check_alive(system)


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-slow: "])
async def test_head_that_never_comes(system, monkeypatch, sent):
    monkeypatch.setattr("gateway.http.protocol.HEAD_TIMEOUT_S", 0.2)
    answer = await raw(system, sent)
    assert answer.startswith(b"HTTP/1.1 408") or (not sent and not answer)
    await check_alive(system)


async def test_head_of_a_second_request_that_never_comes(system, monkeypatch):
    monkeypatch.setattr("gateway.http.protocol.HEAD_TIMEOUT_S", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", system.gateway.http_port)
    writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nGET /health HT")
    async with asyncio.timeout(HANG_LIMIT_S):
        answers = await reader.read()
    assert answers.count(b"HTTP/1.1 200") == 1
    assert b"HTTP/1.1 408" in answers
    writer.close()


async def test_an_answer_is_not_broken_off_for_a_head_that_never_comes(system, monkeypatch):
    monkeypatch.setattr("gateway.http.protocol.HEAD_TIMEOUT_S", 0.1)
    decode, may_go_on = system.workers["decode-0"], asyncio.Event()
    say_ok = decode.script

    async def wait(attempt):
        await may_go_on.wait()
        await say_ok(attempt)

    decode.script = wait
    body = b'{"prompt": "a"}'
    head = LINE + b"content-length: %d\r\n\r\n" % len(body)
    reader, writer = await asyncio.open_connection("127.0.0.1", system.gateway.http_port)
    writer.write(head + body + b"GET /health HT")
    await system.until(lambda: bool(decode.attempts))
    await asyncio.sleep(0.3)  # the time that is measured, several times over
    may_go_on.set()
    async with asyncio.timeout(HANG_LIMIT_S):
        answers = await reader.read()
    assert answers.startswith(b"HTTP/1.1 200")
    assert answers.count(b"HTTP/1.1 408") == 1
    writer.close()


RAW_HTTP = {
    "connect": (b"CONNECT x:443 HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "garbage": (b"\x16\x03\x01 what\r\n\r\n", 400),
    "endless-header": (b"GET / HTTP/1.1\r\nx: " + b"a" * 100_000, 431),
    "long-url": (
        b"POST /v1/completions?" + b"a" * 9000 + b" HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n",
        414,
    ),
    "endless-url": (b"GET /" + b"a" * 100_000, 431),
    "both-lengths": (
        b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "two-lengths": (
        b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcde",
        400,
    ),
    "negative-length": (b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: -5\r\n\r\n", 400),
    "bad-chunk": (b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
    "bad-chunk-end": (
        b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1\r\nabc0\r\n\r\n",
        400,
    ),
    "two-codings": (b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n", 400),
    "cr-in-header": (b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-request-id: a\rb\r\n\r\n", 400),
}


@pytest.mark.parametrize("row", RAW_HTTP, ids=RAW_HTTP)
async def test_raw_http(system, row):
    sent, status = RAW_HTTP[row]
    answer = await raw(system, sent, at_most=-1)
    head = answer.partition(b"\r\n\r\n")[0]
    assert head.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert b"\r\nconnection: close" in head
    assert answer.count(b"HTTP/1.1 ") == 1
    await check_alive(system)


ASKED = b'{"prompt": "a"}'
WISHES = {
    "h2c": b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEA\r\n",
    "websocket": b"Upgrade: websocket\r\nConnection: upgrade\r\nSec-WebSocket-Key: x\r\n",
    "two": b"upgrade: h2c\r\nupgrade: a/1, b/2\r\nconnection: keep-alive, upgrade\r\n",
}
WITH_BODY = {
    "length": b"content-length: %d\r\n\r\n%b" % (len(ASKED), ASKED),
    "chunks": b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(ASKED), ASKED),
}


@pytest.mark.parametrize("wish", WISHES)
async def test_a_wish_for_another_protocol_is_passed_over(system, monkeypatch, wish):
    """RFC 9110, 7.8; Java's own client wishes for HTTP/2 with every request."""
    whole, taken = http_protocol.HttpProtocol.data_received, bytearray()

    def in_pieces_of(num_bytes):
        def data_received(protocol, data):
            for start in range(0, len(data), num_bytes):
                whole(protocol, data[start : start + num_bytes])
            taken.extend(data)

        return data_received

    for num_bytes in (1, 13, 1 << 16):
        monkeypatch.setattr(http_protocol.HttpProtocol, "data_received", in_pieces_of(num_bytes))
        for body in WITH_BODY.values():
            request = LINE + WISHES[wish] + body
            await check_wish_is_passed_over(system, request, taken)


async def check_wish_is_passed_over(system, request, taken):
    head = request[: request.index(b"\r\n\r\n") + 4]
    reader, writer = await asyncio.open_connection("127.0.0.1", system.gateway.http_port)
    try:
        writer.write(request)
        assert await one_answer(reader) == (200, "ok")
        writer.write(request * 3)
        assert [await one_answer(reader) for _ in range(3)] == [(200, "ok")] * 3
        taken.clear()
        writer.write(head)
        await system.until(lambda: taken == head)
        writer.write(request.removeprefix(head))
        assert await one_answer(reader) == (200, "ok")
        writer.write(re.sub(b"(?i)(connection: )", rb"\1close, ", request))
        assert await one_answer(reader) == (200, "ok")
        assert await reader.read() == b""
    finally:
        writer.close()


async def one_answer(reader) -> tuple[int, str]:
    """Status and text of the next answer of a connection."""
    async with asyncio.timeout(HANG_LIMIT_S):
        head = await reader.readuntil(b"\r\n\r\n")
        found = re.search(rb"content-length: (\d+)", head)
        answer = json.loads(await reader.readexactly(int(found[1])))
    return int(head.split()[1]), answer["choices"][0]["text"]


async def raw(system, sent: bytes, at_most: int = 4096) -> bytes:
    """What the HTTP port says to this; all that it says before it closes the connection, if `at_most` is -1."""
    reader, writer = await asyncio.open_connection("127.0.0.1", system.gateway.http_port)
    try:
        writer.write(sent)
        async with asyncio.timeout(HANG_LIMIT_S):
            return await reader.read(at_most)
    finally:
        writer.close()


async def test_half_closed_connection_counts_as_left(system, worker_type):
    decode = system.workers["decode-0"]

    async def hold(attempt):
        attempt.emit(worker_pb2.Admitted())

    decode.script = hold
    body = b'{"prompt": "a"}'
    head = LINE + b"content-length: %d\r\n\r\n" % len(body)
    with socket.create_connection(("127.0.0.1", system.gateway.http_port)) as connection:
        connection.sendall(head + body)
        await system.until(lambda: bool(decode.attempts))
        connection.shutdown(socket.SHUT_WR)
        await system.until(lambda: bool(decode.cancelled))


GRPC = {
    "no-prompt": ({}, "prompt"),
    "empty-ids": ({"token_ids": {}}, "token_ids"),
    "id-outside": ({"token_ids": {"ids": [10**6]}}, "token_ids"),
    "request-id": ({"text": "a", "request_id": "a b"}, "request_id"),
    "tenant": ({"text": "a", "tenant": "a\nb"}, "tenant"),
    "priority": ({"text": "a", "priority": 101}, "priority"),
    "service-class": ({"text": "a", "service_class": "urgent"}, "service_class"),
    "cache-salt": ({"text": "a", "cache_salt": "s" * 65}, "cache_salt"),
    "text-8mb": ({"text": "a" * 8_000_000}, "text"),
    "schema-no-json": ({"text": "a", "response_format": {"json_schema": "{"}}, "response_format"),
    "schema-regex": ({"text": "a", "response_format": {"json_schema": '{"pattern": "(?=a)b"}'}}, "response_format"),
    "context": ({"token_ids": {"ids": [5] * 512}}, "token_ids"),
    **{
        f"{name}={value}": ({"text": "a", "sampling": {name: value}}, f"sampling.{name}")
        for name, values in {
            "temperature": [NAN, INF, -1.0, 2.01, 1e30],
            "top_p": [NAN, 0.0, 1.5],
            "top_k": [-2],
            "min_p": [NAN, -0.5, 1.5],
            "presence_penalty": [NAN, 3.0],
            "frequency_penalty": [INF],
            "repetition_penalty": [NAN, 0.0, -1.0, 11.0],
            "max_tokens": [0, 2**31, 2**32 - 1],
            "min_tokens": [2**31],
            "stop": [[""], ["x" * 257], ["a"] * 17],
            "stop_token_ids": [[10**6]],
            "logprobs": [21],
            "logit_bias": [{1: NAN}, {1: 101.0}, {10**6: 1.0}],
        }.items()
        for value in values
    },
}


@pytest.mark.parametrize("row", GRPC, ids=[row[:40] for row in GRPC])
async def test_bad_grpc_request(system, row):
    fields, named = GRPC[row]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GenerateUnary(inference_pb2.GenerateRequest(**fields), timeout=HANG_LIMIT_S)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        error = rpc.error_from_rpc(refused.value)
        assert isinstance(error, InvalidRequest)
        assert error.field == named
        assert named in refused.value.details() or row == "context"
        assert (await stub.GenerateUnary(inference_pb2.GenerateRequest(text="a"), timeout=HANG_LIMIT_S)).text == "ok"


ODD_OVER_GRPC = {
    "nul": {"text": "a\x00\x1b[31mb"},
    "zalgo": {"text": GOOD["zalgo"]["prompt"]},
    "image-link": {"text": GOOD["image-link"]["prompt"]},
    "special-token": {"text": "<|end|><|system|>"},
    "tiny-temperature": {"text": "a", "sampling": {"temperature": 1e-45}},
    "largest-seed": {"text": "a", "sampling": {"seed": 2**63 - 1}},
    "top_k-beyond-vocabulary": {"text": "a", "sampling": {"top_k": 2**31 - 1}},
    "context-to-the-last-token": {"token_ids": {"ids": [5] * 511}, "sampling": {"max_tokens": 1}},
}


@pytest.mark.parametrize("row", ODD_OVER_GRPC, ids=ODD_OVER_GRPC)
async def test_odd_but_good_over_grpc(system, row):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        answer = await inference_pb2_grpc.InferenceStub(channel).GenerateUnary(
            inference_pb2.GenerateRequest(**ODD_OVER_GRPC[row]), timeout=HANG_LIMIT_S
        )
    assert answer.usage.completion_tokens > 0


TOO_LARGE = inference_pb2.GenerateRequest(text="a" * (17 * 1024 * 1024))
FULL, UNSERVED = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNIMPLEMENTED
GRPC_TOO_LARGE = {
    "message": ({}, TOO_LARGE, (), FULL),
    "gzip-bomb": ({"compression": grpc.Compression.Gzip}, TOO_LARGE, (), UNSERVED),
    "metadata": ({}, inference_pb2.GenerateRequest(text="a"), (("x-large", "a" * 20_000),), FULL),
}


@pytest.mark.parametrize("row", GRPC_TOO_LARGE, ids=GRPC_TOO_LARGE)
async def test_too_large_over_grpc(system, row):
    options, request, metadata, code = GRPC_TOO_LARGE[row]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}", **options) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GenerateUnary(request, metadata=metadata, timeout=HANG_LIMIT_S)
        assert refused.value.code() is code
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        assert (await stub.GenerateUnary(inference_pb2.GenerateRequest(text="a"), timeout=HANG_LIMIT_S)).text == "ok"


async def test_no_decode_worker_is_told_at_once_over_grpc(make_system):
    system = await make_system()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await inference_pb2_grpc.InferenceStub(channel).GenerateUnary(
                inference_pb2.GenerateRequest(text="a"), timeout=HANG_LIMIT_S
            )
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert refused.value.details() == "no decode worker is ready"


async def test_a_body_of_tiny_chunks_costs_its_bytes(system, monkeypatch):
    """What a chunk costs is gone with the next one (CVE-2025-23310), and its bytes count as those of any body."""
    num_chunks = 50_000
    monkeypatch.setattr("gateway.http.exchange.MAX_BODY_BYTES", num_chunks)
    reader, writer = await asyncio.open_connection("127.0.0.1", system.gateway.http_port)
    writer.write(LINE + b"transfer-encoding: chunked\r\n\r\n")
    tracemalloc.start()
    try:
        for _ in range(num_chunks // 100):
            writer.write(b"1\r\n \r\n" * 100)
            await writer.drain()
        most_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most_bytes < 20 * num_chunks
    writer.write(b"1\r\n \r\n0\r\n\r\n")
    async with asyncio.timeout(HANG_LIMIT_S):
        assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
    writer.close()
    await check_alive(system)


# Frames of HTTP/2, as RFC 9113 has them: length, type, flags, stream; a reset is type 3, settings 4, ping 6, goaway 7.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEAD, RESET, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS = 1, 4


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def call_head(**more: str) -> bytes:
    """The head of a call of GenerateUnary, uncompressed."""

    def literal(name: str, value: str) -> bytes:
        return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()

    path = "/tandem.v1.Inference/GenerateUnary"
    return (
        b"\x83\x86"
        + literal(":path", path)
        + literal(":authority", "x")
        + literal("content-type", "application/grpc")
        + literal("te", "trailers")
        + b"".join(literal(name.replace("_", "-"), value) for name, value in more.items())
    )


LAST_PING = b"the last"


def whole_call(stream: int, head: bytes) -> bytes:
    """A call with its message, on this stream."""
    message = inference_pb2.GenerateRequest(text="a").SerializeToString()
    data = b"\x00" + len(message).to_bytes(4, "big") + message
    return frame(HEAD, head, flags=END_HEADERS, stream=stream) + frame(DATA, data, flags=END_STREAM, stream=stream)


async def flooded(port, frames: bytes, *, until=(PING, LAST_PING), times: int = 1) -> bytes:
    """What the gRPC port says to these frames and a ping, until it ends or has said `until` `times` times."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    said = bytearray()
    try:
        writer.write(PREFACE + frame(SETTINGS) + frames + frame(PING, LAST_PING))
        async with asyncio.timeout(HANG_LIMIT_S):
            while kinds_in(said).count(until) < times and (part := await reader.read(65536)):
                said += part
    except ConnectionResetError:
        pass
    finally:
        writer.close()
    return bytes(said)


def kinds_in(said: bytes) -> list[tuple[int, bytes]]:
    """(type, payload) of each whole frame."""
    found, at = [], 0
    while at + 9 <= len(said):
        size = int.from_bytes(said[at : at + 3], "big")
        found.append((said[at + 3], said[at + 9 : at + 9 + size]))
        at += 9 + size
    return found


async def test_a_flood_of_pings_ends_the_connection(system):
    said = await flooded(system.gateway.grpc_port, frame(PING, b"12345678") * 10_000)
    goaways = [payload for kind, payload in kinds_in(said) if kind == GOAWAY]
    assert any(b"too_many_pings" in payload for payload in goaways)
    await check_alive(system)


async def check_nothing_is_left(system):
    requests = system.gateway.requests
    await system.until(lambda: (requests.num_running, requests.num_queued) == (0, 0))
    await system.until(
        lambda: not any(member.session.num_open_attempts for member in system.gateway.topology.members())
    )
    await check_alive(system)


async def test_streams_that_are_reset_at_once_leave_nothing(system):
    """Whole calls, each taken back in the next frame (CVE-2023-44487)."""
    calls = [
        whole_call(number, call_head()) + frame(RESET, (8).to_bytes(4, "big"), stream=number)
        for number in range(1, 4000, 2)
    ]
    await flooded(system.gateway.grpc_port, b"".join(calls))
    await check_nothing_is_left(system)


async def test_streams_that_are_reset_while_they_run_leave_nothing(make_system, worker_type):
    async def hold(attempt):
        attempt.emit(worker_pb2.Admitted())
        await asyncio.Event().wait()

    system = await make_system()
    worker = await system.add(worker_type("decode", "decode-0", hold))
    _, writer = await asyncio.open_connection("127.0.0.1", system.gateway.grpc_port)
    writer.write(PREFACE + frame(SETTINGS))
    try:
        for number in range(0, 100, 20):
            streams = range(2 * number + 1, 2 * number + 41, 2)
            writer.write(b"".join(whole_call(stream, call_head()) for stream in streams))
            await system.until(lambda number=number: len(worker.attempts) == number + 20)
            writer.write(b"".join(frame(RESET, (8).to_bytes(4, "big"), stream=stream) for stream in streams))
            await system.until(lambda number=number: len(worker.cancelled) == number + 20)
    finally:
        writer.close()
    requests = system.gateway.requests
    await system.until(lambda: (requests.num_running, requests.num_queued) == (0, 0))


async def test_a_flood_of_settings_is_answered_or_ended(system):
    await flood_with_settings(system.gateway.grpc_port)
    await check_alive(system)


async def flood_with_settings(port):
    """Sends 10,000 settings; returns when each is acknowledged, or the connection ends."""
    await flooded(port, frame(SETTINGS) * 10_000, until=(SETTINGS, b""), times=10_000)


def repeated_header() -> bytes:
    """A value of 4,000 bytes that is kept in the table of headers and named 8,000 times: 32 MB in 12 KB."""
    return b"\x40\x01x\x7f\xa1\x1e" + b"v" * 4000 + b"\xbe" * 8000


HEADER_TRICKS = {
    "table larger than allowed": b"\x3f\xe1\xff\xff\x03",
    "number of endless zeros": b"\x3f" + b"\x80" * 10_000 + b"\x01",
    "place that does not exist": b"\xff\xff\xff\xff\x0f",
    "value named again and again": repeated_header(),
}


@pytest.mark.parametrize("name", HEADER_TRICKS)
async def test_tricks_with_the_table_of_headers_are_refused(system, name):
    """HPACK's (RFC 7541), such as those of CVE-2023-33953."""
    said = await flooded(system.gateway.grpc_port, whole_call(1, call_head() + HEADER_TRICKS[name]))
    assert b"grpc-status\x010" not in said
    assert system.workers["decode-0"].attempts == []
    await check_alive(system)


async def test_floods_and_tricks_take_no_memory(model_folder, redis_url, cluster_name):
    """Asked of a gateway in a process of its own: in this one, whatever else it does would be counted too."""
    arguments = ["--model", str(model_folder), "--redis", redis_url, "--cluster", cluster_name, "--drain-s", "1"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", *arguments, "--http-port", "0", "--grpc-port", "0"),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(HANG_LIMIT_S):
            port = json.loads(await process.stderr.readline())["grpc_port"]
        # The first connection pays for what the server keeps for all.
        await flooded(port, whole_call(1, call_head()))
        before_bytes = peak_bytes(process.pid, is_reset=True)
        await flood_with_settings(port)
        for trick in HEADER_TRICKS.values():
            await flooded(port, whole_call(1, call_head() + trick))
        assert peak_bytes(process.pid) - before_bytes < 16 << 20
    finally:
        process.terminate()
        await process.communicate()


def peak_bytes(pid: int, *, is_reset: bool = False) -> int:
    """The most memory that a process has had since the last reset; `is_reset` sets it to the present use first."""
    if is_reset:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


async def test_streams_that_the_server_must_reset_leave_nothing(system):
    """Each is broken by its client so that we reset it, which no count of the client's resets sees (CVE-2025-8671)."""
    calls = [
        whole_call(number, call_head()) + frame(WINDOW_UPDATE, bytes(4), stream=number) for number in range(1, 4000, 2)
    ]
    await flooded(system.gateway.grpc_port, b"".join(calls))
    await check_nothing_is_left(system)


async def said_to(system, head: bytes) -> bytes:
    """What the gRPC port says to one call on a connection of its own, up to the call's end."""
    message = inference_pb2.GenerateRequest(text="a").SerializeToString()
    call = frame(HEAD, head, flags=END_HEADERS, stream=1)
    call += frame(DATA, b"\x01" + len(message).to_bytes(4, "big") + message, flags=END_STREAM, stream=1)
    reader, writer = await asyncio.open_connection("127.0.0.1", system.gateway.grpc_port)
    said = b""
    try:
        writer.write(PREFACE + frame(SETTINGS) + call)
        async with asyncio.timeout(HANG_LIMIT_S):
            while not any(kind in (HEAD, RESET, GOAWAY) for kind, _ in kinds_in(said)):
                said += await reader.read(65536)
    finally:
        writer.close()
    return said


async def test_an_unknown_compression_ends_the_call_only(system):
    said = await said_to(system, call_head(grpc_encoding="zzz"))
    (answer,) = [payload for kind, payload in kinds_in(said) if kind == HEAD]
    # A text of two characters: the library itself says INTERNAL, before any code of ours.
    assert b"grpc-status\x0213" in answer
    assert GOAWAY not in [kind for kind, _ in kinds_in(said)]
    await check_alive(system)


async def test_bad_base64_in_binary_metadata_ends_the_call_only(system):
    said = await said_to(system, call_head(x_odd_bin="!!not base64!!"))
    assert GOAWAY not in [kind for kind, _ in kinds_in(said)]
    assert system.workers["decode-0"].attempts == []
    await check_alive(system)


async def test_broken_protobuf_and_unknown_model_over_grpc(system):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        for data in (b"\xff\xff\xff", b"\x1a\x02\xff\xfe", b"\x0a\xff\xff\xff\xff\x0f", b"\xfb\x07" * 10_000):
            call = channel.unary_unary("/tandem.v1.Inference/GenerateUnary")
            with pytest.raises(grpc.aio.AioRpcError) as broken:
                await call(data, timeout=HANG_LIMIT_S)
            assert broken.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        stub = inference_pb2_grpc.InferenceStub(channel)
        for request in (
            stub.GenerateUnary(inference_pb2.GenerateRequest(text="a", model="nope"), timeout=HANG_LIMIT_S),
            stub.Tokenize(inference_pb2.TokenizeRequest(text="a", model="nope"), timeout=HANG_LIMIT_S),
            stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[1], model="nope"), timeout=HANG_LIMIT_S),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await request
            assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.aio.AioRpcError) as outside:
            await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[10**6]), timeout=HANG_LIMIT_S)
        assert outside.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError) as unimplemented:
            await channel.unary_unary("/tandem.v1.Inference/Nothing")(b"", timeout=HANG_LIMIT_S)
        assert unimplemented.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await check_alive(system)


async def test_fault_of_our_own_shows_no_internals(system, monkeypatch, caplog):
    def explode(*arguments):
        raise RuntimeError("secret detail /etc/x")

    monkeypatch.setattr(system.gateway.requests, "accept", explode)
    response = await system.complete()
    check_error(response, 500)
    assert "secret" not in response.text
    assert "secret detail" in caplog.text
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await inference_pb2_grpc.InferenceStub(channel).GenerateUnary(
                inference_pb2.GenerateRequest(text="a"), timeout=HANG_LIMIT_S
            )
    assert (failed.value.code(), failed.value.details()) == (grpc.StatusCode.INTERNAL, "internal error")
    monkeypatch.undo()
    await check_alive(system)
