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

from services.cluster.keys import Keys
from services.cluster.redis_store import Script, Store, run_script, thread_client
from services.cluster.registry import MAX_WORKERS, WORKER_ID_PATTERN, WorkerRecord

KEY_BYTES = 16
PAGES_TTL_S = 5.0
PAGES_BEAT_S = 1.0
FLUSH_INTERVAL_S = 0.05
FLUSH_KEYS = 512
"""Number of noted keys that are published before the interval is over."""
RETRY_S = 0.2
MAX_BATCH_KEYS = 2048
"""Most keys in one change."""
MAX_CHANGES = 64
"""Changes that Redis keeps; a gateway that is further behind reads everything."""
FILL_KEYS = 4096
"""Keys in one round trip of a full publication, or of reading one: about 2 ms of Redis' time."""
MAX_PAGES = 2**20
"""Most keys of one worker; more are not published, and not read."""
MAX_ANSWER_BYTES = 2**20
"""Most bytes of changes in one answer; the rest comes with the next one."""
MAX_LONGEST_KEYS = 1024
"""Most keys that `PrefixIndex.longest` looks at; 64 workers that hold them all are then about 10 ms of Redis' time."""

_COUNT = struct.Struct(">I")
_ORDER_PATTERN = re.compile(r"[0-9]{20}:[0-9a-f]{32}")
_WORKER_ID_PATTERN = re.compile(WORKER_ID_PATTERN)
_MAX_CHANGE_BYTES = _COUNT.size + MAX_BATCH_KEYS * KEY_BYTES

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
        self._keys = (keys.pages_head(record.id), keys.page_keys(record.id), keys.pages)
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
            self._run(_FILL, self._seq, start + len(chunk), *flags, b"".join(chunk))
            self._take_notes()
        self._is_filled = True

    def _send_changes(self) -> None:
        """Publishes what has changed, or says that nothing has, which also keeps the keys from expiring."""
        if not self._changed and self._unconfirmed is None:
            self._run(_CHANGE, self._seq, self._seq, self._num_sent, MAX_CHANGES, b"")
        while self._changed or self._unconfirmed is not None:
            # After a time-out the same bytes are sent again: Redis may have their number, which stands for them.
            if self._unconfirmed is None:
                self._unconfirmed = self._next_change()
            self._run(_CHANGE, self._seq, self._seq + 1, self._num_sent, MAX_CHANGES, self._unconfirmed)
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
        run_script(self._client, _DELETE, self._keys, (self._order, self._worker_id))


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
        args: list[str | bytes | int] = [self._store.keys.pages_prefix, MAX_WORKERS, *keys[:MAX_LONGEST_KEYS]]
        num_rejected, *found = await self._store.run(
            _LONGEST, (self._store.keys.pages, self._store.keys.pages_asked), args
        )
        self._store.stats.num_rejected_values += num_rejected
        longest = {}
        for raw, num_pages in zip(found[::2], found[1::2], strict=True):
            worker_id = self._worker_id(raw)
            if worker_id is not None:
                longest[worker_id] = num_pages
        return longest

    async def look(self, known: Mapping[str, Position]) -> tuple[list[Sighting], bool]:
        """What has changed since the known positions, per worker that has published. False: more is to come."""
        args: list[str | bytes | int] = [self._store.keys.pages_prefix, MAX_WORKERS, MAX_CHANGES]
        args += [_MAX_CHANGE_BYTES, MAX_ANSWER_BYTES, MAX_PAGES]
        for worker_id, position in known.items():
            args += [worker_id, position.order, position.seq]
        num_rejected, is_all, *found = await self._store.run(_LOOK, (self._store.keys.pages,), args)
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
            _READ, (keys.pages_head(worker_id), keys.page_keys(worker_id)), (cursor, FILL_KEYS, MAX_PAGES)
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


# KEYS of the writers: head, set of keys, index. ARGV begins with: order, TTL in ms, id. They answer 1, or 0 if a newer
# life has published, or 2 if Redis does not hold what the publisher believes, so that it has to fill it again. As with
# the lease, a head that cannot be right protects nothing.
_WRITING = """
local function is_newer_there()
  local order = redis.pcall('HGET', KEYS[1], 'order')
  if type(order) ~= 'string' or #order ~= 53 or not string.find(order, '^%d+:%x+$') then return false end
  local ttl = redis.call('PTTL', KEYS[1])
  return order > ARGV[1] and ttl > 0 and ttl <= 20 * ARGV[2]
end
local function split(blob, from, to)
  local keys = {}
  for at = from, to, 16 do keys[#keys + 1] = string.sub(blob, at, at + 15) end
  return keys
end
local function keep()
  local kind = redis.call('TYPE', KEYS[3]).ok
  if kind ~= 'set' and kind ~= 'none' then redis.call('DEL', KEYS[3]) end
  redis.call('SADD', KEYS[3], ARGV[3])
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  redis.call('PEXPIRE', KEYS[2], ARGV[2])
end
"""

