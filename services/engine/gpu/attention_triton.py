"""Paged attention in Triton that reads the pool's pages in place: a kernel for decode rows, and one for prompts.

By construction, the result of a row depends bitwise only on the row's own query, keys, and values:

- The context of a decode row is divided into splits of SPLIT_TOKENS at fixed positions. Each split is reduced
  separately, and the splits are joined in order. The number of programs, and their assignment to splits, do not matter.
- A prompt row processes key blocks of a fixed size in order from position 0. Blocks after the row's position, which
  other rows of its tile need, add zeros. The division into chunks does not matter.

The two kernels are not bitwise equal to each other. Slots beyond a context are not loaded, because they may contain
anything, including NaN. float32 is computed in float32, never in TF32.

Legend: T packed tokens, B sequences, N pages, H KV heads, G query heads of a KV head, S slots of a page, D head_dim,
W splits of all sequences.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

SPLIT_TOKENS = 256

_LOG2_E = 1.4426950408889634
# Programs that share the splits of a step: enough that each SM can hide the loads of one program behind another.
_PROGRAMS_PER_PROCESSOR = 4
_PROGRAMS_INTERPRETED = 3
# A compiled kernel searches up to this number of sequences.
_FEW_SEQUENCES = 256


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Locations of the keys and values of B rows, one query each. All tensors are int32, on the pool's device.

    `context_lens` [B]: tokens including the token of this step. A row of length 0 is padding, and its result is zeros.
    `table_starts` [B]: start of the row's page IDs in `page_ids`, in order.
    `split_starts` [B+1]: number of splits of all previous rows, as computed by `split_starts(lens)`.
    """

    context_lens: torch.Tensor
    table_starts: torch.Tensor
    page_ids: torch.Tensor
    split_starts: torch.Tensor


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """Results of splits before the join: `sums` [W, H, G, D] and `log_weights` [W, H, G], float32."""

    sums: torch.Tensor
    log_weights: torch.Tensor

    @classmethod
    def empty(cls, num_splits: int, num_heads: int, head_dim: int, device: torch.device) -> "DecodeScratch":
        """Allocates scratch memory for `num_splits` splits of `num_heads` query heads. Its content is undefined."""
        return cls(
            torch.empty(num_splits, num_heads, head_dim, dtype=torch.float32, device=device),
            torch.empty(num_splits, num_heads, dtype=torch.float32, device=device),
        )

    @property
    def num_splits(self) -> int:
        """Maximum number of splits."""
        return self.sums.shape[0]


