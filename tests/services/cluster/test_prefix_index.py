"""The cluster's index of cached pages over a real Redis that is flushed, frozen, killed, spoiled and restarted."""

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from services.cluster import prefix_index, prefix_scripts
from services.cluster.change_log import LogReader
from services.cluster.embedded_redis import EmbeddedRedis
from services.cluster.keys import Keys
from services.cluster.prefix_index import (
    FILL_KEYS,
    FLUSH_KEYS,
    KEY_BYTES,
    MAX_BATCH_KEYS,
    MAX_CHANGES,
    MAX_LONGEST_KEYS,
    MAX_READ_KEYS,
    Change,
    Position,
    PrefixIndex,
    PrefixPublisher,
)
from services.cluster.redis_store import Store
from services.cluster.registry import WorkerRecord
from services.runtime.errors import StoreUnavailable
from tests.waiting import HANG_LIMIT_S, until

NewRecord = Callable[..., WorkerRecord]
NewPublisher = Callable[..., PrefixPublisher]
HEAD = "tandem:{test}:pages:prefill-0"
KEYS = HEAD + ":keys"
HEADS = "tandem:{test}:pages:"
LEASES, CHANGES, GONE = Keys("test").pages
PATIENT_S = HANG_LIMIT_S


def page_keys(count: int, *, seed: int = 0) -> list[bytes]:
    source = random.Random(seed)
    return [source.randbytes(KEY_BYTES) for _ in range(count)]


@pytest.fixture
def index(patient_store: Store) -> PrefixIndex:
    return PrefixIndex(patient_store)


@pytest.fixture
def new_publisher(redis_server: EmbeddedRedis, new_record: NewRecord) -> Iterator[NewPublisher]:
    publishers: list[PrefixPublisher] = []

    def start(record: WorkerRecord | None = None, **settings: float) -> PrefixPublisher:
        publisher = PrefixPublisher(redis_server.url, cluster="test", record=record or new_record(), **settings)
        publisher.start()
        publishers.append(publisher)
        return publisher

    yield start
    for publisher in publishers:
        publisher.release()


ASKED: dict[str, Position | None] = {"prefill-0": None}


async def published(index: PrefixIndex) -> tuple[list[str], frozenset[str] | None]:
    """Returns what a gateway without a position sees in the change log."""
    return await index.changed(LogReader())


async def flushed(publisher: PrefixPublisher, *, timeout_s: float = PATIENT_S) -> None:
    assert await asyncio.to_thread(publisher.flush, timeout_s=timeout_s)


async def read_all(index: PrefixIndex, worker_id: str = "prefill-0") -> set[bytes]:
    found: set[bytes] = set()
    cursor = 0
    while True:
        chunk = await index.read(worker_id, cursor)
        assert chunk is not None
        found.update(chunk.keys)
        cursor = chunk.cursor
        if cursor == 0:
            return found


async def position(index: PrefixIndex, worker_id: str = "prefill-0") -> Position:
    chunk = await index.read(worker_id, 0)
    assert chunk is not None
    return chunk.position


async def test_what_is_noted_is_found(index: PrefixIndex, new_publisher: NewPublisher) -> None:
    keys = page_keys(20)
    publisher = new_publisher()
    publisher.note(keys[:10])
    publisher.note(keys[10:], keys[3:5])
    await flushed(publisher)
    assert await read_all(index) == set(keys) - set(keys[3:5])
    assert await index.longest(keys) == {"prefill-0": 3}
    assert await index.longest(keys[5:]) == {"prefill-0": 15}
    assert await index.longest(keys[3:]) == {}
    assert await index.longest([]) == {}


async def test_a_worker_publishes_by_itself_within_its_interval(
    client: "redis.Redis", new_publisher: NewPublisher
) -> None:
    publisher = new_publisher(beat_s=60.0, ttl_s=180.0)
    await flushed(publisher)
    publisher.note(page_keys(3))
    await until(lambda: client.scard(KEYS) == 3)


