"""The phases of one answer: a few numbers each while it runs, spans when its request is over.

An answer is in one phase at any time, and each begins when the one before it ends. Knows neither when a request's spans
are exported nor what else the request's own span says; `gateway.observability.tracing` does.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from gateway.topology.events import DecodeStarted, HandedOff, Heard, PrefillStarted, PullOrder
from services.runtime import status, telemetry
from services.runtime.errors import InternalError, RequestCancelled, TandemError
from services.runtime.telemetry import DECODE_SPAN, KV_TRANSFER_SPAN, Link, Span, TraceContext, Value
from services.scheduling.routing.route import Route


class AttemptFacts(msgspec.Struct):
    """What spans tell of an attempt. The attempt keeps the facts from `prefill_worker` on up to date while it runs."""

    number: int
    trace: TraceContext | None
    num_prompt_tokens: int
    num_replayed_tokens: int
    decode_worker: str
    is_move: bool
    prefill_worker: str = ""
    """The prefill worker's id; empty while none was asked."""
    pull: PullOrder | None = None
    """What the prefill worker is to fetch of the prompt."""
    prefill_started: PrefillStarted | None = None
    decode_started: DecodeStarted | None = None
    handed_off: HandedOff | None = None

    @property
    def heard(self) -> Heard | None:
        """What was heard of it, for the workers' spans; None: they have none."""
        if self.trace is None or not self.trace.is_sampled:
            return None
        return Heard(self.prefill_started is not None, self.decode_started is not None)

    def began_unix_ns(self, phase: str) -> int:
        """Returns when a phase began where it was done, by the clock here; 0: this is not known."""
        told = {"prefill": self.prefill_started, "decode": self.decode_started}.get(phase)
        return 0 if told is None else told.began_unix_ns


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
    is_failed: bool = False
    is_cancelled: bool = False
    attributes: dict[str, Value] = field(default_factory=dict)

    def note_error(self, error: BaseException) -> None:
        """Notes what ended the phase."""
        self.error_type, self.is_failed = error_type_of(error), is_servers_fault(error)
        self.is_cancelled = is_cancelled(error)


@dataclass(frozen=True, slots=True)
class _Follows:
    """What an attempt comes after: the phase that failed, or that a move ended, and why."""

    earlier: _Phase
    reason: str


class RequestTimes(Protocol):
    """The part of a request's spans that its answers share: its clock and its events."""

    def now_s(self) -> float:
        """Returns the time of the clock of all phases."""
        ...

    def unix_ns(self, at_s: float) -> int:
        """Returns a moment of that clock as spans tell it."""
        ...

    def at_s(self, unix_ns: int) -> float:
        """Returns the moment of that clock that spans tell as `unix_ns`."""
        ...

    def add_event(self, name: str, attributes: Mapping[str, Value]) -> None:
        """Notes that something happens now."""
        ...


