"""The rules, dashboards, and runbook agree with each other, with the product's metrics, and with its limits."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from gateway.observability.metrics import SERVER_ERRORS
from gateway.topology.trouble_watch import CERTIFICATE_DAYS, SLOW_REDIS_S
from gateway.topology.troubles import KINDS
from services.runtime.breaker import CircuitState
from services.scheduling.entry import ServiceClass
from services.scheduling.gpu_judgement import GpuLimits, GpuState
from tests.monitoring.deployed_files import (
    ALERTS,
    DASHBOARDS,
    FOLDER,
    GROUPS,
    RECORDED,
    TEST_FILES,
    firing,
    panel_queries,
)

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "metrics.md"
PACKAGED = ROOT / "deploy" / "kubernetes" / "components" / "monitoring" / "rules.yaml"
OF_TARGETS = {"instance", "job", "le", "role", "model"}
"""Labels that targets have, and those of histograms."""
OF_GATEWAY = 'worker=""'
"""Selects a gateway's series of a name that workers export too."""
RECORDED_METRICS = ROOT / "tests" / "monitoring" / "recorded.yml"
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is in Debian's prometheus")

EXPRS = {alert["alert"]: alert["expr"] for alert in ALERTS}
LINES = {
    "Errors of the server": "TandemErrorBudgetBurn3d",
    "Share of failed requests": "TandemErrorBudgetBurn3d",
    "Time to first token": "TandemTimeToFirstTokenHigh",
    "Time of a token": "TandemInterTokenLatencyHigh",
    "Queue": "TandemQueueLong",
    "Answers now": "TandemQueueLong",
    "Prompt tokens found in a cache": "TandemCacheHitsCollapsed",
    "Utilisation": "TandemWorkersSaturated",
    "Utilisation of its workers": "TandemWorkersSaturated",
    "KV pages in use": "TandemKvNearlyFull",
    "Gateways' event loops": "TandemGatewayBusy",
    "Redis": "TandemRedisSlow",
    "GPU: temperature": "TandemGpuInTrouble",
}
"""Panels whose last line is the limit of an alert."""


def documented() -> dict[str, set[str]]:
    """The labels of each metric of gateways and workers."""
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^\| `([\w:]+)` \| \w+ \| ([\w, ]*)\|", PAGE.read_text(), re.MULTILINE):
        found.setdefault(name, set()).update(filter(None, re.split(r"[, ]+", labels)))
    return found


def expressions() -> list[str]:
    return [*(query.expr for query in panel_queries()), *EXPRS.values(), *RECORDED.values()]


def panels() -> Iterator[dict[str, Any]]:
    for board in DASHBOARDS:
        yield from board["panels"]


def alternatives(expr: str, label: str) -> set[str]:
    (found,) = set(re.findall(rf'\b{label}=~"([^"]*)"', expr))
    return set(found.split("|"))


def test_every_series_that_is_read_exists() -> None:
    known = documented()
    assert len(known) > 80
    for expr in expressions():
        for name in re.findall(r"\b(?:tandem|process|vllm)[_:][\w:]+", re.sub(r'"[^"]*"', "", expr)):
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            assert name in RECORDED or name in known or base in known, f"{name} in {expr}"


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


def test_every_alert_is_tested_and_has_the_labels_that_its_summary_shows() -> None:
    fired = [labels for name in TEST_FILES for labels in firing(yaml.safe_load((FOLDER / name).read_text()))]
    assert len(EXPRS) == len(ALERTS) >= 35
    assert {labels["alertname"] for labels in fired} == EXPRS.keys()
    for alert in ALERTS:
        name, texts = alert["alert"], alert["annotations"]
        assert alert["labels"].keys() == {"severity"}, name
        assert alert["labels"]["severity"] in ("critical", "warning", "info"), name
        assert texts.keys() == {"summary", "description", "runbook_url"}, name
        assert texts["description"].endswith("."), name
        assert texts["runbook_url"] == f"docs/runbook.md#{name.lower()}"
        shown = set(re.findall(r"\$labels\.(\w+)", texts["summary"]))
        assert any(shown <= labels.keys() for labels in fired if labels["alertname"] == name), name


def test_values_of_series_are_text() -> None:
    for name in TEST_FILES:
        for test in yaml.safe_load((FOLDER / name).read_text())["tests"]:
            for series in test["input_series"]:
                assert isinstance(series["values"], str), series


def test_the_runbook_has_a_section_for_each_alert() -> None:
    sections = re.split(r"^## ", (ROOT / "docs" / "runbook.md").read_text(), flags=re.MULTILINE)[1:]
    assert [section.split("\n")[0] for section in sections] == list(EXPRS)
    for section in sections:
        assert ("- **Look at**: " in section and "- **Do**" in section) or "\nSee [Tandem" in section, section


def test_the_rules_for_kubernetes_are_the_same() -> None:
    packaged = yaml.safe_load(PACKAGED.read_text())
    assert packaged["spec"] == yaml.safe_load((FOLDER / "rules.yml").read_text()), "run make monitoring"


