"""One rank's part of a decoder step. Gathers activations from the other ranks before each matrix.

All matrices are split by output features, and activations are gathered before each of them. One rank therefore computes
each element completely, by the same sequence of operations as a single rank, so results are bitwise identical for any
number of ranks. docs/parallelism.md compares the cost with the usual split, in which two matrices of each layer are
split by input features.

Legend: T packed tokens, N pages, H KV heads and Hq query heads (of this rank unless noted), L layers, S slots of a
page, D head_dim, K hidden size, V vocabulary.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F

from services.engine.kernels.library import HeadsArgs, Kernels, PlaceArgs, batch_args, check_tensor, pointer
from services.engine.parallel.meeting import Meeting
from services.engine.reference.attention import AttentionBatch, paged_attention, write_kv
from services.engine.reference.decoder import DecoderStep
from services.engine.reference.rope import apply_rope
from services.engine.weights.config import ModelConfig
from services.engine.weights.load import LayerWeights, ShardWeights
from services.engine.weights.shard import Shard
from services.runtime.errors import InvariantViolated


class LayerMath(Protocol):
    """Operations between a layer's matrices.

    Pages and heads belong to this rank. `index` counts all layers of the model.
    """

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Returns the RMSNorm of each row of x [T, hidden]."""
        ...

    def attend(self, layer: LayerWeights, index: int, qkv: torch.Tensor, step: DecoderStep) -> torch.Tensor:
        """Writes keys and values of qkv [T, (Hq + 2 H) D] and returns the attention, [T, Hq D]. May overwrite qkv."""
        ...

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Returns silu(gate) * up."""
        ...


class ShardedDecoder:
    """One rank's decoder. Steps contain the worker's complete pool, of which this rank accesses its own heads."""

    def __init__(
        self, config: ModelConfig, shard: Shard, weights: ShardWeights, math: LayerMath, meeting: Meeting
    ) -> None:
        self._config = config
        self._shard = shard
        self._weights = weights
        self._math = math
        self._meeting = meeting

    def forward_with_states(self, step: DecoderStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs this rank's part. Rank 0 returns the requested logits and states, and other ranks return empty tensors.

        The logits are float32 [rows, V]. The states after the last norm are float32 [num_states, K]. Every rank must
        receive the same step.
        """
        config, shard, meeting, math = self._config, self._shard, self._meeting, self._math
        own_step = self._own_part(step)
        x = self._begin(step)
        for index, layer in zip(shard.layers(config), self._weights.layers, strict=True):
            attended = math.attend(layer, index, layer.qkv(math.norm(x, layer.input_norm)), own_step)
            attended = meeting.gather(attended, config.num_heads * config.head_dim)
            x = x + meeting.gather(layer.output(attended), config.hidden_size)
            activated = math.activate(layer.gate_up(math.norm(x, layer.post_norm)))
            activated = meeting.gather(activated, config.intermediate_size)
            x = x + meeting.gather(layer.down(activated), config.hidden_size)
        return self._end(x, step)

    def _begin(self, step: DecoderStep) -> torch.Tensor:
        """Returns the input of the stage's first layer, [T, hidden]."""
        embedding = self._weights.embedding
        if embedding is None:
            x = torch.empty(step.token_ids.shape[0], self._config.hidden_size, dtype=step.pool_data.dtype)
            return self._meeting.take_over(x.to(step.pool_data.device))
        rows = self._shard.rows(self._config.vocab_size)
        is_own = (step.token_ids >= rows.start) & (step.token_ids < rows.stop)
        found = F.embedding((step.token_ids - rows.start).clamp(0, len(rows) - 1), embedding)
        return self._meeting.choose(found.masked_fill(~is_own[:, None], 0))

    def _end(self, x: torch.Tensor, step: DecoderStep) -> tuple[torch.Tensor, torch.Tensor]:
        config, num_logits = self._config, step.logits_indices.shape[0] - step.num_states
        part = states = None
        if self._weights.lm_head is None or self._weights.final_norm is None:
            self._meeting.pass_on(x)
        else:
            wanted = self._math.norm(x[step.logits_indices], self._weights.final_norm)
            part = self._weights.lm_head(wanted[:num_logits], out_dtype=torch.float32)
            columns = self._shard.rows(config.hidden_size)
            states = wanted[num_logits:, columns.start : columns.stop].float()
        logits = self._meeting.bring_to_first(part, num_logits, config.vocab_size)
        return logits, self._meeting.bring_to_first(states, step.num_states, config.hidden_size)

    def _own_part(self, step: DecoderStep) -> DecoderStep:
        """Returns the step restricted to the pages of this rank's KV heads.

        A page [H, L, 2, S, D] of all heads consists of `groups` consecutive smaller pages, one per range of heads. Page
        p of the worker is page p * groups + group of this rank, in a pool with `groups` times the pages. Ranks with the
        same KV heads share these pages and write the same values to them.
        """
        groups, group = self._shard.num_kv_groups(self._config), self._shard.kv_group(self._config)
        if groups == 1:
            return step
        num_pages, _, *rest = step.pool_data.shape
        batch, page_size = step.batch, rest[2]
        pages, slots = batch.slot_mapping // page_size, batch.slot_mapping % page_size
        own_batch = AttentionBatch(
            query_start=batch.query_start,
            context_lens=batch.context_lens,
            page_tables=batch.page_tables * groups + group,
            slot_mapping=(pages * groups + group) * page_size + slots,
        )
        return replace(step, batch=own_batch, pool_data=step.pool_data.view(num_pages * groups, -1, *rest))


