"""The lifecycle of a worker process: identity, readiness, load reports in Redis, draining, and exit.

Does not depend on the engine, the model, or the role.
"""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from services.cluster.registry import WorkerLease
from services.runtime import logs, process, rpc, service_manager, telemetry
from services.runtime.addresses import is_loopback
from services.runtime.membership import Member
from services.runtime.rpc import RpcServer, set_identity, set_member
from services.runtime.tls import Identity
from services.runtime.worker_state import FOUND, UNFOUND, WorkerState
from worker.config import WorkerConfig
from worker.engine_worker import EngineWorker

SERVER_GRACE_S = 5.0
"""How long an exiting worker waits for gateways to read the last events, in seconds. On a busy machine, a gateway may
be seconds behind. Unread events are lost, including the end of a response that perhaps no other worker can continue."""
PUBLISH_INTERVAL_S = 0.5
WATCH_INTERVAL_S = 0.25
CONFIRM_INTERVAL_S = 0.05
FIRST_SESSION_S = 3.0
"""How long a new worker waits for its first gateway before it becomes ready. A gateway polls about once a second."""
UNFOUND_S = 10.0
"""Time without a gateway connection after which a worker logs a warning, in seconds."""

SWITCH_INTERVAL_S = 1e-4
"""Maximum time that the engine thread waits for the interpreter lock after its kernels finish. The event loop holds the
lock during that time, and Python's default of 5 ms is longer than a step. Steps have priority, and the results of a
step are sent during the next step."""

S = TypeVar("S")
C = TypeVar("C", bound=WorkerConfig)

logger = logging.getLogger(__name__)


class Change(Protocol):
    """A change of a worker process, such as another role or another model."""

    async def due(self) -> None:
        """Returns when the change is requested and possible."""
        ...

    async def withdrawn(self) -> None:
        """Returns when the change is no longer requested."""
        ...


class NoChange:
    """A process without changes."""

    async def due(self) -> None:
        """Never returns."""
        await asyncio.Event().wait()

    withdrawn = due


