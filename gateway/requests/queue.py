"""The queue of requests that wait for room in the cluster: whose turn it is, when one may start, and which are refused.

The order and the judgement are `services.scheduling`'s business (`queue`, `lanes`, `overload`); whether there is room
for the first request is asked of the caller that entered it. Knows no worker. A request that is let go has left the
queue, so the next one can be let go in the same moment; should no worker take it after all, it comes back with the rank
it had. From then on there is less room than it seems, so it keeps its place while it asks again, and nobody behind it
goes before it has its answer.

Workers may be kept for some tenants (`--tenants`) or pools (`--pools`), so a first request that has no room says
nothing about those behind it that may use other workers. Requests that may use the same workers therefore wait in a
lane of their own: one for each tenant that some worker is kept for, one for each pool, and one for all the others,
whose workers are the same; answers that only workers with certain weights may continue have lanes of their own too.
Each lane has its own bound and its own judgement of overload, by what it was seen to drain; a request that a full
cluster refuses hears so within milliseconds, with the reason and a time to come back. The lanes are looked at as one
queue, in the order of `services.scheduling.lanes`; a request without room holds up its lane, and keeps the workers that
it waits for from everybody who comes after it in that order. So nobody is delayed by a request whose workers it may not
use, and among those who compete for a worker nobody goes before a higher class. Without such workers and answers there
is one lane, and all this is one queue.
"""

import asyncio
import random
from collections.abc import Callable, Hashable, Set
from types import TracebackType

from services.runtime.clock import SYSTEM_CLOCK, Clock
from services.runtime.errors import DeadlineExceeded, DeadlineTooShort, Overloaded, TandemError
from services.scheduling.entry import QueueEntry, ServiceClass
from services.scheduling.lanes import LaneKey, LaneOrder
from services.scheduling.overload import NO_TARGETS, Admit, ClusterLoad, OverloadPolicy, Refuse, Targets
from services.scheduling.pools import Audience
from services.scheduling.queue import QueueFull, RequestQueue
from services.scheduling.routing.route import Route

GATHER_S = 0.002
"""The time for which signs of room are gathered and answered together: every step of every worker brings one."""
MAX_SILENCE_S = 0.25
"""The longest time without a look at the queue, should no sign come."""
COME_BACK_S = 0.02
"""The time after which a request asks again that a worker refused in spite of its room; it keeps its place."""


TakeRoom = Callable[[Set[str]], bool]
"""Keeps a place for a request on workers other than those with these ids. False: none has a place."""
Awaited = Callable[[], Set[str]]
"""Gives the ids of the workers that no request behind this one may take, now that it has no room."""


