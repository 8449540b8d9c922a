"""Tenants' limits: the scripts against an exact model, several gateways on one Redis, and life without it."""

import asyncio
import contextlib
import itertools
import os
import signal
from fractions import Fraction

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.cluster import rate_limit_scripts, rate_limits
from services.cluster.rate_limit_scripts import CONCURRENCY, REQUESTS, TOKENS
from services.cluster.rate_limits import Limiter
from services.cluster.redis_store import Script, Store
from services.cluster.tenant_usage import Bucket, TenantLimits, TenantUsage
from services.runtime.clock import ManualClock
from services.runtime.errors import StoreUnavailable
from tests.examples import examples
from tests.waiting import HANG_LIMIT_S, settle, until

NAMES = itertools.count()


class ExactBucket:
    """The formula of the module's docstring, in rational numbers."""

    def __init__(self, limit):
        self.limit, self.level, self.at_us = limit, Fraction(limit), 0

    def refill(self, now_us):
        passed_us = max(0, now_us - self.at_us)
        return min(Fraction(self.limit), self.level + Fraction(passed_us * self.limit, 60_000_000))

    def keep(self, level, now_us):
        self.level, self.at_us = max(Fraction(-10 * self.limit), min(Fraction(self.limit), level)), now_us


def _timed(script, first):
    """The script with a time that is given: two more arguments from number `first` on."""
    assert script.body.count("redis.call('TIME')") == 1
    return Script(script.body.replace("redis.call('TIME')", f"{{ARGV[{first}], ARGV[{first + 1}]}}"))


TAKE, SETTLE = _timed(rate_limit_scripts.TAKE, 8), _timed(rate_limit_scripts.SETTLE, 5)


@st.composite
def histories(draw):
    """(limit, steps of (us passed, cost, is_forced))."""
    limit = draw(st.sampled_from([1, 2, 3, 7, 60, 61, 1000, 10**6, 10**9]))
    cost = st.one_of(st.integers(0, min(limit, 40)), st.integers(0, limit + 2))
    step = st.tuples(st.integers(-3_000_000, 90_000_000), cost, st.booleans(), st.booleans())
    return limit, draw(st.lists(step, max_size=25))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=histories())
