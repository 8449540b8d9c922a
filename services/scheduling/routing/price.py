"""The price of a route: every term of it, once.

Prefill worker P and decode worker D are priced together. Every term is a number of seconds that a request waits, so
terms can be added without weights:

    price(D)   = decode_s + pressure_s(D) + place_s(D) + min(local(D), min over P of remote(P, D))
    remote     = prefill(P) + transfer_s(P, D) + INTERFERENCE · queue_s(D)
    prefill(P) = queue_s(P) + pull_s + crowd · work_s(P) + redone_weight · redone_s(P) + pressure_s(P) + place_s(P)
                 + hot_spot_s(P)
    local      = queue_s(D) + work_s(D) + steps · step_s(D) + itl_s(D) + redone_weight · redone_s(D)

    queue_s    prompt tokens that wait there × seconds per token (the square term for prompts of their mean length)
    work_s     seconds for the prompt's tokens that the worker does not hold, by its measured speed
    pull_s     seconds for fetching tokens that P lacks from a worker that holds them, where that is quicker than
               computing them (`pulls`): then work_s is without these
    redone_s   seconds for those of them that some worker holds; for P, that a decode worker and no prefill worker holds
               (the last answer of a conversation, as a rule). Others arrive meanwhile, so such tokens count twice
    crowd      1 + `displaced_weight` · mean number of requests at a prefill worker that are as urgent: as many will
               come to P while a backlog like today's is worked off (Little's law), and each of them waits work_s
               longer. Without it, going to an idle worker that lacks the prefix is free, and under load lost hits are
               lost capacity
    transfer_s latency + (bytes under way + bytes of the tokens that D does not hold) / rate, of the measured link from
               P to D. A pair that was never measured is priced by P's usual link; from one region to another it takes
               `cross_region_factor` times as long, and their distance more: as the operator says, or `cross_region_s`.
               All of it counts, as computation does, although each hides a part of the other from this request: no
               other request has the link meanwhile
    decode_s   expected new tokens × length of D's step with this request in it, half of its answer generated
    steps      steps of D's batch that have a part of the prompt in them: D computes prompts beside the tokens of its
               sequences, a few milliseconds in each step (`chunks`), until those sequences have ended. A prompt for
               which an idle worker needs 100 ms takes many steps of a busy one
    itl_s      what a local prefill takes from the others: every sequence of D's batch waits once for each step, so
               together they lose work_s · (sequences, at least `min_disturbed`), `itl_weight` times. That is why a long
               prompt goes away even from an idle decode worker: another request will come while it is computed
    pressure_s `pressure_s` · x², where x grows from 0 at the last `pressure_share` of the pool's pages to 1 at the last
               page, and continues to grow beyond: the request would have to wait for pages
    place_s    the distance where worker and request name different regions, as the operator says, or `region_s`, and
               `shared_s` for a shared worker where the tenant has workers of that role of its own, and for one of
               another pool where the request's has any
    hot_spot_s what a worker's queue is longer than the median of its role, once more, if the worker is hot (`Hits`). At
               most half of the seconds that its cache saves, so that to hold more is never worse. It makes requests
               leave a hot prefix's only holder before the queue alone would; the worker that computes the prefix then
               holds it too

`disaggregation` has the thresholds that override the cheaper of local and remote. The idea of one sum of queue,
computation and transfer, and of letting a hot prefix replicate itself by going elsewhere once the holder's queue costs
more than it saves, is that of Mooncake's Conductor (Qin et al., FAST '25; its balancing threshold compares lengths of
prefixes, ours seconds).

One decision prices many workers, so these are loops without calls, over figures that depend on a view alone and are
worked out once per view. They keep the terms; names are given to those of the chosen route (`route`).
"""

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from services.scheduling.chunks import stretch_s
from services.scheduling.disaggregation import DisaggregationSettings, Reason
from services.scheduling.links import PeerLink
from services.scheduling.routing.views import Fits, Pull, RouteRequest, WorkerView, strangeness

INTERFERENCE = 0.5
"""The share of the prompts waiting at D that lengthens the steps of a sequence which comes with its pages: they are
computed between its steps, but the first half, as a rule, before it arrives."""

ROUNDING = 1e-9
"""A least price and a price are sums of the same terms in different orders."""


