"""Answers that go well: whole and streamed, over HTTP and gRPC, by one and by several choices."""

import asyncio

import grpc
import openai
import pytest

from protos import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from services.runtime import rpc

ANSWER_TEXT = "hello world, naïve café 🙂 日本語 end"


@pytest.fixture
def answer(tokenizer):
    return tokenizer.encode(ANSWER_TEXT, add_special_tokens=False).ids


async def test_whole_completion(make_system, pair_type, answer):
    system = await make_system()
    await system.add_pair(pair_type([*answer, 1]))
    response = await system.complete(max_tokens=100, temperature=0, return_token_ids=True)
    assert response.status_code == 200
    body = response.json()
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {
            "index": 0,
            "text": ANSWER_TEXT,
            "logprobs": None,
            "finish_reason": "stop",
            "token_ids": [*answer, 1],
            "prompt_token_ids": [5, 6, 7],
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": len(answer) + 1,
        "total_tokens": len(answer) + 4,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert body["id"].removeprefix("cmpl-") == response.headers["x-request-id"]


async def test_streamed_completion_is_the_whole_one_in_parts(make_system, pair_type, answer, read_sse):
    system = await make_system()
    await system.add_pair(pair_type([*answer, 1]))
    response = await system.complete(
        max_tokens=100, stream=True, return_token_ids=True, stream_options={"include_usage": True}
    )
    *chunks, usage, done = read_sse(response.text)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(answer) + 1
    assert all(chunk["usage"] is None for chunk in chunks)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == ANSWER_TEXT
    assert "\ufffd" not in "".join(choice["text"] for choice in choices)
    assert [token for choice in choices for token in choice.get("token_ids", [])] == [*answer, 1]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]


async def test_chat_stream_begins_with_the_role_and_needs_no_usage(make_system, pair_type, answer, read_sse):
    system = await make_system()
    await system.add_pair(pair_type([*answer, 1]))
    response = await system.chat(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = read_sse(response.text)
    assert done == "[DONE]"
    assert all("usage" not in chunk for chunk in chunks)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == ANSWER_TEXT
    assert chunks[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}


async def test_first_token_does_not_wait_for_the_handoff(make_system, pair_type, worker_type, answer):
    system = await make_system()
    pair = pair_type([*answer, 1])
    release = asyncio.Event()

    async def slow_prefill(attempt):
        attempt.tokens(0, answer[:1])
        await release.wait()
        pair.event(attempt).set()

    await system.add(worker_type("prefill", "prefill-0", slow_prefill))
    await system.add(worker_type("decode", "decode-0", pair.decode))
    async with system.http.stream(
        "POST", "/v1/completions", json={"prompt": [5], "stream": True, "max_tokens": 50}
    ) as r:
        lines = r.aiter_lines()
        assert "data:" in await anext(lines)
        assert not release.is_set()
        release.set()
        rest = [line async for line in lines if line]
    assert rest[-1] == "data: [DONE]"


async def test_tokens_of_the_decode_worker_may_arrive_before_the_first_one(make_system, pair_type, worker_type, answer):
    system = await make_system()
    pair = pair_type([*answer, 1])

    async def late_prefill(attempt):
        pair.event(attempt).set()
        await asyncio.sleep(0.2)
        attempt.tokens(0, answer[:1])

    await system.add(worker_type("prefill", "prefill-0", late_prefill))
    await system.add(worker_type("decode", "decode-0", pair.decode))
    response = await system.complete(max_tokens=100)
    assert response.json()["choices"][0]["text"] == ANSWER_TEXT
    assert len(system.workers["decode-0"].attempts) == 1


async def test_without_prefill_worker_the_decode_worker_computes_the_prompt(make_system, pair_type, answer):
    system = await make_system()
    await system.add_pair(pair_type([*answer, 1]), prefill=0)
    assert (await system.complete(max_tokens=100)).json()["choices"][0]["text"] == ANSWER_TEXT
    assert system.workers["decode-0"].attempts[0].request.local_prefill


async def test_first_token_may_be_the_last(make_system, pair_type, answer):
    system = await make_system()
    await system.add_pair(pair_type(answer))
    body = (await system.complete(max_tokens=1)).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 1
    decode = system.workers["decode-0"]
    await system.until(lambda: decode.cancelled == [decode.attempts[0].key])


@pytest.mark.parametrize("group", [1, 3, 100])
async def test_stop_text_cuts_the_same_however_tokens_are_grouped(make_system, pair_type, answer, tokenizer, group):
    system = await make_system()
    await system.add_pair(pair_type([*answer, 1], group=group))
    body = (await system.complete(max_tokens=100, stop=["ld, na", "zzz"])).json()
    choice = body["choices"][0]
    assert choice["text"] == "hello wor"
    assert choice["finish_reason"] == "stop"
    counts = [tokenizer.decode(answer[:n]).find("ld, na") >= 0 for n in range(len(answer) + 1)]
    assert body["usage"]["completion_tokens"] == counts.index(True)
    decode = system.workers["decode-0"]
    await system.until(lambda: bool(decode.cancelled) or group == 100)


async def test_streamed_stop_text_is_never_shown_in_part(make_system, pair_type, answer, read_sse):
    system = await make_system()
    await system.add_pair(pair_type([*answer, 1]))
    *chunks, done = read_sse((await system.complete(max_tokens=100, stop="world", stream=True)).text)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello "


async def test_stop_token_is_counted_and_not_shown(make_system, pair_type, answer, tokenizer):
    system = await make_system()
    await system.add_pair(pair_type(answer))
    stop_id = answer[2]
    body = (await system.complete(max_tokens=100, stop_token_ids=[stop_id], return_token_ids=True)).json()
    first = answer.index(stop_id)
    assert body["choices"][0]["token_ids"] == answer[: first + 1]
    assert body["choices"][0]["text"] == tokenizer.decode(answer[:first])
    assert body["choices"][0]["finish_reason"] == "stop"


async def test_choices_have_seeds_and_names_of_their_own(make_system, pair_type, answer):
    system = await make_system()
    await system.add_pair(pair_type([*answer, 1]))
    body = (await system.complete(max_tokens=100, n=3, seed=-5)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 3 * (len(answer) + 1)
    specs = [attempt.spec for attempt in system.workers["decode-0"].attempts]
    assert len({spec.id.request_id for spec in specs}) == 3
    seeds = {spec.id.request_id.rpartition(".")[2]: spec.sampling.seed for spec in specs}
    assert seeds["0"] == -5
    assert len(set(seeds.values())) == 3


async def test_streamed_choices_come_interleaved_and_complete(make_system, pair_type, answer, read_sse):
    system = await make_system()
    await system.add_pair(pair_type([*answer, 1]))
    *chunks, usage, done = read_sse((await system.chat(n=2, stream=True, stream_options={"include_usage": True})).text)
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == {0: ANSWER_TEXT, 1: ANSWER_TEXT}
    assert usage["usage"]["completion_tokens"] == 2 * (len(answer) + 1)
    assert done == "[DONE]"


async def test_batch_of_prompts(make_system, pair_type, answer):
    system = await make_system()
    await system.add_pair(pair_type([*answer, 1]))
    response = await system.http.post("/v1/completions", json={"prompt": ["a b", "c"], "n": 2, "max_tokens": 3})
    body = response.json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    prompts = {tuple(a.spec.prompt_token_ids) for a in system.workers["decode-0"].attempts}
    assert len(prompts) == 2
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))


