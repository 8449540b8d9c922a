"""/v1/responses: answers whole and streamed as the official client reads them, streams that are resumed, refusals."""

import asyncio
import json

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from protos import inference_pb2, worker_pb2
from services.runtime.errors import InvalidRequest
from tests.gateway.test_chat_tools import ANSWERS, ARGUMENTS, WEATHER, folder_of, serve

__all__ = ["folder_of", "serve"]  # fixtures

EVENT = pydantic.TypeAdapter(ResponseStreamEvent)
ASKED = "How is it?"
TOOLS = [{"type": "function", **WEATHER["function"]}, {"type": "function", "name": "clock"}]
LOGPROBS = "message.output_text.logprobs"
ENDS = {"response.completed", "response.incomplete"}


async def ask(system, headers=None, *, http_status=200, **body):
    response = await system.http.post("/v1/responses", json={"input": ASKED, **body}, headers=headers)
    assert response.status_code == http_status, response.text
    return response


async def ask_whole(system, headers=None, **body):
    """The response, judged by the official types."""
    text = (await ask(system, headers, **body)).text
    Response.model_validate_json(text, strict=True)
    return json.loads(text)


def events_of(response):
    """(event, id) of each event, each judged by the official types; the id is empty where the event has none."""
    events = []
    for block in response.text.split("\n\n")[:-1]:
        if block.startswith(":"):
            continue  # a comment, which keeps a slow stream alive
        name, data, *event_id = block.split("\n")
        EVENT.validate_json(data.removeprefix("data: "), strict=True)
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append((event, event_id[0].removeprefix("id: ") if event_id else ""))
    assert response.text.endswith("\n\n") or not events
    return events


async def ask_streamed(system, headers=None, **body):
    return events_of(await ask(system, headers, stream=True, **body))


