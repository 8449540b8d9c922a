"""The desired role and model of a worker process, and the change to them, which is prepared while it still serves.

A desired state is declarative: its file may be written at any time, and a restarted process starts in the state that
the files describe. This module does not depend on specific roles or models, nor on how they are stopped.
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
    """One of several named choices. The first choice applies unless `file` names another.

    If the file is missing, the first choice applies. If it contains no valid name, for example during a write, nothing
    changes.
    """

    def __init__(self, choices: Mapping[str, T], file: Path | None = None) -> None:
        self._choices = choices
        self._first = self._wanted = next(iter(choices.values()))
        self._file = file

    @property
    def wanted(self) -> T:
        """Returns the currently desired choice."""
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
    """The current state of a worker process: its role and the name of its model."""

    role: AnyRole
    model: str


@dataclass(frozen=True, slots=True)
class Lives:
    """The desired states of a worker process over time."""

    role: Wish[AnyRole]
    model: Wish[str]

    @property
    def wanted(self) -> Life:
        """Returns the currently desired state."""
        return Life(self.role.wanted, self.model.wanted)


class LifeChange:
    """A change of a worker process from its present state to another. `prepare` raises TandemError.

    `failed` is the state that the process just failed to enter.
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
        """Returns once another state is desired and prepared. A failed state is retried only after it was withdrawn."""
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
        """Returns when the present state is desired again."""
        while self._lives.wanted != self._present:  # noqa: ASYNC110 - the state is in a file, without an event
            await asyncio.sleep(LOOK_S)


def note_refused(wanted: Life, error: TandemError) -> None:
    """Logs that the process keeps its state, and why."""
    facts = {"role": wanted.role.name, "model": wanted.model, "reason": error.message}
    logger.error("the worker stays as it is: it cannot have the role or the model that is wanted", extra=facts)
