"""From an accepted answer to an attempt that workers took: it waits for its turn, and is offered along its routes.

`dispatch` says which workers to ask, `queue` whose turn it is. An answer that failed, or that was begun elsewhere, is
placed before new ones. Knows neither what an attempt brings nor what follows its failure.
"""

import math
from collections import Counter
from collections.abc import Mapping, Set

from gateway.limits import DEFAULT_SERVICE_CLASS, SERVICE_CLASSES
from gateway.models.catalog import ServedModel
from gateway.requests.answer import RunningAnswer
from gateway.requests.attempt import Attempt
from gateway.requests.call import AnswerSpec, Call
from gateway.requests.dispatch import Dispatcher, audience_of
from gateway.requests.observer import AnswerObserver
from gateway.requests.policies import Policies
from gateway.requests.queue import AdmissionQueue, Lane
from gateway.requests.turns import ModelTurns
from gateway.topology.members import Topology
from gateway.topology.session import PrefillSession
from services.cluster.registry import LEASE_TTL_S
from services.runtime.clock import Clock, Deadline
from services.runtime.errors import Overloaded, TandemError, WorkerUnavailable
from services.scheduling.entry import UNSAID_S, QueueEntry, ServiceClass
from services.scheduling.pools import Audience
from services.scheduling.regions import named
from services.scheduling.routing.route import Route

NO_WORKER_RETRY_S = 2.0
"""The time after which a client that found no decode worker is told to come back."""

CHARS_PER_TOKEN = 4
"""The characters of a token, about, by which a prompt's length is guessed."""


