"""The routes of stored chats: what each answers to which tenant, and what is refused."""

import openai
import pytest

from tests.gateway.stored.test_chats import ASKED
from tests.gateway.stored.test_responses_api import KEYS, key_file

__all__ = ["key_file"]  # a fixture


async def test_no_tenant_learns_of_anothers(make, client_of, key_file):
    system = await make(api_keys=key_file)
    alice, bob = [await client_of(system, key) for key in KEYS]
    hers = await alice.chat.completions.create(**ASKED)
    for ask in (
        bob.chat.completions.retrieve(hers.id),
        bob.chat.completions.update(hers.id, metadata={}),
        bob.chat.completions.delete(hers.id),
        bob.chat.completions.messages.list(hers.id),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            await ask
        assert caught.value.code == "completion_not_found"
    assert (await bob.chat.completions.list()).data == []
    assert [chat.id for chat in (await alice.chat.completions.list()).data] == [hers.id]


async def test_they_are_listed_in_pages_and_by_what_they_have(make, client_of):
    system = await make()
    client = await client_of(system)
    await client.responses.create(model="tiny", input="is no chat")
    chats = [await client.chat.completions.create(**ASKED, metadata={"n": str(n % 2)}) for n in range(5)]
    ids = [chat.id for chat in chats]
    assert [chat.id async for chat in client.chat.completions.list(limit=2)] == ids
    assert [chat.id async for chat in client.chat.completions.list(limit=2, order="desc")] == ids[::-1]
    assert [chat.id async for chat in client.chat.completions.list(metadata={"n": "1"}, limit=1)] == ids[1::2]
    assert [chat.id async for chat in client.chat.completions.list(model="tiny")] == ids
    for none in ({"model": "other"}, {"metadata": {"n": "2"}}, {"after": "chatcmpl-none"}):
        page = await client.chat.completions.list(**none)
        assert (page.data, page.has_more) == ([], False)


async def test_metadata_change_and_it_ends(make, client_of):
    system = await make()
    client = await client_of(system)
    chat = await client.chat.completions.create(**ASKED, metadata={"a": "b"})
    changed = await client.chat.completions.update(chat.id, metadata={"c": "d"})
    assert changed.to_dict() == {**chat.to_dict(), "metadata": {"c": "d"}}
    assert await client.chat.completions.retrieve(chat.id) == changed
    deleted = await client.chat.completions.delete(chat.id)
    assert (deleted.id, deleted.object, deleted.deleted) == (chat.id, "chat.completion.deleted", True)
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.delete(chat.id)


async def test_its_messages_are_listed(make, client_of):
    system = await make()
    client = await client_of(system)
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": parts}]
    chat = await client.chat.completions.create(**{**ASKED, "messages": messages})
    listed = [message async for message in client.chat.completions.messages.list(chat.id, limit=1)]
    assert [(message.role, message.content) for message in listed] == [("system", "Be kind."), ("user", "one\ntwo")]
    assert [part.text for part in listed[1].content_parts] == ["one", "two"]
    assert len({message.id for message in listed}) == 2


async def test_what_is_asked_wrongly_is_refused(make, client_of):
    system = await make()
    client = await client_of(system)
    one = f"/{(await client.chat.completions.create(**ASKED)).id}"
    for path, status, code in (
        ("?limit=0", 400, "invalid_value"),
        ("?order=up", 400, "invalid_value"),
        ("?after=/", 400, "invalid_value"),
        (f"{one}/messages?order=up", 400, "invalid_value"),
        ("/chatcmpl-none", 404, "completion_not_found"),
        (f"/{'x' * 3000}", 404, "completion_not_found"),
        ("/input_tokens", 404, "completion_not_found"),
    ):
        got = await system.http.get(f"/v1/chat/completions{path}")
        assert (got.status_code, got.json()["error"]["code"]) == (status, code), path
    for body, code in (({"metadata": {"a": 1}}, "invalid_type"), ({"other": 1}, "invalid_type"), ([], "invalid_type")):
        got = await system.http.post(f"/v1/chat/completions{one}", json=body)
        assert (got.status_code, got.json()["error"]["code"]) == (400, code), body
    all_methods = {"DELETE", "GET", "HEAD", "POST"}
    for path, methods in ((one, all_methods), ("", {"GET", "HEAD", "POST"}), ("/input_tokens", {"POST"})):
        got = await system.http.put(f"/v1/chat/completions{path}")
        assert got.status_code == 405
        assert {*got.headers["allow"].split(", ")} == methods
