"""Structured logs: one JSON object per line, or a readable line on a terminal. Knows no service.

Fields come with `extra=`: `logger.info("admitted", extra=request_fields(request_id, attempt, traceparent))`.
"""

import json
import logging
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

LEVELS = ("debug", "info", "warning", "error")
MAX_MESSAGE_CHARACTERS = 16_384

COLOURS = {"debug": "\x1b[2m", "info": "\x1b[32m", "warning": "\x1b[33m", "error": "\x1b[31m", "critical": "\x1b[1;31m"}
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
_LEFT_BY_CLIENT = ("ExecuteBatchError raised in core", "Invalid encoding on")
"""Beginnings of what the gRPC library logs as errors, with a traceback, if a client leaves or sends broken headers."""
_NOT_FIELDS = frozenset({"time", "level", "message", "logger", "exception", "service", "worker_id"})
_STANDARD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class LostLines:
    """Log lines that this process could not write, for example because the disk is full."""

    def __init__(self) -> None:
        self.count = 0
        self.error = ""
        """Why the last line could not be written. Empty if it was written."""


lost = LostLines()
"""The lost log lines of this process."""


class _Handler(logging.StreamHandler[TextIO]):
    """Writes to a stream. A line that cannot be written is counted: it must neither end nor delay the process."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one record."""
        lost.error = ""
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Counts a line that the system did not take. Other errors are mistakes in a log call."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            lost.count += 1
            lost.error = error.strerror or str(error)
        else:
            super().handleError(record)


def setup(level: str, *, service: str, worker_id: str = "", stream: TextIO | None = None) -> None:
    """Sends all records to stderr (or `stream`): as JSON, or as readable lines if that is a terminal."""
    target = sys.stderr if stream is None else stream
    handler = _Handler(target)
    handler.addFilter(_is_about_us)
    identity = {"service": service} | ({"worker_id": worker_id} if worker_id else {})
    human = HumanFormatter(is_coloured=wants_colour(target))
    handler.setFormatter(human if target.isatty() else JsonFormatter(identity))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # No line has them, and asking for them is a good part of what a line costs.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


def _is_about_us(record: logging.LogRecord) -> bool:
    """Returns whether a record says more than that a client left or broke its connection."""
    return not (record.name.startswith("grpc.") and str(record.msg).startswith(_LEFT_BY_CLIENT))


def request_fields(request_id: str, attempt: int, traceparent: str = "") -> dict[str, Any]:
    """Returns the fields by which the records of one request are found; `traceparent` is W3C's, or empty."""
    fields: dict[str, Any] = {"request_id": request_id, "attempt": attempt}
    parts = traceparent.split("-")
    if len(parts) == 4:
        fields["trace_id"] = parts[1]
    return fields


class LineBudget:
    """How many lines of one kind may be written: `burst` of them at once, `per_s` in the long run.

    What comes at a rate that an outsider decides must not fill a disk. Time is an argument, in seconds of one clock.
    """

    def __init__(self, *, per_s: float, burst: int) -> None:
        self._per_s = per_s
        self._burst = float(burst)
        self._left = self._burst
        self._at_s: float | None = None

    def take(self, now_s: float) -> bool:
        """Returns whether one more line may be written now."""
        if self._at_s is not None:
            self._left = min(self._burst, self._left + max(0.0, now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class JsonFormatter(logging.Formatter):
    """One JSON object per record; `identity` is added to each."""

    def __init__(self, identity: dict[str, str]) -> None:
        super().__init__()
        self._identity = identity

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record as one line; line breaks in a message are escaped, so it cannot forge a record."""
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage()[:MAX_MESSAGE_CHARACTERS],
            "logger": record.name,
        }
        entry.update(self._identity)
        entry.update(_extra_fields(record))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return _as_json(entry)


class HumanFormatter(logging.Formatter):
    """A short line for a terminal, with control characters made visible."""

    def __init__(self, *, is_coloured: bool = False) -> None:
        super().__init__()
        self._is_coloured = is_coloured

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record as a line; a traceback follows on lines of its own."""
        entry = {"level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        moment = datetime.fromtimestamp(record.created)
        line = human_line(moment, entry | _extra_fields(record), is_coloured=self._is_coloured)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def human_line(moment: datetime, entry: Mapping[str, Any], *, is_coloured: bool) -> str:
    """Returns an entry of a log as one line: local time, level, logger, message, and what else it has.

    Control characters are made visible, so that what a client sent cannot draw on a terminal.
    """
    level = str(entry.get("level", ""))
    fields = "".join(f" {name}={value}" for name, value in entry.items() if name not in _NOT_FIELDS)
    message = str(entry.get("message", ""))[:MAX_MESSAGE_CHARACTERS]
    start, end = (COLOURS.get(level, ""), PLAIN) if is_coloured else ("", "")
    dim = DIM if is_coloured else ""
    said = f"{entry.get('logger', '')}: {message}"
    return (
        f"{dim}{moment:%H:%M:%S}.{moment.microsecond // 1000:03}{end} {start}{level:7}{end} "
        f"{_visible(said)}{dim}{_visible(fields)}{end}"
    )


def wants_colour(stream: TextIO) -> bool:
    """Returns whether the stream is a terminal whose user has not set NO_COLOR."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def _visible(text: str) -> str:
    return "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in text)


def _as_json(entry: dict[str, Any]) -> str:
    """Pure ASCII, so that nothing in it can be taken for the end of a line."""
    try:
        text = msgspec.json.encode(entry, enc_hook=str)
        if text.isascii():
            return text.decode()
    except (TypeError, ValueError):  # halves of surrogate pairs, keys that are no texts
        pass
    return json.dumps(entry, default=str, ensure_ascii=True)


def _extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD_ATTRIBUTES}
