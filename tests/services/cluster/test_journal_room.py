"""The room that journals may take in a real Redis: counted, refused, given back, and shared by several gateways."""

import asyncio
import random

import pytest

from services.cluster.journal_room import MAX_DROPPED, MIN_KEPT_S, JournalRoom, cost_bytes, swept_bytes
from services.cluster.journal_scripts import Written
from services.cluster.journals import TTL_S, JournalStore, JournalWriter, Mode, Outcome, Record, row_of

CALL = b"c" * 10_000
COST = cost_bytes(len(CALL), 1)
ROOM = JournalRoom(tenant_bytes=3 * COST, all_bytes=5 * COST)


@pytest.fixture
def journals(patient_store):
    return JournalStore(patient_store, room=ROOM)


def record(number, tenant="acme", *, num_choices=1, **changes):
    fields = {
        "name": f"{number:032x}",
        "digest": "1" * 64,
        "request_id": f"r{number}",
        "owner": "a gateway",
        "call": CALL,
        "token_ids": [[] for _ in range(num_choices)],
        "ends": [b""] * num_choices,
        "tenant": tenant,
    }
    return Record(**(fields | changes))


async def claimed(journals, number, tenant="acme", mode=Mode.JOIN, **changes):
    return (await journals.claim(mode, record(number, tenant, **changes))).outcome


async def is_held(journals, number):
    return await claimed(journals, number, mode=Mode.FIND) is Outcome.HELD


def make_old(client, journals, number, tenant="acme", *, seconds=MIN_KEPT_S + 1):
    """Makes a journal as if it had not been used for `seconds`."""
    keys = journals._store.keys
    name = f"{number:032x}"
    client.zincrby(keys.journals_prefix + tenant, -seconds * 1000, name)
    client.zincrby(keys.journal_expiry, -seconds * 1000, name)


def totals(client, journals):
    return {name.decode(): int(held) for name, held in client.hgetall(journals._store.keys.journal_totals).items()}


async def test_beyond_its_share_a_tenant_is_refused_and_nobody_else(journals, client):
    for number in range(3):
        assert await claimed(journals, number) is Outcome.MADE
    refused = await journals.claim(Mode.JOIN, record(3))
    assert refused.outcome is Outcome.TENANT_FULL
    assert 0 < refused.retry_after_s <= MIN_KEPT_S
    assert await claimed(journals, 100, "other") is Outcome.MADE
    assert [await is_held(journals, number) for number in range(4)] == [True, True, True, False]
    assert totals(client, journals) == {"acme": 3 * COST, "other": COST, "*": 4 * COST}


async def test_all_tenants_together_are_bounded(journals):
    for number in range(3):
        assert await claimed(journals, number) is Outcome.MADE
    for number in range(100, 102):
        assert await claimed(journals, number, "other") is Outcome.MADE
    assert await claimed(journals, 200, "third") is Outcome.ALL_FULL


async def test_what_nobody_has_used_for_a_while_makes_room_the_oldest_first_and_the_tenants_own(journals, client):
    for number in range(3):
        await claimed(journals, number)
    await claimed(journals, 100, "other")
    make_old(client, journals, 100, "other", seconds=MIN_KEPT_S + 100)
    make_old(client, journals, 1, seconds=MIN_KEPT_S + 50)
    make_old(client, journals, 0)
    assert await claimed(journals, 3) is Outcome.MADE
    assert not await is_held(journals, 1)
    assert client.hlen(journals._store.keys.journal_sizes) == 4
    assert [await is_held(journals, number) for number in (2, 3)] == [True, True]
    assert (await journals.claim(Mode.FIND, record(100, "other"))).outcome is Outcome.HELD


async def test_where_all_room_is_used_the_oldest_of_anybody_makes_room(journals, client):
    for number in range(3):
        await claimed(journals, number)
    for number in range(100, 102):
        await claimed(journals, number, "other")
    make_old(client, journals, 0)
    assert await claimed(journals, 200, "third") is Outcome.MADE
    assert not await is_held(journals, 0)


async def test_a_used_journal_counts_as_young_again(journals, client):
    for number in range(3):
        await claimed(journals, number)
        make_old(client, journals, number)
    assert await is_held(journals, 0)
    assert await claimed(journals, 3) is Outcome.MADE
    assert await is_held(journals, 0)
    assert not await is_held(journals, 1)


