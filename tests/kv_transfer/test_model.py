"""The model of the handoff holds with its fences and breaks without one. `make check-model` takes all of them out."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import HANG_LIMIT_S

RUNNER = Path(__file__).resolve().parents[2] / "tools" / "check_model.py"


def run(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = None if path is None else {"PATH": path}
    return subprocess.run(
        [sys.executable, str(RUNNER), *arguments],
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT_S,
        check=False,
        env=environment,
    )


@pytest.mark.skipif(
    shutil.which("spin") is None or shutil.which("gcc") is None, reason="needs spin and gcc: apt-get install spin gcc"
)
@pytest.mark.parametrize("whole", ["reliable", pytest.param("two_pages", marks=pytest.mark.slow)])
def test_the_model_holds_with_its_fences_and_breaks_without_one(whole: str) -> None:
    done = run(whole, "NO_REVOKE")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split()[:3] for line in done.stdout.splitlines()]
    assert [whole, "holds", "holds"] in rows
    assert ["NO_REVOKE", "breaks", "breaks"] in rows


def test_each_fence_that_can_be_taken_out_is_in_the_model() -> None:
    """Also where there is no spin, so that a model that was moved or renamed is missed."""
    model = (RUNNER.parents[1] / "spec" / "handoff.pml").read_text()
    assert '"spec" / "handoff.pml"' in RUNNER.read_text()
    fences = [name for name in run("--list").stdout.split() if name.startswith("NO_")]
    assert len(fences) > 5
    assert [name for name in fences if name not in model] == []


def test_without_spin_it_says_how_to_get_it(tmp_path: Path) -> None:
    done = run(path=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == "The model needs spin, which is not here: apt-get install spin\n"


def test_a_name_that_is_no_variant_is_refused() -> None:
    assert run("NO_SUCH_FENCE").returncode == 1