# ARGV further: number of the publication, keys in the set after this, is first, is last, keys.
_FILL = Script(
    _WRITING
    + """
if is_newer_there() then return 0 end
if ARGV[6] == '1' then
  redis.call('UNLINK', KEYS[1], KEYS[2])
  redis.call('HSET', KEYS[1], 'order', ARGV[1], 'filling', ARGV[4])
else
  local fields = redis.pcall('HMGET', KEYS[1], 'order', 'filling')
  if fields.err or fields[1] ~= ARGV[1] or fields[2] ~= ARGV[4] then return 2 end
end
if #ARGV[8] > 0 then
  local added = redis.pcall('SADD', KEYS[2], unpack(split(ARGV[8], 1, #ARGV[8])))
  if type(added) ~= 'number' or redis.call('SCARD', KEYS[2]) ~= tonumber(ARGV[5]) then return 2 end
end
if ARGV[7] == '1' then
  redis.call('HDEL', KEYS[1], 'filling')
  redis.call('HSET', KEYS[1], 'base', ARGV[4], 'seq', ARGV[4])
end
keep()
return 1
"""
)

# ARGV further: number before and after, keys in the set after it, most changes that are kept, the change. Without a
# change the numbers are the same. A change that Redis has already, since only its answer was lost, is not made twice.
_CHANGE = Script(
    _WRITING
    + """
if is_newer_there() then return 0 end
local fields = redis.pcall('HMGET', KEYS[1], 'order', 'seq', 'filling')
if fields.err or fields[1] ~= ARGV[1] or fields[3] or redis.call('HLEN', KEYS[1]) > 3 + ARGV[7] then return 2 end
local kind = redis.call('TYPE', KEYS[2]).ok
if kind ~= 'set' and kind ~= 'none' then return 2 end
if fields[2] == ARGV[4] and ARGV[4] ~= ARGV[5] then
  local change = ARGV[8]
  local b1, b2, b3, b4 = string.byte(change, 1, 4)
  local added_end = 4 + 16 * (((b1 * 256 + b2) * 256 + b3) * 256 + b4)
  if added_end > 4 then redis.call('SADD', KEYS[2], unpack(split(change, 5, added_end))) end
  if added_end < #change then redis.call('SREM', KEYS[2], unpack(split(change, added_end + 1, #change))) end
  redis.call('HSET', KEYS[1], 'seq', ARGV[5], ARGV[5], change)
  redis.call('HDEL', KEYS[1], string.format('%d', ARGV[5] - ARGV[7]))
elseif fields[2] ~= ARGV[5] then
  return 2
end
if redis.call('SCARD', KEYS[2]) ~= tonumber(ARGV[6]) then return 2 end
keep()
return 1
"""
)

# KEYS: those of the writers. ARGV: order, id.
_DELETE = Script("""
if redis.pcall('HGET', KEYS[1], 'order') ~= ARGV[1] then return 0 end
redis.call('UNLINK', KEYS[1], KEYS[2])
if redis.call('TYPE', KEYS[3]).ok == 'set' then redis.call('SREM', KEYS[3], ARGV[2]) end
return 1
""")

# Whether fields of a head are sound.
_READING = """
local function is_order(text) return text and #text == 53 and string.find(text, '^%d+:%x+$') end
local function is_number(text) return text and #text <= 15 and string.find(text, '^%d+$') end
"""

