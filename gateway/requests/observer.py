"""What an answer is seen to do: one object hears its events, and tells metrics, log, spans, history and placements.

    queued → admitted → prefilling → transferring → decoding → finished
      ↑         │           │             │            │ ↑
      └─────────┴───────────┴─────────────┴────────────┘ moved: transferring, at another decode worker
       must_wait, retried

`state` says where the answer stands, in the words of `services.cluster.placements`; the phases of log, metrics and
spans follow from it. Knows neither how workers are chosen nor what follows a failure: it hears, and decides nothing.
"""

import asyncio
from dataclasses import dataclass
from typing import Protocol

import msgspec

from gateway.observability.metrics import Metrics
from gateway.observability.phases import AnswerSpans
from gateway.observability.request_log import AnswerTrace, Phase, RequestLog
from gateway.requests.answer import RunningAnswer
from gateway.requests.attempt import Attempt
from gateway.requests.kept_answers import KeptAnswers
from gateway.requests.promises import Promises
from gateway.topology.events import HandedOff
from gateway.types import Delta
from services.cluster.placements import Placement, State
from services.runtime.clock import Clock
from services.runtime.errors import RequestCancelled
from services.scheduling.routing.route import Route, rival_of

_PHASES: dict[State, Phase] = {
    State.ADMITTED: "prefill",
    State.PREFILLING: "prefill",
    State.TRANSFERRING: "transfer",
    State.DECODING: "decode",
}
_SPANS: dict[Phase, str] = {"queue": "queue", "prefill": "prefill", "transfer": "kv_transfer", "decode": "decode"}
_BEFORE_TOKENS = (State.ADMITTED, State.PREFILLING)


class PlacementSink(Protocol):
    """Takes notes of where requests are; must return at once. `PlacementWriter` is one."""

    def post(self, placement: Placement) -> None:
        """Takes the latest placement of a request."""
        ...


@dataclass(frozen=True, slots=True)
class Sinks:
    """What the answers of one gateway are told to. `incarnation` is the gateway's."""

    metrics: Metrics
    log: RequestLog
    placements: PlacementSink
    promises: Promises
    incarnation: str
    clock: Clock
    kept: KeptAnswers


