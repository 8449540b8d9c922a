"""The queue of requests that wait for room."""

import asyncio
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.requests.queue import GATHER_S, AdmissionQueue, Lane
from services.runtime.clock import SYSTEM_CLOCK
from services.runtime.errors import DeadlineExceeded, Overloaded, WorkerUnavailable
from services.scheduling.entry import QueueEntry, ServiceClass
from services.scheduling.lanes import LaneOrder
from services.scheduling.overload import OverloadPolicy
from services.scheduling.pools import Audience
from services.scheduling.queue import RequestQueue
from tests.waiting import HANG_LIMIT_S


class Room:
    """Room for `num_places` requests; each request that is let go takes a place."""

    def __init__(self, num_places=0):
        self.num_places = num_places

    def take(self, kept):
        if not self.num_places:
            return False
        self.num_places -= 1
        return True


class NamingLane(Lane):
    """A lane whose refusals name what they refuse."""

    def when_full(self, item):
        return Overloaded(f"no room for {item.key}", retry_after_s=2.0)


def make_queue(max_waiting=10, **settings):
    return AdmissionQueue(
        lambda audience: NamingLane(RequestQueue(max_waiting=max_waiting, **settings)), order=LaneOrder(**settings)
    )


def enter(queue, item, room, **kinds):
    return queue.enter(item, room.take, awaited=frozenset, lane=queue.lane(Audience()), **kinds)


def entry(key, service_class=ServiceClass.NORMAL, *, arrived_s=0.0, deadline_s=math.inf, service_s=0.0):
    return QueueEntry(key, service_class, "", 10, arrived_s, deadline_s, service_s)


async def wait(queue, room, item, order, *, is_resumed=False, timeout_s=HANG_LIMIT_S):
    with enter(queue, item, room, is_resumed=is_resumed) as place:
        if await place.wait_for_turn(timeout_s):
            order.append(item.key)


async def started(*coroutines):
    """Tasks, in order, each of which has run until its first wait."""
    tasks = []
    for coroutine in coroutines:
        tasks.append(asyncio.create_task(coroutine))
        await asyncio.sleep(0)
    return tasks


async def test_all_go_in_order_as_room_comes():
    queue, room, order = make_queue(), Room(), []
    tasks = await started(*(wait(queue, room, entry(key, arrived_s=n), order) for n, key in enumerate("abcde")))
    assert len(queue) == 5
    room.num_places = 2
    queue.poke()
    await asyncio.gather(*tasks[:2])
    assert order == ["a", "b"]
    assert len(queue) == 3
    room.num_places = 3
    queue.poke()
    await asyncio.gather(*tasks)
    assert order == list("abcde")


async def test_many_go_in_one_look():
    queue, room, order = make_queue(1000), Room(), []
    tasks = await started(*(wait(queue, room, entry(n, arrived_s=n), order) for n in range(500)))
    room.num_places = 500
    queue.poke()
    await asyncio.gather(*tasks)
    assert order == list(range(500))


async def test_urgent_requests_go_before_those_that_came_first():
    queue, room, order = make_queue(), Room(), []
    kinds = [ServiceClass.BATCH, ServiceClass.LOW, ServiceClass.CRITICAL, ServiceClass.INTERACTIVE]
    tasks = await started(*(wait(queue, room, entry(kind, kind, arrived_s=n), order) for n, kind in enumerate(kinds)))
    assert queue.is_behind_others(entry("new", ServiceClass.INTERACTIVE))
    room.num_places = 4
    queue.poke()
    await asyncio.gather(*tasks)
    assert order == sorted(kinds)


async def test_only_its_own_class_and_higher_ones_are_before_it():
    queue, room, order = make_queue(), Room(), []
    (task,) = await started(wait(queue, room, entry("b", ServiceClass.BATCH), order))
    assert not queue.is_behind_others(entry("i", ServiceClass.INTERACTIVE))
    assert queue.is_behind_others(entry("c", ServiceClass.BATCH))
    room.num_places = 1
    queue.poke()
    await task


