"""How many requests a second will come: the trend of the last minutes, or the season where one is known.

Rates come in equal slots. The trend is a line through the last ones by least squares; the uncertainty is what the line
misses of them, and no less than that of a Poisson process. Where a season is known, the same slot of the last one is
scaled by how much of it has come lately.
"""

import math
from collections import deque
from dataclasses import dataclass

SIGMAS = 1.5
"""How far above its mean a forecast's upper end lies."""
NUM_TREND = 8
"""Slots that the trend is drawn through."""
NUM_LEVEL = 3
"""Slots that say how much of the season has come."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Requests per second: what is expected, and what will hardly be more."""

    mean: float
    upper: float


class Forecaster:
    """Learns from slots of `slot_s` seconds. `season`: slots after which rates repeat; None: unknown."""

    def __init__(self, slot_s: float, *, season: int | None = None) -> None:
        assert slot_s > 0, "a slot has a length"
        assert season is None or season > NUM_LEVEL, "a season is longer than what tells its level"
        self._slot_s = slot_s
        self._season = season
        self._rates: deque[float] = deque(maxlen=max(NUM_TREND, 0 if season is None else season + NUM_LEVEL))

    def add(self, rate_per_s: float) -> None:
        """Takes the rate of the slot that has ended."""
        assert rate_per_s >= 0, "requests only come"
        self._rates.append(rate_per_s)

    def ahead(self, seconds: float) -> Forecast:
        """Returns the forecast for the slot that is this far in the future; 0: the one that begins now."""
        if not self._rates:
            return Forecast(0.0, 0.0)
        slots = seconds / self._slot_s + 1
        seasonal = self._seasonal(math.ceil(slots))
        mean, spread = seasonal if seasonal is not None else self._trend(slots)
        spread = max(spread, math.sqrt(max(mean, 0.0) / self._slot_s))
        mean = max(0.0, mean)
        return Forecast(mean, mean + SIGMAS * spread)

    def _trend(self, slots: float) -> tuple[float, float]:
        rates = list(self._rates)[-NUM_TREND:]
        count = len(rates)
        level = sum(rates) / count
        if count < 3:
            return level, 0.0
        middle = (count - 1) / 2
        squares = sum((place - middle) ** 2 for place in range(count))
        slope = sum((place - middle) * (rate - level) for place, rate in enumerate(rates)) / squares
        missed = [rate - level - slope * (place - middle) for place, rate in enumerate(rates)]
        spread = math.sqrt(sum(value * value for value in missed) / (count - 2))
        # A line is less certain the farther it goes beyond what it was drawn through.
        reach = slots + middle
        return level + slope * reach, spread * math.sqrt(1 / count + reach * reach / squares)

    def _seasonal(self, slots: int) -> tuple[float, float] | None:
        season, rates = self._season, list(self._rates)
        if season is None or len(rates) < season + NUM_LEVEL or slots > season:
            return None
        recent, before = rates[-NUM_LEVEL:], rates[-NUM_LEVEL - season : -season]
        share = sum(recent) / sum(before) if sum(before) > 0 else 1.0
        missed = [now - share * then for now, then in zip(recent, before, strict=True)]
        spread = math.sqrt(sum(value * value for value in missed) / NUM_LEVEL)
        # How much more or less has come lately says less of what is far away.
        weight = 0.97 ** (slots - 1)
        return rates[-season + slots - 1] * (weight * share + 1 - weight), spread
