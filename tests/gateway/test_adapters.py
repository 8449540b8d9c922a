"""Adapters of a model: each has a name of its own in every API, and pages and workers' orders of its own."""

import asyncio
import json

import grpc
import pytest

from protos import inference_pb2, inference_pb2_grpc, worker_pb2
from services.runtime.errors import Overloaded
from tests.waiting import HANG_LIMIT_S

ANSWER, SMALL_ANSWER = [20, 21, 1], [30, 1]
ASKED = {"prompt": "hello world", "max_tokens": 20, "return_token_ids": True}


@pytest.fixture
async def system(make_system, model_folder, tmp_path):
    """A model with an alias, two adapters and another model that may stand in for it."""
    folder = json.dumps(str(model_folder))
    (tmp_path / "models.toml").write_text(
        f'[[model]]\nname = "large"\npath = {folder}\naliases = ["default"]\nfallback = ["small"]\n'
        f"fallback_after_s = 0.1\nlora = {{sql = {folder}, law = {folder}}}\n"
        f'[[model]]\nname = "small"\npath = {folder}\n'
    )
    return await make_system(models=tmp_path / "models.toml")


async def answers(attempt):
    attempt.emit(worker_pb2.Admitted())
    attempt.emit(worker_pb2.DecodeStarted())
    attempt.tokens(0, ANSWER)
    attempt.finish(inference_pb2.FINISH_REASON_STOP)


async def answers_briefly(attempt):
    attempt.emit(worker_pb2.Admitted())
    attempt.emit(worker_pb2.DecodeStarted())
    attempt.tokens(0, SMALL_ANSWER)
    attempt.finish(inference_pb2.FINISH_REASON_STOP)


async def refuses(attempt):
    attempt.refuse(Overloaded("no pages", retry_after_s=1.0))


async def test_a_request_by_an_adapter_s_name_is_computed_with_it_by_workers_of_its_model(system, worker_type):
    worker = await system.add(worker_type("decode", "decode-large", answers, model="large"))
    names = ["sql", "large", "law", "default", "sql"]
    told = [await system.http.post("/v1/completions", json={**ASKED, "model": name}) for name in names]
    shown = ["sql", "large", "law", "large", "sql"]
    assert [answer.json()["model"] for answer in told] == shown
    assert [answer.headers["x-tandem-model"] for answer in told] == shown
    specs = [attempt.spec for attempt in worker.attempts]
    assert [spec.adapter for spec in specs] == ["sql", "", "law", "", "sql"]
    salts = [spec.cache_salt for spec in specs]
    assert salts[0] == salts[4]
    assert salts[1] == salts[3]
    assert len(set(salts)) == 3
    unknown = await system.http.post("/v1/completions", json={**ASKED, "model": "poetry"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


async def test_adapters_are_listed_with_the_model_that_they_change(system, worker_type):
    await system.add(worker_type("decode", "decode-large", answers, model="large"))
    listed = (await system.http.get("/v1/models")).json()["data"]
    parents = {"large": None, "default": None, "law": "large", "sql": "large", "small": None}
    assert {model["id"]: model["parent"] for model in listed} == parents
    assert [model["root"] for model in listed] == ["large"] * 4 + ["small"]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        inference = inference_pb2_grpc.InferenceStub(channel)
        models = (await inference.ListModels(inference_pb2.ListModelsRequest())).models
        assert {model.name: model.parent or None for model in models} == parents
        call = inference.GenerateUnary(inference_pb2.GenerateRequest(model="law", text="hello"))
        assert list((await call).token_ids) == ANSWER
        assert dict(await call.initial_metadata())["x-tandem-model"] == "law"


async def test_anthropic_s_clients_name_adapters_too(system, worker_type):
    await system.add(worker_type("decode", "decode-large", answers, model="large"))
    body = {"model": "sql", "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}
    answer = await system.http.post("/v1/messages", json=body)
    assert (answer.status_code, answer.json()["model"]) == (200, "sql")


async def test_a_model_that_stands_in_answers_without_the_adapter(system, worker_type):
    await system.add(worker_type("decode", "decode-large", refuses, model="large"))
    small = await system.add(worker_type("decode", "decode-small", answers_briefly, model="small"))
    body = {**ASKED, "model": "sql", "allow_fallback": True}
    answer = await asyncio.wait_for(system.http.post("/v1/completions", json=body), HANG_LIMIT_S)
    assert (answer.json()["model"], answer.headers["x-tandem-model"]) == ("small", "small")
    assert answer.json()["choices"][0]["token_ids"] == SMALL_ANSWER
    assert small.attempts[0].spec.adapter == ""
