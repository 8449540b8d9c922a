"""A quarter of an hour of figures, one set a second: counters that only rise turned into rates, shares and percentiles.

Each figure is of the `WINDOW_S` seconds before it, so that a quiet second is not mistaken for a quiet cluster.
Percentiles are read from histograms, between whose bounds values are taken to lie evenly, as Prometheus'
`histogram_quantile` takes them. Knows no clock: time is an argument.
"""

import math
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

SECONDS = 900
WINDOW_S = 10
NOTHING = math.nan

COLUMNS = (
    "ttft_p50_s",
    "ttft_p90_s",
    "ttft_p99_s",
    "itl_p50_s",
    "itl_p90_s",
    "itl_p99_s",
    "generated_per_s",
    "prompt_per_s",
    "hit_share",
    "good_per_s",
    "finished_per_s",
    "failed_per_s",
    "cancelled_per_s",
    "refused_per_s",
    "queued",
    "running",
)


class TrafficTotals(NamedTuple):
    """What was counted since the gateway started, and what waits and runs now.

    `ttft` and `itl`: values in each bucket of their histogram. Prompt tokens count with an answer's first token, when
    it is known how many were cached. `ended` is by outcome, with `good` for those that met their targets.
    """

    ttft: Sequence[int]
    itl: Sequence[int]
    generated_tokens: float
    prompt_tokens: float
    cached_tokens: float
    ended: Mapping[str, int]
    queued: int
    running: int


class Series:
    """The figures of the last `seconds` seconds. `ttft_bounds` and `itl_bounds` are those of the histograms, in s."""

    def __init__(self, ttft_bounds: Sequence[float], itl_bounds: Sequence[float], *, seconds: int = SECONDS) -> None:
        self._ttft_bounds = tuple(ttft_bounds)
        self._itl_bounds = tuple(itl_bounds)
        self._seconds = seconds
        self._recent: deque[tuple[float, TrafficTotals]] = deque(maxlen=WINDOW_S + 1)
        self._times = array("d")
        self._columns = {name: array("d") for name in COLUMNS}

    def add(self, unix_s: float, monotonic_s: float, totals: TrafficTotals) -> None:
        """Takes what is counted at this moment; once a second. The wall clock, which may jump, is only shown."""
        self._recent.append((monotonic_s, totals))
        self._push(self._times, unix_s)
        for name, value in self._figures().items():
            self._push(self._columns[name], value)

    def last(self, seconds: int) -> tuple[list[float], dict[str, list[float | None]]]:
        """Returns times and figures of the last `seconds` seconds. None: nothing is known of that second."""
        return (
            self._times[-seconds:].tolist(),
            {name: [_shown(value) for value in column[-seconds:]] for name, column in self._columns.items()},
        )

    def latest(self) -> dict[str, float | None]:
        """Returns the figures of the last second; empty before the first."""
        return {name: _shown(column[-1]) for name, column in self._columns.items() if column}

    def _push(self, column: "array[float]", value: float) -> None:
        column.append(value)
        if len(column) > self._seconds:
            del column[0]

    def _figures(self) -> dict[str, float]:
        since_s, before = self._recent[0]
        at_s, now = self._recent[-1]
        passed_s = at_s - since_s
        ttft, itl = _risen(now.ttft, before.ttft), _risen(now.itl, before.itl)
        prompt = now.prompt_tokens - before.prompt_tokens

        def per_s(more: float) -> float:
            return more / passed_s if passed_s > 0 else NOTHING

        return {
            **{f"ttft_p{share}_s": quantile(self._ttft_bounds, ttft, share / 100) for share in (50, 90, 99)},
            **{f"itl_p{share}_s": quantile(self._itl_bounds, itl, share / 100) for share in (50, 90, 99)},
            "generated_per_s": per_s(now.generated_tokens - before.generated_tokens),
            "prompt_per_s": per_s(prompt),
            "hit_share": (now.cached_tokens - before.cached_tokens) / prompt if prompt else NOTHING,
            **{
                f"{outcome}_per_s": per_s(now.ended.get(outcome, 0) - before.ended.get(outcome, 0))
                for outcome in ("good", "finished", "failed", "cancelled", "refused")
            },
            "queued": now.queued,
            "running": now.running,
        }


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float:
    """Returns the value that `share` (0 to 1) of all values do not exceed; NaN if no value was counted.

    `counts` has one more member than `bounds`, for what is beyond the last of them, of which that bound is said.
    """
    num_values = sum(counts)
    if not num_values:
        return NOTHING
    rank, seen = share * num_values, 0
    for index, count in enumerate(counts[: len(bounds)]):
        if count and seen + count >= rank:
            low = bounds[index - 1] if index else 0.0
            return low + (bounds[index] - low) * max(0.0, rank - seen) / count
        seen += count
    return bounds[-1]


def _risen(now: Sequence[int], before: Sequence[int]) -> list[int]:
    return [count - earlier for count, earlier in zip(now, before, strict=True)]


def _shown(value: float) -> float | None:
    """Returns the figure with four digits, which is more than a chart shows."""
    return None if math.isnan(value) else float(f"{value:.4g}")
