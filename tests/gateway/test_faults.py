"""Answers that meet trouble: refusals, deaths, gaps, cancels, slow readers, deadlines, an absent Redis."""

import asyncio
import json
import math
import socket
import time

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.openai.completions import CompletionWriter
from gateway.topology.session import DecodeSession
from gateway.topology.views import NOTHING_MEASURED
from protos import cluster_pb2, inference_pb2, inference_pb2_grpc, worker_pb2
from services.cluster.embedded_redis import EmbeddedRedis
from services.cluster.registry import watch_workers
from services.runtime.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    LayoutMismatch,
    Overloaded,
    TransferFailed,
    WorkerUnavailable,
)
from services.scheduling.pools import Audience
from services.scheduling.retry_budget import RetryBudget, RetryLimits
from tests.free_ports import free_port
from tests.waiting import HANG_LIMIT_S, settle
from worker.sessions import StepTokens

LINE = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
ANSWER_TEXT = "hello world, naïve café 🙂 日本語 end"


@pytest.fixture
def answer(tokenizer):
    return [*tokenizer.encode(ANSWER_TEXT, add_special_tokens=False).ids, 1]


@pytest.fixture
def pair(pair_type, answer):
    return pair_type(answer)


async def refuse_full(attempt):
    attempt.refuse(Overloaded("full", retry_after_s=0.05))


def delivered(chunks):
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice["text"] for choice in choices)
    return text, [token for choice in choices for token in choice.get("token_ids", [])]


@pytest.mark.parametrize("num_before", [1, 2, 5, 9])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_death_of_the_decode_worker_is_not_seen(
    make_system, worker_type, pair, answer, read_sse, num_before, streams
):
    system = await make_system()

    async def dies(attempt):
        attempt.emit(worker_pb2.Admitted())
        await pair.event(attempt).wait()
        attempt.emit(worker_pb2.DecodeStarted())
        await pair.generate(attempt, 1, num_before)
        await asyncio.sleep(0.02)
        await attempt.worker.die()

    await system.add(worker_type("prefill", "prefill-0", pair.prefill))
    doomed = await system.add(worker_type("decode", "decode-0", dies))
    await system.add(worker_type("decode", "decode-1", pair.decode))
    bodies = [{"max_tokens": 100, "stream": streams, "return_token_ids": True, "seed": 9} for _ in range(2)]
    responses = [await system.complete(**body) for body in bodies]
    for response in responses:
        if streams:
            *chunks, done = read_sse(response.text)
            assert done == "[DONE]"
        else:
            chunks = [response.json()]
        assert delivered(chunks) == (ANSWER_TEXT, answer)
    resumed = [a.spec for a in system.workers["decode-1"].attempts if a.spec.emitted_token_ids]
    assert len(doomed.attempts) == 1
    assert [list(spec.emitted_token_ids) for spec in resumed] == [answer[:num_before]]
    assert {spec.sampling.seed for spec in resumed} == {9}
    assert [spec.id.attempt for spec in resumed] == [2]


