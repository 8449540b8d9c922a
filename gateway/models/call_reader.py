"""One call's JSON object: read character by character, so that its arguments can be passed on while they come."""

import json
from collections.abc import Callable, Set
from enum import Enum, auto

from gateway.models.answer_pieces import SPACE
from gateway.models.json_objects import ObjectChecker

MAX_NAME_CHARS = 64

_MAX_KEY_CHARS = 16
_MAX_STRING_CHARS = 6 * MAX_NAME_CHARS
"""The longest name or id as it is written, when each character is an escape."""


class State(Enum):
    """Where the reading of a call stands."""

    GOING = auto()
    DONE = auto()
    BROKEN = auto()
    """The next character does not belong to it."""


class CallReader:
    """Reads the JSON object of one call: `name` and `arguments` or `parameters`, `id` and `type` beside them."""

    def __init__(self, names: Set[str]) -> None:
        self._names = names
        self._read_char: Callable[[str], bool] = self._first
        self._held: list[str] = []
        self._key = ""
        self._word: list[str] = []
        self._is_escaped = False
        self._seen: set[str] = set()
        self._arguments: list[str] = []
        self._json = ObjectChecker()
        self._is_done = False
        self.name: str | None = None
        self.is_announced = False
        self.is_shown = False
        self.has_arguments = False
        """Whether they are complete."""

    @property
    def held(self) -> str:
        """The text that was read and that no piece has."""
        return "".join(self._held)

    def read(self, text: str) -> tuple[int, State]:
        """Reads more of the object; returns how many characters it took, and where it stands."""
        for position, char in enumerate(text):
            if not self._read_char(char):
                return position, State.BROKEN
            if self._is_done:
                self._held.clear()
                return position + 1, State.DONE
        return len(text), State.GOING

    def take_arguments(self) -> str:
        """Returns the arguments that were read since the last time, once the call is announced."""
        if not self.is_announced:
            return ""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    # Each of these takes one character. False: it does not belong here.

    def _first(self, char: str) -> bool:
        return self._keep(char, self._before_key) if char == "{" else False

    def _before_key(self, char: str) -> bool:
        if char in SPACE:
            return self._keep(char)
        self._word.clear()
        return self._keep(char, self._in_key) if char == '"' else False

    def _in_key(self, char: str) -> bool:
        if char != '"':
            self._word.append(char)
            return len(self._word) <= _MAX_KEY_CHARS and self._keep(char)
        self._key = "".join(self._word)
        kind = "arguments" if self._key == "parameters" else self._key
        if kind not in ("name", "arguments", "id", "type") or kind in self._seen:
            return False
        self._seen.add(kind)
        return self._keep(char, self._before_colon)

    def _before_colon(self, char: str) -> bool:
        if char in SPACE:
            return self._keep(char)
        return self._keep(char, self._before_value) if char == ":" else False

    def _before_value(self, char: str) -> bool:
        if char in SPACE:
            return self._keep(char)
        if self._key in ("arguments", "parameters"):
            return char == "{" and self._begin_arguments()
        self._word.clear()
        return self._keep(char, self._in_string) if char == '"' else False

    def _in_string(self, char: str) -> bool:
        if char != '"' or self._is_escaped:
            self._is_escaped = char == "\\" and not self._is_escaped
            self._word.append(char)
            return len(self._word) <= _MAX_STRING_CHARS and self._keep(char)
        if self._key == "name":
            try:
                name = json.loads(f'"{"".join(self._word)}"')
            except ValueError:
                return False
            if name not in self._names:
                return False
            self.name = name
            self._keep(char)
            self._announce()
        else:
            self._keep(char)
        self._read_char = self._after_value
        return True

    def _in_arguments(self, char: str) -> bool:
        if not self._json.take(char):
            return False
        self._arguments.append(char)
        if not self.is_announced:
            self._held.append(char)
        if self._json.is_complete:
            self.has_arguments = True
            self._read_char = self._after_value
        return True

    def _after_value(self, char: str) -> bool:
        if char in SPACE:
            return self._keep(char)
        if char == ",":
            return self._keep(char, self._before_key)
        self._is_done = char == "}" and self.name is not None and self.has_arguments
        return self._is_done

    def _begin_arguments(self) -> bool:
        self._read_char = self._in_arguments
        self._json.take("{")
        self._arguments.append("{")
        self._held.append("{")
        self._announce()
        return True

    def _announce(self) -> None:
        if self.name is not None and self._arguments:
            self.is_announced = True
            self._held.clear()

    def _keep(self, char: str, then: Callable[[str], bool] | None = None) -> bool:
        self._held.append(char)
        if then is not None:
            self._read_char = then
        return True
