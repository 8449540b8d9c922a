"""KV pages in the host's memory: where the pages of a sequence that gave way wait until it goes on.

Knows nothing of sequences. Belongs to the engine thread; nothing locks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.engine.pages import PagePool, host_zeros
from services.runtime.errors import InvariantViolated


class SwapSpace:
    """A bounded number of slots, each of which holds a copy of one page, bit by bit.

    Memory is taken when it is first written to. Slots are taken and given back by the holder; the space keeps no names.
    """

    def __init__(self, pool: PagePool, memory_bytes: int) -> None:
        """`memory_bytes` less than a page: there are no slots."""
        self._pool = pool
        self._page_bytes = pool.layout.page_bytes
        self._num_slots = max(0, memory_bytes) // self._page_bytes
        self._slots = host_zeros((self._num_slots, self._page_bytes), torch.uint8) if self._num_slots else None
        self._free_slots = list(range(self._num_slots - 1, -1, -1))

    @property
    def num_slots(self) -> int:
        """Pages that fit in."""
        return self._num_slots

    @property
    def num_free_slots(self) -> int:
        """Slots that nobody holds."""
        return len(self._free_slots)

    @property
    def page_bytes(self) -> int:
        """Size of a page in bytes."""
        return self._page_bytes

    def store(self, page_ids: Sequence[int]) -> list[int]:
        """Copies pages of the pool, at least one, into slots, which are returned in the same order.

        Raises InvariantViolated where there are too few; the caller has looked.
        """
        if self._slots is None or len(page_ids) > len(self._free_slots):
            raise InvariantViolated(f"{len(page_ids)} pages do not fit into {len(self._free_slots)} free slots")
        slots = [self._free_slots.pop() for _ in page_ids]
        self._copy(self._pool.bytes, page_ids, self._slots, slots)
        return slots

    def load(self, slots: Sequence[int], page_ids: Sequence[int]) -> None:
        """Copies what is in slots into pages of the pool, as many; the slots stay the caller's."""
        if len(slots) != len(page_ids):
            raise InvariantViolated(f"{len(slots)} slots for {len(page_ids)} pages")
        if self._slots is not None:
            self._copy(self._slots, slots, self._pool.bytes, page_ids)

    @staticmethod
    def _copy(source: torch.Tensor, rows: Sequence[int], target: torch.Tensor, target_rows: Sequence[int]) -> None:
        if source.device == target.device:
            # Row by row each is one memcpy; indexing by a list would go byte by byte.
            for row, target_row in zip(rows, target_rows, strict=True):
                target[target_row].copy_(source[row])
            return
        gathered = source[torch.tensor(rows, device=source.device)].to(target.device)
        target[torch.tensor(target_rows, device=target.device)] = gathered

    def free(self, slots: Sequence[int]) -> None:
        """Gives slots back."""
        self._free_slots += slots
        if len(self._free_slots) > self._num_slots:
            raise InvariantViolated("more slots were given back than there are")
