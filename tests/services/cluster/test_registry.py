"""Leases and membership over a real Redis that is flushed, frozen, killed, spoiled and restarted."""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec
import pytest
import redis

from services.cluster import registry
from services.cluster.embedded_redis import EmbeddedRedis
from services.cluster.keys import Keys
from services.cluster.redis_store import Store, run_script
from services.cluster.registry import (
    LEASE_TTL_S,
    WATCH_POLL_S,
    Membership,
    MembershipView,
    RegistryReader,
    WorkerLease,
    WorkerRecord,
    list_workers,
    watch_workers,
)
from services.cluster.registry_scripts import RENEW
from services.runtime.errors import LeaseLost
from services.runtime.worker_state import UNLISTED
from tests.waiting import HANG_LIMIT_S, until

NewRecord = Callable[..., WorkerRecord]
KEY = "tandem:{test}:worker:prefill-0"
LEASES, CHANGES, GONE = Keys("test").workers


class Watcher:
    """Follows the membership in the background."""

    def __init__(self, store: Store, *, poll_s: float = WATCH_POLL_S) -> None:
        self.seen: list[Membership] = []
        self._store = store
        self._poll_s = poll_s
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        async with contextlib.aclosing(watch_workers(self._store, poll_s=self._poll_s)) as memberships:
            async for membership in memberships:
                async with self._changed:
                    self.seen.append(membership)
                    self._changed.notify_all()

    async def until(self, holds: Callable[[Membership], bool], *, timeout_s: float = HANG_LIMIT_S) -> float:
        """Seconds until the view is such."""
        began_s = time.monotonic()
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(lambda: bool(self.seen) and holds(self.seen[-1]))
        return time.monotonic() - began_s


@pytest.fixture(params=[WATCH_POLL_S])
async def watcher(store: Store, request: pytest.FixtureRequest) -> AsyncIterator[Watcher]:
    watching = Watcher(store, poll_s=request.param)
    task = asyncio.create_task(watching.run())
    yield watching
    task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled()


@pytest.fixture
def new_lease(redis_server: EmbeddedRedis, new_record: NewRecord) -> Iterator[Callable[..., WorkerLease]]:
    leases: list[WorkerLease] = []

    def start(record: WorkerRecord | None = None, **settings: object) -> WorkerLease:
        lease = WorkerLease(redis_server.url, cluster="test", record=record or new_record(), **settings)  # type: ignore[arg-type]
        lease.start()
        leases.append(lease)
        return lease

    yield start
    for lease in leases:
        lease.release()


