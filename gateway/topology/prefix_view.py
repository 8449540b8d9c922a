"""This gateway's own picture of which worker has which KV pages cached. No request waits for Redis here.

Ten times a second one call asks which workers have changed since the last one; only those are read. A worker whose
changes no longer continue its picture here is read as a whole, piece by piece, while the former picture still serves. A
wrong answer costs the worker a recompute.

One dictionary has, for each page key, a whole number with one bit for each worker that holds it, so a prompt is looked
up once and not once for each worker. A worker that is read anew or has gone gives its bit back: the bit no longer
counts from then on, and is removed from the numbers piece by piece in the background before another worker gets it.
"""

import asyncio
import contextlib
import heapq
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from services.cluster.change_log import LogReader
from services.cluster.prefix_index import MAX_PAGES, IndexSlice, Position, PrefixIndex, Sighting
from services.runtime.background_tasks import supervise
from services.runtime.clock import SYSTEM_CLOCK, Clock
from services.runtime.errors import StoreUnavailable

LOOK_INTERVAL_S = 0.1
BUSY_INTERVAL_S = 0.005
"""The pause between pieces of work that is left over, so that requests get their turn."""
MAX_AGE_S = 1.0
GRACE_S = 2.0
"""How long a worker that Redis no longer knows still counts; a live one is back soon after its next heartbeat."""
REREAD_S = 1.0
"""The pause before a worker whose pages could not be read is read again."""
MAX_VIEW_PAGES = 2**22
"""The most different pages; further ones are left out, and counted."""
MAX_EXPECTED_PAGES = 2**16
"""The most expected pages; for further ones, those that would end first are dropped."""
CHUNKS_PER_LOOK = 4
WORKERS_PER_LOOK = 256
"""Most workers whose changes are read in one call."""
SWEEP_PAGES = 4096


@dataclass(slots=True)
class ViewStats:
    """Counts since the start, for metrics."""

    num_reads: int = 0
    """How often a worker was read as a whole."""
    num_changed_pages: int = 0
    num_ignored_pages: int = 0
    """Pages beyond MAX_VIEW_PAGES."""


