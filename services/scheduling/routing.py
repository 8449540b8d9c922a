"""Which workers a request should be offered to, and in which order: pure policies over plain views of workers.

Knows nothing of sessions, registries or clocks: the caller says what it sees, and gets back an order. A `Router`
remembers only whose turn it is, and how often a worker was chosen for what it has cached.

`hybrid`, the default, chooses prefill worker P and decode worker D together. Every term of its price is a number of
seconds that somebody waits, so that terms need no weights to be added:

    price(D)   = decode_s + pressure_s(D) + region_s(D) + shared_s(D) + min(local(D), min over P of remote(P, D))
    remote     = queue_s(P) + crowd · prefill_s(P) + redone_weight · redone_s(P) + hot_spot_s(P) + pressure_s(P)
                 + region_s(P) + shared_s(P) + transfer_s(P, D) + INTERFERENCE · queue_s(D)
    local      = queue_s(D) + prefill_s(D) + redone_weight · redone_s(D) + steps · step_s(D)
                 + itl_weight · prefill_s(D) · sequences it disturbs

    queue_s    prompt tokens that wait there × seconds per token (the square term for prompts of their mean length)
    prefill_s  of the tokens of the prompt that the worker does not hold, by its measured speed
    redone_s   of those of them that some worker holds; for P, that some decode worker and no prefill worker holds
    crowd      1 + `displaced_weight` · mean number of requests at a prefill worker that are as urgent: so many will
               come to P while a backlog like today's is worked off (Little's law), and each of them waits prefill_s
               longer. Without it, going to an idle worker that lacks the prefix is free, and under load lost hits are
               lost capacity
    transfer_s latency + (bytes under way + bytes of the tokens that D does not hold) / rate, of the measured link from
               P to D. Of a pair that was never measured by P's usual link, `cross_region_factor` times, and
               `cross_region_s` more, from one region to another. All of it counts, as computation does, although one
               hides a part of the other from this request: meanwhile the link is nobody else's
    decode_s   expected new tokens × length of D's step with this request in it
    pressure_s `pressure_s` · x², where x grows from 0 at the last `pressure_share` of the pool's pages to 1 at the last
               page, and goes on growing beyond: the request would have to wait for pages
    region_s   `region_s` where worker and request name different regions
    shared_s   `shared_s` for a worker of everybody, where the tenant has workers of that role of its own
    hot_spot_s what a worker's queue is longer than the median of its role, once more, if the worker is hot: it was
               chosen for its cache `hot_min_hits` times in about `hot_window_s`, and more than twice as often as its
               share. At most half of the seconds that its cache saves, so that to hold more is never worse. It makes
               requests leave a hot prefix's only holder before the queue alone would; whoever computes the prefix
               then holds it too.

`local` and `remote` are those of `disaggregation`, which also has a threshold that overrides them. The idea of one sum
of queue, computation and transfer, and of letting a hot prefix replicate itself by going elsewhere once the holder's
queue costs more than it saves, is that of Mooncake's Conductor (Qin et al., FAST '25; its balancing threshold compares
lengths of prefixes, ours seconds).

Among more than `all_up_to` workers of a role it looks at a few drawn at random (power of d choices: Mitzenmacher,
2001; gateways that see the same must not all go the same way) and at those that hold the longest prefixes. The others
follow in the order of their prices, computed when somebody asks for them.
"""

import dataclasses
import hashlib
import math
import random
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import overload

from services.scheduling.chunks import more_steps_s, stretch_s
from services.scheduling.disaggregation import (
    INTERFERENCE,
    DisaggregationSettings,
    PrefillChoice,
    PrefillWays,
    decide,
)
from services.scheduling.links import NO_LINKS, PeerLink, PeerLinks
from services.scheduling.prediction import (
    DEFAULT_DECODE,
    DEFAULT_LINK,
    DEFAULT_PREFILL,
    DecodeSpeed,
    LinkSpeed,
    PrefillSpeed,
)

POLICY_NAMES = ("hybrid", "least_loaded", "prefix_aware", "sticky", "round_robin", "random")
"""Names that `Router` takes; the first is the default."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What the gateway knows about one worker at the moment of a decision.

    `pages_available` counts pages that are free or only cached, less those promised to admitted requests.
    `num_requests` counts requests that run or wait there, those that the worker has not yet reported included,
    `num_less_urgent` those of them that wait for whoever asks; `num_running` those in a decode worker's steps, with
    `context_tokens` tokens between them, all of which have ended after `steps_left` steps. `waiting_tokens` counts
    prompt tokens that wait for computation there. Who knows better how long that takes says so in `queue_s`. `links`
    are those to decode workers that were measured, and `link_speed` that to any other. `tenants`: the only ones it
    works for; empty: everybody. `measured` is its own speed with prompts just now, for what is predicted: of two
    workers that are alike one would get everything if prices went by it.
    """

    worker_id: str
    incarnation: str
    pages_total: int
    pages_available: int
    num_requests: int
    waiting_tokens: int
    max_sequence_tokens: int
    num_running: int = 0
    steps_left: float = math.inf
    context_tokens: int = 0
    model: str = ""
    region: str = ""
    tenants: frozenset[str] = frozenset()
    page_size: int = 16
    prefill_speed: PrefillSpeed = DEFAULT_PREFILL
    decode_speed: DecodeSpeed = DEFAULT_DECODE
    link_speed: LinkSpeed = DEFAULT_LINK
    links: PeerLinks = field(default_factory=lambda: NO_LINKS)
    queue_s: float | None = None
    num_less_urgent: int = 0
    measured: PrefillSpeed | None = None


