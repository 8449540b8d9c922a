"""How an error of the exception tree is named on the Link and becomes an error again on the other side."""

from __future__ import annotations

import copy

from services.runtime import errors

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
        errors.LeaseLost,
        errors.DeadlineExceeded,
        errors.RequestCancelled,
        errors.LayoutMismatch,
    )
}


def code_of(error: errors.TandemError) -> str:
    """Return the name of the nearest class that may travel; subclasses of our own are named as their parent."""
    for cls in type(error).__mro__:
        if cls.__name__ in _CLASSES and _CLASSES[cls.__name__] is cls:
            return cls.__name__
    return errors.TransferFailed.__name__


def again(error: errors.TandemError) -> errors.TandemError:
    """Return an equal error to raise at another place: one object raised twice would carry both tracebacks."""
    return copy.copy(error)


def error_from(code: str, message: str) -> errors.TandemError:
    """Return the error that a peer named; an unknown name is a TransferFailed."""
    return _CLASSES.get(code, errors.TransferFailed)(message)
