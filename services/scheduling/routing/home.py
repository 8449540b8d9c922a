"""Whether a request stays in its region: workers there come first until it would miss its target. Pure.

Home is preferred to a cheaper worker elsewhere while the first token is predicted to come in time there. A request for
which home has no room now may wait for it, as long as it could still be in time elsewhere afterwards. Where home would
be late, prices decide among all workers.
"""

from collections.abc import Callable, Sequence

from services.scheduling.routing.price import RoutingSettings
from services.scheduling.routing.route import Route

DOUBT = 2.0
"""Predictions may be wrong by this factor when it is time to leave."""
LOOK_S = 0.25
"""The longest time until a request that waits is looked at again."""


def home_first(
    routes_to: Callable[[bool], Sequence[Route]],
    *,
    left_s: float,
    way_s: Callable[[Route], float],
    has_room: Callable[[Route], bool],
) -> Sequence[Route]:
    """Returns the routes that a request may take, best first, whose first token is due in `left_s`.

    `routes_to` gives those to workers at home (True) or to all, `way_s` says how long a request's way to a route's
    workers takes, and `has_room` whether these would begin with it now.
    """
    home = routes_to(True)
    if not home or home[0].predicted_ttft_s > left_s:
        return routes_to(False)
    if has_room(home[0]):
        return home
    everywhere = routes_to(False)
    away_s = everywhere[0].predicted_ttft_s + way_s(everywhere[0])
    return home if DOUBT * away_s + LOOK_S <= left_s else everywhere


def way_of(route: Route, *, region: str, settings: RoutingSettings) -> float:
    """Returns how long a request's way from its region to the farthest of a route's workers takes, in seconds."""
    workers = (route.decode, route.prefills[0]) if route.is_remote else (route.decode,)
    return max(settings.far_s(region, view.region) for view in workers)
