"""`tandem scale`: more workers or fewer of a running `tandem up`, without a restart."""

import sys
from dataclasses import dataclass
from typing import TextIO

from cli.commands import CommandParser
from cli.control import DrainingSettings
from services.runtime.config import option
from services.runtime.errors import ConfigError
from services.runtime.kinds import integer, text
from services.runtime.orders import order


@dataclass(frozen=True, kw_only=True)
class ScaleSettings(DrainingSettings):
    """Changes how many workers the `tandem up` here runs: new ones start at once, surplus ones finish what they run.

    Where one role is to have fewer and the other more, workers change their role instead. New workers are not pinned to
    cores.
    """

    prefill: int | None = option(
        integer(0, 256), default=None, help="Number of prefill workers; unchanged if not given."
    )
    decode: int | None = option(integer(1, 256), default=None, help="Number of decode workers; unchanged if not given.")
    model: str | None = option(text(), default=None, help="Which model's workers, where several are served.")

    def __post_init__(self) -> None:
        if self.prefill is None and self.decode is None:
            raise ConfigError(
                "neither --prefill nor --decode is given; one of them says how many workers there are to be"
            )


def add_to(parser: CommandParser) -> None:
    """Gives the parser what this command takes and does."""
    parser.runs(ScaleSettings, lambda settings: run(settings, sys.stdout))


def run(settings: ScaleSettings, stdout: TextIO) -> int:
    """Waits until surplus workers have gone or changed; returns the exit code. Raises NoLocalCluster or Refused."""
    numbers = {"prefill": settings.prefill, "decode": settings.decode}
    done = order(settings.url, "scale", model=settings.model, grace_s=settings.timeout, **numbers)
    for name, role in done["changed"].items():
        print(f"changed: {name} is a {role} worker now", file=stdout)
    for what in ("started", "drained"):
        print(f"{what}: {', '.join(done[what]) or 'none'}", file=stdout)
    return 0