async def test_many_keys_do_not_wait_for_the_interval(client: "redis.Redis", new_publisher: NewPublisher) -> None:
    publisher = new_publisher(beat_s=60.0, ttl_s=180.0, flush_interval_s=60.0)
    await flushed(publisher)
    keys = page_keys(FLUSH_KEYS)
    for key in keys[:-1]:
        publisher.note((key,))
    publisher.note(keys[-1:])
    await until(lambda: client.scard(KEYS) == FLUSH_KEYS)


async def test_notes_collapse_and_come_in_few_changes(index: PrefixIndex, new_publisher: NewPublisher) -> None:
    publisher = new_publisher(flush_interval_s=60.0)
    await flushed(publisher)
    before = await position(index)
    first, *others = page_keys(100)
    for key in others:
        publisher.note((key,))
        publisher.note((), (key,))
    publisher.note((first,))
    publisher.note((first,), (first,))
    await flushed(publisher)
    sightings, is_all = await index.look({"prefill-0": before})
    assert is_all
    assert len(sightings) == 1
    assert [change for change in sightings[0].changes if change != Change((), ())] == [Change((first,), ())]


async def test_a_long_list_goes_in_several_changes_and_several_answers(
    index: PrefixIndex, new_publisher: NewPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_index, "MAX_ANSWER_BYTES", 3 * MAX_BATCH_KEYS * KEY_BYTES)
    publisher = new_publisher()
    await flushed(publisher)
    known = await position(index)
    keys = page_keys(MAX_BATCH_KEYS * 7 + 5)
    publisher.note(keys)
    await flushed(publisher)
    got: list[bytes] = []
    num_answers = 0
    is_all = False
    while not is_all:
        [sighting], is_all = await index.look({"prefill-0": known})
        assert sighting.position is not None
        known = sighting.position
        got += [key for change in sighting.changes for key in change.added]
        num_answers += 1
    assert got == keys
    assert num_answers >= 4


async def test_a_large_set_is_filled_and_read_in_pieces(
    client: "redis.Redis", index: PrefixIndex, new_publisher: NewPublisher
) -> None:
    keys = page_keys(3 * FILL_KEYS + 7)
    publisher = new_publisher()
    await flushed(publisher)
    publisher.note(keys)
    await flushed(publisher)
    client.flushall()
    await flushed(publisher)
    assert await read_all(index) == set(keys)


async def test_who_is_too_far_behind_must_read_everything(index: PrefixIndex, new_publisher: NewPublisher) -> None:
    publisher = new_publisher()
    await flushed(publisher)
    old = await position(index)
    keys = page_keys(MAX_CHANGES + 1)
    for number, key in enumerate(keys):
        publisher.note((key,))
        await flushed(publisher)
        [sighting], _ = await index.look({"prefill-0": old})
        assert (sighting.position is None) == (number >= MAX_CHANGES)
        assert not sighting.is_filling


async def test_longest_is_exact_with_holes_for_every_worker(
    index: PrefixIndex, new_publisher: NewPublisher, new_record: NewRecord
) -> None:
    keys = page_keys(300)
    source = random.Random(1)
    expected = {}
    for number in range(6):
        holes = set(source.sample(range(300), number))
        publisher = new_publisher(new_record(id=f"decode-{number}"))
        publisher.note([key for place, key in enumerate(keys) if place not in holes])
        await flushed(publisher)
        expected[f"decode-{number}"] = min(holes, default=300)
    assert await index.longest(keys) == {name: count for name, count in expected.items() if count}
    assert set((await index.longest(keys * 10)).values()) <= {*expected.values(), MAX_LONGEST_KEYS}


