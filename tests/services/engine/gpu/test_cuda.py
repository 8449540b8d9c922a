"""What only a CUDA device can show: graphs that are captured and replayed, and rows of matrix products."""

import subprocess
import sys

import pytest
import torch

from services.engine.engine import Engine
from services.engine.gpu.graphs import GraphCapture, call_again
from services.engine.gpu.matmul import forbid_split_k
from services.engine.gpu_runner import GpuRunner
from services.engine.model import load_model
from services.engine.runner import ModelRunner
from services.engine.steps.sequence import Sampling
from tests.services.engine.gpu.test_gpu_runner import engine_of
from tests.services.engine.weights.test_shared import CHILD

pytestmark = pytest.mark.gpu

PROMPT_LENGTHS = (1, 15, 16, 17, 40)
SAMPLINGS = [Sampling(max_tokens=20 + index, temperature=index % 2, seed=index) for index in range(5)]


@pytest.mark.parametrize("name", ["llama3-gqa-tied", "qwen3-qk-norm", "llama-bias"])
def test_replayed_graphs_answer_as_called_functions_and_the_cpu_do(checkpoint, random_ids, name):
    prompts = [random_ids(length, seed=length) for length in PROMPT_LENGTHS]
    model = load_model(checkpoint(name), device="cuda")
    answers = [
        Engine(engine_of(model, GpuRunner, max_rows=8, capture=capture)).generate(prompts, SAMPLINGS)
        for capture in (GraphCapture(model.device), call_again)
    ]
    assert answers[0] == answers[1]
    oracle = engine_of(load_model(checkpoint(name), device="cpu"), ModelRunner)
    assert answers[0] == Engine(oracle).generate(prompts, SAMPLINGS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_are_the_same_alone_and_together(checkpoint, random_ids, dtype):
    prompts = [random_ids(length, seed=length) for length in PROMPT_LENGTHS]
    parts = engine_of(load_model(checkpoint("llama3-gqa-tied"), dtype=dtype, device="cuda"), GpuRunner, max_rows=8)
    together = Engine(parts).generate(prompts, SAMPLINGS)
    assert parts.runner.num_ahead_used > 0
    for prompt, sampling, answer in zip(prompts, SAMPLINGS, together, strict=True):
        assert Engine(parts).generate([prompt], sampling) == [answer]


def test_weights_of_another_process_give_the_same_answers(checkpoint, random_ids, caplog):
    """The other one is killed: the memory is still there."""
    folder = checkpoint("llama3-gqa-tied")
    command = [sys.executable, "-c", CHILD, str(folder), "cuda"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    with caplog.at_level("INFO"):
        shared = load_model(folder, device="cuda", shares_weights=True)
    assert "nothing was read" in caplog.text
    child.kill()
    child.communicate()
    own = load_model(folder, device="cuda")
    prompts = [random_ids(length, seed=length) for length in PROMPT_LENGTHS]
    answers = [Engine(engine_of(model, GpuRunner, max_rows=8)).generate(prompts, SAMPLINGS) for model in (own, shared)]
    shared.close()
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("out_features", "in_features"), [(6144, 4096), (4096, 14_336), (1024, 3072)])
def test_a_row_of_a_product_does_not_depend_on_the_number_of_rows(out_features, in_features):
    """What `exact` would need; until this and the engine's tests hold on a kind of device, nothing claims it there."""
    forbid_split_k()
    weight = torch.randn(out_features, in_features, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(512, in_features, device="cuda", dtype=torch.bfloat16)
    whole = torch.nn.functional.linear(x, weight)
    for count in (1, 2, 3, 8, 16, 33, 64, 128, 256):
        assert torch.equal(torch.nn.functional.linear(x[:count], weight), whole[:count]), count
