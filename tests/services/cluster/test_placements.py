"""Placements: the states, the fence in Redis against the rule in Python, and the writer behind the requests."""

import asyncio
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.cluster.embedded_redis import EmbeddedRedis
from services.cluster.placements import (
    ACTIVE,
    FINAL,
    PLACED,
    TERMINAL,
    TERMINAL_TTL_S,
    Placement,
    PlacementStore,
    PlacementWriter,
    State,
    accepts,
    can_move,
    can_reach,
)
from services.cluster.rate_limits import Limiter
from services.cluster.redis_store import Script, Store
from services.runtime.errors import StoreRefused, StoreUnavailable
from tests.examples import examples
from tests.limited_redis import LimitedRedis
from tests.waiting import HANG_LIMIT_S

GATEWAY, OTHER = "a" * 32, "b" * 32
HAPPY = [State.QUEUED, State.ADMITTED, State.PREFILLING, State.TRANSFERRING, State.DECODING, State.FINISHED]


@pytest.fixture
def placements(store: Store) -> PlacementStore:
    return PlacementStore(store)


@pytest.fixture
async def writer(placements: PlacementStore) -> AsyncIterator[PlacementWriter]:
    fenced: list[Placement] = []
    opened = PlacementWriter(placements, on_fenced=fenced.append)
    opened.start()
    yield opened
    await opened.close()


BEGAN_NS = 1_790_000_000_123_456_789


def placement(
    request_id: str, state: State, *, attempt: int = 1, gateway: str = GATEWAY, began_unix_ns: int = BEGAN_NS
) -> Placement:
    return Placement(request_id, attempt, state, gateway, "prefill-0", "decode-0", began_unix_ns)


def test_the_sets_of_states_are_what_they_say() -> None:
    assert {State.FINISHED, State.FAILED, State.CANCELLED} == TERMINAL
    assert set(State) == ACTIVE | TERMINAL
    assert not ACTIVE & TERMINAL
    assert {State.ADMITTED, State.PREFILLING, State.TRANSFERRING, State.DECODING} == PLACED
    assert FINAL < TERMINAL


def test_moves_follow_the_design() -> None:
    assert all(can_move(before, after) for before, after in itertools.pairwise(HAPPY))
    assert all(can_move(state, end) for state in ACTIVE for end in (State.FAILED, State.CANCELLED))
    assert not any(can_move(end, state) for end in TERMINAL for state in State)
    assert not any(can_move(state, State.QUEUED) for state in State)
    assert not any(can_move(state, state) for state in State)
    assert not can_move(State.QUEUED, State.DECODING)


def test_what_can_be_reached_is_the_closure_of_the_moves() -> None:
    for before, after in itertools.product(State, State):
        via = any(can_move(before, step) and can_reach(step, after) for step in State)
        assert can_reach(before, after) == (before is after or via)


states = st.sampled_from(State)
updates = st.builds(
    Placement,
    request_id=st.sampled_from(["r1", "r2"]),
    attempt=st.integers(1, 3),
    state=states,
    gateway=st.sampled_from([GATEWAY, OTHER]),
    prefill_worker=st.sampled_from(["", "prefill-0"]),
    decode_worker=st.sampled_from(["", "decode-0"]),
    began_unix_ns=st.sampled_from([0, BEGAN_NS, BEGAN_NS + 1]),
)


def forget_everything(server: LimitedRedis) -> None:
    with redis.Redis.from_url(server.admin_url) as admin:
        admin.flushall()


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(st.lists(updates, max_size=6), max_size=6))
def test_redis_and_the_rule_agree(batches: list[list[Placement]], redis_server: LimitedRedis) -> None:
    """Any writes in any order, many at once: Redis takes and refuses exactly what `accepts` says."""

    async def run() -> None:
        store = Store(redis_server.url, cluster="test", timeout_s=5)
        forget_everything(redis_server)
        placements, model = PlacementStore(store), {}
        for batch in batches:
            expected = []
            for index, update in enumerate(batch):
                if accepts(model.get(update.request_id), update):
                    model[update.request_id] = update
                else:
                    expected.append(index)
            assert await placements.move_many(batch) == expected
            for request_id in ("r1", "r2"):
                assert await placements.get(request_id) == model.get(request_id)
        await store.close()

    asyncio.run(run())


