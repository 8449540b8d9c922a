"""The parts of a worker that do not depend on its role, and the interface of a role.

A worker package describes its specific part in a `Role`. This module does not depend on any role.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import grpc

from kv_transfer.link_end import LinkSetup
from kv_transfer.protocol.counters import Counters
from kv_transfer.receive_link import ReceiveTarget
from kv_transfer.receiving import ChannelAddress, LinkReceiver
from kv_transfer.sending import SendLinks
from kv_transfer.wire import LinkIdentity
from services.cluster.prefix_index import PrefixPublisher
from services.cluster.registry import WorkerLease, named_channels
from services.runtime.clock import SYSTEM_CLOCK
from services.runtime.errors import ConfigError
from services.structured.grammar import Grammars
from worker.config import WorkerConfig
from worker.engine import EngineFacts
from worker.engine_worker import Around, EngineWorker
from worker.gpu import GpuWatch
from worker.host import channel_tls
from worker.loading import LoadedModel
from worker.metrics import WorkerMetrics

C = TypeVar("C", bound=WorkerConfig)
R = TypeVar("R")
E = TypeVar("E")


@dataclass(frozen=True)
class Common(Generic[C, R, E]):
    """The shared parts of both workers after the model is loaded. `R` and `E` are the role's reports and engine."""

    settings: C
    incarnation: str
    model: LoadedModel
    make_engine: Callable[[Callable[[R], None]], E]
    numerics: str
    """Name of the arithmetic that produces its tokens."""
    metrics: WorkerMetrics
    lease: WorkerLease | None
    publisher: PrefixPublisher | None
    gpu: GpuWatch | None
    counters: Counters = field(default_factory=Counters)

    @functools.cached_property
    def link_setup(self) -> LinkSetup:
        """Returns this worker's side of its Links, for sending and receiving."""
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
        """Returns the Links on which the worker sends pages."""
        lease = self.lease
        return SendLinks(
            self.link_setup,
            on_channels=None if lease is None else lambda channels: lease.update(channels=named_channels(channels)),
        )

    def receiver(self, target: ReceiveTarget) -> LinkReceiver:
        """Returns the service for Links that receive pages. Raises ConfigError if their port cannot be bound."""
        settings = self.settings
        try:
            address = ChannelAddress(
                settings.host, settings.transfer_port, settings.advertise_host, settings.advertise_transfer_port
            )
            return LinkReceiver(self.link_setup, target, address=address)
        except OSError as error:
            raise ConfigError(
                f"--transfer-port is {settings.transfer_port}, which cannot be listened on: {error}"
            ) from error

    def around(self) -> Around:
        """Returns the components around the engine of the worker."""
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
        """Returns the properties of the engine."""
        model = self.model
        return EngineFacts(
            model.limits, model.fingerprint, lambda: model.loss, model.check, model.adapters, embeds=model.embeds
        )

    def watch(self) -> None:
        """Exports the metrics that do not depend on a role."""
        self.metrics.watch_faults(self.counters.snapshot)
        if self.model.tier is not None:
            self.metrics.watch_host_tier(self.model.tier.stats)
        if self.gpu is not None:
            self.metrics.watch_gpu(self.gpu.use)


@dataclass(frozen=True, slots=True)
class Made:
    """A worker, the functions that add its services to a server, and the role-specific fields of its record."""

    worker: EngineWorker[Any]
    add_services: Sequence[Callable[[grpc.aio.Server], None]]
    record_fields: Mapping[str, Any] = field(default_factory=dict)


RoleName = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Role(Generic[C, R, E]):
    """One kind of worker: its name, settings, gRPC services, and factories.

    `load` loads the configured model, from retained weights if given. `engine` returns a factory that creates the
    role's engine from a loaded model and a report handler. Both run outside the event loop and raise ModelError or
    ConfigError. Creating the engine raises ConfigError if memory cannot be allocated.
    """

    name: RoleName
    settings: type[C]
    services: Sequence[str]
    load: Callable[[C, Any], LoadedModel]
    engine: Callable[[C, Any], Callable[[Callable[[R], None]], E]]
    make: Callable[[Common[C, R, E]], Made]


AnyRole: TypeAlias = Role[Any, Any, Any]
