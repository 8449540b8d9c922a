"""Counts rejected, dropped, and abandoned messages, frames, and transfers by reason."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum


class Reason(StrEnum):
    """Reason for a rejection or a drop."""

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
    """Counts per Reason. All Links of a worker share one object.

    Only the event loop's thread may count. Any thread may read.
    """

    def __init__(self) -> None:
        self._counts: Counter[Reason] = Counter()

    def count(self, reason: Reason) -> None:
        """Increments the count of a reason."""
        self._counts[reason] += 1

    def __getitem__(self, reason: Reason) -> int:
        return self._counts[reason]

    def snapshot(self) -> dict[str, int]:
        """Returns all nonzero counts by the name of the reason."""
        # The copy is atomic, because the caller may be another thread.
        return {str(reason): count for reason, count in self._counts.copy().items()}
