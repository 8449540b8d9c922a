"""What both workers have around their engines: settings, the attempts they know, metrics, a life from ready to gone.

Knows no engine, no model, no Redis and no role: a worker package passes its parts in.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from opentelemetry.trace import Span
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from protos import cluster_pb2, inference_pb2, worker_pb2
from services.runtime import logs, process, telemetry
from services.runtime.clock import SYSTEM_CLOCK, Clock, Deadline
from services.runtime.config import choice, integer, join_host_port, option, path, size_bytes, text, url
from services.runtime.errors import (
    AlreadyExists,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    InvariantViolated,
)
from services.runtime.logs import LEVELS
from services.runtime.rpc import RpcServer

# A step is between some 100 microseconds (a tiny model) and seconds (a long chunk on few cores).
STEP_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

# Sessions are closed by then; what is left are health checks and Links that end by themselves.
SERVER_GRACE_S = 1.0
PUBLISH_INTERVAL_S = 0.5

S = TypeVar("S")
A = TypeVar("A")
R = TypeVar("R")
C = TypeVar("C", bound="WorkerConfig")
L = TypeVar("L", bound="Lease | None")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """Settings that both workers have."""

    id: str = option(
        text(pattern=r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", rule="1 to 63 of a-z, 0-9 and inner hyphens"),
        help="Stable name of this worker, unique in the cluster, such as decode-0.",
    )
    model: Path = option(path(), help="Folder of a Hugging Face checkpoint.")  # noqa: RUF009 - `option` makes a field
    model_name: str | None = option(
        text(), default=None, help="What the model is called in the cluster. Not given: the folder's name."
    )
    redis: str | None = option(
        url("redis", "rediss", "unix"),
        default=None,
        help="Where the cluster's workers register. Without it a gateway must be told this worker's address.",
    )
    cluster: str = option(
        text(pattern=r"[A-Za-z0-9_.-]{1,64}", rule="1 to 64 of A-Z, a-z, 0-9, _ . and -"),
        default="default",
        help="Name of the cluster in Redis.",
    )
    host: str = option(text(), default="127.0.0.1", help="Address to listen on. 0.0.0.0 is every interface.")
    port: int = option(integer(0, 65535), default=0, help="Port of the gRPC server; 0 picks a free one.")
    advertise_host: str | None = option(
        text(), default=None, help="Host that others connect to, where it is not --host (a pod's address)."
    )
    metrics_port: int | None = option(
        integer(0, 65535), default=None, help="Port of /metrics on --host; 0 picks a free one. Not given: none."
    )
    transport: str = option(choice("auto", "shm", "tcp"), default="auto", help="Channel that pages travel on.")
    page_size: int = option(integer(1, 1024), default=16, help="Tokens of a KV page.")
    dtype: str = option(
        choice("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="Type of weights and KV; auto takes the checkpoint's.",
    )
    device: str = option(choice("auto", "cpu", "cuda"), default="auto", help="Where the model runs.")
    kv_pages: int | None = option(integer(1), default=None, help="Pages of the KV pool.")
    kv_memory: int | None = option(size_bytes(), default=None, help="Size of the KV pool, instead of --kv-pages.")
    chunk_tokens: int = option(integer(1, 65536), default=512, help="Most prompt tokens that one step computes.")
    threads: int | None = option(integer(1, 1024), default=None, help="Processor threads of the engine.")
    otlp: str | None = option(url("http", "https"), default=None, help="OTLP gRPC collector of traces.")
    log_level: str = option(choice(*LEVELS), default="info", help="Least level that is logged.")

    def __post_init__(self) -> None:
        if self.kv_pages is not None and self.kv_memory is not None:
            raise ConfigError("--kv-pages and --kv-memory are both given; the size of the KV pool is one of them")

    def record_fields(self, *, incarnation: str) -> dict[str, Any]:
        """What is known of the worker before its model is loaded, as fields of a WorkerRecord."""
        return {
            "id": self.id,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "address": "",
            "incarnation": incarnation,
            "started_unix_ns": SYSTEM_CLOCK.unix_ns(),
            "state": "starting",
            "model": self.model_name or self.model.resolve().name,
            "exact": False,
            "page_size": self.page_size,
            "layout_fingerprint": "",
            "max_sequence_tokens": 0,
        }

    def engine_settings(self) -> dict[str, Any]:
        """Arguments of `services.engine.engine.load_engine`."""
        return {
            "model_dir": self.model,
            "dtype": self.dtype,
            "device": self.device,
            "page_size": self.page_size,
            "num_pages": self.kv_pages,
            "kv_memory_bytes": self.kv_memory,
            "threads": self.threads,
        }

    def address(self, port: int) -> str:
        """Where others connect to."""
        return join_host_port(self.advertise_host or self.host, port)


class AttemptKey(NamedTuple):
    """One try of a request."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class AttemptSpec(Generic[S]):
    """A SequenceSpec as plain data; `sampling` is of the engine's class."""

    key: AttemptKey
    prompt_token_ids: list[int]
    emitted_token_ids: list[int]
    sampling: S
    deadline: Deadline
    traceparent: str


