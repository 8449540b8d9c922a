"""What Redis does for batches: the Lua scripts of `batches`, and the words and bounds that both know."""

from enum import StrEnum

from services.cluster.files import AGAIN, COMMON, OVERHEAD_BYTES
from services.cluster.pending_work import QUEUES, WAITING
from services.cluster.redis_store import Script

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


_COMMON = (
    COMMON
    + """
local batch_prefix, batches_prefix, waiting_prefix, running_prefix = KEYS[6], KEYS[7], KEYS[8], KEYS[9]

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
    + QUEUES
)

# ARGV: id, tenant, key, endpoint, input, window in s and in words, metadata, TTL of files in s, ids of the files, TTL
# of the batch in s, bounds, regions. Answers why the batch is not made, or nothing, and its fields.
CREATE = Script(
    _COMMON
    + f"""
local id, tenant = ARGV[1], ARGV[2]
local key, list = batch_prefix .. id, batches_prefix .. tenant
if redis.call('EXISTS', key) == 1 then return {{'', redis.call('HGETALL', key)}} end
local running = running_prefix .. tenant
for _, other in ipairs(redis.call('ZRANGE', running, 0, {MAX_ACTIVE})) do
  if redis.call('EXISTS', batch_prefix .. other) == 0 then redis.call('ZREM', running, other) end
end
if redis.call('ZCARD', running) >= {MAX_ACTIVE} then return {{'active', {{}}}} end
local num_bytes = {OVERHEAD_BYTES}
for index = 1, 11 do num_bytes = num_bytes + #ARGV[index] end
local lacks = room_lacks(tenant, num_bytes, 2, ARGV[13], ARGV[14], ARGV[15])
if lacks then return {{lacks, {{}}}} end
redis.call('HSET', key, 'tenant', tenant, 'key', ARGV[3], 'endpoint', ARGV[4], 'input', ARGV[5], 'window_s', ARGV[6],
           'window', ARGV[7], 'metadata', ARGV[8], 'output_ttl', ARGV[9], 'output', ARGV[10], 'error', ARGV[11],
           'regions', ARGV[16], 'status', '{Status.VALIDATING}', 'epoch', 0, 'at:created', now_s,
           'at:expires', now_s + ARGV[6], 'expires', now_s + ARGV[12])
redis.call('EXPIRE', key, ARGV[12])
add_held(id, num_bytes - {OVERHEAD_BYTES})
redis.call('ZADD', running, whole(now_ms), id)
wait_until(id, tenant, ARGV[16], now_ms)
redis.call('ZADD', list, 0, id)
for _, list_key in ipairs({{list, running}}) do redis.call('EXPIRE', list_key, ARGV[12] * 2) end
local num_excess = redis.call('ZCARD', list) - {MAX_BATCHES}
for _, old in ipairs(redis.call('ZRANGE', list, 0, {MAX_ACTIVE})) do
  if num_excess > 0 and not redis.call('ZSCORE', running, old) then
    redis.call('DEL', batch_prefix .. old)
    redis.call('ZREM', list, old)
    forget(old)
    num_excess = num_excess - 1
  end
end
return {{'', redis.call('HGETALL', key)}}
"""
)

FIND = Script(_COMMON + "return redis.call('HGETALL', batch_prefix .. ARGV[1])")
DONE_ROWS = Script(_COMMON + "return redis.call('GET', done_key(ARGV[1])) or ''")

# ARGV: id, tenant, states in which it may be.
CANCEL = Script(
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

FIND_WAITING = Script(_COMMON + WAITING)

# ARGV: owner, lease in ms, queue, tenant. Returns id and fields of what was claimed.
CLAIM = Script(
    _COMMON
    + """
local owner, lease_ms, queue, tenant = unpack(ARGV)
local id = oldest_of(waiting_prefix .. queue, tenant, batch_prefix)
if not id then return false end
local key = batch_prefix .. id
redis.call('HINCRBY', key, 'epoch', 1)
redis.call('HSET', key, 'owner', owner)
wait_until(id, tenant, redis.call('HGET', key, 'regions'), now_ms + lease_ms)
return {id, redis.call('HGETALL', key)}
"""
)

# ARGV: id, claim, lease in ms, 0 to give the batch up. Returns a `Reply`, the status, and whether its window is over. A
# batch that was given up waits where it was when it was made.
RENEW = Script(
    _COMMON
    + f"""
local id, claim, lease_ms = unpack(ARGV)
local key, reply = batch_prefix .. id, fence(id, claim)
if reply ~= '{Reply.DONE}' then return {{reply, '', 0}} end
local status, expires, tenant, regions = unpack(redis.call('HMGET', key, 'status', 'at:expires', 'tenant', 'regions'))
local made_ms = redis.call('ZSCORE', running_prefix .. tenant, id)
if made_ms then wait_until(id, tenant, regions, lease_ms == '0' and made_ms or now_ms + lease_ms) end
return {{reply, status, now_s >= tonumber(expires) and 1 or 0}}
"""
)

# ARGV: id, claim, status, outcome, total or -1, errors, bytes that are kept for each row, bounds, states in which it
# may be.
ADVANCE = Script(
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
  local lacks = room_lacks(tenant, num_bytes, 0, ARGV[8], ARGV[9], ARGV[10])
  if lacks then return lacks == '{AGAIN.decode()}' and lacks or '{Reply.FULL}' end
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
local tenant, ttl, regions = unpack(redis.call('HMGET', key, 'tenant', 'output_ttl', 'regions'))
redis.call('ZREM', running_prefix .. tenant, id)
end_wait(id, tenant, regions)
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
RECORD = Script(
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
local lacks = beyond_room == '0' and room_lacks(tenant, num_bytes, 0, ARGV[5], ARGV[6], ARGV[7])
if lacks then return lacks == '{AGAIN.decode()}' and lacks or '{Reply.FULL}' end
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
