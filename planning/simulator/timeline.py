"""An amount over time, added up in buckets of equal width."""

from collections import defaultdict


class Timeline:
    """Integral of an amount over each bucket of `width_s` seconds."""

    def __init__(self, width_s: float) -> None:
        assert width_s > 0, "a bucket has a width"
        self._width_s = width_s
        self._sums: defaultdict[int, float] = defaultdict(float)
        self.total = 0.0
        """Integral over all time."""

    def add(self, begin_s: float, end_s: float, amount: float = 1.0) -> None:
        """`amount` from `begin_s` to `end_s`."""
        self.total += (end_s - begin_s) * amount
        first, last = int(begin_s / self._width_s), int(end_s / self._width_s)
        if first == last:
            self._sums[first] += (end_s - begin_s) * amount
            return
        self._sums[first] += ((first + 1) * self._width_s - begin_s) * amount
        for bucket in range(first + 1, last):
            self._sums[bucket] += self._width_s * amount
        self._sums[last] += (end_s - last * self._width_s) * amount

    def means(self, until_s: float) -> list[float]:
        """Mean amount of each bucket, the last of which may be cut short by `until_s`."""
        num_buckets = int(until_s / self._width_s) + 1
        widths = [self._width_s] * (num_buckets - 1) + [until_s - (num_buckets - 1) * self._width_s]
        return [self._sums[bucket] / width if width > 1e-9 else 0.0 for bucket, width in enumerate(widths)]