# KEYS: index. ARGV: start of heads, most workers, most changes, most bytes of a change, most bytes of all of them, most
# keys of a worker; then per known worker: id, order, number. Answers how many values were rejected, whether this is
# all, and per worker: id, order, then '' if it is filling its set; base, '' if the changes do not lead there; base,
# number and changes.
_LOOK = Script(
    _READING
    + """
local kind = redis.call('TYPE', KEYS[1]).ok
if kind == 'none' then return {0, 1} end
if kind ~= 'set' or redis.call('SCARD', KEYS[1]) > tonumber(ARGV[2]) then
  redis.call('DEL', KEYS[1])
  return {1, 1}
end
local known = {}
for at = 7, #ARGV, 3 do known[ARGV[at]] = {ARGV[at + 1], ARGV[at + 2]} end
local max_changes, max_bytes, left = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local rejected, answer = 0, {0, 1}
local function look(id)
  local head = ARGV[1] .. id
  local fields = redis.pcall('HMGET', head, 'order', 'base', 'seq', 'filling')
  if fields.err then return nil end
  local order, base, seq, filling = unpack(fields)
  if not is_order(order) then return nil end
  if filling then return {id, order, '', ''} end
  if not is_number(base) or not is_number(seq) then return nil end
  local num_keys = redis.pcall('SCARD', head .. ':keys')
  if type(num_keys) ~= 'number' or num_keys > tonumber(ARGV[6]) then return nil end
  local position = known[id]
  if not position or position[1] ~= order then return {id, order, base, ''} end
  local from, to = tonumber(position[2]), tonumber(seq)
  if from > to or to - from > max_changes then return {id, order, base, ''} end
  local entry = {id, order, base, seq}
  for number = from + 1, to do
    local field = string.format('%d', number)
    local size = redis.call('HSTRLEN', head, field)
    if size < 4 or size > max_bytes then return {id, order, base, ''} end
    if size > left then
      entry[4], answer[2] = string.format('%d', number - 1), 0
      break
    end
    left = left - size
    entry[#entry + 1] = redis.call('HGET', head, field)
  end
  return entry
end
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  if #id > 64 then
    rejected = rejected + 1
    redis.call('SREM', KEYS[1], id)
  elseif redis.call('EXISTS', ARGV[1] .. id) == 0 then
    redis.call('SREM', KEYS[1], id)
  else
    local entry = look(id)
    if entry then answer[#answer + 1] = entry else rejected = rejected + 1 end
  end
end
answer[1] = rejected
return answer
"""
)

# KEYS: head, set of keys. ARGV: cursor, keys at once, most keys. Answers nothing if nothing can be read, else
# order, base, number, next cursor, how many members were rejected, keys.
_READ = Script(
    _READING
    + """
local fields = redis.pcall('HMGET', KEYS[1], 'order', 'base', 'seq', 'filling')
if fields.err or fields[4] then return {} end
if not (is_order(fields[1]) and is_number(fields[2]) and is_number(fields[3])) then return {} end
local num_keys = redis.pcall('SCARD', KEYS[2])
if type(num_keys) ~= 'number' or num_keys > tonumber(ARGV[3]) then return {} end
local found = redis.call('SSCAN', KEYS[2], ARGV[1], 'COUNT', ARGV[2])
local keys, rejected = {}, 0
for _, key in ipairs(found[2]) do
  if #key == 16 then keys[#keys + 1] = key else rejected = rejected + 1 end
end
return {fields[1], fields[2], fields[3], found[1], rejected, table.concat(keys)}
"""
)

# KEYS: index, a name for sets that live as long as the script. ARGV: start of heads, most workers, then keys. Answers
# how many values were rejected, then id and number of pages of each worker that has any. 64 keys at once are counted
# with SINTERCARD, which needs no answer for each key and is ten times as fast; where one of them is missing, or the
# server is too old or too full for such sets, it is looked for.
_LONGEST = Script("""
local kind = redis.call('TYPE', KEYS[1]).ok
if kind == 'none' then return {0} end
if kind ~= 'set' or redis.call('SCARD', KEYS[1]) > tonumber(ARGV[2]) then return {1} end
local blocks = {}
local function holds_all(set, from, to)
  local block = blocks[from]
  if not block then
    block = KEYS[2] .. from
    redis.call('DEL', block)
    redis.pcall('SADD', block, unpack(ARGV, from, to))
    blocks[from] = block
  end
  return redis.pcall('SINTERCARD', 2, block, set) == to - from + 1
end
local answer, rejected = {0}, 0
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local set, at, is_running = ARGV[1] .. id .. ':keys', 3, #id <= 64
  if is_running then
    local is_first = redis.pcall('SISMEMBER', set, ARGV[3])
    is_running = is_first == 1
    if type(is_first) ~= 'number' then rejected = rejected + 1 end
  end
  while is_running and at <= #ARGV do
    local to = math.min(at + 63, #ARGV)
    if holds_all(set, at, to) then
      at = to + 1
    else
      for _, is_held in ipairs(redis.call('SMISMEMBER', set, unpack(ARGV, at, to))) do
        if is_held == 0 then
          is_running = false
          break
        end
        at = at + 1
      end
    end
  end
  if at > 3 then
    answer[#answer + 1] = id
    answer[#answer + 1] = at - 3
  end
end
for _, block in pairs(blocks) do redis.call('DEL', block) end
answer[1] = rejected
return answer
""")
