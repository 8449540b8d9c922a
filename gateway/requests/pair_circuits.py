"""Circuits of pairs of workers: between which workers pages cannot pass. Does not choose workers.

A worker reports an error about its peer. If the peer is alive, the path between the two is at fault, and the pair's
circuit opens. No client's request uses a blocked pair. The gateway's own trials (`gateway.requests.monitor`) find out
when pages pass again.
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
MAX_PROVEN = 16_384
"""Maximum number of pairs of processes whose last handoff is known to have succeeded."""

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
        self._proven: dict[tuple[str, str], None] = {}
        """The processes between which the last handoff succeeded, by incarnation, oldest first: they have a Link."""

    @property
    def has_blocked(self) -> bool:
        """Whether any pair is blocked."""
        return bool(self._reasons)

    def is_blocked(self, pair: Pair) -> bool:
        """Returns whether the pair's circuit is open."""
        return pair in self._reasons

    def is_proven(self, prefill: Peer, decode: Peer) -> bool:
        """Returns whether the last handoff between these two processes succeeded."""
        return (prefill.incarnation, decode.incarnation) in self._proven

    def reports(self) -> list[CutPairReport]:
        """Returns the blocked pairs whose workers are in rotation."""
        breakers, now_s = self._breakers, self._clock.monotonic()
        return [
            CutPairReport(*pair, breakers.state(pair), reason, round(now_s - (breakers.opened_at_s(pair) or now_s), 1))
            for pair, reason in self._reasons.items()
            if self._is_in_rotation(pair)
        ]

    def due_for_trial(self) -> list[Pair]:
        """Returns the blocked pairs in rotation that a trial should use now."""
        now_s = self._clock.monotonic()
        for pair in self._reasons:
            self._breakers.trip(pair, now_s)  # `Breakers` drops breakers that have not changed for a long time.
        return [pair for pair in self._reasons if not self._breakers.shut([pair], now_s) and self._is_in_rotation(pair)]

    def begin_trial(self, attempt: "Attempt", prefill_id: str) -> None:
        """Records that a trial is about to use the pair. If the pair is blocked, the trial's outcome decides."""
        pair = prefill_id, attempt.decode.peer.worker_id
        if self._breakers.begin(pair, self._clock.monotonic()):
            attempt.probes.add(pair)

    def succeeded(self, attempt: "Attempt") -> None:
        """Records a successful handoff. Closes the pair's circuit, or drops the failures before it."""
        if attempt.prefill is None:
            return
        prefill, decode = attempt.prefill.peer, attempt.decode.peer
        pair = prefill.worker_id, decode.worker_id
        if pair in self._reasons and pair not in attempt.probes:
            return  # The handoff began before the path failed. The next trial decides.
        processes = prefill.incarnation, decode.incarnation
        self._proven.pop(processes, None)
        self._proven[processes] = None
        if len(self._proven) > MAX_PROVEN:
            del self._proven[next(iter(self._proven))]
        attempt.probes.discard(pair)
        self._breakers.forget(pair)
        if self._reasons.pop(pair, None) is not None:
            logger.info("pair unblocked", extra=_named(pair))

    def failed(self, attempt: "Attempt", error: TandemError) -> None:
        """Records that the path between the attempt's workers failed, although both are alive."""
        if attempt.prefill is None:
            return
        prefill, decode, now_s = attempt.prefill.peer, attempt.decode.peer, self._clock.monotonic()
        pair = prefill.worker_id, decode.worker_id
        self._proven.pop((prefill.incarnation, decode.incarnation), None)
        self._breakers.failed(pair, now_s, is_probe=pair in attempt.probes)
        attempt.probes.discard(pair)
        if isinstance(error, PeerUnreachable):
            self._breakers.trip(pair, now_s)
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
        for pair in [pair for pair in {*self._breakers.known(), *self._reasons} if worker_id in pair]:
            self._reasons.pop(pair, None)
            self._breakers.forget(pair)

    def _is_in_rotation(self, pair: Pair) -> bool:
        members = [self._topology.member(worker_id) for worker_id in pair]
        return all(member is not None and member.state == WorkerState.READY for member in members)


def _named(pair: Pair) -> dict[str, str]:
    return dict(zip(("prefill", "decode"), pair, strict=True))
