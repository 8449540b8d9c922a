"""Which workers should be in the cluster: those that were seen and have not said that they leave, and as many of each
role as an operator expects. Pure: what is seen and the time are passed in.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from services.runtime.worker_state import WorkerState

GONE_FOR_S = 600.0
"""A worker that vanished is missed for this time, then forgotten."""
MISSING_AFTER_S = 10.0
"""Fewer workers than an operator expects are a trouble after this time: one that is replaced comes back sooner."""
STARTING_FOR_S = 600.0
"""A worker that loads its model counts as present for this time."""
MAX_GONE = 1024
"""The most workers that are missed; beyond that, those that vanished first are forgotten."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A worker that is registered, or has a session. `has_worked`: its process was ready once."""

    id: str
    role: str
    model: str
    host: str
    address: str
    state: WorkerState
    has_worked: bool


@dataclass(frozen=True, slots=True)
class Gone:
    """A worker that was ready and vanished without a word, noticed at `at_s`, which is `since_unix_s` in Unix time."""

    worker: Seen
    at_s: float
    since_unix_s: float


@dataclass(frozen=True, slots=True)
class Shortage:
    """How many workers of a role are ready, are starting and are expected."""

    expected: int
    ready: int
    starting: int


class Presence:
    """The workers that are missed. `expected` gives how many there should be by role; others have no such number."""

    def __init__(self, expected: Callable[[], Mapping[str, int]] = dict) -> None:
        self._expected = expected
        self.num_vanished: Counter[str] = Counter()
        """How many have vanished since the start, by role."""
        self._gone: dict[str, Gone] = {}
        self._known: set[str] = set()
        """Ids of workers that were ready and have neither left in order nor been forgotten."""
        self._newcomers: dict[str, float] = {}
        """When each worker that has not been ready yet was first seen, by its id."""
        self._starting_since_s: dict[str, float] = {}
        self._short_since_s: dict[str, float] = {}
        self._shortages: dict[str, Shortage] = {}

    @property
    def expected(self) -> Mapping[str, int]:
        """How many workers of each role there should be now."""
        return self._expected()

    @property
    def gone(self) -> list[Gone]:
        """The workers that are missed, in order of role and id."""
        return sorted(self._gone.values(), key=lambda gone: (gone.worker.role, gone.worker.id))

    @property
    def shortages(self) -> Mapping[str, Shortage]:
        """Roles that have had too few workers for a while, as of the last look."""
        return self._shortages

    def left(self, worker: Seen, now_s: float, *, unix_s: float, in_order: bool) -> None:
        """Notes that a worker has neither a lease nor a session any longer. `in_order`: it had said that it leaves."""
        if worker.id not in self._known and not worker.has_worked:
            return
        if in_order:
            self._known.discard(worker.id)
            self._gone.pop(worker.id, None)
            return
        self._known.add(worker.id)
        self.num_vanished[worker.role] += 1
        self._gone[worker.id] = Gone(worker, now_s, unix_s)
        while len(self._gone) > MAX_GONE:
            self._forget(next(iter(self._gone)))

    def look(self, present: Iterable[Seen], now_s: float) -> None:
        """Takes all present workers: finds out which are back, which are replacements and which to forget."""
        workers = {worker.id: worker for worker in present}
        self._newcomers = {id_: since_s for id_, since_s in self._newcomers.items() if id_ in workers}
        for worker in workers.values():
            self._gone.pop(worker.id, None)
            if worker.id not in self._known:
                self._take_newcomer(worker, now_s)
        for gone in list(self._gone.values()):
            if now_s - gone.at_s >= GONE_FOR_S:
                self._forget(gone.worker.id)
        self._compare(workers.values(), now_s)

    def _take_newcomer(self, worker: Seen, now_s: float) -> None:
        first_seen_s = self._newcomers.setdefault(worker.id, now_s)
        if worker.state != WorkerState.READY:
            return
        del self._newcomers[worker.id]
        self._known.add(worker.id)
        # Where ids are new at each start, a worker that came after another one vanished is its replacement.
        for gone in self._gone.values():
            is_alike = (gone.worker.role, gone.worker.model) == (worker.role, worker.model)
            if is_alike and gone.at_s <= first_seen_s:
                self._forget(gone.worker.id)
                return

    def _forget(self, worker_id: str) -> None:
        self._gone.pop(worker_id, None)
        self._known.discard(worker_id)

    def _compare(self, workers: Iterable[Seen], now_s: float) -> None:
        ready: Counter[str] = Counter()
        starting: Counter[str] = Counter()
        since_s, self._starting_since_s = self._starting_since_s, {}
        for worker in workers:
            if worker.state == WorkerState.READY:
                ready[worker.role] += 1
            elif worker.state == WorkerState.STARTING:
                began_s = self._starting_since_s[worker.id] = since_s.get(worker.id, now_s)
                starting[worker.role] += now_s - began_s < STARTING_FOR_S
        self._shortages = {}
        for role, expected in self.expected.items():
            if ready[role] + starting[role] >= expected:
                self._short_since_s.pop(role, None)
            elif now_s - self._short_since_s.setdefault(role, now_s) >= MISSING_AFTER_S:
                self._shortages[role] = Shortage(expected, ready[role], starting[role])
