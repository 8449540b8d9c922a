"""The routes of stored responses: what each answers to which tenant, and what is refused."""

import openai
import pytest

from gateway.access.keys import ApiKey, digest_of_key, toml_entry
from tests.gateway.test_chat_tools import folder_of

__all__ = ["folder_of"]  # a fixture

KEYS = {"alice-key": "alice", "bob-key": "bob"}


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text("".join(toml_entry(ApiKey(digest_of_key(key), tenant)) for key, tenant in KEYS.items()))
    return path


async def test_no_tenant_learns_of_anothers_response(make, client_of, key_file, talker):
    await talker.allow(3)
    system = await make(api_keys=key_file)
    alice, bob = [await client_of(system, key) for key in KEYS]
    response = await alice.responses.create(model="tiny", input="hi", background=True)
    for ask in (
        bob.responses.retrieve(response.id),
        bob.responses.cancel(response.id),
        bob.responses.delete(response.id),
        bob.responses.input_items.list(response.id),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            await ask
        assert caught.value.code == "response_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        await bob.responses.create(model="tiny", input="hi", previous_response_id=response.id)
    assert caught.value.code == "previous_response_not_found"
    # Each tenant has names of its own.
    await talker.allow(100)
    named = {"X-Request-Id": "same"}
    hers = await alice.responses.create(model="tiny", input="of alice", extra_headers=named)
    his = await bob.responses.create(model="tiny", input="of bob", extra_headers=named)
    assert hers.id == his.id
    for client, text in ((alice, "of alice"), (bob, "of bob")):
        (item,) = (await client.responses.input_items.list(hers.id)).data
        assert item.content[0].text == text
    assert (await alice.responses.cancel(response.id)).status in ("cancelled", "completed")
    async with openai.AsyncOpenAI(base_url=f"{system.base_url}/v1", api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.responses.retrieve(response.id)


async def test_the_input_is_listed_in_pages(make, client_of, folder_of):
    system = await make(model=folder_of("hermes")[0])
    client = await client_of(system)
    first = await client.responses.create(model="tiny", input="one")
    asked = [
        {"role": "user", "content": "two", "id": "msg_mine"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "said"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "done"},
    ]
    second = await client.responses.create(model="tiny", input=asked, previous_response_id=first.id)
    items = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=2)]
    assert [item.type for item in items] == ["message"] * 4 + ["function_call", "function_call_output"]
    assert items[1].to_dict() == first.output[0].to_dict()
    assert items[2].id == "msg_mine"
    assert len({item.id for item in items}) == 6
    latest = (await client.responses.input_items.list(second.id, limit=1)).data
    assert [item.id for item in latest] == [items[-1].id]
    page = (await system.http.get(f"/v1/responses/{second.id}/input_items?order=asc&limit=4")).json()
    assert (page["first_id"], page["last_id"], page["has_more"]) == (items[0].id, items[3].id, True)


async def test_what_is_asked_wrongly_is_refused(make, client_of):
    system = await make()
    client = await client_of(system)
    response = await client.responses.create(model="tiny", input="hi")
    running = await client.responses.create(model="tiny", input="hi", background=True)
    for path, status, code in (
        (f"/{response.id}?stream=true", 400, "invalid_value"),
        (f"/{running.id}?stream=true", 400, "invalid_value"),
        (f"/{response.id}?stream=yes", 400, "invalid_value"),
        (f"/{response.id}?starting_after=1", 400, "invalid_value"),
        (f"/{response.id}?starting_after=-1", 400, "invalid_value"),
        (f"/{response.id}/input_items?limit=0", 400, "invalid_value"),
        (f"/{response.id}/input_items?order=up", 400, "invalid_value"),
        (f"/{response.id}/input_items?after=/", 400, "invalid_value"),
        ("/resp_none", 404, "response_not_found"),
        ("/resp_none/input_items", 404, "response_not_found"),
        (f"/{'x' * 3000}", 404, "response_not_found"),
        ("/%00", 404, "response_not_found"),
        (f"/{response.id}/other", 404, "not_found"),
    ):
        got = await system.http.get(f"/v1/responses{path}")
        assert (got.status_code, got.json()["error"]["code"]) == (status, code), path
    got = await system.http.post(f"/v1/responses/{response.id}/cancel")
    assert (got.status_code, got.json()["error"]["code"]) == (400, "response_not_background")
    assert (await system.http.post(f"/v1/responses/{response.id}")).status_code == 405


async def test_a_deleted_response_is_gone(make, client_of):
    system = await make()
    client = await client_of(system)
    response = await client.responses.create(model="tiny", input="hi")
    got = await system.http.delete(f"/v1/responses/{response.id}")
    assert got.json() == {"id": response.id, "object": "response", "deleted": True}
    for again in (client.responses.delete(response.id), client.responses.retrieve(response.id)):
        with pytest.raises(openai.NotFoundError):
            await again
