"""Stored answers in a real Redis: one owner, bounds that hold, and nothing that stays counted."""

import json

import pytest

from services.cluster.answer_records import (
    INLINE_BYTES,
    INLINE_EVENT_BYTES,
    MAX_ACTIVE,
    MAX_ANSWERS,
    MAX_SEEN,
    AnswerReply,
)
from services.cluster.answers import AnswerRoom, AnswerStore, BackgroundOrder, name_of_answer
from services.cluster.files import OVERHEAD_BYTES
from services.cluster.keys import Keys
from services.runtime.errors import StoreRefused
from tests.waiting import until

KEYS = Keys("test")


@pytest.fixture
def answers(patient_store):
    return AnswerStore(patient_store, room=AnswerRoom(), life_s=100.0)


def order(digest="d", *, keeps_events=True, body=b"{}", regions=""):
    return BackgroundOrder(digest, "key", body, b"[]", keeps_events, regions=regions)


async def put(answers, answer_id="a", tenant="acme", num_bytes=100):
    return await answers.put(tenant, answer_id, document=b"d" * num_bytes, input_items=b"[]")


async def create(answers, answer_id="a", tenant="acme", **more):
    return await answers.create(tenant, answer_id, order=order(**more), document=b"{}", input_items=b"[]")


async def test_what_is_put_is_found_by_its_tenant_alone(answers, client):
    assert await put(answers) is AnswerReply.DONE
    found = await answers.find("acme", "a")
    assert (found.document, found.input, found.state, found.is_background) == (b"d" * 100, b"[]", "over", False)
    assert await answers.find("other", "a") is None
    assert not await answers.delete("other", "a")
    assert await answers.swept_bytes() == 102 + OVERHEAD_BYTES
    (key,) = [key for key in client.scan_iter(KEYS.answer_prefix + "*")]
    assert 90 < client.ttl(key) <= 100
    assert await put(answers, num_bytes=50) is AnswerReply.DONE
    assert await answers.swept_bytes() == 52 + OVERHEAD_BYTES
    assert await answers.delete("acme", "a")
    assert await answers.swept_bytes() == 0
    assert not [*client.scan_iter(KEYS.answer_prefix + "*")]


async def until_swept(answers):
    """Waits until all answers have expired, by the clock of Redis, and are no longer counted."""

    async def is_swept():
        return not await answers.swept_bytes()

    await until(is_swept)


async def test_what_has_expired_is_no_longer_counted(patient_store):
    answers = AnswerStore(patient_store, room=AnswerRoom(), life_s=1.0)
    await put(answers)
    await until_swept(answers)
    assert await answers.find("acme", "a") is None


async def test_the_oldest_of_the_tenant_make_room_and_then_those_of_the_largest(patient_store):
    each = 1000 + 2 + OVERHEAD_BYTES
    answers = AnswerStore(patient_store, room=AnswerRoom(3 * each, 4 * each), life_s=100.0)
    for number in range(4):
        assert await put(answers, f"a{number}", num_bytes=1000) is AnswerReply.DONE
    assert [await answers.find("acme", f"a{number}") is not None for number in range(4)] == [False, True, True, True]
    for number in range(2):
        assert await put(answers, f"b{number}", "other", num_bytes=1000) is AnswerReply.DONE
    assert await answers.find("acme", "a1") is None
    assert await answers.find("other", "b0") is not None
    assert await put(answers, "large", num_bytes=3 * each) is AnswerReply.TENANT_FULL
    assert await answers.swept_bytes() <= 4 * each


async def test_what_runs_makes_no_room(patient_store):
    answers = AnswerStore(patient_store, room=AnswerRoom(4000, 6000), life_s=100.0)
    assert await create(answers, "r", body=b"b" * 2000) is AnswerReply.DONE
    assert await put(answers, num_bytes=2000) is AnswerReply.TENANT_FULL
    assert await create(answers, "r", "other", body=b"b" * 1000) is AnswerReply.DONE
    assert await put(answers, "x", "third", num_bytes=2000) is AnswerReply.ALL_FULL
    assert (await answers.find("acme", "r")).state == "queued"


