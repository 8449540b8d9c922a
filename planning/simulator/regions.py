"""Regions of a simulated cluster: how far workers are from one another and from a gateway, and what is held where."""

from collections.abc import Sequence
from functools import partial

from planning.simulator.jobs import Job
from planning.simulator.pool import Pool
from planning.simulator.prefill import PrefillWorker
from services.scheduling.prediction import LinkSpeed
from services.scheduling.regions import permits
from services.scheduling.routing.home import home_first, way_of
from services.scheduling.routing.route import Route
from services.scheduling.routing.router import Router
from services.scheduling.routing.views import CanPull, RouteRequest, WorkerView


class Regions:
    """The places of all workers of a pool, with a gateway in each region, of which `router` is the choice."""

    def __init__(self, pool: Pool, router: Router, *, pulls_prefixes: bool) -> None:
        self._can_pull: CanPull | None = (lambda holder, prefill: True) if pulls_prefixes else None
        self._pool = pool
        self._router = router
        self._routing = router.settings

    def is_open_to(self, job: Job, worker_id: str) -> bool:
        """Returns whether a request's data may be at a worker."""
        return permits(job.residency, self._pool.regions[worker_id])

    def is_served(self, job: Job) -> bool:
        """Returns whether a decode worker is ready where a request's data may be; one that is held nowhere may wait."""
        return not job.residency or any(self.is_open_to(job, worker_id) for worker_id in self._pool.decodes)

    def link(self, worker: PrefillWorker, decode_id: str) -> LinkSpeed:
        """Returns the link from a prefill worker to a decode worker, as far as their regions are apart."""
        link, routing, regions = worker.spec.link, self._routing, self._pool.regions
        here, there = regions[worker.worker_id], regions[decode_id]
        if not here or not there or here == there:
            return link
        more_s, factor = routing.distances_s.get((here, there), routing.cross_region_s), routing.cross_region_factor
        return LinkSpeed(link.latency_s * factor + more_s, link.bytes_per_s / factor)

    def way_s(self, job: Job) -> float:
        """Returns how long an attempt's messages from its client to its workers and back take, in seconds."""
        workers = (job.decode_worker, job.prefill_worker) if job.is_remote else (job.decode_worker,)
        return job.outside_s + max(
            self._routing.far_s(job.region, self._pool.regions[worker_id]) for worker_id in workers
        )

    def routes(
        self,
        job: Job,
        request: RouteRequest,
        *,
        workers: Sequence[Sequence[WorkerView]],
        target_s: float | None,
        now_s: float,
    ) -> Sequence[Route]:
        """Returns the routes that a request may take, those of its own region first while it will be in time there.

        `workers` are those of each role. `target_s`: when the first token is due, after the arrival; None: never.
        """
        if job.residency:
            workers = [[view for view in role if permits(job.residency, view.region)] for role in workers]

        def routes_to(is_home: bool) -> Sequence[Route]:
            prefills, decodes = workers
            if is_home:
                prefills, decodes = ([one for one in role if one.region in (job.region, "")] for role in workers)
            return self._router.route(request, prefills, decodes, can_pull=self._can_pull, now_s=now_s)

        if not job.region or target_s is None or job.attempt > 1:
            return routes_to(False)
        return home_first(
            routes_to,
            left_s=job.arrival_s + target_s - now_s,
            way_s=partial(way_of, region=job.region, settings=self._routing),
            has_room=lambda route: route.decode.pages_available >= job.num_all_pages(route.decode.page_size),
        )
