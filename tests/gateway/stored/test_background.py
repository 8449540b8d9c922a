"""Responses that are generated without a reader, whatever becomes of their gateway, their client and Redis."""

import asyncio
import json
import os
import signal

import openai
import pytest
import redis

import gateway.stored.background
from services.cluster.answer_records import MAX_ACTIVE
from services.cluster.embedded_redis import EmbeddedRedis
from services.cluster.keys import Keys
from services.runtime.errors import StoreRefused, StoreUnavailable
from tests.gateway.stored.conftest import TEXT, ended


async def numbered(stream):
    """The events of a stream. Asserts that their numbers have no gap."""
    events = [event async for event in stream]
    first = events[0].sequence_number if events else 0
    assert [event.sequence_number for event in events] == list(range(first, first + len(events)))
    return events


def told(events):
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


async def test_it_is_generated_while_nobody_waits(make, client_of, talker):
    await talker.allow(0)
    system = await make()
    client = await client_of(system)
    response = await client.responses.create(model="tiny", input="hi", background=True, metadata={"of": "a test"})
    assert (response.status, response.background, response.store, response.output) == ("queued", True, True, [])
    await system.until(lambda: bool(system.workers["decode-0"].attempts))
    assert (await client.responses.retrieve(response.id)).status == "in_progress"
    await talker.allow(100)
    over = await ended(client, response)
    assert (over.status, over.output_text, over.id) == ("completed", TEXT, response.id)
    assert (over.created_at, over.background, over.metadata) == (response.created_at, True, {"of": "a test"})
    assert over.usage.output_tokens == len(talker.ids)


async def test_its_stream_is_joined_left_and_resumed(make, client_of, talker):
    await talker.allow(2)
    system = await make()
    client = await client_of(system)
    stream = await client.responses.create(model="tiny", input="hi", background=True, stream=True)
    seen = []
    async for event in stream:
        seen.append(event)
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    response_id = seen[0].response.id
    resumed = await client.responses.retrieve(response_id, stream=True, starting_after=seen[-1].sequence_number)
    await talker.allow(100)
    rest = await numbered(resumed)
    assert rest[0].sequence_number == len(seen)
    assert told([*seen, *rest]) == TEXT
    assert (rest[-1].type, rest[-1].response.output_text) == ("response.completed", TEXT)
    assert rest[-1].response.background
    again = await numbered(await client.responses.retrieve(response_id, stream=True))
    assert [event.to_dict() for event in again] == [event.to_dict() for event in [*seen, *rest]]
    assert (await client.responses.retrieve(response_id)).to_dict() == rest[-1].response.to_dict()


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_another_gateway_takes_it_over_and_continues_it(make, client_of, talker, is_streamed):
    await talker.allow(3)
    first, second = await make(2)
    await second.gateway.stored.background.close()
    client = await client_of(second)
    asked = {"model": "tiny", "input": "hi", "background": True}
    if is_streamed:
        stream = await client.responses.create(**asked, stream=True)
        response = (await anext(aiter(stream))).response
        seen = [event async for event in _until_delta(stream)]
    else:
        response = await client.responses.create(**asked)
    await first.until(lambda: bool(first.workers["decode-0"].attempts))
    await first.flush_journals()
    # It dies: it renews nothing, and what it still writes is refused.
    for run in first.gateway.stored.background.runs.values():
        run._store = _Dead()
    first.gateway.stored.background._task.cancel()
    second.gateway.stored.background.start()
    await second.until(lambda: len(second.gateway.stored.background.runs) == 1)
    await talker.allow(100)
    over = await ended(client, response)
    assert (over.status, over.output_text) == ("completed", TEXT)
    if is_streamed:
        rest = await numbered(stream)
        assert told([*seen, *rest]) == TEXT
        assert (await client.responses.retrieve(response.id)).to_dict() == rest[-1].response.to_dict()


async def _until_delta(stream):
    async for event in stream:
        yield event
        if event.type == "response.output_text.delta":
            return


class _Dead:
    """A store that nobody reaches."""

    lease_s = 1.0

    def __getattr__(self, name):
        async def fail(*args, **kwargs):
            raise StoreUnavailable("Redis did not answer")

        return fail