def read_key(message: worker_pb2.AttemptId) -> AttemptKey:
    """The name of an attempt. Raises InvalidRequest for one that cannot be."""
    if not message.request_id or message.attempt < 1:
        raise InvalidRequest("an attempt needs a request_id and a number from 1", field="id")
    return AttemptKey(message.request_id, message.attempt)


def read_spec(
    message: worker_pb2.SequenceSpec,
    sampling_class: Callable[..., S],
    *,
    clock: Clock = SYSTEM_CLOCK,
) -> AttemptSpec[S]:
    """Turns a message into plain data. Raises InvalidRequest naming the field; `sampling_class` checks its own."""
    if not message.prompt_token_ids:
        raise InvalidRequest("the prompt is empty", field="prompt_token_ids")
    return AttemptSpec(
        key=read_key(message.id),
        prompt_token_ids=list(message.prompt_token_ids),
        emitted_token_ids=list(message.emitted_token_ids),
        sampling=sampling_class(**_sampling_values(message)),
        deadline=Deadline.from_remaining_ms(max(message.deadline_ms, 1), clock=clock),
        traceparent=message.traceparent,
    )


def _sampling_values(message: worker_pb2.SequenceSpec) -> dict[str, Any]:
    given = message.sampling
    if not given.HasField("max_tokens"):
        raise InvalidRequest("max_tokens is not set", field="max_tokens")
    eos_token_ids = () if given.ignore_eos else message.eos_token_ids
    return {
        "max_tokens": given.max_tokens,
        "min_tokens": given.min_tokens,
        "temperature": given.temperature if given.HasField("temperature") else 1.0,
        "top_p": given.top_p if given.HasField("top_p") else 1.0,
        "top_k": given.top_k,
        "min_p": given.min_p,
        "seed": given.seed,
        "stop_token_ids": frozenset(given.stop_token_ids) | frozenset(eos_token_ids),
        "presence_penalty": given.presence_penalty,
        "frequency_penalty": given.frequency_penalty,
        "repetition_penalty": given.repetition_penalty if given.HasField("repetition_penalty") else 1.0,
        "logit_bias": dict(given.logit_bias),
        "logprobs": given.logprobs if given.HasField("logprobs") else None,
    }


class Sampled(Protocol):
    """What travels of a token that an engine chose."""

    @property
    def token_id(self) -> int:
        """The token."""
        ...

    @property
    def logprob(self) -> float | None:
        """Its log-probability, when asked for."""
        ...

    @property
    def top(self) -> tuple[tuple[int, float], ...]:
        """The likeliest tokens, descending."""
        ...


def tokens_message(index: int, token: Sampled) -> worker_pb2.Tokens:
    """The token at place `index` of an answer, as an event."""
    message = worker_pb2.Tokens(first_index=index, token_ids=(token.token_id,))
    if token.logprob is not None:
        top = [inference_pb2.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in token.top]
        message.logprobs.append(inference_pb2.TokenLogprobs(logprob=token.logprob, top=top))
    return message


def finished_message(reason: Literal["stop", "length"]) -> worker_pb2.Finished:
    """The end of an answer, as an event."""
    return worker_pb2.Finished(reason=_FINISH_REASONS[reason])


_FINISH_REASONS = {
    "stop": inference_pb2.FINISH_REASON_STOP,
    "length": inference_pb2.FINISH_REASON_LENGTH,
}


