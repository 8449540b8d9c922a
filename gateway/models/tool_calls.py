"""Tool calls and reasoning in the text of an answer: found while it arrives, however it is cut.

Pure: text in, pieces out. What has been given out after some text depends on that text alone and not on the parts in
which it came, so a stream that another gateway resumes continues where it was. Knows no API.

Three formats, each named after the models that write it:

    hermes    <tool_call>{"name": …, "arguments": {…}}</tool_call>    Hermes 2 and 3, Qwen 2.5, Qwen 3
    llama3    {"name": …, "parameters": {…}}                          Llama 3.1 to 3.3; may follow <|python_tag|>
    mistral   [TOOL_CALLS][{"name": …, "arguments": {…}}, …]          Mistral 7B v0.3 to Mistral Nemo

A call is announced when its name is known, is one of the given ones, and its arguments begin; from then on its
arguments are passed on as they are written. What breaks the format before that is content, character by character.
What breaks it later cannot be taken back from a client that reads a stream: the call keeps what it has, which is then
incomplete JSON, and the rest is content. White space beside calls and around reasoning is dropped.
"""

import re
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import Protocol

from gateway.models.answer_pieces import (
    SPACE,
    Arguments,
    CallStart,
    Content,
    Piece,
    num_certain,
    without_spaces,
)
from gateway.models.call_reader import CallReader, State
from gateway.models.reasoning import ReasoningParser
from services.structured.form import ToolFormat

PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS = "[TOOL_CALLS]"
MARKERS = (PYTHON_TAG, TOOL_CALLS, "<tool_call>", "</tool_call>")
"""Marks of calls that may be special tokens, whose text would not be shown otherwise."""

MARK = "\udfff"
"""Stands in an answer's text for a mark that begins calls; no text can hold it, as it is half of a surrogate pair."""

_PART_CHARS = 4096


def tool_format_of(template: str) -> ToolFormat | None:
    """Returns the format that a chat template teaches its model, or None for one that is not known here."""
    if "<tool_call>" in template and "<function=" not in template:
        return ToolFormat.HERMES
    if TOOL_CALLS in template and "[ARGS]" not in template:
        return ToolFormat.MISTRAL
    if PYTHON_TAG in template or _LLAMA3_RULE.search(template) is not None:
        return ToolFormat.LLAMA3
    return None


_MARKERS = {ToolFormat.HERMES: "<tool_call>", ToolFormat.LLAMA3: PYTHON_TAG, ToolFormat.MISTRAL: TOOL_CALLS}

_LLAMA3_RULE = re.compile(r'\{\\?"name\\?": function name, \\?"parameters\\?":')


class Marks(Protocol):
    """Tells the marks of calls that came as tokens from those that are only text."""

    def put_into(self, text: str, token_ids: Sequence[int]) -> str:
        """Returns the text with MARK for each that came as a token; what may yet become one is held back."""
        ...

    def finish(self) -> str:
        """Returns what was held back."""
        ...


