"""Files of clients, in chunks in Redis: bounded for each tenant and for all, gone when their time is over.

A file is sent chunk by chunk and becomes visible when it is complete. What it takes is counted from its first chunk on;
chunks that nobody completes expire after ten minutes, and the next call that counts takes them out of the count. After
a Redis has lost its memory, every tenant has all the room again. Knows nothing of what is in a file.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.cluster.redis_store import Script, Store
from services.runtime.errors import StoreUnavailable

CHUNK_BYTES = 256 * 1024
UPLOAD_TTL_S = 600.0
FILE_TTL_S = 30 * 86_400.0
"""The longest life of a file."""
OVERHEAD_BYTES = 1024
"""Bytes that are counted for each file beside its content."""
FILE_TIMEOUT_S = 2.0
"""Time-out of the connection for them: nobody's request waits for it, and pieces of files are large."""
MAX_FILES = 1000
"""Files of one tenant."""
MAX_PAGE = 1000
"""Entries of one page of a list."""
MAX_SWEPT = 64
"""Most expired entries that one script takes out of the count."""
MAX_ROUNDS = 200
"""Most repetitions of a script that has more expired entries to take out of the count before it can reply."""
AGAIN = b"again"
"""Reply of a script that has made progress and must be repeated."""
ALL_TENANTS = "*"


@dataclass(frozen=True, slots=True)
class Room:
    """How many bytes files may take, of one tenant and of all together."""

    tenant_bytes: int = 64 * 2**20
    all_bytes: int = 128 * 2**20


@dataclass(frozen=True, slots=True)
class File:
    """A complete file. Times in unix seconds."""

    id: str
    tenant: str
    filename: str
    purpose: str
    num_bytes: int
    num_chunks: int
    created_s: int
    expires_s: int


@dataclass(frozen=True, slots=True)
class Page:
    """Part of a list: (id, fields) of each entry, as they are in Redis."""

    entries: Sequence[tuple[str, Mapping[str, str]]]
    has_more: bool


class FilesFull(Exception):
    """There is no room. `whose` is `files` (too many of them), `tenant` or `all`."""

    def __init__(self, whose: str) -> None:
        super().__init__(whose)
        self.whose = whose


