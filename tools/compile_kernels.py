"""Compiles the engine's Triton kernels for NVIDIA's sm_90 (H100), on any machine, and fails where one spills registers.

    .venv/bin/python tools/compile_kernels.py [MODEL ...]     models: see SHAPES; the first is compiled if none is named

What is compiled is what the engine's own code would launch for a model of that shape: it runs with tensors that have no
memory, and each launch is compiled instead. Prints one line per kernel: registers, stack (which is spilled registers),
local and shared memory, and whether matrix products are on tensor cores.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # read when triton is imported
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction

from services.engine.gpu.attention_triton import DecodeRows, DecodeScratch
from services.engine.gpu.decoder import DecodeStep, TritonDecoder
from services.engine.gpu.sampling_triton import Choices, choose
from services.engine.reference.attention import AttentionBatch
from services.engine.reference.decoder import DecoderStep
from services.engine.weights.config import ModelConfig
from services.engine.weights.linear import TorchLinear
from services.engine.weights.load import LayerWeights, ModelWeights

TARGET = GPUTarget("cuda", 90, 32)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
PAGE_SIZE, NUM_PAGES, NUM_SEQUENCES, NUM_TOKENS = 16, 50_000, 8, 2048

_POINTER_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Shape:
    """Dimensions of a model, one layer of which is compiled."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    has_qk_norm: bool = False
    dtype: torch.dtype = torch.bfloat16


QWEN3_06B = Shape(1024, 3072, 16, 8, 128, 151_936, has_qk_norm=True)
LLAMA31_8B = Shape(4096, 14_336, 32, 8, 128, 128_256)
SHAPES = {
    "Qwen3-0.6B": QWEN3_06B,
    "Llama-3.1-8B": LLAMA31_8B,
    "Llama-3.2-1B": Shape(2048, 8192, 32, 8, 64, 128_256),
    "Qwen2.5-7B": Shape(3584, 18_944, 28, 4, 128, 152_064),
    "Llama-2-7B": Shape(4096, 11_008, 32, 32, 128, 32_000),
    "Phi-head-80": Shape(2560, 10_240, 32, 8, 80, 51_200),
    "Phi-head-96": Shape(3072, 8192, 32, 32, 96, 32_064),
    "Llama-3.1-70B": Shape(8192, 28_672, 64, 8, 128, 128_256),
    "Llama-3.1-8B-float32": replace(LLAMA31_8B, dtype=torch.float32),
    "Qwen3-0.6B-float32": replace(QWEN3_06B, dtype=torch.float32),
}


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel takes of a processor; bytes but for `registers` (per thread)."""

    kernel: str
    registers: int
    stack: int
    local: int
    shared: int
    has_tensor_cores: bool

    @property
    def spills(self) -> bool:
        """Whether registers go to memory and back."""
        return self.stack > 0 or self.local > 0

    def __str__(self) -> str:
        return (
            f"{self.kernel:24s} registers {self.registers:3d}  stack {self.stack}  local {self.local}  "
            f"shared {self.shared:6d}  {'tensor cores' if self.has_tensor_cores else ''}{'  SPILLS' * self.spills}"
        )


def main() -> int:
    """Compiles and prints; 1 if anything spills."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(SHAPES)}, or all")
    models = parser.parse_args().models or [next(iter(SHAPES))]
    models = list(SHAPES) if models == ["all"] else models
    has_spills = False
    for model in models:
        for usage in compile_model(SHAPES[model]):
            print(f"{model:20s} {usage}", flush=True)
            has_spills |= usage.spills
    return int(has_spills)


