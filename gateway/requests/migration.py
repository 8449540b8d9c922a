"""Moving running answers from one decode worker to another, pages and all; the client notices nothing.

An answer moves because its worker is leaving, to whichever other worker takes it, or because another one is wanted
(`gateway.requests.rebalancing`), to that one only.

    Pause → Paused → Admit at another decode worker → HandOver → DecodeStarted there

Everything happens in the request's own task, between two deltas: tokens that come before the worker has stopped are
delivered as ever. Where no worker takes the answer, it continues where it is, and asks again while that worker is
leaving. If the worker dies meanwhile, that is an ordinary failure, and the log has every token.
"""

import asyncio
import logging
from collections import Counter

from gateway.observability.metrics import Metrics
from gateway.requests.answer import RunningAnswer
from gateway.requests.attempt import Attempt, Giver, GiverFailed
from gateway.requests.dispatch import Dispatcher
from gateway.requests.stage import AttemptStage
from gateway.topology.members import Topology
from services.runtime.errors import TandemError, WorkerUnavailable
from services.scheduling.routing.views import WorkerView

MAX_MOVES_PER_WORKER = 8
"""The most moves from a worker at a time: an answer is paused until its pages arrive, and all share one way out."""
TRY_AGAIN_S = 1.0
PAUSE_LIMIT_S = 5.0
"""An answer that another worker is wanted for, and that is not paused within this time, stays: its worker may have an
engine that cannot pause it."""

logger = logging.getLogger(__name__)


class Moves:
    """All moves of one gateway."""

    def __init__(self, *, topology: Topology, dispatcher: Dispatcher, metrics: Metrics) -> None:
        self._topology = topology
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._givers: dict[RunningAnswer, str] = {}
        """The answers that are moving, and the incarnation of the worker that each leaves."""
        self._num_moves: Counter[str] = Counter()

    async def follow(self, request: RunningAnswer, attempt: Attempt) -> Attempt:
        """Returns the attempt that continues from here: this one, or the one at the answer's new worker."""
        if attempt.stage is AttemptStage.PAUSED:
            return await self._hand_over(request, attempt)
        if attempt.is_arriving and attempt.is_decoding:
            attempt.is_arriving = False
            self.end(request)
            if attempt.giver is not None:
                self._dispatcher.move_paths.succeeded((attempt.giver.session.peer, attempt.decode.peer))
        is_late = asyncio.get_running_loop().time() >= request.next_move_at_s
        if attempt.stage is AttemptStage.PAUSING and attempt.wanted and is_late:
            attempt.unpause()
            self.end(request)
            self._put_off(request, attempt)
        has_to_go = attempt.decode.load.is_draining or attempt.wanted
        if has_to_go and attempt.can_pause and request not in self._givers:
            self._begin(request, attempt)
        return attempt

    def end(self, request: RunningAnswer) -> None:
        """Notes that the request no longer moves, or that its attempt is over."""
        giver = self._givers.pop(request, None)
        if giver is not None:
            self._num_moves[giver] -= 1
            if not self._num_moves[giver]:
                del self._num_moves[giver]

    def _begin(self, request: RunningAnswer, attempt: Attempt) -> None:
        giver = attempt.decode.peer.incarnation
        now_s = asyncio.get_running_loop().time()
        if now_s < request.next_move_at_s or self._num_moves[giver] >= MAX_MOVES_PER_WORKER:
            attempt.wanted = ""
            return
        if not self._takers(request, attempt):
            self._put_off(request, attempt)
            return
        try:
            attempt.pause()
        except TandemError:
            attempt.wanted = ""
            return  # The worker is gone or does not listen; the attempt will hear of it.
        self._givers[request] = giver
        request.put_off_move(PAUSE_LIMIT_S)
        self._num_moves[giver] += 1

    async def _hand_over(self, request: RunningAnswer, older: Attempt) -> Attempt:
        """Finds a taker and has the pages sent there. Without one, the older attempt continues."""
        try:
            for view in self._takers(request, older):
                newer = await self._offer(request, older, view)
                if newer is not None:
                    request.move_to(newer)
                    self._metrics.moves.labels("begun").inc()
                    return newer
            older.unpause()
        except (GiverFailed, WorkerUnavailable) as gone:
            logger.info("the worker is gone", extra={"worker": older.decode.peer.worker_id, "reason": str(gone)})
        self.end(request)
        self._metrics.moves.labels("refused").inc()
        self._put_off(request, older)
        return older

    def _takers(self, request: RunningAnswer, attempt: Attempt) -> list[WorkerView]:
        """Returns the workers that are asked to take the answer, best first."""
        views = self._dispatcher.takers(request, attempt.decode)
        if attempt.decode.load.is_draining:
            return views
        return [view for view in views if view.worker_id == attempt.wanted]

    def _put_off(self, request: RunningAnswer, attempt: Attempt) -> None:
        """Notes that no worker takes the answer now."""
        attempt.wanted = ""
        request.put_off_move(TRY_AGAIN_S)

    async def _offer(self, request: RunningAnswer, older: Attempt, view: WorkerView) -> Attempt | None:
        """None: the worker does not take the answer. Raises GiverFailed."""
        try:
            decode = self._topology.decode_session(view.worker_id)
        except WorkerUnavailable:
            return None
        watch = self._dispatcher.new_watch(request, view)
        newer = request.new_attempt(decode, watch, giver=Giver(older.decode, older.order.key))
        try:
            await newer.admit(is_local_prefill=False)
            newer.take_over(older)
        except TandemError as refusal:
            # Should the request itself be over, the older attempt is told so, too.
            newer.close()
            logger.info("not moved", extra={"to": view.worker_id, "reason": refusal.message})
            return None
        except BaseException:
            newer.close()
            raise
        return newer