async def test_a_full_queue_refuses_or_pushes_out_a_lower_class():
    queue, room, order = make_queue(1), Room(), []
    (batch,) = await started(wait(queue, room, entry("b", ServiceClass.BATCH), order))
    with pytest.raises(Overloaded) as error:
        enter(queue, entry("c", ServiceClass.BATCH), room)
    assert error.value.retry_after_s == 2.0
    (urgent,) = await started(wait(queue, room, entry("i", ServiceClass.INTERACTIVE), order))
    with pytest.raises(Overloaded, match="no room for b"):
        await batch
    (resumed,) = await started(wait(queue, room, entry("r"), order, is_resumed=True))
    assert len(queue) == 2
    room.num_places = 2
    queue.poke()
    await asyncio.gather(urgent, resumed)
    assert order == ["r", "i"]


async def test_cancelled_wait_gives_up_its_place():
    queue, room, order = make_queue(), Room(), []
    first, second = await started(*(wait(queue, room, entry(key), order) for key in "ab"))
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert len(queue) == 1
    room.num_places = 1
    queue.poke()
    await second
    assert order == ["b"]


async def test_one_that_is_cancelled_as_it_may_go_takes_nothing_from_the_next():
    queue, room, order = make_queue(), Room(1), []
    first, second = await started(*(wait(queue, room, entry(key), order) for key in "ab"))
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await second
    assert order == ["b"]


async def test_wait_ends_in_time_and_looks_again_without_a_sign():
    queue, room, order = make_queue(), Room(), []
    await wait(queue, room, entry("late"), order, timeout_s=0.05)
    assert order == []
    assert len(queue) == 0
    (task,) = await started(wait(queue, room, entry("a"), order))
    room.num_places = 1  # Nothing notifies the queue.
    await task
    assert order == ["a"]


async def test_whoever_no_worker_took_waits_again_before_the_others():
    queue, room, order = make_queue(), Room(1), []

    async def refused_once():
        with enter(queue, entry("a", arrived_s=1.0), room) as place:
            assert await place.wait_for_turn(10)
            place.come_back()
            assert len(queue) == 2
            room.num_places = 2
            assert await place.wait_for_turn(10)
            order.append("a")

    tasks = await started(refused_once(), wait(queue, room, entry("b", arrived_s=2.0), order))
    await asyncio.gather(*tasks)
    assert order == ["a", "b"]


async def test_a_deadline_that_cannot_be_met_ends_the_wait():
    queue, room, order = make_queue(), Room(), []
    now_s = SYSTEM_CLOCK.monotonic()
    hopeless = entry("a", deadline_s=now_s + 60, service_s=61)
    with pytest.raises(DeadlineExceeded):
        await wait(queue, room, hopeless, order)
    assert len(queue) == 0


async def test_a_closed_queue_ends_every_wait():
    queue, room, order = make_queue(), Room(), []
    tasks = await started(*(wait(queue, room, entry(key), order) for key in "ab"))
    queue.close(WorkerUnavailable("over"))
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, WorkerUnavailable)
    with pytest.raises(WorkerUnavailable):
        await wait(queue, room, entry("c"), order)


async def test_nobody_overtakes_one_that_was_refused_while_it_asks_again():
    queue, room, order = make_queue(), Room(5), []
    asking, answer = asyncio.Event(), asyncio.Event()

    async def asks_again():
        with enter(queue, entry("a", arrived_s=1.0), room, was_refused=True) as place:
            assert await place.wait_for_turn(10)
            assert len(queue) == 2
            asking.set()
            await answer.wait()
            order.append("a")

    tasks = await started(asks_again(), wait(queue, room, entry("b", arrived_s=2.0), order))
    await asking.wait()
    queue.poke()
    await asyncio.sleep(0.02)
    assert order == []
    answer.set()
    await asyncio.gather(*tasks)
    assert order == ["a", "b"]


async def test_one_that_is_pushed_out_while_it_asks_is_told_when_it_comes_back():
    queue, room, order = make_queue(1), Room(5), []
    with enter(queue, entry("b", ServiceClass.BATCH), room, was_refused=True) as place:
        assert await place.wait_for_turn(10)
        (urgent,) = await started(wait(queue, room, entry("i", ServiceClass.INTERACTIVE), order))
        place.come_back()
        with pytest.raises(Overloaded, match="no room for b"):
            await place.wait_for_turn(10)
    await urgent
    assert order == ["i"]


# --- lanes: workers that are kept for some tenants --------------------------------------------------------------------

WORKERS = {"of a": {"a"}, "of a and b": {"a", "b"}, "of c": {"c"}, "shared": set()}
"""Worker → tenants that it is kept for; none: it works for everybody."""


