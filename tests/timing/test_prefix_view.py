"""How soon a view of cached prefixes is right again after a fault, and stale after a silence of Redis."""

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import redis

from gateway.topology.prefix_view import MAX_AGE_S
from services.cluster.embedded_redis import EmbeddedRedis
from services.cluster.redis_store import Store
from tests.gateway.topology import test_prefix_view as view_tests
from tests.timing.limits import within
from tests.timing.test_recovery import LIMIT_S
from tests.waiting import until

client, new_publisher, redis_server, store = (
    view_tests.client,
    view_tests.new_publisher,
    view_tests.redis_server,
    view_tests.store,
)


@pytest.mark.parametrize("fault", ["flushall", "restart", "freeze", "keys deleted"])
async def test_it_is_right_again(
    fault: str, store: Store, redis_server: EmbeddedRedis, client: "redis.Redis", new_publisher: Callable[..., Any]
) -> None:
    keys, publisher = view_tests.page_keys(100), new_publisher("w0")
    store._timeout_s = 0.3
    publisher.note(keys[:10])
    await view_tests.flushed(publisher)
    async with view_tests.following(store) as view:
        await until(lambda: view.longest(keys) == {"w0": 10})
        if fault == "flushall":
            client.flushall()
        elif fault == "restart":
            redis_server.kill()
            await until(lambda: view.is_stale)
            redis_server.start()
        elif fault == "freeze":
            os.kill(redis_server.pid, signal.SIGSTOP)
            with within(MAX_AGE_S + 2):
                await until(lambda: view.is_stale)
            os.kill(redis_server.pid, signal.SIGCONT)
        else:
            client.delete(f"{view_tests.HEAD}:keys")
        publisher.note(keys[10:15])
        with within(LIMIT_S):
            await until(lambda: view.longest(keys) == {"w0": 15} and not view.is_stale)


async def test_a_worker_that_died_with_the_memory_of_redis_is_forgotten(
    store: Store, client: "redis.Redis", new_publisher: Callable[..., Any]
) -> None:
    keys = view_tests.page_keys(10)
    alive, dead = new_publisher("w0"), new_publisher("w1")
    for publisher in (alive, dead):
        publisher.note(keys)
        await view_tests.flushed(publisher)
    async with view_tests.following(store) as view:
        await until(lambda: view.longest(keys) == {"w0": 10, "w1": 10})
        dead._delete = lambda: None  # as in a process that was killed
        await asyncio.to_thread(dead.release)
        client.flushall()
        with within(LIMIT_S):
            await until(lambda: view.longest(keys) == {"w0": 10})
