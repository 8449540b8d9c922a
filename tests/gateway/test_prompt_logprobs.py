"""Log-probabilities of prompts: vLLM's field, and what evaluations ask completions for (echo with logprobs)."""

import asyncio

import grpc
import pytest
from openai.types import Completion

from protos import inference_pb2, inference_pb2_grpc, worker_pb2
from services.runtime.errors import WorkerUnavailable


@pytest.fixture
def answer(tokenizer):
    return [*tokenizer.encode("hello world, naïve café", add_special_tokens=False).ids, 1]


@pytest.fixture
def pair(pair_type, answer):
    return pair_type(answer)


@pytest.fixture
async def system(make_system, pair):
    system = await make_system()
    await system.add_pair(pair)
    return system


async def test_each_token_of_the_prompt_but_the_first_has_its_candidates(system, answer):
    response = await system.complete(prompt=[10, 11, 12], prompt_logprobs=1, max_tokens=100, return_token_ids=True)
    (choice,) = response.json()["choices"]
    assert choice["token_ids"] == answer
    first, second, third = choice["prompt_logprobs"]
    assert first is None
    assert {key: entry["logprob"] for key, entry in second.items()} == {"7": -1.5, "11": -1.0}
    assert {key: entry["logprob"] for key, entry in third.items()} == {"7": -1.5, "12": -2.0}
    assert all(isinstance(entry["decoded_token"], str) for entry in third.values())


async def test_zero_is_the_tokens_own_alone(system):
    response = await system.complete(prompt=[10, 11], prompt_logprobs=0)
    assert [list(entry or ()) for entry in response.json()["choices"][0]["prompt_logprobs"]] == [[], ["11"]]


async def test_a_chat_has_them_beside_its_choices(system):
    body = {"messages": [{"role": "user", "content": "hello"}], "prompt_logprobs": 1, "n": 2}
    response = await system.http.post("/v1/chat/completions", json=body)
    spec = system.workers["prefill-0"].attempts[0].spec
    told = response.json()["prompt_logprobs"]
    assert told[0] is None
    assert [str(token_id) in entry for token_id, entry in zip(spec.prompt_token_ids[1:], told[1:], strict=True)]
    assert len(response.json()["choices"]) == 2


async def test_without_the_wish_there_is_nothing(system):
    response = await system.complete(prompt=[10, 11])
    assert "prompt_logprobs" not in response.json()["choices"][0]
    assert not system.workers["prefill-0"].attempts[0].spec.sampling.HasField("prompt_logprobs")


async def test_echo_with_logprobs_is_of_prompt_and_answer(system, tokenizer, answer):
    """What lm-evaluation-harness asks for; `text_offset` is the place in the whole text."""
    response = await system.complete(prompt="hello world", echo=True, logprobs=1, max_tokens=100)
    assert response.status_code == 200, response.text
    # Its types know no null in the first place, which OpenAI's own server has there; its client does not check.
    (choice,) = Completion.construct(**response.json()).choices
    prompt_ids = list(system.workers["prefill-0"].attempts[0].spec.prompt_token_ids)
    told = choice.logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(prompt_ids) + len(answer)
    assert (told.token_logprobs[0], told.top_logprobs[0]) == (None, None)
    assert told.token_logprobs[1 : len(prompt_ids)] == [-float(n) for n in range(1, len(prompt_ids))]
    assert set(told.token_logprobs[len(prompt_ids) :]) == {-0.5}
    for token, offset in list(zip(told.tokens, told.text_offset, strict=True))[1 : len(prompt_ids)]:
        assert choice.text[offset : offset + len(token)] == token


async def test_both_wishes_are_fulfilled_each_with_its_own_number(system):
    response = await system.complete(prompt=[10, 11], echo=True, logprobs=0, prompt_logprobs=1)
    (choice,) = response.json()["choices"]
    assert list(choice["prompt_logprobs"][1]) == ["7", "11"]
    assert choice["logprobs"]["top_logprobs"][1] == {}


BAD = {
    "negative": ({"prompt_logprobs": -1}, "prompt_logprobs"),
    "too many": ({"prompt_logprobs": 21}, "prompt_logprobs"),
    "wrong type": ({"prompt_logprobs": "1"}, "prompt_logprobs"),
    "stream": ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    "stream of an echo": ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_wishes_are_refused(system, name):
    wish, field = BAD[name]
    response = await system.complete(prompt=[10, 11], **wish)
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize("header", ["x-request-id", "idempotency-key"])
async def test_a_named_request_cannot_have_them(system, header):
    body = {"prompt": [10, 11], "prompt_logprobs": 1}
    response = await system.http.post("/v1/completions", json=body, headers={header: "name"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_logprobs")


async def test_at_the_limit_and_one_past_it(make_system, pair, monkeypatch):
    monkeypatch.setattr("gateway.validation.MAX_PROMPT_LOGPROBS", 12)
    system = await make_system()
    await system.add_pair(pair)
    assert (await system.complete(prompt=[10, 11, 12, 13], prompt_logprobs=2)).status_code == 200
    refused = await system.complete(prompt=[10, 11, 12, 13], prompt_logprobs=3)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")


async def test_they_come_once_when_the_worker_dies_after_the_first_token(make_system, worker_type, pair, answer):
    system = await make_system()

    async def dies(attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.tokens(0, answer[:1])
        attempt.fail(WorkerUnavailable("it is gone"))

    await system.add(worker_type("decode", "decode-0", dies))
    body = {"prompt": [10, 11, 12], "prompt_logprobs": 0, "max_tokens": 100, "return_token_ids": True}
    waiting = asyncio.create_task(system.complete(**body))
    await system.until(lambda: system.gateway.metrics.generated_tokens.labels().value > 0)
    second = await system.add(worker_type("decode", "decode-1", pair.decode))
    (choice,) = (await waiting).json()["choices"]
    assert list(second.attempts[0].spec.emitted_token_ids) == answer[:1]
    assert choice["token_ids"] == answer
    assert len(choice["prompt_logprobs"]) == 3


async def test_a_worker_that_leaves_them_out_is_not_believed(make_system, worker_type, answer):
    """An older one, say, that knows nothing of the field."""
    system = await make_system(max_attempts=1)

    async def forgets(attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.spec.sampling.ClearField("prompt_logprobs")
        attempt.tokens(0, answer)
        attempt.finish()

    await system.add(worker_type("decode", "decode-0", forgets))
    assert (await system.complete(prompt=[10, 11], prompt_logprobs=0)).status_code == 500


async def test_over_grpc_they_come_with_the_first_message(system):
    request = inference_pb2.GenerateRequest(
        model="tiny",
        token_ids=inference_pb2.TokenIds(ids=[10, 11, 12]),
        sampling=inference_pb2.SamplingParams(max_tokens=100, prompt_logprobs=1),
    )
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        messages = [message async for message in stub.Generate(request, timeout=20)]
        whole = await stub.GenerateUnary(request, timeout=20)
    assert [[entry.logprob for entry in message.prompt_logprobs] for message in messages[:2]] == [[-1.0, -2.0], []]
    assert [entry.logprob for entry in whole.prompt_logprobs] == [-1.0, -2.0]