def decode_attention(
    q: torch.Tensor, layer_data: torch.Tensor, rows: DecodeRows, scratch: DecodeScratch, *, scale: float
) -> torch.Tensor:
    """Returns the attention of q [B, H * G, D], one query per sequence, over the pages [N, H, 2, S, D] of one layer.

    The result is [B, H * G, D]. `scratch` must be large enough for all splits of the rows, and is overwritten.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, page_size = layer_data.shape[1], layer_data.shape[3]
    group = num_heads // num_kv_heads
    out = torch.empty_like(q)
    block = decode_block(q.dtype, head_dim)
    _decode_splits[(_num_programs(q.device),)](
        q,
        layer_data,
        rows.context_lens,
        rows.table_starts,
        rows.page_ids,
        rows.split_starts,
        scratch.sums,
        scratch.log_weights,
        scale * _LOG2_E,
        num_rows,
        layer_data.stride(0),
        layer_data.stride(1),
        layer_data.stride(2),
        ROWS=max(_FEW_SEQUENCES, triton.next_power_of_2(num_rows)),
        KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_PADDED=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=max(16, triton.next_power_of_2(head_dim)),
        PAGE_SIZE=page_size,
        BLOCK=block.tokens,
        SPLIT=SPLIT_TOKENS,
        WIDEN=q.device.type == "cpu",
        num_warps=block.num_warps,
        num_stages=_num_stages(block, num_rows),
    )
    _join_splits[(num_rows, num_heads)](
        scratch.sums,
        scratch.log_weights,
        rows.split_starts,
        out,
        HEADS=num_heads,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=triton.next_power_of_2(head_dim),
        BLOCK=8,
        num_warps=4,
    )
    return out


def prefill_attention(
    q: torch.Tensor,
    layer_data: torch.Tensor,
    *,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    page_tables: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Returns the causal attention of q [T, H * G, D] over the pages [N, H, 2, S, D] of one layer, [T, H * G, D].

    `query_start` [B+1], `context_lens` [B], and `page_tables` [B, max pages] are fields of an AttentionBatch. Tokens
    after the last sequence are padding, and their results are zeros.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, page_size = layer_data.shape[1], layer_data.shape[3]
    num_sequences = context_lens.shape[0]
    group = num_heads // num_kv_heads
    out = torch.zeros_like(q)
    block = prefill_block(q.dtype, group)
    queries = block.rows // group
    # This number of tiles suffices for every distribution of tokens to sequences. Only the device has the distribution.
    num_tiles = num_tokens // queries + num_sequences
    _prefill_tiles[(num_tiles, num_kv_heads)](
        q,
        layer_data,
        query_start,
        context_lens,
        page_tables,
        out,
        scale * _LOG2_E,
        num_sequences,
        page_tables.stride(0),
        layer_data.stride(0),
        layer_data.stride(1),
        layer_data.stride(2),
        SEQUENCES=max(_FEW_SEQUENCES, triton.next_power_of_2(num_sequences)),
        KV_HEADS=num_kv_heads,
        GROUP=group,
        QUERIES=queries,
        ROWS=block.rows,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=max(16, triton.next_power_of_2(head_dim)),
        PAGE_SIZE=page_size,
        BLOCK=block.tokens,
        WIDEN=q.device.type == "cpu",
        num_warps=block.num_warps,
        num_stages=block.num_stages,
    )
    return out


@dataclass(frozen=True, slots=True)
class Block:
    """Block size of a program. It affects the bits of a result, so it may depend only on the model."""

    rows: int
    tokens: int
    num_warps: int
    num_stages: int


def decode_block(dtype: torch.dtype, head_dim: int) -> Block:
    """Returns the block of a decode row. Its rows are the padded group."""
    if dtype == torch.float32:
        return Block(16, 16, 4, 2)
    return Block(16, 64, 4, 3 if head_dim > 64 else 2)  # a third stage would spill for narrow heads


def _num_stages(block: Block, num_rows: int) -> int:
    """Returns the number of pipeline stages, which affects no bits. A single row has memory for more stages."""
    return 5 if num_rows == 1 and block.num_stages == 3 else block.num_stages


def prefill_block(dtype: torch.dtype, group: int) -> Block:
    """Returns the block of a prompt. Its rows are pairs of query and head of the group."""
    if dtype == torch.float32:
        return Block(max(32, triton.next_power_of_2(group)), 32, 8, 2)
    if group <= 2:  # 5 to 17 % faster than the larger block on an H100
        return Block(64, 64, 4, 3)
    return Block(max(128, triton.next_power_of_2(group)), 64, 8, 2)


def num_splits(context_len: int) -> int:
    """Returns the number of splits of a decode row with this length."""
    return -(-context_len // SPLIT_TOKENS)


def split_starts(context_lens: torch.Tensor) -> torch.Tensor:
    """Returns `DecodeRows.split_starts` [B+1] for rows with these lengths [B]."""
    counts = (context_lens + (SPLIT_TOKENS - 1)) // SPLIT_TOKENS
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))


def _num_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return _PROGRAMS_INTERPRETED
    return int(_PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def _product(left, right, WIDEN: tl.constexpr):
    # Triton's interpreter cannot multiply bfloat16. In float32, the products are exactly the same.
    if WIDEN:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit(do_not_specialize=["num_rows"])
def _decode_splits(
    q,
    kv,
    context_lens,
    table_starts,
    page_ids,
    split_starts,
    sums,
    log_weights,
    scale_log2,
    num_rows,
    page_stride,
    head_stride,
    value_stride,
    ROWS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDEN: tl.constexpr,
):
    # Programs share the pairs of (split, KV head) of all rows, for any number of programs.
    num_pairs = tl.load(split_starts + num_rows) * KV_HEADS
    rows = tl.arange(0, ROWS)
    ends = tl.load(split_starts + 1 + rows, mask=rows < num_rows, other=2147483647)
    group = tl.arange(0, GROUP_PADDED)
    dim = tl.arange(0, HEAD_DIM_PADDED)
    is_head = (group < GROUP)[:, None]
    is_dim = (dim < HEAD_DIM)[None, :]
    for pair in range(tl.program_id(0), num_pairs, tl.num_programs(0)):
        split = pair // KV_HEADS
        head = pair % KV_HEADS
        row = tl.sum((ends <= split).to(tl.int32), 0)
        first = (split - tl.load(split_starts + row)) * SPLIT
        end = tl.minimum(first + SPLIT, tl.load(context_lens + row))
        table = page_ids + tl.load(table_starts + row)
        heads = (row * KV_HEADS + head) * GROUP + group
        queries = tl.load(q + heads[:, None] * HEAD_DIM + dim[None, :], mask=is_head & is_dim, other=0.0)
        highest = tl.full([GROUP_PADDED], -float("inf"), tl.float32)
        weight = tl.zeros([GROUP_PADDED], tl.float32)
        total = tl.zeros([GROUP_PADDED, HEAD_DIM_PADDED], tl.float32)
        for start in range(first, end, BLOCK):
            token = start + tl.arange(0, BLOCK)
            is_token = token < end
            page = tl.load(table + token // PAGE_SIZE, mask=is_token, other=0).to(tl.int64)
            place = kv + page * page_stride + head * head_stride + (token % PAGE_SIZE) * HEAD_DIM
            if HEAD_DIM == HEAD_DIM_PADDED:
                is_there = is_token[:, None]
            else:
                is_there = is_token[:, None] & is_dim
            keys = tl.load(place[:, None] + dim[None, :], mask=is_there, other=0.0)
            scores = _product(queries, tl.trans(keys), WIDEN) * scale_log2
            scores = tl.where(is_token[None, :], scores, -float("inf"))
            new_highest = tl.maximum(highest, tl.max(scores, 1))
            weights = tl.exp2(scores - new_highest[:, None])
            correction = tl.exp2(highest - new_highest)
            weight = weight * correction + tl.sum(weights, 1)
            values = tl.load(place[:, None] + value_stride + dim[None, :], mask=is_there, other=0.0)
            total = total * correction[:, None] + _product(weights.to(values.dtype), values, WIDEN)
            highest = new_highest
        out = ((split * KV_HEADS + head) * GROUP + group).to(tl.int64)
        tl.store(sums + out[:, None] * HEAD_DIM + dim[None, :], total / weight[:, None], mask=is_head & is_dim)
        tl.store(log_weights + out, highest + tl.log2(weight), mask=group < GROUP)


@triton.jit
def _join_splits(
    sums,
    log_weights,
    split_starts,
    out,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(split_starts + row)
    end = tl.load(split_starts + row + 1)
    dim = tl.arange(0, HEAD_DIM_PADDED)
    is_dim = dim < HEAD_DIM
    highest = -float("inf")
    weight = 0.0
    total = tl.zeros([HEAD_DIM_PADDED], tl.float32)
    for start in range(first, end, BLOCK):
        split = start + tl.arange(0, BLOCK)
        place = split.to(tl.int64) * HEADS + head
        log_weight = tl.load(log_weights + place, mask=split < end, other=-float("inf"))
        is_there = (split < end)[:, None] & is_dim[None, :]
        values = tl.load(sums + place[:, None] * HEAD_DIM + dim[None, :], mask=is_there, other=0.0)
        new_highest = tl.maximum(highest, tl.max(log_weight, 0))
        weights = tl.exp2(log_weight - new_highest)
        correction = tl.exp2(highest - new_highest)
        weight = weight * correction + tl.sum(weights, 0)
        total = total * correction + tl.sum(weights[:, None] * values, 0)
        highest = new_highest
    mean = total / tl.where(end > first, weight, 1.0)  # padding has no weight: the result is 0
    tl.store(out + (row * HEADS + head) * HEAD_DIM + dim, mean.to(out.dtype.element_ty), mask=is_dim)


@triton.jit(do_not_specialize=["num_sequences", "table_stride"])
def _prefill_tiles(
    q,
    kv,
    query_start,
    context_lens,
    page_tables,
    out,
    scale_log2,
    num_sequences,
    table_stride,
    page_stride,
    head_stride,
    value_stride,
    SEQUENCES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDEN: tl.constexpr,
):
    # The last tiles of a prompt take longest, so they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    sequences = tl.arange(0, SEQUENCES)
    is_sequence = sequences < num_sequences
    begins = tl.load(query_start + sequences, mask=is_sequence, other=0) // QUERIES + sequences
    sequence = tl.sum((is_sequence & (begins <= tile)).to(tl.int32), 0) - 1
    first_token = tl.load(query_start + sequence)
    num_queries = tl.load(query_start + sequence + 1) - first_token
    first_query = (tile - first_token // QUERIES - sequence) * QUERIES
    if first_query < num_queries:
        before = tl.load(context_lens + sequence) - num_queries
        row = tl.arange(0, ROWS)
        query = first_query + row // GROUP
        is_row = (row < QUERIES * GROUP) & (query < num_queries)
        position = before + query
        dim = tl.arange(0, HEAD_DIM_PADDED)
        is_dim = (dim < HEAD_DIM)[None, :]
        heads = ((first_token + query).to(tl.int64) * KV_HEADS + head) * GROUP + row % GROUP
        place_of_row = heads[:, None] * HEAD_DIM + dim[None, :]
        queries = tl.load(q + place_of_row, mask=is_row[:, None] & is_dim, other=0.0)
        table = page_tables + sequence.to(tl.int64) * table_stride
        highest = tl.full([ROWS], -float("inf"), tl.float32)
        weight = tl.zeros([ROWS], tl.float32)
        total = tl.zeros([ROWS, HEAD_DIM_PADDED], tl.float32)
        end = before + tl.minimum(first_query + QUERIES, num_queries)
        for start in range(0, end, BLOCK):
            token = start + tl.arange(0, BLOCK)
            is_token = token < end
            page = tl.load(table + token // PAGE_SIZE, mask=is_token, other=0).to(tl.int64)
            place = kv + page * page_stride + head * head_stride + (token % PAGE_SIZE) * HEAD_DIM
            if HEAD_DIM == HEAD_DIM_PADDED:
                is_there = is_token[:, None]
            else:
                is_there = is_token[:, None] & is_dim
            keys = tl.load(place[:, None] + dim[None, :], mask=is_there, other=0.0)
            scores = _product(queries, tl.trans(keys), WIDEN) * scale_log2
            scores = tl.where(token[None, :] <= position[:, None], scores, -float("inf"))
            new_highest = tl.maximum(highest, tl.max(scores, 1))
            weights = tl.exp2(scores - new_highest[:, None])
            correction = tl.exp2(highest - new_highest)
            weight = weight * correction + tl.sum(weights, 1)
            values = tl.load(place[:, None] + value_stride + dim[None, :], mask=is_there, other=0.0)
            total = total * correction[:, None] + _product(weights.to(values.dtype), values, WIDEN)
            highest = new_highest
        result = (total / weight[:, None]).to(out.dtype.element_ty)
        tl.store(out + place_of_row, result, mask=is_row[:, None] & is_dim)