async def test_ten_thousand_are_kept_and_not_one_more(answers, client):
    list_key = KEYS.answers_prefix + "acme"
    await put(answers, "first")
    client.zadd(list_key, {f"{number:032x}": 2e15 + number for number in range(MAX_ANSWERS - 1)})
    assert await put(answers, "last") is AnswerReply.DONE
    assert client.zcard(list_key) == MAX_ANSWERS
    assert await answers.find("acme", "first") is None
    assert await answers.find("acme", "last") is not None


async def test_an_order_is_made_once(answers):
    assert await create(answers) is AnswerReply.DONE
    assert await create(answers) is AnswerReply.HELD
    assert await create(answers, digest="other") is AnswerReply.FENCED
    assert await put(answers) is AnswerReply.FENCED
    await put(answers, "complete")
    assert await create(answers, "complete") is AnswerReply.FENCED
    for number in range(MAX_ACTIVE - 1):
        assert await create(answers, f"a{number}") is AnswerReply.DONE
    assert await create(answers, "more") is AnswerReply.ACTIVE
    assert await create(answers, "more", "other") is AnswerReply.DONE
    await answers.delete("acme", "a0")
    assert await create(answers, "more") is AnswerReply.DONE


async def test_those_whose_keys_are_lost_take_no_place(answers, client):
    for number in range(MAX_ACTIVE):
        await create(answers, f"a{number}")
    client.delete(*client.scan_iter(KEYS.answer_prefix + "*"))
    assert await create(answers, "more") is AnswerReply.DONE
    claimed = await answers.claim("me")
    assert claimed.id == "more"
    assert await answers.claim("me") is None


async def test_one_owner_at_a_time(answers, client):
    await create(answers)
    first = await answers.claim("first")
    assert (first.id, first.tenant, first.order, first.num_tries) == ("a", "acme", order(), 1)
    assert await answers.claim("second") is None
    assert await answers.renew(first) is AnswerReply.DONE
    client.zadd(KEYS.waiting_answers_prefix + "*", {"acme": 0})
    client.zadd(KEYS.waiting_answers_prefix + "*/acme", {first.name: 0})
    second = await answers.claim("second")
    assert (second.epoch, second.num_tries) == (2, 2)
    assert await answers.renew(first) is AnswerReply.FENCED
    assert await answers.write(first, [b"late"], document=b"{}") is AnswerReply.FENCED
    await answers.give_back(first)
    assert await answers.write(second, [b"one", b"two"]) is AnswerReply.DONE
    await answers.give_back(second)
    third = await answers.claim("third")
    assert (third.num_tries, third.num_events, third.last_event) == (2, 2, b"two")
    assert await answers.write(third, [b"three"], document=b"{1}") is AnswerReply.DONE
    assert await answers.write(third, [b"three"], document=b"{1}") is AnswerReply.FENCED
    assert await answers.events("acme", "a", first=1, most=10) == ("over", [b"two", b"three"])
    found = await answers.find("acme", "a")
    assert (found.document, found.state, found.is_background) == (b"{1}", "over", True)
    assert await answers.claim("fourth") is None
    assert await answers.swept_bytes() == len("{1}[][]onetwothree") - len("[]") + len("[]") + OVERHEAD_BYTES


async def test_events_of_a_call_that_timed_out_are_written_once(answers):
    await create(answers)
    claimed = await answers.claim("me")
    await answers.write(claimed, [b"one", b"two"])
    claimed.num_events = 0  # its answer did not arrive
    assert await answers.write(claimed, [b"one", b"two"]) is AnswerReply.DONE
    claimed.num_events = 1
    assert await answers.write(claimed, [b"two", b"three"]) is AnswerReply.DONE
    assert await answers.events("acme", "a", first=0, most=10) == ("in_progress", [b"one", b"two", b"three"])
    claimed.num_events = 7  # Redis has lost some
    assert await answers.write(claimed, [b"eight"]) is AnswerReply.GONE


