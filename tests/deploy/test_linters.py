"""What linters say of deploy/: of YAML, Containerfiles and shell scripts; and that they say anything."""

import subprocess
from pathlib import Path

import pytest

from tests.deploy.manifests import DEPLOY, ROOT, TOOLS

pytestmark = pytest.mark.deploy

UNRESTRICTED = ("DL3008", "DL3018")
"""Rules of hadolint: Debian keeps one version of a package, so that a pinned one is gone at its next update."""


def lint(tool: str, *arguments: str | Path) -> list[str]:
    # Relative names: .yamllint's are.
    command = [str(TOOLS / "bin" / tool), *(str(one).removeprefix(f"{ROOT}/") for one in arguments)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = (ran.stdout + ran.stderr).splitlines()
    assert bool(ran.returncode) == bool(said), f"{tool} ended with {ran.returncode}: {said}"
    return said


def files(*patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in DEPLOY.rglob(pattern))


def scripts() -> list[Path]:
    """The shell scripts of deploy/, and the one that installs these tools."""
    found = [path for path in files("*") if path.is_file() and path.read_bytes().startswith(b"#!/usr/bin/env bash")]
    return [*found, *files("*.sh"), ROOT / "tools" / "deploy_tools.sh"]


def test_yaml() -> None:
    yaml = files("*.yaml", "*.yml")
    assert len(yaml) > 40
    assert lint("yamllint", "--strict", *yaml) == []


def test_containerfiles() -> None:
    found = files("Containerfile")
    if not found:
        pytest.skip("deploy/ has no Containerfile")
    assert lint("hadolint", *(f"--ignore={rule}" for rule in UNRESTRICTED), *found) == []


def test_shell_scripts() -> None:
    assert lint("shellcheck", "--external-sources", *scripts()) == []


def test_each_linter_finds_something(tmp_path: Path) -> None:
    broken = {
        "yamllint": ("broken.yaml", "a: 1\na: 2\n", "duplication of key"),
        "hadolint": ("Containerfile", "FROM python:latest\n", "DL3007"),
        "shellcheck": ("broken.sh", "#!/usr/bin/env bash\nrm -rf $1/*\n", "SC2086"),
    }
    for tool, (name, text, said) in broken.items():
        (tmp_path / name).write_text(text)
        assert said in "\n".join(lint(tool, tmp_path / name))
