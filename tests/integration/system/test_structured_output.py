"""Answers of a given form from whole clusters: each has it, and is the one that a single process gives."""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from benchmarks import structured_failover
from benchmarks.cluster import Answer, Cluster, collect, request, running_cluster, stream
from demo import DEMO_MODEL
from protos import inference_pb2
from services.engine.engine import Engine, load_engine
from services.engine.steps.sequence import Sampling
from services.structured.form import AnswerForm
from services.structured.grammar import Grammars
from tests.json_schema import assert_keeps_to
from tests.schemas import PERSON

# Whole clusters, for a minute and more; what is beside them on a machine makes their workers count as lost.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EOS = (1, 2)
MAX_TOKENS = 350
NUM_ANSWERS = 4
PEOPLE: dict[str, Any] = {"type": "array", "items": PERSON, "minItems": 3, "maxItems": 4}
PEOPLE_TEXT = json.dumps(PEOPLE, separators=(",", ":"))


@pytest.fixture(scope="module")
def expected(tokenizer: Tokenizer) -> list[list[int]]:
    """Computed before a cluster starts, whose workers yield to this process."""
    return in_one_process([list(tokenizer.encode(people(seed).text).ids) for seed in range(NUM_ANSWERS)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, with a chat template that has tools."""
    folder = tmp_path_factory.mktemp("models") / "demo-with-tools"
    shutil.copytree(DEMO_MODEL, folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    told = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{# <tool_call> #}"
    config["chat_template"] = told + config["chat_template"]
    path.write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def cluster(expected: list[list[int]], model: Path) -> Iterator[Cluster]:
    with running_cluster("--threads", "1", model=model, prefill=1, decode=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


def people(seed: int) -> inference_pb2.GenerateRequest:
    message = request(f"people_{seed} = ", max_tokens=MAX_TOKENS, temperature=1.0, seed=seed)
    message.response_format.json_schema = PEOPLE_TEXT
    return message


def check(answer: Answer) -> None:
    assert answer.finish_reason in (inference_pb2.FINISH_REASON_STOP, inference_pb2.FINISH_REASON_LENGTH)
    if answer.finish_reason == inference_pb2.FINISH_REASON_STOP:
        assert_keeps_to(json.loads(answer.text), PEOPLE)


def in_one_process(prompts: list[list[int]]) -> list[list[int]]:
    parts = load_engine(DEMO_MODEL, device="cpu", num_pages=1024, threads=1)
    engine = Engine(parts, chunk_tokens=48)
    grammars = Grammars(DEMO_MODEL / "tokenizer.json", vocab_size=parts.model_config.vocab_size)
    sequences = [
        engine.add(
            prompt,
            Sampling(max_tokens=MAX_TOKENS, seed=seed, stop_token_ids=frozenset(EOS)),
            grammar=grammars.begin(AnswerForm(PEOPLE_TEXT), eos_token_ids=EOS),
        )
        for seed, prompt in enumerate(prompts)
    ]
    while engine.has_work:
        engine.step()
    return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]


async def test_the_same_as_one_process_also_when_a_worker_is_killed(
    cluster: Cluster, expected: list[list[int]], wait_until_idle: Any
) -> None:
    messages = [people(seed) for seed in range(NUM_ANSWERS)]
    async with cluster.inference() as stub:
        undisturbed = await asyncio.gather(*(collect(stub, message) for message in messages))
        assert [answer.token_ids for answer in undisturbed] == expected
        for answer in undisturbed:
            check(answer)
        assert sum(answer.finish_reason == inference_pb2.FINISH_REASON_STOP for answer in undisturbed) > 2
        streams = [stream(stub, message) for message in messages]
        received: list[list[int]] = [[] for _ in messages]
        for n, responses in enumerate(streams):  # every answer is under way
            async for response in responses:
                received[n] += response.token_ids
                if len(received[n]) > 3:
                    break
        os.kill(await asyncio.to_thread(cluster.decode_pid, response.request_id), signal.SIGKILL)

        async def rest(n: int) -> None:
            async for response in streams[n]:
                if response.token_ids:
                    assert response.first_index == len(received[n])
                received[n] += response.token_ids

        await asyncio.gather(*(rest(n) for n in range(len(streams))))
    assert received == expected
    await asyncio.to_thread(wait_until_idle, cluster)


def test_chat_over_http(cluster: Cluster, wait_until_idle: Any) -> None:
    body = {
        "model": cluster.get("/v1/models")["data"][0]["id"],
        "messages": [{"role": "user", "content": "Who are you?"}],
        "max_tokens": 200,
        "temperature": 1,
        "n": 8,
        "seed": 5,
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}},
    }
    first, second = (cluster.post("/v1/chat/completions", body)["choices"] for _ in range(2))
    assert first == second
    complete = [choice for choice in first if choice["finish_reason"] == "stop"]
    assert len(complete) > 3
    for choice in complete:
        assert_keeps_to(json.loads(choice["message"]["content"]), PERSON)
    wait_until_idle(cluster)


def test_calls_are_made_over_http(cluster: Cluster, wait_until_idle: Any) -> None:
    """By a model that has never seen one."""
    tool = {"type": "function", "function": {"name": "greet", "parameters": PERSON, "strict": True}}
    body = {
        "model": cluster.get("/v1/models")["data"][0]["id"],
        "messages": [{"role": "user", "content": "Who are you?"}],
        "tools": [tool],
        "tool_choice": {"type": "function", "function": {"name": "greet"}},
        "parallel_tool_calls": False,
        "max_tokens": 300,
        "n": 8,
        "seed": 5,
    }
    choices = cluster.post("/v1/chat/completions", body)["choices"]
    complete = [choice for choice in choices if choice["finish_reason"] == "tool_calls"]
    assert len(complete) > 3
    for choice in complete:
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "greet"
        assert choice["message"]["content"] is None
        assert_keeps_to(json.loads(call["function"]["arguments"]), PERSON)
    assert {choice["finish_reason"] for choice in choices} <= {"tool_calls", "length"}
    wait_until_idle(cluster)


def test_a_thousand_answers_are_valid_while_workers_are_killed() -> None:
    report = structured_failover.run(1000, 10)
    figures = report.figures()
    assert report.invalid == []
    assert figures["ended_by_themselves"] > 990
    assert figures["hit_by_a_failover"] > 10
