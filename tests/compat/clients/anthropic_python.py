"""Anthropic's client for Python."""

import anthropic
from checks import KEY, MODEL, URL, check, finish

client = anthropic.Anthropic(base_url=URL, api_key=KEY)
ASKED = [{"role": "user", "content": "How is the weather?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "Tells the weather.", "input_schema": SCHEMA}


@check("models")
def models():
    assert MODEL in [model.id for model in client.models.list()]


@check("message")
def message():
    answer = client.messages.create(model=MODEL, max_tokens=8, system="Be brief.", messages=ASKED)
    assert answer.role == "assistant"
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.usage.output_tokens <= 8


@check("message, streamed")
def streamed():
    with client.messages.stream(model=MODEL, max_tokens=8, messages=ASKED) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "".join(block.text for block in final.content if block.type == "text")


@check("a tool that must be called, and its result")
def tool():
    one = {"type": "any", "disable_parallel_tool_use": True}
    for choice in (one, {"type": "tool", "name": "weather"}):
        answer = client.messages.create(model=MODEL, max_tokens=200, messages=ASKED, tools=[TOOL], tool_choice=choice)
        assert answer.stop_reason == "tool_use"
        (use,) = [block for block in answer.content if block.type == "tool_use"][:1]
        assert use.input["city"] in ("Rome", "Oslo")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "Sunny."}
    others = [block.id for block in answer.content if block.type == "tool_use" and block.id != use.id]
    results = [result, *({**result, "tool_use_id": other} for other in others)]
    client.messages.create(
        model=MODEL,
        max_tokens=8,
        tools=[TOOL],
        messages=[*ASKED, {"role": "assistant", "content": answer.content}, {"role": "user", "content": results}],
    )


@check("a message that is begun")
def begun():
    client.messages.create(model=MODEL, max_tokens=8, messages=[*ASKED, {"role": "assistant", "content": "It is"}])


@check("JSON with a schema")
def schema():
    closed = {**SCHEMA, "additionalProperties": False}
    answer = client.messages.create(
        model=MODEL,
        max_tokens=200,
        messages=ASKED,
        output_config={"format": {"type": "json_schema", "schema": closed}},
    )
    assert "city" in answer.content[-1].text


@check("tokens are counted")
def counted():
    assert client.messages.count_tokens(model=MODEL, messages=ASKED, tools=[TOOL]).input_tokens > 1


@check("errors are the client's own")
def errors():
    for error, more in ((anthropic.NotFoundError, {"model": "no"}), (anthropic.BadRequestError, {"max_tokens": 0})):
        try:
            client.messages.create(**{"model": MODEL, "max_tokens": 8, "messages": ASKED, **more})
        except error:
            continue
        raise AssertionError(f"no {error.__name__}")


finish(anthropic.__version__)
