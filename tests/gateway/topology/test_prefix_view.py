"""The gateway's picture of cached prefixes: right over a real Redis whatever happens to it, and fast without it."""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.topology import prefix_view
from gateway.topology.prefix_view import GRACE_S, MAX_AGE_S, PrefixView
from services.cluster import prefix_index
from services.cluster.change_log import LogReader
from services.cluster.embedded_redis import EmbeddedRedis
from services.cluster.keys import Keys
from services.cluster.prefix_index import (
    KEY_BYTES,
    MAX_CHANGES,
    Change,
    IndexSlice,
    Position,
    PrefixIndex,
    PrefixPublisher,
)
from services.cluster.prefix_index import Sighting as Seen
from services.cluster.redis_store import Store
from services.cluster.registry import WorkerRecord, new_incarnation
from services.runtime.clock import ManualClock
from services.runtime.errors import StoreUnavailable
from tests.examples import examples
from tests.waiting import HANG_LIMIT_S, until

NewPublisher = Callable[..., PrefixPublisher]
HEAD = "tandem:{test}:pages:w0"
LEASES, _, _ = Keys("test").pages
PATIENT_S = HANG_LIMIT_S


def page_keys(count: int, *, seed: int = 0) -> list[bytes]:
    source = random.Random(seed)
    return [source.randbytes(KEY_BYTES) for _ in range(count)]


def new_record(worker_id: str = "w0", **changes: Any) -> WorkerRecord:
    fields: dict[str, Any] = {
        "id": worker_id,
        "role": "decode",
        "pid": 1,
        "host": "here",
        "address": "127.0.0.1:1",
        "incarnation": new_incarnation(),
        "started_unix_ns": time.time_ns(),
        "state": "ready",
        "model": "demo",
        "exact": True,
        "page_size": 16,
        "layout_fingerprint": "f",
        "max_sequence_tokens": 2048,
    }
    return WorkerRecord(**(fields | changes))


@pytest.fixture
def redis_server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def client(redis_server: EmbeddedRedis) -> Iterator["redis.Redis"]:
    with redis.Redis.from_url(redis_server.url) as opened:
        yield opened


@pytest.fixture
async def store(redis_server: EmbeddedRedis) -> AsyncIterator[Store]:
    opened = Store(redis_server.url, cluster="test", timeout_s=2.0)
    yield opened
    await opened.close()


@pytest.fixture
def new_publisher(redis_server: EmbeddedRedis) -> Iterator[NewPublisher]:
    publishers: list[PrefixPublisher] = []

    def start(worker_id: str = "w0", **changes: Any) -> PrefixPublisher:
        publisher = PrefixPublisher(redis_server.url, cluster="test", record=new_record(worker_id, **changes))
        publisher.start()
        publishers.append(publisher)
        return publisher

    yield start
    for publisher in publishers:
        publisher.release()


async def flushed(publisher: PrefixPublisher) -> None:
    assert await asyncio.to_thread(publisher.flush, timeout_s=PATIENT_S)


async def refreshed(view: PrefixView) -> None:
    async with asyncio.timeout(PATIENT_S):
        while not await view.refresh():
            pass


@contextlib.asynccontextmanager
async def following(store: Store) -> AsyncIterator[PrefixView]:
    view = PrefixView(PrefixIndex(store))
    view.start()
    try:
        yield view
    finally:
        await view.close()


async def test_it_follows_workers_as_they_come_change_and_leave(store: Store, new_publisher: NewPublisher) -> None:
    keys = page_keys(20)
    async with following(store) as view:
        one, two = new_publisher("w0"), new_publisher("w1")
        one.note(keys[:10])
        two.note(keys)
        await until(lambda: view.longest(keys) == {"w0": 10, "w1": 20})
        one.note((), keys[4:6])
        await until(lambda: view.longest(keys) == {"w0": 4, "w1": 20})
        assert view.longest(keys[1:3]) == {"w0": 2, "w1": 2}
        one.note(keys[4:6])
        await until(lambda: view.longest(keys)["w0"] == 10)
        await until(lambda: not view.is_stale)
        await asyncio.to_thread(two.release)
        await until(lambda: view.longest(keys) == {"w0": 10})
        assert view.longest([]) == {}
        assert view.longest(page_keys(3, seed=1)) == {}
        assert view.worker_ids == {"w0"}
        # What the one that left alone held is forgotten, too.
        await until(lambda: view.num_pages == 10)


