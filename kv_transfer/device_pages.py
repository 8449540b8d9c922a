"""Gathers pages on a GPU into a ring slot, computes their digest on the GPU, and scatters them from a slot into pages.

xxh3 runs on the host, one byte after another, so it cannot be the digest of a frame that never leaves the GPU. The
device digest is two sums over all 64-bit words. Each word is first mixed with its index. The result of a sum does not
depend on the order in which the GPU adds. An accidental change goes undetected with probability 2**-128. Like xxh3, the
digest does not protect against deliberate tampering.

On a CPU, where tests run device channels, plain torch does the same.

Shape legend: N pages, W 64-bit words of a page, P pages of a frame.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kv_transfer.page_bytes import PageMemory

WORD_BYTES = 8
_MASK = 2**64 - 1


class DevicePages:
    """Reads and digests the pages of a pool on its device. Used by one thread at a time; any thread may call `mark`.

    Runs on a separate stream, in parallel with the engine. Pages that an engine has reported as filled are complete,
    because the engine has waited for them. A writer of pages waits for a `mark`: work launched before it, on the
    device's default stream, may still read the pages.
    """

    def __init__(self, pool: PageMemory) -> None:
        """Raises ValueError if pages have several pieces, or a size that `can_hold` rejects."""
        if not can_hold(pool.layout.page_bytes):
            raise ValueError(f"a page of {pool.layout.page_bytes} bytes is no whole number of 64-bit words")
        ((pages,),) = pool.parts
        self._words: torch.Tensor = pages.view(torch.int64)
        self._device = pages.device
        self._is_cuda = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if self._is_cuda else None

    @property
    def page_bytes(self) -> int:
        """Size of a page, in bytes."""
        return self._words.shape[1] * WORD_BYTES

    def mark(self) -> torch.cuda.Event | None:
        """Returns an event behind all work launched so far, to wait for later.

        Returns None on a CPU, where work is synchronous.
        """
        return torch.cuda.default_stream(self._device).record_event() if self._is_cuda else None

    @contextlib.contextmanager
    def working(self, after: torch.cuda.Event | None) -> Iterator[None]:
        """Launches the work of its body on this object's stream, behind the event `after`.

        Waits for the work on exit.
        """
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            try:
                yield
            finally:
                # Synchronize after an error too: launched kernels may touch memory that is unmapped because of the
                # error.
                self._stream.synchronize()

    def gather(self, page_ids: Sequence[int], target: torch.Tensor) -> bytes:
        """Copies pages into `target`, uint8 [P * page_bytes] on the same device.

        Returns their digest once the copy is complete.
        """
        with self.working(None):
            rows = torch.tensor(page_ids, dtype=torch.int64).to(self._device, non_blocking=True)
            words = target.view(torch.int64)
            if self._is_cuda:
                from kv_transfer import page_kernels

                sums = page_kernels.gather(self._words, rows, words)
            else:
                torch.index_select(self._words, 0, rows, out=words.view(len(page_ids), -1))
                sums = word_sums(words)
            return _digest_of(sums, words.numel())

    def digest(self, data: torch.Tensor) -> bytes:
        """Returns the digest of uint8 [bytes] on the same device.

        If the size is not a positive multiple of 8 bytes, returns zeros, which match no sender's digest.
        """
        if data.numel() % WORD_BYTES or not data.numel():
            return bytes(16)
        with self.working(None):
            words = data.view(torch.int64)
            if self._is_cuda:
                from kv_transfer import page_kernels

                return _digest_of(page_kernels.digest(words), words.numel())
            return _digest_of(word_sums(words), words.numel())


def warm_up(pool: PageMemory) -> None:
    """Compiles and loads the kernels for these pages, if they are on a GPU.

    Compiling takes seconds, and loading a kernel may wait for everything that runs on the GPU. That must not happen
    while an NCCL receive waits for its sender.
    """
    device, page_bytes = pool.parts[0].device, pool.layout.page_bytes
    if device.type != "cuda" or len(pool.parts[0]) > 1 or not can_hold(page_bytes):
        return
    from kv_transfer import page_kernels

    with torch.cuda.device(device):
        page = torch.zeros(1, page_bytes // WORD_BYTES, dtype=torch.int64, device=device)
        rows = torch.zeros(1, dtype=torch.int64, device=device)
        page_kernels.gather(page, rows, torch.empty_like(page).view(-1))
        page_kernels.digest(page.view(-1))
        page_kernels.spread(page.view(-1), rows, torch.empty_like(page))
        torch.cuda.synchronize(device)


def can_hold(page_bytes: int) -> bool:
    """Returns whether device channels can carry pages of this size."""
    return page_bytes % WORD_BYTES == 0


def spread(data: torch.Tensor, page_ids: Sequence[int], pages: torch.Tensor) -> None:
    """Copies uint8 [P * page_bytes] into rows of uint8 [N, page_bytes] on the same device, on the current stream."""
    if pages.device.type != "cuda" or not can_hold(pages.shape[1]):
        pages[torch.tensor(page_ids, device=pages.device)] = data.view(len(page_ids), -1)
        return
    from kv_transfer import page_kernels

    rows = torch.tensor(page_ids, dtype=torch.int64).to(pages.device, non_blocking=True)
    page_kernels.spread(data.view(torch.int64), rows, pages.view(torch.int64))


def word_sums(words: torch.Tensor) -> torch.Tensor:
    """Returns the two sums over int64 [words], mod 2**64, as int64 [2].

    Reference implementation of the kernels, in torch.
    """
    index = torch.arange(1, words.numel() + 1, dtype=torch.int64, device=words.device)
    x = words ^ (index * _signed(0x9E3779B97F4A7C15))
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    x = x ^ _shifted(x, 31)
    y = (x ^ _signed(0xD6E8FEB86659FD93)) * _signed(0xFF51AFD7ED558CCD)
    y = y ^ _shifted(y, 33)
    return torch.stack((x.sum(), y.sum()))


def _shifted(words: torch.Tensor, count: int) -> torch.Tensor:
    """Shifts right and fills with zeros. Torch has no logical shift for 64-bit types."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _digest_of(sums: torch.Tensor, num_words: int) -> bytes:
    first, second = sums.tolist()
    # The digest includes the length, so that trailing words of zeros change it.
    return struct.pack("<2Q", (first + num_words * 0x9E3779B97F4A7C15) & _MASK, second & _MASK)
