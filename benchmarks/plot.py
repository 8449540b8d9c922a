"""Several charts in one SVG file that any browser and any forge shows; a chart looks as in the simulator's reports."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

from planning.simulator.html_report import HEIGHT, STYLE, WIDTH, Curve, drawing

PER_ROW = 2
TITLE_HEIGHT = 28
STYLE_OF_TITLES = "svg .title { fill: var(--ink); font: 600 15px system-ui, sans-serif; }"


@dataclass(frozen=True)
class Chart:
    """What is drawn: lines over a common axis."""

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]


def svg_file(charts: Sequence[Chart]) -> str:
    """The whole file; charts without points are left out."""
    drawn = [(chart, drawing(chart.title, chart.x_label, chart.y_label, chart.curves)) for chart in charts]
    placed = []
    shown = [(chart, body) for chart, body in drawn if body]
    for number, (chart, body) in enumerate(shown):
        x, y = number % PER_ROW * WIDTH, number // PER_ROW * (HEIGHT + TITLE_HEIGHT)
        placed.append(f'<text class="title" x="{x + 8}" y="{y + 20}">{html.escape(chart.title)}</text>')
        placed.append(body.replace("<svg ", f'<svg x="{x}" y="{y + TITLE_HEIGHT}" height="{HEIGHT}" ', 1))
    width = WIDTH * min(PER_ROW, max(1, len(shown)))
    height = (HEIGHT + TITLE_HEIGHT) * -(-len(shown) // PER_ROW)
    paper = f'<rect width="{width}" height="{height}" style="fill:var(--paper)"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f"<style>{STYLE}{STYLE_OF_TITLES}</style>{paper}{''.join(placed)}</svg>\n"
    )
