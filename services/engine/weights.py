"""The tensors of the architectures by name and shape, laid out for a device; knows nothing of computing with them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.engine.checkpoint import Checkpoint
from services.engine.config import ModelConfig
from services.engine.linear import Linear
from services.runtime.errors import ModelError


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder block. Query, key and value projections are one matrix, and so are gate and up."""

    input_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights, on the model's device and in its dtype."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    lm_head: Linear


@dataclass(frozen=True, slots=True)
class WeightPlacement:
    """Where weights go and how linear layers are laid out there; `make_linear` takes a weight [N, K] and a bias."""

    dtype: torch.dtype
    device: torch.device
    make_linear: Callable[[torch.Tensor, torch.Tensor | None], Linear]


def load_weights(config: ModelConfig, checkpoint: Checkpoint, placement: WeightPlacement) -> ModelWeights:
    """Reads all tensors of the architecture. Raises ModelError where one is missing, misshapen or unexpected."""
    return _Loader(config, checkpoint, placement).load()


class _Loader:
    """Reads the tensors of the architecture by name and lays them out for the device."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, placement: WeightPlacement) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._placement = placement
        # Buffers of older checkpoints that the engine computes itself, and what is ignored by the architecture.
        self._read = {name for name in checkpoint.names() if name.endswith(".rotary_emb.inv_freq")}
        if config.has_tied_embeddings:
            self._read.add("lm_head.weight")

    def load(self) -> ModelWeights:
        config = self._config
        embedding = self._tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        layers = tuple(self._layer(f"model.layers.{index}") for index in range(config.num_layers))
        final_norm = self._tensor("model.norm.weight", config.hidden_size)
        if config.has_tied_embeddings:
            lm_head = self._placement.make_linear(embedding, None)
        else:
            lm_head = self._linear(["lm_head"], [config.vocab_size], config.hidden_size, has_bias=False)
        unexpected = self._checkpoint.names() - self._read
        if unexpected:
            raise ModelError(
                f"the checkpoint holds the tensor {min(unexpected)}, which {config.architecture} with this config.json "
                "does not have: the weights and config.json belong to different models"
            )
        return ModelWeights(embedding, layers, final_norm, lm_head)

    def _layer(self, prefix: str) -> LayerWeights:
        config = self._config
        hidden, wide = config.hidden_size, config.intermediate_size
        q_features, kv_features = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv_names = [f"{attention}.{part}_proj" for part in ("q", "k", "v")]
        has_norm = config.has_qk_norm
        return LayerWeights(
            input_norm=self._tensor(f"{prefix}.input_layernorm.weight", hidden),
            qkv=self._linear(qkv_names, [q_features, kv_features, kv_features], hidden, has_bias=config.has_qkv_bias),
            query_norm=self._tensor(f"{attention}.q_norm.weight", config.head_dim) if has_norm else None,
            key_norm=self._tensor(f"{attention}.k_norm.weight", config.head_dim) if has_norm else None,
            output=self._linear([f"{attention}.o_proj"], [hidden], q_features, has_bias=config.has_output_bias),
            post_norm=self._tensor(f"{prefix}.post_attention_layernorm.weight", hidden),
            gate_up=self._linear(
                [f"{mlp}.gate_proj", f"{mlp}.up_proj"], [wide, wide], hidden, has_bias=config.has_mlp_bias
            ),
            down=self._linear([f"{mlp}.down_proj"], [hidden], wide, has_bias=config.has_mlp_bias),
        )

    def _linear(self, names: list[str], out_features: list[int], in_features: int, *, has_bias: bool) -> Linear:
        """The projections `names` as one matrix."""
        parts = list(zip(names, out_features, strict=True))
        weight = torch.cat([self._tensor(f"{name}.weight", rows, in_features) for name, rows in parts])
        bias = torch.cat([self._tensor(f"{name}.bias", rows) for name, rows in parts]) if has_bias else None
        return self._placement.make_linear(weight, bias)

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        self._read.add(name)
        return self._checkpoint.tensor(name, shape, dtype=self._placement.dtype).to(self._placement.device)