async def test_cancel_is_final(answers):
    await create(answers)
    claimed = await answers.claim("me")
    assert await answers.cancel("acme", "a", document=b"{c}") is AnswerReply.DONE
    assert await answers.cancel("acme", "a", document=b"{d}") is AnswerReply.FENCED
    assert await answers.cancel("other", "a", document=b"{c}") is AnswerReply.GONE
    assert await answers.renew(claimed) is AnswerReply.FENCED
    assert await answers.write(claimed, [], document=b"{e}") is AnswerReply.FENCED
    assert (await answers.find("acme", "a")).document == b"{c}"
    await create(answers, "b")
    claimed = await answers.claim("me")
    await answers.delete("acme", "b")
    assert await answers.renew(claimed) is AnswerReply.GONE
    assert await answers.write(claimed, [b"x"]) is AnswerReply.GONE
    assert (await answers.events("acme", "b", first=0, most=10)) == ("", [])


async def test_tenants_take_turns(answers):
    for tenant, number in (("acme", 0), ("acme", 1), ("other", 0)):
        await create(answers, f"a{number}", tenant)
    assert (await answers.claim("me", busy_tenants=["acme"])).tenant == "other"
    assert await answers.claim("me", full_tenants=["acme"]) is None
    assert (await answers.claim("me", busy_tenants=["acme"])).id == "a0"


async def test_what_is_held_to_regions_is_claimed_there_only(answers):
    await create(answers, "a", regions="eu,eu-west")
    assert await answers.claim("us", region="us") is None
    assert await answers.claim("nowhere") is None
    assert await answers.claim("nearly", region="eu-w") is None
    claimed = await answers.claim("here", region="eu-west")
    assert (claimed.id, claimed.order.regions) == ("a", "eu,eu-west")


async def read(answers, answer_id="a"):
    return await answers.find("acme", answer_id)


async def test_a_change_is_made_to_what_was_read_and_to_nothing_else(answers, client):
    await put(answers)
    first = await read(answers)
    assert await answers.change("acme", "a", read=first, document=b"new", input_items=b"[1]") is AnswerReply.DONE
    assert await answers.change("acme", "a", read=first, document=b"late") is AnswerReply.FENCED
    second = await read(answers)
    assert (second.document, second.input) == (b"new", b"[1]")
    assert await answers.change("acme", "a", read=second, document=b"newer") is AnswerReply.DONE
    assert (await read(answers)).input == b"[1]"
    assert await answers.swept_bytes() == len(b"newer") + len(b"[1]") + OVERHEAD_BYTES
    assert client.ttl(KEYS.answers_prefix + "acme") > 100
    assert await answers.change("other", "a", read=second, document=b"x") is AnswerReply.GONE
    await create(answers, "runs")
    assert await answers.change("acme", "runs", read=await read(answers, "runs"), document=b"x") is AnswerReply.FENCED


async def test_items_are_added_once_and_keep_their_list_alive(answers, client, monkeypatch):
    await put(answers)
    (key,) = [key for key in client.scan_iter(KEYS.answer_prefix + "*")]
    client.expire(key, 20)
    for items in ([b'{"id":"a"}'], [b'{"id":"b"}', b'{"id":"c"}']):
        assert await answers.append("acme", "a", items=items) is AnswerReply.DONE
        assert await answers.append("acme", "a", items=items) is AnswerReply.HELD
    found = await read(answers)
    assert found.input == b'[{"id":"a"},{"id":"b"},{"id":"c"}]'
    assert client.ttl(key) > 90
    assert await answers.swept_bytes() == 100 + len(found.input) + OVERHEAD_BYTES
    monkeypatch.setattr("services.cluster.answers.MAX_ANSWER_BYTES", 140)
    assert await answers.append("acme", "a", items=[b'{"id":"long"}']) is AnswerReply.LONG
    assert await answers.append("other", "a", items=[b"{}"]) is AnswerReply.GONE


