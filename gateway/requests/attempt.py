"""One try of one answer on a pair of workers: its events put in order, its capacity given back when it is left.

Tokens come from two workers on two streams: index 0 from the prefill worker, the rest from the decode worker, and
either may arrive first. The pages may also come from the decode worker that the answer moves away from, the `Giver`.
Knows neither how workers are chosen nor what happens after a failure; says only whose failure it was.

How far it has come is its `stage`; the tables at the end of this file say what each event of each worker does. The
workers that hold something of the attempt are in one set beside it.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, get_args

from gateway.observability.phases import AttemptFacts
from gateway.requests.fault import Fault, fault_of
from gateway.requests.mailbox import Mailbox
from gateway.requests.stage import STATES, TRANSITIONS, AttemptStage, Sign
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
    OpeningLink,
    Paused,
    PrefillStarted,
    PullOrder,
    SequenceOrder,
)
from gateway.topology.session import DecodeSession, PrefillSession, WorkerSession
from gateway.topology.watch import AttemptWatch
from services.cluster.placements import State
from services.runtime.errors import (
    Overloaded,
    TandemError,
    TransferFailed,
    WorkerLost,
    WorkerUnavailable,
)


class CrowdedOut(Overloaded):
    """A worker has no room for an attempt that another one had admitted: it goes back to the queue."""


class GiverFailed(Exception):
    """An event arrived from the source worker during a migration; the previous attempt handles it."""


@dataclass(frozen=True, slots=True)
class Giver:
    """A decode worker that an answer moves away from, and the key of the attempt that runs there."""

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
        tokens: TokenLog,
        watch: AttemptWatch,
        giver: Giver | None = None,
    ) -> None:
        self.order = order
        self.decode = decode
        self.prefill: PrefillSession | None = None
        self.stage = self.reached = AttemptStage.NEW
        """The present stage; `reached` is the last one before a terminal one."""
        self.fault: Fault | None = None
        self.probes: set[Hashable] = set()
        """The blocked pairs of which this attempt is the trial."""
        self.watch = watch
        self.prompt_done_at_s: float | None = None
        """The time of the event loop at which the prefill worker last had all pages of the prompt."""
        self.facts = AttemptFacts(
            number=order.key.attempt,
            trace=order.trace,
            num_prompt_tokens=len(order.prompt_token_ids),
            num_replayed_tokens=len(order.emitted_token_ids),
            decode_worker=decode.peer.worker_id,
            is_move=giver is not None,
        )
        self.wanted = ""
        """The decode worker that the answer is to move to; empty: it stays, unless its worker leaves."""
        self.is_arriving = giver is not None
        """Whether the answer moves here, and its task has not taken note yet that it is generated here."""
        self.giver = giver
        self._mailbox = mailbox
        self._tokens = tokens
        self._spare_prefills: list[PrefillSession] = []
        self._pulls: Mapping[str, PullOrder] = {}
        self._is_local = False
        """Whether the decode worker computes the prompt itself."""
        self._at: set[WorkerSession] = set()
        """The sessions of the workers that hold something of the attempt: exactly those at which it is open."""
        self.token_sources: set[WorkerSession] = set()
        """The workers from which a token has come."""
        self._held: list[Event] = []
        """The decode worker's events that wait until the prefill worker's token has come."""
        self._arrived = Arrived(tokens.next_index)
        self._ended_by: TandemError | None = None

    async def admit(self, *, is_local_prefill: bool) -> None:
        """Asks the decode worker for capacity. Raises the error of its refusal or failure, or GiverFailed."""
        if self.giver is None:
            self._mailbox.clear()
        self._is_local = is_local_prefill
        self.decode.open(self.order.key, self._mailbox)
        self._at.add(self.decode)
        self._follow(Sign.ASK)
        self.decode.admit(self.order, is_local_prefill=is_local_prefill, is_from_decode=self.giver is not None)
        while True:
            await self._mailbox.wait()
            events = self._mailbox.events
            session, event = events[0]
            if self.giver is not None and session is self.giver.session:
                raise GiverFailed
            events.popleft()
            if isinstance(event, Admitted):
                self._follow(Sign.ADMIT)
                return
            if isinstance(event, Declined | Failed):
                self._follow(Sign.FAIL)
                if isinstance(event, Declined):
                    self.fault = Fault(event.error, self.decode)
                    self._follow(Sign.EXPLAIN)
                elif self._is_local and isinstance(event.error, WorkerLost):
                    # It may have begun at once, and its word of that died with it.
                    self.fault = fault_of(self, self.decode, event, event.error)
                self._leave(self.decode)
                raise event.error.again()

    def take_over(self, older: "Attempt") -> None:
        """Has the giver send its pages here; it belongs to this attempt from now on. Raises its failure."""
        assert self.giver is not None
        self.giver.session.hand_over(self.giver.key, next_attempt=self.order.key.attempt, decode=self.decode.peer)
        older.hand_over()
        self._at.add(self.giver.session)
        self._follow(Sign.TAKE_OVER)

    def hand_over(self) -> None:
        """Leaves the decode worker, and what it still says, to the attempt that takes over."""
        self._at.discard(self.decode)
        self.watch.end()
        self._follow(Sign.CLOSE)

    def start_prefill(
        self, candidates: Sequence[PrefillSession], pulls: Mapping[str, PullOrder] = MappingProxyType({})
    ) -> None:
        """Has the prompt computed by the first of these that takes it. Raises the error of the last one.

        `pulls` are what they are to fetch of it, by their ids.
        """
        self._spare_prefills, self._pulls = list(candidates), pulls
        self._use_next_prefill(WorkerUnavailable("no prefill worker is connected"))

    async def next_arrived(self) -> Arrived:
        """Waits for events and gives what they brought. Raises as `take_arrived`."""
        if self._ended_by is None:
            await self._mailbox.wait()
        return self.take_arrived()

    def take_arrived(self) -> Arrived:
        """Returns what the events in the mailbox bring. Raises CrowdedOut, or the error that ended the attempt.

        Tokens that came before the error are given first: the answer has them, so no later attempt sends them again.
        """
        if self._ended_by is None:
            self._arrived = Arrived(len(self._tokens.token_ids))
            try:
                self._take_all(self._mailbox.events)
            except TandemError as error:
                self._ended_by = error.again()
                self._follow(Sign.FAIL)
            if self._ended_by is None or self._arrived.token_ids:
                return self._arrived
        if isinstance(self._ended_by, Overloaded):
            raise CrowdedOut(self._ended_by.message, retry_after_s=self._ended_by.retry_after_s) from self._ended_by
        raise self._ended_by.again()

    @property
    def state(self) -> State:
        """Where the answer stands with this attempt, which workers have taken, or had until it ended."""
        return STATES[self.reached]

    @property
    def is_over(self) -> bool:
        """Whether an error has ended it."""
        return self._ended_by is not None

    @property
    def is_decoding(self) -> bool:
        """Whether the decode worker has begun to generate."""
        return self.reached >= AttemptStage.DECODING

    @property
    def is_move(self) -> bool:
        """Whether the pages come from another decode worker."""
        return self.giver is not None

    @property
    def is_moving(self) -> bool:
        """Whether the answer is on its way to another decode worker, or should be."""
        has_to_go = bool(self.wanted) or self.decode.load.is_draining
        return has_to_go or self.is_arriving or self.stage is AttemptStage.PAUSED

    @property
    def is_at_giver(self) -> bool:
        """Whether the worker that it moves away from has still to send its pages."""
        return self.giver is not None and self.giver.session in self._at

    @property
    def can_pause(self) -> bool:
        """Whether the whole sequence is at the decode worker and being generated."""
        return self.stage is AttemptStage.DECODING and self._at == {self.decode}

    def is_at(self, worker: WorkerSession | None) -> bool:
        """Returns whether the worker holds something of it."""
        return worker in self._at

    def may_have_met(self, incarnations: Container[str]) -> bool:
        """Returns whether the attempt is at one of these processes, or has failed, and it is not known yet of what."""
        if self.stage is AttemptStage.EXPLAINED:
            return False
        return self.fault is not None or any(worker.peer.incarnation in incarnations for worker in self._at)

    def may_compute(self, worker: WorkerSession) -> bool:
        """Returns whether it is known to have begun its part, or could have unheard. Receiving pages does not count."""
        if worker is not self.decode:
            return worker is self.prefill and self.reached >= AttemptStage.PREFILLING
        return self._is_local or self.is_decoding or self.prompt_done_at_s is not None

    async def word_of(self, witness: WorkerSession) -> Cancelled | Failed:
        """After a failure: waits for what a worker was asked to tell of the attempt, which it has left then."""
        while True:
            await self._mailbox.wait()
            session, word = self._mailbox.events.popleft()
            if session is not witness:
                continue
            if witness is self.prefill and isinstance(word, Emitted | HandedOff):
                self._note_prompt_done()
            if isinstance(word, Cancelled | Failed):
                self._leave(witness)
                return word

    def suspect(self, *workers: WorkerSession, is_between: bool = False) -> None:
        """Notes which workers may have died of the request, or that the path between two living ones failed."""
        assert self.fault is not None, "only a failed attempt has suspects"
        self.fault = replace(self.fault, suspects=workers, is_between=is_between)

    def explain(self) -> None:
        """Notes that nothing more will be known of its failure."""
        self._follow(Sign.EXPLAIN)

    def pause(self) -> None:
        """Asks the decode worker to stop after the current step. Raises WorkerUnavailable or Overloaded."""
        self.decode.pause(self.order.key)
        self._follow(Sign.PAUSE)

    def unpause(self) -> None:
        """Lets it continue."""
        self._follow(Sign.RESUME)
        self.decode.unpause(self.order.key)

    def close(self) -> None:
        """Frees what the workers still hold, and drops whatever still comes. May be called twice."""
        self.watch.end()
        # Its last token came in a message with its end, and was taken first: there is nothing to cancel.
        for session, event in self._mailbox.events:
            if session is self.decode and session in self._at and isinstance(event, Finished):
                self._leave(session)
        heard = self.facts.heard
        for session in self._at:
            is_giver = self.giver is not None and session is self.giver.session
            session.cancel(self.giver.key if is_giver and self.giver is not None else self.order.key, heard)
        self._at.clear()
        self._follow(Sign.CLOSE)

    def _follow(self, sign: Sign) -> None:
        """Moves to the stage to which the sign leads from the present one."""
        stage = TRANSITIONS[self.stage].get(sign)
        if stage is not None:
            self.stage = stage
            if stage < AttemptStage.FINISHED:
                self.reached = stage

    def _take_all(self, events: deque[tuple[WorkerSession, Event]]) -> None:
        while events and self._arrived.finish_reason is None:
            session, event = events.popleft()
            if session is self.decode:
                take = FROM_DECODE[type(event)]
            elif session is self.prefill:
                take = FROM_PREFILL[type(event)]
            elif self.giver is not None and session is self.giver.session and session in self._at:
                take = FROM_GIVER[type(event)]
            else:
                continue  # It is of an attempt, or of a worker, that was left.
            try:
                take(self, event)
            except TandemError as error:
                self.fault = fault_of(self, session, event, error.again())
                raise

    def _take_decoded(self, event: Emitted) -> None:
        if self.prefill in self._at and (self._held or event.first_index > self._tokens.next_index):
            self._held.append(event)
        else:
            self.token_sources.add(self.decode)
            self._accept(event)

    def _take_decode_end(self, event: Finished) -> None:
        if self._held and self.prefill in self._at:
            self._held.append(event)
        else:
            self._leave(self.decode)
            self._finish(event)

    def _take_decode_failure(self, event: Failed | Declined) -> None:
        self._leave(self.decode)
        raise event.error.again()

    def _take_decode_start(self, event: DecodeStarted) -> None:
        self.facts.decode_started = event
        self._follow(Sign.DECODE)

    def _take_pause(self, event: Paused) -> None:
        if event.num_tokens != self._tokens.next_index:
            raise TransferFailed("a worker stopped at another token than the last one it sent")
        self._follow(Sign.PAUSED)

    def _take_prompt_start(self, event: PrefillStarted) -> None:
        self._follow(Sign.BEGIN)
        self.facts.prefill_started = event
        self._tokens.note_prefill(event.num_cached_tokens)

    def _take_opening_link(self, _event: OpeningLink) -> None:
        self.watch.note_opening_link()

    def _take_remote_prompt_start(self, event: PrefillStarted) -> None:
        self._take_prompt_start(event)
        self.watch.note_prompt_started()
        if event.num_cached_tokens >= len(self.order.prompt_token_ids):
            self._note_prompt_done()

    def _take_prefilled(self, event: Emitted) -> None:
        self._note_prompt_done()
        if self.prefill is not None:
            self.token_sources.add(self.prefill)
        self._accept(event)
        self._release_held()

    def _take_handoff(self, event: HandedOff) -> None:
        self._note_prompt_done()
        self.facts.handed_off = event
        self.watch.note_handed_off(event.chunks)
        self._leave_prefill()

    def _take_prefill_end(self, event: Finished) -> None:
        self._leave_prefill()
        self._finish(event)

    def _take_prefill_refusal(self, event: Declined) -> None:
        self._use_next_prefill(event.error)
        assert self.prefill is not None
        pull = self.facts.pull
        self.watch.prompt_refused(self.prefill.peer.worker_id, awaits="" if pull is None else pull.worker_id)

    def _take_prefill_failure(self, event: Failed) -> None:
        if not self.is_decoding:
            assert self.prefill is not None
            self._leave(self.prefill)
            raise event.error.again()
        self._leave_prefill()

    def _take_giver_handoff(self, event: HandedOff) -> None:
        self.facts.handed_off = event
        self._leave_giver()

    def _take_giver_end(self, event: Failed | Declined | Finished) -> None:
        self._leave_giver()
        if not self.is_decoding:
            raise (
                event.error.again() if not isinstance(event, Finished) else WorkerUnavailable("the answer was given up")
            )

    def _ignore(self, event: Event) -> None:
        """Ignores an event that does not matter here, or that this worker should not send: workers are not trusted."""

    def _note_prompt_done(self) -> None:
        self._follow(Sign.PROMPT_DONE)
        self.prompt_done_at_s = asyncio.get_running_loop().time()

    def _use_next_prefill(self, error: TandemError) -> None:
        if self.prefill is not None:
            self._leave(self.prefill)
        while self._spare_prefills:
            prefill = self.prefill = self._spare_prefills.pop(0)
            self.facts.prefill_worker = prefill.peer.worker_id
            try:
                prefill.open(self.order.key, self._mailbox)
                self._at.add(prefill)
                self.facts.pull = self._pulls.get(prefill.peer.worker_id)
                prefill.prefill(self.order, decode=self.decode.peer, pull=self.facts.pull)
            except TandemError as next_error:
                self._leave(prefill)
                error = next_error.again()
                continue
            return
        raise error.again()

    def _leave_prefill(self) -> None:
        """Leaves the prefill worker, whose part is over, and takes the events that were held back for its token."""
        if self.prefill is not None:
            self._leave(self.prefill)
        self._release_held()

    def _leave_giver(self) -> None:
        assert self.giver is not None
        self._at.discard(self.giver.session)
        self.giver.session.close(self.giver.key)

    def _leave(self, worker: WorkerSession) -> None:
        """Leaves a worker that holds nothing of it; whatever it still says is dropped."""
        self._at.discard(worker)
        worker.close(self.order.key)

    def _release_held(self) -> None:
        held, self._held = self._held, []
        for event in held:
            FROM_DECODE[type(event)](self, event)

    def _accept(self, tokens: Emitted) -> None:
        new = self._tokens.accept(tokens)
        self._arrived.token_ids += new.token_ids
        if new.logprobs is not None:
            self._arrived.logprobs = (self._arrived.logprobs or []) + new.logprobs
        if new.prompt_logprobs is not None:
            self._arrived.prompt_logprobs = new.prompt_logprobs

    def _finish(self, event: Finished) -> None:
        if event.reason == "cancelled":
            raise WorkerUnavailable("the worker gave the answer up")
        self._arrived.finish_reason = event.reason
        self._follow(Sign.FINISH)


_Take = Callable[[Attempt, Any], None]

_IGNORED: Mapping[type[Event], _Take] = dict.fromkeys(get_args(Event), Attempt._ignore)

FROM_DECODE: Mapping[type[Event], _Take] = {
    **_IGNORED,
    Declined: Attempt._take_decode_failure,
    PrefillStarted: Attempt._take_prompt_start,
    Emitted: Attempt._take_decoded,
    DecodeStarted: Attempt._take_decode_start,
    Paused: Attempt._take_pause,
    Finished: Attempt._take_decode_end,
    Failed: Attempt._take_decode_failure,
}
"""What each event of the decode worker does."""
FROM_PREFILL: Mapping[type[Event], _Take] = {
    **_IGNORED,
    Declined: Attempt._take_prefill_refusal,
    OpeningLink: Attempt._take_opening_link,
    PrefillStarted: Attempt._take_remote_prompt_start,
    Emitted: Attempt._take_prefilled,
    HandedOff: Attempt._take_handoff,
    Finished: Attempt._take_prefill_end,
    Failed: Attempt._take_prefill_failure,
}
FROM_GIVER: Mapping[type[Event], _Take] = {
    **_IGNORED,
    Declined: Attempt._take_giver_end,
    HandedOff: Attempt._take_giver_handoff,
    Finished: Attempt._take_giver_end,
    Failed: Attempt._take_giver_end,
}
"""What each event of the giver does; its tokens are in the answer already, since they came before it stopped."""
