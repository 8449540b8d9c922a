"""grpc.aio's server, without the fault by which one call ends it. Knows no service.

The library decodes the path of a call of a method that nobody has registered in the very loop that takes calls, so a
path that is not UTF-8 ended the server: one frame, from anybody who reached the port. Here all methods are registered,
as generated code does it, and calls of any other one are answered UNIMPLEMENTED without a look at their path.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
from grpc._cython import cygrpc
from grpc.aio import _server

_UNKNOWN_METHOD = "/unknown"


class _Core(cygrpc.AioServer):  # type: ignore[misc]
    """Takes calls of registered methods as the library does, and all others by itself."""

    def _make_request_call_future(self, method: bytes | None) -> "asyncio.Future[Any]":
        if method is not None:
            taken: asyncio.Future[Any] = super()._make_request_call_future(method)
            return taken
        return asyncio.get_running_loop().create_task(self._refuse_unknown(), name="unknown-methods")

    async def _refuse_unknown(self) -> None:
        """Goes on until the server stops, which ends it with the library's own error."""
        loop = asyncio.get_running_loop()
        nothing = cygrpc._MethodResolver([], {})
        tasks: set[asyncio.Task[None]] = set()
        while True:
            call = await self._request_call()
            answer = cygrpc._handle_rpc(_UNKNOWN_METHOD, nothing, (), call, loop, False)
            task = loop.create_task(cygrpc._schedule_rpc_coro(answer, call, loop, _UNKNOWN_METHOD))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


class Server(_server.Server):
    """As `grpc.aio.server` makes it."""

    def __init__(self, interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, int]]) -> None:
        self._loop = cygrpc.get_working_loop()
        arguments = _server._augment_channel_arguments(options, None)
        self._server = _Core(self._loop, None, (), list(interceptors), arguments, None)