class Views(Sequence[WorkerView]):
    """Views of workers, each put together when it is looked at: of many workers a decision looks at few.

    `view(index)` puts one together; it is kept.
    """

    def __init__(self, worker_ids: Sequence[str], view: Callable[[int], WorkerView]) -> None:
        self.worker_ids = worker_ids
        self._view = view
        self._views: dict[int, WorkerView] = {}

    def __len__(self) -> int:
        return len(self.worker_ids)

    @overload
    def __getitem__(self, index: int) -> WorkerView: ...
    @overload
    def __getitem__(self, index: slice) -> list[WorkerView]: ...
    def __getitem__(self, index: int | slice) -> WorkerView | list[WorkerView]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        view = self._views.get(index)
        if view is None:
            view = self._views[index] = self._view(range(len(self.worker_ids))[index])
        return view

    def only(self, worker_ids: Container[str]) -> "Views":
        """Those with these ids, in the same order."""
        places = [place for place, worker_id in enumerate(self.worker_ids) if worker_id in worker_ids]
        return Views([self.worker_ids[place] for place in places], lambda index: self[places[index]])

    def changed(self, change: Callable[[WorkerView], WorkerView], worker_ids: Container[str]) -> "Views":
        """The same, with a change to those with these ids."""
        ids = self.worker_ids
        return Views(ids, lambda index: change(self[index]) if ids[index] in worker_ids else self[index])


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What a request needs. An empty `model` fits every worker, an empty `region` is near to every one.

    `affinity_key`: session or user, for `sticky`. `cached_tokens`: worker id → tokens of the prompt whose pages that
    worker is believed to hold. `kv_bytes_per_token`: what a transfer moves; 0 where it is not known. `prefill`: who
    computes the prompt, where somebody has chosen that.
    """

    num_prompt_tokens: int
    max_new_tokens: int
    model: str = ""
    tenant: str = ""
    region: str = ""
    affinity_key: str = ""
    cached_tokens: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    kv_bytes_per_token: int = 0
    prefill: PrefillChoice = "auto"


@dataclass(frozen=True, slots=True)
class RoutingSettings:
    """The constants of the price (see the module), and of the other policies. Seconds where the name ends so."""

    disaggregation: DisaggregationSettings = field(default_factory=DisaggregationSettings)
    expected_new_tokens: int = 256
    """An answer's length where its limit is longer: limits are often set far too high."""
    pressure_s: float = 1.0
    pressure_share: float = 0.1
    region_s: float = 0.1
    cross_region_s: float = 0.05
    cross_region_factor: float = 4.0
    shared_s: float = 1.0
    displaced_weight: float = 2.0
    """What a second counts that those who come later wait for a prompt's computation, against one of its own."""
    hot_window_s: float = 10.0
    hot_min_hits: float = 8.0
    all_up_to: int = 64
    """More workers of a role than this are not all looked at."""
    num_choices: int = 8
    """So many drawn at random are instead, and"""
    num_holders: int = 4
    """so many of those with the longest prefixes."""
    max_load_factor: float = 1.25
    """`sticky` leaves the worker of a key that has this many times the mean of requests (Mirrokni et al., 2016)."""


@dataclass(frozen=True, slots=True)
class Route:
    """One way that a request may go: a decode worker, and prefill workers for it, best first.

    The second token needs the pages at the decode worker; a part of their way is hidden behind the computation.
    `num_cached_tokens` is what is reused where the prompt is computed. `inputs` says what the price was made of, for
    the `route` span.
    """

    decode: WorkerView
    prefills: tuple[WorkerView, ...]
    is_remote: bool
    reason: str
    predicted_ttft_s: float
    predicted_itl_s: float
    num_cached_tokens: int
    inputs: Mapping[str, float | int | str]
    predicted_second_s: float = 0.0


Fits = Callable[[WorkerView, WorkerView], bool]
"""(prefill worker, decode worker) → whether pages can go from one to the other."""


class Routes(Sequence[Route]):
    """Routes, best first; each is put together when it is asked for: most requests need the first one only.

    `second` is the decode worker that came second and its price in seconds, where there is one and it has a price.
    """

    def __init__(
        self,
        decodes: list[WorkerView],
        build: Callable[[WorkerView], Route],
        rest: Callable[[], list[WorkerView]] | None = None,
        *,
        second: tuple[str, float] | None = None,
    ) -> None:
        self.second = second
        self._decodes = decodes
        self._build = build
        self._rest = rest
        self._built: dict[int, Route] = {}

    def __len__(self) -> int:
        self._take_rest()
        return len(self._decodes)

    def __bool__(self) -> bool:
        return bool(self._decodes) or len(self) > 0

    @overload
    def __getitem__(self, index: int) -> Route: ...
    @overload
    def __getitem__(self, index: slice) -> list[Route]: ...
    def __getitem__(self, index: int | slice) -> Route | list[Route]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self._decodes):
            index = range(len(self))[index]
        route = self._built.get(index)
        if route is None:
            route = self._built[index] = self._build(self._decodes[index])
        return route

    def _take_rest(self) -> None:
        if self._rest is not None:
            rest, self._rest = self._rest, None
            self._decodes = self._decodes + rest()


