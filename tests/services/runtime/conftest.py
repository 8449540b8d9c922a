"""Fixtures of the runtime's tests: a real OTLP receiver."""

import asyncio
import contextlib
import gzip
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from protos import inference_pb2_grpc
from services.runtime import rpc
from tests.certificates import Authority
from tests.services.runtime.serving import Servicer, serving
from tests.waiting import HANG_LIMIT_S


@dataclass(frozen=True)
class ReceivedSpan:
    resource: dict[str, Any]
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
        self.refuses: grpc.StatusCode | None = None
        self.metadata: dict[str, Any] = {}
        self.num_calls = 0
        self._arrived = asyncio.Condition()

    async def Export(self, request: Any, context: Any) -> Any:
        self.num_calls += 1
        self.metadata = dict(context.invocation_metadata())
        await asyncio.sleep(self.delay_s)
        if self.refuses is not None:
            await context.abort(self.refuses, "not now")
        self.spans += spans_of(request)
        async with self._arrived:
            self._arrived.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    async def wait_for(self, count: int, *, timeout_s: float = HANG_LIMIT_S) -> list[ReceivedSpan]:
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


class HttpCollector(ThreadingHTTPServer):
    """A collector over HTTP that keeps what it gets."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _HttpHandler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.spans: list[ReceivedSpan] = []
        self.paths: list[str] = []
        self.headers: dict[str, str] = {}
        self.status = 200


class _HttpHandler(BaseHTTPRequestHandler):
    server: HttpCollector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.paths.append(self.path)
        self.server.headers = {name.lower(): value for name, value in self.headers.items()}
        if self.server.status == 200:
            self.server.spans += spans_of(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
        self.send_response(self.server.status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Writes nothing."""


@pytest.fixture
def http_collector() -> Iterator[HttpCollector]:
    collector = HttpCollector()
    thread = threading.Thread(target=collector.serve_forever, args=(0.01,))
    thread.start()
    yield collector
    collector.shutdown()
    thread.join()
    collector.server_close()


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


def spans_of(request: Any) -> list[ReceivedSpan]:
    """The spans of a message of OTLP, each with its resource."""
    return [
        _span(_attributes(group.resource.attributes), span)
        for group in request.resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    ]


def _span(resource: dict[str, Any], span: Any) -> ReceivedSpan:
    return ReceivedSpan(
        resource=resource,
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


@pytest.fixture
def servicer() -> Servicer:
    return Servicer()


@pytest.fixture
async def server(servicer: Servicer) -> AsyncIterator[tuple[rpc.RpcServer, str]]:
    async with serving(servicer) as started:
        yield started


@pytest.fixture
async def channel(server: tuple[rpc.RpcServer, str]) -> AsyncIterator[grpc.aio.Channel]:
    async with rpc.make_channel(server[1]) as opened:
        yield opened


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> Any:
    return inference_pb2_grpc.InferenceStub(channel)
