"""A report as one HTML file: tables and SVG drawn here, no script, nothing loaded, readable in light and in dark."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planning.simulator import report
from planning.simulator.cluster import Run

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 44
STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --paper: #ffffff; --faint: #d5dae2; --soft: #5b6675;
  --c0: #0b6bcb; --c1: #c2410c; --c2: #15803d; --c3: #9333ea; --c4: #a16207; --c5: #be185d; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --paper: #14181f; --faint: #363e4b; --soft: #9aa5b5;
  --c0: #60a5fa; --c1: #fb923c; --c2: #4ade80; --c3: #c084fc; --c4: #facc15; --c5: #f472b6; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1360px;
  margin: 2em auto; padding: 0 1.2em; }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums; }
td, th { padding: .25em .8em; text-align: right; border-bottom: 1px solid var(--faint); }
td:first-child, th:first-child { text-align: left; }
figure { display: inline-block; margin: 0 1em 1.5em 0; vertical-align: top; max-width: 100%; }
figcaption { font-weight: 600; margin-bottom: .3em; }
svg { max-width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 12px; }
.grid { stroke: var(--faint); } .line { fill: none; stroke-width: 1.8; } .mark { stroke-dasharray: 4 4; }
.wide { overflow-x: auto; }
"""


@dataclass(frozen=True, slots=True)
class Curve:
    """A named line through points."""

    name: str
    points: Sequence[tuple[float, float]]


def page(
    parameters: Mapping[str, Any],
    trace: Mapping[str, Any],
    runs: Sequence[Run],
    summaries: Sequence[Mapping[str, Any]],
    hit_rates: Sequence[Mapping[str, Any]],
    *,
    with_paper: bool,
) -> str:
    """The whole file. `hit_rates`: rows of a capacity sweep, maybe none."""
    parts = ["<h1>Replay of ", html.escape(str(trace["name"])), "</h1>"]
    if summaries:
        parts += ["<h2>Policies</h2>", _text_table(report.ladder_table(summaries, with_paper=with_paper))]
        parts += _figures(runs, summaries)
    if hit_rates:
        names = [name for name in hit_rates[0] if name != "capacity"]
        curves = [
            Curve(name, [(row["capacity"], row[name]) for row in hit_rates if row["capacity"] is not None])
            for name in names
        ]
        rows = [["blocks", *names]]
        rows += [
            [str(row["capacity"] or "without bound"), *(f"{row[name]:.4f}" for name in names)] for row in hit_rates
        ]
        parts += ["<h2>Hit rate of one prefix cache</h2>", _table(rows)]
        parts.append(chart("Hit rate by capacity", "blocks", "share of blocks", curves, is_log=True))
    for one in summaries:
        rows = [[name, f"{share:.3f}"] for name, share in one["utilisation"].items()]
        parts += [f"<details><summary>{html.escape(one['policy'])}: utilisation</summary>", _table(rows), "</details>"]
    parts += ["<h2>Parameters</h2>", _table([[name, str(value)] for name, value in {**trace, **parameters}.items()])]
    title = html.escape(f"Replay of {trace['name']}")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def chart(
    title: str,
    x_label: str,
    y_label: str,
    curves: Sequence[Curve],
    *,
    is_log: bool = False,
    mark: float | None = None,
) -> str:
    """`drawing` with its title above it, as part of a page. Empty without points."""
    drawn = drawing(title, x_label, y_label, curves, is_log=is_log, mark=mark)
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{drawn}</figure>" if drawn else ""


