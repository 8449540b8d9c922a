"""Checkpoints that this project's own engine does not take: weights of eight and four bits, latent vectors for KV."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is in .venv-vllm: make test-vllm")

import torch
from safetensors.torch import load_file, save_file

from tests.waiting import HANG_LIMIT_S

pytestmark = pytest.mark.filterwarnings("default")

VOCAB, NUM_TOKENS, GROUP = 512, 12, 128
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def int8(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Whole rows of eight bits, as compressed-tensors writes them; returns what config.json says of it."""
    for name in [name for name in weights if name.endswith("proj.weight")]:
        scale = weights[name].abs().amax(1, keepdim=True) / 127
        weights[name] = (weights[name] / scale).round().clamp(-127, 127).to(torch.int8)
        weights[f"{name}_scale"] = scale
    number = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": number | {"strategy": "channel", "dynamic": False},
        "input_activations": number | {"strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def awq(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Groups of inputs of four bits, as AWQ packs them; returns what config.json says of it."""
    for name in [name for name in weights if name.endswith("proj.weight")]:
        by_input = weights.pop(name).t()  # [inputs, outputs]
        groups = by_input.reshape(-1, GROUP, by_input.shape[1])
        scales = groups.abs().amax(1) / 7
        numbers = (groups / scales[:, None]).round().clamp(-8, 7).to(torch.int64) + 8
        base = name.removesuffix("weight")
        weights[f"{base}qweight"] = packed(numbers.reshape(by_input.shape))
        weights[f"{base}qzeros"] = packed(torch.full(scales.shape, 8))
        weights[f"{base}scales"] = scales.half()
    return {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}


def packed(numbers: torch.Tensor) -> torch.Tensor:
    """Eight neighbours of a row in a word of 32 bits, in AWQ's order."""
    words = numbers.reshape(len(numbers), -1, 8)
    packed = sum(words[:, :, place] << 4 * index for index, place in enumerate(AWQ_ORDER))
    assert isinstance(packed, torch.Tensor)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32).contiguous()


def make(folder: Path, quantize: Callable[[dict[str, torch.Tensor]], dict[str, Any]]) -> Path:
    """Writes a random model with quantized weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).float().save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    said = json.loads((folder / "config.json").read_text())
    said |= {"quantization_config": quantize(weights), "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(said))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_latent(folder: Path) -> Path:
    """Writes a random mixture of experts with latent vectors of DeepSeek's sizes, which kernels are made for."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(5)
    config = DeepseekV2Config(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
        first_k_dense_replace=1, n_group=1, topk_group=1, topk_method="greedy", q_lora_rank=None, kv_lora_rank=512,
        qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, max_position_embeddings=2048, initializer_range=0.1,
    )  # fmt: skip
    DeepseekV2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def make_latent_v3(folder: Path) -> Path:
    """Writes one whose experts are chosen as DeepSeek-V3 does it, which the config of `transformers` does not say."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(6)
    config = DeepseekV3Config(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2,
        first_k_dense_replace=1, n_group=4, topk_group=2, routed_scaling_factor=2.5, q_lora_rank=64, kv_lora_rank=512,
        qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, max_position_embeddings=2048, initializer_range=0.1,
    )  # fmt: skip
    model = DeepseekV3ForCausalLM(config)
    for name, correction in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            correction.normal_(std=0.3)
    model.to(torch.bfloat16).save_pretrained(folder)
    said = json.loads((folder / "config.json").read_text()) | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def run(model: Path, dtype: str, **asked: object) -> "subprocess.CompletedProcess[str]":
    chance = random.Random(7)
    prompts = [[chance.randrange(VOCAB) for _ in range(length)] for length in (5, 32, 300)]
    program = {"model": str(model), "prompts": prompts, "num_tokens": NUM_TOKENS, "ranks": 1, "dtype": dtype}
    return subprocess.run(
        [sys.executable, "-m", "tests.vllm.ranks"], input=json.dumps(program | asked), cwd=Path(__file__).parents[2],
        capture_output=True, text=True, timeout=HANG_LIMIT_S, check=False,
    )  # fmt: skip


def check_answers(done: "subprocess.CompletedProcess[str]") -> None:
    assert not done.returncode, done.stderr[-2000:]
    seen = json.loads(done.stdout)
    assert seen["answers"] == seen["alone"]
    assert len({tuple(answer) for answer in seen["answers"]}) == 3


@pytest.mark.parametrize("quantize", [int8, pytest.param(awq, marks=pytest.mark.slow)])
def test_an_answer_from_pages_that_arrived_is_what_vllm_answers_alone(
    tmp_path: Path, quantize: Callable[[dict[str, torch.Tensor]], dict[str, Any]]
) -> None:
    check_answers(run(make(tmp_path, quantize), "auto"))


@pytest.mark.parametrize("make_model", [pytest.param(make_latent, marks=pytest.mark.slow), make_latent_v3])
def test_latent_vectors_are_handed_over(tmp_path: Path, make_model: Callable[[Path], Path]) -> None:
    check_answers(run(make_model(tmp_path), "bfloat16"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_latent_vectors_are_handed_over_without_amx(tmp_path: Path, dtype: str) -> None:
    check_answers(run(make_latent(tmp_path), dtype, has_amx=False))


@pytest.mark.slow
def test_float32_is_refused_before_a_step_would_fail(tmp_path: Path) -> None:
    done = run(make(tmp_path, int8), "float32")
    assert done.returncode
    assert "ConfigError: --dtype is float32, and the model's weights are quantized" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="needs a CPU with AMX")
def test_other_types_than_bfloat16_are_refused_for_latent_vectors_with_amx(tmp_path: Path) -> None:
    done = run(make_latent(tmp_path), "float32")
    assert done.returncode
    assert "ConfigError: --dtype is float32, and the model has latent vectors for KV (MLA)" in done.stderr