@given(first=updates, writes=st.lists(updates, max_size=30))
def test_no_write_ever_goes_back_in_attempts_or_states(first: Placement, writes: list[Placement]) -> None:
    current = first
    for update in writes:
        if not accepts(current, update):
            continue
        assert update.began_unix_ns >= current.began_unix_ns
        if update.began_unix_ns > current.began_unix_ns:
            current = update
            continue
        assert update.attempt >= current.attempt
        assert current.state not in FINAL or update.state is current.state
        if update.attempt == current.attempt:
            assert update.gateway == current.gateway
            assert can_reach(current.state, update.state)
        current = update


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_written_behind_or_not_the_last_state_is_the_same(data: st.DataObject, redis_server: LimitedRedis) -> None:
    """Legal lives of requests, one after the other under one id, posted with random pauses and lost answers."""
    lives = data.draw(st.lists(st.lists(st.sampled_from(["next", "fail_over", "cancel"]), max_size=8), max_size=4))
    flushes = data.draw(st.lists(st.sampled_from(["no", "yes", "answer_lost", "store_away"]), min_size=40, max_size=40))

    async def run() -> None:
        store = Store(redis_server.url, cluster="test", timeout_s=5)
        forget_everything(redis_server)
        placements = Unreliable(store)
        fenced: list[Placement] = []
        writer = PlacementWriter(placements, on_fenced=fenced.append)
        last: Placement | None = None
        outcomes = iter(flushes)
        for number, life in enumerate(lives):
            for posted in walk(life, began_unix_ns=BEGAN_NS + number):
                last = posted
                writer.post(posted)
                placements.outcome = next(outcomes, "yes")
                if placements.outcome != "no":
                    await settle(writer)
        placements.outcome = "yes"
        await writer.flush()
        assert fenced == []
        assert await placements.get("r1") == last
        await store.close()

    asyncio.run(run())


@pytest.mark.parametrize("state", [State.QUEUED, State.TRANSFERRING, State.FINISHED])
async def test_a_request_whose_gateway_is_no_longer_present_is_interrupted(
    store: Store, placements: PlacementStore, state: State
) -> None:
    await placements.move(placement("r1", state))
    found = await placements.get("r1")
    assert found is not None
    assert found.shown_state == state, "no gateway is known to be present, so nothing is known of this one"
    alive, dead = Limiter(store, gateway=GATEWAY), Limiter(store, gateway=OTHER)
    await dead._write(renews=True)
    found = await placements.get("r1")
    assert found is not None
    assert found.state == state
    assert found.shown_state == (state if state == State.FINISHED else "interrupted")
    await alive._write(renews=True)
    assert await placements.get("r1") == placement("r1", state)
    await store.run(EXPIRE, (store.keys.gateways,), (GATEWAY,))
    found = await placements.get("r1")
    assert found is not None
    assert found.shown_state == (state if state == State.FINISHED else "interrupted")


EXPIRE = Script("return redis.call('ZADD', KEYS[1], 1, ARGV[1])")


def walk(life: list[str], *, began_unix_ns: int) -> list[Placement]:
    """The placements of one request that lives by these words, ended in the end."""
    attempt, state = 1, State.QUEUED
    path = [(attempt, state)]
    for word in [*life, "cancel"]:
        if state in TERMINAL:
            break
        if word == "fail_over":
            path.append((attempt, State.FAILED))
            attempt, state = attempt + 1, State.QUEUED
        else:
            state = HAPPY[HAPPY.index(state) + 1] if word == "next" else State.CANCELLED
        path.append((attempt, state))
    return [placement("r1", state, attempt=attempt, began_unix_ns=began_unix_ns) for attempt, state in path]


class Unreliable(PlacementStore):
    """Real Redis whose answers may get lost after or before it did its work."""

    outcome = "yes"

    async def move_many(self, placements: Sequence[Placement], *, ended_ttl_s: float = TERMINAL_TTL_S) -> list[int]:
        if self.outcome == "store_away":
            raise StoreUnavailable("away")
        answer = await super().move_many(placements, ended_ttl_s=ended_ttl_s)
        if self.outcome == "answer_lost":
            raise StoreUnavailable("lost")
        return answer


async def settle(writer: PlacementWriter) -> None:
    try:
        await writer.flush()
    except StoreUnavailable:
        assert writer.num_pending > 0


