"""Tools of the Responses API as models are told of them: namespaces, and tools that no server but OpenAI's runs."""

import json

import pytest

from gateway.openai.requests import parse
from gateway.openai.responses_request import ResponsesRequest
from gateway.openai.responses_tools import chat_tools, left_out, own_names
from gateway.openai.responses_writer import ResponsesWriter
from services.runtime.errors import InvalidRequest
from services.structured.form import ToolFormat
from tests.gateway.openai.writers import whole_of, writer_of

SEARCH = {"type": "function", "name": "search", "parameters": {"type": "object"}}
FILES = {"type": "namespace", "name": "mcp__files__", "description": "Files.", "tools": [SEARCH]}
MAIL = {"type": "namespace", "name": "mail", "tools": [SEARCH]}
TOOLS = [SEARCH, {"type": "web_search", "search_context_size": "low"}, FILES, MAIL]
NAMES = ["search", "mcp__files__search", "mail__search"]


def parsed(**members):
    return parse(json.dumps({"input": "a", **members}).encode(), ResponsesRequest)


def test_each_function_of_a_namespace_has_a_name_of_its_own():
    assert [tool["function"]["name"] for tool in chat_tools(TOOLS)] == NAMES
    assert own_names(TOOLS) == {NAMES[1]: ("mcp__files__", "search"), NAMES[2]: ("mail", "search")}


def test_what_only_a_vendor_runs_is_left_out_and_told():
    request, ignored = parsed(tools=TOOLS)
    assert left_out(TOOLS) == request.left_out() == ["tools.web_search"]
    assert ignored == ["tools.search_context_size"]
    assert len(request.call().tools) == len(NAMES)


async def test_the_answer_says_what_was_left_out(make_system, worker_type, pair_type, tokenizer):
    system = await make_system()
    await system.add_pair(pair_type([*tokenizer.encode("ok", add_special_tokens=False).ids, 1]))
    answer = await system.http.post("/v1/responses", json={"input": "a", "tools": [{"type": "web_search"}]})
    assert (answer.status_code, answer.headers["x-tandem-ignored"]) == (200, "tools.web_search")


@pytest.mark.parametrize(
    ("tool", "field"),
    [
        ({"type": "custom", "name": "apply_patch"}, "tools[0].type"),
        ({"type": "namespace", "name": "a", "tools": [{"type": "custom", "name": "b"}]}, "tools[0].tools[0].type"),
        ({"type": "namespace", "name": "a"}, "tools[0].tools"),
        ({"type": "namespace", "tools": []}, "tools[0].name"),
        ({"type": "namespace", "name": "a", "tools": [{**SEARCH, "strict": 1}]}, "tools[0].tools[0].strict"),
    ],
)
def test_wrong_tools_are_refused_by_name(tool, field):
    with pytest.raises(InvalidRequest) as refused:
        parsed(tools=[tool])[0].call()
    assert refused.value.field == field


def test_a_call_comes_under_the_own_name_of_its_function():
    call = '<tool_call>{"name": "mcp__files__search", "arguments": {}}</tool_call>'
    body = {"input": "a", "tools": TOOLS}
    writer = writer_of(ResponsesWriter, ResponsesRequest, body, tool_format=ToolFormat.HERMES)
    (item,) = json.loads(writer.whole([whole_of(call)]))["output"]
    assert (item["namespace"], item["name"]) == ("mcp__files__", "search")


def test_an_earlier_call_is_told_under_the_name_that_the_model_knows():
    item = {"type": "function_call", "call_id": "1", "namespace": "mail", "name": "search", "arguments": "{}"}
    choice = {"type": "function", "namespace": "mail", "name": "search"}
    call = parsed(input=[{"role": "user", "content": "a"}, item], tools=TOOLS, tool_choice=choice)[0].call()
    assert call.messages[1]["tool_calls"][0]["function"]["name"] == "mail__search"
    assert call.must_call == {"mail__search"}
