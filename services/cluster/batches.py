"""Batches in Redis: each has one owner at a time, and each of its rows one result, whichever gateway dies when.

A gateway claims a batch for a few seconds, which adds 1 to its epoch, and renews the claim while it works. All it
writes carries the epoch: what an earlier owner writes late is refused. A result is appended to the batch's file and its
row's bit set in one step, and a row whose bit is set takes no other result. Redis may be away for a while; one that
forgets a part of a batch is noticed, and the batch fails rather than answer a row twice. Knows no HTTP and no rows'
content.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from services.cluster.files import (
    CHUNK_BYTES,
    COMMON,
    FILE_TTL_S,
    OVERHEAD_BYTES,
    FilesFull,
    FileStore,
    fields_of,
)
from services.cluster.redis_store import Script, Store

LEASE_S = 6.0
"""Seconds that a dead owner's batch waits before another gateway continues it."""
BATCH_TTL_S = 31 * 86_400.0
MAX_ACTIVE = 32
"""Batches of one tenant that are not over."""
MAX_BATCHES = 1000
"""Batches of one tenant; beyond it, the oldest of those that are over are evicted."""


class Status(StrEnum):
    """Where a batch stands, in OpenAI's words."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


OVER = frozenset({Status.COMPLETED, Status.FAILED, Status.EXPIRED, Status.CANCELLED})
_BEFORE: Mapping[Status, Sequence[Status]] = {
    Status.IN_PROGRESS: (Status.VALIDATING,),
    Status.FINALIZING: (Status.IN_PROGRESS,),
    Status.CANCELLING: (Status.VALIDATING, Status.IN_PROGRESS),
    Status.COMPLETED: (Status.FINALIZING,),
    Status.EXPIRED: (Status.FINALIZING,),
    Status.CANCELLED: (Status.CANCELLING,),
    Status.FAILED: (Status.VALIDATING, Status.IN_PROGRESS, Status.FINALIZING, Status.CANCELLING),
}
"""The states from which a batch may come to each state."""


class Reply(StrEnum):
    """What became of a write."""

    DONE = "done"
    GONE = "gone"
    """The batch does not exist, or not for this tenant."""
    FENCED = "fenced"
    """Another owner has it; nothing was written."""
    REFUSED = "refused"
    """The state of the batch does not allow it; nothing was written."""
    LOST = "lost"
    """Redis has forgotten which rows have results, or some of these; nothing was written."""
    FULL = "full"
    """There is no room for the result; nothing was written."""


class BatchRefused(Exception):
    """A batch is not made. `reason` is `active`: the tenant has too many that are not over."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Order:
    """What a client asks of a batch.

    `key_digest` is that of the API key with which it was sent and under which its rows are answered. `metadata` is
    JSON. `output_ttl_s`: how long the files that it writes are kept once it is complete.
    """

    tenant: str
    key_digest: str
    endpoint: str
    input_file_id: str
    window_s: int
    window: str
    metadata: str = ""
    output_ttl_s: int = round(FILE_TTL_S)


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch in its present state. Times in unix seconds by status; `created` and `expires` are among them.

    `errors` is JSON, empty without errors. `outcome` is what it will be once it is finalized. The files' ids are empty
    until the batch is over, or if nothing was written to them.
    """

    id: str
    order: Order
    status: Status
    outcome: str
    epoch: int
    owner: str
    errors: str
    total: int
    completed: int
    failed: int
    times_s: Mapping[str, int]
    output_file_id: str
    error_file_id: str

    @property
    def claim(self) -> str:
        """Names this ownership; what is written under an earlier one is refused."""
        return f"{self.epoch}:{self.owner}"


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a row: a whole line of the file of answers or, if it failed, of the other one."""

    row: int
    line: bytes
    has_failed: bool


@dataclass(frozen=True, slots=True)
class Claim:
    """What an owner learns when it renews its claim."""

    reply: Reply
    status: Status | None = None
    is_expired: bool = False
    """Whether the window in which the batch was to be completed is over."""


