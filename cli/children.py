"""The command line and environment of every process of `tandem up`. Pure: it starts nothing.

Each service's settings are declared by its own class, and forwarded; this module holds those that `up` decides.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from cli.cores import Machine, Share, share_out
from cli.gpus import VISIBLE_ENV, share_out_gpus
from cli.up_settings import UpSettings
from decode_worker.config import DecodeWorkerConfig
from dual_worker.config import DualWorkerConfig
from gateway.config import GatewayConfig
from gateway.models.catalog_file import ModelEntry, read_models_file
from planning.autoscaler.config import AutoscalerConfig
from prefill_worker.config import PrefillWorkerConfig
from services.runtime import last_words, service_manager
from services.runtime.adapters import check_adapters, write_folders
from services.runtime.config import all_settings_of, settings_of
from services.runtime.engines import VLLM
from services.runtime.errors import ConfigError
from services.runtime.process import DIE_WITH_PARENT_ENV

ROLES: tuple[str, ...] = ("prefill", "decode")
WORKERS: dict[str, type] = {"prefill": PrefillWorkerConfig, "decode": DecodeWorkerConfig}
"""Programs that keep their role, for engines that cannot change it."""
GATEWAY, AUTOSCALER = "gateway", "autoscaler"
START_UP_S = 20.0
"""What a worker on this machine takes to start, for the autoscaler, unless it is told."""
GATEWAY_NICENESS = -10
"""Workers compute whenever they have work, and the gateway, which needs little, would answer late behind them. It goes
first where it may; workers do not go last, since they would then get nothing beside any other program."""
SHARED_DRAIN_S = 30.0
"""What answers get to end where another model waits for their worker; they continue when it is theirs again."""
REDIS = "redis"
SOURCE_ROOT = Path(__file__).resolve().parents[1]
MAX_LABEL_CHARS = 40
"""A worker's id, which has it in its middle, may have 63."""
WORKER_HOST = "127.0.0.1"
"""Workers of `tandem up` talk to processes of this machine only, whatever --host opens for clients."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A process to keep running. `environment` is all of it, not an addition."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the parts of a cluster meet. Ports are real ones, never 0."""

    redis_url: str = field(repr=False)
    http_port: int
    grpc_port: int
    starter_key_digest: str | None = None
    """Digest of the key that `up` itself shows to the gateway, where keys are asked for."""
    decisions: Path | None = None
    """File of the autoscaler's decisions."""
    roles: Path | None = None
    """Folder of the files that say which workers have another role, or another model, than their first."""
    expected: Path | None = None
    """File of the numbers of workers that there are to be, which change while the gateway runs."""
    workers_at: Mapping[str, str] = field(default_factory=lambda: {"host": WORKER_HOST, "advertise_host": WORKER_HOST})
    """Where workers listen and are reached: on this machine, whatever machine Redis is on; empty: as they are told."""