@dataclass(frozen=True, slots=True)
class RoutingSettings:
    """The constants of the price (see the module), and of the policies. Seconds where the name ends so."""

    disaggregation: DisaggregationSettings = field(default_factory=DisaggregationSettings)
    expected_new_tokens: int = 256
    """An answer's length where its limit is longer: limits are often set far too high."""
    pressure_s: float = 1.0
    pressure_share: float = 0.1
    region_s: float = 0.1
    cross_region_s: float = 0.05
    cross_region_factor: float = 4.0
    distances_s: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """From one region to another, both ways round, in place of `region_s` and `cross_region_s`."""
    shared_s: float = 1.0
    displaced_weight: float = 2.0
    """What a second that later requests wait for a prompt's computation counts, against one of its own."""
    hot_window_s: float = 10.0
    hot_min_hits: float = 8.0
    all_up_to: int = 64
    """Up to this many workers of a role, all are looked at."""
    num_choices: int = 8
    """Workers drawn at random where they are more."""
    num_holders: int = 4
    """Holders of the longest prefixes that are looked at besides."""
    max_load_factor: float = 1.25
    """`sticky` leaves the worker of a key that has this many times the mean of requests (Mirrokni et al., 2016)."""

    def far_s(self, here: str, there: str) -> float:
        """Returns how long a request's way from one region to a worker in another one takes; empty: near to all."""
        is_far = here and there and here != there
        return self.distances_s.get((here, there), self.region_s) if is_far else 0.0


Terms = tuple[Any, ...]
"""PrefillTerms or DecodeTerms before they have names, which cost more than what is computed."""


class PrefillTerms(NamedTuple):
    """What a prompt costs at a prefill worker, without the transfer. Sorts by price, then by `position`."""

    price_s: float
    position: int
    view: WorkerView
    cached_tokens: int
    queue_s: float
    work_s: float
    redone_s: float
    pressure_s: float
    place_s: float
    hot_spot_s: float = 0.0
    pull_s: float = 0.0


class DecodeTerms(NamedTuple):
    """What a decode worker alone decides of a request's price, which is at least `least_s` there.

    Sorts by that, then by `position`. `common_s` is due in any case. `local_s` is due if D computes the prompt.
    """

    least_s: float
    position: int
    view: WorkerView
    cached_tokens: int
    step_s: float
    pressure_s: float
    place_s: float
    common_s: float
    queue_s: float
    first_s: float
    itl_s: float
    redone_s: float
    local_s: float


class PricedWay(NamedTuple):
    """What a whole request costs at a decode worker. Sorts by price, then by `position`.

    `prefill` is the best prefill worker for it, if there is one, and `remote_s` the price of that way.
    """

    price_s: float
    position: int
    at: DecodeTerms
    is_remote: bool
    reason: Reason
    prefill: PrefillTerms | None
    transfer_s: float
    remote_s: float


