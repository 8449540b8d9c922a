"""Records the current attempt of each request, so that older attempts are rejected.

All Links of a receiver share one fence, because the attempts of a request may arrive from different senders.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kv_transfer.protocol.messages import TransferId

# The fence forgets a request only after this many other requests, and attempts of one request follow within seconds.
DEFAULT_CAPACITY = 65_536


@dataclass(slots=True)
class _Entry:
    attempt: int
    is_running: bool
    is_committed: bool = False


@dataclass(frozen=True, slots=True)
class Admittance:
    """Whether an attempt may start, and the older attempt that it supersedes."""

    is_current: bool
    superseded: TransferId | None = None


class Fence:
    """The highest attempt seen for each request. Never forgets a running attempt."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def enter(self, transfer_id: TransferId) -> Admittance:
        """Admits an attempt if it is newer than all attempts seen. Each attempt can enter only once."""
        entry = self._entries.get(transfer_id.request_id)
        if entry is not None and transfer_id.attempt <= entry.attempt:
            return Admittance(is_current=False)
        superseded = TransferId(transfer_id.request_id, entry.attempt) if entry and entry.is_running else None
        self._remember(transfer_id, is_running=True)
        return Admittance(is_current=True, superseded=superseded)

    def leave(self, transfer_id: TransferId, *, is_committed: bool) -> None:
        """Records that an attempt has ended."""
        entry = self._entries.get(transfer_id.request_id)
        if entry is not None and entry.attempt == transfer_id.attempt:
            entry.is_running = False
            entry.is_committed = is_committed

    def close(self, transfer_id: TransferId) -> None:
        """Rejects an attempt that has not started here, because it was cancelled."""
        entry = self._entries.get(transfer_id.request_id)
        if entry is None or transfer_id.attempt > entry.attempt:
            self._remember(transfer_id, is_running=False)

    def is_committed(self, transfer_id: TransferId) -> bool:
        """Returns whether exactly this attempt was committed."""
        entry = self._entries.get(transfer_id.request_id)
        return entry is not None and entry.attempt == transfer_id.attempt and entry.is_committed

    def _remember(self, transfer_id: TransferId, *, is_running: bool) -> None:
        self._entries[transfer_id.request_id] = _Entry(transfer_id.attempt, is_running)
        self._entries.move_to_end(transfer_id.request_id)
        if len(self._entries) > self._capacity:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        for request_id, entry in self._entries.items():
            if not entry.is_running:
                del self._entries[request_id]
                return