async def test_what_grows_makes_room_and_is_not_evicted_by_itself(patient_store):
    each = 1000 + 2 + OVERHEAD_BYTES
    answers = AnswerStore(patient_store, room=AnswerRoom(2 * each, 10 * each), life_s=100.0)
    await put(answers, "grows", num_bytes=1000)
    await put(answers, "a", num_bytes=1000)
    assert await answers.append("acme", "grows", items=[b"1" * 1000]) is AnswerReply.DONE
    assert await read(answers) is None
    assert await answers.append("acme", "grows", items=[b"2" * 3000]) is AnswerReply.TENANT_FULL
    found = await read(answers, "grows")
    assert found.input == b"[" + b"1" * 1000 + b"]"
    longer = await answers.change("acme", "grows", read=found, document=b"d" * 9000)
    assert (longer, await read(answers, "grows")) == (AnswerReply.TENANT_FULL, found)


async def test_a_list_has_those_of_its_kind_in_the_order_of_their_making(answers, monkeypatch, client):
    for number in range(7):
        await answers.put("acme", f"x-{number}", document=b"%d" % number, input_items=b"[]")
        await put(answers, f"y-{number}")
    await answers.put("other", "x-8", document=b"8", input_items=b"[]")
    await create(answers, "x-9")

    async def page(**asked):
        return await answers.page("acme", "x-", **{"limit": 3, "accepts": lambda document: True, **asked})

    assert await page() == ([b"6", b"5", b"4"], True)
    assert await page(after="x-4") == ([b"3", b"2", b"1"], True)
    assert await page(after="x-1") == ([b"0"], False)
    assert await page(newest_first=False, limit=7) == ([b"%d" % number for number in range(7)], False)
    assert await page(accepts=lambda document: int(document) % 3 == 0) == ([b"6", b"3", b"0"], False)
    assert await page(after="x-8") == ([], False), "it is another tenant's"
    # More than one script looks at lie between.
    client.zadd(KEYS.answers_prefix + "acme", {f"{number:032x}": 2e15 + number for number in range(MAX_SEEN)})
    assert await page(limit=1) == ([b"6"], True)
    assert await page(limit=7, newest_first=False) == ([b"%d" % number for number in range(7)], False)
    monkeypatch.setattr("services.cluster.answers.MAX_ANSWER_BYTES", 1)
    assert await page(limit=7) == ([b"6", b"5"], True)
    assert await page(limit=7, after="x-5") == ([b"4", b"3"], True)


LONG = b"[" + b"1," * INLINE_BYTES + b"1]"
"""An input of three pieces."""


async def evictable(client):
    return dict(client.zrange(KEYS.evictable_answers, 0, -1, withscores=True))


async def test_a_long_value_is_stored_in_pieces_and_read_as_a_whole(answers, client):
    document, events = b"d" * (INLINE_BYTES + 1), [b"e" * (INLINE_EVENT_BYTES + 1), b"short"]
    assert await answers.put("acme", "a", document=document, input_items=LONG) is AnswerReply.DONE
    found = await read(answers)
    assert (found.document, found.input) == (document, LONG)
    assert max(client.memory_usage(key) for key in client.scan_iter("*")) < 4 * INLINE_BYTES
    assert await answers.page("acme", "a", limit=5, accepts=lambda document: True) == ([document], False)
    assert await answers.create("acme", "b", order=order(body=LONG), document=b"{}", input_items=LONG)
    claimed = await answers.claim("me")
    assert (claimed.order.body, claimed.input) == (LONG, LONG)
    assert await answers.write(claimed, events, document=document) is AnswerReply.DONE
    assert await answers.events("acme", "b", first=0, most=10) == ("over", events)
    assert (await read(answers, "b")).document == document
    assert await evictable(client) == {b"acme": await answers.swept_bytes()}
    for answer_id in ("a", "b"):
        assert await answers.delete("acme", answer_id)
    assert (await answers.swept_bytes(), await evictable(client)) == (0, {})
    assert not [key for key in client.scan_iter("*") if client.type(key) in (b"list", b"hash")], "nothing is left"


