"""What an answer is bound to: all that decides its tokens beside the request. Plain data; knows no engine.

A worker says it as text in its record (`services.cluster.registry`). A gateway compares whole texts, so that a field
which only one of two versions knows makes two workers different, and never equal by omission.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from dataclasses import dataclass

MAX_IDENTITY_CHARS = 512
MAX_KEY_CHARS = 64
"""The longest `identity_key`: journals of all versions take as many characters."""
_DIGEST_CHARS = 24


@dataclass(frozen=True, slots=True)
class AnswerIdentity:
    """Two exact workers with equal identities give the same tokens for the same request.

    `engine` is its name and the version of its numerics, such as `tandem/1`. `weights` names every byte of the weights
    and what the bytes of a page mean. `config` names the rest of the model's configuration. `arithmetic` names the
    kernels: their sources, the instructions in use, the version of torch, the GPU. `vocabulary` is the number of its
    tokens and a digest of the tokenizer. `grammars` is the library that forces forms, with its version.
    """

    engine: str
    weights: str
    config: str
    dtype: str
    arithmetic: str
    vocabulary: str
    grammars: str

    @property
    def text(self) -> str:
        """`field=value` for each field, separated by spaces; at most MAX_IDENTITY_CHARS characters."""
        fields = dataclasses.asdict(self)
        return " ".join(f"{name}={'_'.join(value.split())}" for name, value in fields.items())[:MAX_IDENTITY_CHARS]

    @property
    def numerics(self) -> str:
        """How it computes, whatever the model: engine, dtype and kernels."""
        return f"{self.engine}/{self.dtype}/{self.arithmetic}"


def identity_fields(text: str) -> dict[str, str]:
    """Returns the fields of an identity's text by name, unknown ones too; what is no field is left out."""
    pairs = (word.partition("=") for word in text.split())
    return {name: value for name, separator, value in pairs if separator}


def identity_key(text: str, *, layout: str, incarnation: str) -> str:
    """Returns a name for an identity, equal only for equal texts: that of the weights, a dot, and a digest of the text.

    It has at most MAX_KEY_CHARS characters. `layout` is the fingerprint of the worker's weights and pages. A worker
    without a text, because its version says none, is like nobody but itself: its `incarnation` is in the name. Without
    either, nothing is known: empty.
    """
    if not layout:
        return ""
    if not text:
        return f"{layout}.unknown-{incarnation}"[:MAX_KEY_CHARS]
    return f"{layout}.{_digest(text)}"


@functools.lru_cache(maxsize=1024)  # by the text alone, so that it holds for any number of workers
def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARS]


def has_weights_of(key: str, other: str) -> bool:
    """Returns whether two keys name the same weights, however these are computed with."""
    return key.partition(".")[0] == other.partition(".")[0]
