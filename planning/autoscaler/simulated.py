"""An autoscaler in a simulated cluster: it sees what gateways would tell it, and its decisions are carried out."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from planning.autoscaler.policy import Autoscaler, Decision, Observation
from planning.simulator.cluster import Cluster, ClusterSpec, Run, simulate
from planning.simulator.events import EventLoop
from planning.simulator.jobs import prompt_s
from planning.simulator.pool import DECODE, PREFILL, Worker
from planning.simulator.traces import Trace

SWITCH_S = 5.0
"""A worker with its weights in place takes this long to another role, once it is drained."""


@dataclass(slots=True)
class Scaled:
    """What came of it: the run, and each decision that changed something, with its time."""

    run: Run
    decisions: list[tuple[float, Decision]]


def scaled(
    trace: Trace, spec: ClusterSpec, *, autoscaler: Autoscaler, first: tuple[int, int], switch_s: float = SWITCH_S
) -> Scaled:
    """Simulates a trace whose workers the autoscaler chooses. `first`: prompt and answer tokens that it expects."""
    decisions: list[tuple[float, Decision]] = []

    def meddle(cluster: Cluster, loop: EventLoop) -> None:
        hands = _Hands(cluster, loop, autoscaler.settings.start_up_s, switch_s)
        eyes = _Eyes(cluster, trace, first)

        def look() -> None:
            decision = autoscaler.decide(eyes.observe(loop.now_s, hands))
            if decision.is_change:
                decisions.append((loop.now_s, decision))
                hands.act(decision)
            if cluster.num_to_come:
                loop.at(loop.now_s + autoscaler.settings.interval_s, look)

        loop.at(autoscaler.settings.interval_s, look)

    return Scaled(simulate(trace, spec, "hybrid", meddler=meddle), decisions)


class _Hands:
    """Carries decisions out."""

    def __init__(self, cluster: Cluster, loop: EventLoop, start_up_s: float, switch_s: float) -> None:
        self._pool = cluster.pool
        self._loop = loop
        self._start_up_s = start_up_s
        self._switch_s = switch_s
        self.num_switching = {PREFILL: 0, DECODE: 0}
        """Workers on their way to a role that are not drained yet."""

    def act(self, decision: Decision) -> None:
        for _ in range(decision.to_prefill):
            self._switch(DECODE, PREFILL)
        for _ in range(decision.to_decode):
            self._switch(PREFILL, DECODE)
        for role, wanted in ((PREFILL, decision.prefill), (DECODE, decision.decode)):
            has = self._num(role)
            for _ in range(wanted - has):
                self._pool.add(role, start_up_s=self._start_up_s)
            for _ in range(has - wanted):
                self._drop(role)

    def _num(self, role: str) -> int:
        ready: Sequence[object] = list(self._pool.prefills if role == PREFILL else self._pool.decodes)
        return len(ready) + self._pool.num_starting(role) + self.num_switching[role]

    def _switch(self, old: str, new: str) -> None:
        self.num_switching[new] += 1

        def arrive() -> None:
            self.num_switching[new] -= 1
            self._pool.add(new, start_up_s=self._switch_s)

        self._pool.drain(self._idlest(old), arrive)

    def _drop(self, role: str) -> None:
        """Takes back the youngest that still starts, or else drains the one with the least to do."""
        starting = [
            worker_id
            for worker_id, life in self._pool.lives.items()
            if life.role == role and life.ready_s is None and life.gone_s is None
        ]
        self._pool.drain(starting[-1] if starting else self._idlest(role))

    def _idlest(self, role: str) -> str:
        workers: list[Worker] = [*(self._pool.prefills if role == PREFILL else self._pool.decodes).values()]
        return min(workers, key=lambda worker: (worker.num_requests, worker.worker_id)).worker_id


class _Eyes:
    """Sees what gateways know."""

    def __init__(self, cluster: Cluster, trace: Trace, first: tuple[int, int]) -> None:
        self._cluster = cluster
        self._requests = trace.requests
        self._arrivals = [request.arrival_s for request in trace.requests]
        self._mean_prompt, self._mean_answer = float(first[0]), float(first[1])
        self._num_seen, self._last_s = 0, 0.0
        self._answered = (0, 0)

    def observe(self, now_s: float, hands: _Hands) -> Observation:
        cluster, pool = self._cluster, self._cluster.pool
        num_arrived = bisect_right(self._arrivals, now_s)
        new = [request.num_prompt_tokens for request in self._requests[self._num_seen : num_arrived]]
        if new:
            self._mean_prompt += 0.5 * (sum(new) / len(new) - self._mean_prompt)
        count, tokens = cluster.answered
        if count > self._answered[0]:
            mean = (tokens - self._answered[1]) / (count - self._answered[0])
            self._mean_answer += 0.5 * (mean - self._mean_answer)
        self._answered = count, tokens
        waiting_s = len(cluster.queue) * prompt_s(cluster.spec.prefill, round(self._mean_prompt))
        seen = Observation(
            now_s=now_s,
            elapsed_s=now_s - self._last_s,
            num_arrived=num_arrived - self._num_seen,
            mean_prompt=self._mean_prompt,
            mean_answer=self._mean_answer,
            backlog_s=waiting_s + sum(worker.queue_s for worker in pool.prefills.values()),
            prefill=len(pool.prefills),
            decode=len(pool.decodes),
            starting_prefill=pool.num_starting(PREFILL) + hands.num_switching[PREFILL],
            starting_decode=pool.num_starting(DECODE) + hands.num_switching[DECODE],
        )
        self._num_seen, self._last_s = num_arrived, now_s
        return seen