class Workers:
    """Workers with a number of places each. `wronged`: requests that could have had one that a less urgent one took."""

    def __init__(self, queue, places):
        self.queue = queue
        self.places = dict(places)
        self.waiting = {}
        self.took = []
        self.wronged = []

    def usable(self, tenant):
        return {name for name, tenants in WORKERS.items() if name in self.places and (not tenants or tenant in tenants)}

    async def wait(self, item, *, is_resumed=False, was_refused=False):
        def take_room(kept):
            free = [name for name in sorted(self.usable(item.tenant) - kept) if self.places[name]]
            if not free:
                return False
            self.places[free[0]] -= 1
            self.took.append((item.key, free[0]))
            rivals = [other for other in self.waiting.values() if free[0] in self.usable(other.tenant)]
            first = min(rivals, key=lambda other: (other.service_class, other.arrived_s))
            if first is not item:
                self.wronged.append((first, item))
            del self.waiting[item.key]
            return True

        has_own = any(item.tenant in tenants for tenants in WORKERS.values())
        lane = self.queue.lane(Audience(item.tenant if has_own else ""))
        self.waiting[item.key] = item
        place = self.queue.enter(
            item,
            take_room,
            awaited=lambda: self.usable(item.tenant),
            lane=lane,
            is_resumed=is_resumed,
            was_refused=was_refused,
        )
        with place:
            assert await place.wait_for_turn(10.0)

    async def settle(self):
        """Waits until every request has been looked at once; timers go off in their order, however late."""
        self.queue.poke()
        await asyncio.sleep(3 * GATHER_S)


def of(tenant, key, service_class=ServiceClass.NORMAL, **fields):
    return QueueEntry(key, service_class, tenant, 10, float(key), **fields)


async def test_a_tenant_whose_workers_are_full_delays_nobody_else():
    queue = make_queue(1000)
    workers = Workers(queue, {"of a": 0, "of c": 3})
    waiting = await started(*(workers.wait(of("a", key, ServiceClass.CRITICAL)) for key in range(50)))
    served = await started(*(workers.wait(of("c", key, ServiceClass.BATCH)) for key in range(50, 53)))
    await asyncio.wait_for(asyncio.gather(*served), HANG_LIMIT_S)
    assert [key for key, _ in workers.took] == [50, 51, 52]
    workers.places["of a"] = 50
    await workers.settle()
    await asyncio.gather(*waiting)
    assert [key for key, _ in workers.took[3:]] == list(range(50))


async def test_a_tenant_with_a_free_worker_of_its_own_passes_those_that_wait_for_shared_ones():
    queue = make_queue()
    workers = Workers(queue, {"of a": 1, "shared": 0})
    tasks = await started(workers.wait(of("x", 0)), workers.wait(of("a", 1)), workers.wait(of("a", 2)))
    await asyncio.wait_for(tasks[1], HANG_LIMIT_S)
    assert workers.took == [(1, "of a")]
    workers.places["shared"] = 1
    await workers.settle()
    assert workers.took[1:] == [(0, "shared")]
    workers.places["of a"] = 1
    await workers.settle()
    await asyncio.gather(*tasks)


async def test_classes_are_strict_among_those_who_compete_for_a_worker():
    queue = make_queue()
    workers = Workers(queue, {"of a and b": 0})
    kinds = [ServiceClass.BATCH, ServiceClass.NORMAL, ServiceClass.CRITICAL, ServiceClass.LOW]
    tasks = await started(*(workers.wait(of("ab"[key % 2], key, kind)) for key, kind in enumerate(kinds)))
    await workers.settle()
    for _ in kinds:
        workers.places["of a and b"] = 1
        await workers.settle()
    await asyncio.gather(*tasks)
    assert [key for key, _ in workers.took] == [2, 1, 3, 0]


async def test_late_ones_go_behind_those_who_can_be_in_time_whatever_lane_they_are_in():
    queue = make_queue()
    workers = Workers(queue, {"of a and b": 0})
    tasks = await started(
        workers.wait(of("a", 0, promised_s=SYSTEM_CLOCK.monotonic() - 1.0)),
        workers.wait(of("b", 1)),
        workers.wait(of("b", 2)),
        workers.wait(of("b", 3, ServiceClass.LOW)),
    )
    await workers.settle()
    for _ in tasks:
        workers.places["of a and b"] = 1
        await workers.settle()
    await asyncio.gather(*tasks)
    assert [key for key, _ in workers.took] == [1, 2, 0, 3]