async def test_a_life_is_kept_and_expires(placements: PlacementStore, client: "redis.Redis") -> None:
    key = "tandem:{test}:request:r1"
    for state in HAPPY[:-1]:
        assert await placements.move(placement("r1", state))
        assert await placements.get("r1") == placement("r1", state)
        assert 3_500_000 < client.pttl(key) <= 3_600_000
    assert await placements.move(placement("r1", State.FINISHED))
    assert 55_000 < client.pttl(key) <= 60_000
    assert abs(int(client.hget(key, "changed")) - time.time() * 1000) < 60_000
    assert await placements.get("other") is None


async def test_of_many_that_have_ended_only_so_many_are_kept_for_long(
    placements: PlacementStore, client: "redis.Redis"
) -> None:
    writer = PlacementWriter(placements, max_ended=10)
    for number in range(10):
        writer.post(placement(f"r{number}", State.FINISHED))
    await writer.flush()
    for name, state in (("late", State.CANCELLED), ("running", State.DECODING)):
        writer.post(placement(name, state))
    await writer.flush()
    assert all(client.pttl(f"tandem:{{test}}:request:r{number}") > 1_000 for number in range(10))
    assert client.pttl("tandem:{test}:request:late") <= 1_000
    assert client.pttl("tandem:{test}:request:running") > 3_000_000


async def test_older_attempts_and_other_owners_are_fenced_off(placements: PlacementStore) -> None:
    assert await placements.move(placement("r1", State.DECODING, attempt=2))
    assert not await placements.move(placement("r1", State.FINISHED, attempt=1))
    assert not await placements.move(placement("r1", State.FINISHED, attempt=2, gateway=OTHER))
    assert not await placements.move(placement("r1", State.PREFILLING, attempt=2))
    assert await placements.move(placement("r1", State.QUEUED, attempt=3, gateway=OTHER))
    assert await placements.move(placement("r1", State.CANCELLED, attempt=3, gateway=OTHER))
    assert not await placements.move(placement("r1", State.ADMITTED, attempt=4))
    assert not await placements.move(placement("r1", State.QUEUED, attempt=1))
    assert not await placements.move(placement("r1", State.QUEUED, attempt=9, began_unix_ns=BEGAN_NS - 1))
    assert await placements.move(placement("r1", State.QUEUED, attempt=1, began_unix_ns=BEGAN_NS + 1))


@pytest.mark.parametrize("garbage", ["string", "list", "fields", "huge", "bytes", "endless", "attempt", "began"])
async def test_garbage_is_absent_counted_and_replaced(
    garbage: str, placements: PlacementStore, store: Store, client: "redis.Redis"
) -> None:
    key = "tandem:{test}:request:r1"
    good = {"state": "decoding", "attempt": "9", "gateway": GATEWAY, "prefill": "", "decode": "", "began": "0" * 20}
    if garbage == "string":
        client.set(key, "x", px=10_000)
    elif garbage == "list":
        client.rpush(key, "x")
    elif garbage == "endless":
        client.hset(key, mapping=good)
        assert await placements.get("r1") is not None
        assert await placements.move(placement("r1", State.QUEUED))
        return
    else:
        spoiled: dict[str, dict[str, str | bytes]] = {
            "fields": {"state": "dancing"},
            "huge": {"gateway": "x" * 100_000},
            "bytes": {"decode": b"\xff\xfe"},
            "attempt": {"attempt": "1e999"},
            "began": {"began": "99999999999999999999x"},
        }
        client.hset(key, mapping=good | spoiled[garbage])
        client.pexpire(key, 10_000)
    assert await placements.get("r1") is None
    assert store.stats.num_rejected_values == 1
    attempt = 10 if garbage in {"huge", "bytes"} else 1
    assert await placements.move(placement("r1", State.QUEUED, attempt=attempt))
    assert await placements.get("r1") == placement("r1", State.QUEUED, attempt=attempt)


async def test_the_writer_writes_the_latest_state(writer: PlacementWriter, placements: PlacementStore) -> None:
    for state in HAPPY[:5]:
        writer.post(placement("r1", state))
    writer.post(placement("r2", State.QUEUED))
    async with asyncio.timeout(HANG_LIMIT_S):
        while writer.num_pending:  # noqa: ASYNC110 - the writer has its own pace
            await asyncio.sleep(0.01)
        await writer.flush()
    assert await placements.get("r1") == placement("r1", State.DECODING)
    assert await placements.get("r2") == placement("r2", State.QUEUED)
    assert writer.num_written == 2