async def test_stop_text_across_a_death(make_system, worker_type, pair, tokenizer, answer):
    """Held-back text is not lost with the worker."""
    system = await make_system()
    prefixes = tuple("world, n"[:n] for n in range(1, 8))
    middle = next(n for n in range(len(answer)) if tokenizer.decode(answer[:n]).endswith(prefixes))

    async def dies(attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.emit(worker_pb2.DecodeStarted())
        await pair.generate(attempt, 0, middle)
        await asyncio.sleep(0.02)
        await attempt.worker.die()

    await system.add(worker_type("decode", "decode-0", dies))
    await system.add(worker_type("decode", "decode-1", pair.decode))
    for _ in range(2):
        body = (await system.complete(max_tokens=100, stop=["world, n"])).json()
        assert body["choices"][0]["text"] == "hello "
        assert body["choices"][0]["finish_reason"] == "stop"


async def test_death_of_the_prefill_worker_before_the_handoff(make_system, worker_type, pair):
    system = await make_system()

    async def dies(attempt):
        attempt.tokens(0, pair.answer[:1])
        await asyncio.sleep(0.02)
        await attempt.worker.die()

    await system.add(worker_type("prefill", "prefill-0", dies))
    await system.add(worker_type("prefill", "prefill-1", pair.prefill))
    await system.add(worker_type("decode", "decode-0", pair.decode))
    for _ in range(2):
        assert (await system.complete(max_tokens=100)).json()["choices"][0]["text"] == ANSWER_TEXT
    decode = system.workers["decode-0"]
    resumed = [attempt for attempt in decode.attempts if attempt.spec.emitted_token_ids]
    assert [attempt.key[1] for attempt in resumed] == [2]
    await system.until(lambda: (resumed[0].key[0], 1) in decode.cancelled)


async def test_death_of_the_prefill_worker_after_the_handoff_changes_nothing(make_system, worker_type, pair):
    system = await make_system()

    async def dies(attempt):
        await pair.prefill(attempt)
        await asyncio.sleep(0.002)
        await attempt.worker.die()

    await system.add(worker_type("prefill", "prefill-0", dies))
    await system.add(worker_type("decode", "decode-0", pair.decode))
    assert (await system.complete(max_tokens=100)).json()["choices"][0]["text"] == ANSWER_TEXT
    assert len(system.workers["decode-0"].attempts) == 1


async def test_only_decode_worker_dies_and_comes_back(make_system, worker_type, pair, answer, read_sse):
    system = await make_system()

    async def dies(attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.emit(worker_pb2.DecodeStarted())
        await pair.generate(attempt, 0, 3)
        await attempt.worker.die()

    doomed = await system.add(worker_type("decode", "decode-0", dies))
    request = asyncio.create_task(system.complete(max_tokens=100, stream=True, return_token_ids=True))
    await system.until(lambda: not system.gateway.is_ready())
    await asyncio.to_thread(doomed.lease.release)
    refused = await system.complete(max_tokens=3)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "worker_unavailable"
    system.workers["old"] = doomed
    await system.add(worker_type("decode", "decode-0", pair.decode))
    *chunks, done = read_sse((await request).text)
    assert done == "[DONE]"
    assert delivered(chunks) == (ANSWER_TEXT, answer)


@pytest.mark.parametrize(
    "error", [TransferFailed("x"), WorkerUnavailable("x"), InternalError("x"), LayoutMismatch("x")]
)
async def test_failed_attempt_is_tried_again(make_system, worker_type, pair, error):
    system = await make_system()
    failures = []

    async def fails_once(attempt):
        if failures:
            return await pair.prefill(attempt)
        failures.append(attempt.key)
        attempt.emit(worker_pb2.PrefillStarted())
        attempt.fail(error)

    await system.add(worker_type("prefill", "prefill-0", fails_once))
    await system.add(worker_type("decode", "decode-0", pair.decode))
    assert (await system.complete(max_tokens=100)).json()["choices"][0]["text"] == ANSWER_TEXT
    attempts = system.workers["decode-0"].attempts
    assert [attempt.key[1] for attempt in attempts] == [1, 2]
    # A pair that failed the request is not used again. The decode worker then does the whole work.
    assert attempts[1].request.local_prefill == (not isinstance(error, InternalError))
    await system.until(lambda: attempts[0].key in system.workers["decode-0"].cancelled)


async def test_attempts_are_limited(make_system, worker_type, pair):
    system = await make_system()

    async def fails(attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.fail(WorkerUnavailable("no more"))

    await system.add(worker_type("decode", "decode-0", fails))
    response = await system.complete(max_tokens=100)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "worker_unavailable"
    assert len(system.workers["decode-0"].attempts) == 3


async def test_gap_is_a_failure_and_never_shown(make_system, worker_type, pair, answer):
    system = await make_system()

    async def skips(attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.emit(worker_pb2.DecodeStarted())
        attempt.tokens(0, answer[:2])
        attempt.tokens(3, answer[3:6])
        attempt.finish()

    await system.add(worker_type("decode", "decode-0", skips))
    await system.add(worker_type("decode", "decode-1", pair.decode))
    for _ in range(2):
        body = (await system.complete(max_tokens=100, return_token_ids=True)).json()
        assert delivered([body]) == (ANSWER_TEXT, answer)


async def test_gap_after_the_handoff_is_a_failure(make_system, worker_type, pair, answer):
    """The prefill worker never sent the first token: what the decode worker sent cannot be delivered."""
    system = await make_system()
    calls = []

    async def forgets_once(attempt):
        calls.append(attempt)
        if len(calls) > 1:
            return await pair.prefill(attempt)
        attempt.emit(worker_pb2.HandedOff())
        pair.event(attempt).set()

    await system.add(worker_type("prefill", "prefill-0", forgets_once))
    await system.add(worker_type("decode", "decode-0", pair.decode))
    body = (await system.complete(max_tokens=100, return_token_ids=True)).json()
    assert delivered([body]) == (ANSWER_TEXT, answer)
    assert len(calls) == 2


async def test_repeats_are_dropped(make_system, worker_type, pair, answer):
    system = await make_system()

    async def repeats(attempt):
        attempt.emit(worker_pb2.Admitted())
        for end in (2, 2, 4, len(answer)):
            attempt.tokens(0, answer[:end])
        attempt.finish(inference_pb2.FINISH_REASON_STOP)

    await system.add(worker_type("decode", "decode-0", repeats))
    assert delivered([(await system.complete(max_tokens=100, return_token_ids=True)).json()]) == (ANSWER_TEXT, answer)


async def test_events_of_a_dead_attempt_reach_nobody(make_system, worker_type, pair, answer):
    system = await make_system()
    old = []

    async def fails_then_talks(attempt):
        if old:
            old[0].tokens(0, [9, 9, 9])
            old[0].finish()
            await asyncio.sleep(0.01)
            old[0].tokens(3, [9])
            return await pair.decode(attempt)
        old.append(attempt)
        attempt.emit(worker_pb2.Admitted())
        attempt.fail(WorkerUnavailable("leaving"))

    await system.add(worker_type("decode", "decode-0", fails_then_talks))
    body = (await system.complete(max_tokens=100, return_token_ids=True)).json()
    assert delivered([body]) == (ANSWER_TEXT, answer)
    assert system.gateway.topology.decode_session("decode-0").num_dropped_events >= 2


async def test_a_worker_that_does_not_say_whose_a_token_is_is_not_trusted(make_system, worker_type, pair, answer):
    system = await make_system()
    calls = []

    async def confuses_once(attempt):
        calls.append(attempt)
        if len(calls) > 1:
            return await pair.decode(attempt)
        attempt.emit(worker_pb2.Admitted())
        step = StepTokens([attempt.handle, attempt.handle + 1], [0], answer[:2])
        attempt.worker.sessions.emit_step(attempt.session, step)

    await system.add(worker_type("decode", "decode-0", confuses_once))
    body = (await system.complete(max_tokens=100, return_token_ids=True)).json()
    assert delivered([body]) == (ANSWER_TEXT, answer)
    assert len(calls) == 2
    assert calls[0].session.is_closed


async def test_tokens_of_nobody_here_are_counted_and_dropped(make_system, worker_type, pair, answer):
    system = await make_system()

    async def talks_of_others(attempt):
        for handle in (attempt.handle + 1, 0, 2**64 - 1):
            attempt.worker.sessions.emit_step(attempt.session, StepTokens([handle], [0], [9]))
        await system.until(lambda: session.num_dropped_events >= 3)
        dropped.append(session.num_dropped_events)  # later the answer's own end may find nobody, too
        await pair.decode(attempt)

    dropped = []
    await system.add(worker_type("decode", "decode-0", talks_of_others))
    session = system.gateway.topology.decode_session("decode-0")
    body = (await system.complete(max_tokens=100, return_token_ids=True)).json()
    assert delivered([body]) == (ANSWER_TEXT, answer)
    assert dropped == [3]
    assert not session._handles
    assert not session._sinks_by_handle


async def test_a_worker_of_before_there_were_handles_answers_as_ever(make_system, worker_type, pair, answer):
    system = await make_system()
    await system.add(worker_type("decode", "decode-0", pair.decode, knows_handles=False))
    body = (await system.complete(max_tokens=100, return_token_ids=True)).json()
    assert delivered([body]) == (ANSWER_TEXT, answer)


async def test_worker_that_sends_too_many_tokens_is_not_trusted(make_system, worker_type, pair):
    system = await make_system()

    async def babbles(attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.tokens(0, [7] * 50)

    await system.add(worker_type("decode", "decode-0", babbles))
    response = await system.complete(max_tokens=3)
    assert response.status_code == 500
    assert "token" not in response.json()["error"]["message"]


async def test_refused_by_one_taken_by_another(make_system, worker_type, pair):
    system = await make_system(routing="round_robin")
    await system.add(worker_type("decode", "decode-0", refuse_full))
    await system.add(worker_type("decode", "decode-1", pair.decode))
    responses = [await system.complete(max_tokens=100) for _ in range(2)]
    assert [response.json()["choices"][0]["text"] for response in responses] == [ANSWER_TEXT] * 2
    assert len(system.workers["decode-0"].attempts) == 1


async def test_refused_prefill_goes_to_another_prefill_worker(make_system, worker_type, pair):
    system = await make_system(routing="round_robin")
    await system.add(worker_type("prefill", "prefill-0", refuse_full))
    await system.add(worker_type("prefill", "prefill-1", pair.prefill))
    await system.add(worker_type("decode", "decode-0", pair.decode))
    for _ in range(2):
        assert (await system.complete(max_tokens=100)).json()["choices"][0]["text"] == ANSWER_TEXT
    assert len(system.workers["decode-0"].attempts) == 2


async def refuse_as_invalid(attempt):
    attempt.refuse(InvalidRequest("top_p is 0 but must be more"))


async def test_invalid_for_one_worker_alone_is_served_by_another(make_system, worker_type, pair):
    system = await make_system(routing="round_robin")
    await system.add(worker_type("decode", "decode-0", refuse_as_invalid))
    await system.add(worker_type("decode", "decode-1", pair.decode))
    responses = [await system.complete(max_tokens=100) for _ in range(2)]
    assert [response.json()["choices"][0]["text"] for response in responses] == [ANSWER_TEXT] * 2


@pytest.mark.parametrize("num_workers", [1, 3])
async def test_invalid_for_two_attempts_is_the_clients_error_and_not_tried_again(make_system, worker_type, num_workers):
    system = await make_system(routing="round_robin")
    for number in range(num_workers):
        await system.add(worker_type("decode", f"decode-{number}", refuse_as_invalid))
    response = await system.complete(max_tokens=100)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "refused_by_workers")
    assert "top_p is 0 but must be more" in response.json()["error"]["message"]
    assert "retry-after" not in response.headers
    assert [len(worker.attempts) for worker in system.workers.values()] == [2] * num_workers


async def test_full_cluster_queues_in_order_and_refuses_beyond_the_bound(make_system, worker_type, pair):
    system = await make_system(max_queued_requests=2)
    room, order = [], []

    async def takes_when_told(attempt):
        if not room:
            return await refuse_full(attempt)
        room.pop()
        order.append(len(attempt.spec.prompt_token_ids))
        await pair.decode(attempt)
        room.append(1)
        attempt.worker.sessions.load_changed()

    await system.add(worker_type("decode", "decode-0", takes_when_told))
    first = asyncio.create_task(system.http.post("/v1/completions", json={"prompt": [5]}))
    await system.until(lambda: system.gateway.requests.num_queued == 1)
    second = asyncio.create_task(system.http.post("/v1/completions", json={"prompt": [5, 6]}))
    await system.until(lambda: system.gateway.requests.num_queued == 2)
    refused = await system.http.post("/v1/completions", json={"prompt": [5, 6, 7]})
    assert refused.status_code == 503
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.json()["error"]["type"] == "overloaded_error"
    assert (await system.http.get("/cluster")).json()["requests"] == {"queued": 2, "running": 0}
    room.append(1)
    assert [response.status_code for response in await asyncio.gather(first, second)] == [200, 200]
    assert order == [1, 2]


async def test_full_prefill_workers_send_the_request_back_to_the_queue(make_system, worker_type, pair):
    system = await make_system()
    refusals = []

    async def full_at_first(attempt):
        if len(refusals) < 3:
            refusals.append(attempt.key)
            return await refuse_full(attempt)
        await pair.prefill(attempt)

    await system.add(worker_type("prefill", "prefill-0", full_at_first))
    await system.add(worker_type("decode", "decode-0", pair.decode))
    assert (await system.complete(max_tokens=100)).json()["choices"][0]["text"] == ANSWER_TEXT
    decode = system.workers["decode-0"]
    assert [attempt.key[1] for attempt in decode.attempts] == [1, 2, 3, 4]
    await system.until(lambda: decode.cancelled[:3] == [attempt.key for attempt in decode.attempts[:3]])


async def test_queue_has_a_longest_wait(make_system, worker_type):
    system = await make_system(max_queue_wait_s=0.3)
    await system.add(worker_type("decode", "decode-0", refuse_full))
    response = await system.complete()
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "server_overloaded"


async def test_batch_work_waits_longer_than_others(make_system, worker_type, pair):
    system, is_full = await make_system(max_queue_wait_s=0.2), True

    async def full_at_first(attempt):
        await (refuse_full if is_full else pair.decode)(attempt)

    await system.add(worker_type("decode", "decode-0", full_at_first))
    batch = asyncio.create_task(system.complete(max_tokens=100, service_class="batch"))
    assert (await system.complete()).status_code == 503
    assert system.gateway.requests.num_queued == 1
    is_full = False
    assert (await batch).json()["choices"][0]["text"] == ANSWER_TEXT


OUTSIDE = "token id 512 is outside the model's vocabulary of 512"


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("is_taken_first", [False, True])
async def test_a_request_that_a_worker_calls_wrong_is_tried_elsewhere(
    make_system, worker_type, pair, role, is_taken_first
):
    """The gateway has checked the request, so the worker is at fault."""
    system = await make_system()

    async def refuses(attempt):
        if is_taken_first:
            attempt.emit(worker_pb2.Admitted() if role == "decode" else worker_pb2.PrefillStarted())
            attempt.fail(InvalidRequest(OUTSIDE, field="prompt"))
        else:
            attempt.refuse(InvalidRequest(OUTSIDE, field="prompt"))

    wrong = await system.add(worker_type(role, f"{role}-0", refuses))
    for other in ("prefill", "decode"):
        await system.add(worker_type(other, f"{other}-1", getattr(pair, other)))
    for number in range(4):
        response = await system.complete(prompt=[5, 6, number], max_tokens=100)
        assert response.json()["choices"][0]["text"] == ANSWER_TEXT
    assert wrong.attempts, "nothing went to the worker that refuses"


async def test_no_decode_worker_is_said_at_once(make_system, worker_type, pair):
    system = await make_system()
    await system.add(worker_type("prefill", "prefill-0", pair.prefill))
    response = await system.complete()
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1


async def test_a_worker_that_was_silent_and_is_still_listed_is_connected_again(make_system, worker_type, pair):
    system = await make_system()
    worker = await system.add(worker_type("decode", "decode-0", pair.decode))
    (member,) = system.gateway.topology.members()
    silent = member.session
    silent._heard_at_s -= 100
    silent.check_silence(asyncio.get_running_loop().time())
    assert not silent.is_up
    await system.until(lambda: member.session is not silent and member.session.is_up)
    assert member.is_listed
    assert list(system.gateway.topology.members()) == [member]
    assert (await system.complete()).status_code == 200
    assert worker.attempts


async def hold(attempt):
    """Takes the attempt, sends a token and then nothing."""
    attempt.emit(worker_pb2.Admitted())
    attempt.emit(worker_pb2.DecodeStarted())
    attempt.tokens(0, [40])


async def take_and_be_silent(attempt):
    attempt.emit(worker_pb2.Admitted())


async def never_answer(attempt):
    await asyncio.sleep(0)


@pytest.mark.parametrize("script", [never_answer, take_and_be_silent, hold], ids=["asked", "admitted", "decoding"])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_client_that_leaves_is_cancelled_on_the_worker(make_system, worker_type, script, streams):
    system = await make_system()
    decode = await system.add(worker_type("decode", "decode-0", script))
    request = asyncio.create_task(system.complete(stream=streams))
    await system.until(lambda: bool(decode.attempts))
    await asyncio.sleep(0.05)
    request.cancel()
    await system.until(lambda: decode.cancelled == [decode.attempts[0].key])
    await system.until(lambda: not system.gateway.requests.num_running)
    assert (await system.http.get("/cluster")).json()["requests"] == {"queued": 0, "running": 0}


async def test_client_that_leaves_the_queue_is_forgotten(make_system, worker_type):
    system = await make_system()
    await system.add(worker_type("decode", "decode-0", refuse_full))
    request = asyncio.create_task(system.complete())
    await system.until(lambda: system.gateway.requests.num_queued == 1)
    request.cancel()
    await system.until(lambda: system.gateway.requests.num_queued == 0)


async def test_cancelled_grpc_call_is_cancelled_on_the_worker(make_system, worker_type):
    system = await make_system()
    decode = await system.add(worker_type("decode", "decode-0", hold))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest(text="x"))
        assert (await call.read()).token_ids == [40]
        call.cancel()
        await system.until(lambda: decode.cancelled == [decode.attempts[0].key])


async def test_leaving_one_of_several_choices_cancels_all(make_system, worker_type):
    system = await make_system()
    decode = await system.add(worker_type("decode", "decode-0", hold))
    request = asyncio.create_task(system.complete(stream=True, n=3))
    await system.until(lambda: len(decode.attempts) == 3)
    request.cancel()
    await system.until(lambda: len(decode.cancelled) == 3)


@pytest.mark.parametrize("script", [never_answer, take_and_be_silent, refuse_full], ids=["asked", "admitted", "queued"])
async def test_deadline_ends_every_wait(make_system, worker_type, script):
    system = await make_system(max_request_s=0.4)
    await system.add(worker_type("decode", "decode-0", script))
    response = await system.complete()
    assert response.status_code == 504
    assert response.json()["error"]["type"] == "timeout_error"


async def test_deadline_in_mid_stream_is_an_event_and_no_done(make_system, worker_type, read_sse):
    system = await make_system(max_request_s=0.4)
    decode = await system.add(worker_type("decode", "decode-0", hold))
    response = await system.complete(stream=True)
    assert response.status_code == 200
    events = read_sse(response.text)
    assert events[-1]["error"]["code"] == "deadline_exceeded"
    assert "[DONE]" not in events
    await system.until(lambda: len(decode.cancelled) == 1)


async def test_grpc_deadline_is_the_requests(make_system, worker_type):
    system = await make_system()
    decode = await system.add(worker_type("decode", "decode-0", take_and_be_silent))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await stub.GenerateUnary(inference_pb2.GenerateRequest(text="x"), timeout=0.5)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert 0 < decode.attempts[0].spec.deadline_ms <= 600
    await system.until(lambda: len(decode.cancelled) == 1)


async def test_worker_that_reports_the_deadline_is_believed(make_system, worker_type):
    system = await make_system()

    async def late(attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.fail(DeadlineExceeded("too late"))

    await system.add(worker_type("decode", "decode-0", late))
    assert (await system.complete()).status_code == 504


async def test_slow_reader_costs_bounded_memory_and_disturbs_nobody(make_system, worker_type, pair_type, answer):
    system = await make_system()
    long_answer = (answer[:-1] * 40)[:400]
    await system.add_pair(pair_type(long_answer, group=1))
    body = json.dumps({"prompt": [5], "max_tokens": 400, "stream": True}).encode()
    head = LINE + b"content-length: %d\r\n\r\n"
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        slow.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(slow, ("127.0.0.1", system.gateway.http_port))
        await loop.sock_sendall(slow, head % len(body) + body)
        await system.until(lambda: bool(system.workers["decode-0"].attempts))
        assert (await system.complete(max_tokens=20)).status_code == 200
    await system.until(lambda: system.gateway.requests.num_running == 0)


async def test_reader_that_takes_nothing_is_dropped(make_system, worker_type, answer, monkeypatch):
    monkeypatch.setattr("gateway.http.exchange.SLOW_CLIENT_LIMIT_S", 0.3)
    system = await make_system()

    async def floods(attempt):
        attempt.emit(worker_pb2.Admitted())
        for index in range(0, 400, 4):
            attempt.tokens(index, (answer * 40)[index : index + 4])
            await asyncio.sleep(0.005)

    decode = await system.add(worker_type("decode", "decode-0", floods))
    body = json.dumps({"prompt": [5], "max_tokens": 500, "stream": True, "logprobs": 1, "ignore_eos": True}).encode()
    head = LINE + b"content-length: %d\r\n\r\n"
    # The kernel takes a few hundred KiB off the gateway's hands; small buffers on both ends make it stop soon.
    for server in system.gateway._http._server.servers:
        for listener in server.sockets:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
    monkeypatch.setattr(CompletionWriter, "chunk", lambda *arguments: b"data: " + b"x" * 65536)
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        slow.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(slow, ("127.0.0.1", system.gateway.http_port))
        await loop.sock_sendall(slow, head % len(body) + body)
        await system.until(lambda: len(decode.cancelled) == 1)


async def test_silent_worker_is_given_up(make_system, worker_type, pair, answer, monkeypatch):
    monkeypatch.setattr("gateway.topology.session.SILENCE_LIMIT_S", 1.5)
    monkeypatch.setattr("gateway.topology.session.SLOW_LIMIT_S", 1.5)
    system = await make_system()
    frozen = await system.add(worker_type("decode", "decode-0", hold))
    request = asyncio.create_task(system.complete(max_tokens=100, return_token_ids=True))
    await system.until(lambda: len(frozen.attempts) == 1)
    healthy = await system.add(worker_type("decode", "decode-1", pair.decode))
    for session in frozen.sessions.sessions:
        session.wake = asyncio.Event()
        session.wake.set = lambda: None
    monkeypatch.setattr(frozen.sessions, "_wait", lambda session: asyncio.sleep(3600))
    body = (await request).json()
    assert body["choices"][0]["token_ids"] == [40, *answer[1:]]
    assert list(healthy.attempts[0].spec.emitted_token_ids) == [40]


async def test_restarted_worker_gets_a_new_session(make_system, worker_type, pair):
    system = await make_system()
    first = await system.add(worker_type("decode", "decode-0", pair.decode))
    assert (await system.complete()).status_code == 200
    await first.die()
    system.workers["first"] = first
    second = await system.add(worker_type("decode", "decode-0", pair.decode))
    assert (await system.complete()).status_code == 200
    assert len(second.attempts) == 1
    members = system.gateway.topology.members()
    assert [member.record.incarnation for member in members] == [second.incarnation]


async def test_worker_whose_stream_broke_is_reached_again(make_system, worker_type, pair):
    system = await make_system()
    worker = await system.add(worker_type("decode", "decode-0", pair.decode))
    worker.sessions.close()
    await system.until(lambda: system.gateway.topology.num_ready("decode") == 0)
    assert system.gateway.topology.members()[0].state == "lost"
    await system.until(lambda: system.gateway.topology.num_ready("decode") == 1)
    assert (await system.complete()).status_code == 200


async def test_new_requests_wait_for_a_worker_that_is_away_for_a_moment(make_system, worker_type, pair, monkeypatch):
    """On a machine that has no time for it, the only worker may be silent for too long, and be back at once."""
    system = await make_system()
    worker = await system.add(worker_type("decode", "decode-0", pair.decode))
    may_return = asyncio.Event()
    connect = DecodeSession.run

    async def run(session):
        await may_return.wait()
        await connect(session)

    monkeypatch.setattr(DecodeSession, "run", run)
    worker.sessions.close()
    await system.until(lambda: system.gateway.topology.num_ready("decode") == 0)
    waiting = asyncio.create_task(system.complete())
    await system.until(lambda: system.gateway.requests.num_queued == 1)
    may_return.set()
    assert (await waiting).status_code == 200


async def test_a_worker_is_waited_for_as_long_as_its_lease_lasts(make_system, worker_type, pair, monkeypatch):
    system = await make_system()
    worker = await system.add(worker_type("decode", "decode-0", pair.decode))

    async def run(session):
        await asyncio.Event().wait()

    monkeypatch.setattr(DecodeSession, "run", run)
    worker.sessions.close()
    await system.until(lambda: system.gateway.topology.num_ready("decode") == 0)
    waiting = asyncio.create_task(system.complete())
    await system.until(lambda: system.gateway.requests.num_queued == 1)
    await worker.stop()
    refused = await waiting
    assert refused.status_code == 503
    assert refused.json()["error"]["message"] == "no decode worker is ready"
    assert refused.headers["retry-after"] == "2"
    assert system.gateway.requests.num_queued == 0


@pytest.mark.parametrize("has_workers", [True, False])
async def test_what_comes_before_a_new_gateway_has_read_which_workers_there_are_waits_for_that(
    make_system, pair, monkeypatch, has_workers
):
    if has_workers:
        await (await make_system()).add_pair(pair)
    may_read = asyncio.Event()

    async def watch_later(*arguments, **settings):
        await may_read.wait()
        async for membership in watch_workers(*arguments, **settings):
            yield membership

    monkeypatch.setattr("gateway.assembly.watch_workers", watch_later)
    system = await make_system()
    waiting = asyncio.create_task(system.complete())
    await system.until(lambda: system.gateway.requests.num_queued == 1)
    may_read.set()
    response = await waiting
    assert response.status_code == (200 if has_workers else 503)
    assert system.gateway.requests.num_queued == 0


async def test_nobody_waits_beyond_the_deadline_for_a_worker(make_system, worker_type, pair, monkeypatch):
    system = await make_system(max_request_s=0.3)
    worker = await system.add(worker_type("decode", "decode-0", pair.decode))
    monkeypatch.setattr(DecodeSession, "run", lambda session: asyncio.Event().wait())
    worker.sessions.close()
    await system.until(lambda: system.gateway.topology.num_ready("decode") == 0)
    assert (await system.complete()).status_code == 504
    assert system.gateway.requests.num_queued == 0


HOURS_S = 3600.0


@pytest.fixture
def lose(monkeypatch):
    """Breaks the stream to a worker for ever, while its lease stays valid; `wait_s` is how long requests wait, `away_s`
    how long a worker counts as away for a moment."""

    async def lose(system, worker, *, wait_s=HOURS_S, away_s=HOURS_S):
        monkeypatch.setattr("gateway.requests.placing.LEASE_TTL_S", wait_s)
        monkeypatch.setattr("gateway.topology.members.LEASE_TTL_S", away_s)
        monkeypatch.setattr(DecodeSession, "run", lambda session: asyncio.Event().wait())
        worker.sessions.close()
        await system.until(lambda: system.gateway.topology.num_ready("decode") == 0)

    return lose


async def test_a_worker_that_cannot_be_reached_is_not_waited_for_as_long_as_its_lease_is_renewed(
    make_system, worker_type, pair, lose
):
    system = await make_system()
    worker = await system.add(worker_type("decode", "decode-0", pair.decode))
    await lose(system, worker, wait_s=0.3)
    assert (await system.complete()).json()["error"]["message"] == "no decode worker is ready"
    assert [member.is_listed for member in system.gateway.topology.members()] == [True]


async def test_nobody_waits_for_a_worker_that_has_been_away_for_longer_than_a_lease_lasts(
    make_system, worker_type, pair, lose
):
    system = await make_system()
    worker = await system.add(worker_type("decode", "decode-0", pair.decode))
    await lose(system, worker, away_s=0.2)
    await system.until(lambda: not system.gateway.topology.is_away("decode", "tiny", audience=Audience()))
    assert (await system.complete()).status_code == 503
    assert [member.is_listed for member in system.gateway.topology.members()] == [True]


async def test_requests_wait_for_the_first_connection_to_a_worker(make_system, worker_type, pair, lose):
    """A new gateway beside many workers connects to some of them later than a lease lasts."""
    system = await make_system()
    worker = await system.add(worker_type("decode", "decode-0", pair.decode))
    topology = system.gateway.topology
    await lose(system, worker, wait_s=0.0, away_s=0.0)
    assert (await system.complete()).status_code == 503
    topology.settled_at_s = topology.now_s() + HOURS_S
    request = asyncio.create_task(system.complete(max_tokens=100))
    await system.until(lambda: system.gateway.requests._placing._before_queue.total() == 1)
    await settle()
    assert not request.done()
    topology.settled_at_s = topology.now_s()
    assert (await system.complete()).status_code == 503, "the time is over, and nothing has come"
    request.cancel()
    await asyncio.wait((request,))


async def test_nobody_waits_for_a_worker_while_redis_has_been_away_for_longer_than_a_lease_lasts(
    make_system, worker_type, pair, lose
):
    """Nothing can tell then whether the worker is still registered."""
    with EmbeddedRedis(port=free_port()) as redis:
        system = await make_system(redis=redis.url)
        worker = await system.add(worker_type("decode", "decode-0", pair.decode))
        topology = system.gateway.topology
        redis.kill()
        await system.until(lambda: topology.stale_since_s is not None)
        topology.stale_since_s -= HOURS_S + 1
        await lose(system, worker)
        assert (await system.complete()).status_code == 503
        redis.start()
        await system.until(lambda: topology.stale_since_s is None)


async def test_those_who_wait_for_a_worker_count_in_the_queues_bound(make_system, worker_type, pair, lose):
    system = await make_system(max_queued_requests=1)
    worker = await system.add(worker_type("decode", "decode-0", pair.decode))
    await lose(system, worker)
    waiting = asyncio.create_task(system.complete())
    await system.until(lambda: system.gateway.requests.num_queued == 1)
    refused = await system.complete()
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "overloaded_error")
    assert system.gateway.requests.num_queued == 1
    waiting.cancel()
    await system.until(lambda: system.gateway.requests.num_queued == 0)


async def test_who_waits_for_a_worker_is_told_that_the_gateway_leaves(make_system, worker_type, pair, lose):
    system = await make_system(drain_s=0.0)
    worker = await system.add(worker_type("decode", "decode-0", pair.decode))
    await lose(system, worker)
    waiting = asyncio.create_task(system.complete())
    await system.until(lambda: system.gateway.requests.num_queued == 1)
    await system.gateway.stop()
    assert (await waiting).json()["error"]["message"] == "the gateway is leaving"


async def test_draining_worker_gets_no_new_request(make_system, worker_type, pair):
    system = await make_system()
    leaving = await system.add(worker_type("decode", "decode-0", pair.decode))
    leaving.load.state = cluster_pb2.WORKER_STATE_DRAINING
    leaving.sessions.load_changed()
    await system.until(lambda: system.gateway.topology.members()[0].state == "draining")
    await system.add(worker_type("decode", "decode-1", pair.decode))
    for _ in range(3):
        assert (await system.complete()).status_code == 200
    assert not leaving.attempts


async def test_same_running_id_is_refused_and_free_again_afterwards(make_system, worker_type, pair):
    system = await make_system()
    decode = await system.add(worker_type("decode", "decode-0", hold))
    headers = {"x-request-id": "twice"}
    first = asyncio.create_task(system.http.post("/v1/completions", json={"prompt": "x"}, headers=headers))
    await system.until(lambda: bool(decode.attempts))
    second = await system.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    assert second.status_code == 409
    assert second.json()["error"]["type"] == "invalid_request_error"
    first.cancel()
    await system.until(lambda: bool(decode.cancelled))
    decode.script = pair.decode
    assert (await system.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)).status_code == 200


async def test_requests_go_on_while_redis_is_away_and_after_it_forgot(model_folder, worker_type, pair):
    from gateway.assembly import Gateway
    from gateway.config import GatewayConfig

    with EmbeddedRedis(port=free_port()) as redis:
        config = GatewayConfig(
            model=model_folder, redis=redis.url, cluster="away", http_port=0, grpc_port=0, drain_s=0.1
        )
        gateway = Gateway(config)
        await gateway.start()
        worker = worker_type("decode", "decode-0", pair.decode)
        await worker.start(redis.url, "away")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.http_port}", timeout=HANG_LIMIT_S) as http:
            async with asyncio.timeout(HANG_LIMIT_S):
                while (await http.get("/ready")).status_code != 200:  # noqa: ASYNC110 - across sockets
                    await asyncio.sleep(0.02)
            redis.kill()
            for _ in range(3):
                response = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 100})
                assert response.json()["choices"][0]["text"] == ANSWER_TEXT
                await asyncio.sleep(0.4)
            redis.start()
            for _ in range(6):
                assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 200
                assert (await http.get("/ready")).status_code == 200
                await asyncio.sleep(0.2)
        await worker.stop()
        await gateway.stop()


