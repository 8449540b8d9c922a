"""How many workers of each role an operator expects, where another program keeps the numbers up to date in a file."""

import logging
from collections.abc import Mapping
from pathlib import Path

from gateway.topology.member import ROLES
from services.runtime.kinds import counts

MAX_BYTES = 1024

logger = logging.getLogger(__name__)


class ExpectedFile:
    """The numbers in a file such as `prefill=2,decode=3`, looked at with each call and read when it has changed.

    While the file cannot be read, the last numbers hold, at first `numbers`.
    """

    def __init__(self, path: Path, numbers: Mapping[str, int] | None = None) -> None:
        self._path = path
        self._numbers = dict(numbers or {})
        self._seen: object = None
        """The version of the file that was read last, or why it could not be."""

    def numbers(self) -> Mapping[str, int]:
        """Returns how many workers of each role there should be; a role without a number is left out."""
        try:
            facts = self._path.stat()
            seen = (facts.st_mtime_ns, facts.st_ino, facts.st_size)
            if seen != self._seen:
                with self._path.open() as file:
                    self._numbers = dict(counts(*ROLES).parse(file.read(MAX_BYTES).strip()))
                self._seen = seen
        except (OSError, ValueError) as error:
            if self._seen != str(error):
                self._seen = str(error)
                logger.warning("the file of expected workers cannot be read", extra={"error": self._seen})
        return self._numbers
