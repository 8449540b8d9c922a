"""Log-probabilities of prompts: vLLM's field, and what evaluations ask completions for (echo with logprobs)."""

import asyncio
import threading
from types import SimpleNamespace

import grpc
import pytest
from openai.types import Completion

from gateway.edge import grpc_api
from gateway.openai.completions import CompletionWriter
from protos import inference_pb2, inference_pb2_grpc, worker_pb2
from services.runtime.errors import WorkerUnavailable
from tests.waiting import HANG_LIMIT_S


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
    assert all(str(token_id) in entry for token_id, entry in zip(spec.prompt_token_ids[1:], told[1:], strict=True))
    assert len(response.json()["choices"]) == 2


def asking(system):
    """Choices of the call whose workers were asked to report the prompt."""
    specs = [attempt.spec for attempt in system.workers["prefill-0"].attempts]
    return {int(spec.id.request_id.rsplit(".", 1)[1]) for spec in specs if spec.sampling.HasField("prompt_logprobs")}


async def test_each_prompt_is_reported_once_and_shown_in_each_choice(system):
    response = await system.complete(prompt=[[10, 11], [10, 12, 13]], prompt_logprobs=0, n=2)
    choices = response.json()["choices"]
    shown = [[list(entry or ()) for entry in choice["prompt_logprobs"]] for choice in choices]
    assert shown == [[[], ["11"]], [[], ["11"]], [[], ["12"], ["13"]], [[], ["12"], ["13"]]]
    assert asking(system) == {0, 2}


async def test_an_echo_is_of_the_prompt_in_each_choice(system):
    response = await system.complete(prompt=[10, 11, 12], echo=True, logprobs=0, n=2, max_tokens=1)
    told = [choice["logprobs"]["token_logprobs"] for choice in response.json()["choices"]]
    assert told == [[None, -1.0, -2.0, -0.5]] * 2
    assert asking(system) == {0}


async def test_a_chat_asks_for_its_prompt_once(system):
    body = {"messages": [{"role": "user", "content": "hello"}], "prompt_logprobs": 1, "n": 3}
    response = await system.http.post("/v1/chat/completions", json=body)
    assert (response.status_code, asking(system)) == (200, {0})


async def test_long_answers_are_not_written_on_the_event_loop(system, monkeypatch):
    threads = []
    write = CompletionWriter.whole
    monkeypatch.setattr("gateway.edge.generate.MANY_LOGPROBS", 3)
    monkeypatch.setattr(
        CompletionWriter, "whole", lambda *args: threads.append(threading.current_thread()) or write(*args)
    )
    for prompt in ([10, 11, 12], [10, 11, 12, 13]):
        assert (await system.complete(prompt=prompt, prompt_logprobs=0)).status_code == 200
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


async def test_long_answers_over_grpc_are_not_written_on_the_event_loop(system, monkeypatch):
    threads = []
    write = grpc_api.logprobs_of
    monkeypatch.setattr("gateway.edge.generate.MANY_LOGPROBS", 3)
    monkeypatch.setattr(
        grpc_api, "logprobs_of", lambda *args: threads.append(threading.current_thread()) or write(*args)
    )
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for ids in ([10, 11, 12], [10, 11, 12, 13]):
            request = inference_pb2.GenerateRequest(
                model="tiny",
                token_ids=inference_pb2.TokenIds(ids=ids),
                sampling=inference_pb2.SamplingParams(max_tokens=100, prompt_logprobs=0),
            )
            await stub.GenerateUnary(request, timeout=HANG_LIMIT_S)
            assert [message async for message in stub.Generate(request, timeout=HANG_LIMIT_S)]
    assert [thread is threading.main_thread() for thread in threads] == [True, True, False, False]


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
    assert list(choice["logprobs"]["top_logprobs"][1].values()) == [choice["logprobs"]["token_logprobs"][1]]


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
    monkeypatch.setattr("gateway.limits.MAX_PROMPT_LOGPROBS", 12)
    system = await make_system()
    await system.add_pair(pair)
    assert (await system.complete(prompt=[10, 11, 12, 13], prompt_logprobs=2)).status_code == 200
    refused = await system.complete(prompt=[10, 11, 12, 13], prompt_logprobs=3)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")


