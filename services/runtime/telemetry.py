"""Traces: spans through OpenTelemetry's API, and the only place that imports its SDK. Knows no span's name.

Spans are started with `start_span` and ended in a `finally`; none is made "current", because a context that is
held over the `yield` of an async generator breaks when the request is cancelled. Without `setup` there are none.
"""

import threading
import time
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation import set_span_in_context
from opentelemetry.util.types import AttributeValue

EXPORT_TIMEOUT_S = 2.0
SHUTDOWN_TIMEOUT_S = 3.0
MAX_QUEUED_SPANS = 8192
MAX_BATCH_SPANS = 512
EXPORT_INTERVAL_S = 0.5

_TRACER_NAME = "tandem"
_provider: TracerProvider | None = None


def setup(service_name: str, otlp_url: str | None, *, instance_id: str = "") -> None:
    """Sends this process's spans to an OTLP gRPC collector such as http://127.0.0.1:4317. None: no spans.

    Called once, in `__main__`. A collector that is slow or away never delays a request: spans wait in a bounded
    queue and are dropped when it is full.
    """
    global _provider
    if otlp_url is None:
        return
    if _provider is not None:
        raise RuntimeError("telemetry is already set up")
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    exporter = OTLPSpanExporter(endpoint=otlp_url, insecure=not otlp_url.startswith("https"), timeout=EXPORT_TIMEOUT_S)
    attributes = {"service.name": service_name} | ({"service.instance.id": instance_id} if instance_id else {})
    _provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    _provider.add_span_processor(
        BatchSpanProcessor(
            exporter,
            max_queue_size=MAX_QUEUED_SPANS,
            max_export_batch_size=MAX_BATCH_SPANS,
            schedule_delay_millis=EXPORT_INTERVAL_S * 1000,
        )
    )


def shutdown() -> None:
    """Sends what is queued and stops; gives up after SHUTDOWN_TIMEOUT_S."""
    global _provider
    provider, _provider = _provider, None
    if provider is None:
        return
    closing = threading.Thread(target=provider.shutdown, name="telemetry-shutdown", daemon=True)
    closing.start()
    closing.join(SHUTDOWN_TIMEOUT_S)


def start_span(
    name: str,
    parent: Context | Span | None = None,
    *,
    attributes: Mapping[str, AttributeValue] | None = None,
    start_unix_ns: int | None = None,
) -> Span:
    """Starts a span; the caller ends it in a `finally`. Without a parent it is the root of a new trace."""
    context = set_span_in_context(parent, Context()) if isinstance(parent, Span) else (parent or Context())
    return _tracer().start_span(name, context, attributes=attributes, start_time=start_unix_ns)


def record_span(
    name: str,
    start_unix_ns: int,
    end_unix_ns: int,
    *,
    parent: Context | Span | None,
    attributes: Mapping[str, AttributeValue] | None = None,
    error: BaseException | None = None,
) -> Span:
    """Records a span whose times are known afterwards, such as those an engine thread reports."""
    span = start_span(name, parent, attributes=attributes, start_unix_ns=start_unix_ns)
    if error is not None:
        mark_failed(span, error)
    span.end(end_unix_ns)
    return span


def mark_failed(span: Span, error: BaseException) -> None:
    """Gives a span the status ERROR and the error's class; not its text, which may quote a client."""
    span.set_attribute("error.type", type(error).__name__)
    span.set_status(Status(StatusCode.ERROR))


def inject(span: Span) -> str:
    """The span's W3C traceparent for a message; empty where there is no trace."""
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags) & 1:02x}"


def extract(traceparent: str) -> Context:
    """The parent that a message names; an empty context where it names none or nonsense."""
    parts = traceparent.strip().split("-")
    widths = [len(part) for part in parts[:4]]
    if widths != [2, 32, 16, 2] or parts[0] == "ff" or (parts[0] == "00" and len(parts) != 4):
        return Context()
    if any(letter not in "0123456789abcdef-" for letter in "-".join(parts[:4])):
        return Context()
    span_context = SpanContext(int(parts[1], 16), int(parts[2], 16), True, TraceFlags(int(parts[3], 16) & 1))
    if not span_context.is_valid:
        return Context()
    return set_span_in_context(NonRecordingSpan(span_context), Context())


def unix_ns() -> int:
    """Now, for a span's start or end."""
    return time.time_ns()


def _tracer() -> trace.Tracer:
    return _provider.get_tracer(_TRACER_NAME) if _provider is not None else _NO_TRACER


_NO_TRACER = trace.NoOpTracer()