def compile_model(shape: Shape) -> list[Usage]:
    """All kernels of a prompt's chunk, a decode step and the choice of its tokens."""
    usages: dict[str, Usage] = {}

    def compile_instead(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        source, build_options = _source(kernel, args, options)
        key = f"{source.hash()}{sorted(build_options.items())}"
        if key not in usages:
            usages[key] = _usage(kernel.__name__, triton.compile(source, target=TARGET, options=build_options))

    original: Callable[..., Any] = JITFunction.run
    JITFunction.run = compile_instead
    try:
        _launch_all(shape)
    finally:
        JITFunction.run = original
    return list(usages.values())


def _source(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[ASTSource, dict[str, int]]:
    """What a launch with these arguments compiles, specialised as Triton does: divisibility by 16, integers of 1."""
    values = dict(zip(kernel.arg_names, args, strict=False)) | options
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values.pop(parameter.name)
        is_one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or is_one:
            signature[parameter.name], constants[(index,)] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            offset_bytes = value.storage_offset() * value.itemsize
            signature[parameter.name], is_aligned = _POINTER_TYPES[value.dtype], offset_bytes % 16 == 0
        elif isinstance(value, float):
            signature[parameter.name], is_aligned = "fp32", False
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            is_aligned = value % 16 == 0 and not parameter.do_not_specialize
        if is_aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes), values


def _usage(name: str, compiled: CompiledKernel) -> Usage:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    counts = {what: int(count) for what, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    assembly = compiled.asm["ptx"]
    has_tensor_cores = "wgmma.mma_async" in assembly or "mma.sync" in assembly
    return Usage(name, counts["REG"], counts["STACK"], counts["LOCAL"], compiled.metadata.shared, has_tensor_cores)


def _launch_all(shape: Shape) -> None:
    def empty(*size: int, dtype: torch.dtype = shape.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    def ints(*size: int) -> torch.Tensor:
        return empty(*size, dtype=torch.int32)

    decoder = TritonDecoder(_config(shape), _weights(shape, empty))
    pool = empty(NUM_PAGES, shape.kv_heads, 2, 2, PAGE_SIZE, shape.head_dim)
    rope = empty(131_072, 2, shape.head_dim // 2, dtype=torch.float32)
    tokens = empty(NUM_TOKENS, dtype=torch.int64)
    batch = AttentionBatch(ints(NUM_SEQUENCES + 1), ints(NUM_SEQUENCES), ints(NUM_SEQUENCES, 200), tokens)
    decoder.forward(DecoderStep(tokens, tokens, batch, pool, tokens[:NUM_SEQUENCES], rope))
    scratch = DecodeScratch.empty(4096, shape.heads, shape.head_dim, torch.device("meta"))
    for num_rows in (1, NUM_SEQUENCES):
        per_row = ints(num_rows)
        rows = DecodeRows(per_row, per_row, ints(9999), ints(num_rows + 1))
        decoder.decode(DecodeStep(per_row, per_row, tokens[:num_rows], rows, scratch, pool, rope))
    doubles = empty(NUM_SEQUENCES, dtype=torch.float64)
    choices = Choices(tokens[:NUM_SEQUENCES], doubles, doubles)
    choose(empty(NUM_SEQUENCES, shape.vocabulary, dtype=torch.float32), choices, per_row)


def _weights(shape: Shape, empty: Callable[..., torch.Tensor]) -> ModelWeights:
    def linear(out_features: int, in_features: int) -> TorchLinear:
        return TorchLinear(empty(out_features, in_features), None)

    query_features = shape.heads * shape.head_dim
    layer = LayerWeights(
        input_norm=empty(shape.hidden),
        qkv=linear(query_features + 2 * shape.kv_heads * shape.head_dim, shape.hidden),
        query_norm=empty(shape.head_dim) if shape.has_qk_norm else None,
        key_norm=empty(shape.head_dim) if shape.has_qk_norm else None,
        output=linear(shape.hidden, query_features),
        post_norm=empty(shape.hidden),
        gate_up=linear(2 * shape.intermediate, shape.hidden),
        down=linear(shape.hidden, shape.intermediate),
    )
    embedding = empty(shape.vocabulary, shape.hidden)
    return ModelWeights(embedding, (layer, layer), empty(shape.hidden), linear(shape.vocabulary, shape.hidden))


def _config(shape: Shape) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_layers=2,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        context_length_tokens=131_072,
        norm_eps=1e-5,
        rope_theta=10_000.0,
        rope_scaling=None,
        has_qkv_bias=False,
        has_output_bias=False,
        has_mlp_bias=False,
        has_qk_norm=shape.has_qk_norm,
        has_tied_embeddings=False,
        eos_token_ids=frozenset(),
        dtype="bfloat16",
    )


if __name__ == "__main__":
    sys.exit(main())
