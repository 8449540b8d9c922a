"""The memory of KV pages: their shape, and the pool that holds them. Knows no holder of a page.

Shape legend: N pages, H KV heads, L layers, S slots (tokens) of a page, D elements of a head.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from dataclasses import dataclass

import torch


def num_pages_for(num_tokens: int, page_size: int) -> int:
    """Returns how many pages of `page_size` tokens hold `num_tokens` tokens."""
    return -(-num_tokens // page_size)


@dataclass(frozen=True)
class PageLayout:
    """Shape of one page. The order of the axes in memory is a constant of this file: [H, L, 2, S, D].

    Heads come first so that a range of heads of one page is one range of bytes; index 0 of axis `2` is K, 1 is V.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Shape of a page: (H, L, 2, S, D)."""
        return (self.num_kv_heads, self.num_layers, 2, self.page_size, self.head_dim)

    @property
    def page_bytes(self) -> int:
        """Size of a page in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def num_pages_for(self, num_tokens: int) -> int:
        """Returns how many pages hold `num_tokens` tokens."""
        return num_pages_for(num_tokens, self.page_size)


class PagePool:
    """The memory of all pages of a worker: `data` [N, H, L, 2, S, D], contiguous.

    It starts as zeros: a slot that was never written must not hold a NaN, which would survive a masked product.
    Where the memory is made elsewhere, `data` is that, all zeros.
    """

    def __init__(
        self,
        layout: PageLayout,
        num_pages: int,
        *,
        device: torch.device | str = "cpu",
        data: torch.Tensor | None = None,
    ) -> None:
        if num_pages < 1:
            raise ValueError(f"a pool needs at least 1 page, not {num_pages}")
        self.layout, self.num_pages = layout, num_pages
        shape = (num_pages, *layout.shape)
        if data is None and torch.device(device).type == "cpu":
            data = host_zeros(shape, layout.dtype)
        self.data = torch.zeros(shape, dtype=layout.dtype, device=device) if data is None else data

    @property
    def bytes(self) -> torch.Tensor:
        """The pool's memory as uint8 [N, page_bytes]; writing to it writes to the pages."""
        return self.data.view(self.num_pages, -1).view(torch.uint8)

    copies = 1
    """Parts with the same bytes; a pool has one part."""

    @property
    def parts(self) -> tuple[torch.Tensor]:
        """The pages, each of them one piece, as one part [1, N, page_bytes] of uint8."""
        return (self.bytes[None],)


def host_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns zeros in the host's memory, which is taken when it is first written to. At least one element."""
    # Memory that was never touched reads as zeros and takes no room yet: a large pool starts at once and costs what is
    # used of it. torch.zeros would write it all.
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # As long as there are any, a prompt's pages are some that nobody has written to yet: in pieces of 4 KB the
        # kernel takes 6 times as long to give that memory.
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
