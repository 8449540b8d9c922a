"""Fingerprints that gateways share: spread, limits, foreign content, and life without Redis."""

import asyncio
import contextlib

import pytest

from services.cluster.quarantine import MAX_FINGERPRINTS, Quarantine
from services.cluster.redis_store import Store
from services.runtime.clock import ManualClock
from services.runtime.errors import StoreUnavailable
from tests.waiting import HANG_LIMIT_S


def fingerprint(number):
    return f"{number:064x}"


async def test_what_one_gateway_adds_the_others_refuse(patient_store):
    first, second = Quarantine(patient_store), Quarantine(patient_store)
    first.add(fingerprint(1))
    assert fingerprint(1) in first
    assert fingerprint(1) not in second
    await first.exchange()
    await second.exchange()
    assert fingerprint(1) in second
    assert fingerprint(2) not in second


async def test_it_ends(patient_store):
    clock = ManualClock()
    quarantine = Quarantine(patient_store, quarantine_s=10, clock=clock)
    quarantine.add(fingerprint(1))
    clock.advance(9.9)
    assert fingerprint(1) in quarantine
    clock.advance(0.2)
    assert fingerprint(1) not in quarantine
    late = Quarantine(patient_store, quarantine_s=0.3)
    late.add(fingerprint(2))
    await late.exchange()
    await asyncio.sleep(0.5)
    await late.exchange()
    assert fingerprint(2) not in late
    assert len(late) == 0


async def test_an_emptied_redis_has_it_again(patient_store, client):
    first, second = Quarantine(patient_store), Quarantine(patient_store)
    first.add(fingerprint(1))
    await first.exchange()
    client.delete(patient_store.keys.quarantine)
    await first.exchange()
    await second.exchange()
    assert fingerprint(1) in second


async def test_an_exchange_does_not_make_it_longer(patient_store):
    clock = ManualClock()
    quarantine = Quarantine(patient_store, quarantine_s=600, clock=clock)
    quarantine.add(fingerprint(1))
    await quarantine.exchange()
    await quarantine.exchange()
    clock.advance(601)
    assert fingerprint(1) not in quarantine


async def test_there_are_never_too_many(patient_store, client):
    clock = ManualClock()
    quarantine = Quarantine(patient_store, clock=clock)
    for number in range(MAX_FINGERPRINTS + 50):
        clock.advance(0.01)
        quarantine.add(fingerprint(number))
    assert len(quarantine) == MAX_FINGERPRINTS
    assert fingerprint(MAX_FINGERPRINTS + 49) in quarantine
    assert fingerprint(0) not in quarantine
    other = Quarantine(patient_store)
    for number in range(5000, 5100):
        other.add(fingerprint(number))
    await quarantine.exchange()
    await other.exchange()
    assert client.zcard(patient_store.keys.quarantine) == MAX_FINGERPRINTS
    assert client.pttl(patient_store.keys.quarantine) > 0


async def test_foreign_content_is_not_believed(patient_store, client):
    key, quarantine = patient_store.keys.quarantine, Quarantine(patient_store)
    client.set(key, "a text")
    quarantine.add(fingerprint(1))
    await quarantine.exchange()
    assert client.zcard(key) == 1
    client.zadd(key, {"no fingerprint": 9e15, fingerprint(7): 9e15, "\N{SNOWMAN}": 1.9e12, fingerprint(8): "inf"})
    await quarantine.exchange()
    assert [number for number in range(10) if fingerprint(number) in quarantine] == [1]
    now_ms = int((client.time())[0]) * 1000
    client.zadd(key, {"short": now_ms + 5000})
    before = patient_store.stats.num_rejected_values
    await quarantine.exchange()
    assert patient_store.stats.num_rejected_values == before + 1


async def test_without_redis_it_is_local_and_goes_on(redis_server, client, monkeypatch):
    store = Store(redis_server.url, cluster="test", breaker_open_s=0.05)
    quarantine = Quarantine(store, refresh_s=0.02)
    exchange, has_failed = quarantine.exchange, asyncio.Event()

    async def watched_exchange():
        try:
            await exchange()
        except StoreUnavailable:
            has_failed.set()
            raise

    monkeypatch.setattr(quarantine, "exchange", watched_exchange)
    redis_server.kill()
    quarantine.start()
    quarantine.add(fingerprint(1))
    async with asyncio.timeout(HANG_LIMIT_S):
        await has_failed.wait()
    assert fingerprint(1) in quarantine
    with pytest.raises(StoreUnavailable):
        await exchange()
    redis_server.start()
    async with asyncio.timeout(HANG_LIMIT_S):
        while client.zscore(store.keys.quarantine, fingerprint(1)) is None:  # noqa: ASYNC110 - across Redis
            await asyncio.sleep(0.01)
    await quarantine.close()
    await store.close()


async def test_the_exchange_goes_on_by_itself(patient_store):
    async with contextlib.AsyncExitStack() as stack:
        first, second = Quarantine(patient_store, refresh_s=60), Quarantine(patient_store, refresh_s=0.02)
        for quarantine in (first, second):
            quarantine.start()
            stack.push_async_callback(quarantine.close)
        await asyncio.sleep(0.1)
        first.add(fingerprint(1))
        async with asyncio.timeout(HANG_LIMIT_S):
            while fingerprint(1) not in second:  # noqa: ASYNC110 - across Redis
                await asyncio.sleep(0.01)
