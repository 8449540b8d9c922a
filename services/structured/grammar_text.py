"""What clients write instead of a JSON schema: regular expressions, choices, grammars. Checked, as one kind of text.

That text is a grammar in the grammar library's own language (`services.structured.lark`) whose rules' names begin with
`u_` or `U_`, so that it can stand beside rules of ours. It travels where a schema does, marked by its first line, which
no JSON begins with: a worker that knows schemas only refuses it. Pure: texts in, a text out.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from services.runtime.errors import InvalidRequest
from services.runtime.sampling import MAX_TOKENS_EVER
from services.structured.cost import too_complex
from services.structured.keywords import first_mistake

MARK = "%lark\n"
"""The first line of a grammar where a schema could stand."""
TOKENS = "%tokens\n"
"""The first line of a list of token ids, ascending, as in `3,7-9`: the answer has no others."""
REGEX, CHOICES, GRAMMAR = "%regex\n", "%choices\n", "%grammar\n"
"""First lines of what clients wrote, until it is a grammar."""
MAX_CHOICES = 2000
MAX_NESTING = 500
"""The sum, over all rules, of one and the parentheses within one another: the library recurses so deep at most. It ends
the process where it recurses too deep; 2000 rules in a row were not too many."""
MAX_SCHEMA_DEPTH = 64
MAX_ATTRIBUTE_TOKENS = 32
"""Most tokens of a rule between its name and its colon."""
MAX_SHOWN_CHARS = 40

OWN_START = "u_start"
"""The rule that the answer is."""

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+)|(?P<newline>\n)|(?P<comment>//[^\n]*|\#[^\n]*)
    |(?P<string>"(?:[^"\\\n]|\\.)*"i?)|(?P<regex>/(?:[^/\\\n]|\\.)+/[a-z]*)
    |(?P<directive>%[a-z_]+)|(?P<token><[^\n>]*>)|(?P<name>[A-Za-z_][A-Za-z0-9_-]*)|(?P<number>-?[0-9]+(?:\.[0-9]+)?)
    |(?P<mark>->|\.\.|[][():|*+?{},=.~&!@])""",
    re.VERBOSE,
)
_RANGE = re.compile("([0-9]{1,10})(?:-([0-9]{1,10}))?")
_RANGES = re.compile(f"{_RANGE.pattern}(?:,{_RANGE.pattern})*")
_JSON_OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "whitespace_flexible": (False, True),
    "item_separator": (",", ", "),
    "key_separator": (":", ": "),
}
"""What a grammar may ask of the compiler of the schemas in it, as programs do that read the answer by the grammar."""
_ATTRIBUTES = frozenset({"capture", "lazy", "max_tokens", "stop", "suffix"})
_UNICODE_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))|\\.", re.DOTALL)
_DECODER = json.JSONDecoder()


def lark_of(asked: str) -> str:
    """The grammar that a text asks for, whose first line is REGEX, CHOICES or GRAMMAR; any other text stays as it is.

    Raises InvalidRequest that says what is wrong or not supported. Takes up to half a second.
    """
    if asked.startswith(REGEX):
        return lark_of_regex(asked.removeprefix(REGEX))
    if asked.startswith(CHOICES):
        return lark_of_choices(json.loads(asked.removeprefix(CHOICES)))
    return lark_of_grammar(asked.removeprefix(GRAMMAR)) if asked.startswith(GRAMMAR) else asked


def lark_of_regex(pattern: str) -> str:
    """The grammar of texts that match as a whole. Raises InvalidRequest."""
    if not pattern:
        raise _invalid("it is empty")
    return lark_of_grammar(f"start: /{_for_literal(pattern)}/")


def lark_of_choices(choices: Sequence[Any]) -> str:
    """The grammar of these texts. Raises InvalidRequest."""
    if not choices or len(choices) > MAX_CHOICES:
        raise _invalid(f"it must have 1 to {MAX_CHOICES} texts")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise _invalid("each choice must be a text that is not empty")
    return lark_of_grammar(
        "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in choices)
    )


def lark_of_grammar(text: str) -> str:
    """Translates a grammar in Lark's language, or in the one of llama.cpp and XGrammar, whose rules have `::=`.

    Raises InvalidRequest that says what is wrong or not supported.
    """
    if "::=" in text:
        text = _lark_of_ebnf(text)
    return MARK + "".join(_Reader(text).parts())


def tokens_form(token_ids: Iterable[int]) -> str:
    """The text that allows these tokens only."""
    ranges: list[list[int]] = []
    for token_id in sorted(set(token_ids)):
        if ranges and token_id == ranges[-1][1] + 1:
            ranges[-1][1] = token_id
        else:
            ranges.append([token_id, token_id])
    return TOKENS + ",".join(f"{first}-{last}" if first < last else str(first) for first, last in ranges)


