"""Requests that kill their workers: none takes more than a few workers with it, and none is found guilty by chance.

A request that kills whatever computes it would take a whole cluster down, one retry after another. A strike is an
attempt during which a worker process died that was computing the request. One strike proves nothing: the request was
beside a death, and nearly every death is no request's fault. So it is tried alone: no other suspect is sent to the same
workers, which tells the request that they die of. Any new token clears it, because a long answer may well lose two
workers, or ten, to causes that are not its own, while a request that kills whatever computes it never gets one. It is
guilty when MAX_STRIKES workers have died of it without a new token in between, ALONE_STRIKES of them in trials that it
shared with no other; one trial more where workers have died lately that it had nothing to do with, since then its own
deaths may have been chance too. So two deaths by chance never make a request guilty, and a request that kills takes
three workers; four where others die meanwhile, or where it cannot be kept apart from another suspect.

Requests that a dead worker had only just begun wait for their trial, TRIAL_WAIT_S at most. Half of a model's workers
may have a trial at the same time, so that a hundred suspects do not wait for each other one by one. Requests that the
worker had been computing for a while without harm do not wait: they continue at once, as a trial where a place for one
is free.

A process that turns out to be alive, because only the connection broke, takes its strike back. A process that died can
tell what it was computing, so its partner is asked (`hear_out`), and no request is judged before all those that lost
the same process know whether they were computed there.
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
from gateway.requests.policies import Policies
from gateway.topology.events import Cancelled, Failed
from gateway.topology.member import ROLES
from gateway.topology.members import Topology
from gateway.topology.session import WorkerSession
from services.runtime.clock import Clock, Deadline
from services.runtime.errors import InternalError, Quarantined, TandemError, WorkerLost

QUARANTINED = "workers have died of this request; it is not computed for a while"
MAX_STRIKES = 3
"""The deaths of workers computing a request, without a new token in between, that make it guilty."""
ALONE_STRIKES = 2
"""The number of them that must have come while it was tried alone."""
DEATHS_S = 60.0
"""The time for which a death that a request had nothing to do with speaks for it."""
LAST_WORDS_S = 0.1
"""What a dead process had sent is read within this time; a process that speaks later is alive."""
WORD_WAIT_S = 1.0
"""A worker that lives has told by then what it knows of an attempt, usually within a round trip. One that hangs costs
this time; its silence would cost more."""
TRIAL_WAIT_S = 5.0
"""Longest wait for a trial's turn; a trial takes until the first token."""

logger = logging.getLogger(__name__)


class QuarantineList(Protocol):
    """Fingerprints of requests that nobody computes; `services.cluster.quarantine` shares them among gateways."""

    def __len__(self) -> int: ...

    def __contains__(self, fingerprint: str) -> bool: ...

    def add(self, fingerprint: str) -> None:
        """Has this fingerprint refused from now on, for a while."""
        ...


@dataclass(slots=True)
class _Death:
    """A process may have died at `at_s`, while it tried the requests of these ids."""

    at_s: float
    tried: set[str] = field(default_factory=set)


