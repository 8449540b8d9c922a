"""Forms of answers as grammars of token ids: which forms can be served, and which tokens may come next.

The work is done by llguidance (https://github.com/guidance-ai/llguidance, MIT): derivatives of regular expressions for
the lexer, an Earley parser above it, and a walk over the tree of all tokens for what is allowed next. It is imported by
the first use, because most processes never have one.

Blocks while it compiles; `services.structured.compiler` has that done beside an event loop. Knows neither the engine,
which meets a `GrammarState` as its `Grammar`, nor requests.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from tokenizers import Tokenizer

from services.runtime.errors import InvalidRequest, ModelError
from services.structured.cost import may_force_long_texts, too_complex
from services.structured.form import AnswerForm
from services.structured.grammar_text import MARK, TOKENS
from services.structured.keywords import first_mistake
from services.structured.lark import lark_of, marks_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from llguidance._lib import JsonCompileOptions

ANY_OBJECT = '{"type":"object"}'
"""The schema of JSON mode."""

FORM_VERSION = 2
"""Raise it when the same form becomes another grammar."""
MAX_REASON_CHARS = 300
MAX_CACHED_GRAMMARS = 32
MAX_CACHED_TOKENIZERS = 2

INITIAL_LEXER_FUEL = 200_000
"""A fifth of the library's own. It bounds what a regular expression costs at the first token, which is the dearest:
a hostile one (`(a{1000}){1000}`) takes 0.15 s instead of 1.5 s. A schema of 50 KB with 300 enumerations needs less."""

STEP_LEXER_FUEL = 50_000
"""A quarter of the library's own. It bounds what such an expression costs at a later token, on the engine's thread:
50 ms instead of half a second, and the answer fails. Usual expressions need less, with 100,000 tokens too."""

STEP_MAX_ITEMS = 5000
MAX_ITEMS_IN_ROW = 500
"""A tenth and a quarter of the library's own, for grammars that clients write. They bound what an ambiguous one
(`a: a a a | "a" |`) costs at a token: 20 ms instead of 130 ms, and the answer fails. Usual ones need a hundredth."""

_OPTIONS: JsonCompileOptions = {
    # Between two parts a blank, or a new line with an indentation. Without a bound a model that likes white space
    # writes nothing else until max_tokens, and with a generous one it does so for most of the answer.
    "whitespace_pattern": r"\x20|\r?\n[\x20\t]{0,24}",
    "whitespace_flexible": True,
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
    "json_allow_general_unicode_escapes": False,
}
"""All of them are set, because a schema could set them too, by a member `x-guidance`."""


class UnusableSchema(InvalidRequest):
    """The text is not a schema, or has something that cannot be served; the message says what."""

    def __init__(self, message: str, *, code: str = "invalid_value") -> None:
        super().__init__(message, code=code)


class TooComplex(UnusableSchema):
    """The schema costs too much to compile."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="grammar_too_complex")


def grammar_library() -> str:
    """What decides which tokens a form allows: the library and its version, and the version of our grammars."""
    return f"llguidance-{importlib.metadata.version('llguidance')}/{FORM_VERSION}"


def check_form(form: AnswerForm) -> None:
    """Compile a form and each of its schemas for nothing but their errors, by bytes instead of a model's tokens.

    Some errors show only at the first token of a schema, which is not the form's where there are calls or thoughts.

    Takes from 0.1 ms to half a second.

    Raises:
        UnusableSchema: the message names what is wrong or not supported.
    """
    schemas = schemas_of(form)
    try:
        decoded = [json.loads(schema) for schema in schemas]
    except (ValueError, RecursionError) as error:
        raise UnusableSchema(_NO_OBJECT) from error
    for schema in decoded:
        if (mistake := first_mistake(schema)) is not None:
            raise UnusableSchema(mistake)
    reason = too_complex(decoded)
    if reason is not None:
        raise TooComplex(reason)
    if form.json_schema.startswith(TOKENS):
        # Bytes instead of tokens would say nothing of it; the rest of a form, if it has one, stands by itself.
        if form.tool_calls is None:
            return
        form = replace(form, json_schema="")
    grammars = [form.json_schema] if _is_grammar(form) else []
    for part in dict.fromkeys((form, *map(AnswerForm, schemas + grammars))):
        _compiled(_byte_tokenizer(), part, {})


def schemas_of(form: AnswerForm) -> list[str]:
    """Returns all schemas of a form, as texts, without grammars."""
    functions = () if form.tool_calls is None else form.tool_calls.functions
    own = [form.json_schema] if form.json_schema and not _is_grammar(form) else []
    return [function.parameters for function in functions] + own


