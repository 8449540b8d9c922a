"""Text to token ids and back: prompts, chat templates, and answers that arrive token by token.

Knows nothing of requests or workers; gets the model's files as text and gives back ids and strings.
"""

import contextlib
import functools
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer

from gateway.models.chat_template import CONTINUES, compile_template, names_in, reads_tools, render_continued
from gateway.models.detokenizers import ByteLevelDetokenizer, Detokenizer, WindowDetokenizer
from gateway.models.marks import Guard, TemplateMarks
from gateway.models.model_files import ModelFiles
from gateway.models.reasoning import REASONING_MARKS, has_reasoning
from gateway.models.template_words import OWN
from gateway.models.text_pieces import PIECE_CHARS, can_be_cut, pieces
from gateway.models.tool_calls import MARKERS, tool_format_of
from gateway.models.turns import Steps, Turns
from services.runtime.errors import InvalidRequest, ModelError
from services.structured.form import ToolFormat
from services.structured.lark import CALL_MARKS

LONG_TEXT_CHARS = 4096
"""Longer texts are encoded in turns beside the event loop, so that other requests' tokens are not held up."""
MANY_MESSAGES = 64
"""Conversations of more messages count as long texts."""
HUGE_PIECE_CHARS = 2**17
"""Longer pieces are encoded one at a time: each takes 133 bytes of memory for each byte."""
HUGE_PIECE_WAIT_S = 0.005

ChatMessage = Mapping[str, Any]
"""One message with its content as one string; an assistant's may have `tool_calls`, with arguments as objects."""

REASONING_TAIL_TOKENS = 8
"""More than any tokenizer needs for `<think>` and a line break."""


_NOTHING: Mapping[str, Any] = {}


