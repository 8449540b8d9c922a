"""What another gateway needs to continue a named request: in Redis for a bounded time, fenced by an epoch.

A journal has one owner. A gateway that continues the request claims it and adds 1 to its epoch; what an earlier
owner writes is then refused. Redis may forget any part of it at any time: tokens are a function of the call, so every
prefix of them is a right one, and an empty one costs only time. Knows neither a call's meaning nor its tokens'.
"""

import asyncio
import contextlib
import logging
import re
import secrets
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

import msgspec

from services.cluster.journal_room import COMMON, JournalRoom, cost_bytes, room_keys
from services.cluster.redis_store import Script, Store
from services.runtime.errors import StoreUnavailable

VERSION = 1
TTL_S = 600.0
MAX_JOURNAL_BYTES = 4 * 2**20
"""Size of one journal: its call, tokens and ends. One that would become larger is no longer written."""
MAX_CHOICES = 128
MAX_END_BYTES = 1024
MAX_TEXT_BYTES = 256
MAX_EPOCH = 10**9
TOKEN_BYTES = 4

FLUSH_INTERVAL_S = 0.05
RETRY_INTERVAL_S = 0.2
MAX_BATCH_JOURNALS = 64
MAX_BATCH_BYTES = 2**20
MAX_PENDING = 4096
"""Most journals that wait to be written. One that finds no place is written after its next tokens."""

logger = logging.getLogger(__name__)


class Mode(StrEnum):
    """What a claim does where nothing is held, and where something is."""

    JOIN = "join"
    """Makes a journal, or takes over the one that is held."""
    REPLACE = "replace"
    """Makes a journal in any case."""
    FIND = "find"
    """Takes over the one that is held, or makes none."""


class Outcome(StrEnum):
    """What a claim did."""

    MADE = "made"
    HELD = "held"
    OTHER = "other"
    """A journal is held, and its digest is another one. Nothing was changed."""
    MISFIT = "misfit"
    """A journal is held, and it has another request id or number of answers than asked for. Nothing was changed."""
    NONE = "none"
    TENANT_FULL = "tenant"
    """The tenant's journals take their share. Nothing was changed, but what nobody used for a while may be gone."""
    ALL_FULL = "all"
    """All tenants' journals take their share. Nothing was changed, but what nobody used for a while may be gone."""


class Written(IntEnum):
    """What became of a write."""

    DONE = 0
    LOST = 1
    """Redis has forgotten what came before; nothing was written."""
    SUPERSEDED = 2
    """Another life has the name, or the name leads to another journal; nothing was written."""
    TAKEN_OVER = 3
    """Another gateway continues the request; nothing was written."""
    NO_ROOM = 4
    """Redis has forgotten the journal, or never had it, and there is no room to make it; nothing was written."""


@dataclass(slots=True)
class Record:
    """One journal as its owner writes it. `token_ids` and `ends` are the owner's own lists and only grow.

    An end is empty until the answer has ended.
    """

    name: str
    digest: str
    request_id: str
    owner: str
    call: bytes
    token_ids: Sequence[Sequence[int]]
    ends: list[bytes]
    alias: str = ""
    """Another name under which the journal can be found, or empty."""
    tenant: str = ""
    """The tenant in whose share it is counted."""
    life: str = field(default_factory=lambda: secrets.token_hex(16))
    epoch: int = 1
    is_in_redis: bool = False
    """Whether its head was written, as far as is known."""
    is_over: bool = False
    """Whether it must no longer be written, since another one has its name or it has grown too large."""
    num_written: list[int] = field(default_factory=list)
    written_ends: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.forget_written()

    @property
    def num_bytes(self) -> int:
        """What it counts in Redis when all is written."""
        return cost_bytes(len(self.call), len(self.ends), sum(map(len, self.token_ids)))

    def forget_written(self) -> None:
        """Notes that everything has to be written again."""
        self.is_in_redis = False
        self.num_written = [0] * len(self.token_ids)
        self.written_ends = [False] * len(self.ends)


@dataclass(frozen=True, slots=True)
class Held:
    """A journal as it was read, with the reader's epoch; `ends` are empty where an answer has not ended.

    `name` is its own, where it was found by an alias.
    """

    name: str
    digest: str
    life: str
    epoch: int
    request_id: str
    call: bytes
    token_ids: list[list[int]]
    ends: list[bytes]


