"""What ended an attempt, and which of its workers is to blame."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.topology.events import Event, Failed, Unfit
from gateway.topology.session import WorkerSession
from services.runtime.errors import (
    InternalError,
    InvalidRequest,
    LayoutMismatch,
    TandemError,
    TransferFailed,
    WorkerLost,
    WorkerUnavailable,
)

if TYPE_CHECKING:
    from gateway.requests.attempt import Attempt

MAX_REFUSALS = 2
"""Refusals as invalid, by workers, after which a request is invalid. One may be the fault of a single worker."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fault:
    """What ended an attempt, and which worker is to blame.

    `worker` failed; None: one of the two did, or the way between them. `suspects` were computing the request and may
    have died of it; whether they are dead may become known only later. `is_certain`: one of them has said so.
    `is_fresh`: no token had come from them in this attempt. `accused` is the worker that the other one reports about.
    `is_between`: the accused worker has answered since, so the path between the two is at fault.
    """

    error: TandemError
    worker: WorkerSession | None = None
    suspects: tuple[WorkerSession, ...] = ()
    is_certain: bool = False
    is_fresh: bool = True
    accused: WorkerSession | None = None
    is_between: bool = False


def fault_of(attempt: "Attempt", session: WorkerSession, event: Event, error: TandemError) -> Fault:
    """Returns the worker to blame. One that only waited for its part of the work did not die of the request."""
    if not isinstance(event, Failed):
        return Fault(error, worker=None if isinstance(error, TransferFailed) else session)
    is_fresh = session not in attempt.token_sources
    if isinstance(error, Unfit):
        return Fault(error, session, is_fresh=is_fresh)
    if isinstance(error, WorkerLost):  # our own word
        is_suspect = attempt.may_compute(session) and not attempt.is_at_giver
        return Fault(error, session, suspects=(session,) if is_suspect else (), is_fresh=is_fresh)
    if isinstance(error, TransferFailed | LayoutMismatch | WorkerUnavailable):
        # Said by one of the two about the other one, which may be dead without our having noticed yet. A worker
        # that is leaving will be gone, too, and not because of this.
        other = attempt.prefill if session is attempt.decode else attempt.decode
        if other is None or attempt.is_move or other.load.is_draining:
            return Fault(error)
        # A decode worker knows of a transfer only after its pages were reserved, which is when computing begins.
        is_suspect = other is attempt.prefill or attempt.may_compute(other)
        return Fault(
            error,
            suspects=(other,) if is_suspect else (),
            is_fresh=other not in attempt.token_sources,
            # A worker that is leaving reports its own end, whatever the words.
            accused=other if attempt.is_at(other) and not session.load.is_draining else None,
        )
    if isinstance(error, InternalError):
        return Fault(error, session, suspects=(session,), is_certain=True, is_fresh=is_fresh)
    return Fault(error, session, is_fresh=is_fresh)


def check_refusals(failure: TandemError, num_refusals: int, *, request_id: str) -> None:
    """Raises InvalidRequest if two workers refused the request as invalid, this time included."""
    if isinstance(failure, Unfit) and num_refusals >= MAX_REFUSALS:
        logger.error("workers refuse an accepted request", extra={"request_id": request_id, "reason": failure.message})
        raise InvalidRequest(failure.message, code="refused_by_workers")