async def test_it_agrees_with_redis(store: Store, new_publisher: NewPublisher) -> None:
    keys = page_keys(400)
    source = random.Random(7)
    for number in range(5):
        publisher = new_publisher(f"w{number}")
        publisher.note(keys[: source.randrange(401)], ())
        publisher.note((), source.sample(keys, number))
        await flushed(publisher)
    index = PrefixIndex(store)
    view = PrefixView(index)
    await refreshed(view)
    for start in (0, 1, 17, 399):
        assert view.longest(keys[start:]) == await index.longest(keys[start:])


async def test_a_new_gateway_reads_everything_in_pieces(store: Store, new_publisher: NewPublisher) -> None:
    shares = {f"w{number}": page_keys(9000, seed=number) for number in range(3)}
    for worker_id, keys in shares.items():
        publisher = new_publisher(worker_id)
        publisher.note(keys)
        await flushed(publisher)
    view = PrefixView(PrefixIndex(store))
    assert view.is_stale
    assert not await view.refresh()
    assert view.is_stale
    await refreshed(view)
    assert not view.is_stale
    assert view.stats.num_reads == 3
    for worker_id, keys in shares.items():
        assert view.keys_of(worker_id) == set(keys)


async def test_what_changes_while_a_worker_is_read_is_right(
    store: Store, new_publisher: NewPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_index, "FILL_KEYS", 500)
    source = random.Random(3)
    keys = page_keys(12_000)
    held = set(keys[:8000])
    publisher = new_publisher()
    publisher.note(held)
    await flushed(publisher)
    view = PrefixView(PrefixIndex(store))
    num_steps = 0
    while not await view.refresh():
        evicted = source.sample(sorted(held), 500)
        added = source.sample(sorted(set(keys) - held), 500)
        publisher.note(added, evicted)
        held = held - set(evicted) | set(added)
        await flushed(publisher)
        num_steps += 1
    await refreshed(view)
    assert num_steps >= 3
    assert view.stats.num_reads == 1
    assert view.keys_of("w0") == held


@pytest.mark.parametrize("lost", ["behind", "field", "spoiled"])
async def test_a_gap_is_closed_by_reading_again(
    lost: str, store: Store, client: "redis.Redis", new_publisher: NewPublisher
) -> None:
    publisher = new_publisher()
    await flushed(publisher)
    view = PrefixView(PrefixIndex(store))
    await refreshed(view)
    keys = page_keys(MAX_CHANGES + 2)
    publisher.note(keys[:1])
    await flushed(publisher)
    await refreshed(view)
    assert view.stats.num_reads == 1
    for key in keys[1:] if lost == "behind" else keys[1:4]:
        publisher.note((key,))
        await flushed(publisher)
    held = len(keys) if lost == "behind" else 4
    if lost == "field":
        client.hdel(HEAD, client.hget(HEAD, "seq"))
    elif lost == "spoiled":
        client.hset(HEAD, client.hget(HEAD, "seq"), "garbage")
    assert view.longest(keys) == {"w0": 1}
    await view.refresh()
    assert view.longest(keys)["w0"] >= 1  # the former picture serves until the new one is complete
    await refreshed(view)
    assert view.longest(keys) == {"w0": held}
    assert view.stats.num_reads == 2
    assert store.stats.num_rejected_values == (lost == "spoiled")