@dataclass(frozen=True, slots=True)
class Claimed:
    """The answer to a claim; `held` is given exactly with Outcome.HELD.

    `retry_after_s`: the wait after which there may be room, where there was not.
    """

    outcome: Outcome
    held: Held | None = None
    retry_after_s: float = 0.0


class JournalStore:
    """Journals in Redis; every method may wait for one round trip and raises StoreUnavailable."""

    def __init__(self, store: Store, *, room: JournalRoom | None = None) -> None:
        self._store = store
        self.room = room or JournalRoom()

    async def claim(
        self, mode: Mode, record: Record, *, checks_digest: bool = True, checks_request: bool = False
    ) -> Claimed:
        """Makes `record`'s journal or takes over the one that its name leads to, as `mode` says.

        What was made is marked in the record as written. A journal that cannot be read is treated as absent. A caller
        without the digest has it not checked; what is taken over then has as many answers as the record.
        `checks_request`: it also has the record's request id.
        """
        answer = await self._claim(mode, record, checks_digest, checks_request)
        if answer[0] == b"held":
            held = _parse(answer)
            if held is not None:
                return Claimed(Outcome.HELD, held)
            self._store.stats.num_rejected_values += 1
            if mode is Mode.FIND:
                return Claimed(Outcome.NONE)
            answer = await self._claim(Mode.REPLACE, record, checks_digest, checks_request)
        outcome = Outcome(answer[0].decode())
        if outcome in (Outcome.TENANT_FULL, Outcome.ALL_FULL):
            return Claimed(outcome, retry_after_s=answer[1] / 1000)
        if outcome is Outcome.MADE:
            record.forget_written()
            record.is_in_redis, record.is_over = True, False
        return Claimed(outcome)

    async def write(self, rows: Sequence[Sequence[Any]]) -> list[Written]:
        """Appends to many journals at once; the rows are those of `row_of`."""
        # Lua's msgpack knows no binary, so bytes go beside the rows, which hold their numbers from 1.
        blobs: list[bytes] = []

        def number_of(blob: bytes) -> int:
            if blob:
                blobs.append(blob)
            return len(blobs) if blob else 0

        plain = [
            [
                *fixed,
                [*head[:3], number_of(head[3]), head[4]] if head else [],
                [
                    [choice, first_index, number_of(tokens), number_of(end)]
                    for choice, first_index, tokens, end in parts
                ],
            ]
            for *fixed, head, parts in rows
        ]
        bounds = self.room.tenant_bytes, self.room.all_bytes
        args: tuple[str | bytes | int, ...] = (_ENCODER.encode(plain), round(TTL_S * 1000), VERSION, *bounds, *blobs)
        answer = await self._store.run(_WRITE, room_keys(self._store), args)
        return [Written(status) for status in answer]

    async def _claim(self, mode: Mode, record: Record, checks_digest: bool, checks_request: bool) -> list[Any]:
        args: tuple[str | bytes | int, ...] = (
            mode.value,
            record.name,
            record.digest,
            int(checks_digest),
            int(checks_request),
            record.life,
            record.owner,
            record.request_id,
            record.call,
            len(record.ends),
            record.alias,
            round(TTL_S * 1000),
            VERSION,
            record.tenant,
            self.room.tenant_bytes,
            self.room.all_bytes,
        )
        # A client that looks for a journal has a part of its answer, and nowhere else to go.
        run = self._store.run_patiently if mode is Mode.FIND else self._store.run
        answer: list[Any] = await run(_CLAIM, room_keys(self._store), args)
        return answer