class Lane:
    """Requests of one model that may use the same workers: how they wait, and what judges each new one.

    `free_share` gives the largest share of its pages that a decode worker in rotation has free, `num_computing` the
    number of workers that compute prompts.
    """

    def __init__(
        self,
        queue: RequestQueue,
        *,
        policy: OverloadPolicy | None = None,
        targets: Targets = NO_TARGETS,
        free_share: Callable[[], float] = lambda: 1.0,
        num_computing: Callable[[], int] = lambda: 1,
    ) -> None:
        self.queue = queue
        self._policy = policy or OverloadPolicy()
        self._targets = targets
        self._free_share = free_share
        self._num_computing = num_computing
        self._random = random.Random()  # noqa: S311 - which requests are refused

    def check(self, entry: QueueEntry, route: Route | None = None, *, own: Targets = NO_TARGETS) -> Admit:
        """Lets a new request in. Raises Overloaded with the reason.

        Without a route, which costs more to find, it judges by the queue and the pages alone. `own` are the targets
        that its client named, which hold where they are stricter than the operator's.
        """
        load, targets = self._load(entry, route), self._targets.stricter(own)
        verdict = self._policy.judge(entry, load, targets, SYSTEM_CLOCK.monotonic(), jitter=self._random.random())
        if isinstance(verdict, Refuse):
            raise _refused(verdict)
        return verdict

    def promised_s(self, service_class: ServiceClass, own: Targets, *, arrived_s: float, prompt_s: float) -> float:
        """Returns when a request's turn must have come to keep what it was promised; `math.inf`: nothing was."""
        targets = self._targets.stricter(own)
        return self._policy.promised_s(service_class, targets, arrived_s=arrived_s, prompt_s=prompt_s)

    def when_full(self, entry: QueueEntry) -> Overloaded:
        """Returns the error of a request that finds the queue full, or that a more urgent one has pushed out."""
        verdict = self._policy.when_full(
            entry, self._load(entry, None), SYSTEM_CLOCK.monotonic(), jitter=self._random.random()
        )
        return _refused(verdict)

    def may_start(self, entry: QueueEntry, route: Route) -> bool:
        """Returns whether its turn may come now; False: the room is kept for requests that cannot wait."""
        share, queue_s = _free_share(route), _prefill_queue_s(route)
        return self._policy.may_start(entry, ClusterLoad(free_page_share=share, prefill_queue_s=queue_s))

    def note_waiting(self, *, is_for_room: bool) -> None:
        """Notes that the first in the queue could not go, for want of room or because it may not start yet."""
        self._policy.note_backlog(SYSTEM_CLOCK.monotonic(), is_backlogged=is_for_room)

    def note_started(self, entry: QueueEntry) -> None:
        """Notes that workers took it."""
        self._policy.note_start(entry, SYSTEM_CLOCK.monotonic(), is_backlogged=len(self.queue) > 0)

    def yield_late(self, now_s: float) -> None:
        """Puts requests that have missed what they were promised behind the others of their class."""
        for entry in self.queue.yield_late(now_s):
            self._policy.note_late(entry, now_s)

    def note_ended(self, entry: QueueEntry) -> None:
        """Notes that a request is over, which may have started."""
        now_s = SYSTEM_CLOCK.monotonic()
        self._policy.note_end(entry.key, now_s)
        if not len(self.queue):
            self._policy.note_backlog(now_s, is_backlogged=False)

    def _load(self, entry: QueueEntry, route: Route | None) -> ClusterLoad:
        queue, one = self.queue, entry.service_class
        num_ahead, tokens_ahead, num_waiting, prompts_ahead_s = 0, 0, len(queue), 0.0
        if num_waiting:
            num_ahead, tokens_ahead = queue.num_ahead(one), queue.waiting_tokens(one)
            prompts_ahead_s = queue.waiting_prompts_s(one) / max(1, self._num_computing())
        if route is None:
            free_share, prefill_s, queue_s, step_s = self._free_share(), 0.0, 0.0, 0.0
        else:
            free_share, queue_s, step_s = _free_share(route), _prefill_queue_s(route), route.predicted_itl_s
            prefill_s = max(0.0, route.predicted_ttft_s - queue_s)
        return ClusterLoad(
            num_ahead, tokens_ahead, num_waiting, free_share, prefill_s, queue_s, step_s, prompts_ahead_s
        )


def _free_share(route: Route) -> float:
    return route.decode.pages_available / max(1, route.decode.pages_total)


def _prefill_queue_s(route: Route) -> float:
    """Returns how long a prompt waits for others where the route has it computed."""
    at = route.prefills[0] if route.is_remote else route.decode
    return at.prefill_speed.time_s(at.waiting_tokens) if at.waiting_tokens else 0.0


