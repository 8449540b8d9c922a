"""Traces: spans as plain records, sent to an OTLP collector by a thread of its own. Knows no span's name.

A span is written down when it is over: nothing has to be ended, so nothing can be left open. There is no "current" span
either: whoever knows a request has its `TraceContext`. Records go into a bounded queue, and become messages in the
exporter's thread. That costs a third of what the SDK of OpenTelemetry takes for the same (`benchmarks/tracing.py`),
whose format and rules these are.

Without `setup` nothing is recorded, and a client's context passes through as it came.
"""

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import grpc
import msgspec
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from services.runtime import rpc

EXPORT_TIMEOUT_S = 2.0
SHUTDOWN_TIMEOUT_S = 3.0
MAX_QUEUED_SPANS = 8192
MAX_BATCH_SPANS = 512
EXPORT_INTERVAL_S = 0.5
SPANS_IN_A_ROW = 16
"""After so many the thread lets go of the interpreter, for which the event loop would wait 5 ms otherwise."""
MAX_TEXT_CHARS = 256
"""Of a text in a span; the rest is cut off."""
MAX_STATE_CHARS = 512
"""Of a `tracestate`; W3C asks for no more to be passed on."""
KV_TRANSFER_SPAN, DECODE_SPAN = 1, 2
"""An attempt's `traceparent` names its span `prefill`; the ids of the spans `kv_transfer` and `decode` follow it."""

Value = str | bool | int | float | Sequence[str]
"""Of an attribute."""

_MASK_64 = 2**64 - 1
_HEX = frozenset("0123456789abcdef-")

logger = logging.getLogger(__name__)


class TraceContext(NamedTuple):
    """A span's place: W3C's trace context. `is_sampled`: whoever has a part in it exports its spans."""

    trace_id: int
    span_id: int
    is_sampled: bool
    state: str = ""
    """`tracestate`, which is passed on as it came."""


class Event(NamedTuple):
    """Something that happened at one moment of a span."""

    name: str
    unix_ns: int
    attributes: Mapping[str, Value] = {}


class Link(NamedTuple):
    """A span that this one has to do with without being its child."""

    context: TraceContext
    attributes: Mapping[str, Value] = {}


class Span(msgspec.Struct, frozen=True):
    """A span that is over. `parent_id` 0: it is the root. An `error_type` makes it a failed one."""

    name: str
    context: TraceContext
    parent_id: int
    start_unix_ns: int
    end_unix_ns: int
    attributes: Mapping[str, Value] = {}
    events: Sequence[Event] = ()
    links: Sequence[Link] = ()
    error_type: str = ""
    is_server: bool = False


