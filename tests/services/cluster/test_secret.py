"""The secret that Redis holds for a cluster, and records that only its members can sign."""

import logging
from collections.abc import Callable

import pytest
import redis

from services.cluster.embedded_redis import EmbeddedRedis
from services.cluster.keys import Keys
from services.cluster.redis_store import Store, thread_client
from services.cluster.registry import WorkerLease, WorkerRecord, list_workers, watch_workers
from services.cluster.secret import share, share_through
from services.runtime.cluster_secret import Secrets
from tests.services.cluster.test_registry import new_lease as new_lease

NewRecord = Callable[..., WorkerRecord]
KEYS = Keys("test")
CONFIGURED, OTHER = "1" * 64, "2" * 64


@pytest.fixture
def store(patient_store: Store) -> Store:
    return patient_store


async def test_the_first_process_puts_its_secret_there_and_the_others_take_it(
    redis_server: EmbeddedRedis, store: Store
) -> None:
    first, second, third = Secrets(), Secrets(), Secrets()
    client = thread_client(redis_server.url)
    share(client, KEYS, first)
    share(client, KEYS, second)
    await share_through(store, third)
    assert first() == second() == third() == (client.get(KEYS.secret),)
    client.close()


@pytest.mark.parametrize("spoil", ["FLUSHALL", "SET {key} short", "LPUSH {key} x", "SET {key} " + "z" * 64])
async def test_a_redis_that_has_lost_it_has_it_back(
    redis_server: EmbeddedRedis, client: "redis.Redis", store: Store, spoil: str
) -> None:
    secrets = Secrets()
    await share_through(store, secrets)
    held = secrets()
    client.delete(KEYS.secret)
    client.execute_command(*spoil.format(key=KEYS.secret).split())
    await share_through(store, secrets)
    assert (client.get(KEYS.secret),) == held == secrets()


async def test_processes_agree_where_a_new_one_came_first_after_a_loss(client: "redis.Redis", store: Store) -> None:
    old, new = Secrets(), Secrets()
    await share_through(store, old)
    before = old()
    client.delete(KEYS.secret)
    await share_through(store, new)
    await share_through(store, old)
    assert old() == (*new(), *before)


async def test_a_configured_secret_is_neither_shown_to_redis_nor_taken_from_it(
    client: "redis.Redis", store: Store
) -> None:
    secrets = Secrets(value=CONFIGURED)
    await share_through(store, secrets)
    assert client.get(KEYS.secret) is None
    client.set(KEYS.secret, OTHER)
    await share_through(store, secrets)
    assert secrets() == (CONFIGURED.encode(),)


async def first_of(store: Store, secrets: Secrets) -> dict[str, WorkerRecord]:
    return (await list_workers(store, secrets))[1]


@pytest.mark.parametrize("is_shared", [True, False])
async def test_a_members_record_is_believed(
    new_lease: Callable[..., WorkerLease], store: Store, is_shared: bool
) -> None:
    secrets = [Secrets() if is_shared else Secrets(value=CONFIGURED) for _ in range(2)]
    lease = new_lease(secrets=secrets[0])
    async for membership in watch_workers(store, secrets=secrets[1]):
        if membership.workers:
            break
    assert membership.workers[0].id == lease.record.id


async def test_records_of_others_are_left_out_and_named_once(
    new_lease: Callable[..., WorkerLease], new_record: NewRecord, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    new_lease(new_record(id="unsigned-0"))
    new_lease(new_record(id="other-0"), secrets=Secrets(value=OTHER))
    new_lease(new_record(id="ours-0"), secrets=Secrets(value=CONFIGURED))
    async for _ in watch_workers(store):  # somebody without a secret believes all of them, as before
        if len((await list_workers(store))[1]) == 3:
            break
    assert set(await first_of(store, Secrets(value=CONFIGURED))) == {"ours-0"}
    async for membership in watch_workers(store, secrets=Secrets(value=CONFIGURED), poll_s=0.05):
        assert [worker.id for worker in membership.workers] == ["ours-0"]
        break
    told = sorted(record.worker for record in caplog.records if "not used" in record.message)  # type: ignore[attr-defined]
    assert told == ["other-0", "unsigned-0"]


async def test_a_record_with_another_address_is_not_believed(
    new_lease: Callable[..., WorkerLease], client: "redis.Redis", store: Store
) -> None:
    lease = new_lease(secrets=Secrets(value=CONFIGURED), ttl_s=60, beat_s=60)
    async for _ in watch_workers(store):
        if client.exists(KEYS.worker(lease.record.id)):
            break
    key = KEYS.worker(lease.record.id)
    changed = client.hget(key, "record").replace(b"127.0.0.1:5000", b"127.0.0.1:6666")  # type: ignore[union-attr]
    client.hset(key, "record", changed)
    assert b"6666" in client.hget(key, "record")  # type: ignore[operator]
    assert await first_of(store, Secrets(value=CONFIGURED)) == {}
    client.hset(key, "proof", "00" * 5000)
    assert await first_of(store, Secrets(value=CONFIGURED)) == {}
