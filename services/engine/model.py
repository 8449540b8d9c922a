"""A loaded model: computes one step over packed tokens and a paged cache. Does not handle sequences or sampling.

Legend: T packed tokens, N pages, H KV heads, L layers, S slots of a page, D head_dim, V vocabulary.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from services.engine.cpu.decoder import KernelDecoder, KernelStep
from services.engine.gpu.matmul import forbid_split_k, permit_where_needed
from services.engine.kernels.build import KernelsUnavailable
from services.engine.kernels.library import Kernels, load_kernels
from services.engine.reference.attention import AttentionBatch
from services.engine.reference.decoder import Decoder, DecoderStep, RepeatedStep, TorchDecoder
from services.engine.reference.rope import RopeTable
from services.engine.weights.checkpoint import Checkpoint
from services.engine.weights.config import ModelConfig, load_config
from services.engine.weights.linear import PackedLinear, TorchLinear, pack_linear
from services.engine.weights.load import ModelWeights, WeightPlacement, load_weights
from services.engine.weights.shared import Files, LoadedWeights, load_shared_weights
from services.engine.weights.sharing import Sharing
from services.runtime.errors import ConfigError, InvariantViolated

logger = logging.getLogger(__name__)

# Part of the fingerprint. Increase it when the meaning of a page's bytes changes.
PAGE_FORMAT = 1

ENGINE = "tandem/1"
"""Engine name and version of its numerics. Increase the version if a change to the Python code, for example to sampling
or a decoder, can change any token. `Model.arithmetic` covers changes to the CPU kernels and to torch."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Model:
    """A loaded model, for one thread at a time.

    `exact` is true if this process has proven that a token's result is bitwise identical for every batch composition,
    for every split of the prompt into chunks, and in prefill and decode.
    `arithmetic` identifies everything except the inputs that affects results. Two exact models with equal fingerprint,
    dtype, and arithmetic return bitwise equal results in different processes.
    `kernels` contains the CPU kernels in use, if any. `kernels_error` is the reason why torch computes instead of the
    compiled kernels of the device. It is empty if the compiled kernels are in use.
    `fingerprint` identifies the weights and the meaning of a page's bytes. Two workers exchange pages only if their
    fingerprints are equal.
    """

    def __init__(
        self,
        source: ModelSource,
        decoder: Decoder,
        *,
        fingerprint: str,
        sharing: Sharing | None = None,
    ) -> None:
        config, placement, kernels = source.config, source.placement, source.kernels
        self.config = config
        self._sharing = sharing
        self.fingerprint = fingerprint
        self.kernels = kernels
        self.kernels_error = source.kernels_error
        self.exact = kernels is not None
        self.arithmetic = arithmetic_of(kernels, placement.device)
        if placement.device.type == "cuda":
            self.arithmetic += f"/{type(decoder).__name__}"
        self.dtype = placement.dtype
        self.device = placement.device
        self._rope = RopeTable(config, device=self.device)
        self.decoder = decoder

    def close(self) -> None:
        """Stops sharing the weights with other processes. The weights stay usable here. Idempotent."""
        if self._sharing is not None:
            self._sharing.close()

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        pool_data: torch.Tensor,
        logits_indices: torch.Tensor,
    ) -> torch.Tensor:
        """Runs one step: writes the keys and values of the tokens to the pool, and returns logits, float32 [rows, V].

        Accepts the same arguments as `step`, and raises InvariantViolated in the same cases.
        """
        step = self.step(token_ids, positions, batch=batch, pool_data=pool_data, logits_indices=logits_indices)
        return self.decoder.forward(step)

    def step(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        *,
        batch: AttentionBatch,
        pool_data: torch.Tensor,
        logits_indices: torch.Tensor,
    ) -> DecoderStep:
        """Returns the decoder inputs of one step.

        `token_ids` and `positions` are int64 [T] with T >= 1. `pool_data` is [N, H, L, 2, S, D] in the model's dtype.
        `logits_indices` (int64, may be empty) contains the indices of the packed tokens whose logits are needed. All
        tensors are contiguous and on the model's device. Prompt chunks may have any size, and any chunks and decode
        rows may share a step.

        Raises InvariantViolated if the step is inconsistent with itself, the pool, or the model.
        """
        longest = batch.longest_context
        if longest > self.config.context_length_tokens:
            raise InvariantViolated(f"a step reaches {longest} tokens, beyond the model's context")
        rope = self._rope.ensure(longest)
        return DecoderStep(token_ids, positions, batch, pool_data, logits_indices, rope)

    def whole_rope(self) -> torch.Tensor:
        """Returns the rotary table [P, 2, D/2] for the full context. Its memory address stays fixed afterwards."""
        return self._rope.ensure(self.config.context_length_tokens)

    def repeatable(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        pool_data: torch.Tensor,
        logits_indices: torch.Tensor,
        *,
        longest_context: int,
    ) -> KernelStep | RepeatedStep:
        """Binds these tensors to a repeatable `forward`, which costs less than `forward` itself.

        The caller overwrites the tensors' contents between runs. No context may exceed `longest_context`. Each run
        overwrites the logits.
        """
        rope = self._rope.ensure(longest_context)
        step = DecoderStep(token_ids, positions, batch, pool_data, logits_indices, rope)
        decoder = self.decoder
        return decoder.repeatable(step) if isinstance(decoder, KernelDecoder) else RepeatedStep(decoder, step)


