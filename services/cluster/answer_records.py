"""Lua shared by the scripts of stored answers: records, pieces of long values, quotas and evictions.

Room is counted as for files, in accounts of its own. Where it is used up, the oldest answers that are over make room:
those of the tenant whose answers could free most. Such an answer may change, and its input may grow, as that of a
conversation does.

A value longer than INLINE_BYTES is stored in pieces, so that no script handles more than a piece of it. The pieces are
written to a list under a random token first. The value is then a zero byte, the token, the number of pieces (5 digits),
their size in bytes (10 digits), and the rest. Pieces never change, and only an append adds some, so a reader that
follows a value gets exactly that value.
"""

from enum import StrEnum

from services.cluster.files import COMMON as FILES_COMMON
from services.cluster.pending_work import QUEUE_TTL_MS, QUEUES

MAX_ANSWERS = 10_000
"""Stored answers of one tenant; beyond it, the oldest of those that are over are evicted."""
MAX_ACTIVE = 32
"""Answers of one tenant that wait or are generated in the background."""
MAX_DROPPED = 32
"""Most answers that one script evicts; a caller that needs more room repeats it."""
MAX_SEEN = 500
"""Most answers at which one script of a page looks."""
INLINE_BYTES = 128 * 1024
"""Longest value that is stored in one piece."""
INLINE_EVENT_BYTES = 16 * 1024
"""Longest event that is stored in one piece."""
MAX_READ_EVENTS = 64
"""Most events that one script returns."""
REFERENCE_BYTES = 48
"""Size of the start of a value that is stored in pieces."""


class AnswerReply(StrEnum):
    """What became of a write."""

    DONE = "done"
    HELD = "held"
    """An answer has this id already; nothing was changed."""
    ACTIVE = "active"
    """The tenant has too many answers in the background; nothing was written."""
    TENANT_FULL = "tenant"
    """The tenant's share has no room, and what is over takes none of it; nothing was written."""
    ALL_FULL = "all"
    """All tenants' share has no room, and what is over takes none of it; nothing was written."""
    AGAIN = "again"
    """Some room was made, but not enough yet; nothing was written."""
    GONE = "gone"
    """The answer does not exist."""
    FENCED = "fenced"
    """Another owner has it, it is over, or it has changed since it was read; nothing was written."""
    LOST = "lost"
    """Redis has forgotten staged pieces of what was to be written; nothing was written."""
    LONG = "long"
    """With what is added it would take more than an answer may; nothing was written."""


