"""Time limits in tests that a busy machine does not break and an idle one does not forgive."""

import contextlib
import time
from pathlib import Path


class Stopwatch:
    """Measures from its making. Time in which threads of this process stood in line for a processor does not count."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._began_in_line_s = _in_line_s()

    def elapsed_s(self) -> float:
        """Seconds so far; on a machine with nothing else to do, those on the wall."""
        in_line_s = max(0.0, _in_line_s() - self._began_in_line_s)
        return time.monotonic() - self._began_s - in_line_s


def _in_line_s() -> float:
    """How long the threads that live now have waited for a processor (proc(5), schedstat); 0 if nobody keeps count."""
    total_ns = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            total_ns += int(file.read_text().split()[1])
    return total_ns / 1e9
