"""When and how a failed call is tried again: pure policy. Reads no clock, draws no random number, knows no channel.

The budget is a token bucket as in gRPC's retry throttling (gRFC A6) and Finagle's RetryBudget: calls fill it, retries
empty it, so that retries stay a small share of the load when a server is in trouble.
"""

import enum
import threading
from dataclasses import dataclass

import grpc

from tandem_client.errors import AlreadyExists, Failure, NotFound, ServerError, TandemError

_UNITS = 10_000
"""Parts of one retry that the bucket counts in; whole numbers do not drift."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How stubborn a client is."""

    max_attempts: int = 4
    """Tries of a call with no new token between them; 1: no retries."""
    budget_ratio: float = 0.1
    """Retries per call in the long run."""
    budget_reserve: int = 10
    """Retries that a client may make at the start or after a quiet time, on top of that."""
    initial_backoff_s: float = 0.1
    """Longest wait before the first retry, where the server names none; it doubles with each."""
    max_backoff_s: float = 5.0
    """It grows no further."""
    max_pushback_s: float = 30.0
    """A server that asks for a longer wait gets no retry: its error is raised, with `retry_after_s`."""

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts is {self.max_attempts} but must be at least 1")
        if not 0 <= self.budget_ratio <= 1:
            raise ValueError(f"budget_ratio is {self.budget_ratio} but must be in [0, 1]")
        if self.budget_reserve < 0:
            raise ValueError(f"budget_reserve is {self.budget_reserve} but must not be negative")
        for name in ("initial_backoff_s", "max_backoff_s", "max_pushback_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)} but must be finite and not negative")


class RetryBudget:
    """Retries so far never exceed reserve + ratio * calls so far. Any thread may use it."""

    def __init__(self, *, ratio: float, reserve: int) -> None:
        self._fill = int(ratio * _UNITS)
        self._capacity = max(reserve, 1 if ratio else 0) * _UNITS
        self._level = reserve * _UNITS
        self._lock = threading.Lock()

    def deposit(self) -> None:
        """A call begins."""
        with self._lock:
            self._level = min(self._capacity, self._level + self._fill)

    def withdraw(self) -> bool:
        """Pays for one retry, if the budget suffices."""
        with self._lock:
            if self._level < _UNITS:
                return False
            self._level -= _UNITS
            return True


class Naming(enum.Enum):
    """What makes it safe to send a call again."""

    NONE = enum.auto()
    """Nothing: a new generation begins, which is fine until a part of the first was shown."""
    ID = enum.auto()
    """Its request id: can be resumed, but not sent again while it runs."""
    KEY = enum.auto()
    """Its idempotency key: sent again, it joins what runs; can be resumed."""
    SNAPSHOTS = enum.auto()
    """Each message stands for itself: the call can be made again at any time."""


class Course:
    """One call on its way through its attempts.

    The driver makes a call of the kind that `resumes` says, at the gateway `address`, and reports each message and how
    the attempt failed.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        budget: RetryBudget,
        *,
        naming: Naming = Naming.NONE,
        num_addresses: int = 1,
        address: int = 0,
        resume_at: int | None = None,
    ) -> None:
        self.address = address
        self.resumes = resume_at is not None
        """The next attempt is `Resume` from `next_index` on; else it is the call itself."""
        self.next_index = resume_at or 0
        """Index of the first token that is missing."""
        self._policy = policy
        self._budget = budget
        self._naming = naming
        self._num_addresses = num_addresses
        self._has_shown = self.resumes
        self._has_news = False
        self._num_failures = 0
        budget.deposit()

    def received(self, *, first_index: int, num_tokens: int) -> None:
        """A message of an answer has come. Raises ServerError where an index is missing or repeated."""
        if num_tokens and first_index != self.next_index:
            raise ServerError(f"the server sent token {first_index} where token {self.next_index} was due")
        self.next_index += num_tokens
        self.made_progress()

    def made_progress(self) -> None:
        """The server has done something useful: it gets all attempts anew."""
        self._has_shown = True
        self._has_news = True
        self._num_failures = 0

    def failed(self, failure: Failure, *, draw: float, remaining_s: float) -> float:
        """Seconds to wait before the next attempt. Raises the failure's error where none follows.

        `draw` is a random number in [0, 1). The first attempt after a message costs nothing: continuing an
        answer adds no work. All others are paid from the budget.
        """
        error = failure.error
        self._num_failures += 1
        if failure.is_final or self._num_failures >= self._policy.max_attempts:
            raise error
        if self._changes_kind(error):
            return 0.0
        if not self._may_be_repeated(failure):
            raise error
        delay_s = self._delay_s(failure, draw)
        if delay_s >= remaining_s:
            raise error
        if not self._has_news and not self._budget.withdraw():
            raise error
        self._has_news = False
        if self._has_shown and self._naming in (Naming.ID, Naming.KEY):
            self.resumes = True
        if _is_gone(error):
            self.address = (self.address + 1) % self._num_addresses
        return delay_s

    def _changes_kind(self, error: TandemError) -> bool:
        """Whether the answer to a retry says that the other kind of call is the right one.

        An earlier attempt of a request with an id may have begun it without our knowing, or a resumed one not.
        """
        if self._naming is not Naming.ID or self._has_shown or self._num_failures < 2:
            return False
        if isinstance(error, AlreadyExists) and not self.resumes:
            self.resumes = True
            return True
        if isinstance(error, NotFound) and self.resumes:
            self.resumes = False
            return True
        return False

    def _may_be_repeated(self, failure: Failure) -> bool:
        if self._naming is Naming.NONE and self._has_shown:
            return False
        if _is_gone(failure.error):
            return True
        # Without a pushback it is a message that is too large, and will be the next time too.
        return failure.error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and failure.pushback_s is not None

    def _delay_s(self, failure: Failure, draw: float) -> float:
        if failure.pushback_s is not None:
            if failure.pushback_s > self._policy.max_pushback_s:
                raise failure.error
            return failure.pushback_s
        if self._num_failures < self._num_addresses:
            # Another gateway has not been asked yet, and knows nothing of this one's trouble.
            return 0.0
        limit_s = self._policy.initial_backoff_s * 2.0 ** (self._num_failures - self._num_addresses)
        return draw * min(self._policy.max_backoff_s, limit_s)


def _is_gone(error: TandemError) -> bool:
    """Whether the gateway cannot be had.

    gRPC's servers end calls that reach them while they stop with a CANCELLED that has no details; one that somebody
    has cancelled has.
    """
    return error.code is grpc.StatusCode.UNAVAILABLE or (error.code is grpc.StatusCode.CANCELLED and not error.reason)
