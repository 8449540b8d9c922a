"""One line for each request, whatever becomes of it; its phases sum up to its time; nothing of a prompt in any line."""

import asyncio
import io
import json
import logging

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.observability.history import Query, Row
from gateway.observability.metrics import Metrics
from gateway.observability.request_log import REFUSED_BURST, AnswerTrace, OpenCall, RequestLog, in_words, outcome_of
from protos import inference_pb2, inference_pb2_grpc, worker_pb2
from services.runtime import rpc
from services.runtime.errors import (
    InternalError,
    InvalidRequest,
    Overloaded,
    RateLimited,
    RequestCancelled,
    TransferFailed,
    WorkerUnavailable,
)
from services.runtime.logs import JsonFormatter, LineBudget

ANSWER_TEXT = "hello world, naïve café end"
MARKER = "zebrafinch"
PHASES = ("queue", "prefill", "transfer", "decode")


@pytest.fixture
def answer(tokenizer):
    return [*tokenizer.encode(ANSWER_TEXT, add_special_tokens=False).ids, 1]


@pytest.fixture
def pair(pair_type, answer):
    return pair_type(answer)


@pytest.fixture
def output():
    """All that this process logs, as it would be written."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter({"service": "gateway"}))
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel("DEBUG")
    yield stream
    root.removeHandler(handler)
    root.setLevel(level)


def entries(output, message):
    logged = [json.loads(line) for line in output.getvalue().splitlines()]
    return [entry for entry in logged if entry["message"] == message]


async def the_line(system, output):
    """The only line of a request, once it has been written."""
    await system.until(lambda: entries(output, "request"))
    (line,) = entries(output, "request")
    assert sum(line[f"{phase}_ms"] for phase in PHASES) == pytest.approx(line["total_ms"], abs=1e-6)
    assert all(line[f"{phase}_ms"] >= 0 for phase in PHASES)
    return line


async def test_an_answer_has_its_line(make_system, pair, answer, output):
    system = await make_system()
    await system.add_pair(pair)
    headers = {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01", "x-service-class": "interactive"}
    body = {"prompt": [5, 6, 7], "max_tokens": 100}
    reply = await system.http.post("/v1/completions", json=body, headers=headers)
    line = await the_line(system, output)
    assert line["request_id"] == reply.headers["x-request-id"]
    assert line["trace_id"] == "a" * 32
    assert (line["model"], line["service_class"], line["tenant"]) == ("tiny", "interactive", "")
    assert (line["outcome"], line["code"], line["finish_reason"]) == ("finished", "", "stop")
    assert (line["answers"], line["prompt_tokens"], line["cached_tokens"]) == (1, 3, 0)
    assert line["generated_tokens"] == reply.json()["usage"]["completion_tokens"]
    assert (line["attempts"], line["workers"]) == (1, ["prefill-0", "decode-0"])
    assert line["decode_ms"] > 0


@pytest.mark.parametrize(
    ("trusted", "client"), [("127.0.0.1", "198.51.100.7"), ("10.0.0.0/8", "127.0.0.1"), (None, None)]
)
async def test_the_client_has_an_address_where_proxies_are_named(make_system, pair, output, trusted, client):
    system = await make_system(trusted_proxies=trusted)
    await system.add_pair(pair)
    headers = {"x-forwarded-for": "203.0.113.9, 198.51.100.7"}
    await system.http.post("/v1/completions", json={"prompt": [5], "max_tokens": 1}, headers=headers)
    assert (await the_line(system, output)).get("client") == client


async def test_several_answers_are_one_request(make_system, pair, output):
    system = await make_system()
    await system.add_pair(pair)
    reply = (await system.complete(max_tokens=100, n=3)).json()
    line = await the_line(system, output)
    assert (line["answers"], line["prompt_tokens"], line["attempts"]) == (3, 9, 3)
    assert line["generated_tokens"] == reply["usage"]["completion_tokens"]


async def test_a_failover_is_one_request(make_system, worker_type, pair, output):
    async def break_off(attempt):
        attempt.emit(worker_pb2.Admitted())
        await pair.event(attempt).wait()
        attempt.emit(worker_pb2.DecodeStarted())
        attempt.tokens(1, pair.answer[1:4])
        attempt.fail(InternalError("broken"))

    system = await make_system(routing="least_loaded")
    busy = worker_type("decode", "decode-1", pair.decode)
    busy.load.waiting_tokens = busy.load.running = 5  # so that the other one is asked first
    await system.add(worker_type("prefill", "prefill-0", pair.prefill))
    await system.add(worker_type("decode", "decode-0", break_off))
    await system.add(busy)
    reply = await system.complete(max_tokens=100, return_token_ids=True)
    assert reply.json()["choices"][0]["token_ids"] == pair.answer
    line = await the_line(system, output)
    assert (line["outcome"], line["attempts"]) == ("finished", 2)
    assert line["workers"] == ["prefill-0", "decode-0", "decode-1"]
    text = (await system.http.get("/metrics")).text
    assert 'tandem_retries_total{reason="internal_error"} 1.0' in text
    assert 'tandem_failovers_total{model="tiny"} 1.0' in text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_has_its_line(make_system, worker_type, pair, output, stream):
    """A failure that a client is told in the middle of its answer has one too."""

    async def fail(attempt):
        attempt.emit(worker_pb2.Admitted())
        await pair.event(attempt).wait()
        attempt.emit(worker_pb2.DecodeStarted())
        # The first token comes on another connection.
        await system.until(lambda: system.gateway.metrics.generated_tokens.labels("tiny").value > 0)
        attempt.fail(TransferFailed("broken"))

    system = await make_system(max_attempts=1)
    await system.add(worker_type("prefill", "prefill-0", pair.prefill))
    await system.add(worker_type("decode", "decode-0", fail))
    await system.complete(max_tokens=100, stream=stream)
    line = await the_line(system, output)
    assert (line["outcome"], line["code"], line["attempts"]) == ("failed", "transfer_failed", 1)
    assert line["generated_tokens"] == 1


async def test_a_client_that_leaves_has_its_line(make_system, worker_type, pair, output):
    async def begin(attempt):
        attempt.emit(worker_pb2.Admitted())
        await pair.event(attempt).wait()
        attempt.emit(worker_pb2.DecodeStarted())

    system = await make_system()
    await system.add(worker_type("prefill", "prefill-0", pair.prefill))
    await system.add(worker_type("decode", "decode-0", begin))
    async with system.http.stream(
        "POST", "/v1/completions", json={"prompt": [5, 6, 7], "stream": True, "max_tokens": 100}
    ) as reply:
        await anext(reply.aiter_lines())
    line = await the_line(system, output)
    assert (line["outcome"], line["code"], line["finish_reason"]) == ("cancelled", "cancelled", "")
    assert (line["generated_tokens"], line["workers"]) == (1, ["prefill-0", "decode-0"])


async def test_a_refusal_has_its_line(make_system, pair, output):
    system = await make_system()
    reply = await system.complete(max_tokens=100)
    assert reply.status_code == 503
    line = await the_line(system, output)
    assert (line["outcome"], line["code"], line["attempts"]) == ("refused", "worker_unavailable", 0)
    assert line["queue_ms"] == line["total_ms"]
    assert line["workers"] == []


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ("{", 400, "invalid_json"),
        ('{"prompt": [5], "model": 7}', 400, "invalid_type"),
        (
            '{"prompt": [5], "no_such_field": {}}',
            503,
            "worker_unavailable",
        ),  # The request is understood, and refused because the model has no worker.
    ],
)
async def test_what_is_not_understood_has_its_line(make_system, output, body, status, code):
    system = await make_system()
    reply = await system.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    line = await the_line(system, output)
    assert (reply.status_code, line["outcome"], line["code"]) == (status, "refused", code)


async def test_each_call_that_a_leaving_gateway_refuses_counts(make_system, output):
    system = await make_system()
    leaving = Overloaded("the gateway is leaving", retry_after_s=1.0)
    system.gateway.requests.refuse_new(leaving)
    for _ in range(3):
        refused = await system.complete()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    await system.until(lambda: len(entries(output, "request")) == 3)
    assert leaving.__traceback__ is None


@pytest.mark.parametrize("method", ["Resume", "Tokenize", "Detokenize"])
async def test_each_method_of_grpc_that_refuses_has_its_line(make_system, output, method):
    system = await make_system()
    request_type, code = {
        "Resume": (inference_pb2.ResumeRequest, "invalid_value"),
        "Tokenize": (inference_pb2.TokenizeRequest, "model_not_found"),
        "Detokenize": (inference_pb2.DetokenizeRequest, "model_not_found"),
    }[method]
    request = request_type() if method == "Resume" else request_type(model="no-such-model")
    async with rpc.make_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        call = getattr(inference_pb2_grpc.InferenceStub(channel), method)(request)
        with pytest.raises(grpc.aio.AioRpcError):
            await (anext(aiter(call)) if method == "Resume" else call)
    line = await the_line(system, output)
    assert (line["outcome"], line["code"]) == ("refused", code)
    assert f'tandem_refused_requests_total{{code="{code}"}} 1.0' in (await system.http.get("/metrics")).text


async def test_what_grpc_does_not_understand_has_its_line(make_system, output):
    system = await make_system()
    async with rpc.make_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.GenerateUnary(inference_pb2.GenerateRequest())
        line = await the_line(system, output)
        assert (line["outcome"], line["code"]) == ("refused", "invalid_value")
        request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[5, 6, 7]))
        with pytest.raises(grpc.aio.AioRpcError):
            await anext(aiter(stub.Generate(request)))
    lines = entries(output, "request")
    assert [line["code"] for line in lines] == ["invalid_value", "worker_unavailable"], "one line each"
    text = (await system.http.get("/metrics")).text
    assert 'tandem_refused_requests_total{code="worker_unavailable"} 1.0' in text
    assert 'tandem_refused_requests_total{code="invalid_value"} 1.0' in text


async def test_what_is_not_accepted_has_its_line(make_system, output):
    system = await make_system()
    assert (await system.complete(max_tokens=100, temperature=-1)).status_code == 400
    line = await the_line(system, output)
    assert (line["outcome"], line["code"], line["model"], line["answers"]) == ("refused", "invalid_value", "tiny", 0)


async def test_a_named_request_has_its_line(make_system, pair, answer, output):
    """Two readers of one answer are one request, and one that comes when it is done is no further request."""
    system = await make_system()
    await system.add_pair(pair)
    ask = {"json": {"prompt": [5, 6, 7], "max_tokens": 100}, "headers": {"idempotency-key": "one"}}
    await asyncio.gather(*(system.http.post("/v1/completions", **ask) for _ in range(2)))
    assert (await system.http.post("/v1/completions", **ask)).status_code == 200
    line = await the_line(system, output)
    assert (line["outcome"], line["attempts"]) == ("finished", 1)


async def test_grpc_has_its_line(make_system, pair, output):
    system = await make_system()
    await system.add_pair(pair)
    async with rpc.make_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        ids = inference_pb2.TokenIds(ids=[5, 6, 7])
        await inference_pb2_grpc.InferenceStub(channel).GenerateUnary(
            inference_pb2.GenerateRequest(token_ids=ids, sampling=inference_pb2.SamplingParams(max_tokens=100))
        )
    assert (await the_line(system, output))["outcome"] == "finished"


async def test_an_answer_of_another_model_is_one_request(
    make_system, worker_type, pair, output, model_folder, tmp_path
):
    """Whether the first one refuses or is waited for, its part ends badly, and the request does not."""
    names = ['name = "large"\nfallback = ["small"]\nfallback_after_s = 0.05', 'name = "small"']
    models = tmp_path / "models.toml"
    models.write_text("\n".join(f'[[model]]\npath = "{model_folder}"\n{name}' for name in names))
    system = await make_system(models=models)

    async def refuse(attempt):
        attempt.refuse(Overloaded("full"))

    for role, script in (("prefill", pair.prefill), ("decode", pair.decode)):
        await system.add(worker_type(role, f"{role}-small", script, model="small"))
    await system.complete(model="large", allow_fallback=True, max_tokens=100)
    await system.add(worker_type("decode", "decode-large", refuse, model="large"))
    reply = await system.complete(model="large", allow_fallback=True, max_tokens=100)
    await system.until(lambda: len(entries(output, "request")) >= 2)
    for line, reason in zip(entries(output, "request"), ("unavailable", "overloaded"), strict=True):
        assert (line["outcome"], line["code"], line["model"]) == ("finished", "", "small")
        assert line["fallback"] == f"large -> small; reason={reason}"
        assert (line["attempts"], line["workers"]) == (1, ["prefill-small", "decode-small"])
        assert (line["answers"], line["prompt_tokens"]) == (1, 3)
        assert line["generated_tokens"] == reply.json()["usage"]["completion_tokens"]
        assert sum(line[f"{phase}_ms"] for phase in PHASES) == pytest.approx(line["total_ms"])
    assert line["queue_ms"] > 40, "the wait for the first model is a part of it"


async def test_an_answer_that_moves_says_so(make_system, worker_type, pair_type, answer, output):
    class Patient(pair_type):
        """Leaves time to begin the drain before the answer is complete."""

        def step_s_of(self, attempt):
            is_early = attempt.worker.worker_id == "decode-0" and not attempt.pause_asked
            return 0.06 if is_early else 0.001

    answer = [*answer[:-1] * 6, 1]
    pair = Patient(answer)
    system = await make_system()
    await system.add_pair(pair)
    asking = asyncio.create_task(system.complete(max_tokens=400, return_token_ids=True))
    await system.until(lambda: system.total("tandem_generated_tokens_total") >= 2)
    await system.add(worker_type("decode", "decode-1", pair.decode, on_hand_over=pair.hand_over))
    system.workers["decode-0"].drain()
    assert (await asking).json()["choices"][0]["token_ids"] == answer
    line = await the_line(system, output)
    assert (line["outcome"], line["attempts"], line["moves"]) == ("finished", 1, 1)
    assert line["workers"] == ["prefill-0", "decode-0", "decode-1"]
    # The older attempt's handoff, and the one of the move, which the older attempt's own worker speaks of.
    assert (
        'tandem_handoff_bytes_total{model="tiny",transport="none"} 128.0' in system.gateway.metrics.render([]).decode()
    )


BODIES = [
    {"prompt": MARKER},
    {"prompt": [MARKER, f"{MARKER} again"], "n": 2, "stop": [MARKER]},
    {"prompt": MARKER, "suffix": MARKER},
    {"prompt": MARKER, "temperature": -1},
    {"prompt": {"no": MARKER}},
    {"prompt": MARKER, "max_tokens": 100_000},
    {"prompt": MARKER, "stop": [MARKER * 1000] * 100},
    {"prompt": MARKER, "model": "no-such-model"},
    {"messages": [{"role": "user", "content": MARKER}]},
    {"messages": [{"role": "tool", "content": MARKER}]},
    {"messages": [{"role": "user", "content": {"text": MARKER}}]},
    {"messages": [{"role": "user", "content": MARKER * 2000}]},
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fate", ["finishes", "fails", "no_worker"])
async def test_nothing_of_a_prompt_is_in_any_line(make_system, worker_type, pair_type, tokenizer, output, fate, stream):
    """Nothing of an answer is either: the workers generate the text of the prompt."""
    said = [*tokenizer.encode(f"{MARKER} {MARKER}", add_special_tokens=False).ids, 1]
    pair = pair_type(said)

    async def fail(attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.fail(InternalError("broken"))

    system = await make_system(max_attempts=1, slow_request_s=1e-6)
    if fate != "no_worker":
        await system.add(worker_type("prefill", "prefill-0", pair.prefill))
        await system.add(worker_type("decode", "decode-0", pair.decode if fate == "finishes" else fail))
    for body in BODIES:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        reply = await system.http.post(path, json={"max_tokens": 20, "stream": stream, **body})
        assert reply.status_code in (200, 400, 404, 500, 503)
    assert entries(output, "request")
    assert "slow request: " in output.getvalue()
    assert MARKER not in output.getvalue()


async def test_slow_requests_get_words(make_system, pair, output):
    system = await make_system(slow_request_s=0.001)
    await system.add_pair(pair)
    await system.complete(max_tokens=100)
    line = await the_line(system, output)
    (words,) = [
        json.loads(words)
        for words in output.getvalue().splitlines()
        if "slow request: " in json.loads(words)["message"]
    ]
    assert (words["level"], words["request_id"]) == ("warning", line["request_id"])
    assert "s generating; prompt of 3 tokens, " in words["message"]
    assert "; 1 attempt; second token expected " in words["message"]
    assert "for the handoff, and seen after " in words["message"]
    assert words["message"].endswith("; on prefill-0, decode-0")


async def test_without_a_limit_no_request_is_slow(make_system, pair, output):
    system = await make_system(slow_request_s=0)
    await system.add_pair(pair)
    await system.complete(max_tokens=100)
    await the_line(system, output)
    assert "slow" not in output.getvalue()


class ManualClock:
    def __init__(self):
        self.now_s = 100.0

    def monotonic(self):
        return self.now_s

    def unix_ns(self):
        return round(self.now_s * 1e9)


async def test_a_flood_of_refusals_does_not_fill_a_disk(output):
    """Ten thousand refusals a second for a minute are all counted, and few have a line."""
    clock, metrics = ManualClock(), Metrics()
    log = RequestLog(metrics, clock=clock)
    num_requests, seconds = 20_000, 60
    for number in range(num_requests):
        log.note_refusal(Overloaded("full") if number % 4 else WorkerUnavailable("none"), request_id=f"r{number}")
        clock.now_s += seconds / num_requests
    log.close()
    lines = entries(output, "request")
    assert REFUSED_BURST < len(lines) < REFUSED_BURST + 2 * seconds + 10
    (counted,) = entries(output, "requests without a line of their own")
    assert counted["refused"] == num_requests - len(lines)
    assert sum(counted["refused_by_code"].values()) == counted["refused"]
    assert set(counted["refused_by_code"]) == {"server_overloaded", "worker_unavailable"}
    assert len(output.getvalue()) < 100_000
    left_out = f'tandem_unlogged_requests_total{{kind="refused"}} {float(counted["refused"])}'
    assert left_out in metrics.render([]).decode()


def test_an_error_that_two_meet_is_one_refusal(output):
    log = RequestLog(Metrics(), clock=ManualClock())
    error = Overloaded("full")
    assert log.note_refusal(error, request_id="a") == "a"
    assert log.note_refusal(error, request_id="b") == "a", "the id of the line"
    assert log.note_refusal(Overloaded("full"), request_id="c") == "c"
    assert [entry["request_id"] for entry in entries(output, "request")] == ["a", "c"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (InvalidRequest("n is 'secret' but must be less", field="n", rule="must be less"), ("n", "must be less", "")),
        (InvalidRequest("no", field="messages[3].content[0].type"), ("messages[3].content[0].type", "", "")),
        (InvalidRequest("no", field="a client's own words"), ("", "", "")),
        (InvalidRequest("no", field="x" * 1000), ("", "", "")),
        (InvalidRequest("no"), ("", "", "")),
        (RateLimited("no", limit="requests_per_minute"), ("", "", "requests_per_minute")),
        (Overloaded("full", reason="wait"), ("", "", "wait")),
        (WorkerUnavailable("none"), ("", "", "")),
    ],
)
def test_a_refusal_says_which_field_broke_which_rule_or_which_limit_was_reached(output, error, said):
    log = RequestLog(Metrics(), clock=ManualClock())
    log.note_refusal(error, request_id="r")
    (line,) = entries(output, "request")
    assert tuple(line.get(name, "") for name in ("field", "rule", "limit")) == said
    (row,), _ = log.history.find(Query())
    assert (row.request_id, row.field, row.rule, row.limit) == ("r", *said)


@given(
    began_s=st.floats(0, 1e7),
    steps=st.lists(st.tuples(st.sampled_from(PHASES), st.floats(-1e-6, 1e3))),
    rest_s=st.floats(0, 10),
)
def test_phases_sum_up_to_the_time(began_s, steps, rest_s):
    """Whatever the order of phases; a clock that steps back a little takes nothing away."""
    trace, now_s = AnswerTrace("a", began_s, OpenCall(began_s, "normal", "")), began_s
    reached_us = 0
    for phase, seconds in steps:
        now_s += seconds
        entered_us = trace.enter(phase, now_s)
        reached_us = max(reached_us, round((now_s - began_s) * 1e6))
        assert (trace.phase, entered_us) == (phase, reached_us)
    now_s += rest_s
    phases = trace.until(now_s)
    assert sum(phases.values()) == max(reached_us, round((now_s - began_s) * 1e6))
    assert min(phases.values()) >= 0
    assert trace.until(now_s) == phases


def test_words_leave_out_what_did_not_happen():
    refused = Row(outcome="refused", code="server_overloaded", queue_us=1_200_000, total_us=1_200_000)
    assert (
        in_words(refused)
        == "1.2 s: 1.2 s waiting for workers; prompt of 0 tokens, 0 generated; 0 attempts; on no worker"
    )
    moved = Row(
        outcome="finished",
        queue_us=100_000,
        prefill_us=2_000_000,
        transfer_us=20_000,
        decode_us=10_000_000,
        total_us=12_120_000,
        prompt_tokens=300,
        cached_tokens=16,
        generated_tokens=500,
        attempts=2,
        moves=1,
        workers="p d",
    )
    assert in_words(moved) == (
        "12.1 s: 0.1 s waiting for workers, 2 s until the first token, 0.02 s handing over, 10 s generating; "
        "prompt of 300 tokens (16 cached), 500 generated (20 ms each); 2 attempts, moved 1 time; on p, d"
    )


@pytest.mark.parametrize(
    ("error", "was_placed", "outcome"),
    [
        (None, True, "finished"),
        (asyncio.CancelledError(), False, "cancelled"),
        (RequestCancelled("left"), True, "cancelled"),
        (Overloaded("full"), False, "refused"),
        (WorkerUnavailable("gone"), True, "failed"),
        (InternalError("broken"), False, "failed"),
        (ValueError("a bug"), False, "failed"),
    ],
)
def test_outcomes(error, was_placed, outcome):
    assert outcome_of(error, was_placed=was_placed) == outcome


@given(st.lists(st.floats(0, 5), max_size=200), st.floats(0.1, 5), st.integers(1, 20))
def test_a_budget_is_kept_at_any_rate(waits_s, per_s, burst):
    budget, now_s, num_lines = LineBudget(per_s=per_s, burst=burst), 0.0, 0
    for wait_s in waits_s:
        now_s += wait_s
        num_lines += budget.take(now_s)
        assert num_lines <= burst + now_s * per_s + 1e-6
    assert num_lines >= min(burst, len(waits_s))
