"""How much journals may take in Redis: of one tenant and of all, counted in the step that makes or changes one.

A journal is counted by what Redis holds of it, and its count ends when it expires, whichever gateway made it: gateways
that die leave nothing counted for longer than that. Where a share is used up, journals that nobody has written or read
for MIN_KEPT_S make room, the oldest of the same tenant first; younger ones never do. Knows no journal's content.
"""

from dataclasses import dataclass

from services.cluster.redis_store import Script, Store

MIN_KEPT_S = 60.0
"""Time since its last use after which a journal may make room for its tenant's next one, where there is need."""
OVERHEAD_BYTES = 1536
CHOICE_OVERHEAD_BYTES = 256
"""Bytes that are counted for each journal, and for each of its answers: keys, accounts and ends of answers."""
MAX_DROPPED = 16
"""Most journals that one script drops to make room."""
MAX_SWEPT = 64
"""Most expired journals that one script takes out of the count."""
MAX_ROUNDS = 200
"""Most repetitions of a script that could make more room."""
AGAIN = "again"
"""Reply of a script that has made some room and must be repeated."""
ALL_TENANTS = "*"


@dataclass(frozen=True, slots=True)
class JournalRoom:
    """How many bytes journals may take in Redis, of one tenant and of all together."""

    tenant_bytes: int = 64 * 2**20
    all_bytes: int = 128 * 2**20


def cost_bytes(num_call_bytes: int, num_choices: int, num_tokens: int = 0) -> int:
    """Bytes that a journal is counted as; the scripts count the same."""
    return OVERHEAD_BYTES + num_call_bytes + num_choices * CHOICE_OVERHEAD_BYTES + 4 * num_tokens


def room_keys(store: Store) -> tuple[str, str, str, str, str]:
    """KEYS of every script that knows journals."""
    keys = store.keys
    return keys.journal_prefix, keys.journal_expiry, keys.journal_sizes, keys.journal_totals, keys.journals_prefix


