"""Tool calls and reasoning in the text of an answer: found while it arrives, however it is cut.

Pure: text in, pieces out. What has been given out after some text depends on that text alone and not on the parts in
which it came, so a stream that is gone on with elsewhere continues where it was. Knows no API.

Three formats, each named after the models that write it:

    hermes    <tool_call>{"name": …, "arguments": {…}}</tool_call>    Hermes 2 and 3, Qwen 2.5, Qwen 3
    llama3    {"name": …, "parameters": {…}}                          Llama 3.1 to 3.3; may follow <|python_tag|>
    mistral   [TOOL_CALLS][{"name": …, "arguments": {…}}, …]          Mistral 7B v0.3 to Mistral Nemo

A call is announced when its name is known, is one of the given ones, and its arguments begin; from then on its
arguments are passed on as they are written. What breaks the format before that is content, character by character.
What breaks it later cannot be taken back from a client that reads a stream: the call keeps what it has, which is then
no complete JSON, and the rest is content. White space beside calls and around reasoning is dropped.
"""

import json
import re
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Protocol

from services.structured.form import ToolFormat

PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS = "[TOOL_CALLS]"
MARKERS = (PYTHON_TAG, TOOL_CALLS, "<tool_call>", "</tool_call>")
"""What is around calls and may be a special token of its models, whose text would not be shown otherwise."""

MAX_NAME_CHARS = 64
MAX_DEPTH = 128
"""Of arguments; deeper ones are no arguments but a way to harm who reads them."""

MARK = "\udfff"
"""In an answer's text in place of a mark that begins calls; no text can hold it, because it is half of a pair."""

_SPACE = " \t\r\n"
_MAX_KEY_CHARS = 16
_MAX_STRING_CHARS = 6 * MAX_NAME_CHARS
"""Of a name or an id as it is written, when each character is an escape."""
_PART_CHARS = 4096


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model has thought before it answered."""

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


def tool_format_of(template: str) -> ToolFormat | None:
    """The format that a chat template teaches its model; None: none that is known here."""
    if "<tool_call>" in template and "<function=" not in template:
        return ToolFormat.HERMES
    if TOOL_CALLS in template and "[ARGS]" not in template:
        return ToolFormat.MISTRAL
    if PYTHON_TAG in template or _LLAMA3_RULE.search(template) is not None:
        return ToolFormat.LLAMA3
    return None


def has_reasoning(template: str) -> bool:
    """Whether a chat template belongs to a model that thinks between `<think>` and `</think>`."""
    return "</think>" in template


_MARKERS = {ToolFormat.HERMES: "<tool_call>", ToolFormat.LLAMA3: PYTHON_TAG, ToolFormat.MISTRAL: TOOL_CALLS}

_LLAMA3_RULE = re.compile(r'\{\\?"name\\?": function name, \\?"parameters\\?":')


class Marks(Protocol):
    """Knows which of an answer's marks that begin calls came as tokens, and which only have their text."""

    def put_into(self, text: str, token_ids: Sequence[int]) -> str:
        """The text with MARK for each of the former; what may yet become one is held back."""
        ...

    def finish(self) -> str:
        """What was held back."""
        ...


