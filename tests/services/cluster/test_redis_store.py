"""The connection: what a healthy, frozen, dead and restarted Redis costs."""

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
import redis

from services.cluster.embedded_redis import EmbeddedRedis
from services.cluster.redis_store import BREAKER_OPEN_S, MAX_LATE_CALLS, PATIENT_TIMEOUT_S, Script, Store, is_permanent
from services.cluster.registry import watch_workers
from services.runtime.clock import ManualClock
from services.runtime.errors import StoreRefused, StoreUnavailable
from tests.limited_redis import LimitedRedis
from tests.waiting import HANG_LIMIT_S, settle, until

ECHO = Script("return ARGV[1]")


async def fails(store: Store) -> float:
    """Seconds that a failing call took."""
    began_s = time.monotonic()
    with pytest.raises(StoreUnavailable):
        await store.run(ECHO, (), ("x",))
    return time.monotonic() - began_s


async def test_scripts_answer_and_survive_a_restart_and_a_flush(
    patient_store: Store, redis_server: LimitedRedis
) -> None:
    store = patient_store
    assert await store.run(ECHO, (), ("x",)) == b"x"
    redis_server.kill()
    await fails(store)
    redis_server.start()
    await asyncio.sleep(1.01)
    assert await store.run(ECHO, (), ("y",)) == b"y"
    with redis.Redis.from_url(redis_server.admin_url) as client:
        client.script_flush()
    assert await store.run(ECHO, (), ("z",)) == b"z"


async def test_a_frozen_redis_costs_one_timeout_per_second(redis_server: LimitedRedis) -> None:
    clock = ManualClock()
    store = Store(redis_server.url, cluster="test", timeout_s=2.0, clock=clock)
    assert await store.run(ECHO, (), ("x",)) == b"x"
    os.kill(redis_server.pid, signal.SIGSTOP)
    for _ in range(50):
        await fails(store)
    assert (store.stats.num_failed_calls, store.stats.num_skipped_calls) == (1, 49)
    assert not store.is_available
    clock.advance(BREAKER_OPEN_S + 0.01)
    await asyncio.gather(*(fails(store) for _ in range(50)))
    assert (store.stats.num_failed_calls, store.stats.num_skipped_calls) == (2, 98)
    os.kill(redis_server.pid, signal.SIGCONT)
    clock.advance(BREAKER_OPEN_S + 0.01)
    assert await store.run(ECHO, (), ("x",)) == b"x"
    assert store.is_available
    await store.close()


async def test_who_is_patient_waits_for_a_frozen_redis_whatever_others_met(
    store: Store, redis_server: EmbeddedRedis
) -> None:
    os.kill(redis_server.pid, signal.SIGSTOP)
    await fails(store)
    patient = asyncio.create_task(store.run_patiently(ECHO, (), ("x",)))
    # Three times as long as others wait, which are not even let through now.
    assert await asyncio.wait((patient,), timeout=0.3) == (set(), {patient})
    await fails(store)
    assert store.stats.num_skipped_calls == 1
    os.kill(redis_server.pid, signal.SIGCONT)
    assert await patient == b"x"
    assert not store._left_calls


async def test_patience_ends(store: Store, redis_server: EmbeddedRedis) -> None:
    os.kill(redis_server.pid, signal.SIGSTOP)
    began_s = time.monotonic()
    with pytest.raises(StoreUnavailable):
        await store.run_patiently(ECHO, (), ("x",))
    os.kill(redis_server.pid, signal.SIGCONT)
    assert time.monotonic() - began_s > PATIENT_TIMEOUT_S / 2
    assert store.stats.num_failed_calls == 1
    assert store.is_available, "others have not met anything"


async def test_a_frozen_redis_does_not_block_the_event_loop(redis_server: EmbeddedRedis) -> None:
    """Only the event loop can wake Redis here, so the test hangs if the loop is blocked."""
    store = Store(redis_server.url, cluster="test", timeout_s=HANG_LIMIT_S)
    assert await store.run(ECHO, (), ("x",)) == b"x"
    os.kill(redis_server.pid, signal.SIGSTOP)
    calls = [asyncio.create_task(store.run(ECHO, (), (f"x{number}",))) for number in range(5)]
    await settle()
    assert not any(call.done() for call in calls)
    os.kill(redis_server.pid, signal.SIGCONT)
    assert await asyncio.gather(*calls) == [f"x{number}".encode() for number in range(5)]
    await store.close()


async def test_a_cancelled_call_leaves_the_connection_usable(store: Store, redis_server: EmbeddedRedis) -> None:
    os.kill(redis_server.pid, signal.SIGSTOP)
    call = asyncio.create_task(store.run(ECHO, (), ("old",)))
    await asyncio.sleep(0.02)
    call.cancel()
    await asyncio.wait((call,))
    assert call.cancelled()
    os.kill(redis_server.pid, signal.SIGCONT)
    for index in range(20):
        assert await store.run(ECHO, (), (f"new{index}",)) == f"new{index}".encode()


async def test_only_a_few_late_replies_keep_a_connection(redis_server: LimitedRedis) -> None:
    store = Store(redis_server.url, cluster="test", timeout_s=2.0)
    late: list[bytes] = []
    assert await store.run(ECHO, (), ("first",)) == b"first"
    os.kill(redis_server.pid, signal.SIGSTOP)
    calls = [store.run(ECHO, (), (f"late{number}",), on_late=late.append) for number in range(3 * MAX_LATE_CALLS)]
    ended = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(error) for error in ended} == {StoreUnavailable}
    os.kill(redis_server.pid, signal.SIGCONT)
    await until(lambda: not store._left_calls)
    assert len(late) == MAX_LATE_CALLS
    await store.close()


