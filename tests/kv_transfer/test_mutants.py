"""The list of mutants fits the receiver's source. `make test-mutants` tries them all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.waiting import HANG_LIMIT_S

TOOL = Path(__file__).resolve().parents[2] / "tools" / "mutate_receiver.py"


def test_every_entry_of_the_lists_is_found_in_the_source() -> None:
    done = subprocess.run(
        [sys.executable, str(TOOL), "--list"], capture_output=True, text=True, timeout=HANG_LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    names = done.stdout.splitlines()
    assert len(names) == len(set(names)) > 150
    for check in ("_fault_of", "_matches", "_commit_when_complete", "Fence.enter", "revoke", "MAX_CHECKSUM_MISMATCHES"):
        assert any(check in name for name in names), check


def test_the_mutants_of_one_check_are_killed() -> None:
    """The program runs, on a copy that has all that the tests import."""
    done = subprocess.run(
        [sys.executable, str(TOOL), "Fence.leave"], capture_output=True, text=True, timeout=HANG_LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 of 5 killed" in done.stdout
