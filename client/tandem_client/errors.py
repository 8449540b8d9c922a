"""The errors of the clients: one tree, made from what a call ended with. Knows no client."""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError

from tandem_client.protos import wire_pb2

DETAILS_METADATA_KEY = "grpc-status-details-bin"
PUSHBACK_METADATA_KEY = "grpc-retry-pushback-ms"


class TandemError(Exception):
    """The base of all of them.

    `code` is gRPC's; `message` is for people; `reason` is the server's own name for the error, such as Overloaded, and
    empty if it gave none; after `retry_after_s` it may be worth trying again (None: not known); `field` is the field of
    the request that broke a rule (empty: none).
    """

    code = grpc.StatusCode.UNKNOWN

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode | None = None,
        reason: str = "",
        retry_after_s: float | None = None,
        field: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.field = field


class InvalidRequest(TandemError):
    """A value breaks its rule; `field` names it where one is to blame."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class Unauthenticated(TandemError):
    """The API key is missing or not good."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(TandemError):
    """The API key does not allow this."""

    code = grpc.StatusCode.PERMISSION_DENIED


class NotFound(TandemError):
    """The model, worker or named request does not exist, or no longer."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(TandemError):
    """The name belongs to a request with another body, or to one that is running."""

    code = grpc.StatusCode.ALREADY_EXISTS


class RateLimited(TandemError):
    """A limit of the tenant, or of the size of a message, is reached."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class Unavailable(TandemError):
    """The cluster is full or has no worker, no gateway could be reached, or the connection broke."""

    code = grpc.StatusCode.UNAVAILABLE


class DeadlineExceeded(TandemError):
    """The call's time is over."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class RequestCancelled(TandemError):
    """It was cancelled, here or by the server."""

    code = grpc.StatusCode.CANCELLED


class ClientClosed(RequestCancelled):
    """The client was closed."""


class ServerError(TandemError):
    """Anything else: a fault of the server, or an answer that breaks the protocol."""

    code = grpc.StatusCode.INTERNAL


_CLASSES = {
    cls.code: cls
    for cls in (
        InvalidRequest,
        Unauthenticated,
        PermissionDenied,
        NotFound,
        AlreadyExists,
        RateLimited,
        Unavailable,
        DeadlineExceeded,
        RequestCancelled,
    )
}


@dataclass(frozen=True, slots=True)
class Failure:
    """What a call ended with, and what the server said about trying again."""

    error: TandemError
    pushback_s: float | None = None
    """Not sooner than after this time; None: it said nothing."""
    is_final: bool = False
    """It must not be tried again."""


class BrokenCall(Exception):
    """One attempt of a call has failed; the client decides whether another one follows, so its users never see this."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.error)
        self.failure = failure


def failure_of(
    code: grpc.StatusCode, text: str | None, trailing_metadata: Iterable[tuple[str, str | bytes]] | None
) -> Failure:
    """The failure behind the status of a call, with the details that came beside it (gRFC A6 for the pushback)."""
    metadata = dict(trailing_metadata or ())
    reason, field, retry_after_s, message = "", "", None, text or code.name
    details = metadata.get(DETAILS_METADATA_KEY)
    if isinstance(details, bytes):
        # Details are extras: without good ones the status still says what happened.
        with contextlib.suppress(DecodeError):
            reason, field, retry_after_s = _details(details)
    pushback_s, is_final = _pushback(metadata.get(PUSHBACK_METADATA_KEY), otherwise_s=retry_after_s)
    error = _CLASSES.get(code, ServerError)(
        message,
        code=code,
        reason=reason,
        retry_after_s=pushback_s if retry_after_s is None else retry_after_s,
        field=field,
    )
    return Failure(error, pushback_s, is_final)


def _details(data: bytes) -> tuple[str, str, float | None]:
    """(reason, field, retry_after_s) of a google.rpc.Status."""
    info, retry, bad = wire_pb2.ErrorInfo(), wire_pb2.RetryInfo(), wire_pb2.BadRequest()
    retry_after_s: float | None = None
    for detail in wire_pb2.Status.FromString(data).details:
        kind = detail.type_url.rpartition("/")[2]
        if kind == "google.rpc.ErrorInfo":
            info.ParseFromString(detail.value)
        elif kind == "google.rpc.RetryInfo":
            retry.ParseFromString(detail.value)
            retry_after_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
        elif kind == "google.rpc.BadRequest":
            bad.ParseFromString(detail.value)
    return info.reason, bad.field_violations[0].field if bad.field_violations else "", retry_after_s


def _pushback(value: str | bytes | None, *, otherwise_s: float | None) -> tuple[float | None, bool]:
    """(pushback_s, is_final): a number below zero, or what is no number, forbids another try."""
    if value is None:
        return otherwise_s, False
    # Digits only: int() would also take spaces, underscores and other scripts' digits.
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 9:
        return int(value) / 1000, False
    return None, True
