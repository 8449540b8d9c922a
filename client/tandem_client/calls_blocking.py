"""gRPC's blocking calls behind the interface that both clients use: `calls_aio` has it for asyncio.

They are gRPC's own, not a loop in a thread: no thread is started, and they may be used beside asyncio.
"""

import threading
from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf.message import Message

from tandem_client import orders
from tandem_client.connections import Metadata, pairs_of
from tandem_client.errors import BrokenCall, failure_of
from tandem_client.orders import Method

Channel = grpc.Channel


def open_channel(
    target: str, credentials: grpc.ChannelCredentials | None, options: list[tuple[str, str | int]]
) -> Channel:
    """A channel, which connects when it is first used."""
    if credentials is None:
        return grpc.insecure_channel(target, options=options)
    return grpc.secure_channel(target, credentials, options=options)


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
        begin = (channel.unary_stream if is_stream else channel.unary_unary)(method.path, orders.encode, method.decode)
        start: Any = begin if is_stream else begin.future  # type: ignore[union-attr]  # a future can be cancelled
        self._call: Any = start(request, timeout=timeout_s, metadata=metadata)

    def cancel(self) -> None:
        """Ends the call, if it still runs; from any thread."""
        self._call.cancel()

    def response(self) -> Any:
        """The response of a call that is not a stream."""
        try:
            return self._call.result()
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            raise _broken(error) from error

    def read(self) -> Any:
        """The next message of a stream; None at its end."""
        try:
            return next(self._call, None)
        except grpc.RpcError as error:
            raise _broken(error) from error

    def initial_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        """The metadata that came before the first message."""
        return pairs_of(self._call.initial_metadata())


class Pause:
    """A wait that can be ended early, once for all, by any thread."""

    def __init__(self) -> None:
        self._ended = threading.Event()

    def end(self) -> None:
        """Ends the wait; the next ones end at once."""
        self._ended.set()

    def wait(self, timeout_s: float) -> None:
        """Waits until the time is over or the pause is ended."""
        self._ended.wait(timeout_s)


def _broken(error: grpc.RpcError | grpc.FutureCancelledError) -> BrokenCall:
    if isinstance(error, grpc.FutureCancelledError):
        return BrokenCall(failure_of(grpc.StatusCode.CANCELLED, "the call was cancelled", None))
    return BrokenCall(failure_of(error.code(), error.details(), pairs_of(error.trailing_metadata())))
