"""Loads a checkpoint with vLLM and creates the engine of either role from it.

vLLM reads some settings from the environment at import. `import_vllm` sets them, so no other module may import vLLM
first.
"""

import functools
import hashlib
import importlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import set_num_threads  # imported by name, because vLLM replaces the module's function with a no-op

from services.engine.cache.host_tier import HostTier
from services.engine.steps.limits import SequenceLimits
from services.engine.steps.sequence import Sampling
from services.engine.weights.shard import Parallelism
from services.runtime.clock import Clock
from services.runtime.errors import ConfigError, ModelError, TandemError
from services.runtime.identity import AnswerIdentity
from services.runtime.model_facts import read_json_object
from worker.config import WorkerConfig
from worker.engine import DecodeReport, PrefillReport
from worker.vllm.adapters import ADAPTER_CONFIG, load_adapters, lora_arguments
from worker.vllm.blocks import BlockGenerations, BlockMemory
from worker.vllm.decode import VllmDecode
from worker.vllm.installed import own_version
from worker.vllm.prefill import VllmPrefill
from worker.vllm.refusals import refuse_request, refuse_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.core import EngineCore

CPU_BLOCK_TOKENS = 32
"""vLLM's CPU kernels require a block size that is a multiple of this number of tokens."""
DEFAULT_KV_BYTES = 1 << 30
"""Default KV memory on a CPU."""
GPU_MEMORY_SHARE = 0.9
"""Fraction of a GPU's memory that vLLM uses for weights and KV if the worker has the GPU exclusively."""
HASH_CHUNK_BYTES = 16 << 20

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine thread runs the loop
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # gRPC does not survive a fork
    "VLLM_CONFIGURE_LOGGING": "0",  # its messages use our log handlers
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # --cores and --threads control this
    "GLOO_SOCKET_IFNAME": "lo",  # all ranks run on one machine
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, kw_only=True)
class VllmSettings:
    """The settings of a worker that vLLM uses. Sizes and thread counts are totals over all ranks."""

    model_dir: Path
    dtype: str = "auto"
    device: str = "auto"
    block_tokens: int = CPU_BLOCK_TOKENS
    num_blocks: int | None = None
    kv_memory_bytes: int | None = None
    gpu_memory_share: float = 1.0
    threads: int | None = None
    tensor_parallel: int = 1
    adapters: Mapping[str, Path] = field(default_factory=dict)
    step_tokens: int = 512
    max_batch: int = 64

    @classmethod
    def of(cls, settings: WorkerConfig, *, max_batch: int) -> "VllmSettings":
        """Returns the settings for vLLM. Raises ConfigError for settings that this engine does not support."""
        refuse_settings(settings)
        return cls(
            model_dir=settings.model,
            dtype=settings.dtype,
            device=settings.device,
            block_tokens=settings.page_size,
            num_blocks=settings.kv_pages,
            kv_memory_bytes=settings.kv_memory,
            gpu_memory_share=settings.gpu_memory_share,
            threads=settings.threads or (None if settings.cores is None else len(settings.cores)),
            tensor_parallel=settings.tensor_parallel,
            adapters=settings.lora or {},
            step_tokens=settings.chunk_tokens,
            max_batch=max_batch,
        )


