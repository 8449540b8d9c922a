"""Proofs over real streams: strangers on either side get nothing, and take no place."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from protos import worker_pb2, worker_pb2_grpc
from services.runtime import rpc
from services.runtime.errors import NotProven
from services.runtime.membership import Member
from worker.sessions import Reports, SessionLimits, SessionServer

METHOD = "/tandem.v1.DecodeWorker/Session"
INCARNATION, ANOTHER = "a" * 32, "b" * 32
OURS, OTHERS = b"o" * 32, b"x" * 32


class Worker(worker_pb2_grpc.DecodeWorkerServicer):
    """A decode worker that has one place for a gateway. Without a secret it asks nobody."""

    def __init__(self, secret: bytes | None, *, max_sessions: int = 1) -> None:
        rpc.set_member(None if secret is None else Member(lambda: (secret,), "decode"))
        self.rpc = rpc.make_server(["tandem.v1.DecodeWorker"], incarnation=INCARNATION, with_reflection=False)
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(self, self.rpc.server)
        self.received: list[Any] = []
        self.sessions = SessionServer(
            incarnation=INCARNATION,
            handlers={},
            reports=Reports(worker_pb2.WorkerLoad),
            on_session_closed=lambda _: None,
            limits=SessionLimits(max_sessions=max_sessions),
        )

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[worker_pb2.StepEvents]:
        async def noted() -> AsyncIterator[Any]:
            async for message in request_iterator:
                self.received.append(message)
                yield message

        async for events in self.sessions.serve(noted()):
            yield events


@contextlib.asynccontextmanager
async def serving(secret: bytes | None, **settings: Any) -> AsyncIterator[tuple[Worker, grpc.aio.Channel]]:
    worker = Worker(secret, **settings)
    port = await worker.rpc.start("127.0.0.1", 0)
    async with rpc.make_channel(f"127.0.0.1:{port}") as channel:
        yield worker, channel
    await worker.rpc.stop(0)


@pytest.fixture(autouse=True)
def _no_member_is_left() -> Iterator[None]:
    yield
    rpc.set_member(None)


def become(secret: bytes | None, role: str = "gateway") -> None:
    rpc.set_member(None if secret is None else Member(lambda: (secret,), role))


def hello(gateway: str = "g" * 32) -> worker_pb2.DecodeCommands:
    opening = worker_pb2.SessionHello(gateway_incarnation=gateway, worker_incarnation=INCARNATION)
    return worker_pb2.DecodeCommands(commands=[worker_pb2.DecodeCommand(hello=opening)])


async def opened(channel: grpc.aio.Channel, *, gateway: str = "g" * 32, incarnation: str = INCARNATION) -> Any:
    proof = await rpc.prove(channel, METHOD, incarnation=incarnation)
    call: Any = worker_pb2_grpc.DecodeWorkerStub(channel).Session(metadata=rpc.metadata_of(proof))
    await rpc.check_answer(proof, call)
    await call.write(hello(gateway))
    assert (await call.read()).worker_incarnation == INCARNATION
    return call


async def refusal_of(opening: Any) -> str:
    try:
        await opening
    except grpc.aio.AioRpcError as error:
        refused = rpc.refusal(error)
        assert refused is not None
        return refused.message
    raise AssertionError("the call was taken")


async def test_members_talk_to_each_other() -> None:
    async with serving(OURS) as (worker, channel):
        become(OURS)
        call = await opened(channel)
        assert len(worker.sessions.sessions) == 1
        call.cancel()


@pytest.mark.parametrize(("secret", "words"), [(None, "has not proven that it is one"), (OTHERS, "is not one of this")])
async def test_a_stranger_is_refused_before_it_is_read_from(secret: bytes | None, words: str) -> None:
    async with serving(OURS) as (worker, channel):
        become(secret)
        message = await refusal_of(opened(channel))
        assert words in message
        assert "--cluster-secret-file" in message
        assert worker.received == []


async def test_strangers_take_no_place() -> None:
    async with serving(OURS) as (worker, channel):
        become(OTHERS)
        refused = await asyncio.gather(*(refusal_of(opened(channel, gateway=f"{n:032x}")) for n in range(70)))
        assert len(refused) == 70
        become(OURS)
        call = await opened(channel)
        assert len(worker.sessions.sessions) == 1
        call.cancel()


async def test_a_member_that_means_another_life_of_the_worker_is_refused() -> None:
    async with serving(OURS) as (_, channel):
        become(OURS)
        assert "is not one of this" in await refusal_of(opened(channel, incarnation=ANOTHER))


async def test_a_role_that_may_not_call_is_refused() -> None:
    async with serving(OURS) as (_, channel):
        become(OURS, role="prefill")
        assert "no role" in await refusal_of(opened(channel))


@pytest.mark.parametrize("secret", [None, OTHERS])
async def test_a_stranger_at_a_workers_address_hears_nothing(secret: bytes | None) -> None:
    async with serving(secret) as (stranger, channel):
        become(OURS)
        with pytest.raises((NotProven, grpc.aio.AioRpcError)):
            await opened(channel)
        assert stranger.received == []


async def test_a_stranger_that_takes_every_proof_hears_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.runtime.membership.Guard.check", lambda *_: (("tandem-proof-bin", b"x" * 32),))
    async with serving(OTHERS) as (stranger, channel):
        become(OURS)
        with pytest.raises(NotProven, match="the worker has not proven"):
            await opened(channel)
        assert stranger.received == []


async def test_an_earlier_version_is_named_as_such() -> None:
    async with serving(None) as (_, channel):
        become(OURS)
        with pytest.raises(NotProven, match="of an earlier version"):
            await opened(channel)


async def test_processes_without_any_secret_talk_as_before() -> None:
    async with serving(None) as (_, channel):
        become(None)
        call = await opened(channel)
        call.cancel()


async def test_health_is_open_to_everybody() -> None:
    async with serving(OURS) as (_, channel):
        call = channel.unary_unary("/grpc.health.v1.Health/Check")
        await call(b"")
