"""/v1/messages at a gateway: answers whole and streamed, tools, thoughts, stop reasons, errors, counts."""

import json

import pytest

from gateway.access.keys import digest_of_key, new_key
from tests.gateway.openapi.described import check, schema_of
from tests.gateway.test_chat_tools import folder_of, serve

__all__ = ["folder_of", "serve"]  # fixtures

PATH = "/v1/messages"
ASKED = [{"role": "user", "content": "How is it?"}]
WEATHER = {
    "name": "weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CLOCK = {"name": "clock", "input_schema": {"type": "object"}}
TOOLS = [WEATHER, CLOCK]
USES = [
    {"type": "tool_use", "name": "weather", "input": {"city": "Köln", "days": [1, 2]}},
    {"type": "tool_use", "name": "clock", "input": {}},
]
SAID = [{"type": "text", "text": "Let me see."}]
THOUGHT = [{"type": "thinking", "thinking": "Hm, 2 < 3.", "signature": ""}]


async def ask(system, *, http_status=200, headers=None, **body):
    response = await system.http.post(PATH, json={"messages": ASKED, "max_tokens": 300, **body}, headers=headers or {})
    assert response.status_code == http_status, response.text
    return response


async def ask_whole(system, **body):
    message = (await ask(system, **body)).json()
    check(message, schema_of(PATH))
    return message


def put_together(text):
    """What a client makes of a stream; asserts that its events come in the order that clients rely on."""
    events = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    first, *middle, delta, last = events
    assert (first["type"], delta["type"], last) == ("message_start", "message_delta", {"type": "message_stop"})
    message = first["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    is_open, parts = False, []
    for event in middle:
        assert event["index"] == len(message["content"]) - (event["type"] != "content_block_start")
        if event["type"] == "content_block_start":
            assert not is_open
            message["content"].append(event["content_block"])
            is_open, parts = True, []
        elif event["type"] == "content_block_delta":
            assert is_open
            change = event["delta"]
            block = message["content"][-1]
            key = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "input"}[change["type"]]
            if key == "input":
                parts.append(change["partial_json"])
                block["input"] = "".join(parts)
            else:
                block[key] += change[key]
        else:
            assert event["type"] == "content_block_stop"
            is_open = False
            if isinstance(message["content"][-1].get("input"), str):
                message["content"][-1]["input"] = json.loads(message["content"][-1]["input"])
    assert not is_open
    usage = {**message["usage"], **delta["usage"]}
    return {**message, **delta["delta"], "usage": usage}


def plain(message):
    """A message without what belongs to one request only."""
    content = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    return {**message, "id": "", "content": content}


@pytest.mark.parametrize("kind", ["hermes", "llama3", "mistral", "thinks", "thinks-at-once"])
async def test_answers_whole_and_streamed(serve, kind):
    system = await serve(kind)
    message = await ask_whole(system, tools=TOOLS)
    said = {"hermes": SAID, "llama3": [], "mistral": SAID}.get(kind, THOUGHT + SAID)
    assert plain(message)["content"] == said + USES
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert message["id"].startswith("msg_")
    ids = [block["id"] for block in message["content"] if block["type"] == "tool_use"]
    assert all(len(one) == 9 if kind == "mistral" else one.startswith("toolu_") for one in ids)
    streamed = put_together((await ask(system, tools=TOOLS, stream=True)).text)
    assert plain(streamed) == plain(message)


async def test_one_call_where_the_client_asks_for_one(serve):
    system = await serve("hermes")
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    for message in (
        await ask_whole(system, tools=TOOLS, tool_choice=choice),
        put_together((await ask(system, tools=TOOLS, tool_choice=choice, stream=True)).text),
    ):
        assert plain(message)["content"] == SAID + USES[:1]


async def test_a_conversation_with_calls_comes_back(serve):
    system = await serve("hermes")
    message = await ask_whole(system, tools=TOOLS)
    uses = [block["id"] for block in message["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": one, "content": "fine"} for one in uses]
    more = [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": results}]
    await ask_whole(system, tools=TOOLS, messages=[*ASKED, *more])
    counted = await system.http.post(f"{PATH}/count_tokens", json={"messages": [*ASKED, *more], "tools": TOOLS})
    prompt = system.workers["decode-0"].attempts[-1].spec.prompt_token_ids
    assert counted.json() == {"input_tokens": len(prompt)}
    check(counted.json(), schema_of(f"{PATH}/count_tokens"))


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("asked", "text", "reason", "stop"),
    [
        ({}, "One, two, three.", "end_turn", None),
        ({"max_tokens": 2}, None, "max_tokens", None),
        ({"stop_sequences": ["four", ", three"]}, "One, two", "stop_sequence", ", three"),
        ({"stop_sequences": ["four"]}, "One, two, three.", "end_turn", None),
        ({"stop_sequences": ["One"]}, "", "stop_sequence", "One"),
    ],
)
async def test_why_an_answer_ended(serve, is_streamed, asked, text, reason, stop):
    system = await serve("hermes", "One, two, three.")
    if is_streamed:
        message = put_together((await ask(system, stream=True, **asked)).text)
    else:
        message = await ask_whole(system, **asked)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop)
    (block,) = message["content"]
    if text is not None:
        assert block == {"type": "text", "text": text}


