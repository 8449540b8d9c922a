"""What Redis does for stored answers: the Lua scripts of `answers`, and the words and bounds that both know.

Room is counted as for files, in accounts of its own. Where it is used up, the oldest answers that are over make room.
Such an answer may change, and its input may grow, as that of a conversation does.
"""

from enum import StrEnum

from services.cluster.files import COMMON
from services.cluster.redis_store import Script

MAX_ANSWERS = 10_000
"""Stored answers of one tenant; beyond it, the oldest of those that are over are evicted."""
MAX_ACTIVE = 32
"""Answers of one tenant that wait or are generated in the background."""
MAX_DROPPED = 500
"""Most answers that one script evicts; a caller that needs more room asks again."""
MAX_SEEN = 1000
"""Most answers at which one claim, or one part of a page, looks."""


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
    """Room was made, and not enough yet; nothing was written."""
    GONE = "gone"
    """The answer does not exist."""
    FENCED = "fenced"
    """Another owner has it, it is over, or it has changed since it was read; nothing was written."""
    LONG = "long"
    """With what is added it would take more than an answer may; nothing was written."""


_COMMON = (
    COMMON
    + f"""
local active, running_prefix = KEYS[6], KEYS[7]

local function key_of(name) return file_prefix .. name end
local function events_key(name) return file_prefix .. name .. ':events' end

local function drop(name)
  local tenant = redis.call('HGET', key_of(name), 'tenant')
  if tenant then redis.call('ZREM', running_prefix .. tenant, name) end
  redis.call('UNLINK', key_of(name), events_key(name))
  redis.call('ZREM', active, name)
  forget(name)
end

local function num_running(tenant)
  local list = running_prefix .. tenant
  for _, name in ipairs(redis.call('ZRANGE', list, 0, -1)) do
    if redis.call('EXISTS', key_of(name)) == 0 then redis.call('ZREM', list, name) end
  end
  return redis.call('ZCARD', list)
end

local function largest_tenant()
  local found, most = '', -1
  local accounts = redis.call('HGETALL', totals)
  for index = 1, #accounts, 2 do
    local num_bytes = tonumber(accounts[index + 1])
    if accounts[index] ~= '*' and num_bytes > most then found, most = accounts[index], num_bytes end
  end
  return found
end

-- Answers nothing where there is room, or whose room is used up.
local function make_room(tenant, num_bytes, num_answers, max_tenant_bytes, max_all_bytes)
  for _ = 0, {MAX_DROPPED} do
    local lacks = room_lacks(tenant, num_bytes, num_answers, {MAX_ANSWERS}, max_tenant_bytes, max_all_bytes)
    if not lacks then return nil end
    local whose = lacks == 'all' and '{AnswerReply.ALL_FULL}' or '{AnswerReply.TENANT_FULL}'
    -- The list does not have what runs.
    local of = lacks == 'all' and largest_tenant() or tenant
    local oldest = redis.call('ZRANGE', files_prefix .. of, 0, 0)[1]
    if not oldest then return whose end
    drop(oldest)
  end
  return '{AnswerReply.AGAIN}'
end

-- The time to the microsecond; no two changes of one answer have the same.
local function stamp() return whole(now_s * 1000000 + clock[2]) end

local function list(key, name, life_s)
  redis.call('ZADD', key, stamp(), name)
  redis.call('EXPIRE', key, 2 * life_s)
end

-- Makes room for what an answer that is over grows by, without evicting it.
local function room_to_grow(name, tenant, num_more, max_tenant_bytes, max_all_bytes)
  local names = files_prefix .. tenant
  local place, left_ms = redis.call('ZSCORE', names, name), redis.call('PTTL', names)
  if num_more <= 0 or not place then return nil end
  redis.call('ZREM', names, name)
  local lacks = make_room(tenant, num_more, 0, max_tenant_bytes, max_all_bytes)
  redis.call('ZADD', names, place, name)
  redis.call('PEXPIRE', names, left_ms)
  return lacks
end

-- `done` while the claim is the latest one of an answer that is not over.
local function fence(name, claim)
  local epoch, owner, state = unpack(redis.call('HMGET', key_of(name), 'epoch', 'owner', 'state'))
  if not state then return '{AnswerReply.GONE}' end
  if state == 'over' or epoch .. ':' .. (owner or '') ~= claim then return '{AnswerReply.FENCED}' end
  return '{AnswerReply.DONE}'
end

local function is_among(value, first)
  for index = first, #ARGV do
    if ARGV[index] == value then return true end
  end
  return false
end

-- Whether what is held to regions, with commas between them, may be in the one that a claim names.
local function may_be_here(regions)
  for region in string.gmatch(regions or '', '[^,]+') do
    if is_among('region:' .. region, 3) then return true end
  end
  return (regions or '') == ''
end

local function finish(name, document, life_s)
  local key = key_of(name)
  local tenant, ends = redis.call('HGET', key, 'tenant'), now_s + life_s
  local num_freed = redis.call('HSTRLEN', key, 'document') + redis.call('HSTRLEN', key, 'body')
  redis.call('HDEL', key, 'body', 'headers', 'key', 'owner')
  redis.call('HSET', key, 'document', document, 'state', 'over')
  redis.call('EXPIREAT', key, ends)
  redis.call('EXPIREAT', events_key(name), ends)
  redis.call('ZREM', active, name)
  redis.call('ZREM', running_prefix .. tenant, name)
  list(files_prefix .. tenant, name, life_s)
  count(name, tenant, #document - num_freed, ends * 1000)
end
"""
)

