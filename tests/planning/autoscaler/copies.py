"""Copies of the autoscaler as processes beside a `tandem up`, and what they have decided together."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from planning.autoscaler.decisions import Look, read_log

ROOT = Path(__file__).resolve().parents[3]
FREEZES = """
import signal, threading
from planning.autoscaler import __main__, actors
order = actors.order
def frozen(url, name, **arguments):
    if name == "scale":
        actors.order = order
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread goes no further
    return order(url, name, **arguments)
actors.order = frozen
__main__.main()
"""
"""An autoscaler that is frozen when it has decided to act for the first time, and has not given the order yet."""


class Copy:
    """One copy; `program` stands in for `python -m planning.autoscaler`."""

    def __init__(self, folder: Path, name: str, flags: Sequence[str], *, program: str | None = None) -> None:
        self.decisions = folder / f"{name}.jsonl"
        self.log = folder / f"{name}.log"
        module = ["-m", "planning.autoscaler"] if program is None else ["-c", program]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, *module, "--actor=up", f"--decisions={self.decisions}", *flags],
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=os.environ | {"TANDEM_DIE_WITH_PARENT": str(os.getpid())},
            )

    @property
    def acts(self) -> bool:
        """Whether it has said last that it acts."""
        said = self.log.read_text()
        return said.rfind('"this copy acts"') > said.rfind('"this copy waits')

    @property
    def waits(self) -> bool:
        """Whether it has said last that it waits for another one."""
        said = self.log.read_text()
        return said.rfind('"this copy waits') > said.rfind('"this copy acts"')

    @property
    def is_frozen(self) -> bool:
        """Whether a signal has stopped it."""
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def looks(self) -> list[Look]:
        """What it has seen and decided."""
        return [one for one in read_log(self.decisions) if isinstance(one, Look)] if self.decisions.exists() else []

    def orders(self) -> list[Look]:
        """Those looks that came to an order that was taken."""
        return [look for look in self.looks() if look.done.startswith("ordered ")]

    def send(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """Ends it as a machine's failure would, and waits."""
        self.process.kill()
        self.process.wait()


@contextmanager
def copies_of(folder: Path, flags: Sequence[str]) -> Iterator["Copies"]:
    """A family of copies with these flags; all of them are gone at the end."""
    family = Copies(folder, flags)
    try:
        yield family
    finally:
        for copy in family.all:
            copy.kill()


class Copies:
    """Starts copies with the same flags."""

    def __init__(self, folder: Path, flags: Sequence[str]) -> None:
        self._folder = folder
        self._flags = flags
        self.all: list[Copy] = []

    def start(self, name: str, *flags: str, program: str | None = None) -> Copy:
        """Starts one more; the one of the same name that was before continues its log of decisions."""
        self.all.append(Copy(self._folder, name, [*self._flags, *flags], program=program))
        return self.all[-1]


def check_chain(copies: Iterable[Copy], *, first: str) -> list[Look]:
    """Checks that each order of any copy stands on the one before, and says why. Returns all of them in their order.

    A decision that two copies took, or an old one that came late, would stand on what is no more.
    """
    orders = sorted({look.seen.now_s: look for copy in copies for look in copy.orders()}.items())
    found = [look for _, look in orders]
    sizes = [first, *(look.done.removeprefix("ordered ").split(" in place of ")[0] for look in found)]
    for (before, now), look in zip(pairwise(sizes), found, strict=True):
        assert look.done == f"ordered {now} in place of {before}"
        assert "requests/s within" in look.decision.reason
    return found