async def test_seed_is_drawn_from_the_gateways_own(make_system, pair_type, answer):
    system = await make_system(seed=42)
    await system.add_pair(pair_type([*answer, 1]))
    for _ in range(2):
        await system.complete(max_tokens=2)
    seeds = [attempt.spec.sampling.seed for attempt in system.workers["decode-0"].attempts]
    assert len(set(seeds)) == 2
    import random

    source = random.Random(42)
    assert seeds == [source.getrandbits(63), source.getrandbits(63)]


async def test_logprobs_of_both_apis(make_system, pair_type, answer, tokenizer):
    system = await make_system()
    await system.add_pair(pair_type(answer))
    completion = (await system.complete(max_tokens=4, logprobs=1)).json()["choices"][0]["logprobs"]
    texts = [tokenizer.decode([token], skip_special_tokens=False) for token in answer[:4]]
    assert completion["tokens"] == texts
    assert completion["token_logprobs"] == [-0.5] * 4
    assert completion["text_offset"] == [0, *[sum(map(len, texts[: n + 1])) for n in range(3)]]
    assert completion["top_logprobs"][0] == {tokenizer.decode([7]): -1.5, texts[0]: -0.5}
    chosen_only = (await system.complete(max_tokens=4, logprobs=0)).json()["choices"][0]["logprobs"]
    assert chosen_only["top_logprobs"] == [{text: -0.5} for text in texts]
    chat = (await system.chat(max_tokens=4, logprobs=True, top_logprobs=1)).json()["choices"][0]["logprobs"]
    assert [entry["token"] for entry in chat["content"]] == texts
    assert chat["content"][0]["top_logprobs"][0]["logprob"] == -1.5
    assert bytes(chat["content"][0]["bytes"]).decode() == texts[0]


@pytest.mark.parametrize("others", [{}, {"include_usage": True}], ids=["alone", "with-the-last"])
async def test_every_event_tells_the_usage_where_that_is_asked_for(make_system, pair_type, answer, read_sse, others):
    system = await make_system()
    await system.add_pair(pair_type(answer))
    asked = {"max_tokens": 3, "stream": True, "stream_options": {"continuous_usage_stats": True, **others}}
    for response in (await system.chat(**asked), await system.complete(prompt="a", echo=True, **asked)):
        *events, done = read_sse(response.text)
        assert done == "[DONE]"
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert (counts[0], counts[-1]) == (0, 3)
        assert counts == sorted(counts)
        assert all(event["usage"]["prompt_tokens"] > 0 for event in events)


