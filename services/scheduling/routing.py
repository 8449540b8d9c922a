"""Which worker a request should be offered to first: pure policies over plain views of workers.

Knows nothing of sessions, registries or clocks: the caller says what it sees, and gets back an order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What the gateway knows about one worker at the moment of a decision.

    `pages_available` counts pages that are free or only cached, less those promised to admitted requests.
    `num_requests` counts requests that run or wait there, those that the worker has not yet reported included.
    `waiting_tokens` counts prompt tokens that wait for computation there.
    """

    worker_id: str
    incarnation: str
    pages_total: int
    pages_available: int
    num_requests: int
    waiting_tokens: int
    max_sequence_tokens: int


Policy = Callable[[Sequence[WorkerView], int], list[WorkerView]]
"""(workers, turn) → the same workers, best first. `turn` counts decisions from 0 and only breaks ties."""


def round_robin(workers: Sequence[WorkerView], turn: int) -> list[WorkerView]:
    """Each worker in turn, in order of id, whatever its load."""
    ordered = sorted(workers, key=_by_id)
    return _rotated(ordered, turn)


def least_loaded(workers: Sequence[WorkerView], turn: int) -> list[WorkerView]:
    """Fewest waiting prompt tokens, then fewest requests, then the smallest share of pages in use.

    Workers that are equal in all of these take turns.
    """
    return sorted(round_robin(workers, turn), key=_load)


POLICIES: dict[str, Policy] = {"round_robin": round_robin, "least_loaded": least_loaded}
"""Policies by the name that `--routing` takes."""


def _by_id(worker: WorkerView) -> str:
    return worker.worker_id


def _load(worker: WorkerView) -> tuple[int, int, float]:
    pages_in_use = worker.pages_total - worker.pages_available
    return worker.waiting_tokens, worker.num_requests, pages_in_use / max(worker.pages_total, 1)


def _rotated(workers: list[WorkerView], turn: int) -> list[WorkerView]:
    if len(workers) < 2:
        return workers
    first = turn % len(workers)
    return workers[first:] + workers[:first]
