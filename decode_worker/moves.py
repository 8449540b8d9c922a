"""The sending side of a live migration: pauses a sequence and sends its pages to the decode worker that continues it.

On the event loop. If a migration fails, the attempt ends. Its pages are freed once nothing reads them.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from decode_worker.attempt import DecodeAttempt, Phase
from kv_transfer.protocol.messages import TransferId
from kv_transfer.send_link import HandoffStats
from kv_transfer.sending import SendLinks
from protos import worker_pb2
from services.runtime.clock import Clock
from services.runtime.errors import InvalidRequest, RequestCancelled, TandemError, TransferFailed
from services.runtime.logs import request_fields
from worker.attempts import handed_off_message
from worker.engine import DecodeEngine, PausedSequence
from worker.metrics import WorkerMetrics
from worker.sessions import Session, failed

if TYPE_CHECKING:
    from decode_worker.worker import DecodeWorker

logger = logging.getLogger(__name__)


class Moves:
    """Handles the commands by which a gateway migrates a sequence."""

    def __init__(
        self, worker: DecodeWorker, engine: DecodeEngine, *, links: SendLinks, metrics: WorkerMetrics, clock: Clock
    ) -> None:
        self._worker = worker
        self._engine = engine
        self._links = links
        self._metrics = metrics
        self._clock = clock

    async def on_pause(self, session: Session, message: worker_pb2.Pause) -> None:
        """Pauses a sequence as soon as possible."""
        attempt = self._worker.find_of(session, message.id)
        if attempt is None:
            return
        attempt.wants_pause = True
        if attempt.phase is Phase.COMPUTING:
            self._worker.command(lambda: self._engine.pause(attempt.spec.key))

    async def on_unpause(self, session: Session, message: worker_pb2.Unpause) -> None:
        """Resumes a sequence on this worker."""
        attempt = self._worker.find_of(session, message.id)
        if attempt is None or attempt.phase is Phase.HANDING_OVER:
            return
        attempt.wants_pause = False
        # If the sequence is not yet paused, it resumes once the engine reports the pause.
        if attempt.phase is Phase.PAUSED:
            self._continue(attempt)

    async def on_hand_over(self, session: Session, message: worker_pb2.HandOver) -> None:
        """Starts sending a paused sequence to another worker."""
        attempt = self._worker.find_of(session, message.id)
        if attempt is None or attempt.phase is Phase.HANDING_OVER:
            return
        if attempt.phase is not Phase.PAUSED or message.next_attempt <= attempt.spec.key.attempt:
            error = InvalidRequest("only a paused attempt is handed over, and to a later one", field="next_attempt")
            self._worker.end(attempt, "failed", error, answer=failed(error))
            return
        attempt.phase = Phase.HANDING_OVER
        attempt.hand_over = self._worker.begin_task(self._hand_over(attempt, message))
        attempt.hand_over.add_done_callback(lambda task: self._on_ended(attempt, task))

    def on_paused(self, attempt: DecodeAttempt, paused: PausedSequence) -> None:
        """Notifies the gateway that a sequence is paused. Resumes the sequence if the pause was withdrawn."""
        if not attempt.wants_pause:
            self._continue(attempt)
            return
        attempt.phase = Phase.PAUSED
        attempt.paused = paused
        self._worker.emit(attempt, worker_pb2.Paused(num_tokens=paused.num_generated_tokens))

    def _continue(self, attempt: DecodeAttempt) -> None:
        attempt.phase = Phase.COMPUTING
        attempt.paused = None
        self._worker.command(lambda: self._engine.unpause(attempt.spec.key))

    async def _hand_over(self, attempt: DecodeAttempt, message: worker_pb2.HandOver) -> HandoffStats:
        """Sends the pages. Returns once the other worker has committed them."""
        paused = attempt.paused
        assert paused is not None, "only a paused attempt is handed over"
        transfer = attempt.transfer = await self._links.reserve(
            message.decode_address,
            message.decode_incarnation,
            TransferId(attempt.spec.key.request_id, message.next_attempt),
            num_tokens=paused.num_computed_tokens,
            deadline=attempt.spec.deadline,
        )
        start_s, start_unix_ns = self._clock.monotonic(), self._clock.unix_ns()
        try:
            transfer.send(0, paused.page_ids)
            stats = await transfer.seal(
                num_tokens=paused.num_computed_tokens,
                first_token_id=paused.next_token_id,
                sampling_position=paused.num_computed_tokens + 1,
            )
        except BaseException as error:
            attempt.spans.sending(start_unix_ns, self._clock.unix_ns(), error=error, is_move=True)
            raise
        attempt.spans.sending(start_unix_ns, self._clock.unix_ns(), sent=stats, is_move=True)
        now_s = self._clock.monotonic()
        self._metrics.note_transfer(num_bytes=stats.num_bytes, seconds=now_s - start_s, exposed_s=stats.exposed_s)
        self._engine.speedometer.observe_transfer(stats.num_bytes, stats.exposed_s, now_s)
        return stats

    def _on_ended(self, attempt: DecodeAttempt, task: asyncio.Task[HandoffStats]) -> None:
        key = attempt.spec.key
        attempt.spans.export()
        error = RequestCancelled("the attempt was cancelled") if task.cancelled() else task.exception()
        if error is None:
            answer = handed_off_message(task.result())
            self._worker.end(attempt, "handed_off", RequestCancelled("it moved"), answer=answer)
            self._worker.free(key)
            return
        if not isinstance(error, TandemError):
            logger.error("a handover failed", exc_info=error, extra=request_fields(*key, attempt.spec.traceparent))
            error = TransferFailed("the handover failed")
        self._worker.end(attempt, "failed", error, answer=failed(error))
        if attempt.transfer is None:
            self._worker.free(key)
        else:
            self._worker.abort_transfer(attempt.transfer, error, lambda: self._worker.free(key))
