"""What Redis does for stored answers: the Lua scripts of `answers`."""

from services.cluster.answer_records import COMMON, INLINE_BYTES, MAX_ACTIVE, MAX_READ_EVENTS, MAX_SEEN, AnswerReply
from services.cluster.files import OVERHEAD_BYTES, SWEEP, UPLOAD_TTL_S
from services.cluster.pending_work import WAITING
from services.cluster.redis_store import Script

# ARGV: token, tenant, bounds, name, number of the piece, piece. Stores a piece of a value that will be part of the
# answer of that name. It does not evict that answer, and counts on the room that the answer's present values take.
STAGE = Script(
    COMMON
    + f"""
local token, tenant, max_tenant_bytes, max_all_bytes, name, number, piece = unpack(ARGV)
local num_pieces = redis.call('LLEN', key_of(token))
if num_pieces > tonumber(number) then return '{AnswerReply.DONE}' end
if num_pieces < tonumber(number) then return '{AnswerReply.LOST}' end
local score, left_ms = unlist(name, tenant)
local held = score and counted_bytes(name) or 0
local lacks = make_room(tenant, #piece, number == '0' and 1 or 0, max_tenant_bytes + held, max_all_bytes + held)
if score then enlist(name, tenant, score, left_ms) end
if lacks then return lacks end
redis.call('RPUSH', key_of(token), piece)
redis.call('PEXPIRE', key_of(token), {round(UPLOAD_TTL_S * 1000)})
count(token, tenant, #piece, now_ms + {round(UPLOAD_TTL_S * 1000)})
return '{AnswerReply.DONE}'
"""
)

# ARGV: tokens. Drops pieces that have not become part of an answer.
UNSTAGE = Script(
    COMMON
    + """
for _, token in ipairs(ARGV) do
  if redis.call('HEXISTS', sizes, token) == 1 then
    redis.call('UNLINK', key_of(token))
    forget(token)
  end
end
"""
)

# ARGV: token, number of the piece. Returns a piece of a value, or nil.
PIECE = Script(COMMON + "return redis.call('LINDEX', key_of(ARGV[1]), ARGV[2])")

# ARGV: name, tenant, id, life in s, bounds, document, input, metadata of the order or nothing (digest, key, body,
# headers, whether events are kept, how many items of the input are a conversation's, regions). Answers a reply.
PUT = Script(
    COMMON
    + f"""
local name, tenant, id, life_s, max_tenant_bytes, max_all_bytes, document, input = unpack(ARGV)
local digest, owner_key, body, headers, has_events, num_earlier, regions = unpack(ARGV, 9)
local key = key_of(name)
local held = redis.call('HGET', key, 'digest')
if held and (digest or held ~= '') then
  return held == digest and '{AnswerReply.HELD}' or '{AnswerReply.FENCED}'
end
local num_bytes = size_of(document) + size_of(input) + size_of(body) + #(headers or '')
local staged_bytes = 0
for _, value in ipairs({{document, input, body}}) do
  local token, num_pieces, piece_bytes = parts_of(value)
  if token and redis.call('LLEN', key_of(token)) ~= num_pieces then return '{AnswerReply.LOST}' end
  if token then staged_bytes = staged_bytes + piece_bytes + {OVERHEAD_BYTES} end
end
if digest and num_running(tenant) >= {MAX_ACTIVE} then return '{AnswerReply.ACTIVE}' end
local score, left_ms = unlist(name, tenant)
local freed = held and counted_bytes(name) or 0
local lacks = make_room(tenant, num_bytes - staged_bytes, 1, max_tenant_bytes + freed, max_all_bytes + freed)
if lacks then
  if score then enlist(name, tenant, score, left_ms) end
  return lacks
end
if held then drop(name) end
redis.call('HSET', key, 'tenant', tenant, 'id', id, 'document', document, 'input', input, 'digest', digest or '',
           'state', digest and 'queued' or 'over', 'created', now_s, 'changed', stamp())
redis.call('EXPIREAT', key, now_s + life_s)
for _, value in ipairs({{document, input, body}}) do adopt(name, value) end
count(name, tenant, num_bytes, (now_s + life_s) * 1000)
if digest then
  redis.call('HSET', key, 'key', owner_key, 'body', body, 'headers', headers, 'has_events', has_events,
             'num_earlier', num_earlier, 'regions', regions, 'epoch', 0, 'tries', 0)
  redis.call('ZADD', running_prefix .. tenant, stamp(), name)
  redis.call('EXPIRE', running_prefix .. tenant, 2 * life_s)
  wait_until(name, tenant, regions, now_ms)
else
  enlist(name, tenant, stamp(), 2000 * life_s)
end
return '{AnswerReply.DONE}'
"""
)