class AnswerParser:
    """One answer's text as pieces.

    `tool_format` None: no calls are looked for. `names` are the tools that may be called. `has_reasoning`: the
    answer may begin with it; `is_reasoning`: the prompt has opened it already. `is_forced`: the answer is calls and
    nothing else, so its rest is not content when it was cut. `marks` finds those marks that came as tokens:
    then calls begin only there, and `push` needs the tokens.
    """

    def __init__(
        self,
        *,
        tool_format: ToolFormat | None = None,
        names: Set[str] = frozenset(),
        has_reasoning: bool = False,
        is_reasoning: bool = False,
        is_forced: bool = False,
        marks: Marks | None = None,
    ) -> None:
        self.reasoning = ReasoningParser(is_inside=is_reasoning) if has_reasoning else None
        self._is_forced = is_forced
        self._calls = None
        self._marker = ""
        self._marks = None
        if tool_format is not None:
            self._marker = _MARKERS[tool_format]
            self._marks = marks
            self._calls = ToolCallParser(tool_format, names, marker=self._marker if marks is None else MARK)

    @property
    def num_complete_calls(self) -> int:
        """The number of calls whose arguments are complete."""
        return 0 if self._calls is None else self._calls.num_complete

    def push(self, text: str, token_ids: Sequence[int] = ()) -> list[Piece]:
        """Returns the pieces that became certain with this text. `token_ids` came with it, or before it."""
        if self._marks is None:
            return self._push(text)
        return [self._shown(piece) for piece in self._push(self._marks.put_into(text, token_ids))]

    def finish(self) -> list[Piece]:
        """Returns what was held back, when the answer has ended."""
        pieces = [] if self._marks is None else self._push(self._marks.finish())
        pieces += [] if self.reasoning is None else self._with_calls(self.reasoning.finish())
        pieces += [] if self._calls is None else self._calls.finish()
        return [self._shown(piece) for piece in pieces if not (self._is_forced and isinstance(piece, Content))]

    def _push(self, text: str) -> list[Piece]:
        if not text:
            return []
        pieces: list[Piece] = [Content(text)] if self.reasoning is None else self.reasoning.push(text)
        return self._with_calls(pieces)

    def _shown(self, piece: Piece) -> Piece:
        if isinstance(piece, CallStart) or MARK not in piece.text:
            return piece
        return replace(piece, text=piece.text.replace(MARK, self._marker))

    def _with_calls(self, pieces: list[Piece]) -> list[Piece]:
        if self._calls is None:
            return pieces
        found: list[Piece] = []
        for piece in pieces:
            found += self._calls.push(piece.text) if isinstance(piece, Content) else (piece,)
        return found


