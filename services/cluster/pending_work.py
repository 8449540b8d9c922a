"""Work in Redis that waits for a gateway to claim it: queues by region and tenant, and the fair choice among them.

A piece of work waits in the queue of each region that it is pinned to, or in ANYWHERE. A queue orders the tenants by
the time at which their oldest piece became claimable. Each tenant has a list in each queue. So a gateway finds the
oldest piece that it may claim without reading the pieces of other regions, or more than one piece of each tenant.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TypeVar

ANYWHERE = "*"
"""Queue of the work that is not pinned to regions. No region has this name."""
PAGE_TENANTS = 256
"""Most tenants of each queue that one script returns."""
MAX_BUSY = 64
"""Most busy tenants that are tried when no other tenant has work."""
MAX_LOST = 64
"""Most pieces without a record that one claim removes."""
QUEUE_TTL_MS = 60 * 86_400_000

T = TypeVar("T")

# Expects `waiting_prefix`, `now_ms` and `whole`. `wait_until` sets the time in unix ms from which a piece may be
# claimed, and `end_wait` removes the piece. `oldest_of` returns a tenant's oldest piece that is claimable now, or nil.
QUEUES = f"""
local function queues_of(regions)
  local queues = {{}}
  for region in string.gmatch(regions or '', '[^,]+') do table.insert(queues, waiting_prefix .. region) end
  if #queues == 0 then queues[1] = waiting_prefix .. '{ANYWHERE}' end
  return queues
end

local function update_queue(queue, tenant)
  local list = queue .. '/' .. tenant
  local oldest = redis.call('ZRANGE', list, 0, 0, 'WITHSCORES')
  if not oldest[1] then
    redis.call('ZREM', queue, tenant)
    return
  end
  redis.call('ZADD', queue, oldest[2], tenant)
  for _, key in ipairs({{queue, list}}) do redis.call('PEXPIRE', key, {QUEUE_TTL_MS}) end
end

local function wait_until(name, tenant, regions, at_ms)
  for _, queue in ipairs(queues_of(regions)) do
    redis.call('ZADD', queue .. '/' .. tenant, whole(at_ms), name)
    update_queue(queue, tenant)
  end
end

local function end_wait(name, tenant, regions)
  for _, queue in ipairs(queues_of(regions)) do
    redis.call('ZREM', queue .. '/' .. tenant, name)
    update_queue(queue, tenant)
  end
end

local function oldest_of(queue, tenant, record_prefix)
  local list = queue .. '/' .. tenant
  for _ = 1, {MAX_LOST} do
    local oldest = redis.call('ZRANGE', list, 0, 0, 'WITHSCORES')
    if not oldest[1] or tonumber(oldest[2]) > now_ms then break end
    if redis.call('HGET', record_prefix .. oldest[1], 'tenant') == tenant then return oldest[1] end
    redis.call('ZREM', list, oldest[1])
  end
  update_queue(queue, tenant)
end
"""

# ARGV: region or nothing, number of tenants to skip. Returns for each queue of the region the tenants with claimable
# work and the time since when it is, the oldest first.
WAITING = f"""
local pages = {{}}
for _, queue in ipairs(ARGV[1] == '' and {{'{ANYWHERE}'}} or {{'{ANYWHERE}', ARGV[1]}}) do
  table.insert(pages, redis.call('ZRANGEBYSCORE', waiting_prefix .. queue, '-inf', whole(now_ms), 'WITHSCORES',
                                 'LIMIT', ARGV[2], {PAGE_TENANTS}))
end
return pages
"""


async def claim_oldest(
    waiting: Callable[[int], Awaitable[Sequence[Sequence[bytes]]]],
    claim: Callable[[str, str], Awaitable[T | None]],
    *,
    region: str,
    busy_tenants: Collection[str],
    full_tenants: Collection[str],
) -> T | None:
    """Claims the oldest piece of work: of `busy_tenants` last, of `full_tenants` none. Returns None without any.

    `waiting` runs WAITING for `region` with a number of tenants to skip. `claim` claims the oldest piece of a tenant in
    the queue of a region.
    """
    queues, busy, full = (ANYWHERE, region), set(busy_tenants), set(full_tenants)
    busy_entries: list[tuple[str, str]] = []
    num_skipped = 0
    while True:
        pages = await waiting(num_skipped)
        entries = [
            (float(since_ms), tenant.decode(), queue)
            for queue, page in zip(queues, pages, strict=False)
            for tenant, since_ms in zip(page[::2], page[1::2], strict=True)
        ]
        for _, tenant, queue in sorted(entries):
            if tenant in busy and tenant not in full and len(busy_entries) < MAX_BUSY:
                busy_entries.append((queue, tenant))
            elif tenant not in busy and tenant not in full and (claimed := await claim(queue, tenant)) is not None:
                return claimed
        if not any(len(page) == 2 * PAGE_TENANTS for page in pages):
            break
        num_skipped += PAGE_TENANTS
    for queue, tenant in busy_entries:
        if (claimed := await claim(queue, tenant)) is not None:
            return claimed
    return None