class Exporter:
    """A bounded queue of spans and the thread that sends them. `sample`: part of the new traces that are exported.

    A collector that is slow or away never delays anybody: what does not fit into the queue, or is not taken by it
    within EXPORT_TIMEOUT_S, is dropped and counted.
    """

    def __init__(self, service_name: str, otlp_url: str, *, instance_id: str = "", sample: float = 1.0) -> None:
        self.num_exported = 0
        self._num_not_queued = 0
        self._num_not_taken = 0
        self._sampled_below = round(sample * 2**64)
        self._queue: deque[Span] = deque()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._resource = resource_pb2.Resource()
        names = {"service.name": service_name} | ({"service.instance.id": instance_id} if instance_id else {})
        _describe(self._resource.attributes, names)
        target = otlp_url.split("://", 1)[-1].split("/", 1)[0]
        self._channel = rpc.make_outside_channel(target, has_tls=otlp_url.startswith("https"))
        self._stub = trace_service_pb2_grpc.TraceServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Spans that no collector has taken and none will."""
        return self._num_not_queued + self._num_not_taken

    def is_in_sample(self, trace_id: int) -> bool:
        """The decision for a new trace: the same in every process (OpenTelemetry's TraceIdRatioBased)."""
        return trace_id & _MASK_64 < self._sampled_below

    def add(self, spans: Sequence[Span]) -> None:
        """Takes spans from any thread, all or none of them."""
        if self._closing.is_set() or len(self._queue) + len(spans) > MAX_QUEUED_SPANS:
            self._num_not_queued += len(spans)
            return
        self._queue.extend(spans)
        if len(self._queue) >= MAX_BATCH_SPANS:
            self._wake.set()

    def close(self) -> None:
        """Sends what is queued, or gives it up after SHUTDOWN_TIMEOUT_S."""
        self._closing.set()
        self._wake.set()
        self._thread.join(SHUTDOWN_TIMEOUT_S)
        self._channel.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wake.wait(EXPORT_INTERVAL_S)
            self._wake.clear()
            while self._queue:
                is_sent = self._send([self._queue.popleft() for _ in range(min(MAX_BATCH_SPANS, len(self._queue)))])
                if self._closing.is_set() and not is_sent:
                    return

    def _send(self, spans: list[Span]) -> bool:
        try:
            scope_spans = trace_pb2.ScopeSpans(scope=_SCOPE, spans=list(_messages(spans)))
            resource_spans = trace_pb2.ResourceSpans(resource=self._resource, scope_spans=[scope_spans])
            request = trace_service_pb2.ExportTraceServiceRequest(resource_spans=[resource_spans])
            self._stub.Export(request, timeout=EXPORT_TIMEOUT_S, wait_for_ready=True)
        except (grpc.RpcError, ValueError, TypeError) as error:  # no message can be made, or the channel was closed
            self._num_not_taken += len(spans)
            logger.debug("spans were not taken", extra={"spans": len(spans), "reason": type(error).__name__})
            return False
        self.num_exported += len(spans)
        return True


def setup(service_name: str, otlp_url: str | None, *, instance_id: str = "", sample: float = 1.0) -> None:
    """Sends this process's spans to an OTLP gRPC collector such as http://127.0.0.1:4317. None: no spans.

    Called once, in `__main__`, after `rpc.set_identity`. `sample`, from 0 to 1: see `root`.
    """
    global _exporter
    if otlp_url is None:
        return
    if _exporter is not None:
        raise RuntimeError("telemetry is already set up")
    _exporter = Exporter(service_name, otlp_url, instance_id=instance_id, sample=sample)


def shutdown() -> None:
    """Sends what is queued and stops; gives up after SHUTDOWN_TIMEOUT_S."""
    global _exporter
    exporter, _exporter = _exporter, None
    if exporter is not None:
        exporter.close()


def is_on() -> bool:
    """Whether spans go anywhere."""
    return _exporter is not None


def counts() -> tuple[int, int]:
    """Spans that a collector took, and those that were dropped."""
    return (0, 0) if _exporter is None else (_exporter.num_exported, _exporter.num_dropped)


def export(spans: Sequence[Span]) -> None:
    """Sends spans that are over; returns at once."""
    if _exporter is not None:
        _exporter.add(spans)


def record(
    name: str,
    parent: TraceContext,
    start_unix_ns: int,
    end_unix_ns: int,
    *,
    attributes: Mapping[str, Value] | None = None,
    events: Sequence[Event] = (),
    error: BaseException | None = None,
) -> None:
    """Sends one span under a parent that may be in another process."""
    export(
        [
            Span(
                name,
                parent._replace(span_id=new_span_id()),
                parent.span_id,
                start_unix_ns,
                end_unix_ns,
                attributes or {},
                events,
                (),
                "" if error is None else type(error).__name__,
            )
        ]
    )


def root(parent: TraceContext | None) -> TraceContext | None:
    """The context of a new span that begins a trace, or this process's part in its parent's. None: there is no trace.

    A parent's decision whether to sample is kept; without a parent the trace's id decides (OpenTelemetry's ParentBased
    over TraceIdRatioBased). While telemetry is off it is the parent itself, so that it is passed on.
    """
    if _exporter is None:
        return parent
    if parent is not None:
        return parent._replace(span_id=new_span_id())
    trace_id = random.getrandbits(128) or 1
    return TraceContext(trace_id, new_span_id(), _exporter.is_in_sample(trace_id))


def sampled(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """The context that a message brought, if spans are to be recorded under it."""
    if _exporter is None or not traceparent:
        return None
    context = extract(traceparent, tracestate)
    return context if context is not None and context.is_sampled else None


def new_span_id() -> int:
    """Drawn at random, like ids of traces: nothing depends on their being hard to guess."""
    return random.getrandbits(64) or 1


def sibling(context: TraceContext, number: int) -> TraceContext:
    """The context whose span id comes so many after this one's: one id that travels names several spans."""
    return context._replace(span_id=(context.span_id + number) & _MASK_64 or 1)


def inject(context: TraceContext | None) -> str:
    """W3C's `traceparent` for a message; empty where there is no trace."""
    if context is None:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.is_sampled):02x}"


