"""Order of workers under each policy, what the price is made of, and what it may never do."""

import dataclasses
import itertools
import math
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduling.disaggregation import INTERFERENCE, DisaggregationSettings
from services.scheduling.links import PeerLink, PeerLinks
from services.scheduling.prediction import DecodeSpeed, LinkSpeed, PrefillSpeed
from services.scheduling.routing import (
    POLICY_NAMES,
    Router,
    RouteRequest,
    RoutingSettings,
    Views,
    WorkerView,
    _Case,
    _Hits,
)
from tests.examples import examples


def view(worker_id, **facts):
    facts = {"num_requests": 0, "waiting_tokens": 0, "pages_available": 1000} | facts
    return WorkerView(worker_id, "0" * 32, 1000, max_sequence_tokens=10_000, **facts)


def request(**facts):
    return RouteRequest(**({"num_prompt_tokens": 1000, "max_new_tokens": 100, "kv_bytes_per_token": 100_000} | facts))


def decodes(routes):
    return [route.decode.worker_id for route in routes]


def prefills(route):
    return [worker.worker_id for worker in route.prefills]


VIEWS = st.builds(
    WorkerView,
    worker_id=st.just(""),
    incarnation=st.just("0"),
    pages_total=st.sampled_from([10, 100, 1000]),
    pages_available=st.integers(0, 1000),
    num_requests=st.integers(0, 40),
    waiting_tokens=st.one_of(st.just(0), st.integers(0, 50_000)),
    max_sequence_tokens=st.sampled_from([100, 3000, 10_000]),
    num_running=st.integers(0, 40),
    context_tokens=st.integers(0, 100_000),
    model=st.sampled_from(["", "m", "n"]),
    region=st.sampled_from(["", "east", "west"]),
    tenants=st.sampled_from([frozenset(), frozenset({"t"}), frozenset({"u", "v"})]),
    page_size=st.sampled_from([8, 16]),
    prefill_speed=st.builds(PrefillSpeed, st.floats(0, 0.1), st.floats(0, 1e-3), st.floats(0, 1e-7)),
    decode_speed=st.builds(DecodeSpeed, st.floats(0, 0.1), st.floats(0, 1e-3), st.floats(0, 1e-6)),
    link_speed=st.builds(LinkSpeed, st.floats(0, 0.1), st.floats(1e6, 1e11)),
    links=st.dictionaries(
        st.sampled_from([f"d{i}" for i in range(6)]),
        st.builds(PeerLink, st.floats(0, 0.1), st.floats(1e5, 1e11), st.one_of(st.just(0.0), st.floats(0, 1e9))),
        max_size=6,
    ).map(PeerLinks),
    queue_s=st.one_of(st.none(), st.floats(0, 100)),
)
ROLES = st.lists(VIEWS, max_size=6)


@st.composite
def cases(draw):
    """A request, prefill workers and decode workers; in half of the cases everybody can serve it."""
    ps = [dataclasses.replace(worker, worker_id=f"p{i}") for i, worker in enumerate(draw(ROLES))]
    ds = [dataclasses.replace(worker, worker_id=f"d{i}") for i, worker in enumerate(draw(ROLES))]
    if draw(st.booleans()):
        able = {"model": "m", "tenants": frozenset(), "pages_total": 1000, "max_sequence_tokens": 10_000}
        ps, ds = ([dataclasses.replace(worker, **able) for worker in role] for role in (ps, ds))
    cached = {worker.worker_id: draw(st.integers(0, 250)) * 16 for worker in ps + ds if draw(st.booleans())}
    asked = RouteRequest(
        num_prompt_tokens=draw(st.integers(1, 4000)),
        max_new_tokens=draw(st.integers(0, 2000)),
        model=draw(st.sampled_from(["", "m"])),
        tenant=draw(st.sampled_from(["", "t", "x"])),
        region=draw(st.sampled_from(["", "east"])),
        affinity_key=draw(st.sampled_from(["", "k"])),
        cached_tokens=cached,
        kv_bytes_per_token=draw(st.sampled_from([0, 1000, 1_000_000])),
    )
    return asked, ps, ds


