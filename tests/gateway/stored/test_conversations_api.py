"""The routes of conversations: what each answers to which tenant, and what is refused."""

import openai
import pytest

from gateway.stored.conversations_api import MAX_NEW_ITEMS
from tests.gateway.stored.test_responses_api import KEYS, key_file

__all__ = ["key_file"]  # a fixture

ITEM = {"role": "user", "content": "a"}


async def test_no_tenant_learns_of_anothers(make, client_of, key_file):
    system = await make(api_keys=key_file)
    alice, bob = [await client_of(system, key) for key in KEYS]
    hers = await alice.conversations.create(items=[ITEM])
    (item,) = (await alice.conversations.items.list(hers.id)).data
    for ask in (
        bob.conversations.retrieve(hers.id),
        bob.conversations.update(hers.id, metadata={}),
        bob.conversations.delete(hers.id),
        bob.conversations.items.list(hers.id),
        bob.conversations.items.create(hers.id, items=[ITEM]),
        bob.conversations.items.retrieve(item.id, conversation_id=hers.id),
        bob.conversations.items.delete(item.id, conversation_id=hers.id),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            await ask
        assert caught.value.code == "conversation_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        await bob.responses.create(model="tiny", input="hi", conversation=hers.id)
    assert caught.value.code == "conversation_not_found"
    assert len((await alice.conversations.items.list(hers.id)).data) == 1


async def test_one_is_no_response_and_no_chat(make, client_of):
    system = await make()
    client = await client_of(system)
    made = await client.conversations.create()
    for path in (f"responses/{made.id}", f"chat/completions/{made.id}"):
        for method in ("GET", "DELETE"):
            assert (await system.http.request(method, f"/v1/{path}")).status_code == 404
    response = await client.responses.create(model="tiny", input="hi")
    for method in ("GET", "DELETE"):
        assert (await system.http.request(method, f"/v1/conversations/{response.id}")).status_code == 404
    assert (await client.responses.retrieve(response.id)).id == response.id
    with pytest.raises(openai.BadRequestError):
        await client.responses.create(model="tiny", input="hi", conversation=response.id)
    with pytest.raises(openai.BadRequestError):
        await client.responses.create(model="tiny", input="hi", previous_response_id=made.id)
    assert (await client.conversations.retrieve(made.id)).id == made.id


async def test_items_come_in_pages_the_latest_first(make, client_of):
    system = await make()
    client = await client_of(system)
    made = await client.conversations.create(items=[{**ITEM, "content": str(n)} for n in range(5)])
    page = (await system.http.get(f"/v1/conversations/{made.id}/items", params={"limit": 2})).json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["4", "3"]
    assert page["has_more"]
    items = [item.content[0].text async for item in client.conversations.items.list(made.id, limit=2)]
    assert items == ["4", "3", "2", "1", "0"]


async def test_what_is_asked_wrongly_is_refused(make, client_of):
    system = await make()
    client = await client_of(system)
    made = f"/{(await client.conversations.create()).id}"
    many = [ITEM] * (MAX_NEW_ITEMS + 1)
    for path, body, field, code in (
        ("", {"items": many}, "items", "invalid_value"),
        ("", {"items": [5]}, "items[0]", "invalid_value"),
        ("", {"items": [{**ITEM, "role": "nobody"}]}, "items[0].role", "invalid_value"),
        ("", {"metadata": {"a": 1}}, "metadata", "invalid_type"),
        ("", {"metadata": {"a": "x" * 513}}, "metadata", "invalid_value"),
        ("", {"unknown": 1}, "unknown", "invalid_type"),
        (f"{made}/items", {}, "items", "invalid_type"),
        (f"{made}/items", {"items": []}, "items", "invalid_value"),
        (f"{made}/items", {"items": many}, "items", "invalid_value"),
        (made, {"metadata": "a"}, "metadata", "invalid_type"),
    ):
        got = await system.http.post(f"/v1/conversations{path}", json=body)
        error = got.json()["error"]
        assert (got.status_code, error["param"], error["code"]) == (400, field, code), (path, body, error)
    for path, status, code in (
        (f"{made}/items?order=up", 400, "invalid_value"),
        (f"{made}/items?limit=0", 400, "invalid_value"),
        ("/conv_none", 404, "conversation_not_found"),
        (f"/{'x' * 3000}", 404, "conversation_not_found"),
        (f"{made}/items/none", 404, "item_not_found"),
        ("", 405, "method_not_allowed"),
    ):
        got = await system.http.get(f"/v1/conversations{path}")
        assert (got.status_code, got.json()["error"]["code"]) == (status, code), path
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="tiny", input="hi", conversation=made[1:], previous_response_id="resp_1")
    assert caught.value.param == "conversation"


async def test_an_operator_may_keep_none(make, client_of):
    system = await make(stored_answer_s=0.0)
    client = await client_of(system)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.conversations.create()
    assert caught.value.code == "unsupported_endpoint"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="tiny", input="hi", conversation="conv_1")
    assert (caught.value.param, caught.value.code) == ("conversation", "unsupported_parameter")
    with pytest.raises(openai.NotFoundError):
        await client.conversations.retrieve("conv_1")
