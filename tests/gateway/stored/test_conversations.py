"""Conversations: continued and added to by responses, in whichever way these are generated, and changed by clients."""

import asyncio

import openai
import pytest

from gateway.stored.conversations import Conversations, items_of
from services.cluster.answer_records import AnswerReply
from services.cluster.answers import AnswerRoom
from services.runtime.errors import InvalidRequest, NotFound
from tests.gateway.stored.conftest import TEXT, ended
from tests.gateway.stored.test_keeping import away, folder_of

__all__ = ["folder_of"]  # a fixture


async def texts(client, conversation_id):
    """(role, text) of each message, the oldest first."""
    items = [item async for item in client.conversations.items.list(conversation_id, order="asc")]
    assert len({item.id for item in items}) == len(items)
    return [(item.role, item.content[0].text) for item in items]


async def answer(client, conversation_id, asked, how):
    members = {"model": "tiny", "input": asked, "conversation": conversation_id}
    if how == "whole":
        return await client.responses.create(**members, store=False)
    if how == "streamed":
        *_, last = [event async for event in await client.responses.create(**members, stream=True)]
        return last.response
    if how == "background":
        return await ended(client, await client.responses.create(**members, background=True))
    *_, last = [event async for event in await client.responses.create(**members, background=True, stream=True)]
    return last.response


@pytest.mark.parametrize("how", ["whole", "streamed", "background", "background and streamed"])
async def test_a_response_continues_it_and_is_added_to_it(make, client_of, how):
    system = await make()
    client = await client_of(system)
    first = [{"type": "message", "role": "user", "content": "first", "id": "msg_of_the_client"}]
    conversation = await client.conversations.create(items=first, metadata={"a": "b"})
    response = await answer(client, conversation.id, "second", how)
    assert response.conversation.id == conversation.id
    expected = [("user", "first"), ("user", "second"), ("assistant", TEXT)]
    assert await texts(client, conversation.id) == expected
    again = await answer(
        client, conversation.id, [{"role": "user", "content": "third", "id": "msg_of_the_client"}], how
    )
    assert await texts(client, conversation.id) == [*expected, ("user", "third"), ("assistant", TEXT)]
    said = "".join(f"<|{role}|>\n{text}<|end|>\n" for role, text in [*expected, ("user", "third")])
    tokenizer = system.gateway.requests.catalog["tiny"].tokenizer
    ids = await tokenizer.encode(f"{said}<|assistant|>\n", add_special_tokens=False)
    assert list(system.workers["decode-0"].attempts[-1].spec.prompt_token_ids) == ids
    if how != "whole":
        assert (await client.responses.retrieve(again.id)).to_dict() == again.to_dict()


async def test_its_items_are_added_found_and_taken_out(make, client_of):
    system = await make()
    client = await client_of(system)
    conversation = await client.conversations.create()
    items = [{"role": "user", "content": text} for text in ("a", "b", "c")]
    added = (await client.conversations.items.create(conversation.id, items=items)).data
    assert [item.content[0].text for item in added] == ["a", "b", "c"]
    found = await client.conversations.items.retrieve(added[1].id, conversation_id=conversation.id)
    assert found.to_dict() == added[1].to_dict()
    assert (await client.conversations.items.delete(added[1].id, conversation_id=conversation.id)).id == conversation.id
    assert [text for _, text in await texts(client, conversation.id)] == ["a", "c"]
    for ask in (client.conversations.items.retrieve, client.conversations.items.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            await ask(added[1].id, conversation_id=conversation.id)
        assert caught.value.code == "item_not_found"


async def test_its_metadata_change_and_it_ends(make, client_of):
    system = await make()
    client = await client_of(system)
    made = await client.conversations.create(items=[{"role": "user", "content": "a"}], metadata={"a": "b"})
    changed = await client.conversations.update(made.id, metadata={"c": "d"})
    assert (changed.id, changed.created_at, changed.metadata) == (made.id, made.created_at, {"c": "d"})
    assert await client.conversations.retrieve(made.id) == changed
    assert await texts(client, made.id) == [("user", "a")]
    assert (await client.conversations.delete(made.id)).deleted
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="tiny", input="hi", conversation=made.id)
    assert (caught.value.param, caught.value.code) == ("conversation", "conversation_not_found")


async def test_a_call_in_it_is_answered(make, client_of, folder_of):
    system = await make(model=folder_of("hermes")[0])
    client = await client_of(system)
    call = {"type": "function_call", "call_id": "c1", "name": "clock", "arguments": "{}"}
    conversation = await client.conversations.create(items=[{"role": "user", "content": "time?"}, call])
    output = {"type": "function_call_output", "call_id": "c1", "output": "noon"}
    with pytest.raises(openai.BadRequestError) as caught:
        await client.conversations.items.create(conversation.id, items=[{**output, "call_id": "c2"}])
    assert caught.value.param == "items[0].call_id"
    assert (await client.responses.create(model="tiny", input=[output], conversation=conversation.id)).output_text
    items = [item.type async for item in client.conversations.items.list(conversation.id, order="asc")]
    assert items == ["message", "function_call", "function_call_output", "message"]