async def test_what_redis_does_not_have_yet_is_found(placements: PlacementStore, redis_server: EmbeddedRedis) -> None:
    writer = PlacementWriter(placements)
    assert await writer.find("r1") is None
    waiting, later = placement("r1", State.ADMITTED), placement("r1", State.PREFILLING)
    writer.post(waiting)
    assert await writer.find("r1") == waiting
    os.kill(redis_server.pid, signal.SIGSTOP)
    writing = asyncio.create_task(writer.flush())
    await asyncio.sleep(0)
    assert await writer.find("r1") == waiting
    writer.post(later)
    assert await writer.find("r1") == later
    with pytest.raises(StoreUnavailable):
        await writing
    assert await writer.find("r1") == later
    with pytest.raises(StoreUnavailable):
        await writer.find("r2")
    os.kill(redis_server.pid, signal.SIGCONT)
    await writer.close()
    assert (writer.num_pending, await placements.get("r1"), await writer.find("r1")) == (0, later, later)


async def test_a_lost_race_is_reported(placements: PlacementStore) -> None:
    fenced: list[Placement] = []
    writer = PlacementWriter(placements, on_fenced=fenced.append)
    await placements.move(placement("r1", State.DECODING, attempt=5, gateway=OTHER))
    writer.post(placement("r1", State.ADMITTED, attempt=2))
    writer.post(placement("r2", State.ADMITTED, attempt=2))
    await writer.flush()
    writer.post(placement("r2", State.PREFILLING, attempt=2))
    writer.post(placement("r2", State.PREFILLING, attempt=1))
    assert fenced == [placement("r1", State.ADMITTED, attempt=2), placement("r2", State.PREFILLING, attempt=1)]
    assert writer.num_fenced == 2
    await writer.close()


async def test_without_redis_the_writer_is_bounded_and_catches_up(
    placements: PlacementStore, redis_server: EmbeddedRedis
) -> None:
    writer = PlacementWriter(placements, max_pending=100)
    writer.start()
    os.kill(redis_server.pid, signal.SIGSTOP)
    for index in range(1000):
        writer.post(placement(f"r{index}", State.QUEUED))
        writer.post(placement("r0", HAPPY[index % 5]))
        if index % 100 == 0:
            await asyncio.sleep(0.02)
    assert writer.num_pending <= 100
    assert writer.num_dropped == 900
    os.kill(redis_server.pid, signal.SIGCONT)
    async with asyncio.timeout(HANG_LIMIT_S):
        while writer.num_pending or not await exists(placements, "r99"):  # noqa: ASYNC110 - it is in Redis
            await asyncio.sleep(0.05)
    await writer.close()


async def test_closing_without_redis_takes_its_time_and_no_more(
    placements: PlacementStore, redis_server: EmbeddedRedis
) -> None:
    writer = PlacementWriter(placements)
    writer.start()
    redis_server.kill()
    writer.post(placement("r1", State.QUEUED))
    await asyncio.sleep(0.1)
    async with asyncio.timeout(HANG_LIMIT_S):
        await writer.close(timeout_s=0.5)


async def test_closing_outlasts_a_short_outage(placements: PlacementStore, redis_server: EmbeddedRedis) -> None:
    writer = PlacementWriter(placements)
    writer.start()
    os.kill(redis_server.pid, signal.SIGSTOP)
    writer.post(placement("r1", State.QUEUED))
    closing = asyncio.create_task(writer.close(timeout_s=HANG_LIMIT_S))
    await asyncio.sleep(0.4)
    os.kill(redis_server.pid, signal.SIGCONT)
    await closing
    assert writer.num_written == 1


async def test_closing_writes_what_waits(placements: PlacementStore) -> None:
    writer = PlacementWriter(placements, flush_interval_s=60)
    writer.start()
    await asyncio.sleep(0)
    for index in range(600):
        writer.post(placement(f"r{index}", State.QUEUED))
    await asyncio.sleep(0.01)
    await writer.close()
    assert writer.num_written == 600
    assert await placements.get("r599") is not None


async def exists(placements: PlacementStore, request_id: str) -> bool:
    try:
        return await placements.get(request_id) is not None
    except StoreUnavailable:
        return False


async def test_placements_that_redis_refuses_are_dropped(placements: PlacementStore) -> None:
    async def refuse(*args: object, **kwargs: object) -> list[int]:
        raise StoreRefused("no")

    placements.move_many = refuse  # type: ignore[method-assign]
    writer = PlacementWriter(placements)
    writer.post(Placement("r", 1, State.QUEUED, GATEWAY))
    await writer.flush()
    assert (writer.num_pending, writer.num_dropped) == (0, 1)