class AnswerParser:
    """One answer's text as pieces.

    `tool_format` None: there are no calls to look for. `names` are the tools that may be called. `has_reasoning`: the
    answer may begin with it; `is_reasoning`: the prompt has opened it already. `is_forced`: the answer is calls and
    nothing else, so what is left of it when it was cut is no content. `marks` finds those marks that came as tokens:
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
        """Calls whose arguments are complete."""
        return 0 if self._calls is None else self._calls.num_complete

    def push(self, text: str, token_ids: Sequence[int] = ()) -> list[Piece]:
        """The pieces that became certain with this text. `token_ids` came with it; text may come later than they."""
        if self._marks is None:
            return self._push(text)
        return [self._shown(piece) for piece in self._push(self._marks.put_into(text, token_ids))]

    def finish(self) -> list[Piece]:
        """What was held back, when the answer has ended."""
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


class ReasoningParser:
    """Divides an answer into what was thought and what is said. `is_inside`: the prompt ends with `<think>`."""

    def __init__(self, *, is_inside: bool = False) -> None:
        self._is_opened = is_inside
        self._read: Callable[[], list[Piece]] = self._read_start
        self._spaces: list[str] = []
        """White space that waits for what comes after it; in parts, because much of it may come."""
        self._held = ""
        """What comes after that and was not read."""
        self._has_shown = False

    @property
    def is_inside(self) -> bool:
        """Whether the answer has begun with reasoning and nothing was said as yet."""
        return self._read in (self._read_reasoning, self._read_gap) or (
            self._read == self._read_start and self._is_opened
        )

    def push(self, text: str) -> list[Piece]:
        """The pieces that became certain with this text."""
        self._held += text
        return self._read()

    def finish(self) -> list[Piece]:
        """What was held back, when the answer has ended."""
        is_reasoning = self.is_inside
        text, self._held = self._take_spaces() + self._held, ""
        if is_reasoning:
            text = text.strip(_SPACE) if not self._has_shown else text.rstrip(_SPACE)
            return [Reasoning(text)] if text else []
        return [Content(text)] if text else []

    def _read_start(self) -> list[Piece]:
        """Before the first visible character: only here thinking can begin."""
        self._held = _without_spaces(self._held, self._spaces)
        if self._held.startswith("<think>"):
            self._spaces.clear()
            self._held = self._held.removeprefix("<think>")
            return self._go_on(self._read_reasoning)
        if "<think>".startswith(self._held):
            return []
        return self._go_on(self._read_reasoning if self._is_opened else self._read_content)

    def _read_reasoning(self) -> list[Piece]:
        text, end, rest = self._held.partition("</think>")
        certain = text if end else text[: _num_certain(text, "</think>")]
        self._held = rest if end else text[len(certain) :]
        shown = certain.rstrip(_SPACE)
        pieces: list[Piece] = []
        if shown:
            before = self._take_spaces()
            pieces.append(Reasoning(before + shown if self._has_shown else shown.lstrip(_SPACE)))
            self._has_shown = True
        self._spaces.append(certain[len(shown) :])
        if end:
            self._spaces.clear()
            pieces += self._go_on(self._read_gap)
        return pieces

    def _read_gap(self) -> list[Piece]:
        """Between what was thought and what is said."""
        self._held = self._held.lstrip(_SPACE)
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


class ToolCallParser:
    """Divides an answer into calls and content. Each character is looked at a bounded number of times."""

    def __init__(self, tool_format: ToolFormat, names: Set[str], *, marker: str) -> None:
        self._format = tool_format
        self._marker = marker
        self._names = names
        self._read: Callable[[], bool] = self._read_content
        self._text = ""
        """What was pushed and is not read yet."""
        self._opening: list[str] = []
        """Read, and content after all should no call come of it."""
        self._space: list[str] = []
        """White space that is content if content follows, and what stands between two calls without markers."""
        self._skipped: list[str] = []
        """White space before `_text` that belongs to neither as yet."""
        self._call = _CallReader(names)
        self._is_call_next = tool_format is ToolFormat.LLAMA3
        """Whether a brace here begins a call without any marker."""
        self._has_content = False
        self._num_calls = 0
        self._pieces: list[Piece] = []
        self.num_complete = 0
        """Calls whose arguments are complete."""

    def push(self, text: str) -> list[Piece]:
        """The pieces that became certain with this text."""
        # Each mark and each call that is found costs a copy of what comes after it.
        for start in range(0, len(text), _PART_CHARS):
            self._text += text[start : start + _PART_CHARS]
            while self._read():
                pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """What was held back, when the answer has ended."""
        rest = "".join((*self._opening, self._call.held, *self._skipped, self._text))
        self._opening, self._skipped, self._text = [], [], ""
        self._call = _CallReader(self._names)
        if rest.strip(_SPACE):
            self._show(rest)
        elif not self._num_calls:
            self._space.append(rest)
        space = "".join(self._space)
        if space and not self._num_calls:
            self._pieces.append(Content(space))
        self._space = []
        pieces, self._pieces = self._pieces, []
        return pieces

    # Each of these reads on in `_text`. True: go on with `_read`; False: more text is needed.

    def _read_content(self) -> bool:
        if self._is_call_next:
            if not self._skip(_SPACE + ";" if self._num_calls else _SPACE):
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
        num_certain = _num_certain(text, self._marker)
        if not self._is_call_next:
            self._show(text[:num_certain])
            self._text = text[num_certain:]
        return False

    def _read_list(self) -> bool:
        return self._read_one("[", self._read_brace)

    def _read_brace(self) -> bool:
        return self._read_one("{", self._read_call, is_kept=True)

    def _read_one(self, wanted: str, then: Callable[[], bool], *, is_kept: bool = False) -> bool:
        """White space, and one character that must come next; with `is_kept` it stays to be read."""
        self._text = _without_spaces(self._text, self._opening)
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
        if state is _State.GOING:
            return False
        self.num_complete += call.is_shown and call.has_arguments
        if state is _State.BROKEN:
            return self._give_up()
        self._call = _CallReader(self._names)
        if self._format is ToolFormat.LLAMA3:
            self._is_call_next = True
            return self._go_on(self._read_content)
        return self._go_on(self._read_close if self._format is ToolFormat.HERMES else self._read_comma)

    def _read_close(self) -> bool:
        """The closing tag; a call without it counts all the same."""
        self._skip(_SPACE)
        if self._text.startswith("</tool_call>"):
            self._text = self._text.removeprefix("</tool_call>")
            self._skipped.clear()
            return self._go_on(self._read_content)
        return not "</tool_call>".startswith(self._text) and self._go_on(self._read_content)

    def _read_comma(self) -> bool:
        """A comma and the next call, or the end of the list."""
        if not self._skip(_SPACE):
            return False
        if self._text[0] in ",]":
            self._opening = [","] if self._text[0] == "," else []
            self._text = self._text[1:]
            self._skipped.clear()
            return self._go_on(self._read_brace if self._opening else self._read_content)
        return self._go_on(self._read_content)

    def _give_up(self) -> bool:
        """What was begun is no call, or no more."""
        held, self._opening = "".join((*self._opening, self._call.held)), []
        self._call = _CallReader(self._names)
        self._is_call_next = False
        self._show(held)
        return self._go_on(self._read_content)

    def _go_on(self, read: Callable[[], bool]) -> bool:
        self._read = read
        return True

    def _skip(self, chars: str) -> bool:
        """Whether anything comes after these characters."""
        self._text = _without_spaces(self._text, self._skipped, chars)
        return bool(self._text)

    def _take_skipped(self) -> str:
        skipped = "".join(self._skipped)
        self._skipped.clear()
        return skipped

    def _show(self, text: str) -> None:
        """Gives out content; white space at its end only when more follows."""
        shown = text.rstrip(_SPACE)
        if not shown:
            self._space.append(text)
            return
        space = text[len(shown) :]
        if self._num_calls and not self._has_content:
            shown = shown.lstrip(_SPACE)
        else:
            shown = "".join((*self._space, shown))
        self._pieces.append(Content(shown))
        self._space = [space]
        self._has_content = True
        self._is_call_next = False


class _State(Enum):
    GOING = auto()
    DONE = auto()
    BROKEN = auto()
    """The next character does not belong to it."""


class _CallReader:
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
        self._json = _ObjectChecker()
        self._is_done = False
        self.name: str | None = None
        self.is_announced = False
        self.is_shown = False
        self.has_arguments = False
        """They are complete."""

    @property
    def held(self) -> str:
        """What was read and no piece tells of."""
        return "".join(self._held)

    def read(self, text: str) -> tuple[int, _State]:
        """Reads on; how many characters it took, and what it is now."""
        for position, char in enumerate(text):
            if not self._read_char(char):
                return position, _State.BROKEN
            if self._is_done:
                self._held.clear()
                return position + 1, _State.DONE
        return len(text), _State.GOING

    def take_arguments(self) -> str:
        """The arguments that were read since the last time, once the call is announced."""
        if not self.is_announced:
            return ""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    # Each of these takes one character. False: it does not belong here.

    def _first(self, char: str) -> bool:
        return self._keep(char, self._before_key) if char == "{" else False

    def _before_key(self, char: str) -> bool:
        if char in _SPACE:
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
        if char in _SPACE:
            return self._keep(char)
        return self._keep(char, self._before_value) if char == ":" else False

    def _before_value(self, char: str) -> bool:
        if char in _SPACE:
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
        if char in _SPACE:
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


def begins_object(text: str) -> bool:
    """Whether a JSON object can begin like this."""
    checker = _ObjectChecker()
    return all(not checker.is_complete and checker.take(char) for char in text)


class _ObjectChecker:
    """Says of each character whether a JSON object (RFC 8259) can go on with it."""

    def __init__(self) -> None:
        self._take: Callable[[str], bool] = self._open
        self._closers: list[str] = []
        self._is_key = False
        self._num_digits = 0
        self._rest = ""
        self._number = ""
        self.is_complete = False

    def take(self, char: str) -> bool:
        """Whether the object can go on with this character; it must not be asked again after a no."""
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
        if char in _SPACE:
            return True
        self._is_key = True
        self._take = self._string
        return char == '"'

    def _colon(self, char: str) -> bool:
        if char == ":":
            self._take = self._value
        return char == ":" or char in _SPACE

    def _first_item(self, char: str) -> bool:
        return self._end() if char == "]" else self._value(char)

    def _value(self, char: str) -> bool:
        if char in _SPACE:
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
        if char in _SPACE:
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
            # Only what decides how it may go on is kept, so that a long number costs no more than a short one.
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


def _without_spaces(text: str, spaces: list[str], chars: str = _SPACE) -> str:
    """What comes after the white space at the beginning, which is added to `spaces`."""
    rest = text.lstrip(chars)
    if len(rest) < len(text):
        spaces.append(text[: len(text) - len(rest)])
    return rest


def _num_certain(text: str, marker: str) -> int:
    """How much of `text` cannot be the beginning of `marker` any more."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return len(text) - length
    return len(text)


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """The same with neighbouring pieces of one kind, and of one call, in one."""
    result: list[Piece] = []
    for piece in pieces:
        last = result[-1] if result else None
        if isinstance(last, Content) and isinstance(piece, Content):
            result[-1] = Content(last.text + piece.text)
        elif isinstance(last, Reasoning) and isinstance(piece, Reasoning):
            result[-1] = Reasoning(last.text + piece.text)
        elif isinstance(last, Arguments) and isinstance(piece, Arguments) and last.index == piece.index:
            result[-1] = Arguments(last.index, last.text + piece.text)
        else:
            result.append(piece)
    return result
