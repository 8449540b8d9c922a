"""Lease lengths, and the costs of a Redis that is slow, frozen, or dead."""

import asyncio
import os
import signal
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from services.cluster import rate_limits
from services.cluster.embedded_redis import EmbeddedRedis
from services.cluster.leadership import Leadership
from services.cluster.placements import PlacementStore, PlacementWriter
from services.cluster.redis_store import BREAKER_OPEN_S, Script, Store
from services.cluster.tenant_usage import TenantLimits
from services.runtime.errors import StoreUnavailable
from tests.limited_redis import LimitedRedis
from tests.services.cluster.test_placements import HAPPY, placement
from tests.timing.limits import within
from tests.waiting import until

ECHO = Script("return ARGV[1]")

MakeLimiter = Callable[..., Awaitable[Any]]


@pytest.fixture
async def other_store(redis_server: LimitedRedis) -> AsyncIterator[Store]:
    opened = Store(redis_server.url, cluster="test")
    yield opened
    await opened.close()


async def fails(store: Store) -> float:
    """Returns how long a failing call takes, in seconds."""
    began_s = time.monotonic()
    with pytest.raises(StoreUnavailable):
        await store.run(ECHO, (), ("x",))
    return time.monotonic() - began_s


async def test_a_frozen_redis_costs_one_timeout_per_second(store: Store, redis_server: EmbeddedRedis) -> None:
    assert await store.run(ECHO, (), ("x",)) == b"x"
    os.kill(redis_server.pid, signal.SIGSTOP)
    took_s = [await fails(store) for _ in range(50)]
    assert took_s[0] < 1.0
    assert statistics.median(took_s[1:]) < 0.02
    await asyncio.sleep(BREAKER_OPEN_S + 0.01)
    together_s = await asyncio.gather(*(fails(store) for _ in range(50)))
    assert sum(took > 0.05 for took in together_s) == 1
    os.kill(redis_server.pid, signal.SIGCONT)


async def test_a_waiting_copy_acts_when_the_lease_has_ended(patient_store: Store, other_store: Store) -> None:
    key = patient_store.keys.autoscaler
    dead, waiting = Leadership(patient_store, key, holder="a", ttl_s=1.0), Leadership(other_store, key, holder="b")
    began_s = time.monotonic()
    assert await dead.renew()
    waiting.start()
    await until(lambda: waiting.is_held)
    assert 0.8 <= time.monotonic() - began_s < 2.5, "the usual interval is 3 s"
    await waiting.close()


async def test_concurrency_slots_of_a_dead_gateway(gateways: MakeLimiter, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = TenantLimits(concurrency=1)
    dead, living = await gateways(starts=False), await gateways()
    assert rate_limits.HOLD_TTL_S <= 10
    monkeypatch.setattr(rate_limits, "HOLD_TTL_S", 1.0)
    began_s = time.monotonic()
    assert (await dead.take("t", allowed, hold="x")).limit == ""

    async def is_free() -> bool:
        return bool((await living.take("t", allowed, hold="y")).limit == "")

    await until(is_free)
    assert 0.8 <= time.monotonic() - began_s < 2.0


async def test_a_refusal_takes_little_time(gateways: MakeLimiter) -> None:
    limiter = await gateways()
    allowed = TenantLimits(requests_per_minute=1)
    await limiter.take("t", allowed, num_requests=1)
    with within(50 * 0.05):
        for _ in range(50):
            assert (await limiter.take("t", allowed, num_requests=1)).limit


@pytest.mark.parametrize("how", ["frozen", "killed"])
async def test_limits_without_redis(gateways: MakeLimiter, redis_server: EmbeddedRedis, how: str) -> None:
    limiter = await gateways(timeout_s=0.5)
    allowed = TenantLimits(requests_per_minute=100)
    assert (await limiter.take("t", allowed, num_requests=1)).limit == ""
    if how == "frozen":
        os.kill(redis_server.pid, signal.SIGSTOP)
    else:
        redis_server.kill()
    with within(2.5):
        for _ in range(9):
            await limiter.take("t", allowed, num_requests=1)
    if how == "frozen":
        os.kill(redis_server.pid, signal.SIGCONT)


async def test_closing_a_writer_without_redis(patient_store: Store, redis_server: EmbeddedRedis) -> None:
    writer = PlacementWriter(PlacementStore(patient_store))
    writer.start()
    redis_server.kill()
    with within(1.5):
        await writer.close(timeout_s=0.5)


async def test_a_transition_costs_less_than_20_microseconds(patient_store: Store) -> None:
    """Measures 2,000 requests a second with five transitions each, in CPU time of this process."""
    writer = PlacementWriter(PlacementStore(patient_store))
    writer.start()
    num_transitions = 0
    began_s = time.process_time()
    for tick in range(100):
        for request in range(20):
            for state in HAPPY[:5]:
                writer.post(placement(f"r{tick * 20 + request}", state))
                num_transitions += 1
        await asyncio.sleep(0.005)
    await writer.flush()
    cost_us = (time.process_time() - began_s) / num_transitions * 1e6
    await writer.close()
    assert writer.num_written >= 2000
    assert cost_us < 20