class BatchStore:
    """Batches in Redis; every method may wait for one round trip and raises StoreUnavailable."""

    def __init__(self, store: Store, files: FileStore, *, lease_s: float = LEASE_S) -> None:
        self._keys = store.keys
        self._files = files
        self.lease_s = lease_s

    async def create(self, batch_id: str, order: Order, *, output_id: str, error_id: str) -> Batch:
        """Makes a batch, which will write files with two of these ids. Raises BatchRefused or FilesFull.

        A second call with the same id changes nothing.
        """
        args = (
            batch_id,
            order.tenant,
            order.key_digest,
            order.endpoint,
            order.input_file_id,
            order.window_s,
            order.window,
            order.metadata,
            order.output_ttl_s,
            output_id,
            error_id,
            round(BATCH_TTL_S),
            *self._files.bounds,
        )
        refusal, flat = await self._files.run(_CREATE, args)
        if refusal == b"active":
            raise BatchRefused("active")
        if refusal:
            raise FilesFull(refusal.decode())
        return _batch(batch_id, fields_of(flat))

    async def find(self, batch_id: str) -> Batch | None:
        """The batch, of whatever tenant."""
        flat = await self._files.run(_FIND, (batch_id,))
        return _batch(batch_id, fields_of(flat)) if flat else None

    async def page(self, tenant: str, *, after: str, limit: int) -> tuple[list[Batch], bool]:
        """Batches of a tenant, the newest first, after the one with the id `after`, and whether there are more."""
        page = await self._files.read_page(
            self._keys.batches_prefix + tenant, self._keys.batch_prefix, after=after, limit=limit, newest_first=True
        )
        return [_batch(batch_id, fields) for batch_id, fields in page.entries], page.has_more

    async def cancel(self, batch_id: str, tenant: str) -> Reply:
        """Asks its owner to end it. REFUSED: it is nearly over, or over."""
        return Reply((await self._files.run(_CANCEL, (batch_id, tenant, *_BEFORE[Status.CANCELLING]))).decode())

    async def claim(
        self, owner: str, *, busy_tenants: Sequence[str] = (), full_tenants: Sequence[str] = ()
    ) -> Batch | None:
        """Takes over a batch without an owner, the oldest first, those of `busy_tenants` last; None: all have one.

        Batches of `full_tenants` are not taken.
        """
        tenants = [*(f"busy:{tenant}" for tenant in busy_tenants), *(f"full:{tenant}" for tenant in full_tenants)]
        answer = await self._files.run(_CLAIM, (owner, round(self.lease_s * 1000), *tenants))
        if not answer:
            return None
        batch_id, flat = answer
        return _batch(batch_id.decode(), fields_of(flat))

    async def renew(self, batch: Batch) -> Claim:
        """Keeps the claim for another `lease_s`."""
        reply, status, is_expired = await self._files.run(_RENEW, (batch.id, batch.claim, round(self.lease_s * 1000)))
        return Claim(Reply(reply.decode()), Status(status.decode()) if status else None, bool(is_expired))

    async def release(self, batch: Batch) -> None:
        """Gives the batch up, for the next gateway that claims one."""
        await self._files.run(_RENEW, (batch.id, batch.claim, 0))

    async def advance(
        self,
        batch: Batch,
        status: Status,
        *,
        outcome: str = "",
        total: int | None = None,
        row_bytes: int = 0,
        errors: str = "",
    ) -> Reply:
        """Moves the batch to `status`; `total`: its rows, once they are counted. DONE also if it stands there already.

        With `total`, room for that number of lines of `row_bytes` is kept for it until each row has its result: FULL
        where the room does not suffice. Once the batch is over, its tenant can read its files.
        """
        total_said = -1 if total is None else total
        args = (batch.id, batch.claim, status, outcome, total_said, errors, row_bytes, *self._files.bounds)
        return Reply((await self._files.run(_ADVANCE, (*args, *_BEFORE[status]))).decode())

    async def done_rows(self, batch: Batch) -> bytes:
        """Bit N (the highest of a byte first) says whether row N has a result. Empty before rows are counted."""
        bits: bytes = await self._files.run(_DONE_ROWS, (batch.id,))
        return bits

    async def record(self, batch: Batch, results: Sequence[Result], *, beyond_room: bool = False) -> Reply:
        """Keeps the results of rows that have none.

        `beyond_room`: room is not asked for; this is for lines of at most the `row_bytes` that are kept for each row.
        """
        rows: list[str | bytes | int] = []
        for result in results:
            rows += [result.row, "error" if result.has_failed else "output", result.line]
        args = (batch.id, batch.claim, int(beyond_room), CHUNK_BYTES, *self._files.bounds, *rows)
        return Reply((await self._files.run(_RECORD, args)).decode())


