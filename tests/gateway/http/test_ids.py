"""Every answer has an id, and that of a refusal is in its line of the log."""

import asyncio
import json
import logging
import re

import pytest

ID = re.compile("[0-9a-f]{24}")
COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/health", None, 200),
        ("GET", "/ready", None, 503),
        ("GET", "/metrics", None, 200),
        ("GET", "/v1/models", None, 200),
        ("GET", "/v1/models/nobody", None, 404),
        ("GET", "/dashboard", None, 200),
        ("GET", "/dashboard/requests?limit=0", None, 400),
        ("GET", "/nowhere", None, 404),
        ("DELETE", "/v1/completions", None, 405),
        ("POST", "/v1/completions", {"prompt": "a", "temperature": 99}, 400),
        ("POST", "/v1/completions", {"prompt": "a", "model": "nobody"}, 404),
        ("POST", "/v1/messages", {"messages": []}, 400),
        ("POST", "/v1/embeddings", {"input": "a"}, 400),
        ("POST", "/tokenize", {"prompt": "hello"}, 200),
    ],
)
async def test_every_answer_has_an_id(make_system, method, path, body, status):
    system = await make_system()
    drawn = await system.http.request(method, path, json=body)
    assert drawn.status_code == status
    assert ID.fullmatch(drawn.headers["x-request-id"])
    named = await system.http.request(method, path, json=body, headers={"x-request-id": "mine-1"})
    assert (named.status_code, named.headers.get_list("x-request-id")) == (status, ["mine-1"])


async def test_a_name_that_is_none_is_not_taken_over(make_system):
    system = await make_system()
    for path in ("/health", "/nowhere"):
        answer = await system.http.get(path, headers={"x-request-id": "no name"})
        assert ID.fullmatch(answer.headers["x-request-id"])
    refused = await system.http.post(COMPLETIONS, json={"prompt": "a"}, headers={"x-request-id": "no name"})
    assert refused.status_code == 400
    assert ID.fullmatch(refused.headers["x-request-id"])


async def test_what_is_no_http_is_told_an_id(make_system):
    system = await make_system()
    host, port = system.http.base_url.host, system.http.base_url.port
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"nonsense\r\n\r\n")
    head = (await reader.read(4096)).decode()
    writer.close()
    assert head.startswith("HTTP/1.1 400")
    assert ID.fullmatch(re.search("x-request-id: (.*)\r\n", head)[1])


@pytest.mark.parametrize(
    ("body", "field", "rule"),
    [
        ({"prompt": "a", "temperature": 99}, "temperature", "must be a number in [0, 2]"),
        ({"prompt": "a", "n": 10_000}, "n", "must be"),
        ({"prompt": "a", "max_tokens": 10_000_000}, "prompt", "prompt and answer have at most"),
        ({"prompt": [[10**9]]}, "prompt", "must be a token id"),
    ],
)
async def test_a_refusal_is_found_in_the_log_by_its_id(make_system, caplog, body, field, rule):
    system = await make_system()
    with caplog.at_level(logging.INFO):
        answer = await system.http.post(COMPLETIONS, json=body)
    assert answer.status_code == 400
    (line,) = [record for record in caplog.records if record.message == "request"]
    assert line.request_id == answer.headers["x-request-id"]
    assert (line.outcome, line.field) == ("refused", field)
    assert getattr(line, "rule", "").startswith(rule)
    listed = (await system.http.get("/dashboard/requests", params={"id": line.request_id})).json()["requests"]
    assert [row["field"] for row in listed] == [field]
    assert json.loads(answer.content)["error"]["param"] == field
