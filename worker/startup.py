"""Starts a worker: lease, model, then a life in each of its roles: engine, server; until it is told to leave.

Model and pages outlive a role; the worker, its incarnation and all that others know of it do not. Knows no role by
name: a worker package says in a `Role` what its own part is made of.
"""

import asyncio
import contextlib
import functools
import gc
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from services.cluster.prefix_index import PrefixPublisher
from services.cluster.registry import WorkerLease, WorkerRecord, new_incarnation
from services.hub.models import with_local_model
from services.runtime import config, rpc, service_manager
from services.runtime.clock import SYSTEM_CLOCK
from services.runtime.identity import AnswerIdentity
from services.runtime.model_facts import ModelFacts, read_model_facts
from services.runtime.model_size import start_budget_s, weight_bytes
from services.runtime.worker_state import WorkerState
from services.structured.grammar import grammar_library
from worker.config import WorkerConfig
from worker.gpu import GpuWatch, watch_gpu
from worker.host import load_or_stop, run_service, serve_until_drained, take_role, worker_identity
from worker.loading import LoadedModel
from worker.metrics import WorkerMetrics
from worker.role import AnyRole, Common, Role
from worker.role_change import LOOK_S, RoleChange, Roles
from worker.threads import on_this_loop

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=WorkerConfig)

MakeEngine = Callable[[Callable[[Any], None]], Any]


def run(role: Role[C, Any, Any]) -> None:
    """Runs a worker that keeps its role, with the settings of the command line."""
    run_roles(config.load(role.settings, sys.argv[1:], prog=f"python -m {role.name}_worker"), Roles([role]))


def run_roles(settings: WorkerConfig, roles: Roles) -> None:
    """Runs a worker process, which has one of its roles after the other."""
    settings = with_local_model(settings)
    role = roles.wanted
    run_service(settings, role.name, functools.partial(_serve, roles, role))


@dataclass(slots=True)
class _Process:
    """What a worker process has, whatever its role is, and the engines of roles that it can have at once."""

    settings: WorkerConfig
    model: LoadedModel
    identity: AnswerIdentity
    facts: ModelFacts
    gpu: GpuWatch | None
    lease: WorkerLease | None
    publisher: PrefixPublisher | None
    engines: dict[str, MakeEngine] = field(default_factory=dict)

    async def prepare(self, role: AnyRole) -> None:
        """Does what a role needs and what may fail, while another one is served. Raises ConfigError or ModelError.

        Waits until Redis holds the record: through it gateways find the worker in its new role.
        """
        while self.lease is not None and not self.lease.is_held:  # noqa: ASYNC110 - a thread's, no event
            await asyncio.sleep(LOOK_S)
        worker_identity(self.settings, role=role.name)
        self.engines[role.name] = await asyncio.to_thread(role.engine, self.settings, self.model)

    def begin_life(self, role: AnyRole) -> str:
        """Gives the process a new incarnation, also in its record: what belongs to an earlier one has no effect."""
        incarnation = new_incarnation()
        if self.lease is not None:
            self.lease.update(
                role=role.name,
                incarnation=incarnation,
                # Lives are in order even where the clock was set back meanwhile.
                started_unix_ns=max(SYSTEM_CLOCK.unix_ns(), self.lease.record.started_unix_ns + 1),
                state=WorkerState.STARTING,
                address="",
                metrics_address="",
                channels={},
                max_running=0,
            )
            if self.publisher is not None:
                self.publisher.begin_life(self.lease.record.order)
        return incarnation