def has_result(bits: bytes, row: int) -> bool:
    """Whether the row's bit is set in what `BatchStore.done_rows` has answered."""
    return row // 8 < len(bits) and bool(bits[row // 8] & 0x80 >> row % 8)


def _batch(batch_id: str, fields: Mapping[str, str]) -> Batch:
    status = Status(fields["status"])
    written = {name for name in ("output", "error") if status in OVER and f"{name}_chunks" in fields}
    return Batch(
        id=batch_id,
        order=Order(
            fields["tenant"],
            fields["key"],
            fields["endpoint"],
            fields["input"],
            int(fields["window_s"]),
            fields["window"],
            fields["metadata"],
            int(fields["output_ttl"]),
        ),
        status=status,
        outcome=fields.get("outcome", ""),
        epoch=int(fields["epoch"]),
        owner=fields.get("owner", ""),
        errors=fields.get("errors", ""),
        total=int(fields.get("total", 0)),
        completed=int(fields.get("completed", 0)),
        failed=int(fields.get("failed", 0)),
        times_s={name.removeprefix("at:"): int(value) for name, value in fields.items() if name.startswith("at:")},
        output_file_id=fields["output"] if "output" in written else "",
        error_file_id=fields["error"] if "error" in written else "",
    )


_COMMON = (
    COMMON
    + """
local batch_prefix, batches_prefix, active = KEYS[6], KEYS[7], KEYS[8]

local function done_key(id) return batch_prefix .. id .. ':done' end

-- 'done' if the batch exists and the claim is the latest. After a failover of Redis two may have the same epoch.
local function fence(id, claim)
  local epoch, owner = unpack(redis.call('HMGET', batch_prefix .. id, 'epoch', 'owner'))
  if not epoch then return 'gone' end
  return epoch .. ':' .. (owner or '') == claim and 'done' or 'fenced'
end

-- The room that a batch takes itself: its record, and what is kept for its rows.
local function add_held(id, num_bytes)
  local tenant, expires = unpack(redis.call('HMGET', batch_prefix .. id, 'tenant', 'expires'))
  if tenant and expires and num_bytes ~= 0 then count(id, tenant, num_bytes, expires * 1000) end
end

local function is_one_of(value, first)
  for index = first, #ARGV do
    if ARGV[index] == value then return true end
  end
  return false
end
"""
)

# ARGV: id, tenant, key, endpoint, input, window in s and in words, metadata, TTL of files in s, ids of the files, TTL
# of the batch in s, bounds. Answers why the batch is not made, or nothing, and its fields.
_CREATE = Script(
    _COMMON
    + f"""
local id, tenant = ARGV[1], ARGV[2]
local key, list = batch_prefix .. id, batches_prefix .. tenant
if redis.call('EXISTS', key) == 1 then return {{'', redis.call('HGETALL', key)}} end
local num_active = 0
for _, other in ipairs(redis.call('ZRANGE', active, 0, -1)) do
  if redis.call('HGET', batch_prefix .. other, 'tenant') == tenant then num_active = num_active + 1 end
end
if num_active >= {MAX_ACTIVE} then return {{'active', {{}}}} end
local num_bytes = {OVERHEAD_BYTES}
for index = 1, 11 do num_bytes = num_bytes + #ARGV[index] end
local lacks = room_lacks(tenant, num_bytes, 2, ARGV[13], ARGV[14], ARGV[15])
if lacks then return {{lacks, {{}}}} end
redis.call('HSET', key, 'tenant', tenant, 'key', ARGV[3], 'endpoint', ARGV[4], 'input', ARGV[5], 'window_s', ARGV[6],
           'window', ARGV[7], 'metadata', ARGV[8], 'output_ttl', ARGV[9], 'output', ARGV[10], 'error', ARGV[11],
           'status', '{Status.VALIDATING}', 'epoch', 0, 'lease', 0, 'at:created', now_s,
           'at:expires', now_s + ARGV[6], 'expires', now_s + ARGV[12])
redis.call('EXPIRE', key, ARGV[12])
add_held(id, num_bytes - {OVERHEAD_BYTES})
redis.call('ZADD', active, now_ms, id)
redis.call('ZADD', list, 0, id)
for _, list_key in ipairs({{list, active}}) do redis.call('EXPIRE', list_key, ARGV[12] * 2) end
local num_excess = redis.call('ZCARD', list) - {MAX_BATCHES}
for _, old in ipairs(redis.call('ZRANGE', list, 0, {MAX_ACTIVE})) do
  if num_excess > 0 and not redis.call('ZSCORE', active, old) then
    redis.call('DEL', batch_prefix .. old)
    redis.call('ZREM', list, old)
    forget(old)
    num_excess = num_excess - 1
  end
end
return {{'', redis.call('HGETALL', key)}}
"""
)

