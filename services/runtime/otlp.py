"""The way of finished spans to a collector: OpenTelemetry's SDK, set up by flags and the `OTEL_` variables.

The SDK's `BatchSpanProcessor` queues spans and exports them in its own thread, over gRPC or HTTP. What it lacks is
added here: a bound on the time that closing takes, counts of the spans that arrived and that did not, and pauses while
a batch is encoded. A module of its own, because loading the SDK takes 0.1 s, which a process without traces saves.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import metadata
from typing import overload
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.exporter import InvalidCompressionValueException
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcSpanExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpSpanExporter
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.propagators.textmap import Getter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision, ParentBasedTraceIdRatio, Sampler
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    get_current_span,
    set_span_in_context,
)

from services.runtime import rpc, telemetry
from services.runtime.clock import SYSTEM_CLOCK
from services.runtime.errors import ConfigError
from services.runtime.logs import LineBudget
from services.runtime.otlp_encoding import encode
from services.runtime.telemetry import HeaderReader, Span, TraceContext, Value, endpoint_variable, variable
from services.runtime.version import version

SHUTDOWN_TIMEOUT_S = 3.0
"""Time for exporting what is queued when the process ends."""
ABORT_TIMEOUT_S = 0.5
"""Time for a call to the collector to notice that it is given up; over HTTP it does not, and ends with the process."""
MAX_QUEUED_SPANS = 8192
MAX_BATCH_SPANS = 512
EXPORT_INTERVAL_S = 0.5
SPANS_IN_A_ROW = 8
"""After this many spans the encoding thread releases the interpreter, for which an event loop would wait 5 ms
otherwise."""
MAX_TEXT_CHARS = 256
"""Longest text of an attribute, unless a variable of the SDK says otherwise; the rest is cut off."""
SECONDS_A_LOG_LINE = 60.0
"""Interval of log lines about a collector that takes no spans, after the first two."""

_NAMESPACE = "tandem"
_W3C = frozenset({"tracecontext", "baggage"})
"""The default of OTEL_PROPAGATORS."""
_LOGGERS_OF_EXPORTS = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk._shared_internal",
)
# It writes members of a `tracestate` that it cannot read, which are a client's words.
logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)

_SAMPLED, _NOT_SAMPLED = TraceFlags(TraceFlags.SAMPLED), TraceFlags(TraceFlags.DEFAULT)
_NO_CONTEXT = Context()
_FAILED, _UNSET = Status(StatusCode.ERROR), Status(StatusCode.UNSET)
_SCOPE = InstrumentationScope("tandem", version())


class Exporter:
    """A bounded queue of spans and the SDK's thread that exports them.

    A collector that is slow or away delays nobody: spans that do not fit into the queue, or that the collector does
    not take within the SDK's timeout, are dropped and counted.
    """

    def __init__(self, exporter: SpanExporter, *, resource: Resource, sampler: Sampler) -> None:
        self._counting = _CountingExporter(exporter)
        self._resource = resource
        self._sampler = sampler
        self._max_queued = _count_variable("OTEL_BSP_MAX_QUEUE_SIZE", MAX_QUEUED_SPANS)
        self._max_text_chars = SpanLimits().max_span_attribute_length or MAX_TEXT_CHARS
        self._lock = threading.Lock()
        self._num_queued = 0
        self._num_refused = 0
        self._is_closed = False
        self._processor = BatchSpanProcessor(
            self._counting,
            max_queue_size=self._max_queued,
            max_export_batch_size=_count_variable(
                "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", min(MAX_BATCH_SPANS, self._max_queued)
            ),
            schedule_delay_millis=_count_variable("OTEL_BSP_SCHEDULE_DELAY", round(EXPORT_INTERVAL_S * 1e3)),
        )
        self._quiet = _Sparing()
        for name in _LOGGERS_OF_EXPORTS:
            logging.getLogger(name).addFilter(self._quiet)

    @property
    def num_exported(self) -> int:
        """Spans that the collector took."""
        return self._counting.num_exported

    @property
    def num_dropped(self) -> int:
        """Spans that did not fit into the queue or that the collector did not take."""
        return self._num_refused + self._counting.num_failed

    def is_sampled(self, trace_id: int, parent: TraceContext | None) -> bool:
        """Returns the sampler's decision for a request; `parent` is its client's span."""
        context = _NO_CONTEXT
        if parent is not None:
            flags = _SAMPLED if parent.is_sampled else _NOT_SAMPLED
            client = SpanContext(trace_id, parent.span_id, True, flags, _trace_state(parent.state))
            context = set_span_in_context(NonRecordingSpan(client), context)
        return (
            self._sampler.should_sample(context, trace_id, "request", SpanKind.SERVER).decision
            is Decision.RECORD_AND_SAMPLE
        )

    def add(self, spans: Sequence[Span]) -> None:
        """Queues spans, all or none of them; returns at once. For any thread."""
        with self._lock:
            if self._is_closed or self._num_queued - self._counting.num_begun + len(spans) > self._max_queued:
                self._num_refused += len(spans)
                return
            self._num_queued += len(spans)
        for span in spans:
            self._processor.on_end(self._finished(span))

    def close(self) -> None:
        """Exports the queued spans, or gives them up after SHUTDOWN_TIMEOUT_S."""
        with self._lock:
            self._is_closed = True
        closing = threading.Thread(target=self._processor.shutdown, name="telemetry-close", daemon=True)
        closing.start()
        closing.join(SHUTDOWN_TIMEOUT_S)
        # Ends a call that still waits for the collector, and with it the processor's thread.
        self._counting.shutdown()
        closing.join(ABORT_TIMEOUT_S)
        for name in _LOGGERS_OF_EXPORTS:
            logging.getLogger(name).removeFilter(self._quiet)

    def _finished(self, span: Span) -> ReadableSpan:
        trace_id, state = span.context.trace_id, _trace_state(span.context.state)
        parent = None
        if span.parent_id:
            parent = SpanContext(trace_id, span.parent_id, span.has_remote_parent, _SAMPLED, state)
        attributes = self._cut(span.attributes)
        if span.error_type:
            attributes["error.type"] = span.error_type
        return ReadableSpan(
            span.name,
            SpanContext(trace_id, span.context.span_id, False, _SAMPLED, state),
            parent,
            self._resource,
            attributes,
            [Event(event.name, self._cut(event.attributes), event.unix_ns) for event in span.events],
            [Link(_remote(link.context), self._cut(link.attributes)) for link in span.links],
            SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
            None,
            _FAILED if span.is_failed else _UNSET,
            span.start_unix_ns,
            span.end_unix_ns,
            _SCOPE,
        )

    def _cut(self, attributes: Mapping[str, Value]) -> dict[str, Value]:
        limit = self._max_text_chars
        return {name: value[:limit] if isinstance(value, str) else value for name, value in attributes.items()}


def make_exporter(service: str, otlp_url: str | None, *, instance_id: str, sample: float | None) -> Exporter:
    """Returns the exporter that flags and `OTEL_` variables ask for.

    `otlp_url`, the collector's base URL, goes before the endpoints of the environment, and `sample` before
    OTEL_TRACES_SAMPLER. Raises ConfigError that names the variable.
    """
    protocol = variable("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or variable("OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc"
    if protocol not in ("grpc", "http/protobuf"):
        raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r} but must be grpc or http/protobuf")
    try:
        exporter = _grpc_exporter(otlp_url) if protocol == "grpc" else _http_exporter(otlp_url)
        provider = TracerProvider(
            sampler=None if sample is None else ParentBasedTraceIdRatio(sample), shutdown_on_exit=False
        )
        return Exporter(exporter, resource=_resource(service, instance_id), sampler=provider.sampler)
    except (ValueError, RuntimeError, InvalidCompressionValueException) as error:
        raise ConfigError(f"an OTEL_ variable has a wrong value: {error}") from error


def make_header_reader() -> HeaderReader | None:
    """Returns what reads a client's context as OTEL_PROPAGATORS says; None: W3C's headers, which need no propagator.

    Baggage is neither read nor passed on. Raises ConfigError for a propagator of which no package is installed.
    """
    names = [name.strip() for name in variable("OTEL_PROPAGATORS").split(",") if name.strip()]
    if not names or ("tracecontext" in names and _W3C.issuperset(names)):
        return None
    found = [metadata.entry_points(group="opentelemetry_propagator", name=name) for name in names if name != "none"]
    if not all(found):
        raise ConfigError(
            f"OTEL_PROPAGATORS is {','.join(names)!r}, of which one is not installed; b3, for example, comes with the "
            "package opentelemetry-propagator-b3"
        )
    propagator = CompositePropagator([next(iter(entries)).load()() for entries in found])

    def read(header: Callable[[str], str]) -> tuple[str, str]:
        client = get_current_span(propagator.extract(header, _NO_CONTEXT, _Headers())).get_span_context()
        if not client.is_valid:
            return "", ""
        context = TraceContext(client.trace_id, client.span_id, client.trace_flags.sampled)
        return telemetry.inject(context), client.trace_state.to_header()

    return read


class _Headers(Getter[Callable[[str], str]]):
    """Reads the headers of a client's request for a propagator."""

    def get(self, carrier: Callable[[str], str], key: str) -> list[str] | None:
        """Returns the values of a header, or None without one."""
        value = carrier(key)
        return [value] if value else None

    def keys(self, carrier: Callable[[str], str]) -> list[str]:
        """Returns no names: propagators of traces ask for the headers that they know."""
        return []


