"""The official `openai` package against a real cluster, unmodified. Reads as a list of what works."""

import asyncio
import io
import json
import time
from typing import Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from benchmarks.cluster import Cluster
from tests.waiting import HANG_LIMIT_S

MODEL = "tandem-demo"
ASK = [{"role": "user", "content": "Write a function that returns the length of a list."}]
LONG = 1500
"""Tokens of an answer that is not over when its reader leaves."""


class Verdict(BaseModel):
    """A form that even a model which knows nothing fills in with few tokens, at temperature 0."""

    language: Literal["python", "c", "rust"]
    is_function: bool
    stars: int = Field(ge=1, le=5)


CLOCK = {
    "name": "clock",
    "description": "The time in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Delft", "Turin"]}, "hours": {"enum": [12, 24]}},
        "required": ["city", "hours"],
        "additionalProperties": False,
    },
}
"""With arguments that a model which was not taught any functions fills in with few tokens."""


# --- models ----------------------------------------------------------------------------------------------------------


def test_models_are_listed_and_shown(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    shown = client.models.retrieve(MODEL)
    assert (shown.object, shown.owned_by) == ("model", "tandem")


# --- chat ------------------------------------------------------------------------------------------------------------


def test_a_chat_answer_has_all_that_the_client_reads(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASK, max_completion_tokens=10, seed=7)
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    assert abs(answer.created - time.time()) < 300
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content is not None
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert 1 <= answer.usage.completion_tokens <= 10
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_brings_the_same_text(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "messages": ASK, "max_completion_tokens": 24, "seed": 3}
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    *parts, last = chunks
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
    assert parts[0].choices[0].delta.role == "assistant"
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert (last.choices, last.usage and last.usage.completion_tokens) == ([], whole.usage.completion_tokens)


def test_several_answers_log_probabilities_and_members_that_are_only_ours(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        n=3,
        max_completion_tokens=5,
        logprobs=True,
        top_logprobs=2,
        extra_body={"top_k": 40, "ignore_eos": True, "return_token_ids": True},
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert len(choice.logprobs.content or ()) == len(choice.token_ids) == 5
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content or ())


def test_equal_seeds_give_equal_answers(client: openai.OpenAI) -> None:
    def text(seed: int) -> str | None:
        answer = client.chat.completions.create(
            model=MODEL, messages=ASK, seed=seed, temperature=1, max_completion_tokens=20
        )
        return answer.choices[0].message.content

    assert text(11) == text(11)
    assert len({text(seed) for seed in range(4)}) > 1


def test_a_stop_text_ends_the_answer(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "messages": ASK, "temperature": 0, "max_completion_tokens": 30}
    text = client.chat.completions.create(**asked).choices[0].message.content or ""
    stop = text[5:8]
    stopped = client.chat.completions.create(**asked, stop=[stop]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == (text.partition(stop)[0], "stop")


# --- structured output -----------------------------------------------------------------------------------------------


def test_parse_gives_an_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Verdict, max_completion_tokens=60)
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Verdict)
    assert answer.choices[0].finish_reason == "stop"


def test_the_streaming_helper_parses_what_has_come(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "messages": ASK, "response_format": Verdict, "temperature": 0}
    with client.chat.completions.stream(**asked) as stream:
        texts = [event.delta for event in stream if event.type == "content.delta"]
        choice = stream.get_final_completion().choices[0]
    assert "".join(texts) == choice.message.content
    assert isinstance(choice.message.parsed, Verdict)


async def test_many_parse_at_once(async_client: openai.AsyncOpenAI) -> None:
    answers = await asyncio.gather(
        *(
            async_client.chat.completions.parse(
                model=MODEL, messages=ASK, response_format=Verdict, temperature=0, seed=seed
            )
            for seed in range(3)
        )
    )
    assert all(isinstance(answer.choices[0].message.parsed, Verdict) for answer in answers)


def test_an_object_that_was_cut_off_is_told(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Verdict, max_completion_tokens=3)


# --- functions -------------------------------------------------------------------------------------------------------


def test_a_function_is_called_and_its_result_taken(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "tools": [{"type": "function", "function": CLOCK}], "temperature": 0}
    answer = client.chat.completions.create(**asked, messages=ASK, tool_choice="required", parallel_tool_calls=False)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or ()
    assert call.function.name == "clock"
    assert_is_clock(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "12:00"}
    heard = [*ASK, choice.message.model_dump(exclude_none=True), result]
    after = client.chat.completions.create(**asked, messages=heard, tool_choice="none", max_completion_tokens=8)
    assert after.choices[0].message.tool_calls is None
    assert after.choices[0].finish_reason in ("stop", "length")