async def test_gateway_that_leaves_gives_it_back(make, client_of, talker):
    await talker.allow(3)
    first, second = await make(2)
    await second.gateway.stored.background.close()
    client = await client_of(second)
    response = await client.responses.create(model="tiny", input="hi", background=True)
    await first.until(lambda: bool(first.workers["decode-0"].attempts))
    await first.flush_journals()
    await first.gateway.stored.background.close()
    assert (await client.responses.retrieve(response.id)).status == "queued"
    second.gateway.stored.background.start()
    await second.until(lambda: len(second.gateway.stored.background.runs) == 1)
    await talker.allow(100)
    assert (await ended(client, response)).output_text == TEXT


async def test_cancel_ends_it_at_once_and_for_good(make, client_of, talker):
    await talker.allow(3)
    first, second = await make(2)
    client = await client_of(second)
    stream = await client.responses.create(model="tiny", input="hi", background=True, stream=True)
    response = (await anext(aiter(stream))).response
    await first.until(lambda: bool(first.workers["decode-0"].attempts))
    cancelled = await client.responses.cancel(response.id)
    assert (cancelled.status, cancelled.output) == ("cancelled", [])
    worker = first.workers["decode-0"]
    await first.until(lambda: bool(worker.cancelled))
    assert not any([event.type == "response.completed" async for event in stream])
    for system in (first, second):
        await system.until(lambda system=system: not system.gateway.stored.background.runs)
    assert (await client.responses.cancel(response.id)).to_dict() == cancelled.to_dict()
    assert (await client.responses.retrieve(response.id)).status == "cancelled"


async def test_cancel_and_end_race_to_one_result(make, client_of):
    system = await make()
    client = await client_of(system)
    for delay_s in (0.0, 0.005, 0.01, 0.02, 0.05):
        response = await client.responses.create(model="tiny", input="hi", background=True)
        await asyncio.sleep(delay_s)
        said = await client.responses.cancel(response.id)
        assert said.status in ("cancelled", "completed")
        await system.until(lambda: not system.gateway.stored.background.runs)
        assert (await client.responses.retrieve(response.id)).to_dict() == said.to_dict()


async def test_delete_while_it_runs_ends_it(make, client_of, talker):
    await talker.allow(3)
    system = await make()
    client = await client_of(system)
    response = await client.responses.create(model="tiny", input="hi", background=True)
    await system.until(lambda: bool(system.workers["decode-0"].attempts))
    await client.responses.delete(response.id)
    await system.until(lambda: bool(system.workers["decode-0"].cancelled))
    await system.until(lambda: not system.gateway.stored.background.runs)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)


async def test_redis_that_forgets_everything_ends_it(make, client_of, talker):
    await talker.allow(3)
    system = await make()
    client = await client_of(system)
    response = await client.responses.create(model="tiny", input="hi", background=True)
    await system.until(lambda: bool(system.workers["decode-0"].attempts))
    keys = Keys(system.cluster)
    with redis.Redis.from_url(system.redis_url) as server:
        for prefix in (keys.answer_prefix, keys.prefix + "answers"):
            server.delete(*server.scan_iter(f"{prefix}*"))
    await system.until(lambda: not system.gateway.stored.background.runs)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)


async def test_redis_may_be_away_for_a_while(make, client_of, talker):
    await talker.allow(2)
    with EmbeddedRedis() as server:
        system = await make(redis=server.url)
        system.gateway._batch_store._timeout_s = 0.1
        client = await client_of(system)
        stream = await client.responses.create(model="tiny", input="hi", background=True, stream=True)
        seen = [event async for event in _until_delta(stream)]
        (run,) = system.gateway.stored.background.runs.values()
        os.kill(server.pid, signal.SIGSTOP)
        try:
            await talker.allow(100)
            await system.until(lambda: bool(run._last))
            await system.until(lambda: system.gateway._batch_store.stats.num_failed_calls > 2)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        rest = await numbered(stream)
        assert told([*seen, *rest]) == TEXT
        assert [event.sequence_number for event in [*seen, *rest]] == list(range(len(seen) + len(rest)))
        assert (await client.responses.retrieve(seen[0].response.id)).output_text == TEXT


