"""What the price is made of, and what it may never do."""

import itertools
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduling.disaggregation import DisaggregationSettings
from services.scheduling.links import PeerLink, PeerLinks
from services.scheduling.prediction import DecodeSpeed, PrefillSpeed
from services.scheduling.routing.price import INTERFERENCE, Hits, PrefillTerms, Prices, RoutingSettings
from services.scheduling.routing.route import cheapest_route
from services.scheduling.routing.router import Router
from services.scheduling.routing.views import strangeness
from tests.examples import examples
from tests.services.scheduling.routing.samples import (
    cases,
    changed,
    decodes,
    hot_router,
    linked,
    prefills,
    request,
    view,
)


@settings(max_examples=examples(300), deadline=None)
@given(cases(), st.sampled_from([None, 0, 500]))
def test_the_price_is_the_sum_of_the_terms_it_names_and_sorts_the_routes(case, threshold):
    asked, ps, ds = case
    # Without the weight that depends on all workers together, so that they can be compared one by one.
    decided = DisaggregationSettings(local_prefill_tokens=threshold)
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
        if threshold is None and route.prefills:
            assert way == min(terms["remote_cost_s"], terms["local_cost_s"])
        if route.prefills:
            # No other prefill worker would have been cheaper for this decode worker.
            alone = [
                Router(settings=how).route(asked, [p], [route.decode], now_s=0.0)[0].inputs["remote_cost_s"]
                for p in route.prefills
            ]
            found = [strangeness(p, asked) for p in ps]
            shared = 1.0 * (max(found) - min(found))
            assert terms["remote_cost_s"] <= min(alone) + shared + 1e-9 * (1 + min(alone))


@settings(max_examples=examples(300), deadline=None)
@given(cases(), st.sampled_from([None, 500]), st.booleans())
def test_what_is_ranked_is_what_is_told_and_the_first_are_found_without_pricing_all(case, threshold, is_hot):
    asked, ps, ds = case
    how = RoutingSettings(disaggregation=DisaggregationSettings(local_prefill_tokens=threshold))
    prices, hits = Prices(asked, how, None), Hits(10.0)
    for _ in range(9 if is_hot and ps else 0):
        hits.note(ps[0].worker_id, 0.0)
    prices.look_at(ps, ds)
    priced = prices.price_prefills(ps)
    prices.add_hot_spots(priced, hits, 0.0)
    prices.prefills = sorted(priced)
    ways = sorted(map(prices.price, prices.price_decodes(ds)))
    for way in ways:
        route, at, remote = cheapest_route(prices, way), way.at, way.prefill
        assert route.inputs["price_s"] == way.price_s >= at.least_s - 1e-9 * (1 + at.least_s)
        assert (route.is_remote, route.reason) == (way.is_remote, way.reason)
        terms = [prices.new_tokens * at.step_s, at.pressure_s, at.place_s]
        if way.is_remote:
            assert route.prefills[0] is remote.view
            terms += [remote.queue_s, prices.crowd * remote.work_s, remote.pressure_s, remote.place_s]
            terms += [remote.hot_spot_s, remote.redone_s, way.transfer_s, INTERFERENCE * at.queue_s]
        else:
            terms += [at.first_s, at.itl_s, at.redone_s]
        assert way.price_s == pytest.approx(math.fsum(terms))
    first, others = prices.cheapest(ds, 2)
    assert [way.price_s for way in first] == pytest.approx([way.price_s for way in ways[:2]])
    assert len(first) + len(others) == len(ways)


@settings(max_examples=examples(200), deadline=None)
@given(cases(), st.booleans())
def test_what_a_worker_costs_does_not_depend_on_those_that_were_priced_before_it(case, is_alike):
    asked, ps, ds = case
    if is_alike:
        ps, ds = ([one.replaced(prefill_speed=role[0].prefill_speed) for one in role] for role in (ps, ds))
    # The prefill worker that holds most counts for all, so each is priced beside it.
    held = max(ps, key=lambda one: asked.cached_tokens.get(one.worker_id, 0), default=None)
    prices = Prices(asked, RoutingSettings(), None)
    together = prices.price_prefills(ps)
    for one, terms in zip(ps, together, strict=True):
        assert prices.price_prefills([one, held])[0][3:] == terms[3:]
    prices.price_prefills(ps)
    prices.prefills = sorted(together)
    for one, terms in zip(ds, prices.price_decodes(ds), strict=True):
        assert prices.price_decodes([one])[0][2:] == terms[2:]


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
    prices, hits = (
        Prices(request(num_prompt_tokens=4000, cached_tokens={"a": 160}), RoutingSettings(), None),
        Hits(10.0),
    )
    for _ in range(9):
        hits.note("a", 1.0)
    priced = prices.price_prefills([hot, *others])
    prices.add_hot_spots(priced, hits, 1.0)
    assert [PrefillTerms._make(terms).hot_spot_s for terms in priced] == [pytest.approx(160 * 1e-4 / 2), 0, 0, 0, 0]


