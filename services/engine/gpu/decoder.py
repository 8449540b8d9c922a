"""Llama-family decoder on a CUDA device: torch computes the matrix products, and Triton kernels everything else.

`services.engine.reference.decoder` is the reference implementation. Prompts and decode rows use different kernels.
`forward` computes any number of tokens with the prompt kernel. `decode` computes one token per sequence with the decode
kernel, from tensors at fixed addresses, so a CUDA graph can capture it. Neither method synchronizes with the device.

Legend: T packed tokens, B sequences, N pages, H KV heads, L layers, S slots of a page, P positions, Hq query heads,
D head_dim, K hidden size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from services.engine.gpu.attention_triton import DecodeRows, DecodeScratch, decode_attention, prefill_attention
from services.engine.gpu.fused_triton import add_rms_norm, rms_norm, rope_and_write, silu_and_multiply
from services.engine.reference.decoder import DecoderStep
from services.engine.weights.config import ModelConfig
from services.engine.weights.load import ModelWeights


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Inputs of a step with one token for each of B sequences. All tensors are on the model's device.

    `token_ids` and `positions` are [B]. `slot_mapping` [B] is page_id * S + slot, or negative for padding. `rope` is
    the table for the model's full context, [P, 2, D/2]. `pool_data` is [N, H, L, 2, S, D].
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    rows: DecodeRows
    scratch: DecodeScratch
    pool_data: torch.Tensor
    rope: torch.Tensor


class TritonDecoder:
    """The decoder on one device, for one thread at a time."""

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config = config
        self._weights = weights
        self._scale = config.head_dim**-0.5

    def forward(self, step: DecoderStep) -> torch.Tensor:
        """Writes the tokens' keys and values to the pool. Returns the requested logits, float32 [rows, V]."""
        x, residual = self.hidden(step)
        return self.logits(x, residual, step.logits_indices)

    def forward_with_states(self, step: DecoderStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs `forward` and also returns the requested states after the last norm, float32 [num_states, K]."""
        x, residual = self.hidden(step)
        wanted = self._last_norm(x[step.logits_indices], residual[step.logits_indices])
        num_logits = wanted.shape[0] - step.num_states
        return self._weights.lm_head(wanted[:num_logits]).float(), wanted[num_logits:].float()

    def hidden(self, step: DecoderStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs `forward` up to the logits. Returns the last block's output and the residual, each [T, K]."""
        batch = step.batch

        def attend(q: torch.Tensor, layer_data: torch.Tensor) -> torch.Tensor:
            return prefill_attention(
                q,
                layer_data,
                query_start=batch.query_start,
                context_lens=batch.context_lens,
                page_tables=batch.page_tables,
                scale=self._scale,
            )

        return self._layers(
            F.embedding(step.token_ids, self._weights.embedding),
            positions=step.positions,
            slot_mapping=batch.slot_mapping,
            pool_data=step.pool_data,
            rope=step.rope,
            attend=attend,
        )

    def logits(self, x: torch.Tensor, residual: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Returns the logits, float32 [rows, V], of the tokens `wanted`, int64 [rows], from the results of `hidden`."""
        return self._logits(x[wanted], residual[wanted]).float()

    def decode(self, step: DecodeStep) -> torch.Tensor:
        """Computes one token per sequence. Returns the logits of all sequences, [B, V] in the model's dtype."""

        def attend(q: torch.Tensor, layer_data: torch.Tensor) -> torch.Tensor:
            return decode_attention(q, layer_data, step.rows, step.scratch, scale=self._scale)

        x, residual = self._layers(
            F.embedding(step.token_ids, self._weights.embedding),
            positions=step.positions,
            slot_mapping=step.slot_mapping,
            pool_data=step.pool_data,
            rope=step.rope,
            attend=attend,
        )
        return self._logits(x, residual)

    def _layers(
        self,
        residual: torch.Tensor,
        *,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        pool_data: torch.Tensor,
        rope: torch.Tensor,
        attend: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs all blocks. Returns the last block's output and the residual, which is modified in place."""
        config, eps = self.config, self.config.norm_eps
        x = residual
        for index, layer in enumerate(self._weights.layers):
            norm = layer.input_norm
            normed = add_rms_norm(x, residual, norm, eps) if index else rms_norm(x, norm, eps)
            norms = None
            if layer.query_norm is not None and layer.key_norm is not None:
                norms = (layer.query_norm, layer.key_norm)
            layer_data = pool_data[:, :, index]
            q = rope_and_write(
                layer.qkv(normed),
                layer_data,
                num_heads=config.num_heads,
                positions=positions,
                slot_mapping=slot_mapping,
                rope=rope,
                norms=norms,
                eps=eps,
            )
            x = layer.output(attend(q, layer_data).flatten(1))
            normed = add_rms_norm(x, residual, layer.post_norm, eps)
            x = layer.down(silu_and_multiply(layer.gate_up(normed)))
        return x, residual

    def _logits(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._weights.lm_head(self._last_norm(x, residual))

    def _last_norm(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return add_rms_norm(x, residual, self._weights.final_norm, self.config.norm_eps)
