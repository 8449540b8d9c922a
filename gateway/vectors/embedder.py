"""The way of a text to its vector: a place in a queue → a prefill worker computes it → it arrives, or is tried again.

Begin reading at `Embedder.vectors`. Each text of a call has a worker of its own, and each worker gets only as many as
it needs to be busy: the rest wait here, where more urgent ones and other tenants go before them. Knows no decode worker
and neither HTTP nor protobuf.
"""

import asyncio
import contextlib
import functools
import logging
import math
from array import array
from collections import Counter
from collections.abc import Callable, Set
from typing import NamedTuple

from gateway.models.embedding import EmbeddingRule
from gateway.observability.metrics import Metrics
from gateway.observability.request_log import outcome_of
from gateway.requests.call import AcceptedCall, AnswerSpec, Call
from gateway.requests.dispatch import audience_of
from gateway.requests.failover import TRY_AGAIN, reason_of
from gateway.requests.fan_out import all_of
from gateway.requests.lifecycle import Requests
from gateway.requests.placing import held_to
from gateway.requests.policies import Policies
from gateway.requests.queue import AdmissionQueue
from gateway.topology.events import (
    AttemptKey,
    Declined,
    Embedded,
    Event,
    Failed,
    PrefillStarted,
    SequenceOrder,
    VectorOrder,
)
from gateway.topology.members import Topology
from gateway.topology.session import PrefillSession, WorkerSession
from gateway.types import AskedSampling
from gateway.vectors.suspects import Suspects
from services.runtime.clock import SYSTEM_CLOCK, Clock, Deadline
from services.runtime.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NotOffered,
    Overloaded,
    TandemError,
    WorkerUnavailable,
)
from services.scheduling.entry import QueueEntry, ServiceClass

OPERATION = "embeddings"
MAX_VECTOR_BYTES = 16 * 2**20
"""The most for all vectors of a call together: in JSON they take five times as much."""
MAX_AT_ONCE = 64
"""Texts of one call that wait for workers or are with them."""
MAX_AHEAD_TOKENS = 4096
"""Tokens that a worker is given by this gateway's embeddings before it has computed any of them: some steps."""
LEAST_COST_TOKENS = 64
"""What a text costs at least, of these."""
NO_WORKER_RETRY_S = 2.0

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

        with texts:
            try:
                async with asyncio.timeout(max(0.0, first.deadline.remaining_s())):
                    choice = self._choice(first)
                    self._queues[first.model].lane(choice.lane).check(choice.entry())
                    return EmbeddedTexts(await all_of([vector(spec) for spec in accepted.specs]), texts.num_tokens)
            except TimeoutError:
                raise DeadlineExceeded("the request's deadline passed") from None

    async def _vector(self, spec: AnswerSpec, order: VectorOrder, texts: "_Texts") -> bytes:
        """Returns the vector of one text, after as many attempts as the operator allows. Raises Quarantined."""
        self._requests.quarantine.check(spec)
        tried: set[str] = set()
        strikes: set[str] = set()
        number = num_failures = 0
        was_refused = False
        while True:
            number += 1
            async with self._suspects.trial(strikes):
                with await self._place(spec, tried, was_refused=was_refused) as place:
                    texts.note_placed(place.session)
                    try:
                        return await self._ask(place.session, spec, number, order=order, texts=texts)
                    except Overloaded:
                        was_refused = True
                        continue
                    except TRY_AGAIN as error:
                        failure, incarnation = error.again(), place.session.peer.incarnation
            tried.add(incarnation)
            texts.note_failure(failure, spec, number)
            num_failures += self._suspects.judge(failure, spec, strikes=strikes, incarnation=incarnation)
            if num_failures >= self._policies.max_attempts:
                raise failure
            self._metrics.note_retry(reason_of(failure))

    def _choice(self, spec: AnswerSpec, tried: Set[str] = frozenset()) -> "_Choice":
        far_s = functools.partial(self._policies.router.settings.far_s, self._policies.region)
        return _Choice(self._topology, self._requests, spec, tried, self._ahead, far_s=far_s)

    async def _place(self, spec: AnswerSpec, tried: Set[str], *, was_refused: bool) -> "_Place":
        """Returns a place at a worker, at once or after waiting. Raises Overloaded, WorkerUnavailable, NotOffered."""
        queue, places = self._queues[spec.model], self._choice(spec, tried)
        lane, entry = queue.lane(places.lane), places.entry()
        taken: list[_Place] = []

        def left() -> None:
            lane.note_ended(entry)
            queue.poke()

        def take_room(kept: Set[str]) -> bool:
            session = places.best(kept)
            if session is None:
                lane.note_waiting(is_for_room=True)
                return not places.may_come
            taken.append(_Place(session, places.prompt, self._ahead, on_leave=left))
            lane.note_started(entry)
            return True

        try:
            if was_refused or queue.is_behind_others(entry) or not take_room(frozenset()):
                waits_s = self._policies.failover_wait_s if tried else self._policies.max_queue_wait_s
                patience = spec.deadline.sooner(Deadline.after(waits_s, clock=self._clock))
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
            if not taken:
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
        asked = _Asked(texts)
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
                    trace=None,
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
                session.cancel(key)
        if len(vector) != 4 * order.num_dimensions or not math.isfinite(sum(array("f", vector))):
            raise WorkerUnavailable("a worker gave a vector that cannot be one")
        return vector


