"""Reads and validates a checkpoint's `config.json`. Does not depend on tensors, torch, or requests."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.runtime.errors import ModelError

logger = logging.getLogger(__name__)

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Supported model architectures, as named in config.json."""
DTYPES = ("float32", "bfloat16", "float16")

PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Frequency bands of Llama 3.1's rotary scaling."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_tokens: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Validated model configuration.

    `context_length_tokens` is the longest sequence (prompt and response) that is computed exactly: the model's limit,
    or its sliding window if that is shorter. `dtype` is the checkpoint's dtype ("float32", "bfloat16", or "float16").
    `eos_token_ids` is read from `generation_config.json` if present there, otherwise from `config.json`.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length_tokens: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3RopeScaling | None
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    has_tied_embeddings: bool
    eos_token_ids: frozenset[int]
    dtype: str

    @property
    def num_weights(self) -> int:
        """Number of parameters of the architecture. Tied embeddings count once."""
        hidden, heads = self.hidden_size, self.num_heads * self.head_dim
        qkv = heads + 2 * self.num_kv_heads * self.head_dim
        layer = hidden * (qkv + heads) + 3 * hidden * self.intermediate_size + 2 * hidden
        layer += qkv * self.has_qkv_bias + hidden * self.has_output_bias
        layer += (2 * self.intermediate_size + hidden) * self.has_mlp_bias + 2 * self.head_dim * self.has_qk_norm
        ends = self.vocab_size * hidden * (1 if self.has_tied_embeddings else 2) + hidden
        return self.num_layers * layer + ends


def load_config(model_dir: str | Path) -> ModelConfig:
    """Reads `config.json` and `generation_config.json` from a checkpoint directory.

    Raises ModelError, with a message that states the fix, if the directory is missing, contains only pickled weights,
    or describes a model that this engine would not compute exactly.
    """
    folder = Path(model_dir)
    check_folder(folder)
    raw = _read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else {}
    return parse_config(raw, generation=generation)


def check_folder(folder: Path) -> None:
    """Raises ModelError unless the directory looks like a safetensors checkpoint."""
    if not folder.exists():
        raise ModelError(f"the model folder {folder} does not exist: give the path of a downloaded checkpoint")
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder: give the folder that holds config.json, not a file in it")
    if not (folder / "config.json").is_file():
        raise ModelError(f"the model folder {folder} has no config.json: give the folder of a complete checkpoint")
    if any(folder.glob("*.safetensors")) or (folder / "model.safetensors.index.json").exists():
        return
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED_SUFFIXES)
    if pickled:
        raise ModelError(
            f"the model folder {folder} holds only pickled weights ({pickled[0]}), which can run code when loaded: "
            "convert the checkpoint to safetensors"
        )
    raise ModelError(f"the model folder {folder} has no *.safetensors file: download the checkpoint's weights")


