"""The life of a request: accept → queue → admit at D → place P → stream → finish.

Begin reading at `Requests.accept` and `Requests.run`. Knows neither HTTP nor protobuf; both APIs call it with a `Call`
and get `Delta`s. Whatever happens (refusal, death of a worker, deadline, a client that leaves), leaving `run` gives
back what the workers hold.

What it leaves to others: `acceptance` turns a call into answers to generate, `dispatch` says which workers to ask,
`attempt` orders the events of one try, `failover` and `quarantine` decide what follows a failure, and `migration`
empties a worker that is leaving.
"""

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Protocol

from gateway.limits import DEFAULT_SERVICE_CLASS, SERVICE_CLASSES, SLOW_REQUEST_S, ModelLimits
from gateway.models.answer_text import AnswerText
from gateway.models.catalog import ModelCatalog, ServedModel
from gateway.observability.history import History
from gateway.observability.metrics import STATES, Metrics, RequestFigures
from gateway.observability.request_log import AnswerTrace, CallFacts, Phase, RequestLog, code_of, outcome_of
from gateway.observability.tracing import AnswerSpans, Tracing
from gateway.requests.acceptance import Acceptance
from gateway.requests.answer import RunningAnswer
from gateway.requests.attempt import Attempt, CrowdedOut
from gateway.requests.call import AcceptedCall, AnswerSpec, Call, StoredCall
from gateway.requests.delivery import Delivery, FastPath
from gateway.requests.dispatch import Dispatcher, PrefixHints, RoomLimits
from gateway.requests.failover import TRY_AGAIN, Failover, reason_of
from gateway.requests.migration import Moves
from gateway.requests.monitor import Monitor
from gateway.requests.promises import Promises
from gateway.requests.quarantine import Quarantine, QuarantineList
from gateway.requests.queue import AdmissionQueue, Lane
from gateway.topology.events import HandedOff
from gateway.topology.members import Topology
from gateway.topology.session import PrefillSession
from gateway.topology.watch import CircuitReport, CutPairReport
from gateway.types import Delta
from services.cluster.placements import Placement, State
from services.cluster.registry import LEASE_TTL_S
from services.runtime import telemetry
from services.runtime.clock import SYSTEM_CLOCK, Clock, Deadline
from services.runtime.errors import (
    InvalidRequest,
    Overloaded,
    RequestCancelled,
    TandemError,
    WorkerUnavailable,
)
from services.scheduling.disaggregation import PrefillChoice
from services.scheduling.queue import UNSAID_S, QueueEntry, ServiceClass
from services.scheduling.routing import Route, Router, rival_of

NO_WORKER_RETRY_S = 2.0
"""What a client is told when there is no decode worker."""

CHARS_PER_TOKEN = 4
"""About, to guess a prompt's length."""

_SPANS: dict[Phase, str] = {"queue": "queue", "prefill": "prefill", "transfer": "kv_transfer", "decode": "decode"}
_BEFORE_TOKENS = (State.ADMITTED, State.PREFILLING)
_PHASES: dict[State, Phase] = {
    State.ADMITTED: "prefill",
    State.PREFILLING: "prefill",
    State.TRANSFERRING: "transfer",
    State.DECODING: "decode",
}


class PlacementSink(Protocol):
    """Takes notes of where requests are; must return at once. `PlacementWriter` is one."""

    def post(self, placement: Placement) -> None:
        """Takes the latest placement of a request."""
        ...


@dataclass(frozen=True, slots=True)
class Policies:
    """The choices that an operator makes. Times in seconds. `max_attempts` counts those without a new token."""

    router: Router
    room: RoomLimits = field(default_factory=RoomLimits)
    region: str = ""
    max_attempts: int = 3
    max_request_s: float = 600.0
    failover_wait_s: float = 30.0
    max_queue_wait_s: float = 60.0


class _Observed:
    """What the metrics and the log are told of one answer while it runs."""

    __slots__ = ("attempt", "figures", "num_placed_failures", "seen_handoff", "spans", "steady", "trace")

    def __init__(self, figures: RequestFigures, trace: AnswerTrace, spans: AnswerSpans | None) -> None:
        self.figures = figures
        self.trace = trace
        self.spans = spans
        self.attempt: Attempt | None = None
        """The last one that was looked at."""
        self.steady: Attempt | None = None
        """One of which all is known but its next tokens."""
        self.seen_handoff: HandedOff | None = None
        self.num_placed_failures = 0
        """Failed attempts before the last one that workers took."""

    def must_wait(self, error: Exception, reason: str, *, num_tokens: int) -> None:
        """Its attempt ended of a reason after which it waits for workers again."""
        self.trace.story.note_failure(reason)
        self.trace.enter("queue")
        if self.spans is not None:
            self.spans.must_wait(error, reason, num_tokens=num_tokens)


