"""Keeps the text of clients from becoming marks of the conversation, such as the tokens that begin a turn. Pure.

A mark is an added token of the tokenizer, which is one token wherever its text occurs. Added tokens that are not
special and consist only of letters, digits, underscores, and white space are not marks. Chat templates write marks. A
client that could write a mark could write turns of other roles, so marks in a client's strings become plain text.
"""

import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer

_WORDS = re.compile(r"[\w\s]*")
"""Added tokens of letters, digits, underscores, and white space extend the vocabulary. Unless they are special, they
are ordinary text, not marks."""


class Stretch(NamedTuple):
    """A part of a rendered conversation. If `is_plain`, its marks are ordinary text."""

    text: str
    is_plain: bool


class TemplateMarks:
    """The marks of one tokenizer.

    `kept` are marks that stay in the content of an assistant's message, because the chat template searches for them.
    """

    def __init__(self, tokenizer: Tokenizer, *, kept: Collection[str] = ()) -> None:
        marks = {
            token_id: token
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.content and (token.special or not _WORDS.fullmatch(token.content))
        }
        self.ids = frozenset(marks)
        texts = {token.content for token in marks.values()}
        normalized = {token.content for token in marks.values() if token.normalized}
        self._normalize: Callable[[str], str] | None = None
        forms: set[str] = set()
        if normalized and tokenizer.normalizer is not None:
            self._normalize = tokenizer.normalizer.normalize_str
            forms = {*map(self._normalize, normalized)} - {""}
        whole, beginning = _any_of(texts | forms) or "(?!)", _any_of(_beginnings(texts)) or "(?!)"
        self.pattern = re.compile(whole)
        """Finds a mark, the longest that fits."""
        self._ending = re.compile(rf"{beginning}\Z")
        self._kept = re.compile(f"({'|'.join(map(re.escape, kept))})") if kept else None
        self._max_chars = max(map(len, texts | forms), default=0)

    def are_in(self, value: Any) -> bool:
        """Returns whether a string in `value`, at any depth, holds a mark or ends with the beginning of one."""
        if isinstance(value, str):
            has_mark = self.pattern.search(value) or self._begun_at_end(value)
            return has_mark is not None or self._has_hidden(value)
        if isinstance(value, Mapping):
            return any(map(self.are_in, value)) or any(map(self.are_in, value.values()))
        return isinstance(value, Sequence) and any(map(self.are_in, value))

    def replaced(self, text: str, stand_in: Callable[[str], str], *, keeps: bool = False) -> str:
        """Returns a text with `stand_in` of each mark, and of the beginning of a mark at its end.

        `keeps` exempts the marks that stay in an assistant's content. The text between two of them is treated as a text
        of its own, because a template may remove them.
        """
        if keeps and self._kept is not None:
            parts = self._kept.split(text)
            parts[::2] = [self.replaced(part, stand_in) for part in parts[::2]]
            return "".join(parts)
        if self._normalize is not None and self._has_hidden(text):
            text = self._normalize(text)
        parts, end = [], 0
        for mark in self.pattern.finditer(text):
            parts += [text[end : mark.start()], stand_in(mark[0])]
            end = mark.end()
        rest = text[end:]
        begun = self._begun_at_end(rest)
        if begun is not None:
            rest = rest[: begun.start()] + stand_in(begun[0]) + rest[begun.end() :]
        return "".join((*parts, rest))

    def completes(self, text: str, beginning: str) -> bool:
        """Returns whether a mark starts in `beginning` and ends in the `text` after it."""
        found = self.pattern.finditer(beginning + text[: self._max_chars])
        return any(mark.start() < len(beginning) < mark.end() for mark in found)

    def _begun_at_end(self, text: str) -> re.Match[str] | None:
        stripped = text.rstrip()
        return self._ending.search(stripped, max(0, len(stripped) - self._max_chars))

    def _has_hidden(self, text: str) -> bool:
        """Returns whether normalizing creates marks that the text does not hold, such as from full-width letters."""
        if self._normalize is None:
            return False
        return self.pattern.search(self._normalize(self.pattern.sub("\ue000", text))) is not None


class Guard:
    """Stand-ins for the marks in one conversation: put in before it is rendered, and taken out again afterwards."""

    def __init__(self, marks: TemplateMarks) -> None:
        self._marks = marks
        self._nonce = secrets.token_hex(8)
        self._replaced: list[str] = []

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a message with stand-ins in each of its strings."""
        keeps = message["role"] == "assistant"
        return {name: self.value(value, keeps=keeps and name == "content") for name, value in message.items()}

    def value(self, value: Any, *, keeps: bool = False) -> Any:
        """Returns a JSON value with stand-ins in each of its strings, names of members included."""
        if isinstance(value, str):
            return self._marks.replaced(value, self._stand_in, keeps=keeps)
        if isinstance(value, Mapping):
            return {self.value(name): self.value(inner) for name, inner in value.items()}
        return [*map(self.value, value)] if isinstance(value, Sequence) else value

    def stretches(self, rendered: str) -> list[Stretch]:
        """Returns the rendered conversation in parts, without stand-ins."""
        parts = re.split(f"\ue000{self._nonce}x([0-9]+)\ue001", rendered)
        stretches: list[Stretch] = []
        text = parts[-1]
        for before, number in zip(parts[-3::-2], parts[-2::-2], strict=True):
            replaced = self._replaced[int(number)]
            if self._marks.pattern.search(replaced) or self._marks.completes(text, replaced):
                stretches += [Stretch(text, False), Stretch(replaced, True)]
                text = before
            else:
                text = before + replaced + text
        return [*reversed([*stretches, Stretch(text, False)])]

    def _stand_in(self, text: str) -> str:
        self._replaced.append(text)
        return f"\ue000{self._nonce}x{len(self._replaced) - 1}\ue001"


def _beginnings(texts: Collection[str]) -> set[str]:
    return {text[:length] for text in texts for length in range(1, len(text))}


def _any_of(texts: Collection[str]) -> str:
    """Returns a pattern for any of these, the longest that fits; empty without any.

    A beginning of several is in it once, so a search for hundreds takes no longer.
    """
    groups: dict[str, list[str]] = {}
    for text in filter(None, texts):
        groups.setdefault(text[0], []).append(text)
    branches = []
    for group in groups.values():
        # All texts between the first and the last in order begin as those two do.
        first, last = min(group), max(group)
        length = next((n for n, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
        branches.append(re.escape(first[:length]) + _any_of([text[length:] for text in group]))
    return f"(?:{'|'.join(branches)}){'?' if '' in texts else ''}" if branches else ""