def extract(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """The span that a message names as its parent; None where it names none or nonsense.

    A `tracestate` that is too long or is no plain text is left out, as W3C's Trace Context says.
    """
    parts = traceparent.strip().split("-")
    widths = [len(part) for part in parts[:4]]
    if widths != [2, 32, 16, 2] or parts[0] == "ff" or (parts[0] == "00" and len(parts) != 4):
        return None
    if not _HEX.issuperset("-".join(parts[:4])):
        return None
    trace_id, span_id = int(parts[1], 16), int(parts[2], 16)
    if not trace_id or not span_id:
        return None
    is_fit = len(tracestate) <= MAX_STATE_CHARS and tracestate.isascii() and tracestate.isprintable()
    return TraceContext(trace_id, span_id, bool(int(parts[3], 16) & 1), tracestate if is_fit else "")


def _messages(spans: list[Span]) -> Iterator[trace_pb2.Span]:
    for number, span in enumerate(spans):
        if number % SPANS_IN_A_ROW == 0:
            time.sleep(0)
        yield _message(span)


def _message(span: Span) -> trace_pb2.Span:
    """Fields are set one by one: that takes a third of the time of constructors within constructors."""
    context = span.context
    message = trace_pb2.Span(
        trace_id=context.trace_id.to_bytes(16),
        span_id=context.span_id.to_bytes(8),
        trace_state=context.state,
        parent_span_id=span.parent_id.to_bytes(8) if span.parent_id else b"",
        flags=int(context.is_sampled),
        name=span.name,
        kind=trace_pb2.Span.SPAN_KIND_SERVER if span.is_server else trace_pb2.Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=span.start_unix_ns,
        end_time_unix_nano=span.end_unix_ns,
    )
    _describe(message.attributes, span.attributes)
    if span.error_type:
        _describe(message.attributes, {"error.type": span.error_type})
        message.status.code = trace_pb2.Status.STATUS_CODE_ERROR
    for event in span.events:
        told = message.events.add(name=event.name, time_unix_nano=event.unix_ns)
        _describe(told.attributes, event.attributes)
    for link in span.links:
        other = link.context
        linked = message.links.add(
            trace_id=other.trace_id.to_bytes(16), span_id=other.span_id.to_bytes(8), trace_state=other.state
        )
        _describe(linked.attributes, link.attributes)
    return message


class _Pairs(Protocol):
    """Attributes within a message."""

    def add(self) -> common_pb2.KeyValue: ...


def _describe(pairs: _Pairs, attributes: Mapping[str, Value]) -> None:
    for name, value in attributes.items():
        pair = pairs.add()
        pair.key = name
        _set(pair.value, value)


def _set(message: common_pb2.AnyValue, value: Value) -> None:
    if isinstance(value, str):
        message.string_value = value[:MAX_TEXT_CHARS]
    elif isinstance(value, bool):
        message.bool_value = value
    elif isinstance(value, int):
        message.int_value = value
    elif isinstance(value, float):
        message.double_value = value
    else:
        for each in value:
            _set(message.array_value.values.add(), each)


_SCOPE = common_pb2.InstrumentationScope(name="tandem")
_exporter: Exporter | None = None
