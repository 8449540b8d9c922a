"""Whose turn it is, and which workers are looked at among many."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduling.routing.price import RoutingSettings
from services.scheduling.routing.router import Router
from services.scheduling.routing.views import Views
from tests.examples import examples
from tests.services.scheduling.routing.samples import cases, decodes, prefills, request, view


@settings(max_examples=examples(200), deadline=None)
@given(cases(), st.randoms(use_true_random=False), st.sampled_from(["hybrid", "least_loaded", "prefix_aware"]))
def test_the_order_of_the_views_matters_to_ties_only(case, shuffler, policy):
    asked, ps, ds = case
    mixed = shuffler.sample(ps, len(ps)), shuffler.sample(ds, len(ds))
    first = Router(policy).route(asked, ps, ds, now_s=0.0)
    second = Router(policy).route(asked, *mixed, now_s=0.0)
    prices = [route.inputs["price_s"] for route in first]
    if policy == "hybrid":
        assert [route.inputs["price_s"] for route in second] == pytest.approx(prices)
    else:
        assert decodes(first) == decodes(second)


def test_among_many_workers_the_longest_prefix_is_never_missed():
    rng = random.Random(1)
    ps, ds = ([view(f"{role}{i}", num_requests=rng.randrange(20)) for i in range(500)] for role in "pd")
    router = Router()
    for _ in range(100):
        holder, home = f"p{rng.randrange(500)}", f"d{rng.randrange(500)}"
        cached = {f"p{i}": 160 for i in range(500)} | {holder: 4000, home: 3200}
        routes = router.route(request(num_prompt_tokens=4800, cached_tokens=cached), ps, ds, now_s=0)
        assert prefills(routes[0])[0] == holder
        assert routes[0].decode.worker_id == home


def test_among_many_workers_the_few_that_can_are_found_and_all_are_there_in_the_end():
    ps, ds = ([view(f"{role}{i}", model="m" if i % 100 == 7 else "n") for i in range(400)] for role in "pd")
    routes = Router(seed=5).route(request(model="m"), ps, ds, now_s=0)
    assert sorted(decodes(routes)) == sorted(f"d{i}07" if i else "d7" for i in range(4))
    assert sorted(prefills(routes[0])) == sorted(f"p{i}07" if i else "p7" for i in range(4))
    everybody = Router(seed=5).route(request(), ps, ds, now_s=0)
    head = everybody[0].decode.worker_id
    assert sorted(decodes(everybody)) == sorted(worker.worker_id for worker in ds)
    assert decodes(everybody)[0] == head
    assert not Router().route(request(model="x"), ps, ds, now_s=0)


def test_choices_among_many_keep_the_load_even():
    """Among 200 workers the fullest has little more than the mean: eight choices, not one."""
    rng, loads = random.Random(2), [0] * 200
    router = Router(seed=7)
    for _ in range(2000):
        ds = [view(f"d{i}", num_requests=load, num_running=load) for i, load in enumerate(loads)]
        loads[int(router.route(request(), [], ds, now_s=0)[0].decode.worker_id[1:])] += 1
        if rng.random() < 0.2:
            loads[max(range(200), key=loads.__getitem__)] -= 1
    assert max(loads) <= 12


def test_a_decision_among_thousands_looks_at_few():
    seen = set()

    def look(index):
        seen.add(index)
        return view(f"w{index}")

    workers = Views([f"w{index}" for index in range(5000)], look)
    asked = request(cached_tokens={f"w{index}": 16 for index in range(5000)})
    routes = Router().route(asked, [], workers, now_s=0)
    assert routes[0].decode.worker_id in workers.worker_ids
    assert len(seen) <= 4 * RoutingSettings().num_choices + RoutingSettings().num_holders
    assert len(routes) == len(seen) == 5000


def test_an_unknown_policy_is_refused_by_name():
    with pytest.raises(ValueError, match="no routing policy 'best'"):
        Router("best")
