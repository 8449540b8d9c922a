"""A change log in Redis: which members hold a lease, and which of them have changed since a reader last looked.

A look costs Redis O(log n) plus the changes, whatever the number of members. Renewing a lease is not a change. A lease
that expires is: the next look of any reader removes its member.

Numbers of changes grow with the time of Redis, so a server that restarts from older data does not repeat one. A reader
also compares how many members it knows with how many there are, and reads all of them again if that differs. After a
restart from older data, this finds every difference as soon as the leases in it have been renewed or have expired.
"""

from collections.abc import Sequence
from typing import TypeAlias

from services.cluster.redis_store import Script

MAX_CHANGES = 128
"""Most members in one answer. Reading 128 worker records takes about 1 ms of Redis' time."""
MAX_GONE = 1024
"""Most members that left whose ids are kept. A reader that misses more of them reads everything again."""
MAX_NUMBER = 2**53 - 1
"""Greatest number of a change that Lua represents exactly."""

Answer: TypeAlias = tuple[int, int, int, int, Sequence[bytes], Sequence[bytes]]
"""Whether the listing starts from the beginning, whether it is complete, the number that it reaches, how many members
there are, the ids that changed, and the ids that left."""

# Scripts that use the log begin with this text. `log` holds the three keys of `Keys.log_of`. What is not a sorted set
# under one of them is deleted.
LOG = f"""
local function open_log(first)
  local log = {{leases = KEYS[first], changes = KEYS[first + 1], gone = KEYS[first + 2]}}
  for _, key in pairs(log) do
    local kind = redis.call('TYPE', key).ok
    if kind ~= 'zset' and kind ~= 'none' then redis.call('DEL', key) end
  end
  return log
end
local function time_ms()
  local time = redis.call('TIME')
  return 1000 * time[1] + math.floor(time[2] / 1000)
end
local function top(key)
  return tonumber(redis.call('ZREVRANGE', key, 0, 0, 'WITHSCORES')[2] or 0)
end
local function last_number(log)
  return math.max(top(log.changes), top(log.gone))
end
local function next_number(log)
  return string.format('%.0f', math.max(1000 * time_ms(), last_number(log) + 1))
end
local function renew_lease(log, id, ttl_ms)
  redis.call('ZADD', log.leases, string.format('%.0f', time_ms() + ttl_ms), id)
end
local function note_change(log, id)
  redis.call('ZADD', log.changes, next_number(log), id)
  redis.call('ZREM', log.gone, id)
end
local function leave(log, id)
  redis.call('ZREM', log.leases, id)
  local number = next_number(log)  -- before ZREM, which may remove the last number
  if redis.call('ZREM', log.changes, id) == 0 then return end
  redis.call('ZADD', log.gone, number, id)
  redis.call('ZREMRANGEBYRANK', log.gone, 0, -{MAX_GONE + 1})
end
local function expire(log, most)
  local expired = redis.call('ZRANGEBYSCORE', log.leases, '-inf', string.format('%.0f', time_ms()), 'LIMIT', 0, most)
  for _, id in ipairs(expired) do leave(log, id) end
  return #expired < most
end
local function look(log, since, most)
  local is_all = expire(log, most)
  local size, upto = redis.call('ZCARD', log.changes), last_number(log)
  if size ~= redis.call('ZCARD', log.leases) or upto > {MAX_NUMBER} then
    redis.call('DEL', log.leases, log.changes, log.gone)
    return nil
  end
  if since > upto then since = 0 end
  local from = string.format('(%.0f', since)
  local rows = redis.call('ZRANGEBYSCORE', log.changes, from, '+inf', 'WITHSCORES', 'LIMIT', 0, most)
  local changed = {{}}
  for at = 1, #rows, 2 do changed[#changed + 1] = rows[at] end
  if #changed == most then upto, is_all = tonumber(rows[#rows]), false end
  local gone = redis.call('ZRANGEBYSCORE', log.gone, from, string.format('%.0f', upto))
  return {{since == 0 and 1 or 0, is_all and 1 or 0, string.format('%.0f', upto), size, changed, gone}}
end
"""

# KEYS: the log. ARGV: the reader's number, most members. Answers as `Answer` says. A log whose keys contradict each
# other is deleted; its members write it again with their next renewal.
LOOK = Script(
    LOG
    + """
local log = open_log(1)
return look(log, tonumber(ARGV[1]), tonumber(ARGV[2])) or {1, 1, '0', 0, {}, {}}
"""
)


class LogReader:
    """The position of one reader, and the ids of the members that it knows."""

    def __init__(self) -> None:
        self.number = 0
        """Number of the last change that was read. 0: the next look lists all members."""
        self._ids: set[bytes] = set()
        self._before: set[bytes] = set()
        """Members that were known when the listing began and that it has not shown yet."""

    def restart(self) -> None:
        """Makes the next look list all members."""
        self.number = 0

    def read(self, answer: Answer) -> frozenset[bytes] | None:
        """Advances to the end of an answer. Returns the ids of members that left, or None if more is to be read."""
        is_whole, is_all, upto, size, changed, gone = answer
        if is_whole:
            self._before |= self._ids
            self._ids = set()
        self._before |= self._ids.intersection(gone)
        self._ids.difference_update(gone)
        self._ids.update(changed)
        self.number = int(upto)
        if not is_all:
            return None
        if len(self._ids) != size:
            self.restart()
            return None
        left = frozenset(self._before - self._ids)
        self._before = set()
        return left
