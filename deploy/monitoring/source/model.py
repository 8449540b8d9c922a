"""What an alert and a recording rule are, and Prometheus' files of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

RUNBOOK_URL = "docs/runbook.md"
"""What the alerts' annotation `runbook_url` begins with: the page in this repository. An installation puts the address
of its own copy there (docs/kubernetes.md, deploy/monitoring/README.md)."""

Series = Mapping[str, str]
"""Series of a test and their values, as promtool writes them: `0x10`, `0+5x20`."""
MINUTE, TEN_MINUTES = 1, 10


@dataclass(frozen=True, kw_only=True)
class Case:
    """What the series must be for an alert to fire `at` minutes after their beginning, and not one step sooner.

    With the series of `quiet` it never fires within `until` minutes. `labels` are some that the firing alert must have;
    `step_minutes` is the time between two values.
    """

    fires: Series
    quiet: Series
    at: int
    until: int = 30
    step_minutes: int = MINUTE
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RecordedCase:
    """Series, and the samples that a rule has recorded of them after five minutes, by their labels."""

    series: Series
    samples: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One alert: `expr` has held for `for_`. `meaning`, `look` and `action` are its entry in the runbook."""

    name: str
    expr: str
    for_: str
    severity: Literal["critical", "warning", "info"]
    summary: str
    meaning: str
    look: str
    action: str

    def rule(self) -> dict[str, Any]:
        """Returns the alert as Prometheus reads it."""
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.for_,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": f"{self.meaning} Look at: {self.look} Do: {self.action}",
                "runbook_url": f"{RUNBOOK_URL}#{self.name.lower()}",
            },
        }


@dataclass(frozen=True)
class Group:
    """Rules that are evaluated together, one after the other."""

    name: str
    alerts: Sequence[Alert] = ()
    records: Mapping[str, str] = field(default_factory=dict)

    def rules(self) -> dict[str, Any]:
        """Returns the group as Prometheus reads it."""
        recorded = [{"record": name, "expr": expr} for name, expr in self.records.items()]
        return {"name": self.name, "rules": [*recorded, *(alert.rule() for alert in self.alerts)]}


def tests_of(alert: Alert, cases: Sequence[Case], step_minutes: int) -> list[dict[str, Any]]:
    """Returns promtool's tests of an alert in steps of some minutes: that it fires in time, and that it does not."""
    found = []
    for number, case in enumerate(cases, 1):
        if case.step_minutes != step_minutes:
            continue
        firing = f'ALERTS{{alertname="{alert.name}",alertstate="firing"}}'
        labels = {"severity": alert.severity, **case.labels}
        selector = ",".join(f'{name}="{value}"' for name, value in labels.items())
        # Of all that fires exactly one has the labels.
        one = f"count({firing[:-1]},{selector}}}) == count({firing}) == 1"
        too_soon = [_asked(f"count({firing})", case.at - step_minutes, {})] if case.at >= step_minutes else []
        in_time = [*too_soon, _asked(one, case.at, {"{}": 1})]
        never = [_asked(f"count(count_over_time({firing}[{case.until + 1}m]))", case.until, {})]
        for what, series, asked in (("fires", case.fires, in_time), ("does not fire", case.quiet, never)):
            found.append(_test(f"{alert.name} {number} {what}", series, asked, step_minutes))
    return found


def test_of_recorded(name: str, case: RecordedCase) -> dict[str, Any]:
    """Returns promtool's test of a recorded series."""
    samples = {f"{name}{labels}": value for labels, value in case.samples.items()}
    return _test(name, case.series, [_asked(name, 5, samples)], MINUTE)


def _test(name: str, series: Series, asked: list[dict[str, Any]], step_minutes: int) -> dict[str, Any]:
    return {
        "name": name,
        "interval": f"{step_minutes}m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": asked,
    }


def _asked(expr: str, minute: int, samples: Mapping[str, float]) -> dict[str, Any]:
    expected = [{"labels": labels, "value": value} for labels, value in samples.items()]
    return {"expr": expr, "eval_time": f"{minute}m", "exp_samples": expected}
