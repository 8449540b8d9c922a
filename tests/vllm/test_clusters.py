"""`tandem up --engine vllm` with a model that our own engine does not know, beside vLLM alone."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is in .venv-vllm: make test-vllm")

from benchmarks.cluster import Cluster, running_cluster
from cli.up_settings import DEMO_MODEL
from tests.waiting import HANG_LIMIT_S

pytestmark = pytest.mark.timeout(600)  # three imports of vLLM, each of which takes a quarter of a minute and more

NUM_TOKENS = 24
VOCAB_SIZE = 2048
PROMPTS_TOKENS = (10, 31, 32, 33, 64, 200, 513, 700, 1500)
SHARED_TOKENS = 256
FLAGS = ("--engine=vllm", "--dtype=float32", "--kv-memory=256MiB", "--model-name=mixture", "--chunk-tokens=256")
MISSED_WITHIN_S = 3.0
AT_REST_WITHIN_S = 60.0


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random mixture of eight experts as a checkpoint folder, with the demo model's tokenizer."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(11)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE, hidden_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, intermediate_size=256, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2,
        max_position_embeddings=4096, initializer_range=0.3, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("mixture")
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, folder)
    return folder


@pytest.fixture(scope="module")
def cluster(mixture: Path) -> Iterator[Cluster]:
    with running_cluster(*FLAGS, model=mixture) as running:
        yield running


def ask(cluster: Cluster, prompt: object, **asked: Any) -> dict[str, Any]:
    """The only choice of a completion."""
    body = {
        "model": "mixture",
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    (choice,) = cluster.post("/v1/completions", body | asked)["choices"]
    return dict(choice)


def prompts() -> list[list[int]]:
    """Prompts of many lengths; every third one begins as others do."""
    rng = random.Random(3)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(SHARED_TOKENS)]
    made = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in PROMPTS_TOKENS]
    return made + [shared + prompt for prompt in made[::3]] + made[:2]


@pytest.fixture(scope="module")
def expected(mixture: Path) -> list[list[int]]:
    """What vLLM alone answers to the prompts."""
    return answers_alone(mixture)


def answers_alone(model: Path, **asked: str) -> list[list[int]]:
    alone = subprocess.run(
        [sys.executable, "-m", "tests.vllm.alone"],
        input=json.dumps({"model": str(model), "prompts": prompts(), "num_tokens": NUM_TOKENS} | asked),
        cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True, check=True, timeout=HANG_LIMIT_S,
    )  # fmt: skip
    answers: list[list[int]] = json.loads(alone.stdout)
    return answers


def workers_at_rest(cluster: Cluster) -> list[dict[str, Any]]:
    """The workers when every page is free, which they say a moment after the last answer. Raises AssertionError."""
    deadline_s = time.monotonic() + AT_REST_WITHIN_S
    while True:
        workers: list[dict[str, Any]] = cluster.get("/cluster")["workers"]
        held = {
            worker["id"]: worker["pages"] for worker in workers if worker["pages"]["free"] < worker["pages"]["total"]
        }
        if not held:
            return workers
        assert time.monotonic() < deadline_s, held
        time.sleep(0.05)


def ask_all(cluster: Cluster) -> list[list[int]]:
    """The answers to the prompts, four at a time."""
    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(lambda prompt: ask(cluster, prompt, temperature=0)["token_ids"], prompts()))


def test_answers_are_those_of_vllm_alone_and_every_page_comes_back(cluster: Cluster, expected: list[list[int]]) -> None:
    answers = ask_all(cluster)
    assert answers == expected
    assert len({tuple(answer) for answer in answers}) == len(PROMPTS_TOKENS) + len(PROMPTS_TOKENS[::3])
    handed_over = re.search(r"^tandem_handoff_bytes_total\{.*\} (\S+)$", cluster.get_text("/metrics"), re.MULTILINE)
    assert handed_over is not None
    assert float(handed_over[1]) > 0
    workers = workers_at_rest(cluster)
    assert {worker["role"] for worker in workers} == {"prefill", "decode"}
    for worker in workers:
        assert re.fullmatch(r"vllm/0\.\d+\.\d+", worker["identity"]["engine"])
        assert not worker["exact"]


def test_a_seeded_answer_is_the_same_when_it_is_asked_for_again(cluster: Cluster) -> None:
    prompt = prompts()[6]
    asked = {"temperature": 1.0, "top_p": 0.95, "presence_penalty": 1.0, "frequency_penalty": 0.5, "min_tokens": 12}
    drawn = [ask(cluster, prompt, seed=seed, **asked)["token_ids"] for seed in (7, 7, 8)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_forms_and_log_probabilities_are_this_projects(cluster: Cluster) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["tandem", "bicycle"]}}}
    asked = {"response_format": form, "temperature": 1.0, "ignore_eos": False}
    texts = {ask(cluster, prompts()[1], seed=seed, **asked)["text"] for seed in range(12)}
    assert texts <= {'"tandem"', '"bicycle"'}
    logprobs = ask(cluster, prompts()[1], temperature=0, logprobs=2)["logprobs"]
    assert len(logprobs["token_logprobs"]) == NUM_TOKENS
    best = [max(top.values()) for top in logprobs["top_logprobs"]]
    assert logprobs["token_logprobs"] == pytest.approx(best)
    assert all(value <= 0 for value in best)


def test_what_vllm_cannot_give_here_is_refused_with_a_sentence(cluster: Cluster) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(cluster, prompts()[0], prompt_logprobs=1)
    assert refused.value.code == 400
    error = json.loads(refused.value.read())["error"]
    assert (error["code"], "vLLM" in error["message"]) == ("not_offered", True)


@pytest.mark.slow
@pytest.mark.parametrize(("num_prefill_ranks", "num_decode_ranks"), [(2, 2), (1, 2), (2, 1)])
def test_workers_of_any_number_of_ranks_answer_as_vllm_alone(
    mixture: Path, expected: list[list[int]], num_prefill_ranks: int, num_decode_ranks: int
) -> None:
    degrees = (f"--prefill-tensor-parallel={num_prefill_ranks}", f"--decode-tensor-parallel={num_decode_ranks}")
    with running_cluster(*FLAGS, *degrees, "--local-prefill-tokens=0", model=mixture) as running:
        assert ask_all(running) == expected
        workers = workers_at_rest(running)
        assert {worker["role"]: worker["tensor_parallel"] for worker in workers} == {
            "prefill": num_prefill_ranks,
            "decode": num_decode_ranks,
        }


def ranks_of(cluster: Cluster) -> list[int]:
    """Process ids of all ranks but the first ones, under the cluster's process."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    workers = {int(pid) for pid, parent, _ in rows if int(parent) == cluster.process.pid}
    return [int(pid) for pid, parent, command in rows if int(parent) in workers and "worker.vllm.rank" in command]