def test_a_call_is_streamed_and_parsed(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Verdict)
    named = {"type": "function", "function": {"name": "Verdict"}}
    asked = {"model": MODEL, "messages": ASK, "tools": [tool], "tool_choice": named, "temperature": 0}
    with client.chat.completions.stream(**asked) as stream:
        deltas = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert len(deltas) > 1
    assert "".join(deltas) == call.function.arguments
    assert isinstance(call.function.parsed_arguments, Verdict)


def assert_is_clock(arguments: str) -> None:
    said = json.loads(arguments)
    assert said.keys() == {"city", "hours"}
    assert said["city"] in ("Delft", "Turin")
    assert said["hours"] in (12, 24)


# --- responses -------------------------------------------------------------------------------------------------------


def test_a_response_and_its_stream(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "instructions": "Be brief.", "input": "Write a loop.", "temperature": 0}
    answer = client.responses.create(**asked, max_output_tokens=16)
    assert answer.id.startswith("resp_")
    assert (answer.status, answer.incomplete_details and answer.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    with client.responses.stream(**asked, max_output_tokens=16) as stream:
        events = list(stream)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == answer.output_text
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.usage.output_tokens == answer.usage.output_tokens == 16


def test_a_response_is_parsed(client: openai.OpenAI) -> None:
    answer = client.responses.parse(model=MODEL, input="Judge this.", text_format=Verdict, temperature=0)
    assert isinstance(answer.output_parsed, Verdict)


def test_a_response_calls_a_function(client: openai.OpenAI) -> None:
    tool = {"type": "function", "strict": True, **CLOCK}
    answer = client.responses.create(
        model=MODEL, input="What time is it?", tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = answer.output
    assert (call.type, call.name) == ("function_call", "clock")
    assert_is_clock(call.arguments)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "12:00"}
    after = client.responses.create(
        model=MODEL, input=[call.model_dump(exclude_none=True), output], tools=[tool], max_output_tokens=16
    )
    assert after.usage is not None
    assert after.usage.input_tokens > 0


# --- files and batches -----------------------------------------------------------------------------------------------


def test_a_file_of_requests_is_answered(client: openai.OpenAI) -> None:
    body = {"model": MODEL, "messages": ASK, "max_completion_tokens": 4}
    lines = [
        json.dumps({"custom_id": f"row-{n}", "method": "POST", "url": "/v1/chat/completions", "body": body})
        for n in range(5)
    ]
    given = client.files.create(file=("rows.jsonl", io.BytesIO("\n".join(lines).encode())), purpose="batch")
    assert client.files.content(given.id).text.splitlines() == lines
    batch = client.batches.create(
        input_file_id=given.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"for": "this"}
    )
    end = time.monotonic() + HANG_LIMIT_S
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < end, batch
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    assert (batch.status, batch.metadata) == ("completed", {"for": "this"})
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (5, 0)
    assert batch.output_file_id is not None
    results = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert sorted(result["custom_id"] for result in results) == [f"row-{n}" for n in range(5)]
    assert all(result["response"]["status_code"] == 200 for result in results)
    assert client.files.delete(given.id).deleted


# --- completions -----------------------------------------------------------------------------------------------------


def test_a_text_is_gone_on_with(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["def length(", "import "], echo=True, max_tokens=6)
    assert answer.id.startswith("cmpl-")
    assert [choice.text[:7] for choice in answer.choices] == ["def len", "import "]


async def test_an_async_stream_of_a_text(async_client: openai.AsyncOpenAI) -> None:
    stream = await async_client.completions.create(
        model=MODEL, prompt="def length(", max_tokens=8, stream=True, extra_body={"ignore_eos": True}
    )
    async with stream:
        reasons = [choice.finish_reason async for part in stream for choice in part.choices]
    assert reasons[-1] == "length"


# --- headers, names, retries -----------------------------------------------------------------------------------------


def test_the_raw_response_has_our_headers(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=ASK, max_completion_tokens=2, extra_body={"no_such_member": 1}
    )
    assert raw.status_code == 200
    assert raw.headers["x-tandem-model"] == MODEL
    assert raw.headers["x-tandem-ignored"] == "no_such_member"
    answer = raw.parse()
    assert answer.id == f"chatcmpl-{raw.headers['x-request-id']}"
    assert answer._request_id == raw.headers["x-request-id"]


