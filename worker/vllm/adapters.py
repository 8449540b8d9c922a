"""LoRA adapters of a model that vLLM computes: checks that they match the model, and loads them."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open

from services.runtime.errors import ModelError
from services.runtime.model_facts import read_json_object
from worker.vllm.installed import own_version

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.core import EngineCore

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM supports. An adapter of another rank uses the next larger one."""
_PATTERNS = ("rank_pattern", "alpha_pattern")
"""PEFT's keys for the ranks and scales of single layers."""
_PART = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_PACKED = "U8"
"""Data type of packed weights, whose shape differs from the layer's: two 4-bit numbers share a byte."""


class _Tensor(NamedTuple):
    """Metadata of a tensor in a file."""

    name: str
    dtype: str
    shape: list[int]


def lora_arguments(adapters: Mapping[str, Path], model_dir: Path, *, is_cpu: bool) -> dict[str, Any]:
    """Returns the vLLM arguments that keep all these adapters in memory.

    Raises ModelError if an adapter does not match the model or its rank is not supported by vLLM.
    """
    if not adapters:
        return {}
    model = [tensor for file in sorted(model_dir.glob("*.safetensors")) for tensor in _tensors(file)]
    ranks = []
    for name, folder in adapters.items():
        ranks.append(_rank(name, folder))
        _check_shapes(name, _tensors(folder / ADAPTER_WEIGHTS), model)
    # On CPUs, vLLM applies the last adapter slot to batch items without an adapter (vllm#48421), so that slot stays
    # empty.
    num_places = len(adapters) + is_cpu
    return {
        "enable_lora": True,
        "max_loras": num_places,
        "max_lora_rank": next(rank for rank in _RANKS if rank >= max(ranks)),
    }


def load_adapters(adapters: Mapping[str, Path], core: "EngineCore") -> dict[str, "LoRARequest"]:
    """Loads all adapters into vLLM and returns them by name.

    Raises ModelError here, because a failure within a step would end the engine.
    """
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.request import LoRARequest

    known = {field.name for field in dataclasses.fields(PEFTHelper)}
    loaded: dict[str, LoRARequest] = {}
    for number, (name, folder) in enumerate(sorted(adapters.items()), start=1):
        config = read_json_object(folder, ADAPTER_CONFIG)
        if ignored := [key for key in _PATTERNS if config.get(key) and key not in known]:
            raise ModelError(f"the adapter {name} has {ignored[0]}, which vLLM {own_version()} ignores")
        loaded[name] = LoRARequest(name, number, str(folder))
        try:
            core.add_lora(loaded[name])
        except (AssertionError, KeyError, RuntimeError, ValueError) as error:
            raise ModelError(f"vLLM cannot use the adapter {name}: {error}") from error
    return loaded


def _rank(name: str, folder: Path) -> int:
    """Returns the largest rank of an adapter's layers."""
    config = read_json_object(folder, ADAPTER_CONFIG)
    ranks = [config.get("r"), *(config.get("rank_pattern") or {}).values()]
    if not all(type(rank) is int and rank > 0 for rank in ranks):
        raise ModelError(f"{folder / ADAPTER_CONFIG} is not of a LoRA adapter: its r must be a rank of at least 1")
    if max(ranks) > _RANKS[-1]:
        raise ModelError(f"the adapter {name} has rank {max(ranks)}, and vLLM has places for ranks up to {_RANKS[-1]}")
    return int(max(ranks))


def _check_shapes(name: str, adapter: SequenceOf[_Tensor], model: SequenceOf[_Tensor]) -> None:
    """Raises ModelError if an adapter changes a layer that the model lacks, or that has other sizes in the model.

    vLLM would ignore the former, and pad the latter if they are smaller.
    """
    layers = {tensor.name.rpartition(".")[0] for tensor in model}
    shapes = {tensor.name: tensor.shape for tensor in model if tensor.dtype != _PACKED}
    for layer, side, size in _sides(adapter):
        # Checkpoints of a model without its head omit the first component of the names.
        found = next((one for one in (layer, layer.partition(".")[2]) if one in layers), None)
        if found is None:
            if layers and "experts" not in layer:  # layers of a mixture of experts have other names in some checkpoints
                raise ModelError(f"the adapter {name} is made for another model: this one has no {layer}")
            continue
        shape = shapes.get(f"{found}.weight", [])
        if len(shape) == 2 and shape[side] != size:
            kind = ("outputs", "inputs")[side]
            raise ModelError(
                f"the adapter {name} is made for another model: its {layer} has {size} {kind}, this one's {shape[side]}"
            )


def _sides(adapter: SequenceOf[_Tensor]) -> Iterator[tuple[str, int, int]]:
    """Yields a layer, the axis of its weight [outputs, inputs], and the adapter's size along that axis."""
    for tensor in adapter:
        if (part := _PART.fullmatch(tensor.name)) is not None and len(tensor.shape) == 2:
            side = 0 if part[2] == "B" else 1
            yield part[1], side, tensor.shape[side]


def _tensors(file: Path) -> list[_Tensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
            return [_Tensor(name, one.get_dtype(), list(one.get_shape())) for name, one in slices.items()]
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
