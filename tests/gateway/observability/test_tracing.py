"""The spans of a request: they tile its time, their parents are right, and none is left out or left open."""

import asyncio
import contextlib
import itertools
from collections import Counter

import grpc
import pytest

from protos import cluster_pb2, inference_pb2, inference_pb2_grpc, worker_pb2
from services.runtime import telemetry
from services.runtime.errors import Overloaded, TransferFailed
from services.runtime.telemetry import DECODE_SPAN, KV_TRANSFER_SPAN
from tests.kept_spans import KeptSpans, events_of
from tests.waiting import HANG_LIMIT_S

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENT_SPAN_ID = "00f067aa0ba902b7"
PHASES = {"queue", "route", "prefill", "kv_transfer", "decode"}
ANSWER_TEXT = "hello world, naïve café end"


def headers(flags="01", **more):
    return {"traceparent": f"00-{TRACE_ID}-{CLIENT_SPAN_ID}-{flags}", **more}


@pytest.fixture
def spans(monkeypatch):
    return KeptSpans.install(monkeypatch)


@pytest.fixture
def answer(tokenizer):
    return [*tokenizer.encode(ANSWER_TEXT, add_special_tokens=False).ids, 1]


@pytest.fixture
def pair(pair_type, answer):
    return pair_type(answer)


@pytest.fixture
async def system(make_system, pair, spans):
    system = await make_system()
    await system.add_pair(pair)
    return system


async def trace_of(system, spans, num_requests=1):
    """The spans of one request, when it is over."""
    await system.until(lambda: len(spans.named("request")) >= num_requests)
    request = spans.named("request")[-1]
    return request, [span for span in spans.spans if span.context.trace_id == request.context.trace_id]


def phases_of(request, trace, choice=0):
    return [span for span in trace if span is not request and span.attributes["tandem.choice"] == choice]


def check(request, trace, num_choices=1):
    """What holds of every trace, however the request went."""
    assert len({span.context.span_id for span in trace}) == len(trace)
    assert all(span.context.is_sampled for span in trace), "what is exported says so"
    assert all(span.parent_id == request.context.span_id for span in trace if span is not request)
    assert all(span.start_unix_ns <= span.end_unix_ns for span in trace), "a span was left open"
    ended = []
    for choice in range(num_choices):
        phases = phases_of(request, trace, choice)
        assert phases[0].start_unix_ns == request.start_unix_ns
        for one, other in itertools.pairwise(phases):
            assert one.end_unix_ns == other.start_unix_ns, f"between {one.name} and {other.name} there is a gap"
        ended.append(phases[-1].end_unix_ns)
    assert max(ended) == request.end_unix_ns
    known = {span.context.span_id for span in trace}
    assert all(link.context.span_id in known for span in trace for link in span.links if span is not request)


def sums_of(phases):
    spent = Counter()
    for span in phases:
        spent[span.name] += (span.end_unix_ns - span.start_unix_ns) / 1e9
    return spent


