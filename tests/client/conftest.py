"""A gateway that does what a test says, on real sockets, and both clients behind one asyncio face."""

import asyncio
import contextlib
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from services.runtime import rpc

# The client is a distribution of its own, and nothing of the server's environment installs it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "client"))

from tandem_client import AsyncClient, Client

from tests.waiting import HANG_LIMIT_S

SERVICES = ("tandem.v1.Inference", "tandem.v1.Cluster")

Context = grpc.aio.ServicerContext[Any, Any]
Step = Callable[["Seen", Context], AsyncIterator[Any]]


@dataclass
class Seen:
    """One call as the gateway saw it."""

    method: str
    request: Any
    metadata: dict[str, str | bytes]
    remaining_s: float | None
    arrived_s: float = field(default_factory=time.monotonic)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    was_cancelled: bool = False


class FakeGateway(inference_pb2_grpc.InferenceServicer, cluster_pb2_grpc.ClusterServicer):
    """Answers each call with the next step of its script; a call without a step is a mistake of the test."""

    def __init__(self) -> None:
        self.steps: deque[Step] = deque()
        self.calls: list[Seen] = []
        self.called = asyncio.Condition()
        self.address = ""
        self.server: rpc.RpcServer | None = None

    @property
    def methods(self) -> list[str]:
        return [call.method for call in self.calls]

    async def until_called(self, number: int) -> Seen:
        """Waits for this call, counted from 1."""
        async with self.called, asyncio.timeout(HANG_LIMIT_S):
            await self.called.wait_for(lambda: len(self.calls) >= number)
        return self.calls[number - 1]

    async def die(self) -> None:
        """Breaks every connection at once."""
        assert self.server is not None
        await self.server.stop(0)

    async def _play(self, method: str, request: Any, context: Context) -> AsyncIterator[Any]:
        seen = Seen(method, request, dict(context.invocation_metadata() or ()), context.time_remaining())
        async with self.called:
            self.calls.append(seen)
            self.called.notify_all()
        if not self.steps:
            raise AssertionError(f"nobody expected {method}")
        step = self.steps.popleft()
        try:
            async with contextlib.aclosing(step(seen, context)) as messages:
                async for message in messages:
                    yield message
        except asyncio.CancelledError:
            seen.was_cancelled = True
            raise
        finally:
            seen.ended.set()

    async def _one(self, method: str, request: Any, context: Context) -> Any:
        async with contextlib.aclosing(self._play(method, request, context)) as messages:
            async for message in messages:
                return message

    async def Generate(self, request: Any, context: Context) -> AsyncIterator[Any]:
        async for message in self._play("Generate", request, context):
            yield message

    async def Resume(self, request: Any, context: Context) -> AsyncIterator[Any]:
        async for message in self._play("Resume", request, context):
            yield message

    async def WatchTopology(self, request: Any, context: Context) -> AsyncIterator[Any]:
        async for message in self._play("WatchTopology", request, context):
            yield message

    async def GenerateUnary(self, request: Any, context: Context) -> Any:
        return await self._one("GenerateUnary", request, context)

    async def Chat(self, request: Any, context: Context) -> AsyncIterator[Any]:
        async for message in self._play("Chat", request, context):
            yield message

    async def ChatUnary(self, request: Any, context: Context) -> Any:
        return await self._one("ChatUnary", request, context)

    async def Embed(self, request: Any, context: Context) -> Any:
        return await self._one("Embed", request, context)

    async def Tokenize(self, request: Any, context: Context) -> Any:
        return await self._one("Tokenize", request, context)

    async def Detokenize(self, request: Any, context: Context) -> Any:
        return await self._one("Detokenize", request, context)

    async def ListModels(self, request: Any, context: Context) -> Any:
        return await self._one("ListModels", request, context)

    async def GetTopology(self, request: Any, context: Context) -> Any:
        return await self._one("GetTopology", request, context)

    async def Drain(self, request: Any, context: Context) -> Any:
        return await self._one("Drain", request, context)


