"""A request's spans: the phases of each of its answers, one after the other, and what happened in them.

    request                 from its arrival until its answer was sent
      queue                 it waits for workers
      route                 workers are asked to take it, until they have
      prefill               until its first token, or the next one after a failure, is there
        prefill.chunk       a worker: one step that computed a part of the prompt
        kv_transfer.send    a worker: from the first pages that leave it to the commit
      kv_transfer           its pages are on their way, and nothing else happens
      decode                tokens are generated
        decode.steps        a worker: from the first step to the last

The phases are those of `gateway.observability.request_log`, whose `queue` is `queue` and `route` here. At any time an
answer is in one of them, so they sum up to its time. They are of this process's monotonic clock, counted from the wall
clock's time at the arrival; what workers record is of theirs. A phase is a few numbers while the request runs. At its
end they become spans, if anybody is to see them: where the trace is in the sample, and always where the request failed,
had to be tried again, or was slow. Then its later attempts are sampled for the workers too; of the earlier ones their
spans are missing.

Knows neither workers nor how a request is done, and never a prompt, an answer or a key.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from gateway.topology.events import HandedOff, PrefillStarted
from services.runtime import telemetry
from services.runtime.clock import SYSTEM_CLOCK, Clock
from services.runtime.errors import InternalError, RequestCancelled, TandemError
from services.runtime.telemetry import DECODE_SPAN, KV_TRANSFER_SPAN, Event, Link, Span, TraceContext, Value
from services.scheduling.routing import Route

MAX_EVENTS = 64
MAX_LINKS = 32
"""Of a request: any number of clients may attach to one with a name."""


@dataclass(slots=True)
class AttemptFacts:
    """What spans tell of an attempt. The attempt keeps the facts from `prefill_worker` on up to date while it runs."""

    number: int
    trace: TraceContext | None
    num_prompt_tokens: int
    num_replayed_tokens: int
    decode_worker: str
    is_move: bool
    prefill_worker: str = ""
    """Empty while no prefill worker was asked."""
    prefill_started: PrefillStarted | None = None
    handed_off: HandedOff | None = None


class Tracing:
    """All requests of one gateway. `slow_s`: those that take so long are always exported; 0: not for that."""

    def __init__(self, *, clock: Clock, slow_s: float = 0.0) -> None:
        self.clock = clock
        self.slow_s = slow_s

    def begin(self, parent: TraceContext | None, *, arrived_s: float, arrived_unix_ns: int) -> "RequestSpans":
        """A request has come; `parent` is its client's span."""
        context = telemetry.root(parent)
        return RequestSpans(self, context, parent, arrived_s=arrived_s, arrived_unix_ns=arrived_unix_ns)

    def refuse(
        self,
        parent: TraceContext | None,
        error: BaseException,
        *,
        arrived_s: float,
        attributes: Mapping[str, Value],
    ) -> None:
        """A request has ended before it was accepted: a span without phases."""
        arrived_unix_ns = self.clock.unix_ns() - _ns(self.clock.monotonic() - arrived_s)
        spans = self.begin(parent, arrived_s=arrived_s, arrived_unix_ns=arrived_unix_ns)
        spans.finish(error, lambda: attributes)