class AnswerObserver:
    """Hears of one answer from `Requests.run` until `ended`; `spans` is None while nobody traces."""

    __slots__ = (
        *("spans", "state", "trace", "_attempt", "_figures", "_num_placed_failures", "_seen_handoff", "_sinks"),
        *("_placed_as", "_steady"),
    )

    def __init__(self, request: RunningAnswer, sinks: Sinks) -> None:
        spec = request.spec
        self.state = State.QUEUED
        self._placed_as = placement_id(spec.request_id)
        self.spans: AnswerSpans | None = spec.span.answer(spec.choice, spec.model)
        self.trace: AnswerTrace = sinks.log.trace(
            spec.request_id,
            arrived_s=spec.arrived_s,
            service_class=spec.facts.service_class,
            tenant=spec.facts.tenant,
        )
        self._sinks = sinks
        self._figures = sinks.metrics.of(spec.model, spec.facts.service_class)
        self._attempt: Attempt | None = None
        """The last attempt that was heard of."""
        self._steady: Attempt | None = None
        """An attempt of which everything is known but its next tokens."""
        self._seen_handoff: HandedOff | None = None
        self._num_placed_failures = 0
        """Failed attempts before the last one that workers took."""

    def queued(self, request: RunningAnswer, *, num_ahead: int) -> None:
        """It stands in the queue, behind `num_ahead` others."""
        self._place(request, State.QUEUED)
        if self.spans is not None:
            self.spans.waits(num_ahead=num_ahead, service_class=request.spec.facts.service_class)

    def admitted(
        self, request: RunningAnswer, attempt: Attempt, route: Route, *, asked_s: float, queue_delay_s: float | None
    ) -> None:
        """Workers took it, after they were asked at `asked_s`. `queue_delay_s` is the wait that was predicted."""
        spec, trace, metrics = request.spec, self.trace, self._sinks.metrics
        if attempt.prefill is not None:
            metrics.note_sent("prefill", attempt.prefill.peer.worker_id)
        metrics.note_sent("decode", attempt.decode.peer.worker_id)
        now_s = self._sinks.clock.monotonic()
        if not trace.num_attempts:
            self._figures.queue_s.observe(now_s - spec.arrived_s)
        elif request.num_failures > self._num_placed_failures:
            self._figures.failovers.inc()
        self._num_placed_failures = request.num_failures
        self._attempt = attempt
        trace.num_attempts += 1
        placed_us = trace.enter("prefill", now_s)
        self._note_workers(attempt)
        prefill = attempt.prefill.peer.worker_id if attempt.prefill is not None else ""
        promised = self._sinks.promises.corrected(route, prefill)
        if self.spans is not None:
            self.spans.placed(attempt.facts, promised, asked_s=asked_s, predicted_queue_s=queue_delay_s)
        trace.story.note_route(
            promised,
            rival_of(request.routes, route),
            prefill=prefill,
            began_us=round((asked_s - spec.arrived_s) * 1e6),
            placed_us=placed_us,
        )
        trace.story.note_wait(queue_delay_s)
        self._place(request, State.ADMITTED)

    def is_steady(self, attempt: Attempt) -> bool:
        """Returns whether only tokens are to come of this attempt: `more_tokens` is enough until it ends."""
        return self._steady is attempt

    def more_tokens(self, request: RunningAnswer, num_tokens: int) -> None:
        """Notes tokens in the middle of a steady answer."""
        self._figures.generated_tokens.value += num_tokens
        self._figures.itl_s.observe_often(request.last_gap_s / num_tokens, num_tokens)

    def progressed(self, request: RunningAnswer, attempt: Attempt, delta: Delta) -> bool:
        """Notes what the attempt's events brought. Returns whether the answer is in another state now."""
        num_tokens = len(delta.token_ids)
        if num_tokens:
            self._note_tokens(request, delta, num_tokens)
        state = attempt.state
        # A prompt that the decode worker computed itself is at its end with the first token, before that says so.
        phase = "decode" if num_tokens and state in _BEFORE_TOKENS else _PHASES[state]
        if phase != self.trace.phase:
            self._enter(request, attempt, phase, num_new=num_tokens)
        is_new = state is not self.state
        if is_new and not request.is_finished:
            self._place(request, state)
        if num_tokens and state is State.DECODING and request.num_tokens >= 2:
            self._steady = attempt
        return is_new

    def moved(self, request: RunningAnswer, attempt: Attempt, *, reason: str) -> None:
        """Notes that it continues as another attempt, whose decode worker gets its pages from the one before.

        `reason` is `move` where that one is leaving, `rebalance` where this one has less to do.
        """
        trace, before = self.trace, self._attempt
        moved_us = trace.enter("transfer", self._sinks.clock.monotonic())
        trace.num_moves += 1
        if self.spans is not None:
            to = attempt.decode.peer.worker_id
            self.spans.moves(attempt.facts, to=to, num_tokens=request.num_tokens, reason=reason)
        if before is not None:
            self._note_handoff(request, before.facts.handed_off)
        self._attempt = attempt
        trace.story.note_move(attempt.decode.peer.worker_id, moved_us, reason=reason)
        self._note_workers(attempt)
        self._place(request, State.TRANSFERRING)

    def must_wait(self, request: RunningAnswer, error: Exception, reason: str) -> None:
        """Its attempt ended for a reason after which it waits for workers again."""
        self.trace.story.note_failure(reason)
        self.trace.enter("queue", self._sinks.clock.monotonic())
        if self.spans is not None:
            self.spans.must_wait(error, reason, num_tokens=request.num_tokens)

    def retried(self, reason: str) -> None:
        """It may be tried again after a failure."""
        self._sinks.metrics.note_retry(reason)
        if self.spans is not None:
            self.spans.tried_again()

    def left(self, request: RunningAnswer, attempt: Attempt) -> None:
        """The attempt is over, however it ended."""
        self._note_handoff(request, attempt.facts.handed_off)

    def ended(self, request: RunningAnswer, error: BaseException | None) -> None:
        """It is over, however it ended."""
        spec = request.spec
        outcome = _outcome(error)
        self._place(request, outcome)
        new_tokens, cached_tokens = request.num_new_tokens, request.tokens.num_cached_tokens
        prompt_tokens, finish_reason = len(spec.prompt_token_ids), request.finish_reason or ""
        spec.totals.add(
            completion_tokens=request.num_tokens,
            new_tokens=new_tokens,
            cached_tokens=cached_tokens,
            finish_reason=finish_reason or outcome,
        )
        self._figures.note_answer(prompt_tokens=prompt_tokens, tokens=new_tokens, finish_reason=finish_reason)
        if self.spans is not None:
            self.spans.end(error, num_tokens=request.num_tokens)
        if finish_reason:
            self._sinks.kept.note(spec, request.tokens.token_ids[: request.num_tokens], request.identity)
        self._sinks.log.has_line(error)
        self.trace.story.tpot_us = round(request.tpot_s * 1e6)
        self.trace.end(
            error,
            self._sinks.clock.monotonic(),
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            new_tokens=new_tokens,
            finish_reason=finish_reason,
        )

    def _note_tokens(self, request: RunningAnswer, delta: Delta, num_tokens: int) -> None:
        figures, story = self._figures, self.trace.story
        figures.generated_tokens.value += num_tokens
        if delta.first_index == 0:
            ttft_s = request.ttft_s
            figures.ttft_s.observe(ttft_s)
            figures.prefix_queried_tokens.value += len(request.spec.prompt_token_ids)
            figures.prefix_hit_tokens.value += request.tokens.num_cached_tokens
            if self.spans is not None:
                figures.ttft_s.exemplify(ttft_s, request.spec.span.exported_trace_id)
                self.spans.has_token()
            story.first_token_us = round(ttft_s * 1e6)
            self._keep_promise(request, is_second=False)
            if num_tokens > 1:  # The decode worker was as fast as the way of the first one.
                figures.itl_s.observe_often(0.0, num_tokens - 1)
        elif request.last_gap_s:
            figures.itl_s.observe_often(request.last_gap_s / num_tokens, num_tokens)
        if delta.first_index < 2 <= request.num_tokens and story.second_token_us is None:
            self._keep_promise(request, is_second=True)

    def _keep_promise(self, request: RunningAnswer, *, is_second: bool) -> None:
        """A token came whose time was predicted: the first, or the second."""
        spec, story = request.spec, self.trace.story
        now_s = self._sinks.clock.monotonic()
        seen_us = round((now_s - spec.arrived_s) * 1e6)
        if is_second:
            story.second_token_us = seen_us
            if self.spans is not None:
                self.spans.has_second_token()
        attempt = story.predicted()
        if attempt is not None and not spec.emitted_token_ids:
            seen_s = (seen_us - attempt.began_us) / 1e6
            self._sinks.promises.note(self._figures, attempt, seen_s, now_s=now_s, is_second=is_second)

    def _enter(self, request: RunningAnswer, attempt: Attempt, phase: Phase, *, num_new: int) -> None:
        """The answer goes from one phase to another, which came with `num_new` tokens; a handoff may be done."""
        trace, left = self.trace, self.trace.phase
        trace.enter(phase, self._sinks.clock.monotonic())
        if self.spans is not None:
            self.spans.goes_on(_SPANS[phase], attempt.facts, num_tokens=request.num_tokens, num_new=num_new)
        if left == "prefill":
            prefill = attempt.prefill.peer.worker_id if attempt.prefill is not None else ""
            trace.story.note_prompt(prefill, attempt.facts.prefill_started)
        self._note_handoff(request, attempt.facts.handed_off)
        self._note_workers(attempt)

    def _note_handoff(self, request: RunningAnswer, handed_off: HandedOff | None) -> None:
        if handed_off is None or handed_off is self._seen_handoff:
            return
        self._seen_handoff = handed_off
        self.trace.story.note_handoff(
            num_pages=handed_off.num_pages,
            num_bytes=handed_off.num_bytes,
            exposed_s=handed_off.exposed_s,
            transport=handed_off.transport,
            chunks=handed_off.chunks,
        )
        self._figures.note_handoff(handed_off.transport, num_bytes=handed_off.num_bytes, exposed_s=handed_off.exposed_s)

    def _note_workers(self, attempt: Attempt) -> None:
        workers, facts = self.trace.workers, attempt.facts
        if facts.prefill_worker:
            workers[facts.prefill_worker] = None
        workers[facts.decode_worker] = None

    def _place(self, request: RunningAnswer, state: State) -> None:
        """Has the cluster know where the answer stands."""
        self.state = state
        spec, sinks, attempt = request.spec, self._sinks, request.attempt
        prefill = decode = ""
        if attempt is not None:
            prefill, decode = attempt.facts.prefill_worker, attempt.facts.decode_worker
        number, began_unix_ns = request.attempt_number or 1, spec.arrived_unix_ns
        placement = Placement(self._placed_as, number, state, sinks.incarnation, prefill, decode, began_unix_ns)
        sinks.placements.post(placement)


