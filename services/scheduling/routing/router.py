"""Which workers a request should be offered to, and in which order: one gateway's choice.

Knows nothing of sessions, registries or clocks: the caller says what it sees, and gets back an order. A `Router`
remembers only whose turn it is, and how often a worker was chosen for what it has cached.

Among more than `all_up_to` workers of a role `hybrid` looks at a few drawn at random (power of d choices: Mitzenmacher,
2001; gateways that see the same must not all go the same way) and at those that hold the longest prefixes. The others
follow in the order of their prices, computed when they are asked for.
"""

import random
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from services.scheduling.routing.policies import HYBRID, ONE_BY_ONE, POLICY_NAMES, Hashes, PolicyInputs, rotated
from services.scheduling.routing.price import Hits, PricedWay, Prices, RoutingSettings, Terms
from services.scheduling.routing.pulls import add_pulls
from services.scheduling.routing.route import Routes, cheapest_route, ordered_route
from services.scheduling.routing.views import CanPull, Fits, RouteRequest, WorkerView, able, holders, strangeness

Rest = Callable[[], list[WorkerView]]


class Router:
    """One gateway's choice. `seed` decides what is drawn at random, and whose turn is first."""

    def __init__(self, policy: str = HYBRID, *, settings: RoutingSettings | None = None, seed: int = 0) -> None:
        if policy not in POLICY_NAMES:
            raise ValueError(f"no routing policy {policy!r}: one of {', '.join(POLICY_NAMES)}")
        self.policy = policy
        self.settings = settings or RoutingSettings()
        self._random = random.Random(seed)  # noqa: S311 - ties
        self._turn = self._random.randrange(1 << 16) if policy == HYBRID else -1
        self._hits = Hits(self.settings.hot_window_s)
        self._hashes = Hashes()

    def route(
        self,
        request: RouteRequest,
        prefills: Sequence[WorkerView],
        decodes: Sequence[WorkerView],
        *,
        fits: Fits | None = None,
        can_pull: CanPull | None = None,
        now_s: float,
    ) -> Routes[Any]:
        """Returns ways for a request, best first: one for each decode worker that can hold the whole sequence.

        A worker of another model, or kept for other tenants, or too small for the tokens, is in none of them. Prefill
        workers that do not fit the decode worker are not in its Route. Without `can_pull`, nothing is pulled.
        """
        self._turn += 1
        prices = Prices(request, self.settings, fits)
        num_tokens = request.num_prompt_tokens + request.max_new_tokens
        if self.policy == HYBRID:
            return self._cheapest(prices, prefills, decodes, num_tokens, can_pull=can_pull, now_s=now_s)
        ordered = self._ordered(prices, able(prefills, request, request.num_prompt_tokens), is_decode=False)
        ways = self._ordered(prices, able(decodes, request, num_tokens), is_decode=True)

        def change(priced: list[Terms]) -> None:
            if can_pull is not None and request.cached_tokens:
                add_pulls(prices, priced, workers=(prefills, decodes), can_pull=can_pull)

        return Routes(ways, lambda decode: ordered_route(prices, ordered, decode, change=change))

    def _cheapest(
        self,
        prices: Prices,
        prefills: Sequence[WorkerView],
        decodes: Sequence[WorkerView],
        num_tokens: int,
        *,
        can_pull: CanPull | None,
        now_s: float,
    ) -> Routes[Any]:
        request = prices.request
        computing, _ = self._choices(prefills, request, request.num_prompt_tokens)
        candidates, rest = self._choices(decodes, request, num_tokens)
        prices.look_at(computing, candidates)
        priced = prices.price_prefills(computing)
        if request.cached_tokens:
            prices.add_hot_spots(priced, self._hits, now_s)
            if can_pull is not None:
                add_pulls(prices, priced, workers=(prefills, decodes), can_pull=can_pull)
        priced.sort()
        prices.prefills = priced
        ways, others = prices.cheapest(candidates, 2)
        if ways:
            best = ways[0].prefill if ways[0].is_remote else None
            is_hit = best is not None and best.cached_tokens > 0 and not best.pull_s
            self._hits.note(best.view.worker_id if best is not None and is_hit else None, now_s)

        def later() -> list[PricedWay]:
            more = prices.price_decodes(rest()) if rest is not None else []
            return [*sorted(map(prices.price, others)), *sorted(map(prices.price, more))]

        second = (ways[1].at.view.worker_id, ways[1].price_s) if len(ways) > 1 else None
        return Routes(ways, lambda way: cheapest_route(prices, way), later, second=second)

    def _choices(
        self, views: Sequence[WorkerView], request: RouteRequest, num_tokens: int
    ) -> tuple[list[WorkerView], Rest | None]:
        """Returns workers to look at, and what gives the others later. Ties go to the first: all have turns there."""
        settings = self.settings
        if len(views) <= settings.all_up_to:
            return rotated(able(views, request, num_tokens), self._turn), None
        drawn = self._random.sample(range(len(views)), min(len(views), 4 * settings.num_choices))
        chosen = able([views[index] for index in drawn], request, num_tokens)[: settings.num_choices]
        if len(chosen) < min(settings.num_choices, len(views)):
            # Few can do it: whichever they are, they are found.
            chosen = able(views, request, num_tokens)
            if len(chosen) > settings.num_choices:
                chosen = self._random.sample(chosen, settings.num_choices)
        if request.cached_tokens:
            holding = (view for view in holders(views, request.cached_tokens) if able((view,), request, num_tokens))
            known = {view.worker_id for view in chosen}
            chosen += [view for view in islice(holding, settings.num_holders) if view.worker_id not in known]
        taken = {view.worker_id for view in chosen}
        return chosen, lambda: [view for view in able(views, request, num_tokens) if view.worker_id not in taken]

    def _ordered(self, prices: Prices, views: list[WorkerView], *, is_decode: bool) -> list[WorkerView]:
        """Returns workers of one role by a policy that looks at them one by one; the request's own come first."""
        if not views:
            return views
        draw = PolicyInputs(prices, is_decode, self._turn, self._random, self._hashes)
        ordered = ONE_BY_ONE[self.policy](views, draw)
        request = prices.request
        if request.tenant or request.pool is not None:
            ordered.sort(key=lambda view: strangeness(view, request))
        return ordered