class FileStore:
    """Files in Redis; every method may wait for one round trip and raises StoreUnavailable."""

    def __init__(self, store: Store, *, room: Room) -> None:
        self._store = store
        self.room = room

    async def put_chunk(self, file_id: str, tenant: str, index: int, data: bytes) -> None:
        """Keeps one chunk of a file that is being sent. Raises FilesFull."""
        args = (file_id, tenant, index, data, _ms(UPLOAD_TTL_S), *self.bounds)
        whose = await self.run_counting(_PUT, args)
        if whose:
            raise FilesFull(whose.decode())

    async def commit(
        self, file_id: str, tenant: str, *, filename: str, purpose: str, num_chunks: int, num_bytes: int, ttl_s: float
    ) -> File | None:
        """Makes a file of its chunks, for `ttl_s`; None: some of them are gone."""
        args = (file_id, tenant, filename, purpose, num_chunks, num_bytes, round(ttl_s))
        return _file(file_id, await self.run(_COMMIT, args))

    async def find(self, file_id: str) -> File | None:
        """The file, of whatever tenant."""
        return _file(file_id, await self.run(_FIND, (self._store.keys.file_prefix + file_id,)))

    async def chunk(self, file_id: str, index: int) -> bytes | None:
        """One chunk; None: it is gone."""
        data: bytes | None = await self.run(_CHUNK, (file_id, index))
        return data

    async def read(self, file_id: str, start: int, num_bytes: int) -> bytes:
        """Returns `num_bytes` from `start` on of a complete file that a client has sent, or fewer if it is gone."""
        pieces = [
            await self.run(_READ, (file_id, at, min(CHUNK_BYTES, start + num_bytes - at), CHUNK_BYTES))
            for at in range(start, start + num_bytes, CHUNK_BYTES)
        ]
        return b"".join(pieces)

    async def page(
        self, tenant: str, *, after: str = "", limit: int = MAX_PAGE, newest_first: bool = True, purpose: str = ""
    ) -> tuple[list[File], bool]:
        """Files of a tenant after the one with the id `after`, and whether there are more."""
        keys = self._store.keys
        page = await self.read_page(
            keys.files_prefix + tenant,
            keys.file_prefix,
            after=after,
            limit=limit,
            newest_first=newest_first,
            purpose=purpose,
        )
        files = [_file_of(file_id, fields) for file_id, fields in page.entries]
        return files, page.has_more

    async def delete(self, file_id: str, tenant: str) -> bool:
        """Deletes a file; returns whether the tenant had it. A file that is still being sent loses its chunks."""
        return bool(await self.run(_DELETE, (file_id, tenant)))

    async def num_bytes(self, tenant: str = ALL_TENANTS) -> int:
        """Bytes that the tenant's files take, or all files."""
        return int(await self.run(_TOTAL, (tenant,)))

    async def swept_bytes(self) -> int:
        """Gives back what has expired, and returns the bytes that all files and batches take now."""
        is_behind = True
        while is_behind:
            num_bytes, is_behind = await self.run(_SWEEP, ())
        return int(num_bytes)

    @property
    def bounds(self) -> tuple[int, int, int]:
        """The bounds that the scripts' `room_lacks` asks for: files and bytes of a tenant, and bytes of all."""
        return MAX_FILES, self.room.tenant_bytes, self.room.all_bytes

    async def run(self, script: Script, args: Sequence[str | bytes | int]) -> Any:
        """Runs a script of files or batches."""
        keys = self._store.keys
        accounts = (keys.file_expiry, keys.file_sizes, keys.file_totals)
        queues = (keys.waiting_batches_prefix, keys.running_batches_prefix)
        names = (keys.file_prefix, keys.files_prefix, *accounts, keys.batch_prefix, keys.batches_prefix, *queues)
        return await self._store.run(script, names, args)

    async def run_counting(self, script: Script, args: Sequence[str | bytes | int]) -> Any:
        """Runs a script that needs room, and repeats it while expired files are still counted."""
        for _ in range(MAX_ROUNDS):
            reply = await self.run(script, args)
            if AGAIN not in (reply, *(reply[:1] if isinstance(reply, list) else ())):
                return reply
        raise StoreUnavailable("too many expired files are still counted in Redis")

    async def read_page(
        self, index_key: str, entry_prefix: str, *, after: str, limit: int, newest_first: bool, purpose: str = ""
    ) -> Page:
        """A page of any list of ids, in the order in which they were made."""
        args = (index_key, entry_prefix, after, limit, int(newest_first), purpose)
        rows, has_more = await self.run(_PAGE, args)
        return Page([(file_id.decode(), fields_of(flat)) for file_id, flat in rows], bool(has_more))


def new_id(kind: str) -> str:
    """An id that sorts by the time when it was made, to the millisecond, and cannot be guessed."""
    return f"{kind}{time.time_ns() // 10**6:012x}{secrets.token_hex(10)}"


def fields_of(flat: Sequence[bytes]) -> dict[str, str]:
    """The fields in an answer of HGETALL."""
    return {flat[at].decode(): flat[at + 1].decode() for at in range(0, len(flat), 2)}


def _file(file_id: str, flat: Sequence[bytes] | None) -> File | None:
    return _file_of(file_id, fields_of(flat)) if flat else None


def _file_of(file_id: str, fields: Mapping[str, str]) -> File:
    return File(
        file_id,
        fields["tenant"],
        fields["filename"],
        fields["purpose"],
        int(fields["bytes"]),
        int(fields["chunks"]),
        int(fields["created"]),
        int(fields["expires"]),
    )


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