class VllmModel:
    """A model loaded by vLLM: its properties and its engines."""

    tier: HostTier | None = None
    weights: None = None

    def __init__(self, settings: VllmSettings, core: "EngineCore") -> None:
        """Raises ConfigError if the model's pages cannot be handed over."""
        from worker.vllm.running import RunningCore

        self._core = core
        config = core.vllm_config
        block_size = config.cache_config.block_size
        self.pool = _block_memory(core)
        num_blocks = self.pool.parts[0].shape[1]
        self.allocator = BlockGenerations(num_blocks)
        # OpenMP keeps a thread count per calling thread. vLLM's kernels abort if it differs from the planned count.
        claim_thread = functools.partial(set_num_threads, torch.get_num_threads())
        self._running = RunningCore(
            core,
            on_preempted=self.allocator.end_use,
            claim_thread=claim_thread,
            await_writes=torch.cuda.synchronize if self.gpu_uuid else lambda: None,
            adapters=load_adapters(settings.adapters, core),
        )
        self.adapters = frozenset(settings.adapters)
        self.embeds = False
        self.parallelism = Parallelism(settings.tensor_parallel)
        self.limits = SequenceLimits(
            config.model_config.max_model_len, config.model_config.get_vocab_size(), num_blocks - 1, block_size
        )
        self.is_exact = False
        """A decode step writes other bits than a prefill step."""
        self.kernels_error = ""  # vLLM does not load without its kernels
        self._dtype = str(self.pool.layout.dtype).removeprefix("torch.")
        self._arithmetic = _arithmetic(config, core)
        self._weights = weights_digest(settings.model_dir)
        digests = (f"{name}|{weights_digest(path, ADAPTER_CONFIG)}" for name, path in sorted(settings.adapters.items()))
        self.fingerprint = _fingerprint("|".join((self._weights, *digests)), self._arithmetic, self.pool)

    @property
    def gpu_uuid(self) -> str | None:
        """Implements LoadedModel."""
        device = self.pool.parts[0].device
        if device.type != "cuda":
            return None
        return f"GPU-{str(torch.cuda.get_device_properties(device).uuid).removeprefix('GPU-')}"

    @property
    def loss(self) -> TandemError | None:
        """Implements LoadedModel."""
        loss: TandemError | None = getattr(self._core.model_executor, "loss", None)
        return loss

    def identity(self, *, vocabulary: str, grammars: str) -> AnswerIdentity:
        """Implements LoadedModel."""
        return AnswerIdentity(
            engine=f"vllm/{own_version()}",
            weights=self.fingerprint,
            config=self._weights[:16],
            dtype=self._dtype,
            arithmetic=f"{self._arithmetic}/torch-{torch.__version__}",
            vocabulary=vocabulary,
            grammars=grammars,
        )

    def check(self, sampling: Sampling) -> None:
        """Implements LoadedModel."""
        refuse_request(sampling)

    def prefill_engine(self, on_report: Callable[[PrefillReport], None], *, clock: Clock) -> VllmPrefill:
        """Returns the engine of a prefill worker. A model creates only one engine."""
        return VllmPrefill(self._running, clock=clock, on_report=on_report)

    def decode_engine(self, on_report: Callable[[DecodeReport], None], *, clock: Clock) -> VllmDecode:
        """Returns the engine of a decode worker. A model creates only one engine."""
        return VllmDecode(self._running, clock=clock, on_report=on_report)

    def close(self) -> None:
        """Implements LoadedModel."""
        self._core.shutdown()


def import_vllm() -> None:
    """Imports vLLM with its environment settings. Takes seconds, and allocates no memory for a model.

    Raises ConfigError if vLLM is not installed or its version is not supported.
    """
    own_version()
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(logging.WARNING)  # its logs at startup are long
    for name in ("vllm.v1.engine.core", "worker.vllm.ranks", "worker.vllm.running", "worker.vllm.sampling"):
        importlib.import_module(name)


