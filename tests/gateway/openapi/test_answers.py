"""What is answered beside OpenAI's texts has the members of its type, and no other."""

import json
import re

from gateway.openapi.operations import OPERATIONS
from tests.gateway.openapi.described import DOCUMENT, check, schema_of


async def test_what_operators_and_probes_read_keeps_to_the_document(system):
    for operation in OPERATIONS:
        is_one_of_many = "{" in operation.path and operation.name != "showModel"
        if operation.method == "get" and operation.answer is not None and not is_one_of_many:
            if operation.name == "watchDashboard":
                continue  # which has no end
            response = await system.http.get(operation.path.replace("{name}", "tiny"))
            assert response.status_code == 200
            content = DOCUMENT["paths"][operation.path]["get"]["responses"]["200"]["content"]
            (media_type, described) = next(iter(content.items()))
            assert response.headers["content-type"] == media_type
            if media_type == "application/json":
                check(response.json(), described["schema"])
    await system.workers["decode-0"].stop()
    del system.workers["decode-0"]
    await system.until(lambda: not system.gateway.is_ready())
    check((await system.http.get("/ready")).json(), schema_of("/ready", 503, method="get"))


async def test_files_and_batches_keep_to_the_document(system):
    row = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "tiny", "prompt": "a"}}
    form = {"files": {"file": ("rows.jsonl", json.dumps(row))}, "data": {"purpose": "batch"}}
    file = (await system.http.post("/v1/files", **form)).json()
    check(file, schema_of("/v1/files"))
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = (await system.http.post("/v1/batches", json=asked)).json()
    check(batch, schema_of("/v1/batches"))
    for path, name in (("/v1/files/{file_id}", file["id"]), ("/v1/batches/{batch_id}", batch["id"])):
        shown = await system.http.get(re.sub("{.*}", name, path))
        check(shown.json(), schema_of(path, method="get"))
    content = await system.http.get(f"/v1/files/{file['id']}/content")
    assert content.headers["content-type"] == "application/octet-stream"
    for path in ("/v1/files", "/v1/batches"):
        page = (await system.http.get(path, params={"limit": 1})).json()
        assert page["data"]
        check(page, schema_of(path, method="get"))
    deleted = await system.http.delete(f"/v1/files/{file['id']}")
    check(deleted.json(), schema_of("/v1/files/{file_id}", method="delete"))
    missing = await system.http.get("/v1/batches/nobody")
    check(missing.json(), schema_of("/v1/batches/{batch_id}", 404, method="get"))


async def test_conversations_and_stored_chats_keep_to_the_document(system):
    one, chat = "/v1/conversations/{conversation_id}", "/v1/chat/completions/{completion_id}"
    items = {"items": [{"role": "user", "content": "a"}]}
    asked = {"messages": [{"role": "user", "content": "a"}], "store": True}
    made = (await system.http.post("/v1/conversations", json=items)).json()
    check(made, schema_of("/v1/conversations"))
    kept = (await system.http.post("/v1/chat/completions", json=asked)).json()
    page = (await system.http.get(f"/v1/conversations/{made['id']}/items")).json()
    names = {"conversation_id": made["id"], "completion_id": kept["id"], "item_id": page["data"][0]["id"]}
    metadata = {"metadata": {"a": "b"}}
    for method, path, body in (
        ("get", one, None),
        ("post", one, metadata),
        ("get", f"{one}/items", None),
        ("post", f"{one}/items", items),
        ("get", f"{one}/items/{{item_id}}", None),
        ("delete", f"{one}/items/{{item_id}}", None),
        ("delete", one, None),
        ("get", "/v1/chat/completions", None),
        ("get", chat, None),
        ("post", chat, metadata),
        ("get", f"{chat}/messages", None),
        ("delete", chat, None),
    ):
        for status in (200, 404):
            filled = path.format(**(names if status == 200 else {**dict.fromkeys(names, "none")}))
            if filled == "/v1/chat/completions" and status == 404:
                continue
            got = await system.http.request(method, filled, json=body)
            assert got.status_code == status, (method, filled, got.text)
            check(got.json(), schema_of(path, status, method=method))
