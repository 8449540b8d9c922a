"""A simulated gateway with its workers: the policies of `services.scheduling`, given what the simulated workers do.

Requests arrive as the trace says, wait in a `RequestQueue`, and are placed by a `Router` that sees the same views of
the workers as a gateway does: pages, requests, waiting tokens, speeds, and how much of the prompt each one holds.
What is simpler than in the real system: views and cached prefixes are never out of date, every speed is known exactly,
an answer's limit is its length, nothing fails, and messages take no time but the pages' transfer.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from planning.simulator.events import EventLoop
from planning.simulator.timeline import Timeline
from planning.simulator.traces import Trace, TraceRequest
from planning.simulator.workers import DecodeWorker, Job, PrefillWorker, WorkerSpec
from services.runtime.errors import ConfigError
from services.scheduling.overload import Admit, ClusterLoad, OverloadPolicy, Refuse, Targets
from services.scheduling.queue import QueueEntry, QueueFull, RequestQueue, ServiceClass
from services.scheduling.routing.price import RoutingSettings
from services.scheduling.routing.route import Route
from services.scheduling.routing.router import Router
from services.scheduling.routing.views import RouteRequest, WorkerView

MAX_BUCKETS = 240
"""Most points of a chart while requests arrive, about."""

TOO_LONG = "too_long"
QUEUE_FULL = "queue_full"
PUSHED_OUT = "pushed_out"
DEADLINE = "deadline"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """A cluster of equal prefill workers and equal decode workers behind one gateway."""

    num_prefill: int
    num_decode: int
    prefill: WorkerSpec
    decode: WorkerSpec
    max_sequence_tokens: int
    max_waiting: int = 1024
    max_queue_wait_s: float = math.inf
    queue_strategy: str = "fcfs"
    routing: RoutingSettings = field(default_factory=RoutingSettings)
    targets: Targets | None = None
    """With targets, an `OverloadPolicy` refuses what would miss them; without, every request may wait."""


@dataclass(frozen=True, slots=True)
class Run:
    """What came of a trace: every request's times, and how busy the workers were."""

    policy: str
    jobs: tuple[Job, ...]
    end_s: float
    bucket_s: float
    busy: dict[str, Timeline]
    queue: Timeline
    prefill_line: Timeline


def simulate(
    trace: Trace,
    spec: ClusterSpec,
    policy: str,
    *,
    seed: int = 0,
    progress: Callable[[int, int, float], None] | None = None,
) -> Run:
    """Replays a trace under one routing policy. `progress`: (requests ended, requests in all, virtual seconds).

    The same arguments give the same Run. Raises ConfigError if the pages of the trace's blocks are not the workers'.
    """
    for worker in (spec.prefill, spec.decode):
        if trace.block_tokens and worker.page_size != trace.block_tokens:
            raise ConfigError(f"the trace has blocks of {trace.block_tokens} tokens, so pages must have as many")
    loop = EventLoop()
    last_arrival_s = trace.requests[-1].arrival_s
    cluster = Cluster(spec, Router(policy, settings=spec.routing, seed=seed), loop, last_arrival_s)
    jobs = [_job(index, request, spec.decode.page_size) for index, request in enumerate(trace.requests)]
    for job in jobs:
        loop.at(job.arrival_s, partial(cluster.arrive, job))
    if progress is not None:
        _report_progress(loop, cluster, progress, last_arrival_s, len(jobs))
    loop.run()
    cluster.check_is_idle()
    end_s = max((job.end_s for job in jobs if job.end_s is not None), default=last_arrival_s)
    return Run(policy, tuple(jobs), end_s, cluster.bucket_s, cluster.busy, cluster.queue_line, cluster.prefill_line)


