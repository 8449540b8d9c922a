"""Translates vLLM's cached blocks to the cluster's page names as they are stored and evicted. Works without vLLM.

vLLM identifies blocks by its own hashes, which a gateway cannot compute. The names of pages
(`services.runtime.page_keys`) are derived from the tokens that vLLM reports with each block, and from the salt, which
is part of the hash of a first block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.engine.cache.pages import PageChanges
from services.runtime.page_keys import KeyChain, PageKey


@dataclass(slots=True)
class _Named:
    """A name, the salt of its chain, and the number of blocks with this name."""

    key: PageKey
    salt: bytes
    num_blocks: int = 0


class BlockNames:
    """Blocks in the prefix cache, by vLLM's hashes. Belongs to the engine thread."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._named: dict[object, _Named] = {}
        self._added: dict[PageKey, None] = {}
        self._evicted: dict[PageKey, None] = {}

    def stored(
        self, hashes: Sequence[object], token_ids: Sequence[int], *, parent: object | None, salt: bytes | None
    ) -> None:
        """Records consecutive blocks that entered the cache: their tokens, and the block before the first of them.

        `salt` is given for the first block of a prompt. Ignores the blocks if the block before them is unknown.
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
        """Records blocks that left the cache. Other blocks with the same hash remain."""
        for block_hash in hashes:
            named = self._named.get(block_hash)
            if named is None:
                continue
            named.num_blocks -= 1
            if not named.num_blocks:
                del self._named[block_hash]
                self._note(named.key, self._evicted, self._added)

    def take_changes(self) -> PageChanges:
        """Returns the changes since the last call."""
        changes = PageChanges(tuple(self._added), tuple(self._evicted))
        self._added, self._evicted = {}, {}
        return changes

    @staticmethod
    def _note(key: PageKey, here: dict[PageKey, None], there: dict[PageKey, None]) -> None:
        if key in there:
            del there[key]  # same state as in the last report
        else:
            here[key] = None
