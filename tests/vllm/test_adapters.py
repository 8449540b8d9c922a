"""LoRA adapters in a cluster with vLLM: each is a model by its name, and answers as the merged weights do."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

pytest.importorskip("vllm", reason="vLLM is in .venv-vllm: make test-vllm")

from benchmarks.cluster import Cluster, running_cluster
from cli.up_settings import DEMO_MODEL
from protos import inference_pb2, inference_pb2_grpc
from tests.vllm.lora import MERGED, write_adapter
from tests.waiting import HANG_LIMIT_S

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

BASE, ADAPTER = "base", "team/sql"
VOCAB_SIZE, NUM_TOKENS, LONG_TOKENS = 2048, 24, 400
PROMPTS_TOKENS = (10, 32, 33, 200, 700)
ROUNDS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of float32 as a checkpoint folder, with the demo model's tokenizer and chat template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(12)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, initializer_range=0.1, bos_token_id=0,
        eos_token_id=1,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).float().save_pretrained(folder)
    for path in DEMO_MODEL.iterdir():
        if path.name.startswith("tokenizer") or path.suffix == ".jinja":
            shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(
        model, tmp_path_factory.mktemp("adapters") / "sql", seed=3, changes=("q_proj", "v_proj", "up_proj")
    )


@pytest.fixture(scope="module")
def cluster(model: Path, adapter: Path) -> Iterator[Cluster]:
    """Each prompt is handed over, and an answer that loses its decode worker has another one."""
    flags = (
        "--engine=vllm",
        "--dtype=float32",
        "--kv-memory=128MiB",
        f"--model-name={BASE}",
        f"--lora={ADAPTER}={adapter}",
    )
    with running_cluster(*flags, "--local-prefill-tokens=0", model=model, decode=2) as running:
        yield running


def prompts() -> list[list[int]]:
    chance = random.Random(5)
    return [[chance.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in PROMPTS_TOKENS]


def ask(cluster: Cluster, model: str, prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
    body = {"model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    answer = cluster.post("/v1/completions", body | {"return_token_ids": True})
    assert answer["model"] == model
    return list(answer["choices"][0]["token_ids"])


def alone(model: Path, adapter: Path) -> dict[str, list[list[int]]]:
    """What vLLM alone answers to the prompts, without the adapter and with it."""
    program = {"model": str(model), "prompts": prompts(), "num_tokens": NUM_TOKENS, "adapter": str(adapter)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.alone"], input=json.dumps(program), cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE, text=True, check=True, timeout=HANG_LIMIT_S,
    )  # fmt: skip
    answers: list[list[int]] = json.loads(done.stdout)
    return {BASE: answers[: len(PROMPTS_TOKENS)], ADAPTER: answers[len(PROMPTS_TOKENS) :]}


def likeliest(folder: Path, prompt: list[int], answer: list[int]) -> list[int]:
    """What transformers finds likeliest at each place of an answer."""
    import torch
    from transformers import LlamaForCausalLM

    with torch.no_grad():
        logits = LlamaForCausalLM.from_pretrained(folder)(torch.tensor([prompt + answer])).logits[0]
    return list(logits.argmax(-1)[len(prompt) - 1 : -1].tolist())


def answer_whose_worker_dies(cluster: Cluster) -> list[int]:
    """The tokens of a long answer over gRPC, whose decode worker is killed after the first of them."""
    message = inference_pb2.GenerateRequest(
        model=ADAPTER,
        token_ids=inference_pb2.TokenIds(ids=prompts()[2][::-1]),
        sampling=inference_pb2.SamplingParams(max_tokens=LONG_TOKENS, temperature=0, ignore_eos=True),
    )
    token_ids: list[int] = []
    with grpc.insecure_channel(cluster.grpc) as channel:
        for response in inference_pb2_grpc.InferenceStub(channel).Generate(message, timeout=HANG_LIMIT_S):
            if response.token_ids and not token_ids:
                os.kill(cluster.decode_pid(response.request_id), signal.SIGKILL)
            token_ids += response.token_ids
    return token_ids


def test_answers_under_load_are_those_of_the_merged_model_also_when_a_worker_dies(
    cluster: Cluster, model: Path, adapter: Path
) -> None:
    asked = [(name, number) for number in range(len(PROMPTS_TOKENS)) for name in (ADAPTER, BASE)] * ROUNDS
    with ThreadPoolExecutor(8) as threads:
        answers = [threads.submit(ask, cluster, name, prompts()[number]) for name, number in asked]
        long_answer = answer_whose_worker_dies(cluster)
        seen = {(*one, tuple(answer.result(HANG_LIMIT_S))) for one, answer in zip(asked, answers, strict=True)}
    expected = alone(model, adapter)
    assert seen == {(name, number, tuple(expected[name][number])) for name, number in asked}
    assert all(base != adapted for base, adapted in zip(*expected.values(), strict=True))
    for prompt, answer in zip(prompts(), expected[ADAPTER], strict=True):
        assert answer == likeliest(adapter / MERGED, prompt, answer)
    assert len(long_answer) == LONG_TOKENS
    assert long_answer == likeliest(adapter / MERGED, prompts()[2][::-1], long_answer)
    workers = [worker for worker in cluster.get("/cluster")["workers"] if worker["state"] == "ready"]
    assert len(workers) >= 2
    assert all(worker["pages"]["free"] == worker["pages"]["total"] for worker in workers)


def test_an_adapter_is_a_model_of_every_api(cluster: Cluster) -> None:
    listed = {one["id"]: (one["root"], one["parent"]) for one in cluster.get("/v1/models")["data"]}
    assert listed == {BASE: (BASE, None), ADAPTER: (BASE, BASE)}
    asked = {"messages": [{"role": "user", "content": "How is it?"}], "max_tokens": NUM_TOKENS, "temperature": 0}
    texts = {}
    for name in listed:
        chat = cluster.post("/v1/chat/completions", asked | {"model": name})
        message = cluster.post("/v1/messages", asked | {"model": name})
        assert chat["model"] == message["model"] == name
        texts[name] = chat["choices"][0]["message"]["content"]
        assert message["content"][0]["text"] == texts[name]
    assert texts[BASE] != texts[ADAPTER]
    with pytest.raises(urllib.error.HTTPError) as refused:
        cluster.post("/v1/chat/completions", asked | {"model": "team/law"})
    assert refused.value.code == 404
    assert json.loads(refused.value.read())["error"]["code"] == "model_not_found"
