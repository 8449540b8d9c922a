"""From a body and headers to a call: which of two values counts, and what makes a name."""

import json

import pytest

from gateway.edge.http_calls import ask_of, read_call, unknown_to_template
from gateway.http.bodies import Bodies
from gateway.http.connections import in_process_scope
from gateway.http.exchange import Exchange
from gateway.limits import MAX_BODY_BYTES
from gateway.openai.completions import CompletionRequest, CompletionWriter
from services.runtime.errors import InvalidRequest, NotFound


def exchange_of(body, **headers):
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = in_process_scope("POST", "/v1/completions", [(b"content-type", b"application/json"), *named])

    async def receive():
        return {"type": "http.request", "body": json.dumps({"prompt": "a", **body}).encode(), "more_body": False}

    return Exchange(scope, receive, None)


async def read(body=None, **headers):
    exchange, bodies = exchange_of(body or {}, **headers), Bodies(2 * MAX_BODY_BYTES)
    with bodies.claim() as claim:
        return exchange, await read_call(exchange, bodies, claim, CompletionRequest, CompletionWriter)


async def call_of(body=None, **headers):
    return (await read(body, **headers))[1].call


async def asked(body=None, **headers):
    exchange, found = await read(body, **headers)
    return ask_of(exchange, found, CompletionWriter)


async def test_headers_say_what_a_body_cannot():
    call = await call_of(
        x_service_class=" Batch ",
        x_session_id="s",
        x_allow_fallback="true",
        x_request_timeout_ms="5000",
        x_tandem_prefill="local",
        traceparent="00-a",
        tracestate="b=c",
    )
    assert (call.service_class, call.affinity_key, call.allow_fallback) == ("batch", "s", True)
    assert (call.traceparent, call.tracestate, call.wishes.prefill) == ("00-a", "b=c", "local")
    assert 4.0 < call.deadline.remaining_s() <= 5.0


async def test_a_body_counts_before_a_header_and_may_not_contradict_it():
    assert (await call_of({"allow_fallback": False}, x_allow_fallback="true")).allow_fallback is False
    assert (await call_of({"service_class": "batch"}, x_service_class="batch")).service_class == "batch"
    for body, headers, field in (
        ({"service_class": "batch"}, {"x_service_class": "interactive"}, "service_class"),
        ({"request_timeout_ms": 1000}, {"x_request_timeout_ms": "2000"}, "request_timeout_ms"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            await call_of(body, **headers)
        assert refused.value.field == field
    call = await call_of({"request_timeout_ms": 1000}, x_request_timeout_ms="1000")
    assert 0.5 < call.deadline.remaining_s() <= 1.0


async def test_only_a_request_with_a_name_has_a_digest():
    assert (await read())[1].digest == ""
    first, second = [(await read(idempotency_key="k"))[1].digest for _ in range(2)]
    assert first == second != ""
    assert (await read({"max_tokens": 2}, idempotency_key="k"))[1].digest != first


async def test_a_key_an_id_or_an_event_makes_a_name():
    assert await asked() is None
    assert (await asked(x_request_id="mine")).request_id == "mine"
    keyed = await asked(idempotency_key="k")
    assert keyed.call.idempotency_key == "k"
    resumed = await asked({"stream": True}, x_request_id="mine", last_event_id="mine/3")
    assert resumed.positions_in(1)[0].num_tokens == 3
    with pytest.raises(InvalidRequest) as refused:
        await asked(x_request_id="mine", last_event_id="mine/3")
    assert refused.value.field == "Last-Event-ID"


async def test_what_a_template_does_not_read_is_told_by_the_members_name():
    class Catalog:
        def resolve(self, name):
            if name == "none":
                raise NotFound("no such model")
            tokenizer = type("Tokenizer", (), {"template_names": frozenset({"enable_thinking"})})
            return type("Model", (), {"tokenizer": tokenizer})

    call = await call_of()
    assert unknown_to_template(call, Catalog()) == []
    call.template_fields = {"enable_thinking": "enable_thinking", "reasoning_effort": "reasoning_effort"}
    assert unknown_to_template(call, Catalog()) == ["reasoning_effort"]
    call.model = "none"
    assert unknown_to_template(call, Catalog()) == []