@pytest.mark.parametrize(
    "fault", ["flushall", "restart", "freeze", "head deleted", "keys deleted", "member taken", "log spoiled"]
)
async def test_everything_is_back(
    fault: str,
    redis_server: EmbeddedRedis,
    client: "redis.Redis",
    index: PrefixIndex,
    new_publisher: NewPublisher,
) -> None:
    keys = page_keys(5000)
    publisher = new_publisher(ttl_s=2.0)
    publisher.note(keys)
    await flushed(publisher)
    if fault == "flushall":
        client.flushall()
    elif fault == "restart":
        redis_server.kill()
        publisher.note((), keys[:100])
        publisher.note(keys[50:100])
        redis_server.start()
    elif fault == "freeze":
        os.kill(redis_server.pid, signal.SIGSTOP)
        publisher.note((), keys[:50])
        await asyncio.sleep(2.5)  # longer than the TTL
        os.kill(redis_server.pid, signal.SIGCONT)
    elif fault == "head deleted":
        client.delete(HEAD)
    elif fault == "keys deleted":
        client.delete(KEYS)
    elif fault == "member taken":
        client.srem(KEYS, keys[17])
    else:
        client.hset(HEAD, mapping={f"x{number}": "x" for number in range(100)})
    left = set(keys) - set(keys[:50] if fault in {"restart", "freeze"} else [])

    def is_back() -> bool:
        try:
            is_filled = client.hexists(HEAD, "seq") and client.hlen(HEAD) < 70
            return bool(is_filled and client.scard(KEYS) == len(left))
        except redis.RedisError:
            return False

    await until(is_back)
    assert await read_all(index) == left


async def test_a_redis_that_wakes_up_with_an_older_memory_is_corrected(
    client: "redis.Redis", index: PrefixIndex, new_publisher: NewPublisher
) -> None:
    keys = page_keys(10)
    publisher = new_publisher(beat_s=60.0, ttl_s=180.0)
    publisher.note(keys[:5])
    await flushed(publisher)
    before = await position(index)
    memory = {name: client.dump(name) for name in (HEAD, KEYS)}
    publisher.note(keys[5:], keys[:5])  # as many as before
    await flushed(publisher)
    for name, content in memory.items():
        client.restore(name, 180_000, content, replace=True)
    assert await read_all(index) == set(keys[:5])
    assert await position(index) == before
    await flushed(publisher)
    assert await read_all(index) == set(keys[5:])
    [sighting], _ = await index.look({"prefill-0": before})
    assert sighting.position is None


async def test_a_publisher_begins_without_redis(
    redis_server: EmbeddedRedis, new_publisher: NewPublisher, index: PrefixIndex
) -> None:
    redis_server.kill()
    publisher = new_publisher()
    keys = page_keys(10)
    publisher.note(keys)
    assert not await asyncio.to_thread(publisher.flush, timeout_s=0.3)
    redis_server.start()
    await flushed(publisher)
    assert await read_all(index) == set(keys)


async def test_without_redis_the_index_says_so(store: Store, redis_server: EmbeddedRedis) -> None:
    redis_server.kill()
    index = PrefixIndex(store)
    for ask in (
        lambda: index.longest(page_keys(1)),
        lambda: index.look(ASKED),
        lambda: published(index),
        lambda: index.read("prefill-0", 0),
    ):
        with pytest.raises(StoreUnavailable):
            await ask()


