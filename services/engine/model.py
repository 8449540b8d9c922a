"""A loaded model: one call per step over packed tokens and a paged cache; knows nothing of sequences or sampling.

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

# Enters the fingerprint: raise it when the meaning of a page's bytes changes.
PAGE_FORMAT = 1

ENGINE = "tandem/1"
"""This engine and the version of its numerics: raise it when a change of the Python code changes any token, as one of
sampling or of the decoders may. Changes of the CPU kernels and of torch are named by `Model.arithmetic`."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Model:
    """A loaded model, for one thread at a time.

    `exact` says whether a token's result is proven, in this process, to be bitwise the same whatever shares its step,
    however its prompt was cut into chunks, and whether it was computed by prefill or by decode.
    `arithmetic` names what results depend on beside the inputs: two exact models whose fingerprint, dtype and
    arithmetic are equal give bitwise equal results in different processes.
    `kernels` are those of the CPU in use, if any. `kernels_error` says why torch computes instead of the compiled
    kernels of the device, and is empty if it does not.
    `fingerprint` names the weights and the meaning of a page's bytes: two workers exchange pages only if theirs agree.
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
        """Stops handing out the weights; they stay usable. May be called again."""
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
        """One step: writes the tokens' keys and values into the pool and returns logits, float32 [rows, V].

        The arguments are those of `step`, which raises InvariantViolated.
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
        """Returns the inputs of a step as the decoder takes them.

        `token_ids` and `positions` are int64 [T] with T >= 1, `pool_data` is [N, H, L, 2, S, D] in the model's dtype,
        and `logits_indices` int64 names the packed tokens whose logits are wanted (none is allowed). All tensors are
        contiguous and on the model's device. A prompt's chunks may be of any size, and any chunks and decode rows may
        share a step.

        Raises InvariantViolated where the step contradicts itself, the pool or the model.
        """
        longest = batch.longest_context
        if longest > self.config.context_length_tokens:
            raise InvariantViolated(f"a step reaches {longest} tokens, beyond the model's context")
        rope = self._rope.ensure(longest)
        return DecoderStep(token_ids, positions, batch, pool_data, logits_indices, rope)

    def whole_rope(self) -> torch.Tensor:
        """Returns the rotary table [P, 2, D/2] of the whole context; from then on it stays where it is in memory."""
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
        """`forward` of these tensors, for a caller that puts other numbers into them; it costs less than `forward`.

        No context is longer than `longest_context`. The logits are overwritten by the next call.
        """
        rope = self._rope.ensure(longest_context)
        step = DecoderStep(token_ids, positions, batch, pool_data, logits_indices, rope)
        decoder = self.decoder
        return decoder.repeatable(step) if isinstance(decoder, KernelDecoder) else RepeatedStep(decoder, step)


TimedStep = tuple[list[tuple[int, int, bool]], float]
"""What a step computed of each sequence, and the seconds that it took: tokens that it had before, new ones, and whether
these were its prompt's."""


class EngineWeights(NamedTuple):
    """What is left of a loaded model while it has no pages: its weights, and the steps that were timed."""

    model: Model
    first_steps: tuple[TimedStep, ...]

    def close(self) -> None:
        """Stops handing out the weights. May be called again."""
        self.model.close()


def load_model(
    model_dir: str | Path | Model,
    *,
    dtype: str = "auto",
    device: str = "auto",
    use_kernels: bool = True,
    shares_weights: bool = False,
) -> Model:
    """Loads a checkpoint folder. A model that is loaded already is returned as it is.

    `dtype` is "auto" (the checkpoint's own; float32 instead of float16 on a CPU), "float32", "bfloat16" or "float16".
    `device` is "auto" (a GPU where there is one), "cpu" or "cuda[:index]". Without `use_kernels`, or where they
    cannot be built, a CPU computes through torch and the model is not `exact`. With `shares_weights` all processes of
    the host that say so have them once (`services.engine.weights.shared`), until each closes its model.

    Raises ModelError for a folder that cannot be served and ConfigError for a wrong dtype or device.
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
        return None  # the code that opens the folder says what is wrong with it


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A checkpoint that is about to be read, what its tensors will be, and what will compute with them."""

    config: ModelConfig
    checkpoint: Checkpoint
    placement: WeightPlacement
    kernels: Kernels | None
    kernels_error: str = ""
    """Why torch computes instead of the compiled kernels. Empty if it does not, or if that was requested."""


def open_model(model_dir: str | Path, *, dtype: str, device: str, use_kernels: bool = True) -> ModelSource:
    """Does what `load_model` does before it reads a tensor; raises as it does. The caller closes the checkpoint."""
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
    """Names what results depend on beside the inputs: the kernels, the version of torch and the GPU."""
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
        from services.engine.gpu.decoder import TritonDecoder  # only where there is a Triton to import

        return TritonDecoder(config, weights)
    return TorchDecoder(config, weights)


def _triton_error() -> str:
    """Returns why Triton cannot be used, or an empty string. Triton compiles a part of itself, with a compiler."""
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
    """32 hex digits over the weights and the meaning of a page's bytes.

    Page size and dtype are not in it: they may differ between two workers.
    """
    parts = (PAGE_FORMAT, weights_digest, config.num_layers, config.num_kv_heads, config.head_dim)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _find_kernels() -> tuple[Kernels | None, str]:
    """Returns the CPU kernels and an empty string, or None and the reason."""
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
