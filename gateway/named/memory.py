"""How much of a gateway's memory named requests may take: of one tenant, of all, and of those that nobody reads.

What nobody reads makes room for what somebody asks for, a tenant's own first; what runs never does. Knows neither what
a journal holds nor what it costs.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from services.runtime.errors import Overloaded, RateLimited

RETRY_AFTER_S = 1.0
LIMIT = "named_requests"
"""Names the limit in refusals and metrics."""

Entry = TypeVar("Entry", bound=Hashable)


@dataclass(frozen=True, slots=True)
class MemoryBounds:
    """Bytes for the named requests of one tenant, of all, and of all those that nobody reads."""

    tenant_bytes: int = 256 * 2**20
    all_bytes: int = 512 * 2**20
    kept_bytes: int = 64 * 2**20


class JournalMemory(Generic[Entry]):
    """The accounts. `forget` ends an entry that makes room, and must call `drop`."""

    def __init__(self, bounds: MemoryBounds, *, forget: Callable[[Entry], None]) -> None:
        self._bounds = bounds
        self._forget = forget
        self._costs: dict[Entry, tuple[str, int]] = {}
        self._kept: dict[str, OrderedDict[Entry, float]] = {}
        self._by_tenant: Counter[str] = Counter()
        self._kept_by_tenant: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        """What all entries take."""
        return self._by_tenant.total()

    @property
    def num_kept_bytes(self) -> int:
        """What those entries take that nobody reads."""
        return self._kept_by_tenant.total()

    def take(self, entry: Entry, tenant: str, num_bytes: int) -> None:
        """Counts an entry that is in use. Raises RateLimited or Overloaded where it finds no room."""
        self.drop(entry)
        bounds = self._bounds
        while self._by_tenant[tenant] + num_bytes > bounds.tenant_bytes:
            if not self._forget_oldest(tenant):
                raise RateLimited(
                    f"rate limit reached: the running requests with a name of tenant {tenant} may take at most "
                    f"{bounds.tenant_bytes} bytes of the gateway's memory",
                    retry_after_s=RETRY_AFTER_S,
                    limit=LIMIT,
                )
        while self.num_bytes + num_bytes > bounds.all_bytes:
            if not self._forget_oldest(self._largest_keeper()):
                raise Overloaded(
                    f"requests with a name take the {bounds.all_bytes} bytes of memory that the gateway has for them",
                    retry_after_s=RETRY_AFTER_S,
                )
        self._add(entry, tenant, num_bytes)

    def resize(self, entry: Entry, num_bytes: int) -> None:
        """What a counted entry takes now. Nothing is refused, since its tokens exist already."""
        if entry in self._costs:
            tenant, before = self._costs[entry]
            self._costs[entry] = tenant, num_bytes
            self._by_tenant[tenant] += num_bytes - before
            if entry in self._kept.get(tenant, ()):
                self._kept_by_tenant[tenant] += num_bytes - before

    def keep(self, entry: Entry) -> None:
        """Keeps an entry without readers. If all take too much, the oldest of the largest tenant are forgotten."""
        if entry not in self._costs:
            return
        tenant, num_bytes = self._costs[entry]
        self.use(entry)
        self._kept.setdefault(tenant, OrderedDict())[entry] = time.monotonic()
        self._kept_by_tenant[tenant] += num_bytes
        while self.num_kept_bytes > self._bounds.kept_bytes:
            self._forget_oldest(self._largest_keeper())

    def use(self, entry: Entry) -> None:
        """Counts an entry as in use, because it has a reader."""
        tenant, num_bytes = self._costs.get(entry, ("", 0))
        kept = self._kept.get(tenant)
        if kept is not None and kept.pop(entry, None) is not None:
            self._subtract(self._kept_by_tenant, tenant, num_bytes)
            if not kept:
                del self._kept[tenant]

    def drop(self, entry: Entry) -> None:
        """Stops counting an entry."""
        self.use(entry)
        tenant, num_bytes = self._costs.pop(entry, ("", 0))
        self._subtract(self._by_tenant, tenant, num_bytes)

    def forget_older(self, seconds: float) -> None:
        """Forgets entries that have not been read for longer than that."""
        before_s = time.monotonic() - seconds
        for tenant in list(self._kept):
            while tenant in self._kept and next(iter(self._kept[tenant].values())) < before_s:
                self._forget_oldest(tenant)

    def _add(self, entry: Entry, tenant: str, num_bytes: int) -> None:
        self._costs[entry] = tenant, num_bytes
        self._by_tenant[tenant] += num_bytes

    def _forget_oldest(self, tenant: str) -> bool:
        kept = self._kept.get(tenant)
        if not kept:
            return False
        self._forget(next(iter(kept)))
        return True

    def _largest_keeper(self) -> str:
        return max(self._kept_by_tenant, key=self._kept_by_tenant.__getitem__, default="")

    @staticmethod
    def _subtract(totals: Counter[str], tenant: str, num_bytes: int) -> None:
        totals[tenant] -= num_bytes
        if totals[tenant] <= 0:
            del totals[tenant]
