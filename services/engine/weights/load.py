"""Loads the architectures' tensors by name and shape, in the layout of a device. Does not compute with them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.engine.weights.checkpoint import Checkpoint
from services.engine.weights.config import ModelConfig
from services.engine.weights.linear import Linear, LinearParts
from services.engine.weights.shard import SINGLE, Shard
from services.runtime.errors import ModelError


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder block. The query, key, and value projections form one matrix, and so do gate and up."""

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
    """All weights, on the model's device and in the model's dtype."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    lm_head: Linear


@dataclass(frozen=True, slots=True)
class ShardWeights:
    """One rank's part of the weights.

    The first stage has `embedding` [the rank's rows of the vocabulary, hidden]. The last stage has the final norm and
    the head.
    """

    embedding: torch.Tensor | None
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor | None
    lm_head: Linear | None


@dataclass(frozen=True, slots=True)
class WeightPlacement:
    """Device and dtype of the weights, and the layout of linear layers.

    `make_linear` creates a layer from a weight [N, K] and a bias. `linear_of` creates a layer from the parts of an
    equal layer.
    """

    dtype: torch.dtype
    device: torch.device
    make_linear: Callable[[torch.Tensor, torch.Tensor | None], Linear]
    linear_of: Callable[[LinearParts], Linear]


def load_weights(config: ModelConfig, checkpoint: Checkpoint, placement: WeightPlacement) -> ModelWeights:
    """Reads all tensors of the architecture. Raises ModelError if one is missing, misshapen, or unexpected."""
    whole = load_shard(config, checkpoint, placement, Shard(SINGLE, 0))
    assert whole.embedding is not None
    assert whole.final_norm is not None
    assert whole.lm_head is not None
    return ModelWeights(whole.embedding, whole.layers, whole.final_norm, whole.lm_head)


def load_shard(config: ModelConfig, checkpoint: Checkpoint, placement: WeightPlacement, shard: Shard) -> ShardWeights:
    """Reads only a rank's part of the tensors. Raises ModelError like load_weights.

    Across all ranks, each row of the checkpoint is counted exactly once in its digest.
    """
    return _Loader(config, checkpoint, placement, shard).load()


class _Loader:
    """Reads the architecture's tensors by name, in the layout of the device."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, placement: WeightPlacement, shard: Shard) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._placement = placement
        self._shard = shard
        # Skip buffers of older checkpoints that the engine computes itself, and tensors that the architecture ignores.
        self._read = {name for name in checkpoint.names() if name.endswith(".rotary_emb.inv_freq")}
        if config.has_tied_embeddings:
            self._read.add("lm_head.weight")
        # Embedding models are saved without a head, and without the "model." prefix.
        self._base = "" if "embed_tokens.weight" in checkpoint.names() else "model."
        self._read |= self._names_of_other_stages()

    def load(self) -> ShardWeights:
        config, shard = self._config, self._shard
        embedding = self._embedding(is_counted=True) if shard.is_first_stage else None
        layers = tuple(self._layer(f"{self._base}layers.{index}") for index in shard.layers(config))
        final_norm = self._tensor(f"{self._base}norm.weight", config.hidden_size) if shard.is_last_stage else None
        lm_head = self._lm_head(embedding) if shard.is_last_stage else None
        unexpected = self._checkpoint.names() - self._read
        if unexpected:
            raise ModelError(
                f"the checkpoint holds the tensor {min(unexpected)}, which {config.architecture} with this config.json "
                "does not have: the weights and config.json belong to different models"
            )
        return ShardWeights(embedding, layers, final_norm, lm_head)

    def _names_of_other_stages(self) -> set[str]:
        """Returns the names of tensors that ranks of other stages check."""
        own = self._shard.layers(self._config)
        theirs = tuple(f"{self._base}layers.{index}." for index in range(self._config.num_layers) if index not in own)
        names = {name for name in self._checkpoint.names() if name.startswith(theirs)} if theirs else set()
        if not self._shard.is_first_stage:
            names.add(f"{self._base}embed_tokens.weight")
        return names if self._shard.is_last_stage else names | {f"{self._base}norm.weight", "lm_head.weight"}

    def _embedding(self, *, is_counted: bool) -> torch.Tensor:
        shape = (self._config.vocab_size, self._config.hidden_size)
        rows = self._shard.rows(shape[0])
        return self._tensor(f"{self._base}embed_tokens.weight", *shape, rows=rows, is_counted=is_counted)

    def _lm_head(self, embedding: torch.Tensor | None) -> Linear:
        config = self._config
        if not config.has_tied_embeddings:
            rows = [(config.vocab_size, self._shard.rows(config.vocab_size))]
            return self._linear(["lm_head"], rows, config.hidden_size, has_bias=False)
        tied = self._embedding(is_counted=False) if embedding is None else embedding
        return self._placement.make_linear(tied, None)

    def _layer(self, prefix: str) -> LayerWeights:
        config, shard = self._config, self._shard
        hidden, wide = config.hidden_size, config.intermediate_size
        q_features, kv_features = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        q_rows, kv_rows = _features(shard.heads(config), config), _features(shard.kv_heads(config), config)
        kv = (kv_features, kv_rows)
        narrow, widened = (hidden, shard.rows(hidden)), (wide, shard.rows(wide))
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv_names = [f"{attention}.{part}_proj" for part in ("q", "k", "v")]
        gate_up_names = [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
        has_norm = config.has_qk_norm
        return LayerWeights(
            input_norm=self._tensor(f"{prefix}.input_layernorm.weight", hidden),
            qkv=self._linear(qkv_names, [(q_features, q_rows), kv, kv], hidden, has_bias=config.has_qkv_bias),
            query_norm=self._tensor(f"{attention}.q_norm.weight", config.head_dim) if has_norm else None,
            key_norm=self._tensor(f"{attention}.k_norm.weight", config.head_dim) if has_norm else None,
            output=self._linear([f"{attention}.o_proj"], [narrow], q_features, has_bias=config.has_output_bias),
            post_norm=self._tensor(f"{prefix}.post_attention_layernorm.weight", hidden),
            gate_up=self._linear(gate_up_names, [widened, widened], hidden, has_bias=config.has_mlp_bias),
            down=self._linear([f"{mlp}.down_proj"], [narrow], wide, has_bias=config.has_mlp_bias),
        )

    def _linear(self, names: list[str], cuts: list[tuple[int, range]], in_features: int, *, has_bias: bool) -> Linear:
        """Returns the projections `names` as one matrix. `cuts` contains (total rows, rows to read) per projection."""
        weights, biases = [], []
        for name, (out_features, rows) in zip(names, cuts, strict=True):
            is_counted = not name.endswith((".k_proj", ".v_proj")) or self._shard.is_first_of_kv_group(self._config)
            weights.append(self._tensor(f"{name}.weight", out_features, in_features, rows=rows, is_counted=is_counted))
            if has_bias:
                biases.append(self._tensor(f"{name}.bias", out_features, rows=rows))
        return self._placement.make_linear(torch.cat(weights), torch.cat(biases) if has_bias else None)

    def _tensor(self, name: str, *shape: int, rows: range | None = None, is_counted: bool = True) -> torch.Tensor:
        """Returns a tensor, or some of its rows. All ranks of a stage read vectors, and the first rank counts them."""
        self._read.add(name)
        is_counted = is_counted and (len(shape) > 1 or self._shard.tensor_rank == 0)
        tensor = self._checkpoint.tensor(name, shape, dtype=self._placement.dtype, rows=rows, is_counted=is_counted)
        return tensor.to(self._placement.device)


def _features(heads: range, config: ModelConfig) -> range:
    return range(heads.start * config.head_dim, heads.stop * config.head_dim)
