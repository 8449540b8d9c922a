"""A simulated gateway with its workers: the policies of `services.scheduling`, given what the simulated workers do.

Requests arrive as the trace says, wait in a `RequestQueue`, and are placed by a `Router` that sees the same views of
the workers as a gateway does: pages, requests, waiting tokens, speeds, and how much of the prompt each one holds. When
a worker or a transfer fails, the next attempt computes the prompt and what was given of the answer somewhere else.
Workers may be in regions, each with a gateway: requests prefer their own, and those held to regions without a decode
worker are refused. What is simpler than in the real system: views and cached prefixes are never out of date, every
speed is known exactly, an answer's limit is its length, messages take no time but those of a handoff and those between
regions, all requests wait in one queue, and a prefix that is fetched stays with its holder meanwhile.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from planning.simulator.decode import DecodeWorker
from planning.simulator.events import EventLoop
from planning.simulator.jobs import Job, Phase, WorkerSpec, job_of, prompt_s
from planning.simulator.pool import DECODE, PREFILL, Pool, Worker, decode_view, prefill_view
from planning.simulator.prefill import PrefillWorker
from planning.simulator.regions import Regions
from planning.simulator.timeline import Timeline
from planning.simulator.traces import Trace
from planning.simulator.transfers import Transfers
from services.runtime.errors import ConfigError
from services.scheduling.entry import QueueEntry, ServiceClass
from services.scheduling.overload import ClusterLoad, OverloadPolicy, Refuse, Targets
from services.scheduling.queue import QueueFull, RequestQueue
from services.scheduling.routing.price import RoutingSettings
from services.scheduling.routing.route import Route
from services.scheduling.routing.router import Router
from services.scheduling.routing.views import RouteRequest, WorkerView

MAX_BUCKETS = 240
"""Most points of a chart while requests arrive, about."""
MAX_ATTEMPTS = 5
"""A request whose attempts have failed this often has failed."""

TOO_LONG = "too_long"
QUEUE_FULL = "queue_full"
PUSHED_OUT = "pushed_out"
DEADLINE = "deadline"
FAILED = "failed"
NO_WORKER = "no_worker"


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
    workers_per_host: int = 1
    """This many workers of a role share one network card."""
    regions: tuple[str, ...] = ()
    """The workers of each role are in these, in turn; empty: near to all."""
    pulls_prefixes: bool = False
    """Whether prefill workers fetch what others hold of a prompt, where that is quicker."""


@dataclass(frozen=True, slots=True)
class Run:
    """What came of a trace: every request's times, how busy the workers were, and what they cost."""

    policy: str
    jobs: tuple[Job, ...]
    end_s: float
    bucket_s: float
    busy: dict[str, Timeline]
    queue: Timeline
    prefill_line: Timeline
    worker_seconds: float = 0.0


Meddler = Callable[["Cluster", EventLoop], None]
"""Plans faults, or whatever else is to happen to a cluster while it runs."""


