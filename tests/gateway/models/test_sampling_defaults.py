"""How a model's makers want it to be sampled: used where a request does not say it, shown, and turned off."""

import json
import shutil

import grpc
import pytest

from gateway.models.sampling_defaults import read_defaults, with_defaults
from gateway.types import AskedSampling
from protos import inference_pb2, inference_pb2_grpc
from services.runtime.errors import ModelError
from tests.waiting import HANG_LIMIT_S

QWEN3 = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 7, "eos_token_id": [1]}


@pytest.fixture
def folder(model_folder, tmp_path):
    shutil.copytree(model_folder, tmp_path / "tiny")
    (tmp_path / "tiny" / "generation_config.json").write_text(json.dumps(QWEN3))
    return tmp_path / "tiny"


@pytest.fixture
def start(make_system, pair_type, folder):
    async def start(**settings):
        system = await make_system(model=folder, **settings)
        await system.add_pair(pair_type([5, 6, 1]))
        return system

    return start


def seen(system):
    sampling = system.workers["decode-0"].attempts[-1].spec.sampling
    numbers = sampling.temperature, sampling.top_p, sampling.repetition_penalty
    return (*(round(number, 3) for number in numbers), sampling.top_k)


def test_what_is_read(folder, model_folder):
    defaults = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert read_defaults(folder, "auto") == defaults
    assert read_defaults(folder, "none") == read_defaults(model_folder, "auto") == {}
    assert read_defaults(model_folder, str(folder)) == defaults
    with pytest.raises(ModelError, match=r"no generation_config\.json"):
        read_defaults(folder, str(model_folder))
    (folder / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(ModelError, match=r"temperature is 'hot'.*--generation-config none"):
        read_defaults(folder, "auto")


def test_what_a_client_says_goes_before():
    defaults = {"temperature": 0.6, "top_k": 20}
    asked = AskedSampling(top_k=-1, max_tokens=3)
    completed = with_defaults(asked, defaults)
    assert (completed.temperature, completed.top_k, completed.max_tokens) == (0.6, -1, 3)
    assert asked.temperature is None
    assert with_defaults(asked, {}) is asked


async def test_requests_get_them(start):
    system = await start()
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
    ):
        assert (await system.http.post(path, json=body)).status_code == 200
        assert seen(system) == (0.6, 0.95, 1.0, 20)
        assert (await system.http.post(path, json={**body, "temperature": 0, "top_k": -1})).status_code == 200
        assert seen(system) == (0.0, 0.95, 1.0, 0)
    (model,) = (await system.http.get("/v1/models")).json()["data"]
    assert model["sampling_defaults"] == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}


async def test_requests_by_grpc_get_them(start):
    system = await start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for sampling, expected in (
            (inference_pb2.SamplingParams(), (0.6, 0.95, 1.0, 20)),
            (inference_pb2.SamplingParams(top_k=-1, top_p=1.0), (0.6, 1.0, 1.0, 0)),
        ):
            request = inference_pb2.GenerateRequest(text="a", sampling=sampling)
            await stub.GenerateUnary(request, timeout=HANG_LIMIT_S)
            assert seen(system) == expected


async def test_they_are_turned_off(start):
    system = await start(generation_config="none")
    await system.complete()
    assert seen(system) == (1.0, 1.0, 1.0, 0)
    (model,) = (await system.http.get("/v1/models")).json()["data"]
    assert model["sampling_defaults"] == {}


async def test_a_named_request_that_says_no_temperature_goes_on(start):
    system = await start()
    for headers in ({"idempotency-key": "a"}, {"x-request-id": "b"}):
        answers = [
            await system.http.post("/v1/completions", json={"prompt": "a", "stream": True}, headers=headers)
            for _ in range(2)
        ]
        assert answers[0].status_code == 200