def list_as_a_lease_does(client: "redis.Redis", *worker_ids: str | bytes, ttl_s: float = 60.0) -> None:
    """Adds ids to the change log."""
    now_us = time.time_ns() // 1000
    for number, worker_id in enumerate(worker_ids):
        client.zadd(LEASES, {worker_id: (now_us // 1000) + 1000 * ttl_s})
        client.zadd(CHANGES, {worker_id: now_us + number})


def ids(membership: Membership) -> list[str]:
    return [record.id for record in membership.workers]


@pytest.fixture
def store(patient_store: Store) -> Store:
    return patient_store


def here(membership: Membership) -> bool:
    return ids(membership) == ["prefill-0"] and not membership.is_stale


@pytest.mark.parametrize("watcher", [60.0], indirect=True, ids=["told, not polled"])
async def test_a_worker_comes_changes_and_leaves(
    watcher: Watcher, new_lease: Callable[..., WorkerLease], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.cluster.redis_store.THREAD_TIMEOUT_S", 10.0)
    lease = new_lease(beat_s=60.0, ttl_s=180.0)  # so that no beat brings what should be published now
    await watcher.until(here)
    assert watcher.seen[-1].workers == (lease.record,)
    await until(lambda: lease.is_held)  # what Redis has done it tells the lease's thread a moment later
    lease.update(state="draining", running=3)
    await watcher.until(lambda view: view.workers[0].state == "draining")
    assert watcher.seen[-1].workers[0].running == 3
    lease.release()
    await watcher.until(lambda view: not view.workers)


async def test_counts_are_published_at_the_next_beat_and_are_no_change(
    watcher: Watcher, new_lease: Callable[..., WorkerLease], store: Store, client: "redis.Redis"
) -> None:
    lease = new_lease(beat_s=0.01)
    await watcher.until(here)
    number = client.zscore(CHANGES, "prefill-0")
    lease.update(pages_total=100, pages_free=60, pages_used=40)

    async def is_written() -> bool:
        return (await list_workers(store))[1]["prefill-0"].pages_free == 60

    await until(is_written)
    assert client.zscore(CHANGES, "prefill-0") == number
    lease.update(channels={"decode-0": "tcp"})
    await watcher.until(lambda view: view.workers[0].channels == {"decode-0": "tcp"})
    assert watcher.seen[-1].workers[0].pages_free == 60


async def test_the_order_is_by_role_and_id(
    watcher: Watcher, new_lease: Callable[..., WorkerLease], new_record: NewRecord
) -> None:
    for role, worker_id in (("prefill", "prefill-1"), ("decode", "decode-0"), ("prefill", "prefill-0")):
        new_lease(new_record(id=worker_id, role=role))
    await watcher.until(lambda view: ids(view) == ["decode-0", "prefill-0", "prefill-1"])


async def test_clusters_do_not_see_each_other(
    redis_server: EmbeddedRedis, new_lease: Callable[..., WorkerLease], watcher: Watcher
) -> None:
    new_lease()
    await watcher.until(here)
    other = Store(redis_server.url, cluster="other", timeout_s=2.0)
    assert (await list_workers(other))[1] == {}
    await other.close()


async def test_a_dead_worker_expires(
    watcher: Watcher, client: "redis.Redis", new_lease: Callable[..., WorkerLease], new_record: NewRecord
) -> None:
    new_lease(new_record(id="prefill-1"))
    # A process that was killed: its record exists and nothing renews it.
    ghost = new_record()
    raw = msgspec.json.encode(ghost)
    client.hset(KEY, mapping={"order": ghost.order, "record": raw, "state": ghost.state})
    client.pexpire(KEY, 1500)
    list_as_a_lease_does(client, "prefill-0", ttl_s=1.5)
    await watcher.until(lambda view: len(view.workers) == 2)
    await watcher.until(lambda view: ids(view) == ["prefill-1"])
    assert client.zrange(LEASES, 0, -1) == client.zrange(CHANGES, 0, -1) == [b"prefill-1"]
    ttl_ms = client.pttl("tandem:{test}:worker:prefill-1")
    assert 1500 < ttl_ms <= 3000


@pytest.mark.parametrize("fault", ["flushall", "restart", "freeze", "key_deleted"])
async def test_the_record_is_back(
    fault: str,
    watcher: Watcher,
    store: Store,
    redis_server: EmbeddedRedis,
    client: "redis.Redis",
    new_lease: Callable[..., WorkerLease],
) -> None:
    lease = new_lease()
    await watcher.until(here)
    if fault == "flushall":
        client.flushall()
    elif fault == "key_deleted":
        client.delete(KEY)
    elif fault == "restart":
        redis_server.kill()
        await watcher.until(lambda view: view.is_stale)
        redis_server.start()
    else:
        os.kill(redis_server.pid, signal.SIGSTOP)
        await watcher.until(lambda view: view.is_stale)
        await until(lambda: not lease.is_held)
        os.kill(redis_server.pid, signal.SIGCONT)
    await until(lambda: client.exists(KEY) == 1)
    await watcher.until(here)
    if fault != "key_deleted" and fault != "freeze":
        assert all(ids(view) == ["prefill-0"] for view in watcher.seen if view.workers or view is not watcher.seen[0])


async def test_the_last_view_stays_while_redis_is_away(
    watcher: Watcher, redis_server: EmbeddedRedis, new_lease: Callable[..., WorkerLease]
) -> None:
    new_lease()
    await watcher.until(here)
    redis_server.kill()
    await watcher.until(lambda view: view.is_stale)
    await asyncio.sleep(4)
    assert ids(watcher.seen[-1]) == ["prefill-0"]


async def test_a_watcher_and_a_lease_begin_without_redis_and_the_log_says_so(
    redis_server: EmbeddedRedis, new_record: NewRecord, caplog: pytest.LogCaptureFixture
) -> None:
    url = redis_server.url
    redis_server.kill()
    store = Store(url, cluster="test")
    lease = WorkerLease(url, cluster="test", record=new_record())
    lease.start()
    async with contextlib.aclosing(watch_workers(store)) as memberships:
        assert await anext(memberships) == Membership((), is_stale=True)
        await until(lambda: UNLISTED in [record.message for record in caplog.records])
        redis_server.start()
        async with asyncio.timeout(HANG_LIMIT_S):
            while not here(await anext(memberships)):
                pass
    lease.release()
    await store.close()
    (said,) = [record for record in caplog.records if record.message == UNLISTED]
    assert said.__dict__["error"]


async def test_each_look_tells_when_leases_were_renewed(
    store: Store, new_lease: Callable[..., WorkerLease], new_record: NewRecord
) -> None:
    """A gateway does not take a worker that renews for dead, however late its answers are."""
    told: list[dict[str, float]] = []
    new_lease(new_record())
    new_lease(new_record(id="prefill-1"))
    watching = watch_workers(
        store, suspects=lambda: ("nobody", "prefill-0"), on_renewals=lambda ages_s: told.append(dict(ages_s))
    )
    async with contextlib.aclosing(watching) as memberships, asyncio.timeout(HANG_LIMIT_S):
        while len((await anext(memberships)).workers) < 2:
            pass
    assert told[-1].keys() == {"prefill-0"}
    assert 0 <= told[-1]["prefill-0"] < LEASE_TTL_S


async def test_a_newer_incarnation_takes_over_and_the_older_one_is_told(
    client: "redis.Redis", new_lease: Callable[..., WorkerLease], new_record: NewRecord, watcher: Watcher
) -> None:
    lost: list[LeaseLost] = []
    told = threading.Event()

    def on_lost(error: LeaseLost) -> None:
        lost.append(error)
        told.set()

    old = new_lease(new_record(), on_lost=on_lost)
    await watcher.until(here)
    new = new_lease(new_record())
    await watcher.until(lambda view: view.workers == (new.record,))
    assert await asyncio.to_thread(told.wait, HANG_LIMIT_S)
    assert not old.is_held
    old.release()
    await asyncio.sleep(0.2)
    assert client.hget(KEY, "order") == new.record.order.encode()
    assert len(lost) == 1
    assert watcher.seen[-1].workers == (new.record,)


async def test_an_older_incarnation_never_overwrites_a_newer_one(
    client: "redis.Redis", new_lease: Callable[..., WorkerLease], new_record: NewRecord
) -> None:
    now_ns = time.time_ns()
    told = threading.Event()
    newer = new_lease(new_record(started_unix_ns=now_ns))
    await until(lambda: newer.is_held)
    new_lease(new_record(started_unix_ns=now_ns - 1), on_lost=lambda _: told.set())
    assert await asyncio.to_thread(told.wait, HANG_LIMIT_S)
    assert client.hget(KEY, "order") == newer.record.order.encode()


@pytest.mark.parametrize("garbage", ["string", "list", "endless", "no_order", "from_the_future", "bad_order"])
async def test_garbage_under_its_key_does_not_keep_a_worker_out(
    garbage: str,
    client: "redis.Redis",
    watcher: Watcher,
    new_lease: Callable[..., WorkerLease],
    new_record: NewRecord,
) -> None:
    future = new_record(started_unix_ns=2**63 - 1)
    if garbage == "string":
        client.set(KEY, "x")
    elif garbage == "list":
        client.rpush(KEY, "x")
    elif garbage == "endless":
        client.hset(KEY, mapping={"order": future.order, "record": msgspec.json.encode(future)})
    elif garbage == "no_order":
        client.hset(KEY, "record", "x")
    elif garbage == "bad_order":
        client.hset(KEY, "order", "z" * 53)
        client.pexpire(KEY, 2000)
    else:
        client.hset(KEY, mapping={"order": future.order, "record": "x"})
        client.pexpire(KEY, 10**9)
    for key in (LEASES, CHANGES, GONE):
        client.set(key, "no sorted set")
    new_lease()
    await watcher.until(here)


async def test_a_worker_that_does_not_name_its_arithmetic_is_known_all_the_same(
    client: "redis.Redis", store: Store, new_record: NewRecord
) -> None:
    named = new_record(arithmetic="avx2/abc")
    unnamed = new_record(id="older")
    fields = msgspec.to_builtins(unnamed)
    del fields["arithmetic"]
    for record, raw in ((named, msgspec.json.encode(named)), (unnamed, msgspec.json.encode(fields))):
        key = f"tandem:{{test}}:worker:{record.id}"
        client.hset(key, mapping={"order": record.order, "record": raw, "state": "ready"})
        list_as_a_lease_does(client, record.id)
    _, records = await list_workers(store)
    assert {record.id: record.arithmetic for record in records.values()} == {"prefill-0": "avx2/abc", "older": ""}


async def test_a_list_of_garbage_is_counted_and_left_out(
    client: "redis.Redis", store: Store, new_record: NewRecord
) -> None:
    good = new_record()
    bad_fields = [{"pid": -1}, {"pid": "x"}, {"role": "king"}, {"id": "a b"}, {"incarnation": "x"}, {"exact": 1}]
    bad_fields += [{"arithmetic": 5}, {"arithmetic": "x" * 600}, {"state": "lost"}, {"state": "away"}]
    values: list[tuple[str, str, bytes]] = [("prefill-0", good.order, msgspec.json.encode(good))]
    for index, changes in enumerate(bad_fields):
        fields = msgspec.to_builtins(good) | {"id": f"bad-{index}"} | changes
        values.append((f"bad-{index}", good.order, msgspec.json.encode(fields)))
    values.append(("other", good.order, msgspec.json.encode(good)))
    values.append(("huge", good.order, b'{"id": "' + b"x" * 20_000 + b'"}'))
    values.append(("bytes", good.order, b"\xff\xfe"))
    values.append(("nested", good.order, b"[" * 15_000))
    values.append(
        ("stale", new_record(id="stale", started_unix_ns=1).order, msgspec.json.encode(new_record(id="stale")))
    )
    for worker_id, order, raw in values:
        client.hset(f"tandem:{{test}}:worker:{worker_id}", mapping={"order": order, "record": raw, "state": "ready"})
    client.set("tandem:{test}:worker:string", "x")
    list_as_a_lease_does(client, *(worker_id for worker_id, *_ in values), "string", b"\xff\x00")
    _, records = await list_workers(store)
    assert records == {"prefill-0": good}
    assert store.stats.num_rejected_values == len(values) - 1 + 1
    assert store.is_available


async def test_a_bad_epoch_is_replaced(client: "redis.Redis", store: Store) -> None:
    for spoil in (
        lambda: client.hset("tandem:{test}:epoch", "a", "b"),
        lambda: client.set("tandem:{test}:epoch", "x" * 9999),
    ):
        client.delete("tandem:{test}:epoch")
        spoil()
        epoch, _ = await list_workers(store)
        assert len(epoch) == 32
        assert (await list_workers(store))[0] == epoch


@pytest.mark.parametrize("spoiled", ["leases", "changes", "too many leases", "endless number"])
async def test_a_spoiled_log_heals_and_nobody_is_missed(
    spoiled: str, client: "redis.Redis", watcher: Watcher, new_lease: Callable[..., WorkerLease], store: Store
) -> None:
    new_lease()
    await watcher.until(here)
    began, epoch = len(watcher.seen), client.get("tandem:{test}:epoch")
    if spoiled == "leases":
        client.set(LEASES, "x")
    elif spoiled == "changes":
        client.delete(CHANGES)
    elif spoiled == "too many leases":
        client.zadd(LEASES, {f"w{index}": "+inf" for index in range(5000)})
    else:
        client.zadd(GONE, {"w": "+inf"})
    await list_workers(store)
    await until(lambda: client.zrange(CHANGES, 0, -1) == [b"prefill-0"])
    await until(lambda: client.zrange(LEASES, 0, -1) == [b"prefill-0"])
    await watcher.until(here)
    assert all(ids(view) == ["prefill-0"] for view in watcher.seen[began:])
    assert await list_workers(store) == (
        client.get("tandem:{test}:epoch").decode(),
        {"prefill-0": watcher.seen[-1].workers[0]},
    )
    assert spoiled == "leases" or client.get("tandem:{test}:epoch") != epoch


def renewals(client: "redis.Redis", records: list[WorkerRecord]) -> list[int]:
    """Registers workers, each with one renewal. Returns the answers of Redis."""
    keys = Keys("test")
    answers = []
    for record in records:
        of_this = (keys.worker(record.id), keys.workers_changed, *keys.workers)
        args = (record.order, msgspec.json.encode(record), 60_000, record.id, record.state, b"", b"v")
        answers.append(run_script(client, RENEW, of_this, (*args, registry.MAX_WORKERS)))
    return answers


def commands_within(client: "redis.Redis", began: dict[str, int]) -> dict[str, int]:
    """Returns how often each command ran since `began`, without those of this test's own client."""
    now = {name: stats["calls"] for name, stats in client.info("commandstats").items()}
    return {name: calls - began.get(name, 0) for name, calls in now.items() if calls != began.get(name, 0)}


@pytest.mark.parametrize("num_workers", [10, 600])
async def test_a_look_without_news_costs_the_same_for_any_number_of_workers(
    num_workers: int, client: "redis.Redis", store: Store, new_record: NewRecord
) -> None:
    renewals(client, [new_record(id=f"w{index}") for index in range(num_workers)])
    reader = RegistryReader(store, None)
    while not await reader.look():
        pass
    assert len(reader.records) == num_workers
    began = commands_within(client, {})
    for _ in range(10):
        assert await reader.look()
    assert not reader.has_changed
    used = commands_within(client, began)
    used.pop("cmdstat_info", None)
    assert sum(used.values()) < 10 * 20, used
    assert not {name for name in used if "hmget" in name or "pttl" in name}


async def test_only_changed_workers_are_read(
    client: "redis.Redis", store: Store, new_record: NewRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [new_record(id=f"w{index}") for index in range(600)]
    renewals(client, records)
    reader = RegistryReader(store, None)
    while not await reader.look():
        pass
    renewals(client, records[:300])  # the same once more: no change
    changed = new_record(id="w7", model="other")
    assert renewals(client, [changed]) == [1]
    began = commands_within(client, {})
    assert await reader.look()
    assert reader.records["w7"] == changed
    assert len(reader.records) == 600
    assert commands_within(client, began)["cmdstat_hmget"] == 1


async def test_workers_that_leave_or_expire_are_noticed_by_every_reader(
    client: "redis.Redis", store: Store, new_record: NewRecord
) -> None:
    renewals(client, [new_record(id=f"w{index}") for index in range(20)])
    readers = [RegistryReader(store, None) for _ in range(2)]
    for reader in readers:
        assert await reader.look()
    client.zadd(LEASES, {"w3": 1, "w4": 1})
    for reader in readers:
        assert await reader.look()
        assert reader.records.keys() == {f"w{index}" for index in range(20)} - {"w3", "w4"}
    renewals(client, [new_record(id="w3")])
    for reader in readers:
        assert await reader.look()
        assert "w3" in reader.records


async def test_more_workers_that_leave_than_are_noted_are_noticed(
    client: "redis.Redis", store: Store, new_record: NewRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewals(client, [new_record(id=f"w{index}") for index in range(300)])
    reader = RegistryReader(store, None)
    while not await reader.look():
        pass
    client.zadd(LEASES, {f"w{index}": 1 for index in range(290)})
    other = RegistryReader(store, None)
    while not await other.look():
        pass
    client.zremrangebyrank(GONE, 0, -6)
    while not await reader.look():
        pass
    assert reader.records.keys() == other.records.keys() == {f"w{index}" for index in range(290, 300)}


async def test_a_redis_that_wakes_up_with_an_older_memory_is_followed(
    client: "redis.Redis", store: Store, new_record: NewRecord
) -> None:
    renewals(client, [new_record(id="kept"), new_record(id="left")])
    memory = {name: client.dump(name) for name in (LEASES, CHANGES)}
    reader = RegistryReader(store, None)
    client.zadd(LEASES, {"left": 1})
    renewals(client, [new_record(id="lost")])
    assert await reader.look()
    assert reader.records.keys() == {"kept", "lost"}
    for name in (LEASES, CHANGES, GONE):
        client.delete(name)
    for name, content in memory.items():
        client.restore(name, 0, content)
    renewals(client, [new_record(id="new")])
    await reader.look()
    client.zadd(LEASES, {"left": 1})  # nobody renews it
    while not await reader.look():
        pass
    assert reader.records.keys() == {"kept", "new"}


async def test_the_worker_beyond_the_limit_is_refused_and_told_why(
    client: "redis.Redis",
    watcher: Watcher,
    new_lease: Callable[..., WorkerLease],
    new_record: NewRecord,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(registry, "MAX_WORKERS", 3)
    assert renewals(client, [new_record(id=f"w{index}") for index in range(4)]) == [1, 1, 1, -3]
    assert renewals(client, [new_record(id="w1")]) == [1], "one that is registered may renew"
    lease = new_lease(beat_s=0.01)
    await watcher.until(lambda view: ids(view) == ["w0", "w1", "w2"])
    await until(lambda: any("too many workers" in record.message for record in caplog.records))
    (said,) = [record.__dict__ for record in caplog.records if "too many workers" in record.message]
    assert (said["worker"], said["workers"], said["limit"]) == ("prefill-0", 3, 3)
    assert "--cluster" in said["remedy"]
    assert not lease.is_held
    # It is registered once there is a place.
    client.zadd(LEASES, {"w2": 1})
    await watcher.until(lambda view: ids(view) == ["prefill-0", "w0", "w1"])


def test_a_missing_worker_is_gone_unless_redis_lost_its_memory(new_record: NewRecord) -> None:
    one, two = new_record(id="prefill-0"), new_record(id="prefill-1")
    both = {one.id: one, two.id: two}
    view = MembershipView(grace_s=3.0)
    assert view.membership == Membership((), is_stale=True)
    view.observe("a", both, now_s=0)
    view.observe("a", {two.id: two}, now_s=1)
    assert ids(view.membership) == ["prefill-1"]
    view.observe("a", both, now_s=2)
    view.lose_sight()
    assert view.membership == Membership((one, two), is_stale=True)
    view.observe("b", {}, now_s=100)
    assert view.membership == Membership((one, two), is_stale=False)
    view.observe("b", {one.id: one}, now_s=101)
    assert ids(view.membership) == ["prefill-0", "prefill-1"]
    # One that was seen again and leaves is gone at once; one that never came back is gone after the grace.
    view.observe("b", {}, now_s=102)
    assert ids(view.membership) == ["prefill-1"]
    view.observe("b", {}, now_s=103)
    assert ids(view.membership) == []


async def test_a_lease_costs_no_request_of_the_event_loop(
    new_lease: Callable[..., WorkerLease], redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_asked, may_answer = threading.Event(), threading.Event()
    execute = redis.Redis.execute_command

    def answer_later(*args: object, **options: object) -> object:
        is_asked.set()
        assert may_answer.wait(HANG_LIMIT_S)
        return execute(*args, **options)

    monkeypatch.setattr(redis.Redis, "execute_command", answer_later)
    lease = new_lease()

    def update() -> None:
        for index in range(1000):
            lease.update(running=index, state="ready" if index % 2 else "draining")

    try:
        assert await asyncio.to_thread(is_asked.wait, HANG_LIMIT_S)
        # The lease hangs in a request, and so would an update that waits for it or makes one of its own.
        async with asyncio.timeout(HANG_LIMIT_S):
            await asyncio.to_thread(update)
        assert not may_answer.is_set()
    finally:
        os.kill(redis_server.pid, signal.SIGSTOP)
        may_answer.set()
    released = asyncio.create_task(asyncio.to_thread(lease.release))
    async with asyncio.timeout(HANG_LIMIT_S):
        await released
    os.kill(redis_server.pid, signal.SIGCONT)
