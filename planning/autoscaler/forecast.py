"""How many requests a second will come: the trend of the last minutes, or the season where one is known.

Rates come in equal slots. The trend is a line through the last ones by least squares; the uncertainty is what the line
misses of them, and no less than that of a Poisson process. Where a season is known, the slots around the same one of
the last season are scaled by how much of it has come lately, the less the farther ahead.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

SIGMAS = 1.5
"""How far above its mean a forecast's upper end lies."""
NUM_TREND, TREND_S = 8, 80.0
"""Slots that the trend is drawn through: at least this many, and those of this time."""
NUM_LEVEL = 3
"""Slots that say how much of the season has come."""
NUM_ERRORS = 16
"""Slots from which the uncertainty beside a season is learnt."""
LEVEL_WEIGHT = 0.7
"""What the last slot counts in that; what is left counts for those before it in the same way."""
LEVEL_STAYS = 0.93
"""From slot to slot, how much of the difference from the season stays."""
MIN_SHARE = 0.1
"""A season with less than this part of what comes now is not believed."""
SMOOTHED_PART = 168
"""A season's slots are smoothed over this part of it on each side: an hour of a week."""


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
        self._num_trend = max(NUM_TREND, round(TREND_S / slot_s))
        self._rates: deque[float] = deque(maxlen=max(self._num_trend, 0 if season is None else season + NUM_ERRORS + 1))

    def add(self, rate_per_s: float) -> None:
        """Takes the rate of the slot that has ended."""
        assert rate_per_s >= 0, "requests only come"
        self._rates.append(rate_per_s)

    def ahead(self, seconds: float, *, caution: float = 1.0) -> Forecast:
        """Returns the forecast for the slot that is this far in the future; 0: the one that begins now.

        `caution`: the part of the uncertainty that its upper end has.
        """
        if not self._rates:
            return Forecast(0.0, 0.0)
        slots = seconds / self._slot_s + 1
        seasonal = self._seasonal(math.ceil(slots))
        mean, spread = seasonal if seasonal is not None else self._trend(slots)
        spread = max(spread, math.sqrt(max(mean, 0.0) / self._slot_s))
        mean = max(0.0, mean)
        return Forecast(mean, mean + caution * SIGMAS * spread)

    def _trend(self, slots: float) -> tuple[float, float]:
        rates = list(self._rates)[-self._num_trend :]
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
        reach = season // SMOOTHED_PART
        last = len(rates) - 1
        places = range(max(season, last - NUM_ERRORS), last + 1)
        pairs = [(rates[place], _smooth(rates, place - season, reach)) for place in places]
        weights = [(1 - LEVEL_WEIGHT) ** age for age in reversed(range(NUM_LEVEL))]
        recent = sum(weight * now for weight, (now, _) in zip(weights, pairs[-NUM_LEVEL:], strict=True))
        usual = sum(weight * before for weight, (_, before) in zip(weights, pairs[-NUM_LEVEL:], strict=True))
        if usual < MIN_SHARE * recent:
            return None  # a season in which nearly nothing came tells nothing of this
        share = recent / usual if usual > 0 else 1.0
        steps = [
            later / later_usual - now / now_usual
            for (now, now_usual), (later, later_usual) in pairwise(pairs)
            if min(now_usual, later_usual) > MIN_SHARE * max(now, later)
        ]
        spread = math.sqrt(sum(step * step for step in steps) / max(1, len(steps)))
        # How much more or less has come lately says less of what is far away, and what is not known adds up.
        stays = LEVEL_STAYS ** (slots - 1)
        grown = math.sqrt((1 - LEVEL_STAYS ** (2 * slots)) / (1 - LEVEL_STAYS**2))
        then = _smooth(rates, last + slots - season, reach)
        return then * (stays * share + 1 - stays), then * spread * grown


def _smooth(rates: Sequence[float], place: int, reach: int) -> float:
    """Returns the mean of the slots around a place, up to `reach` on each side."""
    around = rates[max(0, place - reach) : place + reach + 1]
    return sum(around) / len(around)
