"""From the events of an answer's attempt to its deltas, made where the events come in.

A token in the middle of an answer goes from the worker's message to the client's connection in one go: no task is
woken for it, which would cost more than all the rest. The task that runs the answer sleeps until it is needed: for the
end, a failure, a worker that leaves, or a client that does not take what there is. Then everything goes through it.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

from gateway.requests.answer import RunningAnswer
from gateway.requests.attempt import Attempt
from gateway.types import Delta
from services.runtime.errors import TandemError

Observed = TypeVar("Observed")


class FastPath:
    """The short way of one answer's deltas, past the task that iterates over `Requests.run`: straight to a socket.

    `take`, once it is set, is offered each delta but the last as soon as it is made. It returns True if it has
    delivered the delta or nothing had to be delivered, and False to leave it to the task. It is called only while the
    task waits for the next delta, so nothing is overtaken.
    """

    __slots__ = ("take",)

    def __init__(self) -> None:
        self.take: Callable[[Delta], bool] | None = None


class Delivery(Generic[Observed]):
    """The deltas of one answer. `observe` is told of each, before anybody else, with `observed`."""

    def __init__(
        self,
        request: RunningAnswer,
        fast_path: FastPath,
        observe: Callable[[RunningAnswer, Attempt, Delta, Observed], None],
        observed: Observed,
    ) -> None:
        self._request = request
        self._fast_path = fast_path
        self._observe = observe
        self._observed = observed
        self._attempt: Attempt | None = None
        self._left: Delta | None = None
        """The delta that was made and has not been delivered."""
        self._error: Exception | None = None

    async def next(self, attempt: Attempt) -> Delta:
        """Returns the next delta that the fast path has not taken; it may be empty. Raises what ended the attempt."""
        self._attempt = attempt
        try:
            if not attempt.is_over:
                await self._request.mailbox.wait(self._take_now)
        except TandemError:
            if self._left is None:
                raise
        if self._error is not None:
            raise self._take_error()
        delta, self._left = self._left, None
        return delta or self._make(attempt)

    def _take_now(self) -> bool:
        """Deals with what has come while `next` waits. False: `next` has to continue."""
        take, attempt = self._fast_path.take, self._attempt
        if take is None or attempt is None:
            return False
        try:
            delta = self._make(attempt)
            goes_on = delta.finish_reason is None and not attempt.is_over and not attempt.is_moving
            if goes_on and take(delta):
                return True
        except Exception as error:  # noqa: BLE001 - the error is this answer's, not that of the session which delivers the event
            self._error = error
            return False
        self._left = delta
        return False

    def _take_error(self) -> Exception:
        """Returns the error. Nothing keeps it then, the frame that raises it included."""
        error, self._error = self._error, None
        assert error is not None
        return error

    def _make(self, attempt: Attempt) -> Delta:
        delta = self._request.take(attempt, attempt.take_arrived())
        self._observe(self._request, attempt, delta, self._observed)
        return delta
