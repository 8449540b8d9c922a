"""One try of one answer on a pair of workers: its events put in order, its capacity given back when it is left.

Tokens come from two workers on two streams: index 0 from the prefill worker, the rest from the decode worker, and
either may arrive first. Knows neither how workers are chosen nor what happens after a failure.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from gateway.sessions import (
    Admitted,
    DecodeSession,
    DecodeStarted,
    Event,
    Failed,
    Finished,
    HandedOff,
    PrefillSession,
    Refused,
    SequenceOrder,
    TokenLogprobs,
    Tokens,
    WorkerSession,
)
from services.runtime.errors import InternalError, Overloaded, TandemError, TransferFailed, WorkerUnavailable

FinishReason = Literal["stop", "length"]


class CrowdedOut(Exception):
    """A worker has no room for an attempt that another one had admitted: it goes back to the queue."""


class TokenLog:
    """The tokens of one answer, over all attempts. Index n is taken only after n-1; repeats are dropped."""

    def __init__(self, max_tokens: int) -> None:
        self.token_ids: list[int] = []
        self._max_tokens = max_tokens

    @property
    def next_index(self) -> int:
        """The index that must come next."""
        return len(self.token_ids)

    @property
    def is_full(self) -> bool:
        """Whether there are max_tokens tokens."""
        return len(self.token_ids) >= self._max_tokens

    def accept(self, tokens: Tokens) -> Tokens:
        """Appends what is new and returns it. Raises TransferFailed at a gap, InternalError beyond max_tokens."""
        num_known = self.next_index - tokens.first_index
        if num_known < 0:
            raise TransferFailed(f"token {self.next_index} is missing; the worker sent {tokens.first_index} next")
        if tokens.logprobs is not None and len(tokens.logprobs) != len(tokens.token_ids):
            raise InternalError("a worker sent tokens without their log-probabilities")
        if num_known > 0:
            logprobs = None if tokens.logprobs is None else tokens.logprobs[num_known:]
            tokens = Tokens(self.next_index, tokens.token_ids[num_known:], logprobs)
        if self.next_index + len(tokens.token_ids) > self._max_tokens:
            raise InternalError("a worker sent more tokens than it was asked for")
        self.token_ids += tokens.token_ids
        return tokens


class Mailbox:
    """Events of one answer on their way from the sessions to whoever runs it."""

    def __init__(self) -> None:
        self._events: deque[tuple[WorkerSession, Event]] = deque()
        self._error: TandemError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def deliver(self, session: WorkerSession, event: Event) -> None:
        """Takes an event; a session's routes call this."""
        self._events.append((session, event))
        self._wake()

    def fail(self, error: TandemError) -> None:
        """Makes every wait from now on raise `error`, such as when the deadline has passed."""
        self._error = error
        self._wake()

    def clear(self) -> None:
        """Forgets events of an attempt that is over."""
        self._events.clear()

    async def wait(self) -> deque[tuple[WorkerSession, Event]]:
        """Waits for at least one event and gives the queue itself, to take from its left. Raises the failure."""
        while not self._events and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None:
            raise self._error
        return self._events

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(slots=True)
class Arrived:
    """New tokens in order, and whether the worker ended the answer with them."""

    first_index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None