@pytest.mark.parametrize("fault", ["flushall", "restart", "freeze", "keys deleted"])
async def test_it_is_right_again(
    fault: str, store: Store, redis_server: EmbeddedRedis, client: "redis.Redis", new_publisher: NewPublisher
) -> None:
    keys = page_keys(100)
    store._timeout_s = 0.3  # near to that of production, so that a frozen Redis is noticed
    publishers = [new_publisher(f"w{number}") for number in range(3)]
    for number, publisher in enumerate(publishers):
        publisher.note(keys[: 10 * (number + 1)])
        await flushed(publisher)
    right = {"w0": 10, "w1": 20, "w2": 30}
    async with following(store) as view:
        await until(lambda: view.longest(keys) == right)
        if fault == "flushall":
            client.flushall()
        elif fault == "restart":
            redis_server.kill()
            await until(lambda: view.is_stale)
            assert view.longest(keys) == right
            redis_server.start()
        elif fault == "freeze":
            os.kill(redis_server.pid, signal.SIGSTOP)
            await until(lambda: view.is_stale)
            assert view.age_s > MAX_AGE_S
            assert view.longest(keys) == right
            os.kill(redis_server.pid, signal.SIGCONT)
        else:
            client.delete(f"{HEAD}:keys")
        publishers[0].note(keys[10:15])
        publishers[1].note((), keys[5:6])
        right = {"w0": 15, "w1": 5, "w2": 30}
        await until(lambda: view.longest(keys) == right and not view.is_stale)
        if fault == "keys deleted":
            return

        def is_published() -> bool:
            try:
                return [client.scard(f"tandem:{{test}}:pages:w{number}:keys") for number in range(3)] == [15, 19, 30]
            except redis.RedisError:
                return False

        await until(is_published)
        assert view.longest(keys) == right


async def test_a_worker_that_died_with_the_memory_of_redis_is_forgotten(
    store: Store, client: "redis.Redis", new_publisher: NewPublisher
) -> None:
    keys = page_keys(10)
    alive, dead = new_publisher("w0"), new_publisher("w1")
    for publisher in (alive, dead):
        publisher.note(keys)
        await flushed(publisher)
    async with following(store) as view:
        await until(lambda: view.longest(keys) == {"w0": 10, "w1": 10})
        dead._delete = lambda: None  # type: ignore[method-assign] # as a process that was killed
        await asyncio.to_thread(dead.release)
        client.flushall()
        seen = []

        def is_forgotten() -> bool:
            seen.append(view.longest(keys))
            return seen[-1] == {"w0": 10}

        await until(is_forgotten)
        assert all(found == {"w0": 10, "w1": 10} for found in seen[:-1])


async def test_a_new_life_of_a_worker_inherits_nothing(store: Store, new_publisher: NewPublisher) -> None:
    keys = page_keys(10)
    old = new_publisher(started_unix_ns=1000)
    old.note(keys)
    await flushed(old)
    view = PrefixView(PrefixIndex(store))
    await refreshed(view)
    view.expect("w0", page_keys(5, seed=2), ttl_s=100)
    assert view.longest(page_keys(5, seed=2)) == {"w0": 5}
    new = new_publisher(started_unix_ns=2000)
    await flushed(new)
    await refreshed(view)
    assert view.longest(keys) == {}
    assert view.longest(page_keys(5, seed=2)) == {}
    new.note(keys[:3])
    await flushed(new)
    await refreshed(view)
    assert view.longest(keys) == {"w0": 3}
    await until(lambda: old.is_lost)


