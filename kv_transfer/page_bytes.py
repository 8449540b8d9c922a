"""Pages of a pool as bytes: reading them for a frame, and writing a frame's pages into reserved ones.

The only code of the handoff that touches page memory. Page size may differ on the two sides; all else is equal.
Copies run without the interpreter's lock, on whatever thread calls; nothing here decides whether a copy is allowed.
Pages on a GPU take the way over host memory, but for those that arrive in it (`device_pages`). A page may lie in
several pieces, and each of them in the memory of several processes (`PageMemory`); it travels as one, in order.

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
    """The memory of a worker's pages, whatever computes in it; `services.engine.cache.pool.PagePool` is one.

    A page is its first piece of all parts, in their order, then its second, and so on. Between two workers whose pages
    have several pieces, the page sizes are equal: only slots of a page of one piece are where `layout` says.
    """

    @property
    def layout(self) -> PageLayout:
        """Size and number of the parts of a page."""
        ...

    @property
    def parts(self) -> Sequence[torch.Tensor]:
        """The pages as tensors [P, N, bytes] of uint8, one for each process; writing to them writes to the pages."""
        ...

    @property
    def copies(self) -> int:
        """How many neighbouring parts have the same bytes, of which one travels; mostly 1."""
        ...


class PageGenerations(Protocol):
    """Which use of each page it is now; a page allocator knows.

    It is asked by threads that do not own the pages. That is safe: an element of a list is read in one step under the
    interpreter's lock, and code that gives a page to another use says so there before its first write to the page.
    """

    def generations(self, page_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the number of this use of each page. Raises InvariantViolated for a page that does not exist."""
        ...


@dataclass(frozen=True, slots=True)
class Destination:
    """The reserved pages of a transfer at the receiver, and which tokens of them may be written.

    Tokens before `num_cached_tokens` are a shared prefix that must stay as it is.
    """

    page_ids: tuple[int, ...]
    num_cached_tokens: int
    num_tokens: int


class PageReader:
    """Serves pages of a pool as flat pieces of host memory: in place, or from a copy if they are on a GPU."""

    def __init__(self, pool: PageMemory) -> None:
        # Arrays of host memory, or the tensor of another device.
        self._parts: list[Any] = _memory_of(pool)[:: pool.copies]
        self._pieces: list[Any] = [part[piece] for piece in range(len(self._parts[0])) for part in self._parts]

    def pieces(self, page_ids: Sequence[int]) -> list[Bytes]:
        """Return the memory of these pages in order, neighbours joined."""
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
        # Arrays of host memory or tensors on a GPU: slicing and assigning them is written in the same way.
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
        """Raise InvariantViolated unless these are different pages of the pool that hold all the tokens."""
        page_ids = destination.page_ids
        is_in_pool = all(0 <= page_id < self._parts[0].shape[1] for page_id in page_ids)
        if not is_in_pool or len(set(page_ids)) != len(page_ids):
            raise InvariantViolated("a reservation names a page twice or a page outside the pool")
        if destination.num_cached_tokens % self._own_size:
            raise InvariantViolated("a cached prefix must end on a page border")

    def places(self, first_page: int, num_pages: int, destination: Destination) -> slice:
        """Return which part of the destination's page table these pages of the sender are written to."""
        start = max(first_page * self._sender_size, destination.num_cached_tokens)
        end = min((first_page + num_pages) * self._sender_size, destination.num_tokens)
        return slice(start // self._own_size, -(-end // self._own_size))

    def write(self, data: Bytes | torch.Tensor, first_page: int, destination: Destination) -> None:
        """Copy whole pages of the sender, the first of which is `first_page` of its page table.

        They lie in host memory, or in that of the pool's device. When it returns, the copy has ended, on a GPU too.
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
    """Return the words in which a pool's layout travels. Raises KeyError for a dtype that does not."""
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
    """Return where channels take pages from: pages of several pieces pass through the host's memory."""
    return pool.parts[0].device if is_one_piece(pool) else torch.device("cpu")


def is_one_piece(pool: PageMemory) -> bool:
    """Return whether each page is one range of memory."""
    return len(pool.parts) * len(pool.parts[0]) == 1


def _memory_of(pool: PageMemory) -> list[Bytes] | list[torch.Tensor]:
    """Return the parts [P, N, bytes of a piece]: arrays over host memory, or the tensor of another device."""
    if pool.parts[0].device.type != "cpu":
        assert len(pool.parts) == 1, "several processes have their parts in the host's memory"
        return list(pool.parts)
    return [part.numpy() for part in pool.parts]


def _runs(page_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first page id, count) of neighbours in ascending order."""
    start = 0
    for index in range(1, len(page_ids) + 1):
        if index == len(page_ids) or page_ids[index] != page_ids[index - 1] + 1:
            yield page_ids[start], index - start
            start = index