TimedStep = tuple[list[tuple[int, int, bool]], float]
"""Work and duration of one step. For each sequence: previously computed tokens, tokens computed in this step, and
whether the new tokens belong to the prompt. The duration is in seconds."""


class EngineWeights(NamedTuple):
    """Remainder of a loaded model that has no pages: its weights and its timed steps."""

    model: Model
    first_steps: tuple[TimedStep, ...]

    def close(self) -> None:
        """Stops sharing the weights with other processes. Idempotent."""
        self.model.close()


def load_model(
    model_dir: str | Path | Model,
    *,
    dtype: str = "auto",
    device: str = "auto",
    use_kernels: bool = True,
    shares_weights: bool = False,
) -> Model:
    """Loads a checkpoint directory. Returns an already loaded model unchanged.

    `dtype` is "auto", "float32", "bfloat16", or "float16". "auto" selects the dtype of the checkpoint, but float32
    instead of float16 on a CPU. `device` is "auto" (a GPU if available), "cpu", or "cuda[:index]". If `use_kernels` is
    false, or if the kernels cannot be built, the CPU computes through torch and the model is not `exact`. Processes on
    this host that set `shares_weights` share one copy of the weights (`services.engine.weights.shared`) until each
    process closes its model.

    Raises ModelError if the directory cannot be served, and ConfigError for an invalid dtype or device.
    """
    if isinstance(model_dir, Model):
        return model_dir
    files = _files(model_dir) if shares_weights else None
    source = open_model(model_dir, dtype=dtype, device=device, use_kernels=use_kernels)
    config, kernels = source.config, source.kernels
    try:
        if files is not None:
            loaded = load_shared_weights(
                config,
                source.checkpoint,
                source.placement,
                arithmetic=arithmetic_of(kernels, source.placement.device),
                files=files,
            )
        else:
            weights = load_weights(config, source.checkpoint, source.placement)
            loaded = LoadedWeights(weights, source.checkpoint.digest())
    finally:
        source.checkpoint.close()
    try:
        fingerprint = layout_fingerprint(config, weights_digest=loaded.digest)
        decoder = _make_decoder(source, loaded.weights)
        return Model(source, decoder, fingerprint=fingerprint, sharing=loaded.sharing)
    except BaseException:
        if loaded.sharing is not None:
            loaded.sharing.close()
        raise


def _files(model_dir: str | Path) -> Files | None:
    try:
        return Files.of(Path(model_dir))
    except OSError:
        return None  # opening the directory reports the error


@dataclass(frozen=True, slots=True)
class ModelSource:
    """An open checkpoint whose tensors are still unread, with the placement of its weights and the kernels to use."""

    config: ModelConfig
    checkpoint: Checkpoint
    placement: WeightPlacement
    kernels: Kernels | None
    kernels_error: str = ""
    """Reason why torch computes instead of the compiled kernels. Empty if it does not, or if torch was requested."""


