"""Servers and channels: health, addresses, deadlines, large messages and dead peers."""

import asyncio
import contextlib
import dataclasses
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos import inference_pb2, inference_pb2_grpc
from services.runtime import errors, rpc
from tests.services.runtime.serving import SERVICE, Servicer, failure_of, read_all, serving
from tests.waiting import HANG_LIMIT_S


async def test_messages_up_to_16_mib_pass_and_larger_ones_are_refused(stub: Any) -> None:
    large = inference_pb2.TokenizeRequest(text="x" * (15 * 2**20))
    assert (await stub.Tokenize(large)).token_ids == [15 * 2**20]
    failure = await failure_of(stub.Tokenize(inference_pb2.TokenizeRequest(text="x" * (17 * 2**20))))
    assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_life_is_one_health_and_readiness_another(
    server: tuple[rpc.RpcServer, str], channel: grpc.aio.Channel
) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    known = health_pb2.HealthCheckResponse

    async def value(name: str) -> Any:
        return (await health.Check(health_pb2.HealthCheckRequest(service=name))).status

    async def values() -> list[Any]:
        found = [await value(name) for name in ("", rpc.READINESS, SERVICE)]
        listed = (await health.List(health_pb2.HealthListRequest())).statuses
        assert [listed[name].status for name in ("", rpc.READINESS, SERVICE)] == found
        return found

    assert await values() == [known.SERVING, known.NOT_SERVING, known.NOT_SERVING]
    await server[0].set_serving(True)
    assert await values() == [known.SERVING] * 3
    await server[0].set_serving(False, SERVICE)
    assert await values() == [known.SERVING, known.SERVING, known.NOT_SERVING]
    await server[0].set_serving(False)
    assert await values() == [known.SERVING, known.NOT_SERVING, known.NOT_SERVING]
    failure = await failure_of(health.Check(health_pb2.HealthCheckRequest(service="nobody")))
    assert failure.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_the_services(channel: grpc.aio.Channel) -> None:
    async def ask() -> AsyncIterator[Any]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    (answer,) = await read_all(stub.ServerReflectionInfo(ask()))
    names = {service.name for service in answer.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names


async def test_a_server_may_be_stopped_twice_at_once(servicer: Servicer) -> None:
    """In gRPC itself the second stop crashes the process."""
    for _ in range(5):
        async with serving(servicer) as (server, address), grpc.aio.insecure_channel(address) as channel:
            call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            await call.read()
            await asyncio.gather(server.stop(0), server.stop(0), server.stop(0.01))


async def test_an_address_is_had_by_one_server_only(server: tuple[rpc.RpcServer, str]) -> None:
    second = rpc.make_server([SERVICE])
    port = int(server[1].rsplit(":", 1)[1])
    with pytest.raises(errors.ConfigError, match=str(port)):
        await second.start("127.0.0.1", port)
    with pytest.raises(errors.ConfigError, match="host"):
        await rpc.make_server([SERVICE]).start("", 0)
    await second.stop(0)


async def test_only_the_configured_address_is_bound(server: tuple[rpc.RpcServer, str]) -> None:
    port = int(server[1].rsplit(":", 1)[1])
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", port), timeout=1)


async def test_the_deadline_is_the_callers_or_the_servers_maximum(stub: Any, servicer: Servicer) -> None:
    seen: list[float] = []

    async def handler(request: Any, context: Any) -> Any:
        seen.append(rpc.call_deadline(context, maximum_s=30).remaining_s())
        return inference_pb2.TokenizeResponse()

    servicer.unary = handler
    await stub.Tokenize(inference_pb2.TokenizeRequest())
    await stub.Tokenize(inference_pb2.TokenizeRequest(), timeout=5)
    await stub.Tokenize(inference_pb2.TokenizeRequest(), timeout=500)
    assert 29 < seen[0] <= 30
    assert 3 < seen[1] <= 5.1
    assert 29 < seen[2] <= 30


async def test_texts_of_grpc_itself_are_not_passed_on() -> None:
    async with rpc.make_channel("127.0.0.1:1") as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Tokenize(inference_pb2.TokenizeRequest(), timeout=HANG_LIMIT_S)
        error = rpc.error_from_rpc(await failure_of(call))
    assert type(error) is errors.WorkerUnavailable
    assert "127.0.0.1" not in error.message


async def test_a_peer_that_answers_no_ping_is_given_up_at_last(servicer: Servicer) -> None:
    async def quiet(request: Any, context: Any) -> AsyncIterator[Any]:
        yield inference_pb2.GenerateResponse()
        await asyncio.sleep(HANG_LIMIT_S)

    servicer.stream = quiet
    profile = dataclasses.replace(rpc.INTERNAL, ping_timeout_ms=1500)
    async with (
        serving(servicer, profile) as (_, behind),
        black_hole(behind) as (address, passes),
        rpc.make_channel(address, profile=profile) as channel,
    ):
        generate = inference_pb2_grpc.InferenceStub(channel).Generate
        call = generate(inference_pb2.GenerateRequest(), wait_for_ready=True)
        await call.read()
        passes.clear()
        failure = await failure_of(call.read())
        async with asyncio.timeout(HANG_LIMIT_S):
            await servicer.ended.wait()
    assert type(rpc.error_from_rpc(failure)) is errors.WorkerUnavailable


async def test_a_process_that_gets_no_time_keeps_its_connections(
    server: tuple[rpc.RpcServer, str], servicer: Servicer
) -> None:
    """Its kernel acknowledges what comes; that it answers no ping for seconds says only that it is slow."""
    may_go_on = asyncio.Event()

    async def slow(request: Any, context: Any) -> AsyncIterator[Any]:
        yield inference_pb2.GenerateResponse()
        await may_go_on.wait()
        yield inference_pb2.GenerateResponse(text="late")

    servicer.stream = slow
    async with black_hole(server[1]) as (address, passes), rpc.make_channel(address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest())
        await call.read()
        passes.clear()
        await asyncio.sleep(4.0)  # the time for which nothing passes is what is tested
        passes.set()
        may_go_on.set()
        async with asyncio.timeout(HANG_LIMIT_S):
            assert (await call.read()).text == "late"


@contextlib.asynccontextmanager
async def black_hole(address: str) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """A TCP proxy that, while its event is cleared, keeps its connections open and passes nothing on."""
    passes = asyncio.Event()
    passes.set()
    tasks: set[asyncio.Task[None]] = set()
    writers: list[asyncio.StreamWriter] = []
    host, port = address.split(":")

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                await passes.wait()
                writer.write(data)
                await writer.drain()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection(host, int(port))
        writers.extend((writer, upstream_writer))
        for pair in ((reader, upstream_writer), (upstream_reader, writer)):
            task = asyncio.create_task(pump(*pair))
            tasks.add(task)

    proxy = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}", passes
    finally:
        proxy.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in writers:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def test_a_quiet_connection_is_kept() -> None:
    """Our own keepalive pings are not too many for our own server, with or without a call under way."""
    server = rpc.make_server([], profile=rpc.INTERNAL)
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    channels = [rpc.make_channel(address, profile=rpc.INTERNAL) for _ in range(2)]
    try:
        for channel, is_cancelled in zip(channels, (False, True), strict=True):
            call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            await call.read()
            if is_cancelled:
                call.cancel()
        ends_at_s = time.monotonic() + 5  # long enough for several pings
        while time.monotonic() < ends_at_s:
            assert [channel.get_state() for channel in channels] == [grpc.ChannelConnectivity.READY] * 2
            await asyncio.sleep(0.05)
    finally:
        for channel in channels:
            await channel.close()
        await server.stop(0)
