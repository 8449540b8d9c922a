"""Which adapters are taken for a model, found out from their files before vLLM is imported."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from services.runtime.errors import ModelError
from worker.vllm.adapters import lora_arguments

INPUTS, OUTPUTS = 6, 10
LAYER = "model.layers.0.self_attn.q_proj"


def parts(
    layer: str = LAYER, *, rank: int = 4, inputs: int = INPUTS, outputs: int = OUTPUTS
) -> dict[str, torch.Tensor]:
    name = f"base_model.model.{layer}"
    return {f"{name}.lora_A.weight": torch.ones(rank, inputs), f"{name}.lora_B.weight": torch.ones(outputs, rank)}


def write(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4} | config))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    experts = {"model.layers.0.mlp.experts.0.up_proj.weight": torch.ones(2, 2)}
    save_file({f"{LAYER}.weight": torch.ones(OUTPUTS, INPUTS)} | experts, folder / "model.safetensors")
    return folder


def problem(folder: Path, model: Path) -> str:
    with pytest.raises(ModelError) as refused:
        lora_arguments({"sql": folder}, model, is_cpu=True)
    return str(refused.value)


def test_vllm_has_room_for_the_largest_adapter_and_on_cpus_a_place_that_stays_empty(
    tmp_path: Path, model: Path
) -> None:
    small = write(tmp_path / "small", parts())
    large = write(tmp_path / "large", parts(rank=8), r=8, rank_pattern={"q_proj": 12})
    adapters = {"small": small, "large": large}
    asked = lora_arguments(adapters, model, is_cpu=True)
    assert asked == {"enable_lora": True, "max_loras": 3, "max_lora_rank": 16}
    assert lora_arguments(adapters, model, is_cpu=False)["max_loras"] == 2
    assert lora_arguments({}, model, is_cpu=True) == {}


@pytest.mark.parametrize("config", [{"r": None}, {"r": "8"}, {"r": 0}, {"r": True}, {"rank_pattern": {"q_proj": -1}}])
def test_a_folder_that_says_no_rank_is_no_adapter(tmp_path: Path, model: Path, config: dict[str, Any]) -> None:
    assert "its r must be a rank" in problem(write(tmp_path / "sql", parts(), **config), model)


def test_a_rank_that_vllm_has_no_place_for_is_refused(tmp_path: Path, model: Path) -> None:
    assert "the adapter sql has rank 513" in problem(write(tmp_path / "sql", parts(), r=513), model)


def test_a_folder_without_weights_is_refused(tmp_path: Path, model: Path) -> None:
    folder = write(tmp_path / "sql", parts())
    (folder / "adapter_model.safetensors").write_bytes(b"no weights")
    assert "adapter_model.safetensors cannot be read" in problem(folder, model)
    (folder / "adapter_model.safetensors").unlink()
    assert "adapter_model.safetensors cannot be read" in problem(folder, model)
    (folder / "adapter_config.json").unlink()
    assert "adapter_config.json" in problem(folder, model)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (parts("model.layers.1.self_attn.q_proj"), "this one has no model.layers.1.self_attn.q_proj"),
        (parts(inputs=INPUTS - 1), f"its {LAYER} has {INPUTS - 1} inputs, this one's {INPUTS}"),
        (parts(outputs=OUTPUTS + 1), f"its {LAYER} has {OUTPUTS + 1} outputs, this one's {OUTPUTS}"),
    ],
)
def test_an_adapter_of_another_model_is_refused(
    tmp_path: Path, model: Path, tensors: dict[str, torch.Tensor], said: str
) -> None:
    text = problem(write(tmp_path / "sql", tensors), model)
    assert text.startswith("the adapter sql is made for another model: ")
    assert said in text


@pytest.mark.parametrize(
    "weights",
    [
        {LAYER.removeprefix("model.") + ".weight": torch.ones(OUTPUTS, INPUTS)},
        {f"{LAYER}.qweight": torch.ones(3, 3)},
        {f"{LAYER}.weight": torch.ones(OUTPUTS, INPUTS // 2, dtype=torch.uint8)},
    ],
)
def test_weights_of_other_names_and_packed_ones_are_left_to_vllm(
    tmp_path: Path, model: Path, weights: dict[str, torch.Tensor]
) -> None:
    save_file(weights, model / "model.safetensors")
    experts = parts("model.layers.0.mlp.experts")
    assert lora_arguments({"sql": write(tmp_path / "sql", parts() | experts)}, model, is_cpu=True)["enable_lora"]
