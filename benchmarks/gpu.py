"""The engine on one CUDA device beside what the device can do: `python -m benchmarks.gpu [--json FILE]`.

First the device's own rates: a large copy (bytes read and written) and a large matrix product. Then, for models of the
shapes of Qwen3-0.6B and Llama-3.1-8B with random weights in bfloat16, each beside its limit:

- a decode step through the engine's graphs, tokens chosen in it, 1, 32 and 128 rows with a context of 2,048: the limit
  is reading all weights and the rows' keys and values once at the copy's rate;
- prompts of 128, 512 and 2,048 tokens through the engine's graphs: the limit is the greater of
  their multiplications at the matrix product's rate and of reading all weights once at the copy's rate;
- the paged attention of those decode rows alone: the limit is reading their keys and values at the copy's rate.

Ratios are of the limit's time to ours: 1 is the limit. Medians of the repetitions; a step's time is between two events
of the device. Without a CUDA device it says so and ends with 1.
"""

import argparse
import functools
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton

from services.engine.cache.pool import PageLayout, PagePool
from services.engine.gpu.attention_triton import DecodeRows, DecodeScratch, decode_attention, split_starts
from services.engine.gpu.decoder import TritonDecoder
from services.engine.gpu.graphs import DecodeGraphs, GraphCapture, Row, call_again
from services.engine.gpu.matmul import forbid_split_k
from services.engine.gpu.prompt_graphs import PromptGraphs
from services.engine.reference.attention import AttentionBatch
from services.engine.reference.decoder import DecoderStep
from services.engine.reference.rope import RopeTable
from services.engine.weights.config import ModelConfig
from services.engine.weights.linear import TorchLinear
from services.engine.weights.load import LayerWeights, ModelWeights

DTYPE = torch.bfloat16
PAGE_SIZE = 16
STEPS_IN_A_ROW = 8
AIMS = {"decode 1": 0.85, "decode": 0.75, "prefill": 0.6, "attention 1": 0.6, "attention": 0.8}


@dataclass(frozen=True)
class Shape:
    """A model's dimensions."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    has_qk_norm: bool = False
    has_tied_embeddings: bool = False

    @property
    def layer_elements(self) -> int:
        """Number of elements in the matrices of a block."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def step_bytes(self) -> int:
        """Bytes of the weights that a decode step has to read."""
        return (self.layers * self.layer_elements + self.vocabulary * self.hidden) * DTYPE.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE.itemsize

    def prompt_operations(self, num_tokens: int) -> float:
        """Multiplications and additions of a prompt, whose last token alone has logits."""
        matrices = 2 * num_tokens * self.layers * self.layer_elements
        attention = 2 * num_tokens**2 * self.layers * self.heads * self.head_dim  # half of the square, twice
        return float(matrices + attention + 2 * self.vocabulary * self.hidden)


SHAPES = (
    Shape("Qwen3-0.6B", 1024, 3072, 28, 16, 8, 128, 151_936, has_qk_norm=True, has_tied_embeddings=True),
    Shape("Llama-3.1-8B", 4096, 14_336, 32, 32, 8, 128, 128_256),
)


@dataclass(frozen=True)
class Limits:
    """What the device does with nothing of ours."""

    device: str
    bytes_per_s: float
    operations_per_s: float

    def __str__(self) -> str:
        rates = f"copies {self.bytes_per_s / 1e12:.2f} TB/s, multiplies {self.operations_per_s / 1e12:.0f} TFLOP/s"
        return f"{self.device}: {rates}"


@dataclass(frozen=True)
class Result:
    """One figure; `ratio` is the limit's time to ours."""

    model: str
    what: str
    seconds: float
    ratio: float
    aim: float

    def __str__(self) -> str:
        verdict = "" if self.ratio >= self.aim else "  below the aim"
        return (
            f"{self.model:14s} {self.what:22s} {self.seconds * 1e3:9.3f} ms  {self.ratio:5.2f} of the limit "
            f"(aim {self.aim:.2f}){verdict}"
        )


