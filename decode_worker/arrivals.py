"""The receiving side of a handoff: reserves pages, receives them, and commits or frees them. On the event loop.

A reservation holds pages from RECEIVING on. A transfer may write into them until it calls `release`, even if the
attempt ends earlier. The worker's table of attempts is the fence: a transfer or a commit for an attempt outside that
table is rejected.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import TYPE_CHECKING

from decode_worker.attempt import DecodeAttempt, Phase
from kv_transfer.protocol.messages import TransferId
from kv_transfer.receive_link import Reserved
from kv_transfer.receiving import LinkReceiver
from services.runtime.errors import RequestCancelled, TandemError, TransferFailed, WorkerUnavailable
from worker.attempts import AttemptKey
from worker.engine import DecodeEngine, ReservedPages
from worker.sessions import Payload, failed

if TYPE_CHECKING:
    from decode_worker.worker import DecodeWorker


class Arrivals:
    """Attempts whose pages a transfer holds or waits for, ended or not. Implements ReceiveTarget."""

    def __init__(self, worker: DecodeWorker, engine: DecodeEngine) -> None:
        self._worker = worker
        self._engine = engine
        self._receiver: LinkReceiver
        self._receiving: dict[AttemptKey, DecodeAttempt] = {}
        self._reserving: set[Future[ReservedPages]] = set()
        """Reservations that wait for pages."""

    def attach(self, receiver: LinkReceiver) -> None:
        """Sets the receiver that uses this target. Call it before the first session."""
        self._receiver = receiver

    def __contains__(self, key: object) -> bool:
        """Returns whether a transfer holds the attempt's pages or waits for them."""
        return key in self._receiving

    async def reserve(self, transfer_id: TransferId, num_tokens: int) -> Reserved:
        """Reserves the pages of the prompt. Raises TransferFailed if the attempt does not wait for pages here."""
        key = AttemptKey(transfer_id.request_id, transfer_id.attempt)
        attempt = self._worker.find(key)
        if attempt is None or attempt.phase is not Phase.ADMITTED:
            raise TransferFailed("the attempt does not wait for pages here")
        if num_tokens != attempt.num_tokens_to_come:
            raise TransferFailed(f"the attempt waits for {attempt.num_tokens_to_come} tokens, not {num_tokens}")
        attempt.phase = Phase.RECEIVING
        self._receiving[key] = attempt
        spec, salt = attempt.spec, self._worker.salt(attempt.spec)
        token_ids = [*spec.prompt_token_ids, *spec.emitted_token_ids][:num_tokens]
        num_prompt_tokens = len(spec.prompt_token_ids)
        asking = self._worker.command(
            lambda: self._engine.reserve(
                key,
                token_ids,
                num_prompt_tokens=num_prompt_tokens,
                salt=salt,
                service_class=spec.service_class,
                adapter=spec.adapter,
            )
        )
        try:
            # If the attempt ends during the wait, its transfer is aborted and frees the pages through `release`.
            reserved = await self._reserved(await asyncio.shield(asyncio.wrap_future(asking)))
        except RequestCancelled:  # the attempt ended while it waited for pages
            await self.release(transfer_id, TransferFailed("the attempt has ended"))
            raise
        except Exception as error:
            await self.release(transfer_id, TransferFailed("the pages could not be reserved"))
            raise WorkerUnavailable("the decode worker failed") from error
        return Reserved(page_ids=reserved.page_ids, num_cached_tokens=reserved.num_cached_tokens)

    async def _reserved(self, given: Future[ReservedPages]) -> ReservedPages:
        self._reserving.add(given)
        try:
            return await asyncio.shield(asyncio.wrap_future(given))
        finally:
            self._reserving.discard(given)

    async def commit(self, transfer_id: TransferId, *, first_token_id: int, sampling_position: int) -> None:
        """Queues the sequence for the batch. Raises if the attempt has ended or the seal contradicts it."""
        key = AttemptKey(transfer_id.request_id, transfer_id.attempt)
        attempt = self._worker.find(key)
        if attempt is None or key not in self._receiving:
            raise RequestCancelled("the attempt has ended here")
        emitted = attempt.spec.emitted_token_ids or [first_token_id]
        num_tokens = attempt.num_tokens_to_come
        is_next = first_token_id == (emitted[-1] if attempt.from_decode else emitted[0])
        if sampling_position != num_tokens + 1 or not is_next:
            raise TransferFailed("the seal does not continue this attempt")
        self._worker.facts.limits.check_token_ids([first_token_id])
        del self._receiving[key]
        attempt.phase = Phase.COMPUTING
        self._worker.start(attempt, num_computed_tokens=num_tokens, emitted_token_ids=emitted)

    async def release(self, transfer_id: TransferId, error: TandemError) -> None:
        """Frees the pages of a transfer that ended without a commit. Call it once nothing writes to them."""
        key = AttemptKey(transfer_id.request_id, transfer_id.attempt)
        attempt = self._receiving.pop(key, None)
        if attempt is None:
            return
        if attempt.phase is Phase.ENDED:
            self._worker.free(key)
        else:
            self._worker.end(attempt, "failed", error, answer=_answer(error))

    async def abandon(self, transfer_id: TransferId, error: TandemError) -> None:
        """Ends an attempt whose sender aborted the transfer before the commit reached it. The result is not needed."""
        attempt = self._worker.find(AttemptKey(transfer_id.request_id, transfer_id.attempt))
        if attempt is not None:
            self._worker.end(attempt, "failed", error, answer=_answer(error))

    def abort(self, key: AttemptKey, reason: TandemError) -> None:
        """Ends the transfer of an attempt that has ended. The transfer calls `release` once it holds no pages."""
        self._worker.command(lambda: self._engine.withdraw(key))
        self._receiver.abort(TransferId(*key), reason)

    def fail(self, error: TandemError) -> None:
        """Fails the pending reservations because the engine can no longer grant pages."""
        for given in self._reserving:
            if not given.done():
                given.set_exception(error)

    async def close(self) -> None:
        """Ends all transfers. Returns once nothing writes into pages."""
        await self._receiver.close()


def _answer(error: TandemError) -> Payload | None:
    """Returns the event for an ended transfer, or None if the side that cancelled it reports the end."""
    return None if isinstance(error, RequestCancelled) else failed(error)
