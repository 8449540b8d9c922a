"""Bounds of numbers, and the error for a value outside them, which names the field and the rule."""

import struct
from dataclasses import dataclass
from typing import Any

from services.runtime.errors import InvalidRequest

MAX_SHOWN_CHARS = 64
"""The longest value that an error repeats in full."""


SMALLEST_FLOAT = 2.0**-149
"""The smallest positive number that a `float` of the wire holds; half of it is rounded to zero."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """A closed interval of numbers. A float's bounds admit integers too.

    Numbers are checked in 64 bits, and a `float` of the wire has 32. A float's bounds are numbers that 32 bits hold, so
    rounding takes no number out of them: a worker admits every number that the gateway has admitted.
    """

    kind: type[int] | type[float]
    minimum: float
    maximum: float

    def __post_init__(self) -> None:
        if self.kind is float:
            for bound in (self.minimum, self.maximum):
                assert struct.unpack("f", struct.pack("f", bound))[0] == bound, f"{bound} is rounded on the wire"

    @property
    def kinds(self) -> tuple[type, ...]:
        """The types of the numbers within the bounds. bool is not one of them."""
        return (int,) if self.kind is int else (int, float)

    def admits(self, value: Any) -> bool:
        """Returns whether a value is such a number within the bounds; true, NaN and, for an integer, 1.0 are not."""
        return type(value) in self.kinds and bool(self.minimum <= value <= self.maximum)

    def check(self, value: Any, field_name: str) -> None:
        """Raises InvalidRequest, which names the field and the rule, unless the value is within the bounds."""
        if not self.admits(value):
            raise invalid_value(field_name, value, self.rule)

    @property
    def rule(self) -> str:
        """What a value must be, in words."""
        if self.kind is int:
            return f"an integer in [{self.minimum}, {self.maximum}]"
        return f"a number in [{self.minimum:g}, {self.maximum:g}]"

    @property
    def schema(self) -> dict[str, Any]:
        """The bounds in the words of JSON Schema."""
        return {"minimum": self.minimum, "maximum": self.maximum}


def invalid_value(name: str, value: Any, rule: str, field_name: str | None = None) -> InvalidRequest:
    """Returns the error for a value that breaks a rule; `name` is what the message calls its field `field_name`."""
    message = f"{name} is {_shown(value)} but must be {rule}"
    return InvalidRequest(message, field=field_name or name, code="invalid_value", rule=f"must be {rule}")


def _shown(value: Any) -> str:
    if type(value) is int and not -(10**30) < value < 10**30:
        return "a huge integer"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…"
