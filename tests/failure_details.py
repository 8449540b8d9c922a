"""Adds cluster states and process logs to a failed test, so that a failure on another machine explains itself."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILES, MAX_LINES = 16, 60


def cluster_states() -> Iterator[tuple[str, str]]:
    """Yields a title and the `/cluster` document of each cluster that this test process runs."""
    clusters = sys.modules.get("benchmarks.cluster")
    for cluster in clusters.running if clusters is not None else ():
        try:
            state = cluster.get_text("/cluster")
        except OSError as error:
            state = f"no answer: {error}"
        yield f"state of {cluster.http}", state


def log_tails(folder: Path, since_s: float) -> Iterator[tuple[str, str]]:
    """Yields a title and the last lines of each log of this test process's children.

    Reads the files behind the outputs of living children, and log files below `folder` written after `since_s` (Unix
    time in seconds), which may belong to dead ones.
    """
    logs = {path for pid in _descendants(os.getpid()) for path in _outputs(pid)}
    logs |= {path for path in folder.rglob("*") if _is_log(path) and path.stat().st_mtime >= since_s}
    newest = sorted(logs, key=lambda path: path.stat().st_mtime, reverse=True)
    for path in newest[:MAX_FILES]:
        lines = path.read_text(errors="replace").splitlines()
        if lines:
            yield f"log {path}", "\n".join(lines[-MAX_LINES:])


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