class AnswerSpans:
    """The phases of one answer; `Requests.run` writes them down."""

    def __init__(self, request: RequestTimes, choice: int, model: str, began_s: float) -> None:
        self.choice = choice
        self.model = model
        self.phases = [_Phase("queue", telemetry.new_span_id(), 1, began_s)]
        self.has_failed = False
        """Whether an attempt of it has failed."""
        self.was_placed = False
        self.ended_s = 0.0
        self.first_token_s: float | None = None
        self.predicted_ttft_s: float | None = None
        self.second_token_s: float | None = None
        self.said_of_request: dict[str, Value] = {}
        """What the request's own span says beside."""
        self.predicted_second_s: float | None = None
        self._request = request
        self._predicted_itl_s = 0.0
        self._predicted_transfer_s: float | None = None
        self._num_tokens = 0
        """The tokens that the answer had when its last phase began."""
        self._follows: _Follows | None = None

    def waits(self, *, num_ahead: int, service_class: str) -> None:
        """Notes that it has to wait in the queue, behind `num_ahead` others."""
        self.phases[-1].attributes |= {"tandem.queue_position": num_ahead, "tandem.service_class": service_class}

    def placed(self, attempt: AttemptFacts, route: Route, *, asked_s: float, predicted_queue_s: float | None) -> None:
        """Notes that workers have taken it, after they were asked at `asked_s`."""
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

    def computes(self, attempt: AttemptFacts, attributes: Mapping[str, Value]) -> None:
        """Notes that workers have begun with its prompts, of which nothing is decoded."""
        now_s = self._request.now_s()
        self._leave(now_s, 0)
        self.was_placed = True
        self._begin("prefill", attempt, now_s).attributes |= attributes

    def goes_on(self, name: str, attempt: AttemptFacts, *, num_tokens: int, num_new: int = 0) -> None:
        """Notes that it enters the phase `kv_transfer` or `decode`.

        The answer has `num_tokens` by now, `num_new` of which came with the news of the phase. These count as decoded,
        except an answer's very first token: that one belongs to the prompt, even while it is still on its way from the
        prefill worker.
        """
        now_s, last = self._request.now_s(), self.phases[-1]
        num_before = max(num_tokens - num_new, 1) if name == "decode" else num_tokens
        self._leave(now_s, num_before)
        if name == "decode" and last.name == "prefill" and attempt.prefill_worker:
            # The pages had arrived before this gateway heard of the first token, so no part of the transfer was
            # visible.
            self._begin("kv_transfer", attempt, now_s).end_s = now_s
        self._begin(name, attempt, now_s)

    def moves(self, attempt: AttemptFacts, *, to: str, num_tokens: int, reason: str) -> None:
        """Notes that its pages go from the decode worker of the last phase to that of `attempt`, and why."""
        giver = self.phases[-1]
        self._follows = _Follows(giver, "moved")
        self.goes_on("kv_transfer", attempt, num_tokens=num_tokens)
        source = giver.attempt.decode_worker if giver.attempt is not None else ""
        number = attempt.number
        said: dict[str, Value] = {"tandem.attempt": number, "tandem.from": source, "tandem.to": to}
        said["tandem.reason"] = reason
        self._request.add_event("move", said)

    def has_token(self) -> None:
        """Notes that its first token has arrived."""
        self.first_token_s = self._request.now_s()
        self._request.add_event("first_token", {"tandem.choice": self.choice})

    def has_second_token(self) -> None:
        """Notes that its second token has arrived, which is the first one that the decode worker computes."""
        self.second_token_s = self._request.now_s()

    def must_wait(self, error: Exception, reason: str, *, num_tokens: int) -> None:
        """Notes that its attempt ended and that it waits for workers again, and the reason."""
        now_s, last = self._request.now_s(), self.phases[-1]
        last.note_error(error)
        self.has_failed = self.has_failed or isinstance(error, TandemError)
        self._leave(now_s, num_tokens)
        self._follows = _Follows(last, reason)
        number = last.attempt_number + 1
        self.phases.append(_Phase("queue", telemetry.new_span_id(), number, now_s, follows=self._follows))

    def tried_again(self) -> None:
        """Notes that it is tried again after its last attempt failed."""
        follows = self._follows
        assert follows is not None, "an attempt has failed"
        number = follows.earlier.attempt_number
        self._request.add_event("retry", {"tandem.attempt": number, "tandem.reason": follows.reason})

    def end(self, error: BaseException | None, *, num_tokens: int) -> None:
        """Notes that it is over."""
        self.ended_s = self._request.now_s()
        self._leave(self.ended_s, num_tokens)
        if error is not None:
            last = self.phases[-1]
            last.note_error(error)
            if not last.is_cancelled:
                self.has_failed = self.has_failed or is_failure(error, was_placed=self.was_placed)
        self._begin_as_told()

    def spans(self, context: TraceContext) -> list[Span]:
        """Returns its phases as spans under the request's."""
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
                phase.is_failed,
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

    def _begin_as_told(self) -> None:
        """Has each phase begin when the worker that did it began, if that was before this gateway heard of it.

        News takes its time, so the phases before it end as much earlier; none begins before its attempt's workers were
        asked.
        """
        for place, phase in enumerate(self.phases):
            began_unix_ns = 0 if phase.attempt is None else phase.attempt.began_unix_ns(phase.name)
            if not began_unix_ns:
                continue
            asked = next(i for i, one in enumerate(self.phases) if one.attempt is phase.attempt)
            first = max(0, asked if self.phases[asked].name == "route" else asked - 1)
            at_s = max(self._request.at_s(began_unix_ns), self.phases[first].start_s)
            for earlier, later in zip(self.phases[first:place], self.phases[first + 1 : place + 1], strict=True):
                earlier.end_s, later.start_s = min(earlier.end_s, at_s), min(later.start_s, at_s)

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
    assert route is not None, "workers are asked along a route"
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
        if attempt.pull is not None:
            said["tandem.pulled_tokens"] = attempt.prefill_started.num_pulled_tokens
            said["tandem.pulled_bytes"] = attempt.prefill_started.pulled_bytes
            said["tandem.pull_s"] = attempt.prefill_started.pull_s
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


def times_of(phases: list[_Phase]) -> dict[str, Value]:
    """Returns the sums of the phases under the names that dashboards for vLLM's traces look for. Seconds."""
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


def error_type_of(error: BaseException | None) -> str:
    """Returns the name of the error's class; empty where nothing failed or the client left."""
    return "" if error is None or is_cancelled(error) else type(error).__name__


def is_servers_fault(error: BaseException | None) -> bool:
    """Returns whether it is the server's fault and not its client's, as OpenTelemetry's conventions tell them apart."""
    return error is not None and not is_cancelled(error) and status.http_status(error) >= 500


def is_cancelled(error: BaseException | None) -> bool:
    """Returns whether the client left or asked to stop, or nobody reads the answer."""
    return isinstance(error, GeneratorExit | asyncio.CancelledError | RequestCancelled)


def is_failure(error: BaseException, *, was_placed: bool) -> bool:
    """Returns whether the request failed: its client did not leave, and it was not refused before workers took it."""
    if is_cancelled(error):
        return False
    return was_placed or not isinstance(error, TandemError) or isinstance(error, InternalError)


def to_ns(seconds: float) -> int:
    """Returns a time in nanoseconds."""
    return round(seconds * 1e9)
