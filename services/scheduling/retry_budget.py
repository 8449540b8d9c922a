"""How fast requests may be tried again: a token bucket that ordinary requests fill. Pure; time is an argument.

Without a bound, a fault that fails every attempt multiplies the load of a cluster just when it can bear it least.
Nothing is refused here: a retry that finds the bucket empty is told how long to wait for its turn.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """What fills the bucket, and how much it holds. Counts are retries."""

    per_request: float = 0.1
    per_second: float = 10.0
    capacity: float = 100.0


@dataclass(frozen=True, slots=True)
class Turn:
    """When a retry may go: after `wait_s` seconds. `taken` is what the bucket gave for it: 1, or 0 for a late retry."""

    wait_s: float
    taken: float


class RetryBudget:
    """The bucket. A retry that has to wait takes its part in advance, so that turns are given in order."""

    def __init__(self, limits: RetryLimits | None = None, *, now_s: float) -> None:
        self._limits = limits or RetryLimits()
        self._filled = self._limits.capacity
        self._filled_at_s = now_s

    def note_request(self, now_s: float) -> None:
        """Notes that a request was accepted, which fills the bucket."""
        self._fill(now_s, self._limits.per_request)

    def take(self, now_s: float, *, max_wait_s: float) -> Turn:
        """Returns the retry's turn, at most `max_wait_s` seconds from now.

        A retry that would have to wait longer goes after `max_wait_s` without having taken anything: it is late
        enough not to do harm, and those behind it do not wait for it.
        """
        self._fill(now_s, 0.0)
        wait_s = max(0.0, 1.0 - self._filled) / self._limits.per_second
        if wait_s > max_wait_s:
            return Turn(max_wait_s, taken=0.0)
        self._filled -= 1.0
        return Turn(wait_s, taken=1.0)

    def give_back(self, turn: Turn) -> None:
        """Gives back what was taken for a retry that is not made after all."""
        self._filled = min(self._limits.capacity, self._filled + turn.taken)

    def _fill(self, now_s: float, extra: float) -> None:
        passed_s = max(0.0, now_s - self._filled_at_s)
        self._filled_at_s = max(self._filled_at_s, now_s)
        more = extra + passed_s * self._limits.per_second
        self._filled = min(self._limits.capacity, self._filled + more)
