"""Starts a worker: its lease, its model, then engine and server for each combination of role and model, until it exits.

The model and its pages outlive a change of role. The worker object, its incarnation, and its published state do not. If
the model changes, the pages are freed too. Does not depend on specific roles: a worker package describes its part in a
`Role`.
"""

import asyncio
import contextlib
import functools
import gc
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from services.cluster.prefix_index import PrefixPublisher
from services.cluster.registry import MAX_TEXT_CHARS, WorkerLease, WorkerRecord, new_incarnation
from services.hub.models import with_local_model
from services.hub.source import served_name
from services.runtime import config, rpc, service_manager
from services.runtime.clock import SYSTEM_CLOCK
from services.runtime.errors import ConfigError, ModelError
from services.runtime.identity import AnswerIdentity
from services.runtime.model_size import start_budget_s, weight_bytes
from services.runtime.worker_state import WorkerState
from worker.config import WorkerConfig
from worker.gpu import GpuWatch, watch_gpu
from worker.host import load_or_stop, run_service, serve_until_drained, take_role, worker_identity
from worker.loading import LoadedModel
from worker.metrics import WorkerMetrics
from worker.models import Models
from worker.role import AnyRole, Common, Role
from worker.role_change import LOOK_S, Life, LifeChange, Lives, Wish, note_refused
from worker.threads import on_this_loop

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=WorkerConfig)

MakeEngine = Callable[[Callable[[Any], None]], Any]


def run(role: Role[C, Any, Any]) -> None:
    """Runs a worker with a fixed role and model, with the settings of the command line."""
    run_lives(config.load(role.settings, sys.argv[1:], prog=f"python -m {role.name}_worker"), [role])


def run_lives(
    settings: WorkerConfig,
    roles: Sequence[AnyRole],
    *,
    role_file: Path | None = None,
    other_models: Mapping[str, Path] | None = None,
    model_file: Path | None = None,
    max_asleep: int = 0,
) -> None:
    """Runs a worker process that has one of `roles` and one of its models at a time.

    It starts with the first role and the configured model, unless the files name others. The weights of up to
    `max_asleep` models stay in memory in addition to those of the loaded model.
    """
    settings = with_local_model(settings)
    name = settings.model_name or served_name(settings.model)
    folders = {name: settings.model, **(other_models or {})}
    lives = Lives(
        Wish({role.name: role for role in roles}, role_file),
        Wish({model: model for model in folders}, model_file),
    )
    models = Models(settings, folders, max_asleep=max_asleep)
    life = lives.wanted
    run_service(settings, life.role.name, functools.partial(_serve, lives, life, models))


@dataclass(slots=True)
class _Process:
    """The parts of a worker process that do not depend on its role, and the prepared engines of its roles."""

    settings: WorkerConfig
    models: Models
    gpu: GpuWatch | None
    lease: WorkerLease | None
    publisher: PrefixPublisher | None
    engines: dict[str, MakeEngine] = field(default_factory=dict)

    async def prepare(self, wanted: Life) -> None:
        """Prepares a state while another one is served, so that most failures occur before the change.

        Waits until Redis holds the record, because gateways use it to find the worker in its new state. Another model
        is only checked and not loaded, because memory may not suffice for both. Raises ConfigError or ModelError.
        """
        while self.lease is not None and not self.lease.is_held:  # noqa: ASYNC110 - set by a thread, without an event
            await asyncio.sleep(LOOK_S)
        worker_identity(self.settings, role=wanted.role.name)
        if wanted.model == self.models.awake.name:
            role, awake = wanted.role, self.models.awake
            self.engines[role.name] = await asyncio.to_thread(role.engine, awake.settings, awake.loaded)
        else:
            await asyncio.to_thread(self.models.check, wanted.model)

    async def change(self, present: Life, wanted: Life, stop: asyncio.Event) -> tuple[Life, str]:
        """Changes the state of the process. Returns the state and its new incarnation.

        If the change fails, restores the present state under a new incarnation. Raises ConfigError or ModelError if
        neither state is possible.
        """
        if wanted.model == present.model and wanted.role.name not in self.engines:
            await self.prepare(wanted)
        # The old engine must be freed before the new one is created, because each may use much host memory.
        gc.unfreeze()
        gc.collect()
        await asyncio.to_thread(take_role, self.settings, wanted.role.name)
        incarnation = self.begin_life(wanted)
        if wanted.model == present.model:
            return wanted, incarnation
        self.engines.clear()
        began_s, was_asleep = SYSTEM_CLOCK.monotonic(), wanted.model in self.models.asleep
        await asyncio.to_thread(self._lay_down, wanted.model)
        try:
            await self._wake(wanted, stop)
        except (ModelError, ConfigError) as error:
            note_refused(wanted, error)
            return await self._come_back(present, stop)
        facts = {"model": wanted.model, "was_asleep": was_asleep, "seconds": SYSTEM_CLOCK.monotonic() - began_s}
        logger.info("another model is awake", extra=facts)
        return wanted, incarnation

    async def _come_back(self, life: Life, stop: asyncio.Event) -> tuple[Life, str]:
        await asyncio.to_thread(take_role, self.settings, life.role.name)
        incarnation = self.begin_life(life)
        await self._wake(life, stop)
        return life, incarnation

    def _lay_down(self, wanted: str) -> None:
        self.unpublish()  # its pages will belong to another model
        self.models.lay_down(wanted)
        gc.collect()

    async def _wake(self, life: Life, stop: asyncio.Event) -> None:
        await load_or_stop(lambda: self.models.wake(life.role, life.model), self.lease, stop)
        self.publisher = _publisher(self.settings, self.lease)
        await self.make_engine(life.role, stop)

    async def make_engine(self, role: AnyRole, stop: asyncio.Event) -> None:
        """Prepares the engine of a role while the process serves nothing."""
        awake = self.models.awake
        engine = await load_or_stop(lambda: role.engine(awake.settings, awake.loaded), self.lease, stop)
        self.engines[role.name] = engine

    def begin_life(self, life: Life) -> str:
        """Starts a new incarnation, also in the record, so that messages for an earlier one have no effect."""
        incarnation = new_incarnation()
        if self.lease is not None:
            self.lease.update(
                role=life.role.name,
                model=life.model,
                incarnation=incarnation,
                # The order of incarnations must hold even if the clock was set back.
                started_unix_ns=max(SYSTEM_CLOCK.unix_ns(), self.lease.record.started_unix_ns + 1),
                state=WorkerState.STARTING,
                address="",
                metrics_address="",
                channels={},
                max_running=0,
                **_NOT_LOADED,
            )
            if self.publisher is not None:
                self.publisher.begin_life(self.lease.record.order)
        return incarnation

    def unpublish(self) -> None:
        """Stops publishing the cached pages of this worker."""
        if self.publisher is not None:
            self.publisher.release()


