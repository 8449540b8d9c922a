"""Which workers an attempt is offered to, best first, and whether they have room: routing as this gateway sees it.

The policies themselves are in `services.scheduling`; here they get what they look at: the workers in rotation without
those that circuit breakers leave alone, what each is believed to hold of the prompt, and what the request has been
through. What this gateway has sent to a worker that has not reported it yet is kept in the session's books, so that
requests that go in the same moment do not all see the same free place. Knows no request's life.
"""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Protocol

from gateway.requests.answer import RunningAnswer
from gateway.requests.attempt import Attempt
from gateway.requests.call import AnswerSpec, Call, RequestFacts
from gateway.requests.move_paths import MovePaths
from gateway.requests.pair_circuits import PairCircuits
from gateway.requests.policies import Policies
from gateway.requests.pulls import Pulls
from gateway.topology.members import Topology
from gateway.topology.session import DecodeSession, Peer, PrefillSession, WorkerSession
from gateway.topology.watch import TOKENS_PER_STAGE, AttemptWatch, WorkerWatch
from services.runtime.breaker import CircuitState
from services.runtime.clock import Clock
from services.runtime.errors import InternalError, LayoutMismatch, TransferFailed, WorkerLost, WorkerUnavailable
from services.scheduling.disaggregation import PrefillChoice
from services.scheduling.entry import ServiceClass
from services.scheduling.pools import Audience
from services.scheduling.prediction import DecodeSpeed, PrefillSpeed
from services.scheduling.routing.home import home_first, way_of
from services.scheduling.routing.route import Route
from services.scheduling.routing.views import CanPull, Fits, RouteRequest, Views, WorkerView

MAX_LOST = 1024
"""Maximum number of lost workers whose last incarnation is remembered."""


class PrefixHints(Protocol):
    """What workers are believed to hold; `gateway.requests.cache_hints` asks the cluster's index."""

    def cached_tokens(self, request: RunningAnswer) -> Mapping[str, int]:
        """Returns worker id → tokens from the start of the prompt whose pages it has."""
        ...

    def expect(self, request: RunningAnswer, route: Route) -> None:
        """Notes the request's route, whose workers will have the prompt's pages."""
        ...

    def has_published(self, request: RunningAnswer, worker_id: str, *, num_tokens: int) -> bool:
        """Returns whether a worker has said itself that it has these tokens from the start of the prompt."""
        ...

    def forget(self, worker_id: str) -> None:
        """Forgets pages that a worker was expected to have and does not."""
        ...


