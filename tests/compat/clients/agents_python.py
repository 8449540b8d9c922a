"""OpenAI's Agents SDK for Python, as its documentation uses it: by /v1/responses, and by chats."""

import asyncio
import os
from importlib.metadata import version
from typing import Literal

from checks import KEY, MODEL, URL, check, finish

# The SDK reads address and key where it needs them first. Its traces go to OpenAI, which has no part in this.
os.environ.update(OPENAI_BASE_URL=f"{URL}/v1", OPENAI_API_KEY=KEY, OPENAI_AGENTS_DISABLE_TRACING="1")

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, SQLiteSession, function_tool
from openai import AsyncOpenAI
from pydantic import BaseModel

loop = asyncio.Runner()
called: list[str] = []


@function_tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Tells the weather of a city."""
    called.append(city)
    return "sunny"


class Place(BaseModel):
    city: Literal["Rome", "Oslo"]


def chats():
    return OpenAIChatCompletionsModel(model=MODEL, openai_client=AsyncOpenAI())


WAYS = {"responses": lambda: MODEL, "chats": chats}
# The demo model would call without end where it must call.
SETTINGS = {"temperature": 0, "parallel_tool_calls": False}


def agent_of(way, *, choice=None, **members):
    settings = ModelSettings(tool_choice=choice, **SETTINGS)
    return Agent(name="Helper", instructions="Be brief.", model=WAYS[way](), model_settings=settings, **members)


def told(agent, words, **members):
    return loop.run(Runner.run(agent, words, **members))


for way in WAYS:

    @check(f"{way}: nothing set")
    def nothing_set(way=way):
        assert told(Agent(name="Helper", model=WAYS[way]()), "Hello").raw_responses[0].usage.output_tokens

    @check(f"{way}: an answer, streamed")
    def streamed(way=way):
        async def run():
            result = Runner.run_streamed(agent_of(way), "Hello")
            return [event.type async for event in result.stream_events()]

        assert "raw_response_event" in loop.run(run())

    @check(f"{way}: a tool that must be called, and the answer after it")
    def tool(way=way):
        called.clear()
        result = told(agent_of(way, tools=[weather], choice="required"), "The weather in Rome?")
        assert called
        assert len(result.raw_responses) == 2

    @check(f"{way}: an output with a type")
    def typed(way=way):
        assert isinstance(told(agent_of(way, output_type=Place), "Which?").final_output, Place)

    @check(f"{way}: an agent hands over to another")
    def hands_over(way=way):
        other = Agent(name="Other", model=WAYS[way](), model_settings=ModelSettings(**SETTINGS))
        assert told(agent_of(way, handoffs=[other], choice="required"), "Hello").last_agent.name == "Other"

    @check(f"{way}: a session")
    def session(way=way):
        memory = SQLiteSession("one")
        first, second = (
            told(agent_of(way), words, session=memory).raw_responses[0] for words in ("Hello", "And then?")
        )
        assert second.usage.input_tokens > first.usage.input_tokens


@check("responses: the conversation is kept by the server")
def previous():
    first = told(agent_of("responses"), "Hello")
    again = told(agent_of("responses"), "And then?", previous_response_id=first.last_response_id)
    assert again.raw_responses[0].usage.input_tokens > first.raw_responses[0].usage.input_tokens


finish(version("openai-agents"))
