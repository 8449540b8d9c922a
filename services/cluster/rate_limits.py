"""What a tenant may use per minute and at once, counted in Redis for all gateways together. Knows no request's content.

Requests and tokens per minute are token buckets. A bucket of a limit L holds at most L and is full at first; after t
seconds it holds min(L, level + t * L / 60); what needs more than it holds is refused and takes nothing. Whatever a
request took too much or too little is given back or taken at its end, so a level may fall below zero, to -10 L at most.
The time is that of Redis. Requests at once are names in a set that end 10 s after their last renewal: those of a
gateway that died count no longer than that.

While Redis is away each gateway continues alone with the n-th part of every limit, at least one request (n: the
gateways last seen), beginning with the n-th part of what was left. What it let through in that time is booked in Redis
when that is back. A Redis that forgets gives every tenant a full bucket.
"""

import asyncio
import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from services.cluster.rate_limit_scripts import (
    CONCURRENCY,
    CONCURRENCY_RETRY_S,
    PERIOD_S,
    REQUESTS,
    SETTLE,
    SLACK,
    TAKE,
    TOKENS,
)
from services.cluster.redis_store import Store
from services.cluster.tenant_usage import (
    MAX_RELEASES,
    MAX_SETTLE_STEPS,
    Bucket,
    LocalBuckets,
    TenantLimits,
    TenantUsage,
    UsageReport,
)
from services.runtime.background_tasks import supervise
from services.runtime.clock import SYSTEM_CLOCK, Clock
from services.runtime.errors import StoreUnavailable

HOLD_TTL_S = 10.0
RENEW_INTERVAL_S = 3.0
RETRY_INTERVAL_S = 0.5
"""How often a Redis that is away is tried again."""
FLUSH_DELAY_S = 0.005
"""What ends within this time is written together."""
TENANT_STEPS = 10
"""Steps that each tenant adds to a script. See `MAX_SETTLE_STEPS`."""

_UNLIMITED = -1


@dataclass(frozen=True, slots=True)
class Rate:
    """The level of one bucket. `reset_s`: seconds until it is full again if nothing is taken."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of an attempt to take something. `limit` names the limit in the way; empty: it was taken.

    `requests` and `tokens` are None where the tenant has no such limit. `num_requests` is the number taken: 0 for a
    request that was known. `is_local`: Redis did not answer, and the gateway decided alone.
    """

    limit: str = ""
    retry_after_s: float = 0.0
    requests: Rate | None = None
    tokens: Rate | None = None
    num_requests: int = 0
    is_local: bool = False


_Sent = tuple[str, TenantUsage, UsageReport]
"""The name of a tenant, its usage, and the part of it that is being sent."""