class PrefixView:
    """The picture of which prefix is cached where, for one event loop.

    `start` begins to follow Redis; `refresh` does one step of it. About 0.1 KiB for each different page.
    """

    def __init__(
        self,
        index: PrefixIndex,
        *,
        grace_s: float = GRACE_S,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.stats = ViewStats()
        self._index = index
        self._grace_s = grace_s
        self._clock = clock
        self._pages = _Pages(self.stats)
        self._workers: dict[str, _Worker] = {}
        self._log = LogReader()
        self._changed: dict[str, None] = {}
        """Workers whose changes are to be read, in the order in which they became known."""
        self._unread: set[str] = set()
        """Workers that publish and could not be read, or not yet. Each look asks for them again."""
        self._reading: dict[str, _Worker] = {}
        """Workers that are being read as a whole."""
        self._missing: dict[str, float] = {}
        """Since when Redis does not know a worker, by its id."""
        self._expected: list[tuple[float, int, _Worker, tuple[bytes, ...]]] = []
        self._num_expected = 0
        self._turn = itertools.count()
        self._as_of_s = -math.inf
        self._task: asyncio.Task[None] | None = None

    @property
    def age_s(self) -> float:
        """How long ago this picture had all that Redis held; infinite before the first time."""
        return self._clock.monotonic() - self._as_of_s

    @property
    def is_stale(self) -> bool:
        """Whether the picture is older than MAX_AGE_S: Redis does not answer, or workers are still being read."""
        return self.age_s > MAX_AGE_S

    @property
    def num_pages(self) -> int:
        """Different pages in memory, including those about to be forgotten."""
        return len(self._pages.holders)

    @property
    def worker_ids(self) -> frozenset[str]:
        """Workers that have published."""
        return frozenset(worker.worker_id for worker in self._workers.values() if worker.order)

    def longest(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Returns how many pages from the first on each worker has, expected ones included; only workers with any."""
        self._expire()
        return {self._pages.names[bit]: num_pages for bit, num_pages in self._pages.longest(keys)}

    def expect(self, worker_id: str, keys: Iterable[bytes], *, ttl_s: float) -> None:
        """Counts pages as held for a while: a prompt was just sent to the worker, which will soon publish them."""
        self._expire()
        worker = self._workers.get(worker_id) or self._new_worker(worker_id)
        expected, ends_at_s = tuple(keys)[:MAX_EXPECTED_PAGES], self._clock.monotonic() + ttl_s
        for key in expected:
            worker.expected[key] = max(ends_at_s, worker.expected.get(key, ends_at_s))
            self._pages.expect(key, worker.bit)
        self._num_expected += len(expected)
        heapq.heappush(self._expected, (ends_at_s, next(self._turn), worker, expected))
        while self._num_expected > MAX_EXPECTED_PAGES:
            self._end_expectation()

    def has_published(self, worker_id: str, key: bytes) -> bool:
        """Returns whether a worker has published a page, whatever is expected."""
        worker = self._workers.get(worker_id)
        return worker is not None and bool(self._pages.holders.get(key, 0) & worker.bit)

    def forget_expected(self, worker_id: str) -> None:
        """Takes back what was expected of a worker, because it is another process now or has refused."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            self._unexpect(worker)

    def keys_of(self, worker_id: str) -> frozenset[bytes]:
        """Returns what a worker holds, without expectations. Looks at every page: for inspection only."""
        worker = self._workers.get(worker_id)
        return frozenset() if worker is None else frozenset(self._pages.keys_of(worker.bit))

    def start(self) -> None:
        """Begins to follow, on the running loop."""
        self._task = supervise(self._follow, name="prefix-view")

    async def close(self) -> None:
        """Stops following."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
            if not self._task.cancelled():
                self._task.result()

    async def refresh(self) -> bool:
        """Looks at Redis once, and reads a piece. Returns whether nothing is left over. Raises StoreUnavailable."""
        began_s = self._clock.monotonic()
        changed, left = await self._index.changed(self._log)
        self._changed.update(dict.fromkeys(changed))
        for worker_id in changed:
            self._missing.pop(worker_id, None)
        self._missing.update(dict.fromkeys(left or (), began_s))
        has_looked = await self._look()
        self._forget_missing()
        for _ in range(CHUNKS_PER_LOOK):
            await self._read_chunk()
        is_complete = left is not None and has_looked and not self._reading
        if is_complete:
            self._as_of_s = began_s
        return is_complete

    async def _look(self) -> bool:
        """Reads what the next workers have changed. Returns whether no change is left to be read."""
        asked = list(
            itertools.islice(itertools.chain(self._changed, self._unread - self._changed.keys()), WORKERS_PER_LOOK)
        )
        if not asked:
            return True
        workers = {worker_id: self._workers.get(worker_id) for worker_id in asked}
        known = {worker_id: worker.followed if worker else None for worker_id, worker in workers.items()}
        sightings, is_all = await self._index.look(known)
        self._unread.difference_update(asked)
        if is_all:
            for worker_id in asked:
                self._changed.pop(worker_id, None)
        for sighting in sightings:
            self._take(sighting)
        return is_all and not self._changed

    async def _follow(self) -> None:
        while True:
            is_complete = True
            with contextlib.suppress(StoreUnavailable):
                is_complete = await self.refresh()
            self._expire()
            is_swept = self._pages.sweep()
            await asyncio.sleep(LOOK_INTERVAL_S if is_complete and is_swept else BUSY_INTERVAL_S)

    def _take(self, sighting: Sighting) -> None:
        worker = self._workers.get(sighting.worker_id)
        if worker is None:
            worker = self._new_worker(sighting.worker_id)
        if worker.order != sighting.order:
            if worker.order:
                # Another process: its pages are not those of the one before.
                self._unexpect(worker)
                self._replace_bit(worker, self._pages.take_bit())
            self._stop_reading(worker)
            worker.order, worker.position = sighting.order, None
        if sighting.position is None:
            self._read_again(worker, is_filling=sighting.is_filling)
            return
        reading = worker.reading
        if reading is not None and reading.position is not None and reading.position.base != sighting.position.base:
            self._read_again(worker, is_filling=False)
            return
        bit = worker.bit if reading is None else reading.bit
        for change in sighting.changes:
            self._pages.add(change.added, bit)
            self._pages.remove(change.evicted, bit)
            self.stats.num_changed_pages += len(change.added) + len(change.evicted)
        if reading is None:
            worker.position = sighting.position
        else:
            reading.position = sighting.position

    def _new_worker(self, worker_id: str) -> "_Worker":
        worker = self._workers[worker_id] = _Worker(worker_id, self._pages.take_bit())
        self._pages.show(worker.bit, worker_id)
        return worker

    def _read_again(self, worker: "_Worker", *, is_filling: bool) -> None:
        if worker.reading is not None and worker.reading.position is None and not is_filling:
            return  # It has not begun yet.
        self._stop_reading(worker)
        worker.position = None
        if not is_filling and self._clock.monotonic() >= worker.read_at_s:
            worker.reading = _Reading(self._pages.take_bit())
            self._reading[worker.worker_id] = worker
        else:
            self._unread.add(worker.worker_id)

    async def _read_chunk(self) -> None:
        """Reads a piece of the first worker that must be read."""
        worker = next(iter(self._reading.values()), None)
        if worker is None or worker.reading is None:
            return
        reading = worker.reading
        chunk = await self._index.read(worker.worker_id, reading.cursor)
        if chunk is not None and reading.position is None and chunk.position.order == worker.order:
            reading.position = chunk.position
        if chunk is None or not reading.goes_on_with(chunk):
            self._stop_reading(worker)
            worker.read_at_s = self._clock.monotonic() + REREAD_S
            self._unread.add(worker.worker_id)
            return
        self._pages.add(chunk.keys, reading.bit)
        reading.num_pages += len(chunk.keys)
        reading.cursor = chunk.cursor
        if chunk.cursor == 0:
            worker.position, worker.reading = reading.position, None
            del self._reading[worker.worker_id]
            self._replace_bit(worker, reading.bit)
            self.stats.num_reads += 1

    def _stop_reading(self, worker: "_Worker") -> None:
        if worker.reading is not None:
            self._pages.retire(worker.reading.bit)
            worker.reading = None
            self._reading.pop(worker.worker_id, None)

    def _replace_bit(self, worker: "_Worker", bit: int) -> None:
        for key in worker.expected:
            self._pages.unexpect(key, worker.bit)
            self._pages.expect(key, bit)
        self._pages.retire(worker.bit)
        worker.bit = bit
        self._pages.show(bit, worker.worker_id)

    def _forget_missing(self) -> None:
        """Forgets workers unknown to Redis for a while; not at once, since it may have lost data that they restore."""
        now_s = self._clock.monotonic()
        for worker_id, since_s in list(self._missing.items()):
            if now_s - since_s < self._grace_s:
                continue
            del self._missing[worker_id]
            self._unread.discard(worker_id)
            worker = self._workers.get(worker_id)
            if worker is not None and worker.order:
                self._unexpect(worker)
                self._stop_reading(worker)
                self._pages.retire(worker.bit)
                del self._workers[worker_id]

    def _expire(self) -> None:
        now_s = self._clock.monotonic()
        while self._expected and self._expected[0][0] <= now_s:
            self._end_expectation()

    def _end_expectation(self) -> None:
        ends_at_s, _, worker, keys = heapq.heappop(self._expected)
        self._num_expected -= len(keys)
        for key in keys:
            if worker.expected.get(key, math.inf) <= ends_at_s:
                del worker.expected[key]
                self._pages.unexpect(key, worker.bit)
        self._leave_if_unknown(worker)

    def _unexpect(self, worker: "_Worker") -> None:
        for key in worker.expected:
            self._pages.unexpect(key, worker.bit)
        worker.expected.clear()
        self._leave_if_unknown(worker)

    def _leave_if_unknown(self, worker: "_Worker") -> None:
        """Forgets a worker that has published nothing and of which nothing is expected."""
        if not worker.order and not worker.expected and self._workers.get(worker.worker_id) is worker:
            del self._workers[worker.worker_id]
            self._pages.retire(worker.bit)


@dataclass(slots=True)
class _Reading:
    """A worker that is being read as a whole, into a bit that does not count yet."""

    bit: int
    cursor: int = 0
    num_pages: int = 0
    position: Position | None = None

    def goes_on_with(self, chunk: IndexSlice) -> bool:
        """Whether the chunk belongs to the set of those before it, and that set comes to an end."""
        life = None if self.position is None else (self.position.order, self.position.base)
        return life == (chunk.position.order, chunk.position.base) and self.num_pages <= 2 * MAX_PAGES


@dataclass(slots=True, eq=False)
class _Worker:
    worker_id: str
    bit: int
    order: str = ""
    """The life of its process; empty: it has published nothing."""
    position: Position | None = None
    """The position up to which its pages are here; None: they are out of date."""
    reading: _Reading | None = None
    read_at_s: float = -math.inf
    expected: dict[bytes, float] = field(default_factory=dict)
    """When each expectation ends, by key."""

    @property
    def followed(self) -> Position | None:
        """The position from which changes are of use."""
        return self.position if self.reading is None else self.reading.position


class _Pages:
    """Which workers hold which page, in bits."""

    def __init__(self, stats: ViewStats) -> None:
        self.holders: dict[bytes, int] = {}
        self.names: dict[int, str] = {}
        self._expected: dict[bytes, int] = {}
        self._stats = stats
        self._taken = 0
        self._shown = 0
        self._retired = 0
        self._sweeping = 0
        self._to_sweep: list[bytes] = []

    def take_bit(self) -> int:
        """Returns the lowest bit that no worker has."""
        bit = ~self._taken & (self._taken + 1)
        self._taken |= bit
        return bit

    def show(self, bit: int, worker_id: str) -> None:
        """Makes a bit count."""
        self.names[bit] = worker_id
        self._shown |= bit

    def retire(self, bit: int) -> None:
        """Stops a bit from counting; it is free again once it has been swept out."""
        self.names.pop(bit, None)
        self._shown &= ~bit
        self._retired |= bit

    def add(self, keys: Sequence[bytes], bit: int) -> None:
        """Notes that the worker holds these keys."""
        holders = self.holders
        if len(holders) + len(keys) > MAX_VIEW_PAGES:
            room = MAX_VIEW_PAGES - len(holders)
            new = [key for key in keys if key not in holders]
            self._stats.num_ignored_pages += max(0, len(new) - room)
            ignored = frozenset(new[room:])
            keys = [key for key in keys if key not in ignored]
        for key in keys:
            held = holders.get(key)
            # Most keys share the very object `bit`: numbers of many bits take memory.
            holders[key] = bit if held is None else held | bit

    def remove(self, keys: Sequence[bytes], bit: int) -> None:
        """Notes that the worker no longer holds these keys."""
        for key in keys:
            _clear(self.holders, key, bit)

    def expect(self, key: bytes, bit: int) -> None:
        """Notes that the worker will hold this key."""
        self._expected[key] = self._expected.get(key, 0) | bit

    def unexpect(self, key: bytes, bit: int) -> None:
        """Notes that this key is no longer expected."""
        _clear(self._expected, key, bit)

    def longest(self, keys: Sequence[bytes]) -> Iterator[tuple[int, int]]:
        """Returns (bit, number of keys from the first one on) for all bits that have any."""
        running = self._shown
        num_pages = 0
        for held in self._held(keys):
            still = running & held
            if still != running:
                if num_pages:
                    yield from ((bit, num_pages) for bit in _bits(running ^ still))
                if not still:
                    return
                running = still
            num_pages += 1
        if num_pages:
            yield from ((bit, num_pages) for bit in _bits(running))

    def _held(self, keys: Sequence[bytes]) -> Iterator[int]:
        """Returns the bits of each key, looked up without a line of Python for each."""
        held = map(self.holders.get, keys, itertools.repeat(0))
        if not self._expected:
            return held
        return map(operator.or_, held, map(self._expected.get, keys, itertools.repeat(0)))

    def sweep(self) -> bool:
        """Takes retired bits out of some pages. Returns whether nothing is left to be swept."""
        if not self._sweeping:
            if not self._retired:
                return True
            self._sweeping = self._retired
            self._to_sweep = list(self.holders)
        piece = self._to_sweep[-SWEEP_PAGES:]
        del self._to_sweep[-SWEEP_PAGES:]
        for key in piece:
            _clear(self.holders, key, self._sweeping)
        if self._to_sweep:
            return False
        self._taken &= ~self._sweeping
        self._retired &= ~self._sweeping
        self._sweeping = 0
        return not self._retired

    def keys_of(self, bit: int) -> Iterator[bytes]:
        """Returns the keys that the worker holds."""
        return (key for key, held in self.holders.items() if held & bit)


def _clear(masks: dict[bytes, int], key: bytes, bits: int) -> None:
    held = masks.get(key, 0)
    if not held & bits:
        return
    left = held & ~bits
    if left:
        masks[key] = left
    else:
        del masks[key]


def _bits(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