# ARGV: name, tenant, id, life in s, bounds, document, input, metadata of the order or nothing (digest, key, body,
# headers, whether events are kept, how many items of the input are a conversation's, regions). Answers a reply.
PUT = Script(
    _COMMON
    + f"""
local name, tenant, id, life_s, max_tenant_bytes, max_all_bytes, document, input = unpack(ARGV)
local digest, owner_key, body, headers, has_events, num_earlier, regions = unpack(ARGV, 9)
local key = key_of(name)
local held = redis.call('HGET', key, 'digest')
if held and (digest or held ~= '') then
  return held == digest and '{AnswerReply.HELD}' or '{AnswerReply.FENCED}'
elseif held then
  drop(name)
end
local num_bytes = #document + #input + #(body or '') + #(headers or '')
if digest and num_running(tenant) >= {MAX_ACTIVE} then return '{AnswerReply.ACTIVE}' end
local lacks = make_room(tenant, num_bytes, 1, max_tenant_bytes, max_all_bytes)
if lacks then return lacks end
redis.call('HSET', key, 'tenant', tenant, 'id', id, 'document', document, 'input', input, 'digest', digest or '',
           'state', digest and 'queued' or 'over', 'created', now_s, 'changed', stamp())
if digest then
  redis.call('HSET', key, 'key', owner_key, 'body', body, 'headers', headers, 'has_events', has_events,
             'num_earlier', num_earlier, 'regions', regions, 'epoch', 0, 'tries', 0)
  redis.call('ZADD', active, whole(now_ms), name)
end
redis.call('EXPIREAT', key, now_s + life_s)
list((digest and running_prefix or files_prefix) .. tenant, name, life_s)
count(name, tenant, num_bytes, (now_s + life_s) * 1000)
return '{AnswerReply.DONE}'
"""
)

# ARGV: name. Answers document, input, state, digest, whether events are kept, the stamp of the last change.
FIND = Script(
    _COMMON
    + "return redis.call('HMGET', key_of(ARGV[1]), 'document', 'input', 'state', 'digest', 'has_events', 'changed')"
)