def run_service(settings: C, role: str, serve: Callable[[C, asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Runs a worker process to its end: logs, membership, traces, parent, signals, and event loop.

    Raises the error that ends it.
    """
    logs.setup(settings.log_level, service=f"{role}-worker", worker_id=settings.id)
    process.be_nice(settings.nice)
    if settings.cores is not None:
        process.keep_to_cores(settings.cores)
    process.die_with_parent()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    take_role(settings, role)
    _warn(settings)

    async def run() -> None:
        with process.stop_signals() as stop:
            await serve(settings, stop)

    try:
        process.run_async(run())
    finally:
        telemetry.shutdown()


def take_role(settings: WorkerConfig, role: str) -> None:
    """Sets the role of this process in logs, traces, certificates, and membership proofs.

    Blocks while the traces of the previous role are exported. Raises ConfigError.
    """
    telemetry.shutdown()
    service = f"{role}-worker"
    logs.setup(settings.log_level, service=service, worker_id=settings.id)
    set_identity(worker_identity(settings, role=role))
    if settings.secrets is not None:
        set_member(Member(settings.secrets, role))
    telemetry.setup(service, settings.otlp, instance_id=settings.id)


def worker_identity(settings: WorkerConfig, *, role: str) -> Identity | None:
    """Returns the certificate of a worker, which must contain its role and advertised host, or None without TLS.

    Raises ConfigError.
    """
    if settings.tls is None:
        return None
    is_within_host = settings.transport in ("shm", "cuda_ipc") or is_loopback(settings.advertise_host or settings.host)
    if settings.insecure and not is_within_host:
        logger.warning("KV pages on the channel tcp or nccl are not encrypted, as --insecure asks for it")
    return Identity(settings.tls, roles=(role,), host=settings.advertise_host or settings.host)


def channel_tls(settings: WorkerConfig) -> Identity | None:
    """Returns the identity that encrypts pages between hosts, or None if they are not encrypted."""
    identity = rpc.identity()
    return identity if identity is not None and identity.is_mutual and not settings.insecure else None


def _warn(settings: WorkerConfig) -> None:
    """Logs warnings about exposure to the network."""
    if settings.secrets is None and settings.tls is None:
        logger.warning(
            "this worker serves everybody who reaches its port: it has neither --cluster-secret-file nor --redis, from "
            "which it would have its cluster's secret"
        )
    if settings.tls is None and not is_loopback(settings.host):
        logger.warning("prompts, answers and pages pass unencrypted through the network, as --insecure asks for it")


async def load_or_stop(load: Callable[[], S], lease: WorkerLease | None, stop: asyncio.Event) -> S:
    """Runs a long `load` in a thread. If the process must stop before it completes, exits cleanly at once."""
    loading = asyncio.ensure_future(asyncio.to_thread(load))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if loading.done():
        return loading.result()
    if lease is not None:
        await asyncio.to_thread(lease.release)
    telemetry.shutdown()
    # A thread cannot be interrupted, and a graceful shutdown would wait for it. The worker holds no requests yet.
    os._exit(0)


async def serve_until_drained(
    worker: EngineWorker[Any],
    server: RpcServer,
    lease: WorkerLease | None,
    stop: asyncio.Event,
    *,
    drain_timeout_s: float | None = None,
    change: Change | None = None,
) -> None:
    """Runs a worker: ready until `stop`, DrainWorker, or a change, then draining until no work is left.

    The worker becomes ready once Redis has its record, without which gateways cannot find it, and a gateway has
    connected. If none connects within FIRST_SESSION_S, it becomes ready anyway. Waiting matters for a rolling update
    that stops the next worker when this one is ready: the gateways then have a worker that they know. Losing Redis or a
    gateway later changes nothing. After `drain_timeout_s` of draining, the remaining requests fail. If a change is
    withdrawn during the drain, the worker becomes ready again. `server` must have started. Closes the worker and the
    server in any case. Raises the worker's failure.
    """
    background, telling = [asyncio.create_task(_watch_engine(worker))], []
    if lease is not None:
        background.append(asyncio.create_task(_publish_load(worker, lease)))
        telling.append(asyncio.create_task(_tell_whether_found(worker, lease)))
    life = _Life(worker, server, lease, stop, background)
    try:
        await life.run(change or NoChange(), drain_timeout_s)
    finally:
        # The engine watchdog keeps running: an engine that hangs now must not keep the worker from exiting.
        try:
            await worker.close()
        finally:
            for task in (*background, *telling):
                task.cancel()
            await server.stop(SERVER_GRACE_S)
    if worker.failed.done():
        worker.failed.result()


@dataclass(frozen=True, slots=True)
class _Life:
    """The ready and draining phases of `serve_until_drained`. `background` tasks must not end before it."""

    worker: EngineWorker[Any]
    server: RpcServer
    lease: WorkerLease | None
    stop: asyncio.Event
    background: Sequence["asyncio.Task[None]"]

    async def run(self, change: Change, drain_timeout_s: float | None) -> None:
        """Returns when no work is left or the drain has timed out."""
        self._publish(WorkerState.READY)
        await self._first_of(_found(self.worker, self.lease), *self._ends())
        while True:
            if not self._is_leaving:
                await self.server.set_serving(True)
                service_manager.tell_ready("ready")
                await self._first_of(*self._ends(), change.due())
            logger.info("draining")
            self.worker.begin_drain()
            self._publish(WorkerState.DRAINING)
            await self.server.set_serving(False)
            first = await self._first_of(_drained(self.worker, drain_timeout_s), change.withdrawn(), *self._ends())
            if self._is_leaving:
                service_manager.tell_stopping("draining")
                if first:
                    await self._first_of(_drained(self.worker, drain_timeout_s))
                return
            if not first:
                return
            logger.info("what the worker was to change to is no longer wanted")
            self.worker.end_drain()
            self._publish(WorkerState.READY)

    @property
    def _is_leaving(self) -> bool:
        return self.stop.is_set() or self.worker.drain_requested.is_set()

    def _ends(self) -> tuple[Coroutine[Any, Any, Any], ...]:
        return self.stop.wait(), self.worker.drain_requested.wait()

    def _publish(self, state: WorkerState) -> None:
        if self.lease is not None:
            self.lease.update(state=state)

    async def _first_of(self, *waits: Coroutine[Any, Any, Any]) -> int:
        """Returns the index of the first wait that has ended.

        Raises the failure of the worker or of a background task if it occurred first.
        """
        tasks = [asyncio.create_task(wait) for wait in waits]
        failed = self.worker.failed
        try:
            await asyncio.wait({*tasks, *self.background, failed}, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                failed.result()
            for task in (*self.background, *tasks):
                if task.done():
                    task.result()
            return [task.done() for task in tasks].index(True)
        finally:
            for task in tasks:
                task.cancel()


async def _found(worker: EngineWorker[Any], lease: WorkerLease | None) -> None:
    """Returns when a gateway has connected to this ready worker, or at once if the worker is in no registry."""
    if lease is None:
        return  # gateways discover the worker by other means, at any time
    await _listed(lease)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FIRST_SESSION_S):
            await worker.sessions.first.wait()


async def _listed(lease: WorkerLease) -> None:
    """Returns when Redis has the record of a ready worker."""
    while lease.confirmed_state is not WorkerState.READY:  # noqa: ASYNC110 - set by a thread, without an event
        await asyncio.sleep(CONFIRM_INTERVAL_S)


async def _tell_whether_found(worker: EngineWorker[Any], lease: WorkerLease) -> None:
    """Logs the first gateway connection, and a warning if it takes too long."""
    await _listed(lease)
    first = worker.sessions.first
    try:
        async with asyncio.timeout(UNFOUND_S):
            await first.wait()
    except TimeoutError:
        remedy = (
            "if a gateway of this cluster and model runs, its log and `tandem doctor` say why: it does not reach this "
            "address, one side is without TLS, or the secrets differ"
        )
        logger.warning(UNFOUND, extra={"after_s": UNFOUND_S, "remedy": remedy})
        await first.wait()
    logger.info(FOUND)


async def _publish_load(worker: EngineWorker[Any], lease: WorkerLease) -> None:
    """Publishes the load to Redis. Gateways with a session receive it with each step, so this copy may be older."""
    while True:
        lease.update(**worker.load().record_fields(), certificate_end_unix_s=certificate_end_unix_s())
        await asyncio.sleep(PUBLISH_INTERVAL_S)


def certificate_end_unix_s() -> int:
    """Returns the expiry time of this process's certificate for its record, or 0 without a certificate."""
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
