"""OpenAI's client for Python, as its documentation uses it."""

import json
import time

import openai
from checks import KEY, MODEL, URL, check, finish

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY)
ASKED = [{"role": "user", "content": "How is the weather?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "place", "schema": {**PARAMETERS, "additionalProperties": False}},
}


@check("models")
def models():
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


@check("chat")
def chat():
    answer = client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=8)
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.completion_tokens <= 8


@check("chat, streamed")
def streamed():
    stream = client.chat.completions.create(
        model=MODEL, messages=ASKED, max_tokens=8, stream=True, stream_options={"include_usage": True}
    )
    assert [*stream][-1].usage.completion_tokens <= 8


@check("a tool that must be called")
def tool():
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        answer = client.chat.completions.create(
            model=MODEL, messages=ASKED, tools=[TOOL], tool_choice=choice, stop=["Observation:"], max_tokens=200
        )
        assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments)["city"] in ("Rome", "Oslo")


@check("JSON with a schema")
def schema():
    answer = client.chat.completions.create(model=MODEL, messages=ASKED, response_format=SCHEMA, max_tokens=200)
    assert json.loads(answer.choices[0].message.content)["city"] in ("Rome", "Oslo")


@check("log-probabilities")
def logprobs():
    answer = client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=3, logprobs=True, top_logprobs=2)
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2


@check("completions")
def completions():
    assert client.completions.create(model=MODEL, prompt="Once", max_tokens=4).choices[0].text


@check("responses")
def responses():
    answer = client.responses.create(model=MODEL, input="Hello", max_output_tokens=8, tools=[{"type": "web_search"}])
    assert answer.status in ("completed", "incomplete")


@check("responses, streamed")
def responses_streamed():
    with client.responses.stream(model=MODEL, input="Hello", max_output_tokens=8) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"


@check("an unknown model is NotFoundError")
def unknown():
    try:
        client.chat.completions.create(model="no-such-model", messages=ASKED)
    except openai.NotFoundError:
        return
    raise AssertionError("it was answered")


@check("responses: stored, continued and deleted")
def stored():
    first = client.responses.create(model=MODEL, input="Hello", max_output_tokens=8)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    again = client.responses.create(model=MODEL, input="And then?", max_output_tokens=8, previous_response_id=first.id)
    assert len(client.responses.input_items.list(again.id).data) == 3
    client.responses.delete(first.id)
    try:
        client.responses.retrieve(first.id)
    except openai.NotFoundError:
        return
    raise AssertionError("it is still there")


@check("responses: in the background, polled, resumed and cancelled")
def background():
    response = client.responses.create(model=MODEL, input="Hello", max_output_tokens=8, background=True)
    until_s = time.monotonic() + 60
    while response.status in ("queued", "in_progress") and time.monotonic() < until_s:
        time.sleep(0.1)
        response = client.responses.retrieve(response.id)
    assert response.output_text
    stream = client.responses.create(model=MODEL, input="Hello", max_output_tokens=8, background=True, stream=True)
    seen = [next(stream), next(stream)]
    stream.close()
    rest = client.responses.retrieve(seen[0].response.id, stream=True, starting_after=seen[-1].sequence_number)
    numbers = [event.sequence_number for event in [*seen, *rest]]
    assert numbers == list(range(len(numbers)))
    response = client.responses.create(model=MODEL, input="Hello", max_output_tokens=500, background=True)
    assert client.responses.cancel(response.id).status in ("cancelled", "completed", "incomplete")


@check("conversations: continued by responses, changed and deleted")
def conversations():
    asked = {"type": "message", "role": "user", "content": "Hello"}
    made = client.conversations.create(items=[asked], metadata={"topic": "weather"})
    for more in ({}, {"stream": True}, {"background": True}):
        response = client.responses.create(
            model=MODEL, input="And then?", max_output_tokens=8, conversation=made.id, **more
        )
        if "stream" in more:
            *_, response = [event.response for event in response if event.type.startswith("response.in")]
        while response.status in ("queued", "in_progress"):
            time.sleep(0.1)
            response = client.responses.retrieve(response.id)
        assert response.conversation.id == made.id
    items = [*client.conversations.items.list(made.id, order="asc", limit=3)]
    assert [item.role for item in items] == ["user", *["user", "assistant"] * 3]
    client.conversations.items.delete(items[0].id, conversation_id=made.id)
    (added,) = client.conversations.items.create(made.id, items=[asked]).data
    assert client.conversations.items.retrieve(added.id, conversation_id=made.id) == added
    assert client.conversations.update(made.id, metadata={}).metadata == {}
    assert client.conversations.delete(made.id).deleted


@check("chat: stored, listed, changed and deleted")
def stored_chats():
    for more in ({}, {"stream": True}):
        answer = client.chat.completions.create(
            model=MODEL, messages=ASKED, max_tokens=8, store=True, metadata={"topic": "weather"}, **more
        )
        answer_id = answer.id if not more else [chunk.id for chunk in answer][-1]
        found = client.chat.completions.retrieve(answer_id)
        assert found.choices[0].message.content
        assert [told.content for told in client.chat.completions.messages.list(answer_id)] == [ASKED[0]["content"]]
        assert answer_id in [chat.id for chat in client.chat.completions.list(metadata={"topic": "weather"}, limit=1)]
        client.chat.completions.update(answer_id, metadata={"topic": "other"})
        assert answer_id not in [chat.id for chat in client.chat.completions.list(metadata={"topic": "weather"})]
        assert client.chat.completions.delete(answer_id).deleted


TEXTS = ["How is the weather?", "def length(", "import os"]


@check("embeddings: texts, token ids, both encodings")
def embeddings():
    vectors = [one.embedding for one in client.embeddings.create(model=MODEL, input=TEXTS).data]
    plain = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    assert [one.embedding for one in plain.data] == vectors
    assert all(abs(sum(number * number for number in vector) - 1) < 1e-3 for vector in vectors)
    assert plain.usage.prompt_tokens == plain.usage.total_tokens > 0
    assert client.embeddings.create(model=MODEL, input=[1, 2, 3]).data[0].index == 0


@check("embeddings: in a batch")
def batched():
    body = {"model": MODEL, "input": TEXTS}
    row = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": body}
    file = client.files.create(file=("rows.jsonl", json.dumps(row).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    until_s = time.monotonic() + 60
    while batch.status not in ("completed", "failed") and time.monotonic() < until_s:
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    answer = json.loads(client.files.content(batch.output_file_id).text)["response"]["body"]
    expected = client.embeddings.create(**body, encoding_format="float").data
    assert [one["embedding"] for one in answer["data"]] == [one.embedding for one in expected]


finish(openai.__version__)