async def _serve(lives: Lives, life: Life, models: Models, settings: WorkerConfig, stop: asyncio.Event) -> None:
    service_manager.tell_status(f"loading {settings.model}")
    service_manager.ask_for_time(start_budget_s(weight_bytes(settings.model)))
    role = life.role
    with contextlib.ExitStack() as stack:
        lease = _lease(life, settings, stop)
        if lease is not None:
            stack.callback(lease.release)
        process = _Process(settings, models, None, lease, _publisher(settings, lease))
        stack.callback(process.unpublish)
        stack.callback(models.close)
        await load_or_stop(lambda: models.wake(role, life.model), lease, stop)
        await process.make_engine(role, stop)
        process.gpu = watch_gpu(models.awake.loaded.gpu_uuid)
        if process.gpu is not None:
            stack.callback(process.gpu.release)
        incarnation = new_incarnation() if lease is None else lease.record.incarnation
        failed: Life | None = None
        while await _live(process, LifeChange(lives, life, process.prepare, failed=failed), life, incarnation, stop):
            wanted = lives.wanted
            life, incarnation = await process.change(life, wanted, stop)
            failed = None if life == wanted else wanted


async def _live(process: _Process, change: LifeChange, life: Life, incarnation: str, stop: asyncio.Event) -> bool:
    """Runs the process in one role with one model. Returns whether another state follows."""
    role, awake, lease = life.role, process.models.awake, process.lease
    settings = awake.settings
    metrics = WorkerMetrics(worker_id=settings.id, program=f"{role.name}-worker")
    common = Common(
        settings,
        incarnation,
        awake.loaded,
        process.engines.pop(role.name),
        awake.identity.numerics,
        metrics,
        lease,
        process.publisher,
        process.gpu,
    )
    made = role.make(common)
    common.watch()
    metrics_address = metrics.serve(settings, made.worker.load)
    server = rpc.make_server(role.services, with_reflection=False, incarnation=incarnation)
    for add in made.add_services:
        add(server.server)
    address = settings.address(await server.start(settings.host, settings.port))
    if lease is not None:
        said = {**_record_fields(awake.loaded, awake.identity), **made.worker.load().record_fields()}
        said |= {**made.record_fields, "asleep": process.models.asleep}
        lease.update(address=address, metrics_address=metrics_address, facts=awake.facts, **said)
    # Long-lived objects are excluded from full garbage collections, which would delay a step.
    gc.collect()
    gc.freeze()
    logger.info("ready", extra={"address": address, "pages": awake.loaded.limits.num_pages})
    await serve_until_drained(made.worker, server, lease, stop, drain_timeout_s=settings.drain_timeout, change=change)
    await asyncio.to_thread(metrics.close)
    return not stop.is_set() and not made.worker.drain_requested.is_set()


_NOT_LOADED: Mapping[str, Any] = {"facts": None, "identity": "", "layout_fingerprint": "", "exact": False}
"""Record fields of a model that is not loaded yet."""


def _record_fields(model: LoadedModel, identity: AnswerIdentity) -> dict[str, Any]:
    """Returns the properties of a loaded model that other processes need, as fields of a WorkerRecord."""
    layout = model.pool.layout
    return {
        "exact": model.is_exact,
        "identity": identity.text,
        "arithmetic": identity.numerics,
        "kernels_error": model.kernels_error[:MAX_TEXT_CHARS],
        "layout_fingerprint": model.fingerprint,
        "page_size": layout.page_size,
        "tensor_parallel": model.parallelism.tensor,
        "pipeline_parallel": model.parallelism.pipeline,
        "max_sequence_tokens": model.limits.max_sequence_tokens,
        "kv_bytes_per_token": layout.page_bytes // layout.page_size,
    }


def _lease(life: Life, settings: WorkerConfig, stop: asyncio.Event) -> WorkerLease | None:
    if settings.redis is None:
        return None
    leave = on_this_loop(lambda _: stop.set())
    said = {**settings.record_fields(incarnation=new_incarnation()), "role": life.role.name, "model": life.model}
    record = WorkerRecord(**said)
    lease = WorkerLease(
        settings.redis, cluster=settings.cluster, record=record, on_lost=leave, secrets=settings.secrets
    )
    lease.start()
    return lease


def _publisher(settings: WorkerConfig, lease: WorkerLease | None) -> PrefixPublisher | None:
    """Starts publishing the cached pages, from startup on, so that pages of an earlier incarnation are forgotten."""
    if settings.redis is None or lease is None:
        return None
    publisher = PrefixPublisher(settings.redis, cluster=settings.cluster, record=lease.record)
    publisher.start()
    return publisher
