"""Which of its roles a worker process is to have, and the change from one to another: prepared while it still serves.

The wish is a state and not a command: the file may be written at any time, and a process that was killed starts in the
role that the file names. Knows no role by name, and not how a role is left.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from services.runtime.errors import TandemError
from worker.role import AnyRole

LOOK_S = 0.25
MAX_WORD_BYTES = 64

logger = logging.getLogger(__name__)


class Roles:
    """The roles that a worker process may have. It is to have the first, unless `file` names another one.

    A file that is missing names the first; one without a role's name, as while it is being written, changes nothing.
    """

    def __init__(self, roles: Sequence[AnyRole], file: Path | None = None) -> None:
        self._roles = {role.name: role for role in roles}
        self._first = self._wanted = roles[0]
        self._file = file

    @property
    def wanted(self) -> AnyRole:
        """The role that the process is to have now."""
        if self._file is not None:
            try:
                with self._file.open("rb") as file:
                    word = file.read(MAX_WORD_BYTES).decode(errors="replace").strip()
            except FileNotFoundError:
                word = self._first.name
            except OSError as error:
                logger.debug("the role's file cannot be read", extra={"error": str(error)})
                return self._wanted
            self._wanted = next((role for role in self._roles.values() if role.name == word), self._wanted)
        return self._wanted


class RoleChange:
    """The change of a worker process from its present role to another one. `prepare` raises TandemError."""

    def __init__(self, roles: Roles, present: AnyRole, prepare: Callable[[AnyRole], Awaitable[None]]) -> None:
        self._roles = roles
        self._present = present
        self._prepare = prepare

    async def due(self) -> None:
        """Returns when another role is wanted and prepared. One that fails is tried again when it is wanted anew."""
        failed: AnyRole | None = None
        while True:
            wanted = self._roles.wanted
            if wanted is self._present:
                failed = None
            elif wanted is not failed:
                try:
                    await self._prepare(wanted)
                except TandemError as error:
                    failed = wanted
                    facts = {"role": wanted.name, "reason": error.message}
                    logger.error("the worker keeps its role: it cannot have the one that is wanted", extra=facts)
                else:
                    return
            await asyncio.sleep(LOOK_S)

    async def withdrawn(self) -> None:
        """Returns when the present role is wanted again."""
        while self._roles.wanted is not self._present:  # noqa: ASYNC110 - a file's, no event
            await asyncio.sleep(LOOK_S)
