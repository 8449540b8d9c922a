"""Which of several copies of a program acts: a lease in Redis that one of them holds at a time.

A copy acts only while it knows that it holds the lease. It knows so until the lease would have run out, reckoned from
before the last renewal was sent. Without Redis nobody renews, so that after this time no copy acts.

A copy may be frozen after it has looked whether it holds the lease, and a Redis that lost its memory gives the lease to
another one too early. Orders therefore carry the `Lease`, and their taker can refuse what comes too late.
"""

import asyncio
import contextlib
import logging
from dataclasses import dataclass

from services.cluster.redis_store import Script, Store
from services.runtime.background_tasks import supervise
from services.runtime.clock import SYSTEM_CLOCK, Clock
from services.runtime.errors import StoreUnavailable

TTL_S = 15.0
RENEWALS_PER_TTL = 5
MARGIN = 0.8
"""The part of the lease's time in which its holder relies on it: clocks do not run equally fast."""
AFTER_S = 0.05
"""Seconds from the end of another's lease until it is asked for."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lease:
    """What an order is given under. Times are those of this machine's monotonic clock, the same for all its processes.

    The lease that began later was given later.
    """

    holder: str
    since_s: float
    until_s: float


class Leadership:
    """One copy's part in the lease. `holder` names the copy and is unlike any other's; `key` is the lease's key."""

    def __init__(
        self, store: Store, key: str, *, holder: str, ttl_s: float = TTL_S, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._store = store
        self._key = key
        self._holder = holder
        self._ttl_s = ttl_s
        self._clock = clock
        self._since_s = self._until_s = 0.0
        self._look_in_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self.other = ""
        """The copy that held the lease at the last renewal; empty: this one, or Redis did not answer."""
        self.failure = ""
        """Why the last renewal failed; empty: it did not."""

    @property
    def is_held(self) -> bool:
        """Whether this copy may act now."""
        return self._clock.monotonic() < self._until_s

    @property
    def lease(self) -> Lease | None:
        """What this copy may act under now; None: it may not act."""
        return Lease(self._holder, self._since_s, self._until_s) if self.is_held else None

    async def renew(self) -> bool:
        """Takes or renews the lease if it is free or held here; returns whether it is held here then."""
        began_s, was_held = self._clock.monotonic(), self.is_held
        self._look_in_s = self._ttl_s / RENEWALS_PER_TTL
        try:
            answer = await self._store.run_patiently(_RENEW, (self._key,), (self._holder, round(self._ttl_s * 1000)))
        except StoreUnavailable as error:
            self.other, self.failure = "", str(error)
            return self.is_held
        found, left_ms = answer[0].decode("utf-8", "replace")[:64], answer[1]
        self.other, self.failure = "" if found == self._holder else found, ""
        self._until_s = began_s + MARGIN * self._ttl_s if found == self._holder else 0.0
        if self.other and left_ms >= 0:
            self._look_in_s = min(self._look_in_s, left_ms / 1000 + AFTER_S)
        if not self.other and not was_held:
            self._since_s = self._clock.monotonic()
        return self.is_held

    def start(self) -> None:
        """Begins to renew the lease, on the running loop."""
        self._task = supervise(self._renew_always, name="leadership")

    async def close(self) -> None:
        """Stops renewing and gives the lease to others, if it is held here."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        self._until_s = 0.0
        with contextlib.suppress(StoreUnavailable):  # it runs out by itself
            await self._store.run_patiently(_RELEASE, (self._key,), (self._holder,))

    async def _renew_always(self) -> None:
        told = ""
        while True:
            await self.renew()
            words = "this copy acts" if self.is_held else f"this copy waits: {self.failure or f'{self.other} acts'}"
            if words != told:
                told = words
                logger.info(words)
            await asyncio.sleep(self._look_in_s)


_RENEW = Script("""
local holder = redis.call('GET', KEYS[1])
if not holder or holder == ARGV[1] then
    redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
    return {ARGV[1], tonumber(ARGV[2])}
end
return {holder, redis.call('PTTL', KEYS[1])}
""")
_RELEASE = Script("""
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 0
""")
