"""Reference paged attention that gathers pages and calls SDPA: correct on every device, but slow.

Legend: T packed tokens, B sequences, C context tokens, N pages, S slots of a page, Hq query heads, H KV heads,
D head_dim.
"""

import torch
import torch.nn.functional as F


def paged_attention_sdpa(
    q: torch.Tensor,
    layer_data: torch.Tensor,
    *,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    page_tables: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Returns the causal attention of q [T, Hq, D] over the pages [N, H, 2, S, D] of one layer, [T, Hq, D].

    `query_start` [B+1], `context_lens` [B], and `page_tables` [B, max pages] are fields of an AttentionBatch.
    """
    starts = query_start.tolist()
    contexts = context_lens.tolist()
    out = torch.empty_like(q)
    decoding = [b for b in range(len(contexts)) if starts[b + 1] - starts[b] == 1]
    if decoding:
        rows = torch.tensor([starts[b] for b in decoding], device=q.device)
        chosen = torch.tensor(decoding, device=q.device)
        lengths = torch.tensor([contexts[b] for b in decoding], device=q.device)
        out[rows] = _attend_decoding(q[rows], layer_data, page_tables[chosen], lengths, scale)
    for b, context in enumerate(contexts):
        first, end = starts[b], starts[b + 1]
        if end - first > 1:
            keys, values = _gather(layer_data, page_tables[b : b + 1], context)
            positions = torch.arange(context - (end - first), context, device=q.device)
            mask = torch.arange(context, device=q.device) <= positions[:, None]
            out[first:end] = _sdpa(q[first:end].transpose(0, 1)[None], keys, values, mask, scale)[0].transpose(0, 1)
    return out


def _attend_decoding(
    q: torch.Tensor, layer_data: torch.Tensor, page_tables: torch.Tensor, lengths: torch.Tensor, scale: float
) -> torch.Tensor:
    """Returns the attention of one query per sequence, q [b, Hq, D], padded to the longest context."""
    longest = int(lengths.max())
    keys, values = _gather(layer_data, page_tables, longest)
    is_valid = torch.arange(longest, device=q.device) < lengths[:, None]
    # Slots beyond a sequence's end contain other data or were never written. NaN there would survive a zero weight.
    keys = keys.masked_fill(~is_valid[:, None, :, None], 0)
    values = values.masked_fill(~is_valid[:, None, :, None], 0)
    return _sdpa(q[:, :, None], keys, values, is_valid[:, None, None, :], scale)[:, :, 0]


def _gather(layer_data: torch.Tensor, page_tables: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns keys and values [b, H, context, D] from layer_data [N, H, 2, S, D]."""
    _, num_kv_heads, _, page_size, head_dim = layer_data.shape
    num_pages = -(-context // page_size)
    # Unused entries of a table may contain any value. Clamping keeps them in range, and the mask removes their pages.
    pages = page_tables[:, :num_pages].long().clamp(0, layer_data.shape[0] - 1)
    gathered = layer_data[pages].permute(3, 0, 2, 1, 4, 5)
    keys, values = gathered.reshape(2, pages.shape[0], num_kv_heads, num_pages * page_size, head_dim)
    return keys[:, :, :context], values[:, :, :context]


def _sdpa(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
