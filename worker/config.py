"""The settings that both workers have, and what follows from them before a model is loaded."""

import functools
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.hub.source import model_source, served_name
from services.runtime.adapters import check_adapters, folders_by_name
from services.runtime.addresses import check_dialled, is_loopback, join_host_port
from services.runtime.clock import SYSTEM_CLOCK
from services.runtime.cluster_secret import Secrets
from services.runtime.config import option
from services.runtime.engines import ENGINES, NATIVE
from services.runtime.errors import ConfigError
from services.runtime.kinds import (
    choice,
    flag,
    host_name,
    integer,
    number,
    number_set,
    path,
    redis_url,
    secret,
    size_bytes,
    text,
    url,
)
from services.runtime.logs import LEVELS
from services.runtime.tls import TlsFiles, tls_files
from services.runtime.transports import TRANSPORTS
from services.runtime.version import version
from services.runtime.worker_state import WorkerState
from services.scheduling.pools import POOL_NAME


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """Settings of both workers."""

    id: str = option(
        text(pattern=r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", rule="1 to 63 of a-z, 0-9 and inner hyphens"),
        help="Stable name of this worker, unique in the cluster, such as decode-0.",
    )
    model: Path = option(
        model_source(), help="Hugging Face checkpoint: its folder, or its name, under which it is downloaded."
    )
    model_name: str | None = option(
        text(), default=None, help="What the model is called in the cluster. Not given: the folder's name."
    )
    redis: str | None = option(
        redis_url(),
        default=None,
        help="Where the cluster's workers register. Without it no gateway finds this worker.",
    )
    cluster: str = option(
        text(pattern=r"[A-Za-z0-9_.-]{1,64}", rule="1 to 64 of A-Z, a-z, 0-9, _ . and -"),
        default="default",
        help="Name of the cluster in Redis.",
    )
    host: str = option(
        host_name(), default="127.0.0.1", help="Address to listen on. 0.0.0.0 and :: are every interface."
    )
    port: int = option(integer(0, 65535), default=0, help="Port of the gRPC server; 0 picks a free one.")
    advertise_host: str | None = option(
        host_name(),
        default=None,
        help="Host that gateways and other workers connect to, where it is not --host (a pod's address).",
    )
    advertise_port: int | None = option(
        integer(1, 65535), default=None, help="Port that they connect to, where something in between maps it to --port."
    )
    transfer_port: int = option(
        integer(0, 65535),
        default=0,
        help="Port on --host at which pages arrive over the channel tcp, or over nccl where that is the only one; 0 "
        "picks a free one.",
    )
    advertise_transfer_port: int | None = option(
        integer(1, 65535),
        default=None,
        help="Port that other workers send pages to, where something in between maps it to --transfer-port.",
    )
    region: str = option(
        text(pattern=r"[A-Za-z0-9_.-]{0,64}", rule="0 to 64 of A-Z, a-z, 0-9, _ . and -"),
        default="",
        help="Where this worker runs; requests and pages stay within a region where that costs little.",
    )
    tenants: str = option(
        text(pattern=r"[A-Za-z0-9_.:,-]{0,1024}", rule="names separated by commas"),
        default="",
        help="Tenants that this worker is reserved for, separated by commas. Not given: it works for everybody.",
    )
    pool: str = option(
        text(pattern=f"({POOL_NAME})?", rule="0 to 64 of A-Z, a-z, 0-9, _ . and -"),
        default="",
        help="Label of the pool that this worker belongs to. What goes there is said by --pools of the gateway.",
    )
    tls_cert: Path | None = option(
        path(), default=None, help="PEM file of the certificate that this process shows; needs --tls-key."
    )
    tls_key: Path | None = option(path(), default=None, help="PEM file of its private key, without a passphrase.")
    tls_ca: Path | None = option(
        path(),
        default=None,
        help="PEM file of the CA whose certificates the cluster's processes show each other; TLS of a worker needs it.",
    )
    cluster_secret_file: Path | None = option(
        path(),
        default=None,
        help="File with the secret that the cluster's processes prove to each other: 1 to 4 lines of at least 32 "
        "characters, read again for each proof. Not given: the one in Redis, or with --tls-ca none.",
    )
    cluster_secret: str | None = option(
        secret(), default=None, help="The secret itself, instead of --cluster-secret-file."
    )
    insecure: bool = option(
        flag(),
        default=False,
        help="Let others in the network read what is said to this worker: listen beyond this machine without TLS, and "
        "with TLS, leave the pages on the channels tcp and nccl unencrypted.",
    )
    metrics_port: int | None = option(
        integer(0, 65535), default=None, help="Port of /metrics on --host; 0 picks a free one. Not given: none."
    )
    transport: str = option(
        choice("auto", *TRANSPORTS),
        default="auto",
        help="Channel that pages travel on; auto measures those that both workers have. nccl, cuda_ipc: pages on GPUs.",
    )
    engine: str = option(
        choice(*ENGINES),
        default=NATIVE,
        help="What computes the model: this project's engine, or vLLM, which must be installed (make install-vllm).",
    )
    lora: Mapping[str, Path] | None = option(
        folders_by_name(),
        default=None,
        help="LoRA adapters that requests can name instead of the model, with --engine vllm; its gateways and all its "
        "workers need the same.",
    )
    page_size: int = option(
        integer(1, 1024), default=16, help="Tokens of a KV page. With vLLM on a CPU, the next multiple of 32."
    )
    dtype: str = option(
        choice("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="Type of weights and KV; auto takes the checkpoint's.",
    )
    device: str = option(choice("auto", "cpu", "cuda"), default="auto", help="Where the model runs.")
    tensor_parallel: int = option(
        integer(1, 64), default=1, help="Processes that share each layer of the model, and the threads."
    )
    pipeline_parallel: int = option(
        integer(1, 64), default=1, help="Stages that share the model's layers, each of --tensor-parallel processes."
    )
    kv_pages: int | None = option(integer(1), default=None, help="Pages of the KV pool.")
    kv_memory: int | None = option(size_bytes(), default=None, help="Size of the KV pool, instead of --kv-pages.")
    gpu_memory_share: float = option(
        number(0.01, 1),
        default=1.0,
        help="Part of the GPU's memory, without the weights, that this worker may have where others use the same GPU: "
        "its KV pool takes half of it, if neither --kv-pages nor --kv-memory is given.",
    )
    host_tier_memory: int | None = option(
        size_bytes(minimum=0),
        default=None,
        help="Host memory for cached pages that the KV pool has no room for; they come back where copying them takes "
        "less time than computing them again. 0: none. Not given: none on a CPU; for a GPU as much as the KV pool, at "
        "most 8 GiB or a quarter of the host's available memory.",
    )
    share_weights: bool = option(
        flag(),
        default=True,
        help="Have the weights in memory once for all workers of this host, or of this GPU, that serve the same files.",
    )
    chunk_tokens: int = option(integer(1, 65536), default=512, help="Most prompt tokens that one step computes.")
    threads: int | None = option(
        integer(1, 1024), default=None, help="Processor threads of the engine; as many as --cores if not given."
    )
    cores: tuple[int, ...] | None = option(
        number_set(),
        default=None,
        help="Processor cores that this process keeps to, by the numbers that the kernel gives them. Not given: any.",
    )
    nice: int = option(
        integer(0, 19),
        default=0,
        help="Niceness of this process towards others on its machine. From 10 on it gets next to nothing beside a "
        "program that uses all cores.",
    )
    drain_timeout: float | None = option(
        number(0),
        default=None,
        help="Seconds that a worker which was told to leave waits for the requests that it has; those that are left "
        "then fail with worker_unavailable. Not given: it waits for all of them, each until its own deadline.",
    )
    step_timeout: float = option(
        number(0),
        default=120.0,
        help="Seconds after which a step of the engine counts as stuck: the worker fails and exits. 0: never.",
    )
    otlp: str | None = option(url("http", "https"), default=None, help="OTLP collector of traces.")
    log_level: str = option(choice(*LEVELS), default="info", help="Least level that is logged.")

    def __post_init__(self) -> None:
        if self.kv_pages is not None and self.kv_memory is not None:
            raise ConfigError("--kv-pages and --kv-memory are both given; the size of the KV pool is one of them")
        check_adapters(self.lora or (), engine=self.engine)
        check_dialled(self.host, self.advertise_host, redis=self.redis)
        if self.advertise_port is not None and not self.port:
            raise ConfigError(
                f"--advertise-port is {self.advertise_port}, but --port is 0, which is another port at each start: "
                "give --port too"
            )
        if self.advertise_transfer_port is not None and not self.transfer_port:
            raise ConfigError(
                f"--advertise-transfer-port is {self.advertise_transfer_port}, but --transfer-port is 0, which is "
                "another port at each start: give --transfer-port too"
            )
        if self.transfer_port and self.transfer_port == self.port:
            raise ConfigError(f"--port and --transfer-port are both {self.port}; give them different ports")
        if self.tls is None and not is_loopback(self.host) and not self.insecure:
            raise ConfigError(
                f"--host is {self.host}, where others in the network reach this worker, but without TLS they could "
                "read prompts and pages on their way: give --tls-cert, --tls-key and --tls-ca, or --insecure on a "
                "network of your own (then with --cluster-secret-file, so that only members are served)"
            )
        _ = self.secrets

    def record_fields(self, *, incarnation: str) -> dict[str, Any]:
        """What is known of the worker before its model is loaded, as fields of a WorkerRecord."""
        return {
            "id": self.id,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "address": "",
            "incarnation": incarnation,
            "started_unix_ns": SYSTEM_CLOCK.unix_ns(),
            "version": version(),
            "state": WorkerState.STARTING,
            "model": self.model_name or served_name(self.model),
            "exact": False,
            "page_size": self.page_size,
            "layout_fingerprint": "",
            "max_sequence_tokens": 0,
            "region": self.region,
            "tenants": tuple(sorted({name for name in self.tenants.split(",") if name})),
            "pool": self.pool,
        }

    @property
    def tls(self) -> TlsFiles | None:
        """Certificate, key and CA; None: no TLS."""
        return tls_files(self.tls_cert, self.tls_key, self.tls_ca, needs_ca=True)

    @functools.cached_property
    def secrets(self) -> Secrets | None:
        """What it proves to gateways and other workers; None: nothing, as TLS does it or nothing is configured.

        Raises ConfigError.
        """
        if self.cluster_secret_file is None and self.cluster_secret is None:
            return None if self.redis is None or self.tls is not None else Secrets()
        return Secrets(file=self.cluster_secret_file, value=self.cluster_secret)

    def engine_settings(self) -> dict[str, Any]:
        """Arguments of `services.engine.engine.load_engine`."""
        return {
            "model_dir": self.model,
            "dtype": self.dtype,
            "device": self.device,
            "page_size": self.page_size,
            "num_pages": self.kv_pages,
            "kv_memory_bytes": self.kv_memory,
            "gpu_memory_share": self.gpu_memory_share,
            "host_tier_bytes": self.host_tier_memory,
            "threads": self.threads or (None if self.cores is None else len(self.cores)),
            "tensor_parallel": self.tensor_parallel,
            "pipeline_parallel": self.pipeline_parallel,
            "shares_weights": self.share_weights,
        }

    def address(self, port: int) -> str:
        """Where others connect to; `port` is the one that the gRPC server listens on."""
        return join_host_port(self.advertise_host or self.host, self.advertise_port or port)
