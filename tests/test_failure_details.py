"""A failed test shows the logs of its processes, of those that have died too."""

import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import cluster
from tests.failure_details import MAX_BYTES, MAX_LINES, STATE_TIMEOUT_S, cluster_states, log_tails
from tests.waiting import HANG_LIMIT_S, wait_until


def tails_below(folder: Path, since_s: float) -> list[tuple[str, str]]:
    """Returns the tails of the logs in the folder. Fixtures of other tests may have processes, too."""
    return [(title, tail) for title, tail in log_tails(folder, since_s) if str(folder) in title]


PROGRAM = "import sys; print('begun', flush=True); print('bad', file=sys.stderr, flush=True); sys.stdin.read()"


def test_the_outputs_of_a_living_process(tmp_path: Path) -> None:
    command, log = [sys.executable, "-c", PROGRAM], tmp_path / "output"
    with (
        log.open("w") as output,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, text=True) as process,
    ):
        wait_until(lambda: "bad" in log.read_text())
        assert (f"log {log}", "begun\nbad") in log_tails(tmp_path, time.time())
        process.communicate("", timeout=HANG_LIMIT_S)


def test_the_last_lines_of_a_dead_process_and_nothing_older(tmp_path: Path) -> None:
    (tmp_path / "old.log").write_text("of an earlier test")
    began_s = (tmp_path / "old.log").stat().st_mtime + 1e-3
    while time.time() < began_s:
        pass
    lines = [f"line {number}" for number in range(2 * MAX_LINES)]
    (tmp_path / "worker-0").mkdir()
    (tmp_path / "worker-0" / "log").write_text("\n".join(lines))
    assert tails_below(tmp_path, began_s) == [(f"log {tmp_path}/worker-0/log", "\n".join(lines[-MAX_LINES:]))]


def test_a_huge_log_is_not_read_and_a_removed_one_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "huge.log").write_bytes(b"x" * (4 * MAX_BYTES) + b"\nend")
    (tmp_path / "removed.log").symlink_to(tmp_path / "nowhere")
    ((_, tail),) = tails_below(tmp_path, 0.0)
    assert tail.endswith("x\nend")
    assert len(tail) <= MAX_BYTES


def test_a_cluster_that_does_not_answer_delays_a_failure_only_a_little(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(cluster, "running", [SimpleNamespace(http=address)])
        monkeypatch.setattr("tests.failure_details.STATE_TIMEOUT_S", STATE_TIMEOUT_S / 50)
        ((title, state),) = cluster_states()
    assert title == f"state of {address}"
    assert state.startswith("no answer: ")