async def test_grpc_generate_tokenize_and_topology(make_system, pair_type, answer, tokenizer):
    system = await make_system()
    await system.add_pair(pair_type([*answer, 1]))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        inference = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(
            request_id="mine", text="hello", sampling=inference_pb2.SamplingParams(max_tokens=100, seed=3)
        )
        parts = [part async for part in inference.Generate(request)]
        assert "".join(part.text for part in parts) == ANSWER_TEXT
        assert [token for part in parts for token in part.token_ids] == [*answer, 1]
        index = 0
        for part in parts:
            assert part.first_index == index
            index += len(part.token_ids)
        assert {part.request_id for part in parts} == {"mine"}
        assert parts[-1].finish_reason == inference_pb2.FINISH_REASON_STOP
        assert parts[-1].usage.completion_tokens == len(answer) + 1
        assert not any(part.HasField("usage") for part in parts[:-1])
        whole = await inference.GenerateUnary(request)
        assert whole.text == ANSWER_TEXT
        assert list(whole.token_ids) == [*answer, 1]
        models = await inference.ListModels(inference_pb2.ListModelsRequest())
        assert models.models[0].name == "tiny"
        ids = (await inference.Tokenize(inference_pb2.TokenizeRequest(text="hello world"))).token_ids
        assert list(ids) == tokenizer.encode("hello world").ids
        text = (await inference.Detokenize(inference_pb2.DetokenizeRequest(token_ids=ids))).text
        assert text == "hello world"
        cluster = cluster_pb2_grpc.ClusterStub(channel)
        topology = await cluster.GetTopology(cluster_pb2.GetTopologyRequest())
        assert [worker.id for worker in topology.workers] == ["decode-0", "prefill-0"]
        watch = cluster.WatchTopology(cluster_pb2.WatchTopologyRequest())
        assert await watch.read() == topology
        drained = await cluster.Drain(cluster_pb2.DrainRequest(worker_id="decode-0"))
        assert drained.state == cluster_pb2.WORKER_STATE_DRAINING
        seen = await watch.read()
        assert seen.workers[0].state == cluster_pb2.WORKER_STATE_DRAINING
        watch.cancel()
        await system.until(lambda: system.workers["decode-0"].is_drained)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await cluster.Drain(cluster_pb2.DrainRequest(worker_id="nobody"))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        assert rpc.error_from_rpc(refused.value).message


async def test_official_client_async_and_streamed(make_system, pair_type, answer):
    system = await make_system()
    await system.add_pair(pair_type([*answer, 1]))
    async with openai.AsyncOpenAI(base_url=system.base_url + "/v1", api_key="none") as client:
        assert (await client.models.list()).data[0].id == "tiny"
        chat = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
            max_completion_tokens=50,
            seed=1,
        )
        assert chat.choices[0].message.content == ANSWER_TEXT
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hello"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER_TEXT
        assert chunks[-1].usage.completion_tokens == len(answer) + 1
        with pytest.raises(openai.NotFoundError) as wrong_model:
            await client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
        assert wrong_model.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as too_hot:
            await client.completions.create(model="tiny", prompt="x", temperature=3)
        assert too_hot.value.param == "temperature"


async def test_official_client_sync(make_system, pair_type, answer):
    system = await make_system()
    await system.add_pair(pair_type([*answer, 1]))

    def use() -> tuple[str, str]:
        with openai.OpenAI(base_url=system.base_url + "/v1", api_key="none") as client:
            whole = client.completions.create(model="tiny", prompt="hello", max_tokens=60)
            parts = client.completions.create(model="tiny", prompt="hello", max_tokens=60, stream=True)
            return whole.choices[0].text, "".join(part.choices[0].text for part in parts)

    assert await asyncio.to_thread(use) == (ANSWER_TEXT, ANSWER_TEXT)


async def test_trace_context_reaches_the_workers(make_system, pair_type, answer):
    system = await make_system()
    await system.add_pair(pair_type([*answer, 1]))
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01", "x-request-id": "abc"}
    response = await system.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
    assert response.headers["x-request-id"] == "abc"
    for worker in system.workers.values():
        assert trace_id in worker.attempts[0].spec.traceparent
        assert worker.attempts[0].spec.id.request_id.startswith("abc.")


async def test_load_is_spread(make_system, pair_type, answer):
    system = await make_system(routing="round_robin")
    await system.add_pair(pair_type([*answer, 1]), prefill=2, decode=2)
    for _ in range(8):
        await system.complete(max_tokens=3)
    assert {worker_id: len(worker.attempts) for worker_id, worker in system.workers.items()} == {
        "prefill-0": 4,
        "prefill-1": 4,
        "decode-0": 4,
        "decode-1": 4,
    }