class AdmissionQueue:
    """Those who wait for one model's workers. Belongs to one event loop.

    `make_lane` makes the lane of an audience; `order` is that between lanes.
    """

    def __init__(
        self, make_lane: Callable[[Audience], Lane], *, order: LaneOrder | None = None, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._make_lane = make_lane
        self._order = order or LaneOrder()
        self._clock = clock
        self._lanes: dict[Audience, Lane] = {}
        self._places: dict[Hashable, WaitingPlace] = {}
        self._asking: dict[Lane, WaitingPlace] = {}
        """The places that ask again, and hold up the others of their lanes."""
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self.closed_by: TandemError | None = None
        """The error that every wait raises from now on; None while the queue is open."""

    def __len__(self) -> int:
        """Returns the number of requests in the queue."""
        return sum(len(lane.queue) for lane in self._lanes.values())

    def lane(self, audience: Audience) -> Lane:
        """Returns the lane of these requests."""
        lane = self._lanes.get(audience)
        if lane is None:
            lane = self._lanes[audience] = self._make_lane(audience)
        return lane

    def is_behind_others(self, entry: QueueEntry) -> bool:
        """Returns whether a request of the same class or a higher one waits, in any lane.

        Which ones may overtake it nevertheless, because they use other workers, is found by a look at the queue.
        """
        return any([lane.queue.num_ahead(entry.service_class) for lane in self._lanes.values()])

    def enter(
        self,
        entry: QueueEntry,
        take_room: TakeRoom,
        *,
        awaited: Awaited,
        lane: Lane,
        is_resumed: bool = False,
        was_refused: bool = False,
    ) -> "WaitingPlace":
        """Returns a place in a lane of the queue; at the front and beyond the bound for one that was already running.

        `take_room` is asked when it is first, `awaited` if it has to wait longer. `was_refused`: a worker that seemed
        to have room had none. Raises Overloaded if the lane is full; a request of a lower class, if there is one, is
        pushed out instead and told so. The place is left by leaving its `with` block.
        """
        place = WaitingPlace(self, entry, take_room, awaited=awaited, lane=lane, is_resumed=is_resumed)
        if was_refused:
            place.be_careful()
        try:
            pushed_out = lane.queue.push(entry, is_resumed=is_resumed)
        except QueueFull as full:
            raise lane.when_full(entry) from full
        if pushed_out is not None:
            self._places.pop(pushed_out.key).end(lane.when_full(pushed_out))
        self._places[entry.key] = place
        self._look_after(GATHER_S)
        return place

    def poke(self) -> None:
        """Says that a worker may have room now."""
        if self._places:
            self._look_after(GATHER_S)

    def close(self, error: TandemError) -> None:
        """Ends every wait with `error`."""
        self.closed_by = error
        places, self._places = self._places, {}
        for key, place in places.items():
            place.lane.queue.remove(key)
            place.end(error)

    def take_back(self, place: "WaitingPlace") -> None:
        """Takes back a place whose request no worker took."""
        if self._asking.get(place.lane) is place:
            del self._asking[place.lane]
        elif not place.was_ended:
            place.lane.queue.push_back(place.entry, is_resumed=place.is_resumed)
            self._places[place.entry.key] = place
        self._look_after(GATHER_S)

    def leave(self, place: "WaitingPlace") -> None:
        """Gives up a place; the next one may be first now."""
        if self._asking.get(place.lane) is place:
            del self._asking[place.lane]
        if self._places.pop(place.entry.key, None) is not None:
            place.lane.queue.remove(place.entry.key)
        self._order.left(place.entry.key)
        self._look_after(GATHER_S)

    def _look_after(self, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + wait_s
        if self._timer is not None:
            if self._due_s <= due_s:
                return
            self._timer.cancel()
        self._timer, self._due_s = loop.call_at(due_s, self._look), due_s

    def _look(self) -> None:
        """Lets every request go that can go now, in order."""
        self._timer = None
        now_s = self._clock.monotonic()
        for lane in self._lanes.values():
            for entry in lane.queue.expire(now_s):
                self._places.pop(entry.key).end(DeadlineExceeded("the request's deadline can no longer be met"))
            lane.yield_late(now_s)
        wait_s = MAX_SILENCE_S
        held: set[Lane] = set()
        kept: set[str] = set()
        for asking in self._asking.values():
            self._hold_up(asking, held, kept)
        while (place := self._first(held)) is not None:
            patience_s = place.not_before_s - asyncio.get_running_loop().time()
            if patience_s > 0:
                wait_s = min(wait_s, patience_s)
            if patience_s > 0 or not (place.is_over or place.take_room(kept)):
                self._hold_up(place, held, kept)
                continue
            if not held:
                self._order.went(place.entry)
            if place.is_careful and not place.is_over:
                self._asking[place.lane] = place
                self._hold_up(place, held, kept)
            else:
                place.lane.queue.pop()
                del self._places[place.entry.key]
            place.go()
        if self._places:
            self._look_after(wait_s)
        else:
            self._order.clear()

    def _first(self, held: Set[Lane]) -> "WaitingPlace | None":
        """Returns the place whose turn it is, among the lanes that are not held up."""
        heads = [lane.queue.peek() for lane in self._lanes.values() if lane not in held]
        places = [self._places[entry.key] for entry in heads if entry is not None]
        if len(places) < 2:
            return places[0] if places else None
        return min(places, key=self._order_of)

    def _order_of(self, place: "WaitingPlace") -> LaneKey:
        is_late = place.lane.queue.has_yielded(place.entry.key)
        return self._order.key(place.entry, is_resumed=place.is_resumed, is_late=is_late)

    def _hold_up(self, place: "WaitingPlace", held: set[Lane], kept: set[str]) -> None:
        """Holds up its own lane, and keeps the workers that it waits for from the others."""
        held.add(place.lane)
        if len(held) < len(self._lanes):
            kept |= place.awaited()


class WaitingPlace:
    """One request's place in the queue, for use in a `with` block."""

    def __init__(
        self,
        queue: AdmissionQueue,
        entry: QueueEntry,
        take_room: TakeRoom,
        *,
        awaited: Awaited,
        lane: Lane,
        is_resumed: bool,
    ) -> None:
        self.entry = entry
        self.lane = lane
        self.is_resumed = is_resumed
        self.take_room = take_room
        self.awaited = awaited
        self.not_before_s = 0.0
        self.is_careful = False
        """Whether it keeps its place while it asks."""
        self._queue = queue
        self._ended_by: TandemError | None = None
        self._turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __enter__(self) -> "WaitingPlace":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._queue.leave(self)
        self._turn.cancel()

    @property
    def is_over(self) -> bool:
        """Whether the wait here is over."""
        return self._turn.done()

    def go(self) -> None:
        """Ends the wait: it is this one's turn."""
        if not self._turn.done():
            self._turn.set_result(None)

    def end(self, error: TandemError) -> None:
        """Ends the wait without a turn."""
        self._ended_by = error
        if not self._turn.done():
            self._turn.set_result(None)

    @property
    def was_ended(self) -> bool:
        """Whether it has been told why it will have no turn."""
        return self._ended_by is not None

    def be_careful(self) -> None:
        """Has it wait a moment before it asks again, since there was less room than it seemed."""
        self.is_careful = True
        self.not_before_s = asyncio.get_running_loop().time() + COME_BACK_S

    def come_back(self) -> None:
        """Has it wait again with the rank it had, since no worker took it."""
        self._turn = asyncio.get_running_loop().create_future()
        self.be_careful()
        self._queue.take_back(self)

    async def wait_for_turn(self, timeout_s: float) -> bool:
        """Waits until this place is first and there is room. False: `timeout_s` passed before.

        Raises DeadlineExceeded, Overloaded where it was pushed out, or what the queue was closed with.
        """
        if self._ended_by is None and self._queue.closed_by is None:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._turn
            except TimeoutError:
                return False
        error = self._ended_by or self._queue.closed_by
        if error is not None:
            raise error.again()
        return True


def _refused(verdict: Refuse) -> Overloaded:
    what = f"the cluster is full: {verdict.reason}"
    if verdict.kind == "deadline":
        what = f"the deadline cannot be met: {verdict.reason}"
    if verdict.is_final:
        return DeadlineTooShort(what, reason=verdict.kind)
    return Overloaded(what, retry_after_s=verdict.retry_after_s, reason=verdict.kind)