def can_serve(worker, asked, num_tokens):
    return (
        worker.max_sequence_tokens >= num_tokens
        and worker.pages_total * worker.page_size >= num_tokens
        and asked.model in ("", worker.model)
        and (not worker.tenants or asked.tenant in worker.tenants)
    )


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


@settings(max_examples=examples(300), deadline=None)
@given(cases(), st.sampled_from([None, 0, 500]), st.sampled_from([None, 0.05]))
def test_the_price_is_the_sum_of_the_terms_it_names_and_sorts_the_routes(case, threshold, max_itl_s):
    asked, ps, ds = case
    # Without the weight that depends on all workers together, so that they can be compared one by one.
    decided = DisaggregationSettings(local_prefill_tokens=threshold, max_itl_s=max_itl_s)
    how = RoutingSettings(disaggregation=decided, displaced_weight=0.0)
    routes = list(Router("hybrid", settings=how).route(asked, ps, ds, now_s=0.0))
    prices = [route.inputs["price_s"] for route in routes]
    for left, right in itertools.pairwise(prices):
        assert left <= right * (1 + 1e-9) + 1e-9
    for route in routes:
        terms = route.inputs
        common = terms["decode_s"] + terms["decode_pressure_s"] + terms["decode_place_s"]
        way = terms["remote_cost_s"] if route.is_remote else terms["local_cost_s"]
        assert terms["price_s"] == pytest.approx(common + way)
        if route.prefills:
            p, d = route.prefills[0], route.decode
            speed, cached = p.prefill_speed, terms["prefill_cached_tokens"]
            sums = (
                terms["prefill_queue_s"] + speed.time_s(asked.num_prompt_tokens - cached, cached),
                terms["remote_redone_s"] + terms["hot_spot_s"] + terms["displaced_s"],
                terms["prefill_pressure_s"] + terms["prefill_place_s"],
                terms["transfer_s"] + INTERFERENCE * terms["decode_queue_s"],
            )
            assert terms["remote_cost_s"] == pytest.approx(sum(sums))
            if d.worker_id in p.links:
                assert terms["transfer_s"] == pytest.approx(p.links[d.worker_id].time_s(terms["handoff_bytes"]))
            assert terms["exposed_s"] <= terms["transfer_s"] + speed.overhead_s + 1e-9 * (1 + terms["transfer_s"])
        if threshold is None and max_itl_s is None and route.prefills:
            assert way == min(terms["remote_cost_s"], terms["local_cost_s"])
        if route.prefills:
            # No other prefill worker would have been cheaper for this decode worker.
            alone = [
                Router(settings=how).route(asked, [p], [route.decode], now_s=0.0)[0].inputs["remote_cost_s"]
                for p in route.prefills
            ]
            shared = 1.0 if asked.tenant and any(p.tenants for p in ps) else 0.0
            assert terms["remote_cost_s"] <= min(alone) + shared + 1e-9 * (1 + min(alone))


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


@settings(max_examples=examples(300), deadline=None)
@given(cases(), st.sampled_from([None, 500]), st.sampled_from([None, 0.05]))
def test_the_loop_that_compares_and_the_terms_that_are_told_agree(case, threshold, max_itl_s):
    asked, ps, ds = case
    how = RoutingSettings(disaggregation=DisaggregationSettings(local_prefill_tokens=threshold, max_itl_s=max_itl_s))
    case = _Case(asked, how, None)
    case.price_prefills(ps, _Hits(10.0), 0.0)
    case.has_prices = True
    for price_s, _, prefill, decode in case.price_decodes(ds):
        route = case.build(decode)
        assert route.inputs["price_s"] == pytest.approx(price_s)
        close = abs(route.inputs["remote_cost_s"] - route.inputs["local_cost_s"]) < 1e-9
        assert close or route.is_remote is (prefill is not None)


