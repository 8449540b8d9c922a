"""The request queue against a naive model of it, for every strategy, and what each strategy promises."""

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.scheduling import queue as queue_module
from services.scheduling.entry import MAX_PASSED_S, PASSED_TIMES, UNSAID_S, QueueEntry, ServiceClass
from services.scheduling.queue import MAX_LOOSE, MAX_RUNS, SHELLS_KEPT, STRATEGIES, QueueFull, RequestQueue
from tests.examples import examples

AGEING_S = 4.0
WEIGHTS = {"heavy": 2.0, "light": 0.5}
MAX_WAITING = 6


def entry(key, service_class=ServiceClass.NORMAL, **fields):
    given_fields = {"tenant": "", "cost_tokens": 1, "arrived_s": 0.0} | fields
    return QueueEntry(key, service_class, **given_fields)


def drained(queue):
    return [queue.pop().key for _ in range(len(queue))]


class NaiveQueue:
    """The queue's promises in the fewest words: everything is looked for in one list."""

    def __init__(self, strategy):
        self.strategy = strategy
        self.waiting = []  # (is not resumed, class, is late, rank, number, entry), in order of coming
        self.num_pushed = 0
        self.clocks = Counter()
        self.charged_to, self.last_start = {}, {}

    def push(self, new, is_resumed):
        pushed_out = None
        if not is_resumed and len(self.waiting) >= MAX_WAITING:
            lower = [item for item in self.waiting if item[0] and item[1] > new.service_class]
            if not lower:
                raise QueueFull
            pushed_out = max(lower, key=lambda item: (item[1], item[2], item[4]))
            self.leave(pushed_out)
        self.num_pushed += 1
        rank = new.arrived_s if is_resumed else self.rank(new)
        service_class = 0 if is_resumed else new.service_class
        self.waiting.append((not is_resumed, service_class, False, rank, self.num_pushed, new))
        return pushed_out and pushed_out[5]

    def rank(self, new):
        place_s = new.arrived_s + min(PASSED_TIMES * new.prompt_s, MAX_PASSED_S)
        if self.strategy == "fcfs":
            return place_s
        if self.strategy == "priority":
            return place_s - AGEING_S * new.level
        if self.strategy == "sla":
            due_s = new.deadline_s - new.service_s if new.due_s is None else new.due_s
            return place_s + UNSAID_S if math.isinf(due_s) else due_s
        who = new.service_class, new.tenant
        start = max(self.clocks[new.service_class], self.charged_to.get(who, 0.0))
        self.charged_to[who] = start + share(new)
        self.last_start[who] = max(start, self.last_start.get(who, 0.0))
        return self.last_start[who]

    def pop(self):
        item = min(self.waiting, key=lambda item: item[:5])
        self.waiting.remove(item)
        if item[0]:
            self.clocks[item[1]] = item[3]
            self.start_anew(item[1])
        return item[5]

    def leave(self, item):
        self.waiting.remove(item)
        left = item[5]
        if item[0] and self.strategy == "fair":
            self.charged_to[left.service_class, left.tenant] -= share(left)
        self.start_anew(item[1])

    def start_anew(self, service_class):
        if not any(item[0] and item[1] == service_class for item in self.waiting):
            self.clocks[service_class] = 0.0
            for book in (self.charged_to, self.last_start):
                for who in [who for who in book if who[0] == service_class]:
                    del book[who]

    def expire(self, now_s):
        late = [item for item in self.waiting if item[0] and latest_start_s(item[5]) < now_s]
        for item in late:
            self.leave(item)
        return [item[5] for item in late]

    def yield_late(self, now_s):
        yielded = []
        for position, item in enumerate(self.waiting):
            if self.strategy != "fair" and item[0] and not item[2] and item[5].promised_s < now_s:
                self.waiting[position] = (*item[:2], True, *item[3:])
                yielded.append(item[5])
        return yielded

    def remove(self, key):
        for item in self.waiting:
            if item[5].key == key:
                self.leave(item)
                return item[5]
        return None

    def ahead(self, service_class):
        """Late ones of its class are behind it, and those of higher classes ahead."""
        return [item[5] for item in self.waiting if not item[0] or item[1:3] < (service_class, True)]


def latest_start_s(some):
    """Batch work is turned away for no prediction, so not for that of how long it takes either."""
    return some.deadline_s - (0.0 if some.service_class == ServiceClass.BATCH else some.service_s)


def share(some):
    return some.cost_tokens / WEIGHTS.get(some.tenant, 1.0)