def rival_of(routes: Sequence[Route], chosen: Route) -> tuple[str, float] | None:
    """The decode worker that was the best beside the chosen one, and its price in seconds; None: there was none.

    Nothing is put together for it that was not before.
    """
    if isinstance(routes, Routes):
        return routes.second if routes[0] is chosen else (routes[0].decode.worker_id, _price_s(routes[0]))
    return next(((route.decode.worker_id, _price_s(route)) for route in routes if route is not chosen), None)


def _price_s(route: Route) -> float:
    return float(route.inputs["price_s"])


class Router:
    """One gateway's choice. `seed` decides what is drawn at random, and whose turn is first."""

    def __init__(self, policy: str = "hybrid", *, settings: RoutingSettings | None = None, seed: int = 0) -> None:
        if policy not in POLICY_NAMES:
            raise ValueError(f"no routing policy {policy!r}: one of {', '.join(POLICY_NAMES)}")
        self.policy = policy
        self._settings = settings or RoutingSettings()
        self._random = random.Random(seed)  # noqa: S311 - ties
        self._turn = self._random.randrange(1 << 16) if policy == "hybrid" else -1
        self._hits = _Hits(self._settings.hot_window_s)
        self._hashes: dict[str, int] = {}

    def route(
        self,
        request: RouteRequest,
        prefills: Sequence[WorkerView],
        decodes: Sequence[WorkerView],
        *,
        fits: Fits | None = None,
        now_s: float,
    ) -> Routes:
        """Ways for a request, best first: one for each decode worker that can hold the whole sequence.

        A worker of another model, or kept for other tenants, or too small for the tokens, is in none of them. Prefill
        workers that do not fit the decode worker are not in its Route.
        """
        self._turn += 1
        case = _Case(request, self._settings, fits)
        num_tokens = request.num_prompt_tokens + request.max_new_tokens
        if self.policy == "hybrid":
            return self._hybrid(case, prefills, decodes, num_tokens, now_s)
        case.prefills = self._ordered(case, _able(prefills, request, request.num_prompt_tokens), is_decode=False)
        return Routes(self._ordered(case, _able(decodes, request, num_tokens), is_decode=True), case.build)

    def _hybrid(
        self,
        case: "_Case",
        prefills: Sequence[WorkerView],
        decodes: Sequence[WorkerView],
        num_tokens: int,
        now_s: float,
    ) -> Routes:
        request = case.request
        case.has_prices = True
        able, _ = self._choices(prefills, request, request.num_prompt_tokens)
        case.price_prefills(able, self._hits, now_s)
        candidates, rest = self._choices(decodes, request, num_tokens)
        priced = case.price_decodes(candidates)
        if not priced:
            return Routes([], case.build, rest and _later(case, rest))
        best_prefill = priced[0][2]
        if best_prefill is not None and request.cached_tokens.get(best_prefill.worker_id, 0) > 0:
            self._hits.note(best_prefill.worker_id, now_s)
        else:
            self._hits.note(None, now_s)
        second = (priced[1][3].worker_id, priced[1][0]) if len(priced) > 1 else None
        return Routes([entry[3] for entry in priced], case.build, rest and _later(case, rest), second=second)

    def _choices(
        self, views: Sequence[WorkerView], request: RouteRequest, num_tokens: int
    ) -> tuple[list[WorkerView], Callable[[], list[WorkerView]] | None]:
        """Workers to look at, and what gives the others later. Ties go to the first, so all have turns there."""
        settings = self._settings
        if len(views) <= settings.all_up_to:
            able = _able(views, request, num_tokens)
            first = self._turn % len(able) if able else 0
            return able[first:] + able[:first], None
        drawn = self._random.sample(range(len(views)), min(len(views), 4 * settings.num_choices))
        chosen = _able([views[index] for index in drawn], request, num_tokens)[: settings.num_choices]
        if len(chosen) < min(settings.num_choices, len(views)):
            # Few can do it: whoever they are, they are found.
            able = _able(views, request, num_tokens)
            chosen = able if len(able) <= settings.num_choices else self._random.sample(able, settings.num_choices)
        cached = request.cached_tokens
        if cached:
            holders = (view for view in _holders(views, cached) if _able((view,), request, num_tokens))
            known = {view.worker_id for view in chosen}
            chosen += [view for view in islice(holders, settings.num_holders) if view.worker_id not in known]
        taken = {view.worker_id for view in chosen}
        return chosen, lambda: [view for view in _able(views, request, num_tokens) if view.worker_id not in taken]

    def _ordered(self, case: "_Case", views: list[WorkerView], *, is_decode: bool) -> list[WorkerView]:
        """Workers of one role by a policy that looks at them one by one; a tenant's own ones first."""
        if not views:
            return views
        request = case.request
        if self.policy == "random":
            ordered = self._random.sample(views, len(views))
        else:
            ordered = _rotated(sorted(views, key=_by_id), self._turn)
        load_s = case.decode_load_s if is_decode else case.prefill_load_s
        if self.policy == "prefix_aware":
            ordered.sort(key=lambda view: (-case.cached(view), load_s(view)))
        elif self.policy == "sticky" and request.affinity_key:
            ordered = self._sticky(request.affinity_key, ordered, load_s)
        elif self.policy in ("least_loaded", "sticky"):
            ordered.sort(key=load_s)
        if request.tenant:
            ordered.sort(key=lambda view: not view.tenants)
        return ordered

    def _sticky(self, key: str, views: list[WorkerView], load_s: Callable[[WorkerView], float]) -> list[WorkerView]:
        """By rendezvous hashing (Thaler and Ravishankar, 1998); after them those that have too many requests."""
        key_hash = _hash(key)
        scored = sorted(views, key=lambda view: _mixed(key_hash ^ self._hash_of(view.worker_id)), reverse=True)
        total = sum(view.num_requests for view in views) + 1
        capacity = math.ceil(self._settings.max_load_factor * total / len(views))
        within = [view for view in scored if view.num_requests < capacity]
        beyond = [view for view in scored if view.num_requests >= capacity]
        return within + sorted(beyond, key=load_s)

    def _hash_of(self, worker_id: str) -> int:
        known = self._hashes.get(worker_id)
        if known is None:
            if len(self._hashes) > 1 << 14:
                self._hashes.clear()  # workers come and go
            known = self._hashes[worker_id] = _hash(worker_id)
        return known


