"""Rules, dashboards and the runbook are what their source writes, and ask for series that exist; promtool agrees."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.monitoring.source.build import ALERTS, FOLDER, GROUPS, files
from deploy.monitoring.source.cases import CASES
from deploy.monitoring.source.dashboards import DASHBOARDS
from deploy.monitoring.source.recording import OF_GATEWAY, recorded

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
OF_TARGETS = {"instance", "job", "le", "role", "model"}
"""Labels that targets have, and those of histograms."""


def documented() -> dict[str, set[str]]:
    """The labels of each metric of gateways and workers."""
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^\| `([\w:]+)` \| \w+ \| ([\w, ]*)\|", PAGE.read_text(), re.MULTILINE):
        found.setdefault(name, set()).update(filter(None, re.split(r"[, ]+", labels)))
    return found


def expressions() -> list[str]:
    panels = [panel for board in DASHBOARDS for panel in board["panels"]]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    return [*asked, *(alert.expr for alert in ALERTS), *recorded().values()]


def test_committed_files_are_what_the_source_writes() -> None:
    wanted = files()
    stale = [path.name for path, text in wanted.items() if path.read_text() != text]
    assert stale == [], "run make monitoring"
    assert {path for path in wanted if path.suffix == ".json"} == set((FOLDER / "dashboards").glob("*.json"))


def test_every_series_that_is_asked_for_exists() -> None:
    known = documented()
    assert len(known) > 80
    for expr in expressions():
        for name in re.findall(r"\b(?:tandem|process|vllm)[_:][\w:]+", re.sub(r'"[^"]*"', "", expr)):
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            assert name in recorded() or name in known or base in known, f"{name} in {expr}"


def test_every_label_that_is_selected_exists() -> None:
    known = documented()
    num_checked = 0
    for expr in expressions():
        for name, selector in re.findall(r"\b((?:tandem|process)_\w+)\{([^}]*)\}", expr):
            labels = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", selector.replace(OF_GATEWAY, "")))
            base = name if name in known else re.sub(r"_(bucket|sum|count)$", "", name)
            assert labels <= known[base] | OF_TARGETS, f"{name}{{{selector}}}"
            num_checked += 1
    assert num_checked > 40


def test_every_alert_can_be_acted_on_and_is_tested() -> None:
    assert len(ALERTS) == len({alert.name for alert in ALERTS}) >= 35
    assert CASES.keys() == {alert.name for alert in ALERTS}
    for alert in ALERTS:
        assert CASES[alert.name], f"{alert.name} has no test"
        for words in (alert.meaning, alert.look, alert.action):
            assert words.endswith("."), f"{alert.name}: {words!r}"
        assert alert.rule()["annotations"]["runbook_url"].endswith(f"#{alert.name.lower()}")


def test_a_panel_may_be_empty_only_for_a_reason() -> None:
    for board in DASHBOARDS:
        for panel in board["panels"]:
            assert panel["targets"], panel["title"]
            _, found, why = panel["description"].partition(" May be empty: ")
            assert not found or why.endswith("."), panel["title"]


def test_panels_do_not_overlap() -> None:
    for board in DASHBOARDS:
        taken = set()
        for panel in board["panels"]:
            place = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not taken & cells, f"{board['uid']}: {panel['title']}"
            assert place["x"] + place["w"] <= 24
            taken |= cells


def test_dashboards_know_their_variables() -> None:
    for path in (FOLDER / "dashboards").glob("*.json"):
        board = json.loads(path.read_text())
        names = {variable["name"] for variable in board["templating"]["list"]}
        asked = set(re.findall(r"\$(\w+)", json.dumps(board["panels"]))) - {"__rate_interval"}
        assert asked <= names, path.name


def test_the_example_silences_alerts_that_exist() -> None:
    text = (FOLDER / "alertmanager.yml").read_text()
    names = [alert.name for alert in ALERTS]
    for wanted in re.findall(r'alertname(?:=|!=)"([^"]+)"', text):
        assert wanted in names
    for pattern in re.findall(r'alertname=~"([^"]+)"', text):
        for part in re.sub(r"\(([^)]*)\)", lambda found: f"({found[1].replace('|', '/')})", pattern).split("|"):
            assert any(re.fullmatch(part.replace("/", "|"), name) for name in names), part


def test_groups_are_written_in_order() -> None:
    written = yaml.safe_load((FOLDER / "rules.yml").read_text())
    assert [group["name"] for group in written["groups"]] == [group.name for group in GROUPS]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is in Debian's package prometheus")
def test_promtool_reads_the_configuration_and_the_rules() -> None:
    subprocess.run(["promtool", "check", "config", "prometheus.yml"], cwd=FOLDER, check=True)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is in Debian's package prometheus")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["rules_test.yml", "rules_of_days_test.yml"])
def test_every_alert_fires_and_does_not(name: str) -> None:
    subprocess.run(["promtool", "test", "rules", name], cwd=FOLDER, check=True)
