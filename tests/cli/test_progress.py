"""What `tandem up` draws."""

import io
import re

from cli.progress import Progress


def screen(text: str) -> list[str]:
    """The lines that a terminal shows after `text`: understands just what Progress writes."""
    lines, row = [""], 0
    for part in re.split(r"(\x1b\[\d*[AJK]|\r|\n)", text):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif match := re.fullmatch(r"\x1b\[(\d*)A", part):
            row -= int(match[1])
        elif part == "\x1b[J":
            lines = [*lines[:row], ""]
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part != "\r":
            lines[row] += part
    return [line for line in lines if line]


def test_plain_lines_say_each_change_once() -> None:
    stream = io.StringIO()
    progress = Progress(stream, ["gateway", "decode-0"], is_live=False)
    progress.show("decode-0", "loading (pid 5)")
    progress.show("decode-0", "loading (pid 5)")
    progress.tick()
    progress.show("decode-0", "ready (pid 5)", is_done=True)
    progress.finish()
    assert stream.getvalue() == "decode-0  loading (pid 5)\ndecode-0  ready (pid 5)\n"


def test_live_lines_are_redrawn_in_place() -> None:
    stream = io.StringIO()
    progress = Progress(stream, ["gateway", "decode-0"], is_live=True, clock=lambda: 0.0)
    progress.show("gateway", "loading")
    progress.show("decode-0", "loading")
    for _ in range(5):
        progress.tick()
    progress.note("a note")
    progress.show("gateway", "ready", is_done=True)
    assert screen(stream.getvalue()) == ["a note", "✓ gateway   ready", "⠋ decode-0  loading"]


def test_after_the_end_news_are_plain_lines_below_the_picture() -> None:
    stream = io.StringIO()
    progress = Progress(stream, ["decode-0"], is_live=True, clock=lambda: 0.0)
    progress.show("decode-0", "ready", is_done=True)
    progress.finish()
    progress.show("decode-0", "ended with SIGKILL")
    assert screen(stream.getvalue()) == ["✓ decode-0  ready", "decode-0  ended with SIGKILL"]


def test_a_closed_stream_does_not_matter() -> None:
    stream = io.StringIO()
    progress = Progress(stream, ["a"], is_live=True)
    stream.close()
    progress.show("a", "ready")
    progress.finish()