async def test_two_turns_at_once_are_both_there(make, client_of, talker):
    await talker.allow(1)
    first, second = await make(2)
    clients = [await client_of(first), await client_of(second)]
    conversation = await clients[0].conversations.create()
    asking = [asyncio.create_task(answer(one, conversation.id, "hi", "whole")) for one in clients]
    await first.until(lambda: len(first.workers["decode-0"].attempts) == 2)
    await talker.allow(100)
    await asyncio.gather(*asking)
    assert await texts(clients[0], conversation.id) == [("user", "hi"), ("assistant", TEXT)] * 2


@pytest.mark.parametrize("how", ["whole", "streamed", "background"])
async def test_one_that_is_gone_at_the_end_is_told(make, client_of, talker, how):
    await talker.allow(1)
    system = await make()
    client = await client_of(system)
    conversation = await client.conversations.create()
    asking = asyncio.create_task(answer(client, conversation.id, "hi", how))
    await system.until(lambda: bool(system.workers["decode-0"].attempts))
    await client.conversations.delete(conversation.id)
    await talker.allow(100)
    response = await asking
    assert (response.output_text, response.conversation) == (TEXT, None)


async def test_a_turn_that_fails_is_not_added(make, client_of, monkeypatch, talker):
    await talker.allow(1)
    system = await make()
    client = await client_of(system)
    conversation = await client.conversations.create()
    response = await client.responses.create(model="tiny", input="hi", conversation=conversation.id, background=True)
    await system.until(lambda: bool(system.workers["decode-0"].attempts))
    await client.responses.cancel(response.id)
    await system.until(lambda: bool(system.workers["decode-0"].cancelled))
    await talker.allow(100)
    assert await texts(client, conversation.id) == []


async def test_redis_that_is_away_is_told(make, client_of, monkeypatch):
    system = await make()
    client = await client_of(system)
    conversation = await client.conversations.create()
    answers = system.gateway.stored.answers
    monkeypatch.setattr(answers, "append", away)
    assert (await answer(client, conversation.id, "hi", "whole")).conversation is None
    monkeypatch.setattr(answers, "find", away)
    monkeypatch.setattr(answers, "put", away)
    monkeypatch.setattr(answers, "delete", away)
    for ask in (
        client.conversations.create(),
        client.conversations.retrieve(conversation.id),
        client.conversations.delete(conversation.id),
        client.conversations.items.create(conversation.id, items=[{"role": "user", "content": "a"}]),
        answer(client, conversation.id, "hi", "streamed"),
    ):
        with pytest.raises(openai.InternalServerError) as caught:
            await ask
        assert (caught.value.status_code, caught.value.code) == (503, "store_unavailable")


async def test_its_room_is_bounded(make, client_of, monkeypatch):
    system = await make()
    client = await client_of(system)
    conversation = await client.conversations.create()
    items = [{"role": "user", "content": "x" * 5000}]
    monkeypatch.setattr(system.gateway.stored.answers, "room", AnswerRoom(8000, 10**6))
    await client.conversations.items.create(conversation.id, items=items)
    with pytest.raises(openai.RateLimitError):
        await client.conversations.items.create(conversation.id, items=items)
    monkeypatch.setattr(system.gateway.stored.answers, "room", AnswerRoom())
    monkeypatch.setattr("services.cluster.answers.MAX_ANSWER_BYTES", 8000)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.conversations.items.create(conversation.id, items=items)
    assert caught.value.code == "request_too_large"
    assert len(await texts(client, conversation.id)) == 1


async def test_what_is_no_conversation_is_not_found():
    class Store:
        async def find(self, tenant, entry_id):
            raise AssertionError("the id is one of another kind")

        delete = find

    conversations = Conversations(Store(), on_refusal=lambda limit: None)
    for ask in (
        conversations.find("acme", "resp_1"),
        conversations.delete("acme", "resp_1"),
        conversations.remove("acme", "resp_1", item_id="msg_1"),
    ):
        with pytest.raises(NotFound):
            await ask


async def test_an_item_that_is_none_is_refused_before_anything_is_stored():
    conversations = Conversations(None, on_refusal=lambda limit: None)
    with pytest.raises(InvalidRequest) as caught:
        await conversations.create("acme", items=[{"role": "nobody", "content": "a"}], metadata={})
    assert caught.value.field == "items[0].role"


async def test_an_item_is_removed_from_what_is_there_now():
    """Another request adds an item between the reading and the change."""

    class Store:
        room = AnswerRoom()
        inputs = (b'[{"id":"a"},{"id":"b"}]', b'[{"id":"a"},{"id":"b"},{"id":"c"}]')
        num_finds = 0

        async def find(self, tenant, entry_id):
            self.found = _Found(self.inputs[min(self.num_finds, 1)])
            self.num_finds += 1
            return self.found

        async def change(self, tenant, entry_id, *, read, document, input_items):
            self.written = input_items
            return AnswerReply.FENCED if read.input == self.inputs[0] else AnswerReply.DONE

    store = Store()
    await Conversations(store, on_refusal=lambda limit: None).remove("acme", "conv_1", item_id="a")
    assert items_of(_Found(store.written)) == [{"id": "b"}, {"id": "c"}]


class _Found:
    document = b"{}"

    def __init__(self, input_items):
        self.input = input_items
