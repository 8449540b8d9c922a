"""Remembers which attempt of each request counts, so that anything older is kept out for good.

One fence serves all Links of a receiver, because attempts of one request come from different senders.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kv_transfer.protocol.messages import TransferId

# A worker would have to see this many other requests before it forgot one; attempts of a request follow in seconds.
DEFAULT_CAPACITY = 65_536


@dataclass(slots=True)
class _Entry:
    attempt: int
    is_running: bool
    is_committed: bool = False


@dataclass(frozen=True, slots=True)
class Admittance:
    """Whether an attempt may begin, and the older one that it ends."""

    is_current: bool
    superseded: TransferId | None = None


class Fence:
    """The highest attempt seen per request. Never forgets one that runs."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def enter(self, transfer_id: TransferId) -> Admittance:
        """An attempt wants to begin. Each attempt may do so once."""
        entry = self._entries.get(transfer_id.request_id)
        if entry is not None and transfer_id.attempt <= entry.attempt:
            return Admittance(is_current=False)
        superseded = TransferId(transfer_id.request_id, entry.attempt) if entry and entry.is_running else None
        self._remember(transfer_id, is_running=True)
        return Admittance(is_current=True, superseded=superseded)

    def leave(self, transfer_id: TransferId, *, is_committed: bool) -> None:
        """An attempt ended."""
        entry = self._entries.get(transfer_id.request_id)
        if entry is not None and entry.attempt == transfer_id.attempt:
            entry.is_running = False
            entry.is_committed = is_committed

    def close(self, transfer_id: TransferId) -> None:
        """Keep an attempt out that has not begun here: it was cancelled."""
        entry = self._entries.get(transfer_id.request_id)
        if entry is None or transfer_id.attempt > entry.attempt:
            self._remember(transfer_id, is_running=False)

    def is_committed(self, transfer_id: TransferId) -> bool:
        """Whether this very attempt ended in a commit."""
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
