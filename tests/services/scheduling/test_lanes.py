"""Queues side by side, served as one queue would be."""

import itertools
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduling.entry import QueueEntry, ServiceClass
from services.scheduling.lanes import ACCOUNTS_KEPT, LaneOrder
from services.scheduling.queue import RequestQueue

TENANTS = "abcd"
LANES = {"a": "a", "b": "b", "c": "", "d": ""}
"""Tenant → lane."""


def make_entry(key, tenant, service_class=ServiceClass.NORMAL, *, cost=1, level=0, deadline_s=math.inf):
    return QueueEntry(key, service_class, tenant, cost, float(key), deadline_s, 0.0, level)


class Lanes:
    """The lanes and their order, as a gateway uses them."""

    def __init__(self, strategy, **settings):
        self.order = LaneOrder(strategy, **settings)
        self.queues = {
            lane: RequestQueue(strategy=strategy, max_waiting=1000, **settings) for lane in set(LANES.values())
        }

    def push(self, entry):
        self.queues[LANES[entry.tenant]].push(entry)

    def pop(self):
        heads = [
            (self.order.key(head, is_late=queue.has_yielded(head.key)), lane)
            for lane, queue in self.queues.items()
            if (head := queue.peek())
        ]
        entry = self.queues[min(heads)[1]].pop()
        self.order.went(entry)
        self.order.left(entry.key)
        return entry


ENTRIES = st.lists(
    st.tuples(st.sampled_from(TENANTS), st.sampled_from(ServiceClass), st.integers(-3, 3), st.integers(1, 40)),
    max_size=30,
)


@pytest.mark.parametrize("strategy", ["fcfs", "priority", "sla"])
@given(kinds=ENTRIES, pops=st.lists(st.booleans(), max_size=60))
def test_they_go_as_they_would_in_one_queue(strategy, kinds, pops):
    lanes, one = Lanes(strategy), RequestQueue(strategy=strategy, max_waiting=1000)
    entries = [
        make_entry(key, tenant, service_class, level=level, deadline_s=key + 1000.0 * deadline)
        for key, (tenant, service_class, level, deadline) in enumerate(kinds)
    ]
    entries = [msgspec.structs.replace(entry, promised_s=2.0 * entry.key + 5.0) for entry in entries]
    for now_s, is_pop in enumerate([*pops, *[False] * len(entries), *[True] * len(entries)]):
        for queue in (one, *lanes.queues.values()):
            queue.yield_late(float(now_s))
        if is_pop and len(one):
            assert lanes.pop() is one.pop()
        elif not is_pop and entries:
            entry = entries.pop(0)
            lanes.push(entry)
            one.push(entry)
    assert not len(one)


@given(
    weights=st.fixed_dictionaries({tenant: st.sampled_from([0.5, 1.0, 2.0, 3.0]) for tenant in TENANTS}),
    costs=st.lists(st.integers(1, 50), min_size=4 * 12, max_size=4 * 12),
)
def test_tenants_of_different_lanes_get_tokens_by_their_weights(weights, costs):
    """The bound of start-time fair queueing: two tenants that both wait differ by one request of each at most."""
    lanes = Lanes("fair", tenant_weights=weights)
    num_left = dict.fromkeys(TENANTS, 12)
    for key, (tenant, cost) in enumerate(zip(itertools.cycle(TENANTS), costs, strict=False)):
        lanes.push(make_entry(key, tenant, cost=cost))
    got = dict.fromkeys(TENANTS, 0.0)
    while all(num_left.values()):
        entry = lanes.pop()
        num_left[entry.tenant] -= 1
        got[entry.tenant] += entry.cost_tokens / weights[entry.tenant]
        for one, other in itertools.combinations(TENANTS, 2):
            # One more of each: within a lane, and between lanes.
            assert abs(got[one] - got[other]) <= 2 * max(costs) * (1 / weights[one] + 1 / weights[other])


def test_one_that_went_past_others_is_not_charged():
    order = LaneOrder("fair")
    past, next_one, other = make_entry(1, "a", cost=100), make_entry(2, "a"), make_entry(3, "b")
    order.key(past)
    order.left(past.key)
    assert order.key(next_one) < order.key(other)
    order.went(next_one)
    assert order.key(other) < order.key(make_entry(4, "a"))


def test_one_that_comes_back_and_goes_again_is_charged_once():
    order = LaneOrder("fair")
    entry = make_entry(1, "a", cost=10)
    for _ in range(2):
        order.key(entry)
        order.went(entry)
    order.left(entry.key)
    assert order.key(make_entry(2, "a"))[2] == 10


def test_resumed_requests_go_before_everybody_and_the_end_of_a_queue_makes_all_equal():
    order = LaneOrder("fair")
    urgent, resumed = make_entry(1, "a", ServiceClass.CRITICAL, cost=10), make_entry(2, "b", ServiceClass.BATCH)
    assert order.key(resumed, is_resumed=True) < order.key(urgent)
    order.went(urgent)
    order.clear()
    assert order.key(make_entry(3, "a", ServiceClass.CRITICAL))[2] == 0


def test_tenants_that_owe_nothing_are_forgotten():
    order, keys = LaneOrder("fair"), itertools.count()

    def serve(tenant, cost=1):
        entry = make_entry(next(keys), tenant, cost=cost)
        order.key(entry)
        order.went(entry)
        order.left(entry.key)

    serve("debtor", cost=10**6)
    for number in range(2000):
        serve("steady")  # whose turns let the clock run
        serve(f"guest {number}")
    assert sum(len(clock.charged_to) for clock in order._clocks) < 4 * ACCOUNTS_KEPT
    assert order.key(make_entry(-1, "debtor"))[2] == 10**6
