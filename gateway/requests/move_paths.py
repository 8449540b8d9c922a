"""Remembers between which decode workers a move failed, so that the next move chooses another target.

The gateway sends no trial over a blocked path. When the block ends, the next move uses the path. If that move fails,
another worker recomputes the response, and its client notices nothing.
"""

import logging

from gateway.requests.pair_circuits import MAX_ERRORS, WINDOW_S
from gateway.topology.session import Peer
from services.runtime.clock import Clock
from services.runtime.errors import PeerUnreachable, TransferFailed
from services.scheduling.breakers import Breakers

Path = tuple[Peer, Peer]
"""The decode worker that an answer leaves, and its next one."""

logger = logging.getLogger(__name__)


class MovePaths:
    """The paths of one gateway, by the incarnations of both workers."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._breakers = Breakers(max_errors=MAX_ERRORS, window_s=WINDOW_S)

    def is_blocked(self, giver: str, taker: str) -> bool:
        """Returns whether no answer should move between these incarnations now."""
        return bool(self._breakers.num_open and self._breakers.shut([(giver, taker)], self._clock.monotonic()))

    def succeeded(self, path: Path) -> None:
        """Records a move that arrived, and drops the failures before it."""
        self._breakers.forget(_key(path))

    def failed(self, path: Path, error: TransferFailed) -> None:
        """Records a failed move. An unreachable peer blocks the path at once, other errors after MAX_ERRORS."""
        key, now_s = _key(path), self._clock.monotonic()
        was_open = self._breakers.is_open(key)
        self._breakers.failed(key, now_s, is_probe=was_open)
        if isinstance(error, PeerUnreachable):
            self._breakers.trip(key, now_s)
        if self._breakers.is_open(key) and not was_open:
            giver, taker = path
            found = {"giver": giver.worker_id, "taker": taker.worker_id, "reason": error.message}
            logger.warning("move path blocked", extra=found)


def _key(path: Path) -> tuple[str, str]:
    giver, taker = path
    return giver.incarnation, taker.incarnation
