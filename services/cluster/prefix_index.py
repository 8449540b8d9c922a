"""Which worker has which KV pages cached: workers publish the keys, gateways follow them. Knows no token and no page.

A page key is 16 opaque bytes that stand for a page and all before it, so the longest cached prefix is the run of keys
from the first one on. A worker that evicts may leave holes, which is why a run is walked and never searched by halves.

Everything here is a hint: one that is wrong costs a recompute. So that it is seldom wrong, what a worker holds is
numbered: within one life of a worker a number stands for one content and is never given twice. A gateway whose number
is that of Redis has what Redis has, whatever happened in between; one that cannot follow the changes from its own
number reads everything again. That is also what tells that Redis has lost its memory or woke up with an older one,
which therefore needs no further sign.
"""

import contextlib
import logging
import re
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from redis.exceptions import RedisError

from services.cluster.change_log import LOOK, LogReader
from services.cluster.change_log import MAX_CHANGES as MAX_WORKERS
from services.cluster.keys import Keys
from services.cluster.prefix_scripts import CHANGE, DELETE, FILL, FOLLOW, LONGEST, READ
from services.cluster.redis_store import Script, Store, run_script, thread_client
from services.cluster.registry import WORKER_ID_PATTERN, WorkerRecord

KEY_BYTES = 16
PAGES_TTL_S = 5.0
PAGES_BEAT_S = 1.0
FLUSH_INTERVAL_S = 0.05
FLUSH_KEYS = 512
"""Number of noted keys that are published before the interval is over."""
RETRY_S = 0.2
MAX_BATCH_KEYS = 1024
"""Most keys in one change: about 3 ms of Redis' time."""
MAX_READ_KEYS = 2048
"""Most keys in one change that is read: workers of earlier versions put this many into one."""
MAX_CHANGES = 64
"""Changes that Redis keeps; a gateway that is further behind reads everything."""
FILL_KEYS = 1024
"""Keys in one round trip of a full publication, or of reading one: about 1 ms of Redis' time."""
MAX_PAGES = 2**20
"""Most keys of one worker; more are not published, and not read."""
MAX_ANSWER_BYTES = 2**20
"""Most bytes of changes in one answer; the rest comes with the next one."""
MAX_LONGEST_KEYS = 1024
"""Most keys that `PrefixIndex.longest` looks at; 64 workers that hold them all are then about 10 ms of Redis' time."""

_COUNT = struct.Struct(">I")
_ORDER_PATTERN = re.compile(r"[0-9]{20}:[0-9a-f]{32}")
_WORKER_ID_PATTERN = re.compile(WORKER_ID_PATTERN)
_MAX_CHANGE_BYTES = _COUNT.size + MAX_READ_KEYS * KEY_BYTES

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Position:
    """Up to where a gateway has followed a worker: its life, its last full publication, its last change."""

    order: str
    base: int
    seq: int


@dataclass(frozen=True, slots=True)
class Change:
    """Keys that a worker has cached since, and keys that it no longer has; no key is in both."""

    added: tuple[bytes, ...]
    evicted: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Sighting:
    """What one look at Redis tells of one worker.

    `changes` lead from the position that the asker gave to `position`; without a `position` they do not lead on:
    the worker is just filling its set (`is_filling`), or all of it must be read.
    """

    worker_id: str
    order: str
    position: Position | None = None
    changes: tuple[Change, ...] = ()
    is_filling: bool = False


@dataclass(frozen=True, slots=True)
class IndexSlice:
    """A part of what a worker has published, and the position of Redis at that time. `cursor` 0: the last part."""

    position: Position
    cursor: int
    keys: tuple[bytes, ...]