async def test_the_judgement_of_a_lane_hears_of_late_ones():
    heard, order, room = [], [], Room()

    class Policy(OverloadPolicy):
        def note_late(self, one, now_s):
            heard.append(one.key)

    policy = Policy()
    queue = AdmissionQueue(lambda audience: Lane(RequestQueue(max_waiting=10), policy=policy))
    late = QueueEntry("late", ServiceClass.NORMAL, "", 10, 0.0, promised_s=SYSTEM_CLOCK.monotonic() - 1.0)
    tasks = await started(wait(queue, room, late, order), wait(queue, room, entry("early", arrived_s=1.0), order))
    await asyncio.sleep(3 * GATHER_S)
    room.num_places = 2
    queue.poke()
    await asyncio.gather(*tasks)
    assert heard == ["late"]
    assert order == ["early", "late"]


async def test_turns_at_a_worker_that_others_do_not_wait_for_cost_nothing_in_a_fair_queue():
    queue = make_queue(100, strategy="fair")
    workers = Workers(queue, {"of a": 10, "shared": 0})
    (x,) = await started(workers.wait(of("x", 0)))
    await asyncio.gather(*await started(*(workers.wait(of("a", key)) for key in range(1, 11))))
    assert {name for _, name in workers.took} == {"of a"}
    tasks = await started(*(workers.wait(of(tenant, key)) for key, tenant in enumerate("xaxa", 11)))
    for _ in range(5):
        workers.places["shared"] = 1
        await workers.settle()
    await asyncio.gather(x, *tasks)
    assert [key for key, _ in workers.took[10:]] == [0, 12, 11, 14, 13]


async def test_one_that_asks_again_holds_up_only_those_who_could_take_what_it_asks_for():
    queue = make_queue()
    workers = Workers(queue, {"of a and b": 3, "of c": 1})
    lane = queue.lane(Audience("a"))
    asking = of("a", 0)
    room = queue.enter(
        asking, lambda kept: True, awaited=lambda: workers.usable("a"), lane=lane, is_resumed=False, was_refused=True
    )
    with room as place:
        assert await place.wait_for_turn(10)
        same, rival, other = await started(*(workers.wait(of(tenant, key)) for key, tenant in enumerate("abc", 1)))
        await asyncio.wait_for(other, HANG_LIMIT_S)
        await workers.settle()
        assert workers.took == [(3, "of c")]
    await asyncio.gather(same, rival)


async def test_each_lane_has_a_bound_of_its_own():
    queue = make_queue(1)
    workers = Workers(queue, {"of a": 0, "of c": 0})
    tasks = await started(workers.wait(of("a", 0)), workers.wait(of("c", 1)))
    with pytest.raises(Overloaded, match="no room for 2"):
        await workers.wait(of("a", 2))
    assert len(queue) == 2
    workers.places = {"of a": 1, "of c": 1}
    await workers.settle()
    await asyncio.gather(*tasks)


@settings(deadline=None, max_examples=60)
@given(
    kinds=st.lists(st.tuples(st.sampled_from("abcx"), st.sampled_from(ServiceClass)), max_size=15),
    freed=st.lists(st.sampled_from(sorted(WORKERS)), max_size=10),
)
def test_no_worker_with_room_stands_idle_while_somebody_waits_who_may_use_it(kinds, freed):
    """Nor does a request take a place that one of a higher class, or one that came earlier, could have had."""

    async def play():
        queue = make_queue(1000)
        workers = Workers(queue, dict.fromkeys(WORKERS, 0))
        tasks = await started(*(workers.wait(of(tenant, key, kind)) for key, (tenant, kind) in enumerate(kinds)))
        for name in freed:
            workers.places[name] += 1
            await workers.settle()
            assert not [
                (item, place)
                for item in workers.waiting.values()
                for place in workers.usable(item.tenant)
                if workers.places[place]
            ]
        workers.places = dict.fromkeys(WORKERS, 1000)
        await workers.settle()
        await asyncio.gather(*tasks)
        assert workers.wronged == []

    asyncio.run(play())
