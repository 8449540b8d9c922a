"""Prefixes that prefill workers fetch from other workers: between which pairs, and what they are told.

A pair between which fetching failed is left alone for a while, since each failure costs a request the time that
computing would have taken. Where prefixes are fetched is `services.scheduling.routing.pulls`' decision.
"""

from collections.abc import Callable, Mapping

from gateway.observability.phases import AttemptFacts
from gateway.topology.events import PullOrder
from gateway.topology.members import Topology
from services.runtime.clock import Clock
from services.scheduling.routing.route import Route
from services.scheduling.routing.views import CanPull, WorkerView

FIRST_PAUSE_S, MAX_PAUSE_S = 2.0, 60.0
"""How long a pair is left alone after a failure; each further one doubles it."""
PATIENCE_S = 0.5
"""How much longer than computing a pull may take: the first one of a pair has its Link to make."""
MAX_PAIRS = 4096


class Pulls:
    """What one gateway knows of fetching between pairs of workers. `is_on` is the operator's choice.

    `is_blocked` tells whether handoffs from a prefill to a decode worker fail; a pull would take the same path.
    """

    def __init__(
        self, topology: Topology, *, clock: Clock, is_on: bool, is_blocked: Callable[[tuple[str, str]], bool]
    ) -> None:
        self._topology = topology
        self._clock = clock
        self._is_on = is_on
        self._is_blocked = is_blocked
        self._pauses: dict[tuple[str, str], tuple[float, float]] = {}
        """By holder and prefill worker: (length of the pause, its end)."""

    @property
    def can_pull(self) -> CanPull | None:
        """Decides whether pages may go from a holder to a prefill worker; None: nothing is fetched."""
        return self._may_pull if self._is_on else None

    def orders(self, route: Route) -> Mapping[str, PullOrder]:
        """Returns what the prefill workers of a route are to fetch, by their ids."""
        orders = {}
        for prefill_id, pull in route.pulls.items():
            member = self._topology.member(pull.holder.worker_id)
            if member is not None and member.session.is_up:
                peer, limit_s = member.session.peer, PATIENCE_S + pull.computing_s
                orders[prefill_id] = PullOrder(peer.worker_id, peer.incarnation, peer.address, pull.num_tokens, limit_s)
        return orders

    def note(self, facts: AttemptFacts) -> None:
        """Takes what became of an attempt's pull, if it had one."""
        if facts.pull is None or facts.prefill_started is None:
            return
        pair = facts.pull.worker_id, facts.prefill_worker
        pause_s, _ = self._pauses.pop(pair, (0.0, 0.0))
        if facts.prefill_started.num_pulled_tokens or len(self._pauses) >= MAX_PAIRS:
            return
        pause_s = min(max(FIRST_PAUSE_S, 2 * pause_s), MAX_PAUSE_S)
        self._pauses[pair] = pause_s, self._clock.monotonic() + pause_s

    def forget(self, worker_id: str) -> None:
        """Drops the pauses of a worker that has left."""
        for pair in [pair for pair in self._pauses if worker_id in pair]:
            del self._pauses[pair]

    def _may_pull(self, holder: WorkerView, prefill: WorkerView) -> bool:
        _, until_s = self._pauses.get((holder.worker_id, prefill.worker_id), (0.0, 0.0))
        gives, takes = (self._topology.member(view.worker_id) for view in (holder, prefill))
        if until_s > self._clock.monotonic() or gives is None or takes is None:
            return False
        if self._is_blocked((prefill.worker_id, holder.worker_id)):
            return False
        # Both serve the request's model; what was computed must be what the other one would have computed.
        return self._topology.may_go_on(gives.record.identity_key, takes.record.identity_key)
