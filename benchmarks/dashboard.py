"""What it costs a gateway to be looked at: a request that is remembered, a second of figures, a search.

CPU time of one thread, the best of the rounds with the median beside it. Every request is remembered, whether anybody
looks or not, and so are the figures of each second; the update is made only while somebody watches.

    python -m benchmarks.dashboard [--rounds 30] [--workers 16] [--json FILE]
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from benchmarks.report import add_arguments, leave
from gateway.dashboard.feed import Feed, GatewayFacts
from gateway.limits import SERVICE_CLASSES
from gateway.observability.bottlenecks import BottleneckWatch
from gateway.observability.history import AnswerStory, History, Query, Row
from gateway.observability.metrics import STATES, Metrics
from gateway.topology.reports import WorkerLoad
from services.scheduling.prediction import DEFAULT_DECODE, DEFAULT_PREFILL
from services.scheduling.routing.router import Router
from services.scheduling.routing.views import RouteRequest, WorkerView

NUM_REQUESTS = 1000
NUM_TICKS = 50
NUM_SEARCHES = 5

Round = Callable[[], int]
"""Does something a number of times and returns the number."""


def remembering(history: History) -> Round:
    """All that is written down of a request with one attempt, from its first phase to its place in the history."""
    views = [WorkerView(name, name, 1000, 1000, 0, 0, 4096) for name in ("prefill-0", "decode-0", "decode-1")]
    asked = RouteRequest(num_prompt_tokens=100, max_new_tokens=200)
    route = Router().route(asked, views[:1], views[1:], now_s=0.0)[0]

    def work() -> int:
        for number in range(NUM_REQUESTS):
            answer = AnswerStory([("queue", 0)])
            answer.note_route(route, ("decode-1", 0.2), prefill="prefill-0", began_us=900, placed_us=1200)
            answer.steps += (("prefill", 1200), ("transfer", 30_000), ("decode", 34_000))
            answer.note_prompt("prefill-0", 0.002)
            answer.note_handoff(
                num_pages=7, num_bytes=1 << 20, exposed_s=0.004, transport="shm", chunks=((0.0, 0.02, 100),)
            )
            answer.first_token_us, answer.tpot_us, answer.ended_us = 30_000, 20_000, 4_000_000
            row = Row(
                request_id=f"a-request-of-some-kind-{number}",
                model="model",
                service_class="normal",
                tenant="tenant",
                outcome="finished",
                finish_reason="stop",
                workers="prefill-0 decode-0",
                answers=1,
                prompt_tokens=100,
                cached_tokens=16,
                generated_tokens=200,
                attempts=1,
                queue_us=1200,
                prefill_us=28_800,
                transfer_us=4000,
                decode_us=3_966_000,
                total_us=4_000_000,
                is_good=history.note_end("finished", (answer,)),
            )
            history.add(row, (answer,))
        return NUM_REQUESTS

    return work


def seconds(history: History, num_workers: int, *, is_watched: bool) -> Round:
    """The figures of a second, and the update for those who watch."""
    metrics = Metrics()
    for service_class in SERVICE_CLASSES:
        metrics.of("model", service_class).ttft_s.observe(0.1)
    load = WorkerLoad(pages_total=1000, pages_free=1000, prefill_speed=DEFAULT_PREFILL, decode_speed=DEFAULT_DECODE)
    members = [_member(number, load) for number in range(num_workers)]
    population = {("model", one, state): 1 for one in SERVICE_CLASSES for state in STATES}
    bottlenecks = BottleneckWatch(lambda: members, lambda: population, busy_s=time.thread_time)
    log = SimpleNamespace(history=history)
    requests = SimpleNamespace(log=log, num_queued=0, num_running=0, bottlenecks=bottlenecks)
    feed = Feed(
        cast(Any, requests),
        topology=cast(Any, SimpleNamespace(members=lambda: members)),
        metrics=metrics,
        facts=GatewayFacts("id", "cluster", "hybrid", 0.0),
    )
    watching = feed.updates()

    async def watch() -> None:
        task = asyncio.ensure_future(anext(watching))
        await asyncio.sleep(0)  # it has begun to wait
        feed.tick()
        await task

    if is_watched:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(watch())
        loop.close()  # `asyncio.run` would end the watching too
        assert feed.num_watchers == 1

    def work() -> int:
        for _ in range(NUM_TICKS):
            feed.tick()
        return NUM_TICKS

    return work


def searches(history: History) -> Round:
    """A word that nothing has, looked for in all that is remembered."""

    def work() -> int:
        for _ in range(NUM_SEARCHES):
            found, _ = history.find(Query(q="nowhere"))
            assert not found
        return NUM_SEARCHES

    return work


def _member(number: int, load: WorkerLoad) -> Any:
    record = SimpleNamespace(
        id=f"worker-{number}", role="decode", model="model", host="host", address="127.0.0.1:1234", page_size=16
    )
    return SimpleNamespace(record=record, load=load, state="ready", gpu_facts=None)


def measure(rounds: dict[str, Round], num_rounds: int) -> dict[str, list[float]]:
    """Microseconds of CPU per piece of work, of each round."""
    figures: dict[str, list[float]] = {name: [] for name in rounds}
    for _ in range(num_rounds):
        for name, work in rounds.items():
            began_s = time.thread_time()
            number = work()
            figures[name].append((time.thread_time() - began_s) / number * 1e6)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--workers", type=int, default=16)
    add_arguments(parser)
    arguments = parser.parse_args()
    history = History()
    figures = measure(
        {
            "request": remembering(history),
            "second": seconds(history, arguments.workers, is_watched=False),
            "second, watched": seconds(history, arguments.workers, is_watched=True),
            "search": searches(history),
        },
        arguments.rounds,
    )
    for name, each in figures.items():
        print(f"{name:28} {min(each):10.3f} us, median {statistics.median(each):10.3f}")
    print(f"{len(history)} requests are remembered in {history.num_bytes / 2**20:.2f} MiB")
    best = {name: {"best_us": min(each), "median_us": statistics.median(each)} for name, each in figures.items()}
    leave(arguments, "dashboard", best, {})


if __name__ == "__main__":
    main()