def largest_token_in(form_text: str) -> int:
    """The largest token id in a text that begins with `TOKENS`."""
    return max(map(int, re.findall("[0-9]+", form_text)))


def rule_of_tokens(form_text: str, eos_token_ids: Collection[int]) -> str:
    """The rule of an answer of the tokens in a text that begins with `TOKENS`.

    It ends where the model ends it, if one of its ends is among them, else never. Raises InvalidRequest.
    """
    if _RANGES.fullmatch(text := form_text.removeprefix(TOKENS)) is None:
        raise _invalid("it is no list of token ids")
    ends = sorted(eos_token_ids)
    ranges = [(int(first), int(last or first)) for first, last in _RANGE.findall(text)]
    may_end = any(first <= end <= last for first, last in ranges for end in ends)
    for end in ends:
        ranges = [part for first, last in ranges for part in ((first, min(last, end - 1)), (max(first, end + 1), last))]
        ranges = [(first, last) for first, last in ranges if first <= last]
    listed = ",".join(f"{first}-{last}" for first, last in dict.fromkeys(ranges))
    token = f"<[{listed}]>" if listed else '""'
    return token + ("*" if may_end and listed else "" if may_end else f"{{{MAX_TOKENS_EVER}}}")


def rules_in(form_text: str, options: Mapping[str, Any]) -> str:
    """The rules in a text that begins with `MARK`, with options for the compiler of the JSON schemas in it.

    Checks them once more, because they may come from a store. Raises InvalidRequest.
    """
    return "".join(_Reader(form_text.removeprefix(MARK), options=options).parts())


def _for_literal(pattern: str) -> str:
    """A regular expression as it stands between slashes."""
    plain = {"/": r"\/", "\n": r"\n"}
    escaped = re.sub(r"\\.|/|\n", lambda found: plain.get(found[0], found[0]), pattern, flags=re.DOTALL)
    return escaped.replace("\\\n", r"\n").replace("\r", r"\r")


