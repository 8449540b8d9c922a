"""KV pages in host memory: pages of preempted sequences, and pages evicted from the pool.

Does not depend on sequences or keys. The engine thread owns it, so there are no locks. Each user has a separate space
with a separate limit: decode_worker.engine_loop for preempted sequences, and services.engine.cache.host_tier for named
pages.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence

import torch

from services.engine.cache.pool import PagePool, host_zeros
from services.runtime.errors import ConfigError, InvariantViolated

logger = logging.getLogger(__name__)


class SwapSpace:
    """A fixed number of slots, each of which stores an exact copy of one page.

    The caller acquires and frees slots, and the space stores no keys. A slot number is never reused, so a stale number
    raises an error instead of returning another page.

    For a pool on a CPU, the memory is allocated when first written. For a pool on a GPU, it is allocated immediately
    and pinned if possible. `store` then waits until the pages are copied to a buffer on the GPU, but not for their
    transfer to the host.
    """

    def __init__(self, pool: PagePool, memory_bytes: int) -> None:
        """Creates no slots if `memory_bytes` is less than a page. Raises ConfigError if the allocation fails."""
        self._pool = pool
        self._page_bytes = pool.layout.page_bytes
        self._num_slots = max(0, memory_bytes) // self._page_bytes
        self._is_on_gpu = pool.data.is_cuda
        self._memory = self._host_memory() if self._num_slots else None
        self._copies = _GpuCopies(pool.data.device) if self._is_on_gpu and self._num_slots else None
        self._free_rows = list(range(self._num_slots - 1, -1, -1))
        self._rows: dict[int, int] = {}
        """Memory row of each slot in use."""
        self._num_given = 0

    @property
    def num_slots(self) -> int:
        """Maximum number of pages."""
        return self._num_slots

    @property
    def num_free_slots(self) -> int:
        """Slots that are not in use."""
        return len(self._free_rows)

    @property
    def num_pool_pages(self) -> int:
        """Pages of the pool."""
        return self._pool.num_pages

    @property
    def page_bytes(self) -> int:
        """Size of a page in bytes."""
        return self._page_bytes

    def store(self, page_ids: Sequence[int]) -> list[int]:
        """Copies pages of the pool, at least one, into slots. Returns the slots in the same order.

        The pages may be overwritten once this returns. Raises InvariantViolated if there are too few free slots, which
        the caller must check first.
        """
        if self._memory is None or len(page_ids) > len(self._free_rows):
            raise InvariantViolated(f"{len(page_ids)} pages do not fit into {len(self._free_rows)} free slots")
        rows = [self._free_rows.pop() for _ in page_ids]
        if self._copies is None:
            _copy(self._pool.bytes, page_ids, self._memory, rows)
        else:
            self._copies.out(self._pool.bytes, page_ids, self._memory, rows)
        slots = list(range(self._num_given, self._num_given + len(rows)))
        self._num_given += len(rows)
        self._rows.update(zip(slots, rows, strict=True))
        return slots

    def load(self, slots: Sequence[int], page_ids: Sequence[int]) -> None:
        """Copies slots into the same number of pages of the pool. The slots stay in use.

        Raises InvariantViolated for a slot that is not in use.
        """
        if len(slots) != len(page_ids):
            raise InvariantViolated(f"{len(slots)} slots for {len(page_ids)} pages")
        rows = self._rows_of(slots)
        if self._memory is None or not rows:
            return
        if self._copies is None:
            _copy(self._memory, rows, self._pool.bytes, page_ids)
        else:
            self._copies.back(self._memory, rows, self._pool.bytes, page_ids)

    def free(self, slots: Sequence[int]) -> None:
        """Frees slots. Raises InvariantViolated for a slot that is not in use."""
        self._free_rows += self._rows_of(slots)
        for slot in slots:
            del self._rows[slot]

    def problems(self) -> list[str]:
        """Returns inconsistencies of the bookkeeping."""
        rows = sorted([*self._free_rows, *self._rows.values()])
        return [] if rows == list(range(self._num_slots)) else ["slots are held twice, or by nobody"]

    def _rows_of(self, slots: Sequence[int]) -> list[int]:
        try:
            return [self._rows[slot] for slot in slots]
        except KeyError as error:
            raise InvariantViolated(f"slot {error.args[0]} is not held") from None

    def _host_memory(self) -> torch.Tensor:
        shape = (self._num_slots, self._page_bytes)
        try:
            memory = host_zeros(shape, torch.uint8)
        except (OSError, RuntimeError) as error:  # raised by mmap and torch
            wanted = self._num_slots * self._page_bytes >> 20
            raise ConfigError(
                f"{wanted} MiB of the host's memory for KV pages cannot be allocated: give less"
            ) from error
        if self._is_on_gpu:
            self._pin(memory)
        return memory

    def _pin(self, memory: torch.Tensor) -> None:
        """Pins memory so that copies need no staging buffer and overlap with the host.

        Continues with unpinned memory if pinning fails.
        """
        # torch's pinned allocator rounds up to a power of two, which can double the size.
        runtime = torch.cuda.cudart()
        with torch.cuda.device(self._pool.data.device):
            code = int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
        if code:
            size = f"{memory.numel() >> 20} MiB"
            logger.warning("%s of the host's memory cannot be pinned (error %d): copies are slow", size, code)
            return
        weakref.finalize(self, runtime.cudaHostUnregister, memory.data_ptr()).atexit = False


def _copy(source: torch.Tensor, rows: Sequence[int], target: torch.Tensor, target_rows: Sequence[int]) -> None:
    # Row by row, each copy is one memcpy. Indexing with a list would copy byte by byte.
    for row, target_row in zip(rows, target_rows, strict=True):
        target[target_row].copy_(source[row])


class _GpuCopies:
    """Copies pages between a pool on a GPU, uint8 [N, page_bytes], and rows of pinned memory.

    A single stream carries all bus transfers, in order. A row is therefore read after it was written, and a reused row
    is overwritten after the pending transfer to it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        new_stream: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream
        self._gathers = new_stream(device)
        self._bus = new_stream(device)

    def out(self, pages: torch.Tensor, page_ids: Sequence[int], memory: torch.Tensor, rows: Sequence[int]) -> None:
        """Returns once the pages are copied to a buffer. Later calls of `back` read them from `memory`."""
        self._gathers.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._gathers):
            aside = pages[torch.tensor(page_ids, device=self._device)]
        # Other threads write to the pages on their own streams as soon as the pages are freed.
        self._gathers.synchronize()
        aside.record_stream(self._bus)
        with torch.cuda.stream(self._bus):
            for place, row in enumerate(rows):
                memory[row].copy_(aside[place], non_blocking=True)

    def back(self, memory: torch.Tensor, rows: Sequence[int], pages: torch.Tensor, page_ids: Sequence[int]) -> None:
        """Returns once all pages are written, so that any stream can read them."""
        self._bus.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._bus):
            aside = torch.empty((len(rows), memory.shape[1]), dtype=torch.uint8, device=self._device)
            for place, row in enumerate(rows):
                aside[place].copy_(memory[row], non_blocking=True)
            pages[torch.tensor(page_ids, device=self._device)] = aside
        self._bus.synchronize()
