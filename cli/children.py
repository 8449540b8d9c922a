"""The command line and environment of every process of `tandem up`. Pure: it starts nothing.

Each service's own flags are described by its own settings class; here stands only which of them `up` decides.
"""

import dataclasses
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cli.cores import Machine, Share, share_out
from cli.gpus import VISIBLE_ENV, GpuShare, share_out_gpus
from cli.up_settings import UpSettings
from gateway.models.catalog_file import ModelEntry, read_models_file
from services.runtime.config import ENV_PREFIX
from services.runtime.process import DIE_WITH_PARENT_ENV

GATEWAY = "gateway"
GATEWAY_NICENESS = -10
"""Workers compute as long as there is anything to do, and the gateway, which needs little, answers late behind them. It
goes first where it may; workers do not go last, since they would then get nothing beside any other program."""
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


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model and how many workers of each role it has. `label` is part of their names; empty: no models file."""

    name: str
    path: Path
    num_prefill: int
    num_decode: int
    label: str = ""


def model_plans(settings: UpSettings) -> list[ModelPlan]:
    """All models to serve, in order. Raises ConfigError for the models file."""
    if settings.models is None:
        return [ModelPlan(settings.served_name, settings.model, settings.prefill, settings.decode)]
    plans: list[ModelPlan] = []
    for entry in read_models_file(settings.models):
        taken = {plan.label for plan in plans}
        plans.append(
            ModelPlan(
                entry.name,
                entry.path,
                settings.prefill if entry.num_prefill is None else entry.num_prefill,
                settings.decode if entry.num_decode is None else entry.num_decode,
                _label(entry, taken),
            )
        )
    return plans


def worker_specs(
    settings: UpSettings,
    plans: Sequence[ModelPlan],
    addresses: Addresses,
    environment: Mapping[str, str],
    machine: Machine,
    gpus: Sequence[str] = (),
) -> list[ChildSpec]:
    """For each model its prefill workers, then its decode workers. `gpus`: as CUDA names those of this machine."""
    num_workers = sum(plan.num_prefill + plan.num_decode for plan in plans)
    shares = iter(share_out(machine, num_workers))
    gpu_shares = iter(share_out_gpus(gpus, num_workers))
    specs = []
    for plan in plans:
        for role, count in (("prefill", plan.num_prefill), ("decode", plan.num_decode)):
            extra = _prefill_flags(settings) if role == "prefill" else _decode_flags(settings)
            for number in range(count):
                name = "-".join(filter(None, (role, plan.label, str(number))))
                cores = _core_flags(settings, next(shares))
                gpu = next(gpu_shares)
                flags = [("id", name), *_worker_flags(settings, plan), *cores, *_gpu_flags(gpu), *extra]
                own_environment = {**environment, **_private(settings, addresses)}
                if gpu is not None:
                    own_environment[VISIBLE_ENV] = gpu.visible
                specs.append(ChildSpec(name, _command(f"{role}_worker", flags), own_environment))
    return specs


def gateway_spec(settings: UpSettings, addresses: Addresses, environment: Mapping[str, str]) -> ChildSpec:
    """The gateway. Its ports are fixed here, so that it comes back on the same ones after a restart."""
    models: list[tuple[str, object]] = [("models", settings.models)]
    if settings.models is None:
        models = [("model", settings.model), ("model-name", settings.served_name)]
    flags = [
        *models,
        ("http-host", settings.host),
        ("http-port", addresses.http_port),
        ("grpc-host", settings.host),
        ("grpc-port", addresses.grpc_port),
        ("cluster", settings.cluster),
        ("cluster-secret-file", settings.cluster_secret_file),
        ("api-keys", settings.api_keys),
        ("starter-key-digest", addresses.starter_key_digest),
        ("admin-port", settings.admin_port),
        ("admin-key-digest", settings.admin_key_digest),
        ("admin-socket", settings.admin_socket),
        ("allowed-hosts", settings.allowed_hosts),
        ("cors-origins", settings.cors_origins),
        ("generation-config", settings.generation_config),
        *_tls_flags(settings),
        ("trace-sample", settings.trace_sample),
        ("seed", settings.seed),
        ("min-prefill", min(settings.prefill, 1)),
        ("min-decode", 1),
        ("expect", _expected(settings)),
        ("drain-s", settings.stop_grace),
        ("linger-s", 0),  # there is no other gateway to which requests could go
        ("nice", GATEWAY_NICENESS),
        ("log-level", settings.log_level),
    ]
    return ChildSpec(GATEWAY, _command("gateway", flags), {**environment, **_private(settings, addresses)})


def _expected(settings: UpSettings) -> str:
    """How many workers of each role there should be: those of all models, unless something else is asked for."""
    if settings.expect is not None:
        return ",".join(f"{role}={count}" for role, count in settings.expect.items())
    plans = model_plans(settings)
    prefill, decode = sum(plan.num_prefill for plan in plans), sum(plan.num_decode for plan in plans)
    return f"prefill={prefill},decode={decode}"


def child_environment(environ: Mapping[str, str], *, parent_pid: int) -> dict[str, str]:
    """What children inherit: everything but the settings that `up` has read itself and passes on as flags.

    TANDEM_ variables that only a service knows go through to it.
    """
    own = {ENV_PREFIX + field.name.upper() for field in dataclasses.fields(UpSettings)}
    environment = {key: value for key, value in environ.items() if key not in own}
    environment[DIE_WITH_PARENT_ENV] = str(parent_pid)
    environment["PYTHONUNBUFFERED"] = "1"
    if (SOURCE_ROOT / "pyproject.toml").is_file():  # a checkout: children run its code, whatever else is installed
        inherited = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(SOURCE_ROOT), *([inherited] if inherited else [])])
    return environment


def _private(settings: UpSettings, addresses: Addresses) -> dict[str, str]:
    """Variables of a child instead of flags: command lines are readable for every user of the machine."""
    given = {"REDIS": addresses.redis_url, "OTLP": settings.otlp, "CLUSTER_SECRET": settings.cluster_secret}
    return {ENV_PREFIX + name: value for name, value in given.items() if value is not None}


def _label(entry: ModelEntry, taken: set[str]) -> str:
    """The model's name as worker ids can have it, unlike those that are taken."""
    plain = re.sub("[^a-z0-9]+", "-", entry.name.lower()).strip("-")[:MAX_LABEL_CHARS].strip("-")
    label, number = plain, 2
    while label in taken:
        label, number = f"{plain}-{number}", number + 1
    return label