@pytest.fixture
async def start() -> AsyncIterator[Callable[[], Awaitable[FakeGateway]]]:
    """`await start()` gives one more gateway on a port of its own."""
    async with contextlib.AsyncExitStack() as stack:

        async def begin() -> FakeGateway:
            gateway = FakeGateway()
            server = rpc.make_server(SERVICES, profile=rpc.PUBLIC, with_reflection=False)
            inference_pb2_grpc.add_InferenceServicer_to_server(gateway, server.server)
            cluster_pb2_grpc.add_ClusterServicer_to_server(gateway, server.server)
            gateway.address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
            gateway.server = server
            stack.push_async_callback(server.stop, 0)
            await server.set_serving(True)
            return gateway

        yield begin


@pytest.fixture
async def gateway(start: Callable[[], Awaitable[FakeGateway]]) -> FakeGateway:
    return await start()


def message(index: int, *token_ids: int, text: str = "", end: int = 0, **fields: Any) -> Any:
    """A part of an answer; `end` is its finish reason."""
    return inference_pb2.GenerateResponse(
        request_id=fields.pop("request_id", "server-id"),
        first_index=index,
        token_ids=token_ids,
        text=text or "".join(f"<{token_id}>" for token_id in token_ids),
        finish_reason=end,
        **fields,
    )


def says(*messages: Any, then: BaseException | None = None) -> Step:
    """Sends these, then ends well or with an error of the tree."""

    async def step(seen: Seen, context: Context) -> AsyncIterator[Any]:
        for part in messages:
            yield part
        if then is not None:
            raise then

    return step


def aborts(*messages: Any, code: grpc.StatusCode, metadata: Sequence[tuple[str, str]] = ()) -> Step:
    """Sends these, then ends with a bare status, as a server that is not ours would."""

    async def step(seen: Seen, context: Context) -> AsyncIterator[Any]:
        for part in messages:
            yield part
        await context.abort(code, "a bare status", tuple(metadata))

    return step


def hangs(*messages: Any) -> Step:
    """Sends these, then nothing more."""

    async def step(seen: Seen, context: Context) -> AsyncIterator[Any]:
        for part in messages:
            yield part
        await asyncio.Event().wait()

    return step


_END = object()


class InThread:
    """A blocking client or stream whose methods run in a thread, awaited like those of the asyncio one."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, "close" if name == "aclose" else name)
        if not callable(attribute):
            return attribute
        if name in ("stream", "stream_chat", "resume", "watch_topology"):
            return lambda *arguments, **options: InThread(attribute(*arguments, **options))
        return lambda *arguments, **options: asyncio.to_thread(attribute, *arguments, **options)

    def __aiter__(self) -> "InThread":
        return self

    async def __anext__(self) -> Any:
        item = await asyncio.to_thread(next, self._inner, _END)
        if item is _END:
            raise StopAsyncIteration
        return item

    async def __aenter__(self) -> "InThread":
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self._inner.close)


@pytest.fixture(params=["asyncio", "blocking"])
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Callable[..., Any]]:
    """`connect(addresses, …)` gives a client of the kind that the test runs with; it is closed at the end."""
    async with contextlib.AsyncExitStack() as stack:

        def make(*addresses: str, **options: Any) -> Any:
            client: Any = (
                AsyncClient(addresses, **options)
                if request.param == "asyncio"
                else InThread(Client(addresses, **options))
            )
            stack.push_async_callback(client.close)
            return client

        yield make


@pytest.fixture
def topology() -> Any:
    """A cluster of one decode worker."""
    return cluster_pb2.Topology(
        workers=[
            cluster_pb2.Worker(
                id="decode-0",
                role=cluster_pb2.WORKER_ROLE_DECODE,
                state=cluster_pb2.WORKER_STATE_READY,
                pages=cluster_pb2.PageCounts(total=8, free=5, cached=1, used=2),
                gpu=cluster_pb2.GpuHealth(state=cluster_pb2.GPU_STATE_OUT, weight=0.5, reasons=["too_hot"]),
                region="eu",
                pool="slow",
            )
        ],
        requests=cluster_pb2.RequestCounts(queued=3, running=4),
        pools=[cluster_pb2.Pool(name="slow"), cluster_pb2.Pool(name="long")],
        troubles=[cluster_pb2.Trouble(kind="gone", subject="d-1", cause="why", remedy="what", since_unix_s=2.0)],
        gone=[cluster_pb2.GoneWorker(id="d-1", role=cluster_pb2.WORKER_ROLE_DECODE, address="d:1", since_unix_s=1.0)],
    )


@pytest.fixture
def unused_address() -> Iterator[str]:
    """An address at which nobody listens, and nobody can meanwhile."""
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"