class Prices:
    """The prices of one request. `prefills` are those that `price_decodes` chooses from, the cheapest first.

    `pulls` are what prefill workers are to fetch, by their ids.
    """

    __slots__ = (
        "crowd",
        "decode_strangeness",
        "fits",
        "held_tokens",
        "least_latency_s",
        "most_bytes_per_s",
        "new_tokens",
        "prefill_strangeness",
        "prefills",
        "pulls",
        "request",
        "settings",
    )

    def __init__(self, request: RouteRequest, settings: RoutingSettings, fits: Fits | None) -> None:
        if request.prefill != "auto":
            chosen = settings.disaggregation.for_choice(request.prefill)
            settings = dataclasses.replace(settings, disaggregation=chosen)
        self.request, self.settings, self.fits = request, settings, fits
        self.new_tokens = max(1, min(request.max_new_tokens, settings.expected_new_tokens))
        self.held_tokens = max(0, min(max(request.cached_tokens.values(), default=0), request.num_prompt_tokens - 1))
        self.crowd = 1.0
        self.prefill_strangeness: int | None = None
        """The least of any; None: all are as much the request's own."""
        self.decode_strangeness: int | None = None
        self.prefills: list[Terms] = []
        self.pulls: dict[str, Pull] = {}
        self.least_latency_s, self.most_bytes_per_s = math.inf, 1.0

    def look_at(self, prefills: Sequence[WorkerView], decodes: Sequence[WorkerView]) -> None:
        """Takes what prices depend on beside one worker: how busy the prefill workers are, and whose workers exist."""
        if self.request.tenant or self.request.pool is not None:
            self.prefill_strangeness = self._least_strangeness(prefills)
            self.decode_strangeness = self._least_strangeness(decodes)
        if prefills:
            mean_requests = sum([view.num_requests - view.num_less_urgent for view in prefills]) / len(prefills)
            self.crowd = 1 + self.settings.displaced_weight * max(0.0, mean_requests)

    def price_prefills(self, views: Sequence[WorkerView]) -> list[Terms]:
        """Returns the `PrefillTerms` of each worker, without names, in the order given and without hot spots."""
        request, settings, crowd = self.request, self.settings, self.crowd
        num_tokens, cached_tokens = request.num_prompt_tokens, request.cached_tokens
        most, chunk_tokens, share = num_tokens - 1, settings.disaggregation.chunk_tokens, settings.pressure_share
        has_place = bool(request.region) or self.prefill_strangeness is not None
        held_here = max([cached_tokens.get(view.worker_id, 0) for view in views], default=0) if cached_tokens else 0
        held_here, held = max(0, min(held_here, most)), self.held_tokens
        weight = settings.disaggregation.redone_weight if held_here < held else 0.0
        least_latency_s, most_bytes_per_s = math.inf, 1.0
        # Workers that are alike and hold as much, often all of them, compute as long.
        known_speed, known_cached, work_s, redone_s = None, 0, 0.0, 0.0
        priced: list[Terms] = []
        for position, view in enumerate(views):
            facts = view.as_prefill
            if facts is None or facts[0] != chunk_tokens:
                facts = _as_prefill(view, chunk_tokens)
            _, worker_id, queue_s, speed, pages_total, available, page_size, latency_s, bytes_per_s = facts
            cached = cached_tokens.get(worker_id, 0) if cached_tokens else 0
            if cached > most:
                cached = most
            if cached != known_cached or speed is not known_speed:
                known_speed, known_cached = speed, cached
                work_s = speed.time_s(num_tokens - cached, cached)
                redone_s = speed.computed_twice_s(held_here, held) if weight else 0.0
            pressure_s = place_s = 0.0
            reserve = share * pages_total
            left = available - num_tokens / page_size
            if left < reserve:
                pressure_s = self._pressure_s(left, reserve)
            if has_place:
                place_s = self._place_s(view, self.prefill_strangeness)
            price_s = queue_s + crowd * work_s + pressure_s + place_s + weight * redone_s
            priced.append((price_s, position, view, cached, queue_s, work_s, redone_s, pressure_s, place_s, 0.0, 0.0))
            if latency_s < least_latency_s:
                least_latency_s = latency_s
            if bytes_per_s > most_bytes_per_s:
                most_bytes_per_s = bytes_per_s
        self.least_latency_s, self.most_bytes_per_s = least_latency_s, most_bytes_per_s
        return priced

    def add_hot_spots(self, priced: list[Terms], hits: "Hits", now_s: float) -> None:
        """Raises, in place, the prices of hot workers that have a longer queue than the median."""
        chosen, least = hits.by_worker, self.settings.hot_min_hits
        held = [entry for entry in priced if entry[3] and chosen.get(entry[2].worker_id, (0.0,))[0] >= least]
        if not held:
            return
        queues, middle = sorted([entry[4] for entry in priced]), len(priced) // 2
        median = queues[middle] if len(queues) % 2 else (queues[middle - 1] + queues[middle]) / 2
        for entry in (PrefillTerms._make(entry) for entry in held if entry[4] > median):
            if hits.is_hot(entry.view.worker_id, len(priced), least, now_s):
                saved_s = self.crowd * entry.view.prefill_speed.computed_twice_s(0, entry.cached_tokens)
                hot_s = min(entry.queue_s - median, saved_s / 2)
                priced[entry.position] = entry._replace(price_s=entry.price_s + hot_s, hot_spot_s=hot_s)

    def price_decodes(self, views: Sequence[WorkerView]) -> list[Terms]:
        """Returns the `DecodeTerms` of each worker, without names, in the order given."""
        request, settings, new_tokens = self.request, self.settings, self.new_tokens
        num_tokens, cached_tokens = request.num_prompt_tokens, request.cached_tokens
        most, chunk_tokens, share = num_tokens - 1, settings.disaggregation.chunk_tokens, settings.pressure_share
        how, held = settings.disaggregation, self.held_tokens
        itl_weight, weight, disturbed = how.itl_weight, how.redone_weight, how.min_disturbed
        all_tokens, half_context = num_tokens + request.max_new_tokens, num_tokens + new_tokens / 2
        has_place = bool(request.region) or self.decode_strangeness is not None
        # Getting the prompt's pages from elsewhere never costs less.
        elsewhere_s = self.prefills[0][0] + self.least_latency_s if self.prefills else math.inf
        token_s = request.kv_bytes_per_token / self.most_bytes_per_s
        known_speed, known_cached, work_s, redone_s, more_s, num_chunks, far_s = None, 0, 0.0, 0.0, 0.0, 0, 0.0
        priced: list[Terms] = []
        for position, view in enumerate(views):
            facts = view.as_decode
            if facts is None or facts[0] != chunk_tokens:
                facts = _as_decode(view, chunk_tokens)
            _, worker_id, queue_s, speed, base_s, context_s, context, pages_total, available, page_size, batch = facts
            cached = cached_tokens.get(worker_id, 0) if cached_tokens else 0
            if cached > most:
                cached = most
            if cached != known_cached or speed is not known_speed:
                known_speed, known_cached, lacking = speed, cached, num_tokens - cached
                work_s, redone_s = speed.time_s(lacking, cached), speed.computed_twice_s(cached, held)
                more_s, num_chunks = work_s - speed.overhead_s, 1 + (lacking - 1) // chunk_tokens
                far_s = elsewhere_s + token_s * lacking
            step_s = base_s + context_s * (context + half_context)
            pressure_s = place_s = 0.0
            reserve = share * pages_total
            left = available - all_tokens / page_size
            if left < reserve:
                pressure_s = self._pressure_s(left, reserve)
            if has_place:
                place_s = self._place_s(view, self.decode_strangeness)
            common_s = new_tokens * step_s + pressure_s + place_s
            first_s, num_disturbed = queue_s + work_s, disturbed
            if batch is not None:
                running, now_step_s, stretch, steps_left = batch
                num_steps = num_chunks if num_chunks > (least_steps := more_s / stretch) else least_steps
                first_s += (num_steps if num_steps < steps_left else steps_left) * now_step_s
                num_disturbed = running if running > disturbed else disturbed
            itl_s = work_s * num_disturbed
            local_s = first_s + itl_weight * itl_s + weight * redone_s
            remote_s = far_s + INTERFERENCE * queue_s
            least_s = common_s + (remote_s if remote_s < local_s else local_s)
            terms = (least_s, position, view, cached, step_s, pressure_s, place_s, common_s, queue_s)
            priced.append(terms + (first_s, itl_s, redone_s, local_s))  # noqa: RUF005 - an unpacking costs more
        return priced

    def price(self, terms: Terms) -> PricedWay:
        """Returns the whole price at a decode worker: with the best prefill worker for it, or with none."""
        at = DecodeTerms._make(terms)
        best, transfer_s, remote_s = self._remote(at)
        ruled = self.settings.disaggregation.rule(self.request.num_prompt_tokens - at.cached_tokens)
        reason: Reason
        if best is None:
            reason, is_remote = "no_prefill_worker", False
        elif ruled is not None:
            reason, is_remote = ruled
        else:
            is_remote = remote_s < at.local_s
            reason = "remote_is_cheaper" if is_remote else "local_is_cheaper"
        price_s = at.common_s + (remote_s if is_remote else at.local_s)
        return PricedWay(price_s, at.position, at, is_remote, reason, best, transfer_s, remote_s)

    def cheapest(self, views: Sequence[WorkerView], num_first: int) -> tuple[list[PricedWay], list[Terms]]:
        """Returns the ways to the `num_first` cheapest decode workers, in order, and the terms of all others.

        A worker whose least price is more than theirs is not looked at further.
        """
        terms = sorted(self.price_decodes(views))
        ways: list[PricedWay] = []
        for at in terms:
            if len(ways) >= num_first and at[0] * (1 - ROUNDING) > ways[num_first - 1].price_s:
                break
            bisect.insort(ways, self.price(at))
        return ways[:num_first], [*(way.at for way in ways[num_first:]), *terms[len(ways) :]]

    def link(self, prefill: WorkerView, decode: WorkerView) -> PeerLink:
        """Returns the link as measured, or as P's links usually are; a far one that was never measured is slower."""
        link = prefill.links.get(decode.worker_id)
        if link is None:
            link = prefill.usual_link or _usual_link(prefill)
            if prefill.region and decode.region and prefill.region != decode.region:
                settings, way = self.settings, (prefill.region, decode.region)
                factor, more_s = settings.cross_region_factor, settings.distances_s.get(way, settings.cross_region_s)
                return PeerLink(link.latency_s * factor + more_s, link.bytes_per_s / factor)
        return link

    def _remote(self, at: DecodeTerms) -> tuple[PrefillTerms | None, float, float]:
        """Returns the best prefill worker for D that fits it, the transfer, and the price of that way."""
        num_bytes = (self.request.num_prompt_tokens - at.cached_tokens) * self.request.kv_bytes_per_token
        least_s = self.least_latency_s + num_bytes / self.most_bytes_per_s  # No transfer is faster: it ends the search.
        fits, best, best_transfer_s, remote_s = self.fits, None, 0.0, math.inf
        for prefill in self.prefills:
            price_s, view = prefill[0], prefill[2]
            if price_s + least_s >= remote_s:
                break
            if fits is not None and not fits(view, at.view):
                continue
            transfer_s = self.link(view, at.view).time_s(num_bytes)
            if price_s + transfer_s < remote_s:
                best, best_transfer_s, remote_s = prefill, transfer_s, price_s + transfer_s
        found = None if best is None else PrefillTerms._make(best)
        return found, best_transfer_s, remote_s + INTERFERENCE * at.queue_s

    def _pressure_s(self, left: float, reserve: float) -> float:
        """Returns the price of the last pages of a pool, where fewer than the `reserve` are left."""
        return self.settings.pressure_s * (1 - left / reserve) ** 2

    def _place_s(self, view: WorkerView, least: int | None) -> float:
        """Returns the price of a worker far away, or of one that is less the request's own than another one is."""
        far_s = self.settings.far_s(self.request.region, view.region)
        return far_s if least is None else far_s + self.settings.shared_s * (strangeness(view, self.request) - least)

    def _least_strangeness(self, views: Sequence[WorkerView]) -> int | None:
        """Returns the least strangeness of any; None if all have the same."""
        found = {strangeness(view, self.request) for view in views}
        return min(found) if len(found) > 1 else None


