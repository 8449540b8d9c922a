"""What Redis does for the prefix index: its Lua scripts. `prefix_index` says what they are for."""

from services.cluster.change_log import LOG
from services.cluster.redis_store import Script

# KEYS of the writers: head, set of keys, the change log. ARGV begins with: order, TTL in ms, id. They answer 1, or 0 if
# a newer life has published, or 2 if Redis does not hold what the publisher believes, so that it has to fill it again.
# As with the lease, a head that cannot be right protects nothing.
_WRITING = (
    LOG
    + """
local function is_newer_there()
  local order = redis.pcall('HGET', KEYS[1], 'order')
  if type(order) ~= 'string' or #order ~= 53 or not string.find(order, '^%d+:%x+$') then return false end
  local ttl = redis.call('PTTL', KEYS[1])
  return order > ARGV[1] and ttl > 0 and ttl <= 20 * ARGV[2]
end
local function split(blob, from, to)
  local keys = {}
  for at = from, to, 16 do keys[#keys + 1] = string.sub(blob, at, at + 15) end
  return keys
end
local function keep(has_changed)
  local log = open_log(3)
  renew_lease(log, ARGV[3], ARGV[2])
  if has_changed or not redis.call('ZSCORE', log.changes, ARGV[3]) then note_change(log, ARGV[3]) end
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  redis.call('PEXPIRE', KEYS[2], ARGV[2])
end
"""
)

# ARGV further: number of the publication, keys in the set after this, is first, is last, keys.
FILL = Script(
    _WRITING
    + """
if is_newer_there() then return 0 end
if ARGV[6] == '1' then
  redis.call('UNLINK', KEYS[1], KEYS[2])
  redis.call('HSET', KEYS[1], 'order', ARGV[1], 'filling', ARGV[4])
else
  local fields = redis.pcall('HMGET', KEYS[1], 'order', 'filling')
  if fields.err or fields[1] ~= ARGV[1] or fields[2] ~= ARGV[4] then return 2 end
end
if #ARGV[8] > 0 then
  local added = redis.pcall('SADD', KEYS[2], unpack(split(ARGV[8], 1, #ARGV[8])))
  if type(added) ~= 'number' or redis.call('SCARD', KEYS[2]) ~= tonumber(ARGV[5]) then return 2 end
end
if ARGV[7] == '1' then
  redis.call('HDEL', KEYS[1], 'filling')
  redis.call('HSET', KEYS[1], 'base', ARGV[4], 'seq', ARGV[4])
end
keep(ARGV[6] == '1' or ARGV[7] == '1')
return 1
"""
)

# ARGV further: number before and after, keys in the set after it, most changes that are kept, the change. Without a
# change the numbers are the same. A change that Redis has already, since only its answer was lost, is not made twice.
CHANGE = Script(
    _WRITING
    + """
if is_newer_there() then return 0 end
local fields = redis.pcall('HMGET', KEYS[1], 'order', 'seq', 'filling')
if fields.err or fields[1] ~= ARGV[1] or fields[3] or redis.call('HLEN', KEYS[1]) > 3 + ARGV[7] then return 2 end
local kind = redis.call('TYPE', KEYS[2]).ok
if kind ~= 'set' and kind ~= 'none' then return 2 end
if fields[2] == ARGV[4] and ARGV[4] ~= ARGV[5] then
  local change = ARGV[8]
  local b1, b2, b3, b4 = string.byte(change, 1, 4)
  local added_end = 4 + 16 * (((b1 * 256 + b2) * 256 + b3) * 256 + b4)
  if added_end > 4 then redis.call('SADD', KEYS[2], unpack(split(change, 5, added_end))) end
  if added_end < #change then redis.call('SREM', KEYS[2], unpack(split(change, added_end + 1, #change))) end
  redis.call('HSET', KEYS[1], 'seq', ARGV[5], ARGV[5], change)
  redis.call('HDEL', KEYS[1], string.format('%d', ARGV[5] - ARGV[7]))
elseif fields[2] ~= ARGV[5] then
  return 2
end
if redis.call('SCARD', KEYS[2]) ~= tonumber(ARGV[6]) then return 2 end
keep(ARGV[4] ~= ARGV[5])
return 1
"""
)

# KEYS: those of the writers. ARGV: order, id.
DELETE = Script(
    LOG
    + """
if redis.pcall('HGET', KEYS[1], 'order') ~= ARGV[1] then return 0 end
redis.call('UNLINK', KEYS[1], KEYS[2])
leave(open_log(3), ARGV[2])
return 1
"""
)

# Whether fields of a head are sound.
_READING = """
local function is_order(text) return text and #text == 53 and string.find(text, '^%d+:%x+$') end
local function is_number(text) return text and #text <= 15 and string.find(text, '^%d+$') end
"""