class ScriptedIndex(PrefixIndex):
    """Answers what the test has written down."""

    def __init__(self) -> None:
        self.sightings: list[Seen] = []
        self.listed: list[str] = []
        self.chunks: dict[tuple[str, int], IndexSlice | None] = {}
        self.is_away = False
        self.num_reads = 0

    async def changed(self, log: LogReader) -> tuple[list[str], frozenset[str] | None]:
        """All workers have changed since any look."""
        if self.is_away:
            raise StoreUnavailable("away")
        listed = [sighting.worker_id for sighting in self.sightings]
        left, self.listed = frozenset(self.listed) - frozenset(listed), listed
        return listed, left

    async def look(self, known: Any) -> tuple[list[Seen], bool]:
        seen = [sighting for sighting in self.sightings if sighting.worker_id in known]
        return [self._followed(sighting, known[sighting.worker_id]) for sighting in seen], True

    def _followed(self, sighting: Seen, known: Position | None) -> Seen:
        """A sighting without a position has not changed since the worker's set was filled."""
        filled = self.chunks.get((sighting.worker_id, 0))
        if sighting.position is not None or known is None or filled is None or known.base != filled.position.base:
            return sighting
        return Seen(sighting.worker_id, sighting.order, known)

    async def read(self, worker_id: str, cursor: int) -> IndexSlice | None:
        self.num_reads += 1
        return self.chunks[worker_id, cursor]


ORDER = "0" * 20 + ":" + "a" * 32


def scripted(num_workers: int, keys: list[bytes]) -> ScriptedIndex:
    """All workers hold all keys."""
    index = ScriptedIndex()
    for number in range(num_workers):
        index.sightings.append(Seen(f"w{number}", ORDER))
        index.chunks[f"w{number}", 0] = IndexSlice(Position(ORDER, 1, 1), 0, tuple(keys))
    return index


async def test_age_counts_from_the_last_complete_look() -> None:
    clock, index = ManualClock(), scripted(1, page_keys(3))
    view = PrefixView(index, clock=clock)
    assert view.age_s == float("inf")
    assert await view.refresh()
    assert view.age_s == 0
    clock.advance(MAX_AGE_S)
    assert not view.is_stale
    index.is_away = True
    with pytest.raises(StoreUnavailable):
        await view.refresh()
    clock.advance(0.01)
    assert view.is_stale
    assert view.longest(page_keys(3)) == {"w0": 3}


async def test_a_worker_that_cannot_be_read_disturbs_nobody_and_is_tried_again_later() -> None:
    clock, keys = ManualClock(), page_keys(3)
    index = scripted(2, keys)
    good = index.chunks["w0", 0]
    index.chunks["w0", 0] = None
    view = PrefixView(index, clock=clock)
    for _ in range(20):
        await view.refresh()
    assert view.longest(keys) == {"w1": 3}
    assert not view.is_stale
    assert index.num_reads < 20
    index.chunks["w0", 0] = good
    clock.advance(prefix_view.REREAD_S)
    await refreshed(view)
    assert view.longest(keys) == {"w0": 3, "w1": 3}


async def test_a_set_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_view, "MAX_PAGES", 100)
    index = scripted(1, [])
    for cursor in range(1000):
        index.chunks["w0", cursor] = IndexSlice(Position(ORDER, 1, 1), cursor + 1, tuple(page_keys(10, seed=cursor)))
    view = PrefixView(index, clock=ManualClock())
    await refreshed(view)
    assert index.num_reads < 50
    assert view.keys_of("w0") == frozenset()
    view._pages.sweep()
    assert view.num_pages == 0


async def test_a_set_that_is_filled_again_while_it_is_read_is_read_again() -> None:
    clock, keys = ManualClock(), page_keys(4)
    index = scripted(1, [])
    index.chunks["w0", 0] = IndexSlice(Position(ORDER, 1, 5), 9, tuple(keys[:2]))
    index.chunks["w0", 9] = IndexSlice(Position(ORDER, 6, 6), 0, tuple(keys[2:]))
    view = PrefixView(index, clock=clock)
    await view.refresh()
    assert view.keys_of("w0") == frozenset()
    index.chunks["w0", 0] = IndexSlice(Position(ORDER, 6, 6), 0, tuple(keys))
    clock.advance(prefix_view.REREAD_S)
    await refreshed(view)
    assert view.keys_of("w0") == set(keys)


async def test_too_many_pages_are_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_view, "MAX_VIEW_PAGES", 10)
    keys = page_keys(15)
    view = PrefixView(scripted(2, keys), clock=ManualClock())
    await refreshed(view)
    assert view.num_pages == 10
    assert view.longest(keys) == {"w0": 10, "w1": 10}
    assert view.stats.num_ignored_pages == 10


