"""The order among the first entries of several queues side by side. Pure.

Each queue (a lane) has an order of its own, by `services.scheduling.queue`. Where lanes compete for the same workers
they must be served as one queue would serve them: strictly by class, then by the rank of the strategy. Ranks of `fair`
come from a queue's virtual clock and mean nothing in another queue, so here is one clock for all lanes: start-time fair
queueing as there, with the start tag given to an entry when it is first of its lane. An entry that goes past a waiting
one takes nothing that the other could use; so it is not charged, and does not advance the clock.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from services.scheduling.entry import QueueEntry, ServiceClass

ACCOUNTS_KEPT = 64
"""With this many tenants more than twice those that owed something last time, ones that owe nothing are forgotten."""

LaneKey = tuple[int, bool, float, float]
"""(class, or −1 for a resumed entry; whether it is late; rank; arrival): the smallest goes first."""


@dataclass(slots=True)
class _Clock:
    """The virtual clock of one class, in tokens over weight."""

    virtual_time: float = 0.0
    charged_to: dict[str, float] = field(default_factory=dict)
    """By tenant, where its next entry starts, unless that is in the past."""
    prune_at: int = ACCOUNTS_KEPT


class LaneOrder:
    """The order of one set of lanes, all of the same strategy; parameters as those of `RequestQueue`."""

    def __init__(
        self, strategy: str = "fcfs", *, ageing_s: float = 10.0, tenant_weights: Mapping[str, float] | None = None
    ) -> None:
        self._strategy = strategy
        self._ageing_s = ageing_s
        self._weights = {} if tenant_weights is None else tenant_weights  # no copy: it is read live, and may change
        self._tags: dict[Hashable, float] = {}
        """Start tags by entry, from when it was first of its lane until it leaves."""
        self._clocks = tuple(_Clock() for _ in ServiceClass)

    def key(self, entry: QueueEntry, *, is_resumed: bool = False, is_late: bool = False) -> LaneKey:
        """Returns where the first entry of a lane stands among the first ones of the others."""
        if is_resumed:
            return -1, False, entry.arrived_s, entry.arrived_s
        return entry.service_class, is_late, self._rank(entry), entry.arrived_s

    def went(self, entry: QueueEntry) -> None:
        """Charges the tenant of an entry that had its turn and went past no other; only once, even if it goes again."""
        tag = self._tags.get(entry.key)
        if tag is None:
            return
        clock = self._clocks[entry.service_class]
        clock.virtual_time = max(clock.virtual_time, tag)
        end = tag + entry.cost_tokens / self._weights.get(entry.tenant, 1.0)
        clock.charged_to[entry.tenant] = max(end, clock.charged_to.get(entry.tenant, 0.0))
        if len(clock.charged_to) > clock.prune_at:
            now = clock.virtual_time
            clock.charged_to = {tenant: end for tenant, end in clock.charged_to.items() if end > now}
            clock.prune_at = 2 * len(clock.charged_to) + ACCOUNTS_KEPT

    def left(self, key: Hashable) -> None:
        """Forgets an entry that does not come back."""
        self._tags.pop(key, None)

    def clear(self) -> None:
        """Forgets all charges once no entry waits: all tenants start anew as equals."""
        self._tags.clear()
        for clock in self._clocks:
            clock.virtual_time = 0.0
            clock.charged_to.clear()

    def _rank(self, entry: QueueEntry) -> float:
        if self._strategy == "fair":
            tag = self._tags.get(entry.key)
            if tag is None:
                clock = self._clocks[entry.service_class]
                tag = max(clock.virtual_time, clock.charged_to.get(entry.tenant, 0.0))
                self._tags[entry.key] = tag
            return tag
        if self._strategy == "priority":
            return entry.place_s - entry.level * self._ageing_s
        return entry.turn_due_s if self._strategy == "sla" else entry.place_s