class WorkerChoices(Protocol):
    """What is chosen for workers: the settings of `up`, or of `join`."""

    @property
    def pin(self) -> bool:
        """Whether each has processor cores of its own."""
        ...

    @property
    def decode_worker(self) -> DecodeWorkerConfig:
        """A decode worker's settings, as far as they are given."""
        ...

    def worker_texts(self, role: str) -> dict[str, str]:
        """The texts of the settings of the workers of a role, by name, as far as they are given."""
        ...


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model, what computes it, and how many workers of each role it has.

    `label` is part of their names; empty: no models file. They run with the interpreter `python`.
    """

    name: str
    path: Path
    num_prefill: int
    num_decode: int
    engine: str
    label: str = ""
    python: str = sys.executable
    lora: Mapping[str, Path] = field(default_factory=dict)
    """The folder of each of its adapters by name."""
    sharers: Mapping[str, Path] = field(default_factory=dict)
    """The folders of other models that have the same workers by turns, by name."""

    @property
    def fixed(self) -> str:
        """Why its workers cannot change their roles; empty: they can."""
        if self.engine == VLLM:
            return "computes with vLLM, which is loaded for one role"
        return f"has one of the models {', '.join((self.name, *self.sharers))} at a time" if self.sharers else ""

    def group(self, number: int) -> str:
        """The name of the workers that change their model together with the one of this number: one decodes."""
        return f"{self.label}-{number % max(1, self.num_decode)}"

    def worker_name(self, role: str, number: int) -> str:
        """The name of the worker of this number that begins in a role, whatever becomes of it."""
        return "-".join(filter(None, (role, self.label, str(number))))


def first_role(name: str) -> str:
    """The role in which a worker of this name begins."""
    return name.partition("-")[0]


def role_file(folder: Path, name: str) -> Path:
    """Where a worker of this name reads which role it is to have."""
    return folder / f"{name}.role"


def model_file(folder: Path | None, group: str) -> Path:
    """Where workers that change their model together read which one they are to have. Raises ConfigError."""
    if folder is None:
        raise ConfigError("models that share workers are served by `tandem up`, which says which one is awake")
    return folder / f"{group}.model"


def model_plans(settings: UpSettings) -> list[ModelPlan]:
    """All models to serve, in order. Raises ConfigError for the models file."""
    if settings.models is None:
        engine = settings.decode_worker.engine
        name, path, lora = settings.served_name, settings.model, settings.decode_worker.lora or {}
        return [ModelPlan(name, path, settings.prefill, settings.decode, engine, lora=lora)]
    plans: list[ModelPlan] = []
    shares: dict[str, int] = {}
    for entry in read_models_file(settings.models):
        if entry.share in shares:
            at = shares[entry.share]
            plans[at] = replace(plans[at], sharers={**plans[at].sharers, entry.name: entry.path})
            continue
        if entry.share:
            shares[entry.share] = len(plans)
        taken = {plan.label for plan in plans}
        engine = entry.engine or settings.decode_worker.engine
        if entry.share and engine == VLLM:
            raise ConfigError(f"{entry.name} shares workers, but --engine is vllm, which keeps its model: give native")
        check_adapters(entry.lora, engine=engine)
        plans.append(
            ModelPlan(
                entry.name,
                entry.path,
                settings.prefill if entry.num_prefill is None else entry.num_prefill,
                settings.decode if entry.num_decode is None else entry.num_decode,
                engine,
                _label(entry, taken),
                lora=entry.lora,
            )
        )
    return plans


def worker_specs(
    settings: WorkerChoices,
    plans: Sequence[ModelPlan],
    addresses: Addresses,
    environment: Mapping[str, str],
    machine: Machine,
    gpus: Sequence[str] = (),
) -> list[ChildSpec]:
    """For each model those that begin as prefill workers, then the others. `gpus`: as CUDA names those here."""
    num_workers = sum(plan.num_prefill + plan.num_decode for plan in plans)
    metrics_port = settings.decode_worker.metrics_port
    shares = iter(share_out(machine, num_workers))
    gpu_shares = iter(share_out_gpus(gpus, num_workers))
    specs: list[ChildSpec] = []
    for plan in plans:
        for role, count in zip(ROLES, (plan.num_prefill, plan.num_decode), strict=True):
            module, config = (
                ("dual_worker", DualWorkerConfig) if plan.engine != VLLM else (f"{role}_worker", WORKERS[role])
            )
            for number in range(count):
                gpu = next(gpu_shares)
                name = plan.worker_name(role, number)
                texts = {
                    **({"drain_timeout": SHARED_DRAIN_S} if plan.sharers else {}),
                    **settings.worker_texts(role),
                    **_core_texts(settings, next(shares)),
                    "id": name,
                    "role": role,
                    "role_file": None if addresses.roles is None or plan.fixed else role_file(addresses.roles, name),
                    "other_models": write_folders(plan.sharers) or None,
                    "model_file": model_file(addresses.roles, plan.group(number)) if plan.sharers else None,
                    "engine": plan.engine,
                    "lora": write_folders(plan.lora) or None,
                    "model": plan.path,
                    "model_name": plan.name,
                    "redis": addresses.redis_url,
                    **addresses.workers_at,
                    "port": 0,
                    "metrics_port": metrics_port + len(specs) if metrics_port else metrics_port,
                    "gpu_memory_share": None if gpu is None or gpu.memory_share == 1 else gpu.memory_share,
                }
                own_environment = environment if gpu is None else {**environment, VISIBLE_ENV: gpu.visible}
                spec = _spec(name, module, config, texts, own_environment)
                specs.append(replace(spec, command=(plan.python, *spec.command[1:])))
    return specs


def gateway_spec(settings: UpSettings, addresses: Addresses, environment: Mapping[str, str]) -> ChildSpec:
    """The gateway. Its ports are fixed here, so that it comes back on the same ones after a restart."""
    one_model = settings.models is None
    texts = {
        "min_prefill": min(settings.prefill, 1),
        "expect": _expected(settings),
        "expect_file": None if settings.autoscale or "expect" in settings.services else addresses.expected,
        **settings.services,
        "models": settings.models,
        "model": settings.model if one_model else None,
        "model_name": settings.served_name if one_model else None,
        "redis": addresses.redis_url,
        "http_host": settings.host,
        "http_port": addresses.http_port,
        "grpc_host": settings.host,
        "grpc_port": addresses.grpc_port,
        "starter_key_digest": addresses.starter_key_digest,
        "drain_s": settings.stop_grace,
        "model_files": None if one_model else addresses.roles,
        "linger_s": 0,  # no other gateway exists to which requests could go
        "nice": GATEWAY_NICENESS,
    }
    return _spec(GATEWAY, "gateway", GatewayConfig, texts, environment)


def autoscaler_spec(
    settings: UpSettings, addresses: Addresses, environment: Mapping[str, str], *, url: str, api_key: str | None
) -> ChildSpec:
    """The autoscaler of the gateway at `url`, with the key that `up` itself shows. Only where --autoscale is given."""
    assert settings.autoscale is not None, "an autoscaler has limits"
    least, most = settings.autoscale
    texts = {
        "scale_start_up": START_UP_S,
        **settings.services,
        "gateways": url,
        "actor": "up",
        "min_prefill": min(least, settings.prefill),
        "min_decode": least,
        "max_workers": most,
        "api_key": api_key,
        "gateway_cert": None if settings.gateway.tls is None else settings.gateway.tls.cert,
        "redis": addresses.redis_url,
        "decisions": addresses.decisions,
        "tls_cert": None,
        "tls_key": None,
        "tls_ca": None,
    }
    return _spec(AUTOSCALER, "planning.autoscaler", AutoscalerConfig, texts, environment)


def _expected(settings: UpSettings) -> str:
    """The number of workers of each role that are started, or that an autoscaler leaves at least."""
    if settings.autoscale is not None:
        return f"prefill={min(settings.autoscale[0], settings.prefill)},decode={settings.autoscale[0]}"
    plans = model_plans(settings)
    prefill, decode = sum(plan.num_prefill for plan in plans), sum(plan.num_decode for plan in plans)
    return f"prefill={prefill},decode={decode}"


def child_environment(environ: Mapping[str, str], *, parent_pid: int) -> dict[str, str]:
    """What children inherit: everything but the settings that `up` has read itself and passes on."""
    own = {setting.variable for setting in all_settings_of(UpSettings)}
    environment = {key: value for key, value in environ.items() if key not in own}
    environment[DIE_WITH_PARENT_ENV] = str(parent_pid)
    service_manager.hide_from_children(environment)
    environment[last_words.FILE_ENV] = ""  # the last words of `up` are the container's
    environment["PYTHONUNBUFFERED"] = "1"
    if (SOURCE_ROOT / "pyproject.toml").is_file():  # a checkout: children run its code, whatever else is installed
        inherited = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(SOURCE_ROOT), *([inherited] if inherited else [])])
    return environment


def _label(entry: ModelEntry, taken: set[str]) -> str:
    """The model's name as worker ids can have it, unlike those that are taken."""
    plain = re.sub("[^a-z0-9]+", "-", entry.name.lower()).strip("-")[:MAX_LABEL_CHARS].strip("-")
    label, number = plain, 2
    while label in taken:
        label, number = f"{plain}-{number}", number + 1
    return label