async def _serve(roles: Roles, role: AnyRole, settings: WorkerConfig, stop: asyncio.Event) -> None:
    service_manager.tell_status(f"loading {settings.model}")
    service_manager.ask_for_time(start_budget_s(weight_bytes(settings.model)))
    with contextlib.ExitStack() as stack:
        lease = _lease(role, settings, stop)
        if lease is not None:
            stack.callback(lease.release)
        publisher = _publisher(settings, lease)
        if publisher is not None:
            stack.callback(publisher.release)
        model = await load_or_stop(lambda: role.load(settings), lease, stop)
        stack.enter_context(contextlib.closing(model))
        make_engine = await load_or_stop(lambda: role.engine(settings, model), lease, stop)
        gpu = watch_gpu(model.gpu_uuid)
        if gpu is not None:
            stack.callback(gpu.release)
        facts = await load_or_stop(lambda: read_model_facts(settings.model), lease, stop)
        identity = model.identity(vocabulary=facts.vocabulary, grammars=grammar_library())
        process = _Process(settings, model, identity, facts, gpu, lease, publisher, {role.name: make_engine})
        incarnation = new_incarnation() if lease is None else lease.record.incarnation
        while await _live(process, roles, role, incarnation, stop):
            role = roles.wanted
            if role.name not in process.engines:
                await process.prepare(role)
            # The last role's engine goes before the next one's comes: each may have a lot of the host's memory.
            gc.unfreeze()
            gc.collect()
            await asyncio.to_thread(take_role, settings, role.name)
            incarnation = process.begin_life(role)


async def _live(process: _Process, roles: Roles, role: AnyRole, incarnation: str, stop: asyncio.Event) -> bool:
    """A process's life in one role. Returns whether another one follows."""
    settings, lease = process.settings, process.lease
    metrics = WorkerMetrics(worker_id=settings.id, program=f"{role.name}-worker")
    common = Common(
        settings,
        incarnation,
        process.model,
        process.engines.pop(role.name),
        process.identity.numerics,
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
        said = {**_record_fields(process.model, process.identity), **made.worker.load().record_fields()}
        said |= made.record_fields
        lease.update(address=address, metrics_address=metrics_address, facts=process.facts, **said)
    # What was loaded for good is not looked at again by every full collection, which would hold up a step.
    gc.collect()
    gc.freeze()
    logger.info("ready", extra={"address": address, "pages": process.model.limits.num_pages})
    change = RoleChange(roles, role, process.prepare)
    await serve_until_drained(made.worker, server, lease, stop, drain_timeout_s=settings.drain_timeout, change=change)
    await asyncio.to_thread(metrics.close)
    return not stop.is_set() and not made.worker.drain_requested.is_set()


def _record_fields(model: LoadedModel, identity: AnswerIdentity) -> dict[str, Any]:
    """Returns what others must know of a loaded model, as fields of a WorkerRecord."""
    layout = model.pool.layout
    return {
        "exact": model.is_exact,
        "identity": identity.text,
        "arithmetic": identity.numerics,
        "layout_fingerprint": model.fingerprint,
        "page_size": layout.page_size,
        "tensor_parallel": model.parallelism.tensor,
        "pipeline_parallel": model.parallelism.pipeline,
        "max_sequence_tokens": model.limits.max_sequence_tokens,
        "kv_bytes_per_token": layout.page_bytes // layout.page_size,
    }


def _lease(role: AnyRole, settings: WorkerConfig, stop: asyncio.Event) -> WorkerLease | None:
    if settings.redis is None:
        return None
    leave = on_this_loop(lambda _: stop.set())
    record = WorkerRecord(role=role.name, **settings.record_fields(incarnation=new_incarnation()))
    lease = WorkerLease(
        settings.redis, cluster=settings.cluster, record=record, on_lost=leave, secrets=settings.secrets
    )
    lease.start()
    return lease


def _publisher(settings: WorkerConfig, lease: WorkerLease | None) -> PrefixPublisher | None:
    """Says which pages can be found here; from the start on, so that those of an earlier life are forgotten."""
    if settings.redis is None or lease is None:
        return None
    publisher = PrefixPublisher(settings.redis, cluster=settings.cluster, record=lease.record)
    publisher.start()
    return publisher