def test_a_hot_worker_that_holds_more_is_never_dearer():
    hot, others = view("a", waiting_tokens=20_000), [view("b", waiting_tokens=20_000), view("c", waiting_tokens=100)]
    others += [view("d", waiting_tokens=100), view("e", waiting_tokens=100)]
    router, costs = hot_router(hot), []
    for cached in range(0, 4000, 160):
        asked = request(num_prompt_tokens=4000, cached_tokens={"a": cached})
        route = router.route(asked, [hot, *others], [view("x")], now_s=1.0)[0]
        costs.append(prefills(route).index("a"))
        terms = router.route(asked, [hot, others[0]], [view("x")], now_s=1.0)[0].inputs
        assert terms["hot_spot_s"] <= cached * 1e-4 / 2
    assert costs == sorted(costs, reverse=True)
    case = _Case(request(num_prompt_tokens=4000, cached_tokens={"a": 160}), RoutingSettings(), None)
    hits = _Hits(10.0)
    for _ in range(9):
        hits.note("a", 1.0)
    case.price_prefills([hot, *others], hits, 1.0)
    assert case.hot_s == {"a": pytest.approx(160 * 1e-4 / 2)}


def hot_router(worker, **settings):
    """One that has sent everything to this worker so far, for what it has cached."""
    router = Router(settings=RoutingSettings(hot_min_hits=1, **settings))
    for _ in range(9):
        router._hits.note(worker.worker_id, 1.0)
    return router


def changed(views, index, **facts):
    return [*views[:index], dataclasses.replace(views[index], **facts), *views[index + 1 :]]


@settings(max_examples=examples(200), deadline=None)
@given(cases(), st.data())
def test_more_cached_is_never_worse_for_anybody(case, data):
    asked, ps, ds = case
    if not ps + ds:
        return
    worker = data.draw(st.sampled_from(ps + ds))
    more = asked.cached_tokens.get(worker.worker_id, 0) + 16 * data.draw(st.integers(1, 100))
    easier = dataclasses.replace(asked, cached_tokens=dict(asked.cached_tokens) | {worker.worker_id: more})
    # What one worker comes to hold, the others would compute twice: that alone is for its holder.
    how = DisaggregationSettings(redone_weight=0)
    before, after = (
        {
            route.decode.worker_id: route.inputs["price_s"]
            for route in hot_router(worker, disaggregation=how).route(asked, ps, ds, now_s=1)
        }
        for asked in (asked, easier)
    )
    assert after.keys() == before.keys()
    for name, price_s in after.items():
        assert price_s <= before[name] + 1e-9 * (1 + before[name])


@settings(max_examples=examples(200), deadline=None)
@given(cases(), st.data())
def test_a_decode_worker_with_less_to_do_is_never_worse(case, data):
    asked, ps, ds = case
    if not ds:
        return
    index = data.draw(st.integers(0, len(ds) - 1))
    worker = ds[index]
    less = {
        "waiting_tokens": data.draw(st.integers(0, worker.waiting_tokens)),
        "num_running": data.draw(st.integers(0, worker.num_running)),
        "context_tokens": data.draw(st.integers(0, worker.context_tokens)),
        "pages_available": data.draw(st.integers(worker.pages_available, 1000)),
        "queue_s": None if worker.queue_s is None else data.draw(st.floats(0, worker.queue_s)),
    }
    before, after = (
        [
            route.inputs["price_s"]
            for route in Router().route(asked, ps, workers, now_s=1)
            if route.decode.worker_id == worker.worker_id
        ]
        for workers in (ds, changed(ds, index, **less))
    )
    assert len(after) == len(before)
    assert not after or after[0] <= before[0] + 1e-9 * (1 + before[0])