async def test_scripts_and_exact_model_agree(patient_store, history):
    limit, steps = history
    exact, name = ExactBucket(limit), f"t{next(NAMES)}"
    keys = (patient_store.keys.limit_prefix + name, patient_store.keys.hold_prefix + name)
    now_us = exact.at_us = 1_800_000_000_000_000
    for passed_us, cost, is_forced, is_back in steps:
        now_us += passed_us
        time = (now_us // 1_000_000, now_us % 1_000_000)
        level = exact.refill(now_us)
        if is_forced:
            cost = -cost if is_back else cost
            rows = rate_limits._ENCODER.encode([(name, limit, -1, float(cost), 0.0, [], [])])
            prefixes = (patient_store.keys.gateways, patient_store.keys.limit_prefix, patient_store.keys.hold_prefix)
            await patient_store.run(SETTLE, prefixes, ("g", 10_000, 10_000, rows, *time))
            if cost:
                exact.keep(level - cost, now_us)
            continue
        refused_by, wait_ms, taken, left, _ = await patient_store.run(
            TAKE, keys, (limit, -1, -1, cost, 0, "", 10_000, *time)
        )
        margin = Fraction(1, 10**5) * max(1, limit // 10**6)
        if abs(level - cost) > margin:  # else rounding may decide
            assert (refused_by == b"") == (level >= cost)
        assert taken == (0 if refused_by else cost)
        if refused_by:
            assert refused_by == b"requests_per_minute"
            if cost > limit:
                assert wait_ms == 60_000
            else:
                assert 0 < wait_ms <= (cost - level) * 60_000 / limit + 1 + margin
                assert level + Fraction(wait_ms * limit, 60_000) >= cost - margin
        else:
            exact.keep(level - cost, now_us)
        if passed_us >= 0:
            assert abs(float(left) - exact.refill(now_us)) < margin


async def test_a_local_bucket_follows_the_same_formula():
    @settings(max_examples=examples(200), deadline=None)
    @given(
        limit=st.integers(1, 10**6), steps=st.lists(st.tuples(st.integers(0, 90_000_000), st.integers(-50, 2_000_000)))
    )
    def check(limit, steps):
        exact, bucket, now_us = ExactBucket(limit), Bucket(limit, now_s=0.0), 0
        for passed_us, cost in steps:
            now_us += passed_us
            level = exact.refill(now_us)
            wait_s = bucket.wait_s(cost, now_us / 1e6)
            if abs(level - cost) > 1e-4:
                assert (wait_s == 0) == (level >= cost)
            bucket.take(cost, now_us / 1e6)
            exact.keep(level - cost, now_us)
            assert bucket.level == pytest.approx(float(exact.level), abs=1e-3)

    check()


@pytest.fixture
async def gateways(redis_server):
    """Makes limiters that have a connection each, as gateways do."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(*, starts=True, timeout_s=2.0, clock=None):
            store = Store(redis_server.url, cluster="test", timeout_s=timeout_s, breaker_open_s=0.1)
            stack.push_async_callback(store.close)
            limiter = Limiter(store, gateway=f"gateway-{next(NAMES)}", **({"clock": clock} if clock else {}))
            if starts:
                limiter.start()
                stack.push_async_callback(limiter.close)
            return limiter

        yield make


async def test_two_gateways_share_one_limit(gateways):
    first, second = await gateways(), await gateways()
    allowed = TenantLimits(requests_per_minute=10)
    verdicts = [await each.take("t", allowed, num_requests=1) for _ in range(6) for each in (first, second)]
    assert [verdict.limit for verdict in verdicts[:10]] == [""] * 10
    assert [verdict.limit for verdict in verdicts[10:]] == [REQUESTS] * 2
    assert 0 < verdicts[10].retry_after_s <= 6
    assert verdicts[0].requests.limit == 10
    assert [verdict.requests.remaining for verdict in verdicts] == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 0, 0]
    assert 54 <= verdicts[9].requests.reset_s <= 60
    other = await first.take("u", allowed, num_requests=1)
    assert other.limit == ""


async def test_many_at_once_take_no_more_than_there_is(gateways):
    limiters = [await gateways() for _ in range(3)]
    allowed = TenantLimits(requests_per_minute=20, tokens_per_minute=600, concurrency=12)
    takes = [
        limiter.take("t", allowed, num_requests=1, num_tokens=5, hold=f"{number}.{index}")
        for number in range(20)
        for index, limiter in enumerate(limiters)
    ]
    verdicts = await asyncio.gather(*takes)
    assert sum(not verdict.limit for verdict in verdicts) == 12
    assert {verdict.limit for verdict in verdicts} == {"", CONCURRENCY}
    # What was refused took nothing, neither of requests nor of tokens.
    last = await limiters[0].take("t", allowed)
    assert last.requests.remaining == 8
    assert 540 <= last.tokens.remaining < 580  # ten come back each second


async def test_zero_allows_nothing_and_absent_everything(gateways):
    limiter = await gateways()
    assert (await limiter.take("a", TenantLimits(requests_per_minute=0), num_requests=1)).limit == REQUESTS
    assert (await limiter.take("b", TenantLimits(tokens_per_minute=0), num_requests=1)).limit == TOKENS
    assert (await limiter.take("c", TenantLimits(concurrency=0), num_requests=1, hold="x")).limit == CONCURRENCY
    for _ in range(50):
        assert (await limiter.take("d", TenantLimits(), num_requests=1, num_tokens=10**9, hold="y")).limit == ""
    assert limiter._tenants.keys() <= {"a", "b", "c"}


async def test_what_was_taken_too_much_comes_back(gateways):
    first, second = await gateways(), await gateways()
    allowed = TenantLimits(tokens_per_minute=1000, concurrency=1)
    assert (await first.take("t", allowed, num_tokens=1000, hold="x")).limit == ""
    assert (await second.take("t", allowed, num_tokens=500)).limit == TOKENS
    assert (await second.take("t", allowed, hold="y")).limit == CONCURRENCY
    first.settle("t", allowed, num_tokens=-900, hold="x")

    async def is_back():
        verdict = await second.take("t", allowed)
        return verdict.tokens.remaining >= 900

    await until(is_back)
    assert (await second.take("t", allowed, num_tokens=500, hold="y")).limit == ""
    second.settle("t", allowed, num_tokens=2000)

    async def owes():
        return (await first.take("t", allowed)).limit == TOKENS

    await until(owes)
    assert (await first.take("t", allowed)).tokens.remaining == 0


async def test_places_of_a_dead_gateway_are_freed(gateways, monkeypatch):
    allowed = TenantLimits(concurrency=1)
    dead, living = await gateways(starts=False), await gateways()
    assert rate_limits.HOLD_TTL_S <= 10
    monkeypatch.setattr(rate_limits, "HOLD_TTL_S", 1.0)
    assert (await dead.take("t", allowed, hold="x")).limit == ""
    assert (await living.take("t", allowed, hold="y")).limit == CONCURRENCY

    async def is_free():
        return (await living.take("t", allowed, hold="y")).limit == ""

    await until(is_free)


async def test_places_of_a_living_gateway_are_kept(gateways, monkeypatch, client):
    allowed = TenantLimits(concurrency=1)
    monkeypatch.setattr(rate_limits, "HOLD_TTL_S", 1.0)
    monkeypatch.setattr(rate_limits, "RENEW_INTERVAL_S", 0.1)
    busy, other = await gateways(), await gateways()
    assert (await busy.take("t", allowed, hold="x")).limit == ""
    key = busy._store.keys.hold_prefix + "t"
    ends_ms = client.zscore(key, "x")

    async def is_renewed_twice():
        return (client.zscore(key, "x") or 0) > ends_ms + 1000

    await until(is_renewed_twice)
    assert (await other.take("t", allowed, hold="y")).limit == CONCURRENCY
    client.flushall()

    async def is_counted_again():
        return client.zscore(key, "x") is not None

    await until(is_counted_again)


async def test_the_same_request_elsewhere_takes_no_other_place(gateways):
    allowed = TenantLimits(requests_per_minute=5, concurrency=1)
    first, second = await gateways(), await gateways()
    assert (await first.take("t", allowed, num_requests=1, hold="same")).limit == ""
    again = await second.take("t", allowed, num_requests=1, hold="same")
    assert (again.limit, again.requests.remaining, again.num_requests) == ("", 4, 0)
    assert (await second.take("t", allowed, num_requests=1, hold="other")).limit == CONCURRENCY


async def test_a_name_that_two_have_is_given_back_by_the_second(gateways):
    tenant = TenantUsage(TenantLimits(concurrency=1))
    tenant.add_hold("x")
    tenant.add_hold("x")
    tenant.end_hold("x")
    assert (dict(tenant.holds), tenant.releases) == ({"x": 1}, set())
    tenant.end_hold("x")
    assert (dict(tenant.holds), tenant.releases) == ({}, {"x"})
    tenant.end_hold("never there")
    assert tenant.releases == {"x"}


@pytest.mark.parametrize("spoil", ["types", "garbage", "future", "endless"])
async def test_what_somebody_else_wrote_stops_nobody(gateways, client, spoil):
    limiter = await gateways()
    allowed = TenantLimits(requests_per_minute=5, concurrency=2)
    bucket, holds = limiter._keys("t")
    gateways_key = limiter._store.keys.gateways
    if spoil == "types":
        for key in (bucket, holds, gateways_key):
            client.delete(key)
            client.set(key, "x")
    elif spoil == "garbage":
        client.hset(bucket, mapping={"requests": "nan", "requests_at": "inf"})
    elif spoil == "future":
        client.hset(bucket, mapping={"requests": "3", "requests_at": "9e15"})
        client.zadd(holds, {str(number): 9e15 for number in range(10)})
    else:
        client.hset(bucket, mapping={"requests": "1e300", "requests_at": "-inf"})
    verdict = await limiter.take("t", allowed, num_requests=1, hold="mine")
    assert verdict.limit == ""
    assert verdict.requests.remaining == (2 if spoil == "future" else 4)
    await limiter._write(renews=True)
    assert client.zcard(holds) == 1


async def test_keys_expire(gateways, client):
    limiter = await gateways()
    allowed = TenantLimits(requests_per_minute=60, tokens_per_minute=60, concurrency=2)
    await limiter.take("t", allowed, num_requests=30, num_tokens=1, hold="x")
    bucket, holds = limiter._keys("t")
    assert 29_000 < client.pttl(bucket) <= 31_000
    assert 9_000 < client.pttl(holds) <= 11_000


async def test_every_request_beyond_the_limit_is_refused(gateways):
    limiter = await gateways()
    allowed = TenantLimits(requests_per_minute=1)
    await limiter.take("t", allowed, num_requests=1)
    for _ in range(50):
        assert (await limiter.take("t", allowed, num_requests=1)).limit == REQUESTS


@pytest.mark.parametrize("how", ["frozen", "killed"])
async def test_without_redis_each_gateway_applies_its_part(gateways, redis_server, how):
    first, second = await gateways(timeout_s=0.5), await gateways(timeout_s=0.5)
    allowed = TenantLimits(requests_per_minute=20, concurrency=4)

    async def see_each_other():
        with contextlib.suppress(StoreUnavailable):  # on a busy machine Redis may be late once
            for each in (first, second):
                await each._write(renews=True)
        return first.num_gateways == second.num_gateways == 2

    await until(see_each_other)
    for number in range(4):
        assert (await first.take("t", allowed, num_requests=1)).limit == "", number
        await second.take("t", allowed)
    if how == "frozen":
        os.kill(redis_server.pid, signal.SIGSTOP)
    else:
        redis_server.kill()
    try:
        for each in (first, second):
            verdicts = [await each.take("t", allowed, num_requests=1) for _ in range(9)]
            assert all(verdict.is_local for verdict in verdicts)
            # 16 of 20 were left, which makes 8 for each of two.
            assert [verdict.limit for verdict in verdicts].count("") in (8, 9)
            assert (await each.take("t", allowed, num_requests=1)).limit == REQUESTS
            places = [
                await each.take("u", TenantLimits(concurrency=4), hold=f"{each._gateway}.{number}")
                for number in range(3)
            ]
            assert [verdict.limit for verdict in places] == ["", "", CONCURRENCY]
    finally:
        if how == "frozen":
            os.kill(redis_server.pid, signal.SIGCONT)
        else:
            redis_server.start()
    await until(lambda: not first.is_alone and not second.is_alone)
    shared = await first.take("t", allowed)
    assert not shared.is_local
    # What was let through meanwhile is booked: of a Redis that forgot, 16 are taken; of one that was frozen, 20.
    assert shared.requests.remaining <= (8 if how == "killed" else 4)
    # Those of both gateways run on, and are counted together again.
    assert (await first.take("u", TenantLimits(concurrency=4), hold="one more")).limit == CONCURRENCY


async def test_what_is_given_back_while_redis_is_away_counts_here(redis_server):
    clock = ManualClock()
    store = Store("unix:///nowhere/redis.sock", cluster="test")
    limiter = Limiter(store, gateway="alone", clock=clock)
    allowed = TenantLimits(tokens_per_minute=100)
    assert (await limiter.take("t", allowed, num_tokens=100)).limit == ""
    assert (await limiter.take("t", allowed, num_tokens=10)).limit == TOKENS
    limiter.settle("t", allowed, num_tokens=-50)
    verdict = await limiter.take("t", allowed, num_tokens=10)
    assert (verdict.limit, verdict.tokens.remaining, verdict.is_local) == ("", 40, True)
    clock.advance(60)
    assert (await limiter.take("t", allowed)).tokens.remaining == 100
    await limiter.close()
    await store.close()


async def test_what_is_owed_is_not_lost_and_not_told_twice():
    clock = ManualClock()
    tenant = TenantUsage(TenantLimits(requests_per_minute=60))
    tenant.owed = {REQUESTS: 3.0}
    parcel = tenant.pack(clock.monotonic(), renews=False, leaves=False)
    assert parcel.costs == {REQUESTS: 3.0}
    assert tenant.pack(clock.monotonic(), renews=False, leaves=False) is None
    tenant.unpack(parcel)
    assert tenant.owed == {REQUESTS: 3.0}


async def test_a_limit_that_changes_counts_at_once(gateways):
    limiter = await gateways()
    assert (await limiter.take("t", TenantLimits(requests_per_minute=100), num_requests=50)).limit == ""
    lower = await limiter.take("t", TenantLimits(requests_per_minute=10), num_requests=1)
    assert (lower.limit, lower.requests.remaining) == ("", 9)
    higher = await limiter.take("t", TenantLimits(requests_per_minute=1000), num_requests=10)
    assert higher.limit == REQUESTS


async def test_a_leaving_gateway_gives_its_places_back(gateways, client):
    limiter = await gateways(starts=False)
    await limiter.take("t", TenantLimits(concurrency=3), hold="x")
    await limiter._write(renews=True)
    assert client.zcard(limiter._store.keys.gateways) == 1
    await limiter.close()
    assert client.exists(limiter._keys("t")[1]) == 0
    assert client.exists(limiter._store.keys.gateways) == 0


async def test_a_tenant_is_not_forgotten_while_redis_is_asked(gateways):
    limiter = await gateways(starts=False)
    allowed = TenantLimits(concurrency=1)
    taking = asyncio.create_task(limiter.take("t", allowed, hold="x"))
    await asyncio.sleep(0)
    await limiter._write(renews=True)
    await taking
    assert limiter._tenants["t"].holds == {"x": 1}


async def test_idle_tenants_are_forgotten_when_their_buckets_are_full(gateways):
    clock = ManualClock()
    limiter = await gateways(starts=False, clock=clock)
    allowed = TenantLimits(requests_per_minute=10, concurrency=1)
    await limiter.take("t", allowed, num_requests=1, hold="x")
    limiter.settle("t", allowed, hold="x")
    await limiter._write(renews=True)
    await limiter._write(renews=True)
    assert limiter._tenants["t"].seen[REQUESTS][0] == 9
    clock.advance(61)
    await limiter._write(renews=True)
    assert not limiter._tenants


async def test_any_number_of_tenants_and_requests_is_settled_in_bounded_scripts(patient_store, monkeypatch):
    sent = []
    run = patient_store.run

    async def counted(script, keys, args, **options):
        sent.append([len(row[-1]) + len(row[-2]) for row in msgspec.msgpack.decode(args[3])])
        return await run(script, keys, args, **options)

    limiter, limits = Limiter(patient_store, gateway="g"), TenantLimits(1000, 10, 10_000)
    for number in range(300):
        limiter.settle(f"t{number}", limits, num_tokens=90)
    for number in range(3 * rate_limits.MAX_SETTLE_STEPS):
        limiter.hold("large", limits, f"r{number}")
    monkeypatch.setattr(patient_store, "run", counted)
    await limiter._write(renews=True)
    assert max(sum(rows) + rate_limits.TENANT_STEPS * len(rows) for rows in sent) <= rate_limits.MAX_SETTLE_STEPS
    assert sum(map(sum, sent)) == 3 * rate_limits.MAX_SETTLE_STEPS
    monkeypatch.setattr(patient_store, "run", run)
    assert [(await limiter.take(f"t{number}", limits)).tokens.remaining for number in (0, 299)] == [0, 0]
    other = Limiter(patient_store, gateway="h")
    refused = await other.take("large", TenantLimits(concurrency=3 * rate_limits.MAX_SETTLE_STEPS), hold="x")
    assert refused.limit == CONCURRENCY


@pytest.mark.parametrize("is_dropped", [False, True], ids=["", "dropped"])
@pytest.mark.parametrize("what", ["take", "settle"])
async def test_a_reply_that_is_late_charges_nothing_twice(gateways, redis_server, client, what, is_dropped):
    """Redis runs a command after the gateway has stopped waiting for it and has decided, or will send it, again.

    By then the gateway may have dropped the tenant as idle.
    """
    limiter = await gateways(starts=False, timeout_s=2.0)
    allowed = TenantLimits(requests_per_minute=2)
    assert (await limiter.take("t", allowed, num_requests=1)).limit == ""
    await limiter._write(renews=True)  # Redis knows both scripts from now on.
    os.kill(redis_server.pid, signal.SIGSTOP)
    try:
        if what == "take":
            assert (await limiter.take("t", allowed, num_requests=1)).is_local
            limiter.settle("t", allowed, num_requests=-1)
        else:
            limiter.settle("t", allowed, num_requests=1)
            with pytest.raises(StoreUnavailable):
                await limiter._write()
        if is_dropped:
            limiter._tenants.clear()
    finally:
        os.kill(redis_server.pid, signal.SIGCONT)
    await until(lambda: not limiter._store._left_calls)

    async def is_written():
        with contextlib.suppress(StoreUnavailable):
            await limiter._write()
            return not limiter.is_alone
        return False

    await until(is_written)
    bucket, _ = limiter._keys("t")
    left = {"take": 1.0, "settle": 0.0}[what]
    # The bucket fills while the test runs.
    assert left <= float(client.hget(bucket, "requests")) < left + 0.9


async def test_closing_does_not_repeat_a_settle_that_runs(gateways, redis_server, client):
    limiter = await gateways(timeout_s=HANG_LIMIT_S)
    allowed = TenantLimits(requests_per_minute=4)
    assert (await limiter.take("t", allowed, num_requests=1)).limit == ""
    os.kill(redis_server.pid, signal.SIGSTOP)
    limiter.settle("t", allowed, num_requests=1)
    await until(limiter._writing.locked)
    closing = asyncio.create_task(limiter.close())
    await settle()
    os.kill(redis_server.pid, signal.SIGCONT)
    await closing
    bucket, _ = limiter._keys("t")
    assert 2.0 <= float(client.hget(bucket, "requests")) < 2.9, "the bucket fills while the test runs"
