"""Converts errors to their representation on the Link, and back."""

from __future__ import annotations

import math

from kv_transfer.protocol.messages import Abort, TransferId
from services.runtime import errors

_MAX_RETRY_AFTER_S = 24 * 3600.0

_CLASSES: dict[str, type[errors.TandemError]] = {
    cls.__name__: cls
    for cls in (
        errors.InvalidRequest,
        errors.NotFound,
        errors.AlreadyExists,
        errors.Overloaded,
        errors.NoFreePages,
        errors.WorkerUnavailable,
        errors.TransferFailed,
        errors.TransferStalled,
        errors.PeerUnreachable,
        errors.LinkRefused,
        errors.ChannelUnreachable,
        errors.StaleIncarnation,
        errors.LeaseLost,
        errors.DeadlineExceeded,
        errors.RequestCancelled,
        errors.LayoutMismatch,
    )
}


def code_of(error: errors.TandemError) -> str:
    """Returns the name of the error's nearest base class that the protocol supports, or "TransferFailed"."""
    for cls in type(error).__mro__:
        if cls.__name__ in _CLASSES and _CLASSES[cls.__name__] is cls:
            return cls.__name__
    return errors.TransferFailed.__name__


def abort_of(transfer_id: TransferId | None, error: errors.TandemError) -> Abort:
    """Returns the message that reports an error to the peer: its class, its message, and the delay before a retry."""
    retry_after_s = min(max(0.0, error.retry_after_s or 0.0), _MAX_RETRY_AFTER_S)
    return Abort(transfer_id, code_of(error), error.message, math.ceil(retry_after_s * 1000))


def peer_error_from(abort: Abort) -> errors.TandemError:
    """Returns the error that a peer sent, as this side reports it to others.

    WorkerUnavailable becomes TransferFailed, because it would mean that the reporting side itself is unavailable.
    """
    error = error_from(abort)
    is_about_peer = isinstance(error, errors.WorkerUnavailable) and not isinstance(error, errors.StaleIncarnation)
    return errors.TransferFailed(error.message) if is_about_peer else error


def error_from(abort: Abort) -> errors.TandemError:
    """Returns the error that a peer sent. An unknown class becomes TransferFailed."""
    error = _CLASSES.get(abort.code, errors.TransferFailed)(abort.message)
    if abort.retry_after_ms:
        error.retry_after_s = abort.retry_after_ms / 1000
    return error
