"""The settings of `tandem up`, and what they mean together. Starts nothing and touches no network."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from decode_worker.config import DecodeWorkerConfig
from gateway.config import GatewayConfig
from planning.autoscaler.config import ScalingSettings
from prefill_worker.config import PrefillWorkerConfig
from services.hub.source import model_source, served_name
from services.runtime.config import forwarded, option, read
from services.runtime.errors import ConfigError
from services.runtime.kinds import flag, folder, host_name, integer, number, path, redis_url, span, text
from worker.config import WorkerConfig

DEMO_MODEL = Path(__file__).resolve().parents[1] / "demo" / "model"
DEMO_DRAFT = DEMO_MODEL.with_name("draft")
PROGRAMS: dict[str, type] = {
    "the gateway": GatewayConfig,
    "all workers": WorkerConfig,
    "prefill workers": PrefillWorkerConfig,
    "decode workers": DecodeWorkerConfig,
    "the autoscaler": ScalingSettings,
}
LEFT_TO_US = frozenset(
    {
        *("id", "port", "advertise_port", "transfer_port", "advertise_transfer_port", "cores", "gpu_memory_share"),
        "nice",
    }
)
"""Settings of workers that `up` and `join` decide for each process."""
DECIDED = LEFT_TO_US | {"advertise_host", "http_host", "grpc_host", "starter_key_digest", "drain_s", "linger_s"}
"""Those that `up` decides, or that have another name there: `--host`, `--stop-grace`; of the gateway too."""


@dataclass(frozen=True, kw_only=True)
class UpSettings:
    """Starts Redis, a gateway, prefill workers and decode workers on this machine, and keeps them running."""

    model: Path = option(
        model_source(),
        default=DEMO_MODEL,
        help="Hugging Face checkpoint: its folder, or its name, under which it is downloaded if it is not here; the "
        "demo model if not given.",
    )
    model_name: str | None = option(
        text(pattern=r"\S{1,256}", rule="1 to 256 characters without spaces"),
        default=None,
        help="Name that clients use for the model; its folder's name if not given, or ORG/MODEL.",
    )
    models: Path | None = option(
        path(),
        default=None,
        help="TOML file of several models and the workers of each, instead of --model and --model-name.",
    )
    prefill: int = option(
        integer(0, 256), default=1, help="Number of prefill workers, of each model; 0 leaves prompts to decode."
    )
    decode: int = option(integer(1, 256), default=1, help="Number of decode workers, of each model.")
    models_asleep: int = option(
        integer(0, 64),
        default=1,
        help="Models whose weights stay in memory while another one that shares their workers is served.",
    )
    autoscale: tuple[int, int] | None = option(
        span(1),
        default=None,
        help="Starts and drains workers as the load turns: at least MIN of each role, at most MAX of both together. "
        "--prefill and --decode are what it begins with.",
    )
    host: str = option(
        host_name(), default="127.0.0.1", help="Address of both APIs. 0.0.0.0 opens them to the network."
    )
    redis: str | None = option(redis_url(), default=None, help="A Redis or Valkey to use; one of its own if not given.")
    prefill_tensor_parallel: int | None = option(
        integer(1, 64), default=None, help="--tensor-parallel of prefill workers only."
    )
    decode_tensor_parallel: int | None = option(
        integer(1, 64), default=None, help="--tensor-parallel of decode workers only."
    )
    prefill_pipeline_parallel: int | None = option(
        integer(1, 64), default=None, help="--pipeline-parallel of prefill workers only."
    )
    decode_pipeline_parallel: int | None = option(
        integer(1, 64), default=None, help="--pipeline-parallel of decode workers only."
    )
    pin: bool = option(
        flag(),
        default=True,
        help="Keeps each worker to processor cores of its own, where the machine has enough of them. Without --threads "
        "a worker has a thread for each core of its share.",
    )
    pid_file: Path | None = option(path(), default=None, help="File that holds the process id while it runs.")
    log_dir: Path | None = option(
        folder(),
        default=None,
        help="Folder of the log files, readable by its owner only; a temporary one, removed at a clean end, if not "
        "given.",
    )
    start_timeout: float = option(
        number(1, 86_400), default=900.0, help="Seconds until the first request must be servable; else it gives up."
    )
    stop_grace: float = option(
        number(0, 3600), default=10.0, help="Seconds that running requests get to finish when it is told to stop."
    )
    verbose: bool = option(flag(short="-v"), default=False, help="Also shows every log line on standard error.")
    services: Mapping[str, str] = forwarded(PROGRAMS, without=DECIDED)

    def __post_init__(self) -> None:
        if self.models is not None and (self.model != DEMO_MODEL or self.model_name is not None):
            raise ConfigError("--models and --model or --model-name are both given; the models are one of them")
        if self.models is not None and "lora" in self.services:
            raise ConfigError("--models and --lora are both given; in the file, a model names its adapters itself")
        if self.autoscale is not None and self.models is not None:
            raise ConfigError("--autoscale and --models are both given; the workers of one model can be scaled")
        if self.autoscale is not None and self.autoscale[1] < 2:
            raise ConfigError("--autoscale needs room for one worker of each role: MAX must be at least 2")
        _ = self.decode_worker
        if self.gateway.http_port == self.gateway.grpc_port != 0:
            raise ConfigError(
                f"--http-port and --grpc-port are both {self.gateway.http_port}; give them different ports"
            )

    @functools.cached_property
    def gateway(self) -> GatewayConfig:
        """The gateway's settings, as far as they are given. Raises ConfigError."""
        return read(GatewayConfig, {**self.services, "model": str(self.model)}, environ={})

    @functools.cached_property
    def decode_worker(self) -> DecodeWorkerConfig:
        """A decode worker's settings, as far as they are given. Raises ConfigError."""
        texts = {**self.worker_texts("decode"), "id": "decode", "model": str(self.model)}
        return read(DecodeWorkerConfig, texts, environ={})

    def worker_texts(self, role: str) -> dict[str, str]:
        """The texts of the settings of the workers of a role, by name, as far as they are given.

        All workers show the gateway's certificate where a CA is given; otherwise TLS is for clients only.
        """
        texts = {**self.services, "models_asleep": str(self.models_asleep)}
        if "tls_ca" not in texts:
            texts = {name: value for name, value in texts.items() if name not in ("tls_cert", "tls_key")}
        for name in ("tensor_parallel", "pipeline_parallel"):
            degree = getattr(self, f"{role}_{name}")
            if degree is not None:
                texts[name] = str(degree)
        if self.model == DEMO_MODEL and self.models is None and texts.get("speculative") in ("draft", "auto"):
            texts.setdefault("draft_model", str(DEMO_DRAFT))
        return texts

    @property
    def served_name(self) -> str:
        """Name that clients use for the model."""
        if self.model_name is not None:
            return self.model_name
        if self.model == DEMO_MODEL:
            return "tandem-demo"
        return served_name(self.model)
