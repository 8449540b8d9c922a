"""One model's refusals: what `services.scheduling.overload` is told, and what clients are told of its verdicts.

The policy knows work, time and limits; here are the queue, the workers and the way that a request would go, put into
its words. Whoever asks a cluster that is full hears so within milliseconds, with the reason and a time to come back.
"""

import random
from collections.abc import Callable

from services.runtime.clock import Clock
from services.runtime.errors import Overloaded
from services.scheduling.overload import NO_TARGETS, Admit, ClusterLoad, OverloadPolicy, Refuse, Targets
from services.scheduling.queue import QueueEntry, RequestQueue, ServiceClass
from services.scheduling.routing import Route


class OverloadGuard:
    """Judges every new request of one model.

    `free_share` gives the largest share of its pages that a decode worker in rotation has free, `num_computing` how
    many workers compute prompts.
    """

    def __init__(
        self,
        policy: OverloadPolicy,
        queue: RequestQueue,
        *,
        targets: Targets,
        free_share: Callable[[], float],
        num_computing: Callable[[], int] = lambda: 1,
        clock: Clock,
    ) -> None:
        self._policy = policy
        self._queue = queue
        self._targets = targets
        self._free_share = free_share
        self._num_computing = num_computing
        self._clock = clock
        self._random = random.Random()  # noqa: S311 - which requests are refused

    def check(self, entry: QueueEntry, route: Route | None = None, *, own: Targets = NO_TARGETS) -> Admit:
        """Lets a new request in. Raises Overloaded with the reason.

        Without a route, which costs more to find, it judges by the queue and the pages alone. `own` are the targets
        that its client named, which hold where they are stricter than the operator's.
        """
        load, targets = self._load(entry, route), self._targets.stricter(own)
        verdict = self._policy.judge(entry, load, targets, self._clock.monotonic(), jitter=self._random.random())
        if isinstance(verdict, Refuse):
            raise _refused(verdict)
        return verdict

    def promised_s(self, service_class: ServiceClass, own: Targets, *, arrived_s: float, prompt_s: float) -> float:
        """When the turn of a request must have come to keep what it is promised; `math.inf`: that is nothing."""
        targets = self._targets.stricter(own)
        return self._policy.promised_s(service_class, targets, arrived_s=arrived_s, prompt_s=prompt_s)

    def when_full(self, entry: QueueEntry) -> Overloaded:
        """What a request is told for which the queue has no room, or had until a more urgent one came."""
        verdict = self._policy.when_full(
            entry, self._load(entry, None), self._clock.monotonic(), jitter=self._random.random()
        )
        return _refused(verdict)

    def may_start(self, entry: QueueEntry, route: Route) -> bool:
        """Whether its turn may come now that there is room; False: that is kept for requests that cannot wait."""
        return self._policy.may_start(entry, self._load(entry, route))

    def note_waiting(self, *, is_for_room: bool) -> None:
        """The first in the queue could not go: for want of room, or because it may not start yet."""
        self._policy.note_backlog(self._clock.monotonic(), is_backlogged=is_for_room)

    def note_started(self, entry: QueueEntry, admitted: Admit | None) -> None:
        """Workers took it. `admitted` is what `check` said of it; None: it was running before."""
        self._policy.note_start(entry, self._clock.monotonic(), is_backlogged=len(self._queue) > 0, admitted=admitted)

    def note_ended(self, entry: QueueEntry) -> None:
        """One that may have started is over."""
        now_s = self._clock.monotonic()
        self._policy.note_end(entry.key, now_s)
        if not len(self._queue):
            self._policy.note_backlog(now_s, is_backlogged=False)

    def _load(self, entry: QueueEntry, route: Route | None) -> ClusterLoad:
        queue, one = self._queue, entry.service_class
        if route is None:
            return ClusterLoad(
                queue.num_ahead(one),
                queue.waiting_tokens(one),
                len(queue),
                self._free_share(),
                prompts_ahead_s=self._prompts_ahead_s(one),
            )
        at = route.prefills[0] if route.is_remote else route.decode
        queue_s = at.prefill_speed.time_s(at.waiting_tokens) if at.waiting_tokens else 0.0
        return ClusterLoad(
            queue.num_ahead(one),
            queue.waiting_tokens(one),
            len(queue),
            route.decode.pages_available / max(1, route.decode.pages_total),
            prefill_s=max(0.0, route.predicted_ttft_s - queue_s),
            prefill_queue_s=queue_s,
            step_s=route.predicted_itl_s,
            prompts_ahead_s=self._prompts_ahead_s(one),
        )

    def _prompts_ahead_s(self, one: ServiceClass) -> float:
        return self._queue.waiting_prompts_s(one) / max(1, self._num_computing())


def _refused(verdict: Refuse) -> Overloaded:
    what = f"the cluster is full: {verdict.reason}"
    if verdict.kind == "deadline":
        what = f"the deadline cannot be met: {verdict.reason}"
    return Overloaded(what, retry_after_s=verdict.retry_after_s, reason=verdict.kind)
