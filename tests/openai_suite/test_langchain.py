"""LangChain's ChatOpenAI against a real cluster, unmodified."""

from typing import Literal

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

on_one_loop = pytest.mark.asyncio(loop_scope="module")
"""LangChain keeps its connections for all its clients of a process, and they live on one event loop."""

ASK = [SystemMessage("You write Python."), HumanMessage("Write a function that returns the length of a list.")]


class Verdict(BaseModel):
    """What is thought of a program."""

    language: Literal["python", "c", "rust"]
    is_function: bool


@tool
def clock(zone: Literal["Europe/Rome", "UTC"]) -> str:
    """Says how late it is in a time zone."""
    return f"12:00 in {zone}"


def test_invoke(chat: ChatOpenAI) -> None:
    answer = chat.invoke(ASK)
    assert isinstance(answer, AIMessage)
    assert isinstance(answer.content, str)
    assert answer.usage_metadata is not None
    assert 1 <= answer.usage_metadata["output_tokens"] <= 12
    assert answer.response_metadata["model_name"] == "tandem-demo"


def test_stream_is_invoke_in_parts(chat: ChatOpenAI) -> None:
    assert "".join(str(part.content) for part in chat.stream(ASK)) == chat.invoke(ASK).content


def test_batch_keeps_the_order(chat: ChatOpenAI) -> None:
    questions = [[HumanMessage(f"def f{number}(")] for number in range(4)]
    assert [answer.content for answer in chat.batch(questions)] == [chat.invoke(each).content for each in questions]


@on_one_loop
async def test_abatch_and_astream(chat: ChatOpenAI) -> None:
    first, second = await chat.abatch([ASK, ASK])
    parts = [str(part.content) async for part in chat.astream(ASK)]
    assert first.content == second.content == "".join(parts)


def test_a_chain(chat: ChatOpenAI) -> None:
    chain = ChatPromptTemplate.from_messages([("user", "Write {what}.")]) | chat
    assert chain.invoke({"what": "a loop"}).content == chat.invoke([HumanMessage("Write a loop.")]).content


def test_structured_output(chat: ChatOpenAI) -> None:
    asked = chat.model_copy(update={"max_tokens": 200}).with_structured_output(Verdict, method="json_schema")
    assert isinstance(asked.invoke(ASK), Verdict)


@on_one_loop
async def test_structured_output_with_the_raw_answer(chat: ChatOpenAI) -> None:
    wide = chat.model_copy(update={"max_tokens": 200})
    asked = wide.with_structured_output(Verdict, method="json_schema", include_raw=True)
    answer = await asked.ainvoke(ASK)
    assert answer["parsing_error"] is None
    assert Verdict.model_validate_json(answer["raw"].content) == answer["parsed"]


def test_a_tool_is_called_and_its_result_taken(chat: ChatOpenAI) -> None:
    asked = chat.model_copy(update={"max_tokens": 200})
    called = asked.bind_tools([clock], tool_choice="any", parallel_tool_calls=False).invoke(ASK)
    (call,) = called.tool_calls
    assert (call["name"], called.invalid_tool_calls) == ("clock", [])
    assert call["args"]["zone"] in ("Europe/Rome", "UTC")
    answer = chat.bind_tools([clock], tool_choice="none").invoke([*ASK, called, clock.invoke(call)])
    assert answer.tool_calls == []
    assert answer.content