def _grpc_exporter(otlp_url: str | None) -> SpanExporter:
    url = otlp_url or endpoint_variable()
    if "@" in urlsplit(url).netloc:
        raise ConfigError(
            "the collector's URL holds a user name or password, which OTLP over gRPC does not send: give "
            "OTEL_EXPORTER_OTLP_HEADERS"
        )
    # The variables, where they are given, name the CAs to believe; otherwise it is the CA of this process.
    has_own = variable("OTEL_EXPORTER_OTLP_CERTIFICATE") or variable("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE")
    credentials = None if has_own or not url.startswith("https") else rpc.channel_credentials()
    options = (("grpc.enable_http_proxy", 0),)
    # Its annotation says texts; gRPC itself takes numbers.
    return _GrpcExporter(otlp_url, credentials=credentials, channel_options=options)  # type: ignore[arg-type]


class _GrpcExporter(GrpcSpanExporter):
    """The SDK's exporter with an encoder that leaves the event loop more of the interpreter."""

    def _translate_data(self, data: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
        return encode(data)


def _http_exporter(otlp_url: str | None) -> SpanExporter:
    endpoint = None
    if otlp_url is not None:
        endpoint = otlp_url if otlp_url.endswith("/v1/traces") else otlp_url.rstrip("/") + "/v1/traces"
    identity = rpc.identity()
    has_own = variable("OTEL_EXPORTER_OTLP_CERTIFICATE") or variable("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE")
    if identity is None or identity.files.ca is None or has_own:
        return HttpSpanExporter(endpoint)
    files = identity.files
    return HttpSpanExporter(
        endpoint,
        certificate_file=str(files.ca),
        client_key_file=str(files.key),
        client_certificate_file=str(files.cert),
    )


def _resource(service: str, instance_id: str) -> Resource:
    """Describes this process; OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME go before what it says of itself."""
    host = socket.gethostname()
    own = {
        "service.name": service,
        "service.namespace": _NAMESPACE,
        "service.instance.id": instance_id or f"{host}-{os.getpid()}",
        "service.version": version(),
        "host.name": host,
    }
    return Resource.create(own | dict(OTELResourceDetector().detect().attributes))


class _CountingExporter(SpanExporter):
    """Counts what another exporter is given and what it brings to the collector."""

    def __init__(self, exporter: SpanExporter) -> None:
        self.num_begun = self.num_exported = self.num_failed = 0
        self._exporter = exporter
        self._lock = threading.Lock()
        self._is_shut_down = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Sends a batch; blocks until the collector has taken it or is given up."""
        self.num_begun += len(spans)
        try:
            result = SpanExportResult.FAILURE if self._is_shut_down else self._exporter.export(_Paced(spans))
        except (ValueError, TypeError):  # gRPC's channel was closed meanwhile
            result = SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            self.num_exported += len(spans)
        else:
            self.num_failed += len(spans)
        return result

    def shutdown(self) -> None:
        """Ends the call that runs, if one does; may be called again."""
        with self._lock:
            is_first, self._is_shut_down = not self._is_shut_down, True
        if is_first:
            self._exporter.shutdown()


class _Paced(Sequence[ReadableSpan]):
    """Spans between which their encoder lets other threads run."""

    def __init__(self, spans: Sequence[ReadableSpan]) -> None:
        self._spans = spans

    def __len__(self) -> int:
        return len(self._spans)

    @overload
    def __getitem__(self, index: int) -> ReadableSpan: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[ReadableSpan]: ...

    def __getitem__(self, index: int | slice) -> ReadableSpan | Sequence[ReadableSpan]:
        return self._spans[index]

    def __iter__(self) -> Iterator[ReadableSpan]:
        for number, span in enumerate(self._spans):
            if number % SPANS_IN_A_ROW == 0:
                time.sleep(0)  # lets go of the interpreter, for the event loop; it waits for nothing
            yield span


class _Sparing(logging.Filter):
    """Lets few lines about failed exports pass, as warnings: spans are lost, requests are not."""

    def __init__(self) -> None:
        super().__init__()
        self._budget = LineBudget(per_s=1 / SECONDS_A_LOG_LINE, burst=2)

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether the line is written."""
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        return self._budget.take(SYSTEM_CLOCK.monotonic())


@lru_cache(maxsize=256)
def _trace_state(state: str) -> TraceState | None:
    return TraceState.from_header([state]) if state else None


def _remote(context: TraceContext) -> SpanContext:
    flags = _SAMPLED if context.is_sampled else _NOT_SAMPLED
    return SpanContext(context.trace_id, context.span_id, True, flags, _trace_state(context.state))


def _count_variable(name: str, default: int) -> int:
    text = variable(name)
    if not text:
        return default
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"{name} is {text!r} but must be a whole number above 0")
    return int(text)
