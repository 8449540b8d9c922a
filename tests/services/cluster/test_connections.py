"""Connections to a Redis that is far away, and the round trip that calls wait for."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
import uvloop

from services.cluster.connections import AWAY_AFTER_S, BACK_AFTER_S, MAX_ROUND_TRIP_S, Availability, RoundTrip
from services.cluster.embedded_redis import EmbeddedRedis
from services.cluster.redis_store import Script, Store
from services.runtime.errors import StoreUnavailable
from tests.faults.proxy import Proxy
from tests.free_ports import free_port
from tests.waiting import HANG_LIMIT_S

ECHO = Script("return ARGV[1]")
PATIENCE_S = HANG_LIMIT_S


@pytest.fixture
async def road() -> AsyncIterator[tuple[Proxy, str]]:
    """A way to a Redis that can be made longer, and the URL at its near end."""
    port, near = free_port(), free_port()
    server = EmbeddedRedis(port=port)
    server.start()
    try:
        async with Proxy("127.0.0.1", near, "127.0.0.1", port) as proxy:
            yield proxy, f"redis://127.0.0.1:{near}"
    finally:
        server.stop()


async def answered(store: Store) -> None:
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            assert await store.run(ECHO, (), ("x",)) == b"x"
            return
        except StoreUnavailable:
            assert time.monotonic() < end, f"never: {store.last_failure}"
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("one_way_s", [0.02, 0.04, 0.1])
async def test_a_redis_that_is_far_from_the_start_is_reached_and_stays_so(
    road: tuple[Proxy, str], one_way_s: float
) -> None:
    proxy, url = road
    proxy.latency_s = one_way_s
    store = Store(url, cluster="test")
    try:
        await answered(store)
        assert 1.9 * one_way_s < store.round_trip.mean_s
        failed = store.stats.num_failed_calls
        for _ in range(5):
            assert await store.run(ECHO, (), ("y",)) == b"y"
        assert store.stats.num_failed_calls == failed
    finally:
        await store.close()


async def test_a_redis_that_becomes_far_is_reached_again(road: tuple[Proxy, str]) -> None:
    proxy, url = road
    store = Store(url, cluster="test", breaker_open_s=0.1)
    try:
        await answered(store)
        proxy.latency_s = 0.15
        await answered(store)
        assert await store.run(ECHO, (), ("y",)) == b"y"
    finally:
        await store.close()


async def test_closing_ends_a_connection_that_is_being_made(road: tuple[Proxy, str]) -> None:
    proxy, url = road
    proxy.is_open.clear()
    store = Store(url, cluster="test")
    with pytest.raises(StoreUnavailable):
        await store.run(ECHO, (), ("x",))
    await store.close()
    assert not [task for task in asyncio.all_tasks() if "Connections._connect" in repr(task.get_coro())]


def test_the_limit_follows_the_round_trip_and_its_variation() -> None:
    trip = RoundTrip()
    assert trip.limit_s == 0.0
    trip.observe(0.001)
    assert trip.limit_s == pytest.approx(0.003)
    trip.observe(0.2)
    assert trip.limit_s > 0.2, "one measurement of a longer way is enough"
    for _ in range(200):
        trip.observe(0.2)
    assert trip.limit_s == pytest.approx(0.2, rel=0.01)


def test_a_redis_that_stood_still_does_not_make_calls_wait_for_ever() -> None:
    trip = RoundTrip()
    for _ in range(50):
        trip.observe(3600.0)
    assert trip.limit_s <= 3 * MAX_ROUND_TRIP_S


def test_a_redis_of_which_some_calls_time_out_stays_available() -> None:
    availability = Availability()
    for second in range(60):
        availability.note(second, has_answered=second % 3 == 0)
        assert availability.is_up(second + 0.9)


def test_an_outage_begins_after_3_s_and_ends_once_calls_have_been_answered_for_2_s() -> None:
    availability = Availability()
    availability.note(0.0, has_answered=True)
    availability.note(10.0, has_answered=False)
    assert availability.is_up(10.0 + AWAY_AFTER_S - 0.1)
    assert not availability.is_up(10.0 + AWAY_AFTER_S)
    availability.note(20.0, has_answered=True)
    assert not availability.is_up(20.0 + BACK_AFTER_S - 0.1)
    availability.note(21.0, has_answered=False)
    assert availability.is_up(20.0 + BACK_AFTER_S), "a single failure does not prolong it"
    availability.note(21.5, has_answered=True)
    assert availability.is_up(100.0)


def test_one_answer_in_a_long_outage_does_not_end_it() -> None:
    availability = Availability()
    availability.note(0.0, has_answered=False)
    availability.note(9.0, has_answered=False)
    availability.note(10.0, has_answered=True)
    availability.note(10.5, has_answered=False)
    assert not [at_s for at_s in (10.6, 11.0, 11.9) if availability.is_up(at_s)]
    assert not availability.is_up(10.5 + AWAY_AFTER_S)
    availability.note(30.0, has_answered=False)
    assert not availability.is_up(30.0)


async def test_calls_that_time_out_count_in_the_time_that_calls_wait(road: tuple[Proxy, str]) -> None:
    proxy, url = road
    store = Store(url, cluster="test", breaker_open_s=0.0)
    try:
        await answered(store)
        mean_s = store.round_trip.mean_s
        proxy.is_open.clear()
        for _ in range(20):
            with pytest.raises(StoreUnavailable):
                await store.run(ECHO, (), ("x",))
        assert store.round_trip.mean_s == mean_s, "a Redis that stood still is no reason to wait longer"
        assert store.round_trip.waited_s > 0.05
    finally:
        proxy.is_open.set()
        await store.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_connections_that_broke_while_nobody_used_them_are_made_anew(
    run: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    """As the kernel breaks them some time after the way to Redis was cut; an event loop may refuse to write there."""

    async def breaking() -> None:
        port, near = free_port(), free_port()
        server = EmbeddedRedis(port=port)
        server.start()
        store = Store(f"redis://127.0.0.1:{near}", cluster="test")
        try:
            async with Proxy("127.0.0.1", near, "127.0.0.1", port) as proxy:
                await answered(store)
                for call in (store.run, store.run_patiently):
                    await asyncio.gather(*(call(ECHO, (), ("x",)) for _ in range(3)))
                    proxy.reset(None)
                    await asyncio.sleep(0.1)
                    assert await call(ECHO, (), ("y",)) == b"y"
                assert store.stats.num_failed_calls == 0
                await store.close()
        finally:
            server.stop()

    run(breaking())