async def test_the_phases_of_a_request_tile_its_time(system, spans):
    response = await system.http.post(
        "/v1/completions",
        json={"prompt": [5, 6, 7], "max_tokens": 50, "seed": 3, "temperature": 0.5},
        headers=headers(tracestate="vendor=1"),
    )
    request, trace = await trace_of(system, spans)
    check(request, trace)
    assert request.is_server
    assert (f"{request.context.trace_id:032x}", f"{request.parent_id:016x}") == (TRACE_ID, CLIENT_SPAN_ID)
    assert {span.context.state for span in trace} == {"vendor=1"}
    assert response.headers["traceparent"] == telemetry.inject(request.context), "so that the client finds it"
    phases = phases_of(request, trace)
    assert [span.name for span in phases] == ["queue", "route", "prefill", "kv_transfer", "decode"]
    assert all(span.attributes["tandem.attempt"] == 1 for span in phases)
    _, route, prefill, transfer, decode = phases
    assert route.attributes["tandem.is_remote_prefill"] is True
    assert route.attributes["tandem.reason"] == "long_prompt"
    assert prefill.attributes["tandem.worker"] == "prefill-0"
    assert prefill.attributes["tandem.predicted_s"] == route.attributes["tandem.predicted_ttft_s"]
    took_s = (prefill.end_unix_ns - prefill.start_unix_ns) / 1e9
    assert prefill.attributes["tandem.actual_s"] == pytest.approx(took_s, abs=1e-6)
    said = transfer.attributes
    assert (said["tandem.kv.pages"], said["tandem.kv.bytes"], said["tandem.kv.transport"]) == (1, 64, "none")
    assert (said["tandem.from"], said["tandem.to"]) == ("prefill-0", "decode-0")
    usage = response.json()["usage"]
    num_first = 1
    assert decode.attributes["tandem.tokens"] == usage["completion_tokens"] - num_first
    assert events_of(request) == [("first_token", {"tandem.choice": 0})]


async def test_workers_are_told_the_ids_of_the_phases_that_they_have_a_part_in(system, spans):
    await system.http.post("/v1/completions", json={"prompt": [5, 6, 7]}, headers=headers(tracestate="vendor=1"))
    _, trace = await trace_of(system, spans)
    by_name = {span.name: span.context for span in trace}
    for worker in system.workers.values():
        (attempt,) = worker.attempts
        told = telemetry.extract(attempt.spec.traceparent, attempt.spec.tracestate)
        assert told == by_name["prefill"]
        assert telemetry.sibling(told, KV_TRANSFER_SPAN) == by_name["kv_transfer"]
        assert telemetry.sibling(told, DECODE_SPAN) == by_name["decode"]


async def test_a_request_for_an_unknown_model_says_which_was_asked_for(system, spans):
    assert (await system.chat("a", model="nope")).status_code == 404
    request, _ = await trace_of(system, spans)
    assert request.attributes["gen_ai.request.model"] == "nope"
    assert (request.error_type, request.attributes["http.response.status_code"]) == ("NotFound", 404)
    assert not request.is_failed, "it is the client's error, not the server's"


