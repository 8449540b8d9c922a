"""Tools and reasoning in /v1/chat/completions: prompts, answers whole and streamed, streams that are resumed."""

import asyncio
import json
import shutil
from dataclasses import replace
from typing import Literal

import jsonschema_rs
import openai
import pydantic
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from gateway.models.answer_pieces import Arguments, Content, Reasoning
from gateway.models.conversation import encode_conversation
from gateway.models.model_files import read_model_files
from gateway.models.tokenizer import ModelTokenizer
from gateway.models.tool_calls import AnswerParser
from gateway.named.journal import decode_call, encode_call
from gateway.openai.chat import ChatRequest
from gateway.openai.requests import parse
from gateway.openapi.document import document
from protos import inference_pb2, worker_pb2
from services.runtime import status
from services.runtime.errors import InvalidRequest
from services.structured.form import AnswerForm, CalledFunction, ToolCalls, ToolFormat, read_form
from services.structured.form import Reasoning as ThoughtsForm
from services.structured.grammar import ANY_OBJECT

CONTEXT_TOKENS = 1024
TURNS = (
    "{% for message in messages %}<|{{ 'user' if message.role == 'tool' else message.role }}|>\n{{ message.content }}"
    "{% if message.tool_calls %}{% for call in message.tool_calls %}<tool_call>"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>"
    "{% endfor %}{% endif %}{% if message.tool_call_id %}({{ message.tool_call_id }}){% endif %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TOLD = "{% if tools %}<|system|>\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|end|>\n{% endif %}"
TEMPLATES = {
    "hermes": TOLD + TURNS,
    "llama3": TOLD + '{# {"name": function name, "parameters": …} #}' + TURNS.replace("tool_call>", "call>"),
    "mistral": TOLD + "{# [TOOL_CALLS] #}" + TURNS.replace("tool_call>", "call>"),
    "thinks": TOLD + TURNS + "{# </think> #}",
    "thinks-at-once": TOLD + TURNS + "{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}",
    "unknown": TOLD + TURNS.replace("tool_call>", "call>"),
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says <|end|> how it is.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": True,
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
TOLD_TOOLS = [{"type": "function", "function": {k: v for k, v in WEATHER["function"].items() if k != "strict"}}, CLOCK]
ARGUMENTS = '{"city": "Köln", "days": [1, 2]}'
ASKED = [{"role": "user", "content": "How is it?"}]

ANSWERS = {
    "hermes": f'Let me see.\n<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    "llama3": f'<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}; '
    '{"name": "clock", "parameters": {}}',
    "mistral": f'Let me see.[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}, '
    '{"name": "clock", "arguments": {}}]',
}
ANSWERS["thinks"] = f"<think>\nHm, 2 < 3.\n</think>\n\n{ANSWERS['hermes']}"
ANSWERS["thinks-at-once"] = f"Hm, 2 < 3.\n</think>\n\n{ANSWERS['hermes']}"


@pytest.fixture(scope="session")
def folder_of(model_folder, tmp_path_factory):
    """The model's folder with another template; those of a format have its markers as special tokens."""

    def make(kind):
        folder = tmp_path_factory.mktemp("models") / "tiny"
        shutil.copytree(model_folder, folder)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        marker = {"llama3": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}.get(kind, "<|more|>")
        tokenizer.add_special_tokens([AddedToken(marker, special=True)])
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "chat_template.jinja").write_text(TEMPLATES[kind])
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps({**config, "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": CONTEXT_TOKENS})
        )
        return folder, tokenizer

    return make


@pytest.fixture
def serve(make_system, worker_type, pair_type, folder_of):
    """A gateway whose worker answers with this text, or with these texts, of which no token has parts of two."""

    async def start(kind, text=None, *, group=1, ends=True):
        folder, tokenizer = folder_of(kind)
        system = await make_system(model=folder)
        text = ANSWERS[kind] if text is None else text
        parts = [text] if isinstance(text, str) else text
        token_ids = [token_id for part in parts for token_id in tokenizer.encode(part, add_special_tokens=False).ids]
        pair = pair_type([*token_ids, 1] if ends else token_ids, group=group, step_s=0)
        await system.add(worker_type("decode", "decode-0", pair.decode, max_sequence_tokens=CONTEXT_TOKENS))
        return system

    return start


async def ask(system, headers=None, **body):
    response = await system.http.post(
        "/v1/chat/completions", json={"messages": ASKED, "tools": TOOLS, **body}, headers=headers
    )
    assert response.status_code == 200, response.text
    return response


def events_of(response):
    """(data, id) of each event but the end."""
    *blocks, done = response.text.strip().split("\n\n")
    assert done == "data: [DONE]"
    parts = [block.partition("\nid: ") for block in blocks]
    return [(json.loads(data.removeprefix("data: ")), event_id) for data, _, event_id in parts]


def put_together(chunks):
    """What a client makes of the chunks of answer 0."""
    made = {"content": "", "reasoning": "", "calls": {}, "finish_reason": None}
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
        for choice in chunk["choices"]:
            delta = choice["delta"]
            made["content"] += delta.get("content") or ""
            made["reasoning"] += delta.get("reasoning_content") or ""
            made["finish_reason"] = choice["finish_reason"] or made["finish_reason"]
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(made["calls"])
                    assert call["type"] == "function"
                    made["calls"][call["index"]] = [call["id"], call["function"]["name"], ""]
                made["calls"][call["index"]][2] += call["function"]["arguments"]
    return made


def put_together_from(chunks):
    """What the chunks add to answer 0 for a client that has a part of it."""
    made = {"content": "", "reasoning": "", "arguments": {}, "finish_reason": None}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        delta = choice["delta"]
        made["content"] += delta.get("content") or ""
        made["reasoning"] += delta.get("reasoning_content") or ""
        made["finish_reason"] = choice["finish_reason"] or made["finish_reason"]
        for call in delta.get("tool_calls", ()):
            before = made["arguments"].get(call["index"], "")
            made["arguments"][call["index"]] = before + call["function"]["arguments"]
    return made


def taken_apart(body):
    """What a whole answer holds, in the form of `put_together`."""
    choice = ChatCompletion.model_validate(body).choices[0]
    message = body["choices"][0]["message"]
    calls = [[call.id, call.function.name, call.function.arguments] for call in choice.message.tool_calls or ()]
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning_content") or "",
        "calls": dict(enumerate(calls)),
        "finish_reason": choice.finish_reason,
    }


