"""The noise of sampling, written out for one number at a time."""

import math

MASK64 = (1 << 64) - 1


def reference_noise(seed: int, position: int, token_id: int) -> float:
    def mix(value: int) -> int:
        value &= MASK64
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK64
        value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK64
        return value ^ value >> 31

    step = 0x9E3779B97F4A7C15
    key = mix(mix(seed + step) + position * step)
    bits = mix(key + token_id * step) >> 12
    return -math.log(-math.log((bits + 0.5) / 2**52))