class Quarantine:
    """Judges every request of this gateway whose attempt failed so that a worker may have died of it."""

    def __init__(
        self,
        topology: Topology,
        dispatcher: Dispatcher,
        *,
        known: QuarantineList,
        metrics: Metrics,
        policies: Policies,
        clock: Clock,
    ) -> None:
        self._topology = topology
        self._dispatcher = dispatcher
        self._known = known
        self._metrics = metrics
        self._policies = policies
        self._clock = clock
        self._struck: WeakSet[RunningAnswer] = WeakSet()
        self._heard = asyncio.Event()
        """An event that is set when it is known why an attempt has failed; then a new one replaces it for the next."""
        self._awaiting_trial: deque[RunningAnswer] = deque()
        self._deaths: dict[str, _Death] = {}
        """The deaths of processes that may have died of a request, without those that a guilty one has killed."""

    def check(self, spec: AnswerSpec) -> None:
        """Raises Quarantined for a request that must not be computed."""
        if len(self._known) and fingerprint_of(spec) in self._known:
            raise Quarantined(QUARANTINED)

    async def hear_out(self, attempt: Attempt) -> None:
        """Asks the worker that can tell which one died, and why, if a failure leaves that open. Takes a bounded time.

        Where a worker has died, its message that it had begun, or could begin, may have been lost with it or be on its
        way, and the other worker knows. Where one reports that the other does not answer, that one may be dead without
        our having noticed. A worker that hangs says nothing for WORD_WAIT_S. Raises the request's failure.
        """
        try:
            witness = _witness_of(attempt)
            if witness is not None and witness.is_up:
                witness.cancel_and_ask(attempt.order.key)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(WORD_WAIT_S):
                        _take_word(attempt, await attempt.word_of(witness))
        finally:
            attempt.explain()
            self._heard.set()
            self._heard = asyncio.Event()

    async def judge(self, request: RunningAnswer, failure: TandemError) -> None:
        """Raises Quarantined if workers die of the request, which has just failed once more. Ends its trial."""
        try:
            is_poison = await self._is_poison(request)
        finally:
            # Not before the dead worker is known: the next request on trial must not be sent there.
            self.end_trial(request)
        if is_poison:
            self._note_poison(request)
            raise Quarantined(QUARANTINED) from failure

    def counts(self, strike: Strike) -> bool:
        """Returns whether one of the strike's suspects is known to have died."""
        return strike.is_certain or any(not self._topology.is_alive(suspect) for suspect in strike.suspects)

    async def await_trial(self, request: RunningAnswer) -> None:
        """Waits until the request, after a strike, may be tried alone; for a bounded time, or not at all."""
        if request.strikes and self.counts(request.strikes[-1]):
            await self._begin_trial(request, max_wait_s=TRIAL_WAIT_S if request.strikes[-1].is_fresh else 0.0)

    def end_trial(self, request: RunningAnswer) -> None:
        """Lets the next request be tried: this one has got a token, has failed again or is over."""
        if request in self._dispatcher.on_trial:
            self._dispatcher.on_trial.discard(request)
            self._nudge_awaiting()

    async def _begin_trial(self, request: RunningAnswer, *, max_wait_s: float) -> None:
        """Waits for a place for its trial, for a bounded time. Without one the request continues untried."""
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
        """Returns whether a worker is left for its trial, and no other request has waited longer for one."""
        model = request.spec.model
        ahead = next(other for other in self._awaiting_trial if other.spec.model == model)
        on_trial = [other for other in self._dispatcher.on_trial if other.spec.model == model]
        # A request that did not wait for its trial keeps no other from having one.
        num_on_trial = sum(other.strikes[-1].is_fresh for other in on_trial if other.strikes)
        num_workers = [self._topology.num_ready(role, model) for role in ROLES]
        return ahead is request and num_on_trial < max(1, min(filter(None, num_workers), default=0) // 2)

    def _nudge_awaiting(self) -> None:
        for request in self._awaiting_trial:
            request.mailbox.nudge()

    def condemn(self, spec: AnswerSpec, *, num_deaths: int) -> None:
        """Has a request refused from now on, for a while."""
        self._metrics.quarantined.inc()
        told = {"request_id": spec.request_id, "model": spec.model, "deaths": num_deaths}
        logger.warning("a request is quarantined: workers have died of computing it", extra=told)
        if fingerprint := fingerprint_of(spec):
            self._known.add(fingerprint)

    def _note_poison(self, request: RunningAnswer) -> None:
        self.condemn(request.spec, num_deaths=len(request.strikes))
        for strike in request.strikes:
            for incarnation in strike.suspects:
                self._deaths.pop(incarnation, None)

    async def _is_poison(self, request: RunningAnswer) -> bool:
        if not request.strikes:
            return False
        self._struck.add(request)
        self._note_deaths(request)
        if len(request.strikes) < MAX_STRIKES or sum(strike.is_alone for strike in request.strikes) < ALONE_STRIKES:
            return False
        unclear = [strike.suspects for strike in request.strikes if not self.counts(strike)]
        if unclear:
            await self._learn_who_died(request, frozenset().union(*unclear))
        counted = [strike for strike in request.strikes if self.counts(strike)]
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
                    death.tried.add(request.spec.request_id)

    def _was_shared(self, strike: Strike) -> bool:
        """Returns whether two were tried at the same process, which happens where only one route exists."""
        deaths = (self._deaths.get(name) for name in strike.suspects)
        return any(death is not None and len(death.tried) > 1 for death in deaths)

    def _has_others_deaths(self, request: RunningAnswer) -> bool:
        """Returns whether workers have died lately that were not computing this request: then chance may be at work."""
        own: set[str] = set().union(*(strike.suspects for strike in request.strikes))
        return any(not self._topology.is_alive(name) for name in self._deaths.keys() - own)

    async def _until_heard(self, request: RunningAnswer, lost: Set[str]) -> None:
        """Waits until all that may have shared its last death know whether they did."""
        others = [other for other in self._struck if other is not request]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WORD_WAIT_S):
                while any(other.attempt is not None and other.attempt.may_have_met(lost) for other in others):
                    await self._heard.wait()

    async def _learn_who_died(self, request: RunningAnswer, suspects: frozenset[str]) -> None:
        """Waits until each suspect has spoken again or is known to be gone, at the latest by its silence."""
        heard_of = asyncio.get_running_loop().time() + LAST_WORDS_S
        patience = request.spec.deadline.sooner(Deadline.after(self._policies.failover_wait_s, clock=self._clock))
        changes = self._topology.changes()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience.remaining_s()), contextlib.aclosing(changes):
                async for _ in changes:
                    if not any(self._topology.is_silent_since(suspect, heard_of) for suspect in suspects):
                        return


