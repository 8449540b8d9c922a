"""Counts what the protocol refused, dropped or gave up, by reason."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum


class Reason(StrEnum):
    """Why something was refused or dropped."""

    STALE_INCARNATION = "stale_incarnation"
    LAYOUT_MISMATCH = "layout_mismatch"
    STALE_ATTEMPT = "stale_attempt"
    SUPERSEDED_ATTEMPT = "superseded_attempt"
    DUPLICATE_RESERVE = "duplicate_reserve"
    UNKNOWN_TRANSFER = "unknown_transfer"
    LATE_MESSAGE = "late_message"
    LATE_FRAME = "late_frame"
    REPLAYED_FRAME = "replayed_frame"
    LOST_FRAME = "lost_frame"
    WRONG_SIZE = "wrong_size"
    CHECKSUM_MISMATCH = "checksum_mismatch"
    STALE_GENERATION = "stale_generation"
    DUPLICATE_CHUNK = "duplicate_chunk"
    CONFLICTING_CHUNK = "conflicting_chunk"
    OUTSIDE_RESERVATION = "outside_reservation"
    SEAL_MISMATCH = "seal_mismatch"
    PROTOCOL_VIOLATION = "protocol_violation"
    CHANNEL_BROKEN = "channel_broken"
    PEER_SILENT = "peer_silent"
    WORKER_SILENT = "worker_silent"
    LINK_LOST = "link_lost"
    DEADLINE = "deadline"


class Counters:
    """Counts per Reason. One object serves all Links of a worker.

    Only the event loop's thread may count; any thread may read.
    """

    def __init__(self) -> None:
        self._counts: Counter[Reason] = Counter()

    def count(self, reason: Reason) -> None:
        """Count one more."""
        self._counts[reason] += 1

    def __getitem__(self, reason: Reason) -> int:
        return self._counts[reason]

    def snapshot(self) -> dict[str, int]:
        """Return all counts that are not zero, by the reason's text."""
        # A copy is made in one step: the reader may be another thread.
        return {str(reason): count for reason, count in self._counts.copy().items()}
