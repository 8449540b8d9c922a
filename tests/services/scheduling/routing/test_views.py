"""How views are put together, and which workers can serve a request at all."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduling.routing.policies import POLICY_NAMES
from services.scheduling.routing.price import RoutingSettings
from services.scheduling.routing.router import Router
from services.scheduling.routing.views import Views
from tests.examples import examples
from tests.services.scheduling.routing.samples import can_serve, cases, decodes, prefills, view


@settings(max_examples=examples(300), deadline=None)
@given(cases(), st.sampled_from(POLICY_NAMES), st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5))))
def test_every_worker_that_can_serve_it_once_and_no_other(case, policy, cut):
    asked, ps, ds = case
    cut = {(f"p{i}", f"d{j}") for i, j in cut}
    routes = Router(policy, seed=3).route(
        asked, ps, ds, fits=lambda p, d: (p.worker_id, d.worker_id) not in cut, now_s=0.0
    )
    num_tokens = asked.num_prompt_tokens + asked.max_new_tokens
    able = [worker for worker in ps if can_serve(worker, asked, asked.num_prompt_tokens)]
    assert sorted(decodes(routes)) == [worker.worker_id for worker in ds if can_serve(worker, asked, num_tokens)]
    assert bool(routes) == (len(routes) > 0)
    for route in routes:
        there = [p.worker_id for p in able if (p.worker_id, route.decode.worker_id) not in cut]
        assert sorted(prefills(route)) == there
        assert not route.is_remote or route.prefills
        assert 0 <= route.num_cached_tokens < asked.num_prompt_tokens


@settings(deadline=None)
@given(cases(), st.sampled_from(POLICY_NAMES), st.integers(0, 3))
def test_views_that_are_made_when_they_are_looked_at_are_chosen_as_any_others(case, policy, all_up_to):
    asked, ps, ds = case
    few = RoutingSettings(all_up_to=all_up_to, num_choices=2, num_holders=1)

    def made_late(views):
        return Views([one.worker_id for one in views], lambda index: views[index])

    at_once = Router(policy, settings=few, seed=3).route(asked, ps, ds, now_s=0.0)
    late = Router(policy, settings=few, seed=3).route(asked, made_late(ps), made_late(ds), now_s=0.0)
    assert [told(route) for route in late] == [told(route) for route in at_once]


def told(route):
    """A route with ids in place of views, which are equal to themselves alone."""
    return msgspec.structs.asdict(route) | {"decode": route.decode.worker_id, "prefills": prefills(route)}


def test_views_of_some_and_with_a_change():
    workers = Views(["a", "b", "c"], lambda index: view("abc"[index], num_requests=index))
    some = workers.only({"c", "a", "x"})
    assert (some.worker_ids, [one.worker_id for one in some]) == (["a", "c"], ["a", "c"])
    busy = some.changed(lambda one: one.replaced(num_requests=9), {"c"})
    assert [one.num_requests for one in busy] == [0, 9]
    assert [one.worker_id for one in workers[1:]] == ["b", "c"]
    assert workers[-1] == workers[2] is workers[2]
    with pytest.raises(IndexError):
        workers[3]
