"""A route as it is offered: where a request would go, what that is predicted to take, and what its price is made of."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Generic, TypeVar, overload

import msgspec

from services.scheduling.chunks import more_steps_s, stretch_s
from services.scheduling.routing.price import PricedWay, Prices, Terms
from services.scheduling.routing.views import Pull, WorkerView

T = TypeVar("T")


class Route(msgspec.Struct, frozen=True, eq=False):
    """One way that a request may go: a decode worker, and prefill workers for it, best first.

    The second token needs the pages at the decode worker; a part of their way is hidden behind the computation.
    `num_cached_tokens` is what is reused where the prompt is computed. `inputs` are the terms of the price, for the
    `route` span. `pulls` are what prefill workers are to fetch, by their ids. `uncorrected_s`: the predictions of both
    tokens before earlier ones corrected them.
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
    uncorrected_s: tuple[float, float] | None = None
    pulls: Mapping[str, Pull] = MappingProxyType({})

    def corrected(self, first: float, second: float) -> "Route":
        """Returns the route with its predictions of the first and the second token multiplied by these factors."""
        first_s, second_s = self.predicted_ttft_s, self.predicted_second_s
        return msgspec.structs.replace(
            self,
            predicted_ttft_s=first * first_s,
            predicted_second_s=max(first * first_s, second * second_s) if second_s else 0.0,
            uncorrected_s=(first_s, second_s),
        )


class Routes(Sequence[Route], Generic[T]):
    """Routes, best first; each is put together when it is asked for: most requests need the first one only.

    `build` makes one of a way. `second` is the decode worker that came second and its price in seconds, where there is
    one and it has a price.
    """

    def __init__(
        self,
        ways: list[T],
        build: Callable[[T], Route],
        rest: Callable[[], list[T]] | None = None,
        *,
        second: tuple[str, float] | None = None,
    ) -> None:
        self.second = second
        self._ways = ways
        self._build = build
        self._rest = rest
        self._built: dict[int, Route] = {}

    def __len__(self) -> int:
        self._take_rest()
        return len(self._ways)

    def __bool__(self) -> bool:
        return bool(self._ways) or len(self) > 0

    @overload
    def __getitem__(self, index: int) -> Route: ...
    @overload
    def __getitem__(self, index: slice) -> list[Route]: ...
    def __getitem__(self, index: int | slice) -> Route | list[Route]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self._ways):
            index = range(len(self))[index]
        route = self._built.get(index)
        if route is None:
            route = self._built[index] = self._build(self._ways[index])
        return route

    def _take_rest(self) -> None:
        if self._rest is not None:
            rest, self._rest = self._rest, None
            self._ways = self._ways + rest()


def rival_of(routes: Sequence[Route], chosen: Route) -> tuple[str, float] | None:
    """Returns the best decode worker beside the chosen one, and its price in seconds, or None.

    Puts nothing together for it that was not before.
    """
    if isinstance(routes, Routes):
        return routes.second if routes[0] is chosen else (routes[0].decode.worker_id, _price_s(routes[0]))
    return next(((route.decode.worker_id, _price_s(route)) for route in routes if route is not chosen), None)


def _price_s(route: Route) -> float:
    return float(route.inputs["price_s"])


def cheapest_route(prices: Prices, way: PricedWay) -> Route:
    """Returns the Route of a way whose prefill workers are all of `prices`, the cheapest for its D first."""
    decode, fits = way.at.view, prices.fits
    num_bytes = _lacking_bytes(prices, way)
    by_price = [
        (entry[0] + prices.link(entry[2], decode).time_s(num_bytes), place, entry[2])
        for place, entry in enumerate(prices.prefills)
        if fits is None or fits(entry[2], decode)
    ]
    by_price.sort()
    return _route(prices, way, [view for _, _, view in by_price])


def ordered_route(
    prices: Prices, prefills: Sequence[WorkerView], decode: WorkerView, *, change: Callable[[list[Terms]], None]
) -> Route:
    """Returns the Route of a decode worker with the first of `prefills` that fits it; `change` has pulls added."""
    fits = prices.fits
    there = [prefill for prefill in prefills if fits is None or fits(prefill, decode)]
    prices.prefills = prices.price_prefills(there[:1])
    change(prices.prefills)
    (at,) = prices.price_decodes([decode])
    return _route(prices, prices.price(at), there)