async def test_a_long_conversation_grows_by_pieces(answers, client):
    await answers.put("acme", "a", document=b"{}", input_items=b"[]")
    items = [b'"%03d%b"' % (number, b"x" * (INLINE_BYTES // 3)) for number in range(9)]
    for item in items:
        assert await answers.append("acme", "a", items=[item]) is AnswerReply.DONE
        assert await answers.append("acme", "a", items=[item]) is AnswerReply.HELD
    large = b'"%b"' % (b"y" * (3 * INLINE_BYTES))
    for reply in (AnswerReply.DONE, AnswerReply.HELD):
        assert await answers.append("acme", "a", items=[large]) is reply
    found = await read(answers)
    assert json.loads(found.input) == [json.loads(item) for item in (*items, large)]
    assert await answers.change("acme", "a", read=found, document=b"new", input_items=b"[]") is AnswerReply.DONE
    assert await answers.swept_bytes() == len(b"new[]") + OVERHEAD_BYTES
    assert len([*client.scan_iter(KEYS.answer_prefix + "*")]) == 1, "its pieces are gone"


async def test_pieces_that_find_no_room_are_dropped(patient_store, client):
    answers = AnswerStore(patient_store, room=AnswerRoom(2 * INLINE_BYTES, 10 * INLINE_BYTES), life_s=100.0)
    await put(answers)
    assert await answers.put("acme", "long", document=b"{}", input_items=LONG + LONG) is AnswerReply.TENANT_FULL
    assert await answers.swept_bytes() == sum((await evictable(client)).values())
    assert not [key for key in client.scan_iter("*") if client.type(key) == b"list"]


async def test_a_change_does_not_evict_what_it_changes(patient_store):
    answers = AnswerStore(patient_store, room=AnswerRoom(20 * INLINE_BYTES, 5 * INLINE_BYTES), life_s=100.0)
    await put(answers, "other", "other", num_bytes=INLINE_BYTES)
    assert await answers.put("acme", "a", document=b"{}", input_items=LONG) is AnswerReply.DONE
    longer = b'"%b"' % (b"y" * (INLINE_BYTES + 1))
    assert await answers.append("acme", "a", items=[longer]) is AnswerReply.DONE
    assert len((await read(answers)).input) == len(LONG) + 1 + len(longer)


@pytest.mark.parametrize("num_events", [8000, 20_000])
async def test_any_number_of_events_is_written_once(answers, num_events):
    await create(answers)
    claimed = await answers.claim("me")
    events = [b"%d" % number for number in range(num_events)]
    await answers.write(claimed, events[:5000])
    claimed.num_events = 0  # its reply did not arrive
    assert await answers.write(claimed, events, document=b"{1}") is AnswerReply.DONE
    stored = []
    while len(stored) < num_events:
        state, more = await answers.events("acme", "a", first=len(stored), most=1000)
        stored += more
    assert (state, stored) == ("over", events)


@pytest.mark.parametrize("refusal", [AnswerReply.TENANT_FULL, StoreRefused("denied")], ids=["full", "denied"])
async def test_portions_before_a_refused_one_are_not_written_again(answers, monkeypatch, refusal):
    await create(answers)
    claimed = await answers.claim("me")
    events, num_calls, run = [b"%d" % number for number in range(9000)], 0, answers._with_room

    async def refuses_the_second(script, args):
        nonlocal num_calls
        num_calls += 1
        if num_calls != 2:
            return await run(script, args)
        if isinstance(refusal, StoreRefused):
            raise refusal
        return refusal

    monkeypatch.setattr(answers, "_with_room", refuses_the_second)
    if isinstance(refusal, StoreRefused):
        with pytest.raises(StoreRefused):
            await answers.write(claimed, events)
    else:
        assert await answers.write(claimed, events) is refusal
    assert 0 < claimed.num_events < len(events)
    assert await answers.write(claimed, events[claimed.num_events :], document=b"{1}") is AnswerReply.DONE
    stored = []
    while len(stored) < len(events):
        stored += (await answers.events("acme", "a", first=len(stored), most=1000))[1]
    assert stored == events


async def test_a_refused_response_leaves_the_earlier_one_of_its_name(patient_store, client):
    answers = AnswerStore(patient_store, room=AnswerRoom(4000, 6000), life_s=100.0)
    assert await put(answers, num_bytes=1000) is AnswerReply.DONE
    found, before = await read(answers), await evictable(client)
    assert await put(answers, num_bytes=5000) is AnswerReply.TENANT_FULL
    assert (await read(answers), await evictable(client)) == (found, before)
    assert await put(answers, num_bytes=2500) is AnswerReply.DONE, "the earlier one makes room for it"
    assert len((await read(answers)).document) == 2500
    assert await answers.swept_bytes() <= 4000


async def test_waiting_responses_of_one_tenant_do_not_keep_others_out(patient_store):
    answers = AnswerStore(patient_store, room=AnswerRoom(60_000, 100_000), life_s=100.0)
    for number in range(4):
        assert await create(answers, f"w{number}", "waits", body=b"b" * 12_000) is AnswerReply.DONE
    for tenant in ("a", "b", "c", "d", "e", "f"):
        assert await put(answers, tenant=tenant, num_bytes=10_000) is AnswerReply.DONE
    assert [(await answers.find("waits", f"w{number}")).state for number in range(4)] == ["queued"] * 4
    assert await answers.find("f", "a") is not None


async def test_the_evictable_amount_follows_every_end_of_an_answer(patient_store, client):
    answers = AnswerStore(patient_store, room=AnswerRoom(), life_s=1.0)
    await put(answers)
    await create(answers, "b")
    claimed = await answers.claim("me")
    assert await evictable(client) == {b"acme": 102 + OVERHEAD_BYTES}
    await answers.write(claimed, [b"event"], document=b"{1}")
    assert await evictable(client) == {b"acme": await answers.swept_bytes()}
    await until_swept(answers)
    assert await evictable(client) == {}
    client.zadd(KEYS.evictable_answers, {"forgotten": 10**9})  # the amount of a tenant whose list is lost
    small = AnswerStore(patient_store, room=AnswerRoom(20_000, 20_000), life_s=100.0)
    for tenant in ("a", "b", "c", "d"):
        assert await put(small, tenant=tenant, num_bytes=8_000) is AnswerReply.DONE
    assert b"forgotten" not in await evictable(client)


async def test_a_claim_reaches_past_any_number_that_it_may_not_have(answers):
    for tenant in range(40):
        for number in range(MAX_ACTIVE):
            await create(answers, f"a{number}", f"t{tenant}", regions="eu")
    await create(answers, "ours", "us", regions="us")
    await create(answers, "anywhere", "us")
    claimed = [await answers.claim("me", region="us", busy_tenants=["t0"]) for _ in range(2)]
    assert {each.id for each in claimed} == {"ours", "anywhere"}
    assert await answers.claim("me", region="us") is None
    full = [f"t{tenant}" for tenant in range(39)]
    assert (await answers.claim("me", region="eu", full_tenants=full)).tenant == "t39"


def calls_inside(client):
    """Commands that scripts have called, in all."""
    stats = client.info("commandstats")
    return sum(each["calls"] for name, each in stats.items() if not name.startswith(("cmdstat_eval", "cmdstat_info")))


async def test_storing_costs_the_same_for_any_number_of_tenants(patient_store, client):
    num_calls = {}
    for num_tenants in (20, 400):
        each = 1000 + 2 + OVERHEAD_BYTES
        answers = AnswerStore(patient_store, room=AnswerRoom(10 * each, num_tenants * each), life_s=100.0)
        for number in range(num_tenants):
            await put(answers, tenant=f"t{number}", num_bytes=1000)
            await create(answers, "w", f"t{number}", regions="eu")
        await create(answers, "ours", "us", regions="us")
        before = calls_inside(client)
        assert await answers.put("new", "a", document=b"d" * 5000, input_items=b"[]") is AnswerReply.DONE
        assert (await answers.claim("me", region="us")).id == "ours"
        num_calls[num_tenants] = calls_inside(client) - before
        for key in client.scan_iter("*"):
            client.delete(key)
    assert num_calls[400] <= num_calls[20]


def test_an_id_of_any_characters_has_a_name() -> None:
    """JSON may hold half of a surrogate pair, which UTF-8 does not have."""
    assert name_of_answer("t", "\ud800") != name_of_answer("t", "\ud801")
