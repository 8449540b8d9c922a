"""A GPU's memory, streams and events as the `nccl` channel wants them: a thin coat around torch."""

from __future__ import annotations

import threading
import weakref

import torch

from kv_transfer.transports.base import ChannelBroken

# torch deals out this number of streams of a GPU and a priority again and again.
_NUM_POOLED = 32
_HIGH_PRIORITY = -1

_in_use: set[int] = set()
_lock = threading.Lock()


class CudaDevice:
    """One GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def memory(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 [num_bytes] that nothing which was launched before still touches. Raises ChannelBroken."""
        try:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            # The allocator hands out what its own stream is still at work on; other streams must not see that.
            torch.cuda.default_stream(self._device).synchronize()
        except RuntimeError as error:
            raise ChannelBroken(f"the GPU gives no memory: {error}") from error
        return memory

    def stream(self) -> CudaStream:
        """Return a stream that nobody else has. Raises ChannelBroken where there are no more."""
        return CudaStream(self._device)


class CudaStream:
    """A stream of its own as long as the object lives: work behind a receive whose sender has died would wait too."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with _lock:
            # What computes has streams of the usual priority, and so never one of these.
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
    """A moment of a stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def is_done(self) -> bool:
        """See nccl_pair.Event."""
        try:
            return bool(self._event.query())
        except RuntimeError as error:
            raise ChannelBroken(f"the GPU has failed: {error}") from error
