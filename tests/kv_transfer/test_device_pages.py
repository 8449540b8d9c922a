"""Gather, digest and spread on a device: plain, in Triton's interpreter, compiled for sm_90, and on a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.device_pages import DevicePages, can_hold, word_sums
from services.engine.cache.pool import PageLayout, PagePool
from tests.kv_transfer.conftest import make_pool
from tests.waiting import HANG_LIMIT_S

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def test_a_frame_holds_the_pages_in_order_and_both_sides_compute_its_digest() -> None:
    pool = make_pool(seed=1)
    pages = DevicePages(pool)
    target = torch.zeros(3 * pages.page_bytes, dtype=torch.uint8)
    digest = pages.gather([5, 2, 9], target)
    assert torch.equal(target.view(3, -1), pool.bytes[[5, 2, 9]])
    assert pages.digest(target) == digest
    assert len(digest) == 16


def reference(words: list[int]) -> bytes:
    """The digest, as its description has it, in Python's own numbers."""
    mask, first, second = 2**64 - 1, 0, 0
    for index, word in enumerate(words):
        x = (word & mask) ^ ((index + 1) * 0x9E3779B97F4A7C15 & mask)
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        x ^= x >> 31
        y = (x ^ 0xD6E8FEB86659FD93) * 0xFF51AFD7ED558CCD & mask
        first, second = first + x & mask, second + (y ^ y >> 33) & mask
    first = first + len(words) * 0x9E3779B97F4A7C15 & mask
    return first.to_bytes(8, "little") + second.to_bytes(8, "little")


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40))
def test_the_digest_is_the_one_that_is_described(words: list[int]) -> None:
    data = torch.tensor(words, dtype=torch.int64).view(torch.uint8)
    assert DevicePages(make_pool()).digest(data) == reference(words)


@given(st.data())
def test_no_small_accident_leaves_the_digest_as_it_was(data: st.DataObject) -> None:
    pages = DevicePages(make_pool())
    words = torch.randint(-(2**63), 2**63 - 1, (64,), generator=torch.Generator().manual_seed(7))
    if data.draw(st.booleans()):
        words = torch.zeros(64, dtype=torch.int64)
        words[3] = 1
    before = pages.digest(words.view(torch.uint8))
    hurt = words.clone()
    match data.draw(st.sampled_from(["bit", "two high bits", "swap", "cut", "zeros behind", "shift"])):
        case "bit":
            hurt[data.draw(st.integers(0, 63))] ^= 1 << data.draw(st.integers(0, 62))
        case "two high bits":  # which cancel in a sum of plain products
            hurt[10] ^= -(2**63)
            hurt[11] ^= -(2**63)
        case "swap":
            hurt[3], hurt[data.draw(st.integers(4, 63))] = words[40], words[3]
        case "cut":
            hurt = hurt[:-1]
        case "zeros behind":
            hurt = torch.cat((hurt, torch.zeros(1, dtype=torch.int64)))
        case "shift":
            hurt = hurt.roll(1)
    assert torch.equal(hurt, words) or pages.digest(hurt.contiguous().view(torch.uint8)) != before


def test_what_is_no_whole_number_of_words_is_no_frame() -> None:
    odd = PagePool(PageLayout(num_layers=1, num_kv_heads=1, head_dim=1, page_size=1, dtype=torch.bfloat16), 2)
    assert not can_hold(odd.layout.page_bytes)
    with pytest.raises(ValueError, match="words"):
        DevicePages(odd)
    pages = DevicePages(make_pool())
    assert pages.digest(torch.zeros(12, dtype=torch.uint8)) == bytes(16)
    assert pages.digest(torch.zeros(0, dtype=torch.uint8)) == bytes(16)


CHECK = """
import torch
from kv_transfer import device_pages, page_kernels
generator = torch.Generator().manual_seed(0)
for num_pool, num_words, num_pages in ((5, 1, 3), (7, 2048, 4), (9, 5000, 9), (3, 64, 1)):
    pages = torch.randint(-(2**63), 2**63 - 1, (num_pool, num_words), generator=generator).to(DEVICE)
    page_ids = torch.randperm(num_pool, generator=generator)[:num_pages].to(DEVICE)
    frame = torch.zeros(num_pages * num_words, dtype=torch.int64, device=DEVICE)
    sums = page_kernels.gather(pages, page_ids, frame)
    assert torch.equal(frame.view(num_pages, -1), pages[page_ids])
    assert torch.equal(sums, device_pages.word_sums(frame))
    assert torch.equal(page_kernels.digest(frame), sums)
    target = torch.zeros_like(pages)
    page_kernels.spread(frame, page_ids, target)
    assert torch.equal(target[page_ids], pages[page_ids])
    assert int((target != 0).any(1).sum()) == num_pages
print("as it should be")
"""

COMPILE = """
import subprocess, tempfile
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kv_transfer import page_kernels as kernels
arguments = {
    kernels._gather_kernel: {"pages": "*i64", "page_ids": "*i64", "target": "*i64", "sums": "*i64", "num_words": "i32"},
    kernels._digest_kernel: {"source": "*i64", "sums": "*i64", "num_words": "i32"},
    kernels._spread_kernel: {"source": "*i64", "page_ids": "*i64", "pages": "*i64", "num_words": "i32"},
}
for kernel, types in arguments.items():
    source = ASTSource(kernel, {**types, "BLOCK": "constexpr"}, {"BLOCK": kernels.BLOCK_WORDS})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": kernels._NUM_WARPS})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "STACK:0 " in usage and "LOCAL:0 " in usage, usage
print("as it should be")
"""


def run_python(program: str, **environment: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_LIMIT_S, env={**os.environ, **environment}, check=False
    )
    assert done.stdout.strip() == "as it should be", done.stderr


@needs_triton
def test_the_kernels_compute_what_plain_torch_does() -> None:
    run_python(f"DEVICE = 'cpu'\n{CHECK}", TRITON_INTERPRET="1")


@needs_triton
def test_the_kernels_compile_for_an_h100_without_spills() -> None:
    run_python(COMPILE, TRITON_INTERPRET="0")


@pytest.mark.gpu
def test_the_kernels_compute_the_same_on_a_gpu() -> None:
    run_python(f"DEVICE = 'cuda'\n{CHECK}")


@pytest.mark.gpu
def test_pages_of_a_gpu_are_gathered_digested_and_the_same_as_on_a_cpu() -> None:
    layout = PageLayout(num_layers=4, num_kv_heads=8, head_dim=128, page_size=16, dtype=torch.bfloat16)
    pool = PagePool(layout, 32, device="cuda")
    pool.data.copy_(torch.randn(pool.data.shape, generator=torch.Generator().manual_seed(1)))
    pages = DevicePages(pool)
    target = torch.empty(5 * layout.page_bytes, dtype=torch.uint8, device="cuda")
    digest = pages.gather([9, 3, 31, 0, 4], target)
    assert torch.equal(target.view(5, -1).cpu(), pool.bytes.cpu()[[9, 3, 31, 0, 4]])
    words = target.cpu().view(torch.int64)
    assert digest == pages.digest(target) == DevicePages(make_pool()).digest(words.view(torch.uint8))
    assert torch.equal(word_sums(words), word_sums(target.view(torch.int64)).cpu())