class _Case:
    """One request's decision: what several workers are asked, and what a Route is made of afterwards."""

    __slots__ = (
        "crowd",
        "fits",
        "has_own_decodes",
        "has_own_prefills",
        "has_prices",
        "held_by_prefills",
        "held_tokens",
        "hot_s",
        "least_latency_s",
        "most_bytes_per_s",
        "new_tokens",
        "prefills",
        "priced_prefills",
        "request",
        "settings",
    )

    def __init__(self, request: RouteRequest, settings: RoutingSettings, fits: Fits | None) -> None:
        self.request = request
        if request.prefill != "auto":
            chosen = settings.disaggregation.for_choice(request.prefill)
            settings = dataclasses.replace(settings, disaggregation=chosen)
        self.settings = settings
        self.fits = fits
        self.new_tokens = max(1, min(request.max_new_tokens, settings.expected_new_tokens))
        self.held_tokens = max(0, min(max(request.cached_tokens.values(), default=0), request.num_prompt_tokens - 1))
        self.held_by_prefills = 0
        self.crowd = 1.0
        self.has_prices = False
        self.has_own_prefills = self.has_own_decodes = False
        self.prefills: list[WorkerView] = []
        self.priced_prefills: list[tuple[float, int, WorkerView]] = []
        self.least_latency_s = math.inf
        self.most_bytes_per_s = 1.0
        self.hot_s: dict[str, float] = {}

    def is_own_among(self, views: list[WorkerView]) -> bool:
        """Whether the tenant has workers of its own among them: then the others of their role cost more."""
        return bool(self.request.tenant) and any(view.tenants for view in views)

    # The terms, for one worker. The loops below have them written out: a call costs more than what is computed in it.

    def cached(self, view: WorkerView) -> int:
        """Tokens of the prompt that need not be computed there: the last one always is."""
        return max(0, min(self.request.cached_tokens.get(view.worker_id, 0), self.request.num_prompt_tokens - 1))

    def queue_s(self, view: WorkerView) -> float:
        """Until what waits there is computed."""
        tokens = view.waiting_tokens
        if view.queue_s is not None:
            return view.queue_s
        if not tokens:
            return 0.0
        speed = view.prefill_speed
        per_token_s = speed.s_per_token + speed.overhead_s / self.settings.disaggregation.chunk_tokens
        squared_s = speed.s_per_token_squared * tokens * tokens / max(1, view.num_requests)
        return speed.overhead_s + per_token_s * tokens + squared_s

    def step_s(self, view: WorkerView) -> float:
        """A step of a decode worker with this request in it, half of its answer generated."""
        num_sequences = max(view.num_requests, view.num_running) + 1
        context = view.context_tokens + self.request.num_prompt_tokens + self.new_tokens / 2
        return view.decode_speed.step_s(num_sequences, context)

    def pressure_s(self, view: WorkerView, num_tokens: int) -> float:
        """For the last pages of a pool."""
        reserve = self.settings.pressure_share * view.pages_total
        left = view.pages_available - num_tokens / view.page_size
        return self.settings.pressure_s * (1 - left / reserve) ** 2 if left < reserve else 0.0

    def place_s(self, view: WorkerView, *, has_own: bool) -> float:
        """For a worker far away, or of everybody where the tenant has its own."""
        region = self.request.region
        far_s = self.settings.region_s if region and view.region and view.region != region else 0.0
        return far_s + (self.settings.shared_s if has_own and not view.tenants else 0.0)

    def link(self, prefill: WorkerView, decode: WorkerView) -> PeerLink:
        """As it was measured, or else as links from there are; a far one of which nothing is known is slower."""
        link = prefill.links.get(decode.worker_id)
        if link is not None:
            return link
        latency_s, bytes_per_s = prefill.link_speed.latency_s, prefill.link_speed.bytes_per_s
        if prefill.region and decode.region and prefill.region != decode.region:
            factor = self.settings.cross_region_factor
            return PeerLink(latency_s * factor + self.settings.cross_region_s, bytes_per_s / factor)
        return PeerLink(latency_s, bytes_per_s)

    def transfer_s(self, prefill: WorkerView, decode: WorkerView) -> float:
        """For the pages that the decode worker does not hold, and what goes before them."""
        num_bytes = (self.request.num_prompt_tokens - self.cached(decode)) * self.request.kv_bytes_per_token
        return self.link(prefill, decode).time_s(num_bytes)

    def exposed_s(self, prefill: WorkerView, decode: WorkerView) -> float:
        """The part of it that comes after the prompt's computation: the pages go as they are computed."""
        request, speed = self.request, prefill.prefill_speed
        cached, held = self.cached(prefill), self.cached(decode)
        num_lacking = request.num_prompt_tokens - cached
        num_last = min(self.settings.disaggregation.chunk_tokens, num_lacking)
        return self.link(prefill, decode).exposed_s(
            (request.num_prompt_tokens - held) * request.kv_bytes_per_token,
            at_once_bytes=max(0, cached - held) * request.kv_bytes_per_token,
            last_bytes=num_last * request.kv_bytes_per_token,
            queue_s=self.queue_s(prefill),
            first_s=speed.time_s(num_last),
            work_s=speed.time_s(num_lacking, cached),
        )

    def at_own_pace_s(self, view: WorkerView, first_s: float) -> float:
        """A first token after `first_s` by the speeds that prices go by, as the worker itself works.

        That takes as much longer as it has measured, and what all of the prompt's steps cost and not only the first,
        but for those that others are in: of them that is known.
        """
        cached, speed = self.cached(view), view.prefill_speed
        num_tokens = self.request.num_prompt_tokens - cached
        work_s = alone_s = speed.time_s(num_tokens, cached) - speed.overhead_s
        if view.num_running and view.context_tokens:
            step_s = view.decode_speed.step_s(view.num_running, view.context_tokens)
            alone_s = max(0.0, work_s - view.steps_left * stretch_s(step_s))
        num_alone = round(num_tokens * alone_s / work_s) if work_s else 0
        chunk_tokens = self.settings.disaggregation.chunk_tokens
        first_s += more_steps_s(speed.overhead_s, alone_s, num_alone, chunk_tokens=chunk_tokens)
        if view.measured is None:
            return first_s
        return first_s * view.measured.time_s(num_tokens, cached) / max(speed.time_s(num_tokens, cached), 1e-9)

    def prefill_load_s(self, view: WorkerView) -> float:
        """How long a prefill worker has to do, for policies that look at nothing else."""
        return self.queue_s(view) + self.pressure_s(view, self.request.num_prompt_tokens)

    def decode_load_s(self, view: WorkerView) -> float:
        """How long a decode worker needs for an answer."""
        pressure_s = self.pressure_s(view, self.request.num_prompt_tokens + self.request.max_new_tokens)
        return self.queue_s(view) + self.new_tokens * self.step_s(view) + pressure_s

    # The same, for all of them.

    def price_prefills(self, views: list[WorkerView], hits: "_Hits", now_s: float) -> None:
        """What the prompt costs at each prefill worker, without the transfer; cheapest first in `priced_prefills`."""
        request, settings = self.request, self.settings
        num_tokens, cached_tokens, region = request.num_prompt_tokens, request.cached_tokens, request.region
        pressure_share, chunk_tokens = settings.pressure_share, settings.disaggregation.chunk_tokens
        has_own = self.has_own_prefills = self.is_own_among(views)
        has_place = bool(region) or has_own
        squared_tokens, most = num_tokens * num_tokens, num_tokens - 1
        if views:
            mean_requests = sum([view.num_requests - view.num_less_urgent for view in views]) / len(views)
            self.crowd = 1 + settings.displaced_weight * max(0.0, mean_requests)
        crowd, most_held = self.crowd, 0
        priced: list[tuple[float, int, WorkerView]] = []
        holders: list[tuple[int, float, float]] = []
        queues: list[float] = []
        chosen_before = hits.by_worker
        least_latency_s, most_bytes_per_s = math.inf, 1.0
        for position, view in enumerate(views):
            speed = view.prefill_speed
            token_s, squared_s, overhead_s = speed.s_per_token, speed.s_per_token_squared, speed.overhead_s
            waiting, queue = view.waiting_tokens, view.queue_s
            if queue is None:
                if waiting:
                    queue = overhead_s + (token_s + overhead_s / chunk_tokens) * waiting
                    queue += squared_s * waiting * waiting / (view.num_requests or 1)
                else:
                    queue = 0.0
            price = queue + crowd * (overhead_s + token_s * num_tokens + squared_s * squared_tokens)
            if cached_tokens:
                queues.append(queue)
                cached = cached_tokens.get(view.worker_id, 0)
                if cached > 0:
                    if cached > most:
                        cached = most
                    if cached > most_held:
                        most_held = cached
                    saved = crowd * (token_s * cached + squared_s * cached * cached)
                    price -= saved
                    if view.worker_id in chosen_before:
                        holders.append((position, queue, saved))
            reserve = pressure_share * view.pages_total
            left = view.pages_available - num_tokens / view.page_size
            if left < reserve:
                price += settings.pressure_s * (1 - left / reserve) ** 2
            if has_place:
                price += self.place_s(view, has_own=has_own)
            priced.append((price, position, view))
            link = view.link_speed
            if link.latency_s < least_latency_s:
                least_latency_s = link.latency_s
            if link.bytes_per_s > most_bytes_per_s:
                most_bytes_per_s = link.bytes_per_s
            links = view.links
            if links:
                if links.least_latency_s < least_latency_s:
                    least_latency_s = links.least_latency_s
                if links.most_bytes_per_s > most_bytes_per_s:
                    most_bytes_per_s = links.most_bytes_per_s
        self.least_latency_s, self.most_bytes_per_s = least_latency_s, most_bytes_per_s
        self.held_by_prefills = most_held
        if holders:
            queues.sort()
            middle = len(queues) // 2
            median = queues[middle] if len(queues) % 2 else (queues[middle - 1] + queues[middle]) / 2
            for position, queue, saved in holders:
                worker_id = views[position].worker_id
                if queue > median and hits.is_hot(worker_id, len(views), settings.hot_min_hits, now_s):
                    hot_s = self.hot_s[worker_id] = min(queue - median, saved / 2)
                    priced[position] = (priced[position][0] + hot_s, position, views[position])
        if most_held < self.held_tokens:
            weight, held = settings.disaggregation.redone_weight, self.held_tokens
            priced = [
                (price + weight * view.prefill_speed.computed_twice_s(most_held, held), position, view)
                for price, position, view in priced
            ]
        priced.sort()
        self.priced_prefills = priced

    def price_decodes(self, views: list[WorkerView]) -> list[tuple[float, int, WorkerView | None, WorkerView]]:
        """(price, position, prefill worker or None for a local prefill, decode worker), cheapest first."""
        request, settings, fits, prefills = self.request, self.settings, self.fits, self.priced_prefills
        num_tokens, cached_tokens, region = request.num_prompt_tokens, request.cached_tokens, request.region
        all_tokens, new_tokens, bytes_per_token = (
            num_tokens + request.max_new_tokens,
            self.new_tokens,
            request.kv_bytes_per_token,
        )
        half_context = num_tokens + new_tokens / 2
        pressure_share = settings.pressure_share
        how = settings.disaggregation
        chunk_tokens, itl_weight, min_disturbed = how.chunk_tokens, how.itl_weight, how.min_disturbed
        threshold, max_itl_s = how.local_prefill_tokens, how.max_itl_s
        held, redone_weight = self.held_tokens, how.redone_weight
        has_own = self.has_own_decodes = self.is_own_among(views)
        has_place = bool(region) or has_own
        squared_tokens, most = num_tokens * num_tokens, num_tokens - 1
        least_latency_s, most_bytes_per_s = self.least_latency_s, self.most_bytes_per_s
        priced: list[tuple[float, int, WorkerView | None, WorkerView]] = []
        for position, view in enumerate(views):
            cached = cached_tokens.get(view.worker_id, 0) if cached_tokens else 0
            cached = most if cached > most else max(cached, 0)
            lacking = num_tokens - cached
            speed, steps = view.prefill_speed, view.decode_speed
            overhead_s, context, running = speed.overhead_s, view.context_tokens, view.num_running
            waiting, queue = view.waiting_tokens, view.queue_s
            if queue is None:
                if waiting:
                    queue = overhead_s + (speed.s_per_token + overhead_s / chunk_tokens) * waiting
                    queue += speed.s_per_token_squared * waiting * waiting / (view.num_requests or 1)
                else:
                    queue = 0.0
            num_sequences = view.num_requests
            if running > num_sequences:
                num_sequences = running
            per_sequence_s, per_context_s, base_s = steps.s_per_sequence, steps.s_per_context_token, steps.overhead_s
            price = new_tokens * (
                base_s + per_sequence_s * (num_sequences + 1) + per_context_s * (context + half_context)
            )
            reserve = pressure_share * view.pages_total
            left = view.pages_available - all_tokens / view.page_size
            if left < reserve:
                price += settings.pressure_s * (1 - left / reserve) ** 2
            if has_place:
                price += self.place_s(view, has_own=has_own)
            # Remote: the first prefill worker in the order of their prices, unless another one's link is better.
            num_bytes = lacking * bytes_per_token
            # No transfer is faster than this: it ends the search.
            least_s = least_latency_s + num_bytes / most_bytes_per_s
            remote, best, decode_region, decode_id = math.inf, None, view.region, view.worker_id
            for prefill_price, _, prefill in prefills:
                if prefill_price + least_s >= remote:
                    break
                if fits is not None and not fits(prefill, view):
                    continue
                measured = prefill.links.get(decode_id)
                if measured is not None:
                    transfer = measured.latency_s + (measured.underway_bytes + num_bytes) / measured.bytes_per_s
                else:
                    link = prefill.link_speed
                    transfer = link.latency_s + num_bytes / link.bytes_per_s
                    if decode_region and prefill.region and prefill.region != decode_region:
                        transfer = transfer * settings.cross_region_factor + settings.cross_region_s
                if prefill_price + transfer < remote:
                    remote, best = prefill_price + transfer, prefill
            if best is not None:
                remote += INTERFERENCE * queue
            # Local.
            local_s = speed.s_per_token * lacking + speed.s_per_token_squared * (squared_tokens - cached * cached)
            local, is_too_long = queue, False
            if running:
                step_s = base_s + per_sequence_s * running + per_context_s * context
                num_steps = local_s / stretch_s(step_s)
                num_chunks = 1 + (lacking - 1) // chunk_tokens
                if num_chunks > num_steps:
                    num_steps = num_chunks
                local += (num_steps if num_steps < view.steps_left else view.steps_left) * step_s
                is_too_long = max_itl_s is not None and step_s + (overhead_s + local_s) / num_steps > max_itl_s
            local_s += overhead_s
            local += local_s * (1 + itl_weight * (running if running > min_disturbed else min_disturbed))
            if cached < held:
                local += redone_weight * (
                    speed.s_per_token * (held - cached) + speed.s_per_token_squared * (held * held - cached * cached)
                )
            if best is None:
                is_remote = False
            elif threshold is not None:
                is_remote = num_tokens - cached > threshold
            else:
                is_remote = is_too_long or remote < local
            if is_remote:
                priced.append((price + remote, position, best, view))
            else:
                priced.append((price + local, position, None, view))
        priced.sort()
        return priced

    # What comes out.

    def build(self, decode: WorkerView) -> Route:
        """The Route of a decode worker."""
        request, fits = self.request, self.fits
        if not self.has_prices:
            prefills = self.prefills
        else:
            prefills = self._prefills_for(decode)
        if fits is not None:
            prefills = [prefill for prefill in prefills if fits(prefill, decode)]
        prefill = prefills[0] if prefills else None
        all_tokens = request.num_prompt_tokens + request.max_new_tokens
        cached_on_decode, decode_queue_s, running = self.cached(decode), self.queue_s(decode), decode.num_running
        step_s, pressure_s = self.step_s(decode), self.pressure_s(decode, all_tokens)
        place_s = self.place_s(decode, has_own=self.has_own_decodes)
        inputs: dict[str, float | int | str] = {
            "decode_s": self.new_tokens * step_s,
            "decode_queue_s": decode_queue_s,
            "decode_pressure_s": pressure_s,
            "decode_place_s": place_s,
            "decode_cached_tokens": cached_on_decode,
        }
        now_step_s = decode.decode_speed.step_s(running, decode.context_tokens)
        exposed_s = 0.0
        if prefill is None:
            cached_on_prefill = 0
            ways = PrefillWays(
                num_prompt_tokens=request.num_prompt_tokens,
                has_prefill_worker=False,
                cached_on_decode=cached_on_decode,
                cached_anywhere=self.held_tokens,
                decode_queue_s=decode_queue_s,
                local_speed=decode.prefill_speed,
                num_running=running,
                steps_left=decode.steps_left,
                step_s=now_step_s,
            )
        else:
            cached_on_prefill, prefill_queue_s = self.cached(prefill), self.queue_s(prefill)
            hot_s, transfer_s = self.hot_s.get(prefill.worker_id, 0.0), self.transfer_s(prefill, decode)
            link, exposed_s = self.link(prefill, decode), self.exposed_s(prefill, decode)
            prefill_pressure_s = self.pressure_s(prefill, request.num_prompt_tokens)
            prefill_place_s = self.place_s(prefill, has_own=self.has_own_prefills)
            num_lacking = request.num_prompt_tokens - cached_on_prefill
            displaced_s = (self.crowd - 1) * prefill.prefill_speed.time_s(num_lacking, cached_on_prefill)
            ways = PrefillWays(
                num_prompt_tokens=request.num_prompt_tokens,
                cached_on_prefill=cached_on_prefill,
                cached_on_decode=cached_on_decode,
                cached_on_any_prefill=max(self.held_by_prefills, cached_on_prefill),
                cached_anywhere=self.held_tokens,
                prefill_queue_s=prefill_queue_s,
                decode_queue_s=decode_queue_s,
                prefill_speed=prefill.prefill_speed,
                local_speed=decode.prefill_speed,
                transfer_s=transfer_s,
                remote_extra_s=displaced_s + hot_s + prefill_pressure_s + prefill_place_s,
                num_running=running,
                steps_left=decode.steps_left,
                step_s=now_step_s,
            )
            inputs |= {
                "prefill_worker": prefill.worker_id,
                "prefill_queue_s": prefill_queue_s,
                "prefill_pressure_s": prefill_pressure_s,
                "prefill_place_s": prefill_place_s,
                "prefill_cached_tokens": cached_on_prefill,
                "displaced_s": displaced_s,
                "hot_spot_s": hot_s,
                "transfer_s": transfer_s,
                "exposed_s": exposed_s,
                "handoff_bytes": (request.num_prompt_tokens - cached_on_decode) * request.kv_bytes_per_token,
                "link_bytes_per_s": link.bytes_per_s,
                "link_underway_bytes": link.underway_bytes,
            }
        decision = decide(ways, self.settings.disaggregation)
        way_s = decision.remote_cost_s if decision.is_remote else decision.local_cost_s
        if decision.is_remote and prefill is not None:
            first_s = self.at_own_pace_s(prefill, decision.remote_ttft_s)
        else:
            first_s = self.at_own_pace_s(decode, decision.local_ttft_s)
        inputs |= {
            "price_s": self.new_tokens * step_s + pressure_s + place_s + way_s,
            "remote_cost_s": decision.remote_cost_s,
            "local_cost_s": decision.local_cost_s,
            "remote_ttft_s": decision.remote_ttft_s,
            "local_ttft_s": decision.local_ttft_s,
            "itl_cost_s": decision.itl_cost_s,
            "remote_redone_s": decision.remote_redone_s,
            "local_redone_s": decision.local_redone_s,
        }
        return Route(
            decode=decode,
            prefills=tuple(prefills),
            is_remote=decision.is_remote,
            reason=decision.reason,
            predicted_ttft_s=first_s,
            predicted_second_s=first_s + (exposed_s if decision.is_remote else 0.0) + step_s,
            predicted_itl_s=step_s,
            num_cached_tokens=cached_on_prefill if decision.is_remote else cached_on_decode,
            inputs=inputs,
        )

    def _prefills_for(self, decode: WorkerView) -> list[WorkerView]:
        """All that were looked at, the cheapest for this decode worker first."""
        settings, region, decode_id = self.settings, decode.region, decode.worker_id
        num_bytes = (self.request.num_prompt_tokens - self.cached(decode)) * self.request.kv_bytes_per_token
        by_price = []
        for price, position, view in self.priced_prefills:
            measured = view.links.get(decode_id)
            if measured is not None:
                by_price.append((price + measured.time_s(num_bytes), position, view))
                continue
            link = view.link_speed
            transfer_s = link.latency_s + num_bytes / link.bytes_per_s
            if region and view.region and view.region != region:
                transfer_s = transfer_s * settings.cross_region_factor + settings.cross_region_s
            by_price.append((price + transfer_s, position, view))
        by_price.sort()
        return [view for _, _, view in by_price]


