"""What OpenAI's API has beside generating: tokens of texts, echo, fingerprints, and what is refused by name."""

import json

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

ANSWER_TEXT = "hello world, naïve café"


@pytest.fixture
async def system(make_system, worker_type, pair_type, tokenizer):
    system = await make_system()
    pair = pair_type([*tokenizer.encode(ANSWER_TEXT, add_special_tokens=False).ids, 1])
    await system.add(worker_type("decode", "decode-0", pair.decode))
    return system


def error_of(response):
    assert response.status_code == 400, response.text
    return response.json()["error"]


# --- what is refused -------------------------------------------------------------------------------------------------


async def test_suffix_is_refused_by_name(system):
    error = error_of(await system.complete(suffix="end"))
    assert (error["param"], error["code"]) == ("suffix", "unsupported_parameter")


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"service_tier": "best"}, "service_tier"),
        ({"prompt_cache_key": "x" * 257}, "prompt_cache_key"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(system, asked, field):
    for response in (await system.chat(**asked), await system.complete(**asked)):
        assert error_of(response)["param"] == field


async def test_length_of_an_answer_is_named_as_it_was_given(system):
    for name in ("max_tokens", "max_completion_tokens"):
        assert error_of(await system.chat(**{name: 0}))["param"] == name
    assert (await system.chat(max_tokens=3, max_completion_tokens=3)).json()["usage"]["completion_tokens"] == 3
    assert error_of(await system.chat(max_tokens=3, max_completion_tokens=4))["param"] == "max_completion_tokens"


# --- hints -----------------------------------------------------------------------------------------------------------


async def test_service_tier_that_served_is_told_to_who_asks(system, read_sse):
    assert "service_tier" not in (await system.chat()).json()
    assert (await system.chat(service_tier="flex")).json()["service_tier"] == "default"
    *chunks, _ = read_sse((await system.chat(service_tier="auto", stream=True)).text)
    assert {chunk["service_tier"] for chunk in chunks} == {"default"}


@pytest.mark.parametrize("field", ["user", "prompt_cache_key"])
async def test_half_a_character_binds_nothing_together(system, field):
    body = json.dumps({"messages": [{"role": "user", "content": "a"}], field: "\ud800"})
    headers = {"content-type": "application/json", "x-request-id": "named"}
    error = error_of(await system.http.post("/v1/chat/completions", content=body, headers=headers))
    assert (error["param"], error["code"]) == (field, "invalid_encoding")


async def test_what_is_not_done_is_named(system):
    """Nothing is done with a name for OpenAI's own checks, nor with words about an answer that is not stored."""
    response = await system.chat(metadata={"a": "b"}, safety_identifier="x")
    assert response.status_code == 200
    assert response.headers["x-tandem-ignored"] == "safety_identifier,metadata"


# --- echo ------------------------------------------------------------------------------------------------------------


async def test_echoed_prompt_comes_before_each_of_its_answers(system):
    response = await system.complete(prompt=["hello ", "<|end|>"], n=2, echo=True, max_tokens=100)
    answer = Completion.model_validate(response.json())
    assert [choice.text for choice in answer.choices] == [
        prompt + ANSWER_TEXT for prompt in ("hello ", "hello ", "<|end|>", "<|end|>")
    ]


async def test_echo_of_token_ids_is_their_text(system, tokenizer):
    ids = tokenizer.encode("<|user|>naïve", add_special_tokens=False).ids
    response = await system.complete(prompt=ids, echo=True, max_tokens=100)
    assert response.json()["choices"][0]["text"] == "<|user|>naïve" + ANSWER_TEXT


async def test_streamed_echo_comes_first_and_once(system, read_sse):
    body = {"prompt": "hello ", "echo": True, "max_tokens": 100, "stream": True}
    response = await system.http.post("/v1/completions", json=body)
    *chunks, done = read_sse(response.text)
    assert done == "[DONE]"
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert texts[0] == "hello "
    assert "".join(texts) == "hello " + ANSWER_TEXT


async def test_echo_is_not_repeated_to_who_goes_on(system):
    body = {"prompt": "hello ", "echo": True, "max_tokens": 100, "stream": True}

    async def read(**headers):
        response = await system.http.post("/v1/completions", json=body, headers={"idempotency-key": "k"} | headers)
        return response.text.strip().split("\n\n")[:-1]

    events = await read()
    for count, event in enumerate(events, 1):
        rest = await read(**{"last-event-id": event.partition("\nid: ")[2]})
        assert '"text":"hello "' not in "".join(rest)
        assert len(rest) <= len(events) - count


# --- fingerprint -----------------------------------------------------------------------------------------------------


async def test_fingerprint_is_the_same_everywhere(system, read_sse):
    whole = ChatCompletion.model_validate((await system.chat()).json())
    assert whole.system_fingerprint.startswith("fp_")
    *chunks, _ = read_sse((await system.chat(stream=True, stream_options={"include_usage": True})).text)
    shown = {ChatCompletionChunk.model_validate(chunk).system_fingerprint for chunk in chunks}
    assert shown == {whole.system_fingerprint}
    completion = Completion.model_validate((await system.complete()).json())
    assert completion.system_fingerprint == whole.system_fingerprint


# --- prompts and tokens by their ids ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_the_prompts_tokens_come_with_the_answers(system, path, is_streamed):
    asked = {"prompt": "hello"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hello"}]}
    body = {**asked, "max_tokens": 2, "return_token_ids": True, "stream": is_streamed}
    answer = await system.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    if is_streamed:
        events = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
        shown = [event if path != "/v1/completions" else event["choices"][0] for event in events]
        prompts = [each["prompt_token_ids"] for each in shown if "prompt_token_ids" in each]
        assert len(prompts) == 1
    else:
        whole = answer.json()
        prompts = [(whole if path != "/v1/completions" else whole["choices"][0])["prompt_token_ids"]]
    assert prompts[0] == list(prompt_of(system))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_tokens_are_named_by_their_ids(system, path):
    asked = (
        {"prompt": "a", "logprobs": 1}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 1}
    )
    body = {**asked, "max_tokens": 2, "return_tokens_as_token_ids": True, "return_token_ids": True}
    (choice,) = (await system.http.post(path, json=body)).json()["choices"]
    logprobs = choice["logprobs"]
    named = logprobs["tokens"] if path == "/v1/completions" else [each["token"] for each in logprobs["content"]]
    assert named == [f"token_id:{token_id}" for token_id in choice["token_ids"]]


@pytest.mark.parametrize(("most", "kept"), [(2, 2), (100, 5), (-1, 5)])
async def test_the_last_tokens_of_a_prompt_are_kept(system, most, kept):
    body = {"prompt": [5, 6, 7, 8, 9], "max_tokens": 2, "truncate_prompt_tokens": most}
    assert (await system.http.post("/v1/completions", json=body)).status_code == 200
    assert list(prompt_of(system)) == [5, 6, 7, 8, 9][-kept:]


async def test_a_prompt_that_is_too_long_is_cut_where_the_client_wants_that(system):
    body = {"prompt": [5] * 600, "max_tokens": 12}
    assert (await system.http.post("/v1/completions", json=body)).status_code == 400
    assert (await system.http.post("/v1/completions", json={**body, "truncate_prompt_tokens": -1})).status_code == 200
    assert len(prompt_of(system)) == 500
    refused = await system.http.post("/v1/completions", json={**body, "truncate_prompt_tokens": 0})
    assert refused.json()["error"]["param"] == "truncate_prompt_tokens"


def prompt_of(system):
    """The prompt of the last attempt, at whichever worker."""
    return next(iter(system.workers.values())).attempts[-1].spec.prompt_token_ids
