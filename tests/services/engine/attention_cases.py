"""Batches of attention over pages in any order, and what comes out by the definition."""

import torch

from services.engine.reference.attention import AttentionBatch, write_kv

LAYERS = 3
SCALE = 0.25


def make_case(lengths, *, heads=(4, 2), head_dim=16, page_size=16, dtype=torch.float32, seed=0):
    """Sequences given as (query tokens, context tokens): q, the filled pool, the batch, and keys and values."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    num_pages = sum(-(-context // page_size) for _, context in lengths) + 2
    order = torch.randperm(num_pages, generator=generator).tolist()
    pool = torch.full((num_pages, num_kv_heads, LAYERS, 2, page_size, head_dim), float("nan"), dtype=dtype)
    tables, kept = [], []
    for _, context in lengths:
        table = [order.pop() for _ in range(-(-context // page_size))]
        keys, values = torch.randn(2, context, num_kv_heads, head_dim, generator=generator).to(dtype)
        slots = torch.tensor([table[p // page_size] * page_size + p % page_size for p in range(context)])
        write_kv(keys, values, pool, layer=1, slot_mapping=slots)
        tables.append(table)
        kept.append((keys, values))
    widest = max(len(table) for table in tables)
    starts = [0]
    for queries, _ in lengths:
        starts.append(starts[-1] + queries)
    batch = AttentionBatch(
        query_start=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor([context for _, context in lengths], dtype=torch.int32),
        page_tables=torch.tensor([table + [-3] * (widest - len(table)) for table in tables], dtype=torch.int32),
        slot_mapping=torch.zeros(starts[-1], dtype=torch.int64),
    )
    q = torch.randn(starts[-1], num_heads, head_dim, generator=generator).to(dtype)
    return q, pool, batch, kept


def expected_attention(q, batch, kept):
    """Softmax written out in double precision, one query at a time."""
    out = torch.empty_like(q, dtype=torch.float64)
    for b, (keys, values) in enumerate(kept):
        first, end = batch.query_start[b : b + 2].tolist()
        group = q.shape[1] // keys.shape[1]
        for row in range(first, end):
            visible = int(batch.context_lens[b]) - (end - row) + 1
            for head in range(q.shape[1]):
                scores = keys[:visible, head // group].double() @ q[row, head].double() * SCALE
                out[row, head] = scores.softmax(0) @ values[:visible, head // group].double()
    return out


CASES = {
    "one-token": [(1, 1)],
    "prompt": [(45, 45)],
    "chunk-after-others": [(20, 77)],
    "decode-rows": [(1, 5), (1, 64), (1, 33), (1, 16)],
    "mixed": [(1, 40), (17, 17), (1, 1), (9, 100), (1, 99), (35, 35)],
}
