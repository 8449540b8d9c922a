"""The workers of a simulated cluster: those that start, that work, that leave, and that are lost.

A worker that starts costs its time and does nothing until it is ready. One that is draining gets nothing new and goes
once it is idle. A lost one is known to be lost some time after it did its last step.
"""

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import partial

from planning.simulator.decode import DecodeWorker
from planning.simulator.events import EventLoop
from planning.simulator.jobs import WorkerSpec
from planning.simulator.prefill import PrefillWorker
from planning.simulator.timeline import Timeline
from services.scheduling.routing.views import WorkerView

PREFILL, DECODE = "prefill", "decode"
ROLES = (PREFILL, DECODE)

Worker = PrefillWorker | DecodeWorker


@dataclass(slots=True)
class Life:
    """When a worker was asked for, was ready and was gone, in seconds; None: not yet."""

    role: str
    asked_s: float
    ready_s: float | None = None
    gone_s: float | None = None


class Pool:
    """All workers by role. `make` builds one that is ready; `changed` is called when there is more or less of them."""

    def __init__(
        self, loop: EventLoop, make: Callable[[str, str], Worker], *, changed: Callable[[], None], bucket_s: float
    ) -> None:
        self._loop = loop
        self._make = make
        self._changed = changed
        self._bucket_s = bucket_s
        self.prefills: dict[str, PrefillWorker] = {}
        """Prefill workers that take requests, by id."""
        self.decodes: dict[str, DecodeWorker] = {}
        self._draining: dict[str, tuple[Worker, Callable[[], None] | None]] = {}
        self.lives: dict[str, Life] = {}
        self.busy: dict[str, Timeline] = {}
        self.regions: dict[str, str] = {}
        """Where each worker is that ever was; empty: near to all."""
        self._num_made = dict.fromkeys(ROLES, 0)

    def __iter__(self) -> Iterator[Worker]:
        """Yields workers that are not gone."""
        yield from self.prefills.values()
        yield from self.decodes.values()
        yield from (worker for worker, _ in self._draining.values())

    def find(self, worker_id: str) -> Worker | None:
        """Returns a worker that is not gone."""
        draining = self._draining.get(worker_id)
        if draining is not None:
            return draining[0]
        return self.prefills.get(worker_id) or self.decodes.get(worker_id)

    def add(self, role: str, *, start_up_s: float = 0.0, region: str = "") -> str:
        """Starts a worker; returns its id."""
        worker_id = f"{role[0]}{self._num_made[role]}"
        self._num_made[role] += 1
        self.busy[worker_id] = Timeline(self._bucket_s)
        self.lives[worker_id] = Life(role, self._loop.now_s)
        self.regions[worker_id] = region
        if start_up_s > 0:
            self._loop.at(self._loop.now_s + start_up_s, partial(self._be_ready, worker_id))
        else:
            self._be_ready(worker_id)
        return worker_id

    def drain(self, worker_id: str, then: Callable[[], None] | None = None) -> None:
        """Takes a worker out of service; it is gone once it is idle, and `then` is called."""
        life = self.lives[worker_id]
        worker = self.prefills.pop(worker_id, None) or self.decodes.pop(worker_id, None)
        if worker is None:  # it has not even started
            life.gone_s = self._loop.now_s
            if then is not None:
                then()
            return
        self._draining[worker_id] = worker, then
        self.settle()

    def settle(self) -> None:
        """Lets drained workers go that have become idle."""
        for worker_id in [one for one, (worker, _) in self._draining.items() if worker.is_idle]:
            _, then = self._draining.pop(worker_id)
            self.lives[worker_id].gone_s = self._loop.now_s
            if then is not None:
                then()

    def forget(self, worker_id: str) -> None:
        """Removes a worker that is known to be lost."""
        self._draining.pop(worker_id, None)
        self.prefills.pop(worker_id, None)
        self.decodes.pop(worker_id, None)
        self.lives[worker_id].gone_s = self._loop.now_s

    def num_starting(self, role: str) -> int:
        """Returns the workers of a role that are asked for and not ready."""
        lives = self.lives.values()
        return sum(life.role == role and life.ready_s is None and life.gone_s is None for life in lives)

    def worker_seconds(self, until_s: float) -> float:
        """Returns what all workers cost until then, start-up and draining included."""
        return sum(min(until_s, life.gone_s or until_s) - life.asked_s for life in self.lives.values())

    def _be_ready(self, worker_id: str) -> None:
        life = self.lives[worker_id]
        if life.gone_s is not None:
            return  # it was taken back while it started
        life.ready_s = self._loop.now_s
        worker = self._make(worker_id, life.role)
        if isinstance(worker, PrefillWorker):
            self.prefills[worker_id] = worker
        else:
            self.decodes[worker_id] = worker
        self._changed()


def prefill_view(worker: PrefillWorker, max_sequence_tokens: int, *, region: str = "") -> WorkerView:
    """Returns what a gateway knows of a prefill worker, and keeps it while that is so."""
    if worker.view is not None:
        if not worker.is_stepping:
            return worker.view
        view = copy(worker.view)  # what waits becomes less while it computes, and nothing else changes
        view.queue_s, view.as_prefill = worker.queue_s, None
        return view
    spec: WorkerSpec = worker.spec
    worker.view = view = WorkerView(
        worker_id=worker.worker_id,
        incarnation="",
        pages_total=spec.num_pages,
        pages_available=worker.pool.num_available,
        num_requests=worker.num_requests,
        waiting_tokens=worker.line.num_tokens,
        max_sequence_tokens=max_sequence_tokens,
        page_size=spec.page_size,
        prefill_speed=spec.law.prefill,
        decode_speed=spec.law.decode_at(1),
        link_speed=spec.link,
        queue_s=worker.queue_s,
        region=region,
        can_pull=True,
    )
    return view


def decode_view(worker: DecodeWorker, max_sequence_tokens: int, *, region: str = "") -> WorkerView:
    """Returns what a gateway knows of a decode worker, and keeps it while that is so."""
    spec: WorkerSpec = worker.spec
    worker.view = view = WorkerView(
        worker_id=worker.worker_id,
        incarnation="",
        pages_total=spec.num_pages,
        pages_available=worker.pool.num_available,
        num_requests=worker.num_requests,
        waiting_tokens=worker.line.num_tokens,
        max_sequence_tokens=max_sequence_tokens,
        num_running=worker.num_running,
        context_tokens=worker.context_tokens,
        page_size=spec.page_size,
        prefill_speed=spec.law.prefill,
        decode_speed=spec.law.decode_at(worker.num_running + 1),
        link_speed=spec.link,
        queue_s=worker.queue_s,
        region=region,
        can_pull=True,
    )
    return view
