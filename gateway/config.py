"""The gateway's settings."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gateway.limits import MAX_TOKENIZE_CHARS, SLOW_REQUEST_S
from services.cluster.keys import CLUSTER_NAME_PATTERN
from services.cluster.memory import StorageBounds
from services.hub.source import model_source, served_name
from services.runtime.adapters import folders_by_name
from services.runtime.cluster_secret import Secrets
from services.runtime.config import option
from services.runtime.errors import ConfigError
from services.runtime.kinds import (
    HOSTS,
    HOSTS_RULE,
    ORIGINS,
    ORIGINS_RULE,
    choice,
    counts,
    distances,
    flag,
    host_name,
    integer,
    networks,
    number,
    path,
    redis_url,
    secret,
    size_bytes,
    text,
    url,
)
from services.runtime.logs import LEVELS
from services.runtime.tls import TlsFiles, tls_files
from services.scheduling.queue import STRATEGIES
from services.scheduling.routing.policies import POLICY_NAMES


@dataclass(frozen=True)
class GatewayConfig:
    """Serves the gRPC API and the OpenAI-compatible HTTP API of one model or several."""

    model: Path | None = option(
        model_source(),
        default=None,
        help="Model, by its folder or name: config.json, tokenizer.json and chat template are read.",
    )
    model_name: str | None = option(
        text(pattern=r"\S{1,256}", rule="1 to 256 characters without spaces"),
        default=None,
        help="Name of the model in requests; the folder's name if not given.",
    )
    lora: Mapping[str, Path] | None = option(
        folders_by_name(),
        default=None,
        help="LoRA adapters of the model, which clients ask for by their names. Its workers need the same setting, and "
        "read the folders.",
    )
    models: Path | None = option(
        path(), default=None, help="TOML file of several models, instead of --model and --model-name."
    )
    http_host: str = option(host_name(), default="127.0.0.1", help="Address of the HTTP API; 0.0.0.0 means all.")
    generation_config: str = option(
        text(),
        default="auto",
        help="Where temperature, top_p, top_k, min_p and repetition_penalty of requests without them come from: "
        "auto, the model's generation_config.json, if it has one; none; or another folder that has one.",
    )
    embeddings: str = option(
        choice("auto", "on", "matryoshka", "off"),
        default="auto",
        help="Which models embed texts: auto, those whose folder has sentence-transformers' modules.json; on, all; "
        "matryoshka, all, and clients may cut their vectors to any number of dimensions; off, none.",
    )
    http_port: int = option(integer(0, 65535), default=8000, help="Port of the HTTP API; 0 picks a free one.")
    grpc_host: str = option(host_name(), default="127.0.0.1", help="Address of the gRPC API; 0.0.0.0 means all.")
    grpc_port: int = option(integer(0, 65535), default=50051, help="Port of the gRPC API; 0 picks a free one.")
    redis: str = option(redis_url(), default="redis://127.0.0.1:6379", help="Where the workers register.")
    cluster: str = option(
        text(pattern=CLUSTER_NAME_PATTERN, rule=CLUSTER_NAME_PATTERN),
        default="default",
        help="Name of the cluster; several may share a Redis.",
    )
    otlp: str | None = option(
        url("http", "https"), default=None, help="OTLP collector for traces, such as http://127.0.0.1:4317."
    )
    trace_sample: float | None = option(
        number(0, 1),
        default=None,
        help="Part of the requests whose traces are exported, 0 to 1; a client's own decision goes before. Those that "
        "fail, are tried again or are slow always are. Not given: OTEL_TRACES_SAMPLER decides, or all are.",
    )
    seed: int | None = option(
        integer(0, 2**63 - 1), default=None, help="Makes the seeds of requests without one repeatable."
    )
    region: str = option(
        text(pattern=r"[A-Za-z0-9_.-]{0,64}", rule="0 to 64 of A-Z, a-z, 0-9, _ . and -"),
        default="",
        help="Where this gateway runs: workers of the same region are preferred until the first token would be late "
        "there, and what is held to other regions is refused.",
    )
    region_distance: Mapping[tuple[str, str], float] | None = option(
        distances(),
        default=None,
        help="Seconds from one region to another and back, such as eu:us=0.08; may be given several times. They count "
        "for a request's way and for that of its pages. Not given for a pair: 0.1 for a request, and 0.05 for pages.",
    )
    routing: str = option(choice(*POLICY_NAMES), default=POLICY_NAMES[0], help="How workers are chosen.")
    pools: Path | None = option(
        path(),
        default=None,
        help="TOML file of pools of workers (their --pool), with the classes and lengths of prompts that go there. Not "
        "given: labels say nothing.",
    )
    local_prefill_tokens: int | None = option(
        integer(0),
        default=None,
        help="Prompt tokens that a decode worker may lack and still compute a prompt itself; 0 sends all prompts to "
        "prefill workers. Not given: decided for each request by the predicted times of both ways.",
    )
    pull_prefixes: bool = option(
        flag(),
        default=True,
        help="Have prefill workers fetch the beginning of a prompt from a worker that holds it, where that is "
        "predicted to be quicker than computing it.",
    )
    queue_strategy: str = option(
        choice(*STRATEGIES),
        default="fcfs",
        help="Order within a service class: first come, numeric priority with ageing, least slack, or fair by tenant.",
    )
    ahead_s: float = option(
        number(0.001, 60),
        default=0.1,
        help="Seconds of work that may wait at a prefill worker; more waits here, where it can still be overtaken.",
    )
    ttft_target_s: float = option(
        number(0, 86_400),
        default=5.0,
        help="Requests whose first token would come later than this, for those that wait before them, are refused; "
        "0: no such limit.",
    )
    itl_target_s: float = option(
        number(0, 3600),
        default=0.0,
        help="Requests whose tokens after the first would each take longer than this are refused; 0: no such limit.",
    )
    min_prefill: int = option(
        integer(0),
        default=0,
        help="Prefill workers that /ready waits for; where none is, decode workers do their work.",
    )
    min_decode: int = option(integer(1), default=1, help="Decode workers that /ready waits for.")
    expect: Mapping[str, int] | None = option(
        counts("prefill", "decode"),
        default=None,
        help="Workers of each role that there should be, such as prefill=2,decode=2. Fewer are a trouble that "
        "/cluster, metrics, tandem status and tandem doctor show; /ready does not fail. Not given: no number.",
    )
    priority_ageing_s: float = option(
        number(0, 86_400),
        default=10.0,
        help="Seconds of waiting that one level of priority is worth, with --queue-strategy priority: a request that "
        "has waited this much longer goes before one of the next higher level. 0: levels count for nothing.",
    )
    health_max_queued: int | None = option(
        integer(0), default=None, help="/health?verbose: most requests that wait. Not given: no limit."
    )
    health_max_ttft_s: float | None = option(
        number(0),
        default=None,
        help="/health?verbose: 99th percentile of the time to the first token, in seconds. Not given: --ttft-target-s.",
    )
    health_max_error_share: float = option(
        number(0, 1), default=0.05, help="/health?verbose: share of the answers that may fail."
    )
    health_max_gpu_c: float = option(
        number(0, 200), default=85.0, help="/health?verbose: highest temperature of a GPU, in degrees Celsius."
    )
    health_min_free_share: float = option(
        number(0, 1),
        default=0.01,
        help="/health?verbose: least part of a GPU's memory, and of the gateway's where it is limited, that is free.",
    )
    expect_file: Path | None = option(
        path(), default=None, help="File that holds what --expect does, read again when it changes."
    )
    max_queued_requests: int = option(
        integer(0),
        default=1024,
        help="Requests of a model that may wait for room in the cluster, and of each tenant with "
        "workers of its own; more are refused.",
    )
    max_queue_wait_s: float = option(
        number(0, 86_400),
        default=60.0,
        help="Longest wait for room, in seconds; batch requests wait until their deadline.",
    )
    body_memory: int = option(
        size_bytes(8 * 2**20),
        default=256 * 2**20,
        help="What the bodies of HTTP requests that are being sent and read may take together; more are refused. An "
        "eighth of it is kept for bodies of at most 64 KiB.",
    )
    tenant_body_memory: int | None = option(
        size_bytes(8 * 2**20),
        default=None,
        help="What those of one tenant may take, where API keys tell tenants apart; not given: a quarter.",
    )
    max_connections: int | None = option(
        integer(1),
        default=None,
        help="HTTP connections at once; beyond them the oldest idle one is closed for each new one. Not given: 10,000, "
        "and never more than half of the files that the process may open.",
    )
    message_memory: int = option(
        size_bytes(8 * 2**20),
        default=128 * 2**20,
        help="What gRPC messages that are on their way may take together. Each counts as 8 MiB until it has arrived; "
        "calls beyond that wait for their turn. A tenant has at most a quarter, where API keys tell tenants apart.",
    )
    max_grpc_connections: int | None = option(
        integer(1),
        default=None,
        help="gRPC connections at once; shortly before this number, the idlest are closed. Not given: 4,096, and never "
        "more than a quarter of the files that the process may open.",
    )
    max_tokenize_chars: int = option(
        integer(1),
        default=MAX_TOKENIZE_CHARS,
        help="Characters of a text that becomes tokens for their own sake: /tokenize, /v1/responses/input_tokens, "
        "Tokenize. Prompts are bounded by the model's context.",
    )
    max_attempts: int = option(
        integer(1, 100),
        default=3,
        help="Attempts without a new token before a request fails. Those of which a worker may have died are not among "
        "them: after three of these, two of them alone on a worker, it is quarantined. Failed paths between two "
        "living workers do not count.",
    )
    failover_wait_s: float = option(
        number(0, 86_400), default=30.0, help="Longest wait for a worker to continue an answer, in seconds."
    )
    model_files: Path | None = option(
        path(),
        default=None,
        help="Folder of the files that say which of the models that share workers these are to have: the --model-file "
        "of workers. Not given: this gateway does not decide it.",
    )
    model_turn_s: float = option(
        number(0, 86_400),
        default=10.0,
        help="How long a model that shares workers keeps them, at least, while it has requests and another one waits.",
    )
    rebalance: bool = option(
        flag(),
        default=False,
        help="Move running answers, with their pages, from decode workers with long steps or too few pages to those "
        "with less to do.",
    )
    allow_other_weights: bool = option(
        flag(),
        default=False,
        help="Use workers whose weights are others than those in the gateway's model folder too, as while they are "
        "replaced under the model's name. An answer keeps to the weights that began it.",
    )
    allow_inexact: bool = option(
        flag(),
        default=False,
        help="Let an answer continue, and be handed over, between workers with the same weights that differ in dtype, "
        "engine or kernels. Its tokens may be others then, and /cluster says exact false of every worker. All gateways "
        "of a cluster need the same.",
    )
    max_request_s: float = option(
        number(0.001, 86_400), default=600.0, help="Deadline of requests that give none or a later one, in seconds."
    )
    batch_rows: int = option(
        integer(0, 4096),
        default=16,
        help="Requests of batches that this gateway answers at once; 0: it leaves batches to other gateways.",
    )
    max_file_size: int = option(
        size_bytes(1024), default=32 * 2**20, help="Largest file that a client may send for a batch."
    )
    tenant_file_storage: int = option(
        size_bytes(1024), default=64 * 2**20, help="What one tenant's files and batches' answers may take in Redis."
    )
    file_storage: int = option(
        size_bytes(1024), default=128 * 2**20, help="What those of all tenants together may take in Redis."
    )
    tenant_journal_storage: int = option(
        size_bytes(8 * 2**20),
        default=64 * 2**20,
        help="What Redis may keep of one tenant's requests with a name; beyond it, what nobody has used for 60 s makes "
        "room, and if that is not enough, requests with a name are refused.",
    )
    journal_storage: int = option(
        size_bytes(8 * 2**20), default=128 * 2**20, help="What it may keep of those of all tenants together."
    )
    tenant_journal_memory: int = option(
        size_bytes(8 * 2**20),
        default=256 * 2**20,
        help="Memory of this gateway that one tenant's requests with a name may take; more are refused.",
    )
    journal_memory: int = option(
        size_bytes(8 * 2**20),
        default=512 * 2**20,
        help="Memory of this gateway that those of all tenants together may take.",
    )
    stored_answer_s: float = option(
        number(0, 30 * 86_400),
        default=86_400.0,
        help="How long responses of /v1/responses are kept after they are complete, in seconds; 0: none are kept, and "
        "none are generated in the background.",
    )
    tenant_answer_storage: int = option(
        size_bytes(8 * 2**20),
        default=16 * 2**20,
        help="What one tenant's stored responses may take in Redis; beyond it, its oldest complete ones are deleted.",
    )
    answer_storage: int = option(
        size_bytes(8 * 2**20),
        default=64 * 2**20,
        help="What those of all tenants together may take; beyond it, the oldest of the tenant that has most.",
    )
    background_responses: int = option(
        integer(0, 4096),
        default=32,
        help="Responses that this gateway generates in the background at once; 0: it leaves them to other gateways.",
    )
    drain_s: float = option(
        number(0, 3600), default=30.0, help="Time that running requests have to end after SIGTERM, in seconds."
    )
    linger_s: float = option(
        number(0, 3600),
        default=2.0,
        help="Part of the drain in which new requests are still taken, until load balancers have noticed, in seconds.",
    )
    api_keys: Path | None = option(
        path(), default=None, help="TOML file of API keys and tenants' limits; without it nobody is asked for a key."
    )
    starter_key_digest: str | None = option(
        text(pattern="[0-9a-f]{64}", rule="64 hex digits in lower case"),
        default=None,
        help="SHA-256 of one more admin key, for the program that started this one.",
    )
    tls_cert: Path | None = option(
        path(), default=None, help="PEM file of the certificate that this process shows; needs --tls-key."
    )
    tls_key: Path | None = option(path(), default=None, help="PEM file of its private key, without a passphrase.")
    tls_ca: Path | None = option(
        path(),
        default=None,
        help="PEM file of the CA whose certificates the cluster's processes show each other. Not given: workers are "
        "reached without TLS.",
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
    operator_port: int | None = option(
        integer(0, 65535),
        default=None,
        help="One more gRPC port on --admin-host, for callers with a certificate of --tls-ca; operators need no key.",
    )
    admin_host: str = option(host_name(), default="127.0.0.1", help="Address of --admin-port and --operator-port.")
    admin_port: int | None = option(
        integer(0, 65535),
        default=None,
        help="One more HTTP port, with /dashboard, /metrics, /cluster and the probes. It asks for an admin's key where "
        "--api-keys is given, and for that of --admin-key-digest.",
    )
    admin_key_digest: str | None = option(
        text(pattern="[0-9a-f]{64}", rule="64 hex digits in lower case"),
        default=None,
        help="SHA-256 of a key that is good at --admin-port and nowhere else, for Prometheus. With it that port asks "
        "for a key also where --api-keys is not given.",
    )
    admin_socket: Path | None = option(
        path(),
        default=None,
        help="Unix socket with what is at --admin-port, without a key: only processes of this user can open it.",
    )
    allowed_hosts: str | None = option(
        text(pattern=HOSTS, rule=HOSTS_RULE),
        default=None,
        help="Names under which clients reach the HTTP ports, beside addresses, localhost, the name that they are "
        "bound to, and this machine's where that is 0.0.0.0; requests under others are refused. *: any name, which is "
        "the default with --tls-cert: no browser takes the certificate for another name's.",
    )
    cors_origins: str | None = option(
        text(pattern=ORIGINS, rule=ORIGINS_RULE),
        default=None,
        help="Sites whose web pages may call the HTTP API; not given: none but its own.",
    )
    trusted_proxies: str | None = option(
        networks(),
        default=None,
        help="Proxies before the gateway, whose X-Forwarded-For is believed. Where it is given, the log of requests "
        "over HTTP has each client's address: its own, or behind such proxies the one that they tell.",
    )
    stream_head_s: float = option(
        number(0, 3600),
        default=2.0,
        help="Seconds without a first token after which a stream of events begins all the same; an error after that is "
        "an event, and has no status of its own.",
    )
    stream_comment_s: float = option(
        number(0.05, 3600),
        default=15.0,
        help="Seconds of silence after which a stream of events gets a comment, which proxies count as life.",
    )
    reflection: bool = option(
        flag(), default=True, help="Serve gRPC reflection; it needs a key where --api-keys is given."
    )
    nice: int = option(
        integer(-20, 19),
        default=0,
        help="Niceness of this process towards others on its machine. Below 0 it goes before them, where it may: as "
        "root, with CAP_SYS_NICE, or within RLIMIT_NICE.",
    )
    log_level: str = option(choice(*LEVELS), default="info", help="Least level of log records.")
    slow_request_s: float = option(
        number(0, 86_400),
        default=SLOW_REQUEST_S,
        help="Seconds after which a request gets one more line in the log, which tells where the time went; 0: none.",
    )

    def __post_init__(self) -> None:
        if self.models is not None and (self.model is not None or self.model_name is not None):
            raise ConfigError("--models and --model or --model-name are both given; the models are one of them")
        if self.models is not None and self.lora is not None:
            raise ConfigError("--models and --lora are both given; in the file, a model names its adapters itself")
        if self.models is None and self.model is None:
            raise ConfigError("neither --model (TANDEM_MODEL) nor --models (TANDEM_MODELS) is given; one is needed")
        if self.model is not None and self.served_name in (self.lora or ()):
            raise ConfigError(f"--lora has an adapter {self.served_name!r}, which is the name of the model itself")
        _ = self.tls, self.secrets
        if self.operator_port is not None and self.tls_ca is None:
            raise ConfigError("--operator-port is given without --tls-ca, which signs operators' certificates")

    @property
    def served_name(self) -> str:
        """Name of --model in requests."""
        assert self.model is not None, "the models are not in a file"
        return self.model_name or served_name(self.model)

    @functools.cached_property
    def secrets(self) -> Secrets | None:
        """What it proves to workers; None: nothing, as TLS does it. Raises ConfigError."""
        if self.cluster_secret_file is None and self.cluster_secret is None:
            return None if self.tls_ca is not None else Secrets()
        return Secrets(file=self.cluster_secret_file, value=self.cluster_secret)

    @property
    def storage_bounds(self) -> StorageBounds:
        """What clients may fill of Redis' memory."""
        return StorageBounds(self.file_storage, self.journal_storage, self.answer_storage)

    @property
    def tls(self) -> TlsFiles | None:
        """Certificate, key and CA; None: no TLS."""
        return tls_files(self.tls_cert, self.tls_key, self.tls_ca)
