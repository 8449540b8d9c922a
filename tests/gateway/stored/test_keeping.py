"""Responses that are kept: continued by their ids, within their bounds, and told honestly where they are not kept."""

import asyncio
import json

import openai
import pytest

from services.cluster.answer_records import AnswerReply
from services.cluster.answers import AnswerRoom
from services.runtime.errors import StoreUnavailable
from tests.gateway.stored.conftest import TEXT
from tests.gateway.test_chat_tools import folder_of

__all__ = ["folder_of"]  # a fixture


async def away(*args, **kwargs):
    raise StoreUnavailable("Redis did not answer in time")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_what_was_answered_is_what_is_fetched(make, client_of, is_streamed):
    system = await make()
    client = await client_of(system)
    asked = {"model": "tiny", "input": "hi", "instructions": "Be kind.", "metadata": {"a": "b"}}
    if is_streamed:
        *_, last = [event async for event in await client.responses.create(**asked, stream=True)]
        response = last.response
    else:
        response = await client.responses.create(**asked)
    assert (response.store, response.output_text) == (True, TEXT)
    assert (await client.responses.retrieve(response.id)).to_dict() == response.to_dict()


async def test_a_conversation_continues_from_its_id(make, client_of):
    system = await make()
    client = await client_of(system)
    first = await client.responses.create(model="tiny", input="one", instructions="Be kind.")
    second = await client.responses.create(model="tiny", input="two", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    third = await client.responses.create(
        model="tiny", input=[{"role": "user", "content": "three"}], previous_response_id=second.id, stream=True
    )
    async for _ in third:
        pass
    # The instructions of an earlier response do not hold for a later one.
    expected = "".join(f"<|user|>\n{asked}<|end|>\n<|assistant|>\n{TEXT}<|end|>\n" for asked in ("one", "two"))
    attempt = system.workers["decode-0"].attempts[-1]
    tokenizer = system.gateway.requests.catalog["tiny"].tokenizer
    ids = await tokenizer.encode(f"{expected}<|user|>\nthree<|end|>\n<|assistant|>\n", add_special_tokens=False)
    assert list(attempt.spec.prompt_token_ids) == ids
    await client.responses.delete(first.id)
    again = await client.responses.create(model="tiny", input="two", previous_response_id=second.id)
    assert again.status == "completed"


async def test_the_output_of_a_stored_call_is_taken(make, client_of, folder_of):
    system = await make(model=folder_of("hermes")[0])
    client = await client_of(system)
    call = {"type": "function_call", "call_id": "c1", "name": "clock", "arguments": "{}"}
    first = await client.responses.create(model="tiny", input=[{"role": "user", "content": "time?"}, call])
    output = {"type": "function_call_output", "call_id": "c1", "output": "noon"}
    second = await client.responses.create(model="tiny", input=[output], previous_response_id=first.id)
    assert second.status == "completed"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="tiny", input=[{**output, "call_id": "c2"}], previous_response_id=first.id)
    assert caught.value.param == "input[0].call_id"


async def test_what_does_not_exist_cannot_be_continued(make, client_of, talker):
    system = await make()
    client = await client_of(system)
    for earlier in ("resp_none", "", "x" * 5000, "résumé"):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="tiny", input="hi", previous_response_id=earlier)
        assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")
    await talker.allow(0)
    running = await client.responses.create(model="tiny", input="hi", background=True)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="tiny", input="hi", previous_response_id=running.id)
    assert caught.value.code == "previous_response_not_complete"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="tiny", input="hi", background=True, store=False)
    assert caught.value.param == "background"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.input_tokens.count(model="tiny", input="hi", previous_response_id=running.id)
    assert caught.value.param == "previous_response_id"


async def test_nothing_is_kept_unasked(make, client_of):
    system = await make()
    client = await client_of(system)
    response = await client.responses.create(model="tiny", input="hi", store=False)
    assert response.store is False
    with pytest.raises(openai.NotFoundError) as caught:
        await client.responses.retrieve(response.id)
    assert caught.value.code == "response_not_found"


async def test_an_operator_may_keep_nothing(make, client_of):
    system = await make(stored_answer_s=0.0)
    client = await client_of(system)
    response = await client.responses.create(model="tiny", input="hi", store=True)
    assert response.store is False
    for asked in ({"background": True}, {"previous_response_id": response.id}):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="tiny", input="hi", **asked)
        assert (caught.value.param, caught.value.code) == (*asked, "unsupported_parameter")
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_redis_that_is_away_is_told(make, client_of, monkeypatch, is_streamed):
    system = await make()
    client = await client_of(system)
    kept = await client.responses.create(model="tiny", input="hi")
    answers = system.gateway.stored.answers
    monkeypatch.setattr(answers, "put", away)
    asked = {"model": "tiny", "input": "hi"}
    if is_streamed:
        *_, last = [event async for event in await client.responses.create(**asked, stream=True)]
        response = last.response
    else:
        response = await client.responses.create(**asked)
    # It was not asked for, so the answer is worth more than a refusal; but it says so.
    assert (response.store, response.output_text) == (False, TEXT)
    monkeypatch.setattr(answers, "find", away)
    monkeypatch.setattr(answers, "create", away)
    for more in ({"store": True}, {"background": True}, {"previous_response_id": kept.id}):
        with pytest.raises(openai.InternalServerError) as caught:
            await client.responses.create(**asked, stream=is_streamed, **more)
        assert (caught.value.status_code, caught.value.code) == (503, "store_unavailable")
    with pytest.raises(openai.InternalServerError) as caught:
        await client.responses.retrieve(kept.id)
    assert caught.value.code == "store_unavailable"


