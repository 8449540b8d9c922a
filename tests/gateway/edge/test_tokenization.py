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


@pytest.mark.parametrize("path", ["/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"])
async def test_the_tokens_of_a_chat_are_counted(system, path):
    body = {"messages": [{"role": "user", "content": "hello <|end|> wörld"}], "max_tokens": 4}
    counted = await system.http.post(path, json=body)
    assert counted.json() == {"input_tokens": (await system.http.post("/tokenize", json=body)).json()["count"]}
    assert error_of(await system.http.post(path, json={"max_tokens": 4}))["param"] == "messages"


@pytest.mark.parametrize("num_words", [1, 3000], ids=["short", "long"])
async def test_text_of_tokens(system, num_words):
    text = "<|user|>\nnaïve 🙂 hello<|end|>" * num_words
    tokens = (await system.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})).json()["tokens"]
    assert (await system.http.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": text, "content": text}


@pytest.mark.parametrize("adds_special", [None, True, False])
async def test_tokens_in_the_words_of_llama_cpp(system, tokenizer, adds_special):
    text = "hello naïve 🙃"
    answered = (await system.http.post("/tokenize", json={"content": text, "add_special": adds_special})).json()
    assert answered["tokens"] == tokenizer.encode(text, add_special_tokens=adds_special is True).ids
    body = {"content": text + "媽", "add_special": adds_special, "with_pieces": True}
    pieces = (await system.http.post("/tokenize", json=body)).json()["tokens"]
    assert [one["id"] for one in pieces] == tokenizer.encode(text + "媽", add_special_tokens=adds_special is True).ids
    told = [one["piece"] for one in pieces]
    if adds_special:
        assert told.pop(0) == "<|bos|>"
    assert b"".join(one.encode() if isinstance(one, str) else bytes(one) for one in told).decode() == text + "媽"
    assert any(isinstance(one, list) for one in told)


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
    "two-texts": ("/tokenize", {"prompt": "a", "content": "a"}, "content"),
    "special-of-prompt": ("/tokenize", {"prompt": "a", "add_special": True}, "add_special"),
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


BEGUN = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "hello wor"}]


@pytest.mark.parametrize(
    ("more", "end"),
    [
        ({}, "<|assistant|>\nhello wor<|end|>\n<|assistant|>\n"),
        ({"add_generation_prompt": False}, "<|assistant|>\nhello wor<|end|>\n"),
        ({"continue_final_message": True}, "<|assistant|>\nhello wor"),
        ({"add_generation_prompt": False, "continue_final_message": True}, "<|assistant|>\nhello wor"),
    ],
)
async def test_a_prompt_ends_where_it_is_asked_to(system, tokenizer, more, end):
    counted = (await system.http.post("/tokenize", json={"messages": BEGUN, **more})).json()
    assert tokenizer.decode(counted["tokens"], skip_special_tokens=False).endswith(end)
    assert (await system.http.post("/v1/chat/completions", json={"messages": BEGUN, **more})).status_code == 200
    assert list(system.workers["decode-0"].attempts[-1].spec.prompt_token_ids) == counted["tokens"]


@pytest.mark.parametrize("word", ["prefix", "partial"])
async def test_a_last_message_may_say_itself_that_it_is_continued(system, tokenizer, word):
    begun = [BEGUN[0], {**BEGUN[1], word: True}]
    assert (await system.http.post("/v1/chat/completions", json={"messages": begun})).status_code == 200
    prompt = system.workers["decode-0"].attempts[-1].spec.prompt_token_ids
    assert tokenizer.decode(prompt, skip_special_tokens=False).endswith("hello wor")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"messages": BEGUN[:1], "continue_final_message": True}, "messages"),
        ({"messages": [{**BEGUN[1], "prefix": True}, BEGUN[0]]}, "messages[0].prefix"),
        ({"messages": [BEGUN[0], {**BEGUN[1], "prefix": "yes"}]}, "messages[1].prefix"),
    ],
)
@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
async def test_what_cannot_be_continued_is_refused(system, path, body, field):
    assert error_of(await system.http.post(path, json=body))["param"] == field


async def test_tokens_come_with_their_names_in_the_vocabulary(system, tokenizer):
    answer = (await system.http.post("/tokenize", json={"prompt": "hello wörld", "return_token_strs": True})).json()
    assert answer["token_strs"] == [tokenizer.id_to_token(token_id) for token_id in answer["tokens"]]


async def test_tokens_of_a_model_that_is_not_there(system):
    response = await system.http.post("/tokenize", json={"model": "nope", "prompt": "a"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_conversation_becomes_the_text_of_its_prompt(system, tokenizer):
    messages = [{"role": "user", "content": "hello"}]
    text = (await system.http.post("/apply-template", json={"messages": messages})).json()["prompt"]
    assert text == "<|user|>\nhello<|end|>\n<|assistant|>\n"
    error = error_of(await system.http.post("/apply-template", json={"prompt": "a"}))
    assert (error["param"], error["code"]) == ("messages", "missing_required_parameter")