# ARGV: tenant, where to begin (nothing, a name, or `(` and a score), whether the newest are first, start of the ids,
# most documents, most bytes. Answers documents of answers that are over, and the score of the last at which it looked;
# none: that was the end.
PAGE = Script(
    _COMMON
    + f"""
local tenant, from, newest_first, start, most, max_bytes = unpack(ARGV)
local names, is_reversed = files_prefix .. tenant, newest_first == '1'
if from == '' then
  from = is_reversed and '+inf' or '-inf'
elseif string.sub(from, 1, 1) ~= '(' then
  local place = redis.call('ZSCORE', names, from)
  if not place then return {{{{}}, ''}} end
  from = '(' .. place
end
local range = {{'BYSCORE', 'LIMIT', 0, {MAX_SEEN}, 'WITHSCORES', is_reversed and 'REV' or nil}}
local seen = redis.call('ZRANGE', names, from, is_reversed and '-inf' or '+inf', unpack(range))
local documents, num_bytes = {{}}, 0
for index = 1, #seen, 2 do
  local id = redis.call('HGET', key_of(seen[index]), 'id')
  if id and string.sub(id, 1, #start) == start then
    local document = redis.call('HGET', key_of(seen[index]), 'document')
    table.insert(documents, document)
    num_bytes = num_bytes + #document
    if #documents == tonumber(most) or num_bytes > tonumber(max_bytes) then return {{documents, seen[index + 1]}} end
  end
end
return {{documents, #seen == 2 * {MAX_SEEN} and seen[#seen] or ''}}
"""
)

# ARGV: name, stamp of what was read, bounds, document, input or nothing.
CHANGE = Script(
    _COMMON
    + f"""
local name, known, max_tenant_bytes, max_all_bytes, document, input = unpack(ARGV)
local key = key_of(name)
local tenant, state, changed = unpack(redis.call('HMGET', key, 'tenant', 'state', 'changed'))
if not state then return '{AnswerReply.GONE}' end
if state ~= 'over' or (changed or '') ~= known then return '{AnswerReply.FENCED}' end
local num_more = #document - redis.call('HSTRLEN', key, 'document')
if input then num_more = num_more + #input - redis.call('HSTRLEN', key, 'input') end
local lacks = room_to_grow(name, tenant, num_more, max_tenant_bytes, max_all_bytes)
if lacks then return lacks end
redis.call('HSET', key, 'document', document, 'changed', stamp())
if input then redis.call('HSET', key, 'input', input) end
count(name, tenant, num_more, now_ms + redis.call('PTTL', key))
return '{AnswerReply.DONE}'
"""
)

# ARGV: name, bounds, items of JSON with commas between them, life in s, most bytes of document and input. Adds them to
# the input, which is a list; HELD: it has exactly these already, since an earlier call has timed out.
APPEND = Script(
    _COMMON
    + f"""
local name, max_tenant_bytes, max_all_bytes, items, life_s, most = unpack(ARGV)
local key = key_of(name)
local tenant, state, input = unpack(redis.call('HMGET', key, 'tenant', 'state', 'input'))
if not state then return '{AnswerReply.GONE}' end
if string.find(input, items, 1, true) then return '{AnswerReply.HELD}' end
local joined = string.sub(input, 1, -2) .. (input == '[]' and '' or ',') .. items .. ']'
if #joined + redis.call('HSTRLEN', key, 'document') > tonumber(most) then return '{AnswerReply.LONG}' end
local num_more = #joined - #input
local lacks = room_to_grow(name, tenant, num_more, max_tenant_bytes, max_all_bytes)
if lacks then return lacks end
redis.call('HSET', key, 'input', joined, 'changed', stamp())
redis.call('EXPIREAT', key, now_s + life_s)
list(files_prefix .. tenant, name, life_s)
count(name, tenant, num_more, (now_s + life_s) * 1000)
return '{AnswerReply.DONE}'
"""
)

# ARGV: name, first event, last event. Answers the state, or nothing, and events.
EVENTS = Script(
    _COMMON
    + """
local state = redis.call('HGET', key_of(ARGV[1]), 'state')
return {state, redis.call('LRANGE', events_key(ARGV[1]), ARGV[2], ARGV[3])}
"""
)

# ARGV: name. Answers 1 if it existed.
DELETE = Script(
    _COMMON
    + """
local existed = redis.call('EXISTS', key_of(ARGV[1]))
drop(ARGV[1])
return existed
"""
)

