"""What a public server takes from callers before it knows them, and how many messages it takes at once."""

import asyncio
import contextlib
import gzip
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest

from protos import inference_pb2, inference_pb2_grpc
from services.runtime import places, rpc
from services.runtime.errors import RateLimited, Unauthenticated
from services.runtime.intake import Intake
from services.runtime.places import STRANGERS, Places
from tests.attack.http2 import Connection, grpc_headers, message_prefix
from tests.waiting import HANG_LIMIT_S, until

SERVICE = "tandem.v1.Inference"
TOKENIZE, GENERATE = f"/{SERVICE}/Tokenize", f"/{SERVICE}/Generate"
MAX_MESSAGE_BYTES = 2 * 2**20
NUM_PLACES = 8
LIMIT_S = HANG_LIMIT_S


class Servicer(inference_pb2_grpc.InferenceServicer):
    async def Tokenize(self, request: Any, context: Any) -> Any:
        return inference_pb2.TokenizeResponse(token_ids=[len(request.text)])

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield inference_pb2.GenerateResponse(text=request.text)
        if request.text == "slow":
            await asyncio.sleep(1.5)
            yield inference_pb2.GenerateResponse(text="end")


@dataclass
class Served:
    address: tuple[str, int]
    places: Places
    stub: Any


def account_of(method: str, context: Any) -> str:
    """The caller's name, in its metadata."""
    shown = dict(context.invocation_metadata() or ())
    if "name" not in shown:
        raise Unauthenticated("no name")
    return str(shown["name"])


@contextlib.asynccontextmanager
async def serving(profile: rpc.Profile = rpc.PUBLIC, **more: Any) -> AsyncIterator[Served]:
    held = Places(NUM_PLACES)
    intake = Intake(held, account_of, max_message_bytes=MAX_MESSAGE_BYTES)
    server = rpc.make_server([SERVICE], profile=profile, intake=intake, **more)
    inference_pb2_grpc.add_InferenceServicer_to_server(Servicer(), server.server)
    port = await server.start("127.0.0.1", 0)
    async with rpc.make_channel(f"127.0.0.1:{port}") as channel:
        yield Served(("127.0.0.1", port), held, inference_pb2_grpc.InferenceStub(channel))
        await server.stop(0)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as started:
        yield started


def unfinished(address: tuple[str, int], num_streams: int, *metadata: tuple[str, str]) -> tuple[Connection, list[int]]:
    """A connection with calls that send a message of the largest size without its last byte; what each could send."""
    connection = Connection(address)
    body = memoryview(message_prefix(MAX_MESSAGE_BYTES) + bytes(MAX_MESSAGE_BYTES - 1))
    time.sleep(0.1)
    connection.read()
    streams = [connection.open(grpc_headers(TOKENIZE, metadata)) for _ in range(num_streams)]
    sent = dict.fromkeys(streams, 0)
    quiet_since_s = time.monotonic()
    while time.monotonic() - quiet_since_s < 1.0:  # real time: nothing signals that the windows are full
        for stream in streams:
            num_bytes = connection.send_data(stream, body[sent[stream] :])
            sent[stream] += num_bytes
            if num_bytes:
                quiet_since_s = time.monotonic()
        connection.read()
        time.sleep(0.001)
    return connection, list(sent.values())


async def status_of(call: Any) -> grpc.StatusCode:
    try:
        async with asyncio.timeout(LIMIT_S):
            await call
    except grpc.aio.AioRpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


async def test_a_caller_without_a_name_sends_no_more_than_the_first_window(served: Served) -> None:
    connection, sent = await asyncio.to_thread(unfinished, served.address, 20)
    with connection:
        assert len(connection.ended) == 20
        assert max(sent) <= rpc.WINDOW_BYTES
        assert served.places.num_taken == 0