@settings(max_examples=examples(200), deadline=None)
@given(cases(), st.data())
def test_more_cached_is_never_worse_for_anybody(case, data):
    asked, ps, ds = case
    if not ps + ds:
        return
    worker = data.draw(st.sampled_from(ps + ds))
    more = asked.cached_tokens.get(worker.worker_id, 0) + 16 * data.draw(st.integers(1, 100))
    easier = msgspec.structs.replace(asked, cached_tokens=dict(asked.cached_tokens) | {worker.worker_id: more})
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
        busy = holder.replaced(waiting_tokens=waiting)
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
    p = linked("p", d=(1e9,)).replaced(region="east")
    measured, guessed = (
        Router().route(asked, [worker], [view("d", region="west")], now_s=0)[0].inputs["transfer_s"]
        for worker in (p, p.replaced(links=PeerLinks({})))
    )
    assert measured == pytest.approx(0.252)
    assert guessed == pytest.approx(4 * 0.252 + 0.05)


@pytest.mark.parametrize(("there", "request_s", "pages_s"), [("west", 0.7, 0.7), ("north", 0.1, 0.05)])
def test_the_distance_that_an_operator_says_counts_for_a_request_and_for_pages(there, request_s, pages_s):
    settings = RoutingSettings(distances_s={("east", "west"): 0.7, ("west", "east"): 0.7})
    asked = request(num_prompt_tokens=2500, region="east")
    p = linked("p", d=(1e9,)).replaced(region="east", links=PeerLinks({}))
    (route,) = Router(settings=settings).route(asked, [p], [view("d", region=there)], now_s=0)
    assert route.inputs["decode_place_s"] == request_s
    assert route.inputs["prefill_place_s"] == 0.0
    assert route.inputs["transfer_s"] == pytest.approx(4 * 0.252 + pages_s)


def test_regions_are_preferred_and_crossed_when_it_pays():
    east, west = ({"region": name} for name in ("east", "west"))
    asked = request(num_prompt_tokens=5000, region="east")
    always_remote = RoutingSettings(disaggregation=DisaggregationSettings(local_prefill_tokens=0))
    ps = [view("pw", **west), view("pe", **east)]
    first, second = Router(settings=always_remote).route(asked, ps, [view("dw", **west), view("de", **east)], now_s=0)
    assert (first.decode.worker_id, prefills(first)) == ("de", ["pe", "pw"])
    # Both far away is better than pages that cross half the world.
    assert (second.decode.worker_id, prefills(second)) == ("dw", ["pw", "pe"])
    busy = ps[1].replaced(waiting_tokens=50_000)
    assert (
        prefills(Router(settings=always_remote).route(asked, [ps[0], busy], [view("de", **east)], now_s=0)[0])[0]
        == "pw"
    )


def test_the_last_pages_cost():
    full, roomy = view("a", pages_available=60), view("b", num_requests=40)
    assert decodes(Router().route(request(), [], [full, roomy], now_s=0)) == ["b", "a"]
    assert decodes(Router().route(request(num_prompt_tokens=10), [], [full, roomy], now_s=0)) == ["a", "b"]


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


def test_a_crowd_keeps_requests_where_their_prefix_is():
    holder, idle = view("holder", num_requests=1, waiting_tokens=3000), view("idle")
    few = [holder, idle]
    many = [one.replaced(num_requests=one.num_requests + 6) for one in few]
    asked = request(num_prompt_tokens=2000, cached_tokens={"holder": 1900})
    remote = DisaggregationSettings(local_prefill_tokens=0)
    for weight, first_of_few, first_of_many in [(0.0, "idle", "idle"), (1.0, "idle", "holder")]:
        router = Router(settings=RoutingSettings(disaggregation=remote, displaced_weight=weight))
        for views, first in [(few, first_of_few), (many, first_of_many)]:
            assert router.route(asked, views, [view("d")], now_s=0.0)[0].prefills[0].worker_id == first
    # Those who wait for it anyway are no crowd.
    many = [one.replaced(num_less_urgent=6) for one in many]
    assert router.route(asked, many, [view("d")], now_s=0.0)[0].prefills[0].worker_id == "idle"


BY_PRICE = DisaggregationSettings()


def way_of(how=BY_PRICE, *, transfer_s=0.05, far_s=0.0, step_s=0.0, cached=(0, 0, 0, 0), p=None, d=None, tokens=4000):
    """The way to a decode worker with one prefill worker; `cached`: on P, on D, on another P, on another D."""
    holders = dict(zip(("p", "d", "other p", "other d"), cached, strict=True))
    asked = request(num_prompt_tokens=tokens, region="near", cached_tokens=holders)
    prices = Prices(asked, RoutingSettings(disaggregation=how, region_s=far_s), None)
    link = PeerLink(transfer_s, 1e15)
    prefill = view("p", region="far", links=PeerLinks({"d": link}), **(p or {}))
    decode = view("d", decode_speed=DecodeSpeed(step_s, 0.0), **(d or {}))
    here, _ = priced = prices.price_prefills([prefill, view("other p", queue_s=1e9)])
    prices.prefills = [here]
    assert len(priced) == 2
    (at,) = prices.price_decodes([decode])
    return prices.price(at)