def _route(prices: Prices, way: PricedWay, prefills: list[WorkerView]) -> Route:
    """Gives the terms their names, and predicts first and second token."""
    prefill, remote_first_s, exposed_s = way.prefill, 0.0, 0.0
    inputs: dict[str, float | int | str] = {
        "price_s": way.price_s,
        "decode_s": prices.new_tokens * way.at.step_s,
        "decode_queue_s": way.at.queue_s,
        "decode_pressure_s": way.at.pressure_s,
        "decode_place_s": way.at.place_s,
        "decode_cached_tokens": way.at.cached_tokens,
        "local_cost_s": way.at.local_s,
        "local_ttft_s": way.at.first_s,
        "itl_cost_s": way.at.itl_s,
        "local_redone_s": way.at.redone_s,
    }
    if prices.request.pool is not None:
        inputs["pool"] = prices.request.pool
    if prefill is not None:
        link, remote_first_s = prices.link(prefill.view, way.at.view), prefill.queue_s + prefill.pull_s + prefill.work_s
        exposed_s = _exposed_s(prices, way)
        inputs |= {
            "prefill_worker": prefill.view.worker_id,
            "prefill_queue_s": prefill.queue_s,
            "prefill_pressure_s": prefill.pressure_s,
            "prefill_place_s": prefill.place_s,
            "prefill_cached_tokens": prefill.cached_tokens,
            "displaced_s": (prices.crowd - 1) * prefill.work_s,
            "hot_spot_s": prefill.hot_spot_s,
            "transfer_s": way.transfer_s,
            "exposed_s": exposed_s,
            "handoff_bytes": _lacking_bytes(prices, way),
            "link_bytes_per_s": link.bytes_per_s,
            "link_underway_bytes": link.underway_bytes,
            "remote_cost_s": way.remote_s,
            "remote_ttft_s": remote_first_s,
            "remote_redone_s": prefill.redone_s,
            **_pull_terms(prices.pulls.get(prefill.view.worker_id)),
        }
    if way.is_remote and prefill is not None:
        cached = prefill.cached_tokens
        first_s = _at_own_pace_s(prices, prefill.view, cached, remote_first_s)
    else:
        cached, exposed_s = way.at.cached_tokens, 0.0
        first_s = _at_own_pace_s(prices, way.at.view, cached, way.at.first_s)
    return Route(
        decode=way.at.view,
        prefills=tuple(prefills),
        is_remote=way.is_remote,
        reason=way.reason,
        predicted_ttft_s=first_s,
        predicted_second_s=first_s + exposed_s + way.at.step_s,
        predicted_itl_s=way.at.step_s,
        num_cached_tokens=cached,
        inputs=inputs,
        pulls=prices.pulls if way.is_remote else {},
    )


def _pull_terms(pull: Pull | None) -> dict[str, float | int | str]:
    if pull is None:
        return {}
    return {
        "pull_from": pull.holder.worker_id,
        "pull_tokens": pull.num_tokens,
        "pull_bytes": pull.num_bytes,
        "pull_s": pull.time_s,
        "pull_computing_s": pull.computing_s,
    }


def _lacking_bytes(prices: Prices, way: PricedWay) -> int:
    return (prices.request.num_prompt_tokens - way.at.cached_tokens) * prices.request.kv_bytes_per_token


def _exposed_s(prices: Prices, way: PricedWay) -> float:
    """Returns the part of the transfer that comes after the prompt's computation: pages go as they are computed."""
    prefill, num_tokens = way.prefill, prices.request.num_prompt_tokens
    assert prefill is not None, "nothing is transferred to itself"
    num_last = min(prices.settings.disaggregation.chunk_tokens, num_tokens - prefill.cached_tokens)
    bytes_per_token = prices.request.kv_bytes_per_token
    return prices.link(prefill.view, way.at.view).exposed_s(
        _lacking_bytes(prices, way),
        at_once_bytes=max(0, prefill.cached_tokens - way.at.cached_tokens) * bytes_per_token,
        last_bytes=num_last * bytes_per_token,
        queue_s=prefill.queue_s + prefill.pull_s,
        first_s=prefill.view.prefill_speed.time_s(num_last),
        work_s=prefill.work_s,
    )


def _at_own_pace_s(prices: Prices, view: WorkerView, cached: int, first_s: float) -> float:
    """Returns when the first token comes as the worker itself works, if it takes `first_s` by the speeds of prices.

    That takes as much longer as it has measured, and what all of the prompt's steps cost and not only the first,
    except for those that others are in: the cost of these is known.
    """
    speed, num_tokens = view.prefill_speed, prices.request.num_prompt_tokens - cached
    work_s = alone_s = speed.time_s(num_tokens, cached) - speed.overhead_s
    if view.num_running and view.context_tokens:
        step_s = view.decode_speed.step_s(view.num_running, view.context_tokens)
        alone_s = max(0.0, work_s - view.steps_left * stretch_s(step_s))
    num_alone = round(num_tokens * alone_s / work_s) if work_s else 0
    chunk_tokens = prices.settings.disaggregation.chunk_tokens
    first_s += more_steps_s(speed.overhead_s, alone_s, num_alone, chunk_tokens=chunk_tokens)
    if view.measured is None:
        return first_s
    return first_s * view.measured.time_s(num_tokens, cached) / max(speed.time_s(num_tokens, cached), 1e-9)
