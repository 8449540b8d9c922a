"""What Redis does for workers' leases: the Lua scripts of `registry`."""

from services.cluster.redis_store import Script

# KEYS: the worker's record, the set of ids, the channel. ARGV: order, record, TTL in ms, id, state, proof.
# Answers 1, or 0 if a newer incarnation holds the record. A record that cannot be right (wrong type, no order, an
# endless TTL) protects nothing and is replaced.
RENEW = Script("""
local kind = redis.call('TYPE', KEYS[1]).ok
local order, state = false, false
if kind == 'hash' then
  order, state = unpack(redis.call('HMGET', KEYS[1], 'order', 'state'))
  local ttl = redis.call('PTTL', KEYS[1])
  local is_sound = order and #order == 53 and string.find(order, '^%d+:%x+$') and ttl > 0 and ttl <= 20 * ARGV[3]
  if is_sound and order > ARGV[1] then return 0 end
elseif kind ~= 'none' then
  redis.call('DEL', KEYS[1])
end
redis.call('HSET', KEYS[1], 'order', ARGV[1], 'record', ARGV[2], 'state', ARGV[5], 'proof', ARGV[6])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
local set_kind = redis.call('TYPE', KEYS[2]).ok
if set_kind ~= 'set' and set_kind ~= 'none' then redis.call('DEL', KEYS[2]) end
redis.call('SADD', KEYS[2], ARGV[4])
if order ~= ARGV[1] or state ~= ARGV[5] then redis.call('PUBLISH', KEYS[3], ARGV[4]) end
return 1
""")

# KEYS: the worker's record, the set of ids, the channel. ARGV: order, id. Answers 1 if the record was ours.
RELEASE = Script("""
if redis.call('TYPE', KEYS[1]).ok ~= 'hash' then return 0 end
if redis.call('HGET', KEYS[1], 'order') ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
if redis.call('TYPE', KEYS[2]).ok == 'set' then redis.call('SREM', KEYS[2], ARGV[2]) end
redis.call('PUBLISH', KEYS[3], ARGV[2])
return 1
""")

# KEYS: the set of ids, the epoch. ARGV: an epoch to set if Redis has none, prefix of records, most ids, most bytes of
# a record and of a proof. Answers the epoch, how many values were not what they should be, and per worker: id, order,
# record, proof. What is not a set, or a set that is too large, is thrown away under a new epoch, so that the
# leases fill it again before anybody is missed.
LIST = Script("""
local epoch = redis.call('TYPE', KEYS[2]).ok == 'string' and redis.call('GETRANGE', KEYS[2], 0, 64)
if not epoch or #epoch ~= 32 or string.find(epoch, '%X') then
  epoch = ARGV[1]
  redis.call('SET', KEYS[2], epoch)
end
local set_kind = redis.call('TYPE', KEYS[1]).ok
if set_kind == 'none' then return {epoch, 0} end
if set_kind ~= 'set' or redis.call('SCARD', KEYS[1]) > tonumber(ARGV[3]) then
  redis.call('DEL', KEYS[1])
  redis.call('SET', KEYS[2], ARGV[1])
  return {ARGV[1], 1}
end
local answer, rejected = {epoch, 0}, 0
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local key = ARGV[2] .. id
  local kind = redis.call('TYPE', key).ok
  if kind == 'none' then
    redis.call('SREM', KEYS[1], id)
  elseif kind ~= 'hash' or redis.call('HSTRLEN', key, 'record') > tonumber(ARGV[4])
      or redis.call('HSTRLEN', key, 'order') ~= 53 or redis.call('HEXISTS', key, 'record') == 0 then
    rejected = rejected + 1
  else
    local order, record = unpack(redis.call('HMGET', key, 'order', 'record'))
    table.insert(answer, id)
    table.insert(answer, order)
    table.insert(answer, record)
    table.insert(answer, redis.call('PTTL', key))
    local is_short = redis.call('HSTRLEN', key, 'proof') <= tonumber(ARGV[5])
    table.insert(answer, is_short and redis.call('HGET', key, 'proof') or '')
  end
end
answer[2] = rejected
return answer
""")