async def test_usage_counts_what_was_cached_apart(serve):
    system = await serve("hermes", "One.")
    message = await ask_whole(system)
    usage = message["usage"]
    prompt = system.workers["decode-0"].attempts[-1].spec.prompt_token_ids
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(prompt)
    assert usage["output_tokens"] > 1


async def test_a_last_message_of_the_assistant_is_continued(serve, tokenizer):
    system = await serve("hermes", " two.")
    await ask_whole(system, messages=[*ASKED, {"role": "assistant", "content": "One,"}])
    prompt = system.workers["decode-0"].attempts[-1].spec.prompt_token_ids
    assert tokenizer.decode(prompt, skip_special_tokens=False).endswith("<|assistant|>\nOne,")


FAILED = {
    "no bound": ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
    "bound": ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
    "schema": (
        {"tools": [{"name": "a", "input_schema": []}]},
        400,
        "invalid_request_error",
        "tools[0].input_schema",
    ),
    "name": ({"tools": [{"name": "a b", "input_schema": {}}]}, 400, "invalid_request_error", "tools[0].name"),
    "member": ({"mcp_servers": [{"url": "a"}]}, 400, "invalid_request_error", "mcp_servers"),
    "thinking": ({"thinking": {"type": "maybe"}}, 400, "invalid_request_error", "thinking.type"),
    "model": ({"model": "nope"}, 404, "not_found_error", "nope"),
    "format": ({"output_config": {"format": {"type": "text"}}}, 400, "invalid_request_error", "output_config.format"),
}


@pytest.mark.parametrize("row", FAILED, ids=FAILED)
async def test_errors_have_this_apis_shape(serve, row):
    body, http_status, kind, what = FAILED[row]
    system = await serve("hermes", "One.")
    answer = (await ask(system, http_status=http_status, **body)).json()
    check(answer, schema_of(PATH, http_status))
    assert (answer["type"], answer["error"]["type"]) == ("error", kind)
    assert what in answer["error"]["message"]


async def test_keys_are_taken_as_anthropics_clients_show_them(make_system, tmp_path):
    key = new_key()
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[key]]\nsha256 = "{digest_of_key(key)}"\ntenant = "acme"\n')
    system = await make_system(api_keys=keys)
    refused = (await ask(system, http_status=401, headers={"x-api-key": "wrong"})).json()
    assert (refused["type"], refused["error"]["type"]) == ("error", "authentication_error")
    for headers in ({"x-api-key": key}, {"authorization": f"Bearer {key}", "x-api-key": "is not looked at"}):
        await ask(system, http_status=503, headers=headers)
    assert (await system.http.get("/v1/models", headers={"x-api-key": key})).status_code == 200


async def test_what_is_not_kept_is_named(serve):
    system = await serve("thinks", "Well.")
    tools = [CLOCK, {"type": "web_search_20250305", "name": "web_search", "max_uses": 1}]
    answer = await ask(
        system,
        tools=tools,
        thinking={"type": "enabled", "budget_tokens": 1024},
        speed="fast",
        metadata={"user_id": "a"},
    )
    named = set(answer.headers["x-tandem-ignored"].split(","))
    assert named == {"thinking", "thinking.budget_tokens", "speed", "tools.web_search_20250305", "tools.max_uses"}
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
