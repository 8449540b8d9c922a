"""Reasoning at the beginning of an answer: found while its text arrives, however it is cut."""

from collections.abc import Callable

from gateway.models.answer_pieces import SPACE, Content, Piece, Reasoning, num_certain, without_spaces

REASONING_MARKS = ("<think>", "</think>")
"""Before and after reasoning, in responses and in the messages of an assistant."""


def has_reasoning(template: str) -> bool:
    """Returns whether a chat template is of a model that thinks between `<think>` and `</think>`."""
    return "</think>" in template


class ReasoningParser:
    """Divides an answer into what was thought and what is said. `is_inside`: the prompt ends with `<think>`."""

    def __init__(self, *, is_inside: bool = False) -> None:
        self._is_opened = is_inside
        self._read: Callable[[], list[Piece]] = self._read_start
        self._spaces: list[str] = []
        """White space that waits for what follows it; in parts, because a hostile answer has much of it."""
        self._held = ""
        """The text after that, which is not read yet."""
        self._has_shown = False

    @property
    def is_inside(self) -> bool:
        """Whether the answer has begun with reasoning and nothing has been said yet."""
        return self._read in (self._read_reasoning, self._read_gap) or (
            self._read == self._read_start and self._is_opened
        )

    def push(self, text: str) -> list[Piece]:
        """Returns the pieces that became certain with this text."""
        self._held += text
        return self._read()

    def finish(self) -> list[Piece]:
        """Returns what was held back, when the answer has ended."""
        is_reasoning = self.is_inside
        text, self._held = self._take_spaces() + self._held, ""
        if is_reasoning:
            text = text.strip(SPACE) if not self._has_shown else text.rstrip(SPACE)
            return [Reasoning(text)] if text else []
        return [Content(text)] if text else []

    def _read_start(self) -> list[Piece]:
        """Reads up to the first visible character: only here can reasoning begin."""
        self._held = without_spaces(self._held, self._spaces)
        if self._held.startswith("<think>"):
            self._spaces.clear()
            self._held = self._held.removeprefix("<think>")
            return self._go_on(self._read_reasoning)
        if "<think>".startswith(self._held):
            return []
        return self._go_on(self._read_reasoning if self._is_opened else self._read_content)

    def _read_reasoning(self) -> list[Piece]:
        text, end, rest = self._held.partition("</think>")
        certain = text if end else text[: num_certain(text, "</think>")]
        self._held = rest if end else text[len(certain) :]
        shown = certain.rstrip(SPACE)
        pieces: list[Piece] = []
        if shown:
            before = self._take_spaces()
            pieces.append(Reasoning(before + shown if self._has_shown else shown.lstrip(SPACE)))
            self._has_shown = True
        self._spaces.append(certain[len(shown) :])
        if end:
            self._spaces.clear()
            pieces += self._go_on(self._read_gap)
        return pieces

    def _read_gap(self) -> list[Piece]:
        """Reads white space between what was thought and what is said."""
        self._held = self._held.lstrip(SPACE)
        return self._go_on(self._read_content) if self._held else []

    def _read_content(self) -> list[Piece]:
        text, self._held = self._take_spaces() + self._held, ""
        return [Content(text)] if text else []

    def _take_spaces(self) -> str:
        spaces = "".join(self._spaces)
        self._spaces.clear()
        return spaces

    def _go_on(self, read: Callable[[], list[Piece]]) -> list[Piece]:
        self._read = read
        return read()
