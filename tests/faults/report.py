"""What a case found, and the table of all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Row:
    """One case. Gaps are in seconds, each with the limit that it is compared with and whether it held."""

    fault: str
    trials: int = 0
    answers: int = 0
    lost: int = 0
    different: int = 0
    gaps_s: list[float] = field(default_factory=list)
    within: list[bool] = field(default_factory=list)
    """Gap at most 150 ms + 1.5 x (prefill + what a first token waits beside the other streams) + 2 steps."""
    within_alone: list[bool] = field(default_factory=list)
    """Gap at most as above, without that wait."""
    leaks: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What else must not be."""
    figures: dict[str, Any] = field(default_factory=dict)
    skipped: str = ""

    @property
    def is_good(self) -> bool:
        return not (self.lost or self.different or self.leaks or self.problems)

    def to_json(self) -> dict[str, Any]:
        """All of it, gaps as percentiles in milliseconds."""
        values = asdict(self)
        del values["gaps_s"], values["within"], values["within_alone"]
        values |= {
            "is_good": self.is_good,
            "num_gaps": len(self.gaps_s),
            "gap_p50_ms": round(percentile(self.gaps_s, 50) * 1000, 1),
            "gap_p99_ms": round(percentile(self.gaps_s, 99) * 1000, 1),
            "within_pct": share(self.within),
            "within_alone_pct": share(self.within_alone),
        }
        return values


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(len(ordered) * percent / 100) - 1))]


def share(held: Sequence[bool]) -> float:
    """Percent; NaN of nothing."""
    return round(100 * sum(held) / len(held), 1) if held else math.nan


def table(rows: Sequence[Row]) -> str:
    """All rows as text, problems below."""
    head = ("fault", "trials", "answers", "lost", "different", "gap p50", "gap p99", "within %", "alone %", "leaks", "")
    lines = [head]
    for row in rows:
        if row.skipped:
            lines.append((row.fault, "-", "", "", "", "", "", "", "", "", f"skipped: {row.skipped}"))
            continue
        lines.append(
            (
                row.fault,
                str(row.trials),
                str(row.answers),
                str(row.lost),
                str(row.different),
                _ms(percentile(row.gaps_s, 50)),
                _ms(percentile(row.gaps_s, 99)),
                _number(share(row.within)),
                _number(share(row.within_alone)),
                str(len(row.leaks)),
                "ok" if row.is_good else "FAILED",
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head) - 1)]
    text = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]) for line in lines
    ]
    for row in rows:
        text += [f"{row.fault}: {name} = {value}" for name, value in row.figures.items()]
        text += [f"{row.fault}: PROBLEM {problem}" for problem in (*row.problems[:10], *row.leaks[:10])]
    return "\n".join(text)


def _ms(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1000:.0f} ms"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:g}"
