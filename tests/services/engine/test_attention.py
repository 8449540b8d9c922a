import pytest
import torch

from services.engine.attention import AttentionBatch, paged_attention, write_kv
from services.engine.kernels.library import load_kernels
from services.runtime.errors import InvariantViolated

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


@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1), (40, 1)])
@pytest.mark.parametrize("with_kernels", [True, False])
def test_equals_softmax_written_out(case, heads, with_kernels):
    kernels = load_kernels() if with_kernels else None
    for head_dim, page_size in ((16, 16), (20, 5)):
        q, pool, batch, kept = make_case(CASES[case], heads=heads, head_dim=head_dim, page_size=page_size)
        out = paged_attention(q, pool, layer=1, batch=batch, scale=SCALE, kernels=kernels)
        torch.testing.assert_close(out.double(), expected_attention(q, batch, kept), atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("head_dim", [2, 6, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_equals_sdpa_for_every_head_dim(head_dim, dtype):
    q, pool, batch, _ = make_case(CASES["mixed"], head_dim=head_dim, dtype=dtype)
    ours = paged_attention(q, pool, layer=1, batch=batch, scale=SCALE, kernels=load_kernels())
    theirs = paged_attention(q, pool, layer=1, batch=batch, scale=SCALE)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (40, 1)])
def test_kernel_row_is_bitwise_independent_of_its_chunk(dtype, heads):
    q, pool, batch, _ = make_case([(90, 90)], heads=heads, head_dim=24, dtype=dtype)
    kernels = load_kernels()
    whole = paged_attention(q, pool, layer=1, batch=batch, scale=SCALE, kernels=kernels)
    for chunk in (1, 13, 32):
        for first in range(0, 90, chunk):
            part = q[first : first + chunk]
            own = AttentionBatch(
                query_start=torch.tensor([0, len(part)], dtype=torch.int32),
                context_lens=torch.tensor([first + len(part)], dtype=torch.int32),
                page_tables=batch.page_tables,
                slot_mapping=batch.slot_mapping[: len(part)],
            )
            out = paged_attention(part, pool, layer=1, batch=own, scale=SCALE, kernels=kernels)
            assert torch.equal(out, whole[first : first + chunk])


def test_great_scores_do_not_overflow():
    q, pool, batch, kept = make_case(CASES["mixed"])
    out = paged_attention(q * 1e3, pool, layer=1, batch=batch, scale=SCALE, kernels=load_kernels())
    torch.testing.assert_close(out.double(), expected_attention(q * 1e3, batch, kept), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1, 6, 20])
def test_scores_that_rise_from_block_to_block(dtype, factor):
    """By less than what weights may be relative to, by more, and so that little is left of what was before."""
    lengths = [(1, 400), (40, 400), (3, 330)]
    q, pool, batch, kept = make_case(lengths, dtype=dtype)
    for (_, context), (keys, values), table in zip(lengths, kept, batch.page_tables.tolist(), strict=True):
        keys *= torch.linspace(0.2, 1.0, context).to(dtype)[:, None, None]
        slots = torch.tensor([table[p // 16] * 16 + p % 16 for p in range(context)])
        write_kv(keys, values, pool, layer=1, slot_mapping=slots)
    out = paged_attention(q * factor, pool, layer=1, batch=batch, scale=SCALE, kernels=load_kernels())
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    expected = expected_attention(q * factor, batch, kept)
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def test_write_kv_touches_only_its_slots():
    pool = torch.zeros(4, 2, LAYERS, 2, 8, 6)
    k, v = torch.ones(3, 2, 6), torch.full((3, 2, 6), 2.0)
    write_kv(k, v, pool, layer=2, slot_mapping=torch.tensor([0, 13, 31]))
    for page, slot in ((0, 0), (1, 5), (3, 7)):
        assert torch.equal(pool[page, :, 2, 0, slot], k[0])
        assert torch.equal(pool[page, :, 2, 1, slot], v[0])
    assert pool.sum() == k.sum() + v.sum()


def test_kernel_refuses_a_page_outside_the_pool():
    q, pool, batch, _ = make_case([(1, 20)])
    batch.page_tables[0, 1] = 99
    with pytest.raises(InvariantViolated, match="a page id is outside"):
        paged_attention(q, pool, layer=1, batch=batch, scale=SCALE, kernels=load_kernels())