def parse_config(raw: Mapping[str, Any], *, generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Validates the content of `config.json` and `generation_config.json`. Returns a ModelConfig.

    Raises ModelError for values that are missing, of the wrong type, or unsupported.
    """
    architecture = _architecture(raw)
    if "auto_map" in raw:
        # The directory contains Python code, which is never run. The public definition of the architecture is used.
        logger.warning("config.json has an auto_map: the checkpoint's own code is ignored")
    _refuse_what_would_be_wrong(raw)
    fields = _Fields(raw)
    hidden_size = fields.count("hidden_size")
    num_heads = fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", default=num_heads)
    head_dim = fields.count("head_dim", default=_default_head_dim(hidden_size, num_heads, raw))
    if num_heads % num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads ({num_heads}) is not a multiple of num_key_value_heads "
            f"({num_kv_heads}): check the checkpoint"
        )
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim ({head_dim}) is odd, rotary positions need an even one")
    attention_bias = fields.flag("attention_bias")
    rope_theta, rope_scaling = _rope(raw)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        context_length_tokens=_context_length_tokens(raw, fields),
        norm_eps=fields.number("rms_norm_eps", default=1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        has_qkv_bias=architecture == "Qwen2ForCausalLM" or (architecture != "MistralForCausalLM" and attention_bias),
        has_output_bias=architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and attention_bias,
        has_mlp_bias=architecture == "LlamaForCausalLM" and fields.flag("mlp_bias"),
        has_qk_norm=architecture == "Qwen3ForCausalLM",
        has_tied_embeddings=fields.flag("tie_word_embeddings"),
        eos_token_ids=_eos_token_ids(raw, generation or {}),
        dtype=_dtype(raw),
    )


@dataclass(frozen=True, slots=True)
class _Fields:
    """Typed access to a JSON object. Errors contain the key and the rule."""

    raw: Mapping[str, Any]

    def count(self, key: str, *, default: int | None = None) -> int:
        value = self.raw.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"config.json has no {key}: the checkpoint is incomplete, download it again")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"config.json: {key} is {value!r}, it must be a whole number of at least 1")
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        value = self.raw.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"config.json has no {key}: the checkpoint is incomplete, download it again")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ModelError(f"config.json: {key} is {value!r}, it must be a positive number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.raw.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise ModelError(f"config.json: {key} is {value!r}, it must be true or false")
        return value


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({error}): download the checkpoint again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} does not hold a JSON object: download the checkpoint again")
    return content


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or not names:
        raise ModelError("config.json names no architectures: use a checkpoint of a causal language model")
    known = [name for name in names if name in ARCHITECTURES]
    if not known:
        raise ModelError(f"the architecture {names[0]} is not supported: use one of {', '.join(ARCHITECTURES)}")
    return str(known[0])


def _refuse_what_would_be_wrong(raw: Mapping[str, Any]) -> None:
    if raw.get("quantization_config"):
        raise ModelError("the checkpoint is quantised (quantization_config): use one in float32, bfloat16 or float16")
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"config.json: hidden_act is {activation!r}, only 'silu' is supported")


def _default_head_dim(hidden_size: int, num_heads: int, raw: Mapping[str, Any]) -> int | None:
    if _architecture(raw) == "Qwen3ForCausalLM":
        return 128  # the default of the architecture for any hidden_size
    if raw.get("head_dim") is None and hidden_size % num_heads:
        raise ModelError(
            f"config.json: hidden_size ({hidden_size}) is not a multiple of num_attention_heads ({num_heads}) "
            "and there is no head_dim: check the checkpoint"
        )
    return hidden_size // num_heads


def _rope(raw: Mapping[str, Any]) -> tuple[float, Llama3RopeScaling | None]:
    # transformers 5 writes one object. transformers 4 wrote rope_theta and rope_scaling.
    parameters = raw.get("rope_parameters")
    if parameters is None:
        parameters = {"rope_theta": raw.get("rope_theta"), **(raw.get("rope_scaling") or {})}
    if not isinstance(parameters, dict):
        raise ModelError("config.json: rope_parameters must be an object")
    fields = _Fields(parameters)
    partial = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelError(f"config.json: partial_rotary_factor is {partial!r}, only 1 is supported")
    theta = fields.number("rope_theta", default=10000.0)
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type == "default":
        return theta, None
    if rope_type != "llama3":
        raise ModelError(f"config.json: the rope type {rope_type!r} is not supported, only 'default' and 'llama3' are")
    scaling = Llama3RopeScaling(
        factor=fields.number("factor"),
        low_freq_factor=fields.number("low_freq_factor"),
        high_freq_factor=fields.number("high_freq_factor"),
        original_context_tokens=fields.count("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ModelError("config.json: the rope's high_freq_factor must be greater than its low_freq_factor")
    return theta, scaling


def _context_length_tokens(raw: Mapping[str, Any], fields: _Fields) -> int:
    """Returns the model's limit or its sliding window. Within one window, full attention computes the same result."""
    limit = fields.count("max_position_embeddings")
    if not _has_sliding_layers(raw):
        return limit
    window = fields.count("sliding_window", default=4096)
    if window < limit:
        logger.warning("the context is limited to the sliding window of %d tokens (the model allows %d)", window, limit)
    return min(limit, window)


def _has_sliding_layers(raw: Mapping[str, Any]) -> bool:
    layer_types = raw.get("layer_types")
    if isinstance(layer_types, list):
        unknown = sorted({str(kind) for kind in layer_types} - {"full_attention", "sliding_attention"})
        if unknown:
            raise ModelError(f"config.json: the layer type {unknown[0]!r} is not supported")
        return "sliding_attention" in layer_types
    is_mistral = _architecture(raw) == "MistralForCausalLM"
    # The first Mistral release uses sliding windows by default. Qwen models only use them if configured.
    window = raw.get("sliding_window", 4096 if is_mistral else None)
    if window is None or not raw.get("use_sliding_window", is_mistral):
        return False
    first_sliding_layer = raw.get("max_window_layers", 0)
    return is_mistral or not isinstance(first_sliding_layer, int) or first_sliding_layer < raw["num_hidden_layers"]


def _eos_token_ids(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> frozenset[int]:
    value = generation.get("eos_token_id")
    value = raw.get("eos_token_id") if value is None else value
    values = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in values):
        raise ModelError(f"config.json: eos_token_id is {value!r}, it must be a token id or a list of them")
    return frozenset(values)


def _dtype(raw: Mapping[str, Any]) -> str:
    value = raw.get("dtype", raw.get("torch_dtype"))
    value = "float32" if value is None else str(value).removeprefix("torch.")
    if value not in DTYPES:
        raise ModelError(f"config.json: the dtype {value!r} is not supported, only {', '.join(DTYPES)} are")
    return value