COMMON = (
    """
local waiting_prefix, running_prefix, evictable = KEYS[6], KEYS[7], KEYS[8]
"""
    + FILES_COMMON
    + QUEUES
    + f"""
local function key_of(name) return file_prefix .. name end
local function events_key(name) return file_prefix .. name .. ':events' end

-- Token, number of pieces, their bytes and the rest of a value. The token is nil if the value is in one piece.
local function parts_of(value)
  if string.byte(value or '', 1) ~= 0 then return nil, 0, 0, value or '' end
  return string.sub(value, 2, 33), tonumber(string.sub(value, 34, 38)), tonumber(string.sub(value, 39, 48)),
         string.sub(value, {REFERENCE_BYTES + 1})
end

local function reference(token, num_pieces, num_bytes, rest)
  return '\\0' .. token .. string.format('%05d%010d', num_pieces, num_bytes) .. rest
end

local function size_of(value)
  local _, _, num_bytes = parts_of(value)
  return #(value or '') + num_bytes
end

local function blobs_of(name)
  local tokens = {{}}
  for token in string.gmatch(redis.call('HGET', key_of(name), 'blobs') or '', string.rep('.', 32)) do
    table.insert(tokens, token)
  end
  return tokens
end

-- Gives the pieces of a value to an answer. False if Redis has forgotten some.
local function adopt(name, value)
  local token, num_pieces = parts_of(value)
  if not token then return true end
  if redis.call('LLEN', key_of(token)) ~= num_pieces then return false end
  forget(token)
  redis.call('HSET', key_of(name), 'blobs', (redis.call('HGET', key_of(name), 'blobs') or '') .. token)
  redis.call('PEXPIRE', key_of(token), redis.call('PTTL', key_of(name)))
  return true
end

-- Drops the pieces of a value that the answer no longer has.
local function abandon(name, value)
  local token = parts_of(value)
  if not token then return end
  redis.call('UNLINK', key_of(token))
  redis.call('HSET', key_of(name), 'blobs', (string.gsub(redis.call('HGET', key_of(name), 'blobs') or '', token, '')))
end

local function expire_all(name, at_s)
  for _, token in ipairs(blobs_of(name)) do redis.call('EXPIREAT', key_of(token), at_s) end
  redis.call('EXPIREAT', key_of(name), at_s)
  redis.call('EXPIREAT', events_key(name), at_s)
end

-- The amount that a tenant's complete answers would free. It is that of the answers in the tenant's list.
local function add_evictable(tenant, num_bytes)
  local total = tonumber(redis.call('ZSCORE', evictable, tenant) or 0) + num_bytes
  if total > 0 and redis.call('ZCARD', files_prefix .. tenant) > 0 then
    redis.call('ZADD', evictable, whole(total), tenant)
  else
    redis.call('ZREM', evictable, tenant)
  end
end

on_unlisted = function(tenant, num_bytes) add_evictable(tenant, -num_bytes) end

local function counted_bytes(name)
  return tonumber(string.match(redis.call('HGET', sizes, name) or '', '^(%d+) ') or 0)
end

-- Makes an answer evictable. The list lives longer than each of its members.
local function enlist(name, tenant, score, life_ms)
  local names = files_prefix .. tenant
  redis.call('ZADD', names, score, name)
  if redis.call('PTTL', names) < life_ms then redis.call('PEXPIRE', names, whole(life_ms)) end
  add_evictable(tenant, counted_bytes(name))
  redis.call('PEXPIRE', evictable, {QUEUE_TTL_MS})
end

-- Keeps an answer from being evicted. Returns its score (nil if it is not in the list) and the TTL of the list in ms.
local function unlist(name, tenant)
  local names = files_prefix .. tenant
  local score, left_ms = redis.call('ZSCORE', names, name), redis.call('PTTL', names)
  if redis.call('ZREM', names, name) == 1 then add_evictable(tenant, -counted_bytes(name)) end
  return score, left_ms
end

local function drop(name)
  local tenant, regions = unpack(redis.call('HMGET', key_of(name), 'tenant', 'regions'))
  if tenant then
    if redis.call('ZREM', running_prefix .. tenant, name) == 1 then end_wait(name, tenant, regions) end
    for _, token in ipairs(blobs_of(name)) do redis.call('UNLINK', key_of(token)) end
  end
  redis.call('UNLINK', key_of(name), events_key(name))
  forget(name)
end

local function num_running(tenant)
  local list = running_prefix .. tenant
  for _, name in ipairs(redis.call('ZRANGE', list, 0, {MAX_ACTIVE})) do
    if redis.call('EXISTS', key_of(name)) == 0 then redis.call('ZREM', list, name) end
  end
  return redis.call('ZCARD', list)
end

-- Evicts answers until there is room. Returns nil then, and otherwise the reason.
local function make_room(tenant, num_bytes, num_answers, max_tenant_bytes, max_all_bytes)
  local is_behind = sweep()
  for _ = 1, {MAX_DROPPED} do
    local lacks = full_quota(tenant, num_bytes, num_answers, {MAX_ANSWERS}, max_tenant_bytes, max_all_bytes)
    if not lacks then return nil end
    if is_behind then break end
    local of = lacks == 'all' and redis.call('ZRANGE', evictable, 0, 0, 'REV')[1] or lacks ~= 'all' and tenant
    local oldest = of and redis.call('ZRANGE', files_prefix .. of, 0, 0)[1]
    if oldest then
      drop(oldest)
    elseif lacks == 'all' and of then
      redis.call('ZREM', evictable, of)
    else
      return lacks == 'all' and '{AnswerReply.ALL_FULL}' or '{AnswerReply.TENANT_FULL}'
    end
  end
  return '{AnswerReply.AGAIN}'
end

-- The time to the microsecond; no two changes of one answer have the same.
local function stamp() return whole(now_s * 1000000 + clock[2]) end

-- Adds to an answer that is over, unless there is no room. It does not evict the answer itself.
local function grow(name, tenant, num_more, bounds, write)
  local score, left_ms = unlist(name, tenant)
  local lacks = num_more > 0 and make_room(tenant, num_more, 0, bounds[1], bounds[2]) or nil
  if not lacks then
    write()
    count(name, tenant, num_more, now_ms + redis.call('PTTL', key_of(name)))
  end
  if score then enlist(name, tenant, score, math.max(left_ms, 2 * redis.call('PTTL', key_of(name)))) end
  return lacks or '{AnswerReply.DONE}'
end

-- `done` while the claim is the latest one of an answer that is not over.
local function fence(name, claim)
  local epoch, owner, state = unpack(redis.call('HMGET', key_of(name), 'epoch', 'owner', 'state'))
  if not state then return '{AnswerReply.GONE}' end
  if state == 'over' or epoch .. ':' .. (owner or '') ~= claim then return '{AnswerReply.FENCED}' end
  return '{AnswerReply.DONE}'
end

local function finish(name, document, life_s)
  local key = key_of(name)
  local tenant, regions, old, body = unpack(redis.call('HMGET', key, 'tenant', 'regions', 'document', 'body'))
  local ends = now_s + life_s
  abandon(name, old)
  abandon(name, body)
  redis.call('HDEL', key, 'body', 'headers', 'key', 'owner')
  redis.call('HSET', key, 'document', document, 'state', 'over')
  if redis.call('ZREM', running_prefix .. tenant, name) == 1 then end_wait(name, tenant, regions) end
  count(name, tenant, size_of(document) - size_of(old) - size_of(body), ends * 1000)
  expire_all(name, ends)
  enlist(name, tenant, stamp(), 2000 * life_s)
end
"""
)
