"""Moving running answers away from a decode worker that is leaving, pages and all; the client notices nothing.

    Pause → Paused → Admit at another decode worker → HandOver → DecodeStarted there

Everything happens in the request's own task, between two deltas: tokens that come before the worker has stopped are
delivered as ever. Where no worker takes the answer, it continues where it is and asks again while that worker is
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
        if attempt.is_move and attempt.is_decoding:
            self.end(request)
        if attempt.decode.load.is_draining and attempt.can_pause and request not in self._givers:
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
            return
        if not self._dispatcher.takers(request, attempt.decode):
            request.put_off_move(TRY_AGAIN_S)
            return
        try:
            attempt.pause()
        except TandemError:
            return  # The worker is gone or does not listen; the attempt will hear of it.
        self._givers[request] = giver
        self._num_moves[giver] += 1

    async def _hand_over(self, request: RunningAnswer, older: Attempt) -> Attempt:
        """Finds a taker and has the pages sent there. Without one, the older attempt continues."""
        try:
            for view in self._dispatcher.takers(request, older.decode):
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
        request.put_off_move(TRY_AGAIN_S)
        return older

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
