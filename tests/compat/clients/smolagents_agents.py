"""smolagents' two agents, from their first call to their last answer."""

from importlib.metadata import version
from typing import Literal

from checks import KEY, MODEL, URL, check, finish
from smolagents import ActionStep, CodeAgent, OpenAIModel, ToolCallingAgent, tool
from smolagents.utils import AgentExecutionError, AgentMaxStepsError, AgentParsingError

model = OpenAIModel(model_id=MODEL, api_base=f"{URL}/v1", api_key=KEY)
short = OpenAIModel(model_id=MODEL, api_base=f"{URL}/v1", api_key=KEY, max_tokens=300)
MODELS_OWN_MISTAKES = (AgentParsingError, AgentExecutionError, AgentMaxStepsError)
"""What an agent notes where a model says something that is no code or no call; it asks again then."""


@tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Tells the weather of a city.

    Args:
        city: The name of the city.
    """
    return f"sunny in {city}"


def run(agent, *, stream=False):
    answered = agent.run("How is the weather in Rome?", stream=stream)
    if stream:
        assert [*answered]
    steps = [step for step in agent.memory.steps if isinstance(step, ActionStep)]
    assert steps
    for step in steps:
        assert step.error is None or isinstance(step.error, MODELS_OWN_MISTAKES), step.error
    return steps


@check("the agent that calls tools, nothing set")
def calls_nothing_set():
    run(ToolCallingAgent(tools=[], model=model, max_steps=2, verbosity_level=0))


@check("the agent that calls tools")
def calls():
    steps = run(ToolCallingAgent(tools=[weather], model=short, max_steps=3, verbosity_level=0))
    assert steps[0].model_output_message.tool_calls, steps[0].error


@check("the agent that calls tools, streamed")
def calls_streamed():
    agent = ToolCallingAgent(tools=[weather], model=short, max_steps=2, verbosity_level=0, stream_outputs=True)
    run(agent, stream=True)


@check("the agent that writes code")
def code():
    run(CodeAgent(tools=[weather], model=short, max_steps=2, verbosity_level=0))


@check("the agent that writes code, streamed")
def code_streamed():
    run(CodeAgent(tools=[weather], model=short, max_steps=2, verbosity_level=0, stream_outputs=True), stream=True)


@check("the agent that writes code, with structured outputs")
def code_structured():
    agent = CodeAgent(
        tools=[weather], model=model, max_steps=2, verbosity_level=0, use_structured_outputs_internally=True
    )
    run(agent)


@check("with planning")
def planning():
    run(ToolCallingAgent(tools=[weather], model=short, max_steps=2, planning_interval=1, verbosity_level=0))


finish(version("smolagents"))
