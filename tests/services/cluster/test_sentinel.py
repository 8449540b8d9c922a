"""A Redis that sentinels watch: found through them, and found again when another server has become the primary."""

import asyncio
import signal
import time
from collections.abc import Iterator

import pytest
import redis

from services.cluster.probe import probe
from services.cluster.redis_store import Script, Store, run_script, thread_client
from services.cluster.redis_url import Sentinels, check_url, sentinels_of
from services.runtime.config import redacted
from services.runtime.errors import ConfigError, StoreUnavailable
from tests.sentinels import ADMIN, SentinelSet, sentinel_set
from tests.waiting import HANG_LIMIT_S

SET = Script("redis.call('SET', KEYS[1], ARGV[1]) return ARGV[1]")
PATIENCE_S = HANG_LIMIT_S


@pytest.fixture(scope="module")
def watched() -> Iterator[SentinelSet]:
    with sentinel_set() as found:
        yield found


async def until_written(store: Store, value: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            assert await store.run(SET, ("tandem:{c}:key",), (value,)) == value.encode()
            return
        except StoreUnavailable:
            assert time.monotonic() < end, f"never: {store.last_failure}"
            await asyncio.sleep(0.05)


def write_from_thread(client: "redis.Redis", value: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            assert run_script(client, SET, ("tandem:{c}:key",), (value,)) == value.encode()
            return
        except redis.RedisError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
async def test_both_clients_find_the_next_primary(watched: SentinelSet, number: signal.Signals) -> None:
    store = Store(watched.url, cluster="c")
    try:
        with thread_client(watched.url) as client:
            await until_written(store, "before")
            await asyncio.to_thread(write_from_thread, client, "before")
            first = watched.primary
            watched.kill(first, number)
            await asyncio.to_thread(watched.failed_over, first)
            await until_written(store, "after")
            await asyncio.to_thread(write_from_thread, client, "after")
            if number is signal.SIGSTOP:  # it comes back as a replica, and nobody writes there
                watched.kill(first, signal.SIGCONT)
                await until_written(store, "and again")
                await asyncio.to_thread(write_from_thread, client, "and again")
                await asyncio.to_thread(is_replica, watched, first)
    finally:
        await store.close()


def is_replica(watched: SentinelSet, port: int) -> None:
    with redis.Redis(port=port, username=ADMIN, password="", socket_timeout=5.0) as client:
        end = time.monotonic() + PATIENCE_S
        while client.info("replication")["role"] != "slave" or client.get("tandem:{c}:key") != b"and again":
            assert time.monotonic() < end
            time.sleep(0.1)


def test_doctor_asks_the_primary_and_nobody_was_refused(watched: SentinelSet) -> None:
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            assert probe(watched.url).ping_s > 0
            break
        except StoreUnavailable:  # another test has just killed the primary
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
    with redis.Redis(port=watched.primary, username=ADMIN, password="") as admin:
        assert admin.acl_log() == [], "the users of the guide"


async def test_a_sentinel_that_is_gone_does_not_matter(watched: SentinelSet) -> None:
    url = watched.url.replace("127.0.0.1:", "127.0.0.1:1,127.0.0.1:", 1)
    store = Store(url, cluster="c")
    try:
        await until_written(store, "x")
        with thread_client(url) as client:
            await asyncio.to_thread(write_from_thread, client, "y")
    finally:
        await store.close()


def test_a_url_names_the_sentinels_the_service_and_who_we_are() -> None:
    url = "rediss+sentinel://tandem:p%40ss@one,two:26380,[::1]:7/main/3?ssl_ca_certs=/ca&sentinel_username=u&sentinel_password=s"
    assert sentinels_of(url) == Sentinels(
        addresses=(("one", 26379), ("two", 26380), ("::1", 7)),
        service="main",
        server={"username": "tandem", "password": "p@ss", "db": 3, "ssl_ca_certs": "/ca"},
        sentinel={"ssl_ca_certs": "/ca", "username": "u", "password": "s"},
        has_tls=True,
    )
    assert sentinels_of("redis://127.0.0.1") is None
    assert redacted(url).count("***") == 3
    assert "p%40ss" not in redacted(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://host:26379",
        "redis+sentinel:///service",
        "redis+sentinel://host:port/service",
        "redis+sentinel://a,,b/service",
        "redis://:hunter2@host?no_such=1",
        "rediss://:hunter2@host?ssl_ca_certs=/no/such/file",
        "redis+sentinel://:hunter2@a/service?sentinel_user=x",
    ],
)
def test_what_could_never_connect_is_a_settings_error(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_url(url)
    assert "hunter2" not in caught.value.message