async def test_the_request_is_told_by_the_conventions_and_without_texts(system, spans):
    body = {"max_tokens": 50, "seed": 3, "temperature": 0.5, "stop": ["a secret stop"], "user": "someone"}
    response = await system.chat("a secret prompt", **body)
    request, trace = await trace_of(system, spans)
    said = request.attributes
    usage = response.json()["usage"]
    assert said["gen_ai.operation.name"] == "chat"
    assert said["gen_ai.provider.name"] == "tandem"
    assert said["gen_ai.request.model"] == said["gen_ai.response.model"] == "tiny"
    assert (said["gen_ai.request.seed"], said["gen_ai.request.temperature"]) == (3, 0.5)
    assert (said["gen_ai.request.max_tokens"], said["gen_ai.request.choice.count"]) == (50, 1)
    assert said["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert said["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert said["gen_ai.usage.cache_read.input_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert said["gen_ai.response.finish_reasons"] == ["stop"]
    assert said["gen_ai.response.id"] == response.json()["id"].partition("-")[2] == response.headers["x-request-id"]
    assert (said["http.request.method"], said["http.route"]) == ("POST", "/v1/chat/completions")
    assert said["http.response.status_code"] == 200
    spent = sums_of(phases_of(request, trace))
    total_s = (request.end_unix_ns - request.start_unix_ns) / 1e9
    assert said["gen_ai.latency.time_in_queue"] == pytest.approx(spent["queue"] + spent["route"], abs=1e-5)
    assert said["gen_ai.latency.time_in_model_prefill"] == pytest.approx(spent["prefill"], abs=1e-5)
    assert said["gen_ai.latency.time_in_model_decode"] == pytest.approx(spent["decode"], abs=1e-5)
    assert said["gen_ai.latency.e2e"] == pytest.approx(total_s, abs=1e-5)
    assert spent["queue"] < said["gen_ai.latency.time_to_first_token"] < total_s
    assert said["tandem.predicted_ttft_s"] > 0
    told = repr(trace)
    assert not any(text in told for text in ("secret", "someone", ANSWER_TEXT, "hello"))


async def test_the_log_has_the_same_phases(system, spans, caplog):
    """How closely their times agree is tested in tests/timing."""
    caplog.set_level("INFO", logger="gateway.observability.request_log")
    await system.complete()
    request, trace = await trace_of(system, spans)
    (line,) = [record for record in caplog.records if record.getMessage() == "request"]
    spent = sums_of(phases_of(request, trace))
    phases_ms = {"prefill": line.prefill_ms, "kv_transfer": line.transfer_ms, "decode": line.decode_ms}
    assert all((spent_ms > 0) == (spent[name] > 0) for name, spent_ms in phases_ms.items())
    assert line.total_ms == pytest.approx(line.queue_ms + sum(phases_ms.values()))
    assert line.trace_id == f"{request.context.trace_id:032x}"


async def test_each_of_several_answers_has_its_phases(system, spans):
    await system.complete(n=3)
    request, trace = await trace_of(system, spans)
    check(request, trace, num_choices=3)
    names = Counter(span.name for span in trace)
    assert names == {"text_completion tiny": 1, **dict.fromkeys(PHASES, 3)}


async def test_grpc_tells_its_client_the_span(system, spans):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        message = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[5, 6, 7]))
        metadata = tuple(headers(tracestate="vendor=2").items())
        call = stub.Generate(message, metadata=metadata)
        async for _ in call:
            pass
        told = dict(await call.initial_metadata())
    request, trace = await trace_of(system, spans)
    check(request, trace)
    assert told["traceparent"] == telemetry.inject(request.context)
    assert request.attributes["rpc.method"] == "tandem.v1.Inference/Generate"
    assert request.attributes["rpc.response.status_code"] == "OK"
    assert request.context.state == "vendor=2"
    assert f"{request.parent_id:016x}" == CLIENT_SPAN_ID


async def test_a_failover_links_its_attempts(make_system, worker_type, pair, spans):
    spans.samples_all = False
    system = await make_system()
    await system.add(worker_type("prefill", "prefill-0", pair.prefill))

    async def dies(attempt):
        attempt.emit(worker_pb2.Admitted())
        await pair.event(attempt).wait()
        attempt.emit(worker_pb2.DecodeStarted())
        await pair.generate(attempt, 1, 4)
        await asyncio.sleep(0.02)
        await attempt.worker.die()

    doomed = await system.add(worker_type("decode", "decode-0", dies))
    request_task = asyncio.create_task(system.complete(max_tokens=100))
    await system.until(lambda: doomed.attempts)
    heir = await system.add(worker_type("decode", "decode-1", pair.decode))
    assert (await request_task).json()["choices"][0]["text"] == ANSWER_TEXT
    request, trace = await trace_of(system, spans)
    check(request, trace)
    phases = phases_of(request, trace)
    failed = [span for span in phases if span.error_type]
    assert [(span.name, span.error_type, span.attributes["tandem.attempt"]) for span in failed] == [
        ("decode", "WorkerLost", 1)
    ]
    assert not request.error_type, "the client has seen nothing of it"
    second = [span for span in phases if span.attributes["tandem.attempt"] == 2]
    assert [span.name for span in second] == ["queue", "route", "prefill", "kv_transfer", "decode"]
    for span in second:
        (link,) = span.links
        assert link.context.span_id == failed[0].context.span_id
        assert link.attributes == {"tandem.reason": "worker_lost", "tandem.attempt": 1}
    assert not any(span.links for span in phases if span.attributes["tandem.attempt"] == 1)
    assert ("retry", {"tandem.attempt": 1, "tandem.reason": "worker_lost"}) in events_of(request)
    # It was not in the sample; from its second attempt on it is known that somebody will look at it.
    (first,), (other,) = doomed.attempts, heir.attempts
    assert first.spec.traceparent.endswith("-00")
    assert other.spec.traceparent.endswith("-01")


