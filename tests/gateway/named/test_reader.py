"""Readers of named requests over HTTP and gRPC: each has its own deadline, and every event a position of its own."""

import asyncio

import grpc
import pytest

from protos import inference_pb2, inference_pb2_grpc, worker_pb2
from tests.waiting import HANG_LIMIT_S


@pytest.fixture
def answer(tokenizer):
    return [*tokenizer.encode("hello world, naïve café end", add_special_tokens=False).ids, 1]


@pytest.fixture
def may_go_on():
    return asyncio.Event()


@pytest.fixture
async def system(make_system, worker_type, answer, may_go_on):
    """A gateway with a decode worker that makes three tokens of an answer, and the others when it may."""

    async def decode(attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.emit(worker_pb2.DecodeStarted())
        first = len(attempt.spec.emitted_token_ids)
        if first < 3:
            attempt.tokens(first, answer[first:3])
        await may_go_on.wait()
        attempt.tokens(max(first, 3), answer[max(first, 3) :])
        attempt.finish(inference_pb2.FINISH_REASON_STOP)

    made = await make_system()
    await made.add(worker_type("decode", "decode-0", decode))
    return made


def generate(stub, *, timeout_s):
    request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[5, 6, 7]))
    return stub.Generate(request, metadata=(("idempotency-key", "k"),), timeout=timeout_s)


@pytest.mark.parametrize("is_resumed", [False, True])
async def test_deadline_of_who_began_is_not_that_of_who_joined(system, answer, may_go_on, is_resumed):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        if is_resumed:
            left = generate(stub, timeout_s=HANG_LIMIT_S)
            await left.read()
            left.cancel()
            await system.until(lambda: len(system.workers["decode-0"].cancelled) == 1)
        hurried = generate(stub, timeout_s=2)
        assert list((await hurried.read()).token_ids) == answer[:3]
        patient = aiter(generate(stub, timeout_s=HANG_LIMIT_S))
        token_ids = list((await anext(patient)).token_ids)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await hurried.read()
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        attempts = system.workers["decode-0"].attempts
        assert attempts[-1].spec.deadline_ms > 590_000  # the gateway's own maximum is 600 s
        may_go_on.set()
        token_ids += [token_id async for part in patient for token_id in part.token_ids]
        assert token_ids == answer
    assert len(attempts) == 1 + is_resumed


async def test_resume_of_several_answers_is_refused_by_name(system, may_go_on):
    may_go_on.set()
    body = {"prompt": [5, 6, 7], "n": 2}
    assert (await system.http.post("/v1/completions", json=body, headers={"x-request-id": "two"})).status_code == 200
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Resume(inference_pb2.ResumeRequest(request_id="two", next_index=1)).read()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "next_index" in refused.value.details()


async def test_stream_cut_after_any_event_names_each_role_once(system, may_go_on):
    may_go_on.set()
    headers = {"idempotency-key": "k"}
    body = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "stream": True}

    async def read(**more_headers):
        response = await system.http.post("/v1/chat/completions", json=body, headers=headers | more_headers)
        assert response.status_code == 200
        return response.text.strip().split("\n\n")

    events = await read()
    *with_choices, done = events
    assert done == "data: [DONE]"
    ids = [event.partition("\nid: ")[2] for event in with_choices]
    assert all(ids)
    assert len(set(ids)) == len(ids)
    roles = ['"role"' in event for event in with_choices]
    assert sum(roles) == 2
    for count, last_id in enumerate(ids, 1):
        rest = await read(**{"last-event-id": last_id})
        assert sum('"role"' in event for event in rest) == sum(roles[count:])


async def test_position_beyond_a_finished_answer_is_refused_before_the_stream(system, may_go_on):
    may_go_on.set()
    body = {"prompt": [5, 6, 7], "stream": True}
    headers = {"idempotency-key": "k", "x-request-id": "mine"}
    assert (await system.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
    for position in ("9999f", "1f"):
        sent = headers | {"last-event-id": f"mine/{position}"}
        response = await system.http.post("/v1/completions", json=body, headers=sent)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_event_id")
