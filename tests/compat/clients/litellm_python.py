"""LiteLLM, by each of its ways that lead to a server of one's own."""

import json
from importlib.metadata import version

import litellm
from checks import KEY, MODEL, URL, check, finish

litellm.suppress_debug_info = True
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
WAYS = {
    "openai": f"{URL}/v1",
    "hosted_vllm": f"{URL}/v1",
    "litellm_proxy": f"{URL}/v1",
    "llamafile": f"{URL}/v1",
    "lm_studio": f"{URL}/v1",
    "anthropic": URL,
}


def complete(way, **members):
    return litellm.completion(
        **{
            "model": f"{way}/{MODEL}",
            "api_base": WAYS[way],
            "api_key": KEY,
            "messages": ASKED,
            "max_tokens": 8,
            **members,
        }
    )


for way in WAYS:

    @check(f"{way}: a chat")
    def chat(way=way):
        assert complete(way).usage.completion_tokens <= 8

    @check(f"{way}: a chat, streamed")
    def streamed(way=way):
        parts = [*complete(way, stream=True, stream_options={"include_usage": True})]
        assert parts[-1].usage.completion_tokens <= 8

    @check(f"{way}: a tool that must be called")
    def tool(way=way):
        answer = complete(way, tools=[TOOL], tool_choice="required", max_tokens=100)
        call = answer.choices[0].message.tool_calls[0]
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
        messages = [*ASKED, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        assert complete(way, tools=[TOOL], messages=messages).choices

    @check(f"{way}: JSON with a schema")
    def schema(way=way):
        answer = complete(way, response_format=SCHEMA, max_tokens=100)
        assert json.loads(answer.choices[0].message.content)["city"] in ("Rome", "Oslo")

    @check(f"{way}: stop, seed, thinking")
    def more(way=way):
        assert complete(way, stop=["zz"], temperature=0.5, top_p=0.9, drop_params=True, seed=1, reasoning_effort="low")


@check("text-completion-openai: a text")
def text():
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="Once", max_tokens=4, api_base=f"{URL}/v1", api_key=KEY
    )
    assert answer.choices[0].text


for way in ("openai", "hosted_vllm"):

    @check(f"{way}: embeddings")
    def embeddings(way=way):
        answer = litellm.embedding(
            model=f"{way}/{MODEL}", input=["How is the weather?", "import os"], api_base=WAYS[way], api_key=KEY
        )
        assert [len(one["embedding"]) for one in answer.data] == [256, 256]


@check("hosted_vllm: a rank")
def rank():
    answer = litellm.rerank(
        model=f"hosted_vllm/{MODEL}",
        query="import os",
        documents=["How is the weather?", "import os"],
        top_n=1,
        api_base=URL,
        api_key=KEY,
    )
    assert [one["index"] for one in answer.results] == [1]


@check("responses")
def responses():
    answer = litellm.responses(
        model=f"openai/{MODEL}", input="Hello", max_output_tokens=8, api_base=f"{URL}/v1", api_key=KEY
    )
    assert answer.status in ("completed", "incomplete")


@check("the words of Anthropic's API, by a chat")
def messages():
    answer = litellm.anthropic.messages.create(
        model=f"openai/{MODEL}", messages=ASKED, max_tokens=8, api_base=f"{URL}/v1", api_key=KEY
    )
    assert answer["role"] == "assistant"


@check("an unknown model is NotFoundError")
def unknown():
    try:
        complete("openai", model="openai/no-such-model")
    except litellm.NotFoundError:
        return
    raise AssertionError("it was answered")


@check("a prompt that is too long is ContextWindowExceededError")
def too_long():
    try:
        complete("openai", messages=[{"role": "user", "content": "a b " * 40_000}])
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("it was answered")


finish(version("litellm"))
