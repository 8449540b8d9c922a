"""When silence, slowness and age become failures: the time limits, and whether a peer is still alive."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeouts:
    """All limits of the protocol, in seconds. A request's own deadline is always kept besides."""

    heartbeat_s: float = 1.0
    """Each side says something at least this often."""
    silence_s: float = 3.0
    """A peer that said nothing for this long is dead."""
    connect_s: float = 5.0
    """From dialling to an open channel."""
    reserve_s: float = 10.0
    """From Reserve to Granted."""
    commit_s: float = 10.0
    """From Seal to Committed."""
    worker_s: float = 8.0
    """The receiving worker's answer to reserve, commit and release. Less than the two above: the sender hears why."""
    abort_s: float = 3.0
    """From Abort to AbortAck; afterwards the sender forgets the transfer."""
    stall_s: float = 5.0
    """A channel that owes something and moves nothing for this long is broken."""


class Liveness:
    """Decides when to beat and when the peer is dead. Any message counts as a sign of life."""

    def __init__(self, timeouts: Timeouts, now: float) -> None:
        self._timeouts = timeouts
        self._last_heard = now
        self._last_beat = now
        self._last_tick = now

    def heard(self, now: float) -> None:
        """Something arrived."""
        self._last_heard = now

    def beat_due(self, now: float) -> bool:
        """Return whether a heartbeat must go out now, and take it as sent."""
        if now - self._last_beat < self._timeouts.heartbeat_s:
            return False
        self._last_beat = now
        return True

    def is_silent(self, now: float) -> bool:
        """Return whether the peer has been silent for too long. Call it at least every heartbeat."""
        # A process that was itself stopped must first read what waits in its sockets before it accuses anyone.
        if now - self._last_tick > self._timeouts.heartbeat_s:
            self._last_heard = max(self._last_heard, now - self._timeouts.silence_s + self._timeouts.heartbeat_s)
        self._last_tick = now
        return now - self._last_heard >= self._timeouts.silence_s