def _as_prefill(view: WorkerView, chunk_tokens: int) -> tuple[Any, ...]:
    """Works out and keeps what `price_prefills` needs of a view."""
    link, links = view.link_speed, view.links
    view.as_prefill = facts = (
        chunk_tokens,
        view.worker_id,
        _queue_s(view, chunk_tokens),
        view.prefill_speed,
        view.pages_total,
        view.pages_available,
        view.page_size,
        min(link.latency_s, links.least_latency_s),
        max(link.bytes_per_s, links.most_bytes_per_s),
    )
    return facts


def _as_decode(view: WorkerView, chunk_tokens: int) -> tuple[Any, ...]:
    """Works out and keeps what `price_decodes` needs of a view."""
    speed, running = view.decode_speed, view.num_running
    base_s = speed.step_s(max(view.num_requests, running) + 1)
    batch = None
    if running:
        step_s = speed.step_s(running, view.context_tokens)
        batch = (running, step_s, stretch_s(step_s), view.steps_left)
    view.as_decode = facts = (
        chunk_tokens,
        view.worker_id,
        _queue_s(view, chunk_tokens),
        view.prefill_speed,
        base_s,
        speed.s_per_context_token,
        view.context_tokens,
        view.pages_total,
        view.pages_available,
        view.page_size,
        batch,
    )
    return facts