# --- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ANSWERS)
async def test_calls_of_a_whole_answer(serve, kind):
    system = await serve(kind)
    body = (await ask(system)).json()
    made = taken_apart(body)
    assert [call[1:] for call in made["calls"].values()] == [["weather", ARGUMENTS], ["clock", "{}"]]
    assert body["choices"][0]["message"]["content"] == (None if kind == "llama3" else "Let me see.")
    assert made["reasoning"] == ("Hm, 2 < 3." if kind.startswith("thinks") else "")
    assert made["finish_reason"] == "tool_calls"
    ids = [call[0] for call in made["calls"].values()]
    assert len(set(ids)) == 2
    assert all(len(each) == 9 and each.isalnum() if kind == "mistral" else each.startswith("call_") for each in ids)


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("group", [1, 1000])
async def test_streamed_calls_are_those_of_the_whole_answer(serve, kind, group):
    system = await serve(kind, group=group)
    whole = taken_apart((await ask(system)).json())
    for headers in (None, {"idempotency-key": "k"}):
        chunks = [data for data, _ in events_of(await ask(system, headers, stream=True))]
        streamed = put_together(chunks)
        assert [call[1:] for call in streamed["calls"].values()] == [call[1:] for call in whole["calls"].values()]
        assert {**streamed, "calls": None} == {**whole, "calls": None}


