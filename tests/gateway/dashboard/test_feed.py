"""What watchers of the dashboard get each second, and how many may watch."""

import asyncio
import json
from typing import Any

import pytest

from gateway.dashboard import feed
from services.cluster.decision_board import DecisionBoard, ShownDecision
from services.runtime.background_tasks import PROCESS_TASKS
from services.runtime.errors import StoreUnavailable
from tests.waiting import HANG_LIMIT_S


def data_of(line: str) -> Any:
    return json.loads(line.removeprefix("data: "))


async def test_updates_come_while_somebody_watches(make_system: Any, pair: Any) -> None:
    system = await make_system()
    await system.add_pair(pair)
    watched = system.gateway._feed
    async with system.http.stream("GET", "/dashboard/events") as reply:
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = reply.aiter_lines()
        first = update = data_of(await anext(lines))
        assert watched.num_watchers == 1
        await system.complete(max_tokens=100)
        while not update["last_number"]:
            line = await anext(lines)
            update = data_of(line) if line else update
        assert update["now_unix_s"] > first["now_unix_s"]
        assert {len(values) for values in update["series"].values()} == {1}
        assert [worker["id"] for worker in update["workers"]] == ["decode-0", "prefill-0"]
    await system.until(lambda: watched.num_watchers == 0)
    assert (await system.http.head("/dashboard/events")).status_code == 200


async def test_one_client_cannot_hold_all_places_of_watchers(make_system: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MAX_WATCHERS", 3)
    watched = (await make_system()).gateway._feed
    tasks: dict[str, asyncio.Task[None]] = {}

    async def watch(client: str) -> None:
        async for _ in watched.updates(client):
            pass

    for name in ("a1", "b1", "b2", "b3", "b4", "c1"):
        tasks[name] = asyncio.create_task(watch(name[0]))
        await asyncio.sleep(0)
        assert watched.num_watchers <= 3
    # A client that has the most places loses its oldest, to another client and to itself.
    async with asyncio.timeout(HANG_LIMIT_S):
        for name in ("b1", "b2", "b3"):
            await tasks[name]
    assert not any(tasks[name].done() for name in ("a1", "b4", "c1"))
    await watched.close()
    async with asyncio.timeout(HANG_LIMIT_S):
        await asyncio.gather(*tasks.values())


async def test_a_watcher_whose_place_is_taken_sees_the_end_of_its_stream(
    make_system: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "MAX_WATCHERS", 1)
    system = await make_system()
    async with system.http.stream("GET", "/dashboard/events") as reply:
        lines = reply.aiter_lines()  # kept: with the iterator the connection would end
        await anext(lines)
        async with system.http.stream("GET", "/dashboard/events") as second:
            await anext(second.aiter_lines())
            async with asyncio.timeout(HANG_LIMIT_S):
                async for _ in lines:  # to its end, which is one: a broken connection would raise
                    pass
            assert system.gateway._feed.num_watchers == 1


async def test_a_gateway_that_stops_ends_the_updates(make_system: Any) -> None:
    system = await make_system()
    async with system.http.stream("GET", "/dashboard/events") as reply:
        lines = reply.aiter_lines()
        await anext(lines)
        leaving = asyncio.create_task(system.gateway._feed.close())
        async with asyncio.timeout(HANG_LIMIT_S):
            async for _ in lines:  # to its end, which is one: a broken connection would raise
                pass
        await leaving


async def test_a_second_that_fails_is_not_the_last_one(make_system: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "TICK_S", 0.01)
    system = await make_system()
    num_failures = PROCESS_TASKS.num_failures["dashboard"]
    monkeypatch.setattr(system.gateway.metrics, "totals", lambda: 1 / 0)
    await system.until(lambda: PROCESS_TASKS.num_failures["dashboard"] > num_failures)
    before = system.gateway._feed.snapshot(1)["series"]["unix_s"]
    monkeypatch.undo()
    await system.until(lambda: system.gateway._feed.snapshot(1)["series"]["unix_s"] != before)


async def test_decisions_of_an_autoscaler_are_shown_and_stay_while_redis_is_away(
    make_system: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "BOARD_S", 0.02)
    system = await make_system()
    watched, board = system.gateway._feed, DecisionBoard(system.gateway._page_store)
    assert watched.snapshot(1)["decisions"] == []
    decision = ShownDecision(1000.0, "ordered 2:1 in place of 1:1", "more came")
    await board.put(decision)
    await system.until(lambda: watched.snapshot(1)["decisions"] == [decision])
    asked = 0

    async def fail(board: DecisionBoard) -> None:
        nonlocal asked
        asked += 1
        raise StoreUnavailable("Redis did not answer")

    monkeypatch.setattr(DecisionBoard, "read", fail)
    await system.until(lambda: asked >= 2)
    assert watched.snapshot(1)["decisions"] == [decision]
    page = (await system.http.get("/dashboard/data")).json()
    assert page["decisions"] == [{"at_unix_s": 1000.0, "done": "ordered 2:1 in place of 1:1", "reason": "more came"}]