async def test_what_ends_it_early_is_its_reason(make, client_of, monkeypatch):
    system = await make()
    client = await client_of(system)
    long = await client.responses.create(model="tiny", input="hello " * 600, background=True, stream=True)
    (event,) = await numbered(long)
    assert (event.type, event.response.status) == ("response.failed", "failed")
    assert "tokens" in event.response.error.message
    assert (await client.responses.retrieve(event.response.id)).error == event.response.error
    monkeypatch.setattr(gateway.stored.background, "BACKGROUND_S", -1.0)
    late = await ended(client, await client.responses.create(model="tiny", input="hi", background=True))
    assert (late.status, late.error.code) == ("failed", "server_error")
    assert "was not complete within" in late.error.message


async def test_gateways_that_die_of_it_are_not_sent_after_each_other_for_ever(make, client_of, monkeypatch):
    system = await make()
    monkeypatch.setattr(system.gateway.stored.answers, "lease_s", 0.05)

    async def fail(*args, **kwargs):
        raise RuntimeError("a fault")

    monkeypatch.setattr(gateway.stored.background, "ask", fail)
    client = await client_of(system)
    over = await ended(client, await client.responses.create(model="tiny", input="hi", background=True))
    assert (over.status, over.error.message) == ("failed", "the gateways that generated it ended, 4 times")


async def test_refusal_that_passes_is_waited_for(make, client_of, monkeypatch):
    system = await make()
    ask, num_asked = gateway.stored.background.ask, 0

    async def refuse_once(*args, **kwargs):
        nonlocal num_asked
        num_asked += 1
        if num_asked == 1:
            return gateway.stored.background.RowAnswer(503, {}, b"{}")
        return await ask(*args, **kwargs)

    monkeypatch.setattr(gateway.stored.background, "ask", refuse_once)
    client = await client_of(system)
    over = await ended(client, await client.responses.create(model="tiny", input="hi", background=True))
    assert (over.output_text, num_asked) == (TEXT, 2)


async def test_a_tenant_has_so_many_of_them_and_no_more(make, client_of, talker):
    await talker.allow(0)
    system = await make()
    client = await client_of(system)
    responses = [await client.responses.create(model="tiny", input="hi", background=True) for _ in range(MAX_ACTIVE)]
    with pytest.raises(openai.RateLimitError) as caught:
        await client.responses.create(model="tiny", input="hi", background=True)
    assert "at most 32 responses" in caught.value.message
    await client.responses.cancel(responses[0].id)
    responses[0] = await client.responses.create(model="tiny", input="hi", background=True)
    await talker.allow(100)
    assert {(await ended(client, response)).status for response in responses} == {"completed"}


async def test_a_retry_with_its_key_makes_no_second_one(make, client_of, talker):
    await talker.allow(0)
    system = await make()
    headers = {"Idempotency-Key": "one"}
    body = {"model": "tiny", "input": "hi", "background": True}
    first, again = [await system.http.post("/v1/responses", json=body, headers=headers) for _ in range(2)]
    assert again.json()["id"] == first.json()["id"]
    other = await system.http.post("/v1/responses", json={**body, "input": "ho"}, headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_conflict")
    await talker.allow(100)
    await system.until(lambda: not system.gateway.stored.background.runs)
    assert json.loads((await system.http.get(f"/v1/responses/{first.json()['id']}")).text)["status"] == "completed"
    assert len(system.workers["decode-0"].attempts) == 1


async def test_what_redis_refuses_for_good_fails_with_its_reason(make, client_of, monkeypatch):
    system = await make()
    store = system.gateway.stored.background.store
    write = store.write

    async def refuse(answer, events, *, document=b"", beyond_room=False):
        if not beyond_room:
            raise StoreRefused("Redis refused a command: too many results to unpack")
        return await write(answer, events, document=document, beyond_room=beyond_room)

    monkeypatch.setattr(store, "write", refuse)
    client = await client_of(system)
    for is_streamed in (False, True):
        response = await client.responses.create(model="tiny", input="hi", background=True, stream=is_streamed)
        if is_streamed:
            response = (await anext(aiter(response))).response
        over = await ended(client, response)
        assert (over.status, over.error.code) == ("failed", "server_error")
        assert "Redis refused the command" in over.error.message