async def test_call_is_announced_and_passed_on_before_it_is_complete(make_system, worker_type, folder_of):
    folder, tokenizer = folder_of("hermes")
    system = await make_system(model=folder)
    answer = [*tokenizer.encode(ANSWERS["hermes"], add_special_tokens=False).ids, 1]
    begun = len(tokenizer.encode(ANSWERS["hermes"].partition('öln"')[0], add_special_tokens=False).ids)
    may_go_on = asyncio.Event()

    async def decode(attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.emit(worker_pb2.DecodeStarted())
        attempt.tokens(0, answer[:begun])
        await may_go_on.wait()
        attempt.tokens(begun, answer[begun:])
        attempt.finish(inference_pb2.FINISH_REASON_STOP)

    await system.add(worker_type("decode", "decode-0", decode))
    chunks = []
    body = {"messages": ASKED, "tools": TOOLS, "stream": True}
    async with system.http.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunks.append(json.loads(line.removeprefix("data: ")))
            calls = put_together(chunks)["calls"]
            if calls and not may_go_on.is_set():
                assert [call[1:] for call in calls.values()] == [["weather", '{"city": "K']]
                may_go_on.set()
    assert [call[1:] for call in put_together(chunks)["calls"].values()] == [["weather", ARGUMENTS], ["clock", "{}"]]


async def test_ids_of_calls_are_the_same_for_every_reader(serve):
    system = await serve("hermes")
    bodies = [(await ask(system, {"idempotency-key": "k"})).json() for _ in range(2)]
    assert taken_apart(bodies[0]) == taken_apart(bodies[1])
    assert len(system.workers["decode-0"].attempts) == 1


async def test_the_official_client_puts_streamed_calls_together(serve):
    system = await serve("hermes")
    async with openai.AsyncOpenAI(base_url=f"{system.base_url}/v1", api_key="none") as client:
        async with client.chat.completions.stream(model="tiny", messages=ASKED, tools=TOOLS) as stream:
            final = await stream.get_final_completion()
        calls = final.choices[0].message.tool_calls
        assert [(call.function.name, call.function.arguments) for call in calls] == [
            ("weather", ARGUMENTS),
            ("clock", "{}"),
        ]
        assert calls[0].function.parsed_arguments == json.loads(ARGUMENTS)
        answered = await client.chat.completions.create(
            model="tiny",
            tools=TOOLS,
            messages=[
                *ASKED,
                final.choices[0].message.to_dict(),
                *({"role": "tool", "tool_call_id": call.id, "content": "fine"} for call in calls),
            ],
        )
        assert answered.choices[0].finish_reason == "tool_calls"


async def test_langchain_calls_a_tool_and_goes_on_with_what_it_said(serve):
    system = await serve("hermes")
    chat = ChatOpenAI(model="tiny", base_url=f"{system.base_url}/v1", api_key="none").bind_tools(TOOLS)
    answer = await chat.ainvoke("How is it?")
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [
        ("weather", json.loads(ARGUMENTS)),
        ("clock", {}),
    ]
    said = [ToolMessage("fine", tool_call_id=call["id"]) for call in answer.tool_calls]
    again = await chat.ainvoke([HumanMessage("How is it?"), answer, *said])
    assert again.response_metadata["finish_reason"] == "tool_calls"


async def test_answers_with_calls_and_reasoning_keep_to_the_document(serve, read_sse):
    system = await serve("thinks")
    components = document(asks_for_keys=False)["components"]

    def check(value, name):
        jsonschema_rs.validate({"$ref": f"#/components/schemas/{name}", "components": components}, value)

    whole = (await ask(system)).json()
    assert whole["choices"][0]["message"].keys() >= {"tool_calls", "reasoning_content"}
    check(whole, "ChatCompletion")
    *events, _ = read_sse((await ask(system, stream=True)).text)
    assert put_together(events)["calls"]
    for event in events:
        check(event, "ChatCompletionChunk")


@pytest.mark.parametrize("kind", ["hermes", "mistral", "thinks"])
@pytest.mark.parametrize("stop", [None, ["}}\n</tool_call>\n<tool", "zzz", "<|x"]], ids=["", "stop"])
async def test_stream_cut_after_any_event_goes_on_where_it_was(serve, kind, stop):
    system = await serve(kind)
    headers = {"idempotency-key": "k"}
    more = {"stream": True} | ({"stop": stop} if stop else {})
    events = events_of(await ask(system, headers, **more))
    whole = put_together([data for data, _ in events])
    assert whole["calls"]
    for count, (_, event_id) in enumerate(events, 1):
        rest = events_of(await ask(system, headers | {"last-event-id": event_id}, **more))
        chunks = [data for data, _ in [*events[:count], *rest]]
        assert put_together(chunks) == whole
    assert len(system.workers["decode-0"].attempts) == 1


@pytest.mark.parametrize("kind", ["hermes", "thinks-at-once"])
async def test_stream_goes_on_after_any_token(serve, folder_of, kind):
    """What the client has is what a parser gave out for the text of these tokens."""
    system = await serve(kind)
    model = ModelTokenizer(read_model_files(folder_of(kind)[0]))
    body = (await ask(system, return_token_ids=True)).json()
    token_ids = body["choices"][0]["token_ids"]
    whole = taken_apart(body)
    events = events_of(await ask(system, {"idempotency-key": "k"}, stream=True))
    request_id = events[0][1].partition("/")[0]
    for num_tokens in range(1, len(token_ids)):
        after = {"idempotency-key": "k", "last-event-id": f"{request_id}/{num_tokens}"}
        rest = put_together_from([data for data, _ in events_of(await ask(system, after, stream=True))])
        parser = AnswerParser(
            tool_format=ToolFormat.HERMES,
            names=frozenset({"weather", "clock"}),
            has_reasoning=kind == "thinks-at-once",
            is_reasoning=kind == "thinks-at-once",
        )
        detokenizer = model.detokenizer()
        given = [piece for token_id in token_ids[:num_tokens] for piece in parser.push(detokenizer.push((token_id,)))]
        content = "".join(piece.text for piece in given if isinstance(piece, Content))
        reasoning = "".join(piece.text for piece in given if isinstance(piece, Reasoning))
        assert content + rest["content"] == whole["content"]
        assert reasoning + rest["reasoning"] == whole["reasoning"]
        for index, (_, _, arguments) in whole["calls"].items():
            has = "".join(piece.text for piece in given if isinstance(piece, Arguments) and piece.index == index)
            assert has + rest["arguments"].get(index, "") == arguments
        assert rest["finish_reason"] == "tool_calls"


async def test_stream_cut_before_held_back_text_was_shown_goes_on(serve):
    """The parser holds back what may begin a call, and the stop text what may begin it, until the answer ends."""
    system = await serve("hermes", "Hm. x<tool_c", ends=False)
    more = {"stream": True, "stop": ["x<tool_cat"]}
    events = events_of(await ask(system, {"idempotency-key": "k"}, **more))
    assert put_together([data for data, _ in events])["content"] == "Hm. x<tool_c"
    for count, (_, event_id) in enumerate(events, 1):
        rest = events_of(await ask(system, {"idempotency-key": "k", "last-event-id": event_id}, **more))
        assert put_together([data for data, _ in [*events[:count], *rest]])["content"] == "Hm. x<tool_c"


async def test_each_of_several_answers_has_its_calls(serve):
    system = await serve("hermes")
    body = (await ask(system, n=3)).json()
    ids = [call["id"] for choice in body["choices"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 6


async def test_answer_that_was_cut_says_so(serve):
    system = await serve("hermes", ANSWERS["hermes"].partition('"Köln')[0], ends=False)
    made = taken_apart((await ask(system, max_tokens=400)).json())
    assert [call[1:] for call in made["calls"].values()] == [["weather", '{"city": ']]
    streamed = put_together([data for data, _ in events_of(await ask(system, max_tokens=400, stream=True))])
    assert streamed["finish_reason"] == made["finish_reason"] != "tool_calls"


async def test_what_is_no_call_stays_text(serve):
    text = 'No <tool_call>{"name": "rm", "arguments": {}}</tool_call>'
    system = await serve("hermes", text)
    body = (await ask(system)).json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert body["choices"][0]["finish_reason"] == "stop"
    streamed = put_together([data for data, _ in events_of(await ask(system, stream=True))])
    assert (streamed["content"], streamed["calls"], streamed["finish_reason"]) == (text, {}, "stop")


@pytest.mark.parametrize(
    "body", [{"tools": None}, {"tools": []}, {"tool_choice": "none"}], ids=["absent", "[]", "none"]
)
async def test_without_tools_to_call_nothing_is_told_or_looked_for(serve, body):
    system = await serve("hermes")
    answered = (await ask(system, **body)).json()
    assert answered["choices"][0]["message"]["content"] == ANSWERS["hermes"]
    prompt = system.workers["decode-0"].attempts[0].spec.prompt_token_ids
    untold = (await system.http.post("/tokenize", json={"messages": ASKED})).json()["tokens"]
    assert list(prompt) == untold


async def test_one_call_at_a_time(serve):
    system = await serve("hermes")
    made = taken_apart((await ask(system, parallel_tool_calls=False)).json())
    assert [call[1] for call in made["calls"].values()] == ["weather"]
    chunks = [data for data, _ in events_of(await ask(system, parallel_tool_calls=False, stream=True))]
    assert [call[1] for call in put_together(chunks)["calls"].values()] == ["weather"]


async def test_logprobs_and_token_ids_are_all_there(serve):
    system = await serve("thinks")
    more = {"logprobs": True, "return_token_ids": True}
    whole = (await ask(system, **more)).json()["choices"][0]
    chunks = [data for data, _ in events_of(await ask(system, stream=True, **more))]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    token_ids = [token_id for choice in choices for token_id in choice.get("token_ids", ())]
    assert token_ids == whole["token_ids"]
    entries = [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
    assert entries == whole["logprobs"]["content"]
    assert len(entries) == len(token_ids)


async def test_reasoning_without_tools(serve):
    system = await serve("thinks", "<think>\nHm.\n</think>\n\nYes.")
    body = (await ask(system, tools=None)).json()
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Yes.",
        "refusal": None,
        "reasoning_content": "Hm.",
    }
    completion = await system.complete(max_tokens=100)
    assert completion.json()["choices"][0]["text"].startswith("<think>")


async def test_tokens_of_reasoning_are_counted(serve, folder_of):
    text = "<think>\nHm.\n</think>\n\nYes."
    system = await serve("thinks", text)
    _, tokenizer = folder_of("thinks")
    usage = ChatCompletion.model_validate((await ask(system, tools=None, n=2)).json()).usage
    num_tokens = usage.completion_tokens_details.reasoning_tokens
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(token_ids[: num_tokens // 2]).rstrip() == "<think>\nHm.\n</think>"
    more = {"tools": None, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    events = events_of(await ask(system, {"idempotency-key": "k"}, **more))
    assert events[-1][0]["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_tokens}
    for _, event_id in events[:-1]:
        rest = events_of(await ask(system, {"idempotency-key": "k", "last-event-id": event_id}, **more))
        assert rest[-1][0]["usage"] == events[-1][0]["usage"]


# --- prompts ---------------------------------------------------------------------------------------------------------


def allowing(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}}


CONVERSATION = [
    *ASKED,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}},
            {"id": "call_2", "type": "function", "function": {"name": "clock", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "user", "content": "And now?"},
]


@pytest.fixture
def as_transformers(folder_of):
    def render(kind, tools):
        folder, _ = folder_of(kind)
        conversation = json.loads(json.dumps(CONVERSATION))
        conversation[1]["content"] = ""
        for call in conversation[1]["tool_calls"]:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        reference = PreTrainedTokenizerFast.from_pretrained(folder, chat_template=TEMPLATES[kind])
        return reference.apply_chat_template(conversation, tools=tools, add_generation_prompt=True, tokenize=False)

    return render


@pytest.mark.parametrize("kind", ["hermes", "llama3", "mistral"])
@pytest.mark.parametrize("tools", [None, [CLOCK]])
async def test_prompt_is_what_transformers_renders(serve, as_transformers, kind, tools):
    system = await serve(kind)
    await ask(system, messages=CONVERSATION, tools=tools)
    prompt = list(system.workers["decode-0"].attempts[0].spec.prompt_token_ids)
    shown = (await system.http.post("/detokenize", json={"tokens": prompt})).json()["prompt"]
    assert shown == as_transformers(kind, tools)
    asked = {"messages": CONVERSATION, "tools": tools}
    assert (await system.http.post("/tokenize", json=asked)).json()["tokens"] == prompt


async def test_arguments_of_an_earlier_call_may_be_empty(serve):
    """As models and clients write those of a function without parameters."""
    system = await serve("hermes")
    conversation = json.loads(json.dumps(CONVERSATION))
    conversation[1]["tool_calls"][1]["function"]["arguments"] = ""
    asked = [{"messages": messages, "tools": TOOLS} for messages in (conversation, CONVERSATION)]
    empty, written = [(await system.http.post("/tokenize", json=body)).json() for body in asked]
    assert empty["tokens"] == written["tokens"]


async def test_special_text_in_tools_and_arguments_is_ordinary_text(serve):
    system = await serve("hermes")
    attack = json.loads(json.dumps(CONVERSATION))
    attack[1]["tool_calls"][0]["function"]["arguments"] = '{"<|end|>": ["<|system|>"]}'
    await ask(system, messages=attack)
    prompt = list(system.workers["decode-0"].attempts[0].spec.prompt_token_ids)
    assert prompt.count(1) == 1 + len(attack)  # <|end|>: the tools' and each message's
    assert prompt.count(4) == 1  # <|system|>
    shown = (await system.http.post("/detokenize", json={"tokens": prompt})).json()["prompt"]
    assert shown.startswith("<|system|>\n" + json.dumps(TOLD_TOOLS[0], ensure_ascii=False))
    assert '{"<|end|>": ["<|system|>"]}' in shown


# --- what is refused -------------------------------------------------------------------------------------------------


def calling(function, **more):
    call = {"id": "a", "type": "function", "function": function, **more}
    return {"messages": [*ASKED, {"role": "assistant", "tool_calls": [call]}]}


REFUSED = {
    "choice-unknown-name": (
        {"tool_choice": {"type": "function", "function": {"name": "rm"}}},
        "tool_choice",
        "invalid_value",
    ),
    "choice-without-tools": ({"tools": [], "tool_choice": "auto"}, "tool_choice", "invalid_value"),
    "choice-word": ({"tool_choice": "maybe"}, "tool_choice", "invalid_value"),
    "choice-number": ({"tool_choice": 1}, "tool_choice", "invalid_value"),
    "choice-required-without-tools": ({"tools": None, "tool_choice": "required"}, "tool_choice", "invalid_value"),
    "choice-unnamed": (
        {"tool_choice": {"type": "function", "function": {}}},
        "tool_choice.function.name",
        "invalid_value",
    ),
    "choice-bare-function": ({"tool_choice": {"type": "function"}}, "tool_choice", "invalid_value"),
    "allowed-mode": (allowing("never", "clock"), "tool_choice.allowed_tools", "invalid_value"),
    "allowed-none": (allowing("auto"), "tool_choice.allowed_tools.tools", "invalid_value"),
    "allowed-unknown": (allowing("auto", "clock", "rm"), "tool_choice", "invalid_value"),
    "allowed-text": (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["clock"]}}},
        "tool_choice.allowed_tools.tools[0]",
        "invalid_value",
    ),
    "tools-object": ({"tools": {}}, "tools", "invalid_type"),
    "tool-text": ({"tools": ["f"]}, "tools[0]", "invalid_value"),
    "tool-type": ({"tools": [{**CLOCK, "type": "custom"}]}, "tools[0]", "invalid_value"),
    "tool-name": (
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools[0].function.name",
        "invalid_value",
    ),
    "tool-parameters": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        "tools[0].function.parameters",
        "invalid_value",
    ),
    "tool-description": (
        {"tools": [{"type": "function", "function": {"name": "f", "description": 1}}]},
        "tools[0].function.description",
        "invalid_value",
    ),
    "tool-strict": (
        {"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]},
        "tools[0].function.strict",
        "invalid_value",
    ),
    "tool-surrogate": (
        {"tools": [{"type": "function", "function": {"name": "f", "description": "\ud800"}}]},
        "tools[0].function",
        "invalid_encoding",
    ),
    "tools-twice": ({"tools": [CLOCK, CLOCK]}, "tools", "invalid_value"),
    "tools-many": (
        {"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(129)]},
        "tools",
        None,
    ),
    "tools-long": (
        {"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 100_000}}]},
        "messages",
        "context_length_exceeded",
    ),
    "parallel-number": ({"parallel_tool_calls": 1}, "parallel_tool_calls", "invalid_type"),
    "call-name": (calling({"name": "", "arguments": "{}"}), "messages[1].tool_calls[0].function.name", None),
    "call-arguments-object": (
        calling({"name": "f", "arguments": {}}),
        "messages[1].tool_calls[0].function.arguments",
        "invalid_value",
    ),
    "call-arguments-list": (
        calling({"name": "f", "arguments": "[]"}),
        "messages[1].tool_calls[0].function.arguments",
        "invalid_value",
    ),
    "call-arguments-nan": (
        calling({"name": "f", "arguments": '{"a": NaN}'}),
        "messages[1].tool_calls[0].function.arguments",
        "invalid_value",
    ),
    "call-arguments-infinite": (
        calling({"name": "f", "arguments": '{"a": [1e400]}'}),
        "messages[1].tool_calls[0].function.arguments",
        "invalid_value",
    ),
    "tool-infinite": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"minimum": float("-inf")}}}]},
        "tools[0].function",
        "invalid_value",
    ),
    "call-arguments-deep": (
        calling({"name": "f", "arguments": '{"a":' * 70 + "1" + "}" * 70}),
        "messages[1].tool_calls[0].function.arguments",
        "invalid_value",
    ),
    "call-id": (calling({"name": "f", "arguments": "{}"}, id="x" * 65), "messages[1].tool_calls[0].id", None),
    "call-type": (calling({"name": "f", "arguments": "{}"}, type="custom"), "messages[1].tool_calls[0]", None),
    "calls-text": ({"messages": [*ASKED, {"role": "assistant", "tool_calls": "f"}]}, "messages[1].tool_calls", None),
    "calls-of-the-user": (
        {"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]},
        "messages[0].tool_calls",
        "unsupported_parameter",
    ),
    "tool_call_id": (
        {"messages": [*ASKED, {"role": "tool", "content": "a", "tool_call_id": 5}]},
        "messages[1].tool_call_id",
        None,
    ),
    "tool_call_id-later": (
        {
            "messages": [
                *ASKED,
                {"role": "tool", "content": "a", "tool_call_id": "c"},
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                },
            ]
        },
        "messages[1].tool_call_id",
        "invalid_value",
    ),
    "tool_call_id-null": (
        {"messages": [*ASKED, {"role": "tool", "content": "a", "tool_call_id": None}]},
        "messages[1].tool_call_id",
        "missing_required_parameter",
    ),
    "tool_call_id-missing": (
        {"messages": [*ASKED, {"role": "tool", "content": "a"}]},
        "messages[1].tool_call_id",
        "missing_required_parameter",
    ),
    "reasoning": (
        {"messages": [*ASKED, {"role": "assistant", "content": "a", "reasoning_content": 5}]},
        "messages[1].reasoning_content",
        None,
    ),
}