class ModelTokenizer:
    """The tokenizer and chat template of one model. Raises ModelError where they cannot be used.

    Long texts are encoded by `turns`, which several models may share.
    """

    def __init__(self, files: ModelFiles, *, turns: Turns | None = None) -> None:
        self.turns = turns or Turns()
        self._files = files
        self._tokenizer = _load(files.tokenizer_json)
        self._decoder_kind = _decoder_kind(files.tokenizer_json)
        source = files.chat_template
        self._template = None if source is None else compile_template(source)
        self.template_names = frozenset() if source is None else names_in(source) - OWN
        """The variables of the chat template that a client may set."""
        self.tool_format = None if source is None or not reads_tools(source) else tool_format_of(source)
        """How the model writes calls; None: its template has no tools, or teaches a format that is not known here."""
        self.call_token = _call_token(self._tokenizer, self.tool_format)
        """The token that begins calls, and its text; the id is -1 where no such token exists."""
        self.has_reasoning = source is not None and has_reasoning(source)
        self._has_developer = source is not None and "developer" in source
        self._shown = _shown_markers(self._tokenizer, self.tool_format)
        self._marks = TemplateMarks(self._tokenizer, kept=REASONING_MARKS if self.has_reasoning else ())
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._token_bytes: dict[int, bytes] = {}
        self._token_texts: dict[int, str] = {}
        self.whole_texts: dict[int, str] = {}
        """Texts of tokens that are whole characters, whatever is beside them, as far as they were asked for."""
        self._affixes = _affixes(self._tokenizer) if can_be_cut(files.tokenizer_json) else None
        """Token ids before and behind a prompt; None: pieces of a text would not have the tokens of the whole."""
        self._plain_ids: dict[str, list[int]] = {}
        """Ids of marks as ordinary text, as far as they were needed."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.longest_token_chars = max(map(len, vocabulary), default=1)

    @property
    def has_call_token(self) -> bool:
        """Whether one token begins calls."""
        return self.call_token[0] >= 0

    def described(self) -> dict[str, Any]:
        """Returns what clients need to build the tokenizer's prompts themselves: its template and special tokens."""
        return {"chat_template": self._files.chat_template, **self._files.special_tokens}

    async def encode(self, text: str, *, add_special_tokens: bool = True, tenant: str = "") -> list[int]:
        """Returns a prompt's token ids. Special tokens written in the text count as such: it is the model's own."""
        if len(text) <= LONG_TEXT_CHARS:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return await self.turns.run(self._encode_steps(text, add_special_tokens), tenant=tenant)

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        more: Mapping[str, Any] = _NOTHING,
        tenant: str = "",
    ) -> list[int]:
        """Returns the token ids of a conversation up to the assistant's next message; it may call `tools`.

        `more` is told to the template as it is, as far as it knows the names. With CONTINUES the token ids end where
        the text of the last message does, so that the answer continues it.

        Added tokens that the template writes stay tokens. Marks (see `gateway.models.marks`) inside messages, tools,
        and `more` are encoded as ordinary text, except reasoning marks in the content of an assistant's message. Added
        tokens that are no marks, such as words, stay tokens there too. Raises InvalidRequest if the template refuses
        the messages.
        """
        if not self._has_developer:
            # OpenAI's newer name for it; a template that does not know it leaves the message out, or worse.
            messages = [
                {**message, "role": "system"} if message["role"] == "developer" else message for message in messages
            ]
        if _is_long(messages) or self._marks.are_in((messages, tools, more)):
            return await self.turns.run(self._encode_chat_steps(messages, tools, more), tenant=tenant)
        text = self._render(messages, tools, more)
        return await self.encode(text, add_special_tokens=False, tenant=tenant)

    async def decode_long(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, tenant: str = "") -> str:
        """Returns what `decode` does, working beside the event loop where the tokens are many."""
        decode = functools.partial(self.decode, token_ids, skip_special_tokens=skip_special_tokens)
        if len(token_ids) <= LONG_TEXT_CHARS:
            return decode()
        return await self.turns.call(decode, tenant=tenant)

    def opens_reasoning(self, prompt_token_ids: Sequence[int]) -> bool:
        """Returns whether this prompt ends where the model's reasoning begins, as with some templates."""
        if not self.has_reasoning:
            return False
        tail = self.decode(prompt_token_ids[-REASONING_TAIL_TOKENS:], skip_special_tokens=False)
        return tail.rstrip().endswith("<think>")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of all ids at once; bytes that are not UTF-8 are replaced by U+FFFD."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def detokenizer(self) -> Detokenizer:
        """Returns an incremental decoder for one answer, which skips special tokens but for those that begin calls."""
        if self._decoder_kind == "ByteLevel":
            return ByteLevelDetokenizer(self.token_bytes, self.whole_texts)
        return WindowDetokenizer(self._tokenizer, self._shown, self._special_ids)

    def token_text(self, token_id: int) -> str:
        """Returns one token's text, special tokens shown, as log-probabilities present it."""
        known = self._token_texts.get(token_id)
        if known is None:
            known = self._token_texts[token_id] = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return known

    def token_name(self, token_id: int) -> str:
        """Returns one token as the vocabulary spells it, such as `Ġhello`; an empty text for an id without a token."""
        return self._tokenizer.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """Returns one token's bytes in a byte-level vocabulary; b"" for special tokens that answers do not show."""
        known = self._token_bytes.get(token_id)
        if known is None:
            known = self._token_bytes[token_id] = self._make_token_bytes(token_id)
            with contextlib.suppress(UnicodeDecodeError):
                self.whole_texts[token_id] = known.decode()
        return known

    def _make_token_bytes(self, token_id: int) -> bytes:
        if token_id in self._shown:
            return self._shown[token_id].encode()
        if not self._tokenizer.decode([token_id], skip_special_tokens=True):
            return b""
        token = self._tokenizer.id_to_token(token_id) or ""
        try:
            return bytes(map(_BYTE_OF_CHARACTER.__getitem__, token))
        except KeyError:
            return token.encode()

    def _encode_steps(self, text: str, add_special_tokens: bool) -> Steps[list[int]]:
        if self._affixes is None or len(text) <= PIECE_CHARS:
            return (yield from _encode_alone_if_huge(self._tokenizer, text, add_special_tokens))
        before, behind = self._affixes if add_special_tokens else ([], [])
        token_ids = list(before)
        for piece in pieces(text):
            token_ids += yield from _encode_alone_if_huge(self._tokenizer, piece, False)
            yield
        return token_ids + behind

    def _encode_chat_steps(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] | None, more: Mapping[str, Any]
    ) -> Steps[list[int]]:
        if self._marks.are_in((messages, tools, more)):
            return (yield from self._encode_guarded_chat(messages, tools, more))
        text = self._render(messages, tools, more)
        yield
        return (yield from self._encode_steps(text, False))

    def _encode_guarded_chat(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] | None, more: Mapping[str, Any]
    ) -> Steps[list[int]]:
        """Renders with stand-ins for the marks that clients wrote, then encodes each stretch by its own rule."""
        guard = Guard(self._marks)
        guarded = [guard.message(message) for message in messages]
        text = self._render(guarded, guard.value(tools), {name: guard.value(value) for name, value in more.items()})
        yield
        token_ids: list[int] = []
        num_chars = 0
        for stretch in guard.stretches(text):
            if stretch.is_plain:
                token_ids += self._plain_ids_of(stretch.text)
            elif stretch.text:
                token_ids += yield from self._encode_steps(stretch.text, False)
            num_chars += len(stretch.text)
            if num_chars > PIECE_CHARS:
                num_chars = 0
                yield
        return token_ids

    def _plain_ids_of(self, mark: str) -> list[int]:
        """Returns the ids of a mark, or of its beginning, as ordinary text. The cache is bounded by the marks."""
        known = self._plain_ids.get(mark)
        if known is None:
            known = _encode_long(self._plain_tokenizer, mark, False)
            if not self._marks.ids.isdisjoint(known):
                # Some vocabularies have the mark as an ordinary token, too.
                known = [token_id for char in mark for token_id in _encode_long(self._plain_tokenizer, char, False)]
            self._plain_ids[mark] = known
        return known

    @functools.cached_property
    def _plain_tokenizer(self) -> Tokenizer:
        """The tokenizer without added tokens; made when first needed, which is rare."""
        return _load(json.dumps({**json.loads(self._files.tokenizer_json), "added_tokens": []}))

    def _render(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] | None, more: Mapping[str, Any]
    ) -> str:
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", field="messages")
        try:
            own = {"messages": messages, "tools": tools, **self._files.special_tokens}
            if more.get(CONTINUES):
                return render_continued(self._template, {**more, **own})
            return self._template.render(**{"add_generation_prompt": True, **more, **own})
        except TemplateError as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error.message}", field="messages"
            ) from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise InvalidRequest("the model's chat template cannot render these messages", field="messages") from error