@pytest.mark.slow
def test_answers_of_a_worker_that_loses_a_rank_are_computed_elsewhere(mixture: Path, expected: list[list[int]]) -> None:
    flags = (*FLAGS, "--decode-tensor-parallel=2")
    with running_cluster(*flags, model=mixture, decode=2) as running, ThreadPoolExecutor(1) as thread:
        asked = thread.submit(lambda: [ask_all(running) for _ in range(4)])
        time.sleep(1.0)
        victim, _ = ranks_of(running)
        killed_s = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        while sum(worker["state"] == "ready" for worker in running.get("/cluster")["workers"]) == 3:
            assert time.monotonic() < killed_s + MISSED_WITHIN_S
            time.sleep(0.05)
        assert asked.result(HANG_LIMIT_S) == [expected] * 4


@pytest.mark.gpu
def test_on_a_gpu_answers_are_those_of_vllm_alone(tmp_path: Path) -> None:
    """Two workers on one GPU, each prompt handed over; in bfloat16 and one after the other, as on any GPU."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(12)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, intermediate_size=512, max_position_embeddings=4096, initializer_range=0.3, bos_token_id=0,
        eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, tmp_path)
    alone = answers_alone(tmp_path, dtype="bfloat16")
    flags = ("--engine=vllm", "--kv-memory=1GiB", "--model-name=mixture", f"--start-timeout={HANG_LIMIT_S:.0f}")
    settings = {"TANDEM_DEVICE": "cuda", "TANDEM_LOCAL_PREFILL_TOKENS": "0", "TANDEM_CHUNK_TOKENS": "2048"}
    with running_cluster(*flags, model=tmp_path, settings=settings) as running:
        answers = [ask(running, prompt, temperature=0)["token_ids"] for prompt in prompts()]
        assert float(re.findall(r"^tandem_handoff_bytes_total\{.*\} (\S+)$", running.get_text("/metrics"), re.M)[0]) > 0
        workers_at_rest(running)
    assert [found == wanted for found, wanted in zip(answers, alone, strict=True)] == [True] * len(alone)