class PrefixPublisher:
    """Publishes the keys of a worker's cached pages, from a thread of its own that no engine waits for.

    Redis may be away, frozen, flushed or restarted: what is noted meanwhile collapses into the present content, and all
    of that is published again when Redis has lost it. Memory: all keys that are held, each once, and those that changed
    since Redis last answered; notes of at most about a second (the time-outs of one call) wait in a queue before that.
    If a newer process has taken the id, nothing more is written.
    """

    def __init__(
        self,
        url: str,
        *,
        cluster: str,
        record: WorkerRecord,
        ttl_s: float = PAGES_TTL_S,
        beat_s: float = PAGES_BEAT_S,
        flush_interval_s: float = FLUSH_INTERVAL_S,
    ) -> None:
        keys = Keys(cluster)
        self._keys = (keys.pages_head(record.id), keys.page_keys(record.id), *keys.pages)
        self._worker_id = record.id
        self._order = record.order
        self._ttl_ms = round(ttl_s * 1000)
        self._beat_s = beat_s
        self._flush_interval_s = flush_interval_s
        self._client = thread_client(url)
        self._notes: deque[_Note | threading.Event] = deque()
        self._num_noted_keys = 0
        self._has_work = threading.Event()
        self._is_urgent = threading.Event()
        self._stopping = threading.Event()
        self._is_lost = False
        self._num_ignored_keys = 0
        # All below belongs to the thread.
        self._held: dict[bytes, None] = {}
        self._changed: dict[bytes, bool] = {}  # against what was sent: True, to be added; False, to be evicted
        self._unconfirmed: bytes | None = None
        self._seq = 0
        self._num_sent = 0
        self._is_filled = False
        self._waiting: list[threading.Event] = []
        self._thread = threading.Thread(target=self._keep, name=f"pages-{record.id}", daemon=True)

    @property
    def is_lost(self) -> bool:
        """Whether a newer process has taken the worker's id."""
        return self._is_lost

    @property
    def num_ignored_keys(self) -> int:
        """Keys that were noted beyond MAX_PAGES and not published."""
        return self._num_ignored_keys

    def start(self) -> None:
        """Begins to publish; returns at once, whether Redis answers or not."""
        self._thread.start()

    def note(self, added: Iterable[bytes] = (), evicted: Iterable[bytes] = ()) -> None:
        """Takes what has changed, from any thread; waits for nothing. A key in both was evicted first.

        Raises ValueError for a key that is not of 16 bytes.
        """
        note = _Note(tuple(added), tuple(evicted))
        for key in (*note.added, *note.evicted):
            if len(key) != KEY_BYTES:
                raise ValueError(f"a page key has {KEY_BYTES} bytes, not {len(key)}")
        self._notes.append(note)
        # Threads may count past each other here; then the interval ends the batch instead of its size.
        self._num_noted_keys += len(note.added) + len(note.evicted)
        if not self._has_work.is_set():
            self._has_work.set()
        if self._num_noted_keys >= FLUSH_KEYS and not self._is_urgent.is_set():
            self._is_urgent.set()

    def begin_life(self, order: str) -> None:
        """Publishes all that is held once more, as a later life of the worker; from any thread."""
        self._order = order  # Redis does not know it, which makes the next change a whole publication
        self._is_urgent.set()
        self._has_work.set()

    def flush(self, *, timeout_s: float) -> bool:
        """Waits until Redis has confirmed everything that was noted before. False: it did not in that time."""
        confirmed = threading.Event()
        self._notes.append(confirmed)
        self._is_urgent.set()
        self._has_work.set()
        return confirmed.wait(timeout_s)

    def release(self, *, timeout_s: float = 2.0) -> None:
        """Stops, and deletes what was published if it is of this life. Without Redis it expires by itself."""
        self._stopping.set()
        self._is_urgent.set()
        self._has_work.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _keep(self) -> None:
        try:
            while not self._stopping.is_set() and not self._is_lost:
                began_s = time.monotonic()
                if not self._try(self._publish):
                    self._stopping.wait(RETRY_S)
                    continue
                if self._has_work.wait(max(0.0, self._beat_s - (time.monotonic() - began_s))):
                    self._is_urgent.wait(self._flush_interval_s)
            self._try(self._delete)
        finally:
            self._client.close()

    def _try(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except (RedisError, OSError, _Refused) as error:
            self._client.connection_pool.disconnect()
            self._take_notes()
            logger.debug("pages could not be published", extra={"error": type(error).__name__})
            return False
        return True

    def _publish(self) -> None:
        self._take_notes()
        if self._is_filled:
            with contextlib.suppress(_Refused):
                self._send_changes()
        if not self._is_filled:
            self._fill()
            self._send_changes()
        for confirmed in self._waiting:
            confirmed.set()
        self._waiting.clear()

    def _take_notes(self) -> None:
        """Collapses the notes into the keys that are held and those that changed."""
        self._has_work.clear()
        self._is_urgent.clear()
        self._num_noted_keys = 0
        held, changed = self._held, self._changed
        while self._notes:
            note = self._notes.popleft()
            if isinstance(note, threading.Event):
                self._waiting.append(note)
                continue
            for key in note.evicted:
                if key in held:
                    del held[key]
                    if changed.get(key):
                        del changed[key]
                    else:
                        changed[key] = False
            for key in note.added:
                if key in held:
                    continue
                if len(held) >= MAX_PAGES:
                    self._num_ignored_keys += 1
                    continue
                held[key] = None
                if key in changed:
                    del changed[key]
                else:
                    changed[key] = True

    def _fill(self) -> None:
        """Publishes everything, under a number that no content had before. What is noted meanwhile changes it."""
        self._unconfirmed = None
        self._changed.clear()
        # One number is left out: a change of that number may have been made on a set with other content.
        self._seq += 2
        keys = tuple(self._held)
        self._num_sent = len(keys)
        starts = range(0, max(1, len(keys)), FILL_KEYS)
        for start in starts:
            chunk = keys[start : start + FILL_KEYS]
            flags = (int(start == 0), int(start == starts[-1]))
            self._run(FILL, self._seq, start + len(chunk), *flags, b"".join(chunk))
            self._take_notes()
        self._is_filled = True

    def _send_changes(self) -> None:
        """Publishes what has changed, or says that nothing has, which also keeps the keys from expiring."""
        if not self._changed and self._unconfirmed is None:
            self._run(CHANGE, self._seq, self._seq, self._num_sent, MAX_CHANGES, b"")
        while self._changed or self._unconfirmed is not None:
            # After a time-out the same bytes are sent again: Redis may have their number, which stands for them.
            if self._unconfirmed is None:
                self._unconfirmed = self._next_change()
            self._run(CHANGE, self._seq, self._seq + 1, self._num_sent, MAX_CHANGES, self._unconfirmed)
            self._seq += 1
            self._unconfirmed = None

    def _next_change(self) -> bytes:
        keys = list(islice(self._changed, MAX_BATCH_KEYS))
        added: list[bytes] = []
        evicted: list[bytes] = []
        for key in keys:
            (added if self._changed.pop(key) else evicted).append(key)
        self._num_sent += len(added) - len(evicted)
        return _COUNT.pack(len(added)) + b"".join(added) + b"".join(evicted)

    def _run(self, script: Script, *args: bytes | int) -> None:
        """Runs a script. Raises _Refused where Redis has lost what it should hold, or it was spoiled there."""
        answer = run_script(self._client, script, self._keys, (self._order, self._ttl_ms, self._worker_id, *args))
        if answer == 1:
            return
        self._is_filled = False
        if answer == 0:
            self._is_lost = True
            logger.warning("a newer process publishes its pages", extra={"worker": self._worker_id})
        raise _Refused

    def _delete(self) -> None:
        run_script(self._client, DELETE, self._keys, (self._order, self._worker_id))


class PrefixIndex:
    """Reads what workers have published. What is not as it should be is left out and counted.

    The methods raise StoreUnavailable.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    async def longest(self, keys: Sequence[bytes]) -> dict[str, int]:
        """How many pages from the first on each worker has, in one round trip; workers that have none are left out.

        It is for callers without a view of their own. At most MAX_LONGEST_KEYS are looked at. Exact, holes included:
        each worker's run is followed 64 keys at a time to the first one that is missing.
        """
        if not keys:
            return {}
        args: list[str | bytes | int] = [self._store.keys.pages_prefix, *keys[:MAX_LONGEST_KEYS]]
        _, changes, _ = self._store.keys.pages
        num_rejected, *found = await self._store.run(LONGEST, (changes, self._store.keys.pages_asked), args)
        self._store.stats.num_rejected_values += num_rejected
        longest = {}
        for raw, num_pages in zip(found[::2], found[1::2], strict=True):
            worker_id = self._worker_id(raw)
            if worker_id is not None:
                longest[worker_id] = num_pages
        return longest

    async def changed(self, log: LogReader) -> tuple[list[str], frozenset[str] | None]:
        """Returns the next workers that have published something since `log`'s position, and those that left.

        The second is None if more is to be read.
        """
        answer = await self._store.run(LOOK, self._store.keys.pages, (log.number, MAX_WORKERS))
        left = log.read(answer)
        changed = [worker_id for worker_id in map(self._worker_id, answer[4]) if worker_id is not None]
        return changed, None if left is None else frozenset(raw.decode(errors="replace") for raw in left)

    async def look(self, known: Mapping[str, Position | None]) -> tuple[list[Sighting], bool]:
        """Returns the changes of some workers since these positions, and whether no changes were left out.

        A worker that has not published, or whose keys are not sound, is missing in the answer.
        """
        args: list[str | bytes | int] = [self._store.keys.pages_prefix, MAX_CHANGES]
        args += [_MAX_CHANGE_BYTES, MAX_ANSWER_BYTES, MAX_PAGES]
        for worker_id, position in known.items():
            args += [worker_id, "", ""] if position is None else [worker_id, position.order, position.seq]
        num_rejected, is_all, *found = await self._store.run(FOLLOW, self._store.keys.pages, args)
        self._store.stats.num_rejected_values += num_rejected
        sightings = [self._sighting(*entry) for entry in found]
        return [sighting for sighting in sightings if sighting is not None], bool(is_all)

    async def read(self, worker_id: str, cursor: int) -> IndexSlice | None:
        """A part of all that a worker has published, from cursor 0 on. None: nothing can be read now.

        A key that the worker held during the whole reading is in one of the chunks at least; one that came or went
        meanwhile may be in them or not, and is in the changes since the first chunk's position.
        """
        keys = self._store.keys
        found = await self._store.run(
            READ, (keys.pages_head(worker_id), keys.page_keys(worker_id)), (cursor, FILL_KEYS, MAX_PAGES)
        )
        if not found:
            return None
        order, base, seq, next_cursor, num_rejected, data = found
        self._store.stats.num_rejected_values += num_rejected
        return IndexSlice(Position(order.decode(), int(base), int(seq)), int(next_cursor), _split(data))

    def _sighting(self, raw_id: bytes, order: bytes, base: bytes, seq: bytes, *changes: bytes) -> Sighting | None:
        worker_id = self._worker_id(raw_id)
        if worker_id is None:
            return None
        if not base or not seq:
            return Sighting(worker_id, order.decode(), is_filling=not base)
        decoded = [_decode(data) for data in changes]
        sound = tuple(change for change in decoded if change is not None)
        if len(sound) < len(decoded):
            self._store.stats.num_rejected_values += len(decoded) - len(sound)
            return Sighting(worker_id, order.decode())
        return Sighting(worker_id, order.decode(), Position(order.decode(), int(base), int(seq)), sound)

    def _worker_id(self, raw: bytes) -> str | None:
        worker_id = raw.decode(errors="replace")
        if _WORKER_ID_PATTERN.match(worker_id) is None or worker_id.endswith("\n"):
            self._store.stats.num_rejected_values += 1
            return None
        return worker_id


@dataclass(frozen=True, slots=True)
class _Note:
    added: tuple[bytes, ...]
    evicted: tuple[bytes, ...]


class _Refused(Exception):
    """Redis does not hold what the publisher believes it does."""


def _decode(data: bytes) -> Change | None:
    """A change as it was published; None: the bytes are not a change."""
    if len(data) < _COUNT.size or (len(data) - _COUNT.size) % KEY_BYTES:
        return None
    keys = _split(data[_COUNT.size :])
    (num_added,) = _COUNT.unpack_from(data)
    if num_added > len(keys):
        return None
    return Change(keys[:num_added], keys[num_added:])


def _split(data: bytes) -> tuple[bytes, ...]:
    return tuple([data[start : start + KEY_BYTES] for start in range(0, len(data), KEY_BYTES)])