# `count` records the size of a journal, and `forget` removes the record. `drop` also deletes the journal. `room_lacks`
# makes room for a number of bytes in place of `own`, or returns whose quota is full and after how many ms it may have
# room. It returns AGAIN if the next call can make more room.
COMMON = f"""
local prefix, expiry, sizes, totals, of_tenant = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local clock = redis.call('TIME')
local now_ms = clock[1] * 1000 + math.floor(clock[2] / 1000)

local function tokens_key(name, life, choice) return prefix .. name .. ':' .. life .. ':' .. choice end

local function whole(number) return string.format('%d', number) end

-- A key of another type is no account, and is deleted.
local function check_accounts(tenant)
  for key, kind in pairs({{[expiry]='zset', [sizes]='hash', [totals]='hash', [of_tenant .. tenant]='zset'}}) do
    local held = redis.call('TYPE', key).ok
    if held ~= kind and held ~= 'none' then redis.call('DEL', key) end
  end
end

local function counted(name)
  local num_bytes, tenant = string.match(redis.call('HGET', sizes, name) or '', '^(%d+) (.*)$')
  return tonumber(num_bytes or 0), tenant
end

local function add_total(tenant, num_bytes)
  local total = (tonumber(redis.call('HGET', totals, tenant) or 0) or 0) + num_bytes
  if total > 0 then redis.call('HSET', totals, tenant, whole(total)) else redis.call('HDEL', totals, tenant) end
end

local function forget(name)
  local num_bytes, tenant = counted(name)
  redis.call('ZREM', expiry, name)
  if not tenant then return end
  check_accounts(tenant)
  redis.call('HDEL', sizes, name)
  redis.call('ZREM', of_tenant .. tenant, name)
  add_total(tenant, -num_bytes)
  add_total('{ALL_TENANTS}', -num_bytes)
end

local function count(name, tenant, num_bytes, ttl)
  check_accounts(tenant)
  local before, held_by = counted(name)
  if held_by and held_by ~= tenant then
    forget(name)
    before = 0
  end
  redis.call('HSET', sizes, name, whole(num_bytes) .. ' ' .. tenant)
  redis.call('ZADD', expiry, whole(now_ms + ttl), name)
  redis.call('ZADD', of_tenant .. tenant, whole(now_ms), name)
  add_total(tenant, num_bytes - before)
  add_total('{ALL_TENANTS}', num_bytes - before)
end

local function size_of(name, life, choices)
  local num_bytes = {OVERHEAD_BYTES} + redis.call('HSTRLEN', prefix .. name, 'call') + choices * {CHOICE_OVERHEAD_BYTES}
  for choice = 0, choices - 1 do
    local of_choice = tokens_key(name, life, choice)
    if redis.call('TYPE', of_choice).ok == 'string' then num_bytes = num_bytes + redis.call('STRLEN', of_choice) end
  end
  return num_bytes
end

local function drop(name)
  local key = prefix .. name
  if redis.call('TYPE', key).ok == 'hash' then
    local life, choices, alias = unpack(redis.call('HMGET', key, 'life', 'choices', 'alias'))
    if life and #life == 32 then
      for choice = 0, math.min(tonumber(choices) or 0, 128) - 1 do
        redis.call('UNLINK', tokens_key(name, life, choice))
      end
    end
    if alias and #alias == 32 and redis.call('TYPE', prefix .. alias).ok == 'string'
       and redis.call('GET', prefix .. alias) == name then
      redis.call('DEL', prefix .. alias)
    end
  end
  redis.call('UNLINK', key)
  forget(name)
end

local function sweep()
  local expired = redis.call('ZRANGEBYSCORE', expiry, '-inf', whole(now_ms), 'LIMIT', 0, {MAX_SWEPT})
  for _, name in ipairs(expired) do
    -- Its own keys expire with it, unless a gateway that counts nothing has renewed them.
    local left_ms = redis.call('PTTL', prefix .. name)
    if left_ms > 0 then redis.call('ZADD', expiry, whole(now_ms + left_ms), name) else forget(name) end
  end
  return #expired == {MAX_SWEPT}
end

local function room_lacks(own, tenant, num_bytes, max_tenant_bytes, max_all_bytes, ttl)
  check_accounts(tenant)
  local is_behind = sweep()
  local held = counted(own)
  local function lacks(whose, most)
    return (tonumber(redis.call('HGET', totals, whose) or 0) or 0) - held + num_bytes > tonumber(most)
  end
  local function free(whose, most, list, offset)
    if not lacks(whose, most) then return nil end
    if is_behind then return 0, true end
    local until_ms = whole(now_ms + offset - {round(MIN_KEPT_S * 1000)})
    local oldest = redis.call('ZRANGEBYSCORE', list, '-inf', until_ms, 'LIMIT', 0, {MAX_DROPPED})
    for _, name in ipairs(oldest) do
      if name ~= own then drop(name) end
      if not lacks(whose, most) then return nil end
    end
    if #oldest == {MAX_DROPPED} then return 0, true end
    local next_ms = redis.call('ZRANGE', list, 0, 0, 'WITHSCORES')[2]
    return next_ms and math.max(0, next_ms - until_ms) or 0
  end
  local wait_ms, has_more = free(tenant, max_tenant_bytes, of_tenant .. tenant, 0)
  if wait_ms then return has_more and '{AGAIN}' or 'tenant', wait_ms end
  wait_ms, has_more = free('{ALL_TENANTS}', max_all_bytes, expiry, tonumber(ttl))
  if wait_ms then return has_more and '{AGAIN}' or 'all', wait_ms end
end
"""

_SWEEP = Script(
    COMMON
    + f"""
check_accounts('')
local is_behind = sweep()
return {{tonumber(redis.call('HGET', totals, '{ALL_TENANTS}') or 0), is_behind and 1 or 0}}
"""
)


async def swept_bytes(store: Store) -> int:
    """Takes what has expired out of the count. Returns the bytes that all journals take. Raises StoreUnavailable."""
    is_behind = True
    while is_behind:
        num_bytes, is_behind = await store.run(_SWEEP, room_keys(store), ())
    return int(num_bytes)
