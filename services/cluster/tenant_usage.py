"""One tenant's use of its limits, as one gateway remembers it: what Redis knows, and what it must still be told.

Pure state machines over the time passed in. `rate_limits` talks to Redis.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from services.cluster.rate_limit_scripts import MAX_DEBT, PERIOD_S, SLACK

MAX_RELEASES = 4096
"""Maximum number of ended holds that one tenant keeps while Redis is unavailable. Further holds expire."""
MAX_SETTLE_STEPS = 500
"""Maximum number of tenants and names that one script settles. A tenant counts as `TENANT_STEPS`."""


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What one tenant may use. None: as much as it likes; 0: nothing."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None

    @property
    def is_unlimited(self) -> bool:
        """Whether nothing has to be counted."""
        return self.requests_per_minute is None and self.tokens_per_minute is None and self.concurrency is None


class Bucket:
    """A token bucket in this process, as the module describes it. A pure state machine over the time passed in."""

    def __init__(self, limit: float, *, level: float | None = None, now_s: float) -> None:
        self.limit = limit
        self.level = limit if level is None else min(limit, level)
        self._at_s = now_s

    def refill(self, now_s: float) -> float:
        """The level now."""
        passed_s = max(0.0, now_s - self._at_s)
        self.level = min(self.limit, self.level + passed_s * self.limit / PERIOD_S)
        self._at_s = max(self._at_s, now_s)
        return self.level

    def wait_s(self, cost: float, now_s: float) -> float:
        """Seconds until `cost` can be taken; 0: now. A minute for a cost that never can be taken."""
        missing = cost - self.refill(now_s)
        if self.limit <= 0:
            return PERIOD_S
        if missing <= SLACK:
            return 0.0
        return PERIOD_S if cost > self.limit else missing * PERIOD_S / self.limit

    def take(self, cost: float, now_s: float) -> None:
        """Takes `cost`, whether the bucket holds that much or not; a negative `cost` is given back."""
        self.level = max(-MAX_DEBT * self.limit, min(self.limit, self.refill(now_s) - cost))


@dataclass(slots=True)
class LocalBuckets:
    """One tenant's buckets while Redis is away, and the same ones as if nothing had been taken since."""

    buckets: dict[str, Bucket] = field(default_factory=dict)
    untouched: dict[str, Bucket] = field(default_factory=dict)

    def taken(self, now_s: float) -> dict[str, float]:
        """Limit → what Redis would have less if it had answered all the while."""
        return {
            limit: self.untouched[limit].refill(now_s) - bucket.refill(now_s) for limit, bucket in self.buckets.items()
        }


@dataclass(frozen=True, slots=True)
class UsageReport:
    """What Redis is told of one tenant at once. `costs`: limit → what was taken."""

    costs: dict[str, float]
    alone_costs: dict[str, float]
    """The part of `costs` that was taken while Redis was away."""
    releases: set[str]
    renewals: set[str]

    def parts(self) -> "Iterator[UsageReport]":
        """Yields parcels that one script settles each. The first of them has the costs."""
        releases, renewals = iter(self.releases), iter(self.renewals)
        part = UsageReport(self.costs, self.alone_costs, set(), set())
        while True:
            part.releases.update(islice(releases, MAX_SETTLE_STEPS // 2))
            part.renewals.update(islice(renewals, MAX_SETTLE_STEPS // 2))
            if part.costs is not self.costs and not part.releases and not part.renewals:
                return
            yield part
            part = UsageReport({}, {}, set(), set())


@dataclass(slots=True)
class TenantUsage:
    """What this gateway remembers of one tenant."""

    limits: TenantLimits
    holds: dict[str, int] = field(default_factory=dict)
    """Names of what runs here, and how many have each."""
    releases: set[str] = field(default_factory=set)
    """Names that have ended and that Redis may still have."""
    has_unknown_holds: bool = False
    """Whether Redis was not asked about some of `holds`."""
    owed: dict[str, float] = field(default_factory=dict)
    """Limit → what Redis must still be told was taken; negative: given back."""
    seen: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Limit → (level, when) as Redis said last."""
    alone: LocalBuckets | None = None
    num_asking: int = 0
    """Requests that wait for Redis' answer."""

    def is_idle(self, now_s: float) -> bool:
        """Whether nothing has to be remembered: nothing runs, and the buckets are full again, or deep in debt."""
        if any(now_s - at_s < PERIOD_S for _, at_s in self.seen.values()):
            return False
        return not (self.num_asking or self.holds or self.releases or self.owed or self.alone)

    def add_hold(self, name: str) -> None:
        """Notes that one more request of this name runs here."""
        self.holds[name] = self.holds.get(name, 0) + 1
        self.releases.discard(name)

    def end_hold(self, name: str) -> None:
        """Notes that one has ended; the last one of a name gives it back. Does nothing for an unknown name."""
        num_left = self.holds.get(name, 0) - 1
        if num_left > 0:
            self.holds[name] = num_left
        elif self.holds.pop(name, None) is not None and len(self.releases) < MAX_RELEASES:
            self.releases.add(name)

    def pack(self, now_s: float, *, renews: bool, leaves: bool) -> UsageReport | None:
        """What Redis should be told now; None: nothing. It counts as told until it is unpacked."""
        costs = dict(self.owed)
        alone_costs = {} if self.alone is None else self.alone.taken(now_s)
        for limit, cost in alone_costs.items():
            costs[limit] = costs.get(limit, 0.0) + cost
        releases = self.releases | set(self.holds) if leaves else set(self.releases)
        shows_holds = not leaves and (renews or self.has_unknown_holds or self.alone is not None)
        renewals = set(self.holds) if shows_holds else set()
        if not (costs or releases or renewals or self.alone):
            return None
        self.owed, self.releases, self.has_unknown_holds = {}, set(), False
        return UsageReport(costs, alone_costs, releases, renewals)

    def unpack(self, parcel: UsageReport) -> None:
        """Takes the parcel back, since Redis was not told."""
        self.releases |= parcel.releases - set(self.holds)
        while len(self.releases) > MAX_RELEASES:
            self.releases.pop()
        self.has_unknown_holds |= bool(parcel.renewals)
        for limit, cost in parcel.costs.items():
            own_cost = cost - parcel.alone_costs.get(limit, 0.0)
            if own_cost:
                self.owed[limit] = self.owed.get(limit, 0.0) + own_cost

    def end_alone(self, parcel: UsageReport, now_s: float) -> None:
        """Ends the time without Redis, which was told what was taken in it. What was taken since the parcel is owed."""
        alone, self.alone = self.alone, None
        if alone is not None:
            self.seen = {}
            for limit, cost in alone.taken(now_s).items():
                later_cost = cost - parcel.alone_costs.get(limit, 0.0)
                if later_cost > SLACK:
                    self.owed[limit] = self.owed.get(limit, 0.0) + later_cost