def check_step(step: DecoderStep, config: ModelConfig) -> None:
    """Raises InvariantViolated for indices out of range. Rank 0 calls it before the other ranks start the step."""
    indices = ((step.token_ids, config.vocab_size), (step.logits_indices, step.token_ids.shape[0]))
    for values, end in indices:
        if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < end:
            raise InvariantViolated("a step names a token outside the vocabulary or logits outside the step")


@dataclass(frozen=True, slots=True)
class KernelMath:
    """Computes with the CPU kernels. Rows are independent, and one call computes all rows of a step."""

    kernels: Kernels
    config: ModelConfig
    heads: HeadsArgs
    """This rank's heads, and all layers of the model."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Returns the RMSNorm of each row."""
        return self.kernels.norm(x, weight, eps=self.config.norm_eps)

    def attend(self, layer: LayerWeights, index: int, qkv: torch.Tensor, step: DecoderStep) -> torch.Tensor:
        """Writes keys and values and returns the attention, [T, Hq D]."""
        num_tokens, batch = qkv.shape[0], step.batch
        args = batch_args(step.pool_data, batch.query_start, batch.context_lens, batch.page_tables)
        place = PlaceArgs(
            args,
            self.heads,
            index,
            None if layer.query_norm is None else pointer(layer.query_norm),
            None if layer.key_norm is None else pointer(layer.key_norm),
            self.config.norm_eps,
            check_tensor(step.positions, torch.int64, shape=(num_tokens,)),
            check_tensor(batch.slot_mapping, torch.int64, shape=(num_tokens,)),
            num_tokens,
            pointer(step.rope),
            step.rope.shape[0],
        )
        q = self.kernels.place(place, qkv)
        return self.kernels.attention(q, index, batch=args, heads=self.heads).view(num_tokens, -1)

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Returns silu(gate) * up."""
        return self.kernels.activate(gate_up)


@dataclass(frozen=True, slots=True)
class TorchMath:
    """Computes with torch operations on any device, like `services.engine.reference.decoder`."""

    config: ModelConfig
    num_heads: int
    num_kv_heads: int

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Returns the RMSNorm of each row."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.norm_eps)
        return weight * scaled.to(x.dtype)

    def attend(self, layer: LayerWeights, index: int, qkv: torch.Tensor, step: DecoderStep) -> torch.Tensor:
        """Writes keys and values and returns the attention, [T, Hq D]."""
        parts = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        q, k, v = torch.split(qkv.view(qkv.shape[0], -1, self.config.head_dim), parts, dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            q, k = self.norm(q, layer.query_norm), self.norm(k, layer.key_norm)
        q, k = apply_rope(q, step.rope, step.positions), apply_rope(k, step.rope, step.positions)
        write_kv(k, v, step.pool_data, layer=index, slot_mapping=step.batch.slot_mapping)
        scale = self.config.head_dim**-0.5
        attended = paged_attention(q, step.pool_data, layer=index, batch=step.batch, scale=scale)
        return attended.reshape(qkv.shape[0], -1)

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Returns silu(gate) * up."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


def layer_math(config: ModelConfig, shard: Shard, kernels: Kernels | None) -> LayerMath:
    """Returns the fastest available implementation."""
    num_heads, num_kv_heads = len(shard.heads(config)), len(shard.kv_heads(config))
    if kernels is None:
        return TorchMath(config, num_heads, num_kv_heads)
    scale = config.head_dim**-0.5
    return KernelMath(kernels, config, HeadsArgs(num_heads, num_kv_heads, config.head_dim, config.num_layers, scale))