async def test_stopping_gateway_lets_answers_end(make_system, worker_type, pair):
    system = await make_system(drain_s=HANG_LIMIT_S)
    release = asyncio.Event()

    async def waits(attempt):
        await release.wait()
        await pair.decode(attempt)

    decode = await system.add(worker_type("decode", "decode-0", waits))
    request = asyncio.create_task(system.complete(max_tokens=100))
    await system.until(lambda: bool(decode.attempts))
    stopping = asyncio.create_task(system.gateway.stop())
    await system.until(lambda: not system.gateway.is_ready())
    release.set()
    assert (await request).json()["choices"][0]["text"] == ANSWER_TEXT
    await stopping


@pytest.mark.parametrize("script", [never_answer, take_and_be_silent, refuse_full], ids=["asked", "admitted", "queued"])
async def test_what_outlasts_the_drain_is_told_so(make_system, worker_type, script):
    system = await make_system(drain_s=0.2)
    decode = await system.add(worker_type("decode", "decode-0", script))
    request = asyncio.create_task(system.complete(max_tokens=100))
    await system.until(lambda: bool(decode.attempts))
    await system.gateway.stop()
    response = await request
    assert response.status_code == 503
    assert "leaving" in response.json()["error"]["message"]
    assert response.headers["retry-after"]