def test_what_is_sent_twice_with_a_key_is_computed_once(
    client: openai.OpenAI, cluster: Cluster, keys: dict[str, str]
) -> None:
    def num_generated() -> float:
        metrics = httpx.get(f"{cluster.http}/metrics", headers={"authorization": f"Bearer {keys['operator']}"}).text
        return sum(
            float(line.split()[-1]) for line in metrics.splitlines() if line.startswith("tandem_generated_tokens_total")
        )

    before = num_generated()
    asked = {"model": MODEL, "messages": ASK, "max_completion_tokens": 8, "temperature": 1}
    first, again = (
        client.chat.completions.create(**asked, extra_headers={"Idempotency-Key": "order-4711"}) for _ in range(2)
    )
    assert (again.id, again.choices) == (first.id, first.choices)
    assert first.usage is not None
    assert num_generated() - before == first.usage.completion_tokens
    with pytest.raises(openai.ConflictError) as caught:
        client.chat.completions.create(**{**asked, "seed": 2}, extra_headers={"Idempotency-Key": "order-4711"})
    assert caught.value.code == "idempotency_conflict"
    # The client does not send again what could only meet the same.
    assert caught.value.response.headers["x-should-retry"] == "false"


# --- errors ----------------------------------------------------------------------------------------------------------


def test_a_bad_value_is_a_bad_request_that_names_it(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=ASK, temperature=3)
    assert (caught.value.param, caught.value.code, caught.value.type) == (
        "temperature",
        "invalid_value",
        "invalid_request_error",
    )
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=ASK, max_completion_tokens=10**6)
    assert caught.value.code == "context_length_exceeded"


def test_what_is_not_served_is_refused_in_words(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="gives no embeddings"):
        client.embeddings.create(model=MODEL, input="a", encoding_format="float")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=ASK, modalities=["text", "audio"])
    assert caught.value.code == "unsupported_parameter"


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-0", messages=ASK)
    assert caught.value.code == "model_not_found"


def test_a_wrong_key_is_an_authentication_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        client.with_options(api_key="tandem-nobody").models.list()
    assert caught.value.code == "invalid_api_key"


def test_what_a_key_does_not_allow_is_a_permission_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.PermissionDeniedError):
        client.chat.completions.create(model=MODEL, messages=ASK, extra_body={"service_class": "critical"})


def test_a_tenants_limit_is_a_rate_limit_error_with_a_time(client: openai.OpenAI, keys: dict[str, str]) -> None:
    trial = client.with_options(api_key=keys["trial"], max_retries=0)
    ask = {"model": MODEL, "messages": ASK, "max_completion_tokens": 1}
    raw = trial.chat.completions.with_raw_response.create(**ask)
    assert raw.headers["x-ratelimit-remaining-requests"] == "0"
    with pytest.raises(openai.RateLimitError) as caught:
        trial.chat.completions.create(**ask)
    assert caught.value.code == "rate_limit_exceeded"
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60


def test_a_timeout_of_the_client_is_a_timeout_error(client: openai.OpenAI) -> None:
    impatient = client.with_options(timeout=0.05, max_retries=0)
    with pytest.raises(openai.APITimeoutError):
        impatient.chat.completions.create(
            model=MODEL, messages=ASK, max_completion_tokens=LONG, extra_body={"ignore_eos": True}
        )


# --- leaving ---------------------------------------------------------------------------------------------------------


async def test_a_stream_that_is_closed_leaves_nothing_running(
    async_client: openai.AsyncOpenAI, cluster: Cluster, keys: dict[str, str]
) -> None:
    stream = await async_client.chat.completions.create(
        model=MODEL, messages=ASK, max_completion_tokens=LONG, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(aiter(stream))
    await stream.close()
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {keys['operator']}"}) as operator:
        async with asyncio.timeout(HANG_LIMIT_S):
            while not _is_idle((await operator.get(f"{cluster.http}/cluster")).json()):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)


def _is_idle(state: dict) -> bool:
    pages = [worker["pages"] for worker in state["workers"]]
    return state["requests"] == {"queued": 0, "running": 0} and all(
        each["reserved"] == each["used"] == 0 for each in pages
    )
