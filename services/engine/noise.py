"""Sampling noise as a function of (seed, position, token ID): identical in any batch, on any worker and device.

Shape legend: R rows, C candidates of a row.
"""

from collections.abc import Sequence

import torch

# Constants of SplitMix64 (Steele, Lea, Flood 2014): the increment and the multipliers of its mixing function.
_INCREMENT = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MIX_SHIFTS = (30, 27, 31)
MASK64 = (1 << 64) - 1
# With 52 bits, u = (k + 0.5) / 2^52 is exact in float64 and never 0 or 1.
_UNIFORM_BITS = 52


def gumbel_noise(seeds: Sequence[int], positions: Sequence[int], token_ids: torch.Tensor) -> torch.Tensor:
    """Returns standard Gumbel noise [R, C] float64 for R (seed, position) pairs and `token_ids` [R or 1, C] int64.

    Each row is one SplitMix64 stream that starts at a key mixed from seed and position. The token ID selects the
    element of the stream.
    """
    keys = [noise_key(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    state = torch.tensor(keys, device=token_ids.device)[:, None] + token_ids * _signed(_INCREMENT)
    bits = _shift_right(_mix(state), 64 - _UNIFORM_BITS)
    uniform = bits.to(torch.float64).add_(0.5).mul_(2.0**-_UNIFORM_BITS)
    return uniform.log_().neg_().log_().neg_()


def noise_key(seed: int, position: int) -> int:
    """Returns the start of a row's stream, mixed from seed and position on the host, as a signed 64-bit integer."""
    return _signed(_mix_int(_mix_int((seed + _INCREMENT) & MASK64) + position * _INCREMENT))


def _mix_int(value: int) -> int:
    value &= MASK64
    for shift, multiplier in zip(_MIX_SHIFTS[:2], _MULTIPLIERS, strict=True):
        value = ((value ^ (value >> shift)) * multiplier) & MASK64
    return value ^ (value >> _MIX_SHIFTS[2])


def _mix(value: torch.Tensor) -> torch.Tensor:
    """Applies `_mix_int` in place to int64 values. Signed products have the same low 64 bits as unsigned products."""
    for shift, multiplier in zip(_MIX_SHIFTS[:2], _MULTIPLIERS, strict=True):
        value.bitwise_xor_(_shift_right(value, shift)).mul_(_signed(multiplier))
    return value.bitwise_xor_(_shift_right(value, _MIX_SHIFTS[2]))


def _shift_right(value: torch.Tensor, count: int) -> torch.Tensor:
    # torch shifts int64 arithmetically. The mask clears the copies of the sign bit.
    return (value >> count).bitwise_and_((1 << (64 - count)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