def put_together(events):
    """What a client makes of a stream. Asserts that it is one: numbers, places, and all that is opened closes."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, in_progress, *middle, last = events
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"] == in_progress["response"]
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    output, text, is_part_open = [], "", False
    for event in middle:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(output)
            assert event["item"]["status"] == "in_progress"
            assert event["item"].get("content", []) == []
            output.append(event["item"])
            text = event["item"].get("arguments", "")
            assert text == ""
            continue
        item = output[-1]
        assert event["output_index"] == len(output) - 1
        assert event.get("item_id", item["id"]) == item["id"]
        if kind == "output_item.done":
            assert not is_part_open
            final = {**event["item"], "status": item["status"]}
            parts = final.pop("content", [])
            assert final | ({"content": []} if "content" in item else {}) == item | (
                {"arguments": text} if "arguments" in item else {}
            )
            assert [part["text"] for part in parts] == ([text] if "content" in item else [])
            output[-1] = event["item"]
        elif kind == "content_part.added":
            assert event["part"]["text"] == ""
            is_part_open = True
        elif kind == "content_part.done":
            assert event["part"]["text"] == text
            is_part_open = False
        elif kind.endswith(".delta"):
            assert event["delta"]
            assert is_part_open == (item["type"] != "function_call")
            text += event["delta"]
        else:
            assert kind.endswith(".done")
            assert event["arguments" if item["type"] == "function_call" else "text"] == text
    assert last["type"] == f"response.{last['response']['status']}"
    assert last["type"] in ENDS
    assert last["response"]["output"] == output
    return last["response"]


def without_names(response):
    """A response without what belongs to one request only."""
    text = json.dumps({**response, "created_at": 0})
    for name in [
        response["id"],
        *(item[key] for item in response["output"] for key in ("id", "call_id") if key in item),
    ]:
        text = text.replace(json.dumps(name), '""')
    return json.loads(text)


@pytest.fixture
async def system(make_system, worker_type, pair_type, tokenizer):
    system = await make_system()
    pair = pair_type([*tokenizer.encode("hello world, naïve 🙂 café", add_special_tokens=False).ids, 1])
    await system.add(worker_type("decode", "decode-0", pair.decode))
    return system


@pytest.fixture
async def client(system):
    async with openai.AsyncOpenAI(base_url=f"{system.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


# --- answers ---------------------------------------------------------------------------------------------------------


async def test_whole_response(system):
    response = await ask_whole(system, instructions="Be kind.", metadata={"a": "b"}, user="me", max_output_tokens=100)
    num_prompt = len(system.workers["decode-0"].attempts[0].spec.prompt_token_ids)
    num_answer = response["usage"]["output_tokens"]
    assert response["usage"] == {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": num_answer,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + num_answer,
    }
    (item,) = response["output"]
    assert item == {
        "id": item["id"],
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "hello world, naïve 🙂 café", "annotations": [], "logprobs": []}],
    }
    assert (response["id"][:5], item["id"][:4]) == ("resp_", "msg_")
    given = {"instructions": "Be kind.", "metadata": {"a": "b"}, "user": "me", "max_output_tokens": 100}
    assert given.items() <= response.items()
    expected = {"object": "response", "status": "completed", "error": None, "incomplete_details": None, "model": "tiny"}
    assert expected.items() <= response.items()


@pytest.mark.parametrize("group", [1, 3, 1000])
async def test_streamed_text_is_that_of_the_whole_response(make_system, worker_type, pair_type, tokenizer, group):
    system = await make_system()
    token_ids = tokenizer.encode("hello world, naïve 🙂 café", add_special_tokens=False).ids
    pair = pair_type([*token_ids, 1], group=group, step_s=0)
    await system.add(worker_type("decode", "decode-0", pair.decode))
    whole = await ask_whole(system)
    for headers in (None, {"x-request-id": "mine"}):
        streamed = put_together([event for event, _ in await ask_streamed(system, headers)])
        assert without_names(streamed) == without_names(whole)


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("group", [1, 1000])
async def test_streamed_items_are_those_of_the_whole_response(serve, kind, group):
    system = await serve(kind, group=group)
    whole = await ask_whole(system, tools=TOOLS)
    kinds = ["reasoning"] * kind.startswith("thinks") + ["message"] * (kind != "llama3") + ["function_call"] * 2
    assert [item["type"] for item in whole["output"]] == kinds
    calls = [item for item in whole["output"] if item["type"] == "function_call"]
    assert [(call["name"], call["arguments"]) for call in calls] == [("weather", ARGUMENTS), ("clock", "{}")]
    assert {item["status"] for item in whole["output"]} == {"completed"}
    assert len({call["call_id"] for call in calls} | {call["id"] for call in calls}) == 4
    for headers in (None, {"idempotency-key": "k"}):
        streamed = put_together([event for event, _ in await ask_streamed(system, headers, tools=TOOLS)])
        assert without_names(streamed) == without_names(whole)


@pytest.mark.parametrize("kind", ["thinks", "thinks-at-once"])
async def test_reasoning_is_an_item_and_its_tokens_are_counted(serve, folder_of, kind):
    system = await serve(kind)
    response = await ask_whole(system)
    reasoning = response["output"][0]
    assert reasoning["type"] == "reasoning"
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm, 2 < 3."}]
    num_tokens = response["usage"]["output_tokens_details"]["reasoning_tokens"]
    _, tokenizer = folder_of(kind)
    token_ids = tokenizer.encode(ANSWERS[kind], add_special_tokens=False).ids
    assert tokenizer.decode(token_ids[:num_tokens]).rstrip() == ANSWERS[kind].partition("\n\n")[0]


@pytest.mark.parametrize("said", ["\nYes.", "<b>Yes.", "<thin"])
async def test_log_probabilities_of_what_could_have_been_a_thought(serve, said):
    system = await serve("thinks", said)
    messages = [{"role": "user", "content": ASKED}]
    chat = (await system.http.post("/v1/chat/completions", json={"messages": messages, "logprobs": True})).json()
    response = await ask_whole(system, include=[LOGPROBS])
    part = response["output"][-1]["content"][0]
    assert part["text"] == said
    assert part["logprobs"] == chat["choices"][0]["logprobs"]["content"]


@pytest.mark.parametrize("kind", ["hermes", "thinks"])
@pytest.mark.parametrize("asked", [{"include": [LOGPROBS]}, {"top_logprobs": 1}], ids=["include", "top"])
async def test_log_probabilities_are_of_what_is_said(serve, kind, asked):
    system = await serve(kind, "<think>\nHm.\n</think>\n\nYes, naïve." if kind == "thinks" else "Yes, naïve 🙂.")
    messages = [{"role": "user", "content": ASKED}]
    more = {"messages": messages, "logprobs": True, "top_logprobs": asked.get("top_logprobs")}
    chat = (await system.http.post("/v1/chat/completions", json=more)).json()
    expected = chat["choices"][0]["logprobs"]["content"]
    whole = await ask_whole(system, **asked)
    entries = whole["output"][-1]["content"][0]["logprobs"]
    num_reasoning = whole["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert bool(num_reasoning) == (kind == "thinks")
    assert entries == expected[num_reasoning:]
    assert whole["top_logprobs"] == asked.get("top_logprobs", 0) == len(entries[0]["top_logprobs"])
    headers = {"idempotency-key": "k"}
    events = await ask_streamed(system, headers, **asked)
    assert without_names(put_together([event for event, _ in events])) == without_names(whole)
    deltas = [event for event, _ in events if event["type"] == "response.output_text.delta"]
    shown = [entry for delta in deltas for entry in delta["logprobs"]]
    assert shown == entries[: len(shown)]
    assert len(entries) - len(shown) <= 1  # the end of the sequence has no text
    for count, (_, event_id) in enumerate(events, 1):
        rest = await ask_streamed(system, headers | {"last-event-id": event_id}, **asked)
        assert (
            put_together([event for event, _ in [*events[:count], *rest]])["output"]
            == events[-1][0]["response"]["output"]
        )


async def test_answer_that_was_cut_is_incomplete(system):
    response = await ask_whole(system, max_output_tokens=3)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"
    assert response["usage"]["output_tokens"] == 3
    streamed = put_together([event for event, _ in await ask_streamed(system, max_output_tokens=3)])
    assert without_names(streamed) == without_names(response)


async def test_call_that_was_cut_is_incomplete(serve):
    system = await serve("hermes", ANSWERS["hermes"].partition('"Köln')[0], ends=False)
    for response in (
        await ask_whole(system, tools=TOOLS),
        put_together([event for event, _ in await ask_streamed(system, tools=TOOLS)]),
    ):
        message, call = response["output"]
        assert (message["status"], call["status"], call["arguments"]) == ("completed", "incomplete", '{"city": ')


async def test_answer_without_text_is_an_empty_message(make_system, worker_type, pair_type):
    system = await make_system()
    await system.add(worker_type("decode", "decode-0", pair_type([1]).decode))
    named = {"x-request-id": "mine"}
    streams = [[event for event, _ in await ask_streamed(system, headers)] for headers in (None, named)]
    for response in (await ask_whole(system), *map(put_together, streams)):
        (item,) = response["output"]
        assert (response["status"], item["content"][0]["text"]) == ("completed", "")


async def test_one_call_at_a_time(serve):
    system = await serve("hermes")
    response = await ask_whole(system, tools=TOOLS, parallel_tool_calls=False)
    assert [item["type"] for item in response["output"]] == ["message", "function_call"]
    assert response["parallel_tool_calls"] is False
    streamed = put_together([event for event, _ in await ask_streamed(system, tools=TOOLS, parallel_tool_calls=False)])
    assert without_names(streamed) == without_names(response)


async def test_ids_are_the_same_for_every_reader(serve):
    system = await serve("hermes")
    bodies = [(await ask(system, {"idempotency-key": "k"}, tools=TOOLS)).json() for _ in range(2)]
    assert bodies[0] == bodies[1]
    assert len(system.workers["decode-0"].attempts) == 1


async def test_headers_are_those_of_every_answer(system):
    response = await ask(system, {"x-request-id": "mine"}, some_new_field=1)
    assert response.headers["x-request-id"] == "mine"
    assert response.headers["x-tandem-model"] == "tiny"
    assert response.headers["x-tandem-ignored"] == "some_new_field"
    assert response.json()["id"] == "resp_mine"


# --- the official client ---------------------------------------------------------------------------------------------


async def test_official_client_creates_and_streams(client):
    response = await client.responses.create(model="tiny", input=ASKED, store=True, temperature=0.5, top_p=0.9)
    assert response.output_text == "hello world, naïve 🙂 café"
    assert (response.temperature, response.top_p) == (0.5, 0.9)
    assert response.model_extra["store"] is True
    stream = await client.responses.create(model="tiny", input=ASKED, stream=True)
    deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == response.output_text
    async with client.responses.stream(model="tiny", input=ASKED) as stream:
        snapshots = [event.snapshot async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert snapshots[-1] == final.output_text == response.output_text


async def test_official_client_without_asyncio(system):
    def read():
        with openai.OpenAI(base_url=f"{system.base_url}/v1", api_key="none", max_retries=0) as client:
            raw = client.responses.with_raw_response.create(model="tiny", input=ASKED)
            with client.responses.stream(model="tiny", input=ASKED) as stream:
                return raw.parse(), stream.get_final_response()

    whole, streamed = await asyncio.to_thread(read)
    assert whole.output_text == streamed.output_text == "hello world, naïve 🙂 café"


class Place(pydantic.BaseModel):
    city: str
    days: list[int]


async def test_official_client_parses_an_answer_with_a_schema(make_system, worker_type, pair_type, tokenizer):
    system = await make_system()
    token_ids = tokenizer.encode('{"city": "Köln", "days": [1]}', add_special_tokens=False).ids
    await system.add(worker_type("decode", "decode-0", pair_type([*token_ids, 1]).decode))
    async with openai.AsyncOpenAI(base_url=f"{system.base_url}/v1", api_key="none", max_retries=0) as client:
        response = await client.responses.parse(model="tiny", input=ASKED, text_format=Place)
        async with client.responses.stream(model="tiny", input=ASKED, text_format=Place) as stream:
            final = await stream.get_final_response()
    assert response.output_parsed == final.output_parsed == Place(city="Köln", days=[1])
    asked = [json.loads(each.spec.json_schema) for each in system.workers["decode-0"].attempts]
    assert asked[0] == asked[1]
    assert asked[0]["required"] == ["city", "days"]
    assert response.text.format.name == "Place"
    whole = await ask_whole(system, text={"format": {"type": "json_object"}})
    assert whole["text"]["format"] == {"type": "json_object"}
    assert json.loads(system.workers["decode-0"].attempts[-1].spec.json_schema)["type"] == "object"


async def test_official_client_calls_and_answers(serve):
    system = await serve("thinks")
    async with openai.AsyncOpenAI(base_url=f"{system.base_url}/v1", api_key="none", max_retries=0) as client:
        async with client.responses.stream(model="tiny", input=ASKED, tools=TOOLS) as stream:
            final = await stream.get_final_response()
        calls = [item for item in final.output if item.type == "function_call"]
        assert calls[0].parsed_arguments == json.loads(ARGUMENTS)
        outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "fine"} for call in calls]
        items = [item.to_dict() for item in final.output]
        asked = [{"role": "user", "content": ASKED}, *items, *outputs]
        await client.responses.create(model="tiny", tools=TOOLS, input=asked)
    messages = [
        {"role": "user", "content": ASKED},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Hm, 2 < 3.",
            "tool_calls": [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ],
        },
        *({"role": "tool", "tool_call_id": call.call_id, "content": "fine"} for call in calls),
    ]
    tools = [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in TOOLS]
    tokenized = (await system.http.post("/tokenize", json={"messages": messages, "tools": tools})).json()
    assert list(system.workers["decode-0"].attempts[-1].spec.prompt_token_ids) == tokenized["tokens"]


async def test_official_client_counts_the_tokens_of_an_input(client, system):
    counted = await client.responses.input_tokens.count(model="tiny", input=ASKED, instructions="Be kind.")
    response = await client.responses.create(model="tiny", input=ASKED, instructions="Be kind.")
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", response.usage.input_tokens)
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.input_tokens.count(model="tiny", input=[{"type": "item_reference", "id": "a"}])
    assert refused.value.param == "input[0].type"
    assert len(system.workers["decode-0"].attempts) == 1


def call_item(call_id, **more):
    return {"type": "function_call", "call_id": call_id, "name": "clock", "arguments": "{}", **more}


USER = {"role": "user", "content": "a"}


NEUTRAL = {
    "background": False,
    "context_management": None,
    "conversation": None,
    "include": ["reasoning.encrypted_content"],
    "max_tool_calls": 3,
    "n": 1,
    "previous_response_id": None,
    "prompt": None,
    "reasoning": {"effort": None, "summary": "auto"},
    "service_tier": "auto",
    "store": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "top_logprobs": 0,
    "truncation": "disabled",
}


async def test_what_asks_for_nothing_passes(system):
    response = await ask(system, **NEUTRAL)
    assert "x-tandem-ignored" not in response.headers
    body = response.json()
    expected = {"store": True, "service_tier": "default", "background": False, "max_tool_calls": 3}
    assert expected.items() <= body.items()


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


async def test_what_nobody_reads_is_not_given_back(serve):
    """However deep the part is that nobody reads, it is not given back."""
    system = await serve("hermes", "ok")
    response = await ask_whole(
        system,
        tools=[{**TOOLS[1], "more": nested(500)}],
        tool_choice="auto",
        text={"format": {"type": "text", "more": nested(500)}, "more": nested(500)},
        more=nested(500),
    )
    assert (response["tools"], response["text"]) == ([TOOLS[1]], {"format": {"type": "text"}})


# --- refusals --------------------------------------------------------------------------------------------------------


REFUSED_LATER = {
    "max_output_tokens": ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0"),
    "too-many-tokens": ({"max_output_tokens": 10_000}, "input", "lower max_output_tokens"),
    "temperature": ({"temperature": 3}, "temperature", "temperature is 3"),
    "min_tokens": ({"max_output_tokens": 2, "min_tokens": 3}, "min_tokens", "at most max_output_tokens"),
    "input-long": ({"input": "x" * 100_000}, "input", "input has 100000 characters"),
    "items-many": ({"input": [USER] * 2049}, "input", "input has 2049 entries"),
    "schema": (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}},
        "text.format",
        "text.format",
    ),
    "stop-ids-and-schema": (
        {"stop_token_ids": [5], "text": {"format": {"type": "json_object"}}},
        "stop_token_ids",
        "this text.format",
    ),
    "tools": ({"tools": TOOLS}, "tools", "chat template"),
    "calls": ({"input": [USER, call_item("1")]}, "input", "chat template"),
}


async def test_refusals_of_a_chat_are_told_in_the_words_of_this_api(system):
    for name, (body, field, words) in REFUSED_LATER.items():
        error = (await ask(system, http_status=400, **body)).json()["error"]
        assert error["param"] == field, name
        assert words in error["message"], name
        assert "messages" not in error["message"], name
    assert not system.workers["decode-0"].attempts


# --- streams that break off, and are resumed -------------------------------------------------------------------------


def continued(events):
    """What a client has that put these together: everything that is text, and the events without it."""
    texts, others = {}, []
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
        else:
            others.append({**event, "sequence_number": None})
    return texts, others


@pytest.mark.parametrize(
    ("kind", "stop"), [("thinks", None), ("mistral", None), ("hermes", ["}}\n</tool_call>\n<tool", "zzz", "<|x"])]
)
async def test_stream_cut_after_any_event_goes_on_where_it_was(serve, kind, stop):
    system = await serve(kind)
    headers = {"idempotency-key": "k"}
    more = {"tools": TOOLS} | ({"stop": stop} if stop else {})
    events = await ask_streamed(system, headers, **more)
    whole = continued([event for event, _ in events])
    assert len({event_id for _, event_id in events}) == len(events)
    for count, (_, event_id) in enumerate(events, 1):
        rest = await ask_streamed(system, headers | {"last-event-id": event_id}, **more)
        numbers = [event["sequence_number"] for event, _ in rest]
        assert numbers == list(range(count, count + len(rest)))
        assert continued([event for event, _ in [*events[:count], *rest]]) == whole
    assert len(system.workers["decode-0"].attempts) == 1


async def test_stream_that_was_divided_otherwise_goes_on_in_the_middle_of_a_delta(serve):
    """The journal gives a late reader many tokens at once, and a client may have a part of these."""
    system = await serve("thinks", group=1000)
    headers = {"idempotency-key": "k"}
    events = await ask_streamed(system, headers, tools=TOOLS)
    whole = continued([event for event, _ in events])
    place = 0
    for event, _ in events:
        size = len(event["delta"]) if event["type"].endswith(".delta") else 1
        for shown in range(1, size):
            has = {**event, "delta": event["delta"][:shown]}
            count = event["sequence_number"]
            after = {"last-event-id": f"{events[0][1].partition('/')[0]}/0;{count}.{place - 1 + shown}"}
            rest = await ask_streamed(system, headers | after, tools=TOOLS)
            assert continued([*(each for each, _ in events[:count]), has, *(each for each, _ in rest)]) == whole
        place += size
    assert place > len(events)


async def test_another_gateway_goes_on_where_the_first_was(serve, make_system, folder_of):
    first = await serve("thinks")
    headers = {"idempotency-key": "k"}
    events = await ask_streamed(first, headers, tools=TOOLS)
    await first.flush_journals()
    second = await make_system(model=folder_of("thinks")[0])
    for system in (first, second):
        system.gateway._store._timeout_s = 2.0  # a reader that Redis answers too late begins anew
    for count in (1, 2, 9, len(events) // 2, len(events) - 3, len(events) - 1):
        rest = await ask_streamed(second, headers | {"last-event-id": events[count - 1][1]}, tools=TOOLS)
        response = put_together([event for event, _ in [*events[:count], *rest]])
        assert response == events[-1][0]["response"]
    assert len(first.workers["decode-0"].attempts) == 1


@pytest.mark.parametrize(
    "event_id", ["mine/3", "mine/3;", "mine/3;1", "mine/3;1.x", "mine/3;01.1", "mine/zzz;1.1", "other/3;1.1", ";1.1"]
)
async def test_id_of_no_event_is_refused(system, event_id):
    headers = {"x-request-id": "mine"}
    await ask_streamed(system, headers)
    error = (await ask(system, headers | {"last-event-id": event_id}, stream=True, http_status=400)).json()["error"]
    assert (error["param"], error["code"]) == ("Last-Event-ID", "invalid_event_id")


async def test_id_of_this_api_is_none_of_another(system):
    events = await ask_streamed(system, {"x-request-id": "mine"})
    headers = {"x-request-id": "mine", "last-event-id": events[5][1]}
    body = {"messages": [USER], "stream": True}
    response = await system.http.post("/v1/chat/completions", json=body, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_event_id")


async def test_same_key_for_a_chat_is_a_conflict(system):
    await ask(system, {"idempotency-key": "k"})
    response = await system.http.post(
        "/v1/chat/completions", json={"messages": [USER]}, headers={"idempotency-key": "k"}
    )
    assert (response.status_code, response.json()["error"]["code"]) == (409, "idempotency_conflict")


async def test_error_in_a_stream_is_an_event_and_a_failed_response(make_system, worker_type):
    system = await make_system()

    async def decode(attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.emit(worker_pb2.DecodeStarted())
        attempt.tokens(0, [40, 41])
        attempt.fail(InvalidRequest("broken"))

    await system.add(worker_type("decode", "decode-0", decode))
    *_, delta, error, failed = [event for event, _ in await ask_streamed(system)]
    assert delta["type"] == "response.output_text.delta"
    assert (error["type"], failed["type"]) == ("error", "response.failed")
    numbers = [event["sequence_number"] for event in (delta, error, failed)]
    assert numbers == list(range(numbers[0], numbers[0] + 3))
    assert (failed["response"]["status"], failed["response"]["error"]["code"]) == ("failed", "server_error")
    assert failed["response"]["error"]["message"] == error["message"]
    (item,) = failed["response"]["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", delta["delta"])
    async with openai.AsyncOpenAI(base_url=f"{system.base_url}/v1", api_key="none", max_retries=0) as client:
        kinds = [event.type async for event in await client.responses.create(model="tiny", input="a", stream=True)]
    assert kinds[-2:] == ["error", "response.failed"]


async def test_error_in_a_stream_names_the_member_of_this_api(make_system, worker_type, monkeypatch):
    system = await make_system()
    broken = InvalidRequest("response_format cannot continue", field="response_format")
    # Workers' own errors come without the member's name.
    monkeypatch.setattr("gateway.topology.wire._blamed", lambda _: broken)

    async def decode(attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.emit(worker_pb2.DecodeStarted())
        attempt.tokens(0, [40])
        attempt.fail(broken)

    await system.add(worker_type("decode", "decode-0", decode))
    for headers in (None, {"x-request-id": "mine"}):
        *_, error, failed = [event for event, _ in await ask_streamed(system, headers)]
        assert (error["param"], error["message"]) == ("text.format", "text.format cannot continue")
        assert failed["response"]["error"]["message"] == error["message"]


async def test_error_before_the_first_event_is_a_status(make_system, worker_type):
    system = await make_system()

    async def decode(attempt):
        attempt.fail(InvalidRequest("broken"))

    await system.add(worker_type("decode", "decode-0", decode))
    for stream in (False, True):
        response = await ask(system, stream=stream, http_status=400)
        assert response.json()["error"]["code"] == "refused_by_workers"


@pytest.mark.parametrize("headers", [{}, {"x-request-id": "mine"}], ids=["unnamed", "named"])
async def test_client_that_leaves_ends_its_response(make_system, worker_type, headers):
    system = await make_system()

    async def decode(attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.emit(worker_pb2.DecodeStarted())
        attempt.tokens(0, [40, 41])

    worker = await system.add(worker_type("decode", "decode-0", decode))
    body = {"input": ASKED, "stream": True}
    async with system.http.stream("POST", "/v1/responses", json=body, headers=headers) as response:
        async for line in response.aiter_lines():
            if line.startswith("event: response.output_text.delta"):
                break
    await system.until(lambda: worker.cancelled)
    await system.until(lambda: not system.gateway.requests.num_running)


async def test_stream_goes_on_after_the_client_left(make_system, worker_type):
    system = await make_system()
    may_go_on = asyncio.Event()

    async def decode(attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.emit(worker_pb2.DecodeStarted())
        first = len(attempt.spec.emitted_token_ids)
        attempt.tokens(first, list(range(40 + first, 44)))
        if first or may_go_on.is_set():
            attempt.tokens(4, list(range(44, 50)))
            attempt.finish(inference_pb2.FINISH_REASON_LENGTH)

    await system.add(worker_type("decode", "decode-0", decode))
    headers = {"idempotency-key": "k"}
    lines = []
    body = {"input": ASKED, "stream": True, "temperature": 0}
    async with system.http.stream("POST", "/v1/responses", json=body, headers=headers) as response:
        async for line in response.aiter_lines():
            lines.append(line)
            if lines[-1].startswith("id: ") and any("output_text.delta" in each for each in lines):
                break
    may_go_on.set()
    begun = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    after = {"last-event-id": lines[-1].removeprefix("id: ")}
    rest = [event for event, _ in await ask_streamed(system, headers | after, temperature=0)]
    response = put_together([*begun, *rest])
    again = await ask_streamed(system, headers, temperature=0)
    assert response == put_together([event for event, _ in again])
