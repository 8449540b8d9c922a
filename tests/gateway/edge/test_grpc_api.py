"""The gRPC port beside strangers: which calls need a key, what a call may hold, and texts that become tokens."""

import asyncio
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from gateway.access.keys import digest_of_key
from protos import inference_pb2, inference_pb2_grpc
from services.runtime import rpc
from tests.attack.http2 import Connection, grpc_headers, message_prefix
from tests.waiting import HANG_LIMIT_S

KEY = "tandem-a-tenants-key-0123456789"
SHOWN = (("authorization", f"Bearer {KEY}"),)
LIMIT_S = HANG_LIMIT_S


@pytest.fixture
async def keyed(make_system, tmp_path):
    """A gateway with one tenant's key."""
    file = tmp_path / "keys.toml"
    file.write_text(f'[[key]]\nsha256 = "{digest_of_key(KEY)}"\ntenant = "acme"\n')
    return await make_system(api_keys=file)


def channel_to(system):
    return grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}")


async def code_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


async def services_of(channel, metadata=()):
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async for answer in stub.ServerReflectionInfo(iter([request]), metadata=metadata, timeout=LIMIT_S):
        return [service.name for service in answer.list_services_response.service]


async def test_reflection_asks_for_a_key_where_there_are_keys(keyed):
    async with channel_to(keyed) as channel:
        assert "tandem.v1.Inference" in await services_of(channel, SHOWN)
        assert await code_of(services_of(channel)) is grpc.StatusCode.UNAUTHENTICATED


async def test_probes_need_no_key(keyed):
    async with channel_to(keyed) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("method", ["Tokenize", "Generate", "Nothing"])
async def test_without_a_key_no_message_is_asked_for(keyed, method):
    def send():
        with Connection(("127.0.0.1", keyed.gateway.grpc_port)) as connection:
            connection.wait_until_closed(timeout_s=0.2)
            stream = connection.open(grpc_headers(f"/tandem.v1.Inference/{method}"))
            body, sent = memoryview(message_prefix(2**20) + bytes(2**20)), 0
            while not connection.wait_until_ended(stream, timeout_s=0.05) and sent < len(body):
                sent += connection.send_data(stream, body[sent:])
            return sent, connection.ended

    sent, ended = await asyncio.to_thread(send)
    assert ended
    assert sent <= rpc.WINDOW_BYTES
    assert keyed.gateway.places.num_taken == 0


async def test_a_refusal_for_the_missing_key_is_counted(keyed):
    async with channel_to(keyed) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        assert await code_of(stub.Tokenize(inference_pb2.TokenizeRequest())) is grpc.StatusCode.UNAUTHENTICATED
    metrics = keyed.gateway.metrics.render(keyed.gateway.topology.members()).decode()
    assert 'code="invalid_api_key"} 1' in metrics


async def test_a_text_that_only_becomes_tokens_is_bounded(make_system):
    system = await make_system(max_tokenize_chars=10_000)
    async with channel_to(system) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        assert len((await stub.Tokenize(inference_pb2.TokenizeRequest(text="a " * 5000))).token_ids) > 1000
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Tokenize(inference_pb2.TokenizeRequest(text="a" * 10_001))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "text has 10001 characters but must have at most 10000"
    long = "a" * 10_001
    for path, body, field in [
        ("/tokenize", {"prompt": long}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": long}]}, "messages"),
        ("/v1/responses/input_tokens", {"input": long}, "input"),
    ]:
        answer = await system.http.post(path, json=body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == (field, "string_above_max_length")
        assert "at most 10000" in error["message"]


async def test_a_message_is_counted_with_the_bodies_until_it_is_tokens(make_system, monkeypatch):
    system = await make_system()
    bodies, may_end = system.gateway._bodies, threading.Event()
    text = "a " * 50_000
    tokenizer = next(iter(system.gateway.requests.catalog)).tokenizer
    busy = [
        asyncio.ensure_future(tokenizer.turns.call(lambda: may_end.wait(LIMIT_S)))
        for _ in range(tokenizer.turns.num_threads)
    ]
    async with channel_to(system) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        calls = [
            asyncio.ensure_future(stub.Tokenize(inference_pb2.TokenizeRequest(text=text))),
            asyncio.ensure_future(system.http.post("/tokenize", json={"prompt": text})),
        ]
        await system.until(lambda: bodies.num_bytes > 2 * len(text))
        may_end.set()
        await asyncio.gather(*calls, *busy)
    await system.until(lambda: bodies.num_bytes == 0)


async def test_short_texts_of_one_tenant_do_not_wait_for_the_long_ones_of_another(make_system):
    system = await make_system()
    tokenizer = next(iter(system.gateway.requests.catalog)).tokenizer
    long = [asyncio.ensure_future(tokenizer.encode("x y" * 1_000_000, tenant="b")) for _ in range(8)]
    await asyncio.sleep(0)
    for _ in range(5):
        await tokenizer.encode("x y" * 1800, tenant="a")
    assert not any(each.done() for each in long)
    for each in long:
        each.cancel()


async def test_reflection_is_there_under_its_newer_name_too(keyed):
    async with channel_to(keyed) as channel:
        ask = channel.stream_stream(
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        request = reflection_pb2.ServerReflectionRequest(file_containing_symbol="tandem.v1.Inference")
        answers = [answer async for answer in ask(iter([request]), metadata=SHOWN, timeout=LIMIT_S)]
        assert b"tandem.v1" in answers[0].file_descriptor_response.file_descriptor_proto[0]


async def test_health_lists_what_there_is(keyed):
    async with channel_to(keyed) as channel:
        listed = await health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest(), timeout=LIMIT_S)
        assert listed.statuses[""].status == health_pb2.HealthCheckResponse.SERVING
        assert "tandem.v1.Inference" in listed.statuses