# ARGV: name, document, life in s. Ends an answer that is not over, whichever gateway has it.
CANCEL = Script(
    _COMMON
    + f"""
local state = redis.call('HGET', key_of(ARGV[1]), 'state')
if not state then return '{AnswerReply.GONE}' end
if state == 'over' then return '{AnswerReply.FENCED}' end
finish(ARGV[1], ARGV[2], tonumber(ARGV[3]))
return '{AnswerReply.DONE}'
"""
)

# ARGV: owner, lease in ms, tenants after `busy:` or `full:`. Answers name, fields, and the last event with an id.
CLAIM = Script(
    _COMMON
    + f"""
local chosen
for _, name in ipairs(redis.call('ZRANGEBYSCORE', active, '-inf', whole(now_ms), 'LIMIT', 0, {MAX_SEEN})) do
  local tenant, regions = unpack(redis.call('HMGET', key_of(name), 'tenant', 'regions'))
  if not tenant then
    redis.call('ZREM', active, name)
  elseif not is_among('full:' .. tenant, 3) and may_be_here(regions) then
    chosen = chosen or name
    if not is_among('busy:' .. tenant, 3) then
      chosen = name
      break
    end
  end
end
if not chosen then return false end
local key = key_of(chosen)
redis.call('HINCRBY', key, 'epoch', 1)
redis.call('HINCRBY', key, 'tries', 1)
redis.call('HSET', key, 'owner', ARGV[1], 'state', 'in_progress')
redis.call('ZADD', active, whole(now_ms + ARGV[2]), chosen)
local num_events = redis.call('LLEN', events_key(chosen))
return {{chosen, redis.call('HGETALL', key), num_events, redis.call('LINDEX', events_key(chosen), -1) or ''}}
"""
)

# ARGV: name, claim, ms until another gateway may claim it, whether it is given up.
RENEW = Script(
    _COMMON
    + f"""
local name, claim, wait_ms, is_given_up = unpack(ARGV)
local reply = fence(name, claim)
if reply ~= '{AnswerReply.DONE}' then return reply end
redis.call('ZADD', active, whole(now_ms + wait_ms), name)
if is_given_up == '1' then
  redis.call('HSET', key_of(name), 'state', 'queued', 'owner', '')
  redis.call('HINCRBY', key_of(name), 'tries', -1)
end
return reply
"""
)

# ARGV: name, claim, bounds, document or nothing, life in s, number of the first event, events. With a document the
# answer is over. Events that are kept already, since an earlier call has timed out, are passed over.
WRITE = Script(
    _COMMON
    + f"""
local name, claim, max_tenant_bytes, max_all_bytes, document, life_s, first = unpack(ARGV)
local reply = fence(name, claim)
if reply ~= '{AnswerReply.DONE}' then return reply end
local key = key_of(name)
local tenant = redis.call('HGET', key, 'tenant')
local num_bytes, next = 0, 8 + redis.call('LLEN', events_key(name)) - first
if next < 8 then return '{AnswerReply.GONE}' end
for index = next, #ARGV do num_bytes = num_bytes + #ARGV[index] end
local num_more = num_bytes + #document
if document ~= '' then
  num_more = num_more - redis.call('HSTRLEN', key, 'document') - redis.call('HSTRLEN', key, 'body')
end
if num_more > 0 then
  local lacks = make_room(tenant, num_more, 0, max_tenant_bytes, max_all_bytes)
  if lacks then return lacks end
end
for index = next, #ARGV do redis.call('RPUSH', events_key(name), ARGV[index]) end
redis.call('PEXPIRE', events_key(name), redis.call('PTTL', key))
if num_bytes > 0 then count(name, tenant, num_bytes, now_ms + redis.call('PTTL', key)) end
if document ~= '' then finish(name, document, tonumber(life_s)) end
return reply
"""
)

SWEEP = Script(_COMMON + "sweep(10000) return tonumber(redis.call('HGET', totals, '*') or 0)")
