"""Scores and ranks over HTTP, and vectors over gRPC and for OpenAI's client."""

import math
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import openai
import pytest

from gateway.edge import vectors
from protos import inference_pb2, inference_pb2_grpc, worker_pb2

ANGLES = {"north": 0.0, "east": math.pi / 2, "north east": math.pi / 4, "south": math.pi}
"""Texts by the directions of their vectors."""
SCORES = ("/v1/score", "/score")
RANKS = ("/v1/rerank", "/v2/rerank", "/rerank")
Make = Callable[..., Awaitable[Any]]


@pytest.fixture
async def system(make_system: Make, worker_type: Any, tokenizer: Any) -> Any:
    async def embed(attempt: Any) -> None:
        text = tokenizer.decode(attempt.spec.prompt_token_ids)
        angle = ANGLES[text]
        attempt.emit(worker_pb2.Embedded(vector=struct.pack("<4f", math.cos(angle), math.sin(angle), 0, 0)))

    system = await make_system(embeddings="on")
    await system.add(worker_type("prefill", "prefill-0", embed, on_embed=embed))
    return system


@pytest.mark.parametrize("path", SCORES)
async def test_scores_are_cosines(system: Any, path: str) -> None:
    answer = (await system.http.post(path, json={"text_1": "north", "text_2": [*ANGLES]})).json()
    assert [one["score"] for one in answer["data"]] == pytest.approx([1, 0, math.sqrt(0.5), -1], abs=1e-6)
    assert [one["index"] for one in answer["data"]] == [0, 1, 2, 3]
    # Each text is computed once.
    assert len(system.workers["prefill-0"].attempts) == len(ANGLES)
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    orders = [attempt.request for attempt in system.workers["prefill-0"].attempts]
    assert all(order.is_normalized for order in orders)


@pytest.mark.parametrize("path", RANKS)
async def test_documents_are_ranked(system: Any, path: str) -> None:
    body = {"query": "north", "documents": ["east", {"text": "north east"}, "south", "north"], "top_n": 3}
    answer = (await system.http.post(path, json=body)).json()
    found = [(one["index"], one["document"]["text"]) for one in answer["results"]]
    assert found == [(3, "north"), (1, "north east"), (0, "east")]
    assert [one["relevance_score"] for one in answer["results"]] == pytest.approx([1, math.sqrt(0.5), 0], abs=1e-6)
    assert answer["usage"]["total_tokens"] > 0
    without = (await system.http.post(path, json={**body, "return_documents": False})).json()
    assert [set(one) for one in without["results"]] == [{"index", "relevance_score"}] * 3


@pytest.mark.parametrize(
    ("paths", "body"),
    [
        (("/v1/embeddings", "/embeddings"), {"input": "a"}),
        (SCORES, {"text_1": "a", "text_2": "b"}),
        (RANKS, {"query": "a", "documents": ["b"]}),
    ],
)
async def test_models_that_were_not_trained_for_it_are_refused_in_words(
    make_system: Make, paths: tuple[str, ...], body: Any
) -> None:
    system = await make_system()
    for path in paths:
        await check_refusal(system, path, body)


async def check_refusal(system: Any, path: str, body: Any) -> None:
    response = await system.http.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "unsupported_endpoint", "model")
    assert "modules.json" in error["message"]


async def test_openais_client_reads_vectors_in_both_forms(system: Any) -> None:
    async with openai.AsyncOpenAI(base_url=f"{system.base_url}/v1", api_key="none") as client:
        by_default = await client.embeddings.create(model="tiny", input=["north", "east"])
        as_numbers = await client.embeddings.create(model="tiny", input="east", encoding_format="float")
    assert [one.embedding for one in by_default.data] == [
        [1.0, 0.0, 0.0, 0.0],
        pytest.approx([0.0, 1.0, 0.0, 0.0], abs=1e-6),
    ]
    assert as_numbers.data[0].embedding == by_default.data[1].embedding
    assert by_default.usage.prompt_tokens == by_default.usage.total_tokens > 0


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
async def test_many_vectors_are_written_while_the_client_reads(
    system: Any, monkeypatch: pytest.MonkeyPatch, encoding_format: str
) -> None:
    body = {"input": [*ANGLES], "encoding_format": encoding_format}
    whole = await system.http.post("/v1/embeddings", json=body)
    monkeypatch.setattr(vectors, "MAX_WHOLE_BYTES", 16 * len(ANGLES) - 1)
    in_parts = await system.http.post("/v1/embeddings", json=body)
    assert in_parts.content == whole.content
    assert in_parts.headers["content-type"] == whole.headers["content-type"]
    assert ("content-length" in whole.headers, "content-length" in in_parts.headers) == (True, False)
    assert in_parts.headers["x-tandem-model"] == "tiny"


async def test_vectors_come_over_grpc(system: Any) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        inputs = [inference_pb2.EmbedInput(text=text) for text in ("north", "south")]
        call = stub.Embed(inference_pb2.EmbedRequest(inputs=inputs))
        answer = await call
        assert [list(vector.values) for vector in answer.vectors] == [
            [1.0, 0.0, 0.0, 0.0],
            pytest.approx([-1.0, 0.0, 0.0, 0.0], abs=1e-6),
        ]
        assert dict(await call.initial_metadata())["x-tandem-model"] == "tiny"
        for wrong in (
            inference_pb2.EmbedRequest(),
            inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput()]),
            inference_pb2.EmbedRequest(inputs=inputs, dimensions=1),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Embed(wrong)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