_FIND = Script(_COMMON + "return redis.call('HGETALL', batch_prefix .. ARGV[1])")
_DONE_ROWS = Script(_COMMON + "return redis.call('GET', done_key(ARGV[1])) or ''")

# ARGV: id, tenant, states in which it may be.
_CANCEL = Script(
    _COMMON
    + f"""
local key = batch_prefix .. ARGV[1]
local tenant, status = unpack(redis.call('HMGET', key, 'tenant', 'status'))
if tenant ~= ARGV[2] then return '{Reply.GONE}' end
if status == '{Status.CANCELLING}' then return '{Reply.DONE}' end
if not is_one_of(status, 3) then return '{Reply.REFUSED}' end
redis.call('HSET', key, 'status', '{Status.CANCELLING}', 'at:cancelling', now_s)
return '{Reply.DONE}'
"""
)

# ARGV: owner, lease in ms, tenants after `busy:` or `full:`. Answers id and fields of what was taken.
_CLAIM = Script(
    _COMMON
    + """
local chosen
for _, id in ipairs(redis.call('ZRANGE', active, 0, -1)) do
  local tenant, lease = unpack(redis.call('HMGET', batch_prefix .. id, 'tenant', 'lease'))
  if not tenant then
    redis.call('ZREM', active, id)
  elseif tonumber(lease) <= now_ms and not is_one_of('full:' .. tenant, 3) then
    chosen = chosen or id
    if not is_one_of('busy:' .. tenant, 3) then
      chosen = id
      break
    end
  end
end
if not chosen then return false end
local key = batch_prefix .. chosen
redis.call('HINCRBY', key, 'epoch', 1)
redis.call('HSET', key, 'owner', ARGV[1], 'lease', whole(now_ms + ARGV[2]))
return {chosen, redis.call('HGETALL', key)}
"""
)

# ARGV: id, claim, lease in ms. Answers a `Reply`, the status, and whether its window is over.
_RENEW = Script(
    _COMMON
    + f"""
local key, reply = batch_prefix .. ARGV[1], fence(ARGV[1], ARGV[2])
if reply ~= '{Reply.DONE}' then return {{reply, '', 0}} end
redis.call('HSET', key, 'lease', whole(now_ms + ARGV[3]))
local status, expires = unpack(redis.call('HMGET', key, 'status', 'at:expires'))
return {{reply, status, now_s >= tonumber(expires) and 1 or 0}}
"""
)

