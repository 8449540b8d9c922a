"""A GPU's memory that several processes map, as tensors."""

import os

import torch

from services.runtime import cuda_memory


class CudaMemory:
    """Memory of one GPU."""

    def __init__(self, device_index: int) -> None:
        self._index = device_index

    def make(self, num_bytes: int) -> tuple[torch.Tensor, int]:
        """Returns new memory, uint8 [at least num_bytes], and a descriptor of it that the caller closes.

        Raises OSError. It is unmapped with its last tensor.
        """
        memory, fd = cuda_memory.make(num_bytes, self._index)
        try:
            return self._tensor_over(memory), fd
        except BaseException:
            os.close(fd)
            raise

    def map(self, fd: int, num_bytes: int) -> torch.Tensor:
        """Returns what another process made, of the same size; the caller closes the descriptor. Raises OSError."""
        return self._tensor_over(cuda_memory.map_shared(fd, num_bytes, self._index))

    def _tensor_over(self, memory: cuda_memory.MappedMemory) -> torch.Tensor:
        # A tensor of this GPU, wherever the memory is: only this one was given access. A copy would not be shared.
        tensor = torch.as_tensor(memory, device=torch.device("cuda", self._index))
        if tensor.data_ptr() != memory.address:
            raise cuda_memory.CudaError("torch copied the mapped memory instead of using it")
        return tensor