class OpenAnswer(msgspec.Struct, frozen=True):
    """An answer that waits or runs, as people see it. Microseconds; `first_token_us` None: it has no token yet."""

    request_id: str
    choice: int
    model: str
    service_class: str
    tenant: str
    phase: str
    since_us: int
    first_token_us: int | None
    prompt_tokens: int
    tokens: int
    max_tokens: int
    attempts: int
    workers: str

    @classmethod
    def of(cls, request: RunningAnswer, observer: AnswerObserver, *, now_s: float) -> "OpenAnswer":
        """Describes an answer at the time `now_s` of the requests' clock."""
        spec, trace = request.spec, observer.trace
        return cls(
            request_id=spec.request_id.rsplit(".", 2)[0],
            choice=spec.choice,
            model=spec.model,
            service_class=spec.facts.service_class,
            tenant=spec.facts.tenant,
            phase=trace.phase,
            since_us=trace.us(now_s),
            first_token_us=trace.story.first_token_us,
            prompt_tokens=len(spec.prompt_token_ids),
            tokens=request.num_tokens,
            max_tokens=spec.sampling.max_tokens,
            attempts=trace.num_attempts,
            workers=" ".join(trace.workers),
        )


def placement_id(worker_id: str) -> str:
    """Returns the name of an answer's placement from its name towards workers, ID.NUMBER.CHOICE.

    It is the request's id, with the number of the choice behind a slash, which no id has, if that is not the first.
    """
    rest, _, choice = worker_id.rpartition(".")
    request_id = rest.rpartition(".")[0]
    return request_id if choice == "0" else f"{request_id}/{choice}"


def _outcome(error: BaseException | None) -> State:
    if error is None:
        return State.FINISHED
    is_cancelled = isinstance(error, GeneratorExit | asyncio.CancelledError | RequestCancelled)
    return State.CANCELLED if is_cancelled else State.FAILED
