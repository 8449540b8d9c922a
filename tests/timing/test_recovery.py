"""How soon gateways are right again after Redis or a worker was lost: 3 s at most."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import redis

from services.cluster.embedded_redis import EmbeddedRedis
from services.cluster.prefix_index import PrefixIndex
from tests.services.cluster import test_prefix_index as index_tests
from tests.services.cluster import test_registry as registry_tests
from tests.timing.limits import within
from tests.waiting import until

LIMIT_S = 3.0

index, new_lease, new_publisher, watcher = (
    index_tests.index,
    registry_tests.new_lease,
    index_tests.new_publisher,
    registry_tests.watcher,
)


@pytest.mark.parametrize("watcher", [registry_tests.WATCH_POLL_S], indirect=True)
@pytest.mark.parametrize("fault", ["flushall", "restart", "freeze", "key_deleted"])
async def test_a_worker_is_listed_again(
    fault: str, watcher: Any, redis_server: EmbeddedRedis, client: "redis.Redis", new_lease: Callable[..., Any]
) -> None:
    lease = new_lease()
    await watcher.until(registry_tests.here)
    if fault == "flushall":
        client.flushall()
    elif fault == "key_deleted":
        client.delete(registry_tests.KEY)
    elif fault == "restart":
        redis_server.kill()
        await watcher.until(lambda view: view.is_stale)
        redis_server.start()
    else:
        os.kill(redis_server.pid, signal.SIGSTOP)
        await until(lambda: not lease.is_held)
        os.kill(redis_server.pid, signal.SIGCONT)
    with within(LIMIT_S):
        await until(lambda: client.exists(registry_tests.KEY) == 1)
        await watcher.until(registry_tests.here)


@pytest.mark.parametrize("fault", ["flushall", "restart", "head deleted", "keys deleted", "member taken"])
async def test_published_pages_are_back(
    fault: str,
    redis_server: EmbeddedRedis,
    client: "redis.Redis",
    index: PrefixIndex,
    new_publisher: Callable[..., Any],
) -> None:
    keys = index_tests.page_keys(5000)
    publisher = new_publisher(ttl_s=2.0)
    publisher.note(keys)
    await index_tests.flushed(publisher)
    if fault == "flushall":
        client.flushall()
    elif fault == "restart":
        redis_server.kill()
        redis_server.start()
    elif fault == "member taken":
        client.srem(index_tests.KEYS, keys[17])
    else:
        client.delete(index_tests.HEAD if fault == "head deleted" else index_tests.KEYS)

    def is_back() -> bool:
        try:
            return bool(client.hexists(index_tests.HEAD, "seq") and client.scard(index_tests.KEYS) == len(keys))
        except redis.RedisError:
            return False

    with within(LIMIT_S):
        await until(is_back)
    assert await index_tests.read_all(index) == set(keys)