class RequestSpans:
    """One request's spans, from its arrival to its end; they are sent at its end or not at all.

    While telemetry is off, or there is no trace, it records nothing and only passes its client's context on.
    """

    __slots__ = (
        *("_answers", "_arrived_s", "_arrived_unix_ns", "_clock", "_events", "_links", "_parent", "_tracing"),
        "context",
    )

    def __init__(
        self,
        tracing: Tracing | None,
        context: TraceContext | None,
        parent: TraceContext | None = None,
        *,
        arrived_s: float = 0.0,
        arrived_unix_ns: int = 0,
    ) -> None:
        self.context = context
        self._tracing = tracing if telemetry.is_on() and context is not None else None
        """None: nothing is recorded, or not any more."""
        self._clock = SYSTEM_CLOCK if tracing is None else tracing.clock
        self._parent = parent
        self._arrived_s = arrived_s
        self._arrived_unix_ns = arrived_unix_ns
        self._answers: list[AnswerSpans] = []
        self._events: list[Event] = []
        self._links: list[Link] = []

    @property
    def traceparent(self) -> str:
        """W3C's name of this request's span; empty where there is no trace."""
        return telemetry.inject(self.context)

    @property
    def told_traceparent(self) -> str:
        """The same for the client, if spans are recorded here that it could look for."""
        return self.traceparent if self._tracing is not None else ""

    def answer(self, choice: int, model: str) -> "AnswerSpans | None":
        """Where one of its answers writes its phases down; None: nowhere.

        What another model was asked for before is over, and this one begins there.
        """
        if self._tracing is None:
            return None
        ended_s = [earlier.ended_s for earlier in self._answers if earlier.choice == choice]
        answer = AnswerSpans(self, choice, model, max(ended_s, default=self._arrived_s))
        self._answers.append(answer)
        return answer

    def for_attempt(self) -> TraceContext | None:
        """The context that an attempt's workers get: new ids of its phases, for every attempt."""
        context = self.context
        if context is None or self._tracing is None:
            return context
        is_sampled = context.is_sampled or self._is_kept or self._is_slow(self.now_s())
        return context._replace(span_id=telemetry.new_span_id(), is_sampled=is_sampled)

    def add_event(self, name: str, attributes: Mapping[str, Value]) -> None:
        """Something happened now."""
        if self._tracing is not None and len(self._events) < MAX_EVENTS:
            self._events.append(Event(name, self.unix_ns(self.now_s()), attributes))

    def add_link(self, context: TraceContext | None, reason: str) -> None:
        """It has to do with another request's span: `resumed`, `attached`."""
        if self._tracing is not None and context is not None and len(self._links) < MAX_LINKS:
            self._links.append(Link(context, {"tandem.reason": reason}))

    def now_s(self) -> float:
        """Now, by the clock of all phases."""
        return self._clock.monotonic()

    def unix_ns(self, at_s: float) -> int:
        """A moment of the monotonic clock as spans tell it."""
        return self._arrived_unix_ns + _ns(at_s - self._arrived_s)

    def finish(self, error: BaseException | None, describe: Callable[[], Mapping[str, Value]]) -> None:
        """The request is over. Sends its spans, if it is in the sample or has to be looked at.

        `describe` gives the request's attributes, if they are needed.
        """
        context = self.context
        if self._tracing is None or context is None:
            return
        if error is None and not self._answers:
            self._tracing = None  # nothing was left to do, or it goes on as another request
            return
        ended_s = self.now_s()
        was_placed = any(answer.was_placed for answer in self._answers)
        is_failed = error is not None and _is_failure(error, was_placed=was_placed)
        if context.is_sampled or is_failed or self._is_kept or self._is_slow(ended_s):
            telemetry.export(self._spans(context._replace(is_sampled=True), ended_s, error, describe()))
        self._tracing = None
        self._answers.clear()

    def _spans(
        self, context: TraceContext, ended_s: float, error: BaseException | None, described: Mapping[str, Value]
    ) -> list[Span]:
        for answer in self._answers:
            if not answer.ended_s:  # whoever ran it has left it
                answer.end(asyncio.CancelledError(), num_tokens=0)
        last = max(self._answers, key=lambda answer: answer.ended_s, default=None)
        if last is not None:
            last.phases[-1].end_s = ended_s  # what is left of the request is the sending of this one's end
            phases = [phase for answer in self._answers if answer.choice == last.choice for phase in answer.phases]
            described = {**described, **_times(phases), **self._predictions(last)}
        request = Span(
            "request",
            context,
            0 if self._parent is None else self._parent.span_id,
            self._arrived_unix_ns,
            self.unix_ns(ended_s),
            attributes=described,
            events=self._events,
            links=self._links,
            error_type="" if error is None or _is_cancelled(error) else type(error).__name__,
            is_server=True,
        )
        return [*(span for answer in self._answers for span in answer.spans(context)), request]

    @property
    def _is_kept(self) -> bool:
        return any(answer.has_failed for answer in self._answers)

    def _is_slow(self, now_s: float) -> bool:
        return self._tracing is not None and 0 < self._tracing.slow_s <= now_s - self._arrived_s

    def _predictions(self, answer: "AnswerSpans") -> dict[str, Value]:
        """What was said of its first and second token, and when they came."""
        said: dict[str, Value] = {}
        if answer.first_token_s is not None:
            ttft_s = answer.first_token_s - self._arrived_s
            said = {"gen_ai.response.time_to_first_chunk": ttft_s, "gen_ai.latency.time_to_first_token": ttft_s}
        if answer.predicted_ttft_s is not None:
            said["tandem.predicted_ttft_s"] = answer.predicted_ttft_s
        if answer.second_token_s is not None:
            said["tandem.second_token_s"] = answer.second_token_s - self._arrived_s
        if answer.predicted_second_s is not None:
            said["tandem.predicted_second_token_s"] = answer.predicted_second_s
        return said


