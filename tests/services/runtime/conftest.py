"""Fixtures of the runtime's tests: a real OTLP receiver."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tests.certificates import Authority


@dataclass(frozen=True)
class ReceivedSpan:
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_unix_ns: int
    end_unix_ns: int
    is_error: bool
    kind: str = ""
    state: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)
    events: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)
    links: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Ids of spans, with what is said of them."""


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector that keeps what it gets, for looking at it afterwards."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[ReceivedSpan] = []
        self.delay_s = 0.0
        self._arrived = asyncio.Condition()

    async def Export(self, request: Any, context: Any) -> Any:
        await asyncio.sleep(self.delay_s)
        for resource_spans in request.resource_spans:
            service = _attributes(resource_spans.resource.attributes).get("service.name", "")
            for scope_spans in resource_spans.scope_spans:
                self.spans.extend(_span(service, span) for span in scope_spans.spans)
        async with self._arrived:
            self._arrived.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    async def wait_for(self, count: int, *, timeout_s: float = 10.0) -> list[ReceivedSpan]:
        async with asyncio.timeout(timeout_s), self._arrived:
            await self._arrived.wait_for(lambda: len(self.spans) >= count)
        return self.spans

    def by_name(self, name: str) -> ReceivedSpan:
        (span,) = [span for span in self.spans if span.name == name]
        return span


@pytest.fixture
async def otlp_receiver() -> AsyncIterator[OtlpReceiver]:
    async with _receiving(None) as receiver:
        yield receiver


@pytest.fixture
async def tls_otlp_receiver(authority: Authority) -> AsyncIterator[OtlpReceiver]:
    """One that shows a certificate of the tests' own CA, and asks for one."""
    files = authority.issue("collector")
    pair = (files.key.read_bytes(), files.cert.read_bytes())
    credentials = grpc.ssl_server_credentials([pair], authority.path.read_bytes(), require_client_auth=True)
    async with _receiving(credentials) as receiver:
        yield receiver


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@contextlib.asynccontextmanager
async def _receiving(credentials: grpc.ServerCredentials | None) -> AsyncIterator[OtlpReceiver]:
    receiver, address = OtlpReceiver(), "127.0.0.1:0"
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    if credentials is None:
        receiver.url = f"http://127.0.0.1:{server.add_insecure_port(address)}"
    else:
        receiver.url = f"https://127.0.0.1:{server.add_secure_port(address, credentials)}"
    await server.start()
    yield receiver
    await server.stop(None)


def _span(service: str, span: Any) -> ReceivedSpan:
    return ReceivedSpan(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_unix_ns=span.start_time_unix_nano,
        end_unix_ns=span.end_time_unix_nano,
        is_error=span.status.code == 2,
        kind=span.SpanKind.Name(span.kind),
        state=span.trace_state,
        attributes=_attributes(span.attributes),
        events=[(event.name, event.time_unix_nano, _attributes(event.attributes)) for event in span.events],
        links=[(link.span_id.hex(), _attributes(link.attributes)) for link in span.links],
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
