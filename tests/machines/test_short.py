"""A short selection of the scenarios; `make test-machines` runs them all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.harness import REPOSITORY
from tests.machines.run import choose
from tests.machines.scenarios import SCENARIOS

TIMEOUT_S = 240


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_machines_that_are_far_and_cut_off_give_the_undisturbed_answers(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    command = [sys.executable, "-m", "tests.machines.run", "--short", f"--json={file}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.stdout.startswith("skipped:"):
        pytest.skip(done.stdout.removeprefix("skipped:").strip())
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    rows = json.loads(file.read_text())
    assert len(rows) == len(choose([], short=True)) >= 3
    assert all(row["answers"] > 10 for row in rows)


def test_scenarios_are_found_by_pattern_and_misspelt_ones_are_named() -> None:
    assert {scenario.name for scenario in choose(["kill *"], short=False)} >= {"kill decode-0", "kill gateway-0"}
    assert len(choose([], short=False)) == len(SCENARIOS)
    with pytest.raises(ValueError, match="'no such'"):
        choose(["no such"], short=False)
