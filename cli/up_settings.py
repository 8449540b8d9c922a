"""The settings of `tandem up`, and what they mean together. Starts nothing and touches no network."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.runtime.config import (
    HOSTS,
    HOSTS_RULE,
    ORIGINS,
    ORIGINS_RULE,
    choice,
    counts,
    flag,
    folder,
    host_name,
    integer,
    number,
    option,
    path,
    redis_url,
    secret,
    size_bytes,
    text,
    url,
)
from services.runtime.errors import ConfigError
from services.runtime.logs import LEVELS
from services.runtime.tls import TlsFiles, tls_files
from services.runtime.transports import TRANSPORTS

DEMO_MODEL = Path(__file__).resolve().parents[1] / "demo" / "model"
DEMO_DRAFT = DEMO_MODEL.with_name("draft")


@dataclass(frozen=True, kw_only=True)
class StorageSettings:
    """What the gateway lets clients keep in Redis, which gives the embedded one its size."""

    file_storage: int = option(size_bytes(1024), default=128 * 2**20, help="Of files and batches.")
    journal_storage: int = option(size_bytes(8 * 2**20), default=128 * 2**20, help="Of requests with a name.")


@dataclass(frozen=True, kw_only=True)
class UpSettings:
    """Starts Redis, a gateway, prefill workers and decode workers on this machine, and keeps them running."""

    model: Path = option(
        folder(), default=DEMO_MODEL, help="Folder of a Hugging Face checkpoint; the demo model if not given."
    )
    model_name: str | None = option(
        text(pattern=r"\S{1,256}", rule="1 to 256 characters without spaces"),
        default=None,
        help="Name that clients use for the model; its folder's name if not given.",
    )
    models: Path | None = option(
        path(),
        default=None,
        help="TOML file of several models and the workers of each, instead of --model and --model-name.",
    )
    generation_config: str = option(
        text(),
        default="auto",
        help="Where temperature, top_p, top_k, min_p and repetition_penalty of requests without them come from: "
        "auto, the model's generation_config.json, if it has one; none; or another folder that has one.",
    )
    prefill: int = option(
        integer(0, 256), default=1, help="Number of prefill workers, of each model; 0 leaves prompts to decode."
    )
    decode: int = option(integer(1, 256), default=1, help="Number of decode workers, of each model.")
    host: str = option(
        host_name(), default="127.0.0.1", help="Address of both APIs. 0.0.0.0 opens them to the network."
    )
    expect: Mapping[str, int] | None = option(
        counts("prefill", "decode"),
        default=None,
        help="Workers of each role that there should be, such as prefill=2,decode=2; not given: those that it starts. "
        "Give it where workers of other machines join.",
    )
    http_port: int = option(integer(0, 65535), default=8000, help="Port of the HTTP API; 0 picks a free one.")
    grpc_port: int = option(integer(0, 65535), default=50051, help="Port of the gRPC API; 0 picks a free one.")
    redis: str | None = option(redis_url(), default=None, help="A Redis or Valkey to use; one of its own if not given.")
    cluster: str = option(
        text(pattern=r"[A-Za-z0-9_.-]{1,64}", rule="1 to 64 of A-Z, a-z, 0-9, _ . and -"),
        default="default",
        help="Name of the cluster in Redis; clusters that share a Redis need different names.",
    )
    api_keys: Path | None = option(
        path(), default=None, help="TOML file of API keys and tenants' limits; without it nobody is asked for a key."
    )
    admin_port: int | None = option(
        integer(0, 65535),
        default=None,
        help="One more HTTP port on this machine's own address, with /dashboard, /metrics, /cluster and the probes. It "
        "asks for an admin's key where --api-keys is given, and for that of --admin-key-digest.",
    )
    admin_key_digest: str | None = option(
        text(pattern="[0-9a-f]{64}", rule="64 hex digits in lower case"),
        default=None,
        help="SHA-256 of a key that is good at --admin-port and nowhere else, for Prometheus.",
    )
    admin_socket: Path | None = option(
        path(),
        default=None,
        help="Unix socket with what is at --admin-port, without a key: only processes of this user can open it.",
    )
    allowed_hosts: str | None = option(
        text(pattern=HOSTS, rule=HOSTS_RULE),
        default=None,
        help="Names under which clients reach the HTTP ports, beside addresses and this machine's names. *: any name.",
    )
    cors_origins: str | None = option(
        text(pattern=ORIGINS, rule=ORIGINS_RULE),
        default=None,
        help="Sites whose web pages may call the HTTP API; not given: none but its own.",
    )
    tls_cert: Path | None = option(
        path(), default=None, help="PEM file of the certificate that this process shows; needs --tls-key."
    )
    tls_key: Path | None = option(path(), default=None, help="PEM file of its private key, without a passphrase.")
    tls_ca: Path | None = option(
        path(),
        default=None,
        help="PEM file of the CA whose certificates the processes show each other. Not given: TLS is for clients only.",
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
    transport: str = option(
        choice("auto", *TRANSPORTS),
        default="auto",
        help="Channel that pages travel on; auto measures those that both workers have. nccl, cuda_ipc: pages on GPUs.",
    )
    device: str = option(
        choice("auto", "cpu", "cuda"),
        default="auto",
        help="Where models run; auto: on GPUs where this machine has any that torch can use.",
    )
    page_size: int = option(integer(1, 1024), default=16, help="Tokens of a KV page.")
    dtype: str = option(
        choice("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="Type of weights and KV; auto takes the checkpoint's.",
    )
    tensor_parallel: int = option(
        integer(1, 64), default=1, help="Processes of each worker that share each layer of the model."
    )
    prefill_tensor_parallel: int | None = option(
        integer(1, 64), default=None, help="The same for prefill workers only, where it is another number."
    )
    decode_tensor_parallel: int | None = option(
        integer(1, 64), default=None, help="The same for decode workers only, where it is another number."
    )
    pipeline_parallel: int = option(
        integer(1, 64), default=1, help="Stages of each worker that share the model's layers."
    )
    kv_pages: int | None = option(integer(1), default=None, help="Pages of each worker's KV pool.")
    kv_memory: int | None = option(size_bytes(), default=None, help="Size of each KV pool, instead of --kv-pages.")
    host_tier_memory: int | None = option(
        size_bytes(minimum=0),
        default=None,
        help="Host memory of each worker for cached pages that its KV pool has no room for. 0: none. Not given: none "
        "on a CPU; for a GPU as much as the KV pool, at most 8 GiB or a quarter of the host's available memory.",
    )
    chunk_tokens: int = option(integer(1, 65536), default=512, help="Most prompt tokens that one step computes.")
    max_batch: int = option(integer(1, 4096), default=64, help="Most sequences in a decode worker's batch.")
    admission: str = option(
        choice("expected", "worst_case"),
        default="expected",
        help="Pages that a decode worker counts a request for: those that it is expected to need, where it may have to "
        "give way later, or those of its max_tokens.",
    )
    swap_memory: int | None = option(
        size_bytes(minimum=0),
        default=None,
        help="Host memory of each decode worker for pages of sequences that gave way; 0: they are always computed "
        "again. As much as the KV pool, at most 1 GiB, if not given.",
    )
    speculative: str = option(
        choice("off", "ngram", "draft", "auto"),
        default="off",
        help="Tokens that decode workers propose and then verify, several in a step, where that pays; answers are the "
        "same. ngram: from what was said before; draft: by a draft model; auto: both.",
    )
    draft_model: Path | None = option(
        folder(),
        default=None,
        help="Folder of a small checkpoint with the model's tokenizer, for --speculative; the demo model has its own.",
    )
    threads: int | None = option(
        integer(1, 1024), default=None, help="Processor threads of each worker; the cores shared out if not given."
    )
    pin: bool = option(
        flag(), default=True, help="Keeps each worker to processor cores of its own, where there are enough of them."
    )
    seed: int | None = option(
        integer(0, 2**63 - 1), default=None, help="Makes answers without a seed of their own repeatable."
    )
    otlp: str | None = option(url("http", "https"), default=None, help="OTLP gRPC collector of traces.")
    trace_sample: float = option(
        number(0, 1),
        default=1.0,
        help="Part of the requests whose traces are exported, 0 to 1; failed and slow ones always are.",
    )
    pid_file: Path | None = option(path(), default=None, help="File that holds the process id while it runs.")
    log_dir: Path | None = option(
        folder(),
        default=None,
        help="Folder of the log files, readable by its owner only; a temporary one, removed at a clean end, if not "
        "given.",
    )
    log_level: str = option(choice(*LEVELS), default="info", help="Least level that is logged.")
    start_timeout: float = option(
        number(1, 86_400), default=900.0, help="Seconds until the first request must be servable; else it gives up."
    )
    stop_grace: float = option(
        number(0, 3600), default=10.0, help="Seconds that running requests get to finish when it is told to stop."
    )
    verbose: bool = option(flag(short="-v"), default=False, help="Also shows every log line on standard error.")

    def __post_init__(self) -> None:
        if self.kv_pages is not None and self.kv_memory is not None:
            raise ConfigError("--kv-pages and --kv-memory are both given; the size of the KV pool is one of them")
        if self.speculative == "draft" and self.draft is None:
            raise ConfigError("--speculative is draft, which needs --draft-model")
        if self.models is not None and (self.model != DEMO_MODEL or self.model_name is not None):
            raise ConfigError("--models and --model or --model-name are both given; the models are one of them")
        if self.http_port == self.grpc_port != 0:
            raise ConfigError(f"--http-port and --grpc-port are both {self.http_port}; give them different ports")
        _ = self.tls

    @property
    def tls(self) -> TlsFiles | None:
        """Certificate, key and CA of all processes; None: no TLS."""
        return tls_files(self.tls_cert, self.tls_key, self.tls_ca)

    @property
    def draft(self) -> Path | None:
        """Folder of the draft model, if one is wanted."""
        if self.draft_model is None and self.model == DEMO_MODEL and self.speculative in ("draft", "auto"):
            return DEMO_DRAFT
        return self.draft_model

    @property
    def served_name(self) -> str:
        """Name that clients use for the model."""
        if self.model_name is not None:
            return self.model_name
        if self.model == DEMO_MODEL:
            return "tandem-demo"
        return re.sub(r"\s+", "-", self.model.resolve().name) or "model"
