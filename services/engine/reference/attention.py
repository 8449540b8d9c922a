"""Defines the cache layout, with one function to write to it and one to attend over it, for all implementations.

The pool's layout is [N, H, L, 2, S, D]. A page is contiguous, and so is a range of its heads.

Legend: T packed tokens, B sequences, N pages, H KV heads, L layers, S slots of a page, Hq query heads, D head_dim.
"""

from dataclasses import dataclass

import torch

from services.engine.kernels.library import HeadsArgs, Kernels, batch_args
from services.engine.reference.attention_sdpa import paged_attention_sdpa


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Assigns packed tokens to sequences, and locates the keys and values of the sequences.

    `query_start` int32 [B+1]: sequence b owns the packed tokens query_start[b] to query_start[b+1].
    `context_lens` int32 [B]: tokens of the sequence. The tokens of this step are included, and are the last ones.
    `page_tables` int32 [B, max pages]: page IDs in order. Entries beyond the context are ignored.
    `slot_mapping` int64 [T]: page_id * S + slot to which each packed token's key and value are written.

    All tensors are on the model's device. `longest_tokens` is the maximum of `context_lens`, if known. It avoids a wait
    for the GPU to compute the maximum.
    """

    query_start: torch.Tensor
    context_lens: torch.Tensor
    page_tables: torch.Tensor
    slot_mapping: torch.Tensor
    longest_tokens: int | None = None

    @property
    def longest_context(self) -> int:
        """Maximum of `context_lens`."""
        if self.longest_tokens is not None:
            return self.longest_tokens
        lens = self.context_lens
        # numpy keeps the GIL for this small operation. torch would release it right before the model is called.
        return int(lens.numpy().max() if lens.device.type == "cpu" else lens.max())


def write_kv(
    k: torch.Tensor, v: torch.Tensor, pool_data: torch.Tensor, *, layer: int, slot_mapping: torch.Tensor
) -> None:
    """Writes k and v, both [T, H, D], into the slots of one layer."""
    page_size = pool_data.shape[4]
    pages, slots = slot_mapping // page_size, slot_mapping % page_size
    pool_data[pages, :, layer, 0, slots] = k
    pool_data[pages, :, layer, 1, slots] = v


def paged_attention(
    q: torch.Tensor,
    pool_data: torch.Tensor,
    *,
    layer: int,
    batch: AttentionBatch,
    scale: float,
    kernels: Kernels | None = None,
) -> torch.Tensor:
    """Returns the causal attention of q [T, Hq, D] over the cached tokens of each row's sequence, [T, Hq, D].

    With `kernels` (CPU, float32 or bfloat16), the result of a row is bitwise independent of other rows.
    """
    if kernels is not None:
        _, num_kv_heads, num_layers, _, _, head_dim = pool_data.shape
        return kernels.attention(
            q.contiguous(),
            layer,
            batch=batch_args(pool_data, batch.query_start, batch.context_lens, batch.page_tables),
            heads=HeadsArgs(q.shape[1], num_kv_heads, head_dim, num_layers, scale),
        )
    return paged_attention_sdpa(
        q,
        pool_data[:, :, layer],
        query_start=batch.query_start,
        context_lens=batch.context_lens,
        page_tables=batch.page_tables,
        scale=scale,
    )