def _lark_of_ebnf(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    def plain(found: re.Match[str]) -> str:
        # The library's converter forgets how many digits there were.
        digits = found[1] or found[2]
        if digits is None:
            return found[0]
        code = int(digits, 16)
        if code < 0x80:
            return f"\\x{code:02x}"
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise _invalid(f"{found[0]} is no character")
        return chr(code)

    try:
        return gbnf_to_lark(_UNICODE_ESCAPE.sub(plain, text))
    except InvalidRequest:
        raise
    except RecursionError as error:
        raise _invalid("it is nested too deeply") from error
    except Exception as error:  # of class Exception itself, and IndexError for what ends too soon
        raise _invalid(" ".join(str(error).split())[:200]) from error


class _Reader:
    """Reads a grammar once, as tokens. With `options` it was written here: its names are changed already."""

    def __init__(self, text: str, *, options: Mapping[str, Any] | None = None) -> None:
        self._tokens = list(_tokens(text))
        self._is_own = options is not None
        self._options = options or {}
        self._imported: set[str] = set()
        self._schemas: list[Any] = []
        self._nesting = 0
        self._has_start = False

    def parts(self) -> Iterator[str]:
        """The grammar's text in parts. Raises InvalidRequest."""
        depth = deepest = position = 0
        tokens = self._tokens
        while position < len(tokens):
            kind, text = tokens[position]
            position += 1
            if kind == "name" and self._begins_rule(position):
                self._add_rule(deepest)
                depth, deepest = 0, 1
                self._has_start |= text.lstrip("_") == ("u_start" if self._is_own else "start")
                yield self._named(text)
                position, attributes = self._attributes(position)
                yield attributes
            elif kind == "name":
                yield self._named(text)
            elif kind == "directive":
                position, directive = self._directive(text, position)
                yield directive
            elif kind == "json":
                self._schemas.append(json.loads(text))
                yield text
            elif kind == "token":
                raise _invalid(f"{_shown(text)} names a token of the model; write its text")
            elif text == "@":
                raise _invalid("references to other grammars (@) are not supported")
            else:
                if kind == "mark":
                    depth += (text in "([") - (text in ")]")
                deepest = max(deepest, 1 + depth + (_depth_of_regex(text) if kind == "regex" else 0))
                yield "" if kind == "comment" else text
        self._add_rule(deepest)
        if not self._has_start:
            raise _invalid("it has no rule named start")
        for schema in self._schemas:
            if (mistake := first_mistake(schema)) is not None:
                raise _invalid(f"%json: {mistake}")
        if (reason := too_complex(self._schemas)) is not None:
            raise InvalidRequest(f"%json: {reason}", code="grammar_too_complex")

    def _add_rule(self, nesting: int) -> None:
        self._nesting += nesting
        if self._nesting > MAX_NESTING:
            raise InvalidRequest(
                f"its rules, and the parentheses within one another in each, are more than {MAX_NESTING} together",
                code="grammar_too_complex",
            )

    def _begins_rule(self, position: int) -> bool:
        """Whether the name before this position is that of a rule which is defined here."""
        position = self._after_space(position)
        if self._is_mark(position, "["):
            most = min(len(self._tokens), position + MAX_ATTRIBUTE_TOKENS)
            while position < most and not self._is_mark(position, "]"):
                position += 1
            position = self._after_space(position + 1)
        if self._is_mark(position, ".") and position + 1 < len(self._tokens):
            position += 2
        return self._is_mark(self._after_space(position), ":")

    def _attributes(self, position: int) -> tuple[int, str]:
        """What stands between the name of a rule that is defined and the colon, and where the colon is."""
        parts = []
        while not self._is_mark(position, ":"):
            kind, text = self._tokens[position]
            if kind == "name" and text not in _ATTRIBUTES:
                raise _invalid(f"the attribute {_shown(text)} of a rule is not supported")
            if kind not in ("name", "string", "number", "space", "mark"):
                raise _invalid(f"{_shown(text)} cannot stand in the attributes of a rule")
            parts.append(text)
            position += 1
        return position, "".join(parts)

    def _directive(self, word: str, position: int) -> tuple[int, str]:
        if word == "%import":
            start = position
            while position < len(self._tokens) and self._tokens[position][0] != "newline":
                if self._tokens[position][0] == "name":
                    self._imported.add(self._tokens[position][1])
                position += 1
            return position, word + "".join(text for _, text in self._tokens[start:position])
        after = self._after_space(position)
        is_json = after < len(self._tokens) and self._tokens[after][0] == "json"
        if word == "%json" and is_json:
            schema = json.loads(self._tokens[after][1])
            if not isinstance(schema, dict):
                raise _invalid("%json needs a schema that is an object")
            asked = _json_options(schema.get("x-guidance"))
            self._tokens[after] = ("json", _schema_text({**schema, "x-guidance": {**self._options, **asked}}))
            return position, word
        if word == "%llguidance" and is_json and not self._is_own:
            if json.loads(self._tokens[after][1]) not in ({}, {"no_forcing": True}, {"no_forcing": False}):
                raise _invalid("options of %llguidance are not supported")
            return after + 1, ""
        if word == "%ignore":
            return position, word
        raise _invalid(f"{word} is not supported, or not as it is written")

    def _named(self, name: str) -> str:
        if self._is_own or name in self._imported:
            return name
        return ("U_" if name.lstrip("_")[:1].isupper() else "u_") + name.lstrip("_")

    def _after_space(self, position: int) -> int:
        while position < len(self._tokens) and self._tokens[position][0] in ("space", "comment"):
            position += 1
        return position

    def _is_mark(self, position: int, mark: str) -> bool:
        return position < len(self._tokens) and self._tokens[position] == ("mark", mark)


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    position = 0
    wants_json = False
    while position < len(text):
        if wants_json and text[position] == "{":
            try:
                _, end = _DECODER.raw_decode(text, position)
            except (ValueError, RecursionError) as error:
                raise _invalid("what follows %json or %llguidance is not valid JSON") from error
            yield "json", text[position:end]
            position, wants_json = end, False
            continue
        found = _TOKEN.match(text, position)
        if found is None:
            raise _invalid(f"it cannot be read from here: {_shown(text[position:])}")
        kind = str(found.lastgroup)
        wants_json = found[0] in ("%json", "%llguidance") or (wants_json and kind in ("space", "newline"))
        yield kind, found[0]
        position = found.end()


def _depth_of_regex(literal: str) -> int:
    depth = deepest = 0
    for found in re.finditer(r"\\.|[()]", literal):
        depth += (found[0] == "(") - (found[0] == ")")
        deepest = max(deepest, depth)
    return deepest


def _json_options(options: Any) -> dict[str, Any]:
    """Returns what a client's grammar asks of the JSON in it. Raises InvalidRequest for what cannot be chosen."""
    if not isinstance(options, dict):
        return {}
    if options.get("whitespace_pattern") is not None:
        raise _invalid("x-guidance.whitespace_pattern is not supported; whitespace_flexible is")
    asked = {name: options[name] for name, values in _JSON_OPTIONS.items() if options.get(name) in values}
    # A pattern goes before the flag.
    return asked | ({"whitespace_pattern": None} if asked.get("whitespace_flexible") is False else {})


def _schema_text(schema: Mapping[str, Any]) -> str:
    depth = 0
    level: list[Any] = [schema]
    while level:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise _invalid(f"%json is nested more than {MAX_SCHEMA_DEPTH} levels deep")
        values = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
        level = [inner for inner in values if isinstance(inner, dict | list)]
    return json.dumps(schema, ensure_ascii=False)


def _shown(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…"


def _invalid(reason: str) -> InvalidRequest:
    return InvalidRequest(reason, code="invalid_value")