def open_model(model_dir: str | Path, *, dtype: str, device: str, use_kernels: bool = True) -> ModelSource:
    """Runs `load_model` up to the first tensor read, with the same errors. The caller closes the checkpoint."""
    config = load_config(model_dir)
    chosen_device = _choose_device(device)
    chosen_dtype = _choose_dtype(dtype, config, chosen_device)
    if chosen_device.type == "cuda":
        forbid_split_k()
    checkpoint = Checkpoint(model_dir)
    kernels, kernels_error = None, ""
    if chosen_device.type == "cuda":
        kernels_error = _triton_error()
    elif use_kernels:
        kernels, kernels_error = _find_kernels()
    if kernels is None:
        placement = WeightPlacement(chosen_dtype, chosen_device, TorchLinear, TorchLinear.of)
    else:
        make_linear, linear_of = partial(pack_linear, kernels), partial(PackedLinear, kernels)
        placement = WeightPlacement(chosen_dtype, chosen_device, make_linear, linear_of)
    return ModelSource(config, checkpoint, placement, kernels, kernels_error)


def arithmetic_of(kernels: Kernels | None, device: torch.device) -> str:
    """Returns an identifier of everything except the inputs that affects results: the kernels, torch, and the GPU."""
    parts = [] if kernels is None else [kernels.arithmetic]
    parts.append(f"torch-{torch.__version__}")
    if device.type == "cuda":
        parts.append(torch.cuda.get_device_name(device).replace(" ", "-"))
    return "/".join(parts)


def _make_decoder(source: ModelSource, weights: ModelWeights) -> Decoder:
    config = source.config
    if source.kernels is not None:
        return KernelDecoder(source.kernels, config, weights)
    embedding, layer = weights.embedding, weights.layers[0]
    if embedding.device.type == "cuda":
        linears = (layer.qkv, layer.output, layer.gate_up, layer.down, weights.lm_head)
        permit_where_needed(linears, dtype=embedding.dtype, device=embedding.device)
    if embedding.device.type == "cuda" and not source.kernels_error:
        from services.engine.gpu.decoder import TritonDecoder  # Triton may be missing

        return TritonDecoder(config, weights)
    return TorchDecoder(config, weights)


def _triton_error() -> str:
    """Returns why Triton cannot be used, or an empty string. Triton needs a C compiler to build a part of itself."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    try:
        from triton.runtime import driver

        driver.active.get_current_target()
    except (ImportError, OSError, RuntimeError, subprocess.CalledProcessError) as error:
        logger.warning("Triton does not work here, so that torch computes, slowly: %s", error)
        return f"Triton does not work: {error}"
    return ""


def layout_fingerprint(config: ModelConfig, *, weights_digest: str) -> str:
    """Returns 32 hex digits that identify the weights and the meaning of a page's bytes.

    Page size and dtype are excluded, because they may differ between two workers.
    """
    parts = (PAGE_FORMAT, weights_digest, config.num_layers, config.num_kv_heads, config.head_dim)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _find_kernels() -> tuple[Kernels | None, str]:
    """Returns (CPU kernels, empty string), or (None, reason) if they are unavailable."""
    try:
        return load_kernels(), ""
    except KernelsUnavailable as error:
        logger.warning("no CPU kernels: %s; answers may depend on the batch (exact is false)", error.message)
        return None, error.message


def _choose_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device is {device!r}, it must be auto, cpu or cuda[:index]") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {device!r}, it must be auto, cpu or cuda[:index]")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {device!r}, but torch sees no GPU here: use cpu")
    return chosen


def _choose_dtype(dtype: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        is_half_on_cpu = config.dtype == "float16" and device.type == "cpu"
        return torch.float32 if is_half_on_cpu else _DTYPES[config.dtype]
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype is {dtype!r}, it must be auto, float32, bfloat16 or float16")
    if dtype == "float16" and device.type == "cpu":
        raise ConfigError("dtype is 'float16', which needs a GPU: use bfloat16 or float32 on a CPU")
    return _DTYPES[dtype]