class _Asked:
    """What a worker was asked, and its answer: the sink of one attempt's events."""

    def __init__(self, texts: "_Texts") -> None:
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.has_ended = False
        """Whether the worker holds nothing of it."""
        self._texts = texts

    def deliver(self, session: WorkerSession, event: Event) -> None:
        """Takes one event; a prefill worker has no reason to send others here."""
        if isinstance(event, PrefillStarted):
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


class _Place:
    """What one text has booked at a worker, until the block is left."""

    def __init__(
        self, session: PrefillSession, prompt: tuple[int, int], ahead: Counter[str], *, on_leave: Callable[[], None]
    ) -> None:
        self.session = session
        self._prompt = prompt
        self._ahead = ahead
        self._on_leave = on_leave
        session.books.add_prompt(prompt)
        ahead[session.peer.incarnation] += _cost(prompt[1])

    def leave(self) -> None:
        """Gives the place back."""
        incarnation = self.session.peer.incarnation
        self.session.books.remove_prompt(self._prompt)
        self._ahead[incarnation] -= _cost(self._prompt[1])
        if not self._ahead[incarnation]:
            del self._ahead[incarnation]
        self._on_leave()

    def __enter__(self) -> "_Place":
        return self

    def __exit__(self, *raised: object) -> None:
        self.leave()


