"""Fused kernels for the operations between a layer's matrix products: norms, rotation with cache write, activation.

Each kernel rounds at the same points as `services.engine.reference.decoder`, so the results are equal up to the order
of sums. The result of a row never depends on other rows, because only the model's sizes determine the order of sums.

Legend: T packed tokens, N pages, H KV heads, Hq query heads, S slots of a page, D head_dim, K hidden size, P positions.
"""

import torch
import triton
import triton.language as tl

_HEADS_PER_PROGRAM = 8
_ACTIVATION_BLOCK = 1024


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns the RMSNorm of x [T, K] over its last axis, times weight [K], in the dtype of x."""
    out = torch.empty_like(x)
    _launch_norm(x, x, weight, out, eps, has_residual=False)
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds x [T, K] to `residual` [T, K] in place, and returns the norm of the sum times weight [K]."""
    out = torch.empty_like(x)
    _launch_norm(x, residual, weight, out, eps, has_residual=True)
    return out


def rope_and_write(
    qkv: torch.Tensor,
    layer_data: torch.Tensor,
    *,
    num_heads: int,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    rope: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
) -> torch.Tensor:
    """Rotates queries and keys of qkv [T, (Hq + 2H) * D], and writes keys and values to the pages of one layer.

    `layer_data` is [N, H, 2, S, D]. `positions` is [T]. `slot_mapping` [T] is page_id * S + slot, or negative for
    padding, which writes nothing. `rope` is [P, 2, D/2]. `norms` contains the query norm and key norm weights [D], if
    the model has them. Returns the queries, [T, Hq, D].
    """
    num_tokens = qkv.shape[0]
    num_kv_heads, page_size, head_dim = layer_data.shape[1], layer_data.shape[3], layer_data.shape[4]
    queries = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    all_heads = num_heads + 2 * num_kv_heads
    query_norm, key_norm = (rope, rope) if norms is None else norms
    _rope_and_write[(num_tokens, triton.cdiv(all_heads, _HEADS_PER_PROGRAM))](
        qkv,
        queries,
        layer_data,
        positions,
        slot_mapping,
        rope,
        query_norm,
        key_norm,
        eps,
        layer_data.stride(0),
        layer_data.stride(1),
        layer_data.stride(2),
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        HALF_PADDED=triton.next_power_of_2(head_dim // 2),
        PAGE_SIZE=page_size,
        HAS_NORMS=norms is not None,
        BLOCK=_HEADS_PER_PROGRAM,
        num_warps=2,
    )
    return queries


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns `silu(gate) * up`, [T, n], for `gate_up` [T, 2 * n] with the gate first."""
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    grid = (num_tokens, triton.cdiv(width, _ACTIVATION_BLOCK))
    _silu_and_multiply[grid](gate_up, out, width, BLOCK=_ACTIVATION_BLOCK, num_warps=4)
    return out


def norm_warps(hidden_size: int) -> int:
    """Returns the number of warps of a norm's program, which affects the bits of its sum."""
    return int(max(1, min(16, triton.next_power_of_2(hidden_size) // 512)))


def _launch_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    *,
    has_residual: bool,
) -> None:
    num_tokens, hidden_size = x.shape
    if num_tokens:
        _norm[(num_tokens,)](
            x,
            residual,
            weight,
            out,
            eps,
            hidden_size,
            HAS_RESIDUAL=has_residual,
            BLOCK=triton.next_power_of_2(hidden_size),
            num_warps=norm_warps(hidden_size),
        )


@triton.jit
def _norm(x, residual, weight, out, eps, hidden_size, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * hidden_size
    column = tl.arange(0, BLOCK)
    is_column = column < hidden_size
    row = tl.load(x + start + column, mask=is_column, other=0.0)
    if HAS_RESIDUAL:
        added = tl.load(residual + start + column, mask=is_column, other=0.0).to(tl.float32) + row.to(tl.float32)
        row = added.to(x.dtype.element_ty)
        tl.store(residual + start + column, row, mask=is_column)
    wide = row.to(tl.float32)
    mean = tl.sum(wide * wide, 0) / hidden_size
    scaled = (wide * tl.rsqrt(mean + eps)).to(x.dtype.element_ty)
    factor = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + start + column, (factor * scaled.to(tl.float32)).to(x.dtype.element_ty), mask=is_column)


@triton.jit
def _rope_and_write(
    qkv,
    queries,
    kv,
    positions,
    slot_mapping,
    rope,
    query_norm,
    key_norm,
    eps,
    page_stride,
    head_stride,
    value_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.arange(0, HALF_PADDED)
    is_pair = pair < HALF
    is_there = (head < HEADS + 2 * KV_HEADS)[:, None] & is_pair[None, :]
    source = qkv + (token * (HEADS + 2 * KV_HEADS) + head)[:, None] * (2 * HALF) + pair[None, :]
    low = tl.load(source, mask=is_there, other=0.0)
    high = tl.load(source + HALF, mask=is_there, other=0.0)
    dtype = qkv.dtype.element_ty
    is_query = (head < HEADS)[:, None]
    is_value = (head >= HEADS + KV_HEADS)[:, None]
    if HAS_NORMS:
        wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
        mean = tl.sum(wide_low * wide_low + wide_high * wide_high, 1) / (2 * HALF)
        factor = tl.rsqrt(mean + eps)[:, None]
        query_low = tl.load(query_norm + pair, mask=is_pair, other=0.0).to(tl.float32)[None, :]
        query_high = tl.load(query_norm + HALF + pair, mask=is_pair, other=0.0).to(tl.float32)[None, :]
        key_low = tl.load(key_norm + pair, mask=is_pair, other=0.0).to(tl.float32)[None, :]
        key_high = tl.load(key_norm + HALF + pair, mask=is_pair, other=0.0).to(tl.float32)[None, :]
        normed_low = (wide_low * factor).to(dtype).to(tl.float32) * tl.where(is_query, query_low, key_low)
        normed_high = (wide_high * factor).to(dtype).to(tl.float32) * tl.where(is_query, query_high, key_high)
        low = tl.where(is_value, low, normed_low.to(dtype))
        high = tl.where(is_value, high, normed_high.to(dtype))
    angles = rope + tl.load(positions + token).to(tl.int64) * (2 * HALF) + pair
    cosine = tl.load(angles, mask=is_pair, other=0.0)[None, :]
    sine = tl.load(angles + HALF, mask=is_pair, other=0.0)[None, :]
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    low = tl.where(is_value, low, (wide_low * cosine - wide_high * sine).to(dtype))
    high = tl.where(is_value, high, (wide_high * cosine + wide_low * sine).to(dtype))
    place = queries + (token * HEADS + head)[:, None] * (2 * HALF) + pair[None, :]
    tl.store(place, low, mask=is_there & is_query)
    tl.store(place + HALF, high, mask=is_there & is_query)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    of_value = (head >= HEADS + KV_HEADS).to(tl.int64)
    kv_head = head - HEADS - of_value * KV_HEADS
    row = (slot // PAGE_SIZE) * page_stride + (slot % PAGE_SIZE) * (2 * HALF)
    place = kv + row + (kv_head * head_stride + of_value * value_stride)[:, None] + pair[None, :]
    is_written = is_there & (slot >= 0) & (head >= HEADS)[:, None]
    tl.store(place, low, mask=is_written)
    tl.store(place + HALF, high, mask=is_written)


@triton.jit
def _silu_and_multiply(gate_up, out, width, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < width
    source = gate_up + token * 2 * width + column
    dtype = gate_up.dtype.element_ty
    gate = tl.load(source, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=is_column, other=0.0).to(tl.float32)
    activated = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    tl.store(out + token * width + column, (activated * up).to(dtype), mask=is_column)
