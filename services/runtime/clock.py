"""Time as a value that is passed in: clocks and absolute deadlines. Knows no event loop, starts no timer."""

import time
from typing import Protocol

import msgspec

from services.runtime.errors import DeadlineExceeded


class Clock(Protocol):
    """Where a part of the program reads the time."""

    def monotonic(self) -> float:
        """Returns seconds that never go back, from an arbitrary start; for durations and deadlines."""
        ...

    def unix_ns(self) -> int:
        """Returns nanoseconds since 1970 by the wall clock, which may jump; for logs and spans only."""
        ...


class SystemClock:
    """The clock of this machine."""

    # Asked forty times for a request: a call of Python's own in between would cost more than the answer.
    monotonic = staticmethod(time.monotonic)
    """Seconds by CLOCK_MONOTONIC."""
    unix_ns = staticmethod(time.time_ns)
    """Nanoseconds since 1970."""


class ThreadClock(SystemClock):
    """The time that the calling thread has computed: what others do on its core meanwhile is not in it."""

    monotonic = staticmethod(time.thread_time)
    """Seconds by CLOCK_THREAD_CPUTIME_ID."""


class ManualClock:
    """A clock that moves only when it is told to."""

    def __init__(self, *, monotonic_s: float = 1000.0, unix_ns: int = 1_700_000_000_000_000_000) -> None:
        self._monotonic_s = monotonic_s
        self._unix_ns = unix_ns

    def monotonic(self) -> float:
        """Returns seconds, as advanced."""
        return self._monotonic_s

    def unix_ns(self) -> int:
        """Returns nanoseconds since 1970, as advanced."""
        return self._unix_ns

    def advance(self, seconds: float) -> None:
        """Moves both clocks forward."""
        if seconds < 0:
            raise ValueError("a monotonic clock does not go back")
        self._monotonic_s += seconds
        self._unix_ns += round(seconds * 1e9)


SYSTEM_CLOCK = SystemClock()
THREAD_CLOCK = ThreadClock()


class Deadline(msgspec.Struct, frozen=True):
    """A moment on a monotonic clock after which nobody waits for the result."""

    at_s: float
    clock: Clock = SYSTEM_CLOCK

    @classmethod
    def after(cls, seconds: float, *, clock: Clock = SYSTEM_CLOCK) -> "Deadline":
        """Returns the moment `seconds` from now."""
        return cls(clock.monotonic() + seconds, clock)

    @classmethod
    def from_remaining_ms(cls, remaining_ms: int, *, clock: Clock = SYSTEM_CLOCK) -> "Deadline":
        """Returns the deadline that a message carries as time left. The message's way here is not counted."""
        return cls.after(remaining_ms / 1000.0, clock=clock)

    def remaining_s(self) -> float:
        """Returns the seconds left, never below zero."""
        return max(0.0, self.at_s - self.clock.monotonic())

    def remaining_ms(self) -> int:
        """Returns the milliseconds left, rounded up, so that a deadline that has not passed never reads 0."""
        return -int(-self.remaining_s() * 1000.0 // 1)

    def has_passed(self) -> bool:
        """Returns whether the moment is now or was before."""
        return self.clock.monotonic() >= self.at_s

    def check(self) -> None:
        """Raises DeadlineExceeded if the moment has passed."""
        if self.has_passed():
            raise DeadlineExceeded("the request's deadline passed")

    def sooner(self, other: "Deadline") -> "Deadline":
        """Returns the earlier of two deadlines of the same clock."""
        return self if self.at_s <= other.at_s else other