class Placing:
    """The places of one gateway's answers: their lanes, and the offers to workers."""

    def __init__(
        self,
        topology: Topology,
        dispatcher: Dispatcher,
        *,
        queues: Mapping[str, AdmissionQueue],
        policies: Policies,
        turns: ModelTurns,
        clock: Clock,
    ) -> None:
        self._topology = topology
        self._dispatcher = dispatcher
        self._queues = queues
        self._policies = policies
        self._turns = turns
        self._clock = clock
        self._before_queue: Counter[Lane] = Counter()
        """The answers that wait until their model has a worker at all."""
        self._lanes: dict[str, set[Lane]] = {model: set() for model in queues}

    @property
    def num_queued(self) -> int:
        """Answers that wait for a place."""
        return sum(map(len, self._queues.values())) + self._before_queue.total()

    def queued(self) -> dict[tuple[str, str], int]:
        """Answers that wait now, by model and service class."""
        counts: Counter[tuple[str, str]] = Counter()
        for model, lanes in self._lanes.items():
            for lane in lanes:
                for one, num_waiting in lane.queue.num_waiting_by_class.items():
                    counts[model, SERVICE_CLASSES[one]] += num_waiting
        return counts

    def close(self, error: TandemError) -> None:
        """Ends every wait in a queue with `error`."""
        for queue in self._queues.values():
            queue.close(error)

    def lane_of(self, spec: AnswerSpec, bound_to: str = "") -> Lane:
        """Returns the lane of an answer, or of answers like it that only this `identity_key` may continue."""
        return self._lane(spec.model, self._dispatcher.audience(spec)._replace(bound_to=bound_to))

    def _lane(self, model: str, audience: Audience) -> Lane:
        lane = self._queues[model].lane(self._topology.lane_of(model, audience))
        self._lanes[model].add(lane)
        return lane

    def entry(self, spec: AnswerSpec, lane: Lane) -> QueueEntry:
        """Returns what the queue knows of an answer."""
        service_class, arrived_s = ServiceClass.from_name(spec.facts.service_class), spec.arrived_s
        service_s, prompt_s = self._dispatcher.service_s(spec)
        targets = spec.wishes.targets
        return QueueEntry(
            key=spec.request_id,
            service_class=service_class,
            tenant=spec.facts.tenant,
            cost_tokens=len(spec.prompt_token_ids) + spec.sampling.max_tokens,
            arrived_s=arrived_s,
            deadline_s=spec.deadline.at_s,
            service_s=service_s,
            level=spec.facts.priority,
            prompt_s=prompt_s,
            due_s=due_s(spec, service_s=service_s, prompt_s=prompt_s),
            promised_s=lane.promised_s(service_class, targets, arrived_s=arrived_s, prompt_s=prompt_s),
        )

    def check_room(self, call: Call, model: ServedModel, deadline: Deadline) -> None:
        """Refuses by the queue alone what would only be refused later. Raises Overloaded."""
        service_class = call.service_class or DEFAULT_SERVICE_CLASS
        pool = self._topology.pools.of(service_class, None)
        lane = None if pool is None else self._lane(model.name, audience_of(call, pool))
        if lane is None or not len(lane.queue):
            return
        num_chars = sum(len(prompt) for prompt in call.prompts)
        num_chars += sum(len(str(message.get("content", ""))) for message in call.messages or ())
        entry = QueueEntry(
            key=None,
            service_class=ServiceClass.from_name(service_class),
            tenant=call.tenant,
            cost_tokens=num_chars // CHARS_PER_TOKEN,
            arrived_s=self._clock.monotonic(),
            deadline_s=deadline.at_s,
            level=call.priority,
        )
        lane.check(entry)

    async def until_served(self, request: RunningAnswer) -> None:
        """Waits while a model's workers are unavailable for a moment, or until the model wakes.

        The wait lasts at most as long as a lease, and right after the gateway's start until `settled_at_s`.

        Raises WorkerUnavailable if it has none, Overloaded if as many wait as may, and what ended the request.
        """
        model, lane, queue_entry = request.spec.model, request.lane, request.queue_entry
        if self.is_served(request.spec):
            return
        audience = self._dispatcher.audience(request.spec)
        takes_turns = self._turns.takes_turns(model)

        def is_decided() -> bool:
            if self.is_served(request.spec):
                return True
            return not (takes_turns or self._topology.is_away("decode", model, audience=audience))

        if not is_decided():
            if len(lane.queue) + self._before_queue[lane] >= lane.queue.max_waiting:
                raise self._turns.not_awake(model) if takes_turns else lane.when_full(queue_entry)
            until_s = max(queue_entry.arrived_s + LEASE_TTL_S, self._topology.settled_at_s)
            patience = Deadline(until_s, self._clock)
            if takes_turns:
                patience = self._patience(request)
            self._before_queue[lane] += 1
            try:
                with self._topology.watched(request.mailbox.nudge):
                    await request.mailbox.rest(patience.remaining_s(), until=is_decided)
            finally:
                self._before_queue[lane] -= 1
        if not self.is_served(request.spec):
            if takes_turns and audience.regions is None:
                request.spec.deadline.check()
                raise self._turns.not_awake(model)
            where = f" for the pool {audience.pool}" if audience.pool else ""
            where += held_to(request.spec)
            raise WorkerUnavailable(f"no decode worker is ready{where}", retry_after_s=NO_WORKER_RETRY_S)

    async def place(self, request: RunningAnswer, observer: AnswerObserver) -> Attempt:
        """Returns the attempt that workers took, at once or after waiting in the queue.

        Raises Overloaded if none has room in time, WorkerUnavailable if none can be reached, DeadlineExceeded.
        """
        lane, entry = request.lane, request.queue_entry
        route = self._dispatcher.plan(request)
        if not request.is_resumed and not request.is_judged:
            request.note_judged(lane.check(entry, route, own=request.spec.wishes.targets))
        was_refused = request.must_queue
        may_go = request.is_resumed or not self._queues[request.spec.model].is_behind_others(entry)
        if not was_refused and may_go and self._take_room(request, route):
            attempt = await self._offer(request, observer)
            if attempt is not None:
                return attempt
            was_refused = True
        patience = self._patience(request)
        while not patience.has_passed():
            if self._is_stranded(request):
                with self._topology.watched(request.mailbox.nudge):
                    await request.mailbox.rest(patience.remaining_s(), until=lambda: not self._is_stranded(request))
            else:
                attempt = await self._wait_in_queue(request, observer, patience, was_refused=was_refused)
                if attempt is not None:
                    return attempt
        request.spec.deadline.check()
        if self._turns.is_asleep(request.spec.model):
            raise self._turns.not_awake(request.spec.model)
        if self._is_stranded(request):
            what = "no worker came in time that has the weights and the arithmetic of the answer's beginning"
        elif request.is_resumed:
            what = "no worker came in time to continue the answer"
        else:
            what = "no worker had room in time"
        what += held_to(request.spec)
        raise Overloaded(what, retry_after_s=NO_WORKER_RETRY_S, reason="wait")

    def is_served(self, spec: AnswerSpec) -> bool:
        """Returns whether a decode worker is ready to which the answer may go."""
        if not (self._topology.pools or spec.facts.residency):
            return self._topology.num_ready("decode", spec.model) > 0
        return bool(self._topology.open_ids("decode", spec.model, self._dispatcher.audience(spec)))

    async def _wait_in_queue(
        self, request: RunningAnswer, observer: AnswerObserver, patience: Deadline, *, was_refused: bool
    ) -> Attempt | None:
        """Waits until workers have room for the request and take it.

        Returns None when its patience is over, it is stranded, or it has to wait in another lane now.
        """
        queue, entry, lane = self._queues[request.spec.model], request.queue_entry, self._lane_of(request)

        def must_leave() -> bool:
            return self._is_stranded(request) or self._lane_of(request) is not lane

        def take_room(kept: Set[str]) -> bool:
            return must_leave() or self._take_room(request, self._dispatcher.plan(request, kept))

        num_ahead = lane.queue.num_ahead(entry.service_class)
        with queue.enter(
            entry,
            take_room,
            awaited=lambda: self._dispatcher.allowed(request),
            lane=lane,
            is_resumed=request.is_resumed,
            was_refused=was_refused,
        ) as place:
            observer.queued(request, num_ahead=num_ahead)
            while await place.wait_for_turn(patience.remaining_s()):
                attempt = None if must_leave() else await self._offer(request, observer)
                if attempt is not None or must_leave():
                    return attempt
                place.come_back()
        return None

    def _lane_of(self, request: RunningAnswer) -> Lane:
        """Returns the lane in which it waits. An answer bound to certain workers holds up only others like it."""
        return self.lane_of(request.spec, request.bound_to) if request.bound_to else request.lane

    def _is_stranded(self, request: RunningAnswer) -> bool:
        """Returns whether it has tokens that no worker in rotation can continue with the same weights and arithmetic.

        Such a request does not stand in the queue, where others would wait behind it; nor does one whose model sleeps.
        """
        if self._turns.is_asleep(request.spec.model):
            return True
        return bool(request.bound_to) and not self._dispatcher.allowed(request)

    def _patience(self, request: RunningAnswer) -> Deadline:
        """Returns the deadline of the request's wait for workers."""
        spec = request.spec
        if request.is_resumed:
            wait_s = self._policies.failover_wait_s
            if self._turns.takes_turns(spec.model):
                wait_s = max(wait_s, self._policies.max_queue_wait_s)
            return spec.deadline.sooner(Deadline.after(wait_s, clock=self._clock))
        if request.queue_entry.service_class == ServiceClass.BATCH:
            return spec.deadline  # It takes what others leave, whenever that is.
        return spec.deadline.sooner(Deadline(spec.arrived_s + self._policies.max_queue_wait_s, self._clock))

    def _take_room(self, request: RunningAnswer, route: Route | None) -> bool:
        """Keeps a place for the request where it would go now. False: none is free, or it is kept for others."""
        lane = request.lane
        if route is None or not self._dispatcher.has_room(request, route):
            lane.note_waiting(is_for_room=True)
            return False
        if not request.is_resumed and not lane.may_start(request.queue_entry, route):
            lane.note_waiting(is_for_room=False)
            return False
        try:
            self._dispatcher.book(request, route)
        except WorkerUnavailable:
            return False  # It has just gone.
        return True

    async def _offer(self, request: RunningAnswer, observer: AnswerObserver) -> Attempt | None:
        """Offers the request to the decode workers of its routes, best first. None: none has room now.

        Raises WorkerUnavailable where every one of them turned out to be unreachable.
        """
        asked_s = self._clock.monotonic()
        is_full = False
        failure: TandemError = WorkerUnavailable("no decode worker took the request")
        for route in request.routes:
            try:
                attempt, prefills = self._new_attempt(request, route)
                asked = attempt.watch.asked()
                await attempt.admit(is_local_prefill=not route.is_remote)
                attempt.watch.answered(asked)
                if route.is_remote:
                    attempt.start_prefill(prefills, self._dispatcher.pulls.orders(route))
                self._dispatcher.watch_prompt(request, route, attempt)
            except Overloaded:
                is_full = True
                self._leave(request)
            except WorkerUnavailable as unavailable:
                if request.attempt is not None and request.attempt.fault is not None and request.attempt.fault.suspects:
                    raise  # It may have died of the request.
                failure = unavailable.again()
                self._leave(request)
            else:
                self._note_admitted(request, observer, attempt, route, asked_s)
                return attempt
        if is_full:
            return None
        raise failure.again()

    def _new_attempt(self, request: RunningAnswer, route: Route) -> tuple[Attempt, list[PrefillSession]]:
        """Returns an attempt on this route, and the prefill workers for it, best first."""
        self._dispatcher.book(request, route)
        decode = self._topology.decode_session(route.decode.worker_id)
        prefills = self._dispatcher.prefill_sessions(request, route) if route.is_remote else []
        return request.begin_attempt(decode, self._dispatcher.new_watch(request, route.decode)), prefills

    def _note_admitted(
        self, request: RunningAnswer, observer: AnswerObserver, attempt: Attempt, route: Route, asked_s: float
    ) -> None:
        verdict = request.note_admitted(self._topology.decode_identity(attempt.decode.peer.worker_id))
        request.lane.note_started(request.queue_entry)
        queue_delay_s = None if verdict is None else verdict.queue_delay_s
        observer.admitted(request, attempt, route, asked_s=asked_s, queue_delay_s=queue_delay_s)
        self._dispatcher.note_sent(request, route)

    def _leave(self, request: RunningAnswer) -> None:
        """Leaves an attempt that no worker took."""
        request.close_attempt()
        if request.attempt is not None:
            self._dispatcher.release(request.attempt)


def held_to(spec: AnswerSpec) -> str:
    """Returns what an error adds for a request whose data is held to regions; empty for any other."""
    residency = spec.facts.residency
    return f" in {named(residency)}, to which the request's data is held" if residency else ""


def due_s(spec: AnswerSpec, *, service_s: float, prompt_s: float) -> float:
    """When an answer's turn should come by what its client said; `math.inf`: it said nothing."""
    wishes, arrived_s = spec.wishes, spec.arrived_s
    due_s = spec.deadline.at_s - service_s if spec.has_own_deadline else math.inf
    if wishes.targets.ttft_s is not None:
        due_s = min(due_s, arrived_s + wishes.targets.ttft_s - prompt_s)
    if math.isinf(due_s) and wishes.patience_s is not None:
        # Clients send their default too, which is long and the same for all: a hint makes nobody wait longer.
        hinted_s = wishes.patience_s - service_s
        return arrived_s + hinted_s if hinted_s < UNSAID_S else math.inf
    return due_s
