"""What the gateway's bookkeeping of waiting requests costs: queue, refusal and their share of a core.

Times are CPU time of one thread, so that what else runs on the machine counts less; each figure is the best of its
rounds (what the code costs), with the median beside it (what it cost here). The limit is what the standard library
needs for the least that could be called a queue: in rounds that take turns with ours, so that the ratios hold also on
a machine with other work.

    python -m benchmarks.queue [--waiting 10000] [--rounds 60] [--json FILE]

At the end a gateway's second is played in real time: 1,000 requests judged, entered into `AdmissionQueue`, let go and
ended, with all others still waiting behind them. Its profile names the functions, with what they call in C.
"""

import argparse
import asyncio
import cProfile
import heapq
import math
import pstats
import random
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from benchmarks.report import Ratio, add_arguments, leave
from gateway.requests.queue import GATHER_S, AdmissionQueue, Lane, WaitingPlace
from services.scheduling.entry import QueueEntry, ServiceClass
from services.scheduling.overload import ClusterLoad, OverloadPolicy, Targets
from services.scheduling.pools import Audience
from services.scheduling.queue import STRATEGIES, RequestQueue

NUM_PAIRS = 1000
NUM_TENANTS = 8
NUM_LEVELS = 3
NUM_PROFILED = 20
"""Functions that are shown."""
ARRIVALS_PER_S = 1000.0
TARGETS = Targets(ttft_s=1e9, itl_s=1e9)
"""Far away: every request takes the longest way through the judgement."""

Round = Callable[[], float]
"""Does NUM_PAIRS in and out and returns the CPU seconds that they took."""


def entries(seed: int, *, is_mixed: bool) -> Iterator[QueueEntry]:
    """Arrivals of a steady stream with deadlines between 20 and 60 s; of one class, or of all five."""
    rng, number = random.Random(seed), 0
    while True:
        number += 1
        now_s = number / ARRIVALS_PER_S
        service_class = ServiceClass(rng.randrange(5)) if is_mixed else ServiceClass.NORMAL
        tenant, level = f"tenant-{rng.randrange(NUM_TENANTS)}", rng.randrange(NUM_LEVELS)
        deadline_s = now_s + rng.uniform(20, 60)
        cost = rng.randrange(100, 4000)
        yield QueueEntry(f"request-{number}", service_class, tenant, cost, now_s, deadline_s, cost / 1000, level)


def queue_round(strategy: str, num_waiting: int, *, is_mixed: bool) -> Round:
    queue = RequestQueue(strategy=strategy, max_waiting=2 * num_waiting + NUM_PAIRS)
    stream = entries(0, is_mixed=is_mixed)
    for _ in range(num_waiting):
        queue.push(next(stream))

    def run() -> float:
        new = [next(stream) for _ in range(NUM_PAIRS)]
        began_s = time.thread_time()
        for entry in new:
            queue.push(entry)
        for _ in new:
            queue.pop()
        return time.thread_time() - began_s

    return run


def heap_round(num_waiting: int) -> Round:
    """(rank, number, entry) in a bare heap: no classes, no bound, nobody can leave early."""
    stream, heap, count = entries(0, is_mixed=False), list[tuple[float, int, QueueEntry]](), 0
    for entry in (next(stream) for _ in range(num_waiting)):
        heapq.heappush(heap, (entry.deadline_s, count := count + 1, entry))

    def run() -> float:
        nonlocal count
        new = [next(stream) for _ in range(NUM_PAIRS)]
        began_s = time.thread_time()
        for entry in new:
            count += 1
            heapq.heappush(heap, (entry.deadline_s, count, entry))
        for _ in new:
            heapq.heappop(heap)
        return time.thread_time() - began_s

    return run


def ordered_dict_round(num_waiting: int) -> Round:
    """Key → entry in order of coming: no ranks, no classes, no bound."""
    stream = entries(0, is_mixed=False)
    waiting = OrderedDict((entry.key, entry) for entry in (next(stream) for _ in range(num_waiting)))

    def run() -> float:
        new = [next(stream) for _ in range(NUM_PAIRS)]
        began_s = time.thread_time()
        for entry in new:
            waiting[entry.key] = entry
        for _ in new:
            waiting.popitem(last=False)
        return time.thread_time() - began_s

    return run