# Shared by all scripts of files. `count` adds to a file's size, which may be its first. `forget` takes the file out of
# the count and the list. `sweep` forgets what has expired and returns whether more is left. `room_lacks` returns which
# quota a number of further bytes would exceed, AGAIN while expired files are still counted, or nil.
COMMON = f"""
local file_prefix, files_prefix, expiry, sizes, totals = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local clock = redis.call('TIME')
local now_s = tonumber(clock[1])
local now_ms = now_s * 1000 + math.floor(clock[2] / 1000)

local function whole(number) return string.format('%d', number) end

local function chunk_key(id, index) return file_prefix .. id .. ':' .. whole(index) end

local function add_total(tenant, num_bytes)
  if redis.call('HINCRBY', totals, tenant, num_bytes) <= 0 then redis.call('HDEL', totals, tenant) end
end

local function count(id, tenant, num_bytes, expires_ms)
  local held = string.match(redis.call('HGET', sizes, id) or '', '^(%d+) ') or '0'
  if held == '0' then num_bytes = num_bytes + {OVERHEAD_BYTES} end
  redis.call('HSET', sizes, id, whole(held + num_bytes) .. ' ' .. tenant)
  redis.call('ZADD', expiry, expires_ms, id)
  add_total(tenant, num_bytes)
  add_total('{ALL_TENANTS}', num_bytes)
  for _, key in ipairs({{expiry, sizes, totals}}) do redis.call('PEXPIRE', key, {_ms(2 * FILE_TTL_S)}) end
end

-- Set by scripts that also count what is in the lists.
local on_unlisted

local function forget(id)
  local num_bytes, tenant = string.match(redis.call('HGET', sizes, id) or '', '^(%d+) (.*)$')
  redis.call('ZREM', expiry, id)
  if not num_bytes then return end
  redis.call('HDEL', sizes, id)
  if redis.call('ZREM', files_prefix .. tenant, id) == 1 and on_unlisted then on_unlisted(tenant, num_bytes) end
  add_total(tenant, -num_bytes)
  add_total('{ALL_TENANTS}', -num_bytes)
end

local function sweep()
  local expired = redis.call('ZRANGEBYSCORE', expiry, '-inf', now_ms, 'LIMIT', 0, {MAX_SWEPT})
  for _, id in ipairs(expired) do forget(id) end
  return #expired == {MAX_SWEPT}
end

local function full_quota(tenant, num_bytes, num_files, max_files, max_tenant_bytes, max_all_bytes)
  local function lacks(whose, most)
    return tonumber(redis.call('HGET', totals, whose) or 0) + num_bytes + num_files * {OVERHEAD_BYTES} > tonumber(most)
  end
  if redis.call('ZCARD', files_prefix .. tenant) + num_files > tonumber(max_files) then return 'files' end
  if lacks(tenant, max_tenant_bytes) then return 'tenant' end
  if lacks('{ALL_TENANTS}', max_all_bytes) then return 'all' end
end

local function room_lacks(...)
  local is_behind, lacks = sweep(), full_quota(...)
  return lacks and is_behind and '{AGAIN.decode()}' or lacks
end

local function publish(id, tenant, filename, purpose, num_chunks, num_bytes, created_s, expires_s)
  local key = file_prefix .. id
  redis.call('HSET', key, 'tenant', tenant, 'filename', filename, 'purpose', purpose, 'chunks', num_chunks,
             'bytes', num_bytes, 'created', created_s, 'expires', expires_s)
  redis.call('EXPIREAT', key, expires_s)
  redis.call('ZADD', expiry, expires_s * 1000, id)
  redis.call('ZADD', files_prefix .. tenant, 0, id)
  redis.call('PEXPIRE', files_prefix .. tenant, {_ms(2 * FILE_TTL_S)})
end
"""

# ARGV: id, tenant, number of the chunk, its bytes, TTL in ms, bounds. Answers what is in the way, or nothing.
_PUT = Script(
    COMMON
    + """
local id, tenant, index, data, ttl = unpack(ARGV)
local lacks = room_lacks(tenant, #data, index == '0' and 1 or 0, ARGV[6], ARGV[7], ARGV[8])
if lacks then return lacks end
redis.call('SET', chunk_key(id, index), data, 'PX', ttl)
count(id, tenant, #data, now_ms + ttl)
return ''
"""
)

