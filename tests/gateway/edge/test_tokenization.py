"""Tokens over HTTP without an answer: of texts, of conversations, and back to text."""

import json

import pytest

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


@pytest.mark.parametrize("adds_special", [None, True, False])
async def test_tokens_of_a_text(system, tokenizer, adds_special):
    body = {"model": "tiny", "prompt": "hello <|end|> wörld", "add_special_tokens": adds_special}
    response = await system.http.post("/tokenize", json=body)
    expected = tokenizer.encode(body["prompt"], add_special_tokens=adds_special is not False).ids
    assert response.status_code == 200
    assert response.json() == {"count": len(expected), "max_model_len": 512, "tokens": expected}


async def test_tokens_of_a_chat_are_those_that_are_generated_from(system):
    messages = [{"role": "user", "content": "hello <|end|> wörld"}]
    answered = (await system.http.post("/tokenize", json={"messages": messages})).json()
    assert (await system.http.post("/v1/chat/completions", json={"messages": messages})).status_code == 200
    assert answered["tokens"] == list(system.workers["decode-0"].attempts[0].spec.prompt_token_ids)
    assert answered["count"] == len(answered["tokens"])


@pytest.mark.parametrize("num_words", [1, 3000], ids=["short", "long"])
async def test_text_of_tokens(system, num_words):
    text = "<|user|>\nnaïve 🙂 hello<|end|>" * num_words
    tokens = (await system.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})).json()["tokens"]
    assert (await system.http.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": text}


BAD = {
    "neither": ("/tokenize", {}, "prompt"),
    "both": ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
    "several": ("/tokenize", {"prompt": ["a", "b"]}, "prompt"),
    "surrogate": ("/tokenize", {"prompt": "\ud800"}, "prompt"),
    "messages-empty": ("/tokenize", {"messages": []}, "messages"),
    "special-in-chat": (
        "/tokenize",
        {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True},
        "add_special_tokens",
    ),
    "no-generation-prompt": ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt"),
    "tokens-missing": ("/detokenize", {}, "tokens"),
    "tokens-outside": ("/detokenize", {"tokens": [10**6]}, "tokens"),
    "tokens-negative": ("/detokenize", {"tokens": [-1]}, "tokens"),
    "tokens-bool": ("/detokenize", {"tokens": [True]}, "tokens"),
    "tokens-text": ("/detokenize", {"tokens": "a"}, "tokens"),
}


@pytest.mark.parametrize("row", BAD, ids=BAD)
async def test_bad_tokens_request(system, row):
    path, body, field = BAD[row]
    response = await system.http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert error_of(response)["param"].partition("[")[0] == field


async def test_tokens_of_a_model_that_is_not_there(system):
    response = await system.http.post("/tokenize", json={"model": "nope", "prompt": "a"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


async def test_embeddings_are_refused_in_words(system):
    error = error_of(await system.http.post("/v1/embeddings", json={"model": "tiny", "input": "a"}))
    assert (error["type"], error["code"]) == ("invalid_request_error", "unsupported_endpoint")
    assert "text only" in error["message"]
