"""Accesses the pages of a pool as bytes: reads them for a frame, and writes the pages of a frame into reserved pages.

This is the only handoff code that touches page memory. The page sizes of the two sides may differ; the rest of the
layout is equal. Copies release the interpreter's lock and run on the calling thread. The caller decides whether a copy
is allowed. Pages on a GPU pass through host memory, unless their frame arrives on the GPU (`device_pages`). A page may
consist of several pieces, and each piece may be spread over the memory of several processes (`PageMemory`). It travels
as one page, with the pieces in order.

Shape legend: N pages, P pieces of a page, R parts of a piece, H KV heads, L layers, S slots (tokens) of a page, B bytes
of one head's K or V of one token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from kv_transfer.device_pages import spread
from kv_transfer.protocol.messages import WireLayout
from kv_transfer.transports.base import Bytes
from services.engine.cache.pool import PageLayout
from services.runtime.errors import InvariantViolated

_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class PageMemory(Protocol):
    """The memory of a worker's pages, independent of the engine; for example `services.engine.cache.pool.PagePool`.

    A page is its first piece from all parts, in their order, then its second piece, and so on. If pages have several
    pieces, both workers must use the same page size: only in single-piece pages are the slots at the offsets of
    `layout`.
    """

    @property
    def layout(self) -> PageLayout:
        """Size of a page, and its dimensions."""
        ...

    @property
    def parts(self) -> Sequence[torch.Tensor]:
        """The pages as uint8 tensors [P, N, bytes], one for each process. Writing to a tensor writes to the pages."""
        ...

    @property
    def copies(self) -> int:
        """Number of consecutive parts with identical bytes, of which only one is transferred. Usually 1."""
        ...


class PageGenerations(Protocol):
    """The current generation of each page; a page allocator implements this.

    Threads that do not own the pages may call it. That is safe for two reasons: reading an element of a list is atomic
    under the interpreter's lock, and code that reassigns a page changes its generation before it first writes to the
    page.
    """

    def generations(self, page_ids: Sequence[int]) -> tuple[int, ...]:
        """Returns the current generation of each page. Raises InvariantViolated for a page that does not exist."""
        ...


@dataclass(frozen=True, slots=True)
class Destination:
    """The reserved pages of a transfer at the receiver, and the range of tokens that may be written to them.

    Tokens before `num_cached_tokens` are a shared prefix that must not change.
    """

    page_ids: tuple[int, ...]
    num_cached_tokens: int
    num_tokens: int


class PageReader:
    """Returns pages of a pool as flat arrays in host memory: views of host memory, or a copy of GPU memory."""

    def __init__(self, pool: PageMemory) -> None:
        # Arrays in host memory, or the tensor on another device.
        self._parts: list[Any] = _memory_of(pool)[:: pool.copies]
        self._pieces: list[Any] = [part[piece] for piece in range(len(self._parts[0])) for part in self._parts]

    def pieces(self, page_ids: Sequence[int]) -> list[Bytes]:
        """Returns the memory of these pages in order. Adjacent pages are joined."""
        first_part = self._parts[0]
        if isinstance(first_part, torch.Tensor):
            rows = torch.tensor(page_ids, device=first_part.device)
            copy: Bytes = first_part.index_select(1, rows).transpose(0, 1).cpu().numpy().reshape(-1)
            return [copy]
        if len(self._pieces) > 1:
            return [piece[page_id] for page_id in page_ids for piece in self._pieces]
        (pages,) = self._pieces
        return [pages[first : first + count].reshape(-1) for first, count in _runs(page_ids)]


class PageWriter:
    """Copies frames of a sender's pages into pages of a pool."""

    def __init__(self, pool: PageMemory, sender: WireLayout) -> None:
        # Arrays in host memory or tensors on a GPU: both support the same slicing and assignment.
        self._parts: list[Any] = _memory_of(pool)
        self._copies = pool.copies
        self._device = pool.parts[0].device
        self._page_bytes = pool.layout.page_bytes
        self._own_size = pool.layout.page_size
        self._sender_size = sender.page_size
        heads, layers = pool.layout.num_kv_heads, pool.layout.num_layers
        vector_bytes = pool.layout.head_dim * pool.layout.dtype.itemsize
        self._own_shape = (heads, layers, 2, self._own_size, vector_bytes)
        self._sender_shape = (heads, layers, 2, self._sender_size, vector_bytes)

    def check(self, destination: Destination) -> None:
        """Raises InvariantViolated unless the pages are distinct pool pages and the cached prefix is page-aligned."""
        page_ids = destination.page_ids
        is_in_pool = all(0 <= page_id < self._parts[0].shape[1] for page_id in page_ids)
        if not is_in_pool or len(set(page_ids)) != len(page_ids):
            raise InvariantViolated("a reservation names a page twice or a page outside the pool")
        if destination.num_cached_tokens % self._own_size:
            raise InvariantViolated("a cached prefix must end on a page border")

    def places(self, first_page: int, num_pages: int, destination: Destination) -> slice:
        """Returns the slice of the destination's page table that these pages of the sender are written to."""
        start = max(first_page * self._sender_size, destination.num_cached_tokens)
        end = min((first_page + num_pages) * self._sender_size, destination.num_tokens)
        return slice(start // self._own_size, -(-end // self._own_size))

    def write(self, data: Bytes | torch.Tensor, first_page: int, destination: Destination) -> None:
        """Copies whole pages of the sender, starting at page `first_page` of its page table.

        The data is in host memory or on the pool's device. When this method returns, the copy is complete, even on a
        GPU.
        """
        is_on_gpu = isinstance(self._parts[0], torch.Tensor)
        source = torch.as_tensor(data).to(self._device) if is_on_gpu else np.asarray(data)
        if self._own_size == self._sender_size:
            self._write_pages(source, first_page, destination)
        else:
            self._write_tokens(source, first_page, destination)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _write_pages(self, data: Any, first_page: int, destination: Destination) -> None:
        page_bytes = self._page_bytes
        end_page = first_page + len(data) // page_bytes
        start_page = max(first_page, destination.num_cached_tokens // self._own_size)
        offset = (start_page - first_page) * page_bytes
        num_pieces, num_parts = len(self._parts[0]), len(self._parts) // self._copies
        if isinstance(data, torch.Tensor) and num_pieces == 1:
            if start_page < end_page:
                spread(data[offset:], destination.page_ids[start_page:end_page], self._parts[0][0])
            return
        for first, count in _runs(destination.page_ids[start_page:end_page]):
            num_bytes = count * page_bytes
            run = data[offset : offset + num_bytes].reshape(count, num_pieces, num_parts, -1)
            for number, part in enumerate(self._parts):
                part[:, first : first + count] = run[:, :, number // self._copies].swapaxes(0, 1)
            offset += num_bytes

    def _write_tokens(self, data: Any, first_page: int, destination: Destination) -> None:
        assert len(self._parts) * len(self._parts[0]) == 1, (
            "workers whose pages have several pieces fit only with equal page sizes"
        )
        own = self._parts[0][0].reshape(-1, *self._own_shape)
        source = data.reshape(-1, *self._sender_shape)
        for index in range(source.shape[0]):
            page_start = (first_page + index) * self._sender_size
            token = max(page_start, destination.num_cached_tokens)
            end = min(page_start + self._sender_size, destination.num_tokens)
            while token < end:
                own_page, own_slot = divmod(token, self._own_size)
                count = min(end - token, self._own_size - own_slot)
                target = own[destination.page_ids[own_page]]
                from_slot = token - page_start
                target[:, :, :, own_slot : own_slot + count] = source[index, :, :, :, from_slot : from_slot + count]
                token += count


def wire_layout(
    layout: PageLayout,
    *,
    fingerprint: str,
    exact: bool,
    arithmetic: str = "",
    tensor_parallel: int = 0,
    pipeline_parallel: int = 0,
) -> WireLayout:
    """Returns a pool's layout in the form that is sent to peers. Raises KeyError for an unsupported dtype."""
    return WireLayout(
        fingerprint=fingerprint,
        page_size=layout.page_size,
        dtype=_DTYPE_NAMES[layout.dtype],
        num_kv_heads=layout.num_kv_heads,
        num_layers=layout.num_layers,
        head_dim=layout.head_dim,
        exact=exact,
        arithmetic=arithmetic,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
    )


def channel_device(pool: PageMemory) -> torch.device:
    """Returns the device that channels read pages from. Pages of several pieces pass through host memory."""
    return pool.parts[0].device if is_one_piece(pool) else torch.device("cpu")


def is_one_piece(pool: PageMemory) -> bool:
    """Returns whether each page is one contiguous range of memory."""
    return len(pool.parts) * len(pool.parts[0]) == 1


def _memory_of(pool: PageMemory) -> list[Bytes] | list[torch.Tensor]:
    """Returns the parts [P, N, bytes of a piece]: arrays over host memory, or the tensor of another device."""
    if pool.parts[0].device.type != "cpu":
        assert len(pool.parts) == 1, "several processes have their parts in the host's memory"
        return list(pool.parts)
    return [part.numpy() for part in pool.parts]


def _runs(page_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields (first page ID, count) for each run of consecutive ascending page IDs."""
    start = 0
    for index in range(1, len(page_ids) + 1):
        if index == len(page_ids) or page_ids[index] != page_ids[index - 1] + 1:
            yield page_ids[start], index - start
            start = index
