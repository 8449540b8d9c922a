"""What Redis does for tenants' limits: the Lua scripts of `rate_limits`, and the numbers that both know."""

from services.cluster.redis_store import Script

REQUESTS, TOKENS, CONCURRENCY = "requests_per_minute", "tokens_per_minute", "concurrency"

PERIOD_S = 60.0
CONCURRENCY_RETRY_S = 1.0
"""The wait that a client with too many requests at once is told: nobody knows when one of them ends."""
MAX_DEBT = 10
"""A level falls to at most this many times the limit below zero."""
SLACK = 1e-6

# What both scripts begin with. A level that is not a number counts as a full bucket.
_BUCKETS = f"""
local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now_ms = math.floor(now_us / 1000)
local names = {{'requests', 'tokens'}}

local function clean(key, kind)
  local held = redis.call('TYPE', key).ok
  if held ~= kind and held ~= 'none' then redis.call('DEL', key) end
end

local function expire_members(key, lasts_ms)
  clean(key, 'zset')
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now_ms)
  redis.call('ZREMRANGEBYSCORE', key, now_ms + lasts_ms + 1000, '+inf')
end

local function level_of(key, name, limit)
  if limit <= 0 then return 0 end
  local held = redis.call('HMGET', key, name, name .. '_at')
  local level, at = tonumber(held[1] or ''), tonumber(held[2] or '')
  if not level or not at or level ~= level or at ~= at then return limit end
  level = math.min(limit, level + math.max(0, now_us - at) * limit / {PERIOD_S * 1e6:.0f})
  return math.max(level, -{MAX_DEBT} * limit)
end

local function keep(key, limits, levels)
  local lasts_ms = 0
  for index, name in ipairs(names) do
    local limit, level = limits[index], levels[index]
    if limit > 0 then
      level = math.max(math.min(level, limit), -{MAX_DEBT} * limit)
      redis.call('HSET', key, name, string.format('%.17g', level), name .. '_at', string.format('%.0f', now_us))
      lasts_ms = math.max(lasts_ms, math.ceil((limit - level) / limit * {PERIOD_S * 1e3:.0f}) + 1000)
    end
  end
  if lasts_ms > 0 then redis.call('PEXPIRE', key, lasts_ms) end
end
"""

# KEYS: a tenant's buckets and its holds. ARGV: limits of requests, tokens and concurrency (-1: none), what is taken of
# the first two, name of the hold (empty: none), how long it lasts in ms. Answers the limit in the way (empty: none),
# after how many ms to try again, how many requests were taken, and both levels.
TAKE = Script(f"""{_BUCKETS}
local limits = {{tonumber(ARGV[1]), tonumber(ARGV[2])}}
local places, hold, lasts_ms = tonumber(ARGV[3]), ARGV[6], tonumber(ARGV[7])
local costs, levels = {{tonumber(ARGV[4]), tonumber(ARGV[5])}}, {{0, 0}}
local refused_by, wait_ms, taken = '', 0, 0

local function refuse(limit, ms)
  if ms > wait_ms then refused_by, wait_ms = limit, ms end
end

if hold ~= '' then
  expire_members(KEYS[2], lasts_ms)
  if redis.call('ZSCORE', KEYS[2], hold) then
    costs[1] = 0
  elseif redis.call('ZCARD', KEYS[2]) >= places then
    refuse('{CONCURRENCY}', {CONCURRENCY_RETRY_S * 1000:.0f})
  end
end
clean(KEYS[1], 'hash')
for index, name in ipairs(names) do
  local limit, cost = limits[index], costs[index]
  if limit >= 0 then
    levels[index] = level_of(KEYS[1], name, limit)
    local missing = cost - levels[index]
    if limit == 0 or cost > limit then
      refuse(name .. '_per_minute', {PERIOD_S * 1e3:.0f})
    elseif missing > {SLACK:.7f} then
      refuse(name .. '_per_minute', math.ceil(missing / limit * {PERIOD_S * 1e3:.0f}))
    end
  end
end
if refused_by == '' then
  taken = costs[1]
  levels = {{levels[1] - costs[1], levels[2] - costs[2]}}
  keep(KEYS[1], limits, levels)
  if hold ~= '' then
    redis.call('ZADD', KEYS[2], now_ms + lasts_ms, hold)
    redis.call('PEXPIRE', KEYS[2], lasts_ms + 1000)
  end
end
return {{refused_by, wait_ms, taken, string.format('%.17g', levels[1]), string.format('%.17g', levels[2])}}
""")

# KEYS: the set of gateways, start of the keys of buckets and of holds. ARGV: this gateway, how long it counts as
# present and how long a hold lasts, in ms (0: it leaves), then in msgpack rows of (tenant, limits of requests and
# tokens, what was taken of each, names that have ended, names that run). Answers the number of gateways.
SETTLE = Script(f"""{_BUCKETS}
local gateway_ms, hold_ms = tonumber(ARGV[2]), tonumber(ARGV[3])
expire_members(KEYS[1], hold_ms)
if gateway_ms > 0 then
  redis.call('ZADD', KEYS[1], now_ms + gateway_ms, ARGV[1])
  redis.call('PEXPIRE', KEYS[1], gateway_ms + 1000)
else
  redis.call('ZREM', KEYS[1], ARGV[1])
end
for _, row in ipairs(cmsgpack.unpack(ARGV[4])) do
  local tenant, requests, tokens, requests_cost, tokens_cost, ended, running = unpack(row)
  local bucket, holds = KEYS[2] .. tenant, KEYS[3] .. tenant
  if requests_cost ~= 0 or tokens_cost ~= 0 then
    clean(bucket, 'hash')
    local limits = {{requests, tokens}}
    keep(bucket, limits, {{level_of(bucket, names[1], requests) - requests_cost,
                           level_of(bucket, names[2], tokens) - tokens_cost}})
  end
  if #ended > 0 or #running > 0 then
    expire_members(holds, hold_ms)
    for _, name in ipairs(ended) do redis.call('ZREM', holds, name) end
    for _, name in ipairs(running) do redis.call('ZADD', holds, now_ms + hold_ms, name) end
    redis.call('PEXPIRE', holds, hold_ms + 1000)
  end
end
return redis.call('ZCARD', KEYS[1])
""")
