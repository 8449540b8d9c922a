"""Says how far a download is: bytes, speed and seconds left. Knows no source."""

import time
from collections.abc import Callable
from typing import TextIO

from services.hub.fetching import RemoteFile

EVERY_S, EVERY_LIVE_S = 5.0, 0.2
OVER_S = 10.0
"""The speed is that of the last bytes, over about this time."""

SMALL_BYTES = 1_000_000
CLEAR_LINE = "\r\x1b[K"


class Meter:
    """A report for `fetch`: one line on a terminal that changes, a line now and then elsewhere."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._is_live = stream.isatty()
        self._name = ""
        self._seen: list[tuple[float, int]] = []
        self._shown_at_s = float("-inf")

    def __call__(self, file: RemoteFile, num_bytes: int) -> None:
        """Notes that this many bytes of a file are here, and shows it if it is time."""
        now_s = self._clock()
        if file.name != self._name:
            self._name, self._seen, self._shown_at_s = file.name, [], float("-inf")
        self._seen = [each for each in self._seen if now_s - each[0] <= OVER_S] + [(now_s, num_bytes)]
        is_whole = num_bytes >= file.size_bytes
        if not is_whole and file.size_bytes < SMALL_BYTES:
            return  # one line is enough for it
        if not is_whole and now_s - self._shown_at_s < (EVERY_LIVE_S if self._is_live else EVERY_S):
            return
        self._shown_at_s = now_s
        line = self._line(file, num_bytes)
        end = "\n" if is_whole or not self._is_live else ""
        self._stream.write(f"{CLEAR_LINE if self._is_live else ''}{line}{end}")
        self._stream.flush()

    def _line(self, file: RemoteFile, num_bytes: int) -> str:
        scale, unit = (1e6, "MB") if file.size_bytes >= SMALL_BYTES else (1e3, "kB")
        said = f"{file.name}: {num_bytes / scale:.1f} of {file.size_bytes / scale:.1f} {unit}"
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        if last > first and last_s > first_s and num_bytes < file.size_bytes:
            speed = (last - first) / (last_s - first_s)
            said += f", {speed / 1e6:.1f} MB/s, {(file.size_bytes - num_bytes) / speed:.0f} s left"
        return said