class AttemptTable(Generic[A]):
    """The attempts that a worker knows: of each request at most one, the newest. This is the fence.

    What is not in the table has never been, has ended or was superseded: messages about it are dropped.
    """

    def __init__(self) -> None:
        self._newest: dict[str, tuple[AttemptKey, A]] = {}

    def __len__(self) -> int:
        return len(self._newest)

    def __iter__(self) -> Iterator[A]:
        """The attempts at this moment; the table may change meanwhile."""
        return iter([attempt for _, attempt in self._newest.values()])

    def begin(self, key: AttemptKey, attempt: A) -> A | None:
        """Enters an attempt and returns the older one that it supersedes.

        Raises AlreadyExists where the same or a newer attempt is known: the message is late or repeated.
        """
        known_key, known = self._newest.get(key.request_id, (None, None))
        if known_key is not None and known_key.attempt >= key.attempt:
            raise AlreadyExists(f"attempt {known_key.attempt} of the request is known here")
        self._newest[key.request_id] = (key, attempt)
        return known

    def find(self, key: AttemptKey) -> A | None:
        """The attempt of exactly this number, or None."""
        known_key, known = self._newest.get(key.request_id, (None, None))
        return known if known_key == key else None

    def end(self, key: AttemptKey) -> None:
        """Forgets an attempt. Unknown and superseded ones are ignored."""
        if self.find(key) is not None:
            del self._newest[key.request_id]


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a worker is; pages by state as in `cluster.proto`."""

    pages_total: int
    pages_free: int
    pages_cached: int
    pages_reserved: int
    pages_used: int
    promised_pages: int = 0
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0

    def record_fields(self) -> dict[str, int]:
        """The load as fields of a WorkerRecord."""
        return {
            "pages_total": self.pages_total,
            "pages_free": self.pages_free,
            "pages_cached": self.pages_cached,
            "pages_reserved": self.pages_reserved,
            "pages_used": self.pages_used,
            "running": self.running,
            "waiting": self.waiting,
        }

    def to_message(self, *, is_draining: bool) -> worker_pb2.WorkerLoad:
        """The load as it travels with a session's events."""
        state = cluster_pb2.WORKER_STATE_DRAINING if is_draining else cluster_pb2.WORKER_STATE_READY
        return worker_pb2.WorkerLoad(
            pages=cluster_pb2.PageCounts(
                total=self.pages_total,
                free=self.pages_free,
                cached=self.pages_cached,
                reserved=self.pages_reserved,
                used=self.pages_used,
            ),
            promised_pages=self.promised_pages,
            running=self.running,
            waiting=self.waiting,
            waiting_tokens=self.waiting_tokens,
            state=state,
        )


class WorkerMetrics:
    """Prometheus metrics of one worker, in a registry of their own."""

    def __init__(self, *, worker_id: str) -> None:
        self.registry = CollectorRegistry()
        self._worker_id = worker_id
        names, values = ("worker",), (worker_id,)
        self.step_s: Histogram = Histogram(
            "tandem_step_seconds", "Time of one engine step.", names, registry=self.registry, buckets=STEP_BUCKETS_S
        ).labels(*values)
        self.tokens: Counter = Counter(
            "tandem_computed_tokens", "Tokens that went through the model.", names, registry=self.registry
        ).labels(*values)
        self.transferred_bytes: Counter = Counter(
            "tandem_transferred_bytes", "Payload bytes of committed handoffs.", names, registry=self.registry
        ).labels(*values)
        self._attempts = Counter(
            "tandem_attempts", "Attempts by how they ended.", ("worker", "outcome"), registry=self.registry
        )

    def count_attempt(self, outcome: str) -> None:
        """Counts an attempt that ended; `outcome` is one of a few words."""
        self._attempts.labels(self._worker_id, outcome).inc()

    def serve(self, settings: WorkerConfig, load: Callable[[], Load]) -> None:
        """Serves /metrics, if a port is set, from a thread of its own for the rest of the process's life.

        `load` is called for each scrape, in that thread. Raises ConfigError where the port cannot be had.
        """
        if settings.metrics_port is None:
            return
        self._watch(load)
        try:
            server, _ = start_http_server(settings.metrics_port, addr=settings.host, registry=self.registry)
        except OSError as error:
            raise ConfigError(f"--metrics-port is {settings.metrics_port}, which cannot be listened on") from error
        logger.info("serving metrics", extra={"port": server.server_port})

    def _watch(self, load: Callable[[], Load]) -> None:
        pages = Gauge("tandem_kv_pages", "KV pages by state.", ("worker", "state"), registry=self.registry)
        for state in ("total", "free", "cached", "reserved", "used"):
            pages.labels(self._worker_id, state).set_function(partial(_field, load, f"pages_{state}"))
        for field, name, words in (
            ("promised_pages", "tandem_kv_pages_promised", "Pages promised and not yet taken."),
            ("running", "tandem_running_sequences", "Sequences that are being computed."),
            ("waiting", "tandem_waiting_sequences", "Sequences taken and not begun."),
            ("waiting_tokens", "tandem_waiting_prompt_tokens", "Prompt tokens that wait for computation."),
        ):
            gauge = Gauge(name, words, ("worker",), registry=self.registry).labels(self._worker_id)
            gauge.set_function(partial(_field, load, field))


def _field(load: Callable[[], Load], name: str) -> float:
    return float(getattr(load(), name))


@contextlib.asynccontextmanager
async def within(deadline: Deadline) -> AsyncIterator[None]:
    """Ends what is inside when the deadline passes. Raises DeadlineExceeded."""
    limit = asyncio.timeout(deadline.remaining_s())
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceeded("the request's deadline passed") from None


