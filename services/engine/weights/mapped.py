"""GPU memory that several processes map, as tensors."""

import os

import torch

from services.runtime import cuda_memory


class CudaMemory:
    """Shared memory of one GPU."""

    def __init__(self, device_index: int) -> None:
        self._index = device_index

    def make(self, num_bytes: int) -> tuple[torch.Tensor, int]:
        """Allocates memory. Returns it as uint8 [at least num_bytes], with a descriptor that the caller closes.

        The memory is unmapped when its last tensor is freed. Raises OSError.
        """
        memory, fd = cuda_memory.make(num_bytes, self._index)
        try:
            return self._tensor_over(memory), fd
        except BaseException:
            os.close(fd)
            raise

    def map(self, fd: int, num_bytes: int) -> torch.Tensor:
        """Maps memory of the same size from another process. The caller closes the descriptor. Raises OSError."""
        return self._tensor_over(cuda_memory.map_shared(fd, num_bytes, self._index))

    def _tensor_over(self, memory: cuda_memory.MappedMemory) -> torch.Tensor:
        # Always use a tensor of this GPU: only this GPU has access to the memory. A copy would not be shared.
        tensor = torch.as_tensor(memory, device=torch.device("cuda", self._index))
        if tensor.data_ptr() != memory.address:
            raise cuda_memory.CudaError("torch copied the mapped memory instead of using it")
        return tensor
