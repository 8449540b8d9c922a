"""Errors of a Link as the dialing worker reports them.

They concern the pair, and never mean that this worker has failed.
"""

from __future__ import annotations

from typing import Final

import grpc

from services.runtime.errors import (
    InvalidRequest,
    LayoutMismatch,
    LinkRefused,
    NotProven,
    Overloaded,
    PeerUnreachable,
    StaleIncarnation,
    TandemError,
    TransferFailed,
)
from services.runtime.reach import NETWORK, SILENT
from services.runtime.rpc import error_from_rpc, is_reply, obstacle_of, refusal

IDENTITY_ERRORS: Final = (StaleIncarnation, NotProven, LayoutMismatch)
"""Errors about the identity of the two workers. Another attempt cannot succeed."""


def lost_link_error(error: grpc.aio.AioRpcError) -> TandemError:
    """Returns the error for the transfers on a Link that ended: the receiver's error, or TransferFailed."""
    refused = refusal(error)
    if refused is not None:
        return refused
    if not is_reply(error):
        return TransferFailed("the Link to the receiver broke")
    meant = error_from_rpc(error)
    return meant if isinstance(meant, (*IDENTITY_ERRORS, TransferFailed, Overloaded)) else TransferFailed(meant.message)


def call_error(error: grpc.aio.AioRpcError, address: str, *, caller: str = "this worker") -> TandemError:
    """Returns the error of a call to the worker at `address`: that worker's error, or PeerUnreachable."""
    refused = refusal(error)
    if refused is not None:
        return refused
    if not is_reply(error):
        return PeerUnreachable(_no_connection(error, address, caller))
    meant = error_from_rpc(error)
    if isinstance(meant, (*IDENTITY_ERRORS, TransferFailed, Overloaded, InvalidRequest)):
        return meant
    # Keep the message only: the error's class would mean that this worker, which only reports it, has failed.
    return PeerUnreachable(f"the worker at {address} refused {caller}: {meant.message}")


def dial_error(error: grpc.aio.AioRpcError | TandemError, address: str, *, caller: str) -> TandemError:
    """Returns the error of a Link that could not be opened.

    Identity refusals keep their class. A refusal for lack of capacity becomes LinkRefused. All other errors become
    PeerUnreachable.
    """
    meant = call_error(error, address, caller=caller) if isinstance(error, grpc.aio.AioRpcError) else error
    if isinstance(meant, (*IDENTITY_ERRORS, TransferFailed)):
        return meant
    kind = LinkRefused if isinstance(meant, Overloaded) else PeerUnreachable
    return kind(f"the worker at {address} refused {caller}: {meant.message}")


def is_silence(error: grpc.aio.AioRpcError) -> bool:
    """Returns whether the connection attempt got no reply, so that another attempt may succeed."""
    return not is_reply(error) and obstacle_of(error) == SILENT


def _no_connection(error: grpc.aio.AioRpcError, address: str, caller: str) -> str:
    problem = obstacle_of(error)
    message = f"{caller} cannot reach the worker at {address}: {problem.cause}"
    if problem.remedy != NETWORK:
        return message
    return f"{message}; {firewall_advice(address, caller=caller)}"


def firewall_advice(address: str, *, caller: str, peer: str = "") -> str:
    """Returns which port to allow in the firewall so that `caller` can reach `host:port`, where `peer` listens."""
    host, _, port = address.rpartition(":")
    return f"allow TCP port {port} from {caller} to {peer or host} in the firewall"