@pytest.fixture(scope="module")
def hermes(folder_of):
    return ModelTokenizer(read_model_files(folder_of("hermes")[0]))


@pytest.mark.parametrize("row", REFUSED, ids=REFUSED)
async def test_refused(hermes, row):
    body, field, code = REFUSED[row]

    async def encode():
        text = json.dumps({"messages": ASKED, "tools": TOOLS, **body})
        request, _ = parse(text.replace("-Infinity", "-1e999").encode(), ChatRequest)
        call = request.call()
        return await encode_conversation(hermes, call.messages, call.tools, max_chars=10_000)

    with pytest.raises(InvalidRequest) as refused:
        await encode()
    error = status.openai_error(refused.value)["error"]
    assert error["param"] == field, error
    assert code is None or error["code"] == code
    assert len(error["message"]) < 500


async def test_refusal_is_an_answer(serve):
    system = await serve("hermes", "ok")
    response = await system.http.post(
        "/v1/chat/completions", json={"messages": ASKED, "tools": TOOLS, "tool_choice": "sometimes"}
    )
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize("kind", ["unknown", None], ids=["unknown-format", "no-tools"])
async def test_model_without_tools_says_so(serve, make_system, kind):
    system = await (serve(kind, "ok") if kind else make_system())
    for body, field in (({"tools": TOOLS}, "tools"), ({"messages": CONVERSATION}, "messages")):
        response = await system.http.post("/v1/chat/completions", json={"messages": ASKED, **body})
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["param"], error["code"]) == (field, "unsupported_parameter")
        assert "chat template" in error["message"]