class JournalWriter:
    """Writes journals behind the answers' back: `post` costs about a microsecond and never waits.

    `on_taken_over` is called on the loop with the record of a request that another gateway continues.
    """

    def __init__(
        self,
        store: JournalStore,
        *,
        on_taken_over: Callable[[Record], None],
        flush_interval_s: float = FLUSH_INTERVAL_S,
        max_pending: int = MAX_PENDING,
    ) -> None:
        self._store = store
        self._on_taken_over = on_taken_over
        self._flush_interval_s = flush_interval_s
        self._max_pending = max_pending
        self._pending: dict[str, Record] = {}
        self._has_work = asyncio.Event()
        self._writing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self.num_dropped = 0
        """Number of posts that found no place, here or in Redis."""

    def start(self) -> None:
        """Begins to write, on the running loop."""
        self._task = asyncio.create_task(self._write_behind(), name="journal-writer")

    def post(self, record: Record) -> None:
        """Notes that the record has something new, or should not expire."""
        if record.is_over:
            return
        if record.life not in self._pending and len(self._pending) >= self._max_pending:
            self.num_dropped += 1
            return
        self._pending[record.life] = record
        self._has_work.set()

    async def flush(self) -> None:
        """Writes all that waits now. Raises StoreUnavailable; what was not written keeps waiting."""
        async with self._writing:
            while self._pending:
                await self._write_batch()

    async def close(self, *, timeout_s: float = 2.0) -> None:
        """Writes what waits, trying for at most `timeout_s`, and stops."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._pending:
                    try:
                        await self.flush()
                    except StoreUnavailable:
                        await asyncio.sleep(RETRY_INTERVAL_S)

    async def _write_behind(self) -> None:
        while True:
            await self._has_work.wait()
            await asyncio.sleep(self._flush_interval_s)
            self._has_work.clear()
            try:
                await self.flush()
            except StoreUnavailable:
                self._has_work.set()
                await asyncio.sleep(RETRY_INTERVAL_S)

    async def _write_batch(self) -> None:
        taken: list[Record] = []
        rows: list[list[Any]] = []
        num_bytes = 0
        while self._pending and len(taken) < MAX_BATCH_JOURNALS and num_bytes < MAX_BATCH_BYTES:
            life = next(iter(self._pending))
            record = self._pending.pop(life)
            if record.num_bytes > MAX_JOURNAL_BYTES:
                record.is_over = True
                continue
            try:
                row, row_bytes = row_of(record)
            except Exception:  # one record must not end the writing of all; it is given up
                logger.exception("a journal cannot be written", extra={"request_id": record.request_id})
                record.is_over = True
                continue
            taken.append(record)
            rows.append(row)
            num_bytes += row_bytes
        if not taken:
            return
        try:
            statuses = await self._store.write(rows)
        except BaseException:
            self._pending = {record.life: record for record in taken} | self._pending
            raise
        for record, row, status in zip(taken, rows, statuses, strict=True):
            self._note(record, row, status)

    def _note(self, record: Record, row: Sequence[Any], status: Written) -> None:
        if status is Written.DONE:
            record.is_in_redis = True
            for choice, first_index, packed, end in row[6]:
                record.num_written[choice] = first_index + len(packed) // TOKEN_BYTES
                record.written_ends[choice] = record.written_ends[choice] or bool(end)
        elif status is Written.LOST:
            record.forget_written()
            self.post(record)
        elif status is Written.NO_ROOM:
            # It comes again with the next tokens, or with its owner's next beat.
            record.forget_written()
            self.num_dropped += 1
        else:
            record.is_over = True
            if status is Written.TAKEN_OVER:
                self._on_taken_over(record)


def row_of(record: Record) -> tuple[list[Any], int]:
    """The part of the record that is not written yet, as `JournalStore.write` takes it, and about its size in bytes."""
    parts: list[list[Any]] = []
    num_bytes = 0
    for choice, token_ids in enumerate(record.token_ids):
        first_index = record.num_written[choice]
        packed = pack(token_ids[first_index:])
        end = b"" if record.written_ends[choice] else record.ends[choice]
        if packed or end:
            parts.append([choice, first_index, packed, end])
            num_bytes += len(packed) + len(end)
    head: list[Any] = []
    if not record.is_in_redis:
        head = [record.digest, record.request_id, len(record.ends), record.call, record.alias]
        num_bytes += len(record.call)
    return [record.name, record.life, record.epoch, record.owner, record.tenant, head, parts], num_bytes


def pack(token_ids: Sequence[int]) -> bytes:
    """Token ids as they are stored."""
    values = array("I", token_ids)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def unpack(packed: bytes) -> list[int]:
    """The token ids; a part of one at the end is left out."""
    values = array("I")
    values.frombytes(packed[: len(packed) // TOKEN_BYTES * TOKEN_BYTES])
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def _parse(answer: Sequence[Any]) -> Held | None:
    try:
        _, name, digest, life, epoch, request_id, call, tokens, ends = answer
        if _HEX_DIGITS.fullmatch(name) is None or _HEX_DIGITS.fullmatch(life) is None:
            return None
        if not 1 <= len(tokens) == len(ends) <= MAX_CHOICES:
            return None
        return Held(
            name.decode(),
            digest.decode(),
            life.decode(),
            int(epoch),
            request_id.decode(),
            call,
            [unpack(packed) for packed in tokens],
            list(ends),
        )
    except (ValueError, TypeError):
        return None


_HEX_DIGITS = re.compile(rb"[0-9a-f]{32}")
_ENCODER = msgspec.msgpack.Encoder()

# What both scripts know of a journal. `target_of` gives the name that an alias leads to, and nothing for what is not
# an alias. `read_head` gives nothing unless the key holds a sound head.
_COMMON = (
    COMMON
    + f"""