def test_the_rules_have_the_limits_and_names_of_the_product() -> None:
    assert EXPRS["TandemRedisSlow"].endswith(f"> {SLOW_REDIS_S:g}")
    assert f"< {CERTIFICATE_DAYS} * 86400" in EXPRS["TandemCertificateEndsSoon"]
    # The fixed limit comes after the worker's own verdict, and before the GPU slows down.
    (celsius,) = re.findall(r"celsius\) > (\d+)", EXPRS["TandemGpuInTrouble"])
    limits = GpuLimits()
    assert limits.default_slowdown_c - limits.hot_margin_c < int(celsius) < limits.default_slowdown_c
    assert alternatives(EXPRS["TandemGpuInTrouble"], "state") == {state.value for state in GpuState} - {"ok"}
    assert alternatives(EXPRS["TandemWorkerFenced"], "state") == {*get_args(CircuitState)} - {"closed"}
    assert alternatives(EXPRS["TandemTrouble"], "kind") < {*KINDS}
    classes = {one.name.lower() for one in ServiceClass} - {"low", "batch"}
    for name, expr in RECORDED.items():
        if "service_class" in expr:
            assert alternatives(expr, "service_class") == classes, name
        if name.startswith("tandem:request_errors:"):
            assert alternatives(expr, "code") == {*SERVER_ERRORS}, name


def test_panels_draw_the_limits_of_the_alerts() -> None:
    drawn = set()
    for panel in panels():
        if alert := LINES.get(panel["title"]):
            line = panel["fieldConfig"]["defaults"]["thresholds"]["steps"][-1]["value"]
            assert f"{line:g}" in re.findall(r"[\d.]+$|[\d.]+(?= and)", EXPRS[alert]), panel["title"]
            drawn.add(panel["title"])
    assert drawn == LINES.keys()


def test_panels_say_what_they_show_in_which_unit() -> None:
    for panel in panels():
        assert panel["targets"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        about, found, why = panel["description"].partition(" May be empty: ")
        assert about.endswith("."), panel["title"]
        assert not found or why.endswith("."), panel["title"]


def test_panels_do_not_overlap() -> None:
    for board in DASHBOARDS:
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
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


def test_dashboards_have_one_format_and_know_their_variables() -> None:
    paths = sorted((FOLDER / "dashboards").glob("*.json"))
    kustomization = (FOLDER / "kustomization.yaml").read_text()
    for path, board in zip(paths, DASHBOARDS, strict=True):
        assert path.read_text() == json.dumps(board, indent=1, ensure_ascii=False) + "\n", path.name
        assert path.stem == board["uid"]
        assert f"- dashboards/{path.name}\n" in kustomization
        names = {variable["name"] for variable in board["templating"]["list"]}
        asked = set(re.findall(r"\$(\w+)", json.dumps(board["panels"]))) - {"__rate_interval"}
        assert asked <= names, path.name


def test_the_example_silences_alerts_that_exist() -> None:
    text = (FOLDER / "alertmanager.yml").read_text()
    for wanted in re.findall(r'alertname(?:=|!=)"([^"]+)"', text):
        assert wanted in EXPRS
    for pattern in re.findall(r'alertname=~"([^"]+)"', text):
        for part in re.sub(r"\(([^)]*)\)", lambda found: f"({found[1].replace('|', '/')})", pattern).split("|"):
            assert any(re.fullmatch(part.replace("/", "|"), name) for name in EXPRS), part


@needs_promtool
def test_promtool_reads_the_configuration_and_the_rules() -> None:
    subprocess.run(["promtool", "check", "config", "prometheus.yml"], cwd=FOLDER, check=True)


@needs_promtool
def test_every_query_of_the_dashboards_parses(tmp_path: Path) -> None:
    rules = [{"record": f"query:{number}", "expr": query.expr} for number, query in enumerate(panel_queries())]
    assert len(rules) > 75
    (tmp_path / "queries.yml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    subprocess.run(["promtool", "check", "rules", "queries.yml"], cwd=tmp_path, check=True)


@needs_promtool
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", TEST_FILES)
def test_every_alert_fires_in_time_and_only_then(name: str) -> None:
    subprocess.run(["promtool", "test", "rules", name], cwd=FOLDER, check=True)


@needs_promtool
@pytest.mark.timeout(300)
def test_panels_show_recorded_metrics_of_a_sound_cluster_and_no_alert_fires(tmp_path: Path) -> None:
    filled = [query.expr for query in panel_queries() if not query.may_be_empty]
    assert len(filled) > 60
    shows = [check(f"count(({expr}) > -Inf) > bool 0", [{"labels": "{}", "value": 1}]) for expr in filled]
    series = yaml.safe_load(RECORDED_METRICS.read_text())
    test = {"interval": "1m", "input_series": series, "promql_expr_test": [*shows, check("ALERTS", [])]}
    names = [group["name"] for group in GROUPS]
    document = {"rule_files": [str(FOLDER / "rules.yml")], "group_eval_order": names, "tests": [test]}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(document | {"evaluation_interval": "1m"}))
    subprocess.run(["promtool", "test", "rules", "test.yml"], cwd=tmp_path, check=True)


def check(expr: str, samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"expr": expr, "eval_time": "20m", "exp_samples": samples}
