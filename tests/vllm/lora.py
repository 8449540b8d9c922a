"""Random LoRA adapters of a checkpoint, and what `merge_and_unload` of PEFT would make of the checkpoint."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

RANK, ALPHA = 4, 8
MERGED = "merged"


def write_adapter(
    model_dir: Path, folder: Path, *, seed: int, changes: Sequence[str] = ("q_proj", "v_proj"), scale: float = 0.1
) -> Path:
    """Writes an adapter of the layers that end in `changes`, and the changed model in its folder MERGED."""
    chance = torch.Generator().manual_seed(seed)
    weights, parts = load_file(model_dir / "model.safetensors"), {}
    for name in [name for name in weights if name.endswith(tuple(f"{layer}.weight" for layer in changes))]:
        num_out, num_in = weights[name].shape
        a = torch.randn(RANK, num_in, generator=chance) * scale
        b = torch.randn(num_out, RANK, generator=chance) * scale
        layer = f"base_model.model.{name.removesuffix('weight')}"
        parts |= {f"{layer}lora_A.weight": a, f"{layer}lora_B.weight": b}
        weights[name] = weights[name] + ALPHA / RANK * (b @ a)
    (folder / MERGED).mkdir(parents=True)
    save_file(parts, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "target_modules": list(changes)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, folder / MERGED / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(model_dir / "config.json", folder / MERGED)
    return folder
