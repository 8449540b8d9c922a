"""One try of one answer on a pair of workers: its events put in order, its capacity given back when it is left.

Tokens come from two workers on two streams: index 0 from the prefill worker, the rest from the decode worker, and
either may arrive first. The pages may also come from a decode worker that is leaving, the `Giver`. Knows neither how
workers are chosen nor what happens after a failure; says only whose failure it was.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass, replace

from gateway.observability.tracing import AttemptFacts
from gateway.requests.mailbox import Mailbox
from gateway.requests.tokens import Arrived, TokenLog
from gateway.topology.events import (
    Admitted,
    AttemptKey,
    Cancelled,
    Declined,
    DecodeStarted,
    Emitted,
    Event,
    Failed,
    Finished,
    HandedOff,
    Paused,
    PrefillStarted,
    SequenceOrder,
    Unfit,
)
from gateway.topology.session import DecodeSession, PrefillSession, WorkerSession
from gateway.topology.watch import AttemptWatch
from services.cluster.placements import State
from services.runtime.errors import (
    InternalError,
    LayoutMismatch,
    Overloaded,
    TandemError,
    TransferFailed,
    WorkerLost,
    WorkerUnavailable,
)


class CrowdedOut(Exception):
    """A worker has no room for an attempt that another one had admitted: it goes back to the queue."""


class GiverFailed(Exception):
    """The decode worker that an answer was to be moved away from said something; the older attempt hears it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What ended an attempt, and who is to blame.

    `worker` failed; None: one of the two did, or the way between them. `suspects` were computing the request and may
    have died of it; whether they are dead may become known only later. `is_certain`: one of them has said so.
    `is_fresh`: no token had come from them in this attempt.
    """

    error: TandemError
    worker: WorkerSession | None = None
    suspects: tuple[WorkerSession, ...] = ()
    is_certain: bool = False
    is_fresh: bool = True


@dataclass(frozen=True, slots=True)
class Giver:
    """A decode worker that an answer moves away from, and the attempt as which it knows it."""

    session: DecodeSession
    key: AttemptKey


class Attempt:
    """Holds capacity on its workers until it is closed; use `close` in a `finally`."""

    def __init__(
        self,
        order: SequenceOrder,
        *,
        decode: DecodeSession,
        mailbox: Mailbox,
        log: TokenLog,
        watch: AttemptWatch,
        giver: Giver | None = None,
    ) -> None:
        self.order = order
        self.decode = decode
        self.prefill: PrefillSession | None = None
        self.fault: Fault | None = None
        self.probes: set[Hashable] = set()
        """Circuit breakers whose probe this attempt is."""
        self.watch = watch
        self.prompt_done_at_s: float | None = None
        """When the prefill worker last had all pages of the prompt, by the event loop's time."""
        self._giver = giver
        self.facts = AttemptFacts(
            number=order.key.attempt,
            trace=order.trace,
            num_prompt_tokens=len(order.prompt_token_ids),
            num_replayed_tokens=len(order.emitted_token_ids),
            decode_worker=decode.peer.worker_id,
            is_move=giver is not None,
        )
        self._mailbox = mailbox
        self._log = log
        self._spare_prefills: list[PrefillSession] = []
        self._is_local = False
        self._is_at_decode = False
        self._is_at_prefill = False
        self._is_at_giver = False
        self._has_taken_over = False
        self._is_begun = False
        self._is_decoding = False
        self._is_pausing = False
        self._is_paused = False
        self._is_heard = False
        """It is known what the attempt has failed of, as far as anybody can tell."""
        self._token_sources: set[WorkerSession] = set()
        self._held: list[Event] = []
        self._arrived = Arrived(log.next_index)
        self._ended_by: TandemError | None = None

    async def admit(self, *, is_local_prefill: bool) -> None:
        """Asks the decode worker for capacity. Raises the error of its refusal or failure, or GiverFailed."""
        if self._giver is None:
            self._mailbox.clear()
        self._is_local = is_local_prefill
        self.decode.open(self.order.key, self._mailbox, num_left=self._log.num_left)
        self._is_at_decode = True
        self.decode.admit(self.order, is_local_prefill=is_local_prefill, is_from_decode=self._giver is not None)
        while True:
            await self._mailbox.wait()
            events = self._mailbox.events
            session, event = events[0]
            if self._giver is not None and session is self._giver.session:
                raise GiverFailed
            events.popleft()
            if isinstance(event, Admitted):
                return
            if isinstance(event, Declined | Failed):
                if isinstance(event, Declined):
                    self.fault, self._is_heard = Fault(event.error, self.decode), True
                elif self._is_local and isinstance(event.error, WorkerLost):
                    # It may have begun at once, and its word of that died with it.
                    self.fault = self._fault(self.decode, event, event.error)
                self._leave_decode()
                raise event.error

    def take_over(self, older: "Attempt") -> None:
        """Has the giver send its pages here; it belongs to this attempt from now on. Raises its failure."""
        assert self._giver is not None
        self._giver.session.hand_over(self._giver.key, next_attempt=self.order.key.attempt, decode=self.decode.peer)
        older._is_at_decode = False
        self._is_at_giver = self._has_taken_over = True

    def start_prefill(self, candidates: Sequence[PrefillSession]) -> None:
        """Has the prompt computed by the first of these that takes it. Raises the error of the last one."""
        self._spare_prefills = list(candidates)
        self._use_next_prefill(WorkerUnavailable("no prefill worker is connected"))

    async def next_arrived(self) -> Arrived:
        """Waits for events and gives what they brought. Raises as `take_arrived`."""
        if self._ended_by is None:
            await self._mailbox.wait()
        return self.take_arrived()

    def take_arrived(self) -> Arrived:
        """What the events in the mailbox bring. Raises CrowdedOut, or the error that ended the attempt.

        Tokens that came before the error are given first: they are in the log, so no later attempt sends them again.
        """
        if self._ended_by is None:
            self._arrived = Arrived(len(self._log.token_ids))
            try:
                self._take_all(self._mailbox.events)
            except TandemError as error:
                self._ended_by = error
            if self._ended_by is None or self._arrived.token_ids:
                return self._arrived
        if isinstance(self._ended_by, Overloaded):
            raise CrowdedOut(self._ended_by.message) from self._ended_by
        raise self._ended_by

    @property
    def handed_off(self) -> HandedOff | None:
        """What was said of its handoff, once that is complete."""
        return self.facts.handed_off

    @property
    def prefill_started(self) -> PrefillStarted | None:
        """What was said when its prompt was begun."""
        return self.facts.prefill_started

    @property
    def is_over(self) -> bool:
        """Whether an error has ended it."""
        return self._ended_by is not None

    @property
    def state(self) -> State:
        """Where the attempt stands that workers have taken."""
        if self._is_decoding:
            return State.DECODING
        if self.is_move or self.prompt_done_at_s is not None:
            return State.TRANSFERRING
        return State.PREFILLING if self._is_begun else State.ADMITTED

    @property
    def is_begun(self) -> bool:
        """Whether a worker is computing it, or has."""
        return self._is_begun

    @property
    def is_decoding(self) -> bool:
        """Whether the decode worker has begun to generate."""
        return self._is_decoding

    @property
    def is_move(self) -> bool:
        """Whether the pages come from a decode worker that is leaving."""
        return self._giver is not None

    @property
    def is_paused(self) -> bool:
        """Whether the decode worker has stopped and waits for what comes next."""
        return self._is_paused and self._ended_by is None

    @property
    def is_moving(self) -> bool:
        """Whether the answer is on its way to another decode worker, or should be."""
        return self._giver is not None or self._is_paused or self.decode.load.is_draining

    @property
    def can_pause(self) -> bool:
        """Whether the whole sequence is at the decode worker and being generated."""
        is_whole = self._is_decoding and not self._is_at_prefill and not self._is_at_giver
        return is_whole and self._is_at_decode and not self._is_pausing and self._ended_by is None

    def may_have_met(self, incarnations: Container[str]) -> bool:
        """Whether the attempt is at one of these processes, or has failed, and nobody has heard out yet of what."""
        if self._is_heard:
            return False
        if self.fault is not None:
            return True
        at: list[WorkerSession | None] = [self.decode if self._is_at_decode else None]
        at.append(self.prefill if self._is_at_prefill else None)
        return any(worker is not None and worker.peer.incarnation in incarnations for worker in at)

    async def hear_out(self, seconds: float) -> None:
        """After a failure that leaves open who died, or of what: asks who can tell, until that one answers or is gone.

        A worker has died: the word that it had begun, or that it could, may have died with it or be on its way, and
        the other one knows. One says that the other one does not answer: it may be dead without our having noticed.
        Who hangs says nothing for `seconds`. Raises the request's failure.
        """
        try:
            witness = self._witness()
            if witness is not None and witness.is_up:
                witness.cancel_and_ask(self.order.key)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await self._take_word(witness)
        finally:
            self._is_heard = True

    def _witness(self) -> WorkerSession | None:
        """Who knows more of the failure than was said; None: nobody, or there is nothing more to know."""
        fault = self.fault
        if fault is None or fault.is_certain:
            return None
        if fault.worker is None:  # one of the two about the other one
            asked = fault.suspects[0] if fault.suspects else None
        elif isinstance(fault.error, WorkerLost) and not fault.suspects and not self.is_move:
            asked = self.decode if fault.worker is self.prefill else self.prefill
        else:
            asked = None
        is_there = self._is_at_decode if asked is self.decode else self._is_at_prefill
        return asked if is_there else None

    async def _take_word(self, witness: WorkerSession) -> None:
        word: Event | None = None
        while not isinstance(word, Cancelled | Failed):
            await self._mailbox.wait()
            session, word = self._mailbox.events.popleft()
            if session is not witness:
                word = None
            elif witness is self.prefill and isinstance(word, Emitted | HandedOff):
                self._note_prompt_done()
        if witness is self.decode:
            self._leave_decode()
        else:
            self._is_at_prefill = False
        if isinstance(word, Failed) and isinstance(word.error, WorkerLost):
            return  # It is gone, too: what was believed of it is true.
        fault = self.fault
        assert fault is not None, "who has a witness has a fault"
        # Pages are reserved before a prompt is computed, and whose transfer failed has had them.
        has_begun = isinstance(word, Failed) or word.has_begun
        if self.prefill is not None and fault.worker is self.prefill and has_begun:
            self.fault = replace(fault, suspects=(self.prefill,))
        elif fault.worker is self.decode and self._may_compute(self.decode):
            self.fault = replace(fault, suspects=(self.decode,))
        else:
            self.fault = replace(fault, suspects=())

    def pause(self) -> None:
        """Asks the decode worker to stop after the current step. Raises WorkerUnavailable or Overloaded."""
        self.decode.pause(self.order.key)
        self._is_pausing = True

    def unpause(self) -> None:
        """Lets it go on."""
        self._is_pausing = self._is_paused = False
        self.decode.unpause(self.order.key)

    def close(self) -> None:
        """Frees what the workers still hold, and drops whatever still comes. May be called twice."""
        self.watch.end()
        # Its last token came in a message with its end, and was taken first: there is nothing to cancel.
        if any(session is self.decode and isinstance(event, Finished) for session, event in self._mailbox.events):
            self._is_at_decode = False
        if self._giver is not None and self._is_at_giver:
            self._is_at_giver = False
            self._giver.session.cancel(self._giver.key)
        elif self._giver is not None and self._has_taken_over:
            self._giver.session.close(self._giver.key)
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
            try:
                if session is self.decode:
                    self._take_from_decode(event)
                elif session is self.prefill:
                    self._take_from_prefill(event)
                elif self._is_at_giver and self._giver is not None and session is self._giver.session:
                    self._take_from_giver(event)
            except TandemError as error:
                self.fault = self._fault(session, event, error)
                raise

    def _take_from_decode(self, event: Event) -> None:
        if isinstance(event, Emitted):
            if self._is_at_prefill and (self._held or event.first_index > self._log.next_index):
                self._held.append(event)
            else:
                self._token_sources.add(self.decode)
                self._accept(event)
            return
        if isinstance(event, Failed | Declined):
            self._leave_decode()
            raise event.error
        if isinstance(event, DecodeStarted):
            self._is_decoding = self._is_begun = True
        elif isinstance(event, Paused):
            if event.num_tokens != self._log.next_index:
                raise TransferFailed("a worker stopped at another token than the last one it sent")
            self._is_paused = True
        if isinstance(event, PrefillStarted):
            self._is_begun = True
            self.facts.prefill_started = event
            self._log.note_prefill(event.num_cached_tokens)
        if not isinstance(event, Finished):
            return
        if self._held and self._is_at_prefill:
            self._held.append(event)
        else:
            self._leave_decode()
            self._finish(event)

    def _take_from_prefill(self, event: Event) -> None:
        if isinstance(event, PrefillStarted):
            self._is_begun = True
            self.facts.prefill_started = event
            self._log.note_prefill(event.num_cached_tokens)
            if event.num_cached_tokens >= len(self.order.prompt_token_ids):
                self._note_prompt_done()
        elif isinstance(event, Emitted):
            self._note_prompt_done()
            if self.prefill is not None:
                self._token_sources.add(self.prefill)
            self._accept(event)
            self._release_held()
        elif isinstance(event, HandedOff):
            self._note_prompt_done()
            self.facts.handed_off = event
            self._leave_prefill()
        elif isinstance(event, Finished):
            self._leave_prefill()
            self._finish(event)
        elif isinstance(event, Declined):
            self._use_next_prefill(event.error)
            assert self.prefill is not None
            self.watch.prompt_refused(self.prefill.peer.worker_id)
        elif isinstance(event, Failed):
            if not self._is_decoding:
                self._is_at_prefill = False
                raise event.error
            self._leave_prefill()

    def _take_from_giver(self, event: Event) -> None:
        if isinstance(event, HandedOff):
            self.facts.handed_off = event
            self._is_at_giver = False
        elif isinstance(event, Failed | Declined | Finished):
            self._is_at_giver = False
            if not self._is_decoding:
                raise event.error if not isinstance(event, Finished) else WorkerUnavailable("the answer was given up")

    def _note_prompt_done(self) -> None:
        self._is_begun = True
        self.prompt_done_at_s = asyncio.get_running_loop().time()

    def _fault(self, session: WorkerSession, event: Event, error: TandemError) -> Fault:
        """Who is to blame. A worker that only waited for its part of the work did not die of the request."""
        if not isinstance(event, Failed):
            return Fault(error, worker=None if isinstance(error, TransferFailed) else session)
        is_fresh = session not in self._token_sources
        if isinstance(error, Unfit):
            return Fault(error, session, is_fresh=is_fresh)
        if isinstance(error, WorkerLost):  # our own word
            is_suspect = self._may_compute(session) and not self._is_at_giver
            return Fault(error, session, suspects=(session,) if is_suspect else (), is_fresh=is_fresh)
        if isinstance(error, TransferFailed | LayoutMismatch | WorkerUnavailable):
            # Said by one of the two about the other one, which may be dead without our having noticed yet. A worker
            # that is leaving will be gone, too, and not because of this.
            other = self.prefill if session is self.decode else self.decode
            if other is None or self.is_move or other.load.is_draining:
                return Fault(error)
            # A decode worker knows of a transfer only after its pages were reserved, which is when computing begins.
            is_suspect = other is self.prefill or self._may_compute(other)
            return Fault(error, suspects=(other,) if is_suspect else (), is_fresh=other not in self._token_sources)
        if isinstance(error, InternalError):
            return Fault(error, session, suspects=(session,), is_certain=True, is_fresh=is_fresh)
        return Fault(error, session, is_fresh=is_fresh)

    def _may_compute(self, worker: WorkerSession) -> bool:
        """Whether it is known to have begun its part, or could have without a word. Receiving pages is no such part."""
        if worker is not self.decode:
            return self._is_begun
        return self._is_local or self._is_decoding or self.prompt_done_at_s is not None

    def _use_next_prefill(self, error: TandemError) -> None:
        self._is_at_prefill = False
        while self._spare_prefills:
            if self.prefill is not None:
                self.prefill.close(self.order.key)
            self.prefill = self._spare_prefills.pop(0)
            self.facts.prefill_worker = self.prefill.peer.worker_id
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
        if self.prefill is not None:
            self.prefill.close(self.order.key)
        self._release_held()

    def _leave_decode(self) -> None:
        self._is_at_decode = False
        self.decode.close(self.order.key)

    def _release_held(self) -> None:
        held, self._held = self._held, []
        for event in held:
            self._take_from_decode(event)

    def _accept(self, tokens: Emitted) -> None:
        new = self._log.accept(tokens)
        self._arrived.token_ids += new.token_ids
        if new.logprobs is not None:
            self._arrived.logprobs = (self._arrived.logprobs or []) + new.logprobs
        if new.prompt_logprobs is not None:
            self._arrived.prompt_logprobs = new.prompt_logprobs

    def _finish(self, event: Finished) -> None:
        if event.reason == "cancelled":
            raise WorkerUnavailable("the worker gave the answer up")
        self._arrived.finish_reason = event.reason
