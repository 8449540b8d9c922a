"""A request's spans: the phases of each of its answers, one after the other, and what happened in them.

    chat MODEL              from its arrival until its answer was sent
      queue                 it waits for workers
      route                 workers are asked to take it, until they have
      prefill               until its first token, or the next one after a failure, has arrived
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
from typing import NamedTuple

from gateway.observability.phases import (
    AnswerSpans,
    error_type_of,
    is_cancelled,
    is_failure,
    is_servers_fault,
    times_of,
    to_ns,
)
from services.runtime import status, telemetry
from services.runtime.clock import SYSTEM_CLOCK, Clock
from services.runtime.telemetry import Event, Link, Span, TraceContext, Value

MAX_EVENTS = 64
MAX_LINKS = 32
"""The most links of a request's span: any number of clients may attach to a request with a name."""


class Origin(NamedTuple):
    """Where a call came in: a route of HTTP or a method of gRPC. `is_streamed`: its answer comes as events."""

    http_route: str = ""
    rpc_method: str = ""
    is_streamed: bool = False

    def describe(self, error: BaseException | None, *, has_token: bool) -> dict[str, Value]:
        """Returns what was called and how it was answered; a status only where one was sent."""
        if self.rpc_method:
            said: dict[str, Value] = {"rpc.system.name": "grpc", "rpc.method": self.rpc_method}
            if not is_cancelled(error):
                said["rpc.response.status_code"] = "OK" if error is None else status.grpc_status(error).name
            return said
        said = {"http.request.method": "POST", "http.route": self.http_route}
        if error is None or (self.is_streamed and has_token):
            said["http.response.status_code"] = 200  # an error after the first token is an event of the stream
        elif not is_cancelled(error):
            said["http.response.status_code"] = status.http_status(error)
        return said


def name_of(described: Mapping[str, Value]) -> str:
    """Returns the name of a request's span by the conventions: the operation and the model.

    A model that does not exist is left out: names are what spans are counted by, and clients may write anything.
    """
    operation = str(described.get("gen_ai.operation.name", "request"))
    model = described.get("gen_ai.request.model") if "gen_ai.response.model" in described else None
    return f"{operation} {model}" if model else operation


class Tracing:
    """The spans of one gateway's requests. `slow_s`: the time from which one is always exported; 0: never."""

    def __init__(self, *, clock: Clock, slow_s: float = 0.0) -> None:
        self.clock = clock
        self.slow_s = slow_s

    def begin(self, parent: TraceContext | None, *, arrived_s: float, arrived_unix_ns: int) -> "RequestSpans":
        """Begins the spans of a request that has arrived; `parent` is its client's span."""
        context = telemetry.root(parent)
        if context is None:
            return NO_TRACE
        return RequestSpans(self, context, parent, arrived_s=arrived_s, arrived_unix_ns=arrived_unix_ns)

    def refuse(
        self,
        parent: TraceContext | None,
        error: BaseException,
        *,
        arrived_s: float,
        attributes: Mapping[str, Value],
        origin: Origin | None = None,
    ) -> None:
        """Notes that a request has ended before it was accepted: a span without phases."""
        arrived_unix_ns = self.clock.unix_ns() - to_ns(self.clock.monotonic() - arrived_s)
        spans = self.begin(parent, arrived_s=arrived_s, arrived_unix_ns=arrived_unix_ns)
        spans.origin = origin
        spans.finish(error, lambda: attributes)


