"""Draws what `tandem up` is doing on a stream: live lines on a terminal, plain lines elsewhere. Knows no process."""

import time
from collections.abc import Callable, Sequence
from typing import TextIO

SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
DONE_MARK, BUSY_MARK = "✓", "•"
CLEAR_LINE = "\x1b[2K"


class Progress:
    """One line per part until `finish`, then a line per piece of news.

    A part is shown by `show(name, text)`; with `is_done` its line stops moving.
    """

    def __init__(
        self,
        stream: TextIO,
        names: Sequence[str],
        *,
        is_live: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._is_live = is_live
        self._clock = clock
        self._started_at_s = clock()
        self._texts = dict.fromkeys(names, "waiting")
        self._done: set[str] = set()
        self._width = max((len(name) for name in names), default=0)
        self._num_drawn = 0
        self._is_finished = False

    def show(self, name: str, text: str, *, is_done: bool = False) -> None:
        """What a part is doing now."""
        if self._texts.get(name) == text:
            return
        self._texts[name] = text
        self._width = max(self._width, len(name))
        (self._done.add if is_done else self._done.discard)(name)
        if self._is_live and not self._is_finished:
            self._draw()
        else:
            self._print(f"{name:<{self._width}}  {text}")

    def note(self, text: str) -> None:
        """A line that stays."""
        self._erase()
        self._print(text)
        if self._is_live and not self._is_finished:
            self._draw()

    def tick(self) -> None:
        """Moves the spinners; does nothing where lines are plain."""
        if self._is_live and not self._is_finished:
            self._draw()

    def finish(self) -> None:
        """Leaves the last picture standing; from now on news are plain lines."""
        if self._is_live and not self._is_finished:
            self._draw()
        self._num_drawn = 0
        self._is_finished = True

    def _draw(self) -> None:
        elapsed_s = self._clock() - self._started_at_s
        frame = SPINNER[int(elapsed_s * 10) % len(SPINNER)]
        lines = []
        for name, text in self._texts.items():
            mark = DONE_MARK if name in self._done else BUSY_MARK if text == "waiting" else frame
            lines.append(f"{CLEAR_LINE}{mark} {name:<{self._width}}  {text}")
        self._erase()
        self._num_drawn = len(lines)
        self._write("\n".join(lines) + "\n")

    def _erase(self) -> None:
        """Removes the picture and puts the cursor where it began."""
        if self._num_drawn:
            self._write(f"\x1b[{self._num_drawn}A\r\x1b[J")
            self._num_drawn = 0

    def _print(self, line: str) -> None:
        self._write(line + "\n")

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the reader of the stream has gone; the cluster runs on
            pass