async def test_a_change_whose_answer_was_lost_is_not_made_twice(
    index: PrefixIndex, new_publisher: NewPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = new_publisher(flush_interval_s=0.01)
    keys = page_keys(3)
    publisher.note(keys[:1])
    await flushed(publisher)
    before = await position(index)
    execute, lost = redis.Redis.execute_command, []

    def lose_one_answer(client: "redis.Redis", *args: object, **options: object) -> object:
        answer = execute(client, *args, **options)
        if not lost and len(args[-1]) > 4:  # type: ignore[arg-type]
            lost.append(args)
            raise redis.TimeoutError
        return answer

    monkeypatch.setattr(redis.Redis, "execute_command", lose_one_answer)
    publisher.note(keys[1:2])
    await flushed(publisher)
    publisher.note(keys[2:])
    await flushed(publisher)
    assert len(lost) == 1
    [sighting], _ = await index.look({"prefill-0": before})
    assert [change.added for change in sighting.changes] == [(keys[1],), (keys[2],)]
    after = await position(index)
    assert (after.base, after.seq) == (before.base, before.seq + 2)


async def test_no_number_ever_stands_for_two_contents(
    client: "redis.Redis", new_publisher: NewPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = redis.Redis.execute_command
    numbers: dict[int, list[bytes]] = {}

    def spoil_and_watch(connection: "redis.Redis", *args: Any, **options: Any) -> Any:
        is_fill = args[1] == prefix_scripts.FILL.digest
        if is_fill or (args[1] == prefix_scripts.CHANGE.digest and args[-1]):
            numbers.setdefault(args[11] if is_fill else args[12], []).append(args[-1])
            if not is_fill:
                # Somebody takes the set away, so this change is made on one that is not what it should be.
                execute(connection, "DEL", KEYS)
        return execute(connection, *args, **options)

    publisher = new_publisher()
    await flushed(publisher)
    with monkeypatch.context() as patch:
        patch.setattr(redis.Redis, "execute_command", spoil_and_watch)
        keys = page_keys(20)
        for start in range(0, 20, 4):
            publisher.note(keys[start : start + 4])
            await flushed(publisher)
    assert len(numbers) >= 8
    assert all(len(set(contents)) == 1 for contents in numbers.values())


async def test_a_dead_worker_vanishes(
    client: "redis.Redis", redis_server: EmbeddedRedis, new_record: NewRecord, index: PrefixIndex
) -> None:
    publisher = PrefixPublisher(redis_server.url, cluster="test", record=new_record(), ttl_s=1.0, beat_s=0.2)
    publisher.start()
    keys = page_keys(4)
    publisher.note(keys)
    await flushed(publisher)
    for key in (HEAD, KEYS):
        assert -1 != client.pttl(key) <= 1000, "-1: it never expires"
    publisher._delete = lambda: None  # type: ignore[method-assign] # as a process that was killed
    await asyncio.to_thread(publisher.release)
    await until(lambda: not client.exists(HEAD, KEYS))
    assert await index.look(ASKED) == ([], True)
    await until(lambda: client.zcount(LEASES, "-inf", time.time() * 1000 - 1) == 1)
    assert await published(index) == ([], frozenset())
    assert client.zcard(LEASES) == client.zcard(CHANGES) == 0
    assert await index.longest(keys) == {}


async def test_beats_keep_it(client: "redis.Redis", new_publisher: NewPublisher) -> None:
    publisher = new_publisher(ttl_s=2 * HANG_LIMIT_S, beat_s=0.1)
    publisher.note(page_keys(4))
    await flushed(publisher)
    before = client.hget(HEAD, "base")
    client.expire(HEAD, int(HANG_LIMIT_S))
    await until(lambda: client.ttl(HEAD) > HANG_LIMIT_S, "that a beat extends the lifetime of the index")
    assert client.hget(HEAD, "base") == before


async def test_release_deletes_it(client: "redis.Redis", new_publisher: NewPublisher) -> None:
    publisher = new_publisher()
    publisher.note(page_keys(4))
    await flushed(publisher)
    await asyncio.to_thread(publisher.release)
    assert client.exists(HEAD, KEYS, LEASES, CHANGES) == 0


async def test_a_later_life_of_a_worker_publishes_what_the_earlier_one_held(
    index: PrefixIndex, new_publisher: NewPublisher, new_record: NewRecord
) -> None:
    first, later = new_record(started_unix_ns=5), new_record(started_unix_ns=6)
    publisher, keys = new_publisher(first), page_keys(6)
    publisher.note(keys)
    await flushed(publisher)
    publisher.begin_life(later.order)
    publisher.note(evicted=keys[4:])
    await flushed(publisher)
    (sighting,), _ = await index.look(ASKED)
    assert sighting.order == later.order
    assert await index.longest(keys) == {"prefill-0": 4}
    publisher.release()
    assert await index.longest(keys) == {}, "it is deleted as what it was published"


async def test_two_workers_of_one_id_the_newer_one_wins(
    client: "redis.Redis", index: PrefixIndex, new_publisher: NewPublisher, new_record: NewRecord
) -> None:
    now_ns = time.time_ns()
    old_keys, new_keys = page_keys(10), page_keys(10, seed=1)
    old = new_publisher(new_record(started_unix_ns=now_ns - 1), beat_s=0.1)
    old.note(old_keys)
    await flushed(old)
    record = new_record(started_unix_ns=now_ns)
    new = new_publisher(record, beat_s=0.1)
    new.note(new_keys)
    await flushed(new)
    await until(lambda: old.is_lost)
    old.note(old_keys)
    assert not await asyncio.to_thread(old.flush, timeout_s=0.5)
    await asyncio.to_thread(old.release)
    assert client.hget(HEAD, "order") == record.order.encode()
    assert await read_all(index) == set(new_keys)
    assert not new.is_lost
    late = new_publisher(new_record(started_unix_ns=now_ns - 2), beat_s=0.1)
    late.note(old_keys)
    await until(lambda: late.is_lost)
    assert await read_all(index) == set(new_keys)


async def test_an_older_one_that_filled_an_emptied_redis_gives_way(
    client: "redis.Redis", index: PrefixIndex, new_publisher: NewPublisher, new_record: NewRecord
) -> None:
    now_ns = time.time_ns()
    newer = new_publisher(new_record(started_unix_ns=now_ns), beat_s=60.0, ttl_s=90.0)
    newer.note(page_keys(5))
    await flushed(newer)
    client.flushall()
    older = new_publisher(new_record(started_unix_ns=now_ns - 1), beat_s=0.1)
    older.note(page_keys(3, seed=1))
    await flushed(older)
    await flushed(newer)
    assert await read_all(index) == set(page_keys(5))
    await until(lambda: older.is_lost)


@pytest.mark.parametrize("garbage", ["string head", "list keys", "endless", "from the future", "bad order", "index"])
async def test_garbage_does_not_keep_a_worker_out(
    garbage: str, client: "redis.Redis", index: PrefixIndex, new_publisher: NewPublisher, new_record: NewRecord
) -> None:
    future = new_record(started_unix_ns=2**63 - 1).order
    if garbage == "string head":
        client.set(HEAD, "x")
    elif garbage == "list keys":
        client.rpush(KEYS, "x")
    elif garbage == "endless":
        client.hset(HEAD, "order", future)
    elif garbage == "from the future":
        client.hset(HEAD, "order", future)
        client.pexpire(HEAD, 10**9)
    elif garbage == "bad order":
        client.hset(HEAD, "order", "z" * 53)
        client.pexpire(HEAD, 2000)
    else:
        for key in (LEASES, CHANGES, GONE):
            client.set(key, "x")
    publisher = new_publisher()
    keys = page_keys(4)
    publisher.note(keys)
    await flushed(publisher)
    assert await published(index) == (["prefill-0"], frozenset())
    assert await read_all(index) == set(keys)
    assert await index.longest(keys) == {"prefill-0": 4}


async def test_garbage_is_left_out_and_counted(
    client: "redis.Redis", index: PrefixIndex, new_publisher: NewPublisher, patient_store: Store, new_record: NewRecord
) -> None:
    keys = page_keys(4)
    publisher = new_publisher()
    publisher.note(keys)
    await flushed(publisher)
    good = new_record().order
    heads: dict[str, dict[str, str | bytes]] = {
        "no-order": {"base": "1", "seq": "1"},
        "bad-order": {"order": "x" * 53, "base": "1", "seq": "1"},
        "bad-base": {"order": good, "base": "-1", "seq": "1"},
        "bad-seq": {"order": good, "base": "1", "seq": "1" * 5000},
        "a b": {"order": good, "base": "1", "seq": "1"},
    }
    for name, fields in heads.items():
        client.hset(f"{HEADS}{name}", mapping=fields)
    client.set(f"{HEADS}string", "x")
    client.hset(f"{HEADS}set-is-list", mapping={"order": good, "base": "1", "seq": "1"})
    client.rpush(f"{HEADS}set-is-list:keys", "x")
    listed = [*heads, "string", "set-is-list", "w" * 65, b"\xff\x00"]
    for key in (LEASES, CHANGES):
        client.zadd(key, dict.fromkeys(listed, 2**51))
    changed, _ = await published(index)
    assert set(changed) == {"prefill-0", *heads, "string", "set-is-list"} - {"a b"}
    assert patient_store.stats.num_rejected_values == 3, "invalid ids"
    [sighting], is_all = await index.look(dict.fromkeys(changed))
    assert sighting.worker_id == "prefill-0"
    assert is_all
    assert patient_store.stats.num_rejected_values == 3 + len(heads) - 1 + 2
    assert await index.longest(keys) == {"prefill-0": 4}
    for name in (*heads, "string", "set-is-list"):
        chunk = await index.read(name, 0)
        assert chunk is None or name == "a b"


async def test_members_that_are_no_keys_are_left_out(
    client: "redis.Redis", index: PrefixIndex, new_publisher: NewPublisher, patient_store: Store
) -> None:
    publisher = new_publisher(beat_s=60.0, ttl_s=180.0)
    keys = page_keys(4)
    publisher.note(keys)
    await flushed(publisher)
    client.sadd(KEYS, "short", b"x" * 100_000)
    assert await read_all(index) == set(keys)
    assert patient_store.stats.num_rejected_values == 2


@pytest.mark.parametrize("data", [b"", b"abc", b"\0\0\0\1", b"\0\0\0\2" + b"k" * 16, b"\0\0\0\0" + b"k" * 15, b"huge"])
async def test_a_change_that_is_none_is_not_followed(
    data: bytes, client: "redis.Redis", index: PrefixIndex, new_publisher: NewPublisher
) -> None:
    publisher = new_publisher(beat_s=60.0, ttl_s=180.0)
    await flushed(publisher)
    known = await position(index)
    publisher.note(page_keys(3))
    await flushed(publisher)
    client.hset(HEAD, str(known.seq + 1), data if data != b"huge" else b"\0\0\0\0" + b"k" * 16 * (MAX_READ_KEYS + 1))
    [sighting], _ = await index.look({"prefill-0": known})
    assert sighting.position is None
    assert not sighting.is_filling


async def test_too_many_of_anything_is_rejected(
    client: "redis.Redis",
    index: PrefixIndex,
    new_publisher: NewPublisher,
    patient_store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_index, "MAX_PAGES", 5)
    publisher = new_publisher(beat_s=60.0, ttl_s=180.0)
    keys = page_keys(8)
    publisher.note(keys)
    await flushed(publisher)
    assert publisher.num_ignored_keys == 3
    assert await read_all(index) == set(keys[:5])
    publisher.note(keys[5:], keys[:3])
    await flushed(publisher)
    assert await read_all(index) == set(keys[3:])
    client.sadd(KEYS, keys[0])
    assert await index.look(ASKED) == ([], True)
    assert await index.read("prefill-0", 0) is None
    assert patient_store.stats.num_rejected_values == 1
    client.zadd(CHANGES, {f"w{number}": number for number in range(5000)})
    assert await published(index) == ([], frozenset())
    assert client.exists(*Keys("test").pages) == 0
    await flushed(publisher)
    assert await published(index) == (["prefill-0"], frozenset())


def calls(client: "redis.Redis") -> dict[str, int]:
    return {name: stats["calls"] for name, stats in client.info("commandstats").items()}


@pytest.mark.parametrize("num_workers", [10, 600])
async def test_a_look_without_news_costs_the_same_for_any_number_of_workers(
    num_workers: int, client: "redis.Redis", index: PrefixIndex
) -> None:
    now_us = time.time_ns() // 1000
    for number in range(num_workers):
        client.zadd(LEASES, {f"w{number}": now_us // 1000 + 600_000})
        client.zadd(CHANGES, {f"w{number}": now_us + number})
    log, seen = LogReader(), []
    left = None
    while left is None:
        changed, left = await index.changed(log)
        seen += changed
    assert seen == [f"w{number}" for number in range(num_workers)]
    before = calls(client)
    for _ in range(10):
        assert await index.changed(log) == ([], frozenset())
    after = calls(client)
    assert sum(after[name] - before.get(name, 0) for name in after if name != "cmdstat_info") < 10 * 15


async def test_only_what_was_published_is_a_change(index: PrefixIndex, new_publisher: NewPublisher) -> None:
    publisher, log = new_publisher(beat_s=0.01), LogReader()
    await flushed(publisher)
    assert (await index.changed(log))[0] == ["prefill-0"]
    for _ in range(5):
        await flushed(publisher)  # beats, which renew the lease
        assert await index.changed(log) == ([], frozenset())
    publisher.note(page_keys(3))
    await flushed(publisher)
    assert (await index.changed(log))[0] == ["prefill-0"]
    await asyncio.to_thread(publisher.release)
    assert await index.changed(log) == ([], frozenset({"prefill-0"}))


async def test_the_end_of_the_last_that_changed_has_a_greater_number(
    client: "redis.Redis", index: PrefixIndex, new_publisher: NewPublisher
) -> None:
    publisher, log = new_publisher(), LogReader()
    await flushed(publisher)
    # As if the clock of Redis had been set back since both changes.
    client.zadd(CHANGES, {"decode-0": 2**52 - 1, "prefill-0": 2**52})
    client.zadd(LEASES, {"decode-0": 2**52})
    assert (await index.changed(log))[0] == ["decode-0", "prefill-0"]
    await asyncio.to_thread(publisher.release)
    assert await index.changed(log) == ([], frozenset({"prefill-0"}))


async def test_while_it_is_filled_it_is_said_to_be(client: "redis.Redis", index: PrefixIndex) -> None:
    client.hset(HEAD, mapping={"order": "0" * 20 + ":" + "a" * 32, "filling": "3"})
    [sighting], _ = await index.look(ASKED)
    assert sighting.is_filling
    assert sighting.position is None
    assert await index.read("prefill-0", 0) is None


def test_only_page_keys_can_be_noted(new_record: NewRecord) -> None:
    publisher = PrefixPublisher("unix:///nowhere", cluster="test", record=new_record())
    with pytest.raises(ValueError, match="16 bytes"):
        publisher.note([b"short"])
    with pytest.raises(ValueError, match="16 bytes"):
        publisher.note([], [b"x" * 17])


async def test_notes_wait_for_nothing_and_take_bounded_memory(
    new_publisher: NewPublisher, redis_server: EmbeddedRedis, index: PrefixIndex
) -> None:
    publisher = new_publisher()
    keys = page_keys(2000)
    publisher.note(keys)
    await flushed(publisher)
    os.kill(redis_server.pid, signal.SIGSTOP)

    def note() -> None:
        for _ in range(50):
            publisher.note((), keys)
            publisher.note(keys)

    try:
        await asyncio.to_thread(note)
        # Whatever was noted meanwhile collapses once the time-out of the call under way is over.
        await until(lambda: not publisher._notes and len(publisher._held) == len(keys))
        assert len(publisher._changed) <= 2 * len(keys)
    finally:
        os.kill(redis_server.pid, signal.SIGCONT)
    await flushed(publisher)
    assert await read_all(index) == set(keys)


async def test_many_threads_may_note(index: PrefixIndex, new_publisher: NewPublisher) -> None:
    publisher = new_publisher()
    shares = [page_keys(500, seed=seed) for seed in range(4)]

    def note(keys: list[bytes]) -> None:
        for key in keys:
            publisher.note((key,))
        for key in keys[::2]:
            publisher.note((), (key,))

    threads = [threading.Thread(target=note, args=(keys,)) for keys in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    await flushed(publisher)
    assert await read_all(index) == {key for keys in shares for key in keys[1::2]}
