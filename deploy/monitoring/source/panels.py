"""Grafana's JSON for panels, variables and dashboards: only what the dashboards here use."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SOURCE = {"type": "prometheus", "uid": "$datasource"}
GRID_WIDTH, PANEL_WIDTH, PANEL_HEIGHT = 24, 8, 8
SCHEMA_VERSION = 39


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel. `queries` are expressions by legend; `steps` are thresholds: the colour from each value on.

    `may_be_empty` says why a healthy cluster may have nothing to show; empty: it must not be empty.
    `has_exemplars`: its points lead to traces.
    """

    title: str
    about: str
    queries: Mapping[str, str]
    unit: str = "short"
    steps: Sequence[tuple[float, str]] = ()
    kind: str = "timeseries"
    may_be_empty: str = ""
    has_exemplars: bool = False

    def json(self, number: int) -> dict[str, Any]:
        """Returns the panel as Grafana reads it, at the place with this number."""
        first = "red" if self.steps and self.steps[0][1] == "green" and self.kind == "floor" else "green"
        thresholds = [{"color": first, "value": None}, *({"color": c, "value": v} for v, c in self.steps)]
        custom = {"thresholdsStyle": {"mode": "line" if self.steps else "off"}, "fillOpacity": 8, "showPoints": "never"}
        kind = "timeseries" if self.kind == "floor" else self.kind
        return {
            "id": number + 1,
            "title": self.title,
            "description": self.about + (f" May be empty: {self.may_be_empty}" if self.may_be_empty else ""),
            "type": kind,
            "datasource": SOURCE,
            "gridPos": {
                "x": number * PANEL_WIDTH % GRID_WIDTH,
                "y": number * PANEL_WIDTH // GRID_WIDTH * PANEL_HEIGHT,
                "w": PANEL_WIDTH,
                "h": PANEL_HEIGHT,
            },
            "fieldConfig": {
                "defaults": {
                    "unit": self.unit,
                    "min": 0,
                    "thresholds": {"mode": "absolute", "steps": thresholds},
                    **({"custom": custom} if kind == "timeseries" else {}),
                },
                "overrides": [],
            },
            "options": {"tooltip": {"mode": "multi"}} if kind == "timeseries" else {},
            "targets": [
                {
                    "refId": chr(ord("A") + place),
                    "datasource": SOURCE,
                    "expr": expr,
                    "legendFormat": legend,
                    "exemplar": self.has_exemplars,
                }
                for place, (legend, expr) in enumerate(self.queries.items())
            ],
        }


def choice(name: str, query: str, *, label: str) -> dict[str, Any]:
    """Returns a variable whose values a query gives; all of them at first."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def number(name: str, value: str, *, label: str) -> dict[str, Any]:
    """Returns a variable that a reader types in."""
    return {
        "name": name,
        "label": label,
        "type": "textbox",
        "query": value,
        "current": {"text": value, "value": value},
        "options": [{"text": value, "value": value, "selected": True}],
    }


def dashboard(
    uid: str, title: str, about: str, panels: Sequence[Panel], variables: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Returns a dashboard as Grafana reads it."""
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "refresh": 1}
    return {
        "uid": uid,
        "title": title,
        "description": about,
        "tags": ["tandem"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [{"title": "Tandem", "type": "dashboards", "tags": ["tandem"], "asDropdown": True, "keepTime": True}],
        "templating": {"list": [source, *variables]},
        "panels": [panel.json(place) for place, panel in enumerate(panels)],
    }
