"""The median of all numbers but one. Pure."""

from bisect import bisect_left
from collections.abc import Sequence


def median_without(in_order: Sequence[float], one: float) -> float | None:
    """Returns the median of sorted numbers without `one` of them, or None if there are no others."""
    num_others = len(in_order) - 1
    if num_others < 1:
        return None
    left_out = bisect_left(in_order, one)
    middle = (num_others - 1) // 2, num_others // 2
    return sum(in_order[index + (index >= left_out)] for index in middle) / 2
