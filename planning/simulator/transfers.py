"""How pages travel between simulated workers: a network card each, which those of one host share, and nothing fails.

A transfer has both cards to itself, first come first served; the chunks of a prompt are transfers one after the other.
"""

from collections.abc import Callable
from functools import partial

from planning.simulator.events import EventLoop
from planning.simulator.jobs import Job
from planning.simulator.prefill import PrefillWorker
from services.scheduling.prediction import LinkSpeed
from services.scheduling.routing.pulls import ASK_S
from services.scheduling.routing.views import Pull


class Network:
    """When each card is free, in seconds."""

    def __init__(self) -> None:
        self._free_s: dict[str, float] = {}

    def stop(self, card: str, until_s: float) -> None:
        """Lets a card carry nothing until then."""
        self._free_s[card] = max(self._free_s.get(card, 0.0), until_s)

    def book(self, *, source: str, target: str, now_s: float, duration_s: float) -> float:
        """Returns when a transfer that may begin now has left both cards."""
        free_s = self._free_s
        end_s = max(now_s, free_s.get(source, 0.0), free_s.get(target, 0.0)) + duration_s
        free_s[source] = free_s[target] = end_s
        return end_s


class Transfers:
    """Sends the pages of chunks; calls `arrived` when the last ones of a prompt have come."""

    def __init__(
        self,
        loop: EventLoop,
        card_of: Callable[[str], str],
        *,
        link: Callable[[PrefillWorker, str], LinkSpeed],
        arrived: Callable[[PrefillWorker, Job, int], None],
    ) -> None:
        """`card_of` names the network card of a worker, `link` gives the way from one to another, by its id; `arrived`
        also gets the attempt that was sent.
        """
        self._link = link
        self._loop = loop
        self._card_of = card_of
        self._arrived = arrived
        self._network = Network()

    def stop(self, worker_id: str, duration_s: float) -> None:
        """Stops a worker's card; what was to go over it goes later."""
        self._network.stop(self._card_of(worker_id), self._loop.now_s + duration_s)

    def fetch(self, worker: PrefillWorker, job: Job, *, pull: Pull) -> None:
        """Has the beginning of a prompt sent from its holder to the prefill worker, which takes the prompt then."""
        worker.expect(1)
        link, now_s = self._link(worker, pull.holder.worker_id), self._loop.now_s
        end_s = self._network.book(
            source=self._card_of(pull.holder.worker_id),
            target=self._card_of(worker.worker_id),
            now_s=now_s,
            duration_s=pull.num_bytes / link.bytes_per_s,
        )
        num_blocks = pull.num_tokens // worker.spec.page_size
        self._loop.at(end_s + link.latency_s + ASK_S, partial(_take_fetched, worker, job, job.attempt, num_blocks))

    def send(self, worker: PrefillWorker, job: Job, *, is_last: bool) -> None:
        """Sends what is computed of a prompt and not yet sent, but for what the receiver has cached."""
        assert job.decode_lease is not None, "its pages are promised"
        num_cached = min(job.decode_lease.num_cached * worker.spec.page_size, job.num_replayed_tokens - 1)
        num_sent = max(job.num_sent_tokens, num_cached)
        num_tokens = max(0, job.num_computed_tokens - num_sent)
        job.num_sent_tokens = num_sent + num_tokens
        link = self._link(worker, job.decode_worker)
        end_s = self._network.book(
            source=self._card_of(worker.worker_id),
            target=self._card_of(job.decode_worker),
            now_s=self._loop.now_s,
            duration_s=num_tokens * worker.spec.kv_bytes_per_token / link.bytes_per_s,
        )
        if is_last:
            self._loop.at(end_s + link.latency_s, partial(self._arrived, worker, job, job.attempt))


def _take_fetched(worker: PrefillWorker, job: Job, attempt: int, num_blocks: int) -> None:
    worker.expect(-1)
    if job.attempt == attempt and not worker.is_lost:
        worker.pool.remember(job.blocks[:num_blocks])
        worker.enter(job)