async def test_a_stream_that_outlasts_the_drain_ends_with_an_error(make_system, worker_type, read_sse):
    system = await make_system(drain_s=0.2)
    await system.add(worker_type("decode", "decode-0", hold))
    request = asyncio.create_task(system.complete(stream=True))
    await system.until(lambda: system.gateway.requests.num_running == 1)
    await asyncio.sleep(0.05)
    await system.gateway.stop()
    events = read_sse((await request).text)
    assert events[-1]["error"]["code"] == "server_overloaded"
    assert "[DONE]" not in events


async def test_a_death_after_the_handoff_goes_to_the_prefill_worker_that_keeps_the_pages(
    make_system, worker_type, pair, answer
):
    system = await make_system(routing="round_robin")

    async def dies(attempt):
        attempt.emit(worker_pb2.Admitted())
        await pair.event(attempt).wait()
        attempt.emit(worker_pb2.DecodeStarted())
        await attempt.worker.die()

    for number in range(3):
        await system.add(worker_type("prefill", f"prefill-{number}", pair.prefill))
    await system.add(worker_type("decode", "decode-0", dies))
    body = asyncio.create_task(system.complete(max_tokens=100, return_token_ids=True))
    await system.until(lambda: not system.gateway.is_ready() and bool(system.workers["decode-0"].attempts))
    await system.add(worker_type("decode", "decode-1", pair.decode))
    assert delivered([(await body).json()]) == (ANSWER_TEXT, answer)
    asked = [worker for worker in system.workers.values() if worker.role == "prefill" and worker.attempts]
    assert [[attempt.key[1] for attempt in worker.attempts] for worker in asked] == [[1, 2]]