async def test_expected_pages_count_until_they_end() -> None:
    clock, keys = ManualClock(), page_keys(10)
    view = PrefixView(scripted(2, keys[:4]), clock=clock)
    await refreshed(view)
    view.expect("w0", keys, ttl_s=1.0)
    view.expect("new", keys[:2], ttl_s=1.0)
    assert view.longest(keys) == {"w0": 10, "w1": 4, "new": 2}
    assert view.worker_ids == {"w0", "w1"}
    clock.advance(0.5)
    view.expect("w0", keys[:7], ttl_s=1.0)
    clock.advance(0.5)
    assert view.longest(keys) == {"w0": 7, "w1": 4}
    assert view.keys_of("w0") == set(keys[:4])
    # A shorter one does not end a longer one.
    view.expect("w0", keys[:7], ttl_s=0.1)
    clock.advance(0.2)
    assert view.longest(keys) == {"w0": 7, "w1": 4}
    clock.advance(0.3)
    assert view.longest(keys) == {"w0": 4, "w1": 4}
    view.expect("w1", keys, ttl_s=1.0)
    view.expect("new", keys, ttl_s=1.0)
    view.forget_expected("w1")
    view.forget_expected("new")
    view.forget_expected("nobody")
    assert view.longest(keys) == {"w0": 4, "w1": 4}


async def test_expected_pages_outlive_that_a_worker_is_read_again() -> None:
    clock, keys = ManualClock(), page_keys(10)
    index = scripted(1, keys[:4])
    view = PrefixView(index, clock=clock)
    view.expect("w0", keys, ttl_s=10.0)
    await refreshed(view)
    assert view.longest(keys) == {"w0": 10}
    index.chunks["w0", 0] = IndexSlice(Position(ORDER, 3, 3), 0, tuple(keys[:2]))
    await refreshed(view)
    assert view.keys_of("w0") == set(keys[:2])
    assert view.longest(keys) == {"w0": 10}
    view.forget_expected("w0")
    assert view.longest(keys) == {"w0": 2}


async def test_expected_pages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_view, "MAX_EXPECTED_PAGES", 100)
    view = PrefixView(ScriptedIndex(), clock=ManualClock())
    prompts = [page_keys(30, seed=number) for number in range(10)]
    for number, keys in enumerate(prompts):
        view.expect("w0", keys, ttl_s=10 + number)
    assert [bool(view.longest(keys)) for keys in prompts] == [False] * 7 + [True] * 3
    assert len(view._pages._expected) == 90
    view.expect("w1", page_keys(200, seed=99), ttl_s=100)
    assert view.longest(page_keys(200, seed=99)) == {"w1": 100}
    assert len(view._pages._expected) == 100


async def test_bits_are_given_again_only_when_swept() -> None:
    clock, keys = ManualClock(), page_keys(10_000)
    index = scripted(3, keys)
    view = PrefixView(index, clock=clock)
    await refreshed(view)
    w1 = index.sightings.pop(1)
    await view.refresh()
    clock.advance(GRACE_S)
    await view.refresh()
    assert view.longest(keys) == {"w0": 10_000, "w2": 10_000}
    # The place of the one that left is not taken by one that holds less, while it is not swept out.
    index.chunks["w3", 0] = IndexSlice(Position(ORDER, 1, 1), 0, tuple(keys[:5]))
    index.sightings.append(Seen("w3", ORDER))
    await refreshed(view)
    assert view.longest(keys) == {"w0": 10_000, "w2": 10_000, "w3": 5}
    while not view._pages.sweep():
        pass
    assert view._pages._taken.bit_count() == 3
    index.chunks["w1", 0] = IndexSlice(Position(ORDER, 1, 1), 0, ())
    index.sightings.append(w1)
    await refreshed(view)
    assert view.longest(keys) == {"w0": 10_000, "w2": 10_000, "w3": 5}
    while not view._pages.sweep():
        pass
    assert view.longest(keys) == {"w0": 10_000, "w2": 10_000, "w3": 5}
    assert view.keys_of("w1") == frozenset()


