"""The cluster's names of vLLM's cached blocks, as they come and go; without vLLM.

vLLM tells of blocks by hashes of its own, which no gateway can compute. The names of pages
(`services.runtime.page_keys`) follow from the tokens that it tells along, and from the salt, which the hash of a first
block is made with.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.engine.cache.pages import PageChanges
from services.runtime.page_keys import KeyChain, PageKey


@dataclass(slots=True)
class _Named:
    """A name, the salt that all names of its chain are made with, and the number of blocks that have it."""

    key: PageKey
    salt: bytes
    num_blocks: int = 0


class BlockNames:
    """Blocks that can be found, by vLLM's hashes. Belongs to the engine thread."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._named: dict[object, _Named] = {}
        self._added: dict[PageKey, None] = {}
        self._evicted: dict[PageKey, None] = {}

    def stored(
        self, hashes: Sequence[object], token_ids: Sequence[int], *, parent: object | None, salt: bytes | None
    ) -> None:
        """Notes blocks in a row that can be found from now on: their tokens, and the block before the first of them.

        `salt` is that of a prompt's first block. A row is left alone if the block before it is not known.
        """
        before = None if parent is None else self._named.get(parent)
        if before is not None:
            salt = before.salt
            chain = KeyChain(salt, self._block_size, parent=before.key)
        elif parent is None and salt is not None:
            chain = KeyChain(salt, self._block_size)
        else:
            return
        keys = chain.extend(token_ids, len(token_ids))
        for block_hash, key in zip(hashes, keys, strict=True):
            named = self._named.setdefault(block_hash, _Named(key, salt))
            named.num_blocks += 1
            if named.num_blocks == 1:
                self._note(key, self._added, self._evicted)

    def removed(self, hashes: Sequence[object]) -> None:
        """Notes blocks that cannot be found any longer; another one with the same hash still can."""
        for block_hash in hashes:
            named = self._named.get(block_hash)
            if named is None:
                continue
            named.num_blocks -= 1
            if not named.num_blocks:
                del self._named[block_hash]
                self._note(named.key, self._evicted, self._added)

    def take_changes(self) -> PageChanges:
        """Returns what has changed since the last call."""
        changes = PageChanges(tuple(self._added), tuple(self._evicted))
        self._added, self._evicted = {}, {}
        return changes

    @staticmethod
    def _note(key: PageKey, here: dict[PageKey, None], there: dict[PageKey, None]) -> None:
        if key in there:
            del there[key]  # back to what was told last
        else:
            here[key] = None