# ARGV: id, claim, status, outcome, total or -1, errors, bytes that are kept for each row, bounds, states in which it
# may be.
_ADVANCE = Script(
    _COMMON
    + f"""
local id, claim, status, outcome, total, errors, row_bytes = unpack(ARGV)
local key, reply = batch_prefix .. id, fence(id, claim)
if reply ~= '{Reply.DONE}' then return reply end
local held = redis.call('HGET', key, 'status')
if held == status then return '{Reply.DONE}' end
if not is_one_of(held, 11) then return '{Reply.REFUSED}' end
if tonumber(total) >= 0 then
  local num_bytes = total * row_bytes + math.floor((total + 7) / 8)
  local tenant = redis.call('HGET', key, 'tenant')
  if room_lacks(tenant, num_bytes, 0, ARGV[8], ARGV[9], ARGV[10]) then return '{Reply.FULL}' end
  add_held(id, num_bytes)
  redis.call('HSET', key, 'row_bytes', row_bytes)
end
redis.call('HSET', key, 'status', status, 'at:' .. status, now_s)
if outcome ~= '' then redis.call('HSET', key, 'outcome', outcome) end
if errors ~= '' then
  redis.call('HSET', key, 'errors', errors)
  add_held(id, #errors)
end
if tonumber(total) >= 0 then
  redis.call('HSET', key, 'total', total)
  redis.call('SETRANGE', done_key(id), math.floor((total + 7) / 8) - 1, '\\0')
  redis.call('PEXPIRE', done_key(id), redis.call('PTTL', key))
end
if not ({" or ".join(f"status == '{status}'" for status in sorted(OVER))}) then return '{Reply.DONE}' end
local rows, completed, failed, each = unpack(redis.call('HMGET', key, 'total', 'completed', 'failed', 'row_bytes'))
if rows and each then
  local num_left = rows - (completed or 0) - (failed or 0)
  add_held(id, -(num_left * each + math.floor((rows + 7) / 8)))
end
redis.call('DEL', done_key(id))
redis.call('ZREM', active, id)
local tenant, ttl = unpack(redis.call('HMGET', key, 'tenant', 'output_ttl'))
for _, kind in ipairs({{'output', 'error'}}) do
  local file, chunks, bytes = unpack(redis.call('HMGET', key, kind, kind .. '_chunks', kind .. '_bytes'))
  if chunks then
    local name = id .. '_' .. kind .. '.jsonl'
    for index = 0, chunks - 1 do redis.call('EXPIREAT', chunk_key(file, index), now_s + ttl) end
    publish(file, tenant, name, 'batch_output', chunks, bytes, now_s, now_s + ttl)
  end
end
return '{Reply.DONE}'
"""
)

# ARGV: id, claim, whether room is not needed, size of a chunk, bounds, then row, file and line of each result.
_RECORD = Script(
    _COMMON
    + f"""
local id, claim, beyond_room, chunk_bytes = unpack(ARGV)
local key, reply = batch_prefix .. id, fence(id, claim)
if reply ~= '{Reply.DONE}' then return reply end
local status, total, tenant = unpack(redis.call('HMGET', key, 'status', 'total', 'tenant'))
if status ~= '{Status.IN_PROGRESS}' and status ~= '{Status.FINALIZING}' and status ~= '{Status.CANCELLING}' then
  return '{Reply.REFUSED}'
end
if not total or redis.call('STRLEN', done_key(id)) ~= math.floor((total + 7) / 8) then return '{Reply.LOST}' end
local row_bytes = tonumber(redis.call('HGET', key, 'row_bytes') or 0)
local num_bytes, num_rows = 0, 0
for index = 8, #ARGV, 3 do
  if redis.call('GETBIT', done_key(id), ARGV[index]) == 0 then
    num_bytes, num_rows = num_bytes + #ARGV[index + 2] - row_bytes, num_rows + 1
  end
end
if beyond_room == '0' and room_lacks(tenant, num_bytes, 0, ARGV[5], ARGV[6], ARGV[7]) then return '{Reply.FULL}' end
local life_ms = redis.call('PTTL', key)
for _, kind in ipairs({{'output', 'error'}}) do
  local file, chunks, tail = unpack(redis.call('HMGET', key, kind, kind .. '_chunks', kind .. '_tail'))
  if chunks and redis.call('STRLEN', chunk_key(file, chunks - 1)) ~= tonumber(tail) then return '{Reply.LOST}' end
end
for index = 8, #ARGV, 3 do
  local row, kind, line = ARGV[index], ARGV[index + 1], ARGV[index + 2]
  if redis.call('GETBIT', done_key(id), row) == 0 then
    local file, chunks, tail = unpack(redis.call('HMGET', key, kind, kind .. '_chunks', kind .. '_tail'))
    chunks, tail = tonumber(chunks or 0), tonumber(tail or 0)
    if chunks == 0 or tail >= tonumber(chunk_bytes) then chunks = chunks + 1 end
    tail = redis.call('APPEND', chunk_key(file, chunks - 1), line)
    redis.call('PEXPIRE', chunk_key(file, chunks - 1), life_ms)
    redis.call('HSET', key, kind .. '_chunks', chunks, kind .. '_tail', tail)
    redis.call('HINCRBY', key, kind .. '_bytes', #line)
    redis.call('HINCRBY', key, kind == 'output' and 'completed' or 'failed', 1)
    count(file, tenant, #line, now_ms + life_ms)
    redis.call('SETBIT', done_key(id), row, 1)
  end
end
-- What was kept for these rows is taken by their results now.
add_held(id, -num_rows * row_bytes)
return '{Reply.DONE}'
"""
)
