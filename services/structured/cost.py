"""Refuses schemas whose compilation the grammar library does not bound itself.

Its own limits ("fuel") end most of what is too complex after some tens of milliseconds. Measured with llguidance 1.9.1,
they do not see what is counted here: forty bytes were enough for minutes. What is allowed here takes 0.5 s of a core at
most, as far as schemas of up to 64 KiB were found. Pure: schemas in, a reason out.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any

MAX_MULTIPLES = 20_000
"""The sum of what numbers must be multiples of, without trailing zeros: about 5 µs for each unit."""
MAX_PATTERN_CHARS = 4096
"""Time grows with the square: 20,000 optional characters take 5 s."""
MAX_COMBINED_PATTERNS = 10
"""Different ones, where a text may have to match several: time doubles with each, and 16 take 2 s."""
MAX_PATTERN_PROPERTIES = 32
"""Each is compared with each, and with each name."""
MAX_MEMBERS = 2000
"""Each is compared with each: 6000 take 3 s."""

LONG_TEXT_CHARS = 200
"""From here on texts are not forced. Where only one text is possible the library makes it tokens, all of it, for each
mask anew: 11 ms a token for 60,000 characters. Unforced, any of the tokens that the text can begin with may come, and
that takes microseconds."""
_REPEATED = re.compile(r"\{\s*\d")

_WITHOUT_EFFECT = frozenset({"$comment", "$id", "$schema", "description", "title"})

_TOGETHER = ("allOf", "anyOf", "oneOf", "$ref")
_WITHOUT_FORCE = frozenset(
    {"type", "title", "description", "default", "examples", "deprecated", "$defs", "definitions", "$schema", "$id"}
)


def too_complex(schemas: Iterable[Any]) -> str | None:
    """Why these schemas, which are decoded and compiled as one, cost too much; None: they do not."""
    counts = _Counts()
    for schema in schemas:
        counts.add(schema)
    return counts.reason()


def may_force_long_texts(schemas: Iterable[Any]) -> bool:
    """Whether there may be a place where one text of `LONG_TEXT_CHARS` or more, or a part of one, is all that can come.

    Such a text is in the schema, or is a number, or comes from a pattern that repeats a part or from a least length.
    """
    level = [(schema, False) for schema in schemas]
    while level:
        if any(_may_be_long(value) for value, _ in level):
            return True
        level = [inner for value, is_data in level for inner in _values_in(value, is_data=is_data)]
    return False


def _may_be_long(value: Any) -> bool:
    if isinstance(value, dict):
        least = value.get("minLength")
        return (isinstance(least, int | float) and least >= LONG_TEXT_CHARS) or any(map(_may_be_long, value))
    if isinstance(value, str):
        return len(value) >= LONG_TEXT_CHARS or _REPEATED.search(value) is not None
    return isinstance(value, int | float) and abs(value) >= 10**LONG_TEXT_CHARS


def _values_in(value: Any, *, is_data: bool) -> Iterator[tuple[Any, bool]]:
    """Values in a schema, or in data of it, but for the texts of a schema that do not matter to what can come."""
    if isinstance(value, list):
        yield from ((inner, is_data) for inner in value)
    elif isinstance(value, dict):
        for word, inner in value.items():
            if is_data or word not in _WITHOUT_EFFECT or not isinstance(inner, str):
                yield inner, is_data or word in ("const", "enum")


class _Counts:
    """Sums over all that is in schemas, values of `enum` and such too, which are few where they look like schemas."""

    def __init__(self) -> None:
        self._multiples: list[int] = []
        self._patterns: set[str] = set()
        self._num_pattern_properties = 0
        self._num_members = 0
        self._num_required = 0
        self._are_combined = False

    def add(self, schema: Any) -> None:
        level = [schema]
        while level:
            for one in level:
                if isinstance(one, dict):
                    self._add_object(one)
            level = [
                inner
                for one in level
                if isinstance(one, dict | list)
                for inner in (one.values() if isinstance(one, dict) else one)
            ]

    def _add_object(self, schema: Mapping[str, Any]) -> None:
        multiple = schema.get("multipleOf")
        if type(multiple) is int or (type(multiple) is float and math.isfinite(multiple)):
            digits = Decimal(str(multiple)).normalize().as_tuple().digits
            self._multiples.append(int("".join(map(str, digits))) or 1)
        patterns = [schema["pattern"]] if isinstance(schema.get("pattern"), str) else []
        of_names = schema.get("patternProperties")
        if isinstance(of_names, dict):
            patterns += of_names
            self._num_pattern_properties += len(of_names)
        self._patterns |= {*patterns, *([schema["format"]] if isinstance(schema.get("format"), str) else ())}
        members, required = schema.get("properties"), schema.get("required")
        self._num_members += len(members) if isinstance(members, dict) else 0
        self._num_required += len(required) if isinstance(required, list) else 0
        together = [word for word in _TOGETHER if word in schema]
        all_of = schema.get("allOf")
        self._are_combined |= isinstance(all_of, list) and len(all_of) > 1
        self._are_combined |= bool(together) and bool(schema.keys() - _WITHOUT_FORCE - {together[0]})

    def reason(self) -> str | None:
        if any(len(pattern) > MAX_PATTERN_CHARS for pattern in self._patterns):
            return f"a pattern has more than {MAX_PATTERN_CHARS} characters"
        if self._are_combined and len(self._patterns) > MAX_COMBINED_PATTERNS:
            return f"more than {MAX_COMBINED_PATTERNS} patterns and formats are in a schema that combines others"
        # A multiple of two numbers is one of their least common multiple.
        combined = math.lcm(*self._multiples) if self._are_combined else 0
        if max(combined, sum(self._multiples)) > MAX_MULTIPLES:
            return f"multipleOf is too large, or there are too many; together they may be {MAX_MULTIPLES}"
        if self._num_pattern_properties > MAX_PATTERN_PROPERTIES:
            return f"there are more than {MAX_PATTERN_PROPERTIES} patternProperties"
        if max(self._num_members, self._num_required) > MAX_MEMBERS:
            return f"there are more than {MAX_MEMBERS} properties"
        return None