@pytest.mark.parametrize(
    ("facts", "is_remote"),
    [
        ({}, True),  # a long prompt leaves even an idle decode worker
        ({"tokens": 200}, False),  # computed before the handoff would be done
        ({"tokens": 200, "step_s": 0.01, "d": {"num_running": 30}}, True),  # but not in thirty others' way
        ({"cached": (0, 3900, 0, 0)}, False),
        ({"cached": (3900, 3900, 0, 0)}, False),
        ({"p": {"queue_s": 0.5}}, False),  # everybody waits there
        ({"p": {"queue_s": 0.5}, "d": {"num_running": 4}}, True),
        ({"p": {"queue_s": 0.5}, "d": {"queue_s": 2.0}}, True),  # here too
        ({"transfer_s": 3.0}, False),  # the link is slower than the model
        ({"d": {"prefill_speed": PrefillSpeed(0.01, 1e-5)}}, False),
        ({"far_s": 5.0}, False),
    ],
)
def test_the_cheaper_way(facts, is_remote):
    way = way_of(**facts)
    assert way.is_remote is is_remote
    assert way.reason == ("remote_is_cheaper" if is_remote else "local_is_cheaper")


def test_what_the_decision_is_made_of():
    speed = PrefillSpeed(0.01, 1e-4, 1e-8)
    way = way_of(
        tokens=2000,
        cached=(1600, 1000, 1700, 1900),
        transfer_s=0.07,
        step_s=0.02,
        p={"queue_s": 0.3, "prefill_speed": speed},
        d={"queue_s": 0.2, "prefill_speed": speed, "num_running": 3},
    )
    remote_prefill_s = 0.01 + 0.04 + 1e-8 * (2000**2 - 1600**2)
    local_prefill_s = 0.01 + 0.1 + 1e-8 * (2000**2 - 1000**2)
    assert way.prefill.queue_s + way.prefill.work_s == pytest.approx(0.3 + remote_prefill_s)
    # Half of what a step takes is for prompts.
    num_steps = (local_prefill_s - 0.01) / 0.01
    assert num_steps > 2
    assert way.at.first_s == pytest.approx(0.2 + local_prefill_s + num_steps * 0.02)
    assert way.at.itl_s == pytest.approx(3 * local_prefill_s)
    assert way.prefill.redone_s == pytest.approx(0.02 + 1e-8 * (1900**2 - 1700**2))
    assert way.at.redone_s == pytest.approx(0.09 + 1e-8 * (1900**2 - 1000**2))
    assert way.remote_s == pytest.approx(0.3 + remote_prefill_s + way.prefill.redone_s + 0.07 + 0.1)
    assert way.at.local_s == pytest.approx(way.at.first_s + way.at.redone_s + way.at.itl_s)


def test_what_the_decode_worker_alone_holds_is_not_computed_twice_for_a_little_time():
    # The turn after an answer of 400 tokens, which no prefill worker has seen, to a decode worker with two others.
    facts = {"tokens": 1600, "cached": (1000, 1400, 0, 0), "transfer_s": 0.002}
    assert way_of(DisaggregationSettings(redone_weight=0), **facts, d={"num_running": 2}).is_remote
    assert not way_of(**facts, d={"num_running": 2}).is_remote
    assert way_of(**facts, d={"num_running": 3}).is_remote


def test_a_fixed_threshold_has_the_last_word():
    for cached, threshold, is_remote in [(0, 0, True), (3999, 0, True), (0, 4000, False), (3000, 1000, False)]:
        for facts in ({}, {"p": {"queue_s": 100.0}}, {"d": {"num_running": 100}}):
            way = way_of(DisaggregationSettings(local_prefill_tokens=threshold), cached=(0, cached, 0, 0), **facts)
            assert way.is_remote is is_remote


def test_a_busy_decode_worker_computes_a_little_of_a_prompt_in_each_step():
    # 0.4 s of computing: 40 steps of 20 ms that may take 10 more.
    assert way_of(step_s=0.02, d={"num_running": 1}).at.first_s == pytest.approx(0.01 + 0.4 + 40 * 0.02)
    assert way_of(step_s=0.02).at.first_s == pytest.approx(0.01 + 0.4)
    # Chunks of few tokens are more steps.
    few = DisaggregationSettings(chunk_tokens=40)
    assert way_of(few, step_s=0.02, d={"num_running": 1}).at.first_s == pytest.approx(0.01 + 0.4 + 100 * 0.02)
    # Answers that are about to end do not stretch a whole prompt.
    for steps_left, num_stretched in [(0, 0), (7, 7), (1000, 40)]:
        at = way_of(step_s=0.02, d={"num_running": 1, "steps_left": steps_left}).at
        assert at.first_s == pytest.approx(0.01 + 0.4 + num_stretched * 0.02)
