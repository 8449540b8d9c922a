"""The Lua scripts of `registry`: what Redis does for workers' leases."""

from services.cluster.change_log import LOG
from services.cluster.redis_store import Script

# KEYS: the worker's record, the channel, the log. ARGV: order, record, TTL in ms, id, state, proof, version, most
# workers. Answers 1, or 0 if a newer incarnation holds the record, or -n if the id is new and there are n workers, the
# most. A record that cannot be right (wrong type, no order, an endless TTL) protects nothing and is replaced.
RENEW = Script(
    LOG
    + """
local log = open_log(3)
local kind = redis.call('TYPE', KEYS[1]).ok
local order, state, version = false, false, false
if kind == 'hash' then
  order, state, version = unpack(redis.call('HMGET', KEYS[1], 'order', 'state', 'version'))
  local ttl = redis.call('PTTL', KEYS[1])
  local is_sound = order and #order == 53 and string.find(order, '^%d+:%x+$') and ttl > 0 and ttl <= 20 * ARGV[3]
  if is_sound and order > ARGV[1] then return 0 end
elseif kind ~= 'none' then
  redis.call('DEL', KEYS[1])
end
local is_listed = redis.call('ZSCORE', log.changes, ARGV[4])
if not is_listed then
  expire(log, 64)
  local size = redis.call('ZCARD', log.changes)
  if size >= tonumber(ARGV[8]) then return -size end
end
local fields = {'order', ARGV[1], 'record', ARGV[2], 'state', ARGV[5], 'proof', ARGV[6], 'version', ARGV[7]}
redis.call('HSET', KEYS[1], unpack(fields))
redis.call('PEXPIRE', KEYS[1], ARGV[3])
renew_lease(log, ARGV[4], ARGV[3])
if not is_listed or order ~= ARGV[1] or version ~= ARGV[7] then note_change(log, ARGV[4]) end
if order ~= ARGV[1] or state ~= ARGV[5] then redis.call('PUBLISH', KEYS[2], ARGV[4]) end
return 1
"""
)

# KEYS: the worker's record, the channel, the log. ARGV: order, id. Answers 1 if the record was ours.
RELEASE = Script(
    LOG
    + """
if redis.call('TYPE', KEYS[1]).ok ~= 'hash' then return 0 end
if redis.call('HGET', KEYS[1], 'order') ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
leave(open_log(3), ARGV[2])
redis.call('PUBLISH', KEYS[2], ARGV[2])
return 1
"""
)

# KEYS: the epoch, the log. ARGV: an epoch to set if Redis has none, prefix of records, the reader's number, most
# members, most bytes of a record and of a proof, then ids whose leases are asked for. Answers the epoch, how many
# values were rejected, when the leases that were asked for end (ms from now; '' without a lease), the log's answer, and
# id, order, record and proof of each worker in it. A log whose keys contradict each other is deleted under a new
# epoch, so that the leases fill it again before any worker is missed.
LIST = Script(
    LOG
    + """
local log = open_log(2)
local epoch = redis.call('TYPE', KEYS[1]).ok == 'string' and redis.call('GETRANGE', KEYS[1], 0, 64)
if not epoch or #epoch ~= 32 or string.find(epoch, '%X') then
  epoch = ARGV[1]
  redis.call('SET', KEYS[1], epoch)
end
local left_ms = {}
for at = 7, #ARGV do
  local ends_ms = redis.call('ZSCORE', log.leases, ARGV[at])
  left_ms[#left_ms + 1] = ends_ms and string.format('%.0f', ends_ms - time_ms()) or ''
end
local seen = look(log, tonumber(ARGV[3]), tonumber(ARGV[4]))
if not seen then
  redis.call('SET', KEYS[1], ARGV[1])
  return {ARGV[1], 1, left_ms, {1, 1, '0', 0, {}, {}}}
end
local answer, rejected = {epoch, 0, left_ms, seen}, 0
for _, id in ipairs(seen[5]) do
  local key = ARGV[2] .. id
  local kind = redis.call('TYPE', key).ok
  if kind == 'hash' and redis.call('HSTRLEN', key, 'record') <= tonumber(ARGV[5])
      and redis.call('HSTRLEN', key, 'proof') <= tonumber(ARGV[6]) and redis.call('HSTRLEN', key, 'order') == 53 then
    local order, record, proof = unpack(redis.call('HMGET', key, 'order', 'record', 'proof'))
    answer[#answer + 1] = {id, order, record or '', proof or ''}
  elseif kind ~= 'none' then
    rejected = rejected + 1
  end
end
answer[2] = rejected
return answer
"""
)
