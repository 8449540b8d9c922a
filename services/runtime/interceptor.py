"""What every handler of a gRPC server runs inside: one way to fail, to read and to write. Knows no service.

An error of the tree becomes its status with details, any other exception becomes INTERNAL with a generic text, bytes
that are not a message become INVALID_ARGUMENT, and a caller that does not read is cut off. Streaming handlers read by
iterating over their requests and answer by yielding.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from services.runtime import status
from services.runtime.errors import InvalidRequest, Overloaded, RateLimited, TandemError, forget_frames
from services.runtime.idle_connections import IdleConnections
from services.runtime.intake import Intake
from services.runtime.membership import Guard
from services.runtime.tls import check_caller, roles_of

DETAILS_METADATA_KEY = "grpc-status-details-bin"
PUSHBACK_METADATA_KEY = "grpc-retry-pushback-ms"
_CERTIFICATE_PROPERTY = "x509_pem_cert"
_URI_PROPERTY = "peer_uri"

logger = logging.getLogger(__name__)


def caller_roles(context: "grpc.aio.ServicerContext[Any, Any]") -> frozenset[str] | None:
    """Returns the roles of the caller's certificate, which the CA has signed, or None without a certificate."""
    shown = context.auth_context()
    if _CERTIFICATE_PROPERTY not in shown:
        return None
    return roles_of(uri.decode("utf-8", "replace") for uri in shown.get(_URI_PROPERTY, ()))


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Gives every handler of a server the same way to fail, to read and to write."""

    def __init__(
        self,
        *,
        write_timeout_s: float,
        checks_callers: bool = False,
        guard: Guard | None = None,
        intake: Intake | None = None,
        connections: IdleConnections | None = None,
    ) -> None:
        self._connections = connections
        self._write_timeout_s = write_timeout_s
        self._checks_callers = checks_callers
        self._guard = guard
        self._intake = intake

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the handler that would answer; unknown methods stay UNIMPLEMENTED."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        behaviour = _inner_behaviour(handler)
        method = str(handler_call_details.method)

        has_one = not handler.request_streaming

        async def answer_unary(request_or_iterator: Any, context: Any) -> Any:
            await self._check_caller(context, method)
            request = await self._received(request_or_iterator, context, method, has_one=has_one)
            return await behaviour(_readable(request), context)

        async def answer_stream(request_or_iterator: Any, context: Any) -> None:
            await self._check_caller(context, method)
            request = await self._received(request_or_iterator, context, method, has_one=has_one)
            await self._write_all(behaviour(_readable(request), context), context)

        answer = answer_stream if handler.response_streaming else answer_unary

        async def serve(request_or_iterator: Any, context: Any) -> Any:
            with self._running(context):
                return await _with_status(answer(request_or_iterator, context), context, method)

        # gRPC reads the message of a call that has one before it calls anybody; those of a stream are left to us.
        arity = _arity_name(handler)
        if self._intake is not None:
            arity = arity.replace("unary_", "stream_", 1) if has_one else arity
        wrap = getattr(grpc, f"{arity}_rpc_method_handler")
        return wrap(serve, _tolerant(handler.request_deserializer), handler.response_serializer)

    def _running(self, context: Any) -> contextlib.AbstractContextManager[None]:
        """Returns the time in which a call's connection is not idle."""
        return contextlib.nullcontext() if self._connections is None else self._connections.call(context.peer())

    async def _received(self, request_or_iterator: Any, context: Any, method: str, *, has_one: bool) -> Any:
        if self._intake is None:
            return request_or_iterator
        return await self._intake.one(context, method) if has_one else self._intake.each(context, method)

    async def _check_caller(self, context: Any, method: str) -> None:
        """Checks, before a stream is read, that the caller may call, and proves to it that it has reached a member."""
        if self._checks_callers:
            check_caller(method.strip("/").partition("/")[0], caller_roles(context))
        if self._guard is not None:
            answer = self._guard.check(method, dict(context.invocation_metadata() or ()))
            if answer:
                await context.send_initial_metadata(answer)

    async def _write_all(self, responses: Any, context: Any) -> None:
        """Writes what the handler yields. The handler's cleanup has run when this returns or raises."""
        if not hasattr(responses, "__aiter__"):
            await responses
            return
        async with contextlib.aclosing(responses):
            async for response in responses:
                await self._write(response, context)

    async def _write(self, response: Any, context: Any) -> None:
        limit = asyncio.timeout(self._write_timeout_s)
        try:
            async with limit:
                await context.write(response)
        except TimeoutError:
            if not limit.expired():
                raise
            raise Overloaded("the stream was cut off because it was not read") from None


class _Undecodable:
    """Stands for a request whose bytes are no message; the handler never sees it."""


_UNDECODABLE = _Undecodable()


async def _with_status(answer: Awaitable[Any], context: Any, method: str) -> Any:
    """Returns what a handler returns, or turns what it raises into the call's status.

    gRPC keeps the error by which a call ends, with the frames through which that goes, until the collector's next look:
    none of them may hold a request.
    """
    try:
        return await answer
    except (grpc.aio.AbortError, grpc.aio.InternalError):
        raise  # The second one means that the client left while something was sent to it.
    except TandemError as error:
        if not status.row_of(error).is_public:
            logger.error("a call failed", exc_info=error, extra={"method": method})
        await _abort(context, error)
    except Exception as error:  # the boundary: the caller gets a status and never a text of ours
        logger.error("a handler failed", exc_info=error, extra={"method": method})
        await _abort(context, error)


async def _abort(context: Any, error: BaseException) -> None:
    rich = status.rich_status(error)
    metadata: list[tuple[str, str | bytes]] = [(DETAILS_METADATA_KEY, rich.SerializeToString())]
    delay_s = status.retry_after_s(error)
    if delay_s is not None:
        metadata.append((PUSHBACK_METADATA_KEY, str(round(delay_s * 1000))))
    if isinstance(error, RateLimited):
        metadata += error.headers
    forget_frames(error)
    await context.abort(status.grpc_status(error), rich.message, tuple(metadata))


def _inner_behaviour(handler: Any) -> Callable[[Any, Any], Any]:
    behaviour: Callable[[Any, Any], Any] = getattr(handler, _arity_name(handler))
    return behaviour


def _arity_name(handler: Any) -> str:
    requests = "stream" if handler.request_streaming else "unary"
    return f"{requests}_{'stream' if handler.response_streaming else 'unary'}"


def _tolerant(deserializer: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Returns a deserializer that marks bad bytes; gRPC would answer INTERNAL to an exception here."""
    if deserializer is None:
        return None

    def decode(data: bytes) -> Any:
        try:
            return deserializer(data)
        except Exception:  # noqa: BLE001 - whatever a decoder raises on foreign bytes is the sender's fault
            return _UNDECODABLE

    return decode


def _readable(request_or_iterator: Any) -> Any:
    """Returns the request, or an iterator over the requests; raises InvalidRequest at one that is no message."""
    if hasattr(request_or_iterator, "__aiter__"):
        return _readable_each(request_or_iterator)
    if request_or_iterator is _UNDECODABLE:
        raise _undecodable_error()
    return request_or_iterator


async def _readable_each(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        if request is _UNDECODABLE:
            raise _undecodable_error()
        yield request


def _undecodable_error() -> InvalidRequest:
    return InvalidRequest("the message is not valid protobuf of the expected type, or holds text that is not UTF-8")
