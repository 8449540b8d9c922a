"""The rules, the tests of rules, and the dashboards in deploy/monitoring, as data."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

Rule = dict[str, Any]

FOLDER = Path(__file__).parents[2] / "deploy" / "monitoring"
TEST_FILES = ("rules_test.yml", "rules_of_days_test.yml")
NAME = r"[A-Za-z_:][\w:]*"
VARIABLES = {"$gpu_price": "2.50", "$model": ".*", "$worker": ".*", "$tenant": ".*"}
"""Values of the dashboards' variables: all models, workers, and tenants."""

GROUPS: Sequence[dict[str, Any]] = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"]
RULES: Sequence[Rule] = [rule for group in GROUPS for rule in group["rules"]]
ALERTS: Sequence[Rule] = [rule for rule in RULES if "alert" in rule]
RECORDED: dict[str, str] = {rule["record"]: rule["expr"] for rule in RULES if "record" in rule}
DASHBOARDS: Sequence[dict[str, Any]] = [
    json.loads(path.read_text()) for path in sorted((FOLDER / "dashboards").glob("*.json"))
]


class Query(NamedTuple):
    """A query of a panel. `may_be_empty` is the reason why a sound cluster may have no data for it, or empty."""

    panel: str
    may_be_empty: str
    expr: str


def panel_queries(rate_interval: str = "5m") -> Iterator[Query]:
    """Yields each query of each dashboard, with values for the variables."""
    for board in DASHBOARDS:
        for panel in board["panels"]:
            _, _, reason = panel["description"].partition(" May be empty: ")
            for target in panel["targets"]:
                expr = target["expr"].replace("$__rate_interval", rate_interval)
                for name, value in VARIABLES.items():
                    expr = expr.replace(name, value)
                yield Query(f"{board['title']} / {panel['title']}", reason, expr)


def needed(expr: str) -> set[str]:
    """Returns the recorded series that an expression reads, directly or through other recorded series."""
    found = set[str]()
    names = re.findall(NAME, expr)
    while names:
        name = names.pop()
        if name in RECORDED and name not in found:
            found.add(name)
            names += re.findall(NAME, RECORDED[name])
    return found


def firing(document: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Yields the labels of each alert that a file of tests expects to fire."""
    for test in document["tests"]:
        for check in test["promql_expr_test"]:
            for sample in check["exp_samples"]:
                labels = dict(re.findall(r'(\w+)="([^"]*)"', sample["labels"]))
                if "alertname" in labels:
                    yield labels


def tests_of(file_name: str, alerts: set[str], *, with_records: bool) -> dict[str, Any]:
    """Returns the part of a file of tests that expects these alerts, and the tests of recorded series if requested."""
    document = yaml.safe_load((FOLDER / file_name).read_text())
    tests = []
    for test in document["tests"]:
        checks = []
        for check in test["promql_expr_test"]:
            samples = [one for one in check["exp_samples"] if _alert_of(one) in alerts]
            if samples:
                checks.append(check | {"exp_samples": samples})
            elif with_records and "ALERTS" not in check["expr"]:
                checks.append(check)
        if checks:
            tests.append(test | {"promql_expr_test": checks})
    return document | {"tests": tests}


def _alert_of(sample: dict[str, Any]) -> str:
    found = re.search(r'alertname="(\w+)"', sample["labels"])
    return found[1] if found else ""
