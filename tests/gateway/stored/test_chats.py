"""Chat answers that are kept: whatever way they come, what was answered is what is fetched."""

import openai
import pytest

from tests.gateway.stored.conftest import TEXT
from tests.gateway.stored.test_keeping import away

ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "store": True}


async def streamed(client, **more):
    """(id, text) of each choice of a stream."""
    texts, chat_id = {}, ""
    async for chunk in await client.chat.completions.create(**{**ASKED, **more}, stream=True):
        chat_id = chunk.id
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    return chat_id, texts


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"logprobs": True, "top_logprobs": 2}])
async def test_what_was_answered_is_what_is_fetched(make, client_of, more):
    system = await make()
    client = await client_of(system)
    answer = await client.chat.completions.create(**ASKED, **more, metadata={"a": "b"})
    found = await client.chat.completions.retrieve(answer.id)
    assert found.to_dict() == {**answer.to_dict(), "metadata": {"a": "b"}}
    chat_id, texts = await streamed(client, **more)
    found = await client.chat.completions.retrieve(chat_id)
    assert {choice.index: choice.message.content for choice in found.choices} == texts
    assert texts == dict.fromkeys(range(more.get("n", 1)), TEXT)
    assert found.usage.to_dict() == answer.usage.to_dict()
    if "logprobs" in more:
        assert found.choices[0].logprobs == answer.choices[0].logprobs


async def test_a_stream_whose_tokens_come_one_by_one_is_kept_whole(make, client_of, talker):
    """Most of them go out without the task that serves the stream."""
    await talker.allow(1)
    system = await make()
    client = await client_of(system)
    parts = []
    async for part in await client.chat.completions.create(**ASKED, stream=True):
        parts.append(part)
        await talker.allow(len(parts) + 1)
    assert len(parts) > 5
    found = await client.chat.completions.retrieve(parts[0].id)
    assert (found.choices[0].message.content, found.usage.completion_tokens) == (TEXT, len(talker.ids))


async def test_a_stream_with_a_name_that_is_resumed_is_kept_whole(make, client_of, talker):
    await talker.allow(3)
    system = await make()
    client = await client_of(system)
    headers = {"x-request-id": "mine"}
    async with system.http.stream(
        "POST", "/v1/chat/completions", json={**ASKED, "stream": True}, headers=headers
    ) as got:
        lines = got.aiter_lines()
        events = []
        async for line in lines:
            if line.startswith("id: "):
                events.append(line.removeprefix("id: "))
            if len(events) == 2:
                break
    await talker.allow(100)
    headers["last-event-id"] = events[-1]
    rest = await system.http.post("/v1/chat/completions", json={**ASKED, "stream": True}, headers=headers)
    assert rest.text.endswith("data: [DONE]\n\n")
    found = await client.chat.completions.retrieve("chatcmpl-mine")
    assert (found.choices[0].message.content, found.choices[0].finish_reason) == (TEXT, "stop")


async def test_nothing_is_kept_unasked(make, client_of):
    system = await make()
    client = await client_of(system)
    for more in ({"store": False}, {"store": None}, {"store": False, "metadata": {"a": "b"}}):
        got = await system.http.post("/v1/chat/completions", json={**ASKED, **more})
        assert got.headers.get("x-tandem-ignored") == ("metadata" if "metadata" in more else None)
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.retrieve(got.json()["id"])
        assert caught.value.code == "completion_not_found"
    assert (await client.chat.completions.list()).data == []


async def test_an_operator_may_keep_nothing(make, client_of):
    system = await make(stored_answer_s=0.0)
    client = await client_of(system)
    got = await system.http.post("/v1/chat/completions", json=ASKED)
    assert got.headers["x-tandem-ignored"] == "store"
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.retrieve(got.json()["id"])


async def test_redis_that_is_away_is_told(make, client_of, monkeypatch):
    system = await make()
    client = await client_of(system)
    answers = system.gateway.stored.answers
    kept = await client.chat.completions.create(**ASKED)
    monkeypatch.setattr(answers, "put", away)
    got = await system.http.post("/v1/chat/completions", json=ASKED)
    assert (got.status_code, got.headers["x-tandem-ignored"]) == (200, "store")
    got = await system.http.post("/v1/chat/completions", json={**ASKED, "stream": True})
    assert got.text.endswith(": not stored\n\ndata: [DONE]\n\n")
    for name in ("find", "page", "delete"):
        monkeypatch.setattr(answers, name, away)
    for ask in (
        client.chat.completions.create(**ASKED),
        streamed(client),
        client.chat.completions.retrieve(kept.id),
        client.chat.completions.update(kept.id, metadata={}),
        client.chat.completions.delete(kept.id),
        client.chat.completions.messages.list(kept.id),
        client.chat.completions.list(),
    ):
        with pytest.raises(openai.InternalServerError) as caught:
            await ask
        assert (caught.value.status_code, caught.value.code) == (503, "store_unavailable")


async def test_what_cannot_be_written_is_refused(make):
    system = await make()
    headers = {"content-type": "application/json"}
    body = r'{"messages": [{"role": "user", "content": "hi", "more": "\ud800"}], "store": true}'
    got = await system.http.post("/v1/chat/completions", content=body, headers=headers)
    assert (got.status_code, got.json()["error"]["code"]) == (400, "invalid_encoding")