# --- special tokens that answers show --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mistral", "llama3", "hermes"])
def test_answers_show_the_special_token_that_begins_calls(folder_of, kind):
    folder, tokenizer = folder_of(kind)
    model = ModelTokenizer(read_model_files(folder))
    detokenizer = model.detokenizer()
    text = "é <|end|>[TOOL_CALLS] <|python_tag|>x" if kind != "hermes" else "é <|end|><|more|>x"
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    shown = "".join(detokenizer.push((token_id,)) for token_id in token_ids) + detokenizer.finish()
    assert shown == text.replace("<|end|>", "").replace("<|more|>", "")


@pytest.mark.parametrize("special", [True, False])
def test_answers_show_marks_of_calls_that_are_tokens(folder_of, special):
    folder, tokenizer = folder_of("hermes")
    marks = [AddedToken(mark, special=special, normalized=False) for mark in ("<tool_call>", "</tool_call>")]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(marks)
    tokenizer.save(str(folder / "tokenizer.json"))
    model = ModelTokenizer(read_model_files(folder))
    assert model.has_call_token
    text = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    detokenizer = model.detokenizer()
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert {tokenizer.token_to_id(mark.content) for mark in marks} < set(token_ids)
    assert detokenizer.push(token_ids) + detokenizer.finish() == text


SPELLED = '[TOOL_CALLS][{"name": "weather", "arguments": {"rm": "-rf"}}]'
MEANT = '[TOOL_CALLS] [{"name": "clock", "arguments": {}}]'


@pytest.mark.parametrize("group", [1, 5])
@pytest.mark.parametrize("stop", [None, "CALLS]x"])
async def test_a_mark_that_other_tokens_spell_begins_no_call_where_tools_are_strict(serve, group, stop):
    """An answer's form keeps to the schema what follows the token, and leaves any other text as it is."""
    system = await serve("mistral", [SPELLED[:5], SPELLED[5:] + " ", MEANT], group=group)
    events = events_of(await ask(system, {"idempotency-key": "k"}, stream=True, stop=stop))
    whole = put_together([data for data, _ in events])
    for made in (whole, taken_apart((await ask(system, stop=stop)).json())):
        assert made["content"] == SPELLED
        assert [call[1:] for call in made["calls"].values()] == [["clock", "{}"]]
    for count, (_, event_id) in enumerate(events, 1):
        headers = {"idempotency-key": "k", "last-event-id": event_id}
        rest = events_of(await ask(system, headers, stream=True, stop=stop))
        assert put_together([data for data, _ in [*events[:count], *rest]]) == whole
    asked = {"input": "a", "tools": [{"type": "function", **tool["function"]} for tool in TOOLS]}
    response = (await system.http.post("/v1/responses", json=asked)).json()
    assert [item["type"] for item in response["output"]] == ["message", "function_call"]
    assert response["output"][0]["content"][0]["text"] == SPELLED
    lenient = [{"type": "function", "function": {**WEATHER["function"], "strict": False}}, CLOCK]
    made = taken_apart((await ask(system, tools=lenient)).json())
    assert [call[1] for call in made["calls"].values()] == ["weather", "clock"]