def _is_grammar(form: AnswerForm) -> bool:
    """Whether what stands in place of the schema is a grammar, or a list of tokens."""
    return form.json_schema.startswith((MARK, TOKENS))


class GrammarState:
    """Where one answer stands in its grammar; the engine's `Grammar`. For one thread at a time.

    `first` is what `allowed` returns before the first token, where somebody has computed it already.
    """

    __slots__ = ("_first", "_matcher", "num_tokens")

    def __init__(self, matcher: LLMatcher, *, first: bytes | None = None) -> None:
        self._matcher = matcher
        self._first = first
        self.num_tokens = 0

    def advance(self, token_ids: Sequence[int]) -> None:
        """Takes the next tokens of the answer. Nothing is allowed after a token that was not allowed."""
        if token_ids:
            self._first = None
            self.num_tokens += len(token_ids)
            self._matcher.consume_tokens(list(token_ids))

    def allowed(self) -> bytes:
        """Returns a bit for each token, the lowest bit of a byte first: whether it may come next.

        At the end of the grammar these are the ends of sequence only. Nothing is allowed after a token that was not,
        or where the library's limits are reached.
        """
        if self._first is not None:
            return self._first
        bits = self._matcher.compute_bitmask()
        # A matcher that has failed allows the ends of sequence: half an answer would end as a whole one.
        return b"" if self._matcher.is_error() else bits

    @property
    def is_complete(self) -> bool:
        """Whether the answer may end here."""
        return self._matcher.is_accepting()


