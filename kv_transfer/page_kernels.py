"""Triton kernels between pages and ring slots: gather pages with a digest, digest a slot, scatter a slot into pages.

They move 64-bit words. `device_pages` calls them, defines the digest, and has the same functions in plain torch.

Shape legend: N pages of the pool, P pages of a frame, W words of a page, C blocks of a page.
"""

import torch
import triton
import triton.language as tl

BLOCK_WORDS = 2048
_NUM_WARPS = 8


@triton.jit
def _mix(words, index):
    """Returns the two values that each word adds to the digest, given its index in the frame.

    See device_pages.word_sums for the reference implementation.
    """
    x = words.to(tl.uint64, bitcast=True) ^ ((index + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    y = (x ^ 0xD6E8FEB86659FD93) * 0xFF51AFD7ED558CCD
    y = y ^ (y >> 33)
    return x.to(tl.int64, bitcast=True), y.to(tl.int64, bitcast=True)


@triton.jit
def _gather_kernel(pages, page_ids, target, sums, num_words, BLOCK: tl.constexpr):
    """Copies and mixes one block of words of one page. Grid (P, C). `sums` is [P, C, 2]."""
    page, block = tl.program_id(0), tl.program_id(1)
    page_id = tl.load(page_ids + page)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    is_inside = offsets < num_words
    words = tl.load(pages + page_id * num_words + offsets, mask=is_inside, other=0)
    index = page.to(tl.int64) * num_words + offsets
    tl.store(target + index, words, mask=is_inside)
    first, second = _mix(words, index)
    place = sums + (page * tl.num_programs(1) + block) * 2
    tl.store(place, tl.sum(tl.where(is_inside, first, 0)))
    tl.store(place + 1, tl.sum(tl.where(is_inside, second, 0)))


@triton.jit
def _digest_kernel(source, sums, num_words, BLOCK: tl.constexpr):
    """Mixes one block of words. Grid (blocks of the frame,). `sums` is [blocks, 2]."""
    block = tl.program_id(0)
    index = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = index < num_words
    words = tl.load(source + index, mask=is_inside, other=0)
    first, second = _mix(words, index)
    tl.store(sums + block * 2, tl.sum(tl.where(is_inside, first, 0)))
    tl.store(sums + block * 2 + 1, tl.sum(tl.where(is_inside, second, 0)))


@triton.jit
def _spread_kernel(source, page_ids, pages, num_words, BLOCK: tl.constexpr):
    """Copies one block of words of one page to its place in the pool. Grid (P, C)."""
    page, block = tl.program_id(0), tl.program_id(1)
    page_id = tl.load(page_ids + page)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    is_inside = offsets < num_words
    words = tl.load(source + page.to(tl.int64) * num_words + offsets, mask=is_inside)
    tl.store(pages + page_id * num_words + offsets, words, mask=is_inside)


def gather(pages: torch.Tensor, page_ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Copies the rows of int64 [N, W] listed in int64 [P] into int64 [P * W].

    Returns the sums of the digest, int64 [2].
    """
    num_pages, num_words = page_ids.numel(), pages.shape[1]
    num_blocks = triton.cdiv(num_words, BLOCK_WORDS)
    sums = torch.empty(num_pages, num_blocks, 2, dtype=torch.int64, device=pages.device)
    _gather_kernel[num_pages, num_blocks](
        pages, page_ids, target, sums, num_words, BLOCK=BLOCK_WORDS, num_warps=_NUM_WARPS
    )
    return sums.view(-1, 2).sum(0)


def digest(words: torch.Tensor) -> torch.Tensor:
    """Returns the sums of the digest over int64 [words], as int64 [2]."""
    num_blocks = triton.cdiv(words.numel(), BLOCK_WORDS)
    sums = torch.empty(num_blocks, 2, dtype=torch.int64, device=words.device)
    _digest_kernel[(num_blocks,)](words, sums, words.numel(), BLOCK=BLOCK_WORDS, num_warps=_NUM_WARPS)
    return sums.sum(0)


def spread(source: torch.Tensor, page_ids: torch.Tensor, pages: torch.Tensor) -> None:
    """Copies int64 [P * W] into the rows of int64 [N, W] listed in int64 [P]."""
    num_words = pages.shape[1]
    grid = (page_ids.numel(), triton.cdiv(num_words, BLOCK_WORDS))
    _spread_kernel[grid](source, page_ids, pages, num_words, BLOCK=BLOCK_WORDS, num_warps=_NUM_WARPS)