class Limiter:
    """Applies the tenants' limits for one gateway, on one event loop. `gateway` is its incarnation."""

    def __init__(self, store: Store, *, gateway: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self.num_gateways = 1
        """Number of gateways as last seen; at least this one."""
        self._store = store
        self._gateway = gateway
        self._clock = clock
        self._tenants: dict[str, TenantUsage] = {}
        self._has_news = asyncio.Event()
        self._writing = asyncio.Lock()
        """Held while usage is written, so that closing does not interrupt a settle and repeat it."""
        self._task: asyncio.Task[None] | None = None

    @property
    def is_alone(self) -> bool:
        """Whether some tenant's limits are applied without Redis."""
        return any(tenant.alone is not None for tenant in self._tenants.values())

    def start(self) -> None:
        """Begins to renew and to settle, on the running loop."""
        self._task = supervise(self._write_behind, name="limits")

    async def close(self) -> None:
        """Stops renewing and settling, and writes what waits if Redis answers."""
        if self._task is not None:
            async with self._writing:
                self._task.cancel()
                await asyncio.wait((self._task,))
        with contextlib.suppress(StoreUnavailable):
            await self._write(leaves=True)

    async def take(
        self, name: str, limits: TenantLimits, *, num_requests: int = 0, num_tokens: int = 0, hold: str = ""
    ) -> Verdict:
        """Takes all of it or nothing, in one round trip. `hold` names a request that begins to run.

        A request whose hold exists already is one that continues: it takes no further place and counts as no further
        request. Never raises for a Redis that is away.
        """
        if limits.is_unlimited:
            return Verdict()
        tenant = self._tenant(name, limits)
        hold = hold if limits.concurrency is not None else ""
        tenant.num_asking += 1
        try:
            answer = await self._store.run(
                TAKE,
                self._keys(name),
                self._args(limits, num_requests, num_tokens, hold),
                on_late=lambda late: self._undo_take((name, tenant), late, num_tokens, hold),
            )
        except StoreUnavailable:
            verdict = self._take_alone(tenant, num_requests, num_tokens, hold)
        except asyncio.CancelledError:
            # Redis may have counted it. Ends the hold here; a late reply also refunds requests and tokens.
            if hold:
                tenant.add_hold(hold)
                tenant.end_hold(hold)
                self._has_news.set()
            raise
        else:
            verdict = self._verdict(tenant, answer)
            if tenant.alone is not None:
                self._has_news.set()
        finally:
            tenant.num_asking -= 1
        if hold and not verdict.limit:
            tenant.add_hold(hold)
        return verdict

    def _undo_take(self, named: tuple[str, TenantUsage], late: list[bytes | int], num_tokens: int, hold: str) -> None:
        """Gives back what Redis took after this gateway had stopped waiting and decided alone."""
        refused_by, _, num_requests, *_ = late
        if refused_by:
            return
        tenant = self._tenants.setdefault(*named)  # It may have been dropped as idle.
        for limit, cost in ((REQUESTS, int(num_requests)), (TOKENS, num_tokens)):
            if cost and getattr(tenant.limits, limit) is not None:
                self._owe(tenant, limit, -cost)
        if hold and hold not in tenant.holds and len(tenant.releases) < MAX_RELEASES:
            tenant.releases.add(hold)
        self._has_news.set()

    def settle(
        self, name: str, limits: TenantLimits, *, num_requests: int = 0, num_tokens: int = 0, hold: str = ""
    ) -> None:
        """Takes, or with negative numbers gives back, whether there is enough or not, and ends the hold.

        Returns at once; Redis hears of it a little later.
        """
        if limits.is_unlimited:
            return
        tenant = self._tenants.setdefault(name, TenantUsage(limits))
        for limit, cost in ((REQUESTS, num_requests), (TOKENS, num_tokens)):
            if cost and getattr(limits, limit) is not None:
                self._owe(tenant, limit, cost)
        tenant.end_hold(hold)
        self._has_news.set()

    def hold(self, name: str, limits: TenantLimits, hold: str) -> None:
        """Counts a request as running without asking Redis: it was let in before. `settle` ends it."""
        if limits.concurrency is not None:
            tenant = self._tenant(name, limits)
            tenant.add_hold(hold)
            tenant.has_unknown_holds = True
            self._has_news.set()

    def _tenant(self, name: str, limits: TenantLimits) -> TenantUsage:
        tenant = self._tenants.setdefault(name, TenantUsage(limits))
        if tenant.limits != limits:
            tenant.limits, tenant.alone = limits, None
        return tenant

    def _keys(self, name: str) -> tuple[str, str]:
        return self._store.keys.limit_prefix + name, self._store.keys.hold_prefix + name

    def _args(self, limits: TenantLimits, num_requests: int, num_tokens: int, hold: str) -> tuple[int | str, ...]:
        concurrency = _UNLIMITED if limits.concurrency is None else limits.concurrency
        return (*_bucket_args(limits), concurrency, num_requests, num_tokens, hold, round(HOLD_TTL_S * 1000))

    def _owe(self, tenant: TenantUsage, limit: str, cost: float) -> None:
        if tenant.alone is not None and limit in tenant.alone.buckets:
            tenant.alone.buckets[limit].take(cost, self._clock.monotonic())
        else:
            tenant.owed[limit] = tenant.owed.get(limit, 0.0) + cost

    def _verdict(self, tenant: TenantUsage, answer: list[bytes | int]) -> Verdict:
        """Reads what TAKE says, and remembers it for the time when Redis is away."""
        refused_by, wait_ms, num_requests, *levels = (
            value.decode() if isinstance(value, bytes) else value for value in answer
        )
        now_s = self._clock.monotonic()
        rates: dict[str, Rate | None] = {}
        for limit, level in zip((REQUESTS, TOKENS), levels, strict=True):
            asked: int | None = getattr(tenant.limits, limit)
            rates[limit] = None
            if asked is not None:
                tenant.seen[limit] = (float(level), now_s)
                rates[limit] = _rate(asked, float(level), asked)
        return Verdict(str(refused_by), int(wait_ms) / 1000, rates[REQUESTS], rates[TOKENS], int(num_requests))

    def _take_alone(self, tenant: TenantUsage, num_requests: int, num_tokens: int, hold: str) -> Verdict:
        """Takes all of it or nothing from the buckets here, without Redis."""
        now_s = self._clock.monotonic()
        alone = self._go_alone(tenant)
        is_known = hold in tenant.holds
        costs = {REQUESTS: 0 if is_known else num_requests, TOKENS: num_tokens}
        waits = {limit: bucket.wait_s(costs[limit], now_s) for limit, bucket in alone.buckets.items()}
        places = tenant.limits.concurrency
        if hold and places is not None and not is_known:
            num_places = min(places, max(1, places // self.num_gateways))
            waits[CONCURRENCY] = CONCURRENCY_RETRY_S if len(tenant.holds) >= num_places else 0.0
        refused_by = max(waits, key=waits.__getitem__) if any(waits.values()) else ""
        if not refused_by:
            for limit, bucket in alone.buckets.items():
                bucket.take(costs[limit], now_s)
        rates = {
            limit: _rate(getattr(tenant.limits, limit), bucket.level, bucket.limit)
            for limit, bucket in alone.buckets.items()
        }
        wait_s = waits.get(refused_by, 0.0)
        taken = 0 if refused_by else costs[REQUESTS]
        return Verdict(refused_by, wait_s, rates.get(REQUESTS), rates.get(TOKENS), taken, is_local=True)

    def _go_alone(self, tenant: TenantUsage) -> LocalBuckets:
        """The tenant's buckets here, which are made from what Redis said last when it goes away."""
        if tenant.alone is not None:
            return tenant.alone
        now_s = self._clock.monotonic()
        alone = tenant.alone = LocalBuckets()
        for limit, least in ((REQUESTS, 1.0), (TOKENS, 0.0)):
            asked: int | None = getattr(tenant.limits, limit)
            if asked is None:
                continue
            level, at_s = tenant.seen.get(limit, (float(asked), now_s))
            shared = Bucket(asked, level=level, now_s=at_s).refill(now_s)
            share = min(float(asked), max(least, asked / self.num_gateways))
            for buckets in (alone.buckets, alone.untouched):
                buckets[limit] = Bucket(share, level=shared / self.num_gateways, now_s=now_s)
            if limit in tenant.owed:
                alone.buckets[limit].take(tenant.owed.pop(limit), now_s)
        return alone

    async def _write_behind(self) -> None:
        """Settles soon after there is news, and renews every RENEW_INTERVAL_S."""
        loop = asyncio.get_running_loop()
        renew_at_s = loop.time()
        while True:
            renews = loop.time() >= renew_at_s
            try:
                async with self._writing:
                    await self._write(renews=renews)
                wait_s = max(0.0, renew_at_s - loop.time())
                if renews:
                    wait_s = RENEW_INTERVAL_S
                    renew_at_s = loop.time() + RENEW_INTERVAL_S
            except StoreUnavailable:
                self._has_news.clear()
                wait_s, renew_at_s = RETRY_INTERVAL_S, loop.time()
                await asyncio.sleep(RETRY_INTERVAL_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._has_news.wait()
            if self._has_news.is_set():
                await asyncio.sleep(FLUSH_DELAY_S)

    async def _write(self, *, renews: bool = False, leaves: bool = False) -> None:
        """Tells Redis what is owed, which requests have ended and, if it is time, which ones run.

        Raises StoreUnavailable; what was owed is then taken from the buckets here.
        """
        self._has_news.clear()
        sent: list[_Sent] = []
        rows = []
        for name, tenant in list(self._tenants.items()):
            if tenant.is_idle(self._clock.monotonic()):
                if renews:
                    del self._tenants[name]
                continue
            parcel = tenant.pack(self._clock.monotonic(), renews=renews, leaves=leaves)
            for part in () if parcel is None else parcel.parts():
                costs = (part.costs.get(REQUESTS, 0.0), part.costs.get(TOKENS, 0.0))
                rows.append((name, *_bucket_args(tenant.limits), *costs, list(part.releases), list(part.renewals)))
                sent.append((name, tenant, part))
        if not rows and not renews and not leaves:
            return
        num_sent = 0
        try:
            for portion in _portions(rows):
                settled = sent[num_sent : num_sent + len(portion)]
                num_gateways = await self._settle(portion, settled, leaves=leaves)
                for _, tenant, parcel in settled:
                    tenant.end_alone(parcel, self._clock.monotonic())
                num_sent += len(portion)
        except BaseException as error:
            for _, tenant, parcel in sent[num_sent:]:
                tenant.unpack(parcel)
                if isinstance(error, StoreUnavailable):
                    self._go_alone(tenant)
            raise
        self.num_gateways = max(1, num_gateways)

    async def _settle(self, rows: Sequence[tuple[Any, ...]], settled: Sequence[_Sent], *, leaves: bool) -> int:
        """Sends one portion of rows, and returns the number of gateways. Raises StoreUnavailable."""
        keys, lasts_ms = self._store.keys, round(HOLD_TTL_S * 1000)
        args = (self._gateway, 0 if leaves else lasts_ms, lasts_ms, _ENCODER.encode(rows))
        names = (keys.gateways, keys.limit_prefix, keys.hold_prefix)
        num_gateways: int = await self._store.run(SETTLE, names, args, on_late=lambda _: self._undo_settle(settled))
        return num_gateways

    def _undo_settle(self, settled: Sequence[_Sent]) -> None:
        """Refunds costs that Redis booked after this gateway had stopped waiting, because they are sent again."""
        for name, sender, parcel in settled:
            tenant = self._tenants.setdefault(name, sender)  # It may have been dropped as idle.
            for limit, cost in parcel.costs.items():
                self._owe(tenant, limit, -cost)
        self._has_news.set()


def _portions(rows: Sequence[tuple[Any, ...]]) -> Iterator[Sequence[tuple[Any, ...]]]:
    """Yields the rows in portions of which one script does not take long, at least one portion."""
    start = num_steps = 0
    for index, row in enumerate(rows):
        row_steps = TENANT_STEPS + len(row[-2]) + len(row[-1])
        num_steps += row_steps
        if index > start and num_steps > MAX_SETTLE_STEPS:
            yield rows[start:index]
            start, num_steps = index, row_steps
    yield rows[start:]


def _rate(limit: int, level: float, full: float) -> Rate:
    """The level that a client is told. `full`: the limit as it is applied here, which may be a part of `limit`."""
    reset_s = (full - level) * PERIOD_S / full if full > 0 else 0.0
    return Rate(limit, max(0, math.floor(level + SLACK)), max(0.0, reset_s))


def _bucket_args(limits: TenantLimits) -> tuple[int, int]:
    requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
    return (_UNLIMITED if requests is None else requests, _UNLIMITED if tokens is None else tokens)


_ENCODER = msgspec.msgpack.Encoder()
