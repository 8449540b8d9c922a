"""The one table from an error class to what the outside sees: gRPC, HTTP, OpenAI's error object, the wire.

Knows no server. What is not in the error tree, or is for operators only, gets a generic text.
"""

from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2  # type: ignore[import-untyped]

from protos import worker_pb2
from protos.worker_pb2 import ErrorCode
from services.runtime import errors

ERROR_DOMAIN = "tandem"
GENERIC_TEXT = "internal error"
DEFAULT_RETRY_AFTER_S = 1.0
MAX_MESSAGE_BYTES = 1024
"""The longest message in UTF-8: gRPC sends it percent-encoded, twice, in metadata of which 8 KiB are safe."""
MAX_FIELD_BYTES = 256


@dataclass(frozen=True, slots=True)
class StatusRow:
    """How one class of errors looks from outside."""

    grpc: grpc.StatusCode
    http: int
    openai_type: str
    openai_code: str
    wire: "ErrorCode.ValueType"
    is_public: bool = True
    """The error's own message may be shown."""
    is_retryable: bool = False
    """A Retry-After is given, the error's own or the default."""


_INTERNAL = StatusRow(
    grpc.StatusCode.INTERNAL,
    500,
    "server_error",
    "internal_error",
    worker_pb2.ERROR_CODE_INTERNAL,
    is_public=False,
)

TABLE: dict[type[BaseException], StatusRow] = {
    errors.InvalidRequest: StatusRow(
        grpc.StatusCode.INVALID_ARGUMENT,
        400,
        "invalid_request_error",
        "invalid_value",
        worker_pb2.ERROR_CODE_INVALID_REQUEST,
    ),
    errors.GrammarExhausted: StatusRow(
        grpc.StatusCode.INVALID_ARGUMENT,
        400,
        "invalid_request_error",
        "grammar_too_complex",
        worker_pb2.ERROR_CODE_GRAMMAR_EXHAUSTED,
    ),
    errors.NotOffered: StatusRow(
        grpc.StatusCode.INVALID_ARGUMENT,
        400,
        "invalid_request_error",
        "not_offered",
        worker_pb2.ERROR_CODE_NOT_OFFERED,
    ),
    errors.NotFound: StatusRow(
        grpc.StatusCode.NOT_FOUND,
        404,
        "not_found_error",
        "not_found",
        worker_pb2.ERROR_CODE_INVALID_REQUEST,
    ),
    errors.AlreadyExists: StatusRow(
        grpc.StatusCode.ALREADY_EXISTS,
        409,
        "invalid_request_error",
        "already_exists",
        worker_pb2.ERROR_CODE_INVALID_REQUEST,
    ),
    errors.Unauthenticated: StatusRow(
        grpc.StatusCode.UNAUTHENTICATED,
        401,
        "invalid_request_error",
        "invalid_api_key",
        worker_pb2.ERROR_CODE_INVALID_REQUEST,
    ),
    errors.PermissionDenied: StatusRow(
        grpc.StatusCode.PERMISSION_DENIED,
        403,
        "permission_error",
        "permission_denied",
        worker_pb2.ERROR_CODE_INVALID_REQUEST,
    ),
    errors.Overloaded: StatusRow(
        grpc.StatusCode.UNAVAILABLE,
        503,
        "overloaded_error",
        "server_overloaded",
        worker_pb2.ERROR_CODE_OVERLOADED,
        is_retryable=True,
    ),
    errors.RateLimited: StatusRow(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        429,
        "rate_limit_error",
        "rate_limit_exceeded",
        worker_pb2.ERROR_CODE_OVERLOADED,
        is_retryable=True,
    ),
    errors.WorkerUnavailable: StatusRow(
        grpc.StatusCode.UNAVAILABLE,
        503,
        "server_error",
        "worker_unavailable",
        worker_pb2.ERROR_CODE_WORKER_UNAVAILABLE,
        is_retryable=True,
    ),
    errors.StaleIncarnation: StatusRow(
        grpc.StatusCode.FAILED_PRECONDITION,
        503,
        "server_error",
        "worker_unavailable",
        worker_pb2.ERROR_CODE_WORKER_UNAVAILABLE,
        is_retryable=True,
    ),
    errors.StoreUnavailable: StatusRow(
        grpc.StatusCode.UNAVAILABLE,
        503,
        "server_error",
        "store_unavailable",
        worker_pb2.ERROR_CODE_INTERNAL,
        is_retryable=True,
    ),
    errors.StoreRefused: _INTERNAL,
    errors.TransferFailed: StatusRow(
        grpc.StatusCode.UNAVAILABLE,
        503,
        "server_error",
        "transfer_failed",
        worker_pb2.ERROR_CODE_TRANSFER_FAILED,
        is_retryable=True,
    ),
    errors.TransferStalled: StatusRow(
        grpc.StatusCode.UNAVAILABLE,
        503,
        "server_error",
        "transfer_failed",
        worker_pb2.ERROR_CODE_TRANSFER_STALLED,
        is_retryable=True,
    ),
    errors.PeerUnreachable: StatusRow(
        grpc.StatusCode.UNAVAILABLE,
        503,
        "server_error",
        "transfer_failed",
        worker_pb2.ERROR_CODE_PEER_UNREACHABLE,
        is_retryable=True,
    ),
    errors.LinkRefused: StatusRow(
        grpc.StatusCode.UNAVAILABLE,
        503,
        "server_error",
        "transfer_failed",
        worker_pb2.ERROR_CODE_LINK_REFUSED,
        is_retryable=True,
    ),
    errors.ChannelUnreachable: StatusRow(
        grpc.StatusCode.UNAVAILABLE,
        503,
        "server_error",
        "transfer_failed",
        worker_pb2.ERROR_CODE_CHANNEL_UNREACHABLE,
        is_retryable=True,
    ),
    errors.DeadlineTooShort: StatusRow(
        grpc.StatusCode.DEADLINE_EXCEEDED,
        504,
        "timeout_error",
        "deadline_exceeded",
        worker_pb2.ERROR_CODE_DEADLINE_EXCEEDED,
    ),
    errors.DeadlineExceeded: StatusRow(
        grpc.StatusCode.DEADLINE_EXCEEDED,
        504,
        "timeout_error",
        "deadline_exceeded",
        worker_pb2.ERROR_CODE_DEADLINE_EXCEEDED,
    ),
    errors.RequestCancelled: StatusRow(
        grpc.StatusCode.CANCELLED,
        499,
        "server_error",
        "cancelled",
        worker_pb2.ERROR_CODE_INTERNAL,
    ),
    errors.LayoutMismatch: StatusRow(
        grpc.StatusCode.FAILED_PRECONDITION,
        500,
        "server_error",
        "layout_mismatch",
        worker_pb2.ERROR_CODE_LAYOUT_MISMATCH,
    ),
    errors.Quarantined: StatusRow(
        grpc.StatusCode.INTERNAL,
        500,
        "server_error",
        "request_quarantined",
        worker_pb2.ERROR_CODE_INTERNAL,
    ),
    errors.InternalError: _INTERNAL,
    errors.ConfigError: _INTERNAL,
    errors.ModelError: _INTERNAL,
    errors.TandemError: _INTERNAL,
    BaseException: _INTERNAL,
}

