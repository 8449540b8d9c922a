"""What a worker reports of another one that it cannot reach, on each hop up to the gateway."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from kv_transfer.link_errors import call_error, dial_error, lost_link_error
from kv_transfer.protocol.failures import abort_of, error_from, peer_error_from
from kv_transfer.wire import from_wire, to_wire
from protos import worker_pb2
from services.runtime import errors, status
from services.runtime.interceptor import DETAILS_METADATA_KEY
from worker.sessions import failed, refused

ADDRESS = "10.0.0.7:50052"
UNREACHABLE = (errors.PeerUnreachable, errors.LinkRefused, errors.ChannelUnreachable)
DROPPED = "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.7:50052: connection attempt timed out"


def reply(error: errors.TandemError) -> grpc.aio.AioRpcError:
    """The end of a call in which one of our servers raised this."""
    rich = status.rich_status(error)
    metadata = grpc.aio.Metadata((DETAILS_METADATA_KEY, rich.SerializeToString()))
    return grpc.aio.AioRpcError(status.grpc_status(error), grpc.aio.Metadata(), metadata, rich.message)


def no_reply(details: str = DROPPED) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


@pytest.mark.parametrize("cls", UNREACHABLE)
def test_the_class_survives_every_hop(cls: type[errors.TandemError]) -> None:
    error = cls("10.0.0.7:50053 does not answer")
    over_the_link: Any = from_wire(to_wire(abort_of(None, error)))
    over_grpc = dial_error(reply(error), ADDRESS, caller="prefill-0")
    events = [failed(error), refused(error)]
    to_the_gateway = [status.from_wire(event.code, event.message) for event in events]
    for arrived in (error_from(over_the_link), peer_error_from(over_the_link), over_grpc, *to_the_gateway):
        assert type(arrived) is cls
        assert arrived.message == error.message
    assert not isinstance(error, errors.WorkerUnavailable)


def test_a_worker_that_cannot_be_reached_is_named_with_its_port_and_what_to_allow() -> None:
    error = dial_error(no_reply(), ADDRESS, caller="prefill-0")
    assert type(error) is errors.PeerUnreachable
    assert "prefill-0 cannot reach the worker at 10.0.0.7:50052: nothing answers" in error.message
    assert "allow TCP port 50052 from prefill-0 to 10.0.0.7 in the firewall" in error.message
    refused_connection = dial_error(no_reply("Connection refused"), ADDRESS, caller="prefill-0")
    assert "nothing listens there" in refused_connection.message
    assert "firewall" not in refused_connection.message


@pytest.mark.parametrize("error", [errors.StaleIncarnation("x"), errors.NotProven("x"), errors.LayoutMismatch("x")])
def test_errors_about_identity_keep_their_class(error: errors.TandemError) -> None:
    for arrived in (dial_error(reply(error), ADDRESS, caller="p"), dial_error(error, ADDRESS, caller="p")):
        assert type(arrived) is type(error)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (errors.WorkerUnavailable("shutting down"), errors.PeerUnreachable),
        (errors.InternalError("a bug"), errors.PeerUnreachable),
        (errors.Overloaded("as many Links as it takes"), errors.LinkRefused),
    ],
)
def test_a_refusal_is_never_the_failure_of_the_worker_that_reports_it(
    said: errors.TandemError, meant: type[errors.TandemError]
) -> None:
    for arrived in (
        dial_error(reply(said), ADDRESS, caller="prefill-0"),
        dial_error(said, ADDRESS, caller="prefill-0"),
    ):
        assert type(arrived) is meant
        assert failed(arrived).code not in (
            worker_pb2.ERROR_CODE_WORKER_UNAVAILABLE,
            worker_pb2.ERROR_CODE_INTERNAL,
            worker_pb2.ERROR_CODE_OVERLOADED,
        )


@pytest.mark.parametrize(
    ("ended_by", "meant"),
    [
        (no_reply(), errors.TransferFailed),
        (reply(errors.WorkerUnavailable("shutting down")), errors.TransferFailed),
        (reply(errors.InternalError("a bug")), errors.TransferFailed),
        (reply(errors.TransferStalled("stuck")), errors.TransferStalled),
        (reply(errors.NoFreePages("full")), errors.NoFreePages),
        (reply(errors.NotProven("another secret")), errors.NotProven),
    ],
)
def test_the_end_of_a_link_is_not_the_end_of_the_worker_that_reports_it(
    ended_by: grpc.aio.AioRpcError, meant: type[errors.TandemError]
) -> None:
    assert type(lost_link_error(ended_by)) is meant


def test_a_peer_that_is_unavailable_is_a_failed_transfer_to_others() -> None:
    assert type(peer_error_from(abort_of(None, errors.WorkerUnavailable("failed")))) is errors.TransferFailed
    assert type(peer_error_from(abort_of(None, errors.StaleIncarnation("older")))) is errors.StaleIncarnation


def test_a_holder_of_a_prefix_may_be_busy_or_unreachable() -> None:
    assert type(call_error(reply(errors.Overloaded("busy")), ADDRESS)) is errors.Overloaded
    assert type(call_error(reply(errors.ChannelUnreachable("closed")), ADDRESS)) is errors.ChannelUnreachable
    assert type(call_error(no_reply(), ADDRESS)) is errors.PeerUnreachable