class _Choice:
    """The workers that one text may go to. `tried` have failed it; `ahead` is what each was given.

    `far_s` gives the seconds to a region.
    """

    def __init__(
        self,
        topology: Topology,
        requests: Requests,
        spec: AnswerSpec,
        tried: Set[str],
        ahead: Counter[str],
        *,
        far_s: Callable[[str], float],
    ) -> None:
        facts = spec.facts
        self._topology = topology
        self._requests = requests
        self._spec = spec
        self._tried = tried
        self._ahead = ahead
        self._num_tokens = len(spec.prompt_token_ids)
        self._class = ServiceClass.from_name(facts.service_class)
        pool = topology.pools.of(facts.service_class, self._num_tokens)
        assert pool is not None, "the length of the prompt is known"
        self._audience = audience_of(facts, pool)
        self._far_s = far_s
        self.lane = topology.lane_of(spec.model, self._audience)
        self.prompt = (int(self._class), self._num_tokens)

    def entry(self) -> QueueEntry:
        """Returns what the queue knows of the text."""
        spec = self._spec
        prompt_s = self._topology.usual_speeds(spec.model).prefill.time_s(self._num_tokens)
        return QueueEntry(
            key=spec.request_id,
            service_class=self._class,
            tenant=spec.facts.tenant,
            cost_tokens=self._num_tokens,
            arrived_s=spec.arrived_s,
            deadline_s=spec.deadline.at_s,
            service_s=prompt_s,
            level=spec.facts.priority,
            prompt_s=prompt_s,
        )

    def candidates(self) -> set[str]:
        """Returns the ids of the workers that can compute it, with or without room."""
        members = self._topology.workers(self._spec.model).prefill.members
        able = {
            member.record.id
            for member in members
            if member.record.embeds and member.record.max_sequence_tokens >= self._num_tokens
        }
        return able & self._topology.open_ids("prefill", self._spec.model, self._audience)

    def best(self, kept: Set[str]) -> PrefillSession | None:
        """Returns the worker that would have computed it first, of those with room and not `kept`; None: none has."""
        ids = self.candidates()
        out = {worker_id for worker_id, circuit in self._requests.circuits().items() if circuit.state == "open"}
        ids = (ids - out or ids) - kept
        topology, model = self._topology, self._spec.model
        usual = topology.usual_speeds(model)
        views = topology.workers(model).prefill.views(usual, usual.prefill, self.prompt, topology.now_s()).only(ids)
        with_room = [view for view in views if self._has_room(view.incarnation)]
        if not with_room:
            return None
        view = min(
            with_room,
            key=lambda view: (
                view.incarnation in self._tried,
                self._far_s(view.region) + view.prefill_speed.time_s(view.waiting_tokens + self._num_tokens),
            ),
        )
        with contextlib.suppress(WorkerUnavailable):
            return topology.prefill_session(view.worker_id)
        return None  # It has just gone.

    @property
    def may_come(self) -> bool:
        """Whether a worker with room may come: one computes such texts now, or is only away for a moment."""
        return bool(self.candidates()) or self._topology.is_away("prefill", self._spec.model, audience=self._audience)

    def why_none(self) -> TandemError:
        """Returns the error of a text that no worker will compute."""
        records = [member.record for member in self._topology.workers(self._spec.model).prefill.members]
        embedding = [record for record in records if record.embeds]
        if embedding and all(record.max_sequence_tokens < self._num_tokens for record in embedding):
            return InvalidRequest(
                "a text is longer than any worker can compute", field="input", code="context_length_exceeded"
            )
        if records and not embedding:
            return NotOffered("the engine of the model's prefill workers gives no embeddings", field="model")
        what = f"no prefill worker is ready{held_to(self._spec)}"
        return WorkerUnavailable(what, retry_after_s=NO_WORKER_RETRY_S)

    def _has_room(self, incarnation: str) -> bool:
        ahead = self._ahead.get(incarnation, 0)
        return not ahead or ahead + _cost(self._num_tokens) <= MAX_AHEAD_TOKENS


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
        self._trace = requests.log.trace(
            first.request_id,
            arrived_s=first.arrived_s,
            service_class=first.facts.service_class,
            tenant=first.facts.tenant,
        )

    def note_placed(self, session: PrefillSession) -> None:
        """Notes that a worker computes one of the texts."""
        trace, worker_id = self._trace, session.peer.worker_id
        self._metrics.note_sent("prefill", worker_id)
        trace.workers[worker_id] = None
        trace.num_attempts += 1
        if trace.phase == "queue":
            self._figures.queue_s.observe(self._log.now_s() - self._specs[0].arrived_s)
            trace.enter("prefill", self._log.now_s())

    def note_failure(self, failure: TandemError, spec: AnswerSpec, number: int) -> None:
        """Notes that an attempt has failed."""
        self._metrics.retries.inc()
        found = {"request_id": spec.request_id, "attempt": number, "reason": failure.message}
        logger.warning("attempt failed", extra=found)

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


def _cost(num_tokens: int) -> int:
    return max(LEAST_COST_TOKENS, num_tokens)