def leaving_round(num_waiting: int) -> Round:
    """Comes, leaves early; the deadlines are looked at once in a hundred."""
    queue, stream = RequestQueue(strategy="sla", max_waiting=2 * num_waiting), entries(0, is_mixed=True)
    for _ in range(num_waiting):
        queue.push(next(stream))

    def run() -> float:
        new = [next(stream) for _ in range(NUM_PAIRS)]
        began_s = time.thread_time()
        for number, entry in enumerate(new):
            queue.push(entry)
            queue.remove(entry.key)
            if number % 100 == 0:
                queue.expire(0.0)
        return time.thread_time() - began_s

    return run


def whole_round(num_waiting: int) -> Round:
    """All of a request: its entry, what it meets, verdict, in, out, start, end; deadlines ten times a second."""
    queue, stream = RequestQueue(max_waiting=2 * num_waiting), entries(0, is_mixed=True)
    policy, running, now_s = OverloadPolicy(), list[Hashable](), 0.0
    for _ in range(num_waiting):
        queue.push(next(stream))

    def run() -> float:
        nonlocal now_s
        began_s = time.thread_time()
        for number in range(NUM_PAIRS):
            now_s += 1 / ARRIVALS_PER_S
            entry = next(stream)
            one = entry.service_class
            load = ClusterLoad(queue.num_ahead(one), queue.waiting_tokens(one), len(queue), 0.5, 0.1, 0.01)
            policy.judge(entry, load, TARGETS, now_s, jitter=0.5)
            queue.push(entry)
            first = queue.peek()
            if first is not None and policy.may_start(first, load):
                queue.pop()
                policy.note_start(first, now_s, is_backlogged=True)
                running.append(first.key)
            if len(running) > 64:
                policy.note_end(running.pop(0), now_s)
            if number % 100 == 0:
                queue.expire(-math.inf)
        return time.thread_time() - began_s

    return run


def stream_round(num_waiting: int) -> Round:
    """Making the entries of `whole_round`, which draws random numbers: taken off it."""
    stream = entries(0, is_mixed=True)

    def run() -> float:
        began_s = time.thread_time()
        for _ in range(NUM_PAIRS):
            next(stream)
        return time.thread_time() - began_s

    return run