# ARGV: name. Answers document, input, state, digest, whether events are kept, the stamp of the last change.
FIND = Script(
    COMMON
    + "return redis.call('HMGET', key_of(ARGV[1]), 'document', 'input', 'state', 'digest', 'has_events', 'changed')"
)

# ARGV: tenant, where to begin (nothing, a name, or `(` and a score), whether the newest are first, start of the ids,
# most documents, most bytes. Answers documents of answers that are over, and the score of the last at which it looked;
# none: that was the end.
PAGE = Script(
    COMMON
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
    num_bytes = num_bytes + size_of(document)
    if #documents == tonumber(most) or num_bytes > tonumber(max_bytes) then return {{documents, seen[index + 1]}} end
  end
end
return {{documents, #seen == 2 * {MAX_SEEN} and seen[#seen] or ''}}
"""
)

# ARGV: name, stamp of what was read, bounds, life in s or nothing to keep it, document, input or nothing.
CHANGE = Script(
    COMMON
    + f"""
local name, known, max_tenant_bytes, max_all_bytes, life_s, document, input = unpack(ARGV)
local key = key_of(name)
local tenant, state, changed = unpack(redis.call('HMGET', key, 'tenant', 'state', 'changed'))
if not state then return '{AnswerReply.GONE}' end
if state ~= 'over' or (changed or '') ~= known then return '{AnswerReply.FENCED}' end
local num_more, staged_bytes, values = 0, 0, {{document=document, input=input}}
for field, value in pairs(values) do
  local token, num_pieces, piece_bytes = parts_of(value)
  if token and redis.call('LLEN', key_of(token)) ~= num_pieces then return '{AnswerReply.LOST}' end
  if token then staged_bytes = staged_bytes + counted_bytes(token) end
  num_more = num_more + size_of(value) - size_of(redis.call('HGET', key, field))
end
return grow(name, tenant, num_more, {{max_tenant_bytes + staged_bytes, max_all_bytes + staged_bytes}}, function()
  if life_s ~= '' then expire_all(name, now_s + life_s) end
  for field, value in pairs(values) do
    abandon(name, redis.call('HGET', key, field))
    redis.call('HSET', key, field, value)
    adopt(name, value)
  end
  redis.call('HSET', key, 'changed', stamp())
end)
"""
)

# ARGV: name, bounds, items of JSON with commas between them, life in s, most bytes of document and input, a new token.
# Adds them to the input, which is a list. HELD: its end has exactly these already, since an earlier call has timed out.
APPEND = Script(
    COMMON
    + f"""
local name, max_tenant_bytes, max_all_bytes, items, life_s, most, new_token = unpack(ARGV)
local key = key_of(name)
local tenant, state, input, document = unpack(redis.call('HMGET', key, 'tenant', 'state', 'input', 'document'))
if not state then return '{AnswerReply.GONE}' end
local token, num_pieces, num_bytes, rest = parts_of(input)
local last = token and redis.call('LINDEX', key_of(token), -1) or ''
if string.find(rest, items, 1, true) or string.find(last, items, 1, true) then return '{AnswerReply.HELD}' end
local added = (input == '[]' and '' or ',') .. items .. ']'
local joined = string.sub(rest, 1, -2) .. added
local piece = #joined > {INLINE_BYTES} and string.sub(rest, 1, -2) or nil
if piece then
  joined = reference(token or new_token, num_pieces + 1, num_bytes + #piece, added)
elseif token then
  joined = reference(token, num_pieces, num_bytes, joined)
end
if size_of(joined) + size_of(document) > tonumber(most) then return '{AnswerReply.LONG}' end
return grow(name, tenant, size_of(joined) - size_of(input), {{max_tenant_bytes, max_all_bytes}}, function()
  if piece then redis.call('RPUSH', key_of(token or new_token), piece) end
  if piece and not token then
    redis.call('HSET', key, 'blobs', (redis.call('HGET', key, 'blobs') or '') .. new_token)
  end
  redis.call('HSET', key, 'input', joined, 'changed', stamp())
  expire_all(name, now_s + life_s)
end)
"""
)

# ARGV: name, first event, most events, most bytes. Returns the state, or nothing, and events: at least one if any are
# there.
EVENTS = Script(
    COMMON
    + f"""
local name, first, most, max_bytes = unpack(ARGV)
local events, num_bytes = {{}}, 0
local last = first + math.min(most, {MAX_READ_EVENTS}) - 1
for _, event in ipairs(redis.call('LRANGE', events_key(name), first, whole(last))) do
  num_bytes = num_bytes + #event
  if #events > 0 and num_bytes > tonumber(max_bytes) then break end
  table.insert(events, event)
end
return {{redis.call('HGET', key_of(name), 'state'), events}}
"""
)

# ARGV: name. Answers 1 if it existed.
DELETE = Script(
    COMMON
    + """
local existed = redis.call('EXISTS', key_of(ARGV[1]))
drop(ARGV[1])
return existed
"""
)

# ARGV: name, document, life in s. Ends an answer that is not over, whichever gateway has it.
CANCEL = Script(
    COMMON
    + f"""
local name, document, life_s = unpack(ARGV)
local state = redis.call('HGET', key_of(name), 'state')
if not state then return '{AnswerReply.GONE}' end
if state == 'over' then return '{AnswerReply.FENCED}' end
if not adopt(name, document) then return '{AnswerReply.LOST}' end
finish(name, document, tonumber(life_s))
return '{AnswerReply.DONE}'
"""
)

FIND_WAITING = Script(COMMON + WAITING)

# ARGV: owner, lease in ms, queue, tenant. Returns name, fields, number of events and last event of what was claimed.
CLAIM = Script(
    COMMON
    + """
local owner, lease_ms, queue, tenant = unpack(ARGV)
local name = oldest_of(waiting_prefix .. queue, tenant, file_prefix)
if not name then return false end
local key = key_of(name)
redis.call('HINCRBY', key, 'epoch', 1)
redis.call('HINCRBY', key, 'tries', 1)
redis.call('HSET', key, 'owner', owner, 'state', 'in_progress')
wait_until(name, tenant, redis.call('HGET', key, 'regions'), now_ms + lease_ms)
local num_events = redis.call('LLEN', events_key(name))
return {name, redis.call('HGETALL', key), num_events, redis.call('LINDEX', events_key(name), -1) or ''}
"""
)

# ARGV: name, claim, ms until another gateway may claim it, whether it is given up.
RENEW = Script(
    COMMON
    + f"""
local name, claim, wait_ms, is_given_up = unpack(ARGV)
local reply = fence(name, claim)
if reply ~= '{AnswerReply.DONE}' then return reply end
local tenant, regions = unpack(redis.call('HMGET', key_of(name), 'tenant', 'regions'))
wait_until(name, tenant, regions, now_ms + wait_ms)
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
    COMMON
    + f"""
local name, claim, max_tenant_bytes, max_all_bytes, document, life_s, first = unpack(ARGV, 1, 7)
local reply = fence(name, claim)
if reply ~= '{AnswerReply.DONE}' then return reply end
local key = key_of(name)
local tenant = redis.call('HGET', key, 'tenant')
local num_bytes, staged_bytes, next = 0, 0, 8 + redis.call('LLEN', events_key(name)) - first
if next < 8 then return '{AnswerReply.GONE}' end
local function add(value)
  local token, num_pieces, piece_bytes = parts_of(value)
  if token and redis.call('LLEN', key_of(token)) ~= num_pieces then return false end
  if token then staged_bytes = staged_bytes + counted_bytes(token) end
  num_bytes = num_bytes + size_of(value)
  return true
end
for index = next, #ARGV do
  if not add(ARGV[index]) then return '{AnswerReply.LOST}' end
end
local event_bytes = num_bytes
if not add(document) then return '{AnswerReply.LOST}' end
if document ~= '' then
  num_bytes = num_bytes - size_of(redis.call('HGET', key, 'document')) - size_of(redis.call('HGET', key, 'body'))
end
if num_bytes > staged_bytes then
  local lacks = make_room(tenant, num_bytes - staged_bytes, 0, max_tenant_bytes, max_all_bytes)
  if lacks then return lacks end
end
for index = next, #ARGV do
  redis.call('RPUSH', events_key(name), ARGV[index])
  adopt(name, ARGV[index])
end
redis.call('PEXPIRE', events_key(name), redis.call('PTTL', key))
if event_bytes > 0 then count(name, tenant, event_bytes, now_ms + redis.call('PTTL', key)) end
if document ~= '' then
  adopt(name, document)
  finish(name, document, tonumber(life_s))
end
return reply
"""
)

SWEEP_ALL = Script(COMMON + SWEEP)