async def test_an_answer_that_ends_in_a_mark_keeps_it(serve):
    system = await serve("mistral", ["a", "[TOOL_CALLS]"])
    made = taken_apart((await ask(system)).json())
    assert (made["content"], made["calls"]) == ("a[TOOL_CALLS]", {})
    system = await serve("mistral", ["b", "[TOOL_CALLS]"])
    for stop, content in [("CALLS]", "b[TOOL_"), ("[", "b")]:
        events = events_of(await ask(system, stream=True, stop=stop))
        assert put_together([data for data, _ in events])["content"] == content


# --- calls that must be made -----------------------------------------------------------------------------------------

CLOSED = {**WEATHER["function"]["parameters"], "additionalProperties": False}
"""Members that a schema does not name are not invented, where it says nothing of others."""
WEATHER_FORM = CalledFunction("weather", json.dumps(CLOSED, separators=(",", ":")))
CLOCK_FORM = CalledFunction("clock", '{"type":"object","properties":{},"additionalProperties":false}')
NAMED = {"tool_choice": {"type": "function", "function": {"name": "clock"}}}
YES = '{"const":"yes"}'
SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": json.loads(YES)}}}
HERMES = ToolFormat.HERMES

STRICT = ToolCalls(ToolFormat.MISTRAL, (WEATHER_FORM, CalledFunction("clock", ANY_OBJECT)), is_optional=True)
"""The weather's arguments keep to its schema, should it be called; the clock's are any object."""

FORMS = {
    "auto": ("hermes", {}, None),
    "allowed-auto": ("hermes", allowing("auto", "clock"), None),
    "none": ("hermes", {"tool_choice": "none"}, None),
    "required": ("hermes", {"tool_choice": "required"}, AnswerForm("", ToolCalls(HERMES, (WEATHER_FORM, CLOCK_FORM)))),
    "named": ("hermes", NAMED, AnswerForm("", ToolCalls(HERMES, (CLOCK_FORM,), is_parallel=False))),
    "allowed-required": ("hermes", allowing("required", "clock"), AnswerForm("", ToolCalls(HERMES, (CLOCK_FORM,)))),
    "one-call": (
        "hermes",
        {"tool_choice": "required", "parallel_tool_calls": False},
        AnswerForm("", ToolCalls(HERMES, (WEATHER_FORM, CLOCK_FORM), is_parallel=False)),
    ),
    "llama3": ("llama3", NAMED, AnswerForm("", ToolCalls(ToolFormat.LLAMA3, (CLOCK_FORM,), is_parallel=False))),
    "mistral": ("mistral", NAMED, AnswerForm("", ToolCalls(ToolFormat.MISTRAL, (CLOCK_FORM,), is_parallel=False))),
    "thinks": (
        "thinks",
        NAMED,
        AnswerForm("", ToolCalls(HERMES, (CLOCK_FORM,), is_parallel=False), ThoughtsForm.MAY_COME),
    ),
    "thinks-at-once": (
        "thinks-at-once",
        NAMED,
        AnswerForm("", ToolCalls(HERMES, (CLOCK_FORM,), is_parallel=False), ThoughtsForm.IS_OPEN),
    ),
    "strict": ("mistral", {}, AnswerForm("", STRICT)),
    "strict-named": ("mistral", NAMED, AnswerForm("", ToolCalls(ToolFormat.MISTRAL, (CLOCK_FORM,), is_parallel=False))),
    "strict-none": ("mistral", {"tool_choice": "none"}, None),
    "strict-one-call": ("mistral", {"parallel_tool_calls": False}, AnswerForm("", replace(STRICT, is_parallel=False))),
    "not-strict": ("mistral", {"tools": [CLOCK]}, None),
    "strict-without-a-token": ("hermes", {}, None),
    "strict-llama3": ("llama3", {}, None),
    "schema": ("hermes", {"tools": None, **SCHEMA}, AnswerForm(YES)),
    "schema-thinks": ("thinks", {"tools": None, **SCHEMA}, AnswerForm(YES, None, ThoughtsForm.MAY_COME)),
    "schema-auto": ("hermes", SCHEMA, AnswerForm(YES, ToolCalls(HERMES, (WEATHER_FORM, CLOCK_FORM)))),
    "schema-named": (
        "hermes",
        {**SCHEMA, **NAMED},
        AnswerForm("", ToolCalls(HERMES, (CLOCK_FORM,), is_parallel=False)),
    ),
    "schema-none": ("hermes", {**SCHEMA, "tool_choice": "none"}, AnswerForm(YES)),
}


@pytest.mark.parametrize("row", FORMS, ids=FORMS)
async def test_workers_are_told_what_an_answer_may_be(serve, row):
    kind, body, form = FORMS[row]
    system = await serve(kind, "ok")
    await ask(system, **body)
    (attempt,) = system.workers["decode-0"].attempts
    assert read_form(attempt.spec) == form
    # What is kept of the call, for another attempt or another gateway, says the same.
    request, _ = parse(json.dumps({"messages": ASKED, "tools": TOOLS, **body}).encode(), ChatRequest)
    with await system.gateway.requests.accept(request.call()) as accepted:
        stored, _ = decode_call(encode_call(accepted.to_stored(), created_unix_s=1), request_id="r")
        assert stored.choices[0].sampling.form == form


async def test_the_model_is_told_of_allowed_tools_only(serve):
    system = await serve("hermes", "ok")
    for body in ({"tools": [CLOCK]}, allowing("auto", "clock"), allowing("required", "clock"), NAMED, {}):
        await ask(system, **body)
    alone, allowed, required, named, both = (a.spec.prompt_token_ids for a in system.workers["decode-0"].attempts)
    assert alone == allowed == required != both == named


async def test_only_allowed_tools_are_calls(serve):
    system = await serve("hermes")
    made = taken_apart((await ask(system, **allowing("auto", "clock"))).json())
    assert [call[1:] for call in made["calls"].values()] == [["clock", "{}"]]
    assert "weather" in made["content"]


