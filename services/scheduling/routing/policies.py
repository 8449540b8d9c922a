"""The routing policies, one function each: which workers come first.

`hybrid`, the default, goes by the price of whole routes (`router`). Every other policy orders the workers of one role,
each of which can serve the request.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from random import Random

from services.scheduling.routing.price import Prices
from services.scheduling.routing.views import WorkerView


@dataclass(slots=True)
class PolicyInputs:
    """What a policy may look at beside the workers of one role."""

    prices: Prices
    is_decode: bool
    turn: int
    random: Random
    hashes: "Hashes"

    def in_turn(self, views: list[WorkerView]) -> list[WorkerView]:
        """Returns workers by id, another one first with each decision."""
        return rotated(sorted(views, key=_BY_ID), self.turn)

    def loads_s(self, views: list[WorkerView]) -> dict[str, float]:
        """Returns how long each worker has to do: with its queue, for the answer, and for the lack of pages."""
        prices = self.prices
        # PrefillTerms and DecodeTerms: names would cost more than the sums.
        if not self.is_decode:
            return {one[2].worker_id: one[4] + one[7] for one in prices.price_prefills(views)}
        answer = prices.new_tokens
        return {one[2].worker_id: one[8] + answer * one[4] + one[5] for one in prices.price_decodes(views)}


_BY_ID = attrgetter("worker_id")

Policy = Callable[[list[WorkerView], PolicyInputs], list[WorkerView]]


def least_loaded(views: list[WorkerView], draw: PolicyInputs) -> list[WorkerView]:
    """Orders workers by the seconds that they have to do."""
    loads_s = draw.loads_s(views)
    return sorted(draw.in_turn(views), key=lambda view: loads_s[view.worker_id])


def prefix_aware(views: list[WorkerView], draw: PolicyInputs) -> list[WorkerView]:
    """Orders workers by how much of the prompt they hold, then by load."""
    loads_s, request = draw.loads_s(views), draw.prices.request
    most = request.num_prompt_tokens - 1

    def cached(view: WorkerView) -> int:
        return max(0, min(request.cached_tokens.get(view.worker_id, 0), most))

    return sorted(draw.in_turn(views), key=lambda view: (-cached(view), loads_s[view.worker_id]))


def sticky(views: list[WorkerView], draw: PolicyInputs) -> list[WorkerView]:
    """Orders workers by rendezvous hashing (Thaler and Ravishankar, 1998), those with too many requests last, by load.

    Without a key, by load.
    """
    request, settings = draw.prices.request, draw.prices.settings
    if not request.affinity_key:
        return least_loaded(views, draw)
    key_hash = _hash(request.affinity_key)
    scored = sorted(
        draw.in_turn(views), key=lambda view: _mixed(key_hash ^ draw.hashes.of(view.worker_id)), reverse=True
    )
    total = sum(view.num_requests for view in views) + 1
    capacity = math.ceil(settings.max_load_factor * total / len(views))
    loads_s = draw.loads_s(views)
    within = [view for view in scored if view.num_requests < capacity]
    beyond = [view for view in scored if view.num_requests >= capacity]
    return within + sorted(beyond, key=lambda view: loads_s[view.worker_id])


def round_robin(views: list[WorkerView], draw: PolicyInputs) -> list[WorkerView]:
    """Gives each worker its turn."""
    return draw.in_turn(views)


def at_random(views: list[WorkerView], draw: PolicyInputs) -> list[WorkerView]:
    """Shuffles workers."""
    return draw.random.sample(views, len(views))


ONE_BY_ONE: dict[str, Policy] = {
    "least_loaded": least_loaded,
    "prefix_aware": prefix_aware,
    "sticky": sticky,
    "round_robin": round_robin,
    "random": at_random,
}
HYBRID = "hybrid"
POLICY_NAMES = (HYBRID, *ONE_BY_ONE)
"""Names that `Router` takes; the first is the default."""


def rotated(workers: list[WorkerView], turn: int) -> list[WorkerView]:
    """Returns workers from the one whose turn it is on, then those before it."""
    first = turn % len(workers) if workers else 0
    return workers[first:] + workers[:first]


class Hashes:
    """Hashes of worker ids, each computed once."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def of(self, worker_id: str) -> int:
        """Returns 64 bits that depend on the id alone."""
        known = self._known.get(worker_id)
        if known is None:
            if len(self._known) > 1 << 14:
                self._known.clear()  # workers come and go
            known = self._known[worker_id] = _hash(worker_id)
        return known


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _mixed(value: int) -> int:
    """Returns 64 bits permuted so that every bit depends on every other (the finalizer of splitmix64)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)
