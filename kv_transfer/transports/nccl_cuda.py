"""A GPU's memory, streams and events as the `nccl` channel wants them: a thin coat around torch.

No line of this file has run on a GPU by now.
"""

from __future__ import annotations

import torch

from kv_transfer.transports.base import ChannelBroken


class CudaDevice:
    """One GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def memory(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 [num_bytes] that nothing which was launched before still touches."""
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        # The allocator hands out what its own stream is still at work on; other streams must not see that.
        torch.cuda.default_stream(self._device).synchronize()
        return memory

    def stream(self) -> CudaStream:
        """Return a new stream."""
        return CudaStream(self._device)


class CudaStream:
    """A stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

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
