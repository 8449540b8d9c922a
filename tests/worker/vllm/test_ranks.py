"""vLLM on two ranks beside one: equal answers by pages of one form, and a rank that is lost."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import HANG_LIMIT_S

pytest.importorskip("vllm", reason="vLLM is in .venv-vllm: make test-vllm")

pytestmark = pytest.mark.filterwarnings("default")

VOCAB, NUM_TOKENS = 512, 12


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with two heads in its KV cache."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, initializer_range=0.3,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder


def run(model: Path, ranks: int, **asked: str) -> dict[str, Any]:
    chance = random.Random(5)
    prompts = [[chance.randrange(VOCAB) for _ in range(length)] for length in (1, 32, 33, 300, 700)]
    program = {"model": str(model), "prompts": prompts, "num_tokens": NUM_TOKENS, "ranks": ranks, "end": "SIGKILL"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.ranks"], input=json.dumps(program | asked), cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE, text=True, check=True, timeout=HANG_LIMIT_S,
    )  # fmt: skip
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


def test_two_ranks_answer_as_one_and_have_its_pages_and_one_that_is_killed_is_missed(llama: Path) -> None:
    one, two = run(llama, 1), run(llama, 2)
    assert two["answers"] == one["answers"] == one["alone"]
    assert len({tuple(answer) for answer in two["answers"]}) > 1
    assert (two["fingerprint"], two["layout"], two["copies"]) == (one["fingerprint"], one["layout"], 1)
    ((pieces, blocks, size),) = one["parts"]
    assert two["parts"] == [[pieces, blocks, size // 2]] * 2
    assert two["is_written"] == [True, True]
    assert two["lost"]["missed_s"] < 3.0
    assert "rank 1 of the worker has ended with SIGKILL" in two["lost"]["loss"]


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_missed(llama: Path) -> None:
    lost = run(llama, 2, end="SIGSTOP")["lost"]
    assert 2.0 < lost["missed_s"] < 5.0
    assert "nothing was heard of rank 1" in lost["loss"]


@pytest.mark.slow
def test_ranks_that_share_a_head_hold_the_same_bytes_of_it(llama: Path) -> None:
    one, four = run(llama, 1), run(llama, 4)
    assert four["answers"] == one["answers"]
    assert (four["copies"], four["fingerprint"]) == (2, one["fingerprint"])


@pytest.mark.gpu
def test_on_a_gpu_an_answer_from_pages_that_arrived_is_what_vllm_answers_alone(llama: Path) -> None:
    seen = run(llama, 1, device="cuda", dtype="bfloat16")
    assert seen["answers"] == seen["alone"]
    assert len({tuple(answer) for answer in seen["answers"]}) > 1