async def test_only_so_many_unfinished_messages_are_taken_as_there_are_places(served: Served) -> None:
    connection, sent = await asyncio.to_thread(unfinished, served.address, 20, ("name", "one"))
    with connection:
        assert sum(num_bytes > rpc.WINDOW_BYTES for num_bytes in sent) <= NUM_PLACES // places.ACCOUNT_PART
        assert served.places.num_taken == NUM_PLACES // places.ACCOUNT_PART
        # Another caller does not notice.
        request = inference_pb2.TokenizeRequest(text="abc")
        answer = await served.stub.Tokenize(request, metadata=[("name", "two")], timeout=LIMIT_S)
        assert answer.token_ids == [3]
    await until(lambda: served.places.num_taken == 0)


async def test_a_message_that_takes_too_long_is_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "RECEIVE_TIMEOUT_S", 0.2)
    connection, _ = await asyncio.to_thread(unfinished, served.address, 1, ("name", "one"))
    with connection:
        assert await asyncio.to_thread(connection.wait_until_ended, 1, timeout_s=LIMIT_S)
    await until(lambda: served.places.num_taken == 0)


@pytest.mark.parametrize("method", [TOKENIZE, GENERATE])
async def test_a_call_with_no_message_or_with_two_is_an_invalid_argument(served: Served, method: str) -> None:
    async with grpc.aio.insecure_channel("{}:{}".format(*served.address)) as channel:
        for messages in ([], [b"\n\x01a", b"\n\x01a"]):
            call = channel.stream_unary(method)(iter(messages), metadata=[("name", "one")])
            assert await status_of(call) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_message_that_is_too_large_is_refused(served: Served) -> None:
    request = inference_pb2.TokenizeRequest(text="a" * MAX_MESSAGE_BYTES)
    call = served.stub.Tokenize(request, metadata=[("name", "one")])
    assert await status_of(call) is grpc.StatusCode.RESOURCE_EXHAUSTED
    await until(lambda: served.places.num_taken == 0)


async def test_a_compressed_message_is_refused_before_it_is_unpacked(served: Served) -> None:
    bomb = gzip.compress(bytes(MAX_MESSAGE_BYTES * 10))
    connection = await asyncio.to_thread(Connection, served.address)
    with connection:
        block = grpc_headers(TOKENIZE, [("name", "one"), ("grpc-encoding", "gzip")])
        stream = connection.open(block)
        connection.send_data(stream, memoryview(b"\1" + message_prefix(len(bomb))[1:] + bomb), ends_stream=True)
        assert await asyncio.to_thread(connection.wait_until_ended, stream, timeout_s=LIMIT_S)
    call = served.stub.Tokenize(
        inference_pb2.TokenizeRequest(text="a" * 10_000), metadata=[("name", "one")], compression=grpc.Compression.Gzip
    )
    assert await status_of(call) is grpc.StatusCode.UNIMPLEMENTED


async def test_metadata_beyond_the_limit_is_refused(served: Served) -> None:
    metadata = [("name", "one"), ("more", "x" * 2 * rpc.MAX_METADATA_BYTES)]
    call = served.stub.Tokenize(inference_pb2.TokenizeRequest(), metadata=metadata)
    assert await status_of(call) is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_connection_without_calls_ends() -> None:
    async with serving(replace(rpc.PUBLIC, max_connection_idle_ms=300)) as served:
        connection = await asyncio.to_thread(Connection, served.address)
        with connection:
            assert await asyncio.to_thread(connection.wait_until_closed, timeout_s=LIMIT_S)
        # A client comes back without noticing.
        call = served.stub.Tokenize(inference_pb2.TokenizeRequest(), metadata=[("name", "one")])
        assert await status_of(call) is grpc.StatusCode.OK


async def test_old_connections_take_no_new_calls_and_keep_the_running_ones() -> None:
    async with serving(replace(rpc.PUBLIC, max_connection_age_ms=200)) as served:
        metadata = [("name", "one")]
        call = served.stub.Generate(inference_pb2.GenerateRequest(text="slow"), metadata=metadata)
        connection = await asyncio.to_thread(Connection, served.address)
        with connection:
            assert await asyncio.to_thread(connection.wait_until_closed, timeout_s=LIMIT_S)
        assert [each.text async for each in call] == ["slow", "end"]
        call = served.stub.Generate(inference_pb2.GenerateRequest(text="a"), metadata=metadata)
        assert [each.text async for each in call] == ["a"]