# KEYS: the change log. ARGV: start of heads, most changes, most bytes of a change, most bytes of all of them, most keys
# of a worker; then per worker: id, and the order and number of the reader's position, or ''. Answers how many values
# were rejected, whether this is all, and per worker that has published: id, order, then '' if it is filling its set;
# base, '' if the changes do not lead there; base, number and changes.
FOLLOW = Script(
    _READING
    + """
local max_changes, max_bytes, left = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local rejected, answer = 0, {0, 1}
local function look(id, known_order, known_number)
  local head = ARGV[1] .. id
  local fields = redis.pcall('HMGET', head, 'order', 'base', 'seq', 'filling')
  if fields.err then return nil end
  local order, base, seq, filling = unpack(fields)
  if not is_order(order) then return nil end
  if filling then return {id, order, '', ''} end
  if not is_number(base) or not is_number(seq) then return nil end
  local num_keys = redis.pcall('SCARD', head .. ':keys')
  if type(num_keys) ~= 'number' or num_keys > tonumber(ARGV[5]) then return nil end
  if known_order ~= order then return {id, order, base, ''} end
  local from, to = tonumber(known_number), tonumber(seq)
  if from > to or to - from > max_changes then return {id, order, base, ''} end
  local entry = {id, order, base, seq}
  for number = from + 1, to do
    local field = string.format('%d', number)
    local size = redis.call('HSTRLEN', head, field)
    if size < 4 or size > max_bytes then return {id, order, base, ''} end
    if size > left then
      entry[4], answer[2] = string.format('%d', number - 1), 0
      break
    end
    left = left - size
    entry[#entry + 1] = redis.call('HGET', head, field)
  end
  return entry
end
for at = 6, #ARGV, 3 do
  if redis.call('EXISTS', ARGV[1] .. ARGV[at]) == 1 then
    local entry = look(ARGV[at], ARGV[at + 1], ARGV[at + 2])
    if entry then answer[#answer + 1] = entry else rejected = rejected + 1 end
  end
end
answer[1] = rejected
return answer
"""
)

# KEYS: head, set of keys. ARGV: cursor, keys at once, most keys. Answers nothing if nothing can be read, else
# order, base, number, next cursor, how many members were rejected, keys.
READ = Script(
    _READING
    + """
local fields = redis.pcall('HMGET', KEYS[1], 'order', 'base', 'seq', 'filling')
if fields.err or fields[4] then return {} end
if not (is_order(fields[1]) and is_number(fields[2]) and is_number(fields[3])) then return {} end
local num_keys = redis.pcall('SCARD', KEYS[2])
if type(num_keys) ~= 'number' or num_keys > tonumber(ARGV[3]) then return {} end
local found = redis.call('SSCAN', KEYS[2], ARGV[1], 'COUNT', ARGV[2])
local keys, rejected = {}, 0
for _, key in ipairs(found[2]) do
  if #key == 16 then keys[#keys + 1] = key else rejected = rejected + 1 end
end
return {fields[1], fields[2], fields[3], found[1], rejected, table.concat(keys)}
"""
)

# KEYS: changes of the log, a name for sets that live as long as the script. ARGV: start of heads, then keys. Answers
# how many values were rejected, then id and number of pages of each worker that has any. 64 keys at once are counted
# with SINTERCARD, which needs no answer for each key and is ten times as fast; where one of them is missing, or the
# server is too old or too full for such sets, it is looked for.
LONGEST = Script("""
local kind = redis.call('TYPE', KEYS[1]).ok
if kind == 'none' then return {0} end
if kind ~= 'zset' then return {1} end
local blocks = {}
local function holds_all(set, from, to)
  local block = blocks[from]
  if not block then
    block = KEYS[2] .. from
    redis.call('DEL', block)
    redis.pcall('SADD', block, unpack(ARGV, from, to))
    blocks[from] = block
  end
  return redis.pcall('SINTERCARD', 2, block, set) == to - from + 1
end
local answer, rejected = {0}, 0
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  local set, at, is_running = ARGV[1] .. id .. ':keys', 2, #id <= 64
  if is_running then
    local is_first = redis.pcall('SISMEMBER', set, ARGV[2])
    is_running = is_first == 1
    if type(is_first) ~= 'number' then rejected = rejected + 1 end
  end
  while is_running and at <= #ARGV do
    local to = math.min(at + 63, #ARGV)
    if holds_all(set, at, to) then
      at = to + 1
    else
      for _, is_held in ipairs(redis.call('SMISMEMBER', set, unpack(ARGV, at, to))) do
        if is_held == 0 then
          is_running = false
          break
        end
        at = at + 1
      end
    end
  end
  if at > 2 then
    answer[#answer + 1] = id
    answer[#answer + 1] = at - 2
  end
end
for _, block in pairs(blocks) do redis.call('DEL', block) end
answer[1] = rejected
return answer
""")