_FROM_WIRE: dict[int, type[errors.TandemError]] = {
    worker_pb2.ERROR_CODE_INVALID_REQUEST: errors.InvalidRequest,
    worker_pb2.ERROR_CODE_GRAMMAR_EXHAUSTED: errors.GrammarExhausted,
    worker_pb2.ERROR_CODE_NOT_OFFERED: errors.NotOffered,
    worker_pb2.ERROR_CODE_OVERLOADED: errors.Overloaded,
    worker_pb2.ERROR_CODE_WORKER_UNAVAILABLE: errors.WorkerUnavailable,
    worker_pb2.ERROR_CODE_TRANSFER_FAILED: errors.TransferFailed,
    worker_pb2.ERROR_CODE_TRANSFER_STALLED: errors.TransferStalled,
    worker_pb2.ERROR_CODE_PEER_UNREACHABLE: errors.PeerUnreachable,
    worker_pb2.ERROR_CODE_LINK_REFUSED: errors.LinkRefused,
    worker_pb2.ERROR_CODE_CHANNEL_UNREACHABLE: errors.ChannelUnreachable,
    worker_pb2.ERROR_CODE_DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    worker_pb2.ERROR_CODE_LAYOUT_MISMATCH: errors.LayoutMismatch,
}

_FROM_GRPC: dict[grpc.StatusCode, type[errors.TandemError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.ALREADY_EXISTS: errors.AlreadyExists,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.RateLimited,
    grpc.StatusCode.UNAVAILABLE: errors.WorkerUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.CANCELLED: errors.RequestCancelled,
}

_BY_NAME: dict[str, type[errors.TandemError]] = {
    cls.__name__: cls for cls in vars(errors).values() if isinstance(cls, type) and cls.__module__ == errors.__name__
}


def row_of(error: BaseException) -> StatusRow:
    """Returns the row of the error's class or of the nearest class above it."""
    for cls in type(error).__mro__:
        row = TABLE.get(cls)
        if row is not None:
            return row
    return _INTERNAL


def public_message(error: BaseException) -> str:
    """Returns what an outsider may read: the error's own words for known classes, a generic text for all others."""
    if isinstance(error, errors.TandemError) and row_of(error).is_public:
        return _clipped(error.message, MAX_MESSAGE_BYTES)
    return GENERIC_TEXT


def retry_after_s(error: BaseException) -> float | None:
    """Returns the seconds after which it may be worth trying again; None where that is pointless."""
    own = error.retry_after_s if isinstance(error, errors.TandemError) else None
    if own is not None:
        return own
    return DEFAULT_RETRY_AFTER_S if row_of(error).is_retryable else None


def grpc_status(error: BaseException) -> grpc.StatusCode:
    """Returns the gRPC status code of an error."""
    return row_of(error).grpc


def http_status(error: BaseException) -> int:
    """Returns the HTTP status code of an error."""
    return row_of(error).http


def openai_error(error: BaseException) -> dict[str, Any]:
    """Returns OpenAI's error object, `{"error": {"message", "type", "param", "code"}}`."""
    row = row_of(error)
    field = error.field if isinstance(error, errors.InvalidRequest) else None
    code = error.code if isinstance(error, errors.InvalidRequest) else None
    return {
        "error": {
            "message": public_message(error),
            "type": row.openai_type,
            "param": field,
            "code": code or row.openai_code,
        }
    }


def to_wire(error: BaseException) -> "tuple[ErrorCode.ValueType, str]":
    """Returns code and message of an error for Refused and Failed."""
    return row_of(error).wire, public_message(error)


def from_wire(code: int, message: str, retry_after_s: float | None = None) -> errors.TandemError:
    """Returns the error that a worker reported. A code this program does not know counts as a fault of the worker."""
    error = _FROM_WIRE.get(code, errors.InternalError)(message or GENERIC_TEXT)
    error.retry_after_s = retry_after_s
    return error


def rich_status(error: BaseException) -> status_pb2.Status:
    """Returns the error as google.rpc.Status, with its class, its field and its retry time where there are any."""
    status = status_pb2.Status(code=_code_number(grpc_status(error)), message=public_message(error))
    if row_of(error).is_public:
        _add_detail(status, error_details_pb2.ErrorInfo(reason=_name_of(error), domain=ERROR_DOMAIN))
    delay_s = retry_after_s(error)
    if delay_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(delay_s * 1e9))
        _add_detail(status, error_details_pb2.RetryInfo(retry_delay=delay))
    if isinstance(error, errors.InvalidRequest) and error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_clipped(error.field, MAX_FIELD_BYTES), description=status.message
        )
        _add_detail(status, error_details_pb2.BadRequest(field_violations=[violation]))
    return status