class RequestSpans:
    """One request's spans, from its arrival to its end; they are sent at its end or not at all.

    While telemetry is off, or there is no trace, it records nothing and only passes its client's context on.
    """

    __slots__ = (
        *("_answers", "_arrived_s", "_arrived_unix_ns", "_clock", "_events", "_links", "_parent", "_tracing"),
        *("context", "origin"),
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
        self.origin: Origin | None = None
        """Where its call came in; None: it continues a request that a gateway accepted before."""
        self._tracing = tracing if telemetry.is_on() and context is not None else None
        """The gateway's tracing; None: nothing is recorded, or no longer."""
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
    def exported_trace_id(self) -> str:
        """32 hex digits of the trace, if it is already certain that its spans are exported; else empty."""
        context = self.context
        return f"{context.trace_id:032x}" if context is not None and self._tracing and context.is_sampled else ""

    @property
    def told_traceparent(self) -> str:
        """The name of this request's span as the client is told it; empty where no span is recorded here."""
        return self.traceparent if self._tracing is not None else ""

    def note_origin(self, origin: Origin | None) -> None:
        """Notes where its call came in."""
        if self._tracing is not None:
            self.origin = origin

    def answer(self, choice: int, model: str) -> AnswerSpans | None:
        """Returns where one of its answers writes its phases down; None: nowhere.

        If another model was asked for this choice before, the answer begins where that one's ended.
        """
        if self._tracing is None:
            return None
        ended_s = [earlier.ended_s for earlier in self._answers if earlier.choice == choice]
        answer = AnswerSpans(self, choice, model, max(ended_s, default=self._arrived_s))
        self._answers.append(answer)
        return answer

    def for_attempt(self) -> TraceContext | None:
        """Returns the context that an attempt's workers get: with new ids of its phases, for every attempt."""
        context = self.context
        if context is None or self._tracing is None:
            return context
        is_sampled = context.is_sampled or self._is_kept or self._is_slow(self.now_s())
        return context._replace(span_id=telemetry.new_span_id(), is_sampled=is_sampled)

    def add_event(self, name: str, attributes: Mapping[str, Value]) -> None:
        """Notes that something happens now."""
        if self._tracing is not None and len(self._events) < MAX_EVENTS:
            self._events.append(Event(name, self.unix_ns(self.now_s()), attributes))

    def add_link(self, context: TraceContext | None, reason: str) -> None:
        """Links it to another request's span; `reason` is `resumed` or `attached`."""
        if self._tracing is not None and context is not None and len(self._links) < MAX_LINKS:
            self._links.append(Link(context, {"tandem.reason": reason}))

    def now_s(self) -> float:
        """Returns the time of the clock of all phases."""
        return self._clock.monotonic()

    def unix_ns(self, at_s: float) -> int:
        """Returns a moment of the monotonic clock as spans tell it."""
        return self._arrived_unix_ns + to_ns(at_s - self._arrived_s)

    def at_s(self, unix_ns: int) -> float:
        """Returns the moment of the monotonic clock that spans tell as `unix_ns`."""
        return self._arrived_s + (unix_ns - self._arrived_unix_ns) / 1e9

    def finish(self, error: BaseException | None, describe: Callable[[], Mapping[str, Value]]) -> None:
        """Notes that the request is over. Sends its spans, if it is in the sample or has to be looked at.

        `describe` gives the request's attributes, if they are needed.
        """
        context = self.context
        if self._tracing is None or context is None:
            return
        if error is None and not self._answers:
            self._tracing = None  # nothing was left to do, or it continues as another request
            return
        ended_s = self.now_s()
        was_placed = any(answer.was_placed for answer in self._answers)
        is_failed = error is not None and is_failure(error, was_placed=was_placed)
        if context.is_sampled or is_failed or self._is_kept or self._is_slow(ended_s):
            telemetry.export(self._spans(context._replace(is_sampled=True), ended_s, error, describe()))
        self._tracing = None
        self._answers.clear()

    def _spans(
        self, context: TraceContext, ended_s: float, error: BaseException | None, described: Mapping[str, Value]
    ) -> list[Span]:
        for answer in self._answers:
            if not answer.ended_s:  # the task that ran it has left it
                answer.end(asyncio.CancelledError(), num_tokens=0)
        last = max(self._answers, key=lambda answer: answer.ended_s, default=None)
        if last is not None:
            last.phases[-1].end_s = ended_s  # what is left of the request is the sending of this one's end
            phases = [phase for answer in self._answers if answer.choice == last.choice for phase in answer.phases]
            described = {**described, **times_of(phases), **self._predictions(last), **last.said_of_request}
        if self.origin is not None:
            has_token = any(answer.first_token_s is not None for answer in self._answers)
            described = {**described, **self.origin.describe(error, has_token=has_token)}
        request = Span(
            name_of(described),
            context,
            0 if self._parent is None else self._parent.span_id,
            self._arrived_unix_ns,
            self.unix_ns(ended_s),
            attributes=described,
            events=self._events,
            links=self._links,
            error_type=error_type_of(error),
            is_failed=is_servers_fault(error),
            is_server=True,
            has_remote_parent=True,
        )
        return [*(span for answer in self._answers for span in answer.spans(context)), request]

    @property
    def _is_kept(self) -> bool:
        return any(answer.has_failed for answer in self._answers)

    def _is_slow(self, now_s: float) -> bool:
        return self._tracing is not None and 0 < self._tracing.slow_s <= now_s - self._arrived_s

    def _predictions(self, answer: AnswerSpans) -> dict[str, Value]:
        """Returns what was predicted of its first and second token, and when they came."""
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
"""The spans of requests that are not traced."""


@contextlib.contextmanager
def attached(
    parent: TraceContext | None, request: RequestSpans, traceparent: str, *, clock: Clock = SYSTEM_CLOCK
) -> Iterator[str]:
    """Records the span `attach`, of a client that reads the answer of a request which another client began.

    `traceparent` names that request's span. The two spans link to one another, since they are of different traces.
    Yields the name of the new span; empty where there is no trace.
    """
    context = telemetry.root(parent) if telemetry.is_on() else None
    if context is None:
        yield ""
        return
    began_s, began_unix_ns = clock.monotonic(), clock.unix_ns()
    request.add_link(context, "attached")
    known = telemetry.extract(traceparent)
    ended_by: Exception | None = None
    try:
        yield telemetry.inject(context)
    except Exception as error:
        ended_by = error
        raise
    finally:
        if context.is_sampled:
            span = Span(
                "attach",
                context,
                0 if parent is None else parent.span_id,
                began_unix_ns,
                began_unix_ns + to_ns(clock.monotonic() - began_s),
                links=() if known is None else (Link(known, {"tandem.reason": "attached"}),),
                error_type=error_type_of(ended_by),
                is_failed=is_servers_fault(ended_by),
                is_server=True,
                has_remote_parent=True,
            )
            telemetry.export([span])
