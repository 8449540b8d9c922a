"""Linear layers whose weights are laid out once for the device they run on; knows nothing of layers or attention.

Legend: T rows, K input features, N output features.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from services.engine.kernels.library import Kernels, linear_args


class LinearParts(NamedTuple):
    """What a layer computes with, laid out as it wants it."""

    out_features: int
    in_features: int
    weight: torch.Tensor
    bias: torch.Tensor | None


class Linear(Protocol):
    """`y = x @ weight.T + bias` for x [T, K], giving [T, N] in `out_dtype` (None: the dtype of x)."""

    in_features: int
    out_features: int

    @property
    def parts(self) -> LinearParts:
        """What it computes with: `of` makes the same layer of these."""
        ...

    def __call__(self, x: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """Applies the layer."""
        ...


class TorchLinear:
    """The layer through `torch.nn.functional.linear`: any device, row results may depend on T."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = weight
        self._bias = bias

    @classmethod
    def of(cls, parts: LinearParts) -> TorchLinear:
        """Returns the layer that has these parts."""
        return cls(parts.weight, parts.bias)

    @property
    def parts(self) -> LinearParts:
        """See Linear."""
        return LinearParts(self.out_features, self.in_features, self._weight, self._bias)

    def __call__(self, x: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """Applies the layer."""
        return F.linear(x, self._weight, self._bias).to(out_dtype or x.dtype)


class PackedLinear:
    """The layer through the CPU kernels: weights are packed once, and a row's result never depends on other rows."""

    def __init__(self, kernels: Kernels, parts: LinearParts) -> None:
        """`parts` as `pack_linear` gives them."""
        self.out_features, self.in_features = parts.out_features, parts.in_features
        self.parts = parts
        self._kernels = kernels
        self.args = linear_args(parts.weight, parts.bias, shape=(self.out_features, self.in_features))

    def __call__(self, x: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """Applies the layer."""
        return self._kernels.linear(self.args, x, out_dtype=out_dtype or x.dtype)


def pack_linear(kernels: Kernels, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
    """Lay out a weight [N, K] and a bias for the CPU kernels."""
    out_features, in_features = weight.shape
    packed_bias = None if bias is None else bias.float().contiguous()
    return PackedLinear(kernels, LinearParts(out_features, in_features, kernels.pack(weight), packed_bias))
