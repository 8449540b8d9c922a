"""What a worker process is to be, its role and its model, and the change to it: prepared while it still serves.

Each wish is a state and not a command: its file may be written at any time, and a process that was killed starts as
the files say. Knows no role and no model by name, and not how either is left.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from services.runtime.errors import TandemError
from worker.role import AnyRole

LOOK_S = 0.25
MAX_WORD_BYTES = 512

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Wish(Generic[T]):
    """One of several choices, at least one, each with a name. It is the first, unless `file` names another one.

    A file that is missing names the first; one without a choice's name, as while it is being written, changes nothing.
    """

    def __init__(self, choices: Mapping[str, T], file: Path | None = None) -> None:
        self._choices = choices
        self._first = self._wanted = next(iter(choices.values()))
        self._file = file

    @property
    def wanted(self) -> T:
        """The choice that is to be made now."""
        if self._file is not None:
            try:
                with self._file.open("rb") as file:
                    word = file.read(MAX_WORD_BYTES).decode(errors="replace").strip()
            except FileNotFoundError:
                self._wanted = self._first
            except OSError as error:
                logger.debug("the file of a wish cannot be read", extra={"error": str(error)})
            else:
                self._wanted = self._choices.get(word, self._wanted)
        return self._wanted


class Life(NamedTuple):
    """What a worker process is at a time: its role, and the name of its model."""

    role: AnyRole
    model: str


@dataclass(frozen=True, slots=True)
class Lives:
    """What a worker process may be, one after the other."""

    role: Wish[AnyRole]
    model: Wish[str]

    @property
    def wanted(self) -> Life:
        """What the process is to be now."""
        return Life(self.role.wanted, self.model.wanted)


class LifeChange:
    """The change of a worker process from what it is to something else. `prepare` raises TandemError.

    `failed` is what the process could not become just before.
    """

    def __init__(
        self,
        lives: Lives,
        present: Life,
        prepare: Callable[[Life], Awaitable[None]],
        *,
        failed: Life | None = None,
    ) -> None:
        self._lives = lives
        self._present = present
        self._prepare = prepare
        self._failed = failed

    async def due(self) -> None:
        """Returns when another life is wanted and prepared. One that fails is tried again when it is wanted anew."""
        while True:
            wanted = self._lives.wanted
            if wanted == self._present:
                self._failed = None
            elif wanted != self._failed:
                try:
                    await self._prepare(wanted)
                except TandemError as error:
                    self._failed = wanted
                    note_refused(wanted, error)
                else:
                    return
            await asyncio.sleep(LOOK_S)

    async def withdrawn(self) -> None:
        """Returns when the present life is wanted again."""
        while self._lives.wanted != self._present:  # noqa: ASYNC110 - a file's, no event
            await asyncio.sleep(LOOK_S)


def note_refused(wanted: Life, error: TandemError) -> None:
    """Says in the log that the process stays what it is, and why."""
    facts = {"role": wanted.role.name, "model": wanted.model, "reason": error.message}
    logger.error("the worker stays as it is: it cannot have the role or the model that is wanted", extra=facts)