@pytest.mark.parametrize("stream", [False, True])
async def test_json_beside_tools_is_content_and_calls_are_calls(serve, stream):
    system = await serve("hermes", '{"yes": [1]}')
    response = await ask(system, stream=stream, response_format={"type": "json_object"})
    made = put_together([data for data, _ in events_of(response)]) if stream else taken_apart(response.json())
    assert made == {"content": '{"yes": [1]}', "reasoning": "", "calls": {}, "finish_reason": "stop"}
    calling = await serve("hermes")
    response = await ask(calling, stream=stream, response_format={"type": "json_object"})
    made = put_together([data for data, _ in events_of(response)]) if stream else taken_apart(response.json())
    assert [call[1:] for call in made["calls"].values()] == [["weather", ARGUMENTS], ["clock", "{}"]]
    assert made["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("kind", ["thinks", "thinks-at-once"])
async def test_thoughts_before_json_are_not_content(serve, kind):
    thoughts = ("<think>\n" if kind == "thinks" else "") + "Yes or no?\n</think>\n\n"
    system = await serve(kind, thoughts + '"yes"')
    body = {"messages": ASKED, "response_format": {"type": "json_object"}}
    whole = taken_apart((await system.http.post("/v1/chat/completions", json=body)).json())
    assert whole == {"content": '"yes"', "reasoning": "Yes or no?", "calls": {}, "finish_reason": "stop"}
    chunks = events_of(await system.http.post("/v1/chat/completions", json={**body, "stream": True}))
    assert put_together([data for data, _ in chunks]) == whole


UNUSABLE_TOOLS = {
    "keyword": ({"uniqueItems": True}, "parameters of f cannot be used: Unimplemented keys"),
    "type": ({"type": "string"}, "parameters are an object, which those of f are not"),
    "types": ({"type": ["string", "null"]}, "parameters are an object"),
    "infinite": ({"properties": {"a": {"const": float("inf")}}}, "not finite"),
}


@pytest.mark.parametrize("row", UNUSABLE_TOOLS, ids=UNUSABLE_TOOLS)
async def test_tools_that_cannot_be_forced_are_named(serve, row):
    parameters, words = UNUSABLE_TOOLS[row]
    system = await serve("hermes", "ok")
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    body = json.dumps({"messages": ASKED, "tools": [CLOCK, tool], "tool_choice": "required", "max_tokens": 3})
    # JSON has no infinity; a number that is as large is one in Python.
    body = body.replace("Infinity", "1e999")
    response = await system.http.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert words in error["message"]
    assert error["param"] == ("tools[1].function" if row == "infinite" else "tools")
    assert not system.workers["decode-0"].attempts


async def test_schema_at_fault_is_named_where_there_are_tools_too(serve):
    system = await serve("hermes", "ok")
    schema = {"type": "array", "uniqueItems": True}
    response = await system.http.post(
        "/v1/chat/completions",
        json={
            "messages": ASKED,
            "tools": TOOLS,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        },
    )
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "response_format")
    assert "uniqueItems" in error["message"]


@pytest.mark.parametrize(
    ("field", "value"), [("ignore_eos", True), ("min_tokens", 1), ("stop_token_ids", [5])], ids=str
)
async def test_what_contradicts_calls_that_must_be_made(serve, field, value):
    system = await serve("hermes", "ok")
    body = {"messages": ASKED, "tools": TOOLS, field: value}
    refused = await system.http.post("/v1/chat/completions", json={**body, "tool_choice": "required"})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (400, field, "unsupported_parameter")
    assert "tool_choice" in error["message"]
    assert (await system.http.post("/v1/chat/completions", json=body)).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"), [("ignore_eos", True), ("min_tokens", 1), ("stop_token_ids", [5])], ids=str
)
async def test_what_contradicts_strict_tools(serve, field, value):
    system = await serve("mistral", "ok")
    body = {"messages": ASKED, field: value}
    refused = await system.http.post("/v1/chat/completions", json={**body, "tools": TOOLS})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (400, field, "unsupported_parameter")
    assert "strict tools" in error["message"]
    for harmless in ({**body, "tools": [CLOCK]}, {"messages": ASKED, "tools": TOOLS, "stop": "x"}):
        assert (await system.http.post("/v1/chat/completions", json=harmless)).status_code == 200


async def test_several_answers_with_log_probabilities_and_forced_calls(serve):
    text = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    system = await serve("hermes", text)
    body = {"tool_choice": "required", "n": 3, "logprobs": True, "top_logprobs": 1}
    choices = (await ask(system, **body)).json()["choices"]
    for choice in choices:
        assert [call["function"] for call in choice["message"]["tool_calls"]] == [{"name": "clock", "arguments": "{}"}]
        assert choice["message"]["content"] is None
        assert choice["finish_reason"] == "tool_calls"
        # Every token has one, those of the marks and of the end too, as for other answers.
        assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == text + "<|end|>"
    assert len({call["id"] for choice in choices for call in choice["message"]["tool_calls"]}) == 3
    chunks = [data for data, _ in events_of(await ask(system, stream=True, **body))]
    for index in range(3):
        shown = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        entries = [entry for choice in shown for entry in (choice["logprobs"] or {"content": []})["content"]]
        assert "".join(entry["token"] for entry in entries) == text + "<|end|>"
        assert shown[-1]["finish_reason"] == "tool_calls"


class Trip(pydantic.BaseModel):
    """Goes somewhere."""

    to: str
    days: Literal[1, 2, 3]
    by: Literal["train", "foot"] | None


@pytest.mark.parametrize("choice", ["required", "auto"])
async def test_the_official_client_parses_strict_calls(serve, choice):
    system = await serve(
        "mistral", '[TOOL_CALLS] [{"name": "Trip", "arguments": {"to": "Bern", "days": 2, "by": null}}]'
    )
    async with openai.AsyncOpenAI(base_url=f"{system.base_url}/v1", api_key="none") as client:
        completion = await client.chat.completions.parse(
            model="tiny", messages=ASKED, tools=[openai.pydantic_function_tool(Trip)], tool_choice=choice
        )
    (call,) = completion.choices[0].message.tool_calls
    assert call.function.parsed_arguments == Trip(to="Bern", days=2, by=None)
    (attempt,) = system.workers["decode-0"].attempts
    (function,) = read_form(attempt.spec).tool_calls.functions
    assert json.loads(function.parameters)["required"] == ["to", "days", "by"]
    assert attempt.spec.tool_calls.is_optional == (choice == "auto")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_chars", [1, 12, 33])