def _worker_flags(settings: UpSettings, plan: ModelPlan) -> list[tuple[str, object]]:
    return [
        ("model", plan.path),
        ("model-name", plan.name),
        ("cluster", settings.cluster),
        ("cluster-secret-file", settings.cluster_secret_file),
        ("host", WORKER_HOST),
        ("advertise-host", WORKER_HOST),  # whatever machine Redis is on, all of them run on this one
        ("port", 0),
        *(_tls_flags(settings) if settings.tls_ca is not None else ()),
        ("transport", settings.transport),
        ("device", settings.device),
        ("page-size", settings.page_size),
        ("dtype", settings.dtype),
        ("pipeline-parallel", settings.pipeline_parallel),
        ("kv-pages", settings.kv_pages),
        ("kv-memory", settings.kv_memory),
        ("host-tier-memory", settings.host_tier_memory),
        ("chunk-tokens", settings.chunk_tokens),
        ("log-level", settings.log_level),
    ]


def _core_flags(settings: UpSettings, share: Share) -> list[tuple[str, object]]:
    """More threads than the share has are the user's wish; on its cores they would only wait for each other."""
    threads = settings.threads or share.threads
    is_pinned = settings.pin and 0 < threads <= len(share.cpus)
    return [("threads", threads), ("cores", ",".join(map(str, share.cpus)) if is_pinned else None)]


def _gpu_flags(share: GpuShare | None) -> list[tuple[str, object]]:
    return [("gpu-memory-share", share.memory_share if share is not None and share.memory_share < 1 else None)]


def _tls_flags(settings: UpSettings) -> list[tuple[str, object]]:
    """Of the gateway, and of workers where there is a CA: all of them show the same certificate."""
    return [("tls-cert", settings.tls_cert), ("tls-key", settings.tls_key), ("tls-ca", settings.tls_ca)]


def _prefill_flags(settings: UpSettings) -> list[tuple[str, object]]:
    return [("tensor-parallel", settings.prefill_tensor_parallel or settings.tensor_parallel)]


def _decode_flags(settings: UpSettings) -> list[tuple[str, object]]:
    return [
        ("tensor-parallel", settings.decode_tensor_parallel or settings.tensor_parallel),
        ("max-batch", settings.max_batch),
        ("admission", settings.admission),
        ("swap-memory", settings.swap_memory),
        ("speculative", settings.speculative),
        ("draft-model", settings.draft),
    ]


def _command(module: str, flags: Sequence[tuple[str, object]]) -> tuple[str, ...]:
    """A Python module with its flags; a flag whose value is None is not given.

    -P: a folder named `gateway` in the current directory is not our gateway.
    """
    given = [f"--{name}={value}" for name, value in flags if value is not None]
    return (sys.executable, "-P", "-m", module, *given)
