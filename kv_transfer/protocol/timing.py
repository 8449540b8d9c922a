"""Time limits of the protocol, and the liveness check of a peer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeouts:
    """All time limits of the protocol, in seconds. A request's deadline applies in addition."""

    heartbeat_s: float = 1.0
    """Interval between heartbeats."""
    silence_s: float = 3.0
    """Time without any message after which the peer counts as dead."""
    connect_s: float = 5.0
    """Time from dialing to an open channel."""
    reserve_s: float = 10.0
    """Time from Reserve to Granted."""
    commit_s: float = 10.0
    """Time from Seal to Committed."""
    worker_s: float = 8.0
    """Time for the receiving worker to complete a reserve, a commit, or a release.

    Shorter than `reserve_s` and `commit_s`, so that the sender receives the reason before its own timeout.
    """
    abort_s: float = 3.0
    """Time from Abort to AbortAck. Afterwards the sender forgets the transfer."""
    stall_s: float = 5.0
    """Time without progress after which a channel with pending payload counts as broken."""


class Liveness:
    """Decides when to send a heartbeat and when the peer counts as dead. Any message counts as a sign of life."""

    def __init__(self, timeouts: Timeouts, now: float) -> None:
        self._timeouts = timeouts
        self._last_heard = now
        self._last_beat = now
        self._last_tick = now

    def heard(self, now: float) -> None:
        """Records that a message arrived."""
        self._last_heard = now

    def beat_due(self, now: float) -> bool:
        """Returns whether a heartbeat is due, and records it as sent."""
        if now - self._last_beat < self._timeouts.heartbeat_s:
            return False
        self._last_beat = now
        return True

    def is_silent(self, now: float) -> bool:
        """Returns whether the peer has been silent for too long. Call it at least once per heartbeat interval."""
        # If this process was itself stopped, it must first read the messages that wait in its sockets before it blames
        # the peer.
        if now - self._last_tick > self._timeouts.heartbeat_s:
            self._last_heard = max(self._last_heard, now - self._timeouts.silence_s + self._timeouts.heartbeat_s)
        self._last_tick = now
        return now - self._last_heard >= self._timeouts.silence_s
