"""Token ids of an answer as text, while they arrive."""

import codecs
import functools
import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Protocol

from tokenizers import Tokenizer


class Detokenizer(Protocol):
    """Turns one answer's token ids into text as they arrive.

    Everything returned, joined, equals the decoding of all ids at once, and no piece ends inside a character.
    """

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that became certain with these tokens."""
        ...

    def finish(self) -> str:
        """Returns the text that was still held back; bytes that never became a character are U+FFFD."""
        ...


class ByteLevelDetokenizer:
    """For vocabularies whose tokens are bytes (GPT-2, Llama 3, Qwen): a UTF-8 decoder over the bytes.

    `token_bytes` gives a token's bytes, and puts its text into `whole_texts` where they are whole characters.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], whole_texts: Mapping[int, str]) -> None:
        self._whole_text = whole_texts.__getitem__
        self._token_bytes = token_bytes
        self._is_in_character = False

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that became certain with these tokens."""
        if self._is_in_character:
            return self._push_bytes(token_ids)
        try:
            return "".join(map(self._whole_text, token_ids))
        except KeyError:  # a part of a character, or a token that is new here
            return self._push_bytes(token_ids)

    def finish(self) -> str:
        """Returns the text that was still held back."""
        if not self._is_in_character:
            return ""
        self._is_in_character = False
        return self._decoder.decode(b"", True)

    @functools.cached_property
    def _decoder(self) -> codecs.IncrementalDecoder:
        """What keeps the beginning of a character; most answers have only tokens that are whole ones."""
        return _Utf8Decoder("replace")

    def _push_bytes(self, token_ids: Sequence[int]) -> str:
        text = self._decoder.decode(b"".join(map(self._token_bytes, token_ids)))
        self._is_in_character = bool(self._decoder.getstate()[0])
        return text


class WindowDetokenizer:
    """For any other decoder (Llama 2's byte fallback among them): the difference of two short decodings.

    Both decodings begin with the tokens of the last piece, so that the decoder treats the new ones as a continuation.
    Byte tokens wait for the end of their run, because the decoder judges a run as a whole.
    """

    def __init__(self, tokenizer: Tokenizer, shown: Mapping[int, str], special_ids: Set[int]) -> None:
        self._tokenizer = tokenizer
        self._shown = shown
        self._special_ids = special_ids
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that became certain with these tokens."""
        if self._shown.keys().isdisjoint(token_ids):
            return self._push_text(token_ids)
        pieces = []
        for token_id in token_ids:
            if token_id in self._shown:
                pieces += [self.finish(), self._shown[token_id]]
            else:
                pieces.append(self._push_text((token_id,)))
        return "".join(pieces)

    def finish(self) -> str:
        """Returns the text that was still held back."""
        return self._take_pending() if self._pending else ""

    def _push_text(self, token_ids: Sequence[int]) -> str:
        # Those without text would wait for some that has any, which need not come.
        self._pending += [token_id for token_id in token_ids if self._has_text(token_id)]
        if not self._pending or self._is_byte(self._pending[-1]):
            return ""
        return self._take_pending()

    def _take_pending(self) -> str:
        whole = self._tokenizer.decode(self._context + self._pending, skip_special_tokens=True)
        text = whole[len(self._context_text) :]
        if text:
            self._context = self._pending
            self._context_text = self._tokenizer.decode(self._pending, skip_special_tokens=True)
        else:
            self._context, self._context_text = self._context + self._pending, whole
        self._pending = []
        return text

    def _has_text(self, token_id: int) -> bool:
        return token_id not in self._special_ids and self._tokenizer.id_to_token(token_id) is not None

    def _is_byte(self, token_id: int) -> bool:
        return _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token_id) or "") is not None


_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
