"""The order of workers under each policy."""

from collections import Counter

import pytest

from services.scheduling.prediction import PrefillSpeed
from services.scheduling.routing.policies import POLICY_NAMES
from services.scheduling.routing.router import Router
from tests.services.scheduling.routing.samples import (
    decodes,
    prefills,
    request,
    view,
)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_tenant_with_workers_of_its_own_goes_there_first(policy):
    own, shared = view("b", tenants=frozenset({"t"}), num_requests=4, num_running=4), view("a")
    for _ in range(4):
        assert decodes(Router(policy).route(request(tenant="t"), [], [shared, own], now_s=0)) == ["b", "a"]
        assert decodes(Router(policy).route(request(tenant="u"), [], [shared, own], now_s=0)) == ["a"]
        assert decodes(Router(policy).route(request(), [], [shared, own], now_s=0)) == ["a"]


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_request_goes_to_the_workers_of_its_pool_first(policy):
    busy, others = view("b", pool="long", num_requests=4, num_running=4), [view("a"), view("c", pool="other")]
    for _ in range(4):
        assert decodes(Router(policy).route(request(pool="long"), [], [*others, busy], now_s=0))[0] == "b"
        assert decodes(Router(policy).route(request(pool=""), [], [*others, busy], now_s=0))[0] == "a"
        assert set(decodes(Router(policy).route(request(pool="none"), [], [*others, busy], now_s=0))) == {"a", "b", "c"}


def test_a_preferred_pool_that_is_much_busier_than_others_is_left():
    full = view("b", pool="long", waiting_tokens=100_000, prefill_speed=PrefillSpeed(0.0, 1e-4))
    helping = view("a", prefill_speed=PrefillSpeed(0.0, 1e-4))
    route = Router().route(request(pool="long"), [], [full, helping], now_s=0)[0]
    assert (route.decode.worker_id, route.inputs["decode_place_s"], route.inputs["pool"]) == ("a", 1.0, "long")


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
    busier = [w.replaced(num_requests=8) if w.worker_id == home else w for w in workers]
    routes = Router("sticky").route(asked, [], busier, now_s=0)
    assert routes[0].decode.worker_id != home
    assert decodes(routes)[-1] == home


def test_without_a_key_sticky_is_least_loaded():
    workers = [view("a", num_requests=5), view("b", num_requests=1), view("c", num_requests=3)]
    assert decodes(Router("sticky").route(request(), [], workers, now_s=0)) == ["b", "c", "a"]