class QueueMachine(RuleBasedStateMachine):
    """Few keys, classes, levels and times, so that everything meets everything."""

    @initialize(strategy=st.sampled_from(STRATEGIES), max_loose=st.sampled_from([1, MAX_LOOSE]))
    def begin(self, strategy, max_loose):
        queue_module.MAX_LOOSE = max_loose
        self.naive = NaiveQueue(strategy)
        self.queue = RequestQueue(strategy=strategy, max_waiting=MAX_WAITING, ageing_s=AGEING_S, tenant_weights=WEIGHTS)

    @rule(
        new=st.builds(
            QueueEntry,
            key=st.integers(0, 15),
            service_class=st.sampled_from(ServiceClass),
            tenant=st.sampled_from(["heavy", "light", "other"]),
            cost_tokens=st.integers(0, 8),
            arrived_s=st.integers(0, 10).map(float),
            deadline_s=st.sampled_from([5.0, 10.0, 15.0, math.inf]),
            service_s=st.integers(0, 3).map(float),
            level=st.integers(-1, 2),
            prompt_s=st.sampled_from([0.0, 0.25, 0.5, 8.0]),
            due_s=st.sampled_from([None, 4.0, 8.0, math.inf]),
            promised_s=st.sampled_from([3.0, 9.0, math.inf]),
        ),
        is_resumed=st.integers(0, 9).map(lambda number: number == 0),
    )
    def push(self, new, is_resumed):
        if new.key in self.queue:
            with pytest.raises(ValueError, match="waits already"):
                self.queue.push(new, is_resumed=is_resumed)
            return
        try:
            expected = self.naive.push(new, is_resumed)
        except QueueFull:
            with pytest.raises(QueueFull):
                self.queue.push(new, is_resumed=is_resumed)
        else:
            assert self.queue.push(new, is_resumed=is_resumed) is expected

    @precondition(lambda self: self.naive.waiting)
    @rule(again=st.booleans())
    def pop(self, again):
        expected = self.naive.pop()
        assert self.queue.peek() is expected
        assert self.queue.pop() is expected
        if again:  # the very same entry goes back, as a request does that no worker took after all
            self.push(expected, is_resumed=False)

    @rule(key=st.integers(0, 15))
    def remove(self, key):
        assert self.queue.remove(key) is self.naive.remove(key)

    @rule(now_s=st.integers(0, 16).map(float))
    def expire(self, now_s):
        expired = self.queue.expire(now_s)
        latest_starts = [latest_start_s(late) for late in expired]
        assert latest_starts == sorted(latest_starts)
        assert {id(late) for late in expired} == {id(late) for late in self.naive.expire(now_s)}

    @rule(now_s=st.integers(0, 16).map(float))
    def yield_late(self, now_s):
        yielded = self.queue.yield_late(now_s)
        assert [one.promised_s for one in yielded] == sorted(one.promised_s for one in yielded)
        assert {id(one) for one in yielded} == {id(one) for one in self.naive.yield_late(now_s)}

    @invariant()
    def counts_are_right(self):
        waiting = [item[5] for item in self.naive.waiting]
        assert all(self.queue.has_yielded(item[5].key) == item[2] for item in self.naive.waiting)
        assert len(self.queue) == len(waiting)
        counts = Counter(one.service_class for one in waiting)
        assert self.queue.num_waiting_by_class == {one: counts[one] for one in ServiceClass}
        for one in ServiceClass:
            ahead = self.naive.ahead(one)
            assert self.queue.waiting_tokens(one) == sum(other.cost_tokens for other in ahead)
            assert self.queue.num_ahead(one) == len(ahead)
            assert self.queue.waiting_prompts_s(one) == pytest.approx(sum(other.prompt_s for other in ahead))

    def teardown(self):
        queue_module.MAX_LOOSE = MAX_LOOSE
        if hasattr(self, "queue"):
            while self.naive.waiting:
                assert self.queue.pop() is self.naive.pop()
            assert self.queue.peek() is None
            with pytest.raises(IndexError):
                self.queue.pop()


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=examples(120), stateful_step_count=50, deadline=None)


