"""Adds cluster states and process logs to a failed test, so that a failure on another machine explains itself."""

import http.client
import os
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

MAX_FILES, MAX_LINES, MAX_BYTES = 16, 60, 65_536
STATE_TIMEOUT_S = 5.0
"""Time that a cluster has to report its state. A test may have left it frozen."""


def cluster_states() -> Iterator[tuple[str, str]]:
    """Yields a title and the `/cluster` document of each cluster that this test process runs."""
    clusters = sys.modules.get("benchmarks.cluster")
    for cluster in clusters.running if clusters is not None else ():
        try:
            with urllib.request.urlopen(f"{cluster.http}/cluster", timeout=STATE_TIMEOUT_S) as answer:
                state = answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            state = f"no answer: {error}"
        yield f"state of {cluster.http}", state


def log_tails(folder: Path, since_s: float) -> Iterator[tuple[str, str]]:
    """Yields a title and the last lines of each log of this test process's children.

    Reads the files behind the outputs of living children, and log files below `folder` written after `since_s` (Unix
    time in seconds), which may belong to dead ones.
    """
    found = {path for pid in _descendants(os.getpid()) for path in _outputs(pid)}
    times = {path: _written_s(path) for path in found}
    times |= {path: time_s for path in folder.rglob("*") if _is_log(path) and (time_s := _written_s(path)) >= since_s}
    for path in sorted(times, key=times.__getitem__, reverse=True)[:MAX_FILES]:
        if tail := _tail(path):
            yield f"log {path}", tail


def _written_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0  # It has just been removed.


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-MAX_LINES:])


def _is_log(path: Path) -> bool:
    return (path.suffix in (".log", ".err") or path.name in ("log", "errors", "stderr")) and path.is_file()


def _descendants(pid: int) -> Iterator[int]:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in _read(children).split():
            yield int(child)
            yield from _descendants(int(child))


def _outputs(pid: int) -> Iterator[Path]:
    for number in (1, 2):
        try:
            path = Path(os.readlink(f"/proc/{pid}/fd/{number}"))
        except OSError:
            continue  # the process has just ended
        if path.is_file():
            yield path


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