async def test_the_oldest_make_room(make, client_of, monkeypatch):
    system = await make()
    client = await client_of(system)
    monkeypatch.setattr(system.gateway.stored.answers, "room", AnswerRoom(20_000, 10**6))
    responses = [await client.responses.create(model="tiny", input="hi") for _ in range(12)]
    found = []
    for response in responses:
        got = await system.http.get(f"/v1/responses/{response.id}")
        found.append(got.status_code == 200)
    assert 0 < found.index(True) < 12
    assert found == sorted(found)
    monkeypatch.setattr(system.gateway.stored.answers, "room", AnswerRoom(1000, 10**6))
    response = await client.responses.create(model="tiny", input="hi")
    assert response.store is False
    with pytest.raises(openai.RateLimitError) as caught:
        await client.responses.create(model="tiny", input="hi", background=True)
    assert "at most 1000 bytes" in caught.value.message
    monkeypatch.setattr(system.gateway.stored.answers, "room", AnswerRoom(10**6, 1000))
    with pytest.raises(openai.InternalServerError) as caught:
        await client.responses.create(model="tiny", input="hi", background=True)
    assert caught.value.status_code == 503


async def test_what_has_no_room_while_it_is_generated_fails(make, client_of, monkeypatch, talker):
    await talker.allow(2)
    system = await make()
    client = await client_of(system)
    stream = await client.responses.create(model="tiny", input="hi", background=True, stream=True)
    response = (await anext(aiter(stream))).response
    await system.until(lambda: bool(system.workers["decode-0"].attempts))
    monkeypatch.setattr(system.gateway.stored.answers, "room", AnswerRoom(2000, 10**6))
    await talker.allow(100)
    await system.until(lambda: not system.gateway.stored.background.runs)
    monkeypatch.setattr(system.gateway.stored.answers, "room", AnswerRoom())
    over = await client.responses.retrieve(response.id)
    assert over.status == "failed"
    assert "no room" in over.error.message


async def test_a_name_that_is_given_twice_means_the_later_response(make, client_of):
    system = await make()
    headers = {"X-Request-Id": "mine"}
    for asked in ("one", "two"):
        response = await system.http.post("/v1/responses", json={"input": asked}, headers=headers)
        assert response.json()["id"] == "resp_mine"
    items = (await system.http.get("/v1/responses/resp_mine/input_items")).json()["data"]
    assert [item["content"][0]["text"] for item in items] == ["two"]
    taken = await system.http.post("/v1/responses", json={"input": "x", "background": True}, headers=headers)
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "idempotency_conflict")


async def test_what_cannot_be_written_is_refused_or_left_out(make):
    system = await make()
    headers = {"content-type": "application/json"}
    item = {"role": "user", "content": [{"type": "input_text", "text": "hi", "more": "\ud800"}], "id": 10**40}
    response = await system.http.post("/v1/responses", content=json.dumps({"input": [item]}), headers=headers)
    assert response.status_code == 200
    assert response.json()["store"]
    members = {"background": True, "text": {"format": {"type": "text", "more": "\ud800"}}}
    body = json.dumps({"input": [item], **members})
    response = await system.http.post("/v1/responses", content=body, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_encoding")


async def test_a_conversation_beyond_what_a_request_may_have_is_refused(make, client_of, monkeypatch):
    system = await make()
    client = await client_of(system)
    monkeypatch.setattr("gateway.stored.keeping.MAX_BODY_BYTES", 500)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="tiny", input="hello " * 80, background=True)
    assert caught.value.code == "request_too_large"
    monkeypatch.setattr("gateway.stored.kept.MAX_ANSWER_BYTES", 500)
    assert (await client.responses.create(model="tiny", input="hi")).store is False


async def test_what_is_kept_is_kept_before_its_client_knows(make, client_of, monkeypatch):
    """A client that has seen the end continues at once, at whichever gateway."""
    first, second = await make(2)
    answers, puts = first.gateway.stored.answers, []
    put = answers.put

    async def slow_put(*args, **kwargs):
        await asyncio.sleep(0.1)
        reply = await put(*args, **kwargs)
        puts.append(reply)
        return reply

    monkeypatch.setattr(answers, "put", slow_put)
    client, other = await client_of(first), await client_of(second)
    async for event in await client.responses.create(model="tiny", input="one", stream=True):
        last = event
    assert last.type == "response.completed"
    assert puts == [AnswerReply.DONE]
    second_response = await other.responses.create(model="tiny", input="two", previous_response_id=last.response.id)
    assert second_response.status == "completed"
