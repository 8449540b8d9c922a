"""The way of a text to its vector: a place in a queue → a prefill worker computes it → it arrives, or is tried again.

Begin reading at `Embedder.vectors`. Each text of a call has a worker of its own, and each worker gets only as many as
it needs to be busy: the rest wait here, where more urgent ones and other tenants go before them. Knows no decode worker
and neither HTTP nor protobuf.
"""

import asyncio
import functools
import logging
import math
from array import array
from collections import Counter
from collections.abc import Callable, Set
from typing import NamedTuple

from gateway.models.embedding import EmbeddingRule
from gateway.observability.metrics import Metrics
from gateway.observability.phases import AttemptFacts
from gateway.observability.request_log import outcome_of
from gateway.requests.call import AcceptedCall, AnswerSpec, Call
from gateway.requests.failover import TRY_AGAIN, reason_of
from gateway.requests.fan_out import all_of
from gateway.requests.fault import check_refusals
from gateway.requests.lifecycle import Requests
from gateway.requests.policies import Policies
from gateway.requests.queue import AdmissionQueue
from gateway.topology.events import (
    AttemptKey,
    Declined,
    Embedded,
    Event,
    Failed,
    Heard,
    PrefillStarted,
    SequenceOrder,
    Unfit,
    VectorOrder,
)
from gateway.topology.members import Topology
from gateway.topology.session import PrefillSession, WorkerSession
from gateway.types import AskedSampling
from gateway.vectors.places import NO_WORKER_RETRY_S, Choice, Place
from gateway.vectors.suspects import Suspects
from gateway.vectors.waking import Waking
from services.runtime.clock import SYSTEM_CLOCK, Clock, Deadline
from services.runtime.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    TandemError,
    WorkerUnavailable,
)
from services.runtime.telemetry import TraceContext, Value
from services.scheduling.entry import ServiceClass

OPERATION = "embeddings"
MAX_VECTOR_BYTES = 16 * 2**20
"""The most for all vectors of a call together: in JSON they take five times as much."""
MAX_AT_ONCE = 64
"""Texts of one call that wait for workers or are with them."""

MAX_TRACED_TEXTS = 32
"""Texts of a call whose steps workers record in a trace."""

logger = logging.getLogger(__name__)


class EmbeddedTexts(NamedTuple):
    """The vectors of a call's texts in their order, each as little-endian float32."""

    vectors: list[bytes]
    num_prompt_tokens: int


