"""`tandem logs`: what the processes of a running `tandem up` write, in the order of time."""

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from cli.commands import CommandParser
from cli.control import LocalSettings
from cli.log_lines import for_people, time_of
from services.runtime.config import option
from services.runtime.errors import ConfigError
from services.runtime.kinds import comma_separated, flag, integer, text
from services.runtime.logs import wants_colour
from services.runtime.orders import order

POLL_S = 0.2
"""The time between two looks at the files: the standard library has no notice of a file that grows."""
MAX_TAIL_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class LogsSettings(LocalSettings):
    """Shows the logs of the `tandem up` here: short lines on a terminal, the lines as they are elsewhere."""

    of: tuple[str, ...] = option(
        comma_separated(text()), default=(), help="Only of these processes, such as decode-0,gateway; all if not given."
    )
    lines: int = option(integer(0, 1_000_000), default=100, help="Last lines to show of each process.")
    follow: bool = option(flag(short="-f"), default=False, help="Shows what is written from now on too.")
    json: bool = option(flag(), default=False, help="Shows the lines as they are on a terminal too.")


def add_to(parser: CommandParser) -> None:
    """Gives the parser what this command takes and does."""
    parser.runs(LogsSettings, lambda settings: run(settings, sys.stdout))


def run(settings: LogsSettings, stdout: TextIO) -> int:
    """Prints the lines; returns the exit code. Raises NoLocalCluster, or ConfigError for a name that does not exist."""
    files = _files(settings)
    width = max(map(len, files))
    offsets: dict[str, int] = {}
    last = [
        (time_of(line), name, line)
        for name, path in files.items()
        for line in _tail(name, path, settings.lines, offsets)
    ]
    _show(sorted(last, key=lambda each: each[0]), settings, stdout, width)
    while settings.follow:
        time.sleep(POLL_S)
        with contextlib.suppress(ConfigError):
            files = _files(settings)  # with workers that are new
        new = [(time_of(line), name, line) for name, path in files.items() for line in _new(name, path, offsets)]
        _show(sorted(new, key=lambda each: each[0]), settings, stdout, width)
    return 0


def _files(settings: LogsSettings) -> Mapping[str, Path]:
    known = {child["name"]: Path(child["log"]) for child in order(settings.url, "children", timeout_s=5.0)}
    for name in settings.of:
        if name not in known:
            raise ConfigError(f"--of is {name!r:.100} but must name one of {', '.join(known)}")
    return {name: path for name, path in known.items() if not settings.of or name in settings.of}


def _tail(name: str, path: Path, num_lines: int, offsets: dict[str, int]) -> Sequence[str]:
    """The last whole lines of a file; notes where the next ones begin."""
    with contextlib.suppress(OSError):
        size = path.stat().st_size
        offsets[name] = max(0, size - MAX_TAIL_BYTES)
    lines = list(_new(name, path, offsets))
    return lines[-num_lines:] if num_lines else ()


def _new(name: str, path: Path, offsets: dict[str, int]) -> Iterator[str]:
    """The whole lines after the noted place, which moves on."""
    try:
        with path.open("rb") as file:
            file.seek(offsets.setdefault(name, 0))
            data = file.read()
    except OSError:
        return
    end = data.rfind(b"\n") + 1
    offsets[name] += end
    yield from data[:end].decode("utf-8", "replace").splitlines()


def _show(entries: Sequence[tuple[str, str, str]], settings: LogsSettings, stdout: TextIO, width: int) -> None:
    is_for_people = stdout.isatty() and not settings.json
    for _, name, line in entries:
        shown = for_people(line, is_coloured=wants_colour(stdout)) if is_for_people else line
        stdout.write(f"{name:<{width}} | {shown}\n" if is_for_people else f"{shown}\n")
    stdout.flush()