async def test_what_is_left_of_a_forced_call_is_no_content(serve, folder_of, stream, num_chars):
    text = '<tool_call>\n{"name": "weather", '[:num_chars]
    system = await serve("hermes", text, ends=False)
    max_tokens = len(folder_of("hermes")[1].encode(text, add_special_tokens=False).ids)
    response = await ask(system, tool_choice="required", stream=stream, max_tokens=max_tokens)
    chunks = [event for event, *_ in events_of(response) if event != "[DONE]"] if stream else []
    made = put_together(chunks) if stream else taken_apart(response.json())
    assert (made["content"] or "", made["calls"], made["finish_reason"]) == ("", {}, "length")
    free = await ask(system, tool_choice="auto", max_tokens=max_tokens)
    assert taken_apart(free.json())["content"]


async def test_a_forced_call_that_is_cut_off(serve, folder_of):
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Kx'
    system = await serve("hermes", text, ends=False)
    num_tokens = len(folder_of("hermes")[1].encode(text, add_special_tokens=False).ids)
    response = await ask(system, tool_choice="required", max_tokens=num_tokens - 1)
    made = taken_apart(response.json())
    assert [call[1:] for call in made["calls"].values()] == [["weather", '{"city": "K']]
    assert made["finish_reason"] == "length"


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "properties": {}}])
async def test_a_forced_call_of_a_function_without_parameters_invents_none(serve, parameters):
    system = await serve("hermes", '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>')
    tool = {"type": "function", "function": {"name": "clock", "parameters": parameters}}
    await ask(system, tools=[tool], tool_choice="required")
    (function,) = system.workers["decode-0"].attempts[-1].spec.tool_calls.functions
    assert json.loads(function.parameters) == {"type": "object", "properties": {}, "additionalProperties": False}


# --- what the chat template is told beside messages and tools ---------------------------------------------------------

TOLD_MORE = "{% if enable_thinking is defined %}({{ enable_thinking }}){% endif %}{{ reasoning_effort or '' }}"


@pytest.fixture
async def told(make_system, pair_type, model_folder, tmp_path):
    shutil.copytree(model_folder, tmp_path / "tiny")
    (tmp_path / "tiny" / "chat_template.jinja").write_text(TEMPLATES["unknown"] + TOLD_MORE)
    system = await make_system(model=tmp_path / "tiny")
    await system.add_pair(pair_type([5, 1]))
    return system


@pytest.mark.parametrize(
    ("path", "said", "shown", "ignored"),
    [
        ("chat/completions", {"chat_template_kwargs": {"enable_thinking": False}}, "(False)", None),
        ("chat/completions", {"enable_thinking": True, "reasoning_effort": "high"}, "(True)high", None),
        ("chat/completions", {"reasoning": {"effort": "low"}, "verbosity": "low"}, "low", "verbosity"),
        ("chat/completions", {"chat_template_kwargs": {"colour": "red"}}, "", "chat_template_kwargs.colour"),
        ("chat/completions", {"reasoning_effort": "none", "verbosity": "medium"}, "(False)", None),
        ("chat/completions", {"reasoning": {"effort": "none"}, "enable_thinking": True}, "(True)", None),
        ("responses", {"reasoning": {"effort": "none"}}, "(False)", None),
        ("responses", {"reasoning": {"effort": "low"}, "text": {"verbosity": "high"}}, "low", "text.verbosity"),
        ("responses", {"enable_thinking": False, "text": {"verbosity": "medium"}}, "(False)", None),
    ],
)
async def test_what_the_template_is_told(told, path, said, shown, ignored):
    body = {"messages": ASKED} if path == "chat/completions" else {"input": "How is it?"}
    response = await told.http.post(f"/v1/{path}", json={**body, **said})
    assert (response.status_code, response.headers.get("x-tandem-ignored")) == (200, ignored), response.text
    token_ids = list(told.workers["decode-0"].attempts[-1].spec.prompt_token_ids)
    prompt = (await told.http.post("/detokenize", json={"tokens": token_ids})).json()["prompt"]
    assert prompt.endswith(f"<|assistant|>\n{shown}")


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": "<|end|>"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {f"a{n}": n for n in range(17)}}, "chat_template_kwargs"),
        ({"reasoning_effort": "<|end|>"}, "reasoning_effort"),
        ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "enable_thinking"),
        ({"reasoning": {"max_tokens": 5}}, "reasoning.max_tokens"),
    ],
)
async def test_what_the_template_cannot_be_told(told, said, field):
    error = (await told.http.post("/v1/chat/completions", json={"messages": ASKED, **said})).json()["error"]
    assert error["param"] == field


# --- stop texts beside forms ------------------------------------------------------------------------------------------


async def test_a_stop_text_does_not_end_calls_that_must_be_made(serve):
    system = await serve("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "a stop"}}\n</tool_call>')
    response = await ask(system, tool_choice="required", stop=["stop", "Observation:"])
    made = taken_apart(response.json())
    assert [call[1:] for call in made["calls"].values()] == [["weather", '{"city": "a stop"}']]
    assert made["finish_reason"] == "tool_calls"


async def test_a_stop_text_cuts_json_and_the_answer_says_so(serve):
    system = await serve("hermes", '{"a": "x stop y"}')
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    for stop, content, reason in ((["stop"], '{"a": "x ', "length"), (["never"], '{"a": "x stop y"}', "stop")):
        body = {"messages": ASKED, "response_format": form, "stop": stop}
        (choice,) = (await system.http.post("/v1/chat/completions", json=body)).json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (content, reason)


async def test_zero_and_empty_values_that_others_take(serve):
    system = await serve("hermes", "hello")
    for body in ({"top_p": 0}, {"stop": ""}, {"stop": [f"s{n}" for n in range(16)]}):
        response = await system.http.post("/v1/chat/completions", json={"messages": ASKED, **body})
        assert (response.status_code, response.json()["choices"][0]["message"]["content"]) == (200, "hello")
    body = {"input": "How is it?", "truncation": "auto"}
    assert (await system.http.post("/v1/responses", json=body)).status_code == 200