@settings(max_examples=examples(200), deadline=None)
@given(cases(), st.data())
def test_a_prefill_worker_with_less_to_do_never_falls_behind(case, data):
    asked, ps, ds = case
    if not ps:
        return
    index = data.draw(st.integers(0, len(ps) - 1))
    worker = ps[index]
    easier = changed(
        ps,
        index,
        waiting_tokens=data.draw(st.integers(0, worker.waiting_tokens)),
        queue_s=None if worker.queue_s is None else data.draw(st.floats(0, worker.queue_s)),
    )
    before, after = (
        {
            route.decode.worker_id: prefills(route).index(worker.worker_id)
            for route in hot_router(worker).route(asked, workers, ds, now_s=1)
            if worker.worker_id in prefills(route)
        }
        for workers in (ps, easier)
    )
    assert after.keys() == before.keys()
    assert all(rank <= before[name] for name, rank in after.items())


def test_the_cached_prefix_is_worth_what_it_saves():
    holder, idle = view("a", waiting_tokens=3000), view("b")
    cached = {"a": 3200}
    long, short = (request(num_prompt_tokens=3500 + extra, cached_tokens=cached) for extra in (0, 3000))
    for waiting, first in ((2000, "a"), (5000, "b")):
        busy = dataclasses.replace(holder, waiting_tokens=waiting)
        for asked in (long, short):
            assert prefills(Router().route(asked, [busy, idle], [view("d")], now_s=0)[0])[0] == first


def test_a_hot_prefix_leaves_its_only_holder_before_the_queue_alone_would():
    hot, others = view("a", waiting_tokens=2500), [view(name) for name in "bcd"]
    asked = request(num_prompt_tokens=3500, cached_tokens={"a": 3200})
    router = Router(settings=RoutingSettings(disaggregation=DisaggregationSettings(local_prefill_tokens=0)))
    # 3,200 tokens saved are worth 2,500 that wait: until the worker is known to be hot.
    firsts = [prefills(router.route(asked, [hot, *others], [view("x")], now_s=i / 10)[0])[0] for i in range(20)]
    assert firsts[:8] == ["a"] * 8
    # It is left until it is chosen no more often than twice its share.
    assert firsts[8:].count("a") <= 6
    assert set(firsts[8:]) >= {"b", "c", "d"}
    assert prefills(router.route(asked, [hot, *others], [view("x")], now_s=100.0)[0])[0] == "a"


def test_pages_that_are_with_the_decode_worker_need_no_way():
    asked = request(num_prompt_tokens=8000, cached_tokens={"a": 4000}, kv_bytes_per_token=1_000_000)
    first, second = Router().route(asked, [view("p")], [view("b"), view("a")], now_s=0)
    assert (first.decode.worker_id, second.decode.worker_id) == ("a", "b")
    assert first.inputs["transfer_s"] == pytest.approx(4.002)
    assert second.inputs["transfer_s"] == pytest.approx(8.002)


def linked(worker_id, **links):
    return view(worker_id, links=PeerLinks({name: PeerLink(0.002, *link) for name, link in links.items()}))


def test_a_slow_link_is_left_and_a_fast_one_to_another_worker_is_not():
    asked = request(num_prompt_tokens=2500, kv_bytes_per_token=36_864)
    mbit = 125_000
    p = linked("p", slow=(30 * mbit,), fast=(8000 * mbit,))
    ds = [
        view("slow", prefill_speed=PrefillSpeed(0.01, 2.5e-3)),
        view("fast", prefill_speed=PrefillSpeed(0.01, 2.5e-3)),
    ]
    first, second = Router().route(asked, [p], ds, now_s=0)
    assert (first.decode.worker_id, first.is_remote) == ("fast", True)
    assert (second.decode.worker_id, second.is_remote) == ("slow", False)
    assert second.inputs["remote_cost_s"] > 24 > second.inputs["local_cost_s"]
    # Whose second token would come late is told, and whose pages arrive while others are computed is not blamed.
    remote = RoutingSettings(disaggregation=DisaggregationSettings(local_prefill_tokens=0))
    (route,) = Router(settings=remote).route(asked, [p], [ds[0]], now_s=0)
    assert route.predicted_ttft_s == pytest.approx(0.26 + 0.01 * (2500 / 512 - 1))
    assert 24.5 < route.predicted_second_s < 25