@pytest.mark.parametrize(("max_entries", "status"), [(20, 200), (19, 400)])
async def test_the_limit_is_that_of_all_answers_together(make_system, pair, monkeypatch, max_entries, status):
    """Two prompts of two and three tokens, one entry more for each of them than was asked for, in two choices each."""
    monkeypatch.setattr("gateway.limits.MAX_PROMPT_LOGPROBS", max_entries)
    system = await make_system()
    await system.add_pair(pair)
    response = await system.complete(prompt=[[10, 11], [10, 12, 13]], prompt_logprobs=1, n=2)
    assert response.status_code == status


@pytest.mark.parametrize(("max_entries", "status"), [(0, 400), (1, 200)])
async def test_a_chats_prompt_counts_once(make_system, pair, monkeypatch, max_entries, status):
    system = await make_system()
    await system.add_pair(pair)
    body = {"messages": [{"role": "user", "content": "hello"}], "n": 2}
    num_tokens = (await system.http.post("/v1/chat/completions", json=body)).json()["usage"]["prompt_tokens"]
    monkeypatch.setattr("gateway.limits.MAX_PROMPT_LOGPROBS", num_tokens - 1 + max_entries)
    response = await system.http.post("/v1/chat/completions", json={**body, "prompt_logprobs": 0})
    assert response.status_code == status


@pytest.mark.parametrize(
    ("wish", "field"),
    [
        ({"prompt_logprobs": 2}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 2}, "logprobs"),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": 2}, "prompt_logprobs"),
    ],
)
async def test_who_asks_for_too_much_is_told_what_of_the_request_did(system, monkeypatch, wish, field):
    monkeypatch.setattr("gateway.limits.MAX_PROMPT_LOGPROBS", 5)
    error = (await system.complete(prompt=[10, 11], **wish)).json()["error"]
    assert error["param"] == field
    assert error["message"].startswith(f"{field} asks for 6 log-probabilities of prompts; the most is 5")


async def test_over_grpc_too_much_is_named_as_there(system, monkeypatch):
    monkeypatch.setattr("gateway.limits.MAX_PROMPT_LOGPROBS", 5)
    sampling = inference_pb2.SamplingParams(prompt_logprobs=2)
    request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[10, 11]), sampling=sampling)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError, match=r"sampling\.prompt_logprobs asks for 6"):
            await inference_pb2_grpc.InferenceStub(channel).GenerateUnary(request, timeout=HANG_LIMIT_S)


async def test_they_come_once_when_the_worker_dies_after_the_first_token(make_system, worker_type, pair, answer):
    system, is_second_there = await make_system(), asyncio.Event()

    async def dies(attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.tokens(0, answer[:1])
        await is_second_there.wait()
        attempt.fail(WorkerUnavailable("it is gone"))

    await system.add(worker_type("decode", "decode-0", dies))
    body = {"prompt": [10, 11, 12], "prompt_logprobs": 0, "max_tokens": 100, "return_token_ids": True}
    waiting = asyncio.create_task(system.complete(**body))
    await system.until(lambda: system.gateway.metrics.generated_tokens.labels("tiny").value > 0)
    second = await system.add(worker_type("decode", "decode-1", pair.decode))
    is_second_there.set()
    (choice,) = (await waiting).json()["choices"]
    assert list(second.attempts[0].spec.emitted_token_ids) == answer[:1]
    assert choice["token_ids"] == answer
    assert len(choice["prompt_logprobs"]) == 3


@pytest.mark.parametrize(("num_tokens", "num_cached"), [(0, 0), (1, 3)])
async def test_after_a_failure_a_prompt_that_was_not_reported_counts_as_computed_again(
    system, pair, num_tokens, num_cached
):
    request = SimpleNamespace(
        spec=SimpleNamespace(model="tiny", sampling=SimpleNamespace(prompt_logprobs=0), prompt_token_ids=[10, 11, 12]),
        is_resumed=True,
        tokens=SimpleNamespace(next_index=num_tokens),
        has_kept_prompt=lambda peer: True,
    )
    dispatcher = system.gateway.requests._dispatcher
    dispatcher._hints = None
    assert dispatcher._cached_tokens(request).get("prefill-0", 0) == num_cached


async def test_a_worker_that_leaves_them_out_is_not_believed(make_system, worker_type, answer):
    """Such a worker may be an older one that does not know the field."""
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
        messages = [message async for message in stub.Generate(request, timeout=HANG_LIMIT_S)]
        whole = await stub.GenerateUnary(request, timeout=HANG_LIMIT_S)
    assert [[entry.logprob for entry in message.prompt_logprobs] for message in messages[:2]] == [[-1.0, -2.0], []]
    assert [entry.logprob for entry in whole.prompt_logprobs] == [-1.0, -2.0]