async def test_a_bit_that_is_given_back_while_others_are_swept_is_not_free_yet() -> None:
    clock, keys = ManualClock(), page_keys(3 * prefix_view.SWEEP_PAGES)
    index = scripted(3, keys)
    view = PrefixView(index, clock=clock)
    await refreshed(view)
    while not view._pages.sweep():
        pass
    for num_left in (2, 1):
        index.sightings.pop()
        await view.refresh()
        clock.advance(GRACE_S)
        await view.refresh()
        assert len(view.worker_ids) == num_left
        assert not view._pages.sweep()
    assert not view._pages.sweep()  # the first one is swept out now, the second one is not
    # Bits are given from the lowest one on, two to each worker that is read and one to the others.
    view.expect("w3", keys[:1], ttl_s=100)
    for name in ("w4", "w5"):
        index.chunks[name, 0] = IndexSlice(Position(ORDER, 1, 1), 0, tuple(keys[:5]))
        index.sightings.append(Seen(name, ORDER))
    await refreshed(view)
    assert view.longest(keys) == {"w0": len(keys), "w3": 1, "w4": 5, "w5": 5}


KEY_POOL = page_keys(12, seed=5)
WORKERS = ("w0", "w1")
some_keys = st.lists(st.sampled_from(KEY_POOL), max_size=6, unique=True)
worker = st.sampled_from(WORKERS)
STEPS = st.one_of(
    st.tuples(st.just("note"), worker, some_keys, some_keys),
    st.tuples(st.just("note"), worker, some_keys, some_keys),
    st.tuples(st.just("flush"), worker),
    st.tuples(st.just("look"), st.integers(1, 3)),
    st.tuples(st.just("pass"), st.sampled_from([0.5, 5.0])),
    st.sampled_from([("flushall",), ("new gateway",), ("sweep",)]),
    st.tuples(st.sampled_from(["restart worker", "kill worker", "lose changes", "lose keys", "lose head"]), worker),
)


class System:
    """Publishers, a view, and what the view should hold."""

    def __init__(self, server: EmbeddedRedis, store: Store, client: "redis.Redis") -> None:
        self.server, self.store, self.client = server, store, client
        self.clock = ManualClock()
        self.view = PrefixView(PrefixIndex(store), clock=self.clock)
        self.publishers: dict[str, PrefixPublisher] = {}
        self.held: dict[str, set[bytes]] = {}
        self.num_lives = 0
        for worker_id in WORKERS:
            self.begin(worker_id)

    def begin(self, worker_id: str) -> None:
        self.num_lives += 1
        record = new_record(worker_id, started_unix_ns=self.num_lives)
        # No beat and no interval disturbs what the example does.
        publisher = PrefixPublisher(
            self.server.url, cluster="test", record=record, beat_s=100, ttl_s=300, flush_interval_s=0.001
        )
        publisher.start()
        self.publishers[worker_id], self.held[worker_id] = publisher, set()

    def end(self, worker_id: str, *, is_killed: bool) -> None:
        publisher = self.publishers.pop(worker_id, None)
        if publisher is None:
            return
        if is_killed:
            publisher._delete = lambda: None  # type: ignore[method-assign]
        publisher.release()
        del self.held[worker_id]

    async def do(self, name: str, *args: Any) -> None:
        match name:
            case "note" if args[0] in self.publishers:
                worker_id, added, evicted = args
                self.publishers[worker_id].note(added, evicted)
                self.held[worker_id] = self.held[worker_id] - set(evicted) | set(added)
            case "flush" if args[0] in self.publishers:
                await flushed(self.publishers[args[0]])
            case "look":
                for _ in range(args[0]):
                    await self.view.refresh()
            case "pass":
                self.clock.advance(args[0])
            case "flushall":
                self.client.flushall()
            case "new gateway":
                self.view = PrefixView(PrefixIndex(self.store), clock=self.clock)
            case "sweep":
                self.view._pages.sweep()
            case "restart worker":
                self.end(args[0], is_killed=True)
                self.begin(args[0])
            case "kill worker":
                self.end(args[0], is_killed=True)
            case "lose changes":
                head = f"tandem:{{test}}:pages:{args[0]}"
                if self.client.exists(head):
                    fields = [name for name in self.client.hkeys(head) if name.isdigit()]
                    self.client.hdel(head, "none", *fields)
            case "lose keys":
                self.client.delete(f"tandem:{{test}}:pages:{args[0]}:keys")
            case "lose head":
                self.client.delete(f"tandem:{{test}}:pages:{args[0]}")

    async def settle(self) -> None:
        for worker_id in WORKERS:
            if worker_id in self.publishers:
                await flushed(self.publishers[worker_id])
            else:
                # The process is dead and its keys expire.
                head = f"tandem:{{test}}:pages:{worker_id}"
                self.client.delete(head, f"{head}:keys")
                self.client.zadd(LEASES, {worker_id: 1}, xx=True)
        await refreshed(self.view)
        self.clock.advance(prefix_view.REREAD_S + GRACE_S)
        await refreshed(self.view)
        self.clock.advance(prefix_view.REREAD_S + GRACE_S)
        await refreshed(self.view)