class _Hits:
    """How often workers were chosen for what they hold, forgotten exponentially."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self.by_worker: dict[str | None, tuple[float, float]] = {}
        """Worker → (count, when). None: of all decisions."""

    def note(self, worker_id: str | None, now_s: float) -> None:
        """A decision was for this worker because of its cache; None: for whatever reason."""
        self.by_worker[None] = (self._count(None, now_s) + 1, now_s)
        if worker_id is not None:
            if len(self.by_worker) > 1 << 14:
                self.by_worker = {None: self.by_worker[None]}  # workers come and go
            self.by_worker[worker_id] = (self._count(worker_id, now_s) + 1, now_s)

    def is_hot(self, worker_id: str, num_workers: int, min_hits: float, now_s: float) -> bool:
        """More than `min_hits` lately, and more than twice its share (of two or three workers: more than 3 in 4)."""
        hits = self._count(worker_id, now_s)
        return hits >= min_hits and hits > min(0.75, 2 / num_workers) * self._count(None, now_s)

    def _count(self, worker_id: str | None, now_s: float) -> float:
        count, at_s = self.by_worker.get(worker_id, (0.0, now_s))
        return count * math.exp((at_s - now_s) / self._window_s) if now_s > at_s else count


def _holders(views: Sequence[WorkerView], cached_tokens: Mapping[str, int]) -> Iterator[WorkerView]:
    """Those that hold something of the prompt, who holds the longest part first."""
    ids = views.worker_ids if isinstance(views, Views) else [view.worker_id for view in views]
    places = [place for place, worker_id in enumerate(ids) if worker_id in cached_tokens]
    places.sort(key=lambda place: -cached_tokens[ids[place]])
    return (views[place] for place in places)


def _able(views: Sequence[WorkerView], request: RouteRequest, num_tokens: int) -> list[WorkerView]:
    """Those of its model, open to its tenant, and large enough, in the order given."""
    model, tenant = request.model, request.tenant
    return [
        view
        for view in views
        if view.max_sequence_tokens >= num_tokens
        and view.pages_total * view.page_size >= num_tokens
        and (not model or view.model == model)
        and (not (tenants := view.tenants) or tenant in tenants)
    ]


def _later(case: _Case, rest: Callable[[], list[WorkerView]]) -> Callable[[], list[WorkerView]]:
    return lambda: [view for _, _, _, view in case.price_decodes(rest())]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _mixed(value: int) -> int:
    """A permutation of 64 bits in which every bit depends on every other (the finalizer of splitmix64)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)


def _by_id(worker: WorkerView) -> str:
    return worker.worker_id


def _rotated(workers: list[WorkerView], turn: int) -> list[WorkerView]:
    if len(workers) < 2:
        return workers
    first = turn % len(workers)
    return workers[first:] + workers[:first]
