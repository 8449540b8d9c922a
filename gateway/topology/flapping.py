"""Which workers keep failing and recovering. Pure: what is seen and the time are passed in."""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from services.runtime.breaker import CircuitState
from services.runtime.worker_state import WorkerState

FLAPS = 3
"""Failures within FLAP_WINDOW_S from which a worker counts as flapping."""
FLAP_WINDOW_S = 600.0
MAX_WORKERS = 16_384
"""The most workers that are remembered. Beyond that, those that failed first are forgotten."""


class SeenWorker(NamedTuple):
    """A registered worker."""

    id: str
    incarnation: str
    state: WorkerState
    circuit: CircuitState = "closed"

    @property
    def is_ejected(self) -> bool:
        """Whether the worker is kept from work. A suspected worker still gets work."""
        return self.circuit in ("open", "half_open")


class FlapCounter:
    """The failures of each worker within the last FLAP_WINDOW_S.

    A failure is a worker that was ready and restarts, becomes unreachable, or disappears without draining first, or
    whose circuit opens.
    """

    def __init__(self) -> None:
        self._ready: dict[str, str] = {}
        """Incarnation of each worker that was ready with a closed circuit and has not failed since."""
        self._failed_at_s: dict[str, deque[float]] = {}
        """Times of the failures of each worker, oldest first."""

    def check(self, workers: Iterable[SeenWorker], now_s: float) -> Mapping[str, int]:
        """Takes all registered workers. Returns the number of failures of each worker that flaps."""
        present = {worker.id: worker for worker in workers}
        for worker_id, incarnation in list(self._ready.items()):
            if _has_failed(present.get(worker_id), incarnation):
                self._failed_at_s.setdefault(worker_id, deque()).append(now_s)
                while len(self._failed_at_s) > MAX_WORKERS:
                    del self._failed_at_s[next(iter(self._failed_at_s))]
        self._ready = {
            worker.id: worker.incarnation
            for worker in present.values()
            if worker.state == WorkerState.READY and not worker.is_ejected
            # A suspected worker that was ejected before has not recovered.
            if worker.circuit != "suspected" or self._ready.get(worker.id) == worker.incarnation
        }
        for worker_id, failed_at_s in list(self._failed_at_s.items()):
            while failed_at_s and failed_at_s[0] <= now_s - FLAP_WINDOW_S:
                failed_at_s.popleft()
            if not failed_at_s:
                del self._failed_at_s[worker_id]
        return {worker_id: len(failed) for worker_id, failed in self._failed_at_s.items() if len(failed) >= FLAPS}


def _has_failed(worker: SeenWorker | None, incarnation: str) -> bool:
    """Returns whether a worker that was ready has failed since the last check."""
    if worker is None or worker.incarnation != incarnation or worker.is_ejected:
        return True
    return worker.state == WorkerState.LOST