def expected_longest(held: dict[str, set[bytes]], keys: list[bytes]) -> dict[str, int]:
    lengths = {
        worker_id: next((number for number, key in enumerate(keys) if key not in pages), len(keys))
        for worker_id, pages in held.items()
    }
    return {worker_id: length for worker_id, length in lengths.items() if length}


def test_once_quiet_it_is_what_the_workers_hold() -> None:
    with EmbeddedRedis() as server, redis.Redis.from_url(server.url) as client:

        @settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(st.lists(STEPS, max_size=25))
        def check(steps: list[tuple[Any, ...]]) -> None:
            client.flushall()
            asyncio.run(run(server, client, steps))

        check()


async def run(server: EmbeddedRedis, client: "redis.Redis", steps: list[tuple[Any, ...]]) -> None:
    store = Store(server.url, cluster="test", timeout_s=5.0)
    system = System(server, store, client)
    try:
        for step in steps:
            await system.do(*step)
        await system.settle()
        assert {name: set(system.view.keys_of(name)) for name in system.held} == system.held
        assert system.view.worker_ids == set(system.held)
        assert system.view.longest(KEY_POOL) == expected_longest(system.held, KEY_POOL)
        while not system.view._pages.sweep():
            pass
        assert set(system.view._pages.holders) == set().union(*system.held.values())
        assert system.view._pages._taken.bit_count() == len(system.held)
    finally:
        for worker_id in WORKERS:
            system.end(worker_id, is_killed=False)
        await store.close()


@given(
    st.lists(st.tuples(worker, st.booleans(), some_keys), max_size=20),
    st.lists(st.sampled_from(KEY_POOL), max_size=12, unique=True),
)
def test_longest_is_the_run_from_the_first_key(changes: list[tuple[str, bool, list[bytes]]], keys: list[bytes]) -> None:
    async def check() -> None:
        index = scripted(2, [])
        view = PrefixView(index, clock=ManualClock())
        await refreshed(view)
        held: dict[str, set[bytes]] = {"w0": set(), "w1": set()}
        seq = 1
        for worker_id, is_added, some in changes:
            seq += 1
            change = Change(tuple(some), ()) if is_added else Change((), tuple(some))
            held[worker_id] = held[worker_id] | set(some) if is_added else held[worker_id] - set(some)
            moved = [
                Seen(name, ORDER, Position(ORDER, 1, seq), (change,) if name == worker_id else ()) for name in held
            ]
            index.sightings = moved
            await view.refresh()
        assert view.longest(keys) == expected_longest(held, keys)

    asyncio.run(check())