def _core_texts(settings: WorkerChoices, share: Share) -> dict[str, object]:
    """More threads than the share has are the user's wish; on its cores they would only wait for each other."""
    threads = settings.decode_worker.threads or share.threads
    is_pinned = settings.pin and 0 < threads <= len(share.cpus)
    return {"threads": threads, "cores": ",".join(map(str, share.cpus)) if is_pinned else None}


def _spec(
    name: str, module: str, config_class: type, texts: Mapping[str, object], environment: Mapping[str, str]
) -> ChildSpec:
    """A Python module with those of the settings that it has; one that is None is not given.

    What may hold a secret is a variable: command lines are readable for every user of the machine.
    -P: a folder named `gateway` in the current directory is not our gateway.
    """
    flags, private = [], {}
    for setting in settings_of(config_class):
        value = texts.get(setting.name)
        if value is None:
            continue
        if setting.kind.is_secret or setting.kind.may_hold_secret:
            private[setting.variable] = str(value)
        elif setting.kind.is_flag:
            flags.append(setting.flag if setting.kind.parse(str(value)) else setting.flag.replace("--", "--no-", 1))
        else:
            flags.append(f"{setting.flag}={value}")
    return ChildSpec(name, (sys.executable, "-P", "-m", module, *flags), {**environment, **private})