local function target_of(name)
  local key = prefix .. name
  if redis.call('TYPE', key).ok ~= 'string' or redis.call('STRLEN', key) ~= 32 then return nil end
  return redis.call('GET', key)
end

local function read_head(name, version)
  local key = prefix .. name
  if redis.call('TYPE', key).ok ~= 'hash' then return nil end
  for _, field in ipairs({{'version', 'digest', 'life', 'epoch', 'owner', 'request', 'choices'}}) do
    local length = redis.call('HSTRLEN', key, field)
    if length == 0 or length > {MAX_TEXT_BYTES} then return nil end
  end
  local held = redis.call('HMGET', key, 'version', 'digest', 'life', 'epoch', 'owner', 'request', 'choices')
  local epoch, choices = tonumber(held[4]), tonumber(held[7])
  if held[1] ~= version or #held[3] ~= 32 or not string.find(held[2], '^%x+$') or #held[2] ~= 64 then return nil end
  if not epoch or epoch < 1 or epoch > {MAX_EPOCH} or epoch ~= math.floor(epoch) then return nil end
  if not choices or choices < 1 or choices > {MAX_CHOICES} or choices ~= math.floor(choices) then return nil end
  return {{digest=held[2], life=held[3], epoch=epoch, owner=held[5], request=held[6], choices=choices}}
end

local function make(name, version, digest, life, epoch, owner, request, choices, call, alias, ttl)
  local key = prefix .. name
  drop(name)
  redis.call('HSET', key, 'version', version, 'digest', digest, 'life', life, 'epoch', epoch, 'owner', owner,
             'request', request, 'choices', choices, 'call', call, 'alias', alias)
  redis.call('PEXPIRE', key, ttl)
  if alias ~= '' then redis.call('SET', prefix .. alias, name, 'PX', ttl) end
end

local function renew(name, life, choices, tenant, ttl)
  local key = prefix .. name
  redis.call('PEXPIRE', key, ttl)
  if redis.call('HSTRLEN', key, 'alias') == 32 then
    local alias = redis.call('HGET', key, 'alias')
    if target_of(alias) == name then redis.call('PEXPIRE', prefix .. alias, ttl) end
  end
  for choice = 0, choices - 1 do redis.call('PEXPIRE', tokens_key(name, life, choice), ttl) end
  count(name, tenant, size_of(name, life, choices), ttl)
end
"""
)

# KEYS: `room_keys`. ARGV: as in `JournalStore._claim`. Answers the outcome; when a journal is held also its
# name, digest, life, new epoch, request id, call, tokens of each answer and ends of each answer. A journal is
# looked for where an alias leads, and made under its own name, in place of an alias.
_CLAIM = Script(
    _COMMON
    + f"""
local mode, own_name, digest, checks_digest, checks_request, life, owner, request, call, choices, alias, ttl, version,
  tenant, max_tenant_bytes, max_all_bytes = unpack(ARGV)
local name = target_of(own_name) or own_name

local function content(head)
  local key = prefix .. name
  local num_bytes = redis.call('HSTRLEN', key, 'call')
  if num_bytes == 0 then return nil end
  local tokens, ends = {{}}, {{}}
  for choice = 0, head.choices - 1 do
    local of_choice = tokens_key(name, head.life, choice)
    local kind = redis.call('TYPE', of_choice).ok
    if kind ~= 'string' and kind ~= 'none' then return nil end
    if redis.call('HSTRLEN', key, 'end:' .. choice) > {MAX_END_BYTES} then return nil end
    num_bytes = num_bytes + redis.call('STRLEN', of_choice)
    if num_bytes > {MAX_JOURNAL_BYTES} then return nil end
    ends[choice + 1] = redis.call('HGET', key, 'end:' .. choice) or ''
  end
  for choice = 0, head.choices - 1 do
    tokens[choice + 1] = redis.call('GET', tokens_key(name, head.life, choice)) or ''
  end
  return {{redis.call('HGET', key, 'call'), tokens, ends}}
end