class Grammars:
    """Compiled forms for one tokenizer; any thread may call it.

    `tokenizer_json` is the path of the model's tokenizer.json, read when it is first needed. `vocab_size` is the
    model's: its tokens that the tokenizer does not know are never allowed.
    """

    def __init__(self, tokenizer_json: Path, *, vocab_size: int) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._added_token_ids: Mapping[str, int] = {}
        """Ids of texts that are one token each, once a tokenizer was loaded."""
        self._tokenizers: OrderedDict[tuple[int, ...], LLTokenizer] = OrderedDict()
        self._compiled: OrderedDict[tuple[AnswerForm, tuple[int, ...]], tuple[LLMatcher, bytes]] = OrderedDict()
        """Matchers at the start of their grammars, with what is allowed there; those that were used last behind."""

    def begin(self, form: AnswerForm, *, eos_token_ids: Sequence[int], token_ids: Sequence[int] = ()) -> GrammarState:
        """Return the state of an answer that has `token_ids` already. `eos_token_ids` end it, once it is complete.

        Raises:
            UnusableSchema: the form cannot be served.
            ModelError: the model's tokenizer cannot be used for this.
        """
        matcher, first = self._beginning(form, tuple(sorted(set(eos_token_ids))))
        state = GrammarState(matcher, first=first)
        state.advance(token_ids)
        return state

    def _beginning(self, form: AnswerForm, eos_token_ids: tuple[int, ...]) -> tuple[LLMatcher, bytes]:
        """Returns a matcher of its own for a caller, at the start of the grammar, and what is allowed there.

        The first mask of a grammar is its dearest, and all answers of a prompt have it in the same step of an engine:
        it is computed here, once, beside the engine.
        """
        key = (form, eos_token_ids)
        with self._lock:
            known = self._compiled.get(key)
            if known is not None:
                self._compiled.move_to_end(key)
                return known[0].deep_copy(), known[1]
        matcher, first = self._compile(form, eos_token_ids)
        with self._lock:
            self._compiled[key] = matcher, first
            if len(self._compiled) > MAX_CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
            return matcher.deep_copy(), first

    def _compile(self, form: AnswerForm, eos_token_ids: tuple[int, ...]) -> tuple[LLMatcher, bytes]:
        tokenizer = self._tokenizer(eos_token_ids)
        token_ids = {text: self._added_token_ids[text] for text in marks_of(form) if text in self._added_token_ids}
        return _compiled(tokenizer, form, token_ids, eos_token_ids=eos_token_ids)

    def _tokenizer(self, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
        """Makes it once, which takes a second for a large vocabulary; other callers wait for it."""
        with self._lock:
            tokenizer = self._tokenizers.get(eos_token_ids)
            if tokenizer is None:
                tokenizer = self._tokenizers[eos_token_ids] = self._load(eos_token_ids)
                if len(self._tokenizers) > MAX_CACHED_TOKENIZERS:
                    self._tokenizers.popitem(last=False)
            return tokenizer

    def _load(self, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
        from llguidance import LLTokenizer

        try:
            text = self._tokenizer_json.read_text(encoding="utf-8")
            known = Tokenizer.from_str(text)
            num_known = known.get_vocab_size(with_added_tokens=True)
            self._added_token_ids = {
                token.content: token_id for token_id, token in known.get_added_tokens_decoder().items()
            }
            return LLTokenizer(
                _with_unwritable_specials(text),
                n_vocab=max(num_known, self._vocab_size),
                eos_token=list(eos_token_ids),
            )
        except Exception as error:  # of any class: what reads the file is compiled code
            raise ModelError(f"{self._tokenizer_json} cannot be used for structured output") from error


def _with_unwritable_specials(tokenizer_json: str) -> str:
    """A tokenizer.json whose special tokens have names that no schema can contain.

    Where only one text is possible (`const`, names of members) the library allows but the first token of that text, and
    of a text that holds a special token's it takes that token. An end of sequence would end the answer inside a string.
    """
    document = json.loads(tokenizer_json)
    nonce = secrets.token_hex(16)
    names = {
        token["content"]: f"<{nonce}:{token['id']}>"
        for token in document.get("added_tokens") or ()
        # These are what the library takes for special.
        if token["special"] or (token["content"].startswith("<") and token["content"].endswith(">"))
    }
    for token in document.get("added_tokens") or ():
        token["content"] = names.get(token["content"], token["content"])
    model = document["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(text, text): token_id for text, token_id in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return json.dumps(document)


def _compiled(
    tokenizer: LLTokenizer,
    form: AnswerForm,
    mark_token_ids: Mapping[str, int],
    *,
    eos_token_ids: Sequence[int] = (),
) -> tuple[LLMatcher, bytes]:
    """Returns a matcher at the start of its grammar, and a bit for each token: whether it may be the first."""
    from llguidance import LLMatcher

    try:
        is_forced = not _is_grammar(form) and not may_force_long_texts(map(json.loads, schemas_of(form)))
        if form == AnswerForm(form.json_schema) and is_forced:
            grammar = LLMatcher.grammar_from_json_schema(form.json_schema, overrides=_OPTIONS)
        else:
            lark = lark_of(
                form,
                mark_token_ids=mark_token_ids,
                options=_OPTIONS,
                eos_token_ids=eos_token_ids,
                is_forced=is_forced,
            )
            grammar = LLMatcher.grammar_from_lark(lark)
    except (ValueError, RecursionError) as error:
        raise UnusableSchema(_NO_OBJECT) from error
    except InvalidRequest as error:
        raise UnusableSchema(error.message, code=error.code or "invalid_value") from error
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_limits(is_grammar=_is_grammar(form)))
    if matcher.is_error():
        reason = _reason(matcher.get_error())
        raise TooComplex(reason) if _OUT_OF_LIMITS.search(reason) is not None else UnusableSchema(reason)
    # A schema that no value can satisfy (one that refers to itself and to nothing else) shows only here.
    first = matcher.compute_bitmask()
    if matcher.is_error():
        raise UnusableSchema("it is too complex, or nothing can satisfy it")
    return matcher, first


def _limits(*, is_grammar: bool) -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=INITIAL_LEXER_FUEL,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_MAX_ITEMS if is_grammar else None,
        max_items_in_row=MAX_ITEMS_IN_ROW if is_grammar else None,
        verbose_errors=False,
    )


_NO_OBJECT = "it is not a JSON object, or it is nested too deeply"

_OUT_OF_LIMITS = re.compile("too big|too large|too complex|fuel|[Uu]nable to determine|can't determine")
"""In the library's words for what its limits end."""

_PLACED = re.compile(r"(?:at )?\d+\(\d+\): (?:failed to compile JSON schema: )?")

_EXCERPT = re.compile(r"\n *\d+ \| ")


def _reason(message: str) -> str:
    """The library's words on one line; where they speak of its own options, ours. Without places in a text of ours."""
    if (placed := _PLACED.match(message)) is not None:
        message = _EXCERPT.split(message[placed.end() :], maxsplit=1)[0]
    if message.startswith("oneOf"):
        return "oneOf is not supported unless its alternatives exclude each other; anyOf is"
    return " ".join(message.split())[:MAX_REASON_CHARS]


@functools.cache
def _byte_tokenizer() -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Bytes()))


class _Bytes:
    """A tokenizer whose tokens are the 256 bytes, in the form that TokenizerWrapper takes."""

    eos_token_id = 256
    bos_token_id = None
    tokens: ClassVar[list[bytes]] = [*(bytes([value]) for value in range(256)), b"<eos>"]
    special_token_ids: ClassVar[list[int]] = [eos_token_id]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)
