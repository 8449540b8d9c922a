"""The pieces that an answer's text is divided into, and what their parsers share."""

from dataclasses import dataclass

SPACE = " \t\r\n"
"""The white space that is dropped beside calls and around reasoning."""


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; calls are numbered from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next part of a call's arguments, as the model wrote them."""

    index: int
    text: str


Piece = Content | Reasoning | CallStart | Arguments


def without_spaces(text: str, spaces: list[str], chars: str = SPACE) -> str:
    """Returns what comes after the white space at the beginning, which is added to `spaces`."""
    rest = text.lstrip(chars)
    if len(rest) < len(text):
        spaces.append(text[: len(text) - len(rest)])
    return rest


def num_certain(text: str, marker: str) -> int:
    """Returns how much of `text` can no longer be the beginning of `marker`."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return len(text) - length
    return len(text)
