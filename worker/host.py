"""The life of a worker process: identity, readiness, its load in Redis, draining, end.

Knows no engine, no model and no role.
"""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from services.cluster.registry import WorkerLease
from services.runtime import logs, process, rpc, service_manager, telemetry
from services.runtime.addresses import is_loopback
from services.runtime.membership import Member
from services.runtime.rpc import RpcServer, set_identity, set_member
from services.runtime.tls import Identity
from services.runtime.worker_state import WorkerState
from worker.config import WorkerConfig
from worker.engine_worker import EngineWorker

# Sessions are closed by then; what is left are health checks and Links that end by themselves.
SERVER_GRACE_S = 1.0
PUBLISH_INTERVAL_S = 0.5
WATCH_INTERVAL_S = 0.25
CONFIRM_INTERVAL_S = 0.05
FIRST_SESSION_S = 3.0
"""How long a new worker waits for its first gateway before it counts as ready: a gateway that looks takes a second."""

SWITCH_INTERVAL_S = 1e-4
"""How long the engine's thread waits for the interpreter at most when its kernels are done: the event loop has it
meanwhile, and Python's own 5 ms are longer than a step. Steps come first; what a step brings is sent during the next.
"""

S = TypeVar("S")
C = TypeVar("C", bound=WorkerConfig)

logger = logging.getLogger(__name__)


def run_service(settings: C, service: str, serve: Callable[[C, asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """A worker process from its settings to its end: logs, membership, traces, parent, signals, event loop.

    Raises what ends it.
    """
    logs.setup(settings.log_level, service=service, worker_id=settings.id)
    process.be_nice(settings.nice)
    if settings.cores is not None:
        process.keep_to_cores(settings.cores)
    process.die_with_parent()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    role = service.removesuffix("-worker")
    set_identity(worker_identity(settings, role=role))
    _join(settings, role=role)
    telemetry.setup(service, settings.otlp, instance_id=settings.id)

    async def run() -> None:
        with process.stop_signals() as stop:
            await serve(settings, stop)

    try:
        process.run_async(run())
    finally:
        telemetry.shutdown()


def worker_identity(settings: WorkerConfig, *, role: str) -> Identity | None:
    """The certificate of a worker, which must name its role and the host that it advertises; None: no TLS.

    Raises ConfigError.
    """
    if settings.tls is None:
        return None
    is_within_host = settings.transport in ("shm", "cuda_ipc") or is_loopback(settings.advertise_host or settings.host)
    if settings.insecure and not is_within_host:
        logger.warning("KV pages on the channel tcp or nccl are not encrypted, as --insecure asks for it")
    return Identity(settings.tls, roles=(role,), host=settings.advertise_host or settings.host)


def channel_tls(settings: WorkerConfig) -> Identity | None:
    """What pages are encrypted with on their way to and from other hosts; None: they are not."""
    identity = rpc.identity()
    return identity if identity is not None and identity.is_mutual and not settings.insecure else None


def _join(settings: WorkerConfig, *, role: str) -> None:
    """Makes this process prove that it is of its cluster, and ask its callers for the same."""
    if settings.secrets is not None:
        set_member(Member(settings.secrets, role))
    elif settings.tls is None:
        logger.warning(
            "this worker serves everybody who reaches its port: it has neither --cluster-secret-file nor --redis, from "
            "which it would have its cluster's secret"
        )
    if settings.tls is None and not is_loopback(settings.host):
        logger.warning("prompts, answers and pages pass unencrypted through the network, as --insecure asks for it")


async def load_or_stop(load: Callable[[], S], lease: WorkerLease | None, stop: asyncio.Event) -> S:
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


async def serve_until_drained(
    worker: EngineWorker[Any],
    server: RpcServer,
    lease: WorkerLease | None,
    stop: asyncio.Event,
    *,
    drain_timeout_s: float | None = None,
) -> None:
    """A worker's life: ready, until `stop` or DrainWorker, then draining until nothing is left, then gone.

    It is ready once Redis has its record, without which no gateway finds it, and a gateway has found it; where none
    comes within FIRST_SESSION_S, without. So an update that takes the next worker down when this one is
    ready leaves gateways one that they know. Losing Redis or a gateway later changes nothing.
    After `drain_timeout_s` of draining it goes with what is left, which fails. `server` has started. Worker and server
    are closed when this returns or raises. Raises the worker's own failure.
    """
    background = [asyncio.create_task(_watch_engine(worker))]
    if lease is not None:
        background.append(asyncio.create_task(_publish_load(worker, lease)))
    try:
        _publish(lease, WorkerState.READY)
        ends = (stop.wait, worker.drain_requested.wait)
        await _first_of(worker, background, _found(worker, lease), *(end() for end in ends))
        if not stop.is_set() and not worker.drain_requested.is_set():
            await server.set_serving(True)
            service_manager.tell_ready("ready")
            await _first_of(worker, background, *(end() for end in ends))
        logger.info("draining")
        service_manager.tell_stopping("draining")
        worker.begin_drain()
        _publish(lease, WorkerState.DRAINING)
        await server.set_serving(False)
        await _first_of(worker, background, _drained(worker, drain_timeout_s))
    finally:
        # The watch continues meanwhile: an engine that hangs now must not keep the worker from ending.
        try:
            await worker.close()
        finally:
            for task in background:
                task.cancel()
            await server.stop(SERVER_GRACE_S)
    if worker.failed.done():
        worker.failed.result()


async def _found(worker: EngineWorker[Any], lease: WorkerLease | None) -> None:
    """Returns when a gateway has found this worker as a ready one, or at once where no registry lists it."""
    if lease is None:
        return  # gateways are told of it in other ways, and when they like
    while lease.confirmed_state is not WorkerState.READY:  # noqa: ASYNC110 - a thread's, no event
        await asyncio.sleep(CONFIRM_INTERVAL_S)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FIRST_SESSION_S):
            await worker.sessions.first.wait()


async def _publish_load(worker: EngineWorker[Any], lease: WorkerLease) -> None:
    """Gateways with a session hear the load with each step; this is for everybody else, so it may be a little old."""
    while True:
        lease.update(**worker.load().record_fields(), certificate_end_unix_s=certificate_end_unix_s())
        await asyncio.sleep(PUBLISH_INTERVAL_S)


def certificate_end_unix_s() -> int:
    """When this process's certificate expires, as its record has it; 0: it has none."""
    identity = rpc.identity()
    return 0 if identity is None else max(0, int(identity.end_unix_s()))


async def _watch_engine(worker: EngineWorker[Any]) -> None:
    while True:
        await asyncio.sleep(WATCH_INTERVAL_S)
        worker.check_engine(WATCH_INTERVAL_S)


async def _drained(worker: EngineWorker[Any], timeout_s: float | None) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await worker.wait_idle()
    except TimeoutError:
        load = worker.load()
        unfinished = {"running": load.running, "waiting": load.waiting}
        logger.warning("the drain took longer than its limit; what is left fails", extra=unfinished)


def _publish(lease: WorkerLease | None, state: WorkerState) -> None:
    if lease is not None:
        lease.update(state=state)


async def _first_of(
    worker: EngineWorker[Any], background: Sequence["asyncio.Task[None]"], *waits: Coroutine[Any, Any, Any]
) -> None:
    """Returns when one of the waits does. Raises what the worker, or something behind it, failed with before."""
    tasks = {asyncio.create_task(wait) for wait in waits}
    try:
        await asyncio.wait({*tasks, *background, worker.failed}, return_when=asyncio.FIRST_COMPLETED)
        if worker.failed.done():
            worker.failed.result()
        for task in (*background, *tasks):
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