async def test_pages_are_not_kept_for_ever(make_system, worker_type, pair, monkeypatch):
    monkeypatch.setattr("gateway.requests.answer.KEPT_PROMPT_S", 0.0)
    monkeypatch.setattr("gateway.requests.quarantine.WORD_WAIT_S", HANG_LIMIT_S)
    system = await make_system(routing="round_robin")
    prefills = [await system.add(worker_type("prefill", f"prefill-{number}", pair.prefill)) for number in range(2)]

    async def fails_once(attempt):
        if attempt.key[1] > 1:
            return await pair.decode(attempt)
        attempt.emit(worker_pb2.Admitted())
        await pair.event(attempt).wait()
        attempt.fail(WorkerUnavailable("no more"))

    await system.add(worker_type("decode", "decode-0", fails_once))
    await system.complete(max_tokens=100)
    assert [len(worker.attempts) for worker in prefills] == [1, 1]


async def test_a_transfer_that_fails_is_tried_with_another_decode_worker_first(make_system, worker_type, pair):
    system = await make_system()
    failed = []

    async def fails_once(attempt):
        if failed:
            return await pair.prefill(attempt)
        failed.append(attempt)
        attempt.fail(TransferFailed("the way broke"))

    await system.add(worker_type("prefill", "prefill-0", fails_once))
    for number in range(2):
        worker = worker_type("decode", f"decode-{number}", pair.decode)
        worker.load.pages.free -= 50 * number  # the first one would be taken each time
        await system.add(worker)
    assert (await system.complete(max_tokens=100)).json()["choices"][0]["text"] == ANSWER_TEXT
    assert [len(system.workers[f"decode-{number}"].attempts) for number in range(2)] == [1, 1]