@pytest.mark.parametrize("strategy", ["fcfs", "priority", "sla"])
def test_a_long_mixed_run_agrees_with_sorting(strategy):
    """Thousands of entries, many leaving early: shells are cleared in between, and nothing is lost or doubled."""
    rng = random.Random(strategy)
    queue, naive = RequestQueue(strategy=strategy, max_waiting=10**6, ageing_s=AGEING_S), NaiveQueue(strategy)
    waiting, now_s = {}, 0.0
    for number in range(2500):
        now_s += rng.random()
        new = entry(
            number,
            ServiceClass(rng.randrange(5)),
            arrived_s=now_s - rng.choice([0.0, 5.0]),
            deadline_s=now_s + rng.uniform(1, 500),
            level=rng.randrange(2 * MAX_RUNS),
        )
        queue.push(new)
        waiting[number] = new
        if rng.random() < 0.7:
            leaving = rng.randrange(number + 1)
            assert queue.remove(leaving) is waiting.pop(leaving, None)
    in_order = sorted(waiting.values(), key=lambda one: (one.service_class, naive.rank(one), one.key))
    assert drained(queue) == [one.key for one in in_order]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_at_the_ends_of_all_numbers_keep_their_order(strategy):
    possible = [-math.inf, -1e308, -0.3, -0.0, 0.0, 1e-300, 0.1, 1e308]
    queue = RequestQueue(strategy=strategy, max_waiting=100)
    fields = [{"deadline_s": time_s} if strategy == "sla" else {"arrived_s": time_s} for time_s in possible]
    for position in random.Random(0).sample(range(len(fields)), len(fields)):
        queue.push(entry(position, **fields[position]))
        queue.push(entry((position, "again"), **fields[position]))
    turns = [key[0] if isinstance(key, tuple) else key for key in drained(queue)]
    same = {3: 4}  # -0.0 and 0.0 are equal, and keep the order in which they came
    if strategy != "fair":
        assert [same.get(one, one) for one in turns] == [same.get(one, one) for one in sorted(turns)]
    assert len(turns) == 2 * len(possible)


