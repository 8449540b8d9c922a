"""Prefix fetches: loads the beginning of a prompt from another worker's cache before the prompt is admitted.

On the event loop. A fetch only fills the cache of this worker. The prompt finds the fetched pages like the pages of an
earlier prompt, and computes the rest, so a failed fetch never fails the attempt. During a fetch, its pages have their
own entry in the queue, so that they are never counted as pages of the prompt.

A fetch has two ends. Its task ends with the commit, a failure, its timeout, or the end of the attempt. Its pages are
freed at once if no transfer has reserved them. Otherwise they are freed when the transfer reports that nothing writes
to them.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_transfer.prefixes import PrefixPeer, WantedPrefix, ask_for_prefix
from kv_transfer.protocol.messages import TransferId
from kv_transfer.receive_link import Reserved
from kv_transfer.receiving import LinkReceiver
from prefill_worker.attempt import NOTHING_PULLED, PrefillAttempt, Pulled
from prefill_worker.scheduler import PromptQueue, PromptSize
from protos import worker_pb2
from services.runtime.clock import Clock, Deadline
from services.runtime.errors import RequestCancelled, TandemError, TransferFailed, WorkerUnavailable
from services.runtime.logs import request_fields
from worker.attempts import AttemptKey
from worker.engine import PrefixPages

if TYPE_CHECKING:
    from prefill_worker.worker import PrefillWorker

MAX_PULLS = 8
"""Maximum number of concurrent fetches. Further prompts are computed without one."""
MAX_LIMIT_S = 30.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PullKey:
    """Key of the pages of a fetch. They belong to the fetch and not to the attempt."""

    of: AttemptKey


@dataclass(eq=False, slots=True)
class _Pull:
    """A running fetch of at most `num_tokens` tokens."""

    attempt: PrefillAttempt
    key: PullKey
    num_tokens: int
    is_reserved: bool = False
    """Whether a transfer has reserved its pages."""
    is_committed: bool = False


class Pulls:
    """Receives prefixes on the Links of a prefill worker. `attach` sets the receiver."""

    def __init__(
        self, worker: PrefillWorker, prefixes: PrefixPages | None, *, queue: PromptQueue, clock: Clock
    ) -> None:
        self._worker = worker
        self._prefixes = prefixes
        self._queue = queue
        self._clock = clock
        self._pulls: dict[AttemptKey, _Pull] = {}
        self._receiver: LinkReceiver | None = None

    def attach(self, receiver: LinkReceiver) -> None:
        """Sets the receiver that serves the Links."""
        self._receiver = receiver

    async def fetch(self, attempt: PrefillAttempt, message: worker_pb2.Pull) -> Pulled:
        """Fetches the beginning of a prompt, as far as that succeeds within the time limit."""
        pull = self._begin(attempt, message.num_tokens)
        if pull is None:
            return NOTHING_PULLED
        start_s, num_bytes = self._clock.monotonic(), 0
        limit_s = min(message.limit_ms / 1000, MAX_LIMIT_S, attempt.spec.deadline.remaining_s())
        wanted = WantedPrefix(
            TransferId(*attempt.spec.key),
            attempt.spec.prompt_token_ids[: pull.num_tokens + 1],
            attempt.spec.cache_salt,
            self._page_size,
        )
        try:
            async with asyncio.timeout(limit_s):
                num_bytes = await ask_for_prefix(
                    wanted,
                    holder=PrefixPeer(message.address, message.incarnation),
                    asker=PrefixPeer(message.own_address, self._worker.incarnation),
                    deadline=Deadline.after(limit_s, clock=self._clock),
                )
        except (TandemError, TimeoutError) as error:
            fields = request_fields(*attempt.spec.key, attempt.spec.traceparent)
            reason = error.message if isinstance(error, TandemError) else f"it took longer than {limit_s:.3f} s"
            logger.info("a prefix is computed that was to be pulled: %s", reason, extra=fields)
        finally:
            self._end(pull)
        num_tokens = pull.num_tokens if pull.is_committed else 0
        return Pulled(num_tokens, num_bytes, self._clock.monotonic() - start_s)

    @property
    def _page_size(self) -> int:
        return self._worker.facts.limits.page_size

    def _begin(self, attempt: PrefillAttempt, num_tokens: int) -> _Pull | None:
        """Reserves capacity for a fetch of whole pages. Returns None if there is nothing to fetch or no capacity."""
        # The last token is always computed, because it yields the first token of the response.
        num_pages = min(num_tokens, attempt.num_tokens - 1) // self._page_size
        if self._prefixes is None or self._receiver is None or not num_pages or len(self._pulls) >= MAX_PULLS:
            return None
        pull = _Pull(attempt, PullKey(attempt.spec.key), num_pages * self._page_size)
        if not self._queue.enter_computed(pull.key, PromptSize(pull.num_tokens, num_pages)):
            return None
        self._pulls[attempt.spec.key] = pull
        return pull

    def _end(self, pull: _Pull) -> None:
        """Cancels a fetch unless it has been committed."""
        key = pull.key.of
        if self._pulls.get(key) is not pull:
            return
        if not pull.is_reserved:
            self._forget(pull)
        assert self._receiver is not None, "a pull begins where something can arrive"
        self._receiver.abort(TransferId(*key), RequestCancelled("the prefix is no longer awaited"))

    def _forget(self, pull: _Pull) -> None:
        del self._pulls[pull.key.of]
        self._queue.leave(pull.key)
        self._worker.room_changed()

    # --- implements ReceiveTarget ---

    async def reserve(self, transfer_id: TransferId, num_tokens: int) -> Reserved:
        """Reserves the pages of the prefix. Raises TransferFailed if the worker does not expect this prefix."""
        pull, prefixes = self._pulls.get(_key(transfer_id)), self._prefixes
        if pull is None or prefixes is None or pull.is_reserved:
            raise TransferFailed("no prefix is awaited for this attempt")
        if not 0 < num_tokens <= pull.num_tokens or num_tokens % self._page_size:
            raise TransferFailed(f"a prefix of up to {pull.num_tokens} tokens is awaited, not {num_tokens}")
        pull.is_reserved, pull.num_tokens = True, num_tokens
        spec, salt = pull.attempt.spec, self._worker.salt(pull.attempt.spec)
        token_ids = spec.prompt_token_ids[:num_tokens]
        asking = self._worker.command(lambda: prefixes.reserve_prefix(pull.key, token_ids, salt=salt))
        try:
            reserved = await asyncio.shield(asyncio.wrap_future(asking))
        except Exception as error:
            await self.release(transfer_id, TransferFailed("the pages could not be reserved"))
            raise WorkerUnavailable("the prefill worker failed") from error
        return Reserved(page_ids=reserved.page_ids, num_cached_tokens=reserved.num_cached_tokens)

    async def commit(self, transfer_id: TransferId, *, first_token_id: int, sampling_position: int) -> None:
        """Adds the pages to the prefix cache.

        Raises if they are no longer expected, or if the seal contradicts the prompt.
        """
        pull, prefixes = self._pulls.get(_key(transfer_id)), self._prefixes
        if pull is None or prefixes is None or not pull.is_reserved:
            raise RequestCancelled("the prefix is no longer awaited")
        next_token_id = pull.attempt.spec.prompt_token_ids[pull.num_tokens]
        if (first_token_id, sampling_position) != (next_token_id, pull.num_tokens + 1):
            raise TransferFailed("the seal does not continue this prompt")
        pull.is_committed = True
        self._worker.command(lambda: prefixes.cache_prefix(pull.key))
        self._forget(pull)

    async def release(self, transfer_id: TransferId, error: TandemError) -> None:
        """Frees the pages of a transfer that ended without a commit."""
        pull, prefixes = self._pulls.get(_key(transfer_id)), self._prefixes
        if pull is not None and prefixes is not None and pull.is_reserved:
            self._worker.command(lambda: prefixes.close(pull.key))
            self._forget(pull)

    async def abandon(self, transfer_id: TransferId, error: TandemError) -> None:
        """Does nothing: verified pages are valid even if their sender has given up."""

    async def close(self) -> None:
        """Ends all transfers. Returns once nothing writes into pages."""
        if self._receiver is not None:
            await self._receiver.close()


def _key(transfer_id: TransferId) -> AttemptKey:
    return AttemptKey(transfer_id.request_id, transfer_id.attempt)
