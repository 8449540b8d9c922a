"""Requests for a tier, over HTTP and gRPC: which model answers, what the client is told, and what is held back."""

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.access.keys import ApiKey, digest_of_key, toml_entry
from protos import inference_pb2, inference_pb2_grpc, worker_pb2
from services.runtime.errors import Overloaded

SMALL, LARGE, EOS = 30, 20, 1


@pytest.fixture
def make_tier(make_system: Any, model_folder: Path, tmp_path: Path, worker_type: Any) -> Any:
    """Makes a gateway whose tier `auto` is of `small` and `large`, with a worker of each: their scripts."""

    async def make(tier: str, *, ends: dict[str, bool] | None = None, **settings: Any) -> Any:
        models = [f'[[model]]\nname = "{name}"\npath = "{model_folder}"\n' for name in ("small", "large")]
        models[0] += f'tier = {{name = "auto", stronger = "large", {tier}}}\n'
        (tmp_path / "models.toml").write_text("".join(models))
        system = await make_system(models=tmp_path / "models.toml", **settings)
        system.refuses = set()

        def script(name: str, token: int) -> Any:
            async def decode(attempt: Any) -> None:
                if name in system.refuses:
                    return attempt.refuse(Overloaded("no pages", retry_after_s=1.0))
                attempt.emit(worker_pb2.Admitted())
                attempt.emit(worker_pb2.DecodeStarted())
                num = attempt.spec.sampling.max_tokens
                whole = [token] * 3 + [EOS] if (ends or {}).get(name, True) else [token] * num
                attempt.tokens(0, whole[:num])
                is_over = num >= len(whole) and whole[-1] == EOS
                reasons = inference_pb2.FINISH_REASON_STOP, inference_pb2.FINISH_REASON_LENGTH
                attempt.finish(reasons[not is_over])

            return decode

        for name, token in (("small", SMALL), ("large", LARGE)):
            await system.add(worker_type("decode", f"decode-{name}", script(name, token), model=name))
        return system

    return make


async def ask(system: Any, model: str = "auto", headers: Any = None, **body: Any) -> Any:
    body = {"model": model, "prompt": "hello", "max_tokens": 6, "return_token_ids": True, **body}
    return await system.http.post("/v1/completions", json=body, headers=headers)


def told(answer: Any) -> tuple[str, str | None, int]:
    """The model that answers, what is said of the tier, and the first token."""
    token_id = answer.json()["choices"][0]["token_ids"][0]
    return answer.headers["x-tandem-model"], answer.headers.get("x-tandem-tier"), token_id


async def test_the_cheap_model_answers_unless_the_prompt_is_long(make_tier: Any) -> None:
    system = await make_tier("long_prompt_chars = 20")
    assert told(await ask(system)) == ("small", "auto -> small; reason=cheap", SMALL)
    assert told(await ask(system, prompt="x" * 20)) == ("large", "auto -> large; reason=long_prompt", LARGE)
    assert told(await ask(system, "small", prompt="x" * 20)) == ("small", None, SMALL)
    named = await ask(system, prompt="x" * 20, headers={"idempotency-key": "k"})
    assert told(named) == ("large", "auto -> large; reason=long_prompt", LARGE)
    messages = [{"role": "user", "content": [{"type": "text", "text": "y" * 20}]}]
    chat = await system.http.post("/v1/chat/completions", json={"model": "auto", "messages": messages, "max_tokens": 6})
    assert chat.headers["x-tandem-model"] == "large"
    assert "auto" in [model["id"] for model in (await system.http.get("/v1/models")).json()["data"]]
    metrics = (await system.http.get("/metrics")).text
    assert 'tandem_tier_answers_total{answering="large",reason="long_prompt",tier="auto"} 3.0' in metrics


async def test_an_answer_that_fails_the_check_is_replaced_before_anything_is_sent(make_tier: Any) -> None:
    system = await make_tier('check = ["finished"]', ends={"small": False})
    answer = await ask(system, n=2)
    assert told(answer) == ("large", "auto -> large; reason=check_finished", LARGE)
    assert len({answer.headers["x-request-id"], answer.json()["id"].removeprefix("cmpl-")}) == 1
    assert len(answer.headers.get_list("x-request-id")) == 1
    assert [choice["token_ids"] for choice in answer.json()["choices"]] == [[LARGE] * 3 + [EOS]] * 2
    body = {"model": "auto", "prompt": "hello", "max_tokens": 6, "stream": True, "return_token_ids": True}
    async with system.http.stream("POST", "/v1/completions", json=body) as stream:
        lines = [line async for line in stream.aiter_lines() if line.startswith("data: {")]
    sent = [
        token for line in lines for choice in json.loads(line[6:])["choices"] for token in choice.get("token_ids", ())
    ]
    assert sent == [LARGE] * 3 + [EOS]


async def test_a_named_request_keeps_to_the_model_that_it_began_with(make_tier: Any) -> None:
    system = await make_tier('check = ["finished"]', ends={"small": False})
    for _ in range(2):
        answer = await ask(system, headers={"idempotency-key": "k"})
        assert told(answer) == ("small", "auto -> small; reason=cheap", SMALL)
    assert not system.workers["decode-large"].attempts


async def test_an_answer_that_passes_the_check_is_sent_as_it_is(make_tier: Any) -> None:
    system = await make_tier('check = ["finished"]')
    assert told(await ask(system)) == ("small", "auto -> small; reason=cheap", SMALL)
    assert not system.workers["decode-large"].attempts


async def test_an_answer_that_failed_is_sent_where_the_stronger_model_gives_none(make_tier: Any) -> None:
    system = await make_tier('check = ["finished"]', ends={"small": False}, max_queue_wait_s=0.2)
    system.refuses = {"large"}
    assert told(await ask(system)) == ("small", "auto -> small; reason=check_finished_not_replaced", SMALL)
    system.refuses = {"small"}
    refused = await ask(system)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_overloaded")


async def test_a_key_that_does_not_allow_the_stronger_model_gets_the_cheap_one(make_tier: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    allowed = {"few": frozenset({"small"}), "all": None}
    entries = [
        toml_entry(ApiKey(digest_of_key(f"tandem-{name}"), name, models=models)) for name, models in allowed.items()
    ]
    keys.write_text("\n".join(entries))
    system = await make_tier('long_prompt_chars = 1, check = ["finished"]', ends={"small": False}, api_keys=keys)
    for name, model in (("few", "small"), ("all", "large")):
        answer = await ask(system, headers={"authorization": f"Bearer tandem-{name}"})
        assert told(answer)[0] == model


async def test_a_client_that_leaves_while_an_answer_is_held_back_leaves_nothing_behind(make_tier: Any) -> None:
    system = await make_tier('check = ["finished"]', ends={"small": False})
    system.refuses = {"large"}
    task = asyncio.create_task(ask(system))
    await system.until(lambda: system.gateway.requests.num_queued == 1)
    task.cancel()
    await system.until(lambda: system.gateway.requests.num_queued == system.gateway.requests.num_open_answers == 0)


async def test_grpc_says_the_same(make_tier: Any) -> None:
    system = await make_tier("long_prompt_chars = 5")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.GenerateUnary(
            inference_pb2.GenerateRequest(
                model="auto", text="hello", sampling=inference_pb2.SamplingParams(max_tokens=6)
            )
        )
        said = dict(await call.initial_metadata())
        assert said["x-tandem-tier"] == "auto -> large; reason=long_prompt"
