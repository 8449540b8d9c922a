"""One workload through our engine and through others, on one device, one after the other.

`python -m benchmarks.gpu_batching [--json FILE]`. The others are `transformers`' continuous batching, and vLLM where
`--peers` names it and it is installed. Requests come all at once, each with a prompt of its own and a greedy answer of
a fixed length: tokens/s over all of it, the time to each first token, and the gaps between tokens. Models have the
shapes of Qwen3-0.6B and Llama-3.1-8B and random weights in bfloat16; a checkpoint of each is written to a temporary
folder (16 GB for the larger one). Each engine has a process of its own, which runs the workload once to warm up.

All are engines in one process, without servers. Ratios are ours to theirs: above 1 is better for tokens/s, below 1 for
times. Without a CUDA device it says so and ends with 1; `--device cpu` is for trying it out.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import DTYPE, SHAPES, Shape
from benchmarks.load import percentile

ENGINES = ("ours", "transformers", "vllm")
RESULT_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Workload:
    """What both engines are given."""

    requests: int = 64
    prompt_tokens: int = 512
    new_tokens: int = 128

    def prompts(self, vocabulary: int, seed: int) -> list[list[int]]:
        """Makes prompts of token ids, no two alike: an engine with a prefix cache would not compute them again."""
        draw = random.Random(seed)
        return [[draw.randrange(vocabulary) for _ in range(self.prompt_tokens)] for _ in range(self.requests)]


@dataclass(frozen=True)
class Figures:
    """What one run gave, or the medians of several."""

    tokens_per_s: float
    ttft_p50_s: float
    itl_p50_s: float
    itl_p99_s: float

    def __str__(self) -> str:
        return (
            f"{self.tokens_per_s:9.0f} tok/s  first token p50 {self.ttft_p50_s * 1e3:8.1f} ms  "
            f"gaps p50 {self.itl_p50_s * 1e3:7.2f} ms  p99 {self.itl_p99_s * 1e3:7.2f} ms"
        )


Run = Callable[[list[list[int]], int], list[list[float]]]
"""Prompts and how many tokens each answer has; returns when each token of each answer came, of `time.perf_counter`."""


def main() -> int:
    """Measure, print, and write the figures as JSON where asked, after each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(shape.name for shape in SHAPES), help="which shapes")
    parser.add_argument("--requests", type=int, default=Workload.requests)
    parser.add_argument("--prompt-tokens", type=int, default=Workload.prompt_tokens)
    parser.add_argument("--new-tokens", type=int, default=Workload.new_tokens)
    parser.add_argument("--peers", default="transformers", help="engines beside ours: transformers, vllm, or both")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each engine, of which medians are taken")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--role", choices=("run", *ENGINES), default="run", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("this benchmark needs a CUDA device, and torch sees none here", file=sys.stderr)
        return 1
    workload = Workload(arguments.requests, arguments.prompt_tokens, arguments.new_tokens)
    if arguments.role != "run":
        figures = serve(arguments.role, arguments.folder, arguments.device, workload, arguments.rounds)
        print(json.dumps(asdict(figures)))
        return 0
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"workload": asdict(workload), "models": {}}
    for shape in SHAPES:
        if shape.name in arguments.models.split(","):
            found["models"][shape.name] = compare(
                shape, arguments.device, workload, arguments.rounds, arguments.peers.split(",")
            )
            if arguments.json:
                arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


def compare(
    shape: Shape, device: str, workload: Workload, rounds: int, peers: list[str]
) -> dict[str, dict[str, float]]:
    """The engines' figures and the ratios of ours to each, printed as they come."""
    figures = {}
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        write_checkpoint(shape, Path(folder), device)
        for engine in ("ours", *peers):
            figures[engine] = asdict(figures_of_another_process(engine, Path(folder), device, workload, rounds))
            print(f"{shape.name:14s} {engine:14s} {Figures(**figures[engine])}", flush=True)
    found = dict(figures)
    for peer in peers:
        ratios = {name: value / figures[peer][name] for name, value in figures["ours"].items()}
        said = "  ".join(f"{name} {value:.2f}" for name, value in ratios.items())
        print(f"{shape.name:14s} {f'to {peer}':14s} {said}", flush=True)
        found[f"to {peer}"] = ratios
    return found


def figures_of_another_process(engine: str, folder: Path, device: str, workload: Workload, rounds: int) -> Figures:
    """What one engine does alone on the device. Raises CalledProcessError where it fails."""
    command = [sys.executable, "-m", "benchmarks.gpu_batching", "--role", engine, "--folder", str(folder)]
    command += ["--device", device, "--rounds", str(rounds), "--requests", str(workload.requests)]
    command += ["--prompt-tokens", str(workload.prompt_tokens), "--new-tokens", str(workload.new_tokens)]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return Figures(**json.loads(printed.splitlines()[-1]))