def _load(tokenizer_json: str) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(tokenizer_json)
    except Exception as error:
        raise ModelError("tokenizer.json cannot be read; download the model again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _encode_long(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Uses the batch call because that one lets go of the interpreter lock, always, and is faster."""
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


_huge_texts = threading.Lock()


def _encode_alone_if_huge(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> Steps[list[int]]:
    if len(text) <= HUGE_PIECE_CHARS:
        return _encode_long(tokenizer, text, add_special_tokens)
    while not _huge_texts.acquire(timeout=HUGE_PIECE_WAIT_S):
        yield  # Others have their turns meanwhile.
    try:
        return _encode_long(tokenizer, text, add_special_tokens)
    finally:
        _huge_texts.release()


def _is_long(messages: Sequence[ChatMessage]) -> bool:
    """Returns whether a conversation takes long enough to be encoded beside the event loop."""
    return len(messages) > MANY_MESSAGES or sum(len(each["content"]) for each in messages) > LONG_TEXT_CHARS


def _affixes(tokenizer: Tokenizer) -> tuple[list[int], list[int]] | None:
    """Returns the tokens before and behind a prompt's own; None: they cannot be told."""
    probe = "a b"
    own = tokenizer.encode(probe, add_special_tokens=False).ids
    whole = tokenizer.encode(probe, add_special_tokens=True).ids
    for start in range(len(whole) - len(own) + 1):
        if whole[start : start + len(own)] == own:
            return whole[:start], whole[start + len(own) :]
    return None


def _decoder_kind(tokenizer_json: str) -> str:
    decoder = json.loads(tokenizer_json).get("decoder") or {}
    return str(decoder.get("type", ""))


def _bytes_of_characters() -> dict[str, int]:
    """Returns GPT-2's printable character for each byte: itself, or else the next free code point from 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + n): byte for n, byte in enumerate(others)})
    return table


_BYTE_OF_CHARACTER = _bytes_of_characters()


def _shown_markers(tokenizer: Tokenizer, tool_format: ToolFormat | None) -> dict[int, str]:
    """Returns the special tokens that answers show: without them a call could not be told from an answer in JSON."""
    if tool_format is None:
        return {}
    ids = {text: tokenizer.token_to_id(text) for text in MARKERS}
    return {
        token_id: text
        for text, token_id in ids.items()
        if token_id is not None and not tokenizer.decode([token_id], skip_special_tokens=True)
    }


def _call_token(tokenizer: Tokenizer, tool_format: ToolFormat | None) -> tuple[int, str]:
    mark = "" if tool_format is None else CALL_MARKS.get(tool_format, "")
    # Any other token would be text for a grammar.
    added = tokenizer.get_added_tokens_decoder().items()
    specials = {token.content: token_id for token_id, token in added if token.special or token.content.startswith("<")}
    return specials.get(mark, -1), mark
