"""The Llama-family decoder in torch operations for any device: the reference for every other decoder.

Legend: T packed tokens, P positions, N pages, H KV heads, L layers, S slots of a page, D head_dim, K hidden size,
V vocabulary.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from services.engine.reference.attention import AttentionBatch, paged_attention, write_kv
from services.engine.reference.rope import apply_rope
from services.engine.weights.config import ModelConfig
from services.engine.weights.load import LayerWeights, ModelWeights


@dataclass(frozen=True, slots=True)
class DecoderStep:
    """The inputs of one step, as for `Model.forward`. `rope` is the data of a RopeTable, [P, 2, D/2].

    The last `num_states` entries of `logits_indices` request hidden states instead of logits.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    batch: AttentionBatch
    pool_data: torch.Tensor
    logits_indices: torch.Tensor
    rope: torch.Tensor
    num_states: int = 0


class Decoder(Protocol):
    """Computes steps of one model.

    On a CPU, a method returns after every rank has completed its writes to the pool. On a GPU, the writes are complete
    once the current stream is.
    """

    def forward(self, step: DecoderStep) -> torch.Tensor:
        """Writes the tokens' keys and values to the pool. Returns the requested logits, float32 [rows, V]."""
        ...

    def forward_with_states(self, step: DecoderStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs `forward` and also returns the requested states after the last norm, float32 [num_states, K]."""
        ...


@dataclass(frozen=True, slots=True)
class RepeatedStep:
    """A repeatable step with tensors at fixed addresses, whose contents change between runs."""

    decoder: Decoder
    step: DecoderStep

    @torch.inference_mode()
    def forward(self) -> torch.Tensor:
        """Runs the step. Returns logits, float32 [rows, V]."""
        return self.decoder.forward(self.step)


class TorchDecoder:
    """The decoder in torch operations. The result of a row may depend on other rows of its step."""

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self._config = config
        self._weights = weights

    def forward(self, step: DecoderStep) -> torch.Tensor:
        """Writes the tokens' keys and values to the pool. Returns the requested logits, float32 [rows, V]."""
        return self.forward_with_states(step)[0]

    def forward_with_states(self, step: DecoderStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Implements Decoder."""
        x = F.embedding(step.token_ids, self._weights.embedding)
        for index, layer in enumerate(self._weights.layers):
            x = x + self._attend(layer, index, x, step)
            x = x + self._feed_forward(layer, x)
        wanted = self._norm(x[step.logits_indices], self._weights.final_norm)
        num_logits = wanted.shape[0] - step.num_states
        return self._weights.lm_head(wanted[:num_logits], out_dtype=torch.float32), wanted[num_logits:].float()

    def _attend(self, layer: LayerWeights, index: int, x: torch.Tensor, step: DecoderStep) -> torch.Tensor:
        config = self._config
        qkv = layer.qkv(self._norm(x, layer.input_norm)).view(x.shape[0], -1, config.head_dim)
        q, k, v = torch.split(qkv, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            q, k = self._norm(q, layer.query_norm), self._norm(k, layer.key_norm)
        q, k = apply_rope(q, step.rope, step.positions), apply_rope(k, step.rope, step.positions)
        write_kv(k, v, step.pool_data, layer=index, slot_mapping=step.batch.slot_mapping)
        scale = config.head_dim**-0.5
        attended = paged_attention(q, step.pool_data, layer=index, batch=step.batch, scale=scale)
        return layer.output(attended.reshape(x.shape[0], -1))

    def _feed_forward(self, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        gate, up = layer.gate_up(self._norm(x, layer.post_norm)).chunk(2, dim=-1)
        return layer.down(F.silu(gate) * up)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._config.norm_eps)
        return weight * scaled.to(x.dtype)