class Attempt:
    """Holds capacity on its workers until it is closed; use `close` in a `finally`."""

    def __init__(self, order: SequenceOrder, *, decode: DecodeSession, mailbox: Mailbox, log: TokenLog) -> None:
        self.order = order
        self.decode = decode
        self.prefill: PrefillSession | None = None
        self.num_cached_tokens = 0
        self.handed_off: HandedOff | None = None
        self._mailbox = mailbox
        self._log = log
        self._spare_prefills: list[PrefillSession] = []
        self._is_at_decode = False
        self._is_at_prefill = False
        self._is_decoding = False
        self._held: list[Event] = []
        self._arrived = Arrived(log.next_index)
        self._ended_by: TandemError | None = None

    async def admit(self, *, is_local_prefill: bool) -> None:
        """Asks the decode worker for capacity. Raises the error of its refusal or failure."""
        self._mailbox.clear()
        self.decode.open(self.order.key, self._mailbox)
        self._is_at_decode = True
        self.decode.admit(self.order, is_local_prefill=is_local_prefill)
        while True:
            events = await self._mailbox.wait()
            _, event = events.popleft()
            if isinstance(event, Admitted):
                self.num_cached_tokens = event.num_cached_tokens
                return
            if isinstance(event, Refused | Failed):
                self._leave_decode()
                raise event.error

    def start_prefill(self, candidates: Sequence[PrefillSession]) -> None:
        """Has the prompt computed by the first of these that takes it. Raises the error of the last one."""
        self._spare_prefills = list(candidates)
        self._use_next_prefill(WorkerUnavailable("no prefill worker is connected"))

    async def next_arrived(self) -> Arrived:
        """Waits for events and gives what they brought. Raises CrowdedOut, or the error that ended the attempt.

        Tokens that came before the error are given first: they are in the log, so no later attempt sends them again.
        """
        if self._ended_by is None:
            self._arrived = Arrived(self._log.next_index)
            events = await self._mailbox.wait()
            try:
                self._take_all(events)
            except TandemError as error:
                self._ended_by = error
            if self._ended_by is None or self._arrived.token_ids:
                return self._arrived
        if isinstance(self._ended_by, Overloaded):
            raise CrowdedOut(self._ended_by.message) from self._ended_by
        raise self._ended_by

    @property
    def is_decoding(self) -> bool:
        """Whether the decode worker has begun to generate."""
        return self._is_decoding

    def close(self) -> None:
        """Frees what the workers still hold, and drops whatever still comes. May be called twice."""
        if self._is_at_prefill and self.prefill is not None:
            self._is_at_prefill = False
            self.prefill.cancel(self.order.key)
        elif self.prefill is not None:
            self.prefill.close(self.order.key)
        if self._is_at_decode:
            self._is_at_decode = False
            self.decode.cancel(self.order.key)
        else:
            self.decode.close(self.order.key)

    def _take_all(self, events: deque[tuple[WorkerSession, Event]]) -> None:
        while events and self._arrived.finish_reason is None:
            session, event = events.popleft()
            if session is self.decode:
                self._take_from_decode(event)
            elif session is self.prefill:
                self._take_from_prefill(event)

    def _take_from_decode(self, event: Event) -> None:
        if isinstance(event, Failed | Refused):
            self._leave_decode()
            raise event.error
        if isinstance(event, DecodeStarted):
            self._is_decoding = True
        if not isinstance(event, Tokens | Finished):
            return
        is_early = self._held or (isinstance(event, Tokens) and event.first_index > self._log.next_index)
        if is_early and self._is_at_prefill:
            self._held.append(event)
        elif isinstance(event, Tokens):
            self._accept(event)
        else:
            self._leave_decode()
            self._finish(event)

    def _take_from_prefill(self, event: Event) -> None:
        if isinstance(event, Tokens):
            self._accept(event)
            self._release_held()
        elif isinstance(event, HandedOff):
            self.handed_off = event
            self._leave_prefill()
        elif isinstance(event, Finished):
            self._leave_prefill()
            self._finish(event)
        elif isinstance(event, Refused):
            self._use_next_prefill(event.error)
        elif isinstance(event, Failed):
            if not self._is_decoding:
                self._is_at_prefill = False
                raise event.error
            self._leave_prefill()

    def _use_next_prefill(self, error: TandemError) -> None:
        self._is_at_prefill = False
        while self._spare_prefills:
            self.prefill = self._spare_prefills.pop(0)
            try:
                self.prefill.open(self.order.key, self._mailbox)
                self.prefill.prefill(self.order, decode=self.decode.peer)
            except TandemError as next_error:
                error = next_error
                continue
            self._is_at_prefill = True
            return
        raise error

    def _leave_prefill(self) -> None:
        """The prefill worker's part is over, so nothing can be missing any more in what was held."""
        self._is_at_prefill = False
        self._release_held()

    def _leave_decode(self) -> None:
        self._is_at_decode = False
        self.decode.close(self.order.key)

    def _release_held(self) -> None:
        held, self._held = self._held, []
        for event in held:
            self._take_from_decode(event)

    def _accept(self, tokens: Tokens) -> None:
        new = self._log.accept(tokens)
        self._arrived.token_ids += new.token_ids
        if new.logprobs is not None:
            self._arrived.logprobs = (self._arrived.logprobs or []) + new.logprobs

    def _finish(self, event: Finished) -> None:
        if event.reason == "cancelled":
            raise WorkerUnavailable("the worker gave the answer up")
        self._arrived.finish_reason = event.reason