NO_TRACE = RequestSpans(None, None)
"""Of requests that nobody traces."""


@contextlib.contextmanager
def attached(
    parent: TraceContext | None, request: RequestSpans, traceparent: str, *, clock: Clock = SYSTEM_CLOCK
) -> Iterator[str]:
    """A client reads the answer of a request that others began, `traceparent` names whose span: the span `attach`.

    The two spans link to one another, for they are of different traces. Gives the new one's name; empty: there is none.
    """
    context = telemetry.root(parent) if telemetry.is_on() else None
    if context is None:
        yield ""
        return
    began_s, began_unix_ns = clock.monotonic(), clock.unix_ns()
    request.add_link(context, "attached")
    known = telemetry.extract(traceparent)
    error_type = ""
    try:
        yield telemetry.inject(context)
    except Exception as error:
        error_type = "" if _is_cancelled(error) else type(error).__name__
        raise
    finally:
        if context.is_sampled:
            span = Span(
                "attach",
                context,
                0 if parent is None else parent.span_id,
                began_unix_ns,
                began_unix_ns + _ns(clock.monotonic() - began_s),
                links=() if known is None else (Link(known, {"tandem.reason": "attached"}),),
                error_type=error_type,
                is_server=True,
            )
            telemetry.export([span])


@dataclass(slots=True, eq=False)
class _Phase:
    """A phase while it is only numbers, in seconds of the monotonic clock."""

    name: str
    span_id: int
    attempt_number: int
    start_s: float
    end_s: float = 0.0
    predicted_s: float | None = None
    attempt: AttemptFacts | None = None
    route: Route | None = None
    follows: "_Follows | None" = None
    error_type: str = ""
    is_cancelled: bool = False
    attributes: dict[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Follows:
    """What an attempt comes after: the phase that failed, or that a move ended, and why."""

    earlier: _Phase
    reason: str


class AnswerSpans:
    """The phases of one answer; `Requests.run` writes them down."""

    def __init__(self, request: RequestSpans, choice: int, model: str, began_s: float) -> None:
        self.choice = choice
        self.model = model
        self.phases = [_Phase("queue", telemetry.new_span_id(), 1, began_s)]
        self.has_failed = False
        """An attempt of it has."""
        self.was_placed = False
        self.ended_s = 0.0
        self.first_token_s: float | None = None
        self.predicted_ttft_s: float | None = None
        self.second_token_s: float | None = None
        self.predicted_second_s: float | None = None
        self._request = request
        self._predicted_itl_s = 0.0
        self._predicted_transfer_s: float | None = None
        self._num_tokens = 0
        """Of the answer, when its last phase began."""
        self._follows: _Follows | None = None

    def waits(self, *, num_ahead: int, service_class: str) -> None:
        """It has to stand in the queue, and so many go before it."""
        self.phases[-1].attributes |= {"tandem.queue_position": num_ahead, "tandem.service_class": service_class}

    def placed(self, attempt: AttemptFacts, route: Route, *, asked_s: float, predicted_queue_s: float | None) -> None:
        """Workers have taken it, after they were asked at `asked_s`."""
        now_s, number = self._request.now_s(), attempt.number
        queue = self.phases[-1]
        queue.end_s, queue.attempt_number, queue.predicted_s = asked_s, number, predicted_queue_s
        if not self.was_placed:
            self.was_placed = True
            self.predicted_ttft_s = (predicted_queue_s or 0.0) + route.predicted_ttft_s
            if route.predicted_second_s:
                self.predicted_second_s = (predicted_queue_s or 0.0) + route.predicted_second_s
        asking = _Phase("route", telemetry.new_span_id(), number, asked_s, now_s, attempt=attempt, route=route)
        asking.follows, asking.attributes["tandem.model"] = self._follows, self.model
        self.phases.append(asking)
        self._predicted_itl_s = route.predicted_itl_s
        transfer_s = route.inputs.get("exposed_s")
        self._predicted_transfer_s = transfer_s if isinstance(transfer_s, float) else None
        phase = self._begin("prefill", attempt, now_s)
        phase.route, phase.predicted_s = route, route.predicted_ttft_s

    def goes_on(self, name: str, attempt: AttemptFacts, *, num_tokens: int, num_new: int = 0) -> None:
        """From now on it is in the phase `kv_transfer` or `decode`.

        So many tokens are there, the new ones of which came with the news of the phase: they belong to decoding, but
        for the first token of all, which is the prompt's, also where it is still on its way from the prefill worker.
        """
        now_s, last = self._request.now_s(), self.phases[-1]
        num_before = max(num_tokens - num_new, 1) if name == "decode" else num_tokens
        self._leave(now_s, num_before)
        if name == "decode" and last.name == "prefill" and attempt.prefill_worker:
            # The pages were there as soon as this gateway heard of the first token: no part of it was to be seen.
            self._begin("kv_transfer", attempt, now_s).end_s = now_s
        self._begin(name, attempt, now_s)

    def moves(self, attempt: AttemptFacts, *, to: str, num_tokens: int) -> None:
        """Its pages go from the decode worker of the last phase to that of `attempt`."""
        giver = self.phases[-1]
        self._follows = _Follows(giver, "moved")
        self.goes_on("kv_transfer", attempt, num_tokens=num_tokens)
        source = giver.attempt.decode_worker if giver.attempt is not None else ""
        number = attempt.number
        said: dict[str, Value] = {"tandem.attempt": number, "tandem.from": source, "tandem.to": to}
        self._request.add_event("move", said)

    def has_token(self) -> None:
        """Its first token is there."""
        self.first_token_s = self._request.now_s()
        self._request.add_event("first_token", {"tandem.choice": self.choice})

    def has_second_token(self) -> None:
        """Its second token is there, which is the first one that the decode worker computes."""
        self.second_token_s = self._request.now_s()

    def must_wait(self, error: Exception, reason: str, *, num_tokens: int) -> None:
        """Its attempt ended of a reason after which it waits for workers again."""
        now_s, last = self._request.now_s(), self.phases[-1]
        last.error_type = type(error).__name__
        self.has_failed = self.has_failed or isinstance(error, TandemError)
        self._leave(now_s, num_tokens)
        self._follows = _Follows(last, reason)
        number = last.attempt_number + 1
        self.phases.append(_Phase("queue", telemetry.new_span_id(), number, now_s, follows=self._follows))

    def tried_again(self) -> None:
        """It may go on after its last attempt failed."""
        follows = self._follows
        assert follows is not None, "an attempt has failed"
        number = follows.earlier.attempt_number
        self._request.add_event("retry", {"tandem.attempt": number, "tandem.reason": follows.reason})

    def end(self, error: BaseException | None, *, num_tokens: int) -> None:
        """It is over."""
        self.ended_s = self._request.now_s()
        self._leave(self.ended_s, num_tokens)
        if error is not None:
            last = self.phases[-1]
            last.is_cancelled = _is_cancelled(error)
            if not last.is_cancelled:
                last.error_type = type(error).__name__
                self.has_failed = self.has_failed or _is_failure(error, was_placed=self.was_placed)

    def spans(self, context: TraceContext) -> list[Span]:
        """Its phases as spans under the request's."""
        return [
            Span(
                phase.name,
                TraceContext(context.trace_id, phase.span_id, True, context.state),
                context.span_id,
                self._request.unix_ns(phase.start_s),
                self._request.unix_ns(phase.end_s),
                self._described(phase),
                (),
                _links(context, phase),
                phase.error_type,
            )
            for phase in self.phases
        ]

    def _begin(self, name: str, attempt: AttemptFacts, now_s: float) -> _Phase:
        trace, span_id = attempt.trace, 0
        if trace is not None:
            span_id = telemetry.sibling(trace, _SIBLINGS[name]).span_id
        if not span_id or any(phase.span_id == span_id for phase in self.phases):
            span_id = telemetry.new_span_id()
        phase = _Phase(name, span_id, attempt.number, now_s, attempt=attempt, follows=self._follows)
        if name == "kv_transfer" and not attempt.is_move:
            phase.predicted_s = self._predicted_transfer_s
        self.phases.append(phase)
        return phase

    def _leave(self, now_s: float, num_tokens: int) -> None:
        phase = self.phases[-1]
        phase.end_s = now_s
        num_new, self._num_tokens = max(0, num_tokens - self._num_tokens), num_tokens
        if phase.name == "decode":
            phase.attributes["tandem.tokens"] = num_new
            phase.attributes["tandem.predicted_itl_s"] = self._predicted_itl_s
            phase.predicted_s = self._predicted_itl_s * num_new

    def _described(self, phase: _Phase) -> dict[str, Value]:
        said = {"tandem.attempt": phase.attempt_number, "tandem.choice": self.choice, **phase.attributes}
        if phase.attempt is not None:
            said |= _DESCRIPTIONS[phase.name](phase.attempt, phase.route)
        if phase.predicted_s is not None:
            said |= {"tandem.predicted_s": phase.predicted_s, "tandem.actual_s": phase.end_s - phase.start_s}
        if phase.is_cancelled:
            said["tandem.is_cancelled"] = True
        return said


def _describe_route(attempt: AttemptFacts, route: Route | None) -> dict[str, Value]:
    assert route is not None, "who is asked is on the way"
    return {
        "tandem.decode_worker": attempt.decode_worker,
        "tandem.prefill_worker": attempt.prefill_worker,
        "tandem.is_remote_prefill": route.is_remote,
        "tandem.reason": route.reason,
        "tandem.cached_tokens": route.num_cached_tokens,
        "tandem.predicted_ttft_s": route.predicted_ttft_s,
        "tandem.predicted_second_token_s": route.predicted_second_s,
        "tandem.predicted_itl_s": route.predicted_itl_s,
        **{f"tandem.route.{name}": value for name, value in route.inputs.items() if value},
    }


def _describe_prefill(attempt: AttemptFacts, route: Route | None) -> dict[str, Value]:
    said: dict[str, Value] = {
        "tandem.worker": attempt.prefill_worker or attempt.decode_worker,
        "tandem.prompt_tokens": attempt.num_prompt_tokens,
        "tandem.replayed_tokens": attempt.num_replayed_tokens,
    }
    if attempt.prefill_started is not None:
        said["tandem.cached_tokens"] = attempt.prefill_started.num_cached_tokens
        said["tandem.worker_queue_s"] = attempt.prefill_started.queue_s
    return said


def _describe_transfer(attempt: AttemptFacts, route: Route | None) -> dict[str, Value]:
    said: dict[str, Value] = {"tandem.to": attempt.decode_worker}
    if attempt.prefill_worker:
        said["tandem.from"] = attempt.prefill_worker
    moved = attempt.handed_off
    if moved is not None:
        said |= {
            "tandem.kv.pages": moved.num_pages,
            "tandem.kv.bytes": moved.num_bytes,
            "tandem.kv.transport": moved.transport,
            "tandem.kv.exposed_s": moved.exposed_s,
        }
    return said


def _describe_decode(attempt: AttemptFacts, route: Route | None) -> dict[str, Value]:
    return {"tandem.worker": attempt.decode_worker}


_DESCRIPTIONS = {
    "route": _describe_route,
    "prefill": _describe_prefill,
    "kv_transfer": _describe_transfer,
    "decode": _describe_decode,
}
_SIBLINGS = {"prefill": 0, "kv_transfer": KV_TRANSFER_SPAN, "decode": DECODE_SPAN}


def _links(context: TraceContext, phase: _Phase) -> tuple[Link, ...]:
    follows = phase.follows
    if follows is None:
        return ()
    said: dict[str, Value] = {"tandem.reason": follows.reason, "tandem.attempt": follows.earlier.attempt_number}
    return (Link(context._replace(span_id=follows.earlier.span_id), said),)


def _times(phases: list[_Phase]) -> dict[str, Value]:
    """Sums of the phases under the names that dashboards for vLLM's traces look for. Seconds."""
    spent = dict.fromkeys(("queue", "route", "prefill", "kv_transfer", "decode"), 0.0)
    for phase in phases:
        spent[phase.name] += phase.end_s - phase.start_s
    in_queue_s = spent["queue"] + spent["route"]
    in_model_s = spent["prefill"] + spent["kv_transfer"] + spent["decode"]
    return {
        "gen_ai.latency.time_in_queue": in_queue_s,
        "gen_ai.latency.time_in_model_prefill": spent["prefill"],
        "gen_ai.latency.time_in_model_decode": spent["decode"],
        "gen_ai.latency.time_in_model_inference": in_model_s,
        "gen_ai.latency.e2e": in_queue_s + in_model_s,
    }


def _is_cancelled(error: BaseException) -> bool:
    return isinstance(error, GeneratorExit | asyncio.CancelledError | RequestCancelled)


def _is_failure(error: BaseException, *, was_placed: bool) -> bool:
    """Whether it is nobody's wish: not one of a client that left, nor a refusal before workers took it."""
    if _is_cancelled(error):
        return False
    return was_placed or not isinstance(error, TandemError) or isinstance(error, InternalError)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
