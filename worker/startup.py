"""Starts a worker: lease, engine, model, server; it lives until it is told to leave or loses its lease.

Knows no role: a worker package says in a `Role` what its own part is made of.
"""

import asyncio
import contextlib
import functools
import gc
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import grpc

from kv_transfer.link_end import LinkSetup
from kv_transfer.protocol.counters import Counters
from kv_transfer.sending import SendLinks
from kv_transfer.wire import LinkIdentity
from services.cluster.prefix_index import PrefixPublisher
from services.cluster.registry import WorkerLease, WorkerRecord, named_channels, new_incarnation
from services.hub.models import with_local_model
from services.runtime import config, rpc, service_manager
from services.runtime.clock import SYSTEM_CLOCK
from services.runtime.identity import AnswerIdentity
from services.runtime.model_facts import read_model_facts
from services.runtime.model_size import start_budget_s, weight_bytes
from services.structured.grammar import Grammars, grammar_library
from worker.config import WorkerConfig
from worker.engine import EngineFacts
from worker.engine_worker import Around, EngineWorker
from worker.gpu import GpuWatch, watch_gpu
from worker.host import channel_tls, load_or_stop, run_service, serve_until_drained
from worker.loading import Loaded, LoadedModel
from worker.metrics import WorkerMetrics
from worker.threads import on_this_loop

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=WorkerConfig)
R = TypeVar("R")
E = TypeVar("E")


@dataclass(frozen=True)
class Common(Generic[C, R, E]):
    """What both workers are made of, once the model is loaded. `R` and `E` are the role's reports and engine."""

    settings: C
    incarnation: str
    model: LoadedModel
    make_engine: Callable[[Callable[[R], None]], E]
    numerics: str
    """Which arithmetic its tokens come from."""
    metrics: WorkerMetrics
    lease: WorkerLease | None
    publisher: PrefixPublisher | None
    gpu: GpuWatch | None
    counters: Counters = field(default_factory=Counters)

    @functools.cached_property
    def link_setup(self) -> LinkSetup:
        """What this worker brings to its Links, those on which it sends and those on which it receives."""
        model = self.model
        identity = LinkIdentity(
            self.settings.id,
            self.incarnation,
            model.fingerprint,
            model.is_exact,
            arithmetic=self.numerics,
            tensor_parallel=model.parallelism.tensor,
            pipeline_parallel=model.parallelism.pipeline,
        )
        return LinkSetup(
            identity,
            model.pool,
            model.allocator,
            (self.settings.transport,),
            counters=self.counters,
            tls=channel_tls(self.settings),
        )

    def send_links(self) -> SendLinks:
        """The Links on which it sends pages."""
        lease = self.lease
        return SendLinks(
            self.link_setup,
            on_channels=None if lease is None else lambda channels: lease.update(channels=named_channels(channels)),
        )

    def around(self) -> Around:
        """What surrounds the engine of its worker."""
        vocab_size = self.model.limits.vocab_size
        return Around(
            incarnation=self.incarnation,
            links=self.send_links(),
            metrics=self.metrics,
            clock=SYSTEM_CLOCK,
            grammars=Grammars(self.settings.model / "tokenizer.json", vocab_size=vocab_size),
            step_timeout_s=self.settings.step_timeout,
            gpu=None if self.gpu is None else self.gpu.message,
            on_pages_changed=None if self.publisher is None else self.publisher.note,
        )

    @property
    def facts(self) -> EngineFacts:
        """What its worker knows of the engine."""
        model = self.model
        return EngineFacts(model.limits, model.fingerprint, lambda: model.loss, model.check, model.adapters)

    def watch(self) -> None:
        """Has metrics read what belongs to no role."""
        self.metrics.watch_faults(self.counters.snapshot)
        if self.model.tier is not None:
            self.metrics.watch_host_tier(self.model.tier.stats)
        if self.gpu is not None:
            self.metrics.watch_gpu(self.gpu.use)


@dataclass(frozen=True, slots=True)
class Made:
    """A worker, what adds each of its services to a server, and what its record says beside what all records say."""

    worker: EngineWorker[Any]
    add_services: Sequence[Callable[[grpc.aio.Server], None]]
    record_fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Role(Generic[C, R, E]):
    """What one kind of worker is: its name, its settings, the gRPC services that it has, and how it is made.

    `load` loads the settings' model, away from the event loop. Raises ModelError or ConfigError.
    """

    name: Literal["prefill", "decode"]
    settings: type[C]
    services: Sequence[str]
    load: Callable[[C], Loaded[R, E]]
    make: Callable[[Common[C, R, E]], Made]


def run(role: Role[C, R, E]) -> None:
    """Runs a worker with the settings of the command line."""
    settings = config.load(role.settings, sys.argv[1:], prog=f"python -m {role.name}_worker")
    settings = with_local_model(settings)
    run_service(settings, f"{role.name}-worker", functools.partial(_serve, role))


async def _serve(role: Role[C, R, E], settings: C, stop: asyncio.Event) -> None:
    incarnation = new_incarnation()
    service_manager.tell_status(f"loading {settings.model}")
    service_manager.ask_for_time(start_budget_s(weight_bytes(settings.model)))
    with contextlib.ExitStack() as stack:
        lease = _lease(role, settings, incarnation, stop)
        if lease is not None:
            stack.callback(lease.release)
        publisher = _publisher(settings, lease)
        if publisher is not None:
            stack.callback(publisher.release)
        loaded = await load_or_stop(lambda: role.load(settings), lease, stop)
        model = loaded.model
        stack.enter_context(contextlib.closing(model))
        gpu = watch_gpu(model.gpu_uuid)
        if gpu is not None:
            stack.callback(gpu.release)
        facts = await load_or_stop(lambda: read_model_facts(settings.model), lease, stop)
        identity = model.identity(vocabulary=facts.vocabulary, grammars=grammar_library())
        metrics = WorkerMetrics(worker_id=settings.id, program=f"{role.name}-worker")
        common = Common(
            settings, incarnation, model, loaded.make_engine, identity.numerics, metrics, lease, publisher, gpu
        )
        made = role.make(common)
        common.watch()
        metrics_address = metrics.serve(settings, made.worker.load)
        server = rpc.make_server(role.services, with_reflection=False, incarnation=incarnation)
        for add in made.add_services:
            add(server.server)
        address = settings.address(await server.start(settings.host, settings.port))
        if lease is not None:
            said = {**_record_fields(model, identity), **made.worker.load().record_fields(), **made.record_fields}
            lease.update(address=address, metrics_address=metrics_address, facts=facts, **said)
        # What was loaded for good is not looked at again by every full collection, which would hold up a step.
        gc.collect()
        gc.freeze()
        logger.info("ready", extra={"address": address, "pages": model.limits.num_pages})
        await serve_until_drained(made.worker, server, lease, stop, drain_timeout_s=settings.drain_timeout)


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


def _lease(role: Role[C, R, E], settings: C, incarnation: str, stop: asyncio.Event) -> WorkerLease | None:
    if settings.redis is None:
        return None
    leave = on_this_loop(lambda _: stop.set())
    record = WorkerRecord(role=role.name, **settings.record_fields(incarnation=incarnation))
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
