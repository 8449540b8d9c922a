import pytest
import torch

from services.engine.kernels.library import load_kernels
from services.engine.reference.attention import AttentionBatch, paged_attention, write_kv
from services.runtime.errors import InvariantViolated
from tests.services.engine.attention_cases import CASES, LAYERS, SCALE, expected_attention, make_case


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