def test_a_prefill_worker_near_its_decode_worker_is_chosen_and_one_whose_link_is_busy_is_not():
    asked = request(num_prompt_tokens=2500, kv_bytes_per_token=36_864)
    near, far = linked("near", d=(1e9,)), linked("far", d=(1e8,))
    for order in ([near, far], [far, near]):
        assert prefills(Router().route(asked, order, [view("d")], now_s=0)[0]) == ["near", "far"]
    busy = linked("near", d=(1e9, 2e9))
    (route,) = Router().route(asked, [busy, far], [view("d")], now_s=0)
    assert prefills(route) == ["far", "near"]


def test_a_region_is_no_guess_where_the_link_was_measured():
    asked = request(num_prompt_tokens=2500)
    p = dataclasses.replace(linked("p", d=(1e9,)), region="east")
    measured, guessed = (
        Router().route(asked, [worker], [view("d", region="west")], now_s=0)[0].inputs["transfer_s"]
        for worker in (p, dataclasses.replace(p, links=PeerLinks({})))
    )
    assert measured == pytest.approx(0.252)
    assert guessed == pytest.approx(4 * 0.252 + 0.05)


def test_regions_are_preferred_and_crossed_when_it_pays():
    east, west = ({"region": name} for name in ("east", "west"))
    asked = request(num_prompt_tokens=5000, region="east")
    always_remote = RoutingSettings(disaggregation=DisaggregationSettings(local_prefill_tokens=0))
    ps = [view("pw", **west), view("pe", **east)]
    first, second = Router(settings=always_remote).route(asked, ps, [view("dw", **west), view("de", **east)], now_s=0)
    assert (first.decode.worker_id, prefills(first)) == ("de", ["pe", "pw"])
    # Both far away is better than pages that cross half the world.
    assert (second.decode.worker_id, prefills(second)) == ("dw", ["pw", "pe"])
    busy = dataclasses.replace(ps[1], waiting_tokens=50_000)
    assert (
        prefills(Router(settings=always_remote).route(asked, [ps[0], busy], [view("de", **east)], now_s=0)[0])[0]
        == "pw"
    )


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_tenant_with_workers_of_its_own_goes_there_first(policy):
    own, shared = view("b", tenants=frozenset({"t"}), num_requests=4, num_running=4), view("a")
    for _ in range(4):
        assert decodes(Router(policy).route(request(tenant="t"), [], [shared, own], now_s=0)) == ["b", "a"]
        assert decodes(Router(policy).route(request(tenant="u"), [], [shared, own], now_s=0)) == ["a"]
        assert decodes(Router(policy).route(request(), [], [shared, own], now_s=0)) == ["a"]


def test_the_last_pages_cost():
    full, roomy = view("a", pages_available=60), view("b", num_requests=40)
    assert decodes(Router().route(request(), [], [full, roomy], now_s=0)) == ["b", "a"]
    assert decodes(Router().route(request(num_prompt_tokens=10), [], [full, roomy], now_s=0)) == ["a", "b"]


def test_equal_workers_take_turns_and_seeds_start_elsewhere():
    workers = [view(name) for name in "abcd"]
    for policy in POLICY_NAMES:
        router = Router(policy, seed=1)
        firsts = Counter(router.route(request(), [], workers, now_s=0)[0].decode.worker_id for _ in range(400))
        assert set(firsts) == set("abcd")
        assert min(firsts.values()) > 60
    starts = {Router(seed=seed).route(request(), [], workers, now_s=0)[0].decode.worker_id for seed in range(20)}
    assert starts == set("abcd")


