"""`tandem models`: the models that were brought to this machine by their names, with their sizes."""

import json
import sys
from dataclasses import asdict, dataclass
from typing import TextIO

from cli.commands import CommandParser
from services.hub.models import cached_models
from services.runtime.config import option
from services.runtime.kinds import flag

HEADINGS = ("MODEL", "REVISION", "SIZE", "STATE", "FOLDER")


@dataclass(frozen=True, kw_only=True)
class ModelsSettings:
    """Lists the models of this machine's caches: those that `tandem serve` finds without a network."""

    json: bool = option(flag(), default=False, help="Prints a JSON list.")


def add_to(parser: CommandParser) -> None:
    """Gives the parser what this command takes and does."""
    parser.runs(ModelsSettings, lambda settings: run(settings, sys.stdout))


def run(settings: ModelsSettings, stdout: TextIO) -> int:
    """Prints the list; returns the exit code."""
    found = list(cached_models())
    if settings.json:
        stdout.write(json.dumps([{**asdict(each), "folder": str(each.folder)} for each in found], indent=2) + "\n")
        return 0
    rows = [HEADINGS]
    for each in found:
        state = "whole" if each.is_whole else "incomplete"
        rows.append((each.name, each.revision, f"{each.num_bytes / 1e6:,.1f} MB", state, str(each.folder)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS) - 1)]
    for *cells, folder in rows:
        sides = [">" if cell.endswith("MB") else "<" for cell in cells]
        padded = [f"{cell:{side}{width}}" for cell, side, width in zip(cells, sides, widths, strict=True)]
        stdout.write("  ".join([*padded, folder]) + "\n")
    if not found:
        stdout.write("none; `tandem serve ORG/MODEL` brings one here\n")
    return 0
