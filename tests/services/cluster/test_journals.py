"""Journals in a real Redis: claims, fenced appends, loss, garbage, bounds, and the writer behind."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.cluster.journal_scripts import MAX_CHOICES, MAX_JOURNAL_BYTES, Written
from services.cluster.journals import (
    MAX_BATCH_CHOICES,
    TTL_S,
    JournalStore,
    JournalWriter,
    Mode,
    Outcome,
    Record,
    pack,
    row_of,
    unpack,
)
from services.cluster.redis_store import Store
from services.runtime.clock import SYSTEM_CLOCK
from services.runtime.errors import StoreRefused, StoreUnavailable
from tests.waiting import HANG_LIMIT_S, until

NAME, OTHER_NAME = "a" * 32, "b" * 32
DIGEST, OTHER_DIGEST = "1" * 64, "2" * 64


@pytest.fixture
def journals(patient_store):
    return JournalStore(patient_store)


def record(*, num_choices=1, **changes):
    fields = {
        "name": NAME,
        "digest": DIGEST,
        "request_id": "mine",
        "owner": "first gateway",
        "call": b"\x00call\xff",
        "token_ids": [[] for _ in range(num_choices)],
        "ends": [b""] * num_choices,
    }
    return Record(**(fields | changes))


async def write(journals, *records):
    statuses = await journals.write([row_of(each)[0] for each in records])
    for each, status in zip(records, statuses, strict=True):
        if status is Written.DONE:
            each.is_in_redis = True
            each.num_written = [len(token_ids) for token_ids in each.token_ids]
            each.written_ends = [bool(end) for end in each.ends]
    return statuses


def accounts(journals, tenant=""):
    """Keys of what is counted, which have no TTL: they must not be evicted, and are empty when nothing is counted."""
    keys = journals._store.keys
    names = keys.journal_expiry, keys.journal_sizes, keys.journal_totals, keys.journals_prefix + tenant
    return {name.encode() for name in names}


async def made(journals, **changes):
    new = record(**changes)
    assert (await journals.claim(Mode.JOIN, new)).outcome is Outcome.MADE
    return new


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1)))
def test_tokens_are_unpacked_as_they_were_packed(token_ids):
    assert unpack(pack(token_ids)) == token_ids
    assert len(pack(token_ids)) == 4 * len(token_ids)
    assert unpack(pack(token_ids) + b"\x01\x02") == token_ids


async def test_first_claim_makes_the_journal_and_the_next_one_takes_it_over(journals):
    first = await made(journals, num_choices=2)
    first.token_ids[0].extend([1, 2, 2**31])
    first.token_ids[1].append(7)
    first.ends[1] = b"\x00end"
    assert await write(journals, first) == [Written.DONE]
    claimed = await journals.claim(Mode.JOIN, record(num_choices=2, owner="second gateway", call=b"other"))
    held = claimed.held
    assert claimed.outcome is Outcome.HELD
    assert (held.name, held.digest, held.life, held.epoch) == (NAME, DIGEST, first.life, 2)
    assert (held.request_id, held.call) == ("mine", b"\x00call\xff")
    assert (held.token_ids, held.ends) == ([[1, 2, 2**31], [7]], [b"", b"\x00end"])
    first.token_ids[0].append(9)
    assert await write(journals, first) == [Written.TAKEN_OVER]
    first.epoch = held.epoch
    assert await write(journals, first) == [Written.DONE]


async def test_a_row_with_a_head_changes_the_call_together_with_its_tokens(journals):
    first = await made(journals, alias=OTHER_NAME)
    first.call = b"\x00changed\xff"
    first.forget_written()
    first.token_ids[0].append(5)
    assert await write(journals, first) == [Written.DONE]
    held = (await journals.claim(Mode.JOIN, record(name=OTHER_NAME, owner="second gateway"))).held
    assert (held.name, held.life, held.call, held.token_ids) == (NAME, first.life, b"\x00changed\xff", [[5]])
    # Not by an owner that was superseded.
    first.call = b"late"
    first.forget_written()
    assert await write(journals, first) == [Written.TAKEN_OVER]
    held = (await journals.claim(Mode.FIND, record())).held
    assert (held.call, held.token_ids) == (b"\x00changed\xff", [[5]])


async def test_finished_journal_is_read_and_stays_whose_it_is(journals):
    first = await made(journals)
    first.token_ids[0].append(1)
    first.ends[0] = b"end"
    await write(journals, first)
    for _ in range(2):
        held = (await journals.claim(Mode.JOIN, record(owner="second"))).held
        assert (held.epoch, held.ends) == (1, [b"end"])
    assert await write(journals, first) == [Written.DONE]


async def test_another_digest_changes_nothing(journals):
    first = await made(journals)
    assert (await journals.claim(Mode.JOIN, record(digest=OTHER_DIGEST))).outcome is Outcome.OTHER
    assert (await journals.claim(Mode.FIND, record(digest=OTHER_DIGEST))).outcome is Outcome.OTHER
    assert await write(journals, first) == [Written.DONE]
    found = await journals.claim(Mode.FIND, record(digest=""), checks_digest=False)
    assert found.held.digest == DIGEST


async def test_claim_whose_answer_was_lost_takes_nothing_from_its_owner(journals):
    first = await made(journals)
    assert (await journals.claim(Mode.JOIN, record(owner=first.owner))).held.epoch == 2
    first.token_ids[0].extend([1, 2])
    assert await write(journals, first) == [Written.DONE]
    taken = (await journals.claim(Mode.JOIN, record(owner="second gateway"))).held
    assert (taken.epoch, taken.token_ids) == (3, [[1, 2]])
    first.token_ids[0].append(3)
    assert await write(journals, first) == [Written.TAKEN_OVER]


async def test_what_does_not_fit_changes_nothing(journals):
    first = await made(journals, num_choices=2)
    alone = record(digest="")
    assert (await journals.claim(Mode.FIND, alone, checks_digest=False)).outcome is Outcome.MISFIT
    other = record(num_choices=2, request_id="other", owner="second gateway")
    for mode in (Mode.FIND, Mode.JOIN):
        assert (await journals.claim(mode, other, checks_request=True)).outcome is Outcome.MISFIT
    first.token_ids[0].append(1)
    assert await write(journals, first) == [Written.DONE]
    both = record(num_choices=2, digest="", owner="second gateway")
    assert (await journals.claim(Mode.FIND, both, checks_digest=False, checks_request=True)).held.epoch == 2


async def test_find_makes_nothing(journals, client):
    assert (await journals.claim(Mode.FIND, record())).outcome is Outcome.NONE
    assert client.keys() == []


async def test_replacing_starts_another_life(journals):
    first = await made(journals)
    first.token_ids[0].extend([1, 2, 3])
    await write(journals, first)
    second = record(digest=OTHER_DIGEST)
    assert (await journals.claim(Mode.REPLACE, second)).outcome is Outcome.MADE
    assert await write(journals, first) == [Written.SUPERSEDED]
    held = (await journals.claim(Mode.JOIN, record(digest=OTHER_DIGEST))).held
    assert (held.life, held.token_ids) == (second.life, [[]])


async def test_alias_leads_to_the_journal(journals):
    first = await made(journals, alias=OTHER_NAME)
    held = (await journals.claim(Mode.FIND, record(name=OTHER_NAME), checks_digest=False)).held
    assert (held.name, held.life) == (NAME, first.life)


async def test_replacing_an_alias_leaves_what_it_led_to(journals):
    keyed = await made(journals, alias=OTHER_NAME)
    keyed.token_ids[0].append(1)
    await write(journals, keyed)
    plain = record(name=OTHER_NAME, digest=OTHER_DIGEST)
    assert (await journals.claim(Mode.REPLACE, plain)).outcome is Outcome.MADE
    plain.token_ids[0].append(2)
    assert await write(journals, keyed, plain) == [Written.DONE, Written.DONE]
    for name, life, token_ids in ((NAME, keyed.life, [[1]]), (OTHER_NAME, plain.life, [[2]])):
        held = (await journals.claim(Mode.FIND, record(name=name), checks_digest=False)).held
        assert (held.name, held.life, held.token_ids) == (name, life, token_ids)


async def test_where_an_alias_leads_nowhere_the_journal_is_made_under_its_own_name(journals, client):
    await made(journals, alias=OTHER_NAME)
    client.delete(journals._store.keys.journal_prefix + NAME)
    plain = await made(journals, name=OTHER_NAME)
    plain.token_ids[0].append(2)
    assert await write(journals, plain) == [Written.DONE]
    assert (await journals.claim(Mode.FIND, record())).outcome is Outcome.NONE
    assert (await journals.claim(Mode.FIND, record(name=OTHER_NAME))).held.token_ids == [[2]]


async def test_name_that_became_an_alias_is_not_written_any_more(journals):
    plain = await made(journals, name=OTHER_NAME)
    keyed = await made(journals, alias=OTHER_NAME)
    plain.token_ids[0].append(1)
    assert await write(journals, plain) == [Written.SUPERSEDED]
    plain.forget_written()
    assert await write(journals, plain) == [Written.SUPERSEDED]
    assert (await journals.claim(Mode.FIND, record(name=OTHER_NAME))).held.life == keyed.life


async def test_appends_may_be_repeated_and_leave_no_gap(journals):
    first = await made(journals)
    first.token_ids[0].extend([1, 2, 3])
    row, _ = row_of(first)
    assert await journals.write([row, row]) == [Written.DONE, Written.DONE]
    first.num_written, first.is_in_redis = [5], True
    first.token_ids[0].extend([4, 5, 6])
    assert await journals.write([row_of(first)[0]]) == [Written.LOST]
    assert (await journals.claim(Mode.JOIN, record())).held.token_ids == [[1, 2, 3]]


async def test_forgotten_journal_is_asked_for_again_and_made_by_a_row_with_its_head(journals, client):
    first = await made(journals, alias=OTHER_NAME)
    first.token_ids[0].extend([1, 2])
    await write(journals, first)
    client.flushall()
    first.token_ids[0].append(3)
    assert await write(journals, first) == [Written.LOST]
    assert client.keys() == []
    first.epoch = 4
    first.forget_written()
    assert await write(journals, first) == [Written.DONE]
    held = (await journals.claim(Mode.JOIN, record(name=OTHER_NAME))).held
    assert (held.token_ids, held.epoch) == ([[1, 2, 3]], 5)


async def test_later_epoch_wins_also_when_the_earlier_one_wrote_first_after_a_loss(journals, client):
    first = await made(journals)
    second = record(life=first.life, epoch=2, owner="second gateway")
    client.flushall()
    first.forget_written()
    assert await write(journals, first) == [Written.DONE]
    assert await write(journals, second) == [Written.DONE]
    first.token_ids[0].append(1)
    assert await write(journals, first) == [Written.TAKEN_OVER]


async def test_everything_expires(journals, client):
    first = await made(journals, num_choices=2, alias=OTHER_NAME)
    first.token_ids[0].append(1)
    first.token_ids[1].append(1)
    await write(journals, first)
    keys = [key for key in client.scan_iter() if key not in accounts(journals)]
    assert len(keys) == 4

    async def add_a_token():
        first.token_ids[0].append(2)
        await write(journals, first)

    async def claim():
        assert (await journals.claim(Mode.JOIN, record(num_choices=2))).outcome is Outcome.HELD

    for renew in (add_a_token, claim):
        for key in keys:
            assert TTL_S - 60 < client.ttl(key) <= TTL_S
            client.expire(key, 5)
        await renew()
    assert all(client.ttl(key) > 500 for key in keys)


async def test_tokens_expire_also_where_somebody_has_changed_their_number(journals, client):
    first = await made(journals, num_choices=2)
    client.hset(journals._store.keys.journal_prefix + NAME, "choices", "1")
    first.token_ids[1].append(7)
    await write(journals, first)
    keys = [key for key in client.scan_iter() if key not in accounts(journals)]
    assert all(client.ttl(key) > 500 for key in keys)


@pytest.mark.parametrize("digest", ["-1", "x" * 64, "0" * 63])
async def test_a_journal_with_a_digest_that_is_none_is_none(journals, client, digest):
    await made(journals)
    client.hset(journals._store.keys.journal_prefix + NAME, "digest", digest)
    assert (await journals.claim(Mode.JOIN, record())).outcome is Outcome.MADE


async def test_a_record_that_cannot_be_written_keeps_none_back(journals, writer, caplog):
    bad = await made(journals)
    good = await made(journals, name=OTHER_NAME, request_id="other")
    bad.token_ids[0].append(2**32)
    good.token_ids[0].append(5)
    writer.post(bad)
    writer.post(good)

    async def is_written():
        held = (await journals.claim(Mode.FIND, record(name=OTHER_NAME))).held
        return held is not None and held.token_ids == [[5]]

    await until(is_written)
    assert bad.is_over
    assert "cannot be written" in caplog.text


@pytest.mark.parametrize("seed", range(40))
async def test_garbage_counts_as_nothing_and_is_replaced(journals, client, patient_store, seed):
    source = random.Random(seed)
    first = await made(journals, num_choices=2)
    first.token_ids[0].extend(range(50))
    first.ends[0] = b"end"
    await write(journals, first)
    key = source.choice(sorted(client.keys()))
    junk = source.randbytes(source.choice([0, 1, 32, 300, 2000]))
    if client.type(key) == b"hash" and source.random() < 0.8:
        client.hset(key, source.choice(sorted(client.hkeys(key))), junk)
    elif source.random() < 0.5:
        client.delete(key)
        client.rpush(key, junk)
    else:
        client.set(key, junk)
    statuses = await journals.write([row_of(first)[0]])
    assert statuses[0] in set(Written)
    claimed = await journals.claim(Mode.JOIN, again := record(num_choices=2))
    assert claimed.outcome in (Outcome.MADE, Outcome.HELD, Outcome.OTHER)
    if claimed.outcome is Outcome.MADE:
        again.token_ids[0].append(4)
        assert await write(journals, again) == [Written.DONE]
        assert (await journals.claim(Mode.JOIN, record(num_choices=2))).held.token_ids[0] == [4]


async def test_journal_of_another_format_is_not_read(journals, client):
    await made(journals)
    key = journals._store.keys.journal_prefix + NAME
    client.hset(key, "version", "2")
    assert (await journals.claim(Mode.FIND, record())).outcome is Outcome.NONE
    assert (await journals.claim(Mode.JOIN, record())).outcome is Outcome.MADE


async def test_unreadable_texts_are_counted(journals, client, patient_store):
    await made(journals)
    client.hset(journals._store.keys.journal_prefix + NAME, "request", b"\xff\xfe")
    assert (await journals.claim(Mode.FIND, record())).outcome is Outcome.NONE
    assert patient_store.stats.num_rejected_values == 1
    assert (await journals.claim(Mode.JOIN, record())).outcome is Outcome.MADE


async def test_what_is_too_large_is_not_read(journals, client):
    first = await made(journals)
    first.token_ids[0].append(1)
    await write(journals, first)
    tokens = next(key for key in client.scan_iter() if client.type(key) == b"string")
    client.set(tokens, b"\0" * (MAX_JOURNAL_BYTES + 1))
    assert (await journals.claim(Mode.FIND, record())).outcome is Outcome.NONE
    client.set(tokens, b"\0" * 8)
    assert (await journals.claim(Mode.FIND, record())).held.token_ids == [[0, 0]]
    client.hset(journals._store.keys.journal_prefix + NAME, "choices", MAX_CHOICES + 1)
    assert (await journals.claim(Mode.FIND, record())).outcome is Outcome.NONE


# --- the writer ------------------------------------------------------------------------------------------------------


class Taken(list):
    """What another gateway has taken over."""


@pytest.fixture
async def writer(journals):
    taken = Taken()
    opened = JournalWriter(journals, on_taken_over=taken.append, flush_interval_s=0.005)
    opened.taken = taken
    opened.start()
    yield opened
    await opened.close()


async def held_of(journals, name=NAME):
    return (await journals.claim(Mode.FIND, record(name=name), checks_digest=False)).held


async def test_posts_are_written_behind_without_a_claim(journals, writer):
    first = record()
    for token in range(100):
        first.token_ids[0].append(token)
        writer.post(first)
    first.ends[0] = b"end"
    writer.post(first)

    async def is_whole():
        held = await held_of(journals)
        return held is not None and (held.token_ids, held.ends) == ([list(range(100))], [b"end"])

    await until(is_whole)


async def test_forgotten_journal_is_written_again_in_full(journals, writer, client):
    first = await made(journals)
    first.token_ids[0].extend([1, 2, 3])
    writer.post(first)
    await writer.flush()
    client.flushall()
    first.token_ids[0].append(4)
    writer.post(first)
    await writer.flush()
    assert (await held_of(journals)).token_ids == [[1, 2, 3, 4]]


async def test_owner_is_told_once_that_another_gateway_goes_on(journals, writer):
    first = await made(journals)
    await journals.claim(Mode.JOIN, record(owner="second"))
    writer.post(first)
    await writer.flush()
    writer.post(first)
    await writer.flush()
    assert list(writer.taken) == [first]
    assert first.is_over


async def test_another_life_of_the_name_ends_the_writing_only(journals, writer):
    first = await made(journals)
    await journals.claim(Mode.REPLACE, record())
    writer.post(first)
    await writer.flush()
    assert list(writer.taken) == []
    assert first.is_over


async def test_too_large_a_journal_is_not_written(journals, writer, client):
    first = record(call=b"x" * (MAX_JOURNAL_BYTES + 1))
    second = record(name=OTHER_NAME)
    for each in (first, second):
        writer.post(each)
    await writer.flush()
    assert first.is_over
    assert await held_of(journals) is None
    assert await held_of(journals, OTHER_NAME) is not None


async def test_what_waits_is_bounded_and_comes_with_the_next_tokens(journals):
    writer = JournalWriter(journals, on_taken_over=lambda record: None, max_pending=3)
    records = [record(name=f"{number:032x}", token_ids=[[number]]) for number in range(5)]
    for each in records:
        writer.post(each)
    assert writer.num_dropped == 2
    await writer.flush()
    records[4].token_ids[0].append(9)
    writer.post(records[4])
    await writer.flush()
    held = [await held_of(journals, each.name) for each in records]
    assert [each and each.token_ids for each in held] == [[[0]], [[1]], [[2]], None, [[4, 9]]]


async def test_many_journals_are_written_in_batches(journals, writer):
    records = [record(name=f"{number:032x}", token_ids=[[number] * 3000]) for number in range(200)]
    for each in records:
        writer.post(each)
    await writer.flush()
    for each in records[::20]:
        assert (await held_of(journals, each.name)).token_ids == [list(each.token_ids[0])]


async def test_what_could_not_be_written_waits(redis_server, client):
    store = Store(redis_server.url, cluster="test", timeout_s=2.0, breaker_open_s=0.01)
    journals = JournalStore(store)
    writer = JournalWriter(journals, on_taken_over=lambda record: None, flush_interval_s=0.005)
    first = await made(journals)
    first.token_ids[0].extend([1, 2])
    redis_server.kill()
    writer.post(first)
    with pytest.raises(StoreUnavailable):
        await writer.flush()
    num_failed = store.stats.num_failed_calls
    writer.start()

    async def has_failed():
        return store.stats.num_failed_calls > num_failed

    await until(has_failed)
    redis_server.start()
    first.token_ids[0].append(3)

    async def is_whole():
        try:
            held = await held_of(journals)
        except StoreUnavailable:
            return False
        return held is not None and held.token_ids == [[1, 2, 3]]

    await until(is_whole)
    await writer.close()
    await store.close()


@pytest.mark.parametrize("is_away", [False, True])
async def test_closing_writes_what_waits(journals, patient_store, is_away):
    if is_away:
        patient_store._breaker.trip(SYSTEM_CLOCK.monotonic())
    writer = JournalWriter(journals, on_taken_over=lambda record: None, flush_interval_s=60.0)
    writer.start()
    writer.post(record(token_ids=[[5]]))
    await asyncio.sleep(0)
    await writer.close(timeout_s=HANG_LIMIT_S)
    assert (await held_of(journals)).token_ids == [[5]]


async def test_a_journal_that_redis_refuses_keeps_no_other_waiting(patient_store):
    class Refusing(JournalStore):
        async def write(self, rows):
            if any(row[0] == OTHER_NAME for row in rows):
                raise StoreRefused("no")
            return await super().write(rows)

    writer = JournalWriter(Refusing(patient_store), on_taken_over=lambda record: None)
    good, bad = record(token_ids=[[1]]), record(name=OTHER_NAME)
    for each in (bad, good):
        writer.post(each)
    await writer.flush()
    assert (good.is_in_redis, bad.is_over) == (True, True)


async def test_one_script_writes_a_bounded_number_of_answers(journals, monkeypatch):
    taken = []
    monkeypatch.setattr(journals, "write", lambda rows: _written(taken, rows))
    writer = JournalWriter(journals, on_taken_over=lambda record: None)
    for number in range(6):
        writer.post(record(name=f"{number:032x}", num_choices=MAX_CHOICES // 2, token_ids=[[1]] * (MAX_CHOICES // 2)))
    await writer.flush()
    assert (sum(taken), max(taken)) == (6, MAX_BATCH_CHOICES // (MAX_CHOICES // 2))


async def _written(taken, rows):
    taken.append(len(rows))
    return [Written.DONE] * len(rows)