local head = mode ~= 'replace' and read_head(name, version) or nil
local held = head and content(head)
if not held then
  if mode == 'find' then return {{'none'}} end
  local num_bytes = {cost_bytes(0, 0)} + #call + choices * {cost_bytes(0, 1) - cost_bytes(0, 0)}
  local whose, wait_ms = room_lacks(own_name, tenant, num_bytes, max_tenant_bytes, max_all_bytes, ttl)
  if whose then return {{whose, wait_ms}} end
  make(own_name, version, digest, life, 1, owner, request, choices, call, alias, ttl)
  count(own_name, tenant, num_bytes, ttl)
  return {{'made'}}
end
if checks_digest == '1' then
  if head.digest ~= digest then return {{'other'}} end
elseif head.choices ~= tonumber(choices) then
  return {{'misfit'}}
end
if checks_request == '1' and head.request ~= request then return {{'misfit'}} end
local epoch = head.epoch
local is_over = true
for _, ending in ipairs(held[3]) do is_over = is_over and ending ~= '' end
if not is_over then
  epoch = epoch + 1
  redis.call('HSET', prefix .. name, 'epoch', string.format('%d', epoch), 'owner', owner)
end
renew(name, head.life, head.choices, tenant, ttl)
return {{'held', name, head.digest, head.life, epoch, head.request, held[1], held[2], held[3]}}
"""
)

# KEYS: `room_keys`. ARGV: rows of `row_of` in msgpack, TTL in ms, version, bounds, what the rows' numbers mean. Answers
# a `Written` for each row. A row with a head makes the journal where Redis has forgotten it, and otherwise changes the
# call of the one in Redis. A later epoch of the same owner is a claim whose answer it did not get: no other gateway
# continues the request.
_WRITE = Script(
    _COMMON
    + f"""
local ttl, version, max_tenant_bytes, max_all_bytes = ARGV[2], ARGV[3], ARGV[4], ARGV[5]

local function blob(number) return number > 0 and ARGV[5 + number] or '' end

local function write(name, life, epoch, owner, tenant, head, parts)
  local held = read_head(name, version)
  if not held then
    if target_of(name) then return {Written.SUPERSEDED} end
    if #head == 0 then return {Written.LOST} end
    local num_bytes = {cost_bytes(0, 0)} + #blob(head[4]) + head[3] * {cost_bytes(0, 1) - cost_bytes(0, 0)}
    for _, part in ipairs(parts) do num_bytes = num_bytes + #blob(part[3]) end
    if room_lacks(name, tenant, num_bytes, max_tenant_bytes, max_all_bytes, ttl) then return {Written.NO_ROOM} end
    make(name, version, head[1], life, epoch, owner, head[2], head[3], blob(head[4]), head[5], ttl)
  elseif held.life ~= life then
    return {Written.SUPERSEDED}
  elseif held.epoch > epoch and held.owner ~= owner then
    return {Written.TAKEN_OVER}
  else
    if held.epoch < epoch then redis.call('HSET', prefix .. name, 'epoch', epoch, 'owner', owner) end
    if #head > 0 then redis.call('HSET', prefix .. name, 'call', blob(head[4])) end
  end
  for _, part in ipairs(parts) do
    local of_choice = tokens_key(name, life, part[1])
    local kind = redis.call('TYPE', of_choice).ok
    if kind ~= 'string' and kind ~= 'none' then
      redis.call('DEL', of_choice)
      kind = 'none'
    end
    local num_held = kind == 'string' and redis.call('STRLEN', of_choice) or 0
    if num_held < part[2] * {TOKEN_BYTES} then return {Written.LOST} end
  end
  for _, part in ipairs(parts) do
    local of_choice = tokens_key(name, life, part[1])
    if part[3] > 0 then
      redis.call('SETRANGE', of_choice, part[2] * {TOKEN_BYTES}, blob(part[3]))
      -- Also where Redis holds another number of answers, which somebody else must have written.
      redis.call('PEXPIRE', of_choice, ttl)
    end
    if part[4] > 0 then redis.call('HSET', prefix .. name, 'end:' .. part[1], blob(part[4])) end
  end
  renew(name, life, held and held.choices or head[3], tenant, ttl)
  return {Written.DONE}
end

local answer = {{}}
for number, row in ipairs(cmsgpack.unpack(ARGV[1])) do
  answer[number] = write(row[1], row[2], row[3], row[4], row[5], row[6], row[7])
end
return answer
"""
)
