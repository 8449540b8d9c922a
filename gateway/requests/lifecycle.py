"""The life of a request: accept → queue → admit at D → place P → stream → finish.

Begin reading at `Requests.accept` and `Requests.run`. Knows neither HTTP nor protobuf; both APIs call it with a `Call`
and get `Delta`s. Whatever happens (refusal, death of a worker, deadline, a client that leaves), leaving `run` gives
back what the workers hold.

What it leaves to others: `acceptance` turns a call into answers to generate, `placing` finds workers that take them,
`attempt` orders the events of one try, `failover` and `quarantine` decide what follows a failure, `migration` empties a
worker that is leaving, and `observer` tells metrics, log and traces what happens.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Iterator, Mapping

from gateway.limits import DEFAULT_SERVICE_CLASS, SERVICE_CLASSES, SLOW_REQUEST_S, ModelLimits
from gateway.models.answer_text import AnswerText
from gateway.models.catalog import ModelCatalog, ServedModel
from gateway.observability.bottlenecks import BottleneckWatch
from gateway.observability.history import History
from gateway.observability.metrics import STATES, Metrics
from gateway.observability.request_log import CallFacts, RequestLog, code_of, outcome_of
from gateway.observability.tracing import Tracing
from gateway.requests.acceptance import Acceptance, FormOf
from gateway.requests.answer import RunningAnswer
from gateway.requests.attempt import Attempt, CrowdedOut
from gateway.requests.call import AcceptedCall, AnswerSpec, Call, StoredCall
from gateway.requests.delivery import Delivery, FastPath
from gateway.requests.dispatch import Dispatcher, PrefixHints
from gateway.requests.failover import TRY_AGAIN, Failover, reason_of
from gateway.requests.kept_answers import KeptAnswers
from gateway.requests.migration import Moves
from gateway.requests.monitor import Monitor
from gateway.requests.observer import AnswerObserver, OpenAnswer, PlacementSink, Sinks
from gateway.requests.placing import Placing
from gateway.requests.policies import Policies
from gateway.requests.promises import Promises
from gateway.requests.quarantine import Quarantine, QuarantineList
from gateway.requests.queue import AdmissionQueue
from gateway.requests.rebalancing import Rebalancer
from gateway.requests.seeds import refused_id
from gateway.requests.turns import ModelTurns
from gateway.topology.members import Topology
from gateway.topology.watch import CircuitReport, CutPairReport
from gateway.types import Delta
from gateway.wishes import RESIDENCY
from services.runtime import telemetry
from services.runtime.clock import SYSTEM_CLOCK, Clock
from services.runtime.errors import InvalidRequest, Overloaded, RequestCancelled, TandemError
from services.scheduling.disaggregation import PrefillChoice
from services.scheduling.handoff_times import SlowPair
from services.scheduling.regions import check_residency


class Requests:
    """All requests of this gateway. `slow_request_s`: the time from which the log describes one as slow; 0: never.

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
        form_of: FormOf,
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
        self.log = RequestLog(metrics, clock=clock, slow_s=slow_request_s, history=history)
        self.tracing = Tracing(clock=clock, slow_s=slow_request_s)
        self._topology, self._region = topology, policies.region
        self._metrics, self._clock = metrics, clock
        kept = KeptAnswers({model.name for model in catalog if model.keeps_answers})
        self._sinks = Sinks(metrics, self.log, placements, Promises(), gateway_incarnation, clock, kept)
        self._open: dict[RunningAnswer, AnswerObserver] = {}
        self._dispatcher = dispatcher = Dispatcher(
            topology,
            policies=policies,
            clock=clock,
            hints=hints,
            prefill_choice=lambda: self.prefill_choice,
        )
        self.turns = ModelTurns(topology, catalog, policies=policies, answers=lambda: self._open, metrics=metrics)
        self._placing = Placing(topology, dispatcher, queues=queues, policies=policies, turns=self.turns, clock=clock)
        self._accepting = Acceptance(
            catalog=catalog,
            longest_sequence=topology.max_sequence_tokens,
            check_room=self._placing.check_room,
            form_of=form_of,
            max_request_s=policies.max_request_s,
            id_suffix=gateway_incarnation[:8],
            seed=seed,
            tracing=self.tracing,
            clock=clock,
        )
        self.monitor = Monitor(dispatcher, topology, models=[model.name for model in catalog], clock=clock)
        self.quarantine = Quarantine(
            topology, dispatcher, known=quarantine, metrics=metrics, policies=policies, clock=clock
        )
        self._failover = Failover(self.quarantine, dispatcher, policies=policies, metrics=metrics, clock=clock)
        self._moves = Moves(topology=topology, dispatcher=dispatcher, metrics=metrics)
        itl_target_s = self.log.history.targets.itl_s
        self.bottlenecks = BottleneckWatch(topology.members, self._population, itl_target_s=itl_target_s, clock=clock)
        metrics.watch(self.bottlenecks)
        self.rebalancer = self._make_rebalancer(is_on=policies.rebalances)
        metrics.watch_requests(self._population)
        metrics.watch_breakers(lambda: dispatcher.num_open_breakers, dispatcher.circuit, dispatcher.watch.num_openings)

    def _make_rebalancer(self, *, is_on: bool) -> Rebalancer:
        return Rebalancer(
            self._topology,
            self._dispatcher,
            models=[model.name for model in self.catalog],
            answers=lambda: self._open,
            metrics=self._metrics,
            is_on=is_on,
        )

    def start(self) -> None:
        """Begins to look at workers: at their health, and at how evenly they are loaded."""
        self.monitor.start()
        self.rebalancer.start()
        self.turns.start()

    async def close(self) -> None:
        """Stops looking."""
        await self.turns.close()
        await self.rebalancer.close()
        await self.monitor.close()

    @property
    def num_queued(self) -> int:
        """The number of requests that wait for a place."""
        return self._placing.num_queued

    def circuits(self) -> dict[str, CircuitReport]:
        """Returns by id the workers that get no work, or should get none: why, with figures, and since when."""
        return {report.worker_id: report for report in self._dispatcher.watch.circuits()}

    def cut_pairs(self) -> list[CutPairReport]:
        """Returns the pairs of workers between which no pages pass."""
        return self._dispatcher.pairs.reports()

    def slow_pairs(self) -> list[SlowPair]:
        """Returns the pairs of workers whose handoffs are far slower than expected."""
        return self._dispatcher.watch.slow_pairs()

    def limits(self, model: ServedModel) -> ModelLimits:
        """Returns the model's limits, lowered where no worker in rotation has enough pages for them."""
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
        """Continues a call that a gateway accepted before; each answer resumes after its emitted tokens.

        With `call`, which is the same call as its client sent it again, it may fall back like a new one. Raises
        AlreadyExists while the call runs here, DeadlineExceeded, and InvalidRequest where the stored call does not fit
        its model: it may come from a store that anybody can write. Overloaded: the gateway is leaving.
        PermissionDenied: the call's data must not be in this gateway's region.
        """
        check_residency(stored.facts.residency, self._region, held=RESIDENCY)
        return self._follow(self._accepting.adopt(stored, call))

    async def prepare_fallback(self, accepted: AcceptedCall) -> list[AnswerSpec] | None:
        """Returns the call's answers for the next of its models that can take them, or None."""
        specs = await self._accepting.fall_back(
            accepted, lambda spec: self._sinks.kept.find(spec, self._topology.identities(spec.model))
        )
        if specs is not None:
            self.log.add(accepted.specs[0].request_id, [one.request_id for one in specs])
        return specs

    def fallback_after_s(self, model: str) -> float:
        """Returns how long a call that may fall back waits for a worker of this model."""
        return self.catalog[model].fallback_after_s

    def is_served(self, spec: AnswerSpec) -> bool:
        """Returns whether a decode worker is ready to which an answer may go."""
        return self._placing.is_served(spec)

    def only_identity(self, model: str) -> str:
        """Returns the `identity_key` that all workers of a model in rotation share; empty if they share none."""
        identities = self._topology.identities(model)
        return identities.pop() if len(identities) == 1 else ""

    def note_fallback(self, asked: str, answering: str, reason: str) -> None:
        """Notes that another model than the one asked for answers a call."""
        self._metrics.fallbacks.labels(asked, answering, reason).inc()

    def note_tier(self, tier: str, answering: str, reason: str) -> None:
        """Notes which model answers a call for a tier."""
        self._metrics.tiers.labels(tier, answering, reason).inc()

    def open_answers(self, most: int) -> list[OpenAnswer]:
        """Returns the answers that wait or run now, those that came first, at most `most`."""
        now_s = self._clock.monotonic()
        return [
            OpenAnswer.of(request, observer, now_s=now_s)
            for request, observer in itertools.islice(self._open.items(), most)
        ]

    @property
    def num_open_answers(self) -> int:
        """How many answers wait or run now."""
        return len(self._open)

    async def wait_until_idle(self, *, timeout_s: float) -> bool:
        """Waits until no call is running. False: some still are after `timeout_s`."""
        is_idle = await self._accepting.wait_until_idle(timeout_s=timeout_s)
        self.log.close()
        return is_idle

    def refuse_new(self, error: Overloaded) -> None:
        """Answers every new call with an error like this one; what runs continues."""
        self._accepting.close(error)

    def end_all(self, error: TandemError) -> None:
        """Answers everything that runs or waits with `error`."""
        self._placing.close(error)
        for request in self._open:
            request.fail(error)

    async def run(self, spec: AnswerSpec, fast_path: FastPath | None = None) -> AsyncGenerator[Delta, None]:
        """Generates one answer. Use with `contextlib.aclosing`: leaving early cancels it on the workers.

        `fast_path` may take deltas. Raises Overloaded, WorkerUnavailable, DeadlineExceeded or the last attempt's error.
        """
        lane = self._placing.lane_of(spec)
        entry = self._placing.entry(spec, lane)
        request = RunningAnswer(spec, self.new_text(spec), self._clock, queue_entry=entry, lane=lane)
        observer = AnswerObserver(request, self._sinks)
        timer = asyncio.get_running_loop().call_later(spec.deadline.remaining_s(), request.expire)
        error: BaseException | None = None
        self._open[request] = observer
        try:
            if request.finish_reason is not None:
                yield request.last_delta()
                return
            if not request.is_resumed:
                await self._placing.until_served(request)
            delivery = Delivery(request, fast_path or FastPath(), self._progressed, observer)
            while request.finish_reason is None:
                try:
                    attempt = await self._place(request, observer)
                    while request.finish_reason is None:
                        delta = await delivery.next(attempt)
                        if delta.text or delta.token_ids or delta.finish_reason:
                            yield delta
                        if attempt.is_moving:
                            attempt = await self._follow_move(request, attempt, observer)
                except CrowdedOut as crowded_out:
                    observer.must_wait(request, crowded_out, "crowded_out")
                    await self._failover.after_crowding(request, crowded_out)
                except TRY_AGAIN as failure:
                    reason = reason_of(failure)
                    observer.must_wait(request, failure, reason)
                    await self._failover.after(request, failure)
                    observer.retried(reason)
                finally:
                    self._leave(request, observer)
        except BaseException as ended_by:
            error = ended_by
            raise
        finally:
            timer.cancel()
            del self._open[request]
            self.quarantine.end_trial(request)
            lane.note_ended(entry)
            self.num_running -= request.is_running
            observer.ended(request, error)
            error = None  # its traceback holds this frame, and so the prompt until the collector's next look

    def new_text(self, spec: AnswerSpec) -> AnswerText:
        """Returns what turns the answer's tokens into text, from its first token on."""
        sampling = spec.sampling
        ends = () if sampling.ignore_eos else spec.eos_token_ids
        return AnswerText(
            self.catalog[spec.model].tokenizer.detokenizer(),
            stop_texts=sampling.stop,
            stop_token_ids=frozenset((*sampling.stop_token_ids, *ends)),
            min_tokens=sampling.min_tokens,
        )

    @contextlib.contextmanager
    def refusals_noted(self) -> Iterator[None]:
        """For an edge: errors that leave the block are counted by code, and have a line unless they have one."""
        try:
            yield
        except TandemError as error:
            if not isinstance(error, RequestCancelled):
                self._metrics.note_refusal(code_of(error))
                self.log.note_refusal(error, request_id=refused_id(None))
            raise

    async def _place(self, request: RunningAnswer, observer: AnswerObserver) -> Attempt:
        """Finds workers, at once or after waiting in the queue. Raises Quarantined."""
        request.forget_attempt()
        self.quarantine.check(request.spec)
        attempt = await self._placing.place(request, observer)
        self.num_running += request.count_as_running()
        return attempt

    def _progressed(self, request: RunningAnswer, attempt: Attempt, delta: Delta, observer: AnswerObserver) -> None:
        """Acts on what a look at the attempt's events brought."""
        num_tokens = len(delta.token_ids)
        if observer.is_steady(attempt) and delta.finish_reason is None:
            if num_tokens:
                observer.more_tokens(request, num_tokens)
                attempt.watch.note_answer(num_tokens, is_finished=False)
            return
        watch = attempt.watch
        if num_tokens:
            request.bookings.note_prompt_done()
            self.quarantine.end_trial(request)
        if num_tokens or attempt.prompt_done_at_s is not None:
            watch.note_prompt_done(is_finished=request.is_finished)
        if attempt.is_decoding:
            watch.note_answer(num_tokens, is_finished=request.is_finished)
        is_new_state = observer.progressed(request, attempt, delta)
        if request.is_finished or (is_new_state and attempt.is_decoding):
            self._dispatcher.note_success(attempt)

    async def _follow_move(self, request: RunningAnswer, attempt: Attempt, observer: AnswerObserver) -> Attempt:
        """Returns the attempt that continues from here: this one, or the one at the answer's new worker."""
        newer = await self._moves.follow(request, attempt)
        if newer is not attempt:
            observer.moved(request, newer, reason="move" if attempt.decode.load.is_draining else "rebalance")
        return newer

    def _leave(self, request: RunningAnswer, observer: AnswerObserver) -> None:
        """Frees what the request's attempt holds, which is over, however it ended."""
        request.close_attempt()
        self._moves.end(request)
        if request.attempt is not None:
            observer.left(request, request.attempt)
            self._dispatcher.release(request.attempt)

    def _population(self) -> dict[tuple[str, str, str], int]:
        """Returns the present answers by model, service class and state, zeros included."""
        counts = {(model.name, one, state): 0 for model in self.catalog for one in SERVICE_CLASSES for state in STATES}
        for whose, num_waiting in self._placing.queued().items():
            counts[*whose, "queued"] += num_waiting
        for request in self._open:
            if request.is_running:
                counts[request.spec.model, request.spec.facts.service_class, "running"] += 1
        return counts

    def _follow(self, accepted: AcceptedCall) -> AcceptedCall:
        """Has a line written for the call when it ends."""
        first = accepted.specs[0]
        opened = self.log.open(
            [spec.request_id for spec in accepted.specs],
            arrived_s=first.arrived_s,
            service_class=first.facts.service_class,
            tenant=first.facts.tenant,
        )
        accepted.on_end(lambda error: self.log.note_end(opened, _facts(accepted), error))
        return accepted

    def _note_refusal(self, call: Call, error: BaseException, arrived_s: float) -> None:
        """Notes a call that was not accepted. It counts as its model's where it named one, with a class that exists."""
        try:
            model = self.catalog.resolve(call.model).name
        except InvalidRequest:
            model = ""
        name = model or call.model or ""
        facts = CallFacts("", call.traceparent, name, call.service_class, call.tenant, operation=call.operation)
        self.log.note_refusal(error, request_id=refused_id(call.request_id), facts=facts, arrived_s=arrived_s)
        if telemetry.is_on():
            parent = telemetry.extract(call.traceparent, call.tracestate)
            said = {"gen_ai.operation.name": call.operation, "gen_ai.request.model": name}
            self.tracing.refuse(parent, error, arrived_s=arrived_s, attributes=said, origin=call.origin)
        service_class = call.service_class or DEFAULT_SERVICE_CLASS
        if model and service_class in SERVICE_CLASSES:
            outcome = outcome_of(error, was_placed=False)
            figures = self._metrics.of(model, service_class)
            figures.note_end(outcome, total_s=self._clock.monotonic() - arrived_s)


def _facts(accepted: AcceptedCall) -> CallFacts:
    first = accepted.specs[0]
    return CallFacts(
        accepted.request_id,
        accepted.span.traceparent,
        accepted.model,
        first.facts.service_class,
        first.facts.tenant,
        accepted.fallback,
        tuple(spec.request_id for spec in accepted.specs),
        first.facts.operation,
    )
