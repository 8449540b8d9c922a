"""The life of a worker process: identity, readiness, its load in Redis, draining, end.

Knows no engine, no model and no role.
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
"""How long a worker that ends waits for gateways to read the last events: on a busy machine one may be seconds behind,
and what it has not read is lost, with the end of an answer that perhaps nobody else may continue."""
PUBLISH_INTERVAL_S = 0.5
WATCH_INTERVAL_S = 0.25
CONFIRM_INTERVAL_S = 0.05
FIRST_SESSION_S = 3.0
"""How long a new worker waits for its first gateway before it counts as ready: a gateway that looks takes a second."""
UNFOUND_S = 10.0
"""The time after which a worker that no gateway has connected to says so."""

SWITCH_INTERVAL_S = 1e-4
"""How long the engine's thread waits for the interpreter at most when its kernels are done: the event loop has it
meanwhile, and Python's own 5 ms are longer than a step. Steps come first; what a step brings is sent during the next.
"""

S = TypeVar("S")
C = TypeVar("C", bound=WorkerConfig)

logger = logging.getLogger(__name__)


class Change(Protocol):
    """What a worker process is to be instead of what it is."""

    async def due(self) -> None:
        """Returns when the process is to change, and can."""
        ...

    async def withdrawn(self) -> None:
        """Returns when the process is to stay as it is after all."""
        ...


class NoChange:
    """A process that stays as it is."""

    async def due(self) -> None:
        """Never returns."""
        await asyncio.Event().wait()

    withdrawn = due


def run_service(settings: C, role: str, serve: Callable[[C, asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """A worker process from its settings to its end: logs, membership, traces, parent, signals, event loop.

    Raises what ends it.
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
    """Has logs, traces, certificates and proofs say from here on that this process is a worker of this role.

    Blocks while traces of the role before are exported. Raises ConfigError.
    """
    telemetry.shutdown()
    service = f"{role}-worker"
    logs.setup(settings.log_level, service=service, worker_id=settings.id)
    set_identity(worker_identity(settings, role=role))
    if settings.secrets is not None:
        set_member(Member(settings.secrets, role))
    telemetry.setup(service, settings.otlp, instance_id=settings.id)


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


def _warn(settings: WorkerConfig) -> None:
    """Says what strangers in the network can do."""
    if settings.secrets is None and settings.tls is None:
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
    change: Change | None = None,
) -> None:
    """A worker's life: ready, until `stop`, DrainWorker or a change, then draining until nothing is left, then gone.

    It is ready once Redis has its record, without which no gateway finds it, and a gateway has found it; where none
    comes within FIRST_SESSION_S, without. So an update that takes the next worker down when this one is
    ready leaves gateways one that they know. Losing Redis or a gateway later changes nothing.
    After `drain_timeout_s` of draining it goes with what is left, which fails. A change that is withdrawn while the
    worker drains makes it ready again. `server` has started. Worker and server are closed when this returns or raises.
    Raises the worker's own failure.
    """
    background, telling = [asyncio.create_task(_watch_engine(worker))], []
    if lease is not None:
        background.append(asyncio.create_task(_publish_load(worker, lease)))
        telling.append(asyncio.create_task(_tell_whether_found(worker, lease)))
    life = _Life(worker, server, lease, stop, background)
    try:
        await life.run(change or NoChange(), drain_timeout_s)
    finally:
        # The watch continues meanwhile: an engine that hangs now must not keep the worker from ending.
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
    """Ready and draining, as `serve_until_drained` has it; `background` must not end before."""

    worker: EngineWorker[Any]
    server: RpcServer
    lease: WorkerLease | None
    stop: asyncio.Event
    background: Sequence["asyncio.Task[None]"]

    async def run(self, change: Change, drain_timeout_s: float | None) -> None:
        """Returns when nothing is left to do, or the limit of the drain has passed."""
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
        """Returns the place of the first wait that has ended, when one has.

        Raises what the worker, or something behind it, failed with before.
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
    """Returns when a gateway has found this worker as a ready one, or at once where no registry lists it."""
    if lease is None:
        return  # gateways are told of it in other ways, and when they like
    await _listed(lease)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FIRST_SESSION_S):
            await worker.sessions.first.wait()


async def _listed(lease: WorkerLease) -> None:
    """Returns when Redis has the record of a ready worker."""
    while lease.confirmed_state is not WorkerState.READY:  # noqa: ASYNC110 - a thread's, no event
        await asyncio.sleep(CONFIRM_INTERVAL_S)


async def _tell_whether_found(worker: EngineWorker[Any], lease: WorkerLease) -> None:
    """Says in the log when the first gateway connects, and before that that none does."""
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
