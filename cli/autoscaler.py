"""`tandem autoscaler`: reads the log of an autoscaler's decisions, and decides all of it again."""

import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from cli.commands import CommandParser
from planning.autoscaler.decisions import Begin, Look, begun, decided, read_log
from services.runtime.config import option
from services.runtime.errors import ConfigError
from services.runtime.kinds import argument, flag, path

DIFFERS = 1


@dataclass(frozen=True, kw_only=True)
class ReplayDecisionsSettings:
    """Decides everything in a log of decisions again. Exit code 1: a decision comes out otherwise than it was."""

    log: Path = option(argument(path()), help="The file that the autoscaler's --decisions names.")
    all: bool = option(flag(), default=False, help="Also shows the looks at which nothing changed.")


def add_to(parser: CommandParser) -> None:
    """Gives the parser what this command takes and does."""
    replay = parser.add_command("replay", "decide everything in a log again, and compare")
    replay.runs(ReplayDecisionsSettings, lambda settings: run(settings, sys.stdout))


def run(settings: ReplayDecisionsSettings, stdout: TextIO) -> int:
    """Prints decisions with their reasons; returns the exit code. Raises ConfigError."""
    begin, autoscaler = None, None
    num_looks = num_different = 0
    for record in read_log(settings.log):
        if isinstance(record, Begin):
            begin, autoscaler = record, begun(record)
            continue
        if begin is None or autoscaler is None:
            continue  # what stands before a beginning cannot be decided again
        num_looks += 1
        found = decided(autoscaler, record.seen, speeds=record.speeds, targets=begin.targets)
        is_different = found != record.decision
        num_different += is_different
        if is_different or settings.all or record.decision.is_change:
            print(_line(record), file=stdout)
        if is_different:
            print(f"  is decided otherwise now: {found.reason}", file=stdout)
    if begin is None:
        raise ConfigError(f"{settings.log} is no log of decisions")
    print(f"{num_looks} looks, {num_different} decided otherwise than then", file=stdout)
    return DIFFERS if num_different else 0


def _line(look: Look) -> str:
    when = datetime.fromtimestamp(look.seen.now_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
    return "; ".join([f"{when}  {look.decision.reason}", look.done, *look.troubles])