def _witness_of(attempt: Attempt) -> WorkerSession | None:
    """Returns the worker that can explain the failure, or None."""
    fault = attempt.fault
    if fault is None or fault.is_certain:
        return None
    if fault.worker is None:  # one of the two about the other one
        asked = fault.accused or next(iter(fault.suspects), None)
    elif isinstance(fault.error, WorkerLost) and not fault.suspects and not attempt.is_move:
        asked = attempt.decode if fault.worker is attempt.prefill else attempt.prefill
    else:
        asked = None
    return asked if attempt.is_at(asked) else None


def _take_word(attempt: Attempt, word: Cancelled | Failed) -> None:
    """Notes which worker may have died of a failed attempt, by what a witness has told."""
    if isinstance(word, Failed) and isinstance(word.error, WorkerLost):
        return  # It is gone, too: what was believed of it is true.
    assert attempt.fault is not None, "only an attempt with a fault has a witness"
    # Pages are reserved before a prompt is computed, so an attempt whose transfer failed has had them.
    has_begun = isinstance(word, Failed) or word.has_begun
    lost = attempt.fault.worker
    if attempt.prefill is not None and lost is attempt.prefill and has_begun:
        attempt.suspect(attempt.prefill)
    elif lost is attempt.decode and attempt.may_compute(attempt.decode):
        attempt.suspect(attempt.decode)
    else:
        accused, has_crashed = attempt.fault.accused, isinstance(word, Failed) and isinstance(word.error, InternalError)
        attempt.suspect(is_between=accused is not None and not accused.load.is_draining and not has_crashed)


def fingerprint_of(spec: AnswerSpec) -> str:
    """Returns 64 hex digits, equal for equal requests on every gateway, without the seed, which is usually drawn.

    It is empty where it cannot be made, with an error in the log: such a request escapes quarantine, but is not lost.
    """
    sampling = msgspec.structs.replace(spec.sampling, seed=0)
    named = (spec.model, list(spec.prompt_token_ids), sampling)
    try:
        # Token ids are keys of a bias, and only keys that are text can be put in order.
        plain = msgspec.to_builtins(named, str_keys=True, order="sorted")
        return hashlib.sha256(msgspec.json.encode(plain)).hexdigest()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        logger.error("a request has no fingerprint", exc_info=error, extra={"request_id": spec.request_id})
        return ""