def test_one_that_leaves_and_comes_again_stands_behind_its_equals():
    for num_turns in (0, 1):
        queue = RequestQueue(strategy="sla", max_waiting=10)
        entries = [entry(number, deadline_s=5.0) for number in range(4)]
        for one in entries:
            queue.push(one)
        for _ in range(num_turns):
            queue.pop()
        queue.push(queue.remove(2))
        assert drained(queue) == [0, 1, 3, 2][num_turns:]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_that_is_pushed_back_goes_before_its_equals(strategy):
    """Also where it was the last one."""
    queue = RequestQueue(strategy=strategy, max_waiting=10**4)
    queue.push(entry("first"))
    first = queue.pop()
    queue.push(entry("equal"))
    queue.push_back(first)
    assert queue.pop() is first
    for number in range(2 * MAX_RUNS):
        queue.push(entry(number, tenant=str(number)))
    queue.push_back(first)
    assert queue.pop() is first
    queue.push_back(first)
    assert queue.peek() is first
    assert drained(queue) == ["first", "equal", *range(2 * MAX_RUNS)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_lower_class_never_goes_before_a_higher_one(strategy):
    queue = RequestQueue(strategy=strategy, max_waiting=100)
    rng = random.Random(0)
    for number in range(100):
        queue.push(
            entry(
                number,
                ServiceClass(rng.randrange(5)),
                tenant=str(rng.randrange(3)),
                cost_tokens=rng.randrange(1000),
                arrived_s=float(rng.randrange(1000)),
                deadline_s=rng.uniform(0, 1e9),
                level=rng.randrange(1000),
            )
        )
    classes = [queue.pop().service_class for _ in range(100)]
    assert classes == sorted(classes)


def test_with_ageing_nobody_starves():
    """One of level 0 against a stream of level 3 that never ends and takes every turn: it waits 3 levels' worth."""
    queue = RequestQueue(strategy="priority", max_waiting=1000, ageing_s=10.0)
    queue.push(entry("patient", arrived_s=0.0, level=0))
    for second in range(1000):
        queue.push(entry(second, arrived_s=float(second), level=3))
        if queue.pop().key == "patient":
            break
    assert second == 30


def test_least_slack_goes_first():
    queue = RequestQueue(strategy="sla", max_waiting=10)
    queue.push(entry("late but long", deadline_s=100.0, service_s=90.0))
    queue.push(entry("soon", deadline_s=20.0))
    queue.push(entry("soon but short", deadline_s=20.0, service_s=1.0))
    queue.push(entry("first token soon", due_s=15.0, deadline_s=600.0))
    assert drained(queue) == ["late but long", "first token soon", "soon but short", "soon"]


def test_who_named_no_time_keeps_the_order_of_arrival_and_has_a_turn_among_those_who_did():
    """The server's own deadline is the same for all: less the service time it would put the longest first."""
    queue = RequestQueue(strategy="sla", max_waiting=10)
    for second, service_s in enumerate([1.0, 30.0, 5.0, 60.0]):
        queue.push(
            entry(second, arrived_s=second, deadline_s=600.0 + second, service_s=service_s, due_s=math.inf),
        )
    queue.push(entry("at once", arrived_s=4.0, deadline_s=10.0, service_s=8.0))
    queue.push(entry("at leisure", arrived_s=4.0, deadline_s=100.0, service_s=8.0))
    assert drained(queue) == ["at once", 0, 1, 2, 3, "at leisure"]


@pytest.mark.parametrize("strategy", ["fcfs", "priority", "sla"])
@given(
    prompts=st.lists(st.tuples(st.floats(0, 3), st.floats(0, 20)), min_size=2, max_size=40),
    service_s=st.floats(0.05, 3),
)
def test_a_prompt_is_passed_by_shorter_ones_only_and_by_none_that_came_much_later(strategy, prompts, service_s):
    """One place serves all: a prompt that goes before one that came earlier is shorter, and came soon after it."""
    queue = RequestQueue(strategy=strategy, max_waiting=1000)
    now_s, free_s, arrivals = 0.0, 0.0, []
    for key, (gap_s, prompt_s) in enumerate(prompts):
        now_s += gap_s
        arrivals.append(entry(key, arrived_s=now_s, prompt_s=prompt_s))
    coming, waiting = list(arrivals), {}
    while coming or waiting:
        while coming and (not waiting or coming[0].arrived_s <= free_s):
            one = coming.pop(0)
            free_s = max(free_s, one.arrived_s) if not waiting else free_s
            waiting[one.key] = one
            queue.push(one)
        gone = waiting.pop(queue.pop().key)
        for passed in waiting.values():
            if passed.arrived_s < gone.arrived_s:
                lead_s = gone.arrived_s - passed.arrived_s
                assert gone.prompt_s < passed.prompt_s
                assert lead_s <= min(MAX_PASSED_S, PASSED_TIMES * (passed.prompt_s - gone.prompt_s)) + 1e-6
        free_s += service_s


def test_a_short_prompt_does_not_wait_behind_the_long_ones_that_came_just_before_it():
    queue = RequestQueue(max_waiting=1000)
    for number in range(20):
        queue.push(entry(("long", number), arrived_s=number / 10, prompt_s=4.0))
    queue.push(entry("short", arrived_s=2.0, prompt_s=0.05))
    assert queue.pop().key == "short"
    queue.push(entry("much later", arrived_s=MAX_PASSED_S + 0.1, prompt_s=0.05))
    assert queue.pop().key == ("long", 0)


@pytest.mark.parametrize("strategy", ["fcfs", "priority", "sla"])
def test_whose_turn_comes_too_late_goes_behind_those_who_can_be_in_time_and_is_not_ahead_of_new_ones(strategy):
    queue = RequestQueue(strategy=strategy, max_waiting=100)
    for number in range(3):
        queue.push(entry(("late", number), arrived_s=number / 10, promised_s=4.0))
    queue.push(entry("young", arrived_s=5.0, promised_s=9.0))
    assert [one.key for one in queue.yield_late(5.0)] == [("late", number) for number in range(3)]
    assert queue.peek().key == "young"
    assert queue.waiting_tokens(ServiceClass.NORMAL) == queue.num_ahead(ServiceClass.NORMAL) == 1
    assert queue.waiting_tokens(ServiceClass.BATCH) == 4
    queue.push(entry("later", arrived_s=100.0, promised_s=math.inf))
    assert queue.yield_late(8.0) == []
    assert queue.remove(("late", 1)) is not None
    assert drained(queue) == ["young", "later", ("late", 0), ("late", 2)]


def test_who_comes_back_keeps_its_place_however_late_it_is():
    queue = RequestQueue(max_waiting=100)
    queue.push(entry("late", promised_s=4.0))
    queue.push(entry("young", arrived_s=3.0))
    queue.push_back(queue.pop())
    queue.yield_late(5.0)
    assert drained(queue) == ["late", "young"]


def test_a_long_prompt_has_its_turn_however_many_short_ones_come():
    """Short ones fill every place for ever: it is passed by those that came within MAX_PASSED_S, and by nobody else."""
    queue = RequestQueue(max_waiting=10_000)
    queue.push(entry("long", prompt_s=1000.0))
    for number in range(1, 1000):
        queue.push(entry(number, arrived_s=number / 10, prompt_s=0.1))
        if queue.pop().key == "long":
            break
    assert number / 10 == pytest.approx(MAX_PASSED_S, abs=0.5)


@given(
    st.lists(st.integers(1, 100), min_size=30, max_size=60),
    st.lists(st.integers(1, 100), min_size=30, max_size=60),
    st.lists(st.integers(1, 100), min_size=30, max_size=60),
)
def test_tenants_that_always_wait_get_their_shares(heavy, light, other):
    """In every stretch of turns two tenants' work over weight differs by no more than one entry of each."""
    queue = RequestQueue(strategy="fair", max_waiting=1000, tenant_weights=WEIGHTS)
    costs = {"heavy": heavy, "light": light, "other": other}
    for tenant, own in costs.items():
        for number, cost in enumerate(own):
            queue.push(entry((tenant, number), tenant=tenant, cost_tokens=cost))
    left = {tenant: len(own) for tenant, own in costs.items()}
    work = [dict.fromkeys(costs, 0.0)]
    while all(left.values()):
        served = queue.pop()
        left[served.tenant] -= 1
        work.append(work[-1] | {served.tenant: work[-1][served.tenant] + share(served)})
    largest = {tenant: max(own) / WEIGHTS.get(tenant, 1.0) for tenant, own in costs.items()}
    for one, another in [("heavy", "light"), ("heavy", "other"), ("light", "other")]:
        lead = [now[one] - now[another] for now in work[:-1]]
        assert max(lead) - min(lead) <= largest[one] + largest[another] + 1e-6


def test_a_tenant_that_waits_alone_owes_nothing_afterwards():
    """Using what nobody else wanted is not held against it when another one comes."""
    queue = RequestQueue(strategy="fair", max_waiting=100)
    for number in range(50):
        queue.push(entry(("busy", number), tenant="busy", cost_tokens=10))
    for _ in range(40):
        queue.pop()
    for number in range(10):
        queue.push(entry(("new", number), tenant="new", cost_tokens=10))
    turns = [tenant for tenant, _ in drained(queue)]
    assert abs(turns[:10].count("new") - 5) <= 1


def test_who_leaves_early_is_not_charged():
    queue = RequestQueue(strategy="fair", max_waiting=100)
    queue.push(entry("stays", tenant="other"))
    queue.push(entry("leaves", tenant="tenant", cost_tokens=1000))
    queue.push(entry("also stays", tenant="other"))
    queue.remove("leaves")
    queue.push(entry("comes back", tenant="tenant"))
    assert drained(queue) == ["stays", "comes back", "also stays"]


def test_tenants_that_are_gone_are_forgotten():
    queue = RequestQueue(strategy="fair", max_waiting=10)
    queue.push(entry("before", tenant="regular"))
    for number in range(10_000):
        queue.push(entry(("regular", number), tenant="regular"))
        queue.push(entry(("passing", number), tenant=f"t{number}"))
        queue.pop()
        queue.pop()
    lane = queue._classes[ServiceClass.NORMAL]
    assert lane.num_waiting == 1
    assert len(lane.accounts) <= 2 * SHELLS_KEPT


def test_a_full_queue_pushes_out_the_youngest_of_the_lowest_class():
    queue = RequestQueue(max_waiting=4)
    for key, service_class in [("n", "normal"), ("b1", "batch"), ("b2", "batch"), ("l", "low")]:
        assert queue.push(entry(key, ServiceClass.from_name(service_class))) is None
    out = [queue.push(entry(f"i{number}", ServiceClass.INTERACTIVE)).key for number in range(4)]
    assert out == ["b2", "b1", "l", "n"]
    with pytest.raises(QueueFull, match="4 requests"):
        queue.push(entry("i4", ServiceClass.INTERACTIVE))
    assert queue.push(entry("c", ServiceClass.CRITICAL)).key == "i3"


def test_who_was_refused_has_changed_nothing():
    queue = RequestQueue(strategy="fair", max_waiting=2)
    queue.push(entry(0, tenant="a"))
    queue.push(entry(1, tenant="b"))
    with pytest.raises(QueueFull):
        queue.push(entry(2, tenant="b", cost_tokens=10**6))
    assert drained(queue) == [0, 1]
    queue.push(entry(3, tenant="a"))
    queue.push(entry(4, tenant="b"))
    assert queue.waiting_tokens(ServiceClass.NORMAL) == 2


def test_resumed_requests_come_in_beyond_the_bound_and_go_first():
    queue = RequestQueue(max_waiting=1)
    queue.push(entry("waits", ServiceClass.CRITICAL))
    queue.push(entry("resumed late", ServiceClass.BATCH, arrived_s=2.0, deadline_s=3.0), is_resumed=True)
    queue.push(entry("resumed", ServiceClass.BATCH, arrived_s=1.0), is_resumed=True)
    assert queue.expire(100.0) == []
    assert queue.waiting_tokens(ServiceClass.CRITICAL) == 3
    assert drained(queue) == ["resumed", "resumed late", "waits"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_grows_but_by_those_who_wait(strategy):
    """A hundred wait at any time; a hundred thousand came, and left in every way."""
    queue, rng = RequestQueue(strategy=strategy, max_waiting=100), random.Random(1)
    for number in range(100_000):
        way = rng.random()
        new = entry(
            number,
            ServiceClass(rng.randrange(1, 5)),
            tenant=f"t{rng.randrange(1000)}",
            arrived_s=float(number),
            deadline_s=number + rng.uniform(1, 10_000),
            level=rng.randrange(1000),
        )
        try:
            queue.push(new)
        except QueueFull:
            queue.pop()
        if way < 0.3:
            queue.remove(rng.randrange(max(0, number - 200), number + 1))
        elif way < 0.31:
            queue.expire(float(number))
    held = len(queue._latest_starts) + sum(
        len(lane.heap)
        + len(lane.youngest)
        + sum(map(len, lane.runs.values()))
        + len(lane.run)
        + len(lane.strays)
        + sum(len(item[4]) for item in lane.heap if item[4])
        for lane in queue._lanes
    )
    assert held < 3000
    assert len(queue) <= 100


def test_equal_ranks_keep_their_order_in_any_number():
    queue = RequestQueue(strategy="sla", max_waiting=10**5)
    for number in range(20_000):
        queue.push(entry(number))
    assert drained(queue) == list(range(20_000))


@pytest.mark.parametrize("field", ["arrived_s", "deadline_s", "service_s"])
def test_times_that_are_not_numbers_are_refused(field):
    queue = RequestQueue(max_waiting=1)
    queue.push(entry("batch", ServiceClass.BATCH))
    with pytest.raises(ValueError, match="not numbers"):
        queue.push(entry("bad", **{field: math.nan}))
    assert drained(queue) == ["batch"]


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="no strategy 'lifo'"):
        RequestQueue(strategy="lifo", max_waiting=1)
    with pytest.raises(ValueError, match="weights"):
        RequestQueue(max_waiting=1, tenant_weights={"a": 0.0})
    for ageing_s in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="ageing"):
            RequestQueue(max_waiting=1, ageing_s=ageing_s)
    with pytest.raises(ValueError, match="no class 'urgent'"):
        ServiceClass.from_name("urgent")


