"""The autoscaler at work: looks, decides, and has its actor carry the decision out, as long as it holds the lease.

It keeps nothing that it could not find again. How many workers there are to be is the actor's to know, so that an order
which a dead autoscaler has half carried out is completed by the next decision. A look that fails changes nothing.
"""

import asyncio
import logging
from collections.abc import Iterable

from planning.autoscaler.actors import Actor, ActorFailed, Sizes
from planning.autoscaler.decisions import DecisionLog, Look, decided
from planning.autoscaler.gateways import Gateways, Seen
from planning.autoscaler.need import Speeds, WorkerFacts, measured
from planning.autoscaler.policy import Decision, Observation
from planning.planner.bounds import prompt_s
from planning.planner.question import LatencyTargets
from services.cluster.decision_board import DecisionBoard, ShownDecision
from services.cluster.leadership import Leadership
from services.runtime.clock import SYSTEM_CLOCK, Clock
from services.runtime.errors import StoreUnavailable
from services.runtime.worker_state import WorkerState

GUESSED_PROMPT, GUESSED_ANSWER = 512.0, 128.0
"""Mean lengths before anything has ended."""

logger = logging.getLogger(__name__)


class Service:
    """One copy of the autoscaler. `leadership` None: it is the only one."""

    def __init__(
        self,
        gateways: Gateways,
        actor: Actor,
        *,
        log: DecisionLog,
        targets: LatencyTargets,
        leadership: Leadership | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._gateways = gateways
        self._actor = actor
        self._log = log
        self._targets = targets
        self._leadership = leadership
        self._clock = clock
        self._speeds: Speeds | None = None
        self.board: DecisionBoard | None = None
        """Where gateways see what it orders; None: they do not."""
        self._told = ""
        self._shown = ""

    async def run(self, stop: asyncio.Event) -> None:
        """Looks at once, so that the next look can count, and then once in an interval until `stop` is set."""
        interval_s = self._log.autoscaler.settings.interval_s
        await asyncio.to_thread(self._gateways.look)
        while not stop.is_set():
            try:
                await asyncio.wait_for(stop.wait(), interval_s)
            except TimeoutError:
                await self.step()

    async def step(self) -> Look | None:
        """Looks and decides once. Returns what was found; None: nothing could be seen, and nothing was done."""
        seen = await asyncio.to_thread(self._gateways.look)
        if seen.num_gateways == 0:
            self._tell("no gateway can be seen, so nothing changes: " + "; ".join(seen.troubles))
            return None
        ready = Sizes(_num_ready(seen.workers, "prefill"), _num_ready(seen.workers, "decode"))
        try:
            wanted = await asyncio.to_thread(self._actor.sizes, ready)
        except ActorFailed as error:
            self._tell(f"how many workers there are to be is not known, so nothing changes: {error.message}")
            return None
        self._speeds = measured(seen.workers, self._speeds)
        observation = self._observation(seen, ready, wanted)
        decision = decided(self._log.autoscaler, observation, speeds=self._speeds, targets=self._targets)
        done = await self._carry_out(decision, wanted)
        look = Look(seen=observation, speeds=self._speeds, decision=decision, done=done, troubles=tuple(seen.troubles))
        self._write(look)
        await self._show(look)
        self._tell("; ".join([done, *seen.troubles]), reason=decision.reason)
        return look

    async def _carry_out(self, decision: Decision, wanted: Sizes) -> str:
        """Returns what was done, or why nothing was."""
        sizes = Sizes(decision.prefill, decision.decode)
        if sizes == wanted:
            return "nothing to do"
        lease = None if self._leadership is None else self._leadership.lease
        if self._leadership is not None and lease is None:
            failure = self._leadership.failure
            return f"nothing: {failure}" if failure else f"nothing: {self._leadership.other or 'nobody'} acts"
        try:
            await asyncio.to_thread(self._actor.resize, sizes, lease)
        except ActorFailed as error:
            return f"failed: {error.message}"
        return f"ordered {sizes} in place of {wanted}"

    def _observation(self, seen: Seen, ready: Sizes, wanted: Sizes) -> Observation:
        mean_prompt = seen.mean_prompt or GUESSED_PROMPT
        backlog_s = 0.0
        if self._speeds is not None:
            waiting = sum(one.waiting_tokens for one in seen.workers if one.role == "prefill")
            backlog_s = seen.num_queued * prompt_s(self._speeds.kind, max(1, round(mean_prompt)))
            backlog_s += waiting * self._speeds.prefill.s_per_token
        return Observation(
            now_s=self._clock.unix_ns() / 1e9,
            elapsed_s=seen.elapsed_s,
            num_arrived=seen.num_arrived,
            mean_prompt=mean_prompt,
            mean_answer=seen.mean_answer or GUESSED_ANSWER,
            backlog_s=backlog_s,
            prefill=min(ready.prefill, wanted.prefill),
            decode=min(ready.decode, wanted.decode),
            starting_prefill=max(0, wanted.prefill - ready.prefill),
            starting_decode=max(0, wanted.decode - ready.decode),
        )

    def _write(self, look: Look) -> None:
        try:
            self._log.write(look)
        except OSError as error:
            logger.warning("the log of decisions cannot be written", extra={"reason": error.strerror})

    async def _show(self, look: Look) -> None:
        """Puts what was ordered, or why it could not be, where gateways see it."""
        if self.board is None or look.done.startswith("nothing") or look.done == self._shown:
            return
        try:
            await self.board.put(ShownDecision(look.seen.now_s, look.done, look.decision.reason))
            self._shown = look.done
        except StoreUnavailable as error:
            logger.warning("gateways cannot be told of a decision", extra={"reason": str(error)})

    def _tell(self, words: str, *, reason: str = "") -> None:
        """Writes a line to the log where there is something new to tell."""
        if words != self._told:
            self._told = words
            logger.info(words, extra={"reason": reason} if reason else {})


def _num_ready(workers: Iterable[WorkerFacts], role: str) -> int:
    return sum(one.role == role and one.state == WorkerState.READY for one in workers)
