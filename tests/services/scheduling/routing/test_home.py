"""Home first, until it would be late."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduling.routing.home import DOUBT, LOOK_S, home_first, way_of
from services.scheduling.routing.price import RoutingSettings


def route(name, ttft_s):
    return SimpleNamespace(name=name, predicted_ttft_s=ttft_s)


def chosen(home_s, away_s, left_s, *, way_s=0.08, has_room=True):
    """Where a request goes; prices would send it away."""
    home = [] if home_s is None else [route("home", home_s)]

    def routes_to(is_home):
        return home if is_home else [route("away", away_s), *home]

    found = home_first(routes_to, left_s=left_s, way_s=lambda one: way_s, has_room=lambda one: has_room)
    return found[0].name


@pytest.mark.parametrize(
    ("home_s", "left_s", "has_room", "where"),
    [
        (0.9, 1.0, True, "home"),  # a tenth of the time elsewhere
        (1.1, 1.0, True, "away"),
        (None, 1.0, True, "away"),
        (0.9, 1.0, False, "home"),  # it waits: elsewhere it would still be in time
        (0.1, 0.5, False, "away"),
        (0.1, -1.0, True, "away"),
    ],
)
def test_home_comes_first_until_it_would_be_late(home_s, left_s, has_room, where):
    assert chosen(home_s, 0.1, left_s, has_room=has_room) == where


seconds = st.floats(0.0, 10.0)


@given(home_s=seconds, away_s=seconds, way_s=seconds, left_s=seconds, has_room=st.booleans())
def test_a_request_that_could_be_in_time_is_not_kept_from_it(home_s, away_s, way_s, left_s, has_room):
    where = chosen(home_s, away_s, left_s, way_s=way_s, has_room=has_room)
    if where == "home":
        assert home_s <= left_s
        # One that waits at home is looked at again before it is too late elsewhere.
        assert has_room or left_s - LOOK_S >= DOUBT * (away_s + way_s)
    elif has_room:
        assert home_s > left_s


def test_nothing_is_looked_at_elsewhere_while_home_has_room():
    asked = []

    def routes_to(is_home):
        asked.append(is_home)
        return [route("home", 0.1)]

    home_first(routes_to, left_s=1.0, way_s=lambda one: 0.0, has_room=lambda one: True)
    assert asked == [True]


def test_the_way_is_that_to_the_farthest_worker():
    settings = RoutingSettings(distances_s={("eu", "us"): 0.08}, region_s=0.3)
    eu, us, ap, none = (SimpleNamespace(region=region) for region in ("eu", "us", "ap", ""))

    def way_s(decode, prefill=None):
        remote = SimpleNamespace(decode=decode, prefills=[prefill], is_remote=prefill is not None)
        return way_of(remote, region="eu", settings=settings)

    assert [way_s(eu), way_s(us), way_s(none), way_s(ap)] == [0.0, 0.08, 0.0, 0.3]
    assert [way_s(eu, us), way_s(us, eu), way_s(ap, us)] == [0.08, 0.08, 0.3]