async def test_tokens_are_counted_as_they_come_and_are_never_refused(journals, client):
    first = record(0, num_choices=2)
    await journals.claim(Mode.JOIN, first)
    for num_tokens in (1, 5_000, 20_000):
        first.token_ids[0].extend([7] * num_tokens)
        first.token_ids[1].append(8)
        row, _ = row_of(first)
        assert await journals.write([row]) == [Written.DONE]
        first.num_written = [len(token_ids) for token_ids in first.token_ids]
        expected = cost_bytes(len(CALL), 2, sum(map(len, first.token_ids)))
        assert totals(client, journals) == {"acme": expected, "*": expected}
        assert first.num_bytes == expected
    assert await claimed(journals, 1) is Outcome.TENANT_FULL


async def test_what_a_new_life_of_the_name_replaces_leaves_nothing(journals, client):
    first = record(0, alias="f" * 32)
    await journals.claim(Mode.JOIN, first)
    first.token_ids[0].extend(range(1000))
    assert await journals.write([row_of(first)[0]]) == [Written.DONE]
    num_keys = client.dbsize()
    assert await claimed(journals, 0, mode=Mode.REPLACE) is Outcome.MADE
    assert totals(client, journals) == {"acme": COST, "*": COST}
    assert client.dbsize() == num_keys - 2  # its tokens and its other name


async def test_what_has_expired_gives_its_room_back_whoever_made_it(journals, client, patient_store):
    for number in range(3):
        await claimed(journals, number, owner="a gateway that was killed")
    make_old(client, journals, 0, seconds=TTL_S + 1)
    for key in client.scan_iter(journals._store.keys.journal_prefix + f"{0:032x}*"):
        client.delete(key)
    assert await swept_bytes(patient_store) == 2 * COST
    assert await claimed(journals, 3) is Outcome.MADE
    for key in client.scan_iter(journals._store.keys.journal_prefix + "*"):
        client.delete(key)
    for number in range(1, 4):
        make_old(client, journals, number, seconds=TTL_S + 1)
    assert await swept_bytes(patient_store) == 0
    assert client.dbsize() == 0


async def test_a_journal_that_nobody_has_counted_is_counted_when_it_is_found(journals, client):
    await claimed(journals, 0)
    keys = journals._store.keys
    client.delete(keys.journal_expiry, keys.journal_sizes, keys.journal_totals, keys.journals_prefix + "acme")
    assert await is_held(journals, 0)
    assert totals(client, journals) == {"acme": COST, "*": COST}


async def test_what_redis_has_no_room_for_is_written_when_there_is_some(journals, client):
    for number in range(3):
        await claimed(journals, number)
    writer = JournalWriter(journals, on_taken_over=lambda record: None)
    late = record(3)
    writer.post(late)
    await writer.flush()
    assert (late.is_in_redis, late.is_over, writer.num_dropped) == (False, False, 1)
    make_old(client, journals, 0)
    writer.post(late)
    await writer.flush()
    assert late.is_in_redis
    assert await is_held(journals, 3)


async def test_gateways_that_claim_at_once_never_take_more_than_there_is(journals, patient_store, client):
    stores = [journals, JournalStore(patient_store, room=ROOM)]
    source = random.Random(5)
    claims = [claimed(source.choice(stores), number, source.choice(["acme", "other", "third"])) for number in range(40)]
    outcomes = await asyncio.gather(*claims)
    assert outcomes.count(Outcome.MADE) <= 5
    held = totals(client, journals)
    assert held.pop("*") == sum(held.values()) <= ROOM.all_bytes
    assert max(held.values()) <= ROOM.tenant_bytes


async def test_any_number_of_old_journals_makes_room(journals, client):
    large = JournalStore(journals._store, room=JournalRoom(2**30, 2**30))
    num_old = 3 * MAX_DROPPED
    for number in range(num_old):
        await claimed(large, number)
        make_old(client, journals, number)
    assert await claimed(journals, num_old) is Outcome.MADE
    assert totals(client, journals)["*"] <= journals.room.all_bytes
