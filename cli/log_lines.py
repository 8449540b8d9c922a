"""Lines that our processes wrote, as people read them on a terminal. Opens no file."""

import json
import re
from datetime import datetime
from typing import Any

from services.runtime.logs import human_line
from services.runtime.model_size import LOADING
from services.runtime.worker_state import UNLISTED

_CORE = re.compile(r"(?P<level>[IWEF])\d{4} (?P<time>\d\d:\d\d:\d\d\.\d+)\s+\d+ (?P<place>[\w./-]+:\d+)\] (?P<said>.*)")
"""A line of gRPC's core, which writes it itself."""
_LEVELS = {"I": "info", "W": "warning", "E": "error", "F": "critical"}


def for_people(line: str, *, is_coloured: bool) -> str:
    """Returns a line of a log file for a terminal: an entry in JSON as a short line, anything else as it is.

    A traceback follows its entry on lines of its own.
    """
    if (core := _CORE.fullmatch(line)) is not None:
        moment = datetime.strptime(core["time"][:15], "%H:%M:%S.%f")
        entry: Any = {"level": _LEVELS[core["level"]], "logger": f"grpc {core['place']}", "message": core["said"]}
        return human_line(moment, entry, is_coloured=is_coloured)
    try:
        entry = json.loads(line) if line.startswith("{") else None
        moment = datetime.fromisoformat(entry["time"]).astimezone()
    except (ValueError, KeyError, TypeError):
        return "".join(letter if letter.isprintable() or letter == "\t" else "?" for letter in line)
    shown = human_line(moment, entry, is_coloured=is_coloured)
    traceback = "\n".join(for_people(each, is_coloured=False) for each in str(entry.get("exception", "")).splitlines())
    return f"{shown}\n{traceback}" if traceback else shown


def start_text(line: str) -> str:
    """Returns how far a worker's start is, or what it waits for, by a line of its log; empty where it does not say."""
    try:
        entry = json.loads(line) if line.startswith("{") else {}
        if entry.get("message") == UNLISTED:
            return f"{UNLISTED}: {entry['error']}"
        if entry.get("message") != LOADING:
            return ""
        read, size, left_s = (float(entry[name]) for name in ("read_bytes", "of_bytes", "left_s"))
    except (ValueError, KeyError, TypeError):
        return ""
    scale, unit = (1e9, "GB") if size >= 1e9 else (1e6, "MB")
    return f"{LOADING}: {read / scale:.1f} of {size / scale:.1f} {unit}, {left_s:.0f} s left"


def says(line: str, message: str) -> bool:
    """Returns whether a line of a log is an entry with this message."""
    try:
        return line.startswith("{") and json.loads(line).get("message") == message
    except ValueError:
        return False


def is_ready_line(line: str) -> bool:
    """Returns whether a line of a worker's log says that it is ready."""
    return says(line, "ready")


def time_of(line: str) -> str:
    """Returns what sorts an entry among those of other processes; empty where the line is not an entry."""
    found = re.match(r'\{"time":\s?"([^"]+)"', line)
    return found[1] if found else ""
