"""What a failed attempt means for its request: whether it is tried again, when, and when never again.

Three limits, for three dangers. `max_attempts` failures that no death explains, without a new token in between: the
cluster cannot do it. The retry budget: such failures are tried again at a bounded rate, so that a fault which fails
everything does not multiply the load. Quarantine: a request that its workers die of would take them all down.

A strike is an attempt during which a worker process died that was computing the request. One strike proves nothing:
the request was beside a death, and nearly every death is nobody's fault. So it is tried alone: no other suspect is sent
to the same workers, which says of whom they die. Any new token clears it, because a long answer may well lose two
workers, or ten, to causes that are not its own, while a request that kills whatever computes it never gets one. It is
guilty when MAX_STRIKES workers have died of it without a new token in between, ALONE_STRIKES of them in trials that it
shared with nobody; one trial more where workers have died lately that it had nothing to do with, since then its own
deaths may have been chance too. So two deaths by chance never make a request guilty, and a request that kills takes
three workers; four where others die meanwhile, or where it cannot be kept apart from another suspect.

Those that a dead worker had only just begun wait for their trial, TRIAL_WAIT_S at most. Half of a model's workers may
have a trial at the same time, so that a hundred suspects do not wait for each other one by one. Those that the worker
had been computing for a while without harm do not wait: they go on at once, as a trial where there is a place for one.

A process that turns out to be alive, because only the connection broke, takes its strike back. What a process was
computing when it died it can tell nobody, so its partner is asked (`Attempt.hear_out`), and nobody is judged before all
that lost the same one know whether they were computed there.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections import deque
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakSet

import msgspec

from gateway.observability.metrics import Metrics
from gateway.requests.answer import RunningAnswer, Strike
from gateway.requests.attempt import Attempt
from gateway.requests.call import AnswerSpec
from gateway.requests.dispatch import Dispatcher
from gateway.topology.members import ROLES, Topology
from services.runtime.clock import Clock, Deadline
from services.runtime.errors import Quarantined, TandemError, WorkerLost
from services.scheduling.retry_budget import RetryBudget

QUARANTINED = "workers have died of this request; it is not computed for a while"
MAX_STRIKES = 3
"""Deaths of workers that computed a request, without a new token in between, that make it guilty."""
ALONE_STRIKES = 2
"""Of these, while it was tried alone."""
DEATHS_S = 60.0
"""Deaths that a request had nothing to do with speak for it for this long."""
MAX_FAILURES = 16
"""Of one answer, however far it comes between them."""
LAST_WORDS_S = 0.1
"""What a dead process had sent is read within this time; who speaks later is alive."""
WORD_WAIT_S = 1.0
"""A worker that lives has told by then what it knows of an attempt, usually within a round trip. One that hangs costs
this time; its silence would cost more."""
TRIAL_WAIT_S = 5.0
"""Longest wait for those that are tried alone before; a trial takes until the first token."""

logger = logging.getLogger(__name__)


class QuarantineList(Protocol):
    """Fingerprints of requests that nobody computes; `services.cluster.quarantine` shares them among gateways."""

    def __len__(self) -> int: ...

    def __contains__(self, fingerprint: str) -> bool: ...

    def add(self, fingerprint: str) -> None:
        """Refused from now on, for a while."""
        ...


@dataclass(slots=True)
class _Death:
    """A process may have died at `at_s`, while it tried the requests of these ids."""

    at_s: float
    tried: set[str] = field(default_factory=set)


class Recovery:
    """Decides about every failed attempt of this gateway."""

    def __init__(
        self,
        *,
        max_attempts: int,
        failover_wait_s: float,
        topology: Topology,
        dispatcher: Dispatcher,
        quarantine: QuarantineList,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._max_attempts = max_attempts
        self._failover_wait_s = failover_wait_s
        self._topology = topology
        self._dispatcher = dispatcher
        self._quarantine = quarantine
        self._metrics = metrics
        self._clock = clock
        self._budget = RetryBudget(now_s=clock.monotonic())
        self._struck: WeakSet[RunningAnswer] = WeakSet()
        self._heard = asyncio.Event()
        """Set when it is known what an attempt has failed of; then there is another one for the next."""
        self._awaiting_trial: deque[RunningAnswer] = deque()
        self._deaths: dict[str, _Death] = {}
        """By process, of those that may have died of a request; not those that a guilty one has killed."""

    def note_accepted(self) -> None:
        """A call was accepted: retries of others may be a little more."""
        self._budget.note_request(self._clock.monotonic())

    def check(self, request: RunningAnswer) -> None:
        """Raises Quarantined for a request that must not be computed."""
        if len(self._quarantine) and fingerprint_of(request.generation) in self._quarantine:
            raise Quarantined(QUARANTINED)

    async def after(self, request: RunningAnswer, attempt: Attempt | None, failure: TandemError) -> None:
        """Returns when the request may be tried again. Raises the failure or Quarantined where it may not."""
        if attempt is not None:
            await self._hear_out(attempt)
        request.close_attempt()
        self._metrics.retries.inc()
        reason = {"attempt": request.attempt_number, "reason": failure.message}
        logger.warning("attempt failed", extra={"request_id": request.generation.request_id, **reason})
        if attempt is not None and attempt.is_move and not attempt.is_decoding:
            return  # It ran well where it was, so the request has nothing to do with it.
        strike = request.note_failure(attempt, is_alone=request in self._dispatcher.on_trial)
        if attempt is not None:
            self._dispatcher.note_failure(attempt)
        try:
            is_poison = await self._is_poison(request)
        finally:
            # Not before it is known who died: the next one on trial must not be sent there.
            self.end_trial(request)
        if is_poison:
            self._note_poison(request)
            raise Quarantined(QUARANTINED) from failure
        if strike is None and isinstance(failure, WorkerLost):
            request.excuse_failure()
        num_unexplained = request.num_failures_in_row - sum(map(self._counts, request.strikes))
        if num_unexplained >= self._max_attempts or request.num_failures >= MAX_FAILURES:
            raise failure
        if not isinstance(failure, WorkerLost):
            await self._wait_for_turn(request)
        if strike is not None and self._counts(strike):
            await self._begin_trial(request, max_wait_s=TRIAL_WAIT_S if strike.is_fresh else 0.0)

    def end_trial(self, request: RunningAnswer) -> None:
        """The request has got a token, has failed again or is over: the next one may be tried."""
        if request in self._dispatcher.on_trial:
            self._dispatcher.on_trial.discard(request)
            self._nudge_awaiting()

    async def _begin_trial(self, request: RunningAnswer, *, max_wait_s: float) -> None:
        """Waits for a place for its trial, for a bounded time. Without one the request goes on untried."""
        self._awaiting_trial.append(request)
        try:
            if max_wait_s:
                await request.mailbox.rest(max_wait_s, until=lambda: self._may_be_tried(request))
            if self._may_be_tried(request):
                self._dispatcher.on_trial.add(request)
        finally:
            self._awaiting_trial.remove(request)
            self._nudge_awaiting()

    def _may_be_tried(self, request: RunningAnswer) -> bool:
        """Whether a worker is left for its trial, and nobody has waited longer for one."""
        model = request.generation.model
        ahead = next(other for other in self._awaiting_trial if other.generation.model == model)
        on_trial = [other for other in self._dispatcher.on_trial if other.generation.model == model]
        # Who did not wait for its trial keeps nobody from having one.
        num_on_trial = sum(other.strikes[-1].is_fresh for other in on_trial if other.strikes)
        num_workers = [self._topology.num_ready(role, model) for role in ROLES]
        return ahead is request and num_on_trial < max(1, min(filter(None, num_workers), default=0) // 2)

    def _nudge_awaiting(self) -> None:
        for request in self._awaiting_trial:
            request.mailbox.nudge()

    def _note_poison(self, request: RunningAnswer) -> None:
        self._metrics.quarantined.inc()
        if fingerprint := fingerprint_of(request.generation):
            self._quarantine.add(fingerprint)
        for strike in request.strikes:
            for incarnation in strike.suspects:
                self._deaths.pop(incarnation, None)

    async def _wait_for_turn(self, request: RunningAnswer) -> None:
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

    async def _is_poison(self, request: RunningAnswer) -> bool:
        if not request.strikes:
            return False
        self._struck.add(request)
        self._note_deaths(request)
        if len(request.strikes) < MAX_STRIKES or sum(strike.is_alone for strike in request.strikes) < ALONE_STRIKES:
            return False
        unclear = [strike.suspects for strike in request.strikes if not self._counts(strike)]
        if unclear:
            await self._learn_who_died(request, frozenset().union(*unclear))
        counted = [strike for strike in request.strikes if self._counts(strike)]
        if len(counted) < MAX_STRIKES:
            return False
        last = request.strikes[-1]
        lost = {name for name in last.suspects if last.is_certain or not self._topology.is_alive(name)}
        await self._until_heard(request, lost)
        num_alone = sum(strike.is_alone and not self._was_shared(strike) for strike in counted)
        return num_alone >= ALONE_STRIKES + self._has_others_deaths(request)

    def _note_deaths(self, request: RunningAnswer) -> None:
        now_s = self._clock.monotonic()
        self._deaths = {name: death for name, death in self._deaths.items() if now_s - death.at_s < DEATHS_S}
        for strike in request.strikes:
            for name in strike.suspects:
                death = self._deaths.setdefault(name, _Death(now_s))
                if strike.is_alone:
                    death.tried.add(request.generation.request_id)

    def _was_shared(self, strike: Strike) -> bool:
        """Whether two were tried at the same process: they could only both go where there was one way."""
        deaths = (self._deaths.get(name) for name in strike.suspects)
        return any(death is not None and len(death.tried) > 1 for death in deaths)

    def _has_others_deaths(self, request: RunningAnswer) -> bool:
        """Whether workers have died lately that were not computing this request: then chance may be at work."""
        own: set[str] = set().union(*(strike.suspects for strike in request.strikes))
        return any(not self._topology.is_alive(name) for name in self._deaths.keys() - own)

    async def _until_heard(self, request: RunningAnswer, lost: Set[str]) -> None:
        """Waits until all that may have shared its last death know whether they did."""
        others = [other for other in self._struck if other is not request]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WORD_WAIT_S):
                while any(other.attempt is not None and other.attempt.may_have_met(lost) for other in others):
                    await self._heard.wait()

    def _counts(self, strike: Strike) -> bool:
        return strike.is_certain or any(not self._topology.is_alive(suspect) for suspect in strike.suspects)

    async def _learn_who_died(self, request: RunningAnswer, suspects: frozenset[str]) -> None:
        """Waits until each suspect has spoken again or is known to be gone, which silence tells at the latest."""
        heard_of = asyncio.get_running_loop().time() + LAST_WORDS_S
        patience = request.generation.deadline.sooner(Deadline.after(self._failover_wait_s, clock=self._clock))
        changes = self._topology.changes()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience.remaining_s()), contextlib.aclosing(changes):
                async for _ in changes:
                    if not any(self._topology.is_silent_since(suspect, heard_of) for suspect in suspects):
                        return


def fingerprint_of(generation: AnswerSpec) -> str:
    """The same for the same request, on every gateway; its seed, which is usually drawn, left out. 64 hex digits.

    Empty where it cannot be made, with an error in the log: such a request is in no quarantine, rather than lost.
    """
    sampling = msgspec.structs.replace(generation.sampling, seed=0)
    named = (generation.model, list(generation.prompt_token_ids), sampling)
    try:
        # Token ids are keys of a bias, and only keys that are text can be put in order.
        plain = msgspec.to_builtins(named, str_keys=True, order="sorted")
        return hashlib.sha256(msgspec.json.encode(plain)).hexdigest()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        logger.error("a request has no fingerprint", exc_info=error, extra={"request_id": generation.request_id})
        return ""
