"""Memory of the KV pages: their layout, and the pool that contains them. Does not track page holders.

Shape legend: N pages, H KV heads, L layers, S slots (tokens) of a page, D elements of a head.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from dataclasses import dataclass

import torch


def num_pages_for(num_tokens: int, page_size: int) -> int:
    """Returns the number of pages of `page_size` tokens needed for `num_tokens` tokens."""
    return -(-num_tokens // page_size)


@dataclass(frozen=True)
class PageLayout:
    """Shape of one page. The memory order of its axes is fixed in this file: [H, L, 2, S, D].

    Heads are the outermost axis, so a range of heads of one page is contiguous. Index 0 of axis `2` is K, and 1 is V.
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
        """Returns the number of pages needed for `num_tokens` tokens."""
        return num_pages_for(num_tokens, self.page_size)


class PagePool:
    """Memory of all pages of a worker: `data` [N, H, L, 2, S, D], contiguous.

    It starts as zeros: a slot that was never written must not contain NaN, which would survive a masked product. To use
    memory allocated elsewhere, pass it as `data`, filled with zeros.
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
        """View of the pool's memory as uint8 [N, page_bytes]. Writes change the pages."""
        return self.data.view(self.num_pages, -1).view(torch.uint8)

    copies = 1
    """Number of parts with the same bytes. A pool has one part."""

    @property
    def parts(self) -> tuple[torch.Tensor]:
        """The pages as a single part, uint8 [1, N, page_bytes]."""
        return (self.bytes[None],)


def host_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns at least one zero in host memory that is not allocated until first written."""
    # Untouched memory reads as zeros and is not yet allocated, so a large pool starts immediately and only costs the
    # memory in use. torch.zeros would write all of it.
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Until every page was used once, prompts write to untouched memory. With 4 KB pages, the kernel takes 6 times
        # as long to allocate it.
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
