"""The exception tree of the whole project, without any transport: no grpc, no HTTP.

`services.runtime.status` maps each class to its gRPC status, HTTP status and OpenAI error in one table.
"""

from collections.abc import Sequence
from typing import Self


class TandemError(Exception):
    """Root of the tree.

    `message` is for the person who sent the request or runs the cluster; it holds no prompt text and no
    internals. `retry_after_s` is the time after which it may be worth trying again, or None where that is
    unknown or pointless.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s

    def again(self) -> Self:
        """Returns an equal error, to be raised where this one is kept.

        An error that is kept and raised has the frames of each place where that was, with all that they hold, such as a
        prompt. Where a frame leads back to the error, they stay until the collector's next look.
        """
        copied = type(self).__new__(type(self), *self.args)
        copied.__dict__.update(self.__dict__)
        return copied


def forget_frames(error: BaseException) -> None:
    """Drops the tracebacks of an error that has been dealt with, and of the errors that led to it.

    It is for the ends of the ways that errors take. What is raised again uses `TandemError.again`.
    """
    error.__traceback__ = None
    for cause in (error.__cause__, error.__context__):
        if cause is not None and cause.__traceback__ is not None:
            forget_frames(cause)


class InvalidRequest(TandemError):
    """The request itself is wrong. `field` names the offending field in the words of the API in use.

    `rule` is what the field does not keep to, in words that quote nothing of the request; empty: only `message` says.
    """

    def __init__(self, message: str, *, field: str | None = None, code: str | None = None, rule: str = "") -> None:
        super().__init__(message)
        self.field = field
        self.code = code
        self.rule = rule


class GrammarExhausted(InvalidRequest):
    """No token may come next under the request's own grammar, whichever worker computes the answer."""


class NotOffered(InvalidRequest):
    """The engine that computes the model does not have what the request asks for."""


class NotFound(InvalidRequest):
    """The request names something that does not exist: a model, a worker, a path."""


class AlreadyExists(InvalidRequest):
    """A running request has the same id."""


class Unauthenticated(TandemError):
    """The caller gave no API key, or none that is good here and now."""


class PermissionDenied(InvalidRequest):
    """The caller's API key does not allow this."""


class Overloaded(TandemError):
    """There is no room in the cluster now. `reason` is one of a few words for what is short; empty: nobody has said."""

    def __init__(self, message: str, *, retry_after_s: float | None = None, reason: str = "") -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.reason = reason


class DeadlineTooShort(Overloaded):
    """The request would end after its deadline, however little the cluster has to do: a retry is in vain."""


class NoFreePages(Overloaded):
    """The page pool of a worker cannot hold the request now."""


class RateLimited(TandemError):
    """The tenant's own limit is reached.

    `limit` names it; `headers` are names and values that tell the client more, in HTTP and as gRPC metadata.
    """

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float | None = None,
        limit: str = "",
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.limit = limit
        self.headers = headers


class WorkerUnavailable(TandemError):
    """A worker cannot be reached, has died or is leaving."""


class WorkerLost(WorkerUnavailable):
    """A worker's process has died, or nothing was heard of it for so long that it counts as dead."""


class TransferFailed(TandemError):
    """A handoff could not be proven complete."""


class TransferStalled(TransferFailed):
    """Pages got stuck on their way between two workers that could still talk to each other."""


class PeerUnreachable(TransferFailed):
    """A worker cannot open a Link to its peer. The worker that raises it is healthy; the fault lies with the pair."""


class LinkRefused(PeerUnreachable):
    """The peer already has as many Links as it accepts."""


class ChannelUnreachable(PeerUnreachable):
    """A Link to the peer is open, but no payload channel can be opened."""


class LeaseLost(WorkerUnavailable):
    """A time-limited ownership ended before its holder renewed it."""


class StaleIncarnation(WorkerUnavailable):
    """A message is meant for another life of this process; the sender's view is out of date."""


class NotProven(WorkerUnavailable):
    """A worker and this process could not prove to each other that they belong to one cluster."""


class StoreUnavailable(TandemError):
    """Redis cannot be asked now. Its content is a hint, so a process that meets this continues with its own view."""


class StoreRefused(StoreUnavailable):
    """Redis has refused a command and would refuse it again. The message has its reason."""


class DeadlineExceeded(TandemError):
    """The request's deadline passed."""


class RequestCancelled(TandemError):
    """The client went away or asked to stop."""


class LayoutMismatch(TandemError):
    """Two workers' pages do not fit together; the pair must not be used."""


class InternalError(TandemError):
    """A fault in this program or, read from a message, in its sender. Details are only in the log."""


class Quarantined(TandemError):
    """The workers that computed this request died of it, one after the other; for a while it is not tried again."""


class InvariantViolated(InternalError):
    """The program contradicts itself; the process can no longer be trusted and must exit."""


class ConfigError(TandemError):
    """A setting is wrong; the message names the key, the value and the rule."""


class ModelError(TandemError):
    """A model folder is missing, incomplete, unsafe or of an unknown kind; the message says what to do."""
