"""Tables for rotary position embeddings. Does not depend on queries, keys, or the cache.

Legend: P positions, D head_dim.
"""

import math

import torch

from services.engine.weights.config import Llama3RopeScaling, ModelConfig

# Tables are computed in blocks of this many positions, with the same calls on the same shapes. The vector code and the
# tail code of a math library may round differently, and a row must not depend on the length of the table.
BLOCK_POSITIONS = 256


class RopeTable:
    """Cosines and sines of all positions so far, float32. Grows on demand, up to the model's context."""

    def __init__(self, config: ModelConfig, *, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(config)
        self._device = device
        self._max_positions = config.context_length_tokens
        self.data = torch.empty(0, 2, config.head_dim // 2, device=device)
        self.ensure(min(self._max_positions, BLOCK_POSITIONS))

    def ensure(self, num_positions: int) -> torch.Tensor:
        """Returns the table [P, 2, D/2] (cosines, then sines) with P >= num_positions."""
        have = self.data.shape[0]
        if num_positions > have:
            wanted = min(max(num_positions, 2 * have), max(self._max_positions, num_positions))
            starts = range(have, wanted, BLOCK_POSITIONS)
            blocks = [_block(self._frequencies, start).to(self._device) for start in starts]
            self.data = torch.cat([self.data, *blocks])
        return self.data


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Returns the angle per position of each pair of dimensions, float32 [D/2], as `transformers` computes it."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if config.rope_scaling is None:
        return frequencies
    return _scale_llama3(frequencies, config.rope_scaling)


def apply_rope(x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotates x [T, heads, D] by the angles of positions [T]. Returns the same dtype."""
    cos, sin = table[positions].unbind(1)
    cos, sin = cos[:, None], sin[:, None]
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)


def _block(frequencies: torch.Tensor, start: int) -> torch.Tensor:
    positions = torch.arange(start, start + BLOCK_POSITIONS, dtype=torch.float32)
    angles = positions[:, None] * frequencies[None, :]
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def _scale_llama3(frequencies: torch.Tensor, scaling: Llama3RopeScaling) -> torch.Tensor:
    wavelengths = 2 * math.pi / frequencies
    longest = scaling.original_context_tokens / scaling.low_freq_factor
    shortest = scaling.original_context_tokens / scaling.high_freq_factor
    scaled = torch.where(wavelengths > longest, frequencies / scaling.factor, frequencies)
    band = scaling.high_freq_factor - scaling.low_freq_factor
    smooth = (scaling.original_context_tokens / wavelengths - scaling.low_freq_factor) / band
    blended = (1 - smooth) * scaled / scaling.factor + smooth * scaled
    is_between = ~(wavelengths < shortest) & ~(wavelengths > longest)
    return torch.where(is_between, blended, scaled)