@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_that_is_pushed_back_has_the_turn_that_it_had(strategy, is_resumed):
    queue = RequestQueue(strategy=strategy, max_waiting=3)
    for number in range(3):
        queue.push(entry(number, arrived_s=float(number), deadline_s=9.0 + number), is_resumed=is_resumed)
    first = queue.pop()
    if not is_resumed:
        queue.push(entry("meanwhile", arrived_s=3.0, deadline_s=20.0))
    queue.push_back(first, is_resumed=is_resumed)
    assert len(queue) == 4 - is_resumed
    assert queue.waiting_tokens(ServiceClass.NORMAL) == len(queue)
    assert queue.peek() is first
    assert queue.pop() is first
    assert queue.pop().key == 1


def test_one_that_is_pushed_back_can_expire_be_pushed_out_and_leave():
    queue = RequestQueue(max_waiting=2)
    queue.push(entry("a", ServiceClass.BATCH, deadline_s=5.0))
    queue.push_back(queue.pop())
    assert [late.key for late in queue.expire(6.0)] == ["a"]
    queue.push(entry("b", ServiceClass.BATCH))
    queue.push_back(queue.pop())
    queue.push(entry("c", ServiceClass.BATCH))
    assert queue.push(entry("d", ServiceClass.NORMAL)).key == "c"
    assert queue.push(entry("e", ServiceClass.NORMAL)).key == "b"
    queue.push_back(queue.pop())
    assert queue.remove("d").key == "d"
    assert drained(queue) == ["e"]