def load_vllm(settings: VllmSettings) -> VllmModel:
    """Loads a checkpoint folder. Call it once per process, because vLLM has one connector.

    Raises:
        ConfigError: vLLM is not installed, or does not support a setting.
        ModelError: vLLM cannot serve the folder, or cannot separate prefill and decode for it.
    """
    import_vllm()
    if settings.threads is not None or settings.tensor_parallel > 1:
        set_num_threads(max(1, (settings.threads or torch.get_num_threads()) // settings.tensor_parallel))
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    try:
        config = EngineArgs(**_arguments(settings)).create_engine_config()
        config.model_config.logits_processors = [_processor(config)]
        _refuse_dtype(config)
        core = EngineCore(config, Executor.get_class(config), log_stats=False)
    except (KeyError, RuntimeError, ValueError) as error:  # a model that vLLM or this machine does not support
        raise ModelError(f"vLLM cannot serve {settings.model_dir}: {type(error).__name__}: {error}") from error
    try:
        groups = core.scheduler.kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise ModelError(f"--engine vllm takes models with one kind of KV cache; this one has {len(groups)}")
        return VllmModel(settings, core)
    except BaseException:
        core.shutdown()
        raise


def _arguments(settings: VllmSettings) -> dict[str, Any]:
    from vllm.config import KVEventsConfig, KVTransferConfig
    from vllm.platforms import current_platform

    from worker.vllm.ranks import RANKS_EXECUTOR

    is_cpu = current_platform.is_cpu()
    if settings.device not in ("auto", "cpu" if is_cpu else "cuda"):
        raise ConfigError(f"--device is {settings.device}, and vLLM is installed for {current_platform.device_name}s")
    kv_bytes = settings.kv_memory_bytes or (DEFAULT_KV_BYTES if is_cpu else None)
    degree = settings.tensor_parallel
    if degree > 1 and not is_cpu:
        raise ConfigError(
            f"--tensor-parallel is {degree}, which --engine vllm has on CPUs: it does not reach the pages on other GPUs"
        )
    return {
        "model": str(settings.model_dir),
        "dtype": _dtype(settings),
        "block_size": _rounded_up(settings.block_tokens, CPU_BLOCK_TOKENS) if is_cpu else settings.block_tokens,
        "num_gpu_blocks_override": None if settings.num_blocks is None else settings.num_blocks + 1,
        "kv_cache_memory_bytes": None if kv_bytes is None else kv_bytes // degree,
        "gpu_memory_utilization": GPU_MEMORY_SHARE * settings.gpu_memory_share,
        "max_model_len": -1,  # as long as the model and the KV memory allow
        "max_num_batched_tokens": max(settings.step_tokens, settings.max_batch),
        "max_num_seqs": settings.max_batch,
        "tensor_parallel_size": degree,
        "distributed_executor_backend": None if degree == 1 else RANKS_EXECUTOR,
        "scheduling_policy": "priority",
        "async_scheduling": False,
        "enforce_eager": is_cpu,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        **lora_arguments(settings.adapters, settings.model_dir, is_cpu=is_cpu),
        "kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        "kv_transfer_config": KVTransferConfig(
            kv_connector="TandemConnector",
            kv_connector_module_path="worker.vllm.connector",
            kv_role="kv_both",
            kv_load_failure_policy="fail",
        ),
    }


def _refuse_dtype(config: "VllmConfig") -> None:
    """Raises ConfigError if vLLM's CPU kernels would reject the data type later, possibly only in the first step."""
    if config.device_config.device_type != "cpu":
        return
    model = config.model_config
    reason = ""
    if model.quantization is not None and model.dtype == torch.float32:
        reason = (
            f"model's weights are quantized ({model.quantization}): on a CPU, vLLM computes with them in bfloat16 or "
            "float16"
        )
    elif model.use_mla and model.dtype != torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        reason = "model has latent vectors for KV (MLA): on a CPU with AMX, vLLM computes with them in bfloat16"
    if reason:
        raise ConfigError(f"--dtype is {str(model.dtype).removeprefix('torch.')}, and the {reason}")


def _processor(config: "VllmConfig") -> str:
    """Returns the token sampler for the model runner that vLLM selects for this model and machine."""
    from worker.vllm.sampling import RUNNER_V1, RUNNER_V2

    return RUNNER_V2 if config.use_v2_model_runner else RUNNER_V1


def _block_memory(core: "EngineCore") -> BlockMemory:
    """Returns the blocks of all ranks. Raises ConfigError if the model's pages cannot be handed over."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from worker.vllm.connector import TandemConnector
    from worker.vllm.ranks import RanksExecutor, blocks_of_ranks

    config = core.vllm_config
    if isinstance(core.model_executor, RanksExecutor):
        ranks = blocks_of_ranks(core.model_executor)
    else:
        connector = get_kv_transfer_group()
        assert isinstance(connector, TandemConnector), "the settings name this connector"
        ranks = [connector.kv_caches]
    model = config.model_config
    if len(ranks) == 1:
        num_kv_heads = 0
    else:
        num_kv_heads = 1 if model.use_mla else model.get_total_num_kv_heads()
    return BlockMemory(ranks, block_size=config.cache_config.block_size, num_kv_heads=num_kv_heads)


def _dtype(settings: VllmSettings) -> str:
    """Returns the checkpoint's data type for `auto`, because vLLM would use 16 bits for float32."""
    if settings.dtype != "auto":
        return settings.dtype
    config = read_json_object(settings.model_dir, "config.json")
    named = config.get("dtype") or config.get("torch_dtype")
    return named if isinstance(named, str) else "auto"


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _arithmetic(config: "VllmConfig", core: "EngineCore") -> str:
    """Returns the properties that determine the bytes of a page, apart from the weights, in readable form."""
    layout = config.cache_config.kv_cache_layout
    isa = torch.backends.cpu.get_cpu_capability() if config.device_config.device_type == "cpu" else "cuda"
    amx = "-amx" if isa != "cuda" and torch.cpu._is_amx_tile_supported() else ""
    quantization = config.model_config.quantization or "none"
    kv_dtype = config.cache_config.cache_dtype
    block = f"block-{config.cache_config.block_size}"
    return "/".join((f"{isa}{amx}", f"{layout}", block, f"kv-{kv_dtype}", f"quantization-{quantization}"))


def _fingerprint(weights: str, arithmetic: str, pool: BlockMemory) -> str:
    """Returns 32 hex digits. Two workers exchange pages only if their fingerprints are equal."""
    cut = "" if pool.is_cut_by_heads else f"ranks-{len(pool.parts)}"
    words = "|".join((own_version(), weights, arithmetic, str(pool.layout), str(len(pool.parts[0])), cut))
    return hashlib.blake2b(words.encode(), digest_size=16, person=b"tandem vllm").hexdigest()


@functools.cache
def weights_digest(folder: Path, config: str = "config.json") -> str:
    """Returns a digest of 32 hex digits over the config and all weight files. Raises ModelError."""
    digest = xxhash.xxh3_128()
    files = [folder / config, *sorted(path for path in folder.iterdir() if path.suffix in _WEIGHT_SUFFIXES)]
    try:
        for path in files:
            digest.update(path.name.encode())
            with path.open("rb") as file:
                while piece := file.read(HASH_CHUNK_BYTES):
                    digest.update(piece)
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


_WEIGHT_SUFFIXES: Mapping[str, None] = dict.fromkeys((".safetensors", ".bin", ".gguf"))