def test_round_robin_and_random_look_at_nothing():
    workers = [view("b", num_requests=30, waiting_tokens=9000), view("a"), view("c")]
    router = Router("round_robin")
    assert [decodes(router.route(request(), [], workers, now_s=0))[0] for _ in range(4)] == ["a", "b", "c", "a"]
    once, again = ([decodes(Router("random", seed=s).route(request(), [], workers, now_s=0)) for s in range(30)],) * 2
    assert once == again
    assert {order[0] for order in once} == {"a", "b", "c"}


def test_least_loaded_counts_seconds_and_not_requests():
    slow, fast = PrefillSpeed(0.01, 1e-3), PrefillSpeed(0.01, 1e-4)
    ps = [view("slow", waiting_tokens=1000, prefill_speed=slow), view("fast", waiting_tokens=5000, prefill_speed=fast)]
    many, long = view("many", num_requests=20, num_running=20), view("long", num_requests=2, context_tokens=2_000_000)
    routes = Router("least_loaded").route(request(), ps, [long, many], now_s=0)
    assert decodes(routes) == ["many", "long"]
    assert prefills(routes[0]) == ["fast", "slow"]


def test_prefix_aware_takes_the_longest_prefix_then_the_lightest_load():
    workers = [view("a", waiting_tokens=9), view("b"), view("c", waiting_tokens=5000), view("d", waiting_tokens=1)]
    asked = request(cached_tokens={"c": 512, "a": 256, "d": 256})
    assert decodes(Router("prefix_aware").route(asked, [], workers, now_s=0)) == ["c", "d", "a", "b"]


def test_sticky_keys_keep_their_worker_when_others_come_and_go():
    workers = [view(f"w{i}", num_requests=1) for i in range(10)]
    keys = [f"user {i}" for i in range(300)]

    def homes(workers):
        router = Router("sticky")
        return {key: router.route(request(affinity_key=key), [], workers, now_s=0)[0].decode.worker_id for key in keys}

    before, after = homes(workers), homes(workers[1:])
    assert all(after[key] == before[key] for key in keys if before[key] != "w0")
    assert max(Counter(before.values()).values()) < 60
    assert homes(workers) == before


def test_sticky_leaves_a_worker_that_has_too_much():
    workers = [view(f"w{i}", num_requests=4) for i in range(4)]
    asked = request(affinity_key="k")
    home = Router("sticky").route(asked, [], workers, now_s=0)[0].decode.worker_id
    busier = [dataclasses.replace(w, num_requests=8) if w.worker_id == home else w for w in workers]
    routes = Router("sticky").route(asked, [], busier, now_s=0)
    assert routes[0].decode.worker_id != home
    assert decodes(routes)[-1] == home


def test_without_a_key_sticky_is_least_loaded():
    workers = [view("a", num_requests=5), view("b", num_requests=1), view("c", num_requests=3)]
    assert decodes(Router("sticky").route(request(), [], workers, now_s=0)) == ["b", "c", "a"]


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


@settings(deadline=None)
@given(cases(), st.sampled_from(POLICY_NAMES), st.integers(0, 3))
def test_views_that_are_made_when_they_are_looked_at_are_chosen_as_any_others(case, policy, all_up_to):
    asked, ps, ds = case
    few = RoutingSettings(all_up_to=all_up_to, num_choices=2, num_holders=1)

    def made_late(views):
        return Views([one.worker_id for one in views], lambda index: views[index])

    at_once = Router(policy, settings=few, seed=3).route(asked, ps, ds, now_s=0.0)
    late = Router(policy, settings=few, seed=3).route(asked, made_late(ps), made_late(ds), now_s=0.0)
    assert list(late) == list(at_once)


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


def test_views_of_some_and_with_a_change():
    workers = Views(["a", "b", "c"], lambda index: view("abc"[index], num_requests=index))
    some = workers.only({"c", "a", "x"})
    assert (some.worker_ids, [one.worker_id for one in some]) == (["a", "c"], ["a", "c"])
    busy = some.changed(lambda one: replace(one, num_requests=9), {"c"})
    assert [one.num_requests for one in busy] == [0, 9]
    assert [one.worker_id for one in workers[1:]] == ["b", "c"]
    assert workers[-1] == workers[2] is workers[2]
    with pytest.raises(IndexError):
        workers[3]