def _usual_link(view: WorkerView) -> PeerLink:
    """Works out and keeps a worker's link to a decode worker as its links usually are."""
    view.usual_link = link = PeerLink(view.link_speed.latency_s, view.link_speed.bytes_per_s)
    return link


def _queue_s(view: WorkerView, chunk_tokens: int) -> float:
    """Returns the seconds until the prompts that wait at a worker are computed."""
    tokens = view.waiting_tokens
    if view.queue_s is not None:
        return view.queue_s
    if not tokens:
        return 0.0
    speed = view.prefill_speed
    per_token_s = speed.s_per_token + speed.overhead_s / chunk_tokens
    squared_s = speed.s_per_token_squared * tokens * tokens / max(1, view.num_requests)
    return speed.overhead_s + per_token_s * tokens + squared_s


class Hits:
    """How often workers were chosen for what they hold, forgotten exponentially."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self.by_worker: dict[str | None, tuple[float, float]] = {}
        """Worker → (count, when). The entry of None counts all decisions."""

    def note(self, worker_id: str | None, now_s: float) -> None:
        """Counts a decision for this worker because of its cache; None: for any other reason."""
        self.by_worker[None] = (self._count(None, now_s) + 1, now_s)
        if worker_id is not None:
            if len(self.by_worker) > 1 << 14:
                self.by_worker = {None: self.by_worker[None]}  # workers come and go
            self.by_worker[worker_id] = (self._count(worker_id, now_s) + 1, now_s)

    def is_hot(self, worker_id: str, num_workers: int, min_hits: float, now_s: float) -> bool:
        """Whether it had `min_hits` lately, and more than twice its share (of two or three workers: over 3 in 4)."""
        hits = self._count(worker_id, now_s)
        return hits >= min_hits and hits > min(0.75, 2 / num_workers) * self._count(None, now_s)

    def _count(self, worker_id: str | None, now_s: float) -> float:
        count, at_s = self.by_worker.get(worker_id, (0.0, now_s))
        return count * math.exp((at_s - now_s) / self._window_s) if now_s > at_s else count
