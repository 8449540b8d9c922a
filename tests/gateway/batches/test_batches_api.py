"""The batches API: what is refused, what is made once, and how batches are listed."""

import asyncio
import json

import openai
import pytest

import gateway.batches.batches_api
import gateway.batches.runner
from services.runtime.errors import StoreUnavailable
from tests.gateway.batches.clients import (
    client_of,
    created,
    jsonl,
    row,
)
from tests.waiting import HANG_LIMIT_S

WRONG_BATCHES = [
    ({"input_file_id": "file-none"}, "input_file_id"),
    ({"input_file_id": "../x"}, "input_file_id"),
    ({"endpoint": "/v1/rerank"}, "endpoint"),
    ({"completion_window": "1h"}, "completion_window"),
    ({"metadata": {"a" * 65: "x"}}, "metadata"),
    ({"metadata": {"a": "x" * 513}}, "metadata"),
    ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, "output_expires_after.seconds"),
    ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after.anchor"),
    ({"unknown": 1}, "unknown"),
    ({"endpoint": None}, "endpoint"),
]


async def test_a_batch_that_is_asked_for_wrongly_is_not_made(make):
    system = await make(has_worker=False)
    async with client_of(system) as client:
        file = await client.files.create(file=("rows.jsonl", jsonl([row(0)])), purpose="batch")
        right = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
        for changes, param in WRONG_BATCHES:
            response = await system.http.post("/v1/batches", json=right | changes)
            assert response.status_code == (404 if "input_file_id" in changes else 400), response.text
            assert response.json()["error"]["param"] == param, response.text
        twice = json.dumps(right).replace("{", '{"endpoint": "/v1/responses", ').encode()
        for body, status, code in (
            (b"{", 400, "invalid_json"),
            (b"[" * 60_000, 400, "invalid_type"),
            (b"[]", 400, "invalid_type"),
            (b"\xff", 400, "invalid_json"),
            (json.dumps(right | {"metadata": {"a": "\ud800"}}).encode(), 400, "invalid_json"),
            (twice, 400, "duplicate_key"),
            (b"x" * 65_537, 413, "request_too_large"),
        ):
            response = await system.http.post("/v1/batches", content=body, headers={"content-type": "application/json"})
            assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        assert (await client.batches.list()).data == []


async def test_a_body_that_does_not_come_is_not_waited_for(make, monkeypatch):
    monkeypatch.setattr(gateway.batches.batches_api, "MAX_BODY_READ_S", 0.2)
    system = await make(has_worker=False)
    for path in ("/v1/batches", "/v1/batches/batch_x/cancel"):
        for num_bytes, status in ((10, b" 408 "), (65_537, b" 413 "), (10**12, b" 413 ")):
            reader, writer = await asyncio.open_connection("127.0.0.1", system.gateway.http_port)
            head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}content-length: {num_bytes}\r\n\r\n".encode())
            assert status in await asyncio.wait_for(reader.readline(), HANG_LIMIT_S)
            writer.close()


async def test_a_batch_is_made_once_where_redis_answers_too_late(make, monkeypatch):
    system = await make(has_worker=False, batch_rows=0)
    store = system.gateway.batches.store
    create, times = store.create, []

    async def late(*args, **kwargs):
        times.append(await create(*args, **kwargs))
        if len(times) == 1:
            raise StoreUnavailable("Redis did not answer in time")
        return times[-1]

    monkeypatch.setattr(store, "create", late)
    async with client_of(system) as client:
        batch = await created(client, [row(0)])
        assert [one.id for one in times] == [batch.id, batch.id]
        assert [one.id for one in (await client.batches.list()).data] == [batch.id]


async def test_batches_are_listed_the_newest_first_and_in_pages(make, monkeypatch):
    system = await make(has_worker=False)
    async with client_of(system) as client:
        ids = [(await created(client, [row(0)])).id for _ in range(5)]
        assert [batch.id async for batch in await client.batches.list(limit=2)] == ids[::-1]
        page = await client.batches.list(limit=2, after=ids[3])
        assert [batch.id for batch in page.data] == [ids[2], ids[1]]
        assert page.has_more
        assert not (await client.batches.list(limit=2, after=ids[2])).has_more
        assert len((await client.batches.list(limit=10_000)).data) == 5
        monkeypatch.setattr(gateway.batches.batches_api, "MAX_LIST_LIMIT", 4)
        assert len((await client.batches.list(limit=10_000)).data) == 4
        for query in ("limit=0", "limit=x", "after=*"):
            assert (await system.http.get(f"/v1/batches?{query}")).status_code == 400
        with pytest.raises(openai.NotFoundError):
            await client.batches.retrieve("batch_none")
