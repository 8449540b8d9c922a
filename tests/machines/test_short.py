"""A short selection of the scenarios; `make test-machines` runs them all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.harness import REPOSITORY
from tests.machines.pairs import PAIRS
from tests.machines.run import choose
from tests.machines.scenarios import SCENARIOS

TIMEOUT_S = 240
STARTED = ("tests.machines.network", "tests.faults.nursery", "valkey-server")


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_machines_that_are_far_and_cut_off_give_the_undisturbed_answers(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    command = [sys.executable, "-m", "tests.machines.run", "--short", f"--json={file}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.stdout.startswith("skipped:"):
        pytest.skip(done.stdout.removeprefix("skipped:").strip())
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    rows = json.loads(file.read_text())
    assert len(rows) == len(choose([], short=True)) >= 2
    assert all(row["answers"] > 10 for row in rows)


def test_scenarios_are_found_by_pattern_and_misspelt_ones_are_named() -> None:
    assert {scenario.name for scenario in choose(["kill *"], short=False)} >= {"kill decode-0", "kill gateway-0"}
    assert len(choose([], short=False)) == len(SCENARIOS)
    assert {scenario.name for scenario in choose(["pairs *"], short=False)} == set(PAIRS)
    with pytest.raises(ValueError, match="'no such'"):
        choose(["no such"], short=False)


@pytest.mark.timeout(TIMEOUT_S)
def test_a_runner_that_is_killed_leaves_no_process_and_no_namespace_behind(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w+") as log:
        command = [sys.executable, "-m", "tests.machines.run", "undisturbed"]
        runner = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log)
        try:
            end = time.monotonic() + TIMEOUT_S / 2
            started = descendants(runner.pid)
            while not all(any(part in command_line(pid) for pid in started) for part in STARTED):
                if runner.poll() is not None:
                    log.seek(0)
                    pytest.skip(log.read())
                assert time.monotonic() < end, [command_line(pid) for pid in started]
                time.sleep(0.1)
                started = descendants(runner.pid)
            assert len({os.readlink(f"/proc/{pid}/ns/net") for pid in started}) > 2, "these are no machines"
            started = descendants(runner.pid)
        finally:
            runner.kill()
            runner.wait()
    end = time.monotonic() + 60.0
    while left := {pid for pid, began in started.items() if _stat(pid)[19:20] == [began]}:
        assert time.monotonic() < end, [command_line(pid) for pid in left]  # a namespace ends with its last process
        time.sleep(0.05)


def descendants(root: int) -> dict[int, str]:
    """Processes that come from this one, with the moments at which they began."""
    stats = {int(folder.name): _stat(int(folder.name)) for folder in Path("/proc").glob("[0-9]*")}
    found: dict[int, str] = {}
    family = {root}
    while family:
        family = {pid for pid, stat in stats.items() if stat and int(stat[1]) in family}
        found |= {pid: stats[pid][19] for pid in family}
    return found


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _stat(pid: int) -> list[str]:
    """What the kernel says behind the process's name: its state, its parent, …; empty: the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
