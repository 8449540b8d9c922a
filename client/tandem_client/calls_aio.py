"""gRPC's asyncio calls behind the interface that both clients use: `calls_blocking` has it for threads."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf.message import Message

from tandem_client import orders
from tandem_client.connections import Metadata, pairs_of
from tandem_client.errors import BrokenCall, failure_of
from tandem_client.orders import Method

Channel = grpc.aio.Channel


def open_channel(
    target: str, credentials: grpc.ChannelCredentials | None, options: list[tuple[str, str | int]]
) -> Channel:
    """A channel, which connects when it is first used."""
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, credentials, options=options)


class Call:
    """One attempt of a call. Its methods raise BrokenCall where gRPC reports an error or the call was cancelled."""

    def __init__(
        self,
        channel: Channel,
        method: Method[Any],
        request: Message,
        *,
        is_stream: bool,
        timeout_s: float,
        metadata: Metadata,
    ) -> None:
        begin = channel.unary_stream if is_stream else channel.unary_unary
        self._call: Any = begin(method.path, orders.encode, method.decode)(
            request, timeout=timeout_s, metadata=metadata
        )
        self._loop = asyncio.get_running_loop()

    def __del__(self) -> None:
        # Tasks of gRPC hold the call, so that dropping it would not end it. The collector runs in any thread.
        if not self._call.done() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._call.cancel)

    def cancel(self) -> None:
        """Ends the call, if it still runs."""
        self._call.cancel()

    async def response(self) -> Any:
        """The response of a call that is not a stream."""
        return await self._heard(self._call)

    async def read(self) -> Any:
        """The next message of a stream; None at its end."""
        message = await self._heard(self._call.read())
        return None if message is grpc.aio.EOF else message

    async def initial_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        """The metadata that came before the first message."""
        return pairs_of(await self._call.initial_metadata())

    async def _heard(self, work: Any) -> Any:
        try:
            return await work
        except grpc.aio.AioRpcError as error:
            raise BrokenCall(failure_of(error.code(), error.details(), pairs_of(error.trailing_metadata()))) from error
        except asyncio.CancelledError:
            # gRPC raises it for a cancelled call too; a cancelled task keeps it.
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                cancelled = failure_of(grpc.StatusCode.CANCELLED, "the call was cancelled", None)
                raise BrokenCall(cancelled) from None
            raise


class Pause:
    """A wait that can be ended early, once for all."""

    def __init__(self) -> None:
        self._ended = asyncio.Event()

    def end(self) -> None:
        """Ends the wait; the next ones end at once."""
        self._ended.set()

    async def wait(self, timeout_s: float) -> None:
        """Waits until the time is over or the pause is ended."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), timeout_s)
