"""Linear layers whose weights are laid out once for the device they run on; knows nothing of layers or attention.

Legend: T rows, K input features, N output features.
"""

from typing import Protocol

import torch
import torch.nn.functional as F

from services.engine.kernels.library import Kernels, linear_args


class Linear(Protocol):
    """`y = x @ weight.T + bias` for x [T, K], giving [T, N] in `out_dtype` (None: the dtype of x)."""

    in_features: int
    out_features: int

    def __call__(self, x: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """Applies the layer."""
        ...


class TorchLinear:
    """The layer through `torch.nn.functional.linear`: any device, row results may depend on T."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """Applies the layer."""
        return F.linear(x, self._weight, self._bias).to(out_dtype or x.dtype)


class PackedLinear:
    """The layer through the CPU kernels: weights are packed once, and a row's result never depends on other rows."""

    def __init__(self, kernels: Kernels, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._kernels = kernels
        self._packed = kernels.pack(weight)
        self._bias = None if bias is None else bias.float().contiguous()
        self.args = linear_args(self._packed, self._bias, shape=(self.out_features, self.in_features))

    def __call__(self, x: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """Applies the layer."""
        return self._kernels.linear(self.args, x, out_dtype=out_dtype or x.dtype)