def write_checkpoint(shape: Shape, folder: Path, device: str) -> None:
    """Random weights as `transformers` makes and writes them."""
    import transformers

    transformers.logging.disable_progress_bar()
    common: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.has_tied_embeddings,
        "max_position_embeddings": 8192,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    kind: Any = transformers.Qwen3Config if shape.has_qk_norm else transformers.LlamaConfig
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = transformers.AutoModelForCausalLM.from_config(kind(**common), dtype=DTYPE)
    model.save_pretrained(folder)


def serve(engine: str, folder: Path, device: str, workload: Workload, rounds: int) -> Figures:
    """Load an engine and run the workload; the first run only warms up."""
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    engines = {"ours": our_engine, "transformers": transformers_engine, "vllm": vllm_engine}
    with engines[engine](folder, device, workload) as run:
        measured = [measure(run, workload, workload.prompts(vocabulary, seed)) for seed in range(rounds + 1)][1:]
    return Figures(*(statistics.median(column) for column in zip(*map(_columns, measured), strict=True)))


def _columns(figures: Figures) -> tuple[float, ...]:
    return tuple(asdict(figures).values())


def measure(run: Run, workload: Workload, prompts: list[list[int]]) -> Figures:
    """One run. Raises RuntimeError where an answer has another length than it was asked for."""
    began_s = time.perf_counter()
    answers = run(prompts, workload.new_tokens)
    lengths = {len(answer) for answer in answers}
    if len(answers) != workload.requests or lengths != {workload.new_tokens}:
        raise RuntimeError(f"{len(answers)} answers of {lengths} tokens, not {workload}")
    gaps_s = [after - before for answer in answers for before, after in itertools.pairwise(answer)]
    return Figures(
        tokens_per_s=workload.requests * workload.new_tokens / (max(map(max, answers)) - began_s),
        ttft_p50_s=percentile([answer[0] - began_s for answer in answers], 50),
        itl_p50_s=percentile(gaps_s, 50),
        itl_p99_s=percentile(gaps_s, 99),
    )


@contextmanager
def our_engine(folder: Path, device: str, workload: Workload) -> Iterator[Run]:
    """This project's engine loop in one process."""
    from services.engine.engine import Engine, load_engine
    from services.engine.steps.sequence import Sampling

    num_tokens = workload.requests * (workload.prompt_tokens + workload.new_tokens + 32)
    parts = load_engine(folder, device=device, num_pages=num_tokens // 16)
    engine = Engine(parts, chunk_tokens=2048, max_batch=workload.requests)

    def run(prompts: list[list[int]], num_new: int) -> list[list[float]]:
        sampling = Sampling(max_tokens=num_new, temperature=0.0)
        times_s: dict[Any, list[float]] = {engine.add(prompt, sampling): [] for prompt in prompts}
        while engine.has_work:
            outputs = engine.step()
            now_s = time.perf_counter()
            for output in outputs:
                times_s[output.sequence].append(now_s)
        return [*times_s.values()]

    try:
        yield run
    finally:
        parts.close()


@contextmanager
def transformers_engine(folder: Path, device: str, workload: Workload) -> Iterator[Run]:
    """`transformers` with its own choice of attention, CUDA graphs and batch for the device."""
    import transformers

    causal: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE).to(device)
    generation = transformers.GenerationConfig(max_new_tokens=workload.new_tokens, do_sample=False, eos_token_id=-1)

    manager = causal.init_continuous_batching(generation_config=generation)
    manager.warmup()
    manager.start()

    def run(prompts: list[list[int]], num_new: int) -> list[list[float]]:
        manager.add_requests(prompts, max_new_tokens=num_new, record_timestamps=True)
        answers = [manager.get_result(timeout=RESULT_TIMEOUT_S) for _ in prompts]
        failed = ["nothing came" if answer is None else answer.error for answer in answers]
        if any(failed):
            raise RuntimeError(f"transformers: {next(filter(None, failed))}")
        return [answer.timestamps for answer in answers]

    try:
        yield run
    finally:
        manager.stop(block=True)


@contextmanager
def vllm_engine(folder: Path, device: str, workload: Workload) -> Iterator[Run]:
    """An engine of vLLM with its own choices, and with our chunks, in one process."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"VLLM_LOGGING_STREAM": "ext://sys.stderr"}  # standard output has the figures
    from vllm import LLM, SamplingParams  # it reads the variables when it is imported

    llm = LLM(
        str(folder), dtype="bfloat16", skip_tokenizer_init=True, max_num_seqs=workload.requests,
        max_num_batched_tokens=2048, max_model_len=workload.prompt_tokens + workload.new_tokens + 32,
    )  # fmt: skip
    engine, names = llm.llm_engine, itertools.count()

    def run(prompts: list[list[int]], num_new: int) -> list[list[float]]:
        sampling = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False)
        times_s: dict[str, list[float]] = {}
        for prompt in prompts:
            name = str(next(names))
            times_s[name] = []
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                times_s[output.request_id] += [time.perf_counter()] * (
                    len(output.outputs[0].token_ids) - len(times_s[output.request_id])
                )
        return [*times_s.values()]

    yield run


if __name__ == "__main__":
    sys.exit(main())