async def test_the_first_token_is_the_prompts_also_where_the_second_one_comes_before_it(
    make_system, pair_type, answer, spans
):
    gate = asyncio.Event()

    class Hasty(pair_type):
        async def prefill(self, attempt):
            attempt.emit(worker_pb2.PrefillStarted(queue_s=0.0))
            self.event(attempt).set()
            await gate.wait()
            await super().prefill(attempt)

    system = await make_system()
    await system.add_pair(Hasty(answer))
    request_task = asyncio.create_task(system.complete(max_tokens=100))
    opened = system.gateway.requests._open
    await system.until(lambda: [one.spans.phases[-1].name for one in opened.values()] == ["decode"])
    gate.set()
    assert (await request_task).status_code == 200
    request, trace = await trace_of(system, spans)
    check(request, trace)
    decode = phases_of(request, trace)[-1]
    assert decode.attributes["tandem.tokens"] == request.attributes["gen_ai.usage.output_tokens"] - 1


async def test_a_move_links_to_where_the_answer_was(make_system, worker_type, pair_type, answer, spans):
    class Patient(pair_type):
        def step_s_of(self, attempt):
            is_early = attempt.worker.load.state == cluster_pb2.WORKER_STATE_READY
            return 0.03 if attempt.worker.worker_id == "decode-0" and is_early else 0.002

    pair = Patient([*answer[:-1] * 4, 1])
    system = await make_system()
    await system.add_pair(pair)
    leaving = system.workers["decode-0"]
    request_task = asyncio.create_task(system.complete(max_tokens=100))
    await system.until(lambda: leaving.attempts)
    await pair.event(leaving.attempts[0]).wait()
    await system.add(worker_type("decode", "decode-1", pair.decode, on_hand_over=pair.hand_over))
    leaving.drain()
    assert (await request_task).status_code == 200
    request, trace = await trace_of(system, spans)
    check(request, trace)
    phases = phases_of(request, trace)
    names = ["queue", "route", "prefill", "kv_transfer", "decode", "kv_transfer", "decode"]
    assert [span.name for span in phases] == names
    earlier, moving, later = phases[-3:]
    (link,) = moving.links
    assert (link.context.span_id, link.attributes["tandem.reason"]) == (earlier.context.span_id, "moved")
    assert (earlier.attributes["tandem.worker"], later.attributes["tandem.worker"]) == ("decode-0", "decode-1")
    assert moving.attributes["tandem.kv.bytes"] == 64
    said = {"tandem.attempt": 2, "tandem.from": "decode-0", "tandem.to": "decode-1", "tandem.reason": "move"}
    assert ("move", said) in events_of(request)
    tokens = earlier.attributes["tandem.tokens"] + later.attributes["tandem.tokens"]
    assert tokens == request.attributes["gen_ai.usage.output_tokens"] - 1
    told = telemetry.extract(system.workers["decode-1"].attempts[0].spec.traceparent)
    assert telemetry.sibling(told, DECODE_SPAN) == later.context


async def test_what_is_not_in_the_sample_leaves_nothing(system, spans):
    spans.samples_all = False
    response = await system.complete()
    assert response.status_code == 200
    assert response.headers["traceparent"].endswith("-00")
    assert await system.gateway.requests.wait_until_idle(timeout_s=HANG_LIMIT_S)
    assert spans.spans == []
    spans.samples_all = True
    await system.http.post("/v1/completions", json={"prompt": [5]}, headers=headers("00"))
    assert await system.gateway.requests.wait_until_idle(timeout_s=HANG_LIMIT_S)
    assert spans.spans == [], "the client's decision goes before"
    await system.http.post("/v1/completions", json={"prompt": [5]}, headers=headers("01"))
    await trace_of(system, spans)


