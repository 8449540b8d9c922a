"""What Redis' memory is for: how much each kind of keys may take, what it takes, and whether anything may be evicted.

Files, batches, journals and stored answers are what clients fill; all are counted, and refused where their room is used
up. All other kinds are bounded by the number of workers, of tenants and of requests at once. Knows no key's format.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from services.cluster.answers import AnswerStore
from services.cluster.files import FileStore
from services.cluster.journal_room import swept_bytes
from services.cluster.redis_store import Store

REST_BYTES = 448 * 2**20
"""Memory for all that clients do not fill: leases, published pages, placements, limits, quarantine."""
APPENDED_FACTOR = 2
"""Redis gives a text that is appended to up to this many times its size."""
KEEPING_POLICIES = frozenset({"noeviction"})
EVICTION_ADVICE = (
    "leases, files, batches, limits, journals and answers would go with the rest: set maxmemory-policy to noeviction, "
    "with room for --file-storage, --journal-storage and --answer-storage"
)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What Redis says of its memory, and what the counted kinds take of it, in bytes.

    `max_bytes` 0: no limit. `num_evicted_keys` since it was started.
    """

    used_bytes: int
    max_bytes: int
    policy: str
    num_evicted_keys: int
    file_bytes: int
    journal_bytes: int
    answer_bytes: int


@dataclass(frozen=True, slots=True)
class StorageBounds:
    """What the counted kinds may take of Redis' memory, in bytes: files and batches, journals, stored answers."""

    file_bytes: int
    journal_bytes: int
    answer_bytes: int

    @property
    def all_bytes(self) -> int:
        """The memory that a Redis needs for them and all the rest."""
        return APPENDED_FACTOR * (self.file_bytes + self.journal_bytes) + self.answer_bytes + REST_BYTES


def may_evict(max_bytes: int, policy: str) -> bool:
    """Whether a Redis throws keys away when its memory is used up."""
    return max_bytes > 0 and policy not in KEEPING_POLICIES


class Complaint(NamedTuple):
    """Something that is wrong, and what to do, in words for an operator; `subject` names the setting."""

    subject: str
    what: str
    advice: str


def complaints(use: MemoryUse, bounds: StorageBounds) -> Iterator[Complaint]:
    """Yields what is wrong with a Redis' memory for these bounds."""
    if may_evict(use.max_bytes, use.policy):
        what = f"Redis throws keys away at its memory limit (maxmemory-policy {use.policy})"
        yield Complaint("maxmemory-policy", what, EVICTION_ADVICE)
    if use.max_bytes and use.max_bytes < bounds.all_bytes:
        what = (
            f"Redis has a maxmemory of {use.max_bytes} bytes, and files, batches, journals, answers and the rest may "
            f"need {bounds.all_bytes}"
        )
        yield Complaint("maxmemory", what, "raise it, or lower --file-storage, --journal-storage and --answer-storage")


async def memory_use(store: Store, *, files: FileStore, answers: AnswerStore) -> MemoryUse:
    """Gives back what has expired, and returns what is used. Raises StoreUnavailable."""
    file_bytes, journal_bytes, answer_bytes = (
        await files.swept_bytes(),
        await swept_bytes(store),
        await answers.swept_bytes(),
    )
    memory, stats = await store.info("memory"), await store.info("stats")
    return MemoryUse(
        used_bytes=int(memory.get("used_memory", 0)),
        max_bytes=int(memory.get("maxmemory", 0)),
        policy=str(memory.get("maxmemory_policy", "unknown")),
        num_evicted_keys=int(stats.get("evicted_keys", 0)),
        file_bytes=file_bytes,
        journal_bytes=journal_bytes,
        answer_bytes=answer_bytes,
    )
