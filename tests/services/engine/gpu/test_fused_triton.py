"""Norms, rotation and activation against the readable decoder's operations."""

import pytest
import torch
import torch.nn.functional as F

from services.engine.gpu.fused_triton import add_rms_norm, rms_norm, rope_and_write, silu_and_multiply
from services.engine.reference.attention import write_kv
from services.engine.reference.rope import apply_rope

EPS = 1e-5
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def norm(x, weight):
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


def random(*shape, dtype, device, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def assert_near(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE[ours.dtype], rtol=TOLERANCE[ours.dtype], equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [54, 4096])
def test_norms_equal_the_decoders(device, dtype, size):
    x, residual = random(3, size, dtype=dtype, device=device), random(3, size, dtype=dtype, device=device, seed=1)
    weight = random(size, dtype=dtype, device=device, seed=2)
    assert_near(rms_norm(x, weight, EPS), norm(x, weight))
    total = x + residual
    assert_near(add_rms_norm(x, residual, weight, EPS), norm(total, weight))
    assert torch.equal(residual, total)
    assert add_rms_norm(x[:0], residual[:0], weight, EPS).shape == (0, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activation_equals_the_decoders(device, dtype):
    gate_up = random(3, 2 * 1100, dtype=dtype, device=device)
    gate, up = gate_up.chunk(2, dim=-1)
    assert_near(silu_and_multiply(gate_up), F.silu(gate) * up)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize(("heads", "head_dim", "page_size"), [((4, 2), 64, 16), ((7, 1), 80, 32), ((3, 3), 20, 5)])
def test_rotation_and_write_equal_the_decoders(device, dtype, has_norms, heads, head_dim, page_size):
    num_heads, num_kv_heads = heads
    num_tokens, num_pages = 5, 6
    qkv = random(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype, device=device)
    rope = random(40, 2, head_dim // 2, dtype=torch.float32, device=device, seed=1)
    norms = tuple(random(head_dim, dtype=dtype, device=device, seed=seed) for seed in (2, 3)) if has_norms else None
    positions = torch.tensor([0, 7, 8, 39, 3], device=device)
    slots = torch.tensor([0, page_size + 1, 2 * page_size - 1, -1, num_pages * page_size - 1], device=device)
    pool = torch.full((num_pages, num_kv_heads, 2, 2, page_size, head_dim), float("nan"), dtype=dtype, device=device)
    expected_pool = pool.clone()
    queries = rope_and_write(
        qkv,
        pool[:, :, 1],
        num_heads=num_heads,
        positions=positions,
        slot_mapping=slots,
        rope=rope,
        norms=norms,
        eps=EPS,
    )
    q, k, v = qkv.view(num_tokens, -1, head_dim).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if norms is not None:
        q, k = norm(q, norms[0]), norm(k, norms[1])
    assert_near(queries, apply_rope(q, rope, positions))
    written = slots >= 0
    write_kv(apply_rope(k, rope, positions)[written], v[written], expected_pool, layer=1, slot_mapping=slots[written])
    assert_near(pool, expected_pool)
    assert torch.equal(pool.isnan(), expected_pool.isnan())
