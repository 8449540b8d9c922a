"""`tandem up --engine vllm` with a model that our own engine does not know, beside vLLM alone."""

import json
import random
import re
import shutil
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is in .venv-vllm: make test-vllm")

from benchmarks.cluster import Cluster, running_cluster
from cli.up_settings import DEMO_MODEL

pytestmark = pytest.mark.timeout(600)  # three imports of vLLM, each of which takes a quarter of a minute and more

NUM_TOKENS = 24
VOCAB_SIZE = 2048
PROMPTS_TOKENS = (10, 31, 32, 33, 64, 200, 513, 700, 1500)
SHARED_TOKENS = 256


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
    flags = ("--engine=vllm", "--dtype=float32", "--kv-memory=256MiB", "--model-name=mixture", "--chunk-tokens=256")
    with running_cluster(*flags, model=mixture) as running:
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


def test_answers_are_those_of_vllm_alone_and_every_page_comes_back(cluster: Cluster, mixture: Path) -> None:
    asked = prompts()
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda prompt: ask(cluster, prompt, temperature=0)["token_ids"], asked))
    alone = subprocess.run(
        [sys.executable, "-m", "tests.vllm.alone"],
        input=json.dumps({"model": str(mixture), "prompts": asked, "num_tokens": NUM_TOKENS}),
        cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True, check=True, timeout=300,
    )  # fmt: skip
    assert answers == json.loads(alone.stdout)
    assert len({tuple(answer) for answer in answers}) == len(PROMPTS_TOKENS) + len(PROMPTS_TOKENS[::3])
    handed_over = re.search(r"^tandem_handoff_bytes_total\{.*\} (\S+)$", cluster.get_text("/metrics"), re.MULTILINE)
    assert handed_over is not None
    assert float(handed_over[1]) > 0
    workers = cluster.get("/cluster")["workers"]
    assert {worker["role"] for worker in workers} == {"prefill", "decode"}
    for worker in workers:
        assert re.fullmatch(r"vllm/0\.\d+\.\d+", worker["identity"]["engine"])
        assert not worker["exact"]
        assert worker["pages"]["free"] == worker["pages"]["total"]


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
