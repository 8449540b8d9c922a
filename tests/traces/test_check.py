"""The checker finds each thing that may be wrong with a trace, and nothing in one that is right."""

from dataclasses import replace

import pytest

from tests.traces.check import CLOCK_NS, ERROR, SERVER, Received, problems

GATEWAY = dict.fromkeys(
    ("service.name", "service.namespace", "service.instance.id", "service.version", "host.name"), "g"
)
WORKER = {**GATEWAY, "service.name": "w"}
SAID = {
    "gen_ai.operation.name": "chat",
    "gen_ai.request.model": "m",
    "gen_ai.response.model": "m",
    "gen_ai.response.id": "r",
    "gen_ai.response.finish_reasons": ["stop"],
    "gen_ai.usage.input_tokens": 3,
    "gen_ai.usage.output_tokens": 4,
    "http.request.method": "POST",
    "http.route": "/v1/chat/completions",
    "http.response.status_code": 200,
}
MS = 1_000_000
ROOT = Received("chat m", "t", "1", "c", 0, 100 * MS, SERVER, 0, SAID, GATEWAY)
QUEUE = Received("queue", "t", "2", "1", 0, 40 * MS, 1, 0, {}, GATEWAY)
DECODE = Received("decode", "t", "3", "1", 40 * MS, 100 * MS, 1, 0, {}, GATEWAY)
STEPS = Received("decode.steps", "t", "4", "3", 41 * MS, 99 * MS, 1, 0, {}, WORKER)
REFUSED = {"http.response.status_code": 400, "error.type": "InvalidRequest"}


def found(*spans: Received) -> list[str]:
    return list(problems(spans, client_spans={"t": "c"}))


def test_a_right_trace_has_no_problems() -> None:
    assert found(ROOT, QUEUE, DECODE, STEPS) == []
    slewed = replace(STEPS, start_ns=40 * MS - CLOCK_NS, end_ns=100 * MS + CLOCK_NS)
    assert found(ROOT, QUEUE, DECODE, slewed) == []
    refused = replace(ROOT, name="chat", said={"gen_ai.operation.name": "chat", **REFUSED} | {
        name: SAID[name] for name in ("http.request.method", "http.route")
    })  # fmt: skip
    assert found(refused) == []


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        ([QUEUE, DECODE], "0 roots"),
        ([ROOT, replace(ROOT, span_id="9")], "2 roots"),
        ([ROOT, QUEUE, replace(DECODE, span_id="2")], "two spans have one id"),
        ([ROOT, QUEUE, DECODE, replace(STEPS, parent_id="7")], "decode.steps is an orphan"),
        ([ROOT, replace(QUEUE, start_ns=-1), DECODE], "queue is not within chat m"),
        ([ROOT, QUEUE, replace(DECODE, end_ns=101 * MS)], "decode is not within chat m"),
        ([ROOT, QUEUE, replace(DECODE, start_ns=41 * MS)], "+1.000 ms between queue and decode"),
        ([ROOT, QUEUE, DECODE, replace(STEPS, end_ns=103 * MS)], "decode.steps is not within decode: begins +1.000 ms"),
        ([ROOT, QUEUE, DECODE, replace(STEPS, start_ns=38 * MS)], "decode.steps is not within decode: begins -2.000"),
        ([ROOT, replace(QUEUE, start_ns=1), DECODE], "does not begin with the request"),
        ([replace(ROOT, end_ns=-1)], "ends before it begins"),
        ([ROOT, replace(QUEUE, kind=SERVER), DECODE], "kind SERVER and not a root"),
        ([replace(ROOT, kind=1)], "of the kind 1"),
        ([replace(ROOT, name="request")], "is called 'request'"),
        ([replace(ROOT, said=SAID | REFUSED, status=ERROR)], "status 2 with the HTTP status 400"),
        ([replace(ROOT, said={**SAID, "http.response.status_code": 503, "error.type": "x"})], "status 0 with the HTTP"),
        ([replace(ROOT, said={**SAID, "http.response.status_code": 400})], "error.type None"),
        ([replace(ROOT, said={**SAID, "gen_ai.response.finish_reasons": ["cancelled"]})], "['cancelled']"),
        ([replace(ROOT, said={**SAID, "gen_ai.response.id": ""})], "no gen_ai.response.id"),
        ([replace(ROOT, said={**SAID, "http.route": ""})], "no http.request.method or http.route"),
        ([replace(ROOT, resource={**GATEWAY, "host.name": ""})], "does not say host.name"),
    ],
)
def test_what_is_wrong_is_found(spans: list[Received], said: str) -> None:
    assert [problem for problem in found(*spans) if said in problem]