# ARGV: id, tenant, filename, purpose, number of chunks, bytes, TTL in s. Answers the fields; none: chunks are gone.
_COMMIT = Script(
    COMMON
    + """
local id, tenant, filename, purpose, num_chunks, num_bytes, ttl_s = unpack(ARGV)
local expires_s = now_s + ttl_s
for index = 0, num_chunks - 1 do
  if redis.call('EXPIREAT', chunk_key(id, index), expires_s) == 0 then return {} end
end
publish(id, tenant, filename, purpose, num_chunks, num_bytes, now_s, expires_s)
return redis.call('HGETALL', file_prefix .. id)
"""
)

_FIND = Script("return redis.call('HGETALL', ARGV[1])")
_CHUNK = Script(COMMON + "return redis.call('GET', chunk_key(ARGV[1], ARGV[2]))")
# ARGV: id, where to begin, number of bytes, size of a chunk.
_READ = Script(
    COMMON
    + """
local id, start, num_bytes, chunk_bytes = unpack(ARGV)
local last = start + num_bytes - 1
local parts = {}
for index = math.floor(start / chunk_bytes), math.floor(last / chunk_bytes) do
  local offset = index * chunk_bytes
  table.insert(parts, redis.call('GETRANGE', chunk_key(id, index), math.max(0, start - offset), last - offset))
end
return table.concat(parts)
"""
)
SWEEP = f"""
local is_behind = sweep()
return {{tonumber(redis.call('HGET', totals, '{ALL_TENANTS}') or 0), is_behind and 1 or 0}}
"""
_SWEEP = Script(COMMON + SWEEP)
_TOTAL = Script(COMMON + "return tonumber(redis.call('HGET', totals, ARGV[1]) or 0)")

# ARGV: id, tenant. Answers 1 if the file existed.
_DELETE = Script(
    COMMON
    + """
local id, tenant = unpack(ARGV)
local held_tenant, num_chunks = unpack(redis.call('HMGET', file_prefix .. id, 'tenant', 'chunks'))
local is_there = held_tenant == tenant
if not is_there then
  -- One that is still being sent is known by what it takes, and its last chunk by the first that is missing.
  local counted = redis.call('HGET', sizes, id)
  if held_tenant or not counted or string.match(counted, '^%d+ (.*)$') ~= tenant then return 0 end
  num_chunks = 0
  while redis.call('EXISTS', chunk_key(id, num_chunks)) == 1 do num_chunks = num_chunks + 1 end
end
for index = 0, num_chunks - 1 do redis.call('UNLINK', chunk_key(id, index)) end
redis.call('DEL', file_prefix .. id)
forget(id)
return is_there and 1 or 0
"""
)

# ARGV: key of the list, prefix of entries, id after which to begin, most entries, whether the newest are first, purpose
# or nothing. Answers (id, fields) of each, and whether there are more. Ids whose entries have expired are taken out.
_PAGE = Script("""
local list, prefix, after, limit, newest_first, purpose = unpack(ARGV)
local from = after == '' and (newest_first == '1' and '+' or '-') or '(' .. after
local rows = {}
while true do
  local ids = newest_first == '1' and redis.call('ZREVRANGEBYLEX', list, from, '-', 'LIMIT', 0, 100)
              or newest_first ~= '1' and redis.call('ZRANGEBYLEX', list, from, '+', 'LIMIT', 0, 100)
  for _, id in ipairs(ids) do
    local fields = redis.call('HGETALL', prefix .. id)
    if #fields == 0 then
      redis.call('ZREM', list, id)
    elseif purpose == '' or redis.call('HGET', prefix .. id, 'purpose') == purpose then
      if #rows == tonumber(limit) then return {rows, 1} end
      table.insert(rows, {id, fields})
    end
  end
  if #ids < 100 then return {rows, 0} end
  from = '(' .. ids[#ids]
end
""")
