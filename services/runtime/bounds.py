"""Bounds of numbers, and the error for a value outside them, which names the field and the rule."""

import math
from dataclasses import dataclass, field
from typing import Any

from services.runtime.errors import InvalidRequest

MAX_SHOWN_CHARS = 64
"""The longest value that an error repeats in full."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """A closed interval of numbers, or one that is open below. A float's bounds admit integers too."""

    kind: type[int] | type[float]
    minimum: float
    maximum: float
    excludes_minimum: bool = False
    kinds: tuple[type, ...] = field(init=False)
    """The types of the numbers that are within the bounds; bool is not one of them."""
    lowest: float = field(init=False)
    """The lowest number within the bounds."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", (int,) if self.kind is int else (int, float))
        object.__setattr__(
            self, "lowest", math.nextafter(self.minimum, math.inf) if self.excludes_minimum else self.minimum
        )

    def admits(self, value: Any) -> bool:
        """Returns whether a value is such a number within the bounds; true, NaN and, for an integer, 1.0 are not."""
        return type(value) in self.kinds and bool(self.lowest <= value <= self.maximum)

    def check(self, value: Any, field_name: str) -> None:
        """Raises InvalidRequest, which names the field and the rule, unless the value is within the bounds."""
        if not self.admits(value):
            raise invalid_value(field_name, value, self.rule)

    @property
    def rule(self) -> str:
        """What a value must be, in words."""
        if self.kind is int:
            return f"an integer in [{self.minimum}, {self.maximum}]"
        return f"a number in {'(' if self.excludes_minimum else '['}{self.minimum:g}, {self.maximum:g}]"

    @property
    def schema(self) -> dict[str, Any]:
        """The bounds in the words of JSON Schema."""
        return {"exclusiveMinimum" if self.excludes_minimum else "minimum": self.minimum, "maximum": self.maximum}


def invalid_value(name: str, value: Any, rule: str, field_name: str | None = None) -> InvalidRequest:
    """Returns the error for a value that breaks a rule; `name` is what the message calls its field `field_name`."""
    message = f"{name} is {_shown(value)} but must be {rule}"
    return InvalidRequest(message, field=field_name or name, code="invalid_value", rule=f"must be {rule}")


def _shown(value: Any) -> str:
    if type(value) is int and not -(10**30) < value < 10**30:
        return "a huge integer"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…"
