"""The table: every error of the tree has its place, nothing leaks, and the wire gives back what went in."""

import grpc
import pytest

from protos import worker_pb2
from services.runtime import errors, status

TREE = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.TandemError)]


def test_the_table_is_the_agreed_one() -> None:
    expected = {
        errors.InvalidRequest: (grpc.StatusCode.INVALID_ARGUMENT, 400),
        errors.NotFound: (grpc.StatusCode.NOT_FOUND, 404),
        errors.AlreadyExists: (grpc.StatusCode.ALREADY_EXISTS, 409),
        errors.Overloaded: (grpc.StatusCode.UNAVAILABLE, 503),
        errors.NoFreePages: (grpc.StatusCode.UNAVAILABLE, 503),
        errors.RateLimited: (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
        errors.WorkerUnavailable: (grpc.StatusCode.UNAVAILABLE, 503),
        errors.LeaseLost: (grpc.StatusCode.UNAVAILABLE, 503),
        errors.StaleIncarnation: (grpc.StatusCode.FAILED_PRECONDITION, 503),
        errors.TransferFailed: (grpc.StatusCode.UNAVAILABLE, 503),
        errors.DeadlineTooShort: (grpc.StatusCode.DEADLINE_EXCEEDED, 504),
        errors.DeadlineExceeded: (grpc.StatusCode.DEADLINE_EXCEEDED, 504),
        errors.RequestCancelled: (grpc.StatusCode.CANCELLED, 499),
        errors.LayoutMismatch: (grpc.StatusCode.FAILED_PRECONDITION, 500),
        errors.InvariantViolated: (grpc.StatusCode.INTERNAL, 500),
        errors.Quarantined: (grpc.StatusCode.INTERNAL, 500),
        errors.WorkerLost: (grpc.StatusCode.UNAVAILABLE, 503),
    }
    for cls, (code, http) in expected.items():
        assert (status.grpc_status(cls("x")), status.http_status(cls("x"))) == (code, http)


@pytest.mark.parametrize("cls", TREE)
def test_every_class_has_a_full_error_object(cls: type[errors.TandemError]) -> None:
    body = status.openai_error(cls("the text"))["error"]
    assert set(body) == {"message", "type", "param", "code"}
    known = "invalid_request authentication permission not_found rate_limit overloaded server timeout"
    assert body["type"] in {f"{name}_error" if name != "server" else "server_error" for name in known.split()}
    assert body["message"] in {"the text", "internal error"}
    assert worker_pb2.ErrorCode.Name(status.to_wire(cls("x"))[0]) != "ERROR_CODE_UNSPECIFIED"


def test_field_and_code_of_the_error_are_shown() -> None:
    error = errors.InvalidRequest("too long", field="prompt", code="context_length_exceeded")
    body = status.openai_error(error)["error"]
    assert (body["param"], body["code"]) == ("prompt", "context_length_exceeded")


@pytest.mark.parametrize("error", [RuntimeError("secret"), OSError("secret"), errors.InvariantViolated("secret")])
def test_nothing_internal_is_shown(error: Exception) -> None:
    assert "secret" not in str(status.openai_error(error))
    assert status.to_wire(error) == (worker_pb2.ERROR_CODE_INTERNAL, "internal error")
    assert status.http_status(error) == 500
    assert "secret" not in str(status.rich_status(error))


def test_retry_times() -> None:
    assert status.retry_after_s(errors.Overloaded("x", retry_after_s=7)) == 7
    assert status.retry_after_s(errors.Overloaded("x")) == 1.0
    assert status.retry_after_s(errors.InvalidRequest("x")) is None
    assert status.retry_after_s(errors.DeadlineTooShort("x")) is None


@pytest.mark.parametrize("code", [code for code in worker_pb2.ErrorCode.values() if code])
def test_the_wire_gives_back_what_went_in(code: "worker_pb2.ErrorCode.ValueType") -> None:
    error = status.from_wire(code, "the text", retry_after_s=2.0)
    assert (error.message, error.retry_after_s) == ("the text", 2.0)
    assert status.to_wire(error)[0] == code


@pytest.mark.parametrize("code", [0, 99, -1])
def test_an_unknown_wire_code_is_a_fault_of_the_worker(code: int) -> None:
    error = status.from_wire(code, "")
    assert type(error) is errors.InternalError
    assert error.message == "internal error"


def test_long_messages_are_clipped_to_whole_characters() -> None:
    message = status.public_message(errors.InvalidRequest("ж" * 10_000))
    assert set(message) == {"ж"}
    assert len(message.encode()) <= status.MAX_MESSAGE_BYTES
