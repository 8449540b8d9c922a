"""Spans as OTLP's messages: what the SDK's own encoder makes of them, in a fraction of its time.

The SDK gives finished messages to the constructors of others, each of which encodes and parses its parts again, so an
attribute is copied five times. Here every message is filled in its place.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, SpanKind, StatusCode

logger = logging.getLogger(__name__)

_KINDS = {
    SpanKind.INTERNAL: trace_pb2.Span.SPAN_KIND_INTERNAL,
    SpanKind.SERVER: trace_pb2.Span.SPAN_KIND_SERVER,
    SpanKind.CLIENT: trace_pb2.Span.SPAN_KIND_CLIENT,
    SpanKind.PRODUCER: trace_pb2.Span.SPAN_KIND_PRODUCER,
    SpanKind.CONSUMER: trace_pb2.Span.SPAN_KIND_CONSUMER,
}
_CODES = {
    StatusCode.UNSET: trace_pb2.Status.STATUS_CODE_UNSET,
    StatusCode.OK: trace_pb2.Status.STATUS_CODE_OK,
    StatusCode.ERROR: trace_pb2.Status.STATUS_CODE_ERROR,
}
_HERE = trace_pb2.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_REMOTE = _HERE | trace_pb2.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK


def encode(spans: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
    """Returns the request that exports spans of one process: all have the resource and the scope of the first one."""
    request = ExportTraceServiceRequest()
    if not spans:
        return request
    of_resource = request.resource_spans.add()
    of_scope = of_resource.scope_spans.add()
    resource, scope = spans[0].resource, spans[0].instrumentation_scope
    _fill(of_resource.resource.attributes, resource.attributes)
    of_resource.schema_url = resource.schema_url
    if scope is not None:
        of_scope.scope.name, of_scope.scope.version = scope.name, scope.version or ""
    for span in spans:
        _fill_span(of_scope.spans.add(), span)
    return request


def _fill_span(message: trace_pb2.Span, span: ReadableSpan) -> None:
    context, parent = span.get_span_context(), span.parent
    assert context is not None, "a finished span has a context"
    message.trace_id, message.span_id = context.trace_id.to_bytes(16, "big"), context.span_id.to_bytes(8, "big")
    if context.trace_state:
        message.trace_state = ",".join([f"{key}={value}" for key, value in context.trace_state.items()])
    if parent is not None:
        message.parent_span_id = parent.span_id.to_bytes(8, "big")
    message.flags = _flags_of(parent)
    message.name, message.kind = span.name, _KINDS[span.kind]
    message.start_time_unix_nano, message.end_time_unix_nano = span.start_time or 0, span.end_time or 0
    message.status.code = _CODES[span.status.status_code]
    if span.status.description:
        message.status.message = span.status.description
    _fill(message.attributes, span.attributes)
    for event in span.events:
        happened = message.events.add()
        happened.name, happened.time_unix_nano = event.name, event.timestamp
        _fill(happened.attributes, event.attributes)
    for link in span.links:
        linked, other = message.links.add(), link.context
        linked.trace_id, linked.span_id = other.trace_id.to_bytes(16, "big"), other.span_id.to_bytes(8, "big")
        linked.flags = _flags_of(other)
        _fill(linked.attributes, link.attributes)


def _flags_of(context: SpanContext | None) -> int:
    return _REMOTE if context is not None and context.is_remote else _HERE


def _fill(entries: Any, attributes: Mapping[str, Any] | None) -> None:
    """Adds attributes; one that no message can hold is left out, and told."""
    for name, value in (attributes or {}).items():
        entry = entries.add()
        try:
            entry.key = name
            _set(entry.value, value)
        except (TypeError, ValueError) as error:
            entries.pop()
            logger.error("an attribute of a span cannot be encoded", exc_info=error, extra={"attribute": name})


def _set(message: AnyValue, value: Any) -> None:
    if isinstance(value, bool):
        message.bool_value = value
    elif isinstance(value, str):
        message.string_value = value
    elif isinstance(value, int):
        message.int_value = value
    elif isinstance(value, float):
        message.double_value = value
    else:
        message.array_value.SetInParent()
        for item in value:
            _set(message.array_value.values.add(), item)