def drawing(
    title: str,
    x_label: str,
    y_label: str,
    curves: Sequence[Curve],
    *,
    is_log: bool = False,
    mark: float | None = None,
) -> str:
    """Lines over a common x axis, logarithmic if told, as SVG that needs STYLE; `mark` is a vertical line.

    Empty without points.
    """
    points = [point for curve in curves for point in curve.points if not is_log or point[0] > 0]
    if not points:
        return ""
    x_axis = _Axis(min(x for x, _ in points), max(x for x, _ in points), LEFT, WIDTH - RIGHT, is_log)
    y_axis = _Axis(0.0, max(max(y for _, y in points), 1e-9), HEIGHT - BOTTOM, TOP, False)
    drawn = [_grid(x_axis, y_axis, x_label, y_label)]
    for number, curve in enumerate(curves):
        path = " ".join(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in curve.points if not is_log or x > 0)
        drawn.append(f'<polyline class="line" style="stroke:var(--c{number % 6})" points="{path}"/>')
        x, y = LEFT + 10 + 155 * (number % 4), TOP + 12 + 16 * (number // 4)
        drawn.append(f'<rect x="{x}" y="{y - 8}" width="10" height="10" style="fill:var(--c{number % 6})"/>')
        drawn.append(f'<text x="{x + 14}" y="{y + 1}">{html.escape(curve.name)}</text>')
    if mark is not None and x_axis.low <= mark <= x_axis.high:
        x_mark = x_axis.at(mark)
        drawn.append(f'<line class="grid mark" x1="{x_mark:.1f}" x2="{x_mark:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" aria-label="{html.escape(title)}">'
        f"{''.join(drawn)}</svg>"
    )


def _figures(runs: Sequence[Run], summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    slo = summaries[0]["slo"]
    first_tokens = [Curve(run.policy, report.cdf([report.ttft_s(job) for job in report.answered(run)])) for run in runs]
    later_tokens = []
    busy: dict[str, list[Curve]] = {"prefill": [], "decode": []}
    waiting, prompts = [], []
    for run in runs:
        jobs = [job for job in report.answered(run) if job.num_output_tokens > 1]
        later_tokens.append(Curve(run.policy, report.cdf([report.tpot_s(job) * 1e3 for job in jobs])))
        series = report.series(run)
        for role, means in series["utilisation"].items():
            busy[role].append(Curve(run.policy, _over_time(means, run.bucket_s)))
        waiting.append(Curve(run.policy, _over_time(series["queue"], run.bucket_s)))
        prompts.append(Curve(run.policy, _over_time(series["prompts_in_prefill"], run.bucket_s)))
    share = "share of requests"
    return [
        chart("Time to the first token", "seconds", share, first_tokens, is_log=True, mark=slo["ttft_s"]),
        chart("Time per later token", "milliseconds", share, later_tokens, mark=slo["tpot_s"] * 1e3),
        chart("Prefill workers: busy", "seconds", "share of time", busy["prefill"]),
        chart("Decode workers: busy", "seconds", "share of time", busy["decode"]),
        chart("Prompts waiting or in computation", "seconds", "prompts", prompts),
        chart("Requests waiting at the gateway", "seconds", "requests", waiting),
    ]


def _over_time(means: Sequence[float], bucket_s: float) -> list[tuple[float, float]]:
    return [((bucket + 0.5) * bucket_s, value) for bucket, value in enumerate(means)]


class _Axis:
    """Values from `low` to `high` on pixels from `begin` to `end`."""

    def __init__(self, low: float, high: float, begin: float, end: float, is_log: bool) -> None:
        if high <= low:
            high = low * 2 if low > 0 else low + 1
        self.low, self.high, self._begin, self._end, self._is_log = low, high, begin, end, is_log

    def at(self, value: float) -> float:
        low, high = self.low, self.high
        if self._is_log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return self._begin + (value - low) / (high - low) * (self._end - self._begin)

    def ticks(self) -> list[float]:
        if self._is_log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps = (1,) if last - first > 3 else (1, 2, 5)
            found = [step * 10.0**power for power in range(first, last + 1) for step in steps]
            return [value for value in found if self.low <= value <= self.high]
        raw = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(one * power for one in (1, 2, 5, 10) if one * power >= raw)
        first, last = math.ceil(self.low / step), math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


def _grid(x_axis: _Axis, y_axis: _Axis, x_label: str, y_label: str) -> str:
    drawn = []
    for value in x_axis.ticks():
        x = x_axis.at(value)
        drawn.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        drawn.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{value:g}</text>')
    for value in y_axis.ticks():
        y = y_axis.at(value)
        drawn.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        drawn.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    drawn.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{x_label}</text>')
    drawn.append(f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">{y_label}</text>')
    return "".join(drawn)


def _table(rows: Sequence[Sequence[str]]) -> str:
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table>{body}</table></div>'


def _text_table(text: str) -> str:
    return f'<div class="wide"><pre>{html.escape(text)}</pre></div>'