@dataclass(frozen=True)
class Work:
    """What is measured, on which device, how often."""

    device: torch.device
    batches: tuple[int, ...] = (1, 32, 128)
    context_tokens: int = 2048
    prompts_tokens: tuple[int, ...] = (128, 512, 2048)
    repetitions: int = 30
    copy_bytes: int = 2 << 30
    matrix_size: int = 8192

    def seconds(self, function: Callable[[], object]) -> float:
        """The median time of a call, after some that do not count."""
        times = [self._time(function) for _ in range(self.repetitions + 3)][3:]
        return statistics.median(times)

    def _time(self, function: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            began_s = time.perf_counter()
            function()
            return time.perf_counter() - began_s
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def main() -> int:
    """Measure, print, and write the figures as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(shape.name for shape in SHAPES), help="which shapes")
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--json", type=Path, help="also write the figures to this file, after each model")
    parser.add_argument("--role", choices=("run", "limits"), default="run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device, and torch sees none here", file=sys.stderr)
        return 1
    work = Work(torch.device("cuda"), repetitions=arguments.repetitions)
    if arguments.role == "limits":
        print(json.dumps(asdict(measure_limits(work))))
        return 0
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
    limits = limits_of_another_process(arguments.repetitions)
    print(limits, flush=True)
    forbid_split_k()  # as where models are served
    results: list[Result] = []
    for shape in SHAPES:
        if shape.name in arguments.models.split(","):
            results += measure(shape, limits, work)
            torch.cuda.empty_cache()
            if arguments.json:
                versions = {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}
                figures = {"versions": versions, "limits": asdict(limits), "results": [*map(asdict, results)]}
                arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def limits_of_another_process(repetitions: int) -> Limits:
    """The device's own rates with the libraries' own settings, which this process's models do without."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--role", "limits", "--repetitions", str(repetitions)]
    measured = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return Limits(**json.loads(measured))


def measure_limits(work: Work) -> Limits:
    """The device's own rates."""
    pair = torch.ones(2, work.copy_bytes, dtype=torch.uint8, device=work.device)
    bytes_per_s = 2 * work.copy_bytes / work.seconds(lambda: pair[0].copy_(pair[1]))
    size = work.matrix_size
    left, right = (torch.randn(size, size, device=work.device, dtype=DTYPE) for _ in range(2))
    operations_per_s = 2 * size**3 / work.seconds(lambda: left @ right)
    name = torch.cuda.get_device_name(work.device) if work.device.type == "cuda" else "cpu"
    return Limits(name, bytes_per_s, operations_per_s)


@torch.inference_mode()
def measure(shape: Shape, limits: Limits, work: Work) -> list[Result]:
    """Everything of one model, printed as it comes."""
    config = model_config(shape, work)
    decoder = TritonDecoder(config, random_weights(shape, work.device))
    rope = RopeTable(config, device=work.device).ensure(config.context_length_tokens)
    results = []

    def note(what: str, seconds: float, limit_s: float, aim: float) -> None:
        results.append(Result(shape.name, what, seconds, limit_s / seconds, aim))
        print(results[-1], flush=True)

    # A token further than the context: a step's own token is part of it.
    num_pages = work.context_tokens // PAGE_SIZE + 1
    layout = PageLayout(shape.layers, shape.kv_heads, shape.head_dim, PAGE_SIZE, DTYPE)
    num_all_pages = max(num_pages * max(work.batches), max(work.prompts_tokens) // PAGE_SIZE + 1)
    pool = PagePool(layout, num_all_pages, device=work.device)
    pool.data.normal_()
    order = torch.randperm(num_all_pages).tolist()

    capture = GraphCapture(work.device) if work.device.type == "cuda" else call_again
    prompts = PromptGraphs(decoder, pool, rope, capture=capture, max_tokens=max(work.prompts_tokens))
    for num_tokens in work.prompts_tokens:
        prompt = prompt_step(num_tokens, work.device, pool, rope, order)
        seconds = work.seconds(functools.partial(prompts.forward, prompt))
        computing_s = shape.prompt_operations(num_tokens) / limits.operations_per_s
        note(f"prefill {num_tokens}", seconds, max(computing_s, shape.step_bytes / limits.bytes_per_s), AIMS["prefill"])
    for batch in work.batches:
        tables = [order[row * num_pages : (row + 1) * num_pages] for row in range(batch)]
        rows = [Row(1, work.context_tokens - 1, table, 1, 1.0, -math.inf) for table in tables]
        graphs = DecodeGraphs(decoder, pool, rope, max_rows=batch)
        # One behind the other, as the engine launches them: the host packs a step while the device computes another.
        seconds = work.seconds(functools.partial(launch_many, graphs, rows)) / STEPS_IN_A_ROW
        cache_bytes = batch * work.context_tokens * shape.token_bytes
        limit_s = (shape.step_bytes + cache_bytes) / limits.bytes_per_s
        note(f"decode {batch}", seconds, limit_s, AIMS["decode 1" if batch == 1 else "decode"])
        seconds = attention_seconds(shape, pool, tables, work)
        aim = AIMS["attention 1" if batch == 1 else "attention"]
        note(f"attention {batch}", seconds, cache_bytes / limits.bytes_per_s, aim)
    return results


def launch_many(graphs: DecodeGraphs, rows: list[Row]) -> None:
    """Steps in a row."""
    for _ in range(STEPS_IN_A_ROW):
        graphs.launch(rows)


def attention_seconds(shape: Shape, pool: PagePool, tables: list[list[int]], work: Work) -> float:
    """Returns what the decode attention of all layers takes, one after the other, so that each reads its own memory."""
    device, batch = work.device, len(tables)
    lens = torch.full((batch,), work.context_tokens, dtype=torch.int32)
    page_ids = torch.tensor(tables, dtype=torch.int32)
    starts = torch.arange(batch, dtype=torch.int32) * page_ids.shape[1]
    splits = split_starts(lens)
    rows = DecodeRows(lens.to(device), starts.to(device), page_ids.flatten().to(device), splits.to(device))
    scratch = DecodeScratch.empty(int(splits[-1]), shape.heads, shape.head_dim, device)
    q = torch.randn(batch, shape.heads, shape.head_dim, dtype=DTYPE, device=device)

    def attend() -> None:
        for layer in range(shape.layers):
            decode_attention(q, pool.data[:, :, layer], rows, scratch, scale=shape.head_dim**-0.5)

    if device.type != "cuda":
        return work.seconds(attend)
    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # without one, the host's launches would be what is measured for few rows
        attend()
    return work.seconds(graph.replay)


def prompt_step(
    num_tokens: int, device: torch.device, pool: PagePool, rope: torch.Tensor, order: list[int]
) -> DecoderStep:
    """A whole prompt in one chunk; the logits of its last token are wanted."""
    positions = torch.arange(num_tokens, device=device)
    table = torch.tensor(order[: -(-num_tokens // PAGE_SIZE)], device=device)
    batch = AttentionBatch(
        query_start=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        context_lens=torch.tensor([num_tokens], dtype=torch.int32, device=device),
        page_tables=table.int()[None],
        slot_mapping=table[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE,
        longest_tokens=num_tokens,
    )
    last = torch.tensor([num_tokens - 1], device=device)
    return DecoderStep(torch.ones_like(positions), positions, batch, pool.data, last, rope)


def model_config(shape: Shape, work: Work) -> ModelConfig:
    """The shape as the engine reads it."""
    return ModelConfig(
        architecture="Qwen3ForCausalLM" if shape.has_qk_norm else "LlamaForCausalLM",
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        context_length_tokens=max(work.context_tokens, *work.prompts_tokens),
        norm_eps=1e-5,
        rope_theta=500_000.0,
        rope_scaling=None,
        has_qkv_bias=False,
        has_output_bias=False,
        has_mlp_bias=False,
        has_qk_norm=shape.has_qk_norm,
        has_tied_embeddings=shape.has_tied_embeddings,
        eos_token_ids=frozenset(),
        dtype="bfloat16",
    )


def random_weights(shape: Shape, device: torch.device) -> ModelWeights:
    """Makes weights small enough to keep numbers from growing through the layers."""

    def linear(out_features: int, in_features: int) -> TorchLinear:
        weight = torch.empty(out_features, in_features, dtype=DTYPE, device=device)
        return TorchLinear(weight.normal_(std=in_features**-0.5), None)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=DTYPE, device=device)

    def layer() -> LayerWeights:
        query_features = shape.heads * shape.head_dim
        return LayerWeights(
            input_norm=ones(shape.hidden),
            qkv=linear(query_features + 2 * shape.kv_heads * shape.head_dim, shape.hidden),
            query_norm=ones(shape.head_dim) if shape.has_qk_norm else None,
            key_norm=ones(shape.head_dim) if shape.has_qk_norm else None,
            output=linear(shape.hidden, query_features),
            post_norm=ones(shape.hidden),
            gate_up=linear(2 * shape.intermediate, shape.hidden),
            down=linear(shape.hidden, shape.intermediate),
        )

    embedding = torch.empty(shape.vocabulary, shape.hidden, dtype=DTYPE, device=device).normal_()
    if shape.has_tied_embeddings:
        lm_head = TorchLinear(embedding, None)
    else:
        lm_head = linear(shape.vocabulary, shape.hidden)
    return ModelWeights(embedding, tuple(layer() for _ in range(shape.layers)), ones(shape.hidden), lm_head)


if __name__ == "__main__":
    sys.exit(main())
