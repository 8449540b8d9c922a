"""`tandem role WORKER prefill|decode`: has a worker of a running `tandem up` change its role."""

import sys
from dataclasses import dataclass
from typing import TextIO

from cli.commands import CommandParser
from cli.control import LocalSettings
from services.runtime.config import option
from services.runtime.kinds import argument, choice, flag, number, text
from services.runtime.orders import order


@dataclass(frozen=True, kw_only=True)
class RoleSettings(LocalSettings):
    """Has WORKER of the `tandem up` here become a prefill or a decode worker, with its weights and pages in place.

    Its running answers move to other workers or end, nothing new comes to it, and it serves again as the other one,
    under the name that it has. If it is not done in --timeout seconds, it stays what it is. It keeps its role when it
    has to be started again. Workers that compute with vLLM cannot change their role.
    """

    worker: str = option(argument(text()), help="Its name, such as decode-1; `tandem status` lists them.")
    role: str = option(argument(choice("prefill", "decode")), help="What it is to be.")
    timeout: float = option(
        number(0, 86_400), default=600.0, help="Seconds that running answers get; a worker that has some then stays."
    )
    force: bool = option(flag(), default=False, help="Also where it is the last worker of its role.")


def add_to(parser: CommandParser) -> None:
    """Gives the parser what this command takes and does."""
    parser.runs(RoleSettings, lambda settings: run(settings, sys.stdout))


def run(settings: RoleSettings, stdout: TextIO) -> int:
    """Waits until the worker serves in its new role; returns the exit code. Raises NoLocalCluster or Refused."""
    limits = {"grace_s": settings.timeout, "is_forced": settings.force}
    has_changed = order(settings.url, "role", name=settings.worker, role=settings.role, **limits)
    print(f"{settings.worker} is a {settings.role} worker {'now' if has_changed else 'already'}", file=stdout)
    return 0