class Cluster:
    """The gateway's part: queue, routing, and what is told of them."""

    def __init__(self, spec: ClusterSpec, router: Router, loop: EventLoop, last_arrival_s: float) -> None:
        self.spec = spec
        self.bucket_s = max(1.0, last_arrival_s / MAX_BUCKETS)
        self.num_ended = 0
        self._loop = loop
        self._router = router
        self._overload = None if spec.targets is None else OverloadPolicy()
        self._admitted: dict[int, Admit] = {}
        self.prefills = [
            PrefillWorker(
                f"p{number}",
                spec.prefill,
                loop,
                Timeline(self.bucket_s),
                on_first_token=self._note_first_token,
                on_sent=self._join,
                on_step=self._drain,
            )
            for number in range(spec.num_prefill)
        ]
        self.decodes = [
            DecodeWorker(
                f"d{number}",
                spec.decode,
                loop,
                Timeline(self.bucket_s),
                on_first_token=self._note_first_token,
                on_end=self._end,
            )
            for number in range(spec.num_decode)
        ]
        self._workers: tuple[PrefillWorker | DecodeWorker, ...] = (*self.prefills, *self.decodes)
        self._by_id = {worker.worker_id: worker for worker in self.decodes}
        self._prefill_by_id = {worker.worker_id: worker for worker in self.prefills}
        self.queue = RequestQueue(strategy=spec.queue_strategy, max_waiting=spec.max_waiting)
        self._jobs: dict[int, Job] = {}
        self._is_draining = False
        self.queue_line = Timeline(self.bucket_s)
        self._queue_noted_s = 0.0
        self.prefill_line = Timeline(self.bucket_s)
        self._prefill_noted_s = 0.0
        self._num_prompts = 0

    def arrive(self, job: Job) -> None:
        """A request comes in; it is refused, waits, or is on its way."""
        spec = self.spec
        num_tokens = job.num_prompt_tokens + job.num_output_tokens
        pages = job.num_all_pages(spec.decode.page_size)
        fits_prefill = not self.prefills or job.num_pages(spec.prefill.page_size) <= spec.prefill.num_pages
        if num_tokens > spec.max_sequence_tokens or pages > spec.decode.num_pages or not fits_prefill:
            self._refuse(job, TOO_LONG)
            return
        entry = self._entry(job)
        if self._overload is not None and not self._is_admitted(self._overload, entry, job):
            return
        self._note_queue()
        try:
            pushed_out = self.queue.push(entry)
        except QueueFull:
            self._refuse(job, QUEUE_FULL)
            return
        self._jobs[job.index] = job
        if pushed_out is not None:
            self._refuse(self._jobs.pop(self._index(pushed_out)), PUSHED_OUT)
        if math.isfinite(entry.deadline_s):
            self._loop.at(math.nextafter(entry.latest_start_s, math.inf), self._expire)
        self._drain()

    def views(self, job: Job) -> tuple[list[WorkerView], list[WorkerView], dict[str, int]]:
        """Prefill workers, decode workers, and the tokens of the prompt that each of them holds."""
        spec = self.spec
        cached: dict[str, int] = {}
        prefills, decodes = [], []
        for prefill in self.prefills:
            prefills.append(
                WorkerView(
                    worker_id=prefill.worker_id,
                    incarnation="",
                    pages_total=spec.prefill.num_pages,
                    pages_available=prefill.pool.num_available,
                    num_requests=prefill.num_requests,
                    waiting_tokens=prefill.line.num_tokens,
                    max_sequence_tokens=spec.max_sequence_tokens,
                    page_size=spec.prefill.page_size,
                    prefill_speed=spec.prefill.prefill,
                    decode_speed=spec.prefill.decode.large,
                    link_speed=spec.prefill.link,
                    queue_s=prefill.queue_s,
                )
            )
        for decode in self.decodes:
            decodes.append(
                WorkerView(
                    worker_id=decode.worker_id,
                    incarnation="",
                    pages_total=spec.decode.num_pages,
                    pages_available=decode.pool.num_available,
                    num_requests=decode.num_requests,
                    waiting_tokens=decode.line.num_tokens,
                    max_sequence_tokens=spec.max_sequence_tokens,
                    num_running=decode.num_running,
                    context_tokens=decode.context_tokens,
                    page_size=spec.decode.page_size,
                    prefill_speed=spec.decode.prefill,
                    decode_speed=spec.decode.decode.at(decode.num_running + 1),
                    link_speed=spec.decode.link,
                    queue_s=decode.queue_s,
                )
            )
        if job.blocks:
            for worker in self._workers:
                num_blocks = worker.pool.num_cached(job.blocks)
                if num_blocks:
                    cached[worker.worker_id] = num_blocks * worker.spec.page_size
        return prefills, decodes, cached

    @property
    def busy(self) -> dict[str, Timeline]:
        """How long each worker has computed."""
        return {worker.worker_id: worker.busy for worker in self._workers}

    def check_is_idle(self) -> None:
        """After the last event nobody waits, and every page is free or only remembered."""
        assert len(self.queue) == len(self._jobs) == 0, "a request still waits"
        for worker in self._workers:
            assert worker.pool.num_available == worker.spec.num_pages, "a page was not given back"
            assert not worker.line.jobs, "a prompt still waits"
        assert all(decode.num_running == decode.num_requests == 0 for decode in self.decodes), "a sequence still runs"
        assert all(decode.context_tokens == 0 for decode in self.decodes), "tokens of a sequence are left"

    def _drain(self) -> None:
        """Places waiting requests as long as the first one finds room. Not entered twice: placing may end others."""
        if self._is_draining:
            return
        self._is_draining = True
        self.queue.yield_late(self._loop.now_s)
        is_backlogged = False
        while (entry := self.queue.peek()) is not None:
            job = self._jobs[self._index(entry)]
            if not self._may_start(entry, job):
                is_backlogged = False
                break
            if not self._place(job):
                is_backlogged = True
                break
            self._note_queue()
            self.queue.pop()
            del self._jobs[job.index]
            self._begin(entry, job)
        if self._overload is not None:
            self._overload.note_backlog(self._loop.now_s, is_backlogged=is_backlogged)
        self._is_draining = False

    def _entry(self, job: Job) -> QueueEntry:
        service_s, prompt_s, promised_s = 0.0, 0.0, math.inf
        service_class = ServiceClass.from_name(job.service_class)
        if self.spec.targets is not None:
            load = self._load(job)
            service_s = load.prefill_s + load.step_s * (job.num_output_tokens - 1)
            if self._overload is not None:
                prompt_s = load.prefill_s
                promised_s = self._overload.promised_s(
                    service_class, self.spec.targets, arrived_s=job.arrival_s, prompt_s=prompt_s
                )
        return QueueEntry(
            key=job.index,
            service_class=service_class,
            tenant=job.tenant,
            cost_tokens=job.num_prompt_tokens + job.num_output_tokens,
            arrived_s=job.arrival_s,
            # The bound is on the wait for its turn, and the queue asks when the turn must have come.
            deadline_s=job.arrival_s + self.spec.max_queue_wait_s + service_s,
            service_s=service_s,
            prompt_s=prompt_s,
            promised_s=promised_s,
            # The deadline is the bound on the wait, which nobody has named.
            due_s=None if self.spec.targets is None else math.inf,
        )

    def _is_admitted(self, overload: OverloadPolicy, entry: QueueEntry, job: Job) -> bool:
        assert self.spec.targets is not None
        verdict = overload.judge(entry, self._load(job, entry), self.spec.targets, self._loop.now_s)
        if isinstance(verdict, Refuse):
            self._refuse(job, verdict.kind)
            return False
        self._admitted[job.index] = verdict
        return True

    def _may_start(self, entry: QueueEntry, job: Job) -> bool:
        return self._overload is None or self._overload.may_start(entry, self._load(job, entry))

    def _load(self, job: Job, entry: QueueEntry | None = None) -> ClusterLoad:
        """What a request would meet now: the best prefill worker's queue, the best decode worker's pages and step."""
        computing = self.prefills or self.decodes
        step_s = min(
            worker.spec.decode.at(worker.num_running + 1).step_s(
                worker.num_running + 1, worker.context_tokens + job.num_prompt_tokens
            )
            for worker in self.decodes
        )
        return ClusterLoad(
            num_ahead=0 if entry is None else self.queue.num_ahead(entry.service_class),
            tokens_ahead=0 if entry is None else self.queue.waiting_tokens(entry.service_class),
            num_waiting=len(self.queue),
            prompts_ahead_s=0.0
            if entry is None
            else self.queue.waiting_prompts_s(entry.service_class) / len(self.prefills or self.decodes),
            free_page_share=max(worker.pool.num_available / worker.pool.num_pages for worker in self.decodes),
            prefill_s=min(worker.spec.prefill.time_s(job.num_prompt_tokens) for worker in computing),
            prefill_queue_s=min(worker.queue_s for worker in computing),
            step_s=step_s,
        )

    def _place(self, job: Job) -> bool:
        prefills, decodes, cached = self.views(job)
        request = RouteRequest(
            num_prompt_tokens=job.num_prompt_tokens,
            max_new_tokens=job.num_output_tokens,
            tenant=job.tenant,
            affinity_key=job.tenant,
            cached_tokens=cached,
            kv_bytes_per_token=self.spec.decode.kv_bytes_per_token,
        )
        for route in self._router.route(request, prefills, decodes, now_s=self._loop.now_s):
            if self._by_id[route.decode.worker_id].promise(job):
                self._note_route(job, route)
                return True
        return False

    def _note_route(self, job: Job, route: Route) -> None:
        job.is_remote = route.is_remote
        job.decode_worker = route.decode.worker_id
        job.prefill_worker = route.prefills[0].worker_id if route.is_remote else ""
        job.dispatched_s = self._loop.now_s

    def _begin(self, entry: QueueEntry, job: Job) -> None:
        self._note_prompts(1)
        if self._overload is not None:
            self._overload.note_start(
                entry,
                self._loop.now_s,
                is_backlogged=len(self.queue) > 0,
                admitted=self._admitted.pop(job.index, None),
            )
        if job.is_remote:
            self._prefill_by_id[job.prefill_worker].enter(job)
        else:
            self._by_id[job.decode_worker].enter_prompt(job)

    def _note_first_token(self, job: Job) -> None:
        job.first_token_s = self._loop.now_s
        self._note_prompts(-1)
        if not job.is_remote:
            if job.num_output_tokens == 1:
                self._by_id[job.decode_worker].withdraw(job)
            self._drain()  # the queue's first one may have waited for this prompt

    def _join(self, job: Job) -> None:
        worker = self._by_id[job.decode_worker]
        if job.num_output_tokens == 1:
            worker.withdraw(job)
        else:
            worker.join(job)

    def _end(self, job: Job) -> None:
        # Whose only token is the first one has ended with it; its pages were still on their way.
        job.end_s = job.first_token_s if job.num_output_tokens == 1 else self._loop.now_s
        self.num_ended += 1
        if self._overload is not None:
            self._overload.note_end(job.index, self._loop.now_s)
        self._drain()

    def _refuse(self, job: Job, reason: str) -> None:
        self._admitted.pop(job.index, None)
        job.refusal = reason
        self.num_ended += 1

    def _expire(self) -> None:
        self._note_queue()
        for entry in self.queue.expire(self._loop.now_s):
            self._refuse(self._jobs.pop(self._index(entry)), DEADLINE)
        self._drain()

    def _note_queue(self) -> None:
        now_s = self._loop.now_s
        self.queue_line.add(self._queue_noted_s, now_s, len(self.queue))
        self._queue_noted_s = now_s

    def _note_prompts(self, more: int) -> None:
        now_s = self._loop.now_s
        self.prefill_line.add(self._prefill_noted_s, now_s, self._num_prompts)
        self._prefill_noted_s = now_s
        self._num_prompts += more

    def _index(self, entry: QueueEntry) -> int:
        assert isinstance(entry.key, int), "requests are queued by their number"
        return entry.key


def _job(index: int, request: TraceRequest, page_size: int) -> Job:
    return Job(
        index=index,
        arrival_s=request.arrival_s,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        # Only full pages are reused: the end of a partial one would have to be computed into a shared page.
        blocks=request.block_ids[: request.num_prompt_tokens // page_size],
        tenant=request.tenant,
        service_class=request.service_class,
    )


def _report_progress(
    loop: EventLoop,
    cluster: Cluster,
    progress: Callable[[int, int, float], None],
    last_arrival_s: float,
    num_requests: int,
) -> None:
    def tell() -> None:
        progress(cluster.num_ended, num_requests, loop.now_s)

    for tenth in range(1, 11):
        loop.at(last_arrival_s * tenth / 10, tell)