@pytest.mark.parametrize("flags", ["00", None])
async def test_what_failed_is_exported_whatever_the_sample(make_system, worker_type, spans, flags):
    spans.samples_all = False
    system = await make_system(max_attempts=1)

    async def breaks(attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.emit(worker_pb2.DecodeStarted())
        attempt.fail(TransferFailed("a client's words"))

    await system.add(worker_type("decode", "decode-0", breaks))
    said = headers(flags) if flags else {}
    response = await system.http.post("/v1/completions", json={"prompt": [5]}, headers=said)
    assert response.status_code == 503
    request, trace = await trace_of(system, spans)
    check(request, trace)
    assert request.error_type == "TransferFailed"
    assert "words" not in repr(trace)


async def test_a_fault_of_this_program_is_exported_whatever_the_sample(system, spans, monkeypatch):
    spans.samples_all = False

    async def breaks(call):
        raise RuntimeError("a client's words")

    monkeypatch.setattr(system.gateway.requests._accepting, "accept", breaks)
    assert (await system.complete()).status_code == 500
    request, trace = await trace_of(system, spans)
    assert trace == [request]
    assert request.error_type == "RuntimeError"
    assert "words" not in repr(trace)


async def test_what_was_slow_is_exported_whatever_the_sample(make_system, pair_type, answer, spans):
    spans.samples_all = False
    system = await make_system(slow_request_s=0.15)
    await system.add_pair(pair_type(answer, step_s=0.001))
    await system.complete()
    assert await system.gateway.requests.wait_until_idle(timeout_s=HANG_LIMIT_S)
    assert spans.spans == []
    slow = pair_type(answer, step_s=0.05)
    for worker in system.workers.values():
        worker.script = slow.prefill if worker.role == "prefill" else slow.decode
    await system.complete()
    request, trace = await trace_of(system, spans)
    check(request, trace)
    assert request.end_unix_ns - request.start_unix_ns >= 0.15e9


async def test_a_refused_request_is_one_span_where_it_is_sampled(system, spans):
    response = await system.http.post("/v1/completions", json={"prompt": [5], "top_p": 7}, headers=headers())
    assert response.status_code == 400
    request, trace = await trace_of(system, spans)
    assert trace == [request]
    assert request.start_unix_ns < request.end_unix_ns
    assert request.error_type == "InvalidRequest"
    assert f"{request.parent_id:016x}" == CLIENT_SPAN_ID
    await system.http.post("/v1/completions", json={"prompt": [5], "top_p": 7}, headers=headers("00"))
    assert len(spans.named("request")) == 1


async def test_latencies_lead_to_the_traces_that_are_exported(system):
    body = {"prompt": [5, 6, 7], "max_tokens": 5}
    for flags, traced in (("00", 0), ("01", 2)):
        await system.http.post("/v1/completions", json=body, headers=headers(flags=flags))
        page = await system.http.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
        lines = [line for line in page.text.splitlines() if TRACE_ID in line]
        names = {line.split("{")[0] for line in lines}
        assert len(lines) == traced
        assert names <= {"tandem_time_to_first_token_seconds_bucket", "tandem_request_duration_seconds_bucket"}


async def test_nobody_records_while_telemetry_is_off(make_system, pair):
    system = await make_system()
    await system.add_pair(pair)
    response = await system.http.post("/v1/completions", json={"prompt": [5]}, headers=headers())
    assert "traceparent" not in response.headers, "there is nothing to look for"
    told = system.workers["decode-0"].attempts[0].spec.traceparent
    assert told == headers()["traceparent"], "it is passed on all the same"


async def _finishes(system, worker_type, pair):
    await system.add_pair(pair)
    await system.complete()


async def _client_leaves(system, worker_type, pair):
    async def never(attempt):
        attempt.emit(worker_pb2.Admitted())

    worker = await system.add(worker_type("decode", "decode-0", never))
    task = asyncio.create_task(system.complete())
    await system.until(lambda: worker.attempts)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _client_leaves_the_stream(system, worker_type, pair):
    async def one_token(attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.emit(worker_pb2.DecodeStarted())
        attempt.tokens(0, pair.answer[:1])

    await system.add(worker_type("decode", "decode-0", one_token))
    body = {"prompt": [5], "stream": True}
    async with system.http.stream("POST", "/v1/completions", json=body) as response:
        await anext(response.aiter_lines())


async def _nobody_has_room(system, worker_type, pair):
    async def full(attempt):
        attempt.refuse(Overloaded("full"))

    await system.add(worker_type("decode", "decode-0", full))
    await system.complete()


async def _no_worker(system, worker_type, pair):
    await system.complete()


async def _deadline(system, worker_type, pair):
    async def never(attempt):
        attempt.emit(worker_pb2.Admitted())

    await system.add(worker_type("decode", "decode-0", never))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with contextlib.suppress(grpc.RpcError):
            await stub.GenerateUnary(inference_pb2.GenerateRequest(text="x"), timeout=0.2)


async def _keeps_failing(system, worker_type, pair):
    async def breaks(attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.fail(TransferFailed("no"))

    await system.add(worker_type("decode", "decode-0", breaks))
    await system.complete()


async def _gateway_ends_it(system, worker_type, pair):
    async def never(attempt):
        attempt.emit(worker_pb2.Admitted())

    worker = await system.add(worker_type("decode", "decode-0", never))
    task = asyncio.create_task(system.complete())
    await system.until(lambda: worker.attempts)
    system.gateway.requests.end_all(Overloaded("leaving"))
    await task


ENDS = {
    _finishes: "",
    _client_leaves: "",
    _client_leaves_the_stream: "",
    _nobody_has_room: "Overloaded",
    _no_worker: "WorkerUnavailable",
    _deadline: "DeadlineExceeded",
    _keeps_failing: "TransferFailed",
    _gateway_ends_it: "Overloaded",
}


@pytest.mark.parametrize("run", ENDS, ids=lambda run: run.__name__)
async def test_however_it_ends_every_phase_has_an_end(make_system, worker_type, pair, spans, run):
    system = await make_system(max_queue_wait_s=0.2, max_attempts=2)
    await run(system, worker_type, pair)
    request, trace = await trace_of(system, spans)
    check(request, trace)
    assert len(spans.named("request")) == 1
    if run is not _deadline:  # the client's own clock may have ended the call first
        assert request.error_type == ENDS[run]
    last = phases_of(request, trace)[-1]
    assert (last.error_type or last.attributes.get("tandem.is_cancelled")) or run is _finishes


# --- requests with a name ---------------------------------------------------------------------------------------------


class Gated:
    """Decode worker's script: all of an answer, but for a stop after its second token until `gate` is set."""

    def __init__(self, answer):
        self.answer = answer
        self.gate = asyncio.Event()

    async def decode(self, attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.emit(worker_pb2.DecodeStarted())
        first = len(attempt.spec.emitted_token_ids)
        attempt.tokens(first, self.answer[first:2])
        await self.gate.wait()
        first = max(first, 2)
        attempt.tokens(first, self.answer[first:])
        attempt.finish(inference_pb2.FINISH_REASON_STOP)


BODY = {"prompt": [5, 6, 7], "max_tokens": 100, "stream": True, "return_token_ids": True}


def link_of(span):
    return [(link.context.span_id, link.attributes["tandem.reason"]) for link in span.links]


async def read_some(system, named):
    """Reads the first event of a named stream and leaves; its id, and the span that the client was told."""
    async with system.http.stream("POST", "/v1/completions", json=BODY, headers=named) as response:
        assert response.status_code == 200
        lines = response.aiter_lines()
        while not (line := await anext(lines)).startswith("id: "):
            pass
    return line.removeprefix("id: "), response.headers["traceparent"]


async def test_who_attaches_to_a_request_and_the_request_link_to_one_another(make_system, worker_type, answer, spans):
    system = await make_system()
    script = Gated(answer)
    worker = await system.add(worker_type("decode", "decode-0", script.decode))
    named = {"idempotency-key": "order"}
    first = asyncio.create_task(system.http.post("/v1/completions", json=BODY, headers=named))
    await system.until(lambda: worker.attempts)
    second = asyncio.create_task(system.http.post("/v1/completions", json=BODY, headers={**named, **headers()}))
    journal = next(iter(system.gateway._journals._journals.values()))
    await system.until(lambda: journal.num_users == 2)
    script.gate.set()
    answers = [await first, await second]
    assert answers[0].text.count("data:") == answers[1].text.count("data:") > 2
    request, trace = await trace_of(system, spans)
    check(request, trace)
    await system.until(lambda: spans.named("attach"))
    attach = spans.one("attach")
    assert link_of(attach) == [(request.context.span_id, "attached")]
    assert link_of(request) == [(attach.context.span_id, "attached")]
    assert f"{attach.context.trace_id:032x}" == TRACE_ID != f"{request.context.trace_id:032x}"
    assert f"{attach.parent_id:016x}" == CLIENT_SPAN_ID
    told = [answer.headers["traceparent"] for answer in answers]
    assert told == [telemetry.inject(request.context), telemetry.inject(attach.context)]


async def test_who_resumes_what_was_resumed_links_to_the_last_one(make_system, worker_type, answer, spans):
    script, named, requests = Gated(answer), {"idempotency-key": "order"}, []
    for number in range(3):
        system = await make_system()
        if not requests:
            await system.add(worker_type("decode", "decode-0", script.decode))
        topology = system.gateway.topology
        await system.until(lambda topology=topology: topology.num_ready("decode", "tiny") == 1)
        await read_some(system, named)
        request, trace = await trace_of(system, spans, num_requests=number + 1)
        check(request, trace)
        requests.append(request)
        await system.flush_journals()
    links = [link_of(request) for request in requests]
    assert links == [[], *([(earlier.context.span_id, "resumed")] for earlier in requests[:2])]


@pytest.mark.parametrize("where", ["here", "elsewhere"])
async def test_who_resumes_a_request_links_to_what_it_was(make_system, worker_type, answer, spans, where):
    system = await make_system()
    script = Gated(answer)
    await system.add(worker_type("decode", "decode-0", script.decode))
    named = {"idempotency-key": "order"}
    last_id, told = await read_some(system, named)
    first, trace = await trace_of(system, spans)
    check(first, trace)
    assert told == telemetry.inject(first.context)
    await system.flush_journals()
    other = system if where == "here" else await make_system()
    await other.until(lambda: other.gateway.topology.num_ready("decode", "tiny") == 1)
    script.gate.set()
    more = {**named, **headers(), "last-event-id": last_id}
    response = await other.http.post("/v1/completions", json=BODY, headers=more)
    assert response.text.endswith("data: [DONE]\n\n")
    second, trace = await trace_of(other, spans, num_requests=2)
    check(second, trace)
    assert second.attributes["tandem.resumed_tokens"] == 2
    assert link_of(second) == [(first.context.span_id, "resumed")]
    assert f"{second.context.trace_id:032x}" == TRACE_ID
    assert f"{second.parent_id:016x}" == CLIENT_SPAN_ID
    assert spans.named("attach") == []
    assert len(spans.named("request")) == 2
    # A client that only reads what is complete has nothing computed.
    assert (await other.http.post("/v1/completions", json=BODY, headers=named)).status_code == 200
    await other.until(lambda: spans.named("attach"))
    assert link_of(spans.one("attach")) == [(second.context.span_id, "attached")]
    assert len(spans.named("request")) == 2
