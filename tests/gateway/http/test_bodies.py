"""What bodies may take: together, by tenant, and small ones beside long ones."""

import contextlib
import random

import pytest

from gateway.http.bodies import RESERVE_PART, SMALL_BODY_BYTES, TENANT_PART, Bodies
from gateway.limits import MAX_BODY_BYTES
from services.runtime.errors import Overloaded, RateLimited

MIB = 2**20
ALL = 256 * MIB


def long_claims(bodies, tenant):
    """As many whole long bodies as the tenant may have, and the refusal of the next one."""
    claims = []
    while True:
        try:
            claims.append(bodies.claim(tenant, num_bytes=MAX_BODY_BYTES))
        except (RateLimited, Overloaded) as error:
            return claims, error


def test_a_tenant_has_its_share_and_no_more():
    bodies = Bodies(ALL)
    claims, error = long_claims(bodies, "b")
    assert len(claims) == bodies.tenant_bytes // MAX_BODY_BYTES == 7
    assert isinstance(error, RateLimited)
    assert error.retry_after_s
    assert len(long_claims(bodies, "a")[0]) == 7
    claims[0].release()
    bodies.claim("b", num_bytes=MAX_BODY_BYTES)


def test_what_a_tenant_holds_is_never_above_its_share():
    """Bodies of any size that come in turns and are given up when they find no room, as a flood of them is."""
    bodies, chance = Bodies(ALL), random.Random(8)
    share = bodies.tenant_bytes + ALL // RESERVE_PART // TENANT_PART
    claims = [bodies.claim("b") for _ in range(640)]
    most = num_refused = 0
    for _ in range(6000):
        claim = chance.choice(claims)
        try:
            claim.add(min(chance.choice([1, 1000, 60_000, 2**20]), MAX_BODY_BYTES - claim.num_bytes))
        except RateLimited:
            claim.release()
            num_refused += 1
        assert bodies.num_bytes == sum(each.num_bytes for each in claims)
        most = max(most, bodies.num_bytes)
    assert share - 2**20 < most <= share
    assert num_refused > 100


def test_the_share_of_a_tenant_may_be_set():
    bodies = Bodies(ALL, tenant_bytes=16 * MIB)
    assert len(long_claims(bodies, "b")[0]) == 2


def test_small_bodies_find_room_where_long_ones_of_several_tenants_take_all_the_rest():
    bodies = Bodies(ALL)
    refusals = [long_claims(bodies, tenant)[1] for tenant in ("b", "c", "d", "e", "f")]
    assert isinstance(refusals[-1], Overloaded)
    small = [bodies.claim("a", num_bytes=SMALL_BODY_BYTES) for _ in range(100)]
    with pytest.raises(Overloaded):
        bodies.claim("a", num_bytes=SMALL_BODY_BYTES + 1)
    assert len(small) == 100


def test_small_bodies_of_one_tenant_leave_the_reserve_to_others():
    bodies = Bodies(ALL)
    for _ in range(ALL // SMALL_BODY_BYTES):
        with contextlib.suppress(RateLimited):
            bodies.claim("b", num_bytes=SMALL_BODY_BYTES)
    assert bodies.num_bytes <= ALL // 4 + SMALL_BODY_BYTES
    bodies.claim("a", num_bytes=SMALL_BODY_BYTES)


def test_without_tenants_all_of_the_rest_may_be_one_callers():
    bodies = Bodies(ALL)
    assert len(long_claims(bodies, "")[0]) == (ALL - ALL // 8) // MAX_BODY_BYTES
    bodies.claim(num_bytes=SMALL_BODY_BYTES)


def test_a_body_that_grows_is_counted_once():
    bodies = Bodies(ALL)
    with bodies.claim("a") as claim:
        for _ in range(100):
            claim.add(1024)
        assert bodies.num_bytes == claim.num_bytes == 100 * 1024
        assert not claim.is_small
    assert bodies.num_bytes == 0
    claim.release()
    assert bodies.num_bytes == 0


def test_a_refused_claim_has_what_it_had():
    bodies = Bodies(ALL, tenant_bytes=MAX_BODY_BYTES)
    with bodies.claim("a", num_bytes=MAX_BODY_BYTES) as claim:
        with pytest.raises(RateLimited):
            claim.add(1)
        assert bodies.num_bytes == claim.num_bytes == MAX_BODY_BYTES
        assert bodies.num_refused == {"tenant": 1}
    assert bodies.num_bytes == 0


async def test_a_claim_may_be_held_after_its_body_was_read():
    bodies = Bodies(ALL)

    async def receive(claim):
        claim.add(5)
        return b"12345"

    with bodies.claim("a") as claim:
        assert await bodies.read(claim, receive, len) == 5
        assert bodies.num_bytes == 5
    assert bodies.num_bytes == 0
    assert await bodies.take(receive, len, tenant="a") == 5
    assert bodies.num_bytes == 0


def test_the_least_memory_has_room_for_one_body_of_the_largest_size():
    with Bodies(MAX_BODY_BYTES).claim("a", num_bytes=MAX_BODY_BYTES) as claim:
        assert claim.num_bytes == MAX_BODY_BYTES
