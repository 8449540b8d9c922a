"""Which prefill workers fetch what others hold, and that it never makes a way dearer."""

import pytest
from hypothesis import given, settings

from services.scheduling.links import PeerLink, PeerLinks
from services.scheduling.prediction import PrefillSpeed
from services.scheduling.routing.pulls import ASK_S, BUSY_STEP_S
from services.scheduling.routing.router import Router
from tests.examples import examples
from tests.services.scheduling.routing.samples import cases, request, view

SPEED = PrefillSpeed(0.01, 1e-3)
FAST, SLOW = PeerLinks({"p1": PeerLink(0.001, 1e9)}), PeerLinks({"p1": PeerLink(0.001, 1e6)})


def always(holder, prefill):
    return True


def worker(worker_id, **facts):
    return view(worker_id, **({"can_pull": True, "prefill_speed": SPEED, "links": FAST} | facts))


def routed(prefills, decodes, *, can_pull=always, policy="hybrid", **facts):
    asked = request(**({"prefill": "remote", "cached_tokens": {"p0": 800, "d0": 960}} | facts))
    return Router(policy).route(asked, prefills, decodes, can_pull=can_pull, now_s=0.0)[0]


def test_an_idle_worker_fetches_what_another_prefill_worker_or_a_decode_worker_holds():
    busy = worker("p0", waiting_tokens=50_000, queue_s=50.0)
    route = routed([busy, worker("p1")], [worker("d0")])
    pull = route.pulls["p1"]
    assert (route.prefills[0].worker_id, pull.holder.worker_id, pull.num_tokens) == ("p1", "d0", 960)
    assert route.num_cached_tokens == 960
    assert pull.num_bytes == 960 * 100_000
    assert pull.time_s == pytest.approx(ASK_S + FAST["p1"].time_s(pull.num_bytes))
    assert pull.computing_s == pytest.approx(SPEED.time_s(1000) - SPEED.time_s(40, 960))
    terms = route.inputs
    assert (terms["pull_from"], terms["pull_tokens"]) == ("d0", 960)
    assert route.predicted_ttft_s == pytest.approx(pull.time_s + SPEED.time_s(40, 960), rel=0.3)
    without = routed([busy, worker("p1")], [worker("d0")], can_pull=None)
    assert not without.pulls
    assert without.inputs["price_s"] > terms["price_s"]


@pytest.mark.parametrize(
    ("holder", "prefill"),
    [
        pytest.param({"links": SLOW}, {}, id="slow link"),
        pytest.param({"can_pull": False}, {}, id="holder that does not give"),
        pytest.param({}, {"can_pull": False}, id="worker that does not ask"),
        pytest.param({}, {"prefill_speed": PrefillSpeed(0.01, 1e-7)}, id="fast prefill"),
    ],
)
def test_nothing_is_fetched_where_computing_is_quicker_or_a_worker_cannot(holder, prefill):
    route = routed([worker("p1", **prefill)], [worker("d0", **holder)], cached_tokens={"d0": 960})
    assert not route.pulls
    assert route.num_cached_tokens == 0


def test_the_last_token_is_computed_and_pages_are_whole_ones_of_the_worker_that_asks():
    route = routed([worker("p1", page_size=64)], [worker("d0")], cached_tokens={"d0": 1000})
    assert route.pulls["p1"].num_tokens == 960


def test_a_busy_holder_is_waited_for():
    idle = routed([worker("p1")], [worker("d0")], cached_tokens={"d0": 960}).pulls["p1"]
    busy = routed([worker("p1")], [worker("d0", waiting_tokens=5)], cached_tokens={"d0": 960}).pulls["p1"]
    assert busy.time_s - idle.time_s == pytest.approx(BUSY_STEP_S)


def test_pairs_that_may_not_fetch_do_not_and_the_next_holder_is_taken():
    def not_from_decode(holder, prefill):
        return holder.worker_id != "d0"

    busy = worker("p0", waiting_tokens=50_000, queue_s=50.0)
    route = routed([busy, worker("p1")], [worker("d0")], can_pull=not_from_decode)
    assert route.pulls["p1"].holder.worker_id == "p0"


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded"])
def test_policies_that_do_not_price_fetch_too(policy):
    route = routed([worker("p1")], [worker("d0")], policy=policy, cached_tokens={"d0": 960})
    assert route.pulls["p1"].num_tokens == 960


@settings(max_examples=examples(200), deadline=None)
@given(cases())
def test_fetching_never_makes_the_best_way_dearer_and_is_told_as_it_is_priced(case):
    asked, ps, ds = case
    ps, ds = ([one.replaced(can_pull=True) for one in role] for role in (ps, ds))
    with_pulls = Router().route(asked, ps, ds, can_pull=always, now_s=0.0)
    without = Router().route(asked, ps, ds, now_s=0.0)
    if not without:
        return
    priced, usual = with_pulls[0].inputs, without[0].inputs
    assert priced["price_s"] <= usual["price_s"] * (1 + 1e-9) + 1e-9
    for worker_id, pull in with_pulls[0].pulls.items():
        assert pull.holder.worker_id != worker_id
        assert pull.num_tokens <= asked.cached_tokens[pull.holder.worker_id]
        assert asked.cached_tokens.get(worker_id, 0) < pull.num_tokens < asked.num_prompt_tokens
