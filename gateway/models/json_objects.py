"""JSON objects that are checked character by character, while they are being written."""

from collections.abc import Callable

from gateway.models.answer_pieces import SPACE

MAX_DEPTH = 128
"""The depth of nesting; an object that is deeper is an attack on its readers."""


def begins_object(text: str) -> bool:
    """Returns whether a JSON object can begin like this."""
    checker = ObjectChecker()
    return all(not checker.is_complete and checker.take(char) for char in text)


class ObjectChecker:
    """Says of each character whether a JSON object (RFC 8259) can continue with it."""

    def __init__(self) -> None:
        self._take: Callable[[str], bool] = self._open
        self._closers: list[str] = []
        self._is_key = False
        self._num_digits = 0
        self._rest = ""
        self._number = ""
        self.is_complete = False

    def take(self, char: str) -> bool:
        """Returns whether the object can continue with this character; after False it must not be asked again."""
        return self._take(char)

    def _open(self, char: str) -> bool:
        return char == "{" and self._begin(char)

    def _begin(self, char: str) -> bool:
        self._closers.append("}" if char == "{" else "]")
        self._take = self._first_key if char == "{" else self._first_item
        return len(self._closers) <= MAX_DEPTH

    def _end(self) -> bool:
        self._closers.pop()
        self.is_complete = not self._closers
        self._take = self._after
        return True

    def _first_key(self, char: str) -> bool:
        return self._end() if char == "}" else self._next_key(char)

    def _next_key(self, char: str) -> bool:
        if char in SPACE:
            return True
        self._is_key = True
        self._take = self._string
        return char == '"'

    def _colon(self, char: str) -> bool:
        if char == ":":
            self._take = self._value
        return char == ":" or char in SPACE

    def _first_item(self, char: str) -> bool:
        return self._end() if char == "]" else self._value(char)

    def _value(self, char: str) -> bool:
        if char in SPACE:
            return True
        if char in "{[":
            return self._begin(char)
        if char == '"':
            self._is_key = False
            self._take = self._string
            return True
        if char in _LITERALS:
            self._rest = _LITERALS[char]
            self._take = self._literal
            return True
        self._number = ""
        self._take = self._in_number
        return char in "-0123456789" and self._in_number(char)

    def _after(self, char: str) -> bool:
        if char in SPACE:
            return True
        if char == ",":
            self._take = self._next_key if self._closers[-1] == "}" else self._value
            return True
        return char == self._closers[-1] and self._end()

    def _string(self, char: str) -> bool:
        if char == '"':
            self._take = self._colon if self._is_key else self._after
        elif char == "\\":
            self._take = self._escape
        return char >= " "

    def _escape(self, char: str) -> bool:
        self._num_digits = 0
        self._take = self._unicode if char == "u" else self._string
        return char in '"\\/bfnrtu'

    def _unicode(self, char: str) -> bool:
        self._num_digits += 1
        if self._num_digits == 4:
            self._take = self._string
        return char in "0123456789abcdefABCDEF"

    def _literal(self, char: str) -> bool:
        is_right = char == self._rest[0]
        self._rest = self._rest[1:]
        if not self._rest:
            self._take = self._after
        return is_right

    def _in_number(self, char: str) -> bool:
        if char in "+-.eE0123456789":
            # Only what decides how it may continue is kept, so that a long number costs no more than a short one.
            self._number = _NUMBER_STATES.get((self._number, _kind_of(char)), "")
            return bool(self._number)
        self._take = self._after
        return self._number in _NUMBER_ENDS and self._after(char)


_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}

_NUMBER_STATES = {
    ("", "-"): "minus",
    **{(state, "0"): "zero" for state in ("", "minus")},
    **{(state, "1"): "whole" for state in ("", "minus", "whole")},
    ("whole", "0"): "whole",
    **{(state, "."): "point" for state in ("zero", "whole")},
    **{(state, digit): "fraction" for state in ("point", "fraction") for digit in "01"},
    **{(state, "e"): "e" for state in ("zero", "whole", "fraction")},
    **{("e", sign): "sign" for sign in "+-"},
    **{(state, digit): "exponent" for state in ("e", "sign", "exponent") for digit in "01"},
}
_NUMBER_ENDS = frozenset({"zero", "whole", "fraction", "exponent"})


def _kind_of(char: str) -> str:
    if char in "123456789":
        return "1"
    return "e" if char == "E" else char
