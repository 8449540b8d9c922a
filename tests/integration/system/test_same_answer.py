"""Promise 1 on the whole system: what a cluster answers equals `transformers` and our own engine in one process."""

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.cluster import Cluster, collect, request, running_cluster
from services.engine.engine import Engine, load_engine
from services.engine.steps.sequence import Sampling

NUM_NEW_TOKENS = 6
CHUNK_TOKENS = 32
# Around pages of 16 and 64 and around chunks of 32.
PROMPT_LENGTHS = (1, 15, 16, 17, 31, 32, 33, 64, 65, 97)
VARIANTS = (
    "llama-mha",
    "llama3-gqa-tied",
    "llama-mqa-odd",
    "llama-bias",
    "mistral-wide-head",
    "qwen2-bias",
    "qwen2-tied",
    "qwen3-qk-norm",
    "qwen3-tied-bias",
)
SETTINGS = list(itertools.product((1, 2), (16, 64), ("shm", "tcp")))  # workers per role, page size, transport
EVERY_CASE = list(itertools.product(VARIANTS, SETTINGS))
# Each value of the settings; the whole product is a slow test, and what models differ in is compared with transformers
# in tests/services/engine too.
SOME_CASES = [("llama3-gqa-tied", (1, 16, "shm")), ("qwen3-qk-norm", (2, 64, "tcp"))]


@pytest.mark.parametrize(("variant", "setting"), SOME_CASES)
def test_greedy_equals_transformers(
    variant: str, setting: tuple[int, int, str], checkpoint: Any, reference: Any, random_ids: Any, wait_until_idle: Any
) -> None:
    check_greedy(variant, setting, checkpoint(variant), reference(variant), random_ids, wait_until_idle)


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "setting"), [case for case in EVERY_CASE if case not in SOME_CASES])
def test_greedy_equals_transformers_everywhere(
    variant: str, setting: tuple[int, int, str], checkpoint: Any, reference: Any, random_ids: Any, wait_until_idle: Any
) -> None:
    check_greedy(variant, setting, checkpoint(variant), reference(variant), random_ids, wait_until_idle)


def check_greedy(
    variant: str,
    setting: tuple[int, int, str],
    model: Path,
    reference: Any,
    random_ids: Callable[..., list[int]],
    wait_until_idle: Callable[[Cluster], Any],
) -> None:
    num_workers, page_size, transport = setting
    prompts = [random_ids(length, seed=length) for length in PROMPT_LENGTHS]
    expected = [greedy_by_transformers(reference, prompt) for prompt in prompts]
    flags = ["--page-size", str(page_size), "--transport", transport, "--dtype", "float32"]
    flags += ["--chunk-tokens", str(CHUNK_TOKENS), "--kv-memory", "64MiB"]
    with running_cluster(*flags, model=model, prefill=num_workers, decode=num_workers) as cluster:
        over_grpc = asyncio.run(
            all_at_once(cluster, prompts, temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
        )
        over_http = cluster.post(
            "/v1/completions",
            {
                "model": cluster.get("/v1/models")["data"][0]["id"],
                "prompt": prompts,
                "temperature": 0,
                "max_tokens": NUM_NEW_TOKENS,
                "ignore_eos": True,
                "return_token_ids": True,
            },
        )
        # The pages of this prompt are cached by now, and must not keep its tokens from being looked at.
        scored = cluster.post("/v1/completions", {"prompt": prompts[-1], "prompt_logprobs": 0, "max_tokens": 1})
        wait_until_idle(cluster)
    assert over_grpc == expected
    assert [choice["token_ids"] for choice in over_http["choices"]] == expected
    (choice,) = scored["choices"]
    said = [next(iter(entry.values()))["logprob"] for entry in choice["prompt_logprobs"][1:]]
    assert said == pytest.approx(logprobs_by_transformers(reference, prompts[-1]), abs=1e-3)


@pytest.mark.parametrize(
    ("dtype", "chunk_tokens"),
    [
        ("float32", 512),
        ("bfloat16", 64),
        pytest.param("float32", 64, marks=pytest.mark.slow),
        pytest.param("bfloat16", 512, marks=pytest.mark.slow),
    ],
)
def test_alone_or_in_a_batch_in_one_process_or_two(
    dtype: str, chunk_tokens: int, checkpoint: Any, random_ids: Any
) -> None:
    """One request alone and among 16, on 1P1D and in one process, with different chunks: identical tokens."""
    model = checkpoint("llama3-gqa-tied", dtype=dtype)
    prompts = [random_ids(20 + 11 * n, seed=n) for n in range(16)]
    choices: list[dict[str, Any]] = [
        {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True},
        {"temperature": 0.9, "top_p": 0.95, "seed": 1234, "max_tokens": 12, "ignore_eos": True},
    ]
    expected = [in_one_process(model, dtype, prompts, choice) for choice in choices]
    flags = ["--dtype", dtype, "--chunk-tokens", str(chunk_tokens), "--kv-memory", "64MiB"]
    with running_cluster(*flags, model=model) as cluster:
        for choice, answers in zip(choices, expected, strict=True):
            assert asyncio.run(all_at_once(cluster, prompts, **choice)) == answers
            alone = [asyncio.run(all_at_once(cluster, [prompts[n]], **choice))[0] for n in (0, 7, 15)]
            assert alone == [answers[n] for n in (0, 7, 15)]


def in_one_process(model: Path, dtype: str, prompts: list[list[int]], choice: dict[str, Any]) -> list[list[int]]:
    parts = load_engine(model, dtype=dtype, num_pages=1024)
    sampling = Sampling(**{key: value for key, value in choice.items() if key != "ignore_eos"})
    # A chunk size that no cluster of this test uses.
    return Engine(parts, chunk_tokens=48).generate(prompts, sampling)


async def all_at_once(cluster: Cluster, prompts: list[list[int]], **sampling: Any) -> list[list[int]]:
    async with cluster.inference() as stub:
        answers = await asyncio.gather(*(collect(stub, request(prompt, **sampling)) for prompt in prompts))
    return [answer.token_ids for answer in answers]


def logprobs_by_transformers(reference: Any, prompt: list[int]) -> list[float]:
    with torch.no_grad():
        logprobs = reference(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    return [float(logprobs[position, token_id]) for position, token_id in enumerate(prompt[1:])]


def greedy_by_transformers(reference: Any, prompt: list[int]) -> list[int]:
    defaults = reference.generation_config
    eos_token_id, defaults.eos_token_id = defaults.eos_token_id, None
    try:
        with torch.no_grad():
            ids = reference.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM_NEW_TOKENS)
    finally:
        defaults.eos_token_id = eos_token_id
    return [int(token) for token in ids[0, len(prompt) :]]
