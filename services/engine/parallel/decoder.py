"""One rank's part of a decoder step, with the others met where a layer needs what they have.

All matrices are cut by output features, and activations are gathered before each: an element is then computed whole, by
the same chain of operations as on a single rank, so results are bitwise the same however many ranks there are. Its cost
against the usual cut, where two matrices of a layer are cut by input features, is in docs/parallelism.md.

Legend: T packed tokens, N pages, H KV heads and Hq query heads (of this rank where not said otherwise), L layers,
S slots of a page, D head_dim, K hidden size, V vocabulary.
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
    """What lies between the matrices of a layer. Pages and heads are this rank's, layers all of the model's."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm of each row of x [T, hidden]."""
        ...

    def attend(self, layer: LayerWeights, index: int, qkv: torch.Tensor, step: DecoderStep) -> torch.Tensor:
        """Writes keys and values of qkv [T, (Hq + 2 H) D], which may be spoilt, and attends: [T, Hq D]."""
        ...

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up."""
        ...


class ShardedDecoder:
    """One rank's decoder. `pool_data` of its steps is the worker's whole pool, of which it touches its own heads."""

    def __init__(
        self, config: ModelConfig, shard: Shard, weights: ShardWeights, math: LayerMath, meeting: Meeting
    ) -> None:
        self._config = config
        self._shard = shard
        self._weights = weights
        self._math = math
        self._meeting = meeting

    def forward_with_states(self, step: DecoderStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes this rank's part; rank 0 returns the wanted logits and states, the others nothing.

        The logits are float32 [rows, V], the states after the last norm float32 [num_states, K]. Every rank must be
        given the same step.
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
        """Returns what goes into the first layer of the stage, [T, hidden]."""
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
        """Returns the step over pages of this rank's KV heads only.

        A page [H, L, 2, S, D] of all heads is `groups` smaller pages one after the other, one for each range of heads:
        page p of the worker is page p * groups + group of this rank, in a pool with `groups` times the pages. Ranks
        that share their KV heads share these pages and write the same to them.
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
    """Raises InvariantViolated for what every rank would use as an index; for one rank, before the others begin."""
    indices = ((step.token_ids, config.vocab_size), (step.logits_indices, step.token_ids.shape[0]))
    for values, end in indices:
        if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < end:
            raise InvariantViolated("a step names a token outside the vocabulary or logits outside the step")


@dataclass(frozen=True, slots=True)
class KernelMath:
    """Through the CPU kernels: rows do not depend on each other, and are those of a step in one call."""

    kernels: Kernels
    config: ModelConfig
    heads: HeadsArgs
    """This rank's heads, and all layers."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm of each row."""
        return self.kernels.norm(x, weight, eps=self.config.norm_eps)

    def attend(self, layer: LayerWeights, index: int, qkv: torch.Tensor, step: DecoderStep) -> torch.Tensor:
        """Writes keys and values and attends: [T, Hq D]."""
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
        """silu(gate) * up."""
        return self.kernels.activate(gate_up)


@dataclass(frozen=True, slots=True)
class TorchMath:
    """Through torch operations, on any device; as `services.engine.reference.decoder` computes."""

    config: ModelConfig
    num_heads: int
    num_kv_heads: int

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm of each row."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.norm_eps)
        return weight * scaled.to(x.dtype)

    def attend(self, layer: LayerWeights, index: int, qkv: torch.Tensor, step: DecoderStep) -> torch.Tensor:
        """Writes keys and values and attends: [T, Hq D]."""
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
        """silu(gate) * up."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


def layer_math(config: ModelConfig, shard: Shard, kernels: Kernels | None) -> LayerMath:
    """Returns the fastest there is."""
    num_heads, num_kv_heads = len(shard.heads(config)), len(shard.kv_heads(config))
    if kernels is None:
        return TorchMath(config, num_heads, num_kv_heads)
    scale = config.head_dim**-0.5
    return KernelMath(kernels, config, HeadsArgs(num_heads, num_kv_heads, config.head_dim, config.num_layers, scale))
