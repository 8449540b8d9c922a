"""What Redis does for journals: the Lua scripts of `journals`, and the bounds that both know."""

from enum import IntEnum

from services.cluster.journal_room import COMMON, cost_bytes
from services.cluster.redis_store import Script

MAX_JOURNAL_BYTES = 2 * 2**20
"""Size of one journal: its call, tokens and ends. One that would become larger is no longer written.

To claim a larger one would hold Redis for more than 5 ms, since a script copies it twice.
"""
MAX_CHOICES = 128
MAX_END_BYTES = 1024
MAX_TEXT_BYTES = 256
MAX_EPOCH = 10**9
TOKEN_BYTES = 4


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
CLAIM = Script(
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
WRITE = Script(
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
