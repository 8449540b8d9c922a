"""The GPU memory, streams, and events that the `nccl` channel needs: a thin wrapper around torch."""

from __future__ import annotations

import threading
import weakref

import torch

from kv_transfer.transports.base import ChannelBroken

# Torch has this number of streams for each GPU and priority, and returns them round-robin.
_NUM_POOLED = 32
_HIGH_PRIORITY = -1

_in_use: set[int] = set()
_lock = threading.Lock()


class CudaDevice:
    """One GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def memory(self, num_bytes: int) -> torch.Tensor:
        """Returns uint8 [num_bytes] that no previously launched work still touches. Raises ChannelBroken."""
        try:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            # The allocator reuses memory that is still in use on its own stream. Other streams must not see that memory
            # yet.
            torch.cuda.default_stream(self._device).synchronize()
        except RuntimeError as error:
            raise ChannelBroken(f"the GPU gives no memory: {error}") from error
        return memory

    def stream(self) -> CudaStream:
        """Returns a stream for exclusive use. Raises ChannelBroken if all streams are in use."""
        return CudaStream(self._device)


class CudaStream:
    """A stream that is exclusive as long as the object lives.

    Work queued behind a receive whose sender died would also hang.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with _lock:
            # Computation uses streams of normal priority, so it never shares one of these.
            for _ in range(_NUM_POOLED):
                self._stream = torch.cuda.Stream(device, priority=_HIGH_PRIORITY)
                if self.handle not in _in_use:
                    break
            else:
                raise ChannelBroken("all streams for channels of the GPU are in use")
            _in_use.add(self.handle)
        weakref.finalize(self, _in_use.discard, self.handle)

    @property
    def handle(self) -> int:
        """See nccl_pair.Stream."""
        return int(self._stream.cuda_stream)

    def activate(self) -> None:
        """See nccl_pair.Stream."""
        torch.cuda.set_device(self._device)

    def record(self) -> CudaEvent:
        """See nccl_pair.Stream."""
        return CudaEvent(self._stream.record_event())


class CudaEvent:
    """A point in a stream's work."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def is_done(self) -> bool:
        """See nccl_pair.Event."""
        try:
            return bool(self._event.query())
        except RuntimeError as error:
            raise ChannelBroken(f"the GPU has failed: {error}") from error
