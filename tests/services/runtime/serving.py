"""A server whose handlers do what a test says, and how its calls end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from protos import inference_pb2, inference_pb2_grpc
from services.runtime import rpc

SERVICE = "tandem.v1.Inference"
SECRET = "secret /etc/passwd"


class Servicer(inference_pb2_grpc.InferenceServicer):
    """Does what the test says."""

    def __init__(self) -> None:
        self.unary: Callable[[Any, Any], Any] = self._echo
        self.stream: Callable[[Any, Any], AsyncIterator[Any]] = self._tokens
        self.ended = asyncio.Event()
        self.end_reason = ""

    async def _echo(self, request: Any, context: Any) -> Any:
        return inference_pb2.TokenizeResponse(token_ids=[len(request.text)])

    async def _tokens(self, request: Any, context: Any) -> AsyncIterator[Any]:
        for index in range(3):
            yield inference_pb2.GenerateResponse(first_index=index)

    async def Tokenize(self, request: Any, context: Any) -> Any:
        return await self.unary(request, context)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for response in self.stream(request, context):
                yield response
            self.end_reason = "done"
        except BaseException as error:
            self.end_reason = type(error).__name__
            raise
        finally:
            self.ended.set()


@contextlib.asynccontextmanager
async def serving(servicer: Servicer, profile: rpc.Profile = rpc.INTERNAL) -> AsyncIterator[tuple[rpc.RpcServer, str]]:
    server = rpc.make_server([SERVICE], profile=profile)
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server.server)
    port = await server.start("127.0.0.1", 0)
    try:
        yield server, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def failure_of(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def read_all(call: Any) -> list[Any]:
    return [response async for response in call]


def raising(error: BaseException) -> Callable[[Any, Any], Any]:
    async def handler(request: Any, context: Any) -> Any:
        raise error

    return handler