class Dispatcher:
    """The choice of workers of one gateway. Faults are kept by worker id: a crash loop makes many processes.

    `prefill_choice` gives the kind of worker that computes prompts of requests which do not choose one themselves.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        policies: Policies,
        clock: Clock,
        hints: PrefixHints | None = None,
        prefill_choice: Callable[[], PrefillChoice] = lambda: "auto",
    ) -> None:
        self._topology = topology
        self._router = policies.router
        self._clock = clock
        self._limits = policies.room
        self._hints = hints
        self._region = policies.region
        self._targets = policies.targets
        self._prefill_choice = prefill_choice
        self.on_trial: set[RunningAnswer] = set()
        """The requests that are tried alone after a death (`gateway.requests.quarantine`): each goes to workers without
        another one, if it can.
        """
        self.watch = WorkerWatch(clock, topology.pace)
        topology.watch_gpus(self.watch.note_gpu)
        self.pairs = PairCircuits(topology, clock=clock)
        self.pulls = Pulls(topology, clock=clock, is_on=policies.pulls_prefixes, is_blocked=self.pairs.is_blocked)
        self.move_paths = MovePaths(clock)
        topology.watch_leaving(self._note_leaving)
        self._last_lost: dict[str, str] = {}
        """The last incarnation of recently lost workers: a death is one error, however many attempts it ended."""

    @property
    def num_open_breakers(self) -> int:
        """The number of workers and pairs that get no work except trials. Suspected workers do not count."""
        num_workers = sum(report.state != "suspected" for report in self.watch.circuits())
        return num_workers + len(self.pairs.reports())

    def circuit(self, worker_id: str) -> CircuitState:
        """Returns whether the worker gets new work."""
        return self.watch.circuit(worker_id)

    def plan(self, request: RunningAnswer, kept: Set[str] = frozenset()) -> Route | None:
        """Decides where the request would go, with or without room there; None: no route exists.

        It does not go to a decode worker in `kept`.
        """
        request.bookings.leave()
        left_s = self._left_s(request)
        if left_s is None or not self._topology.workers(request.spec.model).is_spread(self._region):
            routes = self.routes(request, kept)
        else:
            routes = home_first(
                lambda is_home: self.routes(request, kept, is_home=is_home),
                left_s=left_s,
                way_s=lambda route: way_of(route, region=self._region, settings=self._router.settings),
                has_room=lambda route: self.has_room(request, route),
            )
        request.note_routes(routes)
        return routes[0] if routes else None

    def allowed(self, request: RunningAnswer) -> set[str]:
        """Returns the ids of the decode workers in rotation that the request may go to, with or without room.

        No request behind it may take these while it waits. Prefill workers need no such care: what waits there counts
        by class, so a worker that is too busy for the request is too busy for those behind it as well.
        """
        spec = request.spec
        return self._topology.open_ids("decode", spec.model, self.audience(spec)._replace(bound_to=request.bound_to))

    def audience(self, spec: AnswerSpec) -> Audience:
        """Returns the requests that may use the same workers as this answer before it is bound to any."""
        pool = self._topology.pools.of(spec.facts.service_class, len(spec.prompt_token_ids))
        assert pool is not None, "the length of the prompt is known"
        return audience_of(spec.facts, pool)

    def book(self, request: RunningAnswer, route: Route) -> None:
        """Keeps the places of a route, if it does not yet, and of no other one. Raises WorkerUnavailable."""
        if request.bookings.route is route:
            return
        decode = self._topology.decode_session(route.decode.worker_id)
        computes = self._topology.prefill_session(route.prefills[0].worker_id) if route.is_remote else decode
        request.bookings.enter(
            decode.books,
            computes.books,
            num_pages=-(-request.expected_num_tokens // route.decode.page_size),
            prompt=(request.queue_entry.service_class, max(0, request.num_known_tokens - route.num_cached_tokens)),
            handoff=(route.decode.worker_id, int(route.inputs.get("handoff_bytes", 0))) if route.is_remote else None,
        )
        request.bookings.route = route

    def routes(self, request: RunningAnswer, kept: Set[str] = frozenset(), *, is_home: bool = False) -> Sequence[Route]:
        """Returns routes to decode workers not `kept` that can hold the whole sequence, those that failed it last.

        An answer that has tokens continues on workers whose next tokens are the same. `is_home`: only routes within the
        gateway's region.
        """
        spec, topology = request.spec, self._topology
        num_known, now_s, workers = request.num_known_tokens, topology.now_s(), topology.workers(spec.model)
        prompt = (request.queue_entry.service_class, num_known)
        usual = request.usual = topology.usual_speeds(spec.model)
        decodes = workers.decode.views(usual, usual.local, prompt, now_s)
        decodes = self._usable(request, decodes, usual.local, usual.decode)
        if kept:
            decodes = decodes.only(set(decodes.worker_ids) - kept)
        audience = self.audience(spec)
        if request.bound_to or topology.pools or audience.regions is not None:
            decodes = decodes.only(self.allowed(request))
        prefills = workers.prefill.views(usual, usual.prefill, prompt, now_s)
        prefills = self._usable(request, prefills, usual.prefill, usual.decode)
        if topology.pools or audience.regions is not None:
            prefills = prefills.only(topology.open_ids("prefill", spec.model, audience))
        if is_home:
            prefills = prefills.only(workers.prefill.near_ids(self._region))
            decodes = decodes.only(workers.decode.near_ids(self._region))
        wanted = RouteRequest(
            num_prompt_tokens=num_known,
            max_new_tokens=max(1, request.max_num_tokens - num_known),
            tenant=spec.facts.tenant,
            region=self._region,
            affinity_key=spec.facts.affinity_key,
            cached_tokens=self._cached_tokens(request),
            kv_bytes_per_token=workers.prefill.kv_bytes_per_token,
            prefill=spec.wishes.prefill or self._prefill_choice(),
            pool=audience.pool if topology.pools else None,
        )
        fits = self._fits(request)
        can_pull, now_s = self._can_pull(request, wanted), self._clock.monotonic()
        routes = self._router.route(wanted, prefills, decodes, fits=fits, can_pull=can_pull, now_s=now_s)
        if not (request.has_failed or self.pairs.has_blocked or self.on_trial):
            return routes
        paired = {decode for _, decode in request.avoided_pairs}
        tried_at = self._tried_at(request)
        return sorted(
            routes,
            key=lambda route: (
                route.decode.incarnation in tried_at,
                route.decode.incarnation in request.avoided,
                self._is_ejected(route.decode.worker_id),
                route.decode.incarnation == request.crowded_at,
                route.is_remote and route.decode.incarnation in paired,
                route.reason == "no_prefill_worker",
            ),
        )

    def _left_s(self, request: RunningAnswer) -> float | None:
        """Returns the time until the first token is due; None: it has no target, or was refused or failed elsewhere."""
        spec = request.spec
        target_s = self._targets.stricter(spec.wishes.targets).ttft_s
        is_free = request.is_resumed or request.must_queue or request.queue_entry.service_class == ServiceClass.BATCH
        return None if target_s is None or is_free else spec.arrived_s + target_s - self._clock.monotonic()

    def prefill_sessions(self, request: RunningAnswer, route: Route) -> list[PrefillSession]:
        """Returns a route's prefill workers: those that may have the prompt's pages first, those that failed last."""
        sessions = [self._topology.prefill_session(view.worker_id) for view in route.prefills]
        decode = self._topology.decode_session(route.decode.worker_id).peer
        sessions.sort(key=lambda session: self._reluctance(request, session.peer, decode))
        if tried_at := self._tried_at(request):
            sessions.sort(key=lambda session: session.peer.incarnation in tried_at)
        return sessions

    def _reluctance(self, request: RunningAnswer, prefill: Peer, decode: Peer) -> tuple[bool, bool, bool]:
        has_failed = prefill.incarnation in request.avoided
        was_cut = (prefill.incarnation, decode.incarnation) in request.avoided_pairs
        return has_failed or was_cut, self._is_ejected(prefill.worker_id), not request.has_kept_prompt(prefill)

    def _is_ejected(self, worker_id: str) -> bool:
        return self.circuit(worker_id) in ("open", "half_open")

    def _can_pull(self, request: RunningAnswer, wanted: RouteRequest) -> CanPull | None:
        """Decides between which workers a prompt's beginning may go. Pages that are only expected cannot be fetched."""
        can_pull, hints = self.pulls.can_pull, self._hints
        if can_pull is None or hints is None or not wanted.cached_tokens:
            return None

        def may_go(holder: WorkerView, prefill: WorkerView) -> bool:
            num_tokens = wanted.cached_tokens[holder.worker_id]
            return can_pull(holder, prefill) and hints.has_published(request, holder.worker_id, num_tokens=num_tokens)

        return may_go

    def decode_views(self, model: str) -> tuple[Views, Sequence[str]]:
        """Returns the decode workers of a model in rotation, and the ids of those that get new work."""
        workers, usual = self._topology.workers(model), self._topology.usual_speeds(model)
        views = workers.decode.views(usual, usual.local, (ServiceClass.BATCH, 0), self._topology.now_s())
        return views, self.watch.usable(views.worker_ids)

    def may_move(self, request: RunningAnswer, *, giver: DecodeSession, taker: WorkerView) -> bool:
        """Returns whether a running answer, whose pages a worker has, may continue at another one that takes work."""
        if request in self.on_trial or taker.incarnation in request.avoided:
            return False
        if request.max_num_tokens > min(taker.max_sequence_tokens, taker.pages_total * taker.page_size):
            return False
        return taker.worker_id in self.allowed(request) and self._can_move(giver, taker)

    def takers(self, request: RunningAnswer, giver: DecodeSession) -> list[WorkerView]:
        """Returns the decode workers that an answer may move to with its pages."""
        views = [route.decode for route in self.routes(request)]
        return [view for view in views if self._can_move(giver, view)]

    def _can_move(self, giver: DecodeSession, taker: WorkerView) -> bool:
        is_blocked = self.move_paths.is_blocked(giver.peer.incarnation, taker.incarnation)
        return not is_blocked and self._topology.can_take_over(taker.worker_id, giver.peer)

    def note_sent(self, request: RunningAnswer, route: Route) -> None:
        """Notes that workers took the request, and are about to have its prompt's pages."""
        if self._hints is not None:
            self._hints.expect(request, route)

    def new_watch(self, request: RunningAnswer, decode: WorkerView) -> AttemptWatch:
        """Watches an attempt on this decode worker: what it needs, by what is usual for its role."""
        usual = request.usual
        num_sequences = max(decode.num_requests, decode.num_running) + 1
        token_s = usual.decode.step_s(num_sequences, decode.context_tokens + request.max_num_tokens)
        num_bytes = request.num_known_tokens * self._topology.kv_bytes_per_token(request.spec.model)
        handoff_s = usual.link.time_s(num_bytes)
        watch = AttemptWatch(self.watch, decode.worker_id, token_s=token_s, handoff_s=handoff_s)
        prompt_s = usual.local.time_s(decode.waiting_tokens + request.num_known_tokens)
        watch.sent(decode.worker_id, prompt_s + TOKENS_PER_STAGE * token_s)
        return watch

    def watch_prompt(self, request: RunningAnswer, route: Route, attempt: Attempt) -> None:
        """Notes that the attempt's workers are about to compute the prompt."""
        worker_id = (attempt.prefill or attempt.decode).peer.worker_id
        usual = request.usual
        speed = usual.prefill if route.is_remote else usual.local
        views = route.prefills if route.is_remote else (route.decode,)
        waiting = next((view.waiting_tokens for view in views if view.worker_id == worker_id), 0)
        # Whatever it has cached may be gone, and what waits there may be ahead or behind.
        expected_s = speed.time_s(waiting + request.num_known_tokens)
        if route.is_remote:
            attempt.watch.sent(worker_id, expected_s)
        awaits = "" if attempt.facts.pull is None else attempt.facts.pull.worker_id
        attempt.watch.prompt_sent(worker_id, expected_s, awaits=awaits)

    def note_success(self, attempt: Attempt) -> None:
        """Notes that the decode worker generates, so that every worker has done its part."""
        self.pulls.note(attempt.facts)
        self.pairs.succeeded(attempt)
        self.release(attempt)

    def note_failure(self, attempt: Attempt) -> None:
        """Notes the fault that ended an attempt with the breaker that it concerns."""
        fault = attempt.fault
        if self._hints is not None:
            for worker in (attempt.decode, attempt.prefill):
                if worker is not None:
                    self._hints.forget(worker.peer.worker_id)
        if fault is None:
            return
        if isinstance(fault.error, TransferFailed) and attempt.prefill is not None:
            pair = (attempt.prefill.peer.worker_id, attempt.decode.peer.worker_id)
            self._topology.note_handoff(*pair, fault.error)
        if isinstance(fault.error, LayoutMismatch) and attempt.prefill is not None:
            self._topology.exclude_pair(attempt.prefill.peer, attempt.decode.peer)
        elif fault.is_between:
            self.pairs.failed(attempt, fault.error)
        elif isinstance(fault.error, InternalError) and fault.worker is not None:
            attempt.watch.failed(fault.worker.peer.worker_id)
        elif isinstance(fault.error, WorkerLost) and fault.worker is not None:
            self._note_lost(attempt, fault.worker)
        self.release(attempt)

    def release(self, attempt: Attempt) -> None:
        """Ends the attempt's part in circuits and statistics, once it is over or has passed its handoff."""
        self.pairs.release(attempt)
        handed_off = attempt.facts.handed_off
        if attempt.prefill is not None and handed_off is not None:
            pair = (attempt.prefill.peer.worker_id, attempt.decode.peer.worker_id)
            self._topology.note_handoff(*pair, handed_off.num_bytes)

    def service_s(self, spec: AnswerSpec) -> tuple[float, float]:
        """Returns the least time that an answer takes once workers have taken it, and that of its prompt alone.

        The first is that of workers without other work; the other that of a usual one, without what each step costs.
        """
        usual = self._topology.usual_speeds(spec.model)
        sampling, num_prompt_tokens = spec.sampling, len(spec.prompt_token_ids)
        num_new_tokens = sampling.max_tokens if sampling.ignore_eos else max(1, sampling.min_tokens)
        step_s = min([speed.step_s(1, num_prompt_tokens) for speed in usual.decodes], default=0.0)
        num_steps = max(0, num_new_tokens - len(spec.emitted_token_ids))
        return step_s * num_steps, usual.prefill.time_s(num_prompt_tokens) - usual.prefill.overhead_s

    def has_room(self, request: RunningAnswer, route: Route) -> bool:
        """Returns whether a route's workers would begin with the request soon."""
        decode, limits = route.decode, self._limits
        service_class = request.queue_entry.service_class
        if decode.num_requests:
            pages, places = self._topology.decode_room(decode.worker_id, service_class)
            if places <= 0 or request.expected_num_tokens > pages * decode.page_size:
                return False
            can_wait = service_class >= ServiceClass.NORMAL and limits.itl_s is not None
            if can_wait and route.predicted_itl_s > (limits.itl_s or math.inf):
                return False
        return prefill_queue_s(route.prefills[0] if route.is_remote else decode) <= limits.ahead_s

    def _tried_at(self, request: RunningAnswer) -> set[str]:
        """Returns the processes at which others are tried alone, where this request is to be tried alone too."""
        if request not in self.on_trial:
            return set()
        attempts = [other.attempt for other in self.on_trial if other is not request and other.attempt is not None]
        workers = [worker for attempt in attempts for worker in (attempt.decode, attempt.prefill) if worker is not None]
        return {worker.peer.incarnation for worker in workers}

    def _cached_tokens(self, request: RunningAnswer) -> Mapping[str, int]:
        if request.spec.sampling.prompt_logprobs is not None and not request.tokens.next_index:
            return {}  # All of the prompt is computed.
        cached = dict(self._hints.cached_tokens(request)) if self._hints is not None else {}
        for worker_id in self._topology.prefill_ids(request.spec.model) if request.is_resumed else ():
            if request.has_kept_prompt(self._topology.prefill_session(worker_id).peer):
                cached[worker_id] = len(request.spec.prompt_token_ids)
        return cached

    def _fits(self, request: RunningAnswer) -> Fits | None:
        """Returns whether this request's pages can go from a prefill worker to a decode worker.

        A decode worker to which no path is left computes the prompt itself.
        """
        model, pairs = request.spec.model, self.pairs
        if self._topology.is_uniform(model) and not (request.has_failed or pairs.has_blocked):
            return None
        if request.avoids_handoffs:
            return lambda prefill, decode: False
        fitting: dict[str, set[str]] = {}

        def fits(prefill: WorkerView, decode: WorkerView) -> bool:
            if decode.worker_id not in fitting:
                fitting[decode.worker_id] = self._fitting(model, decode.worker_id)
            return (
                prefill.worker_id in fitting[decode.worker_id]
                and not pairs.is_blocked((prefill.worker_id, decode.worker_id))
                and (prefill.incarnation, decode.incarnation) not in request.failed_paths
            )

        return fits

    def _fitting(self, model: str, decode_id: str) -> set[str]:
        try:
            return set(self._topology.prefill_ids(model, decode=self._topology.decode_session(decode_id).peer))
        except WorkerUnavailable:
            return set()

    def _note_leaving(self, worker_id: str) -> None:
        self.watch.note_gone(worker_id)
        self.pairs.forget(worker_id)
        self.pulls.forget(worker_id)

    def _note_lost(self, attempt: Attempt, worker: WorkerSession) -> None:
        peer = worker.peer
        if self._last_lost.pop(peer.worker_id, None) != peer.incarnation:
            attempt.watch.failed(peer.worker_id)
        self._last_lost[peer.worker_id] = peer.incarnation
        if len(self._last_lost) > MAX_LOST:
            del self._last_lost[next(iter(self._last_lost))]

    def _usable(self, request: RunningAnswer, views: Views, prefill: PrefillSpeed, decode: DecodeSpeed) -> Views:
        """Returns the workers that get new work; one with a GPU in trouble is slower than the usual speeds given.

        A last attempt may use workers with an open circuit, too. This is not done in the topology, because judgements
        of what the cluster can do go by what was measured.
        """
        watch, worker_ids = self.watch, views.worker_ids
        usable = watch.last_resort(worker_ids) if request.is_last_attempt else watch.usable(worker_ids)
        if usable is not worker_ids:
            views = views.only(frozenset(usable))
        if not watch.has_weak_gpus:
            return views
        weights = watch.gpu_weights(views.worker_ids)

        def slowed(view: WorkerView) -> WorkerView:
            slowdown = 1 / weights[view.worker_id]
            return _slowed(view, prefill.times(slowdown), decode.times(slowdown))

        return views.changed(slowed, weights)


def audience_of(facts: RequestFacts | Call, pool: str) -> Audience:
    """Returns the requests that may use the same workers as one with these facts, in this pool."""
    return Audience(facts.tenant, pool, regions=frozenset(facts.residency) if facts.residency else None)


def _slowed(view: WorkerView, prefill: PrefillSpeed, decode: DecodeSpeed) -> WorkerView:
    """Returns the worker at these speeds, or at its own if they are slower, so that throttling counts once."""
    return view.replaced(
        prefill_speed=max(view.prefill_speed, prefill, key=lambda speed: speed.time_s(512)),
        decode_speed=max(view.decode_speed, decode, key=lambda speed: speed.step_s(1)),
    )


def prefill_queue_s(view: WorkerView) -> float:
    """Returns the time until the prompts that wait there are computed."""
    return view.prefill_speed.time_s(view.waiting_tokens) if view.waiting_tokens else 0.0