def from_rich_status(code: grpc.StatusCode, message: str, details: status_pb2.Status | None) -> errors.TandemError:
    """Returns the error behind a gRPC status: its very class where the other side is ours, else the nearest one."""
    cls = _FROM_GRPC.get(code, errors.InternalError)
    info, retry, bad = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(), error_details_pb2.BadRequest()
    delay_s: float | None = None
    for detail in details.details if details is not None else ():
        if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
            cls = _BY_NAME.get(info.reason, cls)
        elif detail.Unpack(retry):
            delay_s = retry.retry_delay.ToNanoseconds() / 1e9
        else:
            detail.Unpack(bad)
    error = cls(message or code.name)
    error.retry_after_s = delay_s
    if isinstance(error, errors.InvalidRequest) and bad.field_violations:
        error.field = bad.field_violations[0].field
    return error


def _name_of(error: BaseException) -> str:
    """Returns the nearest class that the other side knows by its name."""
    return next((cls.__name__ for cls in type(error).__mro__ if _BY_NAME.get(cls.__name__) is cls), "")


def _code_number(code: grpc.StatusCode) -> int:
    return int(code_pb2.Code.Value(code.name))


def _clipped(text: str, max_bytes: int) -> str:
    return text if len(text) <= max_bytes // 4 else text.encode(errors="replace")[:max_bytes].decode(errors="ignore")


def _add_detail(status: status_pb2.Status, detail: Any) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)