def test_pairs_that_cannot_be_are_not_priced():
    ps = [view("p1"), view("p2", waiting_tokens=60_000)]
    ds = [view("d1"), view("d2", num_requests=10, num_running=10, context_tokens=1000)]
    always_remote = RoutingSettings(disaggregation=DisaggregationSettings(local_prefill_tokens=0))
    routes = Router(settings=always_remote).route(
        request(), ps, ds, fits=lambda p, d: (p.worker_id, d.worker_id) != ("p1", "d1"), now_s=0
    )
    assert [(route.decode.worker_id, prefills(route)) for route in routes] == [("d2", ["p1", "p2"]), ("d1", ["p2"])]
    nobody = Router().route(request(), ps, ds, fits=lambda p, d: False, now_s=0)
    assert {(route.is_remote, route.reason) for route in nobody} == {(False, "no_prefill_worker")}


def test_an_unknown_policy_is_refused_by_name():
    with pytest.raises(ValueError, match="no routing policy 'best'"):
        Router("best")


def test_a_crowd_keeps_requests_where_their_prefix_is():
    holder, idle = view("holder", num_requests=1, waiting_tokens=3000), view("idle")
    few = [holder, idle]
    many = [replace(one, num_requests=one.num_requests + 6) for one in few]
    asked = request(num_prompt_tokens=2000, cached_tokens={"holder": 1900})
    remote = DisaggregationSettings(local_prefill_tokens=0)
    for weight, first_of_few, first_of_many in [(0.0, "idle", "idle"), (1.0, "idle", "holder")]:
        router = Router(settings=RoutingSettings(disaggregation=remote, displaced_weight=weight))
        for views, first in [(few, first_of_few), (many, first_of_many)]:
            assert router.route(asked, views, [view("d")], now_s=0.0)[0].prefills[0].worker_id == first
    # Those who wait for it anyway are no crowd.
    many = [replace(one, num_less_urgent=6) for one in many]
    assert router.route(asked, many, [view("d")], now_s=0.0)[0].prefills[0].worker_id == "idle"


def test_what_is_predicted_goes_by_the_workers_own_speed_and_the_price_does_not():
    remote = RoutingSettings(disaggregation=DisaggregationSettings(local_prefill_tokens=0))
    asked, measured = request(num_prompt_tokens=2500, kv_bytes_per_token=1), PrefillSpeed(0.02, 1.3e-4)
    for how, place in [(remote, 0), (RoutingSettings(), 1)]:
        workers = [[view("p"), view("d")] for _ in range(2)]
        workers[1][place] = dataclasses.replace(workers[1][place], measured=measured)
        usual, own = (Router(settings=how).route(asked, [p] if place == 0 else [], [d], now_s=0)[0] for p, d in workers)
        assert own.inputs["price_s"] == usual.inputs["price_s"]
        assert own.predicted_ttft_s == pytest.approx(
            usual.predicted_ttft_s * measured.time_s(2500) / PrefillSpeed(0.01, 1e-4).time_s(2500)
        )


def test_the_steps_of_a_local_prompt_are_stretched_only_until_those_that_run_have_ended():
    asked = request(num_prompt_tokens=2000)
    busy = [view("d", num_running=1, context_tokens=100, steps_left=left) for left in (math.inf, 5, 0)]
    routes = [Router().route(asked, [], [d], now_s=0)[0] for d in busy]
    first, second, third = (route.predicted_ttft_s for route in routes)
    step_s = DecodeSpeed(0.010, 1e-4, 2e-8).step_s(1, 100)
    assert second - third == pytest.approx(5 * step_s, rel=0.25)
    assert first - third > 30 * step_s
    prices = [float(route.inputs["price_s"]) for route in routes]
    assert prices[0] > prices[1] > prices[2]