async def test_a_cancellation_passes_at_any_moment_also_while_connecting(redis_server: EmbeddedRedis) -> None:
    for num_turns in range(25):
        store = Store(redis_server.url, cluster="test")
        call = asyncio.create_task(store.run(ECHO, (), ("x",)))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        is_late = call.done()
        call.cancel()
        await asyncio.wait((call,), timeout=1)
        assert call.cancelled() or is_late
        await store.close()


async def test_a_watch_ends_at_any_moment(redis_server: EmbeddedRedis) -> None:
    async def watch(store: Store) -> None:
        async with contextlib.aclosing(watch_workers(store)) as memberships:
            async for _ in memberships:
                pass

    for num_turns in range(0, 60, 2):
        store = Store(redis_server.url, cluster="test")
        watching = asyncio.create_task(watch(store))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await asyncio.sleep(0.02 if num_turns % 4 else 0)
        watching.cancel()
        await asyncio.wait((watching,), timeout=3)
        assert watching.cancelled()
        await store.close()


async def test_nobody_listening_fails_fast(tmp_path: Path) -> None:
    for url in (f"unix://{tmp_path}/none.sock", "redis://127.0.0.1:1"):
        store = Store(url, cluster="test")
        assert await fails(store) < 1.0
        await store.close()


async def test_a_script_error_is_no_answer(store: Store) -> None:
    with pytest.raises(StoreUnavailable):
        await store.run(Script("return redis.call('GET')"), (), ())


async def test_connections_that_do_not_say_in_time_that_they_are_closed_are_closed(store: Store) -> None:
    assert await store.run(ECHO, (), ("x",)) == b"x"
    async with contextlib.aclosing(store.subscriber()) as subscription:
        await subscription.subscribe(store.keys.workers_changed)
    pools = store._client.connection_pool, store._patient_client.connection_pool
    connections = [connection for pool in pools for connection in pool._available_connections]
    assert len(connections) == 2
    for connection in connections:
        connection.socket_connect_timeout = 0.0
    await store.close()
    assert not any(connection.is_connected for connection in connections)


@pytest.mark.parametrize(
    ("error", "is_lasting"),
    [
        (redis.ResponseError("user_script:3: too many results to unpack script: 1, on @user_script:3."), True),
        (redis.ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"), True),
        (redis.exceptions.NoPermissionError("this user has no permissions to run the 'get' command"), True),
        (redis.ResponseError("BUSY Redis is busy running a script."), False),
        (redis.ResponseError("Error running script: @user_script:1: -READONLY You can't write against it."), False),
        (redis.ResponseError("MISCONF Redis is configured to save RDB snapshots"), False),
        (redis.ResponseError("NOREPLICAS Not enough good replicas to write."), False),
        (redis.exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), False),
        (redis.ReadOnlyError("You can't write against a read only replica."), False),
        (redis.exceptions.MasterDownError("Link with MASTER is down"), False),
        (redis.exceptions.ClusterDownError("CLUSTERDOWN The cluster is down"), False),
        (redis.exceptions.TryAgainError("TRYAGAIN"), False),
        (redis.BusyLoadingError("Redis is loading the dataset in memory"), False),
        (redis.AuthenticationError("WRONGPASS"), False),
        (redis.ConnectionError("refused"), False),
        (redis.TimeoutError("late"), False),
        (OSError("gone"), False),
        (None, False),
    ],
)
def test_which_errors_last(error: Exception | None, is_lasting: bool) -> None:
    assert is_permanent(error) is is_lasting


async def test_a_refused_command_opens_no_breaker(patient_store: Store, redis_server: LimitedRedis) -> None:
    for body in ("return unpack(ARGV)", "return redis.call('GET')", "return redis.call('KEYS', '*')"):
        with pytest.raises(StoreRefused, match="Redis refused a command"):
            await patient_store.run(Script(body), (), ["x"] * 9000)
        assert patient_store.is_available
        assert await patient_store.run(ECHO, (), ("x",)) == b"x"
    assert patient_store.stats.num_failed_calls == 3
    assert redis_server.refused() == ["keys: command (lua)"]


async def test_a_full_redis_still_answers_reads(patient_store: Store, client: redis.Redis) -> None:
    write = Script("return redis.call('SET', KEYS[1], ARGV[1])")
    client.config_set("maxmemory", 1)
    with pytest.raises(StoreUnavailable) as caught:
        await patient_store.run(write, (patient_store.keys.epoch,), ("x",))
    assert not isinstance(caught.value, StoreRefused), "it may be repeated"
    assert patient_store.is_available


async def test_a_redis_that_cannot_be_written_counts_as_away(patient_store: Store, client: redis.Redis) -> None:
    write = Script("return redis.call('SET', KEYS[1], ARGV[1])")
    client.replicaof("127.0.0.1", "1")
    with pytest.raises(StoreUnavailable) as caught:
        await patient_store.run(write, (patient_store.keys.epoch,), ("x",))
    assert not isinstance(caught.value, StoreRefused)
    assert not patient_store.is_available
