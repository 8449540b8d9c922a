"""Requests that killed their workers, shared among gateways for a while. Knows fingerprints only, no request.

The list that counts is the one in memory. Redis only carries it from gateway to gateway: what Redis has is taken
over once a second, and what it lacks is put back, so an emptied Redis has the list again within a second. Without Redis
each gateway goes by what it has seen itself.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import Mapping

from services.cluster.redis_store import Script, Store
from services.runtime.background_tasks import supervise
from services.runtime.clock import SYSTEM_CLOCK, Clock
from services.runtime.errors import StoreUnavailable

QUARANTINE_S = 600.0
MAX_FINGERPRINTS = 1024
"""Fingerprints that are kept; beyond it, the one that ends first is evicted."""
MAX_SENT = 256
"""Most fingerprints that one script takes."""
REFRESH_S = 1.0

logger = logging.getLogger(__name__)


class Quarantine:
    """Fingerprints, 64 hex digits each, that are refused until their time is over."""

    def __init__(
        self,
        store: Store,
        *,
        quarantine_s: float = QUARANTINE_S,
        refresh_s: float = REFRESH_S,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._store = store
        self._quarantine_s = quarantine_s
        self._refresh_s = refresh_s
        self._clock = clock
        self._ends_at_s: dict[str, float] = {}
        self._was_added = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __contains__(self, fingerprint: str) -> bool:
        ends_at_s = self._ends_at_s.get(fingerprint)
        return ends_at_s is not None and self._clock.monotonic() < ends_at_s

    def __len__(self) -> int:
        """Number of fingerprints that are kept, including those whose time is just over."""
        return len(self._ends_at_s)

    def count(self) -> int:
        """Returns how many fingerprints are refused now."""
        now_s = self._clock.monotonic()
        return sum(ends_at_s > now_s for ends_at_s in self._ends_at_s.values())

    def add(self, fingerprint: str) -> None:
        """Has the fingerprint refused here from now on, and by the other gateways within about a second."""
        self._ends_at_s[fingerprint] = self._clock.monotonic() + self._quarantine_s
        self._trim()
        self._was_added.set()

    def start(self) -> None:
        """Begins to exchange fingerprints with the other gateways, on the running loop."""
        self._task = supervise(self._exchange_always, name="quarantine")

    async def close(self) -> None:
        """Stops the exchange."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def exchange(self) -> None:
        """Exchanges fingerprints with Redis once. Raises StoreUnavailable."""
        now_s = self._clock.monotonic()
        known = [
            (key, round((ends_at_s - now_s) * 1000)) for key, ends_at_s in self._ends_at_s.items() if ends_at_s > now_s
        ]
        for start in range(0, max(1, len(known)), MAX_SENT):
            args: list[str | int] = [MAX_FINGERPRINTS, round(self._quarantine_s * 1000)]
            for fingerprint, left_ms in known[start : start + MAX_SENT]:
                args += [fingerprint, left_ms]
            answer = await self._store.run(_EXCHANGE, (self._store.keys.quarantine,), args)
        self._take(answer)

    def _take(self, answer: list[bytes | int]) -> None:
        """(fingerprint, ms that are left) in turn; they are checked, since any program may have written them."""
        now_s = self._clock.monotonic()
        for raw, left_ms in zip(answer[::2], answer[1::2], strict=True):
            fingerprint = raw.decode(errors="replace") if isinstance(raw, bytes) else ""
            if re.fullmatch("[0-9a-f]{64}", fingerprint) is None or not isinstance(left_ms, int):
                self._store.stats.num_rejected_values += 1
                continue
            ends_at_s = now_s + min(left_ms / 1000, self._quarantine_s)
            self._ends_at_s[fingerprint] = max(ends_at_s, self._ends_at_s.get(fingerprint, 0.0))
        self._trim()

    def _trim(self) -> None:
        now_s = self._clock.monotonic()
        kept: Mapping[str, float] = {key: at_s for key, at_s in self._ends_at_s.items() if at_s > now_s}
        latest = sorted(kept, key=kept.__getitem__)[-MAX_FINGERPRINTS:]
        self._ends_at_s = {fingerprint: kept[fingerprint] for fingerprint in latest}

    async def _exchange_always(self) -> None:
        while True:
            self._was_added.clear()
            with contextlib.suppress(StoreUnavailable):
                await self.exchange()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._refresh_s):
                    await self._was_added.wait()


# KEYS: the set. ARGV: most members, longest stay in ms, then fingerprint and ms that are left, in turn. Answers all
# members in the same way. A key of another type is replaced; a member that would stay longer than allowed is thrown
# out, since the clock of Redis was set back or another program has written it.
_EXCHANGE = Script("""
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'zset' and kind ~= 'none' then redis.call('DEL', KEYS[1]) end
for index = 3, #ARGV, 2 do
  local ends_ms = now_ms + tonumber(ARGV[index + 1])
  local held = tonumber(redis.call('ZSCORE', KEYS[1], ARGV[index]) or 0)
  if ends_ms > held + 1000 then redis.call('ZADD', KEYS[1], ends_ms, ARGV[index]) end
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now_ms)
redis.call('ZREMRANGEBYSCORE', KEYS[1], now_ms + ARGV[2] + 1000, '+inf')
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -1 - ARGV[1])
local answer = {}
local members = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')
for index = 1, #members, 2 do
  table.insert(answer, members[index])
  table.insert(answer, math.floor(members[index + 1] - now_ms))
end
if #members > 0 then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return answer
""")