def simulate(
    trace: Trace,
    spec: ClusterSpec,
    policy: str,
    *,
    seed: int = 0,
    progress: Callable[[int, int, float], None] | None = None,
    meddler: Meddler | None = None,
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
    jobs = [job_of(index, request, page_size=spec.decode.page_size) for index, request in enumerate(trace.requests)]
    cluster.num_to_come = len(jobs)
    for job in jobs:
        loop.at(job.arrival_s, partial(cluster.arrive, job))
    if meddler is not None:
        meddler(cluster, loop)
    if progress is not None:
        for tenth in range(1, 11):
            loop.at(last_arrival_s * tenth / 10, lambda: progress(cluster.num_ended, len(jobs), loop.now_s))
    loop.run()
    cluster.check_is_idle()
    end_s = max((job.end_s for job in jobs if job.end_s is not None), default=last_arrival_s)
    return Run(
        policy,
        tuple(jobs),
        end_s,
        cluster.bucket_s,
        cluster.pool.busy,
        cluster.queue_line,
        cluster.prefill_line,
        cluster.pool.worker_seconds(end_s),
    )


class Cluster:
    """The gateway's part: queue, routing, further attempts, and what is told of them."""

    def __init__(self, spec: ClusterSpec, router: Router, loop: EventLoop, last_arrival_s: float) -> None:
        self.spec = spec
        self.bucket_s = max(1.0, last_arrival_s / MAX_BUCKETS)
        self.num_ended = 0
        self.answered = (0, 0)
        """Answers that are complete, and their tokens."""
        self.num_to_come = 0
        """Requests that have not ended, those included that have not arrived."""
        self._loop = loop
        self._overload = None if spec.targets is None else OverloadPolicy()
        self.queue = RequestQueue(strategy=spec.queue_strategy, max_waiting=spec.max_waiting)
        self._jobs: dict[int, Job] = {}
        self._active: dict[int, Job] = {}
        """Requests that have an attempt under way, or wait for the next one."""
        self._retries: deque[Job] = deque()
        self._is_draining = False
        self.pool = Pool(loop, self._make, changed=self.note_step, bucket_s=self.bucket_s)
        self._regions = Regions(self.pool, router, pulls_prefixes=spec.pulls_prefixes)
        self.transfers = Transfers(loop, self.card_of, link=self._regions.link, arrived=self.end_transfer)
        self.queue_line = Timeline(self.bucket_s)
        self._queue_noted_s = 0.0
        self.prefill_line = Timeline(self.bucket_s)
        self._prefill_noted_s = 0.0
        self._num_prompts = 0
        for role, count in ((PREFILL, spec.num_prefill), (DECODE, spec.num_decode)):
            for number in range(count):
                self.pool.add(role, region=spec.regions[number % len(spec.regions)] if spec.regions else "")

    def arrive(self, job: Job) -> None:
        """Takes a request; it is refused, waits, or is on its way."""
        spec = self.spec
        num_tokens = job.num_prompt_tokens + job.num_output_tokens
        pages = job.num_all_pages(spec.decode.page_size)
        fits_prefill = not self.pool.prefills or job.num_pages(spec.prefill.page_size) <= spec.prefill.num_pages
        if num_tokens > spec.max_sequence_tokens or pages > spec.decode.num_pages or not fits_prefill:
            self._refuse(job, TOO_LONG)
            return
        if not self._regions.is_served(job):
            self._refuse(job, NO_WORKER)
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
        self.note_step()

    def views(self, job: Job) -> tuple[list[WorkerView], list[WorkerView], dict[str, int]]:
        """Returns prefill workers, decode workers, and the tokens of the prompt that each of them holds."""
        most, pool, regions = self.spec.max_sequence_tokens, self.pool, self.pool.regions
        cached: dict[str, int] = {}
        if job.blocks:
            workers: list[Worker] = [*pool.prefills.values(), *pool.decodes.values()]
            for worker in workers:
                num_blocks = worker.pool.num_cached(job.blocks)
                if num_blocks:
                    cached[worker.worker_id] = num_blocks * worker.spec.page_size
        prefills = [prefill_view(one, most, region=regions[name]) for name, one in pool.prefills.items()]
        decodes = [one.view or decode_view(one, most, region=regions[name]) for name, one in pool.decodes.items()]
        return prefills, decodes, cached

    def card_of(self, worker_id: str) -> str:
        """Returns the name of the network card that a worker uses."""
        return f"{worker_id[0]}{int(worker_id[1:]) // self.spec.workers_per_host}"

    def check_is_idle(self) -> None:
        """After the last event nobody waits, and every page is free or only remembered."""
        assert len(self.queue) == len(self._jobs) == 0, "a request still waits"
        assert not self._active, "an attempt is still under way"
        for worker in self.pool:
            if worker.is_lost:
                continue
            assert worker.pool.num_available == worker.spec.num_pages, "a page was not given back"
            assert worker.is_idle, "a prompt or a sequence is still there"
            assert not worker.line, "a prompt still waits"
            if isinstance(worker, DecodeWorker):
                assert worker.num_running == worker.context_tokens == 0, "tokens of a sequence are left"

    # --- what workers and transfers tell ---

    def send_pages(self, worker: PrefillWorker, job: Job, *, is_last: bool) -> None:
        """Has the pages of a computed chunk sent."""
        self.transfers.send(worker, job, is_last=is_last)

    def note_first_token(self, job: Job) -> None:
        """Takes the first token of an attempt."""
        if job.first_token_s is None:
            job.first_token_s = self._loop.now_s + self._regions.way_s(job)
        self._note_prompts(-1)
        job.phase = Phase.TRANSFER if job.is_remote else Phase.DECODE
        if not job.is_remote:
            if job.num_left == 1:
                self._decode(job).withdraw(job)
            self.note_step()  # the queue's first one may have waited for this prompt

    def end_transfer(self, worker: PrefillWorker, job: Job, attempt: int) -> None:
        """All pages of a prompt have arrived, if that is still its attempt."""
        worker.end_sending(job, attempt)
        if job.attempt == attempt and job.phase is Phase.TRANSFER:
            job.phase = Phase.DECODE
            decode = self._decode(job)
            if job.num_left == 1:
                decode.withdraw(job)
            else:
                decode.join(job)
        self.pool.settle()

    def note_end(self, job: Job) -> None:
        """Takes the end of an answer."""
        # Whose only token is the first one has ended with it; its pages were still on their way.
        is_short = job.num_output_tokens == 1 and job.first_token_s is not None
        job.end_s = job.first_token_s if is_short else self._loop.now_s + self._regions.way_s(job)
        del self._active[job.index]
        self.answered = self.answered[0] + 1, self.answered[1] + job.num_output_tokens
        self.num_ended += 1
        self.num_to_come -= 1
        if self._overload is not None:
            self._overload.note_end(job.index, self._loop.now_s)
        self.pool.settle()
        self.note_step()

    # --- failures ---

    def lose_worker(self, worker_id: str) -> None:
        """A worker ends its work; the gateway hears of it by `note_lost`."""
        if (worker := self.pool.find(worker_id)) is not None:
            worker.lose()

    def note_lost(self, *worker_ids: str) -> None:
        """It is known that workers are lost: all attempts there have failed."""
        lost = {worker_id for worker_id in worker_ids if self.pool.find(worker_id) is not None}
        for worker_id in lost:
            self.pool.forget(worker_id)
        for job in list(self._active.values()) if lost else ():
            is_at_prefill = job.is_remote and job.phase is not Phase.DECODE
            if job.decode_worker in lost or (job.prefill_worker in lost and is_at_prefill):
                self.fail_attempt(job)
        for job in (*self._jobs.values(), *self._retries):
            if not self._regions.is_served(job):
                self._give_up(job)
        self.note_step()

    def _give_up(self, job: Job) -> None:
        """Refuses a request that waits in the queue or for its next attempt."""
        self._note_queue()
        if self.queue.remove(job.index) is not None:
            del self._jobs[job.index]
        else:
            self._retries.remove(job)
            del self._active[job.index]
        self._refuse(job, NO_WORKER)

    def fail_attempt(self, job: Job) -> None:
        """Ends an attempt; the next one begins as soon as there is room, before all requests that wait."""
        if job.phase is Phase.PREFILL:
            self._note_prompts(-1)
        job.num_emitted += job.is_first_out
        job.is_first_out = False
        workers = [job.decode_worker]
        if job.is_remote and job.phase is not Phase.DECODE:
            workers.append(job.prefill_worker)
        for worker in map(self.pool.find, workers):
            if worker is not None and not worker.is_lost:
                worker.drop(job)
        job.phase = Phase.WAITING
        if job.num_left == 0:
            self.note_end(job)
        elif job.attempt == MAX_ATTEMPTS:
            del self._active[job.index]
            self._refuse(job, FAILED)
        else:
            job.attempt += 1
            job.num_computed_tokens = job.num_cached_tokens = job.num_sent_tokens = 0
            self._retries.append(job)

    # --- the queue ---

    def _make(self, worker_id: str, role: str) -> Worker:
        busy = self.pool.busy[worker_id]
        if role == PREFILL:
            return PrefillWorker(worker_id, self.spec.prefill, loop=self._loop, busy=busy, owner=self)
        return DecodeWorker(worker_id, self.spec.decode, loop=self._loop, busy=busy, owner=self)

    def _decode(self, job: Job) -> DecodeWorker:
        worker = self.pool.find(job.decode_worker)
        assert isinstance(worker, DecodeWorker), "a worker with requests is not gone"
        return worker

    def note_step(self) -> None:
        """Places waiting requests as long as the first one finds room. Not entered twice: placing may end others."""
        if self._is_draining:
            return
        self._is_draining = True
        while self._retries and self._place(self._retries[0]):
            self._start(self._retries.popleft())
        if self._overload is not None:  # nobody else promises anything
            for yielded in self.queue.yield_late(self._loop.now_s):
                self._overload.note_late(yielded, self._loop.now_s)
        is_backlogged = bool(self._retries)
        while not self._retries and (entry := self.queue.peek()) is not None:
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
            self._active[job.index] = job
            if self._overload is not None:
                self._overload.note_start(entry, self._loop.now_s, is_backlogged=len(self.queue) > 0)
            self._start(job)
        if self._overload is not None:
            self._overload.note_backlog(self._loop.now_s, is_backlogged=is_backlogged)
        self._is_draining = False

    def _entry(self, job: Job) -> QueueEntry:
        service_s, prompt_s, promised_s = 0.0, 0.0, math.inf
        service_class = ServiceClass.from_name(job.service_class)
        if self.spec.targets is not None and self.pool.decodes:
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
        assert self.spec.targets is not None, "they are what an overload policy is for"
        if not self.pool.decodes:
            return True
        verdict = overload.judge(entry, self._load(job, entry), self.spec.targets, self._loop.now_s)
        if isinstance(verdict, Refuse):
            self._refuse(job, verdict.kind)
            return False
        return True

    def _may_start(self, entry: QueueEntry, job: Job) -> bool:
        if self._overload is None or not self.pool.decodes:
            return True
        return self._overload.may_start(entry, self._load(job, entry))

    def _load(self, job: Job, entry: QueueEntry | None = None) -> ClusterLoad:
        """What a request would meet now: the best prefill worker's queue, the best decode worker's pages and step."""
        decodes = list(self.pool.decodes.values())
        computing: list[Worker] = [*self.pool.prefills.values()] or [*decodes]
        step_s = min(
            worker.spec.law.decode_at(worker.num_running + 1).step_s(
                worker.num_running + 1, worker.context_tokens + job.num_prompt_tokens
            )
            for worker in decodes
        )
        return ClusterLoad(
            num_ahead=0 if entry is None else self.queue.num_ahead(entry.service_class),
            tokens_ahead=0 if entry is None else self.queue.waiting_tokens(entry.service_class),
            num_waiting=len(self.queue),
            prompts_ahead_s=0.0
            if entry is None
            else self.queue.waiting_prompts_s(entry.service_class) / len(computing),
            free_page_share=max(worker.pool.num_available / worker.pool.num_pages for worker in decodes),
            prefill_s=min(prompt_s(worker.spec, job.num_prompt_tokens) for worker in computing),
            prefill_queue_s=min(worker.queue_s for worker in computing),
            step_s=step_s,
        )

    def _place(self, job: Job) -> bool:
        num_pages = job.num_all_pages(self.spec.decode.page_size)
        if not job.blocks and all(one.pool.num_available < num_pages for one in self.pool.decodes.values()):
            return False  # the router would come to that too, after a long look at each
        prefills, decodes, cached = self.views(job)
        request = RouteRequest(
            num_prompt_tokens=job.num_replayed_tokens,
            max_new_tokens=job.num_left,
            tenant=job.tenant,
            affinity_key=job.tenant,
            cached_tokens=cached,
            kv_bytes_per_token=self.spec.decode.kv_bytes_per_token,
            region=job.region,
        )
        for route in self._regions.routes(
            job,
            request,
            workers=(prefills, decodes),
            target_s=None if self.spec.targets is None else self.spec.targets.ttft_s,
            now_s=self._loop.now_s,
        ):
            if self.pool.decodes[route.decode.worker_id].promise(job):
                self._note_route(job, route)
                return True
        return False

    def _note_route(self, job: Job, route: Route) -> None:
        job.is_remote = route.is_remote
        job.decode_worker = route.decode.worker_id
        job.prefill_worker = route.prefills[0].worker_id if route.is_remote else ""
        job.outside_s = (self.spec.prefill if route.is_remote else self.spec.decode).outside_s
        job.pull = route.pulls.get(job.prefill_worker)
        if job.dispatched_s is None:
            job.dispatched_s = self._loop.now_s

    def _start(self, job: Job) -> None:
        """Has the workers of its route begin an attempt."""
        self._note_prompts(1)
        job.phase = Phase.PREFILL
        if not job.is_remote:
            self.pool.decodes[job.decode_worker].enter_prompt(job)
        elif job.pull is not None:
            self.transfers.fetch(self.pool.prefills[job.prefill_worker], job, pull=job.pull)
        else:
            self.pool.prefills[job.prefill_worker].enter(job)

    def _refuse(self, job: Job, reason: str) -> None:
        if self._overload is not None:
            self._overload.note_end(job.index, self._loop.now_s)
        job.refusal = reason
        self.num_ended += 1
        self.num_to_come -= 1

    def _expire(self) -> None:
        self._note_queue()
        for entry in self.queue.expire(self._loop.now_s):
            self._refuse(self._jobs.pop(self._index(entry)), DEADLINE)
        self.note_step()

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
