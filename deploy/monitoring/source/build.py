"""Writes the rules, their tests, the dashboards and the runbook: `python -m deploy.monitoring.source.build [--check]`.

With --check nothing is written; the exit status is 1 if a file is not what would be written.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from deploy.monitoring.source import alerts, parts
from deploy.monitoring.source.cases import CASES, RECORDED
from deploy.monitoring.source.dashboards import DASHBOARDS
from deploy.monitoring.source.model import MINUTE, TEN_MINUTES, Group, test_of_recorded, tests_of
from deploy.monitoring.source.recording import recorded

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "deploy" / "monitoring"
PACKAGED = ROOT / "deploy" / "kubernetes" / "components" / "monitoring"
GROUPS = (
    Group("tandem-recorded", records=recorded()),
    Group("tandem-requests", alerts.ALERTS),
    Group("tandem-gateways", parts.GATEWAYS),
    Group("tandem-workers", parts.WORKERS),
    Group("tandem-handoffs", parts.HANDOFFS),
    Group("tandem-store", parts.STORE),
)
ALERTS = tuple(alert for group in GROUPS for alert in group.alerts)
_WRITTEN = "Written by `make monitoring` from deploy/monitoring/source; edit that."


def files() -> dict[Path, str]:
    """Returns the text of each file that is made, by its path."""
    rules = {"groups": [group.rules() for group in GROUPS]}
    return {
        FOLDER / "rules.yml": _yaml(rules),
        PACKAGED / "rules.yaml": _yaml(
            {
                "apiVersion": "monitoring.coreos.com/v1",
                "kind": "PrometheusRule",
                "metadata": {"name": "tandem"},
                "spec": rules,
            }
        ),
        FOLDER / "rules_test.yml": _tests(MINUTE),
        FOLDER / "rules_of_days_test.yml": _tests(TEN_MINUTES),
        ROOT / "docs" / "runbook.md": _runbook(),
        **{
            FOLDER / "dashboards" / f"{board['uid']}.json": json.dumps(board, indent=1, ensure_ascii=False) + "\n"
            for board in DASHBOARDS
        },
    }


def _tests(step_minutes: int) -> str:
    """Returns promtool's tests of the alerts with series of these steps; those of days take long in single minutes."""
    tests = [test for alert in ALERTS for test in tests_of(alert, CASES[alert.name], step_minutes)]
    if step_minutes == MINUTE:
        tests += [test_of_recorded(name, case) for name, case in RECORDED.items()]
    return _yaml(
        {
            "rule_files": ["rules.yml"],
            "evaluation_interval": f"{step_minutes}m",
            # Without it promtool evaluates the groups in any order, and alerts see a recorded series a step later.
            "group_eval_order": [group.name for group in GROUPS],
            "tests": tests,
        }
    )


def _yaml(content: dict[str, Any]) -> str:
    return f"# {_WRITTEN}\n{yaml.safe_dump(content, sort_keys=False, width=140, allow_unicode=True)}"


def _runbook() -> str:
    lines = [
        "# Runbook",
        "",
        "What each alert of [deploy/monitoring](../deploy/monitoring/README.md) means, what to look at, what to do.",
        f"{_WRITTEN}",
    ]
    for group in GROUPS:
        for alert in group.alerts:
            lines += [
                "",
                f"## {alert.name}",
                "",
                f"*{alert.severity}*, after {alert.for_}: `{alert.expr}`",
                "",
                f"- **It means**: {alert.meaning}",
                f"- **Look at**: {alert.look}",
                f"- **Do**: {alert.action}",
            ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Writes what is stale, or names it; returns the exit status."""
    wanted = files()
    stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text() != text]
    stale += [path for path in (FOLDER / "dashboards").glob("*.json") if path not in wanted]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not what `make monitoring` writes")
        return int(bool(stale))
    (FOLDER / "dashboards").mkdir(exist_ok=True)
    for path in stale:
        if path in wanted:
            path.write_text(wanted[path])
        else:
            path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
