"""Linear layers with weights in the layout of their device. Does not depend on other kinds of layers.

Legend: T rows, K input features, N output features.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from services.engine.kernels.library import Kernels, linear_args


class LinearParts(NamedTuple):
    """Sizes and tensors of a layer, in the layout that it computes with."""

    out_features: int
    in_features: int
    weight: torch.Tensor
    bias: torch.Tensor | None


class Linear(Protocol):
    """Computes `y = x @ weight.T + bias` for x [T, K]. y is [T, N] in `out_dtype`, by default the dtype of x."""

    in_features: int
    out_features: int

    @property
    def parts(self) -> LinearParts:
        """Sizes and tensors of this layer. `of` builds an equal layer from them."""
        ...

    def __call__(self, x: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """Applies the layer."""
        ...


class TorchLinear:
    """Computes with `torch.nn.functional.linear` on any device. Results of a row may depend on T."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = weight
        self._bias = bias

    @classmethod
    def of(cls, parts: LinearParts) -> TorchLinear:
        """Returns the layer with these parts."""
        return cls(parts.weight, parts.bias)

    @property
    def parts(self) -> LinearParts:
        """Implements Linear."""
        return LinearParts(self.out_features, self.in_features, self._weight, self._bias)

    def __call__(self, x: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """Applies the layer."""
        return F.linear(x, self._weight, self._bias).to(out_dtype or x.dtype)


class PackedLinear:
    """Computes with the CPU kernels. Weights are packed once, and the result of a row never depends on other rows."""

    def __init__(self, kernels: Kernels, parts: LinearParts) -> None:
        """Expects `parts` in the layout that `pack_linear` creates."""
        self.out_features, self.in_features = parts.out_features, parts.in_features
        self.parts = parts
        self._kernels = kernels
        self.args = linear_args(parts.weight, parts.bias, shape=(self.out_features, self.in_features))

    def __call__(self, x: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """Applies the layer."""
        return self._kernels.linear(self.args, x, out_dtype=out_dtype or x.dtype)


def pack_linear(kernels: Kernels, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
    """Packs a weight [N, K] and a bias for the CPU kernels."""
    out_features, in_features = weight.shape
    packed_bias = None if bias is None else bias.float().contiguous()
    return PackedLinear(kernels, LinearParts(out_features, in_features, kernels.pack(weight), packed_bias))
