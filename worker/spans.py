"""The spans that a worker records for an attempt. They are kept until it ends, in times of the gateway's clock.

Their parents are the gateway's phases, and a span must lie within its parent. Times are therefore corrected by the
clock offset to the gateway. Events that the gateway has not received when it gives up the attempt, and later work, are
omitted.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kv_transfer.send_link import HandoffStats
from protos import worker_pb2
from services.runtime import telemetry
from services.runtime.errors import RequestCancelled
from services.runtime.telemetry import DECODE_SPAN, Event, Link, Span, TraceContext, Value
from worker.attempts import AttemptSpec

CHUNK, SENDING, STEPS = "prefill.chunk", "kv_transfer.send", "decode.steps"


class AttemptSpans:
    """The spans of one attempt. `trace` identifies the gateway's span `prefill`. If it is None, nothing is recorded.

    `request_span_id` is the ID of the request's span, or 0 if unknown. `clock_ahead_ns` is the local clock minus the
    gateway's clock.
    """

    def __init__(self, trace: TraceContext | None, *, request_span_id: int = 0, clock_ahead_ns: int = 0) -> None:
        self._trace = trace
        self._request_span_id = request_span_id
        self._clock_ahead_ns = clock_ahead_ns
        self._kept: list[Span] = []
        self._given_up: worker_pb2.Cancel | None = None

    @classmethod
    def of(cls, spec: AttemptSpec[Any], clock: worker_pb2.SpanClock, *, received_unix_ns: int) -> "AttemptSpans":
        """Returns the spans of an attempt that arrived at `received_unix_ns`, in local time."""
        trace = telemetry.sampled(spec.traceparent, spec.tracestate)
        ahead_ns = clock_ahead_ns(clock, received_unix_ns)
        return cls(trace, request_span_id=spec.request_span_id, clock_ahead_ns=ahead_ns)

    @property
    def are_kept(self) -> bool:
        """Returns whether spans are recorded."""
        return self._trace is not None

    def told_unix_ns(self, unix_ns: int) -> int:
        """Converts a local time to the gateway's clock. Returns 0 if nothing is recorded."""
        return 0 if self._trace is None else unix_ns - self._clock_ahead_ns

    def chunk(self, start_unix_ns: int, end_unix_ns: int, *, start: int, num_tokens: int) -> None:
        """Records a child of `prefill` for the step that computed `num_tokens` of a prompt from position `start`."""
        if self._trace is not None:
            attributes = {"tandem.start": start, "tandem.tokens": num_tokens}
            self._keep(_span(CHUNK, self._trace, (start_unix_ns, end_unix_ns), attributes=attributes))

    def sending(
        self,
        start_unix_ns: int,
        end_unix_ns: int,
        *,
        sent: HandoffStats | None = None,
        error: BaseException | None = None,
        is_move: bool = False,
    ) -> None:
        """Records the transfer of pages, from the first page sent to the commit or the error that ended it.

        The transfer outlasts a single phase. Its parent is therefore the request, and it links to the phase in which it
        started.
        """
        if self._trace is None:
            return
        attributes: dict[str, Value] = {}
        if sent is not None:
            attributes = {
                "tandem.kv.pages": sent.num_pages,
                "tandem.kv.bytes": sent.num_bytes,
                "tandem.kv.transport": sent.transport,
                "tandem.kv.exposed_s": sent.exposed_s,
            }
            if sent.carried is not None:
                attributes["tandem.kv.gb_per_s"] = sent.carried.num_bytes / sent.carried.time_s / 1e9
        if isinstance(error, asyncio.CancelledError | RequestCancelled):
            attributes["tandem.is_cancelled"], error = True, None
        phase = telemetry.sibling(self._trace, DECODE_SPAN if is_move else 0)
        parent = phase._replace(span_id=self._request_span_id) if self._request_span_id else phase
        links = (Link(phase),) if self._request_span_id else ()
        times = (start_unix_ns, end_unix_ns)
        self._keep(_span(SENDING, parent, times, attributes=attributes, error=error), links=links)

    def steps(
        self,
        start_unix_ns: int,
        end_unix_ns: int,
        *,
        attributes: Mapping[str, Value],
        events: Sequence[Event] = (),
        error: BaseException | None = None,
    ) -> None:
        """Records the decode steps of the attempt, from the start of the first to the end of the last."""
        if self._trace is not None:
            parent = telemetry.sibling(self._trace, DECODE_SPAN)
            times = (start_unix_ns, end_unix_ns)
            self._keep(_span(STEPS, parent, times, attributes=attributes, error=error), events=events)

    def give_up(self, cancel: worker_pb2.Cancel) -> None:
        """Records that the gateway gave up the attempt, and which events it had received."""
        if cancel.sent_unix_ns:
            self._given_up = cancel

    def export(self) -> None:
        """Exports the recorded spans that have a parent in the gateway's trace. Call it when the attempt ends."""
        kept, self._kept = self._kept, []
        telemetry.export(kept if self._given_up is None else _within(kept, self._given_up))

    def _keep(self, span: Span, *, events: Sequence[Event] = (), links: Sequence[Link] = ()) -> None:
        """Stores a span until the attempt ends, with its times and its events' times converted from the local clock."""
        ahead_ns = self._clock_ahead_ns
        kept = msgspec.structs.replace(
            span,
            start_unix_ns=span.start_unix_ns - ahead_ns,
            end_unix_ns=span.end_unix_ns - ahead_ns,
            events=[event._replace(unix_ns=event.unix_ns - ahead_ns) for event in events],
            links=links,
        )
        self._kept.append(kept)


def _span(
    name: str,
    parent: TraceContext,
    times_unix_ns: tuple[int, int],
    *,
    attributes: Mapping[str, Value],
    error: BaseException | None = None,
) -> Span:
    return Span(
        name,
        parent._replace(span_id=telemetry.new_span_id()),
        parent.span_id,
        *times_unix_ns,
        attributes,
        error_type="" if error is None else type(error).__name__,
        is_failed=error is not None,
        has_remote_parent=True,
    )


def clock_ahead_ns(told: worker_pb2.SpanClock, received_unix_ns: int) -> int:
    """Returns the estimated offset of the local clock: local minus gateway.

    The offset lies between two bounds, given by the fastest message to the gateway and by this message from it. If both
    bounds allow zero, the clocks are assumed to be equal: the difference is then the latency of the messages.
    """
    if not told.sent_unix_ns:
        return 0
    most_ns = received_unix_ns - told.sent_unix_ns
    return 0 if told.ahead_ns <= 0 <= most_ns else min(told.ahead_ns, most_ns)


def _within(spans: Sequence[Span], given_up: worker_pb2.Cancel) -> list[Span]:
    heard = {CHUNK: given_up.has_heard_prefill, STEPS: given_up.has_heard_decode, SENDING: True}
    last_unix_ns = given_up.sent_unix_ns
    return [
        span if span.end_unix_ns <= last_unix_ns else _cut(span, last_unix_ns)
        for span in spans
        if heard[span.name] and span.start_unix_ns <= last_unix_ns
    ]


def _cut(span: Span, end_unix_ns: int) -> Span:
    return msgspec.structs.replace(span, end_unix_ns=end_unix_ns)
