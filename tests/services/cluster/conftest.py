"""Fixtures with a real Redis-compatible server."""

import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import redis

from services.cluster import embedded_redis
from services.cluster.redis_store import Store
from services.cluster.registry import WorkerRecord, new_incarnation
from tests.limited_redis import GUIDE, OTHER_SERVER, LimitedRedis


@pytest.fixture(autouse=True)
def chosen_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the server that TANDEM_TEST_REDIS names instead of the embedded one."""
    if server := os.environ.get(OTHER_SERVER):
        monkeypatch.setattr(embedded_redis, "_binary", lambda: server)


@pytest.fixture
def redis_server() -> Iterator[LimitedRedis]:
    """What the product asks of it is within the rights that the guide gives to its user."""
    with LimitedRedis() as server:
        yield server
        if server.is_running():
            refused = server.refused()
            assert not refused, f"the rights in {GUIDE} do not suffice: {refused}"


@pytest.fixture
def client(redis_server: LimitedRedis) -> Iterator["redis.Redis"]:
    """A client that may do everything, to look at keys and to spoil them."""
    with redis.Redis.from_url(redis_server.admin_url) as opened:
        yield opened


@pytest.fixture
async def store(redis_server: LimitedRedis) -> AsyncIterator[Store]:
    opened = Store(redis_server.url, cluster="test")
    yield opened
    await opened.close()


@pytest.fixture
async def patient_store(redis_server: LimitedRedis) -> AsyncIterator[Store]:
    """Waits longer than in production, for tests that a busy machine must not disturb."""
    opened = Store(redis_server.url, cluster="test", timeout_s=2.0)
    yield opened
    await opened.close()


@pytest.fixture
def new_record() -> Callable[..., WorkerRecord]:
    def make(**changes: Any) -> WorkerRecord:
        fields: dict[str, Any] = {
            "id": "prefill-0",
            "role": "prefill",
            "pid": 4711,
            "host": "here",
            "address": "127.0.0.1:5000",
            "incarnation": new_incarnation(),
            "started_unix_ns": time.time_ns(),
            "state": "ready",
            "model": "demo",
            "exact": True,
            "page_size": 16,
            "layout_fingerprint": "f" * 32,
            "max_sequence_tokens": 2048,
        }
        return WorkerRecord(**(fields | changes))

    return make