def infallible(command: Callable[[], None]) -> Callable[[], None]:
    """A command for the engine thread that nobody waits for: if it fails, the books are wrong and the engine stops."""

    def run() -> None:
        try:
            command()
        except InvariantViolated:
            raise
        except Exception as error:
            raise InvariantViolated(f"a command of the engine failed: {type(error).__name__}") from error

    return run


def on_this_loop(receive: Callable[[R], None]) -> Callable[[R], None]:
    """A function that any thread may call and that calls `receive` on the event loop that runs now."""
    loop = asyncio.get_running_loop()

    def call(what: R) -> None:
        # A closed loop means that the process is ending and nobody is left to tell.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(receive, what)

    return call


def record_chunk(span: Span, start_unix_ns: int, end_unix_ns: int, *, start: int, num_tokens: int) -> None:
    """The step that computed `num_tokens` of a prompt from position `start`, as a part of its `prefill` span."""
    if span.is_recording():
        attributes = {"tandem.start": start, "tandem.tokens": num_tokens}
        telemetry.record_span("prefill.chunk", start_unix_ns, end_unix_ns, parent=span, attributes=attributes)


class Worker(Protocol):
    """What the host needs of a worker."""

    drain_requested: asyncio.Event
    """Set when a gateway sent DrainWorker."""
    failed: "asyncio.Future[None]"
    """Fails with the error that makes going on impossible; its attempts have been answered by then."""

    def load(self) -> Load:
        """How busy it is."""
        ...

    def begin_drain(self) -> None:
        """Takes nothing new from here on."""
        ...

    async def wait_idle(self) -> None:
        """Returns when every attempt has ended. Each has a deadline, so this does too."""
        ...

    async def close(self) -> None:
        """Ends what is left, frees everything and stops the engine."""
        ...


class Lease(Protocol):
    """What the host needs of services.cluster.registry.WorkerLease."""

    def update(self, **changes: Any) -> None:
        """Changes the published record, from any thread."""
        ...

    def release(self) -> None:
        """Takes the record back."""
        ...


def run_service(settings: C, service: str, serve: Callable[[C, asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """A worker process from its settings to its end: logs, traces, parent, signals, event loop. Raises what ends it."""
    logs.setup(settings.log_level, service=service, worker_id=settings.id)
    telemetry.setup(service, settings.otlp, instance_id=settings.id)
    process.die_with_parent()

    async def run() -> None:
        with process.stop_signals() as stop:
            await serve(settings, stop)

    try:
        process.run_async(run())
    finally:
        telemetry.shutdown()


@contextlib.contextmanager
def held(lease: L) -> Iterator[L]:
    """Releases the lease, if there is one, at the end."""
    try:
        yield lease
    finally:
        if lease is not None:
            lease.release()


async def load_or_stop(load: Callable[[], S], lease: Lease | None, stop: asyncio.Event) -> S:
    """Runs a long `load` beside the event loop. A process that is told to stop meanwhile ends at once, cleanly."""
    loading = asyncio.ensure_future(asyncio.to_thread(load))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if loading.done():
        return loading.result()
    if lease is not None:
        await asyncio.to_thread(lease.release)
    telemetry.shutdown()
    # A thread cannot be interrupted, and leaving in an orderly way would wait for it: nothing is held yet.
    os._exit(0)


async def serve_until_drained(worker: Worker, server: RpcServer, lease: Lease | None, stop: asyncio.Event) -> None:
    """A worker's life: ready, until `stop` or DrainWorker, then draining until nothing is left, then gone.

    `server` has started. Worker and server are closed when this returns or raises. Raises the worker's own failure.
    """
    publishing = asyncio.create_task(_publish_load(worker, lease))
    try:
        await server.set_serving(True)
        _publish(lease, "ready")
        await _first_of(worker, stop.wait(), worker.drain_requested.wait())
        logger.info("draining")
        worker.begin_drain()
        _publish(lease, "draining")
        await server.set_serving(False)
        await _first_of(worker, worker.wait_idle())
    finally:
        publishing.cancel()
        await worker.close()
        await server.stop(SERVER_GRACE_S)


async def _publish_load(worker: Worker, lease: Lease | None) -> None:
    """Gateways with a session hear the load with each step; this is for everybody else, so it may be a little old."""
    while lease is not None:
        lease.update(**worker.load().record_fields())
        await asyncio.sleep(PUBLISH_INTERVAL_S)


def _publish(lease: Lease | None, state: str) -> None:
    if lease is not None:
        lease.update(state=state)


async def _first_of(worker: Worker, *waits: Coroutine[Any, Any, Any]) -> None:
    """Returns when one of the waits does. Raises what the worker failed with if that comes first."""
    tasks = {asyncio.create_task(wait) for wait in waits}
    try:
        await asyncio.wait({*tasks, worker.failed}, return_when=asyncio.FIRST_COMPLETED)
        if worker.failed.done():
            worker.failed.result()
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
