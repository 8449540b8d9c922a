"""Where a long text can be cut so that its pieces, encoded one by one, have exactly the tokens of the whole.

Knows the pre-tokenizers of the usual byte-level vocabularies; the texts of any other tokenizer stay whole.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

PIECE_CHARS = 32 * 1024
"""The size of a piece: some milliseconds of work, and some megabytes of memory meanwhile."""
_LOOK_CHARS = 32 * 1024
"""The size of a part that is searched: a search holds the interpreter lock."""

_WORD = "[0-9A-Za-zÀ-ÖØ-öø-ÿА-яёЁ\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3]"
_AFTER = r'[ \t\r\n.,;:!?()\[\]{}"“”、。，；：！？（）]'
_CUT = re.compile(f"(?<={_WORD})(?={_AFTER})")
"""Behind a letter or digit and before a blank or any mark but the apostrophe: every pattern below ends a word there,
and none looks back, so the rest is divided as if it stood alone. The characters are those whose kind has been the same
in every version of Unicode."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_KNOWN_PATTERNS = frozenset(
    {_GPT2, _CONTRACTIONS + r"|\p{N}{1,3}" + _REST, _CONTRACTIONS + r"|\p{N}" + _REST}  # GPT-2, Llama 3, Qwen 2
)


def can_be_cut(tokenizer_json: str) -> bool:
    """Returns whether texts of this tokenizer may be cut by `pieces`."""
    document = json.loads(tokenizer_json)
    normalizer = document.get("normalizer")
    if normalizer is not None and normalizer.get("type") != "NFC":
        return False
    return _ends_words(document.get("pre_tokenizer")) and all(map(_is_plain, document.get("added_tokens") or ()))


def pieces(text: str) -> Iterator[str]:
    """Returns the text in pieces of about PIECE_CHARS; a stretch without a place to cut stays whole."""
    start = at = 0
    while len(text) - start > 2 * PIECE_CHARS:
        at = max(at, start + PIECE_CHARS)
        if at >= len(text):
            break
        found = _CUT.search(text, at, min(len(text), at + _LOOK_CHARS))
        if found is None:
            # A search cannot look behind the end of the part, so the last character is searched again.
            at += _LOOK_CHARS - 1
            continue
        yield text[start : found.start()]
        start = found.start()
    yield text[start:]


def _ends_words(pre_tokenizer: dict[str, Any] | None) -> bool:
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, **more}:
            return more.get("use_regex", True) is True
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return pattern in _KNOWN_PATTERNS
    return False


def _is_plain(token: dict[str, Any]) -> bool:
    """Returns whether an added token is found whatever stands beside it, and cannot be cut itself."""
    return not (
        token.get("lstrip") or token.get("rstrip") or token.get("single_word") or _CUT.search(token.get("content", ""))
    )
