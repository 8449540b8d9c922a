"""Faults on the virtual clock: workers that die, fall silent or become slow, cards that stop, regions that are lost.

A gateway hears of a death at once, because its connection ends, and of silence after `SILENCE_S`. Attempts that
fail are made again elsewhere, as the gateway does it. Pages that a stopped card holds arrive when it moves again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from planning.simulator.cluster import Cluster, Meddler
from planning.simulator.events import EventLoop

SILENCE_S = 3.0
"""A worker that said nothing for this long is lost: `Timeouts.silence_s` of the handoff, and a lease's time."""
DEATH, SILENCE, SLOWNESS, STOPPED_CARD = "death", "silence", "slowness", "stopped card"
LOST_REGION = "lost region"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to a worker, or to all of a region, and when.

    `duration_s` and `factor` are those of slowness, or of a card that stops; workers of a region that is lost are back
    after `duration_s`, without what they had cached; 0: never.
    """

    kind: str
    worker_id: str = ""
    region: str = ""
    at_s: float
    duration_s: float = 0.0
    factor: float = 1.0


def with_faults(faults: Sequence[Fault]) -> Meddler:
    """Returns what plans these faults for a simulation. A worker that is gone by then has none."""

    def plan(cluster: Cluster, loop: EventLoop) -> None:
        for fault in faults:
            loop.at(fault.at_s, partial(_strike, cluster, loop, fault))

    return plan


def without_region(region: str) -> Meddler:
    """Returns what takes the workers of a region away before the first request, as is known from then on."""

    def plan(cluster: Cluster, loop: EventLoop) -> None:
        del loop  # nothing happens later
        lost = [worker.worker_id for worker in cluster.pool if cluster.pool.regions[worker.worker_id] == region]
        for worker_id in lost:
            cluster.lose_worker(worker_id)
        cluster.note_lost(*lost)

    return plan


def _strike(cluster: Cluster, loop: EventLoop, fault: Fault) -> None:
    if fault.kind == LOST_REGION:
        _lose_region(cluster, loop, fault)
        return
    worker = cluster.pool.find(fault.worker_id)
    if worker is None:
        return
    if fault.kind in (DEATH, SILENCE):
        cluster.lose_worker(fault.worker_id)
        found_s = loop.now_s + (SILENCE_S if fault.kind == SILENCE else 0.0)
        loop.at(found_s, partial(cluster.note_lost, fault.worker_id))
    elif fault.kind == SLOWNESS:
        worker.change_pace(fault.factor)
        loop.at(loop.now_s + fault.duration_s, partial(worker.change_pace, 1.0))
    else:
        assert fault.kind == STOPPED_CARD, "a fault has a kind"
        cluster.transfers.stop(fault.worker_id, fault.duration_s)


def _lose_region(cluster: Cluster, loop: EventLoop, fault: Fault) -> None:
    """All workers of a region fall silent at once, as where its network is cut off."""
    pool = cluster.pool
    lost = [worker.worker_id for worker in pool if pool.regions[worker.worker_id] == fault.region]
    for worker_id in lost:
        cluster.lose_worker(worker_id)
    loop.at(loop.now_s + SILENCE_S, lambda: cluster.note_lost(*lost))
    roles = [pool.lives[worker_id].role for worker_id in lost]

    def come_back() -> None:
        for role in roles:
            pool.add(role, region=fault.region)

    if fault.duration_s:
        loop.at(loop.now_s + fault.duration_s, come_back)