async def test_connections_beyond_the_most_are_closed() -> None:
    async with serving(max_connections=5) as served:
        connections = await asyncio.to_thread(lambda: [Connection(served.address) for _ in range(8)])
        try:
            await asyncio.to_thread(lambda: [each.wait_until_closed(timeout_s=0.5) for each in connections])
            assert sum(each.is_open for each in connections) <= 5
        finally:
            for each in connections:
                each.socket.close()


async def test_the_idlest_connections_end_for_new_ones_and_those_with_calls_do_not() -> None:
    async with serving(max_connections=32) as served:
        call = served.stub.Generate(inference_pb2.GenerateRequest(text="slow"), metadata=[("name", "one")])
        answers = aiter(call)
        assert (await anext(answers)).text == "slow"
        connections: list[Connection] = []

        def open_more() -> int:
            """More than there may be, slowly; how many of them are open at the end."""
            for _ in range(60):
                connections.append(Connection(served.address))
                connections[-1].wait_until_closed(timeout_s=0.03)
            for each in connections:
                each.read()
            return sum(each.is_open for each in connections)

        try:
            assert 0 < await asyncio.to_thread(open_more) < 32
            assert connections[-1].is_open
            assert not connections[0].is_open
            assert [each.text async for each in answers] == ["end"]
            async with rpc.make_channel("{}:{}".format(*served.address)) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                request = inference_pb2.TokenizeRequest(text="abc")
                answer = await stub.Tokenize(request, metadata=[("name", "two")], timeout=LIMIT_S, wait_for_ready=True)
                assert answer.token_ids == [3]
        finally:
            for each in connections:
                each.socket.close()


async def test_all_calls_get_their_turn_beyond_the_places(served: Served) -> None:
    request = inference_pb2.TokenizeRequest(text="a" * 100_000)
    calls = [served.stub.Tokenize(request, metadata=[("name", f"tenant-{n % 3}")]) for n in range(120)]
    assert [answer.token_ids[0] for answer in await asyncio.gather(*calls)] == [100_000] * 120
    assert served.places.num_taken == 0


async def test_strangers_lose_their_oldest_place_at_once() -> None:
    held = Places(4)
    entered = asyncio.Event()
    errors: list[BaseException] = []

    async def hold() -> None:
        try:
            async with held.place(STRANGERS):
                entered.set()
                await asyncio.sleep(LIMIT_S)
        except RateLimited as error:
            errors.append(error)

    task = asyncio.create_task(hold())
    await entered.wait()
    async with asyncio.timeout(LIMIT_S), held.place(STRANGERS):
        await task
    assert "others waited" in str(errors[0])
    assert held.num_taken == 0


async def test_a_tenant_that_fills_the_places_gives_one_up_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "PATIENCE_S", 0.1)
    held = Places(2)
    ended: list[str] = []

    async def hold() -> None:
        async with asyncio.timeout(LIMIT_S):
            with contextlib.suppress(Exception):
                async with held.place(""):
                    await asyncio.sleep(LIMIT_S)
        ended.append("lost")

    tasks = [asyncio.create_task(hold()) for _ in range(2)]
    await until(lambda: held.num_taken == 2)
    async with asyncio.timeout(LIMIT_S), held.place("other"):
        assert ended == ["lost"]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert held.num_taken == 0


async def test_a_call_that_stops_waiting_leaves_nothing_behind() -> None:
    held = Places(1)
    async with held.place("one"):
        waiting = [asyncio.create_task(_enter(held, "two")) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert held.num_taken == 0
    async with held.place("one"):
        pass


async def _enter(held: Places, account: str) -> None:
    async with held.place(account):
        await asyncio.sleep(0)