class ToolCallParser:
    """Divides an answer into calls and content. Each character is looked at a bounded number of times."""

    def __init__(self, tool_format: ToolFormat, names: Set[str], *, marker: str) -> None:
        self._format = tool_format
        self._marker = marker
        self._names = names
        self._read: Callable[[], bool] = self._read_content
        self._text = ""
        """The text that was pushed and is not read yet."""
        self._opening: list[str] = []
        """Text that was read, and becomes content if it turns out to begin no call."""
        self._space: list[str] = []
        """White space that is content if content follows, and separators of two calls without markers."""
        self._skipped: list[str] = []
        """White space before `_text` whose place is not known yet."""
        self._call = CallReader(names)
        self._is_call_next = tool_format is ToolFormat.LLAMA3
        """Whether a brace here begins a call without any marker."""
        self._has_content = False
        self._num_calls = 0
        self._pieces: list[Piece] = []
        self.num_complete = 0
        """Calls whose arguments are complete."""

    def push(self, text: str) -> list[Piece]:
        """Returns the pieces that became certain with this text."""
        # Each mark and each call that is found costs a copy of what comes after it.
        for start in range(0, len(text), _PART_CHARS):
            self._text += text[start : start + _PART_CHARS]
            while self._read():
                pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """Returns what was held back, when the answer has ended."""
        rest = "".join((*self._opening, self._call.held, *self._skipped, self._text))
        self._opening, self._skipped, self._text = [], [], ""
        self._call = CallReader(self._names)
        if rest.strip(SPACE):
            self._show(rest)
        elif not self._num_calls:
            self._space.append(rest)
        space = "".join(self._space)
        if space and not self._num_calls:
            self._pieces.append(Content(space))
        self._space = []
        pieces, self._pieces = self._pieces, []
        return pieces

    # Each of these reads more of `_text`. True: `_read` has more to do; False: more text is needed.

    def _read_content(self) -> bool:
        if self._is_call_next:
            if not self._skip(SPACE + ";" if self._num_calls else SPACE):
                return False
            if self._text[0] == "{":
                self._space.append(self._take_skipped())
                return self._go_on(self._read_call)
            self._is_call_next = self._marker.startswith(self._text[: len(self._marker)])
        text = self._text = self._take_skipped() + self._text
        before, marker, rest = text.partition(self._marker)
        if marker:
            self._show(before)
            self._text = rest
            self._opening = [marker]
            return self._go_on(self._read_list if self._format is ToolFormat.MISTRAL else self._read_brace)
        length = num_certain(text, self._marker)
        if not self._is_call_next:
            self._show(text[:length])
            self._text = text[length:]
        return False

    def _read_list(self) -> bool:
        return self._read_one("[", self._read_brace)

    def _read_brace(self) -> bool:
        return self._read_one("{", self._read_call, is_kept=True)

    def _read_one(self, wanted: str, then: Callable[[], bool], *, is_kept: bool = False) -> bool:
        """Reads white space and one character that must come next; with `is_kept` it stays to be read."""
        self._text = without_spaces(self._text, self._opening)
        if not self._text:
            return False
        if self._text[0] != wanted:
            return self._give_up()
        if not is_kept:
            self._opening.append(wanted)
            self._text = self._text[1:]
        return self._go_on(then)

    def _read_call(self) -> bool:
        call = self._call
        num_read, state = call.read(self._text)
        self._text = self._text[num_read:]
        if call.is_announced and not call.is_shown:
            call.is_shown = True
            self._opening = []
            if self._space:
                self._space[-1] = self._space[-1].replace(";", "")
            self._is_call_next = False
            self._pieces.append(CallStart(self._num_calls, call.name or ""))
            self._num_calls += 1
        arguments = call.take_arguments()
        if arguments:
            self._pieces.append(Arguments(self._num_calls - 1, arguments))
        if state is State.GOING:
            return False
        self.num_complete += call.is_shown and call.has_arguments
        if state is State.BROKEN:
            return self._give_up()
        self._call = CallReader(self._names)
        if self._format is ToolFormat.LLAMA3:
            self._is_call_next = True
            return self._go_on(self._read_content)
        return self._go_on(self._read_close if self._format is ToolFormat.HERMES else self._read_comma)

    def _read_close(self) -> bool:
        """Reads the closing tag; a call without it counts as well."""
        self._skip(SPACE)
        if self._text.startswith("</tool_call>"):
            self._text = self._text.removeprefix("</tool_call>")
            self._skipped.clear()
            return self._go_on(self._read_content)
        return not "</tool_call>".startswith(self._text) and self._go_on(self._read_content)

    def _read_comma(self) -> bool:
        """Reads a comma before the next call, or the end of the list."""
        if not self._skip(SPACE):
            return False
        if self._text[0] in ",]":
            self._opening = [","] if self._text[0] == "," else []
            self._text = self._text[1:]
            self._skipped.clear()
            return self._go_on(self._read_brace if self._opening else self._read_content)
        return self._go_on(self._read_content)

    def _give_up(self) -> bool:
        """Turns what was begun into content, since it is not a call, or no longer one."""
        held, self._opening = "".join((*self._opening, self._call.held)), []
        self._call = CallReader(self._names)
        self._is_call_next = False
        self._show(held)
        return self._go_on(self._read_content)

    def _go_on(self, read: Callable[[], bool]) -> bool:
        self._read = read
        return True

    def _skip(self, chars: str) -> bool:
        """Reads these characters; returns whether anything comes after them."""
        self._text = without_spaces(self._text, self._skipped, chars)
        return bool(self._text)

    def _take_skipped(self) -> str:
        skipped = "".join(self._skipped)
        self._skipped.clear()
        return skipped

    def _show(self, text: str) -> None:
        """Gives out content; white space at its end waits until more follows."""
        shown = text.rstrip(SPACE)
        if not shown:
            self._space.append(text)
            return
        space = text[len(shown) :]
        if self._num_calls and not self._has_content:
            shown = shown.lstrip(SPACE)
        else:
            shown = "".join((*self._space, shown))
        self._pieces.append(Content(shown))
        self._space = [space]
        self._has_content = True
        self._is_call_next = False
