"""Paged attention against softmax written out in double precision, and bit by bit against itself in other company."""

import pytest
import torch

from services.engine.cache.pool import host_zeros
from services.engine.gpu import attention_triton
from services.engine.gpu.attention_triton import (
    SPLIT_TOKENS,
    DecodeRows,
    DecodeScratch,
    decode_attention,
    num_splits,
    prefill_attention,
    split_starts,
)
from services.engine.reference.attention_sdpa import paged_attention_sdpa

LAYERS, LAYER, SCALE = 2, 1, 0.25
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2}


class Case:
    """Sequences given as (query tokens, context tokens), their pages in random order; all else in the pool is NaN."""

    def __init__(self, device, lengths, *, heads=(4, 2), head_dim=64, page_size=16, dtype=torch.float32):
        generator = torch.Generator().manual_seed(0)
        num_heads, num_kv_heads = heads
        widest = max(-(-context // page_size) for _, context in lengths)
        num_pages = len(lengths) * widest + 1
        order = torch.randperm(num_pages, generator=generator)[1:].view(len(lengths), widest)
        shape = (num_pages, num_kv_heads, LAYERS, 2, page_size, head_dim)
        pool = torch.randn(shape, generator=generator).to(dtype)
        tables = torch.full((len(lengths), widest), -9, dtype=torch.int32)
        is_used = torch.zeros(num_pages, page_size, dtype=torch.bool)
        for row, (_, context) in enumerate(lengths):
            count = -(-context // page_size)
            tables[row, :count] = order[row, :count]
            positions = torch.arange(context)
            is_used[order[row, positions // page_size], positions % page_size] = True
        pool.permute(0, 4, 1, 2, 3, 5)[~is_used] = float("nan")
        pool[:, :, 1 - LAYER] = float("nan")
        counts = torch.tensor([0] + [queries for queries, _ in lengths])
        self.query_start = counts.cumsum(0).int().to(device)
        self.context_lens = torch.tensor([context for _, context in lengths], dtype=torch.int32, device=device)
        self.page_tables = tables.to(device)
        self.layer_data = pool.to(device)[:, :, LAYER]
        self.q = torch.randn(int(counts.sum()), num_heads, head_dim, generator=generator).to(dtype).to(device)

    def prefill(self, q=None, query_start=None, context_lens=None, page_tables=None):
        return prefill_attention(
            self.q if q is None else q,
            self.layer_data,
            query_start=self.query_start if query_start is None else query_start,
            context_lens=self.context_lens if context_lens is None else context_lens,
            page_tables=self.page_tables if page_tables is None else page_tables,
            scale=SCALE,
        )

    def decode(self, chosen):
        """The rows of these sequences alone, in this order; None is padding."""
        lens = torch.tensor([0 if one is None else int(self.context_lens[one]) for one in chosen], dtype=torch.int32)
        width = self.page_tables.shape[1]
        rows = DecodeRows(
            lens.to(self.q.device),
            torch.tensor([(one or 0) * width for one in chosen], dtype=torch.int32, device=self.q.device),
            self.page_tables.flatten(),
            split_starts(lens).to(self.q.device),
        )
        scratch = DecodeScratch.empty(int(rows.split_starts[-1]) + 1, *self.q.shape[1:], self.q.device)
        scratch.sums.fill_(float("nan"))
        q = self.q[[one or 0 for one in chosen]]
        return decode_attention(q, self.layer_data, rows, scratch, scale=SCALE)

    def expected(self):
        return paged_attention_sdpa(
            self.q.double().cpu(),
            self.layer_data.double().cpu(),
            query_start=self.query_start.cpu(),
            context_lens=self.context_lens.cpu(),
            page_tables=self.page_tables.cpu(),
            scale=SCALE,
        )


def assert_near(out, expected):
    torch.testing.assert_close(out.double().cpu(), expected, atol=TOLERANCE[out.dtype], rtol=TOLERANCE[out.dtype])


F32, BF16 = torch.float32, torch.bfloat16
# (heads, KV heads), head_dim, page size: every group from 1 to 8, every usual head_dim and page size.
SHAPES = [
    ((2, 2), 64, 16, BF16),
    ((3, 1), 80, 32, F32),
    ((14, 2), 96, 128, BF16),
    ((8, 1), 128, 16, F32),
    *(
        pytest.param(*shape, marks=pytest.mark.slow)
        for shape in (
            ((2, 1), 80, 32, BF16),
            ((3, 1), 96, 16, F32),
            ((4, 1), 128, 64, F32),
            ((4, 1), 128, 16, BF16),
            ((5, 1), 64, 128, F32),
            ((6, 1), 20, 5, BF16),
            ((7, 1), 16, 16, F32),
            ((8, 1), 128, 16, BF16),
            ((40, 1), 64, 16, BF16),
        )
    ),
]


@pytest.mark.parametrize(("heads", "head_dim", "page_size", "dtype"), SHAPES)
def test_prompts_equal_sdpa(device, heads, head_dim, page_size, dtype):
    # A whole prompt, a chunk behind others, one token, and one behind a prefix of whole pages.
    lengths = [(21, 21), (7, 40), (1, 1), (4, page_size + 4)]
    case = Case(device, lengths, heads=heads, head_dim=head_dim, page_size=page_size, dtype=dtype)
    assert_near(case.prefill(), case.expected())


@pytest.mark.parametrize(("heads", "head_dim", "page_size", "dtype"), SHAPES)
def test_decode_rows_equal_sdpa(device, heads, head_dim, page_size, dtype):
    lengths = [(1, 1), (1, page_size), (1, page_size + 1), (1, 75)]
    case = Case(device, lengths, heads=heads, head_dim=head_dim, page_size=page_size, dtype=dtype)
    assert_near(case.decode(range(len(lengths))), case.expected())


def test_a_long_row_is_joined_from_many_splits(device):
    case = Case(device, [(1, 9 * SPLIT_TOKENS + 1), (1, SPLIT_TOKENS)], heads=(1, 1), head_dim=16, dtype=BF16)
    assert_near(case.decode([0, 1]), case.expected())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decode_row_is_bitwise_the_same_in_any_batch(device, dtype, monkeypatch):
    lengths = [(1, 300), (1, 1), (1, 256), (1, 40)]
    case = Case(device, lengths, heads=(3, 1), head_dim=24, dtype=dtype)
    together = case.decode([0, 1, 2, 3])
    mixed = case.decode([3, None, 1, 1, 0, None, 2])
    assert torch.equal(mixed[[4, 2, 6, 0]], together)
    assert torch.equal(mixed[[1, 5]], torch.zeros_like(mixed[:2]))
    monkeypatch.setattr(attention_triton, "_num_programs", lambda device: 1)
    for row in range(len(lengths)):
        assert torch.equal(case.decode([row])[0], together[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prompt_is_bitwise_the_same_in_any_chunks_and_company(device, dtype):
    case = Case(device, [(70, 70), (9, 30)], heads=(3, 1), head_dim=24, dtype=dtype)
    whole = case.prefill()
    for chunk in (1, 13, 32):
        starts = range(0, 70, chunk) if chunk > 1 else (0, 15, 16, 69)
        for start in starts:
            end = min(start + chunk, 70)
            alone = case.prefill(
                case.q[start:end].contiguous(),
                torch.tensor([0, end - start], dtype=torch.int32, device=device),
                torch.tensor([end], dtype=torch.int32, device=device),
                case.page_tables[:1],
            )
            assert torch.equal(alone, whole[start:end]), (chunk, start)


def test_strides_are_those_of_the_pool_whatever_its_order(device):
    case = Case(device, [(1, 40), (1, 3)])
    expected = case.decode([0, 1])
    case.layer_data = case.layer_data.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(case.decode([0, 1]), expected)


def test_pages_beyond_2_to_the_31_elements_are_found(device):
    """A few pages near each other and far apart; memory in between is never touched, and so takes none."""
    near = Case(device, [(1, 40), (3, 17)], heads=(1, 1), head_dim=16, dtype=BF16)
    size, last_page = near.layer_data[0].numel(), len(near.layer_data) - 1
    page_stride = -(-(2**31) // last_page // 16) * 16 + 16
    memory = host_zeros((last_page * page_stride + size,), BF16).to(device)
    far = memory.as_strided(near.layer_data.shape, (page_stride, size, 256, 16, 1))
    far.copy_(near.layer_data)
    expected = near.prefill(), near.decode([0])
    near.layer_data = far
    assert torch.equal(near.prefill(), expected[0])
    assert torch.equal(near.decode([0]), expected[1])


def test_great_scores_do_not_overflow(device):
    case = Case(device, [(9, 40), (3, 3)])
    case.q *= 1e3
    out, expected = case.prefill().double().cpu(), case.expected()
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's
def test_nan_of_the_model_is_not_hidden(device):
    case = Case(device, [(1, 40), (1, 3)])
    case.q[0, 0, 0] = float("nan")
    out = case.decode([0, 1])
    assert out[0, 0].isnan().all()
    assert out[1].isfinite().all()


def test_splits_are_counted_by_length_alone():
    assert [num_splits(length) for length in (0, 1, 256, 257)] == [0, 1, 1, 2]
    assert split_starts(torch.tensor([0, 1, 257, 256], dtype=torch.int32)).tolist() == [0, 0, 1, 3, 4]