class Embedder:
    """All texts that this gateway has embedded. `make_queue` makes the queue of a model's texts."""

    def __init__(
        self,
        requests: Requests,
        topology: Topology,
        *,
        make_queue: Callable[[str], AdmissionQueue],
        policies: Policies,
        metrics: Metrics,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._requests = requests
        self._topology = topology
        self._suspects = Suspects(topology, requests.quarantine)
        self._waking = Waking(requests.turns, topology)
        self._policies = policies
        self._metrics = metrics
        self._clock = clock
        self._queues = {model.name: make_queue(model.name) for model in requests.catalog}
        self._ahead: Counter[str] = Counter()
        """By incarnation, what a worker was given and has not computed, in tokens."""
        self._asked: set[_Asked] = set()

    def poke(self) -> None:
        """Says that a worker may have room now."""
        for queue in self._queues.values():
            queue.poke()

    def end_all(self, error: TandemError) -> None:
        """Answers everything that runs or waits with `error`."""
        for queue in self._queues.values():
            queue.close(error)
        self._waking.end_all(error)
        for asked in self._asked:
            asked.fail(error)

    def rule_of(self, name: str | None) -> EmbeddingRule:
        """Returns how a model embeds. Raises NotFound, and InvalidRequest that says why it does not."""
        model = self._requests.catalog.resolve(name)
        if isinstance(model.embedding, str):
            raise InvalidRequest(
                f"the model {model.name} gives no embeddings: {model.embedding}",
                field="model",
                code="unsupported_endpoint",
            )
        return model.embedding

    def order_for(self, call: Call, num_dimensions: int | None = None) -> VectorOrder:
        """Completes a call whose prompts are to be embedded; returns how. Raises InvalidRequest or NotFound."""
        rule = self.rule_of(call.model).cut_to(num_dimensions)
        wanted = rule.num_dimensions
        if len(call.prompts) * wanted * 4 > MAX_VECTOR_BYTES:
            raise InvalidRequest(
                f"{call.prompt_field} has {len(call.prompts)} texts; of vectors with {wanted} dimensions, a call may "
                f"have {MAX_VECTOR_BYTES // 4 // wanted}",
                field=call.prompt_field,
            )
        call.is_embedded, call.sampling = True, AskedSampling(max_tokens=1)
        return VectorOrder(rule.pooling, wanted, rule.is_normalized)

    async def vectors(self, accepted: AcceptedCall, order: VectorOrder) -> EmbeddedTexts:
        """Returns the vectors of an accepted call's prompts.

        Raises Overloaded, WorkerUnavailable, DeadlineExceeded or the last attempt's error.
        """
        texts, first = _Texts(self._requests, self._metrics, accepted), accepted.specs[0]
        places = asyncio.Semaphore(MAX_AT_ONCE)

        async def vector(spec: AnswerSpec) -> bytes:
            async with places:
                return await self._vector(spec, order, texts)

        with texts, self._waking.wanted(first):
            try:
                async with asyncio.timeout(max(0.0, first.deadline.remaining_s())):
                    choice = self._choice(first)
                    lane = self._queues[first.model].lane(choice.lane)
                    if self._waking.is_asleep(first.model):
                        if not choice.may_come:
                            raise choice.why_none()
                        most = lane.queue.max_waiting - len(lane.queue)
                        await self._waking.until_awake(first, self._patience(first), max_waiting=most)
                    lane.check(choice.entry())
                    return EmbeddedTexts(await all_of([vector(spec) for spec in accepted.specs]), texts.num_tokens)
            except TimeoutError:
                raise DeadlineExceeded("the request's deadline passed") from None

    async def _vector(self, spec: AnswerSpec, order: VectorOrder, texts: "_Texts") -> bytes:
        """Returns the vector of one text, after as many attempts as the operator allows. Raises Quarantined."""
        self._requests.quarantine.check(spec)
        tried: set[str] = set()
        strikes: set[str] = set()
        number = num_failures = num_refusals = 0
        was_refused = False
        while True:
            number += 1
            async with self._suspects.trial(strikes):
                with await self._place(spec, tried, was_refused=was_refused) as place:
                    texts.note_placed(place.session, order)
                    try:
                        return await self._ask(place.session, spec, number, order=order, texts=texts)
                    except Overloaded:
                        was_refused = True
                        continue
                    except TRY_AGAIN as error:
                        failure, incarnation = error.again(), place.session.peer.incarnation
            tried.add(incarnation)
            texts.note_failure(failure, spec, number)
            num_refusals += isinstance(failure, Unfit)
            check_refusals(failure, num_refusals, request_id=spec.request_id)
            num_failures += self._suspects.judge(failure, spec, strikes=strikes, incarnation=incarnation)
            if num_failures >= self._policies.max_attempts:
                raise failure
            self._metrics.note_retry(reason_of(failure))

    def _choice(self, spec: AnswerSpec, tried: Set[str] = frozenset()) -> "Choice":
        far_s = functools.partial(self._policies.router.settings.far_s, self._policies.region)
        return Choice(spec, self._requests, topology=self._topology, tried=tried, ahead=self._ahead, far_s=far_s)

    def _patience(self, spec: AnswerSpec, tried: Set[str] = frozenset()) -> Deadline:
        """Returns the deadline of a text's wait for a worker; `tried` have failed it."""
        policies = self._policies
        if not tried and spec.facts.service_class == "batch":
            return spec.deadline  # It takes what others leave, whenever that is.
        waits_s = policies.max_queue_wait_s
        if tried and not self._requests.turns.takes_turns(spec.model):
            waits_s = policies.failover_wait_s
        return spec.deadline.sooner(Deadline.after(waits_s, clock=self._clock))

    async def _place(self, spec: AnswerSpec, tried: Set[str], *, was_refused: bool) -> "Place":
        """Returns a place at a worker, at once or after waiting. Raises Overloaded, WorkerUnavailable, NotOffered."""
        queue, places = self._queues[spec.model], self._choice(spec, tried)
        lane, entry = queue.lane(places.lane), places.entry()
        taken: list[Place] = []

        def left() -> None:
            lane.note_ended(entry)
            queue.poke()

        def take_room(kept: Set[str]) -> bool:
            session = places.best(kept)
            if session is None:
                lane.note_waiting(is_for_room=True)
                return not places.may_come or self._waking.is_asleep(spec.model)
            taken.append(Place(session, places.prompt, ahead=self._ahead, on_leave=left))
            lane.note_started(entry)
            return True

        patience = self._patience(spec, tried)
        try:
            while not taken:
                await self._waking.until_awake(spec, patience)
                if was_refused or queue.is_behind_others(entry) or not take_room(frozenset()):
                    with queue.enter(
                        entry,
                        take_room,
                        awaited=places.candidates,
                        lane=lane,
                        is_resumed=bool(tried),
                        was_refused=was_refused,
                    ) as waiting:
                        if not await waiting.wait_for_turn(patience.remaining_s()):
                            raise Overloaded(
                                "no prefill worker had room in time", retry_after_s=NO_WORKER_RETRY_S, reason="wait"
                            )
                if not taken and not places.may_come:
                    raise places.why_none()
            return taken.pop()
        except BaseException:
            for place in taken:
                place.leave()
            lane.note_ended(entry)
            raise

    async def _ask(
        self, session: PrefillSession, spec: AnswerSpec, number: int, *, order: VectorOrder, texts: "_Texts"
    ) -> bytes:
        """Returns the vector that a worker gives. Raises the error of its refusal or failure."""
        key = AttemptKey(spec.request_id, number)
        facts = spec.facts
        asked, trace = _Asked(texts), texts.trace_of(spec)
        session.open(key, asked)
        self._asked.add(asked)
        try:
            session.embed(
                SequenceOrder(
                    key=key,
                    prompt_token_ids=spec.prompt_token_ids,
                    emitted_token_ids=(),
                    sampling=spec.sampling,
                    eos_token_ids=(),
                    deadline=spec.deadline,
                    trace=trace,
                    cache_salt=facts.sharers,
                    service_class=ServiceClass.from_name(facts.service_class),
                    adapter=facts.adapter,
                    vector=order,
                )
            )
            vector = await asked.answer
        finally:
            self._asked.discard(asked)
            if asked.has_ended:
                session.close(key)
            else:
                session.cancel(key, asked.heard if trace is not None and trace.is_sampled else None)
        if len(vector) != 4 * order.num_dimensions or not math.isfinite(sum(array("f", vector))):
            raise WorkerUnavailable("a worker gave a vector that cannot be one")
        return vector


class _Asked:
    """What a worker was asked, and its answer: the sink of one attempt's events."""

    def __init__(self, texts: "_Texts") -> None:
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.has_ended = False
        """Whether the worker holds nothing of it."""
        self.heard = Heard(prefill=False, decode=False)
        self._texts = texts

    def deliver(self, session: WorkerSession, event: Event) -> None:
        """Takes one event; a prefill worker has no reason to send others here."""
        if isinstance(event, PrefillStarted):
            self.heard = Heard(prefill=True, decode=False)
            self._texts.num_cached_tokens += event.num_cached_tokens
        elif isinstance(event, Declined | Failed):
            self.has_ended = True
            self.fail(event.error)
        elif isinstance(event, Embedded):
            self.has_ended = True
            if not self.answer.done():
                self.answer.set_result(event.vector)

    def num_left(self) -> int:
        """No token is left: nothing is decoded."""
        return 0

    def fail(self, error: TandemError) -> None:
        """Ends the wait for the answer."""
        if not self.answer.done():
            self.answer.set_exception(error.again())


class _Texts:
    """What log, metrics and limits are told of a call whose prompts are embedded: one line, whatever their number."""

    def __init__(self, requests: Requests, metrics: Metrics, accepted: AcceptedCall) -> None:
        first = accepted.specs[0]
        self.num_tokens = sum(len(spec.prompt_token_ids) for spec in accepted.specs)
        self.num_cached_tokens = 0
        self._log = requests.log
        self._metrics = metrics
        self._figures = metrics.of(first.model, first.facts.service_class)
        self._specs = accepted.specs
        self._spans = first.span.answer(first.choice, first.model)
        self._context: TraceContext | None = None
        self._trace = requests.log.trace(
            first.request_id,
            arrived_s=first.arrived_s,
            service_class=first.facts.service_class,
            tenant=first.facts.tenant,
        )

    def note_placed(self, session: PrefillSession, order: VectorOrder) -> None:
        """Notes that a worker computes one of the texts."""
        trace, worker_id = self._trace, session.peer.worker_id
        self._metrics.note_sent("prefill", worker_id)
        trace.workers[worker_id] = None
        trace.num_attempts += 1
        if trace.phase == "queue":
            self._figures.queue_s.observe(self._log.now_s() - self._specs[0].arrived_s)
            trace.enter("prefill", self._log.now_s())
            self._begin_spans(worker_id, order)

    def trace_of(self, spec: AnswerSpec) -> TraceContext | None:
        """Returns the context under which a worker records what it does for a text; None: it records nothing."""
        return self._context if spec.choice < MAX_TRACED_TEXTS else None

    def note_failure(self, failure: TandemError, spec: AnswerSpec, number: int) -> None:
        """Notes that an attempt has failed."""
        self._metrics.retries.inc()
        found = {"request_id": spec.request_id, "attempt": number, "reason": failure.message}
        logger.warning("attempt failed", extra=found)
        if self._spans is not None:
            self._spans.has_failed = True
            said: dict[str, Value] = {"tandem.choice": spec.choice, "tandem.attempt": number}
            spec.span.add_event("retry", {**said, "tandem.reason": reason_of(failure)})
        if self._context is not None:
            self._context = self._context._replace(is_sampled=True)

    def _begin_spans(self, worker_id: str, order: VectorOrder) -> None:
        if self._spans is None:
            return
        self._context = self._specs[0].span.for_attempt()
        facts = AttemptFacts(1, self._context, self.num_tokens, 0, "", is_move=False, prefill_worker=worker_id)
        self._spans.computes(facts, {"tandem.texts": len(self._specs)})
        self._spans.said_of_request = {"gen_ai.embeddings.dimension.count": order.num_dimensions}

    def __enter__(self) -> None:
        """Nothing is told before a worker has a text."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        specs, figures = self._specs, self._figures
        now_s = self._log.now_s()
        reason = "stop" if error is None else outcome_of(error, was_placed=True)
        for spec in specs:
            figures.prompt_size.observe(len(spec.prompt_token_ids))
            figures.prompt_tokens.value += len(spec.prompt_token_ids)
        num_cached = min(self.num_cached_tokens, self.num_tokens)
        specs[0].totals.add(completion_tokens=0, new_tokens=0, cached_tokens=num_cached, finish_reason=reason)
        if self._spans is not None:
            self._spans.end(error, num_tokens=0)
        if error is None:
            self._trace.story.first_token_us = self._trace.us(now_s)
        self._trace.end(
            error,
            now_s,
            prompt_tokens=self.num_tokens,
            cached_tokens=num_cached,
            new_tokens=0,
            finish_reason=reason if error is None else "",
        )
