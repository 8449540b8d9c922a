"""`tandem drain WORKER`: has a worker of a running `tandem up` finish what it runs, and end."""

import sys
from dataclasses import dataclass
from typing import TextIO

from cli.commands import CommandParser
from cli.control import DrainingSettings
from services.runtime.config import option
from services.runtime.kinds import argument, text
from services.runtime.orders import order


@dataclass(frozen=True, kw_only=True)
class DrainSettings(DrainingSettings):
    """Drains WORKER of the `tandem up` here: no new requests; it ends when its running ones have, and stays away.

    `tandem scale` brings it back. A worker that another program started is drained with SIGTERM to its process.
    """

    worker: str = option(argument(text()), help="Its name, such as decode-1; `tandem status` lists them.")


def add_to(parser: CommandParser) -> None:
    """Gives the parser what this command takes and does."""
    parser.runs(DrainSettings, lambda settings: run(settings, sys.stdout))


def run(settings: DrainSettings, stdout: TextIO) -> int:
    """Waits until the worker has gone; returns the exit code. Raises NoLocalCluster or Refused."""
    order(settings.url, "drain", name=settings.worker, grace_s=settings.timeout)
    print(f"{settings.worker} has ended", file=stdout)
    return 0
