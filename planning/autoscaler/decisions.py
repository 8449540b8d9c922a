"""The log of decisions: a line of JSON for each look, enough to decide all of it again.

A file begins with the settings and with the last looks before it, so that it can be replayed alone; an autoscaler that
is started again begins with the looks that its last life has left there.
"""

import contextlib
import errno
import fcntl
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from planning.autoscaler.need import Speeds, need_of
from planning.autoscaler.policy import Autoscaler, AutoscalerSettings, Decision, Observation
from planning.planner.question import LatencyTargets
from services.runtime.errors import ConfigError

MAX_BYTES = 64 << 20
"""A file of this size becomes FILE.1, and a new one begins."""
TAIL_BYTES = 1 << 20
NUM_WARM = 64
"""Looks that an autoscaler begins with."""


class Look(msgspec.Struct, frozen=True, kw_only=True, tag="look", tag_field="what"):
    """What was seen and decided, at one moment. `done` says what was ordered, or why nothing was."""

    seen: Observation
    speeds: Speeds | None
    decision: Decision
    done: str
    troubles: Sequence[str] = ()


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag="begin", tag_field="what"):
    """What an autoscaler is begun with, and the looks that it has not seen itself."""

    settings: AutoscalerSettings
    targets: LatencyTargets
    warm: Sequence[Look] = ()


def begun(begin: Begin) -> Autoscaler:
    """Returns an autoscaler that knows what the log's beginning has."""
    autoscaler = Autoscaler(begin.settings, lambda *_: (0.0, 0.0))
    for look in begin.warm:
        decided(autoscaler, look.seen, speeds=look.speeds, targets=begin.targets)
    return autoscaler


def decided(autoscaler: Autoscaler, seen: Observation, *, speeds: Speeds | None, targets: LatencyTargets) -> Decision:
    """Returns the decision by these speeds; None: as many workers as there are do, for all that is known."""
    if speeds is None:
        autoscaler.need = lambda *_: (0.0, 0.0)
    else:
        autoscaler.need = need_of(speeds.kind, speeds.kind, targets=targets)
    return autoscaler.decide(seen)


class DecisionLog:
    """Writes a file of decisions; `file` None: keeps the last ones in memory only."""

    def __init__(self, file: Path | None, begin: Begin, *, since_s: float, max_bytes: int = MAX_BYTES) -> None:
        """Continues an earlier file; of its looks, those after `since_s` (seconds since 1970) count.

        Raises ConfigError for a file that cannot be written, or that another autoscaler writes.
        """
        self._file = file
        self._lock: int | None = None
        self._max_bytes = max_bytes
        self._begin = begin
        self._last: deque[Look] = deque(maxlen=NUM_WARM)
        try:
            if file is not None:
                self._claim(file)
                self._last.extend(look for look in _tail(file) if look.seen.now_s >= since_s)
            self.autoscaler = self._start()
        except BlockingIOError:
            raise ConfigError(
                f"another autoscaler writes its decisions into {file}: give each copy a file of its own (--decisions)"
            ) from None
        except OSError as error:
            raise ConfigError(f"{file} cannot be written ({error.strerror})") from error

    def write(self, look: Look) -> None:
        """Adds a line. The disk being full costs the line and nothing else. Raises OSError."""
        self._last.append(look)
        if self._file is None:
            return
        self._append(look)
        if self._file.stat().st_size > self._max_bytes:
            os.replace(self._file, self._file.with_name(self._file.name + ".1"))
            self._claim(self._file)
            self.autoscaler = self._start()  # as it will be when the new file alone is replayed

    def _start(self) -> Autoscaler:
        begin = msgspec.structs.replace(self._begin, warm=tuple(self._last))
        if self._file is not None:
            self._append(begin)
        return begun(begin)

    def close(self) -> None:
        """Lets another autoscaler continue the file."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _claim(self, file: Path) -> None:
        """Keeps other autoscalers from the file, until this process ends at the latest: lines of two make no sense.

        Raises OSError: BlockingIOError where another one has it.
        """
        self.close()
        self._lock = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP):  # a file system may know no locks
                self.close()
                raise

    def _append(self, record: Look | Begin) -> None:
        assert self._file is not None, "there is a file"
        with self._file.open("ab") as stream:
            stream.write(msgspec.json.encode(record) + b"\n")


def read_log(file: Path) -> Iterator[Begin | Look]:
    """Yields the records of a log; lines that a death or a full disk has cut off are left out. Raises ConfigError."""
    try:
        with file.open("rb") as stream:
            yield from _records(stream)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror})") from None


def _records(lines: Iterable[bytes]) -> Iterator[Begin | Look]:
    for line in lines:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            yield _DECODER.decode(line)


def _tail(file: Path) -> list[Look]:
    """Returns the last looks of a file, as far as they can be read."""
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - TAIL_BYTES))
        lines = stream.read().splitlines()
    found: list[Look] = []
    for record in _records(lines):
        found = list(record.warm) if isinstance(record, Begin) else [*found, record]
    return found[-NUM_WARM:]


_DECODER = msgspec.json.Decoder(Begin | Look)
