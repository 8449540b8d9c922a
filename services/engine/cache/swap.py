"""KV pages in the host's memory: those of preempted sequences, and those that the pool had no room to keep.

Knows nothing of sequences and keys. Belongs to the engine thread; nothing locks. Each user has a space of its own, with
its own bound: preempted sequences (decode_worker.engine_loop) and named pages (services.engine.cache.host_tier).
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
    """A bounded number of slots, each of which holds a copy of one page, bit by bit.

    Slots are taken and given back by the holder; the space keeps no names. A slot's number is given once: a holder of
    an old one finds nothing, and never what another has put in its place.

    On a CPU memory is taken when it is first written to. For a pool on a GPU it is taken at once and pinned, if that
    can be, and storing waits until the pages are copied aside on the GPU, not for their way to the host.
    """

    def __init__(self, pool: PagePool, memory_bytes: int) -> None:
        """`memory_bytes` less than a page: there are no slots. Raises ConfigError where they cannot be had."""
        self._pool = pool
        self._page_bytes = pool.layout.page_bytes
        self._num_slots = max(0, memory_bytes) // self._page_bytes
        self._is_on_gpu = pool.data.is_cuda
        self._memory = self._host_memory() if self._num_slots else None
        self._copies = _GpuCopies(pool.data.device) if self._is_on_gpu and self._num_slots else None
        self._free_rows = list(range(self._num_slots - 1, -1, -1))
        self._rows: dict[int, int] = {}
        """Where the held slots lie in the memory."""
        self._num_given = 0

    @property
    def num_slots(self) -> int:
        """Pages that fit in."""
        return self._num_slots

    @property
    def num_free_slots(self) -> int:
        """Slots that nobody holds."""
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
        """Copies pages of the pool, at least one, into slots, which are returned in the same order.

        The pages may be written to when this returns. Raises InvariantViolated where there are too few slots; the
        caller has looked.
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
        """Copies what is in slots into pages of the pool, as many; the slots stay the caller's.

        Raises InvariantViolated for a slot that is held no longer.
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
        """Gives slots back. Raises InvariantViolated for one that was given back before."""
        self._free_rows += self._rows_of(slots)
        for slot in slots:
            del self._rows[slot]

    def problems(self) -> list[str]:
        """Returns how the books contradict themselves, if they do."""
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
        except (OSError, RuntimeError) as error:  # mmap's and torch's words for it
            wanted = self._num_slots * self._page_bytes >> 20
            raise ConfigError(
                f"{wanted} MiB of the host's memory for KV pages cannot be allocated: give less"
            ) from error
        if self._is_on_gpu:
            self._pin(memory)
        return memory

    def _pin(self, memory: torch.Tensor) -> None:
        """Only pinned memory is copied without a detour, and beside what the host does; other memory is right, too."""
        # torch's own way to such memory takes up to twice of what is asked for: it rounds up to a power of two.
        runtime = torch.cuda.cudart()
        with torch.cuda.device(self._pool.data.device):
            code = int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
        if code:
            size = f"{memory.numel() >> 20} MiB"
            logger.warning("%s of the host's memory cannot be pinned (error %d): copies are slow", size, code)
            return
        weakref.finalize(self, runtime.cudaHostUnregister, memory.data_ptr()).atexit = False


def _copy(source: torch.Tensor, rows: Sequence[int], target: torch.Tensor, target_rows: Sequence[int]) -> None:
    # Row by row each is one memcpy; indexing by a list would go byte by byte.
    for row, target_row in zip(rows, target_rows, strict=True):
        target[target_row].copy_(source[row])


class _GpuCopies:
    """Pages between a pool on a GPU, uint8 [N, page_bytes], and rows of pinned memory.

    All that crosses the bus goes through one stream, in order: a row that is read was written before, and one that was
    given away is written after what was on its way into it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        new_stream: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream
        self._gathers = new_stream(device)
        self._bus = new_stream(device)

    def out(self, pages: torch.Tensor, page_ids: Sequence[int], memory: torch.Tensor, rows: Sequence[int]) -> None:
        """Returns when the pages are copied aside; they are in `memory` for readers by `back`."""
        self._gathers.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._gathers):
            aside = pages[torch.tensor(page_ids, device=self._device)]
        # Others than this thread write into pages, on streams of their own, as soon as they are given away.
        self._gathers.synchronize()
        aside.record_stream(self._bus)
        with torch.cuda.stream(self._bus):
            for place, row in enumerate(rows):
                memory[row].copy_(aside[place], non_blocking=True)

    def back(self, memory: torch.Tensor, rows: Sequence[int], pages: torch.Tensor, page_ids: Sequence[int]) -> None:
        """Returns when all is in the pages, so that whatever stream reads them finds it."""
        self._bus.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._bus):
            aside = torch.empty((len(rows), memory.shape[1]), dtype=torch.uint8, device=self._device)
            for place, row in enumerate(rows):
                aside[place].copy_(memory[row], non_blocking=True)
            pages[torch.tensor(page_ids, device=self._device)] = aside
        self._bus.synchronize()
