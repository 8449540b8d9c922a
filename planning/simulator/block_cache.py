"""Which blocks of prompts a worker remembers, and which goes first: two orders of LRU, and the pool of pages behind.

`lru`: the blocks of a prompt are touched one after the other in the order of the prompt, so that of one prompt the
first block is the oldest. That is what Mooncake's analysis does (Qin et al., FAST 2025). `lru-leaf-first`: the last
block is the oldest, so that a parent never leaves before its child; a child without its parent is of no use, because
only a prefix can be reused. That is what the allocator of the engine does.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LRU = "lru"
LRU_LEAF_FIRST = "lru-leaf-first"
EVICTIONS = (LRU, LRU_LEAF_FIRST)


class BlockCache:
    """At most `capacity` blocks that nobody uses just now, in the order in which they go; None: without bound."""

    def __init__(self, capacity: int | None = None, eviction: str = LRU) -> None:
        assert eviction in EVICTIONS, "the name was checked where it was read"
        assert capacity is None or capacity >= 0, "a capacity is a number of blocks"
        self._capacity = capacity
        self._is_leaf_first = eviction == LRU_LEAF_FIRST
        self.blocks: OrderedDict[int, None] = OrderedDict()
        """The blocks, the next to go first."""

    def __len__(self) -> int:
        return len(self.blocks)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self.blocks

    def access(self, block_ids: Sequence[int]) -> int:
        """Notes a prompt; returns how many of its blocks were cached. Afterwards all are, as far as there is room."""
        if self._is_leaf_first:
            num_hits = 0
            while num_hits < len(block_ids) and block_ids[num_hits] in self.blocks:
                num_hits += 1
            self.put(block_ids)
            return num_hits
        num_hits = 0
        for block_id in block_ids:
            num_hits += block_id in self.blocks
            self.put((block_id,))
        return num_hits

    def put(self, block_ids: Sequence[int]) -> None:
        """Remembers blocks of one prompt, given in its order; they are the youngest now. The oldest go if need be."""
        blocks = self.blocks
        for block_id in reversed(block_ids) if self._is_leaf_first else block_ids:
            blocks[block_id] = None
            blocks.move_to_end(block_id)
        while self._capacity is not None and len(blocks) > self._capacity:
            self.evict()

    def take(self, block_id: int) -> None:
        """Somebody uses the block from now on; it is no longer among those that may go."""
        del self.blocks[block_id]

    def evict(self) -> int:
        """The oldest block goes; which it was."""
        return self.blocks.popitem(last=False)[0]


def hit_rate(prompts: Iterable[Sequence[int]], capacity: int | None, eviction: str = LRU) -> float:
    """Blocks found / blocks asked for, when `prompts` pass one cache of `capacity` blocks one after the other."""
    cache, num_hits, num_asked = BlockCache(capacity, eviction), 0, 0
    for block_ids in prompts:
        num_hits += cache.access(block_ids)
        num_asked += len(block_ids)
    return num_hits / num_asked if num_asked else 0.0


@dataclass(slots=True)
class Lease:
    """Pages of one request. The first `num_cached` of `block_ids` were cached when it came."""

    block_ids: tuple[int, ...]
    num_cached: int
    num_private: int
    """Pages that nobody else can use."""
    shared: list[int]
    """Blocks that it uses in common with others that ask for them, in the order of the prompt."""


class PagePool:
    """Pages of one simulated worker: free, private to a request, shared blocks in use, and blocks only remembered."""

    def __init__(self, num_pages: int, eviction: str = LRU_LEAF_FIRST) -> None:
        self.num_pages = num_pages
        self._num_private = 0
        self._users: dict[int, int] = {}  # of shared blocks in use
        self._idle = BlockCache(None, eviction)

    @property
    def num_available(self) -> int:
        """Pages that are free or only remembered."""
        return self.num_pages - self._num_private - len(self._users)

    def num_cached(self, block_ids: Sequence[int]) -> int:
        """How many blocks from the first on are here."""
        users, idle = self._users, self._idle.blocks
        for index, block_id in enumerate(block_ids):
            if block_id not in users and block_id not in idle:
                return index
        return len(block_ids)

    def reserve(self, block_ids: tuple[int, ...], num_pages: int) -> Lease | None:
        """`num_pages` pages of which the first hold `block_ids`, or None if fewer are free.

        What is here of the blocks is used; for the rest the oldest remembered blocks go, if need be.
        """
        assert num_pages >= len(block_ids), "every block is a page"
        users, num_cached = self._users, self.num_cached(block_ids)
        cached = list(block_ids[:num_cached])
        idle = [block_id for block_id in cached if block_id not in users]
        num_new = num_pages - num_cached
        if num_new + len(idle) > self.num_available:
            return None
        for block_id in cached:
            users[block_id] = users.get(block_id, 0) + 1
        for block_id in idle:
            self._idle.take(block_id)
        self._num_private += num_new
        self._make_room()
        return Lease(block_ids, num_cached, num_new, cached)

    def publish(self, lease: Lease) -> None:
        """The lease's blocks are computed: others may use them.

        Where another request has computed a block at the same time, the copy stays private; the blocks after it are
        still found, because an id stands for all that is before.
        """
        users, idle = self._users, self._idle.blocks
        new = [one for one in lease.block_ids[lease.num_cached :] if one not in users and one not in idle]
        users.update(dict.fromkeys(new, 1))
        self._num_private -= len(new)
        lease.num_private -= len(new)
        lease.shared += new

    def remember(self, block_ids: Sequence[int]) -> None:
        """Blocks have come from elsewhere, which nobody uses yet; the oldest remembered ones go if need be."""
        self._idle.put([block_id for block_id in block_ids if block_id not in self._users])
        self._make_room()

    def release(self, lease: Lease) -> None:
        """The request has ended: its private pages are free, its shared blocks are remembered once nobody uses them."""
        self._num_private -= lease.num_private
        users, unused = self._users, []
        for block_id in lease.shared:
            num_users = users[block_id] - 1
            if num_users:
                users[block_id] = num_users
            else:
                del users[block_id]
                unused.append(block_id)
        self._idle.put(unused)
        lease.num_private = 0
        lease.shared = []

    def _make_room(self) -> None:
        for _ in range(self._num_private + len(self._users) + len(self._idle) - self.num_pages):
            self._idle.evict()