class Requests:
    """All requests of this gateway. `slow_request_s`: from when on the log has words about one; 0: never.

    `prefill_choice` says where the prompts of requests are computed that do not say so themselves.
    """

    def __init__(
        self,
        *,
        catalog: ModelCatalog,
        topology: Topology,
        queues: Mapping[str, AdmissionQueue],
        policies: Policies,
        placements: PlacementSink,
        metrics: Metrics,
        quarantine: QuarantineList,
        gateway_incarnation: str,
        hints: PrefixHints | None = None,
        seed: int | None = None,
        slow_request_s: float = SLOW_REQUEST_S,
        history: History | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.catalog = catalog
        self.num_running = 0
        self.prefill_choice: PrefillChoice = "auto"
        self._before_queue: Counter[Lane] = Counter()
        self.log = RequestLog(metrics, clock=clock, slow_s=slow_request_s, history=history)
        self._topology = topology
        self._queues = queues
        self._policies = policies
        self._placements = placements
        self._metrics = metrics
        self._promises = Promises(metrics, clock=clock)
        self._clock = clock
        self._gateway_incarnation = gateway_incarnation
        self._open: dict[RunningAnswer, _Observed] = {}
        self._lanes: dict[str, set[Lane]] = {model.name: set() for model in catalog}
        self.tracing = Tracing(clock=clock, slow_s=slow_request_s)
        self._accepting = Acceptance(
            catalog=catalog,
            longest_sequence=topology.max_sequence_tokens,
            check_room=self._check_room,
            max_request_s=policies.max_request_s,
            id_suffix=gateway_incarnation[:8],
            seed=seed,
            tracing=self.tracing,
            clock=clock,
        )
        self._dispatcher = dispatcher = Dispatcher(
            topology,
            router=policies.router,
            clock=clock,
            limits=policies.room,
            hints=hints,
            region=policies.region,
            prefill_choice=lambda: self.prefill_choice,
        )
        self.monitor = Monitor(dispatcher, topology, models=[model.name for model in catalog], clock=clock)
        self._quarantine = Quarantine(
            topology, dispatcher, known=quarantine, metrics=metrics, patience_s=policies.failover_wait_s, clock=clock
        )
        self._failover = Failover(
            max_attempts=policies.max_attempts,
            wait_s=policies.failover_wait_s,
            dispatcher=dispatcher,
            quarantine=self._quarantine,
            metrics=metrics,
            clock=clock,
        )
        self._moves = Moves(topology=topology, dispatcher=dispatcher, metrics=metrics)
        metrics.watch_requests(self._population)
        metrics.watch_breakers(lambda: dispatcher.num_open_breakers, dispatcher.circuit, dispatcher.watch.num_openings)

    @property
    def num_queued(self) -> int:
        """Requests that wait for a place."""
        return sum(map(len, self._queues.values())) + self._before_queue.total()

    def circuits(self) -> dict[str, CircuitReport]:
        """By worker id, those that get no work, or should get none: why, with figures, and since when."""
        return {report.worker_id: report for report in self._dispatcher.watch.circuits()}

    def cut_pairs(self) -> list[CutPairReport]:
        """Pairs of workers between which pages keep failing to go."""
        return self._dispatcher.cut_pairs()

    def limits(self, model: ServedModel) -> ModelLimits:
        """The model's limits, or less where no worker in rotation has pages for so much."""
        return self._accepting.limits(model)

    async def accept(self, call: Call) -> AcceptedCall:
        """Validates and tokenizes. Raises InvalidRequest, NotFound, AlreadyExists or DeadlineExceeded.

        Overloaded: the gateway is leaving, or the queue says that it would come to nothing. Whatever it raises has its
        line in the log, and so has the call when its `with` block is left.
        """
        arrived_s = self._clock.monotonic()
        try:
            accepted = await self._accepting.accept(call)
        except BaseException as error:
            self._note_refusal(call, error, arrived_s)
            raise
        self._failover.note_accepted()
        return self._follow(accepted)

    def adopt(self, stored: StoredCall, call: Call | None = None) -> AcceptedCall:
        """Goes on with a call that a gateway accepted before; each answer continues after its emitted tokens.

        With `call`, the same as its client sent it again, it may fall back as if it was new. Raises AlreadyExists while
        the call runs here, DeadlineExceeded, and InvalidRequest where the stored call does not fit its model: it may
        come from a store that anybody can write. Overloaded: the gateway is leaving.
        """
        return self._follow(self._accepting.adopt(stored, call))

    async def prepare_fallback(self, accepted: AcceptedCall) -> list[AnswerSpec] | None:
        """The call's answers for the next of its models that can take them; None: there is none."""
        generations = await self._accepting.fall_back(accepted)
        if generations is not None:
            self.log.add(accepted.generations[0].request_id, [one.request_id for one in generations])
        return generations

    def fallback_after_s(self, model: str) -> float:
        """How long a call that may fall back waits for a worker of this model."""
        return self.catalog[model].fallback_after_s

    def is_served(self, model: str) -> bool:
        """Whether a decode worker of this model is ready."""
        return self._topology.num_ready("decode", model) > 0

    def only_identity(self, model: str) -> str:
        """The `identity_key` that all workers of a model in rotation have; empty: there are several, or none."""
        identities = self._topology.identities(model)
        return identities.pop() if len(identities) == 1 else ""

    def note_fallback(self, asked: str, answering: str, reason: str) -> None:
        """A call goes on with another model."""
        self._metrics.fallbacks.labels(asked, answering, reason).inc()

    async def wait_until_idle(self, *, timeout_s: float) -> bool:
        """Waits until no call is running. False: some still are after `timeout_s`."""
        is_idle = await self._accepting.wait_until_idle(timeout_s=timeout_s)
        self.log.close()
        return is_idle

    def refuse_new(self, error: Overloaded) -> None:
        """Answers every new call with an error like this one; what runs goes on."""
        self._accepting.close(error)

    def end_all(self, error: TandemError) -> None:
        """Answers everything that runs or waits with `error`."""
        for queue in self._queues.values():
            queue.close(error)
        for request in self._open:
            request.fail(error)

    async def run(self, generation: AnswerSpec, fast_path: FastPath | None = None) -> AsyncGenerator[Delta, None]:
        """Generates one answer. Use with `contextlib.aclosing`: leaving early cancels it on the workers.

        `fast_path` may take deltas. Raises Overloaded, WorkerUnavailable, DeadlineExceeded or the last attempt's error.
        """
        lane = self._lane(generation.model, generation.tenant)
        request = RunningAnswer(
            generation,
            self.new_text(generation),
            self._clock,
            queue_entry=self._queue_entry(generation, lane),
            lane=lane,
        )
        figures = self._metrics.of(generation.model, generation.service_class)
        spans = generation.span.answer(generation.choice, generation.model)
        trace = self.log.trace(
            generation.request_id,
            arrived_s=generation.arrived_s,
            service_class=generation.service_class,
            tenant=generation.tenant,
        )
        observed = _Observed(figures, trace, spans)
        timer = asyncio.get_running_loop().call_later(generation.deadline.remaining_s(), request.expire)
        error: BaseException | None = None
        self._open[request] = observed
        try:
            if request.is_finished:
                yield request.last_delta()
                return
            if not request.is_resumed:
                await self._until_served(request)
            delivery = Delivery(request, fast_path or FastPath(), self._observe, observed)
            while not request.is_finished:
                try:
                    attempt = await self._place(request)
                    while not request.is_finished:
                        delta = await delivery.next(attempt)
                        if delta.text or delta.token_ids or delta.finish_reason:
                            yield delta
                        if attempt.is_moving:
                            attempt = await self._moves.follow(request, attempt)
                            if attempt is not observed.attempt:
                                self._note_phase(request, attempt, "transfer", observed)
                except CrowdedOut as crowded_out:
                    observed.must_wait(crowded_out, "crowded_out", num_tokens=request.num_tokens)
                    request.must_queue = True
                except TRY_AGAIN as failure:
                    reason = reason_of(failure)
                    observed.must_wait(failure, reason, num_tokens=request.num_tokens)
                    await self._failover.after(request, failure)
                    self._metrics.note_retry(reason)
                    if observed.spans is not None:
                        observed.spans.tried_again()
                finally:
                    self._leave(request)
        except BaseException as ended_by:
            error = ended_by
            raise
        finally:
            timer.cancel()
            del self._open[request]
            self._quarantine.end_trial(request)
            self._note_end(request, error, observed)

    def new_text(self, generation: AnswerSpec) -> AnswerText:
        """What turns the answer's tokens into text, from its first token on."""
        sampling = generation.sampling
        ends = () if sampling.ignore_eos else generation.eos_token_ids
        return AnswerText(
            self.catalog[generation.model].tokenizer.detokenizer(),
            stop_texts=sampling.stop,
            stop_token_ids=frozenset((*sampling.stop_token_ids, *ends)),
            min_tokens=sampling.min_tokens,
        )

    async def _place(self, request: RunningAnswer) -> Attempt:
        """Finds workers, at once or after waiting in the queue. Raises Quarantined."""
        request.attempt = None
        self._quarantine.check(request)
        queue, lane = self._queues[request.generation.model], request.lane
        entry = request.queue_entry
        route = self._dispatcher.plan(request)
        if not request.is_resumed and not request.is_judged:
            request.is_judged = True
            request.admitted = lane.check(entry, route, own=request.generation.wishes.targets)
        was_refused = request.must_queue
        may_go = request.is_resumed or not queue.is_behind_others(entry)
        if not was_refused and may_go and self._take_room(request, route):
            attempt = await self._offer(request)
            if attempt is not None:
                return attempt
            was_refused = True
        patience = self._patience(request)
        while not patience.has_passed():
            if self._is_stranded(request):
                with self._topology.watched(request.mailbox.nudge):
                    await request.mailbox.rest(patience.remaining_s(), until=lambda: not self._is_stranded(request))
            else:
                attempt = await self._wait_in_queue(request, patience, was_refused=was_refused)
                if attempt is not None:
                    return attempt
        request.generation.deadline.check()
        if self._is_stranded(request):
            what = "no worker came in time that has the weights and the arithmetic of the answer's beginning"
        elif request.is_resumed:
            what = "no worker came in time to go on with the answer"
        else:
            what = "no worker had room in time"
        raise Overloaded(what, retry_after_s=NO_WORKER_RETRY_S, reason="wait")

    async def _wait_in_queue(self, request: RunningAnswer, patience: Deadline, *, was_refused: bool) -> Attempt | None:
        """Waits until workers have room for the request and take it.

        None: its patience is over, it is stranded, or it has to wait in another lane now.
        """
        queue, entry, lane = self._queues[request.generation.model], request.queue_entry, self._lane_of(request)

        def must_leave() -> bool:
            return self._is_stranded(request) or self._lane_of(request) is not lane

        def take_room(kept: Set[str]) -> bool:
            return must_leave() or self._take_room(request, self._dispatcher.plan(request, kept))

        spans = self._open[request].spans
        num_ahead = 0 if spans is None else lane.queue.num_ahead(entry.service_class)
        with queue.enter(
            entry,
            take_room,
            awaited=lambda: self._dispatcher.allowed(request),
            lane=lane,
            is_resumed=request.is_resumed,
            was_refused=was_refused,
        ) as place:
            self._note(request, State.QUEUED)
            if spans is not None:
                spans.waits(num_ahead=num_ahead, service_class=request.generation.service_class)
            while await place.wait_for_turn(patience.remaining_s()):
                attempt = None if must_leave() else await self._offer(request)
                if attempt is not None or must_leave():
                    return attempt
                place.come_back()
        return None

    def _lane_of(self, request: RunningAnswer) -> Lane:
        """Where it waits. An answer that began with what others do not have holds up only its like."""
        generation, bound_to = request.generation, request.bound_to
        return self._lane(generation.model, generation.tenant, bound_to) if bound_to else request.lane

    def _is_stranded(self, request: RunningAnswer) -> bool:
        """Whether the answer has tokens, and nobody in rotation computes as their worker did, with the same weights.

        Such a request does not stand in the queue, where others would wait behind it.
        """
        return bool(request.bound_to) and not self._dispatcher.allowed(request)

    def _take_room(self, request: RunningAnswer, route: Route | None) -> bool:
        """Keeps a place for the request where it would go now. False: there is none, or it is kept for others."""
        lane = request.lane
        has_room = route is not None and self._dispatcher.has_room(request, route)
        if route is None or not has_room:
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

    async def _offer(self, request: RunningAnswer) -> Attempt | None:
        """Offers the request to the decode workers of its routes, best first. None: nobody has room now.

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
                attempt.watch.came(asked)
                if route.is_remote:
                    attempt.start_prefill(prefills)
                self._dispatcher.watch_prompt(request, route, attempt)
            except (Overloaded, CrowdedOut):
                is_full = True
                self._leave(request)
            except WorkerUnavailable as unavailable:
                if request.attempt is not None and request.attempt.fault is not None and request.attempt.fault.suspects:
                    raise  # It may have died of the request.
                failure = unavailable
                self._leave(request)
            else:
                self._note_placed(request, attempt, route, asked_s)
                return attempt
        if is_full:
            return None
        raise failure

    def _new_attempt(self, request: RunningAnswer, route: Route) -> tuple[Attempt, list[PrefillSession]]:
        """An attempt that goes this way, and the prefill workers for it, best first."""
        self._dispatcher.book(request, route)
        decode = self._topology.decode_session(route.decode.worker_id)
        prefills = self._dispatcher.prefill_sessions(request, route) if route.is_remote else []
        request.attempt = request.new_attempt(decode, self._dispatcher.new_watch(request, route.decode))
        self._dispatcher.begin(request.attempt, prefills)
        return request.attempt, prefills

    def _check_room(self, call: Call, model: ServedModel, deadline: Deadline) -> None:
        """Refuses by the queue alone what would only be refused later. Raises Overloaded."""
        lane = self._lane(model.name, call.tenant)
        if not len(lane.queue):
            return
        num_chars = sum(len(prompt) for prompt in call.prompts)
        num_chars += sum(len(str(message.get("content", ""))) for message in call.messages or ())
        entry = QueueEntry(
            key=None,
            service_class=ServiceClass.from_name(call.service_class or DEFAULT_SERVICE_CLASS),
            tenant=call.tenant,
            cost_tokens=num_chars // CHARS_PER_TOKEN,
            arrived_s=self._clock.monotonic(),
            deadline_s=deadline.at_s,
            level=call.priority,
        )
        lane.check(entry)

    @contextlib.contextmanager
    def refusals_noted(self) -> Iterator[None]:
        """For an edge: errors that leave the block are counted by code, and have a line unless they have one."""
        try:
            yield
        except TandemError as error:
            if not isinstance(error, RequestCancelled):
                self._metrics.note_refusal(code_of(error))
                self.log.note_refusal(error)
            raise

    def _lane(self, model: str, tenant: str, bound_to: str = "") -> Lane:
        lane = self._queues[model].lane(self._topology.lane_of(model, tenant, bound_to))
        self._lanes[model].add(lane)
        return lane

    def _population(self) -> dict[tuple[str, str, str], int]:
        """Answers now by model, service class and state, zeros included."""
        counts = {(model, one, state): 0 for model in self._lanes for one in SERVICE_CLASSES for state in STATES}
        for model, lanes in self._lanes.items():
            for lane in lanes:
                for one, num_waiting in lane.queue.num_waiting_by_class.items():
                    counts[model, SERVICE_CLASSES[one], "queued"] += num_waiting
        for request in self._open:
            if request.is_running:
                counts[request.generation.model, request.generation.service_class, "running"] += 1
        return counts

    def _follow(self, accepted: AcceptedCall) -> AcceptedCall:
        """Has a line written for the call when it ends."""
        first = accepted.generations[0]
        opened = self.log.open(
            [generation.request_id for generation in accepted.generations],
            arrived_s=first.arrived_s,
            service_class=first.service_class,
            tenant=first.tenant,
        )
        accepted.on_end(lambda error: self.log.note_end(opened, _facts(accepted), error))
        return accepted

    def _note_refusal(self, call: Call, error: BaseException, arrived_s: float) -> None:
        """A call was not accepted. It counts as its model's where it named one, with a class that there is."""
        try:
            model = self.catalog.resolve(call.model).name
        except InvalidRequest:
            model = ""
        name = model or call.model or ""
        facts = CallFacts(call.request_id or "", call.traceparent, name, call.service_class, call.tenant)
        self.log.note_refusal(error, facts=facts, arrived_s=arrived_s)
        if telemetry.is_on():
            parent = telemetry.extract(call.traceparent, call.tracestate)
            said = {"gen_ai.operation.name": call.operation, "gen_ai.request.model": name}
            self.tracing.refuse(parent, error, arrived_s=arrived_s, attributes=said)
        service_class = call.service_class or DEFAULT_SERVICE_CLASS
        if model and service_class in SERVICE_CLASSES:
            outcome = outcome_of(error, was_placed=False)
            self._metrics.note_end(model, service_class, outcome, total_s=self._clock.monotonic() - arrived_s)

    def _queue_entry(self, generation: AnswerSpec, lane: Lane) -> QueueEntry:
        service_class, arrived_s = ServiceClass.from_name(generation.service_class), generation.arrived_s
        service_s, prompt_s = self._dispatcher.least_service_s(generation), self._dispatcher.prompt_s(generation)
        return QueueEntry(
            key=generation.request_id,
            service_class=service_class,
            tenant=generation.tenant,
            cost_tokens=len(generation.prompt_token_ids) + generation.sampling.max_tokens,
            arrived_s=arrived_s,
            deadline_s=generation.deadline.at_s,
            service_s=service_s,
            level=generation.priority,
            prompt_s=prompt_s,
            due_s=due_s(generation, service_s=service_s, prompt_s=prompt_s),
            promised_s=lane.promised_s(
                service_class, generation.wishes.targets, arrived_s=arrived_s, prompt_s=prompt_s
            ),
        )

    def _leave(self, request: RunningAnswer) -> None:
        """The request's attempt is over, however it ended."""
        request.close_attempt()
        self._moves.end(request)
        if request.attempt is not None:
            self._note_handoff(request, request.attempt.handed_off, self._open[request])
            self._dispatcher.release(request.attempt)

    def _patience(self, request: RunningAnswer) -> Deadline:
        """Until when the request may wait for workers."""
        generation, policies = request.generation, self._policies
        if request.is_resumed:
            return generation.deadline.sooner(Deadline.after(policies.failover_wait_s, clock=self._clock))
        if request.queue_entry.service_class == ServiceClass.BATCH:
            return generation.deadline  # It takes what others leave, whenever that is.
        return generation.deadline.sooner(Deadline(generation.arrived_s + policies.max_queue_wait_s, self._clock))

    async def _until_served(self, request: RunningAnswer) -> None:
        """Waits while a model's workers are only away for a moment, and no longer than a lease lasts.

        Raises WorkerUnavailable where there are none, Overloaded where as many wait as may, and what ended the request.
        """
        model, lane, queue_entry = request.generation.model, request.lane, request.queue_entry

        def is_decided() -> bool:
            return self.is_served(model) or not self._topology.is_away("decode", model)

        if not is_decided():
            if len(lane.queue) + self._before_queue[lane] >= lane.queue.max_waiting:
                raise lane.when_full(queue_entry)
            patience = Deadline(queue_entry.arrived_s + LEASE_TTL_S, self._clock)
            self._before_queue[lane] += 1
            try:
                with self._topology.watched(request.mailbox.nudge):
                    await request.mailbox.rest(patience.remaining_s(), until=is_decided)
            finally:
                self._before_queue[lane] -= 1
        if not self.is_served(model):
            raise WorkerUnavailable("no decode worker is ready", retry_after_s=NO_WORKER_RETRY_S)

    def _note_placed(self, request: RunningAnswer, attempt: Attempt, route: Route, asked_s: float) -> None:
        """Books that workers took the request, after they were asked at `asked_s`."""
        observed, admitted = self._open[request], request.admitted
        request.lane.note_started(request.queue_entry, admitted)
        request.admitted = None
        if not request.bound_to:
            request.identity = self._topology.decode_identity(attempt.decode.peer.worker_id)
        request.note_placed()
        self._note_taken(request, attempt, observed)
        if observed.spans is not None:
            predicted_queue_s = None if admitted is None else admitted.queue_delay_s
            observed.spans.placed(attempt.facts, route, asked_s=asked_s, predicted_queue_s=predicted_queue_s)
        self._note_route(request, attempt, route, asked_s)
        self._dispatcher.note_sent(request, route)
        self.num_running += request.count_as_running()
        self._note(request, State.ADMITTED)

    def _note_taken(self, request: RunningAnswer, attempt: Attempt, observed: _Observed) -> None:
        """Tells metrics and log that workers took the request."""
        generation, trace = request.generation, observed.trace
        if attempt.prefill is not None:
            self._metrics.note_sent("prefill", attempt.prefill.peer.worker_id)
        self._metrics.note_sent("decode", attempt.decode.peer.worker_id)
        if not trace.num_attempts:
            queue_s = self._clock.monotonic() - generation.arrived_s
            self._metrics.note_placed(generation.model, generation.service_class, queue_s)
        elif request.num_failures > observed.num_placed_failures:
            self._metrics.note_failover(generation.model)
        observed.num_placed_failures = request.num_failures
        observed.attempt = attempt
        trace.num_attempts += 1
        trace.enter("prefill")
        _note_workers(trace, attempt)

    def _note_route(self, request: RunningAnswer, attempt: Attempt, route: Route, asked_s: float) -> None:
        """Writes down for those who look at the request why it went there."""
        trace = self._open[request].trace
        trace.story.note_route(
            route,
            rival_of(request.routes, route),
            prefill=attempt.prefill.peer.worker_id if attempt.prefill is not None else "",
            began_us=round((asked_s - request.generation.arrived_s) * 1e6),
            placed_us=trace.waterfall.steps[-1][1],
        )

    def _observe(self, request: RunningAnswer, attempt: Attempt, delta: Delta, observed: _Observed) -> None:
        """Books what a delta says about progress."""
        num_tokens = len(delta.token_ids)
        if observed.steady is attempt and delta.finish_reason is None:
            if num_tokens:
                observed.figures.generated_tokens.value += num_tokens
                observed.figures.itl_s.observe(request.last_gap_s / num_tokens, num_tokens)
                attempt.watch.note_answer(num_tokens, is_finished=False)
            return
        if num_tokens:
            request.bookings.note_prompt_done()
            self._quarantine.end_trial(request)
            figures = observed.figures
            figures.generated_tokens.value += num_tokens
            if delta.first_index == 0:
                self._note_first_token(request, figures)
                if observed.spans is not None:
                    observed.spans.has_token()
                observed.trace.story.first_token_us = round(request.ttft_s * 1e6)
                self._note_kept(request, observed, is_second=False)
                if num_tokens > 1:  # The decode worker was as fast as the way of the first one.
                    figures.itl_s.observe(0.0, num_tokens - 1)
            elif request.last_gap_s:
                figures.itl_s.observe(request.last_gap_s / num_tokens, num_tokens)
            if delta.first_index < 2 <= request.num_tokens and observed.trace.story.second_token_us is None:
                self._note_kept(request, observed, is_second=True)
        watch = attempt.watch
        if delta.token_ids or attempt.prompt_done_at_s is not None:
            watch.note_prompt_done()
        if attempt.is_decoding:
            watch.note_answer(len(delta.token_ids), is_finished=request.is_finished)
        state = _state_of(attempt)
        # A prompt that the decode worker computed itself is at its end with the first token, before that says so.
        phase = "decode" if num_tokens and state in _BEFORE_TOKENS else _PHASES[state]
        if phase != observed.trace.waterfall.phase:
            self._note_phase(request, attempt, phase, observed, num_new=num_tokens)
        if request.is_finished or (attempt.is_decoding and request.noted_state is not state):
            self._dispatcher.note_success(attempt)
        if state is not request.noted_state and not request.is_finished:
            request.noted_state = state
            self._note(request, state)
        if num_tokens and state is State.DECODING and request.num_tokens >= 2:
            observed.steady = attempt

    def _note_kept(self, request: RunningAnswer, observed: _Observed, *, is_second: bool) -> None:
        """A token came whose time was predicted: the first, or the second."""
        generation, story = request.generation, observed.trace.story
        seen_us = round((self._clock.monotonic() - generation.arrived_s) * 1e6)
        if is_second:
            story.second_token_us = seen_us
            if observed.spans is not None:
                observed.spans.has_second_token()
        attempt = story.predicted()
        if attempt is None or generation.emitted_token_ids:
            return
        seen_s = (seen_us - attempt.began_us) / 1e6
        if not is_second:
            self._promises.note_first(generation.model, predicted_s=attempt.predicted_ttft_us / 1e6, seen_s=seen_s)
            return
        self._promises.note_second(
            generation.model,
            prefill=attempt.prefill if attempt.is_remote else "",
            decode=attempt.decode,
            predicted_s=attempt.predicted_second_us / 1e6,
            transfer_s=attempt.predicted_exposed_us / 1e6,
            seen_s=seen_s,
        )

    def _note_first_token(self, request: RunningAnswer, figures: RequestFigures) -> None:
        generation = request.generation
        figures.ttft_s.observe(request.ttft_s)
        self._metrics.note_first_token(
            generation.model,
            prompt_tokens=len(generation.prompt_token_ids),
            cached_tokens=request.log.num_cached_tokens,
        )

    def _note_phase(
        self, request: RunningAnswer, attempt: Attempt, phase: Phase, observed: _Observed, *, num_new: int = 0
    ) -> None:
        """Notes a change of phase that `num_new` tokens came with; workers may be others, and a handoff may be done."""
        trace, spans, num_tokens = observed.trace, observed.spans, request.num_tokens
        left = trace.waterfall.phase
        trace.enter(phase)
        if observed.attempt is not attempt:
            trace.num_moves += 1
            if spans is not None:
                spans.moves(attempt.facts, to=attempt.decode.peer.worker_id, num_tokens=num_tokens)
            if observed.attempt is not None:
                self._note_handoff(request, observed.attempt.handed_off, observed)
            observed.attempt = attempt
            trace.story.note_move(attempt.decode.peer.worker_id, trace.waterfall.steps[-1][1])
        else:
            if spans is not None:
                spans.goes_on(_SPANS[phase], attempt.facts, num_tokens=num_tokens, num_new=num_new)
            if left == "prefill":
                waited_s = attempt.prefill_started.queue_s if attempt.prefill_started is not None else 0.0
                trace.story.note_prompt(attempt.prefill.peer.worker_id if attempt.prefill is not None else "", waited_s)
        self._note_handoff(request, attempt.handed_off, observed)
        _note_workers(trace, attempt)

    def _note_handoff(self, request: RunningAnswer, handed_off: HandedOff | None, observed: _Observed) -> None:
        if handed_off is None or handed_off is observed.seen_handoff:
            return
        observed.seen_handoff = handed_off
        observed.trace.story.note_handoff(
            num_pages=handed_off.num_pages,
            num_bytes=handed_off.num_bytes,
            exposed_s=handed_off.exposed_s,
            transport=handed_off.transport,
            chunks=handed_off.chunks,
        )
        self._metrics.note_handoff(
            request.generation.model,
            handed_off.transport,
            num_bytes=handed_off.num_bytes,
            exposed_s=handed_off.exposed_s,
        )

    def _note(self, request: RunningAnswer, state: State) -> None:
        attempt = request.attempt
        placement = Placement(
            request.generation.request_id,
            max(1, request.attempt_number),
            state,
            self._gateway_incarnation,
            attempt.prefill.peer.worker_id if attempt and attempt.prefill else "",
            attempt.decode.peer.worker_id if attempt else "",
            began_unix_ns=request.generation.arrived_unix_ns,
        )
        self._placements.post(placement)

    def _note_end(self, request: RunningAnswer, error: BaseException | None, observed: _Observed) -> None:
        generation = request.generation
        request.lane.note_ended(request.queue_entry)
        self.num_running -= request.is_running
        outcome = _outcome(error)
        self._note(request, outcome)
        new_tokens = request.num_tokens - len(generation.emitted_token_ids)
        totals = generation.totals
        totals.completion_tokens += request.num_tokens
        totals.new_tokens += new_tokens
        totals.cached_tokens += request.log.num_cached_tokens
        totals.finish_reasons.append(request.finish_reason or outcome)
        prompt_tokens, finish_reason = len(generation.prompt_token_ids), request.finish_reason or ""
        self._metrics.note_answer(
            generation.model,
            generation.service_class,
            prompt_tokens=prompt_tokens,
            tokens=new_tokens,
            finish_reason=finish_reason,
        )
        if observed.spans is not None:
            observed.spans.end(error, num_tokens=request.num_tokens)
        observed.trace.end(
            error,
            prompt_tokens=prompt_tokens,
            cached_tokens=request.log.num_cached_tokens,
            new_tokens=new_tokens,
            finish_reason=finish_reason,
            tpot_s=request.tpot_s,
        )


def due_s(generation: AnswerSpec, *, service_s: float, prompt_s: float) -> float:
    """When an answer's turn should come by what its client said; `math.inf`: it said nothing."""
    wishes, arrived_s = generation.wishes, generation.arrived_s
    due_s = generation.deadline.at_s - service_s if generation.has_own_deadline else math.inf
    if wishes.targets.ttft_s is not None:
        due_s = min(due_s, arrived_s + wishes.targets.ttft_s - prompt_s)
    if math.isinf(due_s) and wishes.patience_s is not None:
        # Clients send their default too, which is long and the same for all: a hint makes nobody wait longer.
        hinted_s = wishes.patience_s - service_s
        return arrived_s + hinted_s if hinted_s < UNSAID_S else math.inf
    return due_s


def _note_workers(trace: AnswerTrace, attempt: Attempt) -> None:
    if attempt.prefill is not None:
        trace.note_workers(attempt.prefill.peer.worker_id)
    trace.note_workers(attempt.decode.peer.worker_id)


def _state_of(attempt: Attempt) -> State:
    """Where an attempt stands that workers have taken."""
    if attempt.is_decoding:
        return State.DECODING
    if attempt.is_move or attempt.prompt_done_at_s is not None:
        return State.TRANSFERRING
    return State.PREFILLING if attempt.is_begun else State.ADMITTED


def _outcome(error: BaseException | None) -> State:
    if error is None:
        return State.FINISHED
    is_cancelled = isinstance(error, GeneratorExit | asyncio.CancelledError | RequestCancelled)
    return State.CANCELLED if is_cancelled else State.FAILED


def _facts(accepted: AcceptedCall) -> CallFacts:
    first = accepted.generations[0]
    return CallFacts(
        accepted.request_id,
        accepted.span.traceparent,
        accepted.model,
        first.service_class,
        first.tenant,
        accepted.fallback,
        tuple(generation.request_id for generation in accepted.generations),
    )
