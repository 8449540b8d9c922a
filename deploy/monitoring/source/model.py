"""What an alert and a recording rule are, and Prometheus' files of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

RUNBOOK_URL = "https://tandem.invalid/docs/runbook.md"
"""Where the alerts' annotation `runbook_url` leads; an installation replaces it by its own copy of docs/runbook.md."""

Series = Mapping[str, str]
"""Series of a test and their values, as promtool writes them: `0x10`, `0+5x20`."""
MINUTE, TEN_MINUTES = 1, 10


@dataclass(frozen=True, kw_only=True)
class Case:
    """What the series must be for an alert to fire, and not to fire, `at` minutes after their beginning.

    `labels` are some that the firing alert must have; `step_minutes` is the time between two values.
    """

    fires: Series
    quiet: Series
    at: int = 30
    step_minutes: int = MINUTE
    labels: Mapping[str, str] = field(default_factory=dict)


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
    cases: Sequence[Case]

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


def tests_of(alert: Alert, step_minutes: int) -> list[dict[str, Any]]:
    """Returns promtool's tests of an alert in steps of some minutes: that it fires, and that it does not."""
    found = []
    for number, case in enumerate(alert.cases, 1):
        if case.step_minutes != step_minutes:
            continue
        labels = {"alertname": alert.name, "alertstate": "firing", "severity": alert.severity, **case.labels}
        selector = ",".join(f'{name}="{value}"' for name, value in labels.items())
        for fires, series in ((True, case.fires), (False, case.quiet)):
            expected = [{"labels": "{}", "value": 1}] if fires else []
            found.append(
                {
                    "name": f"{alert.name} {number} {'fires' if fires else 'does not fire'}",
                    "interval": f"{step_minutes}m",
                    "input_series": [{"series": name, "values": values} for name, values in series.items()],
                    "promql_expr_test": [
                        {
                            "expr": f"count(count by (alertname) (ALERTS{{{selector}}}))",
                            "eval_time": f"{case.at}m",
                            "exp_samples": expected,
                        }
                    ],
                }
            )
    return found
