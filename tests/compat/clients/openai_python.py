"""OpenAI's client for Python, as its documentation uses it."""

import json

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


finish(openai.__version__)
