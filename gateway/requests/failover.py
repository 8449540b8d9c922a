"""What a failed attempt means for its answer: whether it is tried again, when, and when never again.

Two limits, for two dangers. `max_attempts` failures that no death explains, without a new token in between: the cluster
cannot do it. The retry budget: such failures are tried again at a bounded rate, so that a fault which fails everything
does not multiply the load. The third danger, a request that its workers die of, is `quarantine`'s business.

A failed path between two living workers does not count against `max_attempts`, because other paths work. A request uses
no pair of workers again that failed it, and after `MAX_PATHS` - 1 failed paths no path: one worker does everything.
"""

import logging

from gateway.observability.metrics import Metrics
from gateway.requests.answer import RunningAnswer
from gateway.requests.attempt import CrowdedOut
from gateway.requests.dispatch import Dispatcher
from gateway.requests.fault import check_refusals
from gateway.requests.policies import Policies
from gateway.requests.quarantine import Quarantine
from gateway.topology.events import Unfit
from services.runtime.clock import Clock
from services.runtime.errors import (
    InternalError,
    LayoutMismatch,
    TandemError,
    TransferFailed,
    WorkerLost,
    WorkerUnavailable,
)
from services.scheduling.retry_budget import RetryBudget

TRY_AGAIN = (WorkerUnavailable, TransferFailed, LayoutMismatch, InternalError)
"""The failures of an attempt after which another pair of workers continues after the last token."""
MAX_FAILURES = 16
"""The most failures of one answer that are tried again, however far it comes between them."""
MAX_PATHS = 3
"""Maximum number of pairs of workers that fail one request in a row because of the path between them."""
PATH_RETRY_WAIT_S = 0.5
"""Maximum wait for the retry budget after a failed path, in seconds. The pair's circuit bounds the load already."""
MAX_CROWDINGS = 8
"""How often in a row an admitted attempt may find no room. Then it counts as one failed attempt."""
CROWDED_WAIT_S, MAX_CROWDED_WAIT_S = 0.05, 1.0
"""First and longest pause after an admitted attempt found no room, in seconds. Each pause is twice the one before."""

_REASONS: dict[type[TandemError], str] = {
    WorkerLost: "worker_lost",
    WorkerUnavailable: "worker_unavailable",
    TransferFailed: "transfer_failed",
    LayoutMismatch: "layout_mismatch",
    InternalError: "internal_error",
}

logger = logging.getLogger(__name__)


def reason_of(failure: TandemError) -> str:
    """Returns the failure's class, or the nearest one above it, in one of a few words."""
    return next(reason for kind, reason in _REASONS.items() if isinstance(failure, kind))


class Failover:
    """Decides about every failed attempt of this gateway."""

    def __init__(
        self, quarantine: Quarantine, dispatcher: Dispatcher, *, policies: Policies, metrics: Metrics, clock: Clock
    ) -> None:
        self._policies = policies
        self._dispatcher = dispatcher
        self._quarantine = quarantine
        self._metrics = metrics
        self._clock = clock
        self._budget = RetryBudget(now_s=clock.monotonic())

    def note_accepted(self) -> None:
        """Notes an accepted call, which allows a few more retries of others."""
        self._budget.note_request(self._clock.monotonic())

    async def after(self, request: RunningAnswer, failure: TandemError) -> None:
        """Returns when the request may be tried again. Raises the failure or Quarantined if it may not."""
        attempt, quarantine = request.attempt, self._quarantine
        if attempt is not None:
            await quarantine.hear_out(attempt)
        request.close_attempt()
        self._metrics.retries.inc()
        reason = {"attempt": request.attempt_number, "reason": failure.message}
        logger.warning("attempt failed", extra={"request_id": request.spec.request_id, **reason})
        if attempt is not None and attempt.giver is not None and not attempt.is_decoding:
            if isinstance(failure, TransferFailed):
                path = attempt.giver.session.peer, attempt.decode.peer
                self._dispatcher.move_paths.failed(path, failure)
            return  # It ran well where it was, so the request has nothing to do with it.
        request.num_refusals += isinstance(failure, Unfit)
        check_refusals(failure, request.num_refusals, request_id=request.spec.request_id)
        strike = request.note_failure(attempt, is_alone=request in self._dispatcher.on_trial)
        if attempt is not None:
            self._dispatcher.note_failure(attempt)
        await quarantine.judge(request, failure)
        if strike is None and isinstance(failure, WorkerLost):
            request.excuse_failure()
        self._check_limits(request, failure)
        if not isinstance(failure, WorkerLost):
            is_path = attempt is not None and attempt.fault is not None and attempt.fault.is_between
            max_wait_s = self._policies.failover_wait_s
            await self._wait_for_turn(request, min(PATH_RETRY_WAIT_S, max_wait_s) if is_path else max_wait_s)
        if strike is not None:
            await quarantine.await_trial(request)

    async def after_crowding(self, request: RunningAnswer, crowded_out: CrowdedOut) -> None:
        """Returns when the request may enter the queue again. Raises the error if it has found no room too often."""
        num_crowded_out = request.note_crowded_out(request.attempt)
        request.close_attempt()
        if num_crowded_out % MAX_CROWDINGS == 0:
            request.note_failure(None)
            self._check_limits(request, crowded_out)
        wait_s = CROWDED_WAIT_S * 2 ** min(num_crowded_out - 1, 16)
        await request.mailbox.rest(min(wait_s, MAX_CROWDED_WAIT_S))

    def _check_limits(self, request: RunningAnswer, failure: TandemError) -> None:
        """Decides how the next attempt may be made. Raises the failure if there must be none."""
        num_paths = request.num_path_failures
        num_unexplained = request.num_failures_in_row - num_paths - sum(map(self._quarantine.counts, request.strikes))
        most = self._policies.max_attempts
        if num_unexplained >= most or num_paths >= MAX_PATHS or request.num_failures >= MAX_FAILURES:
            raise failure.again()
        request.limit_attempts(is_last=num_unexplained + 1 >= most > 1, avoids_handoffs=num_paths + 1 >= MAX_PATHS)

    async def _wait_for_turn(self, request: RunningAnswer, max_wait_s: float) -> None:
        turn = self._budget.take(self._clock.monotonic(), max_wait_s=max_wait_s)
        if not turn.wait_s:
            return
        self._metrics.delayed_retries.inc()
        try:
            await request.mailbox.rest(turn.wait_s)
        except BaseException:
            self._budget.give_back(turn)
            raise
