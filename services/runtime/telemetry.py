"""Traces: spans as plain records, and the W3C contexts that join them across processes. Knows no span's name.

A span is written down when it is over: nothing has to be ended, so nothing can be left open. No span is "current"
either: each request has its `TraceContext`. Whether a request is sampled is decided before anything is recorded of it.
`services.runtime.otlp` makes OpenTelemetry's finished spans of the records, and its SDK exports them.

Without `setup`, or where it finds traces turned off, nothing is recorded, and a client's context passes through as it
came.
"""

import os
import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from services.runtime.errors import ConfigError

MAX_STATE_CHARS = 512
"""Longest `tracestate` that is passed on, as long as W3C asks for."""
KV_TRANSFER_SPAN, DECODE_SPAN = 1, 2
"""An attempt's `traceparent` names its span `prefill`; the ids of the spans `kv_transfer` and `decode` follow it."""

Value = str | bool | int | float | Sequence[str]
"""Value of an attribute."""
HeaderReader = Callable[[Callable[[str], str]], tuple[str, str]]
"""From a function that gives a header's value to W3C's `traceparent` and `tracestate`."""

_MASK_64 = 2**64 - 1
_HEX = frozenset("0123456789abcdef-")


class TraceContext(NamedTuple):
    """A span's place: W3C's trace context. `is_sampled`: every process with a part in the trace exports its spans."""

    trace_id: int
    span_id: int
    is_sampled: bool
    state: str = ""
    """The header `tracestate`, passed on as it came."""


class Event(NamedTuple):
    """Something that happened at one moment of a span."""

    name: str
    unix_ns: int
    attributes: Mapping[str, Value] = {}


class Link(NamedTuple):
    """A span that is related to this one without being its parent."""

    context: TraceContext
    attributes: Mapping[str, Value] = {}


class Span(msgspec.Struct, frozen=True):
    """A span that is over. `parent_id` 0: it is the root. `error_type` is the class of what ended it.

    `is_failed`: its status is ERROR; an error that is the client's own leaves the status unset.
    """

    name: str
    context: TraceContext
    parent_id: int
    start_unix_ns: int
    end_unix_ns: int
    attributes: Mapping[str, Value] = {}
    events: Sequence[Event] = ()
    links: Sequence[Link] = ()
    error_type: str = ""
    is_failed: bool = False
    is_server: bool = False
    has_remote_parent: bool = False
    """Whether the parent was made by another process."""


class SpanExporter(Protocol):
    """The way of this process's spans to a collector; `services.runtime.otlp.Exporter` is the real one."""

    @property
    def num_exported(self) -> int:
        """Number of spans that the collector took."""
        ...

    @property
    def num_dropped(self) -> int:
        """Number of spans that the collector did not take and that are given up."""
        ...

    def is_sampled(self, trace_id: int, parent: TraceContext | None) -> bool:
        """Returns whether the spans of a new request are exported; `parent` is its client's span."""
        ...

    def add(self, spans: Sequence[Span]) -> None:
        """Takes spans that are over; returns at once."""
        ...

    def close(self) -> None:
        """Exports what is queued, within a limit of time."""
        ...


def setup(service: str, otlp_url: str | None, *, instance_id: str = "", sample: float | None = None) -> None:
    """Sends this process's spans to the collector `otlp_url`, or to that of the `OTEL_` variables.

    Does nothing where neither names one, or a variable turns traces off. Called once, in `__main__`, after
    `rpc.set_identity`. `sample`, from 0 to 1, is the share of new traces that are exported; None: OTEL_TRACES_SAMPLER
    decides. Raises ConfigError for a variable with a wrong value.
    """
    global _exporter, _read_headers
    if not _is_wanted(otlp_url):
        return
    if _exporter is not None:
        raise RuntimeError("telemetry is already set up")
    from services.runtime import otlp  # loading the SDK takes 0.1 s, which a process without traces saves

    read_headers = otlp.make_header_reader()
    _exporter = otlp.make_exporter(service, otlp_url, instance_id=instance_id, sample=sample)
    _read_headers = read_headers


def shutdown() -> None:
    """Exports what is queued and stops; gives up after `otlp.SHUTDOWN_TIMEOUT_S`."""
    global _exporter, _read_headers
    exporter, _exporter, _read_headers = _exporter, None, None
    if exporter is not None:
        exporter.close()


def is_on() -> bool:
    """Returns whether spans are exported."""
    return _exporter is not None


def counts() -> tuple[int, int]:
    """Returns the number of spans that a collector took, and of those that were dropped."""
    return (0, 0) if _exporter is None else (_exporter.num_exported, _exporter.num_dropped)


def export(spans: Sequence[Span]) -> None:
    """Exports spans that are over; returns at once."""
    if _exporter is not None:
        _exporter.add(spans)


def root(parent: TraceContext | None) -> TraceContext | None:
    """Returns the context of a request's span; `parent` is its client's. None: no trace is made.

    The sampler decides whether it is sampled; those that OpenTelemetry calls parent-based keep to the parent's
    decision. While telemetry is off it is the parent itself, so that it is passed on.
    """
    if _exporter is None:
        return parent
    trace_id = parent.trace_id if parent is not None else random.getrandbits(128) or 1
    state = parent.state if parent is not None else ""
    return TraceContext(trace_id, new_span_id(), _exporter.is_sampled(trace_id, parent), state)


def sampled(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """Returns the context that a message brought, if spans are to be recorded under it.

    Workers decide nothing themselves: the gateway's decision came with the message.
    """
    if _exporter is None or not traceparent:
        return None
    context = extract(traceparent, tracestate)
    return context if context is not None and context.is_sampled else None


def from_client(header: Callable[[str], str]) -> tuple[str, str]:
    """Returns W3C's `traceparent` and `tracestate` of a client's request; empty where it brings none.

    `header` gives the value of a header, several joined by commas, or an empty text. OTEL_PROPAGATORS says which
    headers are read.
    """
    if _read_headers is None:
        return header("traceparent"), header("tracestate")
    return _read_headers(header)


def new_span_id() -> int:
    """Draws a span's id at random, like ids of traces: nothing depends on their being hard to guess."""
    return random.getrandbits(64) or 1


def sibling(context: TraceContext, number: int) -> TraceContext:
    """Returns the context whose span id is `number` above this one's: one id that travels names several spans."""
    return context._replace(span_id=(context.span_id + number) & _MASK_64 or 1)


def inject(context: TraceContext | None) -> str:
    """Returns W3C's `traceparent` for a message; empty without a trace."""
    if context is None:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.is_sampled):02x}"


def extract(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """Returns the span that a message names as its parent; None where it names none or nonsense.

    A `tracestate` that is too long or not plain text is left out, as W3C's Trace Context says.
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


def variable(name: str) -> str:
    """Returns a variable of the environment; empty is the same as not given, as OpenTelemetry's specification says."""
    return os.environ.get(name, "").strip()


def endpoint_variable() -> str:
    """Returns the collector's URL that the environment names, or an empty text."""
    return variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or variable("OTEL_EXPORTER_OTLP_ENDPOINT")


def _is_wanted(otlp_url: str | None) -> bool:
    kind = variable("OTEL_TRACES_EXPORTER")
    if kind not in ("", "otlp", "none"):
        raise ConfigError(f"OTEL_TRACES_EXPORTER is {kind!r} but must be otlp or none")
    if kind == "none" or variable("OTEL_SDK_DISABLED").lower() == "true":
        return False
    return bool(otlp_url or endpoint_variable() or kind)


_exporter: SpanExporter | None = None
_read_headers: HeaderReader | None = None