async def test_retries_wait_for_their_turn_and_none_is_lost(make_system, worker_type, pair, monkeypatch):
    monkeypatch.setattr(
        "gateway.requests.failover.RetryBudget", lambda now_s: RetryBudget(RetryLimits(0.0, 20.0, 2.0), now_s=now_s)
    )
    system = await make_system()

    async def fails_once(attempt):
        if attempt.key[1] == 1:
            attempt.fail(TransferFailed("the way broke"))
        else:
            await pair.prefill(attempt)

    await system.add(worker_type("prefill", "prefill-0", fails_once))
    await system.add(worker_type("decode", "decode-0", pair.decode))
    started_s = time.monotonic()
    answers = await asyncio.gather(*(system.complete(max_tokens=100) for _ in range(12)))
    assert [body.json()["choices"][0]["text"] for body in answers] == [ANSWER_TEXT] * 12
    assert system.total("tandem_delayed_retries_total") == 10
    assert time.monotonic() - started_s >= 0.4


async def test_a_deadline_ends_the_wait_for_a_turn(make_system, worker_type, pair, monkeypatch):
    monkeypatch.setattr(
        "gateway.requests.failover.RetryBudget", lambda now_s: RetryBudget(RetryLimits(0.0, 0.05, 1.0), now_s=now_s)
    )
    system = await make_system(max_request_s=0.5, failover_wait_s=60.0)

    async def fails(attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.fail(WorkerUnavailable("no more"))

    await system.add(worker_type("decode", "decode-0", fails))
    assert (await system.complete(max_tokens=100)).status_code == 504


async def test_deaths_do_not_draw_on_the_budget(make_system, worker_type, pair, monkeypatch):
    monkeypatch.setattr(
        "gateway.requests.failover.RetryBudget", lambda now_s: RetryBudget(RetryLimits(0.0, 0.001, 0.0), now_s=now_s)
    )
    system = await make_system(failover_wait_s=60.0)

    async def dies(attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.emit(worker_pb2.DecodeStarted())
        await pair.generate(attempt, 0, 3)
        await attempt.worker.die()

    await system.add(worker_type("decode", "decode-0", dies))
    requests = [asyncio.create_task(system.complete(max_tokens=100)) for _ in range(3)]
    await system.until(lambda: len(system.workers["decode-0"].attempts) == 3)
    await system.add(worker_type("decode", "decode-1", pair.decode))
    for request in requests:
        assert (await request).json()["choices"][0]["text"] == ANSWER_TEXT
    assert system.total("tandem_delayed_retries_total") == 0


async def test_a_worker_that_fails_again_and_again_is_left_alone_and_comes_back(make_system, worker_type, pair):
    system, is_broken = await make_system(routing="round_robin"), True

    async def fails(attempt):
        if not is_broken:
            return await pair.decode(attempt)
        attempt.emit(worker_pb2.Admitted())
        attempt.fail(InternalError("broken"))

    broken = await system.add(worker_type("decode", "decode-0", fails))
    await system.add(worker_type("decode", "decode-1", pair.decode))
    prompts = iter(range(5, 390))

    async def ask():
        response = await system.complete(prompt=[next(prompts)], max_tokens=100)
        assert response.json()["choices"][0]["text"] == ANSWER_TEXT

    def num_asked():
        return sum(not attempt.key[0].startswith("trial-") for attempt in broken.attempts)

    while system.total("tandem_open_breakers") == 0:
        assert num_asked() < 3
        await ask()
    num_attempts = num_asked()
    for _ in range(4):
        await ask()
    assert num_asked() == num_attempts
    is_broken = False
    await system.until(lambda: not system.total("tandem_open_breakers"))
    assert num_asked() == num_attempts, "the gateway tries it itself"
    await ask()
    await ask()
    assert num_asked() > num_attempts


async def test_a_way_that_is_cut_is_gone_around(make_system, worker_type, pair):
    system = await make_system(routing="round_robin")
    tried = []

    async def cut_off_from_0(attempt):
        if attempt.request.decode_incarnation == system.workers["decode-0"].incarnation:
            tried.append(attempt)
            attempt.fail(TransferFailed("the way is cut"))
        else:
            await pair.prefill(attempt)

    await system.add(worker_type("prefill", "prefill-0", cut_off_from_0))
    for number in range(2):
        await system.add(worker_type("decode", f"decode-{number}", pair.decode))
    for _ in range(20):
        assert (await system.complete(max_tokens=100)).json()["choices"][0]["text"] == ANSWER_TEXT
    assert sum(not attempt.key[0].startswith("trial-") for attempt in tried) == 2


async def test_the_last_worker_is_never_left_alone(make_system, worker_type, pair):
    system, failures = await make_system(), []

    async def fails_often(attempt):
        attempt.emit(worker_pb2.Admitted())
        if attempt.key[1] == 1:
            failures.append(attempt)
            attempt.fail(InternalError("broken"))
        else:
            attempt.emit(worker_pb2.DecodeStarted())
            await pair.generate(attempt, 0)

    await system.add(worker_type("decode", "decode-0", fails_often))
    for number in range(5):
        response = await system.complete(prompt=[5 + number], max_tokens=100)
        assert response.json()["choices"][0]["text"] == ANSWER_TEXT
    assert len(failures) == 5


async def test_a_gateway_that_slept_blames_nobody(make_system, worker_type, pair, monkeypatch):
    monkeypatch.setattr("gateway.topology.session.SILENCE_LIMIT_S", 1.5)
    monkeypatch.setattr("gateway.topology.session.SLOW_LIMIT_S", 1.5)
    system = await make_system()
    worker = await system.add(worker_type("decode", "decode-0", pair.decode))
    session = system.gateway.topology.decode_session("decode-0")
    await asyncio.sleep(0.3)
    time.sleep(2.5)  # noqa: ASYNC251 - this is the process that does not listen
    await asyncio.sleep(0.5)
    assert session.is_up
    assert (await system.complete(max_tokens=100)).status_code == 200
    assert len(worker.sessions.sessions) == 1


async def test_a_gateway_that_sleeps_now_and_then_still_finds_the_silent(make_system, worker_type, monkeypatch):
    monkeypatch.setattr("gateway.topology.session.SILENCE_LIMIT_S", 1.5)
    monkeypatch.setattr("gateway.topology.session.SLOW_LIMIT_S", 1.5)
    monkeypatch.setattr("gateway.topology.keeper.OWN_PAUSE_S", 0.1)
    system = await make_system()
    frozen = await system.add(worker_type("decode", "decode-0", hold))
    session = system.gateway.topology.decode_session("decode-0")
    monkeypatch.setattr(frozen.sessions, "_wait", lambda session: asyncio.sleep(3600))
    async with asyncio.timeout(HANG_LIMIT_S):
        while session.is_up:
            time.sleep(0.4)  # noqa: ASYNC251
            await asyncio.sleep(0.3)


async def test_workers_are_exact_only_together(make_system, worker_type, pair):
    system = await make_system()
    await system.add(worker_type("prefill", "prefill-0", pair.prefill, arithmetic="avx2"))
    await system.add(worker_type("decode", "decode-0", pair.decode, arithmetic="avx2"))
    topology = system.gateway.topology
    assert [(member.is_exact, member.arithmetic) for member in topology.members()] == [(True, "avx2")] * 2
    other = await system.add(worker_type("decode", "decode-1", pair.decode, arithmetic="avx512"))
    assert [member.is_exact for member in topology.members()] == [False] * 3
    other.drain()
    await system.until(lambda: [member.is_exact for member in topology.members()] == [True, False, True])


async def test_a_leaving_gateway_takes_requests_for_a_moment_and_then_none(make_system, worker_type, pair):
    system = await make_system(drain_s=20.0, linger_s=1.0)
    release = asyncio.Event()

    async def waits(attempt):
        await release.wait()
        await pair.decode(attempt)

    decode = await system.add(worker_type("decode", "decode-0", waits))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        sampling = inference_pb2.SamplingParams(max_tokens=100)

        async def call():
            stream = stub.Generate(inference_pb2.GenerateRequest(text="x", sampling=sampling), timeout=HANG_LIMIT_S)
            return "".join([message.text async for message in stream])

        requests = [asyncio.create_task(system.complete(max_tokens=100)), asyncio.create_task(call())]
        await system.until(lambda: len(decode.attempts) == 2)
        stopping = asyncio.create_task(system.gateway.stop())
        await asyncio.sleep(0)
        ready = await system.http.get("/ready")
        assert (ready.status_code, ready.headers["connection"]) == (503, "close")
        requests += [asyncio.create_task(system.complete(max_tokens=100)), asyncio.create_task(call())]
        await system.until(lambda: len(decode.attempts) == 4)
        async with asyncio.timeout(HANG_LIMIT_S):
            while await _is_listening(system.gateway.http_port):  # noqa: ASYNC110 - across sockets
                await asyncio.sleep(0.05)
        with pytest.raises(httpx.ConnectError):
            await system.complete(max_tokens=100)
        with pytest.raises(grpc.aio.AioRpcError, match="leaving"):
            await call()
        release.set()
        answers = [await request for request in requests]
    assert [answer.json()["choices"][0]["text"] for answer in answers[::2]] == [ANSWER_TEXT] * 2
    assert answers[1::2] == [ANSWER_TEXT] * 2
    assert answers[2].headers["connection"] == "close"
    await stopping


async def test_how_long_few_answers_may_still_run_is_known(make_system, worker_type, pair):
    system = await make_system()

    async def begins(attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.emit(worker_pb2.DecodeStarted())
        attempt.tokens(0, pair.answer[:3])

    decode = await system.add(worker_type("decode", "decode-0", begins))
    session = system.gateway.topology.decode_session("decode-0")
    assert session.steps_left() == math.inf
    streams = [asyncio.create_task(system.complete(max_tokens=number)) for number in (5, 20)]
    await system.until(lambda: len(decode.attempts) == 2)
    decode.load.running = 2
    decode.sessions.load_changed()
    await system.until(lambda: session.steps_left() == 17)
    (view,) = system.gateway.topology.workers(None).decode.views(
        NOTHING_MEASURED, NOTHING_MEASURED.local, (2, 10), system.gateway.topology.now_s()
    )
    assert (view.num_running, view.steps_left) == (2, 17)
    decode.load.running = 3  # one of another gateway
    decode.sessions.load_changed()
    await system.until(lambda: session.steps_left() == math.inf)
    for stream in streams:
        stream.cancel()
    decode.load.running = 1
    decode.sessions.load_changed()
    await system.until(lambda: session.num_open_attempts == 0)
    assert session.steps_left() == math.inf


async def _is_listening(port):
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionRefusedError:
        return False
    writer.close()
    return True


async def test_grpc_health_tells_life_from_readiness(make_system, worker_type, pair):
    system = await make_system(min_prefill=0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)

        async def status(service):
            return (await health.Check(health_pb2.HealthCheckRequest(service=service))).status

        async def until(expected):
            watch = health.Watch(health_pb2.HealthCheckRequest(service="tandem.v1.Inference"), timeout=HANG_LIMIT_S)
            async for message in watch:
                if message.status == expected:
                    watch.cancel()
                    return

        known = health_pb2.HealthCheckResponse
        assert await status("") == await status("tandem.v1.Cluster") == known.SERVING
        assert await status("tandem.v1.Inference") == known.NOT_SERVING
        worker = await system.add(worker_type("decode", "decode-0", pair.decode))
        await until(known.SERVING)
        await worker.die()
        await until(known.NOT_SERVING)
        assert await status("") == known.SERVING