def gateway_second(num_waiting: int) -> tuple[float, dict[str, float]]:
    """A second with a request every millisecond, entered into a full gateway's queue and let go at its next look.

    Returns the share of a core that it took, and how much of it each function took by itself, C included.
    """
    stream, policy, profile = entries(0, is_mixed=False), OverloadPolicy(), cProfile.Profile(time.thread_time)
    num_together = round(GATHER_S * ARRIVALS_PER_S)

    def enter(admission: AdmissionQueue, entry: QueueEntry, *, has_room: bool) -> WaitingPlace:
        return admission.enter(entry, lambda _: has_room, awaited=frozenset, lane=admission.lane(Audience()))

    async def play(admission: AdmissionQueue, new: list[QueueEntry]) -> float:
        queue = admission.lane(Audience()).queue
        began_s = time.thread_time()
        for first in range(0, len(new), num_together):
            places = []
            for entry in new[first : first + num_together]:
                one, now_s = entry.service_class, entry.arrived_s
                load = ClusterLoad(queue.num_ahead(one), queue.waiting_tokens(one), len(queue), 0.5, 0.1, 0.01)
                policy.judge(entry, load, TARGETS, now_s, jitter=0.5)
                places.append(enter(admission, entry, has_room=True))
            for place in places:
                with place:
                    await place.wait_for_turn(60)
                policy.note_start(place.entry, place.entry.arrived_s, is_backlogged=True)
                policy.note_end(place.entry.key, place.entry.arrived_s + 1)
        return time.thread_time() - began_s

    async def run() -> float:
        queue = RequestQueue(max_waiting=2 * num_waiting + NUM_PAIRS)
        admission = AdmissionQueue(lambda audience: Lane(queue, policy=policy, targets=TARGETS))
        # Nobody has a deadline: these times are those of the stream, and the queue's clock is the machine's.
        timeless = (replace(entry, deadline_s=math.inf) for entry in stream)
        for _ in range(num_waiting):
            enter(admission, replace(next(timeless), service_class=ServiceClass.LOW), has_room=False)
        taken_s = [await play(admission, [next(timeless) for _ in range(NUM_PAIRS)]) for _ in range(3)]
        new = [next(timeless) for _ in range(NUM_PAIRS)]
        profile.enable()
        await play(admission, new)
        profile.disable()
        return min(taken_s) * ARRIVALS_PER_S / NUM_PAIRS

    share = asyncio.run(run())
    rows = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    own_s = {f"{'/'.join(Path(file).parts[-2:])}:{name}": row[2] for (file, _, name), row in rows.items()}
    whole_s = sum(own_s.values())
    return share, {name: share * time_s / whole_s for name, time_s in sorted(own_s.items(), key=lambda one: -one[1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=60)
    add_arguments(parser)
    options = parser.parse_args()
    waiting = options.waiting
    makers: dict[str, Callable[[], Round]] = {
        f"{strategy}, {'five classes' if is_mixed else 'one class'}": partial(
            queue_round, strategy, waiting, is_mixed=is_mixed
        )
        for strategy in STRATEGIES
        for is_mixed in (False, True)
    }
    makers |= {"push + remove": partial(leaving_round, waiting), "whole request": partial(whole_round, waiting)}
    makers |= {"its entry": partial(stream_round, waiting)}
    print(f"{NUM_PAIRS:,} in and {NUM_PAIRS:,} out with {waiting:,} waiting; CPU time of one core, ms")
    print(f"{'':24}{'best':>8}{'median':>8}{'/ OrderedDict':>16}{'/ heap of tuples':>18}")
    best_s, figures, to_limits = {}, dict[str, dict[str, float]](), dict[str, Ratio]()
    for name, make in makers.items():
        rounds = (make(), ordered_dict_round(waiting), heap_round(waiting))
        taken_s = [[run() for run in rounds] for _ in range(options.rounds)]
        ours_s, *limits_s = (min(column) for column in zip(*taken_s, strict=True))
        best_s[name] = ours_s
        median_s = statistics.median(row[0] for row in taken_s)
        ratios = [ours_s / limit_s for limit_s in limits_s]
        to_limits[f"{name} over OrderedDict"] = Ratio(ratios[0], lower_is_better=True)
        figures[name] = {"best_ms": ours_s * 1e3, "median_ms": median_s * 1e3}
        print(f"{name:24}{ours_s * 1e3:8.3f}{median_s * 1e3:8.3f}{ratios[0]:16.1f}{ratios[1]:18.1f}")
    per_request_s = (best_s["whole request"] - best_s["its entry"]) / NUM_PAIRS
    with_entry_s = best_s["whole request"] / NUM_PAIRS
    print(
        f"bookkeeping at {ARRIVALS_PER_S:,.0f} requests/s: {per_request_s * ARRIVALS_PER_S:.2%} of a core, "
        f"{with_entry_s * ARRIVALS_PER_S:.2%} with making the entries"
    )
    share, shares = gateway_second(waiting)
    print(f"with admission and its event loop: {share:.2%} of a core, of which")
    for file in ("scheduling/queue.py", "scheduling/overload.py", "gateway/requests/queue.py", "asyncio/"):
        print(f"{sum(one for name, one in shares.items() if name.startswith(file)):8.3%}  {file}, without what is in C")
    for name, own_share in list(shares.items())[:NUM_PROFILED]:
        print(f"{own_share:8.3%}  {name}")
    figures["shares of a core"] = {"bookkeeping": per_request_s * ARRIVALS_PER_S, "with admission": share} | shares
    leave(options, "queue", figures, to_limits)


if __name__ == "__main__":
    main()
