"""One of several copies holds the lease, and none without Redis."""

import time
from collections.abc import AsyncIterator

import pytest

from services.cluster.leadership import Leadership
from services.cluster.redis_store import Store
from services.runtime.clock import ManualClock
from tests.limited_redis import LimitedRedis
from tests.waiting import until


@pytest.fixture
async def other_store(redis_server: LimitedRedis) -> AsyncIterator[Store]:
    store = Store(redis_server.url, cluster="test")
    yield store
    await store.close()


async def test_one_holds_it_until_it_gives_it_back(patient_store: Store, other_store: Store) -> None:
    key = patient_store.keys.autoscaler
    first, second = Leadership(patient_store, key, holder="a"), Leadership(other_store, key, holder="b")
    assert await first.renew()
    assert not await second.renew()
    assert second.other == "a"
    assert await first.renew(), "the holder renews"
    await second.close()
    assert not await second.renew(), "what is another's is not given back"
    await first.close()
    assert not first.is_held
    assert await second.renew()


async def test_a_dead_holders_lease_runs_out(patient_store: Store, other_store: Store) -> None:
    key = patient_store.keys.autoscaler
    dead, next_one = Leadership(patient_store, key, holder="a", ttl_s=0.2), Leadership(other_store, key, holder="b")
    await dead.renew()
    await until(lambda: not dead.is_held)
    await until(next_one.renew)
    assert not await dead.renew()
    assert dead.other == "b"


async def test_one_that_waits_acts_as_soon_as_the_lease_has_run_out(patient_store: Store, other_store: Store) -> None:
    key = patient_store.keys.autoscaler
    dead, next_one = Leadership(patient_store, key, holder="a", ttl_s=1.0), Leadership(other_store, key, holder="b")
    began_s = time.monotonic()
    assert await dead.renew()
    next_one.start()
    await until(lambda: next_one.is_held)
    assert time.monotonic() - began_s >= 0.8
    await next_one.close()


async def test_leases_tell_which_of_them_is_the_later_one(patient_store: Store, other_store: Store) -> None:
    key = patient_store.keys.autoscaler
    first, second = Leadership(patient_store, key, holder="a"), Leadership(other_store, key, holder="b")
    await first.renew()
    before = first.lease
    await second.renew()
    await first.renew()
    after = first.lease
    assert before is not None
    assert after is not None
    assert second.lease is None
    assert (after.holder, after.since_s) == ("a", before.since_s), "to renew it is not to take it"
    assert after.until_s > before.until_s
    await first.close()
    assert first.lease is None
    await second.renew()
    taken = second.lease
    await second.close()
    await first.renew()
    assert taken is not None
    assert first.lease is not None
    assert before.since_s < taken.since_s < first.lease.since_s


async def test_the_holder_stops_relying_on_it_before_it_runs_out(patient_store: Store) -> None:
    clock = ManualClock()
    leadership = Leadership(patient_store, patient_store.keys.autoscaler, holder="a", ttl_s=10.0, clock=clock)
    assert await leadership.renew()
    clock.advance(7.9)
    assert leadership.is_held
    clock.advance(0.2)
    assert not leadership.is_held


async def test_without_redis_nobody_acts_for_long() -> None:
    server = LimitedRedis()
    with server:
        store, clock = Store(server.url, cluster="test"), ManualClock()
        leadership = Leadership(store, store.keys.autoscaler, holder="a", ttl_s=10.0, clock=clock)
        assert await leadership.renew()
    assert await leadership.renew(), "it relies on the lease until that would have run out"
    assert "Redis" in leadership.failure
    clock.advance(8.1)
    assert not await leadership.renew()
    await leadership.close()
    await store.close()


async def test_renewing_goes_on_after_an_unexpected_error(
    patient_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that stopped renewing would never act again."""
    leadership, renew = Leadership(patient_store, patient_store.keys.autoscaler, holder="a"), Leadership.renew
    errors: list[Exception] = [KeyError("an error that nobody expects")]

    async def renew_or_fail(self: Leadership) -> bool:
        if errors:
            raise errors.pop()
        return await renew(self)

    monkeypatch.setattr(Leadership, "renew", renew_or_fail)
    leadership.start()
    await until(lambda: leadership.is_held)
    assert not errors
    await leadership.close()
