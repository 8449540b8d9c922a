"""What a failed attempt means for its request: whether it is tried again, when, and when never again.

Three limits, for three dangers. `max_attempts` failures without a new token in between: the cluster cannot do it. The
retry budget: failures that no death explains are tried again at a bounded rate, so that a fault which fails everything
does not multiply the load. Two strikes: a request that its workers die of would take down one after the other.

A strike is an attempt during which a worker process died that was computing the request. What makes it a poison
request is that it happens again without a single new token in between. Any progress clears it, because a long answer
may well lose two workers, or ten, to causes that are not its own, and then each of them got it a step further; a
request that kills whoever computes it gets nowhere, since the next worker repeats the same computation up to the same
point. Losing both workers of one attempt is one strike. A process that turns out to be alive, because only the
connection broke, takes its strike back. What a process was computing when it died it can tell nobody, so its partner is
asked (`Attempt.hear_out`), and nobody is judged before all who lost the same one know whether they were computed there.

A poison request has neighbours, which go with it from the first dead worker to the second one, and may have no token
from there yet when that one dies. So those that the dead worker had only just begun are tried again one at a time:
whoever gets a token is cleared, and the one that takes down the second worker was alone. Those that it had been
computing for a while without harm do not wait, since nearly every death is nobody's fault; should they lose the same
two workers as one that both had only just begun, that one is to blame, and they are tried again. Several may have lost
the same two with nothing between them: they met two deaths that were nobody's fault, or nobody knew in time that the
first was one. Then nobody is to blame yet; they are tried one at a time, and a poison request among them takes a third.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections import deque
from collections.abc import Set
from typing import Protocol
from weakref import WeakSet

import msgspec

from gateway.attempts import Attempt
from gateway.candidates import Candidates
from gateway.metrics import Metrics
from gateway.running import RunningRequest, Strike
from gateway.topology import Topology
from services.runtime.clock import Clock, Deadline
from services.runtime.errors import Quarantined, TandemError, WorkerLost
from services.scheduling.retry_budget import RetryBudget

QUARANTINED = "workers have died of this request; it is not computed for a while"
MAX_STRIKES = 2
MAX_FAILURES = 16
"""Of one answer, however far it comes between them."""
LAST_WORDS_S = 0.1
"""What a dead process had sent is read within this time; who speaks later is alive."""
WORD_WAIT_S = 1.0
"""A worker that lives has told by then what it knows of an attempt, usually within a round trip. One that hangs costs
this time; its silence would cost more."""
TRIAL_WAIT_S = 5.0
"""Longest wait for all that are tried alone before; a trial takes until the first token."""

logger = logging.getLogger(__name__)


class QuarantineList(Protocol):
    """Fingerprints of requests that nobody computes; `services.cluster.quarantine` shares them among gateways."""

    def __len__(self) -> int: ...

    def __contains__(self, fingerprint: str) -> bool: ...

    def add(self, fingerprint: str) -> None:
        """Refused from now on, for a while."""
        ...


class Recovery:
    """Decides about every failed attempt of this gateway."""

    def __init__(
        self,
        *,
        max_attempts: int,
        failover_wait_s: float,
        topology: Topology,
        candidates: Candidates,
        quarantine: QuarantineList,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._max_attempts = max_attempts
        self._failover_wait_s = failover_wait_s
        self._topology = topology
        self._candidates = candidates
        self._quarantine = quarantine
        self._metrics = metrics
        self._clock = clock
        self._budget = RetryBudget(now_s=clock.monotonic())
        self._struck: WeakSet[RunningRequest] = WeakSet()
        self._heard = asyncio.Event()
        """Set when it is known what an attempt has failed of; then there is another one for the next."""
        self._on_trial: RunningRequest | None = None
        self._awaiting_trial: deque[RunningRequest] = deque()

    def note_accepted(self) -> None:
        """A call was accepted: retries of others may be a little more."""
        self._budget.note_request(self._clock.monotonic())

    def check(self, request: RunningRequest) -> None:
        """Raises Quarantined for a request that must not be computed."""
        if len(self._quarantine) and self._fingerprint(request) in self._quarantine:
            raise Quarantined(QUARANTINED)

    async def after(self, request: RunningRequest, attempt: Attempt | None, failure: TandemError) -> None:
        """Returns when the request may be tried again. Raises the failure or Quarantined where it may not."""
        if attempt is not None:
            await self._hear_out(attempt)
        request.close_attempt()
        self._metrics.retries.inc()
        reason = {"attempt": request.attempt_number, "reason": failure.message}
        logger.warning("attempt failed", extra={"request_id": request.generation.request_id, **reason})
        if attempt is not None and attempt.is_move and not attempt.is_decoding:
            return  # It ran well where it was, so the request has nothing to do with it.
        request.note_failure(attempt)
        if attempt is not None:
            self._candidates.note_failure(attempt)
        try:
            is_poison = await self._is_poison(request)
        finally:
            # Not before it is known who died: the next one on trial must not be sent there.
            self.end_trial(request)
        if is_poison:
            self._metrics.quarantined.inc()
            self._quarantine.add(self._fingerprint(request))
            raise Quarantined(QUARANTINED) from failure
        if request.num_failures_in_row >= self._max_attempts or request.num_failures >= MAX_FAILURES:
            raise failure
        if not isinstance(failure, WorkerLost):
            await self._wait_for_turn(request)
        if request.strikes and request.strikes[-1].is_fresh and self._counts(request.strikes[-1]):
            await self._begin_trial(request)

    def end_trial(self, request: RunningRequest) -> None:
        """The request has got a token, has failed again or is over: the next one may be tried."""
        if self._on_trial is request:
            self._on_trial = None
            if self._awaiting_trial:
                self._awaiting_trial[0].mailbox.nudge()

    async def _begin_trial(self, request: RunningRequest) -> None:
        """Waits until nobody else is on trial, for a bounded time."""
        waiting = self._awaiting_trial
        waiting.append(request)
        try:
            await request.mailbox.rest(TRIAL_WAIT_S, until=lambda: self._on_trial is None and waiting[0] is request)
        finally:
            waiting.remove(request)
            if self._on_trial is None and waiting:
                waiting[0].mailbox.nudge()
        if self._on_trial is None:
            self._on_trial = request

    async def _wait_for_turn(self, request: RunningRequest) -> None:
        turn = self._budget.take(self._clock.monotonic(), max_wait_s=self._failover_wait_s)
        if not turn.wait_s:
            return
        self._metrics.delayed_retries.inc()
        try:
            await request.mailbox.rest(turn.wait_s)
        except BaseException:
            self._budget.give_back(turn)
            raise

    async def _hear_out(self, attempt: Attempt) -> None:
        try:
            await attempt.hear_out(WORD_WAIT_S)
        finally:
            self._heard.set()
            self._heard = asyncio.Event()

    async def _is_poison(self, request: RunningRequest) -> bool:
        if not request.strikes:
            return False
        self._struck.add(request)
        if len(request.strikes) < MAX_STRIKES:
            return False
        unclear = [strike.suspects for strike in request.strikes if not self._counts(strike)]
        if unclear:
            await self._learn_who_died(request, frozenset().union(*unclear))
        if sum(map(self._counts, request.strikes)) < MAX_STRIKES:
            return False
        last = request.strikes[-1]
        lost = {name for name in last.suspects if last.is_certain or not self._topology.is_alive(name)}
        await self._until_heard(request, lost)
        rivals = self._rivals(request, lost)
        if not _is_fresh(request) and any(map(_is_fresh, rivals)):
            request.forget_strike()
            return False
        return all(_is_fresh(request) and not _is_fresh(rival) for rival in rivals)

    async def _until_heard(self, request: RunningRequest, lost: Set[str]) -> None:
        """Waits until all that may have shared its last death know whether they did."""
        others = [other for other in self._struck if other is not request]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WORD_WAIT_S):
                while any(other.attempt is not None and other.attempt.may_have_met(lost) for other in others):
                    await self._heard.wait()

    def _rivals(self, request: RunningRequest, lost: Set[str]) -> list[RunningRequest]:
        """The others that shared its last death, and for which it was not the first one either."""
        others = (other for other in self._struck if other is not request)
        shared = (other for other in others if any(not strike.suspects.isdisjoint(lost) for strike in other.strikes))
        return [other for other in shared if sum(map(self._counts, other.strikes)) >= MAX_STRIKES]

    def _counts(self, strike: Strike) -> bool:
        return strike.is_certain or any(not self._topology.is_alive(suspect) for suspect in strike.suspects)

    async def _learn_who_died(self, request: RunningRequest, suspects: frozenset[str]) -> None:
        """Waits until each suspect has spoken again or is known to be gone, which silence tells at the latest."""
        heard_of = asyncio.get_running_loop().time() + LAST_WORDS_S
        patience = request.generation.deadline.sooner(Deadline.after(self._failover_wait_s, clock=self._clock))
        changes = self._topology.changes()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience.remaining_s()), contextlib.aclosing(changes):
                async for _ in changes:
                    if not any(self._topology.is_silent_since(suspect, heard_of) for suspect in suspects):
                        return

    def _fingerprint(self, request: RunningRequest) -> str:
        """The same for the same request, on every gateway; its seed, which is usually drawn, left out."""
        generation = request.generation
        sampling = msgspec.structs.replace(generation.sampling, seed=0)
        named = (generation.model, list(generation.prompt_token_ids), sampling)
        return hashlib.sha256(msgspec.json.encode(named, order="sorted")).hexdigest()


def _is_fresh(request: RunningRequest) -> bool:
    """Whether no worker that died of it, perhaps, had got anywhere with it."""
    return all(strike.is_fresh for strike in request.strikes)
