"""Time limits in tests that a busy machine does not break and an idle one does not forgive."""

import contextlib
import time
from pathlib import Path


class Stopwatch:
    """Measures from its making, less the time in which one thread of this process stood in line for a processor.

    It is the thread that stood there longest: the others may have waited for it. No more is taken off, because threads
    stand in line at the same time.
    """

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._began_in_line_s = _in_line_s()

    def elapsed_s(self) -> float:
        """Seconds so far; on a machine with nothing else to do, those on the wall."""
        in_line_s = {
            thread: so_far_s - self._began_in_line_s.get(thread, 0.0) for thread, so_far_s in _in_line_s().items()
        }
        return time.monotonic() - self._began_s - max(in_line_s.values(), default=0.0)


def _in_line_s() -> dict[str, float]:
    """How long each thread has waited for a processor (proc(5), schedstat); nothing if nobody keeps count."""
    waited_s = {}
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            waited_s[file.parent.name] = int(file.read_text().split()[1]) / 1e9
    return waited_s
