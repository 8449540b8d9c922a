"""Circuits of pairs of workers: between which workers pages cannot pass. Does not choose workers.

A worker reports an error about its peer. If the peer is alive, the path between the two is at fault, and the pair's
circuit opens. No client's request uses a blocked pair. The gateway's own trials (`gateway.requests.monitor`) find out
whether one failed handoff was chance, and when pages pass again.
"""

import logging
from typing import TYPE_CHECKING

from gateway.topology.members import Topology
from gateway.topology.session import Peer
from gateway.topology.watch import CutPairReport
from services.runtime.clock import Clock
from services.runtime.errors import PeerUnreachable, TandemError
from services.runtime.worker_state import WorkerState
from services.scheduling.breakers import Breakers

if TYPE_CHECKING:
    from gateway.requests.attempt import Attempt

MAX_ERRORS = 2
"""Failed handoffs in a row that open a pair's circuit. A peer that cannot be reached opens it at once."""
WINDOW_S = 30.0
"""Maximum age of the first of these failures, in seconds. A handoff may take several seconds to fail."""

Pair = tuple[str, str]
"""IDs of the prefill worker and the decode worker."""

logger = logging.getLogger(__name__)


class PairCircuits:
    """The circuits of one gateway. They belong to worker IDs, but a worker that leaves takes its circuits with it."""

    def __init__(self, topology: Topology, *, clock: Clock) -> None:
        self._topology = topology
        self._clock = clock
        self._breakers = Breakers(max_errors=MAX_ERRORS, window_s=WINDOW_S)
        self._reasons: dict[Pair, str] = {}
        """The error that blocked each pair."""
        self._doubted: set[Pair] = set()
        """Pairs that are not blocked, whose last handoff failed, and for which a trial is due or under way."""

    @property
    def has_blocked(self) -> bool:
        """Whether any pair is blocked."""
        return bool(self._reasons)

    def is_blocked(self, pair: Pair) -> bool:
        """Returns whether the pair's circuit is open."""
        return pair in self._reasons

    def reports(self) -> list[CutPairReport]:
        """Returns the blocked pairs whose workers are in rotation."""
        breakers, now_s = self._breakers, self._clock.monotonic()
        return [
            CutPairReport(*pair, breakers.state(pair), reason, round(now_s - (breakers.opened_at_s(pair) or now_s), 1))
            for pair, reason in self._reasons.items()
            if self._is_in_rotation(pair)
        ]

    def is_in_doubt(self, pair: Pair) -> bool:
        """Returns whether the pair is blocked, or one handoff failed and its trial is not over."""
        return pair in self._reasons or pair in self._doubted

    def due_for_trial(self) -> list[Pair]:
        """Returns the pairs in rotation that a trial should use now: blocked ones, and those whose last handoff failed.

        Without a trial, the second error that blocks a pair would have to wait until a request uses the pair again.
        """
        now_s = self._clock.monotonic()
        for pair in self._reasons:
            self._breakers.trip(pair, now_s)  # `Breakers` drops breakers that have not changed for a long time.
        pairs = [pair for pair in (*self._reasons, *self._doubted) if self._is_in_rotation(pair)]
        return [pair for pair in pairs if not self._breakers.shut([pair], now_s)]

    def begin_trial(self, attempt: "Attempt", prefill_id: str) -> None:
        """Records that a trial is about to use the pair. If the pair is in doubt, the trial's outcome decides."""
        pair = prefill_id, attempt.decode.peer.worker_id
        if self._breakers.begin(pair, self._clock.monotonic()) or pair in self._doubted:
            attempt.probes.add(pair)

    def succeeded(self, attempt: "Attempt") -> None:
        """Records a successful handoff. Closes the pair's circuit, or drops the failures before it."""
        if attempt.prefill is None:
            return
        pair = attempt.prefill.peer.worker_id, attempt.decode.peer.worker_id
        if pair in self._reasons and pair not in attempt.probes:
            return  # The handoff began before the path failed. The next trial decides.
        self._doubted.discard(pair)
        if pair in attempt.probes:
            attempt.probes.discard(pair)
            if pair not in self._reasons:
                return  # A trial is smaller than most handoffs, so the error before it still counts.
        self._breakers.forget(pair)
        if self._reasons.pop(pair, None) is not None:
            logger.info("pair unblocked", extra=_named(pair))

    def failed(self, attempt: "Attempt", error: TandemError) -> None:
        """Records that the path between the attempt's workers failed, although both are alive."""
        if attempt.prefill is None:
            return
        prefill, decode, now_s = attempt.prefill.peer, attempt.decode.peer, self._clock.monotonic()
        if not (self._is_current(prefill) and self._is_current(decode)):
            return  # The error says nothing about the path to a successor.
        pair = prefill.worker_id, decode.worker_id
        self._breakers.failed(pair, now_s, is_probe=pair in attempt.probes)
        if isinstance(error, PeerUnreachable):
            self._breakers.trip(pair, now_s)
        self._doubted.discard(pair)
        if pair not in attempt.probes and not self._breakers.is_open(pair):
            self._doubted.add(pair)
        attempt.probes.discard(pair)
        if self._breakers.is_open(pair):
            if pair not in self._reasons:
                logger.warning("pair blocked", extra={**_named(pair), "reason": error.message})
            self._reasons[pair] = error.message

    def release(self, attempt: "Attempt") -> None:
        """Ends a trial without an outcome. The next trial decides."""
        for pair in attempt.probes:
            self._breakers.abandoned(pair)
        attempt.probes.clear()

    def forget(self, worker_id: str) -> None:
        """Drops the circuits of a worker that has left."""
        for pair in [pair for pair in {*self._breakers.known(), *self._reasons, *self._doubted} if worker_id in pair]:
            self._reasons.pop(pair, None)
            self._doubted.discard(pair)
            self._breakers.forget(pair)

    def _is_current(self, peer: Peer) -> bool:
        member = self._topology.member(peer.worker_id)
        return member is not None and member.session.peer.incarnation == peer.incarnation

    def _is_in_rotation(self, pair: Pair) -> bool:
        members = [self._topology.member(worker_id) for worker_id in pair]
        return all(member is not None and member.state == WorkerState.READY for member in members)


def _named(pair: Pair) -> dict[str, str]:
    return dict(zip(("prefill", "decode"), pair, strict=True))
