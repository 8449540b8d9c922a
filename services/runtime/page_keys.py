"""Names of KV pages by content: equal names mean equal tokens at equal places, of the same model and the same tenant.

Knows no page, no pool and no torch. A key is a keyed BLAKE2b digest over the key of the page before it and the tokens
of the page, so it stands for everything from the first token on; without the salt, one can neither guess a key make two
prompts collide. (vLLM and SGLang chain hashes of pages likewise; theirs are unkeyed or keyed by a seed.)
"""

from __future__ import annotations

import functools
import hashlib
from array import array
from collections.abc import Sequence

KEY_BYTES = 16
SALT_BYTES = 32
_ROOT = bytes(KEY_BYTES)

PageKey = bytes
"""16 bytes."""


@functools.lru_cache(maxsize=1024)
def cache_salt(*, model: str, tenant: str) -> bytes:
    """Returns the key of the digests, 32 bytes: pages are shared only where both arguments are the same.

    `model` is the layout fingerprint, which names the weights; `tenant` names those that may share, the empty text all.
    """
    parts = (model, tenant)
    # Lengths in front: no two different lists of parts give the same bytes.
    text = b"".join(len(part.encode()).to_bytes(8, "little") + part.encode() for part in parts)
    return hashlib.blake2b(text, digest_size=SALT_BYTES, person=b"tandem pages").digest()


def sharers(*, tenant: str, group: str = "", salt: str = "", adapter: str = "", regions: Sequence[str] = ()) -> str:
    """Names the sharers of a request's pages, for `tenant` of `cache_salt`: those with the same owner and salt.

    The owner is `group` where the operator has put the tenant into one, else the tenant. `salt` is the client's choice,
    as in vLLM. The owner's kind and length stand in front, so no choice of a salt and no name of a tenant gives what
    belongs to another owner. `adapter` is the one that changes what the model computes, or empty. Pages that are held
    to `regions` are shared only with requests that are held to the same ones: no others may carry them elsewhere.
    """
    owner = f"g{group}" if group else f"t{tenant}"
    changed = f"a{len(adapter)}:{adapter}" if adapter else ""
    held = "".join(f"r{len(region)}:{region}" for region in regions)
    return f"{held}{changed}{len(owner)}:{owner}{salt}"


class KeyChain:
    """Keys of the full pages of one sequence; grows with it. Costs time only for the tokens that were added.

    `parent` is the key of the page before them, where they are not the first ones.
    """

    __slots__ = ("_keyed", "_page_size", "_parent", "keys")

    def __init__(self, salt: bytes, page_size: int, *, parent: PageKey = _ROOT) -> None:
        self._keyed = hashlib.blake2b(digest_size=KEY_BYTES, key=salt)
        self._page_size = page_size
        self._parent = parent
        self.keys: list[PageKey] = []

    def extend(self, token_ids: Sequence[int], num_tokens: int) -> list[PageKey]:
        """Returns all keys, after adding those of the full pages among the first `num_tokens` of all `token_ids`."""
        size, keys = self._page_size, self.keys
        first = len(keys)
        end = num_tokens // size
        if first >= end:
            return keys
        data = array("I", token_ids[first * size : end * size]).tobytes()
        page_bytes = len(data) // (end - first)
        parent = keys[-1] if keys else self._parent
        for start in range(0, len(data), page_bytes):
            digest = self._keyed.copy()
            digest.update(parent + data[start : start + page_bytes])
            parent = digest.digest()
            keys.append(parent)
        return keys


def page_keys(token_ids: Sequence[int], *, salt: bytes, page_size: int) -> list[PageKey]:
    """Returns the keys of the full pages of a prompt, in order."""
    return KeyChain(salt, page_size).extend(token_ids, len(token_ids))
